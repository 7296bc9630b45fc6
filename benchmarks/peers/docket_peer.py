"""Docket, 500 tasks at a time, without state and results ("fire and forget"). Durable: redelivery after 10 s.

A worker whose tasks are all taken sleeps for minimum_check_interval, so no more than 500 tasks start per interval; with
the defaults, 10 tasks and 250 ms, it would be 40 a second.
"""

import logging
from datetime import timedelta

import job_run
import verbs
from docket import Docket, Worker

concurrency = verbs.CONCURRENCY or 500
# Its guide: at least as many connections as tasks.
url = f"unix://{verbs.SOCKET}?max_connections={concurrency + 50}"
docket = Docket(name="bench", url=url, execution_ttl=timedelta(0))


async def noop(argument: dict):
    await job_run.run_async(argument)


docket.register(noop)


async def send(argument):
    await docket.add(noop)(argument)


async def send_many(arguments):
    await docket.add_many(docket.call(noop)(argument) for argument in arguments)


async def work():
    logging.getLogger("docket").setLevel(logging.ERROR)
    options = {"minimum_check_interval": timedelta(milliseconds=50)}
    if verbs.DURABLE:
        options["redelivery_timeout"] = timedelta(seconds=10)
    async with docket, Worker(docket, concurrency=concurrency, **options) as worker:
        await worker.run_forever()


if __name__ == "__main__":
    verbs.main(send, send_many, lambda: verbs.run(work()), within=docket)
