"""Dramatiq, 8 threads, prefetch 100, without middleware but the one that retries (its default has seven).

A consumer whose prefetched messages are all taken sleeps, longer each time, so few of them leave the threads without
work. The roster sets the prefetch, which Dramatiq reads from the environment.
"""

import threading

import dramatiq
import job_run
import verbs
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from dramatiq.worker import Worker

broker = RedisBroker(url=f"unix://{verbs.SOCKET}", middleware=[Retries()])
dramatiq.set_broker(broker)
noop = dramatiq.actor(job_run.typed if verbs.TYPED else job_run.run, actor_name="noop", queue_name="bench")


def work():
    Worker(broker, worker_threads=verbs.CONCURRENCY or 8).start()
    threading.Event().wait()


if __name__ == "__main__":
    verbs.main(noop.send, None, work)
