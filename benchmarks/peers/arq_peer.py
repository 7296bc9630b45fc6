"""arq, 100 jobs at a time, no results kept, polls every 50 ms. Bulk: 20 calls at a time."""

import asyncio

import job_run
import uvloop
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


def work():
    asyncio.set_event_loop(uvloop.new_event_loop())
    jobs = verbs.CONCURRENCY or 100
    noops = [func(noop, name="noop", keep_result=0)]
    # Its default is to look for jobs every 0.5 s.
    Worker(noops, redis_settings=settings, max_jobs=jobs, poll_delay=0.05, log_results=False).run()


if __name__ == "__main__":
    verbs.main(send, None, work, prepare, at_once=20)
