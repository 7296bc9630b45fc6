"""Creates real events fast: runs the scripts of a queue in large turns, without processes."""

from forq.broker.chunks import chunks
from forq.broker.claim import Settled
from forq.broker.enqueue import Update, new_job
from forq.broker.journal import Event, read_entry
from tests.support.drive.one_queue import HandWorker, OneQueue

_TURN = 100


def fill(queue: OneQueue, count: int, name: str = "job") -> None:
    for chunk in chunks(new_job({"n": n}, id=f"{name}-{n}") for n in range(count)):
        queue.producer.enqueue(chunk, Update("refuse"))


def drain(queue: OneQueue, worker: HandWorker, *, failing: str = "-never") -> int:
    """Claims and settles all waiting jobs. Ids with the suffix `failing` fail. Returns the number of settled jobs."""
    done: Settled = []
    failed: Settled = []
    settled = 0
    while True:
        worker.number += 1
        turn = worker.consumer.turn(worker.number, done, failed, 0, _TURN)
        settled += len(done) // 3 + len(failed) // 8
        if not turn.jobs:
            return settled
        done, failed = [], []
        for job in turn.jobs[::2]:
            if job.decode().endswith(failing):
                error = '{"message":"no"}'
                failed += (job, turn.fence, 7, error, error, "retriable", "", "0.5")
            else:
                done += (job, turn.fence, 7)


def events_of(queue: OneQueue, key: str = "events") -> list[Event]:
    """The journal as broker/journal.py reads it."""
    name = queue.name if key == "events" else f"{queue.name}#fail"
    entries = queue.redis.xrange(queue.key(key))
    return [event for _, fields in entries for event in read_entry(fields, name)]
