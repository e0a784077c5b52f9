"""What a value of a JSON document becomes in a column: the value as it is written, or a refusal.

Numbers are kept as they are written until it is known what they are wanted for: nothing is rounded twice, and text that
is wanted of a number is its own.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# The bits of whole numbers up to which each of them is a floating point number.
_WHOLE_BITS = {32: 24, 64: 53}
# From half a step above the largest FLOAT on, the nearest one is infinity.
_NO_FLOAT = 2**128 - 2**103
# Only the beginning of a number is tried, or the time for a number would grow with the square of its length.
_LONG_NUMBER = re.compile(rf"(?<![-+0-9.eE])[-+0-9.eE]{{{_MOST_DIGITS + 1}}}")
_TOO_LONG = f"longer than the {MOST_VARIANT_BYTES >> 20} MiB of a VARIANT"
# As Arrow reads days and times.
_ISO_DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
_ISO_LOCAL_MOMENT = re.compile(
    rf"{_ISO_DAY.pattern}(?:[ T][0-9]{{2}}(?::[0-9]{{2}}(?::[0-9]{{2}}(?:\.[0-9]{{1,6}})?)?)?)?"
)
_ISO_MOMENT = re.compile(
    rf"{_ISO_DAY.pattern}(?:[ T][0-9]{{2}}(?::[0-9]{{2}}(?::[0-9]{{2}}(?:\.[0-9]{{1,6}})?)?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)
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
    return RepeatingObject(pairs, _repeated(pairs))


def _repeated(pairs: Sequence[tuple[str, Any]]) -> frozenset[str]:
    """The keys that are there more than once."""
    counts = Counter(name for name, _ in pairs)
    return frozenset(name for name, count in counts.items() if count > 1)


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


def leaf_conversion(kind: pa.DataType, *, is_lenient: bool) -> Callable[[Any], Any]:
    """The function from a parsed value to the one of a type that has no parts; it raises :class:`UnfitError`.

    Args:
        kind: the type, one that :func:`spark_jobs.decoding.json_types.check_json_type` lets pass.
        is_lenient: take text for a STRING whatever it is written as, and times as more than ISO 8601.
    """
    convert: Callable[[Any], Any] = _text if is_lenient else _only_text
    if pa.types.is_integer(kind):
        convert = _integer(kind.bit_width)
    elif pa.types.is_floating(kind):
        convert = _float(kind.bit_width)
    elif isinstance(kind, pa.Decimal128Type):
        convert = _decimal(kind.precision, kind.scale)
    elif pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        convert = _time(kind, is_lenient=is_lenient)
    elif pa.types.is_boolean(kind):
        convert = _boolean
    elif pa.types.is_binary(kind):
        convert = _binary
    return convert


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
    def convert(value: Any) -> float:
        if type(value) is not Integer and type(value) is not Float:
            raise UnfitError("a number")
        number = float(value)
        size = abs(number)
        if size == math.inf or (bits == 32 and size >= 2**127 and abs(Decimal(value)) >= _NO_FLOAT):
            raise UnfitError(f"a number that {FLOATS[bits]} can hold")
        if type(value) is Integer and size >= 1 << _WHOLE_BITS[bits] and not _is_whole_float(value, bits):
            raise UnfitError(f"a whole number that {FLOATS[bits]} can hold exactly")
        # Arrow goes from text to FLOAT directly, and so rounds once.
        return number if bits == 64 else float(pa.scalar(str(value)).cast(pa.float32()).as_py())

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


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise UnfitError("true or false")


def _text(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json_text(value)
    except ValueError:
        raise UnfitError("text: a key is there twice") from None
    if not is_encodable(text):
        raise UnfitError("text without half of a surrogate pair")
    return text


def _only_text(value: Any) -> str:
    if type(value) is str:
        return _text(value)
    raise UnfitError("a string")


def is_encodable(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it, which no encoding has."""
    if text.isascii():
        return True
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
        read, wanted, form = read_day, "a date", _ISO_DAY
    elif isinstance(kind, pa.TimestampType) and kind.tz:
        read, wanted, form = read_moment, f"a time {_TO_MICROSECONDS}", _ISO_MOMENT
    else:
        read, wanted, form = read_local_moment, f"a time without a zone, {_TO_MICROSECONDS}", _ISO_LOCAL_MOMENT

    def convert(value: Any) -> Any:
        try:
            if is_lenient and read is read_moment and type(value) is Integer:
                return read_epoch_seconds(value)
            if type(value) is not str or not (is_lenient or form.fullmatch(value)):
                raise UnfitError(wanted)
            return read(value)
        except OverflowError:
            raise UnfitError(_YEARS) from None
        except ValueError:
            raise UnfitError(wanted) from None

    return convert


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
        raise ValueError(f"the key {min(_repeated(pairs))!r} is there twice")
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
    try:
        if len(text) > MOST_VARIANT_BYTES:
            raise ValueError(_TOO_LONG)
        value, end = _scan_variant(text, 0)
        if end != len(text):
            raise ValueError("more than one JSON value")
        # To look at each part of the value takes longer than to scan it.
        is_long = len(text) > _MOST_NAME or (len(text) > _MOST_DIGITS and _LONG_NUMBER.search(text))
        if is_long or "\\u" in text or text.count("[") + text.count("{") > MOST_NESTED:
            variant_text(value)
    except StopIteration:
        return "not JSON"
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        return str(error)
    return None


def variant_text(value: Any) -> str:
    """The JSON text of a parsed value, for Spark's ``parse_json``.

    Raises:
        ValueError: it does not take this value.
    """
    text = json_text(value, MOST_NESTED)
    if len(text) > MOST_VARIANT_BYTES:
        raise ValueError(_TOO_LONG)
    if not is_encodable(text):
        raise ValueError("half of a surrogate pair, which a VARIANT cannot hold")
    return text


def json_text(value: Any, levels: int | None = None) -> str:
    """The JSON text of a parsed value, with numbers as they are written.

    Args:
        value: as :func:`scanner` reads it.
        levels: how many of them a VARIANT has room for; NaN and names and numbers that are too long are refused then.

    Raises:
        ValueError: an object has a key twice, or it is no value of a VARIANT.

    Example:
        >>> json_text(scanner()('[1.10,{"a":null}]', 0)[0])
        '[1.10, {"a": null}]'
    """
    if isinstance(value, Number):
        if levels is not None and isinstance(value, Constant):
            raise ValueError(f"{value} is not JSON")
        if levels is not None and len(value) > _MOST_DIGITS:
            raise ValueError(f"a number with more than the {_MOST_DIGITS} digits of a VARIANT")
        return str(value)
    if not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, RepeatingObject):
        raise ValueError(f"the key {min(value.repeated)!r} is there twice")
    if levels == 0:
        raise ValueError(_TOO_DEEP)
    within = None if levels is None else levels - 1
    # A loop, since a comprehension would take twice as many of the levels that Python has.
    parts: list[str] = []
    if isinstance(value, list):
        for item in value:
            parts.append(json_text(item, within))
        return f"[{', '.join(parts)}]"
    for name, one in value.items():
        if levels is not None and len(name) > _MOST_NAME:
            raise ValueError(f"a name with more than the {_MOST_NAME} characters of a VARIANT")
        parts.append(f"{json.dumps(name, ensure_ascii=False)}: {json_text(one, within)}")
    return f"{{{', '.join(parts)}}}"
