"""What a value of a JSON document becomes in a column, taken as Spark's ``from_json`` takes it.

Numbers are kept as they are written until it is known what they are wanted for: nothing is rounded twice, and text that
is wanted of a number is its own.
"""

from __future__ import annotations

import functools
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.times import read_day, read_epoch_seconds, read_local_moment, read_moment

Scan: TypeAlias = Callable[[str, int], tuple[Any, int]]
FLOATS = {32: "FLOAT", 64: "DOUBLE"}
ROOMY_DECIMAL = pa.decimal256(76, 38)
"""Room for numbers of 38 digits, wherever their point is. Arrow does not check for overflow when it scales."""
MOST_NESTED = 500
"""How deep a VARIANT may be: Python reads no deeper than a thousand, counted from where it is called."""
MOST_VARIANT_BYTES = 4 << 20
"""The longest JSON text of a VARIANT: Spark 4.0 has room for 16 MiB, and some values take three times their text."""
_TOO_DEEP = f"nested deeper than the {MOST_NESTED} levels of a VARIANT"
# What Jackson, with which Spark reads JSON, has room for.
_MOST_DIGITS = 1000
_MOST_NAME = 50_000
_WIDEST_INTEGER = 20
_SURELY_EXACT = 38
_NOT_FINITE = {
    **{"NaN": "nan", "Infinity": "inf", "+Infinity": "inf", "+INF": "inf"},
    **{"-Infinity": "-inf", "-INF": "-inf"},
}
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?")
_BEYOND_MICROSECONDS = r"(\.[0-9]{6})[0-9]+"
_LONG_NUMBER = re.compile(rf"[-+0-9.eE]{{{_MOST_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_EXPONENT = re.compile("[eE]")
_FIRST_INSTANT = datetime(1, 1, 1, tzinfo=timezone.utc)
_LAST_INSTANT = datetime.max.replace(tzinfo=timezone.utc)
_EXACT = Context(prec=80, rounding=ROUND_HALF_UP)
_SPACE = re.compile("[\0- ]+")


class Number(str):
    """A number as it is written."""

    __slots__ = ()


class Integer(Number):
    """A number without a point and an exponent."""

    __slots__ = ()


class Float(Number):
    """Another number."""

    __slots__ = ()


class Constant(Number):
    """NaN, Infinity or -Infinity, which JSON does not have, but many write."""

    __slots__ = ()


class JsonText(str):
    """An object or an array as it is written."""

    __slots__ = ()


class UnfitError(ValueError):
    """A value is not what the column wants; the text says what that is."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How values become those of a type that has no parts.

    Args:
        kind: the type, one that :func:`spark_jobs.decoding.json_types.check_json_type` lets pass.
        one: from a value that is not null; raises :class:`UnfitError`.
        parsed: the type that the result of ``one`` has in Arrow, from which it is cast to ``kind``.
        types: of the values that Arrow may take together.
        together: from values of these types, and null, to the same as ``one`` gives for each of them; raises
            ``ArrowInvalid`` or ``ValueError`` if one of them does not fit, or may not.
    """

    kind: pa.DataType
    one: Callable[[Any], Any]
    parsed: pa.DataType
    types: frozenset[type]
    together: Callable[[Sequence[Any]], Column]

    def column(self, values: Sequence[Any], fail: Callable[[int, str], None]) -> Column:
        """The values as a column.

        Args:
            values: parsed JSON.
            fail: told of the place of what does not fit, which becomes null, and of what it should have been.
        """
        if self.types.issuperset(map(type, values)):
            with suppress(pa.ArrowInvalid, ValueError):
                return self.together(values)
        found: list[Any] = []
        for place, value in enumerate(values):
            try:
                found.append(None if value is None else self.one(value))
            except UnfitError as error:
                found.append(None)
                fail(place, str(error))
        column: Column = pa.array(found, self.parsed)
        return column if self.parsed == self.kind else column.cast(self.kind)


def conversion(kind: pa.DataType) -> Conversion:
    """How values become those of a type that has no parts."""

    def cast(values: Sequence[Any]) -> Column:
        return pa.array(values, pa.string()).cast(kind)

    def take(values: Sequence[Any]) -> Column:
        return pa.array(values, kind)

    one: Callable[[Any], Any]
    together: Callable[[Sequence[Any]], Column] = cast
    parsed = kind
    types: set[type] = {str}
    if pa.types.is_integer(kind):
        one, types = _integer(kind.bit_width), {Integer}
    elif pa.types.is_floating(kind):
        # Arrow goes from text to FLOAT directly, and so rounds once.
        one, types, parsed = _float, {Integer, Float}, pa.string()
    elif isinstance(kind, pa.Decimal128Type):
        one, types = _decimal(kind.precision, kind.scale), {Integer, Float}
        together = functools.partial(_decimals, kind=kind)
    elif isinstance(kind, pa.TimestampType):
        one = functools.partial(_timestamp, kind=kind) if kind.tz else _local_timestamp
        together = functools.partial(_timestamps, kind=kind)
    elif pa.types.is_date32(kind):
        one, together = _date, lambda values: _in_range(cast(values))
    elif pa.types.is_boolean(kind):
        one, types, together = _boolean, {bool}, take
    elif pa.types.is_binary(kind):
        one, together = _binary, lambda values: pa.array([v if v is None else read_base64(v) for v in values], kind)
    else:
        one, types, together = _text, {str, Integer, Float, Constant, JsonText}, take
    return Conversion(kind, one, parsed, frozenset({*types, type(None)}), together)


def _integer(bits: int) -> Callable[[Any], Any]:
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def convert(value: Any) -> int:
        if type(value) is Integer and len(value) <= _WIDEST_INTEGER:
            found = int(value)
            if least <= found <= most:
                return found
        raise UnfitError(f"a whole number of {bits} bits")

    return convert


def _float(value: Any) -> str:
    if type(value) is Integer or type(value) is Float:
        return value
    if isinstance(value, str) and (found := _NOT_FINITE.get(value)):
        return found
    raise UnfitError("a number")


def _decimal(precision: int, scale: int) -> Callable[[Any], Any]:
    places = precision - scale
    step = Decimal(1).scaleb(-scale)

    def convert(value: Any) -> Decimal:
        if not isinstance(value, str) or isinstance(value, (Constant, JsonText)):
            raise UnfitError("a number")
        # Some write thousands with commas, and Spark reads them.
        text = value if isinstance(value, Number) else value.replace(",", "")
        if not _DECIMAL.fullmatch(text):
            raise UnfitError("a number")
        number = Decimal(text)
        if number and number.adjusted() <= places:
            number = number.quantize(step, context=_EXACT) if number.adjusted() >= -scale - 1 else Decimal(0)
        if number and number.adjusted() >= places:
            raise UnfitError(f"a number with at most {places} digits before the point")
        return number or Decimal(0)

    return convert


def _decimals(values: Sequence[Any], kind: pa.Decimal128Type) -> Column:
    texts = [value for value in values if value is not None]
    if max(map(len, texts), default=0) > _SURELY_EXACT or any(map(_EXPONENT.search, texts)):
        raise ValueError("one by one")
    roomy = pa.array(values, pa.string()).cast(ROOMY_DECIMAL)
    return rounded(roomy, kind.scale).cast(kind)


def rounded(column: Column, places: int) -> Column:
    """Numbers of type :data:`ROOMY_DECIMAL` with so many places behind the point, half up."""
    found: Column = pc.round(column, ndigits=places, round_mode="half_towards_infinity")
    return found


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise UnfitError("true or false")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return encodable(value)
    assert isinstance(value, bool), "objects and arrays are read as JsonText"
    return "true" if value else "false"


def encodable(text: str) -> str:
    """The same; a half of a surrogate pair, which no encoding has, becomes a question mark, as in Java."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def read_base64(text: str) -> bytes:
    r"""The bytes that Base64 stands for.

    Raises:
        ValueError: it is none.

    Example:
        >>> read_base64("AAEC")
        b'\x00\x01\x02'
    """
    if len(text) % 4:
        raise ValueError("not base64")
    return b64decode(text, validate=True)


def _binary(value: Any) -> bytes:
    if isinstance(value, str) and not isinstance(value, (Number, JsonText)):
        try:
            return read_base64(_SPACE.sub("", value))
        except ValueError:
            pass
    raise UnfitError("base64")


def _date(value: Any) -> Any:
    return _time(value, read_day, "a date")


def _timestamp(value: Any, kind: pa.TimestampType) -> Any:
    if type(value) is Integer:
        try:
            return read_epoch_seconds(value)
        except OverflowError:
            raise UnfitError("a number of seconds in the years 1 to 9999; milliseconds are read as BIGINT") from None
    try:
        return _time(value, read_moment, "a time")
    except UnfitError as unfit:
        # Arrow takes a zone behind minutes, too.
        with suppress(pa.ArrowInvalid, ValueError, TypeError):
            return _timestamps([value], kind)[0].as_py()
        raise unfit from None


def _local_timestamp(value: Any) -> Any:
    return _time(value, read_local_moment, "a time without a zone")


def _timestamps(values: Sequence[Any], kind: pa.TimestampType) -> Column:
    texts = pc.replace_substring_regex(pa.array(values, pa.string()), _BEYOND_MICROSECONDS, r"\1")
    try:
        found = texts.cast(kind)
    except pa.ArrowInvalid:
        if kind.tz is None:
            raise
        found = texts.cast(pa.timestamp("us")).cast(kind)
    return _in_range(found)


def _in_range(column: Column) -> Column:
    if not are_in_range(column):
        raise ValueError("one by one")
    return column


def are_in_range(column: Column) -> bool:
    """Whether dates and times are of the years that Spark has; other values always are."""
    kind = column.type
    if not pa.types.is_timestamp(kind) and not pa.types.is_date32(kind):
        return True
    first, last = (date.min, date.max) if pa.types.is_date32(kind) else (_FIRST_INSTANT, _LAST_INSTANT)
    is_beyond = pc.or_(pc.less(column, pa.scalar(first, kind)), pc.greater(column, pa.scalar(last, kind)))
    return not pc.any(is_beyond).as_py()


def _time(value: Any, read: Callable[[str], Any], wanted: str) -> Any:
    if not isinstance(value, str) or isinstance(value, (Number, JsonText)):
        raise UnfitError(wanted)
    try:
        return read(value)
    except OverflowError:
        raise UnfitError("in the years 1 to 9999") from None
    except ValueError:
        raise UnfitError(wanted) from None


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which each key is there once.

    Raises:
        ValueError: naming one that is not.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def refuse_constant(constant: str) -> None:
    """NaN and Infinity are no JSON.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{constant} is not JSON")


def scanner(**hooks: Any) -> Scan:
    """Reads a value from a place in a text: the value, and where it ends. Numbers stay as they are written.

    Args:
        **hooks: more of ``json.JSONDecoder``.

    Example:
        >>> scanner()('[1.10]', 0)
        (['1.10'], 6)
    """
    decoder: Any = json.JSONDecoder(parse_int=Integer, parse_float=Float, **hooks)
    scan: Scan = decoder.scan_once
    return scan


_scan_variant = scanner(parse_constant=refuse_constant, object_pairs_hook=object_once)


def variant_problem(text: str) -> str | None:
    """Why Spark's ``parse_json`` does not take this text, which would end the run; ``None`` if it does.

    Args:
        text: without white space around it.

    Example:
        >>> variant_problem('[1, {"a": null}]') is None
        True
        >>> variant_problem('{"a": 1, "a": 2}')
        "the key 'a' is there twice"
    """
    if len(text) > MOST_VARIANT_BYTES:
        return f"longer than the {MOST_VARIANT_BYTES >> 20} MiB of a VARIANT"
    try:
        value, end = _scan_variant(text, 0)
    except StopIteration:
        return "not JSON"
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        return str(error)
    return "more than one JSON value" if end != len(text) else _beyond(text, value)


def _beyond(text: str, value: Any) -> str | None:
    """Which limit of a VARIANT this value is beyond, if it is."""
    if len(text) > _MOST_DIGITS and (_LONG_NUMBER.search(text) or len(text) > _MOST_NAME):
        if any(isinstance(part, Number) and len(part) > _MOST_DIGITS for part in _parts(value)):
            return f"a number with more than the {_MOST_DIGITS} digits of a VARIANT"
        if any(isinstance(part, dict) and any(len(name) > _MOST_NAME for name in part) for part in _parts(value)):
            return f"a name with more than the {_MOST_NAME} characters of a VARIANT"
    if text.count("[") + text.count("{") > MOST_NESTED and _depth(value) > MOST_NESTED:
        return _TOO_DEEP
    if _SURROGATE.search(text) and any(encodable(part) != part for part in _strings(value)):
        return "half of a surrogate pair, which a VARIANT cannot hold"
    return None


def _parts(value: Any) -> Iterable[Any]:
    """The value and all that is in it."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        if isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)


def _strings(value: Any) -> Iterable[str]:
    for part in _parts(value):
        if isinstance(part, dict):
            yield from part
        elif isinstance(part, str):
            yield part


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth
