"""streaQ, 32 tasks at a time, no results kept, with the settings of its own benchmark: optimized coredis, uvloop."""

import coredis
import job_run
import verbs
from streaq import Worker

coredis.Config.optimized = True
worker = Worker(
    redis_url=f"unix://{verbs.SOCKET}",
    queue_name="bench",
    concurrency=verbs.CONCURRENCY or 32,
    anyio_kwargs={"use_uvloop": True},
)


@worker.task(name="noop", ttl=0, timeout=None, silent=True)
async def noop(argument):
    await job_run.run_async(argument)


async def send(argument):
    await noop.enqueue(argument)


async def send_many(arguments):
    await worker.enqueue_many([noop.enqueue(argument) for argument in arguments])


if __name__ == "__main__":
    verbs.main(send, send_many, worker.run_sync, within=worker)
