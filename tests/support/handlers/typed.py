"""An app whose tasks return their argument, one task for each kind of type."""

from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from uuid import UUID

from pydantic import BaseModel

import forq

app = forq.App("typed")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Line:
    name: str
    price: Decimal
    count: int = 1


@dataclass(frozen=True)
class Order:
    id: UUID
    at: datetime
    lines: tuple[Line, ...]
    color: Color | None = None
    notes: dict[str, date] = field(default_factory=dict)


class Person(BaseModel):
    id: UUID
    born: date
    balance: Decimal
    level: Level
    tags: list[str] = []


@app.task
def decimal(value: Decimal) -> Decimal:
    return value


@app.task
def moment(value: datetime) -> datetime:
    return value


@app.task
def uuid(value: UUID) -> UUID:
    return value


@app.task
async def color(value: Color) -> Color:
    return value


@app.task
def order(value: Order) -> Order:
    return value


@app.task
async def person(value: Person) -> Person:
    return value


@app.task
def durations(value: list[timedelta]) -> list[timedelta]:
    return value


@app.task
def sums(prices: list[Decimal], *more: Decimal, by: Level = Level.LOW, **named: Decimal) -> dict[str, Decimal]:
    """Positional, keyword and default arguments."""
    return {"prices": sum(prices, Decimal()), "more": sum(more, Decimal(by)), **named}
