"""Celery. Fast: pool solo, no results or events, prefetch 64. Durable: prefork, acks_late, reject_on_worker_lost."""

import os

import job_run
import verbs
from celery import Celery

app = Celery("bench", broker=f"redis+socket://{verbs.SOCKET}")
app.conf.update(
    task_ignore_result=True,
    task_acks_late=verbs.DURABLE,
    task_reject_on_worker_lost=verbs.DURABLE,
    worker_prefetch_multiplier=1 if verbs.DURABLE else 64,
    # Its guide: switch them off where no task has one.
    worker_disable_rate_limits=True,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    task_default_queue="bench",
)
noop = app.task(name="noop")(job_run.typed if verbs.TYPED else job_run.run)


def send(*arguments):
    noop.delay(*arguments)


def work():
    pool = ["--pool=prefork", "--concurrency=1"] if verbs.DURABLE else ["--pool=solo"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=ERROR"]
    app.worker_main(["worker", *pool, *quiet, f"--hostname=bench{os.getpid()}@localhost"])


if __name__ == "__main__":
    verbs.main(send, None, work)
