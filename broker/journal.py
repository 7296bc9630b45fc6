"""The journal's schema, for its writer (lua/lib/journal.lua) and its readers.

One stream entry per script call: v (schema version), s (sequence number, without gaps), a (actor: worker, processor
or '-'), e (events, one per line). The entry's id is the server's time. An event is a verb, a fence (0 where none
applies) and its subjects:

    enqueued 0 ID ID …            claimed FENCE ID ID …        done FENCE ID MICROS ID MICROS …  (MICROS '-': unknown)
    retried FENCE ID MICROS       dead FENCE ID MICROS
    stalled FENCE ID CAUSE        timed_out FENCE ID CAUSE     suspected FENCE ID CAUSE   (each followed by `returned`)
    returned 0 ID ID …            promoted 0 ID ID …           updated 0 ID
    blocked 0 ID                  unblocked 0 ID ID …          failing FENCE ID (its fail job was written)
    cancelled FENCE ID ID …       dropped 0 ID                 created 0 EPOCH     paused 0     resumed 0
    revived FENCE ID              discarded FENCE ID           (FENCE: of the attempt that the dead job ended with)

Events are in the order in which they can be applied one by one (tests/support/journal_replay.py does). `unblocked`
after the end of the active job of that id: a job of its own; before `retried` or `returned`: it has updated that one.
`cancelled` with a fence: the active job, which was marked; without: what was blocked behind it, else what waited.
`claimed` and `dead` of one id in one entry: it had stalled or timed out too often and was not given to the worker.
Nothing tells whether a job that is not active waits or is scheduled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    time_ms: int
    actor: str
    verb: str
    fence: int
    job: str | None
    micros: int | None
    cause: str | None


def read_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Iterator[Event]:
    """The events of one stream entry, in order."""
    sequence, actor = int(fields[b"s"]), fields[b"a"].decode()
    time_ms = int(entry_id.partition(b"-")[0])
    for line in fields[b"e"].decode().split("\n"):
        verb, fence, *subjects = line.split(" ")
        for job, micros, cause in _subjects(verb, subjects):
            yield Event(sequence, time_ms, actor, verb, int(fence), job, micros, cause)


def _subjects(verb: str, subjects: list[str]) -> Iterator[tuple[str | None, int | None, str | None]]:
    if verb in ("done", "retried", "dead"):
        for job, micros in zip(subjects[::2], subjects[1::2], strict=True):
            yield job, (None if micros == "-" else int(micros)), None
    elif verb in ("stalled", "timed_out", "suspected"):
        yield subjects[0], None, " ".join(subjects[1:])
    elif verb in ("paused", "resumed", "created"):
        yield None, None, subjects[0] if subjects else None
    else:
        for job in subjects:
            yield job, None, None
