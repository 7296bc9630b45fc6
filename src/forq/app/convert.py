"""Converts values to JSON types and back, by annotation.

msgspec reads annotations and converts back. Packing is our own walk over msgspec's description of the annotation: it
compares exact types, names the place of a value that does not fit, and packs fields that msgspec's own encoder leaves
out (names that begin with an underscore).
"""

import re
from binascii import b2a_base64
from collections.abc import Callable, Iterator
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
from msgspec import inspect as info

from forq.broker.record import pack_data
from forq.errors import InvalidData, InvalidTask
from forq.values import shown

Pack = Callable[[Any], Any]

# orjson writes and reads no others.
MIN_INT, MAX_INT = -(2**63), 2**64 - 1

_MINUTE = timedelta(minutes=1)
_NO_TIME = timedelta()
_MSGSPEC_PLACE = re.compile(r"(.*) - at `(key` in `)?\$(.*)`\Z", re.DOTALL)
_MSGSPEC_TEXT = re.compile(r"(Expected|Invalid|Object|Missing|Unable) ")

# Annotations that convert to JSON text, as dict keys must.
_KEY_TYPES = (
    info.AnyType | info.StrType | info.IntType | info.FloatType | info.EnumType | info.LiteralType | info.BytesType
    | info.DateTimeType | info.DateType | info.TimeType | info.TimeDeltaType | info.UUIDType | info.DecimalType
)  # fmt: skip
_INSTEAD = {
    "Job": "call forq.current_job() in the function",
    "object": "use Any for JSON types",
    "Path": "use str",
    "PurePath": "use str",
    "Iterable": "use list",
    "Iterator": "use list",
    "bytearray": "use bytes",
    "memoryview": "use bytes",
}


class Misfit(Exception):
    """A value that does not fit. Each container on the way out adds its step to the place."""

    def __init__(self, reason: str, *steps: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps = list(steps)

    def at(self, step: str) -> "Misfit":
        self.steps.append(step)
        return self

    def text(self, root: str) -> str:
        return f"{root}{''.join(reversed(self.steps))}: {self.reason}"


class Converter:
    """Converts the values of one annotation.

    `place` names the annotation in errors, such as "argument order"; `native` is the one type that JSON keeps as it
    is, or None.
    """

    def __init__(self, annotation: Any, place: str) -> None:
        self.annotation = annotation
        compiler = _Compiler()
        described = _describe(annotation, place)
        self._pack = compiler.pack(described, place)
        self.native = _NATIVE.get(type(described)) if described in _UNCONSTRAINED else None
        self.pack: Pack = self._pack_and_compare if compiler.needs_comparison else self._pack

    def unpack(self, data: Any) -> Any:
        """Raises Misfit."""
        try:
            return msgspec.convert(data, self.annotation, strict=True, str_keys=True, dec_hook=_unpack_model)
        except msgspec.ValidationError as exc:
            raise _misfit_of(exc) from exc
        except Exception as exc:  # raised by a user's class
            raise Misfit(f"{type(exc).__name__}: {exc}") from exc

    def _pack_and_compare(self, value: Any) -> Any:
        """Classes may compute, drop or refuse values when they are built, so the value is converted back at once."""
        data = self._pack(value)
        _compare(value, self.unpack(data))
        return data


def _describe(annotation: Any, place: str) -> info.Type:
    try:
        return info.type_info(annotation)
    except Exception as exc:
        place, part, cause = _narrow(annotation, place, exc)
        raise InvalidTask(f"{place}: {_refusal(part, cause)}") from exc


def _narrow(annotation: Any, place: str, exc: Exception) -> tuple[str, Any, Exception]:
    """The innermost part of a refused annotation that is refused alone; msgspec does not name the place."""
    for step, part in _parts(annotation):
        try:
            info.type_info(part)
        except Exception as inner:
            if len(place) < 1000:  # a class may contain itself
                return _narrow(part, place + step, inner)
    return place, annotation, exc


def _parts(annotation: Any) -> Iterator[tuple[str, Any]]:
    cls = get_origin(annotation) or annotation
    if isinstance(cls, type) and hasattr(cls, "__annotations__"):
        try:
            hints = get_type_hints(cls, include_extras=True)
        except Exception:  # a name that cannot be resolved: the class is the place
            return
        yield from ((f".{name}", hint) for name, hint in hints.items())
    elif isinstance(cls, type) and issubclass(cls, list | dict | tuple | set | frozenset):
        yield from (("[...]", part) for part in get_args(annotation) if part is not Ellipsis)
    else:
        yield from (("", part) for part in get_args(annotation) if not isinstance(part, str | int | bytes | None))


def _refusal(annotation: Any, exc: Exception) -> str:
    shown_annotation = show_annotation(annotation)
    reason = str(exc).partition(" - type `")[0]
    if "custom type" in reason:
        return f"{shown_annotation} is refused: only None may stand beside a pydantic model or another class in a union"
    if reason.startswith("Type unions may not contain more than one "):
        kinds = reason.removeprefix("Type unions may not contain more than one ").partition(" ")[0]
        kind = {"str-like": "a string", "int-like": "a number", "array-like": "an array"}.get(kinds, "an object")
        return (
            f"{shown_annotation} is refused: JSON stores more than one of these types as {kind}, so they cannot be "
            "told apart; use one of them, or a dataclass with a field for each"
        )
    if isinstance(exc, NameError):
        return f"{shown_annotation} is refused: {exc}; import that name outside `if TYPE_CHECKING`"
    if isinstance(exc, KeyError):
        return f"{shown_annotation} is refused: its field {exc} has no annotation"
    return f"{shown_annotation} is refused: {reason[:1].lower()}{reason[1:]}"


def show_annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type) and not get_args(annotation):
        return "None" if annotation is type(None) else annotation.__name__
    return re.sub(r"\b(?:[A-Za-z_]\w*\.|<locals>\.)+(?=[A-Za-z_])", "", str(annotation))


class _Compiler:
    """Builds the packing function of an annotation, once per class that it contains."""

    def __init__(self) -> None:
        self.needs_comparison = False
        self._classes: dict[Any, Pack] = {}

    def pack(self, described: info.Type, place: str) -> Pack:
        if type(described) in _LEAVES:
            self.needs_comparison |= described not in _UNCONSTRAINED
            return _LEAVES[type(described)]
        match described:
            case info.Metadata(type=inner):
                return self.pack(inner, place)
            case info.LiteralType(values=values):
                return _literal(values)
            case info.EnumType(cls=cls):
                return _enum(cls)
            case info.ListType() | info.SetType() | info.FrozenSetType() | info.VarTupleType():
                self.needs_comparison |= (described.min_length, described.max_length) != (None, None)
                return _collection(_COLLECTIONS[type(described)], self.pack(described.item_type, f"{place}[...]"))
            case info.TupleType(item_types=items):
                return _tuple([self.pack(item, f"{place}[{index}]") for index, item in enumerate(items)])
            case info.DictType():
                self.needs_comparison |= (described.min_length, described.max_length) != (None, None)
                return _dict(self._key(described.key_type, place), self.pack(described.value_type, f"{place}[...]"))
            case info.UnionType(types=types):
                return self._union(types, place)
            case info.TypedDictType() | info.NamedTupleType() | info.DataclassType():
                return self._class(described, place)
            case info.CustomType(cls=cls) if is_model(cls):
                self.needs_comparison = True
                return _model(cls)
        kind = type(described).__name__.removesuffix("Type").lower()
        name = show_annotation(getattr(described, "cls", kind))
        instead = _INSTEAD.get(name, "use a dataclass, or pass an id and load it in the task")
        raise InvalidTask(f"{place}: {name} cannot be converted to JSON and back; {instead}")

    def _class(self, described: info.TypedDictType | info.NamedTupleType | info.DataclassType, place: str) -> Pack:
        if described.cls in self._classes:
            return self._classes[described.cls]
        fields: list[tuple[str, Pack]] = []
        cls = get_origin(described.cls) or described.cls
        if isinstance(described, info.TypedDictType):
            required = {field.name for field in described.fields if field.required}
            packed = _typed_dict(fields, required)
        elif isinstance(described, info.NamedTupleType):
            packed = _named_tuple(cls, fields)
        else:
            self.needs_comparison = True
            packed = _object(cls, fields)
        # Before its fields: a class may contain itself.
        self._classes[described.cls] = packed
        fields += [(field.name, self.pack(field.type, f"{place}.{field.name}")) for field in described.fields]
        return packed

    def _key(self, described: info.Type, place: str) -> Pack:
        values = described.values if isinstance(described, info.LiteralType) else ()
        if not isinstance(described, _KEY_TYPES) or len({type(value) for value in values} - {str, int}) > 0:
            raise InvalidTask(
                f"{place}: its keys cannot be converted to JSON and back; use str, int, UUID, an Enum or a date as keys"
            )
        if len({type(value) for value in values}) > 1:
            raise InvalidTask(f"{place}: Literal keys of more than one type cannot be told apart; use one type")
        if isinstance(described, info.AnyType):
            return _pack_str
        pack = self.pack(described, place)

        def key(value: Any) -> str:
            packed = pack(value)
            return packed if type(packed) is str else str(packed)

        return key

    def _union(self, types: tuple[info.Type, ...], place: str) -> Pack:
        if any(isinstance(each, info.AnyType) for each in types):
            return _pack_any
        by_type: dict[type, Pack] = {}
        # Literals first: str beside Literal["a"] takes every str.
        for each in sorted(types, key=lambda each: not isinstance(each, info.LiteralType)):
            pack = self.pack(each, place)
            by_type |= dict.fromkeys(_types_of(each), pack)
        if float in by_type:
            by_type.setdefault(int, by_type[float])
        expected = " or ".join(_name(cls) for cls in by_type)

        def union(value: Any) -> Any:
            pack = by_type.get(type(value))
            if pack is None:
                raise _unexpected(value, expected)
            return pack(value)

        return union


def _types_of(described: info.Type) -> list[type]:
    """The exact types of the values that a member of a union takes."""
    match described:
        case info.Metadata(type=inner):
            return _types_of(inner)
        case info.LiteralType(values=values):
            return [type(value) for value in values]
        case info.TypedDictType() | info.DictType():
            return [dict]
        case info.TupleType():
            return [tuple]
        case info.EnumType() | info.CustomType() | info.NamedTupleType() | info.DataclassType():
            return [get_origin(described.cls) or described.cls]
    return [_NATIVE.get(type(described)) or _COLLECTIONS.get(type(described)) or _TEXTS[type(described)]]


def _name(cls: type) -> str:
    return "None" if cls is type(None) else cls.__name__


def _unexpected(value: Any, expected: str) -> Misfit:
    found = "None" if value is None else f"{shown(value)} is {_name(type(value))}"
    return Misfit(f"{found}, expected {expected}")


def _pack_str(value: Any) -> Any:
    if type(value) is not str:
        raise _unexpected(value, "str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Misfit(f"{shown(value)} is not valid Unicode: it contains a surrogate") from None
    return value


def _pack_int(value: Any) -> Any:
    if type(value) is not int:
        raise _unexpected(value, "int")
    if not MIN_INT <= value <= MAX_INT:
        raise Misfit("int beyond 64 bits; use Decimal or str for larger numbers")
    return value


def _pack_float(value: Any) -> Any:
    if type(value) is int and abs(value) <= 2**1023:
        if float(value) != value:
            raise Misfit(f"{value} is int and has no equal float; use int or Decimal")
        return float(value)
    if type(value) is not float:
        raise _unexpected(value, "float")
    if not isfinite(value):
        raise Misfit("NaN and Infinity are not allowed in JSON")
    return value


def _pack_bool(value: Any) -> Any:
    if type(value) is not bool:
        raise _unexpected(value, "bool")
    return value


def _pack_none(value: Any) -> Any:
    if value is not None:
        raise _unexpected(value, "None")
    return value


def _pack_time(cls: type[datetime | time]) -> Pack:
    def pack(value: Any) -> str:
        if type(value) is not cls:
            raise _unexpected(value, cls.__name__)
        if value.tzinfo is not None:
            offset = value.utcoffset()
            if offset is None:
                raise Misfit(f"{value} has a time zone without a fixed offset; use datetime")
            if offset % _MINUTE != _NO_TIME:
                raise Misfit(f"{value} has an offset with seconds, which cannot be stored; convert it to UTC")
        text: str = value.isoformat()
        return text

    return pack


def _pack_text(cls: type, text: Callable[[Any], str]) -> Pack:
    def pack(value: Any) -> str:
        if type(value) is not cls:
            raise _unexpected(value, cls.__name__)
        return text(value)

    return pack


def _pack_decimal(value: Any) -> str:
    if type(value) is not Decimal:
        raise _unexpected(value, "Decimal")
    if not value.is_finite():
        raise Misfit("NaN and Infinity are not allowed")
    return str(value)


def _pack_any(value: Any) -> Any:
    """JSON types only, as job data without a task: a tuple comes back as a list."""
    try:
        pack_data(value, "")
    except InvalidData as exc:
        _, _, reason = str(exc).partition(" is not JSON: ")
        place, verb, reason = reason.rpartition(" is of type ") if " is of type " in reason else ("", "", reason)
        raise Misfit(f"{verb.lstrip()}{reason}", place.removeprefix("result")) from None
    return value


_NATIVE: dict[type[info.Type], type] = {
    info.StrType: str,
    info.IntType: int,
    info.FloatType: float,
    info.BoolType: bool,
    info.NoneType: type(None),
}
_TEXTS: dict[type[info.Type], type] = {
    info.DateTimeType: datetime,
    info.DateType: date,
    info.TimeType: time,
    info.TimeDeltaType: timedelta,
    info.UUIDType: UUID,
    info.DecimalType: Decimal,
    info.BytesType: bytes,
}
_COLLECTIONS: dict[type[info.Type], type] = {
    info.ListType: list,
    info.SetType: set,
    info.FrozenSetType: frozenset,
    info.VarTupleType: tuple,
}
_LEAVES: dict[type[info.Type], Pack] = {
    info.AnyType: _pack_any,
    info.StrType: _pack_str,
    info.IntType: _pack_int,
    info.FloatType: _pack_float,
    info.BoolType: _pack_bool,
    info.NoneType: _pack_none,
    info.DateTimeType: _pack_time(datetime),
    info.TimeType: _pack_time(time),
    info.DateType: _pack_text(date, date.isoformat),
    info.TimeDeltaType: _pack_text(timedelta, msgspec.to_builtins),
    info.UUIDType: _pack_text(UUID, str),
    info.BytesType: _pack_text(bytes, lambda value: b2a_base64(value, newline=False).decode("ascii")),
    info.DecimalType: _pack_decimal,
}
# Without limits such as Annotated[int, msgspec.Meta(gt=0)].
_UNCONSTRAINED = [leaf() for leaf in _LEAVES]


def _literal(values: tuple[Any, ...]) -> Pack:
    allowed = {(type(value), value) for value in values}
    types = {type(value) for value in values}
    expected = "one of " + ", ".join(map(repr, values)) if len(values) > 1 else repr(values[0])

    def pack(value: Any) -> Any:
        if type(value) not in types or (type(value), value) not in allowed:
            raise Misfit(f"{shown(value)}, expected {expected}")
        return value

    return pack


def _enum(cls: Any) -> Pack:
    def pack(value: Any) -> Any:
        if type(value) is not cls:
            raise _unexpected(value, cls.__name__)
        stored = value.value
        return stored if type(stored) is str else _pack_int(stored)

    return pack


def _collection(cls: Any, pack_item: Pack) -> Pack:
    def pack(value: Any) -> list[Any]:
        if type(value) is not cls:
            raise _unexpected(value, cls.__name__)
        packed: list[Any] = []
        try:
            for item in value:
                packed.append(pack_item(item))  # noqa: PERF401 (its length is the place of a misfit)
        except Misfit as misfit:
            raise misfit.at(f"[{len(packed)}]" if cls in (list, tuple) else "[...]") from None
        return packed

    return pack


def _tuple(pack_items: list[Pack]) -> Pack:
    def pack(value: Any) -> list[Any]:
        if type(value) is not tuple:
            raise _unexpected(value, "tuple")
        if len(value) != len(pack_items):
            raise Misfit(f"a tuple of length {len(value)}, expected length {len(pack_items)}")
        packed: list[Any] = []
        try:
            for pack_item, item in zip(pack_items, value, strict=True):
                packed.append(pack_item(item))
        except Misfit as misfit:
            raise misfit.at(f"[{len(packed)}]") from None
        return packed

    return pack


def _dict(pack_key: Pack, pack_value: Pack) -> Pack:
    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _unexpected(value, "dict")
        packed = {}
        for key, item in value.items():
            try:
                name = pack_key(key)
            except Misfit as misfit:
                raise Misfit(f"key {misfit.reason}", *misfit.steps) from None
            try:
                packed[name] = pack_value(item)
            except Misfit as misfit:
                raise misfit.at(f"[{shown(key)}]") from None
        return packed

    return pack


def _typed_dict(fields: list[tuple[str, Pack]], required: set[str]) -> Pack:
    by_name: dict[str, Pack] = {}

    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _unexpected(value, "dict")
        if not by_name:
            by_name.update(fields)
        for name in required:
            if name not in value:
                raise Misfit(f"lacks the key {name!r}")
        packed = {}
        for name, item in value.items():
            pack_item = by_name.get(name) if type(name) is str else None
            if pack_item is None:
                raise Misfit(f"has the key {shown(name)}, which its TypedDict does not declare")
            try:
                packed[name] = pack_item(item)
            except Misfit as misfit:
                raise misfit.at(f".{name}") from None
        return packed

    return pack


def _named_tuple(cls: type, fields: list[tuple[str, Pack]]) -> Pack:
    as_object = _object(cls, fields)

    def pack(value: Any) -> list[Any]:
        return list(as_object(value).values())

    return pack


def _object(cls: type, fields: list[tuple[str, Pack]]) -> Pack:
    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not cls:
            raise _unexpected(value, cls.__name__)
        packed = {}
        name = ""
        try:
            for name, pack_item in fields:
                packed[name] = pack_item(getattr(value, name))
        except Misfit as misfit:
            raise misfit.at(f".{name}") from None
        except AttributeError:
            raise Misfit("has no value", f".{name}") from None
        return packed

    return pack


def is_model(cls: Any) -> bool:
    """Whether it is a pydantic model, without importing pydantic."""
    return hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_dump") and hasattr(cls, "model_validate_json")


def _model(cls: Any) -> Pack:
    def pack(value: Any) -> Any:
        if type(value) is not cls:
            raise _unexpected(value, cls.__name__)
        try:
            dumped = value.model_dump(mode="json", by_alias=True, warnings=False)
        except Exception as exc:
            raise Misfit(f"{cls.__name__} cannot be dumped: {exc}") from exc
        return _pack_any(dumped)

    return pack


def _unpack_model(cls: Any, data: Any) -> Any:
    """Validates JSON text, since strict models take dates, sets and bytes only from there."""
    return cls.model_validate_json(pack_data(data))


def _compare(value: Any, back: Any) -> None:
    """Raises Misfit where the value that comes back differs in value or type."""
    kind = type(value)
    if kind is not type(back):
        if kind is int and type(back) is float and value == back:
            return
        raise Misfit(f"{shown(value)} is {_name(kind)}, but comes back as {_name(type(back))}")
    if kind is datetime or kind is time:
        # Times in the hour that a zone repeats equal no time of another zone.
        same = value.isoformat() == back.isoformat()
    elif kind is list or kind is tuple:
        same = len(value) == len(back)
        for index, (item, back_item) in enumerate(zip(value, back, strict=False)):
            _compare_at(f"[{index}]", item, back_item)
    elif kind is dict:
        same = value.keys() == back.keys()
        for key in value.keys() & back.keys():
            _compare_at(f"[{shown(key)}]", value[key], back[key])
    elif (names := _field_names(kind)) is not None:
        same = True
        for name in names:
            _compare_at(f".{name}", getattr(value, name, None), getattr(back, name, None))
        if is_model(kind):
            _compare(value.model_extra, back.model_extra)
    else:
        same = bool(value == back)
    if not same:
        raise Misfit(f"{shown(value)} would come back as {shown(back)}")


def _compare_at(step: str, value: Any, back: Any) -> None:
    try:
        _compare(value, back)
    except Misfit as misfit:
        raise misfit.at(step) from None


def _field_names(cls: Any) -> list[str] | None:
    if is_dataclass(cls):
        return [field.name for field in dataclass_fields(cls)]
    if is_model(cls):
        return list(cls.model_fields)
    if hasattr(cls, "__attrs_attrs__"):
        return [field.name for field in cls.__attrs_attrs__]
    return list(cls._fields) if issubclass(cls, tuple) and hasattr(cls, "_fields") else None


def _misfit_of(exc: msgspec.ValidationError) -> Misfit:
    """msgspec's text and place, in our words."""
    text = str(exc)
    reason, key, place = found.groups() if (found := _MSGSPEC_PLACE.match(text)) else (text, None, "")
    if _MSGSPEC_TEXT.match(reason):
        reason = reason[0].lower() + reason[1:].replace("`", "")
    return Misfit(f"key: {reason}" if key else reason, place)
