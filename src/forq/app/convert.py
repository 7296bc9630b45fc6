"""Converts values to JSON types and back, by annotation.

msgspec reads annotations and converts back. Packing is our own walk over msgspec's description of the annotation: it
compares exact types, names the place of a value that does not fit, and packs fields that msgspec's own encoder leaves
out (names that begin with an underscore).
"""

import re
from binascii import b2a_base64
from collections.abc import Callable, Iterator
from dataclasses import InitVar, is_dataclass
from dataclasses import fields as dataclass_fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
from msgspec import inspect as info

from forq.app.packing import (
    Misfit,
    Pack,
    collection_packer,
    dict_packer,
    enum_packer,
    is_model,
    literal_packer,
    model_packer,
    named_tuple_packer,
    object_packer,
    pack_any,
    pack_bool,
    pack_decimal,
    pack_float,
    pack_int,
    pack_none,
    pack_str,
    text_packer,
    time_packer,
    tuple_packer,
    type_name,
    typed_dict_packer,
    unexpected,
)
from forq.broker.record import pack_data
from forq.errors import InvalidTask
from forq.values import shown

# Prefixes such as "typing.", outside the strings of a Literal.
_MODULES = re.compile(r"('[^']*'|\"[^\"]*\")|(?:\b[A-Za-z_]\w*\.|<locals>\.)+(?=[A-Za-z_])")
_MSGSPEC_PLACE = re.compile(r"(.*) - at `(key` in `)?\$\[0\](.*)`\Z", re.DOTALL)
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
    "deque": "use list",
    "defaultdict": "use dict",
    "OrderedDict": "use dict",
    "Counter": "use dict",
    "Callable": "pass its name",
    "type": "pass its name",
    "bytearray": "use bytes",
    "memoryview": "use bytes",
}


class Converter:
    """Converts the values of one annotation.

    `place` names the annotation in errors, such as "argument order". `native` holds the types whose values JSON keeps
    as they are.
    """

    def __init__(self, annotation: Any, place: str) -> None:
        self.annotation = annotation
        compiler = _Compiler()
        described, self._holder = _describe(annotation, place)
        self._pack = compiler.pack(described, place)
        members = described.types if isinstance(described, info.UnionType) else (described,)
        self.native = {_NATIVE[type(each)] for each in members if each in _UNCONSTRAINED and type(each) in _NATIVE}
        self.pack: Pack = self._pack_and_compare if compiler.needs_comparison else self._pack

    def unpack(self, data: Any) -> Any:
        """Raises Misfit."""
        if self.annotation is Any:
            return data
        try:
            return msgspec.convert([data], self._holder, strict=True, str_keys=True, dec_hook=_unpack_model).value
        except msgspec.ValidationError as exc:
            raise _misfit_of(exc) from exc
        except Exception as exc:  # raised by a user's class
            raise Misfit(f"{type(exc).__name__}: {exc}") from exc

    def _pack_and_compare(self, value: Any) -> Any:
        """Classes may compute, drop or refuse values when they are built, so the value is converted back at once."""
        data = self._pack(value)
        _compare(value, self.unpack(data))
        return data


def _describe(annotation: Any, place: str) -> tuple[info.Type, Any]:
    """msgspec's description, and a class with one field of that annotation."""
    try:
        return _read(annotation)
    except Exception as exc:
        found = _narrow(annotation, place, exc, [annotation])
        place, part, cause = found or (place, annotation, exc)
        raise InvalidTask(f"{place}: {_refusal(part, cause)}") from exc


def _read(annotation: Any) -> tuple[info.Type, Any]:
    # msgspec keeps what it knows of a class, but would read other annotations again at each conversion.
    holder = msgspec.defstruct("Holder", [("value", annotation)], array_like=True)
    msgspec.json.Decoder(holder)
    return info.type_info(annotation), holder


def _narrow(annotation: Any, place: str, exc: Exception, seen: list[Any]) -> tuple[str, Any, Exception] | None:
    """The innermost part that msgspec refuses, since msgspec names no place; None if `seen` holds all of its parts."""
    innermost = True
    for step, part in _parts(annotation):
        try:
            _read(part)
        except Exception as inner:
            innermost = False
            if part not in seen:
                seen.append(part)
                if found := _narrow(part, place + step, inner, seen):
                    return found
    return (place, annotation, exc) if innermost else None


def _parts(annotation: Any) -> Iterator[tuple[str, Any]]:
    cls = get_origin(annotation) or annotation
    if cls is Literal:
        return
    if isinstance(cls, type) and hasattr(cls, "__annotations__"):
        try:
            hints = get_type_hints(cls, include_extras=True)
        except Exception:  # a name that cannot be resolved: the class is the place
            return
        yield from ((f".{name}", hint) for name, hint in hints.items())
    elif isinstance(cls, type) and issubclass(cls, list | dict | tuple | set | frozenset):
        yield from (("[...]", part) for part in get_args(annotation) if part is not Ellipsis)
    else:
        yield from (("", part) for part in get_args(annotation))


def _refusal(annotation: Any, exc: Exception) -> str:
    shown_annotation = show_annotation(annotation)
    reason = re.split(r" - (?:type|constraints)|\. If ", str(exc))[0]
    if "custom type" in reason:
        return (
            f"{shown_annotation} is refused: only None may stand beside a pydantic model or a foreign class in a union"
        )
    if reason.startswith("Type unions may not contain more than one "):
        kinds = reason.removeprefix("Type unions may not contain more than one ").partition(" ")[0]
        kind = {"str-like": "a string", "int-like": "a number", "array-like": "an array"}.get(kinds, "an object")
        return (
            f"{shown_annotation} is refused: JSON stores more than one of these types as {kind}, so they cannot be "
            "told apart; use one of them, or a dataclass with a field for each"
        )
    if isinstance(annotation, InitVar):
        return f"{shown_annotation} is refused: its value is not kept, so the class cannot be rebuilt; use a field"
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
    return _MODULES.sub(lambda found: found[1] or "", str(annotation))


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
                return literal_packer(values)
            case info.EnumType(cls=cls):
                return enum_packer(cls)
            case info.ListType() | info.SetType() | info.FrozenSetType() | info.VarTupleType():
                self.needs_comparison |= (described.min_length, described.max_length) != (None, None)
                return collection_packer(_COLLECTIONS[type(described)], self.pack(described.item_type, f"{place}[...]"))
            case info.TupleType(item_types=items):
                return tuple_packer([self.pack(item, f"{place}[{index}]") for index, item in enumerate(items)])
            case info.DictType():
                self.needs_comparison |= (described.min_length, described.max_length) != (None, None)
                return dict_packer(
                    self._key(described.key_type, place), self.pack(described.value_type, f"{place}[...]")
                )
            case info.UnionType(types=types):
                return self._union(types, place)
            case info.TypedDictType() | info.NamedTupleType() | info.DataclassType():
                return self._class(described, place)
            case info.CustomType(cls=cls) if is_model(cls):
                self.needs_comparison = True
                return model_packer(cls)
        kind = type(described).__name__.removesuffix("Type").lower()
        name = show_annotation(getattr(described, "cls", kind))
        instead = _INSTEAD.get(name, "use a dataclass, or pass an id and load it in the task")
        raise InvalidTask(f"{place}: {name} cannot be converted to JSON and back; {instead}")

    def _class(self, described: info.TypedDictType | info.NamedTupleType | info.DataclassType, place: str) -> Pack:
        if described.cls in self._classes:
            return self._classes[described.cls]
        fields: dict[str, Pack] = {}
        cls = get_origin(described.cls) or described.cls
        if isinstance(described, info.TypedDictType):
            required = {field.name for field in described.fields if field.required}
            packed = typed_dict_packer(fields, required)
        elif isinstance(described, info.NamedTupleType):
            packed = named_tuple_packer(cls, fields)
        else:
            self.needs_comparison = True
            packed = object_packer(cls, fields)
        # Before its fields: a class may contain itself.
        self._classes[described.cls] = packed
        fields |= {field.name: self.pack(field.type, f"{place}.{field.name}") for field in described.fields}
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
            return pack_str
        pack = self.pack(described, place)

        def key(value: Any) -> str:
            packed = pack(value)
            return packed if type(packed) is str else str(packed)

        return key

    def _union(self, types: tuple[info.Type, ...], place: str) -> Pack:
        if any(isinstance(each, info.AnyType) for each in types):
            return pack_any
        by_type: dict[type, Pack] = {}
        # Literals first: str beside Literal["a"] takes every str.
        for each in sorted(types, key=lambda each: not isinstance(each, info.LiteralType)):
            pack = self.pack(each, place)
            by_type |= dict.fromkeys(_types_of(each), pack)
        expected = " or ".join(type_name(cls) for cls in by_type)
        if float in by_type:
            by_type.setdefault(int, by_type[float])

        def union(value: Any) -> Any:
            pack = by_type.get(type(value))
            if pack is None:
                raise unexpected(value, expected)
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
    info.AnyType: pack_any,
    info.StrType: pack_str,
    info.IntType: pack_int,
    info.FloatType: pack_float,
    info.BoolType: pack_bool,
    info.NoneType: pack_none,
    info.DateTimeType: time_packer(datetime),
    info.TimeType: time_packer(time),
    info.DateType: text_packer(date, date.isoformat),
    info.TimeDeltaType: text_packer(timedelta, msgspec.to_builtins),
    info.UUIDType: text_packer(UUID, str),
    info.BytesType: text_packer(bytes, lambda value: b2a_base64(value, newline=False).decode("ascii")),
    info.DecimalType: pack_decimal,
}
# Without limits such as Annotated[int, msgspec.Meta(gt=0)].
_UNCONSTRAINED = [leaf() for leaf in _LEAVES]


def _unpack_model(cls: Any, data: Any) -> Any:
    """Validates JSON text, since strict models take dates, sets and bytes only from there."""
    try:
        return cls.model_validate_json(pack_data(data))
    except ValueError as exc:
        # pydantic's own text has several lines and shows values.
        errors = exc.errors() if hasattr(exc, "errors") else []
        texts = ["".join(f"{step}: " for step in each["loc"]) + each["msg"] for each in errors]
        raise ValueError("; ".join(texts) or str(exc)) from exc


_SIMPLE = {str, int, float, bool, type(None), Decimal, UUID, date, timedelta, bytes}


def _compare(value: Any, back: Any) -> None:
    """Raises Misfit where the value that comes back differs in value or type."""
    kind = type(value)
    if kind in _SIMPLE and kind is type(back) and value == back:
        return
    if kind is not type(back):
        if kind is int and type(back) is float and value == back:
            return
        raise Misfit(f"{shown(value)} is {type_name(kind)}, but comes back as {type_name(type(back))}")
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


def _read_field_names(cls: Any) -> list[str] | None:
    if is_dataclass(cls):
        return [field.name for field in dataclass_fields(cls)]
    if is_model(cls):
        return list(cls.model_fields)
    if hasattr(cls, "__attrs_attrs__"):
        return [field.name for field in cls.__attrs_attrs__]
    return list(cls._fields) if issubclass(cls, tuple) and hasattr(cls, "_fields") else None


_field_names: Callable[[Any], list[str] | None] = lru_cache(1000)(_read_field_names)


def _misfit_of(exc: msgspec.ValidationError) -> Misfit:
    """msgspec's text and place, in our words."""
    text = str(exc)
    reason, key, place = found.groups() if (found := _MSGSPEC_PLACE.match(text)) else (text, None, "")
    if _MSGSPEC_TEXT.match(reason):
        reason = reason[0].lower() + reason[1:].replace("`", "")
    return Misfit(f"key: {reason}" if key else reason, place)
