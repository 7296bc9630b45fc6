"""Findings of the audit: violations of a rule, and gaps, where data is missing and nothing can be checked."""

from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

VIOLATION, GAP = "violation", "gap"

# Columns of every DataFrame of findings.
COLUMNS = ("history", "rule", "kind", "queue", "epoch", "sequence", "job", "found")


@dataclass(frozen=True, slots=True)
class Finding:
    history: int
    rule: str
    kind: str
    queue: str
    epoch: int
    sequence: int | None
    job: str | None
    found: str
    # Events of the job, or of the entry if there is no job. Only the first findings have them.
    events: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "history"}


@dataclass(slots=True)
class Verdict:
    """The result of one rule. `findings` has the first ones, `violations` and `gaps` count all."""

    rule: str
    checked: int = 0
    violations: int = 0
    gaps: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


# A condition that must not hold, and the text of its finding.
Check = tuple[Column, Column]


def findings_where(frame: DataFrame, rule: str | Column, checks: list[Check]) -> DataFrame:
    """One finding per row and check whose condition holds. Other rows are filtered before any text is built."""
    wrong = frame.where(reduce(Column.__or__, (F.coalesce(condition, F.lit(False)) for condition, _ in checks)))
    found = F.array_compact(F.array(*(F.when(condition, message) for condition, message in checks)))
    return wrong.select(
        "history",
        (F.lit(rule) if isinstance(rule, str) else rule).alias("rule"),
        F.lit(VIOLATION).alias("kind"),
        "queue",
        "epoch",
        "sequence",
        "job",
        F.explode(found).alias("found"),
    )


def text(*parts: str | Column) -> Column:
    """Concatenates constants and values; never null."""
    columns = [F.lit(part) if isinstance(part, str) else part.cast("string") for part in parts]
    return F.concat(*(F.coalesce(column, F.lit("nothing")) for column in columns))


def union(frames: list[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionAll, frames)


def to_finding(row: Row) -> Finding:
    return Finding(*(row[column] for column in COLUMNS))
