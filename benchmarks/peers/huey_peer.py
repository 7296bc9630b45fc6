"""Huey, 2 threads (1 where asked for), blocking pop, no results, no scheduler of periodic tasks."""

import logging

import job_run
import verbs
from huey import RedisHuey

huey = RedisHuey("bench", url=f"unix://{verbs.SOCKET}", results=False)
noop = huey.task(name="noop")(job_run.run)


def work():
    logging.getLogger("huey").setLevel(logging.ERROR)
    huey.create_consumer(workers=verbs.CONCURRENCY or 2, worker_type="thread", periodic=False).run()


if __name__ == "__main__":
    verbs.main(noop, None, work)
