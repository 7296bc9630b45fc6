"""What Redis says of its queues: how much is in them, what, and up to which entry of the journal that is so.

1. Ids are read first, in pieces, while the queue works; what changes meanwhile is left out of the comparison.
2. Then, in one step for a queue and its fail queue: the numbers, and the place in the journal of the same moment.

Nothing is lost and nothing appears: what was born is what has ended and what is still there, and Redis holds that.

1. `end_findings`: whether the journal goes up to where Redis says it does; holes and missing ends are gaps.
2. `sums_of`, `balance_findings`: the numbers per queue and epoch.
3. `place_findings`: id by id, what the journal says against where Redis has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from forq.broker.keys import fail_queue, main_queue, queue_base, registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.pipeline import verbs
from forq.pipeline.audit.chain import Epoch, Hole
from forq.pipeline.audit.findings import GAP, VIOLATION, Finding, all_of, findings_where, told

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


Key = tuple[int, str, int]
_EPOCH = ("history", "queue", "epoch")
_JOB = (*_EPOCH, "job")


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one queue and epoch. The last four are what is still there at the end."""

    born: int = 0
    done: int = 0
    released: int = 0
    cancelled: int = 0
    dead: int = 0
    lost: int = 0
    ready: int = 0
    active: int = 0
    blocked: int = 0
    archived: int = 0

    @property
    def ended(self) -> int:
        return self.done + self.released + self.cancelled + self.dead + self.lost

    @property
    def there(self) -> int:
        return self.ready + self.active


def key_of(what: Epoch | Hole | Standing) -> Key:
    return what.history, what.queue, what.epoch


def end_findings(epochs: Sequence[Epoch], holes: Sequence[Hole], standings: Standings | None) -> list[Finding]:
    found = [
        _finding("chain", GAP, key_of(hole), f"entries {hole.first} to {hole.last} are missing", hole.first)
        for hole in holes
    ]
    newest: dict[tuple[int, str], Epoch] = {}
    for epoch in epochs:
        earlier = newest.get((epoch.history, epoch.queue))
        if earlier is not None and not earlier.deleted:
            found.append(_finding("chain", GAP, key_of(earlier), _NO_END, earlier.last))
        newest[epoch.history, epoch.queue] = epoch
    if standings is not None:
        for queue in newest.keys() | standings.queues.keys():
            found += _end_of_queue(newest.get(queue), standings.queues.get(queue), standings)
    return found


_NO_END = "it ends without `deleted`, though the queue was made again: what came after this entry is missing"


def _end_of_queue(epoch: Epoch | None, standing: Standing | None, standings: Standings) -> Iterator[Finding]:
    if standing is None:
        assert epoch is not None
        if not epoch.deleted:
            found = "the queue is not in Redis, and the journal does not say that it was deleted"
            yield _finding("chain", GAP, key_of(epoch), found, epoch.last)
        return
    key = key_of(standing)
    if not standing.journal_on:
        yield _finding("chain", GAP, key, "its journal is switched off", standing.sequence)
    if epoch is None or epoch.epoch != standing.epoch:
        if standing.sequence:
            yield _finding("chain", GAP, key, f"entries 1 to {standing.sequence} are missing", 1)
        if epoch is not None and not epoch.deleted:
            yield _finding("chain", GAP, key_of(epoch), _NO_END, epoch.last)
    elif epoch.last < standing.sequence:
        found = f"entries {epoch.last + 1} to {standing.sequence} are missing"
        yield _finding("chain", GAP, key, found, epoch.last + 1)
    elif epoch.last > standing.sequence:
        found = f"the last entry is {epoch.last}, but Redis has come to {standing.sequence} only: it has lost data"
        yield _finding("chain", VIOLATION, key, found, epoch.last)
    elif epoch.last_hash != standing.hash:
        yield _finding("chain", VIOLATION, key, f"Redis has another hash for entry {epoch.last}", epoch.last)


def sums_of(lives: DataFrame, archive: DataFrame) -> dict[Key, Sums]:
    step, last = F.col("step"), F.col("last")
    counted = {
        "born": step.isin(*verbs.BIRTHS),
        "done": step == "done",
        "released": step == "released",
        "cancelled": step.isin("cancelled", "cancelled_run"),
        "dead": step == "dead",
        "lost": (step == "dropped") & F.col("was_there"),
        "ready": last & F.col("ready"),
        "active": last & F.col("running"),
        "blocked": last & F.col("followed"),
    }
    rows = lives.groupBy(*_EPOCH).agg(*(F.count_if(what).alias(name) for name, what in counted.items())).collect()
    archived = archive.where(last & step.isin("dead", "failing")).groupBy(*_EPOCH).count().collect()
    kept = {(row.history, row.queue, row.epoch): row["count"] for row in archived}
    return {
        key: Sums(archived=kept.get(key, 0), **{name: row[name] for name in counted})
        for row in rows
        for key in [(row.history, row.queue, row.epoch)]
    }


def fail_jobs_at_deletion(lives: DataFrame, epochs: Sequence[Epoch]) -> dict[Key, int]:
    """Of each deleted queue: how many fail jobs its fail queue held at that moment; `deleted` counts those, too."""
    fail_epochs = sorted((e.history, e.queue, e.epoch) for e in epochs if e.queue != main_queue(e.queue))
    moments = []
    for epoch in epochs:
        name = fail_queue(epoch.queue)
        there = [key for key in fail_epochs if key[:2] == (epoch.history, name) and key[2] < epoch.ended_us]
        if epoch.deleted and there and epoch.queue == main_queue(epoch.queue):
            moments.append((*there[-1], epoch.ended_us, epoch.epoch))
    if not moments:
        return {}
    deleted = lives.sparkSession.createDataFrame(
        moments, "history int, queue string, epoch long, moment long, parent long"
    )
    change = F.when(F.col("step").isin(*verbs.BIRTHS), 1).when(F.col("step").isin(*verbs.GONE), -1).otherwise(0)
    rows = (
        lives.join(F.broadcast(deleted), list(_EPOCH))
        .where(F.col("time") <= F.col("moment"))
        .groupBy("history", "queue", "parent")
        .agg(F.sum(change).alias("held"))
        .collect()
    )
    return {(row.history, main_queue(row.queue), row.parent): row.held for row in rows}


def balance_findings(
    sums: Mapping[Key, Sums],
    fail_jobs: Mapping[Key, int],
    epochs: Iterable[Epoch],
    holes: Iterable[Hole],
    standings: Standings | None,
) -> list[Finding]:
    """Of queues with a hole nothing is said: what they lack is in there."""
    incomplete = {(hole.history, main_queue(hole.queue)) for hole in holes}
    known = {key_of(epoch): epoch for epoch in epochs}
    found = []
    for key in sorted(sums.keys() | known.keys()):
        if (key[0], main_queue(key[1])) in incomplete:
            continue
        held = sums.get(key, Sums())
        if held.born != held.ended + held.there:
            found.append(_finding("conservation", VIOLATION, key, _unbalanced(held)))
        epoch = known.get(key)
        if epoch is not None and epoch.jobs_deleted is not None:
            found += _at_deletion(key, held, epoch.jobs_deleted, fail_jobs.get(key, 0))
        standing = standings.queues.get(key[:2]) if standings else None
        if standing is not None and standing.journal_on and _reaches(epoch, standing):
            found += _against_redis(key, held, standing)
    return found


def _reaches(epoch: Epoch | None, standing: Standing) -> bool:
    return epoch is not None and (epoch.epoch, epoch.last) == (standing.epoch, standing.sequence)


def _unbalanced(held: Sums) -> str:
    return (
        f"{held.born} were born, but {held.done} done + {held.released} released + {held.cancelled} cancelled + "
        f"{held.dead} dead + {held.lost} lost + {held.there} still there = {held.ended + held.there}"
    )


def _at_deletion(key: Key, held: Sums, deleted: int, fail_jobs: int) -> Iterator[Finding]:
    there = held.there + held.blocked + held.archived + fail_jobs
    if there != deleted:
        found = f"it was deleted with {deleted} jobs, but the journal says that {there} were there"
        yield _finding("conservation", VIOLATION, key, found)


def _against_redis(key: Key, held: Sums, standing: Standing) -> Iterator[Finding]:
    pairs = {
        "live jobs": (held.there, standing.records),
        "active jobs": (held.active, standing.active),
        "blocked jobs": (held.blocked, standing.blocked),
        "dead jobs": (held.archived, standing.dead),
    }
    for what, (journal, redis) in pairs.items():
        if journal != redis:
            found = f"{journal} {what} by the journal, {redis} in Redis"
            yield _finding("conservation", VIOLATION, key, found, standing.sequence)


def place_findings(
    lives: DataFrame,
    archive: DataFrame,
    places: DataFrame,
    epochs: Iterable[Epoch],
    holes: Iterable[Hole],
    standings: Standings,
) -> DataFrame:
    """Of queues whose whole journal is there; without the ids that changed while they were read."""
    incomplete = {(hole.history, main_queue(hole.queue)) for hole in holes}
    reached = {key_of(epoch): epoch for epoch in epochs}
    compared = [
        (*key_of(standing), standing.read_from_us)
        for standing in standings.queues.values()
        if (standing.history, main_queue(standing.queue)) not in incomplete
        and standing.journal_on
        and _reaches(reached.get(key_of(standing)), standing)
    ]
    queues = F.broadcast(
        lives.sparkSession.createDataFrame(compared, "history int, queue string, epoch long, read_from long")
    )
    return all_of([_live_places(lives, places, queues), _dead_places(archive, places, queues)])


def _live_places(lives: DataFrame, places: DataFrame, queues: DataFrame) -> DataFrame:
    ended = lives.where("last").select(*_JOB, "sequence", "time", "ready", "due", "running", "run", "followed")
    held = places.where("place != 'dead'").groupBy(*_JOB)
    held_at = held.agg(
        *(F.count_if(F.col("place") == place).alias(place) for place in ("record", "active", "scheduled", "blocked")),
        F.max("fence").alias("owner"),
    )
    both = ended.join(held_at, list(_JOB), "full").join(queues, list(_EPOCH))
    unchanged = both.where(F.coalesce("time", F.lit(0)) < F.col("read_from"))
    for column in ("ready", "due", "running", "followed"):
        unchanged = unchanged.withColumn(column, F.coalesce(column, F.lit(False)))
    for column in ("record", "active", "scheduled", "blocked"):
        unchanged = unchanged.withColumn(column, F.coalesce(F.col(column) > 0, F.lit(False)))
    there = F.col("ready") | F.col("running")
    kept = there & F.col("record")
    conservation = [
        (there & ~F.col("record"), told("by the journal it is there, but Redis has no record of it")),
        (~there & F.col("record"), told("Redis has a record of it, but by the journal it is not there")),
    ]
    states = [
        (F.col("active") & F.col("scheduled"), told("in Redis it is active and scheduled")),
        (~F.col("record") & F.col("active"), told("in Redis it is active without a record")),
        (~F.col("record") & F.col("scheduled"), told("in Redis it is scheduled without a record")),
        (F.col("blocked") & ~F.col("active"), told("in Redis something is blocked behind it, but it is not active")),
        (kept & (F.col("running") != F.col("active")), told("active by one of journal and Redis only")),
        (
            kept & F.col("active") & (F.col("run") != F.col("owner")),
            told("active with fence ", F.col("owner"), ", by the journal with ", F.col("run")),
        ),
        (kept & (F.col("due") != F.col("scheduled")), told("scheduled by one of journal and Redis only")),
        (F.col("followed") != F.col("blocked"), told("blocked behind it by one of journal and Redis only")),
    ]
    return all_of(
        [findings_where(unchanged, "conservation", conservation), findings_where(unchanged, "states", states)]
    )


def _dead_places(archive: DataFrame, places: DataFrame, queues: DataFrame) -> DataFrame:
    ended = archive.where("last").select(
        *_JOB, "fence", "sequence", "time", F.col("step").isin("dead", "failing").alias("archived")
    )
    held = places.where("place = 'dead'").select(*_JOB, "fence", F.lit(True).alias("held")).distinct()
    both = ended.join(held, [*_JOB, "fence"], "full").join(queues, list(_EPOCH))
    unchanged = both.where(F.coalesce("time", F.lit(0)) < F.col("read_from"))
    archived, there = F.coalesce("archived", F.lit(False)), F.coalesce("held", F.lit(False))
    tests = [
        (archived & ~there, told("it is dead by the journal, but not in the archive: fence ", F.col("fence"))),
        (~archived & there, told("it is in the archive, but not by the journal: fence ", F.col("fence"))),
    ]
    return findings_where(unchanged, "conservation", tests)


def _finding(rule: str, kind: str, key: Key, found: str, sequence: int | None = None) -> Finding:
    return Finding(key[0], rule, kind, key[1], key[2], sequence, None, found)
