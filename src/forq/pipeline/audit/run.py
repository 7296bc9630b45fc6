"""`forq pipeline audit`: runs all rules and prints their findings.

It reads the state of Redis, then the journals, then the history. In this order no event is missed while others ingest
and trim. Exit code: 0 clean, 1 violations, 2 a gap: data is missing and could not be checked.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from forq.broker.keys import main_queue
from forq.broker.link import Link
from forq.errors import RedisUnavailable, UnknownQueue, UsageError
from forq.pipeline.audit import balance, batches, chain, dependencies, own_options, transitions
from forq.pipeline.audit.findings import GAP, VIOLATION, Finding, Verdict, to_finding
from forq.pipeline.audit.redis_state import RedisState, locations_table, read_redis_state
from forq.pipeline.audit.transitions import steps_of
from forq.pipeline.history import Folder, read_history
from forq.pipeline.reader import require_queues
from forq.pipeline.session import spark_session
from forq.pipeline.source import ForqSource
from forq.progress_line import ProgressLine

CLEAN, VIOLATIONS, GAPS = 0, 1, 2
# Findings listed per rule and in all; the others are only counted.
MAX_SHOWN = 100
MAX_EVENTS_SHOWN = 20
RULES = {
    "chain": "sequence, hash and time of every entry follow from the entry before",
    "rows": "the rows of every entry match its text",
    "paths": "the events of every job follow the state table",
    "conservation": "jobs added = jobs ended + jobs present, and Redis holds the present ones",
    "overlap": "no two runs of the same job id overlap",
    "fail_jobs": "every permanent failure of a queue with a fail handler has its fail job",
    "states": "no record is lost, and no job is in two states",
    "dependencies": "held jobs become ready, or dead, when the jobs for which they wait have ended, and not before",
    "batches": "a batch ends once, and its callbacks become ready after that",
    "options": "no job starts after its own expiry, or in the main lane after its own max_retries",
}
# Most of an audit is not startup: the optimizing compiler pays off, and so does memory for the cached frames.
_LONG_RUN = {"spark.driver.extraJavaOptions": "-XX:+UseParallelGC", "spark.driver.memory": "2g"}
_TRIES = 3


@dataclass(frozen=True, slots=True)
class AuditResult:
    verdicts: list[Verdict]
    events: int
    compared_with_redis: bool

    @property
    def exit_code(self) -> int:
        if any(verdict.violations for verdict in self.verdicts):
            return VIOLATIONS
        return GAPS if any(verdict.gaps for verdict in self.verdicts) else CLEAN

    @property
    def findings(self) -> list[Finding]:
        return [finding for verdict in self.verdicts for finding in verdict.findings]


class Auditor:
    """Runs all rules over event rows and the state of Redis. DataFrames used by several rules are cached until the end.

    Rows may have a column `history`: each of its numbers is audited separately, in the same Spark jobs.
    """

    def __init__(
        self,
        events: DataFrame,
        redis_state: RedisState | None,
        *,
        limit: int = MAX_SHOWN,
        progress: Callable[[str], None] = lambda rule: None,
    ) -> None:
        self._spark = events.sparkSession
        self._redis_state = redis_state
        self._limit = limit
        self._progress = progress
        self._cached: list[DataFrame] = []
        self._verdicts = {rule: Verdict(rule) for rule in RULES}
        self._rows = _with_micros(events) if redis_state is None else _up_to_cutoff(_with_micros(events), redis_state)

    def run(self) -> AuditResult:
        try:
            self._check_chain()
            self._check_rows()
            self._check_transitions()
            self._check_overlap()
            self._check_balance()
            self._check_dependencies()
            self._check_options()
        finally:
            for frame in self._cached:
                frame.unpersist()
        return AuditResult(list(self._verdicts.values()), self._verdicts["rows"].checked, self._redis_state is not None)

    def _check_chain(self) -> None:
        with self._timed("chain"):
            entries = self._cache(chain.entries_of(self._rows))
            self._epochs = chain.epochs_of(entries)
            self._holes = chain.holes_of(entries)
            self._add_frame(chain.chain_findings(entries))
            self._add_findings(balance.end_findings(self._epochs, self._holes, self._redis_state))
            self._verdicts["chain"].checked = sum(epoch.entries for epoch in self._epochs)

    def _check_rows(self) -> None:
        with self._timed("rows"):
            self._add_frame(chain.row_findings(self._rows))
            self._verdicts["rows"].checked = self._rows.count()

    def _check_transitions(self) -> None:
        with self._timed("paths"):
            self._steps = steps_of(self._rows, self._epochs, self._holes)
            self._lives = self._cache(transitions.transitions_of(self._steps))
            self._archive = self._cache(transitions.archive_of(self._steps))
            self._add_frame(transitions.path_findings(self._lives))
            self._add_frame(transitions.fence_findings(self._lives))
            self._verdicts["paths"].checked = self._lives.count()
            self._verdicts["states"].checked = self._verdicts["paths"].checked
        with self._timed("fail_jobs"):
            self._add_frame(transitions.archive_findings(self._archive))
            deaths = F.count_if((F.col("step") == "dead") & F.col("fail_job"))
            self._verdicts["fail_jobs"].checked = self._archive.select(deaths).collect()[0][0]

    def _check_overlap(self) -> None:
        with self._timed("overlap"):
            runs = transitions.runs_of(self._lives)
            self._add_frame(transitions.overlap_findings(runs))
            self._verdicts["overlap"].checked = runs.count()

    def _check_balance(self) -> None:
        with self._timed("conservation"):
            sums = balance.sums_of(self._lives, self._archive)
            fail_jobs = balance.fail_jobs_at_deletion(self._lives, self._epochs)
            found = balance.balance_findings(sums, fail_jobs, self._epochs, self._holes, self._redis_state)
            self._add_findings(found)
            self._verdicts["conservation"].checked = len(sums)
        if self._redis_state is not None:
            with self._timed("states"):
                # Without the checkpoint every query plan would copy the rows.
                locations = self._spark.createDataFrame(locations_table(self._redis_state.locations)).localCheckpoint()
                held = (locations, self._epochs, self._holes, self._redis_state)
                self._add_frame(balance.location_findings(self._lives, self._archive, *held))
                self._verdicts["states"].checked += len(self._redis_state.locations)

    def _check_dependencies(self) -> None:
        with self._timed("dependencies"):
            # Most histories have none; the rest would read the whole history again.
            checked = self._lives.where("step = 'held'").count()
            self._verdicts["dependencies"].checked = checked
            if not checked:
                return
            held = self._cache(dependencies.steps_of_held(self._steps))
            bound = dependencies.bound_dependencies(held, self._steps)
            decided = self._cache(dependencies.decisions(held, bound))
            self._add_frame(dependencies.held_findings(held))
            ends = (self._epochs, self._holes, self._redis_state)
            self._add_frame(dependencies.dependency_findings(decided, *ends))
            self._check_batches(held)

    def _check_batches(self, held: DataFrame) -> None:
        """Of batches with callbacks: these are held jobs."""
        steps = self._cache(batches.batch_steps(self._rows, held, self._holes))
        self._verdicts["batches"].checked = steps.where("step = 'batch_opened'").count()
        if self._verdicts["batches"].checked:
            self._add_frame(batches.batch_findings(steps))

    def _check_options(self) -> None:
        with self._timed("options"):
            # Most histories have none; the rest would read the whole history again.
            checked = self._lives.where("step = 'options'").count()
            self._verdicts["options"].checked = checked
            if not checked:
                return
            steps = self._cache(own_options.steps_with_options(self._steps))
            self._add_frame(own_options.option_findings(steps))
            claims = own_options.claims_beyond_max_retries(steps)
            if not claims.isEmpty():
                self._add_frame(own_options.retry_findings(claims, self._steps))

    @contextmanager
    def _timed(self, rule: str) -> Iterator[None]:
        self._progress(rule)
        began = time.monotonic()
        yield
        self._verdicts[rule].seconds += time.monotonic() - began

    def _cache(self, frame: DataFrame) -> DataFrame:
        kept = frame.persist(StorageLevel.MEMORY_AND_DISK)
        self._cached.append(kept)
        return kept

    def _add_frame(self, found: DataFrame) -> None:
        """Usually there are few findings. If there are many, counts all and lists the first of each rule."""
        rows = found.limit(self._limit + 1).collect()
        if len(rows) <= self._limit:
            return self._add_findings(sorted(map(to_finding, rows), key=_order))
        kept = self._cache(found)
        for rule, kind, number in kept.groupBy("rule", "kind").count().collect():
            self._count(rule, kind, number)
            room = self._limit - len(self._verdicts[rule].findings)
            of_rule = kept.where((F.col("rule") == rule) & (F.col("kind") == kind))
            first = of_rule.orderBy("history", "queue", "epoch", "sequence", "job", "found").limit(max(0, room))
            self._verdicts[rule].findings += [to_finding(row) for row in first.collect()]
        return None

    def _add_findings(self, found: list[Finding]) -> None:
        for finding in found:
            self._count(finding.rule, finding.kind, 1)
            if len(self._verdicts[finding.rule].findings) < self._limit:
                self._verdicts[finding.rule].findings.append(finding)

    def _count(self, rule: str, kind: str, number: int) -> None:
        self._verdicts[rule].violations += number if kind == VIOLATION else 0
        self._verdicts[rule].gaps += number if kind == GAP else 0


def _order(finding: Finding) -> tuple[object, ...]:
    return finding.history, finding.queue, finding.epoch, finding.sequence or 0, finding.job or "", finding.found


def _with_micros(events: DataFrame) -> DataFrame:
    """Times as numbers, as they are in the hashed text."""
    rows = events if "history" in events.columns else events.withColumn("history", F.lit(0))
    return rows.withColumn("time", F.unix_micros("time")).withColumn("due", F.unix_micros("due"))


def _up_to_cutoff(rows: DataFrame, redis_state: RedisState) -> DataFrame:
    """Leaves out events written after the state of their queue was read."""
    cutoffs = F.broadcast(
        rows.sparkSession.createDataFrame(
            redis_state.cutoffs(), "history int, queue string, now_epoch long, now_sequence long, moment long"
        )
    )
    counted = (F.col("epoch") == F.col("now_epoch")) & (F.col("sequence") <= F.col("now_sequence"))
    earlier = F.col("time") < F.coalesce("moment", F.lit(redis_state.started_us))
    return (
        rows.join(cutoffs, ["history", "queue"], "left")
        .where(earlier | F.coalesce(counted, F.lit(False)))
        .drop("now_epoch", "now_sequence", "moment")
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    progress = ProgressLine()
    spark = spark_session("audit", **_LONG_RUN)

    def show(rule: str) -> None:
        if not args.json:
            progress.update(f"audit: {rule} …")

    audit, notes = _retry_after_compaction(lambda: audit_all(spark, args.redis, args.prefix, args.history, show))
    progress.clear()
    print(json.dumps(_as_dict(audit, notes)) if args.json else "\n".join(_as_text(audit, notes)))
    return audit.exit_code


def _retry_after_compaction(once: Callable[[], tuple[AuditResult, list[str]]]) -> tuple[AuditResult, list[str]]:
    """Starts again if a compaction deleted files that the audit was still reading."""
    for _ in range(_TRIES - 1):
        try:
            return once()
        except PySparkException as exc:
            if "FILE_NOT_EXIST" not in str(exc):
                raise
    return once()


def audit_all(
    spark: SparkSession, url: str, prefix: str, directory: str, progress: Callable[[str], None] = lambda rule: None
) -> tuple[AuditResult, list[str]]:
    """Audits the history and the newer events in Redis. The second value lists what could not be audited."""
    progress("Redis")
    notes: list[str] = []
    redis_state = _redis_state(url, prefix, notes)
    if redis_state is not None and not redis_state.queues:
        _require_deleted(spark, url, prefix, directory)
    live = None if redis_state is None else _live_events(spark, url, prefix, redis_state, directory)
    past = _history(spark, directory, notes)
    if live is None and past is None:
        raise UsageError(
            f"nothing to audit: cannot reach Redis at {Link(url).shown_url}, and there is no history in {directory}; "
            "give --redis or --history"
        )
    events = _joined(past, live)
    audit = Auditor(events, redis_state, limit=MAX_SHOWN, progress=progress).run()
    return _with_events(audit, events), notes


def _redis_state(url: str, prefix: str, notes: list[str]) -> RedisState | None:
    link = Link(url, name="forq-audit")
    try:
        return read_redis_state(link, prefix)
    except RedisUnavailable as exc:
        notes.append(f"not compared with Redis: {exc}")
        return None
    finally:
        link.close()


def _require_deleted(spark: SparkSession, url: str, prefix: str, directory: str) -> None:
    """Refuses a prefix without queues, unless the journals or the history show that all were deleted. Otherwise the
    prefix is wrong, or Redis lost all queues."""
    try:
        require_queues(url, prefix)
    except UnknownQueue:
        if not Folder(spark, directory).exists("events"):
            raise
        last = F.max_by("verb", F.struct("epoch", "sequence", "position"))
        ends = read_history(spark, directory).groupBy("queue").agg(last.alias("verb")).collect()
        if any(row.verb != "deleted" for row in ends if main_queue(row.queue) == row.queue):
            raise


def _live_events(spark: SparkSession, url: str, prefix: str, redis_state: RedisState, directory: str) -> DataFrame:
    """The journals as they are now: entries trimmed later stay in this DataFrame."""
    spark.dataSource.register(ForqSource)
    queues = {queue for _, queue in redis_state.queues} | _queues_of(spark, directory)
    # An unreadable entry becomes a hole, not an error.
    reader = spark.read.format("forq").option("redis", url).option("prefix", prefix).option("failOnLoss", "false")
    return reader.option("queues", ",".join(sorted(queues))).load().localCheckpoint()


def _queues_of(spark: SparkSession, directory: str) -> set[str]:
    """The journal of a deleted queue may still have events that the history lacks."""
    if not Folder(spark, directory).exists("events"):
        return set()
    names = {row.queue for row in read_history(spark, directory).select("queue").distinct().collect()}
    return names | {main_queue(name) for name in names}


def _history(spark: SparkSession, directory: str, notes: list[str]) -> DataFrame | None:
    if Folder(spark, directory).exists("events"):
        return read_history(spark, directory)
    notes.append(f"there is no history in {directory}")
    return None


def _joined(past: DataFrame | None, live: DataFrame | None) -> DataFrame:
    """The history and the newer events of the journals."""
    if past is None or live is None:
        rows = past if live is None else live
        assert rows is not None
        return rows
    # Collected: as a subquery it would be evaluated again by each rule.
    known = past.groupBy("queue", "epoch").agg(F.max("sequence")).collect()
    ends = past.sparkSession.createDataFrame(known, "queue string, epoch long, known long")
    beyond = live.join(F.broadcast(ends), ["queue", "epoch"], "left").where("sequence > coalesce(known, 0)")
    return past.unionByName(beyond.drop("known"))


def _with_events(audit: AuditResult, events: DataFrame) -> AuditResult:
    """Adds to the first findings the events of their job or entry."""
    shown = audit.findings[:MAX_SHOWN]
    jobs = {(found.queue, found.job) for found in shown if found.job is not None}
    entries = {(found.queue, found.epoch, found.sequence) for found in shown if found.job is None and found.sequence}
    shown_events: dict[tuple[Any, ...], list[str]] = {}
    spark = events.sparkSession
    if jobs:
        wanted = spark.createDataFrame(sorted(jobs), "queue string, job string")
        for row in (
            events.join(F.broadcast(wanted), ["queue", "job"]).orderBy("epoch", "sequence", "position").collect()
        ):
            shown_events.setdefault((row.queue, row.job), []).append(_event(row))
    if entries:
        wanted = spark.createDataFrame(sorted(entries), "queue string, epoch long, sequence long")
        for row in events.join(F.broadcast(wanted), ["queue", "epoch", "sequence"]).orderBy("position").collect():
            shown_events.setdefault((row.queue, row.epoch, row.sequence), []).append(_event(row))
    for verdict in audit.verdicts:
        verdict.findings[:] = [replace(found, events=_events_of(found, shown_events)) for found in verdict.findings]
    return audit


def _events_of(found: Finding, shown_events: dict[tuple[Any, ...], list[str]]) -> list[str]:
    key = (found.queue, found.job) if found.job is not None else (found.queue, found.epoch, found.sequence)
    events = shown_events.get(key, [])
    return events if len(events) <= MAX_EVENTS_SHOWN else [*events[: MAX_EVENTS_SHOWN - 1], f"… {len(events)} in all"]


def _event(row: Any) -> str:
    about = row.cause or ""
    # The verb names this value already.
    told = {"options": own_options.show_options, "held": dependencies.show_hold, "unmet": dependencies.show_unmet}
    details = {
        "fence": row.fence or None,
        "attempt": row.attempt,
        "micros": row.micros,
        "cause": None if row.verb in told else row.cause,
        "": told[row.verb](about) if row.verb in told else None,
        "fail_job": row.fail_job,
        "due": row.due,
    }
    parts = [f"{name} {value}".lstrip() for name, value in details.items() if value is not None]
    return " ".join(
        [row.time.isoformat(), f"{row.sequence}.{row.position}", row.verb, row.job or "", *parts, row.actor]
    )


def _as_dict(audit: AuditResult, notes: list[str]) -> dict[str, Any]:
    return {
        "result": ("clean", "violations", "gap")[audit.exit_code],
        "events": audit.events,
        "compared_with_redis": audit.compared_with_redis,
        "notes": notes,
        "rules": [
            {
                "rule": verdict.rule,
                "says": RULES[verdict.rule],
                "checked": verdict.checked,
                "violations": verdict.violations,
                "gaps": verdict.gaps,
                "seconds": round(verdict.seconds, 2),
            }
            for verdict in audit.verdicts
        ],
        "findings": [found.as_dict() for found in audit.findings[:MAX_SHOWN]],
    }


def _as_text(audit: AuditResult, notes: list[str]) -> list[str]:
    lines = [f"{'rule':<14}{'checked':>12}{'violations':>12}{'gaps':>8}{'seconds':>9}"]
    lines += [f"{v.rule:<14}{v.checked:>12,}{v.violations:>12,}{v.gaps:>8,}{v.seconds:>9.1f}" for v in audit.verdicts]
    for found in audit.findings[:MAX_SHOWN]:
        job = f" job {found.job}" if found.job is not None else ""
        gap = "gap, " if found.kind == GAP else ""
        lines += ["", f"{gap}{found.rule}: queue {found.queue}{job}: {found.found}"]
        lines += [f"    {event}" for event in found.events]
    total = sum(verdict.violations + verdict.gaps for verdict in audit.verdicts)
    shown = min(MAX_SHOWN, len(audit.findings))
    lines += [""] + ([f"{total - shown:,} more are not shown"] if total > shown else [])
    lines += notes
    result = ("clean", "violations found", "no violations, but gaps: missing data could not be checked")
    return [*lines, f"{audit.events:,} events: {result[audit.exit_code]}"]
