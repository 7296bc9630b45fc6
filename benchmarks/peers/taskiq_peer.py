"""Taskiq, 100 tasks at a time. Fast: list broker. Durable: stream broker (it acknowledges; the other forgets)."""

import job_run
import verbs
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker, RedisStreamBroker

kind = RedisStreamBroker if verbs.DURABLE else ListQueueBroker
broker = kind(f"unix://{verbs.SOCKET}", queue_name="bench")
noop = broker.task(task_name="noop")(job_run.typed_async if verbs.TYPED else job_run.run_async)


def work():
    async def receive():
        await broker.startup()
        await run_receiver_task(
            broker, max_async_tasks=verbs.CONCURRENCY or 100, max_prefetch=0 if verbs.CONCURRENCY else 100
        )

    verbs.run(receive())


if __name__ == "__main__":
    verbs.main(noop.kiq, None, work, broker.startup, at_once=20)
