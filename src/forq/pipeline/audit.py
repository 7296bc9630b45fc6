"""forq pipeline audit: whether what the journal tells can have happened, and whether Redis holds what it says.

What is read, in this order, so that nothing falls in between while others ingest and trim: the state of Redis, then its
journal, then history. Exit code: 0 clean, 1 violations, 2 a gap, i.e. there are times of which nothing can be said.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from forq.broker.keys import main_queue
from forq.broker.link import Link
from forq.errors import RedisUnavailable, UnknownQueue, UsageError
from forq.pipeline.auditor import RULES, Audit, Auditor
from forq.pipeline.findings import GAP, Finding
from forq.pipeline.folder import Folder
from forq.pipeline.history import read_history
from forq.pipeline.reading import require_queues
from forq.pipeline.session import spark_session
from forq.pipeline.source import ForqSource
from forq.pipeline.standing import Standings, read_standings

# An audit works for longer than it takes to start: the better compiler pays, and so does room for what is kept.
_LONG_RUN = {"spark.driver.extraJavaOptions": "-XX:+UseParallelGC", "spark.driver.memory": "2g"}
_TRIES = 3
MAX_SHOWN = 100
MAX_EVENTS_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    progress = _Progress(sys.stderr.isatty() and not args.json)
    spark = spark_session("audit", **_LONG_RUN)
    audit, notes = _repeated(lambda: audit_all(spark, args.redis, args.prefix, args.history, progress))
    progress.end()
    print(json.dumps(_as_dict(audit, notes)) if args.json else "\n".join(_as_text(audit, notes)))
    return audit.exit_code


def _repeated(once: Callable[[], tuple[Audit, list[str]]]) -> tuple[Audit, list[str]]:
    """An ingest that compacts takes files away that an audit has yet to read; then it begins anew."""
    for _ in range(_TRIES - 1):
        try:
            return once()
        except PySparkException as exc:
            if "FILE_NOT_EXIST" not in str(exc):
                raise
    return once()


def audit_all(
    spark: SparkSession, url: str, prefix: str, directory: str, progress: Callable[[str], None] = lambda rule: None
) -> tuple[Audit, list[str]]:
    """The audit of a history and of what Redis has beyond it; and what it could not look at."""
    progress("Redis")
    notes: list[str] = []
    standings = _standings(url, prefix, notes)
    if standings is not None and not standings.queues:
        _require_deleted(spark, url, prefix, directory)
    live = None if standings is None else _live_events(spark, url, prefix, standings, directory)
    past = _history(spark, directory, notes)
    if live is None and past is None:
        raise UsageError(f"there is nothing to audit: no Redis at {Link(url).shown_url} and no history in {directory}")
    events = _joined(past, live)
    audit = Auditor(events, standings, limit=MAX_SHOWN, progress=progress).run()
    return _with_events(audit, events), notes


def _standings(url: str, prefix: str, notes: list[str]) -> Standings | None:
    link = Link(url, name="forq-audit")
    try:
        return read_standings(link, prefix)
    except RedisUnavailable as exc:
        notes.append(f"not compared with Redis: {exc}")
        return None
    finally:
        link.close()


def _require_deleted(spark: SparkSession, url: str, prefix: str, directory: str) -> None:
    """No queue has this prefix. If they were all deleted, their journals or the history tell so; else it is wrong, or
    Redis has lost them all."""
    try:
        require_queues(url, prefix)
    except UnknownQueue:
        if not Folder(spark, directory).exists("events"):
            raise
        last = F.max_by("verb", F.struct("epoch", "sequence", "position"))
        ends = read_history(spark, directory).groupBy("queue").agg(last.alias("verb")).collect()
        if any(row.verb != "deleted" for row in ends if main_queue(row.queue) == row.queue):
            raise


def _live_events(spark: SparkSession, url: str, prefix: str, standings: Standings, directory: str) -> DataFrame:
    """The journals that are in Redis, as they are now: what is trimmed later is in this frame all the same."""
    spark.dataSource.register(ForqSource)
    queues = {queue for _, queue in standings.queues} | _queues_of(spark, directory)
    # An entry that cannot be read is a hole, not an error.
    reader = spark.read.format("forq").option("redis", url).option("prefix", prefix).option("failOnLoss", "false")
    return reader.option("queues", ",".join(sorted(queues))).load().localCheckpoint()


def _queues_of(spark: SparkSession, directory: str) -> set[str]:
    """A queue that was deleted is in no register, but its journal may still have what history lacks."""
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
    """History, and what the journal has beyond it."""
    if past is None or live is None:
        rows = past if live is None else live
        assert rows is not None
        return rows
    # As numbers: in the query they would be looked up again by each rule.
    known = past.groupBy("queue", "epoch").agg(F.max("sequence")).collect()
    ends = past.sparkSession.createDataFrame(known, "queue string, epoch long, known long")
    beyond = live.join(F.broadcast(ends), ["queue", "epoch"], "left").where("sequence > coalesce(known, 0)")
    return past.unionByName(beyond.drop("known"))


def _with_events(audit: Audit, events: DataFrame) -> Audit:
    """The first findings with the events of their job, or of their entry."""
    shown = audit.findings[:MAX_SHOWN]
    jobs = {(found.queue, found.job) for found in shown if found.job is not None}
    entries = {(found.queue, found.epoch, found.sequence) for found in shown if found.job is None and found.sequence}
    told: dict[tuple[Any, ...], list[str]] = {}
    spark = events.sparkSession
    if jobs:
        wanted = spark.createDataFrame(sorted(jobs), "queue string, job string")
        for row in (
            events.join(F.broadcast(wanted), ["queue", "job"]).orderBy("epoch", "sequence", "position").collect()
        ):
            told.setdefault((row.queue, row.job), []).append(_event(row))
    if entries:
        wanted = spark.createDataFrame(sorted(entries), "queue string, epoch long, sequence long")
        for row in events.join(F.broadcast(wanted), ["queue", "epoch", "sequence"]).orderBy("position").collect():
            told.setdefault((row.queue, row.epoch, row.sequence), []).append(_event(row))
    for verdict in audit.verdicts:
        verdict.findings[:] = [replace(found, events=_about(found, told)) for found in verdict.findings]
    return audit


def _about(found: Finding, told: dict[tuple[Any, ...], list[str]]) -> list[str]:
    key = (found.queue, found.job) if found.job is not None else (found.queue, found.epoch, found.sequence)
    events = told.get(key, [])
    return events if len(events) <= MAX_EVENTS_SHOWN else [*events[: MAX_EVENTS_SHOWN - 1], f"… {len(events)} in all"]


def _event(row: Any) -> str:
    details = {
        "fence": row.fence or None,
        "attempt": row.attempt,
        "micros": row.micros,
        "cause": row.cause,
        "fail_job": row.fail_job,
        "due": row.due,
    }
    parts = [f"{name} {value}" for name, value in details.items() if value is not None]
    return " ".join(
        [row.time.isoformat(), f"{row.sequence}.{row.position}", row.verb, row.job or "", *parts, row.actor]
    )


def _as_dict(audit: Audit, notes: list[str]) -> dict[str, Any]:
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


def _as_text(audit: Audit, notes: list[str]) -> list[str]:
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
    said = ("clean", "there are violations", "no violation, but there are gaps: of these nothing can be said")
    return [*lines, f"{audit.events:,} events: {said[audit.exit_code]}"]


class _Progress:
    """What is being looked at, on a terminal."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    def __call__(self, rule: str) -> None:
        if self._shown:
            print(f"\r\x1b[Kaudit: {rule} …", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
