"""forq pipeline replay: dead jobs, picked out of the history by a predicate, are enqueued again.

1. The predicate is about lives of jobs (replay_lives.py). Picked are those that are done, released or dead.
2. Each is looked up (replay_look.py): the journal has no data, a dead job's record has.
3. What is ready goes through the sink with a token made of queue, id and fence: a replay that was cut off may be made
   again, and while the queue remembers tokens (dedup_ttl) nothing is enqueued twice.
The dead jobs themselves stay where they are.
"""

import logging
import re
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass

import orjson
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.errors import ForqError, UnknownQueue, UsageError
from forq.paths import redis_url
from forq.pipeline.history import read_history, require_history
from forq.pipeline.reading import require_queues
from forq.pipeline.replay_lives import job_lives
from forq.pipeline.replay_look import ALREADY, LOOKED, READY, Look
from forq.pipeline.session import spark_session
from forq.progress_line import ProgressLine
from forq.values import check_queue_name

MAX_LISTED = 10_000
_SHOWN_PER_REASON = 10
NOT_NEWEST = "another life of its id is replayed"
_SENTENCE = re.compile(r"forq\.errors\.\w+: (.*)")
_CONDITION = re.compile(r"^\[[A-Z0-9_.]+\]\s*")


@dataclass(frozen=True, slots=True)
class NotReplayed:
    queue: str
    job: str
    fence: int
    state: str
    reason: str


@dataclass(slots=True)
class Replay:
    """What became of those that were picked. `replayed` of a dry run: that could be."""

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
        help="which jobs, over queue, job, state (done, released, dead), fate, enqueued_at, ended_at, attempts, "
        "cause, micros, fence, epoch: \"queue = 'emails' and ended_at >= '2026-11-16'\"",
    )
    parser.add_argument("--to", metavar="QUEUE", help="enqueue there (default: each in its own queue)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be replayed, and change nothing")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(args: Namespace) -> int:
    look = Look(args.redis or redis_url(), args.prefix, args.to and check_queue_name(args.to))
    _check_queues(look)
    # Spark logs a wrong predicate at length before it raises; here the sentence is enough.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    progress = ProgressLine()
    progress.say("starting Spark")
    spark = spark_session("replay")
    progress.say(f"reading {args.history}")
    require_history(spark, args.history)
    events = read_history(spark, args.history)
    # For a predicate that looks at single events, or at other jobs.
    events.createOrReplaceTempView("events")
    lives = job_lives(spark, events)
    lives.createOrReplaceTempView("jobs")
    # What fails is told once, below, and not by every task with its stack.
    spark.sparkContext.setLogLevel("OFF")
    try:
        result = replay(pick(lives, args.where), look, dry_run=args.dry_run, progress=progress)
    finally:
        spark.sparkContext.setLogLevel("ERROR")
        progress.clear()
    _show(result, args)
    return 1 if result.reasons else 0


def pick(lives: DataFrame, where: str) -> DataFrame:
    """The lives that have ended in a way that can be replayed, and that the predicate is true of."""
    ended = lives.where("state in ('done', 'released', 'dead')")
    try:
        return ended.where(where)
    except PySparkException as exc:
        raise UsageError(f"--where cannot be used: {_sentence(exc)}") from exc


def replay(picked: DataFrame, look: Look, *, dry_run: bool, progress: ProgressLine | None = None) -> Replay:
    try:
        looked = _look(picked, look).persist()
        counts = _counts(looked)
    except (PySparkException, Py4JJavaError) as exc:
        # Nothing was written yet: what failed is the look at Redis, or else the predicate on some row.
        kind = ForqError if _SENTENCE.search(str(exc)) else UsageError
        raise kind(f"the jobs cannot be picked: {_sentence(exc)}") from exc
    try:
        ready = looked.where(F.col("outcome") == READY)
        failure = None
        if not dry_run and counts.get(READY):
            if progress:
                progress.say(f"{counts[READY]:,} of {sum(counts.values()):,} are enqueued")
            failure = _store(ready, look)
        if failure is None:
            return _result(looked, counts)
        # Some may be stored: their tokens tell.
        after = _look(picked, look).persist()
        try:
            unstored = F.when(F.col("outcome") == READY, F.lit(failure)).otherwise(F.col("outcome"))
            now = after.withColumn("outcome", unstored)
            return _result(now, _counts(now), stored_before=counts.get(ALREADY, 0))
        finally:
            after.unpersist()
    finally:
        looked.unpersist()


def _look(picked: DataFrame, look: Look) -> DataFrame:
    # By way of an RDD: Spark's functions over batches of a DataFrame all want pandas.
    rows = picked.select("queue", "job", "fence", "state", "fate").rdd.mapPartitions(look)
    found = picked.sparkSession.createDataFrame(rows, LOOKED)
    can_be = F.col("outcome").isin(READY, ALREADY)
    # One life per id: with the second one the first would be overwritten, or the second left out.
    newest = Window.partitionBy("target", "job", can_be).orderBy(F.col("fence").desc(), "queue")
    first = F.row_number().over(newest) == 1
    return found.withColumn("outcome", F.when(can_be & ~first, F.lit(NOT_NEWEST)).otherwise(F.col("outcome")))


def _store(ready: DataFrame, look: Look) -> str | None:
    """Why not all of it was stored; None if all was."""
    jobs = ready.select(
        F.col("target").alias("queue"), F.col("job").alias("id"), "identifier", "type", "priority", "data", "token"
    )
    options = {"redis": look.redis, "prefix": look.prefix, "ifExists": "skip"}
    try:
        jobs.write.format("forq").mode("append").options(**options).save()
    except (PySparkException, Py4JJavaError) as exc:
        return f"it could not be enqueued: {_sentence(exc)}"
    return None


def _counts(looked: DataFrame) -> dict[str, int]:
    return {row.outcome: row["count"] for row in looked.groupBy("outcome").count().collect()}


def _result(looked: DataFrame, counts: dict[str, int], stored_before: int | None = None) -> Replay:
    """`stored_before`: the counts are of a look after the jobs were stored, when so many had been there before."""
    reasons = {outcome: count for outcome, count in sorted(counts.items()) if outcome not in (READY, ALREADY)}
    listed = looked.where(~F.col("outcome").isin(READY, ALREADY)).orderBy("outcome", "queue", "job").limit(MAX_LISTED)
    rows = listed.select("queue", "job", "fence", "state", F.col("outcome").alias("reason")).collect()
    already = counts.get(ALREADY, 0)
    return Replay(
        picked=sum(counts.values()),
        replayed=counts.get(READY, 0) if stored_before is None else already - stored_before,
        already=already if stored_before is None else stored_before,
        reasons=reasons,
        not_replayed=[NotReplayed(**row.asDict()) for row in rows],
    )


def _check_queues(look: Look) -> None:
    require_queues(look.redis, look.prefix)
    if look.to is None:
        return
    link = Link(look.redis, name="forq-replay")
    try:
        if look.to not in Registry(link, look.prefix).names():
            raise UnknownQueue(f"there is no queue {look.to!r}")
    finally:
        link.close()


def _sentence(exc: Exception) -> str:
    """What Spark has to say in one line: forq's own words if it passes them on, else the first of its own."""
    if own := _SENTENCE.search(str(exc)):
        return own[1].strip()
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return _CONDITION.sub("", lines[0]).partition(" SQLSTATE:")[0].rstrip() if lines else type(exc).__name__


def _show(result: Replay, args: Namespace) -> None:
    if args.json:
        document = asdict(result) | {"dry_run": args.dry_run}
        document["not_listed"] = sum(result.reasons.values()) - len(result.not_replayed)
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
        return
    if not result.picked:
        print("no job that is done, released or dead matches")
        return
    print(f"{result.replayed:,} of {result.picked:,} {'could be replayed' if args.dry_run else 'replayed'}")
    if result.already:
        print(f"{result.already:,} had been replayed before")
    for reason, count in result.reasons.items():
        print(f"{count:,} not replayed: {reason}")
        shown = [one for one in result.not_replayed if one.reason == reason][:_SHOWN_PER_REASON]
        for one in shown:
            print(f"    {one.queue}  {one.job}@{one.fence}")
        if count > len(shown):
            print(f"    and {count - len(shown):,} more")
