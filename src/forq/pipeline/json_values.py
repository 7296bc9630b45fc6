"""Values of a DataFrame as the JSON that job data is."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import orjson
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
)

from forq.errors import InvalidData, UsageError

Reader = Callable[[Any], Any]


def json_reader(column: DataType) -> Reader:
    """How the values of the column `data` become job data: text is JSON itself, all else is written as JSON."""
    return _parse if isinstance(column, StringType) else _reader(column)


def _parse(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except ValueError as exc:
        raise InvalidData(f"data is not JSON: {exc} (a string column must hold JSON text: to_json makes it)") from exc


def _reader(column: DataType) -> Reader:
    if isinstance(column, DecimalType):
        return _from_decimal
    if isinstance(column, StringType | BooleanType | NumericType | NullType):
        return _as_it_is
    if isinstance(column, ArrayType):
        of_element = _reader(column.elementType)
        return lambda value: None if value is None else [of_element(one) for one in value]
    if isinstance(column, MapType) and isinstance(column.keyType, StringType):
        of_value = _reader(column.valueType)
        # Arrow gives a map as a list of pairs.
        return lambda value: None if value is None else {key: of_value(one) for key, one in value}
    if isinstance(column, StructType):
        of_field = {field.name: _reader(field.dataType) for field in column}
        return lambda value: None if value is None else {name: of_field[name](value[name]) for name in of_field}
    raise UsageError(
        f"data of type {column.simpleString()} has no form in JSON: structs, arrays, maps with string keys, numbers, "
        "booleans and strings have; to_json or a cast to string chooses one"
    )


def _as_it_is(value: Any) -> Any:
    return value


def _from_decimal(value: Decimal | None) -> float | int | None:
    if value is None:
        return None
    if value == value.to_integral_value():
        return int(value)
    if Decimal(repr(float(value))) != value:
        raise InvalidData(f"data has the number {value}, which JSON's readers would not keep exactly: use a string")
    return float(value)
