"""The rules, run one after the other over event rows and the state of Redis.

Rows may have a column `history`: each number is then audited for itself, as if it were alone. So many histories can be
audited in one run of Spark.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from forq.pipeline import balance, chain, lives
from forq.pipeline.findings import GAP, VIOLATION, Finding, Verdict, as_finding
from forq.pipeline.standing import Standings, places_table
from forq.pipeline.steps import steps_of

CLEAN, VIOLATIONS, GAPS = 0, 1, 2
# Findings per rule that are told; the others are counted.
MAX_TOLD = 100
# Name of each rule -> what it says, as the audit shows it.
RULES = {
    "chain": "sequence, hash and time of every entry follow from the one before",
    "rows": "the rows of every entry are what its text says",
    "paths": "every job's events are a path of the state table",
    "conservation": "born = ended + still there, and Redis holds what is still there",
    "overlap": "no two runs of one id overlap",
    "fail_jobs": "every permanent failure of a queue with a fail handler has its fail job",
    "states": "no record was lost, and nothing is in two states",
}


@dataclass(frozen=True, slots=True)
class Audit:
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
    """One audit. Frames that several rules look at are kept until its end."""

    def __init__(
        self,
        events: DataFrame,
        standings: Standings | None,
        *,
        limit: int = MAX_TOLD,
        progress: Callable[[str], None] = lambda rule: None,
    ) -> None:
        self._spark = events.sparkSession
        self._standings = standings
        self._limit = limit
        self._progress = progress
        self._kept: list[DataFrame] = []
        self._verdicts = {rule: Verdict(rule) for rule in RULES}
        self._rows = _in_micros(events) if standings is None else _up_to_now(_in_micros(events), standings)

    def run(self) -> Audit:
        try:
            self._check_chain()
            self._check_rows()
            self._check_lives()
            self._check_overlap()
            self._check_balance()
        finally:
            for frame in self._kept:
                frame.unpersist()
        return Audit(list(self._verdicts.values()), self._verdicts["rows"].checked, self._standings is not None)

    def _check_chain(self) -> None:
        with self._timed("chain"):
            entries = self._keep(chain.entries_of(self._rows))
            self._epochs = chain.epochs_of(entries)
            self._holes = chain.holes_of(entries)
            self._add(chain.chain_findings(entries))
            self._add_told(balance.end_findings(self._epochs, self._holes, self._standings))
            self._verdicts["chain"].checked = sum(epoch.entries for epoch in self._epochs)

    def _check_rows(self) -> None:
        with self._timed("rows"):
            self._add(chain.row_findings(self._rows))
            self._verdicts["rows"].checked = self._rows.count()

    def _check_lives(self) -> None:
        with self._timed("paths"):
            steps = steps_of(self._rows, self._epochs, self._holes)
            self._lives = self._keep(lives.lives_of(steps))
            self._archive = self._keep(lives.archive_of(steps))
            self._add(lives.path_findings(self._lives))
            self._add(lives.fence_findings(self._lives))
            self._verdicts["paths"].checked = self._lives.count()
            self._verdicts["states"].checked = self._verdicts["paths"].checked
        with self._timed("fail_jobs"):
            self._add(lives.archive_findings(self._archive))
            deaths = F.count_if((F.col("step") == "dead") & F.col("fail_job"))
            self._verdicts["fail_jobs"].checked = self._archive.select(deaths).collect()[0][0]

    def _check_overlap(self) -> None:
        with self._timed("overlap"):
            runs = lives.runs_of(self._lives)
            self._add(lives.overlap_findings(runs))
            self._verdicts["overlap"].checked = runs.count()

    def _check_balance(self) -> None:
        with self._timed("conservation"):
            sums = balance.sums_of(self._lives, self._archive)
            fail_jobs = balance.fail_jobs_at_deletion(self._lives, self._epochs)
            found = balance.balance_findings(sums, fail_jobs, self._epochs, self._holes, self._standings)
            self._add_told(found)
            self._verdicts["conservation"].checked = len(sums)
        if self._standings is not None:
            with self._timed("states"):
                # Else every plan would copy them.
                places = self._spark.createDataFrame(places_table(self._standings.places)).localCheckpoint()
                held = (places, self._epochs, self._holes, self._standings)
                self._add(balance.place_findings(self._lives, self._archive, *held))
                self._verdicts["states"].checked += len(self._standings.places)

    @contextmanager
    def _timed(self, rule: str) -> Iterator[None]:
        self._progress(rule)
        began = time.monotonic()
        yield
        self._verdicts[rule].seconds += time.monotonic() - began

    def _keep(self, frame: DataFrame) -> DataFrame:
        kept = frame.persist(StorageLevel.MEMORY_AND_DISK)
        self._kept.append(kept)
        return kept

    def _add(self, found: DataFrame) -> None:
        """Usually there is nothing, or little. Else all are counted, and the first of each rule are told."""
        rows = found.limit(self._limit + 1).collect()
        if len(rows) <= self._limit:
            return self._add_told(sorted(map(as_finding, rows), key=_order))
        kept = self._keep(found)
        for rule, kind, number in kept.groupBy("rule", "kind").count().collect():
            self._count(rule, kind, number)
            room = self._limit - len(self._verdicts[rule].findings)
            of_rule = kept.where((F.col("rule") == rule) & (F.col("kind") == kind))
            first = of_rule.orderBy("history", "queue", "epoch", "sequence", "job", "found").limit(max(0, room))
            self._verdicts[rule].findings += [as_finding(row) for row in first.collect()]
        return None

    def _add_told(self, found: list[Finding]) -> None:
        for finding in found:
            self._count(finding.rule, finding.kind, 1)
            if len(self._verdicts[finding.rule].findings) < self._limit:
                self._verdicts[finding.rule].findings.append(finding)

    def _count(self, rule: str, kind: str, number: int) -> None:
        self._verdicts[rule].violations += number if kind == VIOLATION else 0
        self._verdicts[rule].gaps += number if kind == GAP else 0


def _order(finding: Finding) -> tuple[object, ...]:
    return finding.history, finding.queue, finding.epoch, finding.sequence or 0, finding.job or "", finding.found


def _in_micros(events: DataFrame) -> DataFrame:
    """Times as numbers: the journal's hash, and Python, see them so."""
    rows = events if "history" in events.columns else events.withColumn("history", F.lit(0))
    return rows.withColumn("time", F.unix_micros("time")).withColumn("due", F.unix_micros("due"))


def _up_to_now(rows: DataFrame, standings: Standings) -> DataFrame:
    """Without what was written after its queue was counted."""
    moments = F.broadcast(
        rows.sparkSession.createDataFrame(
            standings.moments(), "history int, queue string, now_epoch long, now_sequence long, moment long"
        )
    )
    counted = (F.col("epoch") == F.col("now_epoch")) & (F.col("sequence") <= F.col("now_sequence"))
    earlier = F.col("time") < F.coalesce("moment", F.lit(standings.asked_us))
    return (
        rows.join(moments, ["history", "queue"], "left")
        .where(earlier | F.coalesce(counted, F.lit(False)))
        .drop("now_epoch", "now_sequence", "moment")
    )
