"""arq, 100 jobs at a time, no results kept. Bulk: 100 calls at a time."""

import asyncio

import job_run
import verbs
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

settings = RedisSettings(unix_socket_path=verbs.SOCKET)
pool = None


async def prepare():
    global pool
    pool = await create_pool(settings)


async def noop(ctx, argument):
    await job_run.run_async(argument)


async def send(argument):
    await pool.enqueue_job("noop", argument)


async def send_many(arguments):
    for start in range(0, len(arguments), 100):
        await asyncio.gather(*(send(argument) for argument in arguments[start : start + 100]))


def work():
    asyncio.set_event_loop(asyncio.new_event_loop())
    jobs = verbs.CONCURRENCY or 100
    Worker([func(noop, name="noop", keep_result=0)], redis_settings=settings, max_jobs=jobs, log_results=False).run()


if __name__ == "__main__":
    verbs.main(send, send_many, work, prepare)
