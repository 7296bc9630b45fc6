"""RQ, with JSON for pickle. Fast: SimpleWorker (no fork per job), no result kept. Durable: Worker, three retries."""

import job_run
import verbs
from redis import Redis
from rq import Queue, Retry, SimpleWorker, Worker

connection = Redis(unix_socket_path=verbs.SOCKET)
queue = Queue("bench", connection=connection, serializer="json")
retry = Retry(max=3) if verbs.DURABLE else None


def send(argument):
    queue.enqueue_call(job_run.run, args=(argument,), result_ttl=0, retry=retry)


def send_many(arguments):
    queue.enqueue_many([Queue.prepare_data(job_run.run, (argument,), result_ttl=0) for argument in arguments])


def work():
    kind = Worker if verbs.DURABLE else SimpleWorker
    kind([queue], connection=connection, serializer="json", log_job_description=False).work(logging_level="ERROR")


if __name__ == "__main__":
    verbs.main(send, send_many, work)
