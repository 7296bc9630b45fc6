"""Reads the state of all queues in Redis, which the audit compares with the journal.

1. Job ids are read first, in chunks, while the queue works. Jobs that change meanwhile are not compared.
2. Then one transaction per queue and its fail queue reads the counts and the end of the journal.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from forq.broker.journal import read_summary
from forq.broker.keys import fail_queue, queue_base, registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry

_CHUNK = 1000
# Commands per queue in `_count`.
_ANSWERS = 9

# One row per job and location (record, held, active, scheduled, blocked, dead). `record`: of live and held jobs; a job
# with both has two rows. `fence`: only of active and dead.
LOCATIONS = pa.schema(
    [
        pa.field("history", pa.int32(), nullable=False),
        pa.field("queue", pa.string(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("job", pa.string(), nullable=False),
        pa.field("location", pa.string(), nullable=False),
        pa.field("fence", pa.int64()),
    ]
)
JobLocation = tuple[int, str, int, str, str, int | None]


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue. `records`: of live and held jobs. `resolving`: ended jobs whose dependants pulse has yet to tell.
    `ids_read_from_us`: when reading its ids began; `counted_us`: when its counts were read."""

    history: int
    queue: str
    epoch: int
    sequence: int
    hash: str
    records: int
    held: int
    active: int
    blocked: int
    dead: int
    resolving: int
    journal_on: bool
    ids_read_from_us: int
    counted_us: int


@dataclass(frozen=True, slots=True)
class RedisState:
    """All queues. Queues created after `started_us` may be missing."""

    started_us: int
    queues: dict[tuple[int, str], QueueState]
    locations: list[JobLocation]

    def cutoffs(self) -> list[tuple[int, str, int, int, int]]:
        """(history, queue, epoch, sequence, time): the journal is compared up to there."""
        return [(s.history, s.queue, s.epoch, s.sequence, s.counted_us) for s in self.queues.values()]


def read_redis_state(link: Link, prefix: str) -> RedisState:
    started_us = _time_us(link.call("TIME", at=registry_key(prefix)))
    queues: dict[tuple[int, str], QueueState] = {}
    locations: list[JobLocation] = []
    for name in sorted(Registry(link, prefix).names()):
        both = (name, fail_queue(name))
        ids_read_from_us = _time_us(link.call("TIME", at=queue_base(prefix, name)))
        found = [(queue, location) for queue in both for location in _job_locations(link, queue_base(prefix, queue))]
        states = _count(link, prefix, both, ids_read_from_us)
        queues |= {(0, state.queue): state for state in states}
        epochs = {state.queue: state.epoch for state in states}
        locations += [(0, queue, epochs[queue], *location) for queue, location in found if queue in epochs]
    return RedisState(started_us, queues, locations)


def _count(link: Link, prefix: str, queues: Iterable[str], ids_read_from_us: int) -> list[QueueState]:
    """Leaves out queues that do not exist."""
    commands: list[tuple[Any, ...]] = [("MULTI",), ("TIME",)]
    for queue in queues:
        base = queue_base(prefix, queue)
        commands += [
            ("HMGET", f"{base}:options", "epoch", "journal"),
            ("GET", f"{base}:summary"),
            *(("HLEN", f"{base}:{hash_}") for hash_ in ("jobs", "held:jobs", "held", "active", "blocked")),
            ("ZCARD", f"{base}:dead"),
            ("LLEN", f"{base}:resolving"),
        ]
    time, *answers = link.pipeline([*commands, ("EXEC",)], at=base)[-1]
    states = []
    for number, queue in enumerate(queues):
        (epoch, journal), packed, *lengths = answers[_ANSWERS * number : _ANSWERS * (number + 1)]
        if epoch is not None:
            live, held_records, held, active, blocked, dead, resolving = lengths
            summary = read_summary(packed)
            state = QueueState(
                history=0,
                queue=queue,
                epoch=int(epoch),
                sequence=summary.sequence,
                hash=summary.hash,
                records=live + held_records,
                held=held,
                active=active,
                blocked=blocked,
                dead=dead,
                resolving=resolving,
                journal_on=journal == b"1",
                ids_read_from_us=ids_read_from_us,
                counted_us=_time_us(time),
            )
            states.append(state)
    return states


def _job_locations(link: Link, base: str) -> Iterator[tuple[str, str, int | None]]:
    """(job, location, fence), without duplicates."""
    for name, location in (("jobs", "record"), ("held:jobs", "record"), ("held", "held"), ("blocked", "blocked")):
        for job in _scan(link, "HSCAN", f"{base}:{name}"):
            yield job, location, None
    for job in _scan(link, "ZSCAN", f"{base}:scheduled"):
        yield job, "scheduled", None
    for job, owner in _scan(link, "HSCAN", f"{base}:active").items():
        yield job, "active", _number(owner.split(":")[1] if ":" in owner else "")
    for member in _scan(link, "ZSCAN", f"{base}:dead"):
        job, _, fence = member.rpartition("@")
        yield job, "dead", _number(fence)


def _scan(link: Link, command: str, key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    cursor = b"0"
    while True:
        cursor, flat = link.call(command, key, cursor, "COUNT", _CHUNK)
        values = flat[1::2] if key.endswith(":active") else [b""] * (len(flat) // 2)
        found |= {_text(name): _text(value) for name, value in zip(flat[::2], values, strict=True)}
        if cursor == b"0":
            return found


def locations_table(locations: list[JobLocation]) -> pa.Table:
    columns = zip(*locations, strict=True) if locations else ([] for _ in LOCATIONS)
    return pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, LOCATIONS.types, strict=True)], schema=LOCATIONS
    )


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _time_us(answer: list[bytes]) -> int:
    seconds, micros = answer
    return int(seconds) * 1_000_000 + int(micros)
