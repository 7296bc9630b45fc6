"""Rules `conservation` and `states`, and the end of the chain: journal and Redis agree on which jobs exist.

1. `end_findings`: the journal must reach the entry that Redis wrote last. Missing entries are gaps.
2. `sums_of`, `balance_findings`: jobs added = jobs ended + jobs present, per queue and epoch, as Redis counts them.
3. `location_findings`: each job must be where the journal says.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from forq.broker.keys import fail_queue, main_queue
from forq.pipeline import verbs
from forq.pipeline.audit.chain import Epoch, Hole
from forq.pipeline.audit.findings import GAP, VIOLATION, Finding, findings_where, text, union
from forq.pipeline.audit.redis_state import QueueState, RedisState

Key = tuple[int, str, int]
_EPOCH = ("history", "queue", "epoch")
_JOB = (*_EPOCH, "job")


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers of jobs of one queue and epoch. The last five are those present at the end."""

    added: int = 0
    done: int = 0
    released: int = 0
    cancelled: int = 0
    dead: int = 0
    lost: int = 0
    ready: int = 0
    held: int = 0
    active: int = 0
    blocked: int = 0
    archived: int = 0

    @property
    def ended(self) -> int:
        return self.done + self.released + self.cancelled + self.dead + self.lost

    @property
    def present(self) -> int:
        return self.ready + self.held + self.active


def key_of(what: Epoch | Hole | QueueState) -> Key:
    return what.history, what.queue, what.epoch


def end_findings(epochs: Sequence[Epoch], holes: Sequence[Hole], redis_state: RedisState | None) -> list[Finding]:
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
    if redis_state is not None:
        for queue in newest.keys() | redis_state.queues.keys():
            found += _end_of_queue(newest.get(queue), redis_state.queues.get(queue), redis_state)
    return found


_NO_END = "no `deleted` event, but the queue was created again: the entries after this one are missing"


def _end_of_queue(epoch: Epoch | None, queue_state: QueueState | None, redis_state: RedisState) -> Iterator[Finding]:
    if queue_state is None:
        assert epoch is not None
        if not epoch.deleted:
            found = "the queue is not in Redis, but the journal has no `deleted` event"
            yield _finding("chain", GAP, key_of(epoch), found, epoch.last)
        return
    key = key_of(queue_state)
    if not queue_state.journal_on:
        yield _finding("chain", GAP, key, "the journal is switched off", queue_state.sequence)
    if epoch is None or epoch.epoch != queue_state.epoch:
        if queue_state.sequence:
            yield _finding("chain", GAP, key, f"entries 1 to {queue_state.sequence} are missing", 1)
        if epoch is not None and not epoch.deleted:
            yield _finding("chain", GAP, key_of(epoch), _NO_END, epoch.last)
    elif epoch.last < queue_state.sequence:
        found = f"entries {epoch.last + 1} to {queue_state.sequence} are missing"
        yield _finding("chain", GAP, key, found, epoch.last + 1)
    elif epoch.last > queue_state.sequence:
        found = f"the last entry is {epoch.last}, but Redis is at entry {queue_state.sequence}: Redis lost data"
        yield _finding("chain", VIOLATION, key, found, epoch.last)
    elif epoch.last_hash != queue_state.hash:
        yield _finding("chain", VIOLATION, key, f"Redis has a different hash for entry {epoch.last}", epoch.last)


def sums_of(transitions: DataFrame, archive: DataFrame) -> dict[Key, Sums]:
    step, last = F.col("step"), F.col("last")
    counted = {
        "added": step.isin(*verbs.STARTS),
        "done": step == "done",
        "released": step == "released",
        "cancelled": step.isin("cancelled", "cancelled_run"),
        "dead": step == "dead",
        "lost": (step == "dropped") & F.col("existed"),
        "ready": last & F.col("ready"),
        "held": last & F.col("held"),
        "active": last & F.col("running"),
        "blocked": last & F.col("has_blocked"),
    }
    rows = transitions.groupBy(*_EPOCH).agg(*(F.count_if(what).alias(name) for name, what in counted.items())).collect()
    archived = archive.where(last & step.isin("dead", "failing")).groupBy(*_EPOCH).count().collect()
    kept = {(row.history, row.queue, row.epoch): row["count"] for row in archived}
    return {
        key: Sums(archived=kept.get(key, 0), **{name: row[name] for name in counted})
        for row in rows
        for key in [(row.history, row.queue, row.epoch)]
    }


def fail_jobs_at_deletion(transitions: DataFrame, epochs: Sequence[Epoch]) -> dict[Key, int]:
    """Fail jobs present when each queue was deleted. The count in the `deleted` event includes them."""
    fail_epochs = sorted((e.history, e.queue, e.epoch) for e in epochs if e.queue != main_queue(e.queue))
    deletions = []
    for epoch in epochs:
        name = fail_queue(epoch.queue)
        earlier = [key for key in fail_epochs if key[:2] == (epoch.history, name) and key[2] < epoch.ended_us]
        if epoch.deleted and earlier and epoch.queue == main_queue(epoch.queue):
            deletions.append((*earlier[-1], epoch.ended_us, epoch.epoch))
    if not deletions:
        return {}
    deleted = transitions.sparkSession.createDataFrame(
        deletions, "history int, queue string, epoch long, moment long, parent long"
    )
    change = F.when(F.col("step").isin(*verbs.STARTS), 1).when(F.col("step").isin(*verbs.GONE), -1).otherwise(0)
    rows = (
        transitions.join(F.broadcast(deleted), list(_EPOCH))
        .where(F.col("time") <= F.col("moment"))
        .groupBy("history", "queue", "parent")
        .agg(F.sum(change).alias("kept"))
        .collect()
    )
    return {(row.history, main_queue(row.queue), row.parent): row.kept for row in rows}


def balance_findings(
    sums: Mapping[Key, Sums],
    fail_jobs: Mapping[Key, int],
    epochs: Iterable[Epoch],
    holes: Iterable[Hole],
    redis_state: RedisState | None,
) -> list[Finding]:
    """Skips queues with a hole: the missing jobs may be in it."""
    incomplete = {(hole.history, main_queue(hole.queue)) for hole in holes}
    known = {key_of(epoch): epoch for epoch in epochs}
    found = []
    for key in sorted(sums.keys() | known.keys()):
        if (key[0], main_queue(key[1])) in incomplete:
            continue
        held = sums.get(key, Sums())
        if held.added != held.ended + held.present:
            found.append(_finding("conservation", VIOLATION, key, _unbalanced(held)))
        epoch = known.get(key)
        if epoch is not None and epoch.jobs_deleted is not None:
            found += _at_deletion(key, held, epoch.jobs_deleted, fail_jobs.get(key, 0))
        queue_state = redis_state.queues.get(key[:2]) if redis_state else None
        if queue_state is not None and queue_state.journal_on and _reaches(epoch, queue_state):
            found += _against_redis(key, held, queue_state)
    return found


def _reaches(epoch: Epoch | None, queue_state: QueueState) -> bool:
    return epoch is not None and (epoch.epoch, epoch.last) == (queue_state.epoch, queue_state.sequence)


def _unbalanced(held: Sums) -> str:
    return (
        f"{held.added} jobs were added, but {held.done} done + {held.released} released + {held.cancelled} cancelled + "
        f"{held.dead} dead + {held.lost} lost + {held.present} present = {held.ended + held.present}"
    )


def _at_deletion(key: Key, held: Sums, deleted: int, fail_jobs: int) -> Iterator[Finding]:
    present = held.present + held.blocked + held.archived + fail_jobs
    if present != deleted:
        found = f"the queue was deleted with {deleted} jobs, but according to the journal {present} were present"
        yield _finding("conservation", VIOLATION, key, found)


def _against_redis(key: Key, held: Sums, queue_state: QueueState) -> Iterator[Finding]:
    pairs = {
        "live jobs": (held.present, queue_state.records),
        "held jobs": (held.held, queue_state.held),
        "active jobs": (held.active, queue_state.active),
        "blocked jobs": (held.blocked, queue_state.blocked),
        "dead jobs": (held.archived, queue_state.dead),
    }
    for what, (journal, redis) in pairs.items():
        if journal != redis:
            found = f"{journal} {what} according to the journal, {redis} in Redis"
            yield _finding("conservation", VIOLATION, key, found, queue_state.sequence)


def location_findings(
    transitions: DataFrame,
    archive: DataFrame,
    locations: DataFrame,
    epochs: Iterable[Epoch],
    holes: Iterable[Hole],
    redis_state: RedisState,
) -> DataFrame:
    """Compares queues with a complete journal, without the jobs that changed while the ids were read."""
    incomplete = {(hole.history, main_queue(hole.queue)) for hole in holes}
    reached = {key_of(epoch): epoch for epoch in epochs}
    compared = [
        (*key_of(queue_state), queue_state.ids_read_from_us)
        for queue_state in redis_state.queues.values()
        if (queue_state.history, main_queue(queue_state.queue)) not in incomplete
        and queue_state.journal_on
        and _reaches(reached.get(key_of(queue_state)), queue_state)
    ]
    queues = F.broadcast(
        transitions.sparkSession.createDataFrame(compared, "history int, queue string, epoch long, read_from long")
    )
    return union(
        [_live_location_findings(transitions, locations, queues), _dead_location_findings(archive, locations, queues)]
    )


def _live_location_findings(transitions: DataFrame, locations: DataFrame, queues: DataFrame) -> DataFrame:
    by_journal, in_redis = ("ready", "due", "held", "running", "has_blocked"), ("active", "scheduled", "blocked")
    ended = transitions.where("last").select(*_JOB, "sequence", "time", "run", *by_journal)
    there = locations.where("location != 'dead'").groupBy(*_JOB)
    found_at = there.agg(
        *(F.count_if(F.col("location") == location).alias(location) for location in ("record", *in_redis)),
        F.count_if(F.col("location") == "held").alias("hold"),
        F.max("fence").alias("owner"),
    )
    both = ended.join(found_at, list(_JOB), "full").join(queues, list(_EPOCH))
    unchanged = both.where(F.coalesce("time", F.lit(0)) < F.col("read_from"))
    unchanged = unchanged.withColumn("twice", F.coalesce(F.col("record") > 1, F.lit(False)))
    for column in by_journal:
        unchanged = unchanged.withColumn(column, F.coalesce(column, F.lit(False)))
    for column in ("record", "hold", *in_redis):
        unchanged = unchanged.withColumn(column, F.coalesce(F.col(column) > 0, F.lit(False)))
    present = F.col("ready") | F.col("held") | F.col("running")
    kept = present & F.col("record")
    conservation = [
        (present & ~F.col("record"), text("present according to the journal, but Redis has no record")),
        (~present & F.col("record"), text("Redis has a record, but according to the journal the job is not present")),
    ]
    states = [
        (F.col("active") & F.col("scheduled"), text("both active and scheduled in Redis")),
        (~F.col("record") & F.col("active"), text("active in Redis, without a record")),
        (~F.col("record") & F.col("scheduled"), text("scheduled in Redis, without a record")),
        (~F.col("record") & F.col("hold"), text("held in Redis, without a record")),
        (F.col("twice"), text("both held and live in Redis")),
        (kept & (F.col("held") != F.col("hold")), text("held in only one of journal and Redis")),
        (F.col("blocked") & ~F.col("active"), text("a job is blocked behind it in Redis, but it is not active")),
        (kept & (F.col("running") != F.col("active")), text("active in only one of journal and Redis")),
        (
            kept & F.col("active") & (F.col("run") != F.col("owner")),
            text("active with fence ", F.col("owner"), " in Redis, with fence ", F.col("run"), " in the journal"),
        ),
        (kept & (F.col("due") != F.col("scheduled")), text("scheduled in only one of journal and Redis")),
        (F.col("has_blocked") != F.col("blocked"), text("a job is blocked behind it in only one of journal and Redis")),
    ]
    return union([findings_where(unchanged, "conservation", conservation), findings_where(unchanged, "states", states)])


def _dead_location_findings(archive: DataFrame, locations: DataFrame, queues: DataFrame) -> DataFrame:
    ended = archive.where("last").select(
        *_JOB, "fence", "sequence", "time", F.col("step").isin("dead", "failing").alias("archived")
    )
    held = locations.where("location = 'dead'").select(*_JOB, "fence", F.lit(True).alias("held")).distinct()
    both = ended.join(held, [*_JOB, "fence"], "full").join(queues, list(_EPOCH))
    unchanged = both.where(F.coalesce("time", F.lit(0)) < F.col("read_from"))
    archived, present = F.coalesce("archived", F.lit(False)), F.coalesce("held", F.lit(False))
    checks = [
        (archived & ~present, text("dead according to the journal, but not in Redis: fence ", F.col("fence"))),
        (~archived & present, text("dead in Redis, but not according to the journal: fence ", F.col("fence"))),
    ]
    return findings_where(unchanged, "conservation", checks)


def _finding(rule: str, kind: str, key: Key, found: str, sequence: int | None = None) -> Finding:
    return Finding(key[0], rule, kind, key[1], key[2], sequence, None, found)
