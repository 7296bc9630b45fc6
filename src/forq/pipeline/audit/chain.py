"""Rules `chain` and `rows`: the entries of each queue form a chain of hashes, and their rows match their text.

1. `chain_findings`: sequence numbers are unique, hashes match, time never goes back, `created` first, `deleted` last.
2. `row_findings`: decodes the text of every entry again and compares it with its rows, column by column.
3. `epochs_of`, `holes_of`: first and last entry of each queue, and the missing ones in between.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import ArrowUDFType, arrow_udf

from forq.broker.journal import Entry, pack_entry, read_entry
from forq.errors import InvalidData
from forq.pipeline.audit.findings import VIOLATION, findings_where, text
from forq.pipeline.format import EVENTS

_EPOCH = ("history", "queue", "epoch")
_ENTRY = (*_EPOCH, "sequence")
# The columns after queue, epoch and sequence, in the order of format.py and broker/journal.py.
_KEY_WIDTH = 3
_COMPARED = tuple(EVENTS.fieldNames()[_KEY_WIDTH:])


@dataclass(frozen=True, slots=True)
class Epoch:
    """The entries of one epoch of a queue."""

    history: int
    queue: str
    epoch: int
    entries: int
    first: int
    last: int
    last_hash: str | None
    begun_us: int
    ended_us: int
    deleted: bool
    jobs_deleted: int | None


@dataclass(frozen=True, slots=True)
class Hole:
    """Missing entries, from `first` to `last`."""

    history: int
    queue: str
    epoch: int
    first: int
    last: int


def entries_of(events: DataFrame) -> DataFrame:
    """One row per entry, with sequence, hash, time and verb of the entry before."""
    before = Window.partitionBy(*_EPOCH).orderBy("sequence", "time")
    heads = events.where("position = 0").select(*_ENTRY, "time", "verb", "actor", "cause", "entry", "hash")
    for column in ("sequence", "hash", "time", "verb"):
        heads = heads.withColumn(f"{column}_before", F.lag(column).over(before))
    return heads


def chain_findings(entries: DataFrame) -> DataFrame:
    follows = F.coalesce(F.col("sequence") == F.col("sequence_before") + 1, F.lit(False))
    hashed = F.concat(
        F.when(F.col("sequence") == 1, "").otherwise(F.coalesce("hash_before", F.lit(""))),
        F.lit("\n"),
        F.concat_ws(" ", "epoch", "sequence", "time", "actor"),
        F.lit("\n"),
        "entry",
    )
    # The hash of the entry after a hole cannot be checked: the entry before is missing.
    right = (F.sha1(hashed) == F.col("hash")) | ~(follows | (F.col("sequence") == 1))
    checks = [
        (F.col("sequence") < 1, text("entry ", F.col("sequence"), ": sequence numbers begin with 1")),
        (F.col("sequence") == F.col("sequence_before"), text("entry ", F.col("sequence"), " is duplicated")),
        (~F.coalesce(right, F.lit(False)), text("the hash of entry ", F.col("sequence"), " does not match its text")),
        (
            F.col("time") < F.col("time_before"),
            text("entry ", F.col("sequence"), " is older than entry ", F.col("sequence_before")),
        ),
        (
            (F.col("sequence") == 1)
            & ~((F.col("verb") == "created") & F.col("cause").eqNullSafe(F.col("epoch").cast("string"))),
            text("the first entry is ", F.col("verb"), " instead of created"),
        ),
        ((F.col("sequence") > 1) & (F.col("verb") == "created"), text("the queue was created twice")),
        (F.col("verb_before") == "deleted", text("entry ", F.col("sequence"), " follows the deletion of the queue")),
    ]
    return findings_where(entries.withColumn("job", F.lit(None).cast("string")), "chain", checks)


def epochs_of(entries: DataFrame) -> list[Epoch]:
    at_end = F.max_by(F.struct("hash", "verb", "cause"), F.struct("sequence", "time"))
    rows = (
        entries.groupBy(*_EPOCH)
        .agg(
            F.count("*").alias("entries"),
            F.min("sequence").alias("first"),
            F.max("sequence").alias("last"),
            at_end.alias("end"),
            F.min("time").alias("begun"),
            F.max("time").alias("ended"),
        )
        .orderBy(*_EPOCH)
        .collect()
    )
    return [_epoch(row) for row in rows]


def _epoch(row: Row) -> Epoch:
    deleted = row.end.verb == "deleted"
    jobs = int(row.end.cause) if deleted and (row.end.cause or "").isdigit() else None
    return Epoch(
        row.history,
        row.queue,
        row.epoch,
        row.entries,
        row.first,
        row.last,
        row.end.hash,
        row.begun,
        row.ended,
        deleted,
        jobs,
    )


def holes_of(entries: DataFrame) -> list[Hole]:
    """In order. The first hole of a queue may be its trimmed beginning."""
    before = F.coalesce("sequence_before", F.lit(0))
    rows = (
        entries.where(F.col("sequence") > before + 1)
        .select(*_EPOCH, (before + 1).alias("first"), (F.col("sequence") - 1).alias("last"))
        .orderBy(*_EPOCH, "first")
        .collect()
    )
    return [Hole(*row) for row in rows]


def row_findings(events: DataFrame) -> DataFrame:
    of_entry = F.sort_array(F.collect_list(F.struct(*_COMPARED)))
    with warnings.catch_warnings():
        # Spark recommends type hints, but needs pandas to read them.
        warnings.simplefilter("ignore", UserWarning)
        wrong = arrow_udf(_compare, "array<struct<job: string, found: string>>", ArrowUDFType.SCALAR)
    return (
        events.groupBy(*_ENTRY)
        .agg(of_entry.alias("rows"))
        .select(*_ENTRY, F.explode(wrong("queue", "epoch", "sequence", "rows")).alias("wrong"))
        .select(
            "history",
            F.lit("rows").alias("rule"),
            F.lit(VIOLATION).alias("kind"),
            *("queue", "epoch", "sequence", "wrong.job", "wrong.found"),
        )
    )


_Row = tuple[Any, ...]
_Wrong = dict[str, str | None]
_WRONG = pa.list_(pa.struct([("job", pa.string()), ("found", pa.string())]))
# Per entry.
_MAX_DIFFERENCES = 20


def _compare(queues: pa.Array, epochs: pa.Array, sequences: pa.Array, entries: pa.Array) -> pa.Array:
    """Per entry the differences between its rows and its text, or null."""
    columns = [column.to_pylist() for column in entries.flatten().flatten()]
    rows = list(zip(*columns, strict=True))
    ends = accumulate(entries.value_lengths().to_pylist())
    wrong: list[list[_Wrong] | None] = []
    begin = 0
    for queue, epoch, sequence, end in zip(*(a.to_pylist() for a in (queues, epochs, sequences)), ends, strict=True):
        wrong.append(_differences(queue, epoch, sequence, rows[begin:end]) or None)
        begin = end
    return pa.array(wrong, _WRONG)


def _differences(queue: str, epoch: int, sequence: int, rows: list[_Row]) -> list[_Wrong]:
    head = dict(zip(_COMPARED, rows[0], strict=True))
    if head["position"] != 0 or head["entry"] is None or head["hash"] is None:
        return [{"job": None, "found": f"entry {sequence} has no text"}]
    fields = pack_entry(Entry(epoch, sequence, head["time"], head["actor"], head["hash"], head["entry"]))
    try:
        expected: list[_Row] = [event[_KEY_WIDTH:] for event in read_entry(fields, queue)]
    except InvalidData as exc:
        return [{"job": None, "found": f"the text of entry {sequence} cannot be read: {exc}"}]
    if rows == expected:
        return []
    wrong = (_difference(sequence, row, right) for row, right in _paired(rows, expected) if row != right)
    return list(islice(wrong, _MAX_DIFFERENCES))


def _paired(rows: list[_Row], expected: list[_Row]) -> Iterator[tuple[_Row | None, _Row | None]]:
    """Pairs rows by position. The second of two rows with the same position has no partner."""
    partners = {row[0]: row for row in expected}
    for row in rows:
        yield row, partners.pop(row[0], None)
    for missing in partners.values():
        yield None, missing


def _difference(sequence: int, row: _Row | None, right: _Row | None) -> _Wrong:
    values = dict(zip(_COMPARED, row or right or (), strict=True))
    label = f"row {sequence}.{values['position']}"
    if row is None or right is None:
        problem = "is missing" if row is None else "is not in the text"
        return {"job": values["job"], "found": f"{label} ({values['verb']}) {problem}"}
    wrong = [
        f"{name} is {was!r}, but {should!r} in the text"
        for name, was, should in zip(_COMPARED, row, right, strict=True)
        if was != should
    ]
    return {"job": values["job"], "found": f"{label}: {'; '.join(wrong)}"}
