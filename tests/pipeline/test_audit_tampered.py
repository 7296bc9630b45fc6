"""The audit finds every change of a single row or entry: removed, duplicated, reordered or edited.

All changed histories are audited in one run.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from forq.broker.journal import Event
from forq.pipeline.audit.findings import GAP, VIOLATION, Finding
from forq.pipeline.audit.run import Auditor
from tests.pipeline.histories import frame_of, merged_redis_states, rows_of, sample_history

CHAIN = frozenset({"chain"})
ROWS = frozenset({"rows"})


@dataclass(frozen=True)
class Tampered:
    what: str
    rows: list[Event]
    # One of these rules must find the change, as one of these kinds.
    rules: frozenset[str]
    kinds: tuple[str, ...] = (VIOLATION,)


def place(row: Event) -> str:
    return f"{row.queue} {row.epoch} {row.sequence}.{row.position} {row.verb}"


def same_entry(one: Event, other: Event) -> bool:
    return one[:3] == other[:3]


def removed_rows(rows: list[Event]) -> Iterator[Tampered]:
    for number, row in enumerate(rows):
        alone = sum(same_entry(row, other) for other in rows) == 1
        rest = rows[:number] + rows[number + 1 :]
        yield Tampered(f"removed row {place(row)}", rest, CHAIN if alone else ROWS, (GAP if alone else VIOLATION,))


def removed_entries(rows: list[Event]) -> Iterator[Tampered]:
    for row in rows:
        if row.position == 0:
            rest = [other for other in rows if not same_entry(row, other)]
            yield Tampered(f"removed entry {place(row)}", rest, CHAIN, (GAP,))


def doubled_rows(rows: list[Event]) -> Iterator[Tampered]:
    for row in rows:
        yield Tampered(f"doubled row {place(row)}", [*rows, row], ROWS)
    head = next(row for row in rows if row.verb == "done")
    entry = [row for row in rows if same_entry(row, head)]
    yield Tampered(f"doubled entry {place(head)}", [*rows, *entry], CHAIN)
    last = max(row.sequence for row in rows if row.queue == "q")
    copied = [row._replace(sequence=last + 1) for row in entry]
    yield Tampered(f"copied entry {place(head)} to the end", [*rows, *copied], CHAIN)


def edited(column: str, value: int | str | None) -> int | str:
    if column in TEXTS and value is None:
        return "new"
    if column in FLAGS:
        return not value
    if isinstance(value, str):
        return f"~{value}"
    return 7 if value is None else value + 1


def with_value(row: Event, column: str, value: int | str) -> Event:
    values: dict[str, Any] = {**row._asdict(), column: value}
    return Event(**values)


TEXTS = ("job", "cause", "entry", "hash")
FLAGS = ("fail_job",)


def edited_rows(rows: list[Event]) -> Iterator[Tampered]:
    """Every column of every third row. Changes of key columns and hashed columns may be found by the chain."""
    for number, row in list(enumerate(rows))[::3]:
        for column in Event._fields:
            new = edited(column, getattr(row, column))
            changed = [*rows[:number], with_value(row, column, new), *rows[number + 1 :]]
            # Moving the only row of an entry leaves a hole.
            kinds = (VIOLATION, GAP) if column in Event._fields[:3] else (VIOLATION,)
            yield Tampered(f"edited {column} of {place(row)}", changed, ROWS | CHAIN, kinds)


def reordered(rows: list[Event]) -> Iterator[Tampered]:
    heads = [row for row in rows if row.position == 0]
    for one, other in itertools.pairwise(heads):
        if one.queue == other.queue and one.epoch == other.epoch:
            swapped = [_swapped(row, one, other) for row in rows]
            yield Tampered(f"swapped entries {place(one)} and {place(other)}", swapped, CHAIN)
    for one, other in itertools.pairwise(rows):
        if same_entry(one, other) and one[4:-2] != other[4:-2]:
            swapped = [
                row._replace(position=other.position if row is one else one.position) if row in (one, other) else row
                for row in rows
            ]
            yield Tampered(f"swapped rows {place(one)} and {place(other)}", swapped, ROWS)


def _swapped(row: Event, one: Event, other: Event) -> Event:
    if same_entry(row, one):
        return row._replace(sequence=other.sequence)
    return row._replace(sequence=one.sequence) if same_entry(row, other) else row


def described(findings: list[Finding]) -> str:
    return "; ".join(f"{found.rule} {found.kind}: {found.found}" for found in findings) or "nothing"


@pytest.mark.timeout(300)
def test_every_single_change_of_rows_is_found(spark: SparkSession, tmp_path: Path) -> None:
    entries, redis_state = sample_history()
    rows = rows_of(entries)
    cases = [Tampered("nothing changed", rows, frozenset())]
    for change in (removed_rows, removed_entries, doubled_rows, edited_rows, reordered):
        cases += change(rows)
    audit = Auditor(
        frame_of(spark, tmp_path, [case.rows for case in cases]),
        merged_redis_states([redis_state] * len(cases)),
        limit=100_000,
    ).run()
    by_case: dict[int, list[Finding]] = {}
    for found in audit.findings:
        by_case.setdefault(found.history, []).append(found)
    missed = [
        f"{case.what}: {described(by_case.get(number, []))}"
        for number, case in enumerate(cases)
        if case.rules
        and not any(found.rule in case.rules and found.kind in case.kinds for found in by_case.get(number, []))
    ]
    assert missed == []
    assert described(by_case.get(0, [])) == "nothing"
    assert len(cases) > 200
    # A hole is a gap, and causes no violations.
    overdone = [
        f"{case.what}: {described(by_case[number])}"
        for number, case in enumerate(cases)
        if case.kinds == (GAP,) and any(found.kind == VIOLATION for found in by_case.get(number, []))
    ]
    assert overdone == []
    print(f"{len(cases) - 1} changes, all found", {v.rule: round(v.seconds, 1) for v in audit.verdicts})
