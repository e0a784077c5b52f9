"""What a value of a JSON document becomes in a column: the value as it is written, or a refusal.

Numbers are kept as they are written until it is known what they are wanted for: nothing is rounded twice, and text that
is wanted of a number is its own.
"""

from __future__ import annotations

import functools
import json
import math
import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from typing import Any, TypeAlias

import numpy as np
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
_YEARS = "in the years 1 to 9999; a whole number is one of seconds since 1970, so read milliseconds as BIGINT"
_TO_MICROSECONDS = "with at most 6 decimal places of a second"
_TOO_DEEP = f"nested deeper than the {MOST_NESTED} levels of a VARIANT"
# What Jackson, with which Spark reads JSON, has room for.
_MOST_DIGITS = 1000
_MOST_NAME = 50_000
_WIDEST_INTEGER = 20
_SURELY_EXACT = 38
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# The bits of whole numbers up to which each of them is a floating point number.
_WHOLE_BITS = {32: 24, 64: 53}
# From half a step above the largest FLOAT on, the nearest one is infinity.
_NO_FLOAT = 2**128 - 2**103
_LONG_NUMBER = re.compile(rf"[-+0-9.eE]{{{_MOST_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_EXPONENT = re.compile("[eE]")
_FIRST_INSTANT = datetime(1, 1, 1, tzinfo=timezone.utc)
_LAST_INSTANT = datetime.max.replace(tzinfo=timezone.utc)
_EXACT = Context(prec=80, traps=[Inexact, InvalidOperation])


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


class RepeatingObject(dict[str, Any]):
    """An object with keys that are there more than once."""

    def __init__(self, pairs: Iterable[tuple[str, Any]], repeated: frozenset[str]) -> None:
        super().__init__(pairs)
        self.repeated = repeated


def read_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object out of its keys and values; a :class:`RepeatingObject` if a key is there more than once."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(name for name, _ in pairs)
    return RepeatingObject(pairs, frozenset(name for name, count in counts.items() if count > 1))


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
            fail: gets the place of what does not fit, which becomes null, what it should have been, and what it is.
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
                fail(place, f"{error}; found {kind_of(value)}")
        column: Column = pa.array(found, self.parsed)
        return column if self.parsed == self.kind else column.cast(self.kind)


def kind_of(value: Any) -> str:
    """What kind of value this is, for errors, which do not show the value."""
    return next(name for kind, name in _KINDS if isinstance(value, kind))


_KINDS: tuple[tuple[type, str], ...] = (
    (dict, "an object"),
    (list, "an array"),
    (bool, "true or false"),
    (Integer, "a whole number"),
    (Constant, "NaN or infinity"),
    (Number, "a number with a point or an exponent"),
    (str, "text"),
)


def conversion(kind: pa.DataType, *, is_lenient: bool) -> Conversion:
    """How values become those of a type that has no parts.

    Args:
        kind: the type.
        is_lenient: take text for a STRING whatever it is written as, and times as more than Arrow reads.
    """

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
        one, types, parsed = _float(kind.bit_width), {Integer, Float}, pa.string()
        together = lambda values: _checked(cast(values), are_surely_exact)  # noqa: E731
    elif isinstance(kind, pa.Decimal128Type):
        one, types = _decimal(kind.precision, kind.scale), {Integer, Float}
        together = functools.partial(_decimals, kind=kind)
    elif pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        one = _time(kind, is_lenient=is_lenient)
        together = lambda values: _checked(_parsed_times(values, kind), are_in_range)  # noqa: E731
    elif pa.types.is_boolean(kind):
        one, types, together = _boolean, {bool}, take
    elif pa.types.is_binary(kind):
        one, together = _binary, lambda values: pa.array([v if v is None else read_base64(v) for v in values], kind)
    else:
        one, together = _text if is_lenient else _only_text, take
        if is_lenient:
            types = {str, Integer, Float, Constant, JsonText}
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


def _float(bits: int) -> Callable[[Any], Any]:
    def convert(value: Any) -> str:
        if type(value) is not Integer and type(value) is not Float:
            raise UnfitError("a number")
        found = abs(float(value))
        if found == math.inf or (bits == 32 and found >= 2**127 and abs(Decimal(value)) >= _NO_FLOAT):
            raise UnfitError(f"a number that {FLOATS[bits]} can hold")
        if type(value) is Integer and found >= 1 << _WHOLE_BITS[bits] and not _is_whole_float(value, bits):
            raise UnfitError(f"a whole number that {FLOATS[bits]} can hold exactly")
        return value

    return convert


def _is_whole_float(digits: str, bits: int) -> bool:
    """Whether a whole number other than 0 is a floating point number, or how one is written in short."""
    whole = abs(int(digits))
    if (whole // (whole & -whole)).bit_length() <= _WHOLE_BITS[bits]:
        return True
    nearest: np.floating[Any] = np.float32(digits) if bits == 32 else np.float64(digits)
    return np.format_float_positional(nearest, trim="-") == digits


def are_surely_exact(column: Column) -> bool:
    """Whether floating point numbers are so small that each whole number among them is exact; others always are."""
    if not pa.types.is_floating(column.type):
        return True
    limit = pa.scalar(float(1 << _WHOLE_BITS[column.type.bit_width]), column.type)
    return not pc.any(pc.greater_equal(pc.abs(column), limit)).as_py()


def _decimal(precision: int, scale: int) -> Callable[[Any], Any]:
    places = precision - scale
    step = Decimal(1).scaleb(-scale)
    wanted = f"a number with at most {places} digits before the point and {scale} after it"

    def convert(value: Any) -> Decimal:
        if not isinstance(value, str) or not _NUMBER.fullmatch(value):
            raise UnfitError("a number")
        try:
            number = Decimal(value)
            if not number:
                return Decimal(0)
            if -scale <= number.adjusted() < places:
                return number.quantize(step, context=_EXACT)
        except DecimalException:
            pass
        raise UnfitError(wanted)

    return convert


def _decimals(values: Sequence[Any], kind: pa.Decimal128Type) -> Column:
    texts = [value for value in values if value is not None]
    if max(map(len, texts), default=0) > _SURELY_EXACT or any(map(_EXPONENT.search, texts)):
        raise ValueError("one by one")
    return pa.array(values, pa.string()).cast(ROOMY_DECIMAL).cast(kind)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise UnfitError("true or false")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    assert isinstance(value, str), "objects and arrays are read as JsonText"
    if not is_encodable(value):
        raise UnfitError("text without half of a surrogate pair")
    return value


def _only_text(value: Any) -> str:
    if type(value) is str:
        return _text(value)
    raise UnfitError("a string")


def is_encodable(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_base64(text: str) -> bytes:
    r"""The bytes that Base64 stands for.

    Raises:
        ValueError: it is not what these bytes are written as.

    Example:
        >>> read_base64("AAEC")
        b'\x00\x01\x02'
    """
    found = b64decode(text)
    if b64encode(found).decode() != text:
        raise ValueError("not base64")
    return found


def _binary(value: Any) -> bytes:
    if type(value) is str:
        with suppress(ValueError):
            return read_base64(value)
    raise UnfitError("base64")


def _time(kind: pa.DataType, *, is_lenient: bool) -> Callable[[Any], Any]:
    """From text to a date, a time, or a time without a zone."""
    read: Callable[[str], Any]
    if pa.types.is_date32(kind):
        read, wanted = read_day, "a date"
    elif isinstance(kind, pa.TimestampType) and kind.tz:
        read, wanted = read_moment, f"a time {_TO_MICROSECONDS}"
    else:
        read, wanted = read_local_moment, f"a time without a zone, {_TO_MICROSECONDS}"

    def convert(value: Any) -> Any:
        try:
            if is_lenient and read is read_moment and type(value) is Integer:
                return read_epoch_seconds(value)
            if type(value) is not str:
                raise UnfitError(wanted)
            if is_lenient:
                with suppress(ValueError):
                    return read(value)
            found = _parsed_times([value], kind)
        except OverflowError:
            raise UnfitError(_YEARS) from None
        except ValueError:
            raise UnfitError(wanted) from None
        if not are_in_range(found):
            raise UnfitError(_YEARS)
        return found[0].as_py()

    return convert


def _parsed_times(values: Sequence[Any], kind: pa.DataType) -> Column:
    """Dates or times as Arrow reads them; it takes those with a zone and those without one only apart."""
    texts = pa.array(values, pa.string())
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if not isinstance(kind, pa.TimestampType) or kind.tz is None:
            raise
        return texts.cast(pa.timestamp("us")).cast(kind)


def _checked(column: Column, is_sure: Callable[[Column], bool]) -> Column:
    if not is_sure(column):
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

    Objects with a key twice are :class:`RepeatingObject`.

    Args:
        **hooks: more of ``json.JSONDecoder``.

    Example:
        >>> scanner()('[1.10]', 0)
        (['1.10'], 6)
    """
    options = {"object_pairs_hook": read_pairs, **hooks}
    decoder: Any = json.JSONDecoder(parse_int=Integer, parse_float=Float, **options)
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
    if _SURROGATE.search(text) and not all(map(is_encodable, _strings(value))):
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
