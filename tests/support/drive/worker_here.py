"""Runs the waiting jobs of a queue in this process, with a worker's own code, and returns when none is left."""

from forq import App
from forq.broker.claim import Consumer, Limits
from forq.broker.keys import DEFAULT_PREFIX
from forq.errors import UnknownQueue
from forq.job import new_id
from forq.procs.scoreboard import Scoreboard
from forq.settings import defaults
from forq.workers.attempt import AttemptRunner
from forq.workers.grant import Grant
from forq.workers.handlers import Handlers
from forq.workers.loop import WorkerLoop
from forq.workers.recycling import Recycling

EXPIRY_MS = 15_000


def run_waiting(url: str, app: App, queue: str) -> int:
    """Also runs jobs that become waiting meanwhile. Returns the number of attempts; 0 if there is no such queue."""
    board = Scoreboard.create(1)
    slot = board.slot(board.take())
    ran: list[int] = []
    consumer = Consumer(url, DEFAULT_PREFIX, queue, f"here-{new_id()}", "w1", "main")
    attempts = AttemptRunner(queue, Handlers({None: app}), slot)
    loop = WorkerLoop(
        consumer,
        attempts,
        slot,
        expiry_ms=EXPIRY_MS,
        limits=Limits(timeout_ms=0, size=1, priority=0),
        grant=Grant(lambda message: None, slot.number),
        recycling=Recycling(defaults(), [slot], lambda reason: None),
        on_batch=ran.append,
        on_unguarded=lambda: None,
    )
    try:
        loop.join()
        while batch := loop._claim():
            loop._run_batch(batch)
        loop.settle()
        loop.leave()
    except UnknownQueue:
        return 0
    finally:
        attempts.close()
        consumer.close()
    return sum(ran)
