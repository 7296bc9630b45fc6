"""Properties of the conversion, for generated annotations, nested, with generated values.

A kind is an annotation with the strategy of its values. Values travel as the text that a record holds.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypedDict, Union, cast
from uuid import UUID

import attrs
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from forq.app.convert import Converter
from forq.app.packing import MAX_INT, MIN_INT, Misfit
from forq.app.signature import Signature
from forq.broker.record import pack_body, unpack
from forq.errors import DoesNotFit, InvalidTask
from tests.support.thorough import examples


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2
    RUN = 4


@dataclass(frozen=True)
class Kind:
    annotation: Any
    values: st.SearchStrategy[Any]


OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
ZONES = st.none() | OFFSETS | st.timezones()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(MIN_INT, MAX_INT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def whole_minutes(moment: datetime) -> bool:
    """Historic offsets have seconds, and are refused."""
    offset = moment.utcoffset()
    return offset is None or offset % timedelta(minutes=1) == timedelta()


def unambiguous(moment: datetime) -> bool:
    """Python finds a local time that exists twice, or not at all, unequal to every time with a fixed offset (PEP 495).
    So it cannot be found in a dict or set that came back."""
    return moment.utcoffset() == moment.replace(fold=1 - moment.fold).utcoffset()


KEYS = [
    Kind(str, st.text()),
    Kind(int, st.integers(MIN_INT, MAX_INT)),
    Kind(float, st.floats(allow_nan=False, allow_infinity=False)),
    Kind(datetime, st.datetimes(timezones=ZONES).filter(whole_minutes).filter(unambiguous)),
    Kind(date, st.dates()),
    Kind(time, st.times(timezones=st.none() | OFFSETS)),
    Kind(timedelta, st.timedeltas()),
    Kind(UUID, st.uuids()),
    Kind(Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    Kind(bytes, st.binary()),
    Kind(Color, st.sampled_from(Color)),
    Kind(Level, st.sampled_from(Level)),
    Kind(Rights, st.integers(0, 7).map(Rights)),
    Kind(Literal["a", "b"], st.sampled_from(["a", "b"])),
    Kind(Literal[1, 2], st.sampled_from([1, 2])),
]
LEAVES = [
    *KEYS,
    Kind(bool, st.booleans()),
    Kind(None, st.none()),
    Kind(Any, JSON),
    Kind(Literal["a", 1, None], st.sampled_from(["a", 1, None])),
]

# Members of a union, by the JSON type that stores them.
STRINGS = [
    kind for kind in KEYS if kind.annotation in (str, datetime, date, time, timedelta, UUID, Decimal, bytes, Color)
]
INTEGERS = [kind for kind in KEYS if kind.annotation in (int, Level, Rights)]
FLOATS = [kind for kind in KEYS if kind.annotation is float]


def lists(kind: Kind) -> Kind:
    return Kind(list[kind.annotation], st.lists(kind.values, max_size=3))  # type: ignore[name-defined]


def tuples(kind: Kind) -> Kind:
    return Kind(tuple[kind.annotation, ...], st.lists(kind.values, max_size=3).map(tuple))  # type: ignore[name-defined]


@st.composite
def sets(draw: st.DrawFn, kinds: st.SearchStrategy[Kind]) -> Kind:
    kind, cls = draw(st.sampled_from(KEYS)), draw(st.sampled_from([set, frozenset]))
    return Kind(cls[kind.annotation], st.lists(kind.values, max_size=3).map(cls))  # type: ignore[index]


@st.composite
def dicts(draw: st.DrawFn, kinds: st.SearchStrategy[Kind]) -> Kind:
    key, value = draw(st.sampled_from(KEYS)), draw(kinds)
    return Kind(dict[key.annotation, value.annotation], st.dictionaries(key.values, value.values, max_size=3))  # type: ignore[name-defined]


@st.composite
def pairs(draw: st.DrawFn, kinds: st.SearchStrategy[Kind]) -> Kind:
    parts = draw(st.lists(kinds, min_size=1, max_size=3))
    return Kind(tuple[tuple(part.annotation for part in parts)], st.tuples(*(part.values for part in parts)))  # type: ignore[misc]


@st.composite
def unions(draw: st.DrawFn, kinds: st.SearchStrategy[Kind]) -> Kind:
    one_of = [STRINGS, INTEGERS, FLOATS, [Kind(bool, st.booleans())], [Kind(None, st.none())]]
    members = [
        draw(st.sampled_from(each)) for each in draw(st.lists(st.sampled_from(one_of), min_size=1, unique_by=id))
    ]
    members += [draw(kinds.map(lists))] * draw(st.integers(0, 1)) + [draw(dicts(kinds))] * draw(st.integers(0, 1))
    return Kind(
        Union[tuple(member.annotation for member in members)],  # noqa: UP007 (not known here)
        st.one_of([member.values for member in members]),
    )


def named(values: dict[str, st.SearchStrategy[Any]], build: Callable[..., Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(values).map(lambda arguments: build(**arguments))


@st.composite
def classes(draw: st.DrawFn, kinds: st.SearchStrategy[Kind]) -> Kind:
    parts = {f"field_{index}": part for index, part in enumerate(draw(st.lists(kinds, min_size=1, max_size=3)))}
    hints = {name: part.annotation for name, part in parts.items()}
    values = {name: part.values for name, part in parts.items()}
    made: Any
    match draw(
        st.sampled_from(["dataclass", "frozen", "slots", "kw_only", "typed dict", "partial", "named tuple", "attrs"])
    ):
        case "typed dict":
            return Kind(cast(Any, TypedDict)("Made", hints), st.fixed_dictionaries(values))
        case "partial":
            return Kind(cast(Any, TypedDict)("Made", hints, total=False), st.fixed_dictionaries({}, optional=values))
        case "named tuple":
            made = cast(Any, NamedTuple)("Made", list(hints.items()))
        case "attrs":
            made = attrs.make_class("Made", {name: attrs.field(type=hint) for name, hint in hints.items()})
            made.__annotations__ = hints
        case "dataclass":
            made = make_dataclass("Made", list(hints.items()))
        case option:
            made = cast(Any, make_dataclass)("Made", list(hints.items()), **{option: True})
    return Kind(made, named(values, made))


# pydantic converts these in its own way: Decimals lose nothing, but times of day and zones differ.
IN_MODELS = [kind for kind in LEAVES if kind.annotation in (str, int, float, bool, date, UUID, Decimal, Color, Level)]


@st.composite
def models(draw: st.DrawFn) -> Kind:
    parts = {
        f"field_{index}": part for index, part in enumerate(draw(st.lists(st.sampled_from(IN_MODELS), max_size=3)))
    }
    aliased = {
        name: (part.annotation, pydantic.Field(alias=name.upper()) if draw(st.booleans()) else ...)
        for name, part in parts.items()
    }
    made: Any = pydantic.create_model("Made", __config__={"populate_by_name": True}, **cast(Any, aliased))
    return Kind(made, named({name: part.values for name, part in parts.items()}, made))


def nested(kinds: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    containers = kinds.map(lists) | kinds.map(tuples) | sets(kinds) | dicts(kinds) | pairs(kinds)
    return containers | unions(kinds) | classes(kinds)


KINDS = st.recursive(st.sampled_from(LEAVES) | models(), nested, max_leaves=6)


def same(value: Any, back: Any) -> bool:
    """Equal in value and type, at every depth."""
    if type(value) is not type(back):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(back) and all(map(same, value, back))
    if isinstance(value, dict):
        return len(value) == len(back) and all(key in back and same(item, back[key]) for key, item in value.items())
    if isinstance(value, datetime):
        return bool(value.isoformat() == back.isoformat())
    if is_dataclass(value) and not isinstance(value, type):
        return all(same(getattr(value, each.name), getattr(back, each.name)) for each in fields(value))
    if attrs.has(type(value)):
        return all(same(getattr(value, each.name), getattr(back, each.name)) for each in attrs.fields(type(value)))
    if isinstance(value, pydantic.BaseModel):
        return same(value.__dict__, back.__dict__)
    return bool(value == back)


def through(converter: Converter, value: Any) -> Any:
    body = pack_body(converter.pack(value), None, None)
    return converter.unpack(unpack(b"p1 1\n" + body).data)


PROPERTY = settings(
    max_examples=examples(150, 1500),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@PROPERTY
@given(st.data())
def test_every_value_comes_back_equal_and_of_the_same_type(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    value = data.draw(kind.values)
    assert same(value, through(Converter(kind.annotation, "value"), value))


@PROPERTY
@given(st.data())
def test_a_value_of_another_annotation_is_refused_or_comes_back_equal(data: st.DataObject) -> None:
    """Also in type, but for an int given as float and a tuple given as Any."""
    kind = data.draw(KINDS)
    value = data.draw(data.draw(KINDS).values)
    converter = Converter(kind.annotation, "value")
    try:
        converter.pack(value)
    except Misfit:
        return
    back = through(converter, value)
    assert same(as_stored(value), as_stored(back))


def as_stored(value: Any) -> Any:
    """The value with the two stated exceptions applied."""
    if type(value) is int:
        return value if float(value) != value else float(value)
    if type(value) in (list, tuple):
        return [as_stored(item) for item in value]
    if type(value) is dict:
        return {key: as_stored(item) for key, item in value.items()}
    return value


@PROPERTY
@given(st.data())
def test_any_json_is_refused_or_gives_a_value_that_comes_back(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    converter = Converter(kind.annotation, "value")
    try:
        value = converter.unpack(data.draw(JSON))
    except Misfit:
        return
    assert same(value, through(converter, value))


@PROPERTY
@given(st.data())
def test_an_annotation_is_refused_when_it_is_read_or_converts_every_value(data: st.DataObject) -> None:
    """Any two annotations in a union: what is not refused at once must tell its members apart."""
    first, second = data.draw(KINDS), data.draw(KINDS)
    try:
        converter = Converter(Union[first.annotation, second.annotation], "value")  # noqa: UP007
    except InvalidTask:
        return
    value = data.draw(first.values | second.values)
    try:
        back = through(converter, value)
    except Misfit:
        # Beside Any, all members are JSON types only.
        assert Any in (first.annotation, second.annotation)
        return
    assert same(as_stored(value), as_stored(back))


def call(first: Any, second: Any = 2, *rest: Any, key: Any, option: Any = None, **more: Any) -> tuple[Any, ...]:
    return first, second, rest, key, option, more


# Each example has the arguments of six parameters.
@settings(PROPERTY, max_examples=examples(50, 400))
@pytest.mark.timeout(400)
@given(st.data())
def test_every_call_comes_back_with_the_same_arguments(data: st.DataObject) -> None:
    kinds = {name: data.draw(KINDS) for name in ("first", "second", "rest", "key", "option", "more")}
    call.__annotations__ = {name: kind.annotation for name, kind in kinds.items()}
    task = Signature(call, "call")
    args = [data.draw(kinds["first"].values)]
    if data.draw(st.booleans()):
        args += [data.draw(kinds["second"].values), *data.draw(st.lists(kinds["rest"].values, max_size=3))]
    kwargs = {"key": data.draw(kinds["key"].values)}
    if data.draw(st.booleans()):
        kwargs["option"] = data.draw(kinds["option"].values)
    kwargs |= data.draw(st.dictionaries(st.sampled_from(["x", "more", "args"]), kinds["more"].values))
    body = pack_body(task.pack(tuple(args), kwargs), None, "call")
    back_args, back_kwargs = task.unpack(unpack(b"p1 1\n" + body).data)
    assert same(call(*args, **kwargs), call(*back_args, **back_kwargs))


@PROPERTY
@given(kind=KINDS, value=JSON)
def test_a_refused_result_names_its_place(kind: Kind, value: Any) -> None:
    call.__annotations__ = {"return": kind.annotation}
    task = Signature(call, "call")
    assume(task.keeps_result)
    try:
        packed = task.pack_result(value)
    except DoesNotFit as exc:
        assert str(exc).startswith("result")  # noqa: PT017
        return
    assert same(as_stored(value), as_stored(task.unpack_result(packed)))


NOT_FINITE = [float("nan"), float("inf"), -float("inf"), Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity")]


@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize("annotation", [float, Decimal, Any, int | float, float | Decimal])
def test_no_annotation_takes_nan_or_infinity(annotation: Any, value: Any) -> None:
    with pytest.raises(Misfit):
        Converter(annotation, "value").pack(value)
    with pytest.raises(Misfit):
        Converter(dict[str, list[annotation]], "value").pack({"a": [value]})
