"""Packs values as JSON types: one function per kind of annotation.

Each function checks the exact type of a value, so that nothing comes back as another type.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any

from forq.broker.record import pack_data
from forq.errors import InvalidData
from forq.values import shown

Pack = Callable[[Any], Any]

# orjson writes and reads no others.
MIN_INT, MAX_INT = -(2**63), 2**64 - 1

_MINUTE = timedelta(minutes=1)
_NO_TIME = timedelta()
_TOO_LARGE = "int beyond 64 bits; use Decimal or str for larger numbers"
# The place and the reason in an error of pack_data.
_PLACE = re.compile(r"result(\[.*\])? ((?:is of type|has the key|is NaN) .*)\Z", re.DOTALL)


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
        separator = " " if self.reason.startswith(("is ", "has ", "lacks ")) else ": "
        return f"{root}{''.join(reversed(self.steps))}{separator}{self.reason}"


def type_name(cls: type) -> str:
    return "None" if cls is type(None) else cls.__name__


def unexpected(value: Any, expected: str) -> Misfit:
    found = "None" if value is None else f"{shown(value)} is {type_name(type(value))}"
    return Misfit(f"{found}, expected {expected}")


def pack_str(value: Any) -> Any:
    if type(value) is not str:
        raise unexpected(value, "str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Misfit(f"{shown(value)} is not valid Unicode: it contains a surrogate") from None
    return value


def pack_int(value: Any) -> Any:
    if type(value) is not int:
        raise unexpected(value, "int")
    if not MIN_INT <= value <= MAX_INT:
        raise Misfit(_TOO_LARGE)
    return value


def pack_float(value: Any) -> Any:
    if type(value) is int and abs(value) <= 2**1023:
        if float(value) != value:
            raise Misfit(f"{value} is int and has no equal float; use int or Decimal")
        return float(value)
    if type(value) is not float:
        raise unexpected(value, "float")
    if not isfinite(value):
        raise Misfit("NaN and Infinity are not allowed in JSON")
    return value


def pack_bool(value: Any) -> Any:
    if type(value) is not bool:
        raise unexpected(value, "bool")
    return value


def pack_none(value: Any) -> Any:
    if value is not None:
        raise unexpected(value, "None")
    return value


def time_packer(cls: type[datetime | time]) -> Pack:
    def pack(value: Any) -> str:
        if type(value) is not cls:
            raise unexpected(value, cls.__name__)
        if value.tzinfo is not None and value.tzinfo is not UTC:
            offset = value.utcoffset()
            if offset is None:
                raise Misfit(f"{value} has a time zone without a fixed offset; use datetime")
            if offset % _MINUTE != _NO_TIME:
                raise Misfit(f"{value} has an offset with seconds, which cannot be stored; convert it to UTC")
        text: str = value.isoformat()
        return text

    return pack


def text_packer(cls: type, text: Callable[[Any], str]) -> Pack:
    def pack(value: Any) -> str:
        if type(value) is not cls:
            raise unexpected(value, cls.__name__)
        return text(value)

    return pack


def pack_decimal(value: Any) -> str:
    if type(value) is not Decimal:
        raise unexpected(value, "Decimal")
    if not value.is_finite():
        raise Misfit("NaN and Infinity are not allowed")
    return str(value)


def pack_any(value: Any) -> Any:
    """JSON types only, as job data without a task: a tuple comes back as a list."""
    try:
        pack_data(value, "")
    except InvalidData as exc:
        _, _, text = str(exc).partition(" is not JSON: ")
        found = _PLACE.match(text)
        if found:
            raise Misfit(found[2], found[1] or "") from None
        raise Misfit(_TOO_LARGE if "64-bit" in text else text) from None
    return value


def literal_packer(values: tuple[Any, ...]) -> Pack:
    allowed = {(type(value), value) for value in values}
    types = {type(value) for value in values}
    expected = "one of " + ", ".join(map(repr, values)) if len(values) > 1 else repr(values[0])

    def pack(value: Any) -> Any:
        if type(value) not in types or (type(value), value) not in allowed:
            raise Misfit(f"{shown(value)}, expected {expected}")
        return value

    return pack


def enum_packer(cls: Any) -> Pack:
    def pack(value: Any) -> Any:
        if type(value) is not cls:
            raise unexpected(value, cls.__name__)
        stored = value.value
        return stored if type(stored) is str else pack_int(stored)

    return pack


def collection_packer(cls: Any, pack_item: Pack) -> Pack:
    def pack(value: Any) -> list[Any]:
        if type(value) is not cls:
            raise unexpected(value, cls.__name__)
        packed: list[Any] = []
        try:
            for item in value:
                packed.append(pack_item(item))  # noqa: PERF401 (its length is the place of a misfit)
        except Misfit as misfit:
            raise misfit.at(f"[{len(packed)}]" if cls in (list, tuple) else "[...]") from None
        return packed

    return pack


def tuple_packer(pack_items: list[Pack]) -> Pack:
    def pack(value: Any) -> list[Any]:
        if type(value) is not tuple:
            raise unexpected(value, "tuple")
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


def dict_packer(pack_key: Pack, pack_value: Pack) -> Pack:
    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise unexpected(value, "dict")
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


def typed_dict_packer(fields: dict[str, Pack], required: set[str]) -> Pack:
    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise unexpected(value, "dict")
        for name in required:
            if name not in value:
                raise Misfit(f"lacks the key {name!r}")
        packed = {}
        for name, item in value.items():
            pack_item = fields.get(name) if type(name) is str else None
            if pack_item is None:
                raise Misfit(f"has the key {shown(name)}, which its TypedDict does not declare")
            try:
                packed[name] = pack_item(item)
            except Misfit as misfit:
                raise misfit.at(f".{name}") from None
        return packed

    return pack


def named_tuple_packer(cls: type, fields: dict[str, Pack]) -> Pack:
    as_object = object_packer(cls, fields)

    def pack(value: Any) -> list[Any]:
        return list(as_object(value).values())

    return pack


def object_packer(cls: type, fields: dict[str, Pack]) -> Pack:
    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not cls:
            raise unexpected(value, cls.__name__)
        packed = {}
        name = ""
        try:
            for name, pack_item in fields.items():
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


def model_packer(cls: Any) -> Pack:
    def pack(value: Any) -> Any:
        if type(value) is not cls:
            raise unexpected(value, cls.__name__)
        try:
            dumped = value.model_dump(mode="json", by_alias=True, warnings=False)
        except Exception as exc:
            raise Misfit(f"{cls.__name__} cannot be dumped: {exc}") from exc
        return pack_any(dumped)

    return pack
