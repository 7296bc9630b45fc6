"""The same no-op job for each peer, with its recommended fast settings; run by drain.py in the peers' environment.

noop_jobs.py PEER fill COUNT     enqueue, one by one where the peer has no bulk call
noop_jobs.py PEER drain COUNT    consume with one process; prints the seconds from the first job to the last
"""

import os
import sys
import threading
import time

SOCKET = os.environ["BENCH_SOCKET"]
COUNT = int(sys.argv[3])
_first = 0.0
_ran = 0
_lock = threading.Lock()


def count_one() -> None:
    """Called by every job; the last one prints the time and ends the process."""
    global _first, _ran
    with _lock:
        if _ran == 0:
            _first = time.perf_counter()
        _ran += 1
        if _ran == COUNT:
            print(time.perf_counter() - _first, flush=True)
            os._exit(0)


def rq_job(argument):
    count_one()


def rq_peer(what: str) -> None:
    from redis import Redis
    from rq import Queue, SimpleWorker

    connection = Redis(unix_socket_path=SOCKET)
    queue = Queue("bench", connection=connection)
    if what == "fill":
        jobs = [Queue.prepare_data("noop_jobs.rq_job", ({"n": n},)) for n in range(COUNT)]
        queue.enqueue_many(jobs)
    else:
        SimpleWorker([queue], connection=connection, log_job_description=False).work(logging_level="ERROR")


def huey_peer(what: str) -> None:
    from huey import RedisHuey

    huey = RedisHuey("bench", url=f"unix://{SOCKET}", results=False)

    @huey.task(name="noop")
    def noop(argument):
        count_one()

    if what == "fill":
        for n in range(COUNT):
            noop({"n": n})
    else:
        import logging

        logging.getLogger("huey").setLevel(logging.ERROR)
        huey.create_consumer(workers=4, worker_type="thread", periodic=False).run()


def dramatiq_peer(what: str) -> None:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.worker import Worker

    broker = RedisBroker(url=f"unix://{SOCKET}", middleware=[])
    dramatiq.set_broker(broker)

    @dramatiq.actor(actor_name="noop", queue_name="bench")
    def noop(argument):
        count_one()

    if what == "fill":
        for n in range(COUNT):
            noop.send({"n": n})
    else:
        Worker(broker, worker_threads=8).start()
        threading.Event().wait()


if __name__ == "__main__":
    # Peers import the job by module name.
    sys.modules.setdefault("noop_jobs", sys.modules["__main__"])
    {"rq": rq_peer, "huey": huey_peer, "dramatiq": dramatiq_peer}[sys.argv[1]](sys.argv[2])
