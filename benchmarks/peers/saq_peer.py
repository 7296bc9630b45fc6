"""SAQ, 50 jobs at a time, no results kept. Bulk: 20 calls at a time. Durable: heartbeats, and a sweep every 10 s."""

import asyncio
from contextlib import suppress

import job_run
import verbs
from redis import asyncio as redis
from saq import Worker
from saq.queue.redis import RedisQueue

HEARTBEAT_SECONDS = 10
# Queue.from_url accepts no Unix socket.
queue = RedisQueue(redis.from_url(f"unix://{verbs.SOCKET}"), name="bench", max_concurrent_ops=100)
# Its timeout of 10 s would end the longer jobs. ttl -1: nothing remains of a job that is done.
options = {"ttl": -1, "timeout": 0}
if verbs.DURABLE:
    options |= {"heartbeat": HEARTBEAT_SECONDS, "retries": 5}


async def prepare():
    await queue.connect()


async def noop(ctx, *, argument):
    if verbs.DURABLE:
        beats = asyncio.create_task(beat(ctx["job"]))
        try:
            await job_run.run_async(argument)
        finally:
            beats.cancel()
            with suppress(asyncio.CancelledError):
                await beats
    else:
        await job_run.run_async(argument)


async def beat(job):
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS / 3)
        await job.update()


async def send(argument):
    await queue.enqueue("noop", argument=argument, **options)


async def work():
    await prepare()
    timers = {"sweep": HEARTBEAT_SECONDS} if verbs.DURABLE else None
    await Worker(queue, [noop], concurrency=verbs.CONCURRENCY or 50, timers=timers).start()


if __name__ == "__main__":
    verbs.main(send, None, lambda: verbs.run(work()), prepare, at_once=20)
