"""Conversion of values to JSON types and back, by annotation."""

import enum
import typing
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Required, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import orjson
import pydantic
import pydantic.dataclasses
import pytest

from forq.app.convert import Converter
from forq.app.packing import Misfit
from forq.broker.record import pack_data
from forq.errors import InvalidTask
from forq.job import Job

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Wide(enum.IntEnum):
    ONE = 1
    ALL = 2**70


class Word(enum.StrEnum):
    YES = "yes"


class Fractional(enum.Enum):
    HALF = 0.5


@dataclass
class Item:
    name: str
    price: Decimal


@dataclass
class Order:
    total: Decimal
    items: list[Item] = field(default_factory=list)
    paid: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strict:
    at: date
    ids: frozenset[UUID] = frozenset()


@dataclass
class Box(Generic[T]):
    content: T
    next: "Box[T] | None" = None


@dataclass
class Tree:
    name: str
    children: "list[Tree]" = field(default_factory=list)


@dataclass
class Derived(Item):
    weight: int = 0


@dataclass
class Computed:
    width: int
    area: int = field(init=False)

    def __post_init__(self) -> None:
        self.area = self.width**2


@dataclass
class Trimmed:
    text: str

    def __post_init__(self) -> None:
        self.text = self.text.strip()


@dataclass
class Private:
    _secret: int


@dataclass
class WithInitVar:
    x: int
    seed: InitVar[int] = 0


@dataclass(eq=False)
class Identity:
    x: int


class Address(TypedDict, total=False):
    city: Required[str]
    since: date


class Person(TypedDict):
    name: str
    born: NotRequired[date]


class Point(NamedTuple):
    x: int
    label: str = ""


class Pair(NamedTuple, Generic[T]):
    left: T
    right: T


@attrs.define
class Car:
    _plate: str
    seats: int = attrs.field(default=4, validator=attrs.validators.lt(100))


@attrs.frozen
class Route:
    stops: tuple[date, ...]
    car: Car | None = None


class User(pydantic.BaseModel):
    user_id: int = pydantic.Field(alias="userId")
    seen: datetime | None = None
    tags: set[str] = set()


class StrictUser(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    born: date
    raw: bytes = b""


class Measured(pydantic.BaseModel):
    weight: float


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


class OneWay(pydantic.BaseModel):
    x: int = pydantic.Field(serialization_alias="out", validation_alias="in")


@pydantic.dataclasses.dataclass
class Checked:
    age: int
    born: date


@attrs.define
class Converted:
    number: int = attrs.field(converter=int)


UserId = NewType("UserId", int)
Untyped = namedtuple("Untyped", "a b")

ID = UUID("12345678-1234-5678-1234-567812345678")
BERLIN = ZoneInfo("Europe/Berlin")


def converter(annotation: Any) -> Converter:
    return Converter(annotation, "value")


def stored(annotation: Any, value: Any) -> Any:
    return converter(annotation).pack(value)


def through(annotation: Any, value: Any) -> Any:
    """The value after a way through JSON text, as records hold it."""
    each = converter(annotation)
    return each.unpack(orjson.loads(pack_data(each.pack(value))))


def refused(annotation: Any, value: Any) -> str:
    with pytest.raises(Misfit) as raised:
        converter(annotation).pack(value)
    return raised.value.text("value")


def refused_annotation(annotation: Any) -> str:
    with pytest.raises(InvalidTask) as raised:
        converter(annotation)
    return str(raised.value)


SAME: list[tuple[Any, Any]] = [
    (str, "ä"),
    (int, -5),
    (int, 2**64 - 1),
    (int, -(2**63)),
    (float, 1.5),
    (bool, True),
    (None, None),
    (Any, {"a": [1, None, "x", 1.5]}),
    (datetime, datetime(2026, 1, 2, 3, 4, 5, 678)),
    (datetime, datetime(2026, 1, 2, tzinfo=UTC)),
    (datetime, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30)))),
    (date, date(1, 2, 3)),
    (time, time(1, 2, 3, 4)),
    (time, time(1, 2, tzinfo=timezone(timedelta(hours=1)))),
    (timedelta, timedelta(days=-1, microseconds=1)),
    (timedelta, timedelta.max),
    (UUID, ID),
    (Decimal, Decimal("1.50")),
    (Decimal, Decimal("-0E+400")),
    (bytes, b"\x00\xff"),
    (Color, Color.RED),
    (Level, Level.HIGH),
    (Rights, Rights.READ | Rights.WRITE),
    (Word, Word.YES),
    (Literal["a", 1, None], 1),
    (Literal[True], True),
    (str | None, None),
    (str | None, "x"),
    (int | float, 1),
    (int | float, 1.0),
    (Any | None, {"a": 1}),
    (bool | int, True),
    (int | Decimal, Decimal(1)),
    (datetime | int | list[date] | dict[str, UUID] | None, [date(2026, 1, 1)]),
    (datetime | int | list[date] | dict[str, UUID] | None, {"a": ID}),
    (Literal["auto"] | int, "auto"),
    (Literal["a"] | str, "b"),
    (Color | Level, Level.LOW),
    (list, [1, "a"]),
    (list[datetime], [datetime(2026, 1, 1)]),
    (Sequence[UUID], [ID]),
    (Mapping[str, date], {"a": date(2026, 1, 1)}),
    (tuple[int, str, date], (1, "a", date(2026, 1, 1))),
    (tuple[()], ()),
    (tuple[Decimal, ...], (Decimal(1), Decimal(2))),
    (set[UUID], {ID}),
    (frozenset[int], frozenset({1, 2})),
    (dict, {"a": 1}),
    (dict[int, bytes], {2**64 - 1: b"x"}),
    (dict[float, int], {1.5: 1}),
    (dict[UUID, int], {ID: 1}),
    (dict[Color, int], {Color.RED: 1}),
    (dict[Level, int], {Level.LOW: 1}),
    (dict[date, int], {date(2026, 1, 1): 1}),
    (dict[Decimal, int], {Decimal("1.0"): 1}),
    (dict[Literal["a", "b"], int], {"a": 1}),
    (dict[Literal[1, 2], int], {1: 1}),
    (Order, Order(Decimal("1.5"), [Item("a", Decimal(1))], datetime(2026, 1, 1))),
    (Strict, Strict(at=date(2026, 1, 1), ids=frozenset({ID}))),
    (Box[date], Box(date(2026, 1, 1), Box(date(2026, 1, 2)))),
    (Box[list[Decimal]], Box([Decimal(1)])),
    (Tree, Tree("a", [Tree("b"), Tree("c", [Tree("d")])])),
    (Computed, Computed(3)),
    (Private, Private(5)),
    (Trimmed, Trimmed(" a ")),
    (Address, {"city": "Bonn", "since": date(2026, 1, 1)}),
    (Address, {"city": "Bonn"}),
    (Person, {"name": "Ada"}),
    (Point, Point(1, "a")),
    (Pair[date], Pair(date(2026, 1, 1), date(2026, 1, 2))),
    (Untyped, Untyped(1, "a")),
    (Car, Car("X-1", 2)),
    (Route, Route((date(2026, 1, 1),), Car("X-1"))),
    (User, User(userId=1, seen=datetime(2026, 1, 1), tags={"a"})),
    (StrictUser, StrictUser(born=date(2026, 1, 1), raw=b"x", more=[1])),  # type: ignore[call-arg]
    (Numbers, Numbers([1, 2])),
    (Page[date], Page[date](items=[date(2026, 1, 1)])),
    (list[User] | None, [User(userId=1)]),
    (Box[User], Box(User(userId=1))),
    (Checked, Checked(5, date(2026, 1, 1))),
    (Converted, Converted("5")),
    (UserId, 5),
    (Annotated[str, "a name"], "x"),
    (Annotated[int, msgspec.Meta(gt=0)], 1),
]


@pytest.mark.parametrize(("annotation", "value"), SAME, ids=str)
def test_a_value_comes_back_equal_and_of_the_same_type(annotation: Any, value: Any) -> None:
    back = through(annotation, value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_classes_that_compare_by_identity_come_back() -> None:
    assert through(Identity, Identity(5)).x == 5


def test_values_are_stored_as_plain_json() -> None:
    assert stored(Order, Order(Decimal("1.5"), paid=datetime(2026, 1, 1, tzinfo=UTC))) == {
        "total": "1.5",
        "items": [],
        "paid": "2026-01-01T00:00:00+00:00",
    }
    assert stored(dict[Color, bytes], {Color.RED: b"abc"}) == {"red": "YWJj"}
    assert stored(Point, Point(1, "a")) == [1, "a"]
    assert stored(timedelta, timedelta(hours=1)) == "PT3600S"


def test_pydantic_models_are_stored_by_alias() -> None:
    assert stored(User, User(userId=1)) == {"userId": 1, "seen": None, "tags": []}


def test_an_int_for_a_float_comes_back_as_float() -> None:
    back = through(float, 3)
    assert (back, type(back)) == (3.0, float)
    assert through(dict[str, float], {"a": 1}) == {"a": 1.0}
    assert type(through(float | None, 3)) is float


def test_an_int_without_an_equal_float_is_refused() -> None:
    assert refused(float, 2**53 + 1) == "value: 9007199254740993 is int and has no equal float; use int or Decimal"
    assert "is int, expected float" in refused(float, 10**400)


def test_a_time_zone_comes_back_as_its_offset() -> None:
    summer = datetime(2026, 7, 1, tzinfo=BERLIN)
    assert through(datetime, summer) == summer
    assert through(datetime, summer).tzinfo == timezone(timedelta(hours=2))


def test_both_hours_of_a_change_of_the_clock_come_back() -> None:
    for fold in (0, 1):
        moment = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=fold)
        assert through(Order, Order(Decimal(1), paid=moment)).paid.timestamp() == moment.timestamp()


def test_tuples_without_annotation_come_back_as_lists() -> None:
    assert through(Any, (1, (2,))) == [1, [2]]


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (int, "1", "'1' is str, expected int"),
        (int, True, "True is bool, expected int"),
        (int, 1.0, "1.0 is float, expected int"),
        (int, None, "None, expected int"),
        (int, Level.LOW, "<Level.LOW: 1> is Level, expected int"),
        (str, Word.YES, "<Word.YES: 'yes'> is Word, expected str"),
        (str, b"a", "b'a' is bytes, expected str"),
        (bool, 1, "1 is int, expected bool"),
        (None, 1, "1 is int, expected None"),
        (float, "1", "'1' is str, expected float"),
        (float, True, "True is bool, expected float"),
        (Decimal, 1.5, "1.5 is float, expected Decimal"),
        (Decimal, 1, "1 is int, expected Decimal"),
        (UUID, str(ID), f"'{ID}' is str, expected UUID"),
        (date, datetime(2026, 1, 1), "datetime.datetime(2026, 1, 1, 0, 0) is datetime, expected date"),
        (datetime, date(2026, 1, 1), "datetime.date(2026, 1, 1) is date, expected datetime"),
        (Color, "red", "'red' is str, expected Color"),
        (Literal["a", "b"], "c", "'c', expected one of 'a', 'b'"),
        (Literal[1], True, "True, expected 1"),
        (Literal[True, 2], 1, "1, expected one of True, 2"),
        (Literal["a"], ["a"], "['a'], expected 'a'"),
        (str | None, 5, "5 is int, expected str or None"),
        (list[int], (1,), "(1,) is tuple, expected list"),
        (Sequence[int], (1,), "(1,) is tuple, expected list"),
        (tuple[int, ...], [1], "[1] is list, expected tuple"),
        (tuple[int, int], (1,), "a tuple of length 1, expected length 2"),
        (tuple[int], (1, 2), "a tuple of length 2, expected length 1"),
        (set[int], frozenset({1}), "frozenset({1}) is frozenset, expected set"),
        (dict[str, int], OrderedDict(a=1), "OrderedDict([('a', 1)]) is OrderedDict, expected dict"),
        (dict[str, int], {1: 1}, "key 1 is int, expected str"),
        (dict[int, int], {"1": 1}, "key '1' is str, expected int"),
        (dict, {1: 1}, "key 1 is int, expected str"),
        (Item, Derived("a", Decimal(1)), "is Derived, expected Item"),
        (Item, {"name": "a", "price": Decimal(1)}, "is dict, expected Item"),
        (Point, (1, "a"), "(1, 'a') is tuple, expected Point"),
        (Address, {}, "lacks the key 'city'"),
        (Address, {"city": "a", "zip": 1}, "has the key 'zip', which its TypedDict does not declare"),
        (User, {"userId": 1}, "{'userId': 1} is dict, expected User"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_type(annotation: Any, value: Any, reason: str) -> None:
    text = refused(annotation, value)
    assert text.startswith(("value: ", "value has ", "value lacks "))
    assert text.endswith(reason)


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
        (Order, Order(1.5), "value.total"),  # type: ignore[arg-type]
        (Order, Order(Decimal(1), [Item("a", Decimal(1)), Item("b", 2)]), "value.items[1].price"),  # type: ignore[arg-type]
        (list[list[int]], [[1], [2, "x"]], "value[1][1]"),
        (tuple[int, str], (1, 2), "value[1]"),
        (dict[str, list[int]], {"a": [1], "b": [None]}, "value['b'][0]"),
        (dict[UUID, dict[str, int]], {ID: {"a": "x"}}, f"value[UUID('{ID}')]['a']"),
        (set[int], {"x"}, "value[...]"),
        (Tree, Tree("a", [Tree("b"), Tree("c", [Tree(5)])]), "value.children[1].children[0].name"),  # type: ignore[arg-type]
        (Box[int], Box[Any](1, Box[Any]("x")), "value.next.content"),
        (Point, Point("x"), "value.x"),  # type: ignore[arg-type]
        (Address, {"city": 5}, "value.city"),
        (Route, Route((date(2026, 1, 1), "x")), "value.stops[1]"),  # type: ignore[arg-type]
        (Any, {"a": [1, {"b": ID}]}, "value['a'][1]['b']"),
        (list[Any], [1, {2}], "value[1]"),
        (Box[Any], Box({"a": {1}}), "value.content['a']"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(annotation: Any, value: Any, place: str) -> None:
    assert refused(annotation, value).startswith((f"{place}: ", f"{place} is of type "))


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (float, float("nan"), "value: NaN and Infinity are not allowed"),
        (list[float], [1.0, float("inf")], "value[1]: NaN and Infinity are not allowed"),
        (Decimal, Decimal("NaN"), "value: NaN and Infinity are not allowed"),
        (Decimal, Decimal("-Infinity"), "value: NaN and Infinity are not allowed"),
        (Any, {"a": [float("nan")]}, "value['a'][0] is NaN or Infinity, which are not allowed"),
        (Measured, Measured(weight=float("nan")), "value['weight'] is NaN or Infinity, which are not allowed"),
        (Any | None, datetime(2026, 1, 1), "value is of type datetime; allowed are str, int"),
        (int, 2**64, "value: int beyond 64 bits; use Decimal or str for larger numbers"),
        (int, -(2**63) - 1, "value: int beyond 64 bits"),
        (dict[int, int], {2**64: 1}, "value: key int beyond 64 bits"),
        (Any, [2**64], "value: int beyond 64 bits; use Decimal"),
        (str, "\ud800", "value: '\\ud800' is not valid Unicode: it contains a surrogate"),
        (time, time(1, tzinfo=BERLIN), "value: 01:00:00 has a time zone without a fixed offset; use datetime"),
        (
            datetime,
            datetime(1800, 1, 1, tzinfo=BERLIN),
            "value: 1800-01-01 00:00:00+00:53:28 has an offset with seconds, which cannot be stored; convert it to UTC",
        ),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused(annotation: Any, value: Any, reason: str) -> None:
    assert refused(annotation, value).startswith(reason)


def test_objects_that_contain_themselves_do_not_end_the_process() -> None:
    tree = Tree("a")
    tree.children.append(tree)
    with pytest.raises(RecursionError):
        converter(Tree).pack(tree)


def test_a_class_that_changes_its_values_when_built_is_refused() -> None:
    changed = Trimmed("a")
    changed.text = " a "
    assert refused(Trimmed, changed) == "value.text: ' a ' would come back as 'a'"


def test_a_class_that_refuses_its_values_when_built_is_refused() -> None:
    car = Car("X-1")
    object.__setattr__(car, "seats", 5)
    assert through(Car, car) == car
    wrong = Car.__new__(Car)
    object.__setattr__(wrong, "_plate", "X-1")
    object.__setattr__(wrong, "seats", 500)
    assert "must be < 100" in refused(Car, wrong)


def test_an_attribute_without_value_is_refused() -> None:
    unfinished = Item.__new__(Item)
    unfinished.name = "a"
    assert refused(Item, unfinished) == "value.price has no value"


def test_limits_of_an_annotation_are_checked_when_packing() -> None:
    assert refused(Annotated[int, msgspec.Meta(gt=0)], -1) == "value: expected int >= 1"
    assert "expected array of length >= 1" in refused(Annotated[list[int], msgspec.Meta(min_length=1)], [])


def test_a_pydantic_model_that_hides_its_values_is_refused() -> None:
    assert "value.password: " in refused(Secret, Secret(password=pydantic.SecretStr("x")))


def test_a_pydantic_model_that_reads_other_names_than_it_writes_is_refused() -> None:
    assert refused(OneWay, OneWay.model_validate({"in": 1})) == "value: in: Field required"


def test_an_extra_value_of_a_pydantic_model_that_comes_back_differently_is_refused() -> None:
    user = StrictUser(born=date(2026, 1, 1), more=(1,))  # type: ignore[call-arg]
    assert refused(StrictUser, user) == "value['more']: (1,) is tuple, but comes back as list"


def test_a_pydantic_model_with_a_value_of_the_wrong_type_is_refused() -> None:
    assert refused(User, User.model_construct(user_id="1")) == "value.user_id: '1' is str, but comes back as int"


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (str | datetime, "value: str | datetime is refused: JSON stores more than one of these types as a string"),
        (bytes | UUID | None, "as a string"),
        (
            list[int] | set[int],
            "value: list[int] | set[int] is refused: JSON stores more than one of these types as an array",
        ),
        (Item | Order, "value: Item | Order is refused: JSON stores more than one of these types as an object"),
        (dict[str, int] | Item, "as an object"),
        (Level | int, "as a number"),
        (User | int, "only None may stand beside a pydantic model"),
        (User | Secret, "only None may stand beside a pydantic model"),
        (list[dict[str, str | date]], "value[...][...]: str | date is refused"),
        (Path, "value: Path cannot be converted to JSON and back; use str"),
        (list[Path], "value[...]: Path cannot be"),
        (Path | None, "value: Path cannot be"),
        (object, "value: object cannot be converted to JSON and back; use Any for JSON types"),
        (complex, "value: complex cannot be converted to JSON and back; use a dataclass, or pass an id"),
        (Callable, "value: Callable cannot be"),
        (Iterable[int], "use list"),
        (bytearray, "use bytes"),
        (Job, "value: Job cannot be converted to JSON and back; call forq.current_job() in the function"),
        (defaultdict[str, int], "value: defaultdict"),
        (WithInitVar, "value.seed: InitVar[int] is refused: its value is not kept"),
        (Box[Path], "value.content: Path cannot be"),
        (Wide, "value: Wide is refused: integer values > (2**63 - 1) are not currently supported"),
        (Fractional, "value: Fractional is refused: enums must contain either all str or all int values"),
        (Literal[b"x"], "value: Literal[b'x'] is refused: literal may only contain"),
        (Literal[Color.RED], "value: Literal[<RED: 'red'>] is refused: literal may only contain"),
        (tuple[int, *tuple[str, ...]], "value[...]: *tuple[str, ...] is refused"),
        (typing.NoReturn, "value: NoReturn is refused"),
        (dict[tuple[int, int], int], "value: its keys cannot be converted to JSON and back; use str, int, UUID"),
        (dict[int | str, int], "value: its keys cannot be"),
        (dict[bool, int], "value: its keys cannot be"),
        (dict[Literal[1, "1"], int], "value: Literal keys of more than one type cannot be told apart"),
        (dict[Literal[True], int], "value: its keys cannot be"),
        (dict[Item, int], "value: its keys cannot be"),
    ],
    ids=str,
)
def test_an_annotation_that_cannot_be_converted_back_is_refused(annotation: Any, text: str) -> None:
    assert text in refused_annotation(annotation)


@dataclass
class Shelf:
    boxes: "list[Holder]"


@dataclass
class Holder:
    total: str | Decimal
    file: Path | None = None


@dataclass
class Loop:
    again: "Loop | None"
    bad: complex


@dataclass
class Ring:
    again: "Ring | None"
    either: str | date


def test_a_refused_annotation_is_named_with_its_place() -> None:
    assert refused_annotation(Ring).startswith("value.either: str | date is refused")
    assert refused_annotation(Shelf).startswith("value.boxes[...].total: str | Decimal is refused")
    assert refused_annotation(Loop).startswith("value.bad: complex cannot be")


@attrs.define
class Untold:
    x = attrs.field()  # type: ignore[var-annotated]


def test_attrs_fields_without_annotation_are_refused() -> None:
    assert refused_annotation(Untold) == "value: Untold is refused: its field 'x' has no annotation"


@pytest.mark.parametrize(
    ("annotation", "data", "text"),
    [
        (Order, {"total": True}, "value.total: expected decimal, got bool"),
        (Order, {"total": "1", "items": [{"name": 1}]}, "value.items[0].name: expected str, got int"),
        (Order, {}, "value: object missing required field total"),
        (dict[int, int], {"x": 1}, "value: key: expected int, got str"),
        (dict[str, list[int]], {"x": ["1"]}, "value[...][0]: expected int, got str"),
        (datetime, "yesterday", "value: invalid RFC3339 encoded datetime"),
        (Color, "green", "value: invalid enum value 'green'"),
        (list[User], [{"userId": "x"}], "value[0]: userId: Input should be a valid integer"),
    ],
)
def test_stored_data_that_does_not_fit_is_refused_with_its_place(annotation: Any, data: Any, text: str) -> None:
    with pytest.raises(Misfit) as raised:
        converter(annotation).unpack(data)
    assert raised.value.text("value").startswith(text)
