"""`forq pipeline replay`: enqueues dead jobs again, selected by a predicate over the history.

1. `job_lifecycles` turns events into one row per lifecycle of a job. A job id that was used again or revived has
   several. A blocked job has no row until it is unblocked.
2. `pick` applies the predicate to the lifecycles that ended as done, released or dead.
3. `Lookup` finds the records of the picked jobs in Redis: the journal has no job data. Each job is READY, was replayed
   ALREADY, or has a reason why it cannot be replayed. A job that died because of what it waited for is ready only when
   all of that is done: by the history, or since then by Redis.
4. Ready jobs are enqueued by the sink, with a token of queue, id and fence. So an interrupted replay can be repeated:
   while the queue remembers tokens (dedup_ttl) no job is enqueued twice. The dead jobs stay.
"""

import logging
import re
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from typing import Any

import orjson
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from forq.broker.dead import read_dead
from forq.broker.keys import main_queue, queue_base, token_key
from forq.broker.link import Link
from forq.broker.record import unpack
from forq.broker.registry import Registry
from forq.errors import ForqError, InvalidData, UnknownQueue, UsageError
from forq.pipeline import verbs
from forq.pipeline.history import read_history, require_history
from forq.pipeline.reader import require_queues
from forq.pipeline.session import spark_session
from forq.pipeline.verbs import quoted
from forq.progress_line import ProgressLine
from forq.settings import WORK
from forq.values import check_queue_name

_ENDS = quoted(*verbs.ENDS)
_NOT_IN_LIFECYCLE = quoted(*verbs.NOT_IN_LIFECYCLE)

# A claim that finds too many stalls or timeouts buries the job without an attempt. The cause of its last attempt is
# more useful.
_BY_CLAIM = "verb = 'dead' and micros is null and cause in ('StallError', 'TimeoutError')"

# What follows the job in `held` and `unmet` is no cause.
_HAS_CAUSE = "cause is not null and verb not in ('held', 'unmet')"

# `options` is about a job, but no step of its lifecycle.
_IS_STEP = f"verb not in ({quoted(*verbs.NOTES)})"

_LIFECYCLES = f"""
select life.queue, life.epoch, life.job, life.number as life, life.enqueued_at,
  case when last_verb in ({_ENDS}) then last_verb
    when deletion.time is not null then 'deleted'
    when last_verb in ({quoted(*verbs.ACTIVE)}) then 'active'
    when last_verb in ({quoted(*verbs.HELD)}) then 'held'
    else 'ready' end as state,
  last_verb as verb,
  case when last_verb in ({_ENDS}) then last_at else deletion.time end as ended_at,
  attempts, cause, micros, life.fence, nullif(options, '-') as options,
  case when last_verb = 'dead' then coalesce(archived.fate, if(deletion.time is null, null, 'deleted')) end as fate,
  if(was_unmet, slice(split(hold, ' '), 2, 2147483647), null) as waited_for
from (
  select queue, epoch, job, number, min(time) as enqueued_at, max(time) as last_at,
    max_by(verb, struct(sequence, position)) filter (where {_IS_STEP}) as last_verb,
    max_by(fence, struct(sequence, position)) filter (where {_IS_STEP}) as fence,
    max(attempt) as attempts,
    max_by(micros, struct(sequence, position)) filter (where micros is not null) as micros,
    max_by(cause, struct(sequence, position)) filter (
      where {_IS_STEP} and {_HAS_CAUSE} and not ({_BY_CLAIM})
    ) as cause,
    max_by(cause, struct(sequence, position)) filter (where verb = 'held') as hold, max(verb = 'unmet') as was_unmet,
    max_by(cause, struct(sequence, position)) filter (where not ({_IS_STEP})) as options
  from (
    select *, coalesce(sum(if(verb in ({_ENDS}), 1, 0)) over (
      partition by queue, epoch, job order by sequence, position rows between unbounded preceding and 1 preceding
    ), 0) as number
    from {{events}} where job is not null and (verb not in ({_NOT_IN_LIFECYCLE}) or not ({_IS_STEP}))
  )
  group by queue, epoch, job, number
) as life
left join (
  select queue, epoch, min(time) as time from {{events}} where verb = 'deleted' group by queue, epoch
) as deletion
  on life.queue = deletion.queue and life.epoch = deletion.epoch
left join (
  select queue, epoch, job, fence as of_fence, min(verb) as fate
  from {{events}} where verb in ({quoted(*verbs.ARCHIVE_ENDS)}) group by queue, epoch, job, fence
) as archived
  on life.queue = archived.queue and life.epoch = archived.epoch and life.job = archived.job
    and life.fence = archived.of_fence
"""


def job_lifecycles(spark: SparkSession, events: DataFrame) -> DataFrame:
    """Columns: queue, epoch, job, life (from 0), enqueued_at, state, verb (the last), ended_at, attempts, cause (of the
    last attempt that did not succeed), micros (of the last measured attempt), fence, options (packed), fate, waited_for
    (of a job that died because of a dependency: the ids of those that had not ended when it was last updated).

    state: held, ready, active, done, released, dead, cancelled, dropped (its record was lost) or deleted (with its
    queue).
    fate of a dead job: revived, discarded, forgotten or deleted; null while it is kept.
    """
    return spark.sql(_LIFECYCLES, events=events)


READY, ALREADY = "ready", "already"
LOOKED_UP = (
    "queue string, job string, fence long, state string, target string, outcome string, identifier string, "
    "type string, priority int, data string, token string, timeout string, max_retries int, backoff array<string>, "
    "keep_done string"
)
OWN_OPTIONS = ("timeout", "max_retries", "backoff", "keep_done")
_COLUMNS = tuple(column.split()[0] for column in LOOKED_UP.split(","))
_LONGEST_TOKEN = 128
# Records may be large: limits the memory of a task.
_JOBS_PER_CALL = 200

_FATES = {
    "revived": "it was revived already",
    "discarded": "it was discarded",
    "forgotten": "it was forgotten (dead_ttl, dead_max); it may be in the failed log: forqctl recover",
    "deleted": "its queue was deleted; it may be in the failed log: forqctl recover",
}
IS_DONE = "it is done, so its data is gone"
IS_RELEASED = "it was released, so its data is gone"
IS_FAIL_JOB = "it is a fail job: replay the job that it belongs to"
NOT_DEAD = "it is no longer a dead job"
IS_LIVE = "a live job has its id"
BROKEN = "its record is broken"
NO_QUEUE = "its queue does not exist any more"
NOT_MET = (
    "it died because of a job for which it waited, and not all of those are done: replay them first, and this one when "
    "they are done"
)
NOT_IN_MODE = "it has options of its own, which need a queue of mode work"


@dataclass(frozen=True, slots=True)
class Lookup:
    """Looks up jobs in Redis. A plain value, since Spark sends it to its workers."""

    redis: str
    prefix: str
    to: str | None

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
        """Maps rows of queue, job, fence, state, fate and undone to rows of LOOKED_UP."""
        link = Link(self.redis, name="forq-replay")
        walk = iter(rows)
        try:
            while some := [row.asDict() for row in islice(walk, _JOBS_PER_CALL)]:
                for found in self._look_up_rows(link, some):
                    yield tuple(found.get(name) for name in _COLUMNS)
        finally:
            link.close()

    def _look_up_rows(self, link: Link, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_queue: dict[str, list[dict[str, Any]]] = defaultdict(list)
        looked_up = []
        for row in rows:
            fate = row.pop("fate")
            row["target"] = self.to or row["queue"]
            row["token"] = token_for(row["queue"], row["job"], row["fence"])
            row["outcome"] = _known_reason(row)
            if row["outcome"] is None:
                row["outcome"] = _FATES.get(fate, NOT_DEAD)
                by_queue[row["queue"]].append(row)
            looked_up.append(row)
        for queue, dead in by_queue.items():
            self._look_up_queue(link, queue, dead)
        return looked_up

    def _look_up_queue(self, link: Link, queue: str, rows: list[dict[str, Any]]) -> None:
        source, target = queue_base(self.prefix, queue), queue_base(self.prefix, rows[0]["target"])
        epoch, mode = link.call("HMGET", f"{target}:options", "epoch", "mode")
        if epoch is None:
            for row in rows:
                row["outcome"] = NO_QUEUE
            return
        members = [f"{row['job']}@{row['fence']}" for row in rows]
        packed, *known = link.pipeline(
            [
                ("HMGET", f"{source}:dead:jobs", *members),
                *(("HEXISTS", f"{target}:jobs", row["job"]) for row in rows),
                *(("EXISTS", token_key(target, epoch.decode(), row["token"])) for row in rows),
            ]
        )
        live, replayed = known[: len(rows)], known[len(rows) :]
        for row, record, is_live, was_replayed in zip(rows, packed, live, replayed, strict=True):
            if was_replayed:
                row["outcome"] = ALREADY
            elif record is not None:
                row.update(_with_data(record) if not is_live else {"outcome": IS_LIVE})
                if row["outcome"] == READY and not self._are_done(link, row):
                    row["outcome"] = NOT_MET
                elif mode.decode() != WORK and any(row.get(name) is not None for name in OWN_OPTIONS):
                    row["outcome"] = NOT_IN_MODE

    def _are_done(self, link: Link, row: dict[str, Any]) -> bool:
        """Whether what it waited for has been done since the history was read: in its queue, or where it was replayed
        to."""
        undone = set(row["undone"] or ())
        for queue in dict.fromkeys((row["queue"], row["target"])):
            if undone:
                names, base = sorted(undone), queue_base(self.prefix, queue)
                found = link.pipeline([("HMGET", f"{base}:{hash_}", *names) for hash_ in _WHERE_ENDS_ARE])
                undone -= {name for name, *ends in zip(names, *found, strict=True) if _is_done(*ends)}
        return not undone


# `ends` is newer than `ends:old`.
_WHERE_ENDS_ARE = ("jobs", "held", "ends", "ends:old")


def _is_done(live: bytes | None, held: bytes | None, how: bytes | None, how_before: bytes | None) -> bool:
    return live is held is None and (how or how_before or b"").decode() in verbs.SUCCEEDED


def token_for(queue: str, job: str, fence: int) -> str:
    """Depends only on the lifecycle: repeating a replay, or another target queue, gives the same token."""
    token = f"replay:{queue}:{job}@{fence}"
    return token if len(token) <= _LONGEST_TOKEN else f"replay:{sha256(token.encode()).hexdigest()}"


def _known_reason(row: dict[str, Any]) -> str | None:
    if main_queue(row["queue"]) != row["queue"]:
        return IS_FAIL_JOB
    return {"done": IS_DONE, "released": IS_RELEASED}.get(row["state"])


def _with_data(packed: bytes) -> dict[str, Any]:
    try:
        record = unpack(read_dead(packed)[0])
    except InvalidData:
        return {"outcome": BROKEN}
    return {
        "outcome": READY,
        "identifier": record.identifier,
        "type": record.type,
        "priority": record.priority,
        "data": orjson.dumps(record.data).decode(),
        # Without the expiry, as when a dead job is revived: a new job must not expire at once.
        **(record.options.show() if record.options else {}),
    }


MAX_LISTED = 10_000
_SHOWN_PER_REASON = 10
NOT_NEWEST = "a newer job with the same id is replayed"
_FORQ_ERROR = re.compile(r"forq\.errors\.\w+: (.*)")
_CONDITION = re.compile(r"^\[[A-Z0-9_.]+\]\s*")


@dataclass(frozen=True, slots=True)
class NotReplayed:
    queue: str
    job: str
    fence: int
    state: str
    reason: str


@dataclass(slots=True)
class ReplayResult:
    """Numbers of picked jobs. In a dry run, `replayed` counts those that could be replayed."""

    picked: int
    replayed: int
    already: int
    reasons: dict[str, int]
    not_replayed: list[NotReplayed]  # MAX_LISTED at most


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        metavar="SQL",
        required=True,
        help="predicate over queue, job, state (done, released, dead), fate, enqueued_at, ended_at, attempts, "
        "cause, micros, fence, options, waited_for, epoch: \"queue = 'emails' and ended_at >= '2026-11-16'\"",
    )
    parser.add_argument("--to", metavar="QUEUE", help="enqueue all jobs in this queue (default: each in its own)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be replayed; change nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    lookup = Lookup(args.redis, args.prefix, args.to and check_queue_name(args.to))
    _check_queues(lookup)
    # Spark logs a wrong predicate at length before it raises; the error message is enough.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    progress = ProgressLine()
    progress.update("starting Spark")
    spark = spark_session("replay")
    progress.update(f"reading {args.history}")
    require_history(spark, args.history)
    events = read_history(spark, args.history)
    # Views for subqueries of the predicate.
    events.createOrReplaceTempView("events")
    lifecycles = job_lifecycles(spark, events)
    lifecycles.createOrReplaceTempView("jobs")
    # Most histories have none; the rest would read the history again.
    picked = pick(lifecycles, args.where, unmet=not events.where("verb = 'unmet'").isEmpty())
    # Errors are reported once, below, and not by every task with its stack.
    spark.sparkContext.setLogLevel("OFF")
    try:
        result = replay(picked, lookup, dry_run=args.dry_run, progress=progress)
    finally:
        spark.sparkContext.setLogLevel("ERROR")
        progress.clear()
    _show(result, args)
    return 1 if result.reasons else 0


def pick(lifecycles: DataFrame, where: str, *, unmet: bool = True) -> DataFrame:
    """The done, released and dead lifecycles for which the predicate is true. `undone`: those of `waited_for` whose
    last life is not done. `unmet`: whether some lifecycles have waited for others in vain."""
    ended = lifecycles.where("state in ('done', 'released', 'dead')")
    try:
        picked = ended.where(where)
    except PySparkException as exc:
        raise UsageError(f"--where is not a valid predicate: {_first_line(exc)}") from exc
    if not unmet:
        return picked.withColumn("undone", F.lit(None).cast("array<string>"))
    life = ("queue", "epoch", "job", "life")
    waited = picked.select(*life, F.explode("waited_for").alias("dependency"))
    last = lifecycles.groupBy("queue", "epoch", F.col("job").alias("dependency")).agg(
        F.max_by("state", "life").alias("last_state")
    )
    is_done = F.coalesce(F.col("last_state").isin(*verbs.SUCCEEDED), F.lit(False))
    undone = waited.join(last, ["queue", "epoch", "dependency"], "left").where(~is_done)
    return picked.join(undone.groupBy(*life).agg(F.collect_list("dependency").alias("undone")), list(life), "left")


def replay(picked: DataFrame, lookup: Lookup, *, dry_run: bool, progress: ProgressLine | None = None) -> ReplayResult:
    try:
        looked_up = _look_up(picked, lookup).persist()
        counts = _counts(looked_up)
    except (PySparkException, Py4JJavaError) as exc:
        # Nothing was written yet: the lookup in Redis failed, or the predicate on some row.
        kind = ForqError if _FORQ_ERROR.search(str(exc)) else UsageError
        raise kind(f"the jobs cannot be picked: {_first_line(exc)}") from exc
    try:
        ready = looked_up.where(F.col("outcome") == READY)
        failure = None
        if not dry_run and counts.get(READY):
            if progress:
                progress.update(f"enqueuing {counts[READY]:,} of {sum(counts.values()):,} jobs")
            failure = _store(ready, lookup)
        if failure is None:
            return _result(looked_up, counts)
        # Some jobs may be stored: their tokens show which.
        after = _look_up(picked, lookup).persist()
        try:
            unstored = F.when(F.col("outcome") == READY, F.lit(failure)).otherwise(F.col("outcome"))
            now = after.withColumn("outcome", unstored)
            return _result(now, _counts(now), stored_before=counts.get(ALREADY, 0))
        finally:
            after.unpersist()
    finally:
        looked_up.unpersist()


def _look_up(picked: DataFrame, lookup: Lookup) -> DataFrame:
    # Through an RDD: Spark's batch functions of DataFrames all need pandas.
    rows = picked.select("queue", "job", "fence", "state", "fate", "undone").rdd.mapPartitions(lookup)
    found = picked.sparkSession.createDataFrame(rows, LOOKED_UP)
    can_be = F.col("outcome").isin(READY, ALREADY)
    # Only the newest lifecycle per job id can be replayed.
    newest = Window.partitionBy("target", "job", can_be).orderBy(F.col("fence").desc(), "queue")
    first = F.row_number().over(newest) == 1
    return found.withColumn("outcome", F.when(can_be & ~first, F.lit(NOT_NEWEST)).otherwise(F.col("outcome")))


def _store(ready: DataFrame, lookup: Lookup) -> str | None:
    """None, or the reason why some jobs were not stored."""
    jobs = ready.select(
        F.col("target").alias("queue"),
        F.col("job").alias("id"),
        "identifier",
        "type",
        "priority",
        "data",
        "token",
        *OWN_OPTIONS,
    )
    options = {"redis": lookup.redis, "prefix": lookup.prefix, "ifExists": "skip"}
    try:
        jobs.write.format("forq").mode("append").options(**options).save()
    except (PySparkException, Py4JJavaError) as exc:
        return f"it could not be enqueued: {_first_line(exc)}"
    return None


def _counts(looked_up: DataFrame) -> dict[str, int]:
    return {row.outcome: row["count"] for row in looked_up.groupBy("outcome").count().collect()}


def _result(looked_up: DataFrame, counts: dict[str, int], stored_before: int | None = None) -> ReplayResult:
    """`stored_before`: number of jobs that were replayed ALREADY before this replay, if `counts` are from after it."""
    reasons = {outcome: count for outcome, count in sorted(counts.items()) if outcome not in (READY, ALREADY)}
    listed = (
        looked_up.where(~F.col("outcome").isin(READY, ALREADY)).orderBy("outcome", "queue", "job").limit(MAX_LISTED)
    )
    rows = listed.select("queue", "job", "fence", "state", F.col("outcome").alias("reason")).collect()
    already = counts.get(ALREADY, 0)
    return ReplayResult(
        picked=sum(counts.values()),
        replayed=counts.get(READY, 0) if stored_before is None else already - stored_before,
        already=already if stored_before is None else stored_before,
        reasons=reasons,
        not_replayed=[NotReplayed(**row.asDict()) for row in rows],
    )


def _check_queues(lookup: Lookup) -> None:
    require_queues(lookup.redis, lookup.prefix)
    if lookup.to is None:
        return
    link = Link(lookup.redis, name="forq-replay")
    try:
        if lookup.to not in Registry(link, lookup.prefix).names():
            raise UnknownQueue(f"there is no queue {lookup.to!r}: `forqctl status` lists the queues")
    finally:
        link.close()


def _first_line(exc: Exception) -> str:
    """One line for an error raised by Spark: the message of forq's exception inside it, else Spark's first line."""
    if own := _FORQ_ERROR.search(str(exc)):
        return own[1].strip()
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return _CONDITION.sub("", lines[0]).partition(" SQLSTATE:")[0].rstrip() if lines else type(exc).__name__


def _show(result: ReplayResult, args: Namespace) -> None:
    if args.json:
        document = asdict(result) | {"dry_run": args.dry_run}
        document["not_listed"] = sum(result.reasons.values()) - len(result.not_replayed)
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
        return
    if not result.picked:
        print("no done, released or dead job matches")
        return
    print(f"{result.replayed:,} of {result.picked:,} {'could be replayed' if args.dry_run else 'replayed'}")
    if result.already:
        print(f"{result.already:,} were replayed before")
    for reason, count in result.reasons.items():
        print(f"{count:,} not replayed: {reason}")
        shown = [one for one in result.not_replayed if one.reason == reason][:_SHOWN_PER_REASON]
        for one in shown:
            print(f"    {one.queue}  {one.job}@{one.fence}")
        if count > len(shown):
            print(f"    and {count - len(shown):,} more")
