"""What Redis says of its queues: how much is in them, what, and up to which entry of the journal that is so.

1. Ids are read first, in pieces, while the queue works; what changes meanwhile is left out of the comparison.
2. Then, in one step for a queue and its fail queue: the numbers, and the place in the journal of the same moment.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from forq.broker.keys import fail_queue, queue_base, registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry

_CHUNK = 1000

# One row per id and place; `fence` of those that are active or dead.
PLACES = pa.schema(
    [
        pa.field("history", pa.int32(), nullable=False),
        pa.field("queue", pa.string(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("job", pa.string(), nullable=False),
        pa.field("place", pa.string(), nullable=False),
        pa.field("fence", pa.int64()),
    ]
)
Place = tuple[int, str, int, str, str, int | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """One queue at one moment. `read_from_us`: when reading its ids began; `moment_us`: when it was counted."""

    history: int
    queue: str
    epoch: int
    sequence: int
    hash: str
    records: int
    active: int
    blocked: int
    dead: int
    journal_on: bool
    read_from_us: int
    moment_us: int


@dataclass(frozen=True, slots=True)
class Standings:
    """All queues. `asked_us`: when the first was asked for; what was made later is not in here."""

    asked_us: int
    queues: dict[tuple[int, str], Standing]
    places: list[Place]

    def moments(self) -> list[tuple[int, str, int, int, int]]:
        """(history, queue, epoch, sequence, moment): up to where the journal is to be compared."""
        return [(s.history, s.queue, s.epoch, s.sequence, s.moment_us) for s in self.queues.values()]


def read_standings(link: Link, prefix: str) -> Standings:
    asked_us = _time_us(link.call("TIME", at=registry_key(prefix)))
    queues: dict[tuple[int, str], Standing] = {}
    places: list[Place] = []
    for name in sorted(Registry(link, prefix).names()):
        both = (name, fail_queue(name))
        read_from_us = _time_us(link.call("TIME", at=queue_base(prefix, name)))
        found = [(queue, place) for queue in both for place in _places(link, queue_base(prefix, queue))]
        standings = _count(link, prefix, both, read_from_us)
        queues |= {(0, standing.queue): standing for standing in standings}
        epochs = {standing.queue: standing.epoch for standing in standings}
        places += [(0, queue, epochs[queue], *place) for queue, place in found if queue in epochs]
    return Standings(asked_us, queues, places)


def _count(link: Link, prefix: str, queues: Iterable[str], read_from_us: int) -> list[Standing]:
    """Those of the queues that are there."""
    commands: list[tuple[Any, ...]] = [("MULTI",), ("TIME",)]
    for queue in queues:
        base = queue_base(prefix, queue)
        commands += [
            ("HMGET", f"{base}:options", "epoch", "journal"),
            ("HMGET", f"{base}:counts", "journal_sequence", "journal_hash"),
            *(("HLEN", f"{base}:{hash_}") for hash_ in ("jobs", "active", "blocked")),
            ("ZCARD", f"{base}:dead"),
        ]
    time, *answers = link.pipeline([*commands, ("EXEC",)], at=base)[-1]
    standings = []
    for number, queue in enumerate(queues):
        (epoch, journal), (sequence, hash_), *lengths = answers[6 * number : 6 * number + 6]
        if epoch is not None:
            records, active, blocked, dead = lengths
            standing = Standing(
                history=0,
                queue=queue,
                epoch=int(epoch),
                sequence=int(sequence or 0),
                hash=(hash_ or b"").decode(),
                records=records,
                active=active,
                blocked=blocked,
                dead=dead,
                journal_on=journal == b"1",
                read_from_us=read_from_us,
                moment_us=_time_us(time),
            )
            standings.append(standing)
    return standings


def _places(link: Link, base: str) -> Iterator[tuple[str, str, int | None]]:
    """(job, place, fence), each once."""
    for name, place in (("jobs", "record"), ("blocked", "blocked")):
        for job in _scan(link, "HSCAN", f"{base}:{name}"):
            yield job, place, None
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


def places_table(places: list[Place]) -> pa.Table:
    columns = zip(*places, strict=True) if places else ([] for _ in PLACES)
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, PLACES.types, strict=True)], schema=PLACES)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _time_us(answer: list[bytes]) -> int:
    seconds, micros = answer
    return int(seconds) * 1_000_000 + int(micros)
