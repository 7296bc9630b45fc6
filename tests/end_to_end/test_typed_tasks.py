"""Many typed tasks through a real supervisor: each result is equal to its argument in value and type."""

import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import forq as forq_package
from forq.app.tasks import JobRef, Prepared
from tests.conftest import SEED
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.handlers import typed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        options = ("--set=done_max=20000", "--set=concurrency=8")
        forq.ctl("create", "typed", "--handler", "typed:app", "--path", str(HANDLERS), *options)
        typed.app._client = forq.client()
        yield forq
        typed.app._client.close()
        typed.app._client = None


def a_uuid(rng: random.Random) -> UUID:
    return UUID(int=rng.getrandbits(128))


def a_decimal(rng: random.Random) -> Decimal:
    return Decimal(rng.randrange(-(10**12), 10**12)).scaleb(-rng.randrange(6))


def a_moment(rng: random.Random) -> datetime:
    zone = rng.choice([UTC, timezone(timedelta(minutes=rng.randrange(-700, 700)))])
    return datetime(2026, 11, 18, tzinfo=zone) + timedelta(microseconds=rng.randrange(10**15))


def a_date(rng: random.Random) -> date:
    return date(1970, 1, 1) + timedelta(days=rng.randrange(30_000))


def an_order(rng: random.Random) -> typed.Order:
    return typed.Order(
        a_uuid(rng),
        a_moment(rng),
        tuple(typed.Line(f"äöü {n}", a_decimal(rng), rng.randrange(9)) for n in range(rng.randrange(4))),
        rng.choice([None, *typed.Color]),
        {str(n): a_date(rng) for n in range(rng.randrange(3))},
    )


def a_person(rng: random.Random) -> typed.Person:
    tags = [str(n) for n in range(rng.randrange(3))]
    level = rng.choice(list(typed.Level))
    return typed.Person(id=a_uuid(rng), born=a_date(rng), balance=a_decimal(rng), level=level, tags=tags)


def some_durations(rng: random.Random) -> list[timedelta]:
    return [timedelta(microseconds=rng.randrange(10**12)) for _ in range(rng.randrange(4))]


MAKERS: list[tuple[Any, Callable[[random.Random], Any]]] = [
    (typed.decimal, a_decimal),
    (typed.moment, a_moment),
    (typed.uuid, a_uuid),
    (typed.color, lambda rng: rng.choice(list(typed.Color))),
    (typed.order, an_order),
    (typed.person, a_person),
    (typed.durations, some_durations),
]


def types_of(value: Any) -> Any:
    """The types of a value and of everything in it."""
    if isinstance(value, dict):
        return dict, {types_of(key): types_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types_of(each) for each in value]
    if isinstance(value, typed.Order | typed.Line | typed.Person):
        return type(value), types_of(vars(value))
    if isinstance(value, Decimal):
        return Decimal, value.as_tuple()
    if isinstance(value, datetime):
        return datetime, value.utcoffset()
    return type(value)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_results_are_equal_in_value_and_type(forq: Forq, count: int) -> None:
    rng = random.Random(int(os.environ[SEED]))
    expected: list[Any] = []
    prepared: list[Prepared[Any]] = []
    for number in range(count):
        task, make = MAKERS[number % len(MAKERS)]
        expected.append(make(rng))
        prepared.append(task.prepare(expected[-1]))
    began = time.monotonic()
    refs = typed.app.enqueue_many(prepared)
    value_of: dict[JobRef[Any], Any] = dict(zip(refs, expected, strict=True))
    assert len(value_of) == count
    for ref in forq_package.as_completed(refs, timeout=200):
        value = value_of.pop(ref)
        result = ref.result(timeout=10)
        assert result == value
        assert types_of(result) == types_of(value)
    assert value_of == {}
    print(f"{count} typed tasks in {time.monotonic() - began:.2f} s")


def test_all_kinds_of_arguments(forq: Forq) -> None:
    ref = typed.sums.enqueue([Decimal("1.10")], Decimal(2), Decimal("0.5"), by=typed.Level.HIGH, extra=Decimal("7.00"))
    assert ref.result(timeout=30) == {"prices": Decimal("1.10"), "more": Decimal("4.5"), "extra": Decimal("7.00")}
    assert str(ref.result()["extra"]) == "7.00"
