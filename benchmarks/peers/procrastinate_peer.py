"""Procrastinate on PostgreSQL, 10 jobs at a time and as many connections; jobs that are done are deleted.

Durable: the periodic task of its guide that retries stalled jobs, every minute.
"""

import logging

import job_run
import verbs
from procrastinate import App, PsycopgConnector

concurrency = verbs.CONCURRENCY or 10
# Its guide: for short jobs as many connections as jobs at a time, plus one. A producer needs few.
pool = {"min_size": 1, "max_size": concurrency + 1}
app = App(connector=PsycopgConnector(conninfo=f"host={verbs.SOCKET} user=postgres dbname=bench", **pool))


@app.task(name="noop", queue="bench")
async def noop(argument):
    await job_run.run_async(argument)


if verbs.DURABLE:

    @app.periodic(cron="* * * * *")
    @app.task(name="retry_stalled", queue="bench", queueing_lock="retry_stalled", pass_context=True)
    async def retry_stalled(context, timestamp):
        for job in await app.job_manager.get_stalled_jobs():
            await app.job_manager.retry_job(job)


async def prepare():
    """Creates the tables, unless another process has."""
    await app.open_async()
    async with app.connector.pool.connection() as connection:
        await connection.execute("SELECT pg_advisory_lock(1)")
        found = await (await connection.execute("SELECT to_regclass('procrastinate_jobs')")).fetchone()
        if found[0] is None:
            await app.schema_manager.apply_schema_async()
        await connection.execute("SELECT pg_advisory_unlock(1)")


async def send(argument):
    await noop.defer_async(argument=argument)


async def send_many(arguments):
    await noop.batch_defer_async(*({"argument": argument} for argument in arguments))


async def work():
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    await prepare()
    # With one job at a time, the durable mode would never get to its periodic task.
    jobs = concurrency + 1 if verbs.DURABLE else concurrency
    await app.run_worker_async(queues=["bench"], concurrency=jobs, delete_jobs="always")


if __name__ == "__main__":
    verbs.main(send, send_many, lambda: verbs.run(work()), prepare)
