"""What the values of Debezium and Kafka Connect become before they are decoded as JSON.

Debezium writes a time as a number of days or fractions of a second, a decimal as the bytes of a whole number, and JSON
as text. A conversion makes of such a value the JSON that ``Json`` decodes exactly into the declared column, or refuses
it. It is made once for a column, from the name of the semantic type in the schema of the message. Without a schema the
declared type and the options that are named as Debezium's decide.
"""

from __future__ import annotations

import enum
import hashlib
import json
import uuid
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from spark_jobs.decoding.json_values import (
    EPOCH,
    WHITE_SPACE,
    Float,
    Integer,
    Number,
    UnfitError,
    is_variant,
    kind_of,
    read_base64,
    refuse_constant,
    scanner,
)
from stream_consumers.options import choose_fields

Convert: TypeAlias = Callable[[Any], Any]
"""Makes a value of JSON of another one, neither of which is null, or raises ``UnfitError``."""
CONNECT, TIME, DATA = "org.apache.kafka.connect.data.", "io.debezium.time.", "io.debezium.data."
MAX_DECIMAL_BYTES = 400
"""How many bytes the whole number of a decimal may have, for about 960 digits."""
MAX_SCALE = 1000
_MILLISECONDS, _MICROSECONDS, _NANOSECONDS = 10**3, 10**6, 10**9
_YEARS = "in the years 1 to 9999"
_WIDEST_INTEGER = 20
_NO_SCHEMA: Mapping[str, Any] = {}
_scan = scanner(parse_constant=refuse_constant)


class TimePrecisionMode(str, enum.Enum):
    """Debezium's ``time.precision.mode``, which decides the unit of times in messages without a schema."""

    ADAPTIVE = "adaptive"
    ADAPTIVE_TIME_MICROSECONDS = "adaptive_time_microseconds"
    CONNECT = "connect"
    ISOSTRING = "isostring"
    MICROSECONDS = "microseconds"
    NANOSECONDS = "nanoseconds"


_UNITS = {
    TimePrecisionMode.CONNECT: _MILLISECONDS,
    TimePrecisionMode.MICROSECONDS: _MICROSECONDS,
    TimePrecisionMode.NANOSECONDS: _NANOSECONDS,
}


class DecimalHandlingMode(str, enum.Enum):
    """Debezium's ``decimal.handling.mode``, which decides what text of a DECIMAL is in messages without a schema."""

    PRECISE = "precise"
    DOUBLE = "double"
    STRING = "string"


@dataclass(frozen=True, slots=True)
class HandlingModes:
    """Debezium's options for how values are written."""

    time_precision_mode: TimePrecisionMode | str = TimePrecisionMode.ADAPTIVE
    decimal_handling_mode: DecimalHandlingMode | str = DecimalHandlingMode.PRECISE

    def __post_init__(self) -> None:
        choose_fields(self, time_precision_mode=TimePrecisionMode, decimal_handling_mode=DecimalHandlingMode)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Recognizes the value that Debezium writes for one that the database did not log, in all of its forms.

    Args:
        data: the bytes of the placeholder.
    """

    data: bytes

    @classmethod
    def of(cls, option: str) -> Placeholder:
        """The placeholder of Debezium's ``unavailable.value.placeholder``.

        Raises:
            ValueError: it begins with ``hex:``, and the rest is not hexadecimal.
        """
        return cls(bytes.fromhex(option[4:]) if option.startswith("hex:") else option.encode())

    @property
    def text(self) -> str:
        """The placeholder of text."""
        return self.data.decode(errors="replace")

    @property
    def texts(self) -> frozenset[str]:
        """The placeholders that are text: of text itself, of bytes, and of an hstore as JSON."""
        return frozenset(
            (self.text, b64encode(self.data).decode(), json.dumps({self.text: self.text}, separators=(",", ":")))
        )

    @property
    def collections(self) -> tuple[Any, ...]:
        """The placeholders of arrays of text, bytes, UUIDs and whole numbers, and of an hstore, as Python values.

        Whole numbers are there as text, too, as which JSON is read.
        """
        own_uuid = str(uuid.UUID(bytes=hashlib.md5(self.data, usedforsecurity=False).digest(), version=3))
        # Java's bytes have a sign.
        numbers = [byte - 256 if byte > 127 else byte for byte in self.data]
        pair = (self.text, self.text)
        single = [[one] for one in (self.text, b64encode(self.data).decode(), self.data, own_uuid, pair)]
        return *single, numbers, [str(number) for number in numbers], dict([pair])


def unfit(path: str, wanted: str, value: Any) -> UnfitError:
    """The error for a value that cannot be converted; it names the kind of the value, and not the value."""
    return UnfitError(f"field {path!r} is not {wanted}; found {kind_of(value)}")


def schema_part(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a schema in a message, which has the form that Kafka Connect's JSON converter writes.

    Raises:
        ValueError: the part is not an object.
    """
    found = schema.get(name) or _NO_SCHEMA
    if not isinstance(found, Mapping):
        raise ValueError(f"the schema in the message is not one of Kafka Connect: {name!r} is not an object")
    return found


def schema_fields(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of the fields of a record, by their names.

    Raises:
        ValueError: the schema has no such form.
    """
    fields = schema.get("fields") or []
    if not isinstance(fields, list) or not all(isinstance(f, dict) and isinstance(f.get("field"), str) for f in fields):
        raise ValueError("the schema in the message is not one of Kafka Connect: 'fields' are not fields")
    return {field["field"]: field for field in fields}


def conversion(kind: pa.DataType, schema: Mapping[str, Any] | None, path: str, modes: HandlingModes) -> Convert | None:
    """Make the conversion of the values of a column; ``None`` if they are decoded as they are.

    Args:
        kind: the declared type.
        schema: the schema of the values in the message; ``None`` if it has none.
        path: the path of the value, for errors.
        modes: decide where the schema does not.

    Raises:
        ValueError: the schema is not one of Kafka Connect.
    """
    if schema is None:
        return _by_kind(kind, path, modes)
    name = str(schema.get("name"))
    if name in _SEMANTIC:
        return partial(_SEMANTIC[name], kind, path)
    if name in _DECIMALS:
        scale = schema_part(schema, "parameters").get("scale", getattr(kind, "scale", None))
        return partial(_decimal, None if scale is None else _scale(scale, path), kind, path)
    return _of_parts(kind, schema, path, modes) or _guard(kind, schema.get("type"), path)


def _guard(kind: pa.DataType, written: Any, path: str) -> Convert | None:
    """Refuse what JSON would take for something else: a number for a time, and the text of bytes for other text."""
    if pa.types.is_temporal(kind):
        return partial(_not_number, "of a semantic type that is known as a time", path)
    if written == "bytes" and not (pa.types.is_binary(kind) or pa.types.is_string(kind)):
        return partial(_refused, "of a semantic type that is known; declare BINARY for its bytes", path)
    if written == "string" and pa.types.is_binary(kind):
        return partial(_refused, "bytes: declare STRING for the text of binary.handling.mode", path)
    return None


def _by_kind(kind: pa.DataType, path: str, modes: HandlingModes) -> Convert | None:
    """The conversion of values without a schema."""
    if pa.types.is_timestamp(kind):
        mode = TimePrecisionMode(modes.time_precision_mode)
        unit = _UNITS.get(mode)
        unknown = f"a time: time_precision_mode={mode.value!r} does not say what its number counts"
        convert = partial(_not_number, unknown, path) if unit is None else partial(_moment, unit, kind, path)
        return lambda value: convert(value) if isinstance(value, Number) else value
    if pa.types.is_date(kind):
        return lambda value: (_iso_day if type(value) is str else _day)(kind, path, value)
    if isinstance(kind, pa.Decimal128Type):
        is_precise = modes.decimal_handling_mode is DecimalHandlingMode.PRECISE
        return partial(_decimal, kind.scale, kind, path) if is_precise else None
    parts = _of_parts(kind, None, path, modes)
    if is_variant(kind) or pa.types.is_nested(kind):
        return lambda value: _document(kind, path, value) if type(value) is str else parts(value) if parts else value
    return None


def _of_parts(kind: pa.DataType, schema: Mapping[str, Any] | None, path: str, modes: HandlingModes) -> Convert | None:
    """The conversion of the parts of an ARRAY, a MAP or a STRUCT."""
    if isinstance(kind, (pa.ListType, pa.MapType)):
        inner, name, sign = (
            (kind.value_type, "items", "[]") if isinstance(kind, pa.ListType) else (kind.item_type, "values", "{}")
        )
        convert = conversion(inner, schema and schema_part(schema, name), path + sign, modes)
        return convert and partial(_each, convert)
    if isinstance(kind, pa.StructType) and not is_variant(kind):
        own = None if schema is None else schema_fields(schema)
        fields = [(f.name, f.type, None if own is None else own.get(f.name, _NO_SCHEMA)) for f in kind]
        made = {name: conversion(inner, part, f"{path}.{name}", modes) for name, inner, part in fields}
        return partial(_members, {name: convert for name, convert in made.items() if convert})
    return None


def _each(convert: Convert, value: Any) -> Any:
    if isinstance(value, list):
        return [None if one is None else convert(one) for one in value]
    return _members(dict.fromkeys(value, convert), value) if isinstance(value, dict) else value


def _members(conversions: Mapping[str, Convert], value: Any) -> Any:
    if isinstance(value, dict):
        # In place, because an object may know that a key of it occurs twice.
        value.update({name: one(value[name]) for name, one in conversions.items() if value.get(name) is not None})
    return value


def _refused(wanted: str, path: str, value: Any) -> Any:
    raise unfit(path, wanted, value)


def _not_number(wanted: str, path: str, value: Any) -> Any:
    return _refused(wanted, path, value) if isinstance(value, Number) else value


def _whole(value: Any, path: str) -> int:
    if type(value) is not Integer or len(value) > _WIDEST_INTEGER:
        raise unfit(path, "a whole number of 64 bits", value)
    return int(value)


def _day(kind: pa.DataType, path: str, value: Any) -> Any:
    days = _whole(value, path)
    if pa.types.is_integer(kind):
        return value
    try:
        return (EPOCH.date() + timedelta(days=days)).isoformat()
    except OverflowError:
        raise unfit(path, _YEARS, value) from None


def _moment(unit: int, kind: pa.DataType, path: str, value: Any) -> Any:
    seconds, parts = divmod(_whole(value, path), unit)
    if pa.types.is_integer(kind):
        return value
    try:
        moment = EPOCH.replace(tzinfo=None) + timedelta(seconds=seconds)
    except OverflowError:
        raise unfit(path, _YEARS, value) from None
    # A time without a zone is that of UTC.
    zone = "Z" if isinstance(kind, pa.TimestampType) and kind.tz else ""
    return f"{moment.isoformat()}{_fraction(parts, unit)}{zone}"


def _clock(unit: int, kind: pa.DataType, path: str, value: Any) -> Any:
    number = _whole(value, path)
    if pa.types.is_integer(kind):
        return value
    seconds, parts = divmod(abs(number), unit)
    minutes, second = divmod(seconds, 60)
    # MySQL has times below zero and of more than a day.
    sign = "-" if number < 0 else ""
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}:{second:02}{_fraction(parts, unit)}"


def _fraction(parts: int, unit: int) -> str:
    digits = str(unit + parts)[1:].rstrip("0")
    return f".{digits}" if digits else ""


def _iso_day(kind: pa.DataType, path: str, value: Any) -> Any:
    return value.removesuffix("Z") if type(value) is str and pa.types.is_date(kind) else value


def _scale(value: Any, path: str) -> int:
    with suppress(TypeError, ValueError):
        if abs(scale := int(value)) <= MAX_SCALE:
            return scale
    raise ValueError(f"field {path!r} has a scale that is not a whole number up to {MAX_SCALE}")


def decimal_text(data: bytes, scale: int, path: str) -> str:
    r"""The decimal number of a whole number and the number of digits after its point.

    Raises:
        UnfitError: the whole number has no bytes, or more than :data:`MAX_DECIMAL_BYTES`, or the text would have more
            than :data:`MAX_SCALE` zeros or decimals.

    Example:
        >>> decimal_text(b"\xfb\x2e", 2, "price"), decimal_text(b"\x05", -2, "price")
        ('-12.34', '500')
    """
    if not 0 < len(data) <= MAX_DECIMAL_BYTES:
        raise UnfitError(f"field {path!r} is not a decimal of 1 to {MAX_DECIMAL_BYTES} bytes; found {len(data)} bytes")
    if abs(scale) > MAX_SCALE:
        raise UnfitError(f"field {path!r} has a scale above {MAX_SCALE}")
    number = int.from_bytes(data, "big", signed=True)
    sign, digits = "-" if number < 0 else "", str(abs(number))
    if scale <= 0:
        return sign + (digits + "0" * -scale if number else "0")
    digits = digits.zfill(scale + 1)
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}"


def _decimal(scale: int | None, kind: pa.DataType, path: str, value: Any) -> Any:
    """A decimal, from base64 of a known scale, or from an object with both."""
    is_kept = pa.types.is_binary(kind) or (isinstance(kind, pa.StructType) and not is_variant(kind))
    if is_kept or isinstance(value, Number):
        return value
    data = value
    if isinstance(value, dict) and type(value.get("scale")) is Integer:
        scale, data = _scale(value["scale"], f"{path}.scale"), value.get("value")
    if scale is None or type(data) is not str:
        raise unfit(path, "a decimal", value)
    try:
        found = read_base64(data)
    except ValueError:
        raise unfit(path, "the base64 of a decimal", value) from None
    text = decimal_text(found, scale, path)
    return text if pa.types.is_string(kind) else Float(text) if "." in text else Integer(text)


def _document(kind: pa.DataType, path: str, value: Any) -> Any:
    """What the text of JSON means, unless text is wanted."""
    if pa.types.is_string(kind):
        return value
    if type(value) is str:
        with suppress(ValueError, StopIteration):
            text = value.strip(WHITE_SPACE)
            found, end = _scan(text, 0)
            if end == len(text):
                return found
    raise unfit(path, "the text of JSON", value)


_DECIMALS = (f"{CONNECT}Decimal", f"{DATA}VariableScaleDecimal")
_SEMANTIC: Mapping[str, Callable[[pa.DataType, str, Any], Any]] = {
    f"{TIME}Date": _day,
    f"{CONNECT}Date": _day,
    f"{TIME}IsoDate": _iso_day,
    f"{TIME}Timestamp": partial(_moment, _MILLISECONDS),
    f"{CONNECT}Timestamp": partial(_moment, _MILLISECONDS),
    f"{TIME}MicroTimestamp": partial(_moment, _MICROSECONDS),
    f"{TIME}NanoTimestamp": partial(_moment, _NANOSECONDS),
    f"{TIME}Time": partial(_clock, _MILLISECONDS),
    f"{CONNECT}Time": partial(_clock, _MILLISECONDS),
    f"{TIME}MicroTime": partial(_clock, _MICROSECONDS),
    f"{TIME}NanoTime": partial(_clock, _NANOSECONDS),
    f"{DATA}Json": _document,
}
