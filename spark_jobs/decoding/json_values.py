"""Converts values of JSON to the column types that JSON can be decoded into, exactly or not at all.

Numbers stay text until the wanted type is known, so that nothing is rounded twice and a STRING column gets the text of
a number.

Dates and times are text of the form ``yyyy-[m]m-[d]d[( |T)[h]h[:[m]m[:[s]s[.fraction]]][ ][zone]]``. In the fraction
only zeros may follow the sixth digit, because times have microseconds. A zone is an offset, ``UTC``, ``GMT`` or ``UT``
with or without one, or a name such as ``Europe/Paris``. Ambiguous text is refused: a local time that a clock shows
twice or never, and abbreviations of zones, which mean several places.
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
from datetime import date, datetime, timedelta, timezone, tzinfo
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from json.encoder import encode_basestring
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo, available_timezones

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.decoders import Column
from stream_consumers.errors import SchemaMismatchError

VARIANT = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
"""PySpark's type of a VARIANT. Decoders return its JSON text."""
_TYPES = (
    "BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BINARY, BOOLEAN, DATE, TIMESTAMP, VARIANT, and "
    "STRUCT, ARRAY and MAP of them"
)
Scan: TypeAlias = Callable[[str, int], tuple[Any, int]]
FLOATS = {32: "FLOAT", 64: "DOUBLE"}
WIDE_DECIMAL = pa.decimal256(76, 38)
"""A type for any number of 38 digits with any scale. Arrow does not check for overflow when it scales."""
MAX_JSON_LEVELS = 500
"""The most levels of JSON that is kept, whichever process decodes. Python parses at most a thousand, including those
of its callers."""
MAX_VARIANT_BYTES = 4 << 20
"""The longest JSON text of a VARIANT. Spark 4.0 has room for 16 MiB, and some values take three times their text."""
_YEARS = "in the years 1 to 9999; a whole number is one of seconds since 1970, so read milliseconds as BIGINT"
_TO_MICROSECONDS = "with at most 6 decimal places of a second"
WHITE_SPACE = " \t\n\r\x0b\x0c"
"""White space that may be around a document, in bytes and in text."""
TOO_DEEP = f"nested deeper than {MAX_JSON_LEVELS} levels"
# The limits of Jackson, with which Spark parses JSON.
_MAX_NUMBER_LENGTH = 1000
_MAX_NAME_LENGTH = 50_000
_WIDEST_INTEGER = 20
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# Floating point numbers hold every whole number of this many bits.
_WHOLE_BITS = {32: 24, 64: 53}
# From half a step above the largest FLOAT on, the nearest FLOAT is infinity.
_NO_FLOAT = 2**128 - 2**103
# The most digits of a DECIMAL, and the most of them after the point.
_MAX_DIGITS = 38
_TOO_LONG = f"longer than the {MAX_VARIANT_BYTES >> 20} MiB of a VARIANT"
# The forms of days and times that Arrow reads.
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
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MOMENT = re.compile(
    r"([0-9]{4,6})-([0-9]{1,2})-([0-9]{1,2})(?:[ T]([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2})"
    r"(?:\.([0-9]{1,6})0*)?)?)?(?: ?([^0-9 ].*))?)?",
    re.DOTALL,
)
_DAY = re.compile(r"([0-9]{4,7})-([0-9]{1,2})-([0-9]{1,2})")
_OFFSET = re.compile(r"([+-])(?:([0-9]{1,2})(?::([0-9]{1,2})|:([0-9]{2}):([0-9]{2}))?|([0-9]{2})([0-9]{2})([0-9]{2})?)")
_PREFIXED = re.compile(r"(?:UTC|GMT|UT)(?=[+-]|\Z)")
# Names in the database of zones that Java lacks.
_NO_REGIONS = re.compile(r"posix/|right/|(?:localtime|posixrules|Factory)\Z")
_MAX_OFFSET = timedelta(hours=24)


def check_json_type(name: str, kind: pa.DataType) -> None:
    """Check that JSON can be decoded into a type.

    Raises:
        SchemaMismatchError: it cannot; the error names the column, its type, and the types that can be used.
    """
    if is_variant(kind):
        return
    if isinstance(kind, pa.StructType):
        for field in kind:
            check_json_type(f"{name}.{field.name}", field.type)
    elif isinstance(kind, pa.ListType):
        check_json_type(f"{name}[]", kind.value_type)
    elif isinstance(kind, pa.MapType):
        if not pa.types.is_string(kind.key_type):
            raise SchemaMismatchError(
                f"column {name} is a MAP with keys that are {kind.key_type}, but keys of JSON are text",
                remedy="Write it like MAP<STRING, BIGINT>.",
            )
        check_json_type(f"{name}{{}}", kind.item_type)
    elif not (
        pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date32(kind)
    ):
        raise SchemaMismatchError(
            f"column {name} is {kind}, which JSON payloads are not decoded into",
            remedy=f"Use one of {_TYPES}; or decode=Text() and from_json in the transform.",
        )


def is_variant(kind: pa.DataType) -> bool:
    """Return whether a type is PySpark's type of a VARIANT.

    Example:
        >>> is_variant(VARIANT), is_variant(pa.struct([("value", pa.binary()), ("metadata", pa.binary())]))
        (True, False)
    """
    return isinstance(kind, pa.StructType) and any((field.metadata or {}).get(b"variant") == b"true" for field in kind)


def needs_python(kind: pa.DataType) -> bool:
    """Return whether a type has a part that Arrow cannot parse, a VARIANT or a MAP."""
    if is_variant(kind) or isinstance(kind, pa.MapType):
        return True
    if isinstance(kind, pa.StructType):
        return any(needs_python(field.type) for field in kind)
    return isinstance(kind, pa.ListType) and needs_python(kind.value_type)


def is_parsed_by_arrow(schema: pa.Schema) -> bool:
    """Return whether Arrow can parse all of these columns."""
    return not any(needs_python(field.type) for field in schema)


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a decoded column, with text instead of each VARIANT."""
    if not needs_python(kind):
        return kind
    if is_variant(kind):
        return pa.string()
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(decoded_type(field.type)) for field in kind])
    if isinstance(kind, pa.MapType):
        item: Any = kind.item_field.with_type(decoded_type(kind.item_type))
        found: pa.DataType = pa.map_(kind.key_type, item)
        return found
    assert isinstance(kind, pa.ListType)
    return pa.list_(kind.value_field.with_type(decoded_type(kind.value_type)))


class Number(str):
    """The text of a number."""

    __slots__ = ()


class Integer(Number):
    """The text of a number without a point and an exponent."""

    __slots__ = ()


class Float(Number):
    """The text of a number with a point or an exponent."""

    __slots__ = ()


class Constant(Number):
    """NaN, Infinity or -Infinity, which many programs write although JSON does not have them."""

    __slots__ = ()


class UnfitError(ValueError):
    """A value does not fit its column; the text names the values that fit."""


class RepeatingObject(dict[str, Any]):
    """An object in which some keys occur more than once."""

    def __init__(self, pairs: Iterable[tuple[str, Any]], repeated: frozenset[str]) -> None:
        super().__init__(pairs)
        self.repeated = repeated


def read_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Create an object from its pairs; a :class:`RepeatingObject` if a key occurs more than once."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    return RepeatingObject(pairs, _repeated(pairs))


def _repeated(pairs: Sequence[tuple[str, Any]]) -> frozenset[str]:
    """Return the keys that occur more than once."""
    counts = Counter(name for name, _ in pairs)
    return frozenset(name for name, count in counts.items() if count > 1)


def kind_of(value: Any) -> str:
    """Name the kind of a value for errors, which do not show the value itself."""
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "another value")


_KINDS: tuple[tuple[type, str], ...] = (
    (dict, "an object"),
    (list, "an array"),
    (bool, "true or false"),
    (Integer, "a whole number"),
    (Constant, "NaN or infinity"),
    (Number, "a number with a point or an exponent"),
    (str, "text"),
    (int, "a whole number"),
)


def leaf_conversion(kind: pa.DataType, *, is_lenient: bool) -> Callable[[Any], Any]:
    """Return the function that converts a parsed value to a type without parts, or raises :class:`UnfitError`.

    Args:
        kind: a type that :func:`check_json_type` accepts.
        is_lenient: whether to accept any value for a STRING, and times in more forms than ISO 8601.
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
        # Arrow converts text to FLOAT directly, and so rounds once.
        return number if bits == 64 else float(pa.scalar(str(value)).cast(pa.float32()).as_py())

    return convert


def _is_whole_float(digits: str, bits: int) -> bool:
    """Return whether a whole number other than 0 is a floating point number, or the shortest text of one."""
    whole = abs(int(digits))
    if (whole // (whole & -whole)).bit_length() <= _WHOLE_BITS[bits]:
        return True
    nearest: np.floating[Any] = np.float32(digits) if bits == 32 else np.float64(digits)
    return np.format_float_positional(nearest, trim="-") == digits


def are_surely_exact(column: Column) -> bool:
    """Return whether floating point numbers are so small that whole ones are exact; true for other types."""
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
    except ValueError as error:
        raise UnfitError(f"text: {error}") from None
    if not is_encodable(text):
        raise UnfitError("text without half of a surrogate pair")
    return text


def _only_text(value: Any) -> str:
    if type(value) is str:
        return _text(value)
    raise UnfitError("a string")


def is_encodable(text: str) -> bool:
    """Return whether text can be encoded, which half of a surrogate pair cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_base64(text: str) -> bytes:
    r"""Decode base64.

    Raises:
        ValueError: the text is not the base64 encoding of its bytes.

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
    """Return the conversion from text to a date, a time, or a time without a zone."""
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
    """Return whether dates and times are of the years 1 to 9999, which Spark supports; true for other types."""
    kind = column.type
    if not pa.types.is_timestamp(kind) and not pa.types.is_date32(kind):
        return True
    first, last = (date.min, date.max) if pa.types.is_date32(kind) else (_FIRST_INSTANT, _LAST_INSTANT)
    is_beyond = pc.or_(pc.less(column, pa.scalar(first, kind)), pc.greater(column, pa.scalar(last, kind)))
    return not pc.any(is_beyond).as_py()


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Create an object from pairs with distinct keys.

    Raises:
        ValueError: a key is repeated; it names it.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {min(_repeated(pairs))!r} occurs twice")
    return found


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which are not JSON.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{constant} is not JSON")


def scanner(**hooks: Any) -> Scan:
    """Return a function that parses the value at a place of a text and returns it and the place after it.

    The function keeps the text of numbers. Objects in which a key occurs twice are :class:`RepeatingObject`.

    Args:
        **hooks: further arguments of ``json.JSONDecoder``.

    Example:
        >>> scanner()('[1.10]', 0)
        (['1.10'], 6)
    """
    options = {"object_pairs_hook": read_pairs, "parse_int": Integer, "parse_float": Float, **hooks}
    decoder: Any = json.JSONDecoder(**options)
    scan: Scan = decoder.scan_once
    return scan


def _number_of_variant(text: str) -> str:
    """Return the text of a number that Spark's ``parse_json`` reads as it is.

    It reads a number with an exponent as the nearest DOUBLE. It would do so with any other number that DECIMAL cannot
    hold, too, and without an error.

    Raises:
        ValueError: a VARIANT would have another number.
    """
    if len(text) <= _MAX_DIGITS and "e" not in text and "E" not in text:
        return text
    mantissa = text.lower().partition("e")[0]
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("-0")
    if len(mantissa) < len(text):
        if len(text) > _MAX_NUMBER_LENGTH:
            raise ValueError(f"a number with more than the {_MAX_NUMBER_LENGTH} characters of a VARIANT")
        if math.isinf(number := float(text)) or (not number and digits):
            raise ValueError("a number with an exponent that a VARIANT cannot hold")
    elif len(digits) > _MAX_DIGITS or len(fraction) > _MAX_DIGITS:
        raise ValueError(f"a number with more than the {_MAX_DIGITS} digits of a VARIANT")
    return text


_scan_variant = scanner(
    parse_constant=refuse_constant,
    parse_int=lambda text: Integer(_number_of_variant(text)),
    parse_float=lambda text: Float(_number_of_variant(text)),
    object_pairs_hook=object_once,
)


def _is_longer_than_name(text: str) -> bool:
    """Return whether text is longer than a name of Jackson, which counts a character beyond U+FFFF twice."""
    return 2 * len(text) > _MAX_NAME_LENGTH and len(text.encode("utf-16-le", "surrogatepass")) > 2 * _MAX_NAME_LENGTH


def variant_problem(text: str) -> str | None:
    """Return why Spark's ``parse_json`` would reject or change a text; ``None`` if it takes the text as it is.

    Args:
        text: a text without white space around it.

    Example:
        >>> variant_problem('[1, {"a": null}]') is None
        True
        >>> variant_problem('{"a": 1, "a": 2}')
        "the key 'a' occurs twice"
    """
    try:
        if len(text) > MAX_VARIANT_BYTES:
            raise ValueError(_TOO_LONG)
        value, end = _scan_variant(text, 0)
        if end != len(text):
            raise ValueError("more than one JSON value")
        # Checking each part of the value takes longer than parsing it, so only suspicious text is checked.
        is_long = _is_longer_than_name(text)
        if is_long or "\\u" in text or text.count("[") + text.count("{") > MAX_JSON_LEVELS:
            variant_text(value)
    except StopIteration:
        return "not JSON"
    except RecursionError:
        return TOO_DEEP
    except ValueError as error:
        return str(error)
    return None


def variant_text(value: Any) -> str:
    """Return the JSON text of a parsed value for Spark's ``parse_json``.

    Raises:
        ValueError: a VARIANT cannot hold this value.
    """
    text = json_text(value, of_variant=True)
    if len(text) > MAX_VARIANT_BYTES:
        raise ValueError(_TOO_LONG)
    if not is_encodable(text):
        raise ValueError("half of a surrogate pair, which a VARIANT cannot hold")
    return text


def json_text(value: Any, levels: int = MAX_JSON_LEVELS, *, of_variant: bool = False) -> str:
    """Return the JSON text of a parsed value, with the text of numbers unchanged.

    Args:
        value: the value from a :func:`scanner`.
        levels: how many levels it may have.
        of_variant: whether to reject names and numbers that a VARIANT cannot hold.

    Raises:
        ValueError: an object has a key twice, it has too many levels, or a VARIANT cannot hold the value.

    Example:
        >>> json_text(scanner()('[1.10,{"a":null}]', 0)[0])
        '[1.10, {"a": null}]'
    """
    if isinstance(value, Number):
        if of_variant and isinstance(value, Constant):
            raise ValueError(f"{value} is not JSON")
        return _number_of_variant(str(value)) if of_variant else str(value)
    if isinstance(value, str):
        return encode_basestring(value)
    if not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, RepeatingObject):
        raise ValueError(f"the key {min(value.repeated)!r} occurs twice")
    if levels == 0:
        raise ValueError(TOO_DEEP)
    # A comprehension would use twice as many of the stack levels that Python allows.
    parts: list[str] = []
    if isinstance(value, list):
        for item in value:
            parts.append(json_text(item, levels - 1, of_variant=of_variant))
        return f"[{', '.join(parts)}]"
    for name, one in value.items():
        if of_variant and _is_longer_than_name(name):
            raise ValueError(f"a name with more than the {_MAX_NAME_LENGTH} characters of a VARIANT")
        parts.append(f"{encode_basestring(name)}: {json_text(one, levels - 1, of_variant=of_variant)}")
    return f"{{{', '.join(parts)}}}"


def read_moment(text: str) -> datetime:
    """Read a time, and return it in UTC, which is also the zone of text without one.

    Args:
        text: a time in the form that the module describes.

    Raises:
        ValueError: the text is not such a time, or is ambiguous.
        OverflowError: the time is not in the years 1 to 9999.

    Example:
        >>> print(read_moment("2024-02-29T12:00:00.123456000 Europe/Paris"))
        2024-02-29 11:00:00.123456+00:00
    """
    found, zone = _moment(text)
    offset = zone.utcoffset(found) if zone is not None else None
    if zone is not None and zone.utcoffset(found.replace(fold=1)) != offset:
        raise ValueError("clocks of this zone show this time twice or never")
    return (found - offset if offset else found).replace(tzinfo=timezone.utc)


def read_local_moment(text: str) -> datetime:
    """Read a time without a zone.

    Raises:
        ValueError: the text is not a time, or has a zone.
        OverflowError: the time is not in the years 1 to 9999.

    Example:
        >>> print(read_local_moment("2024-02-29 12:00"))
        2024-02-29 12:00:00
    """
    found, zone = _moment(text)
    if zone is not None:
        raise ValueError("it has a zone")
    return found


def _moment(text: str) -> tuple[datetime, tzinfo | None]:
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueError("no time")
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    found = datetime(  # noqa: DTZ001 - the caller applies the zone
        _year(year),
        int(month),
        int(day),
        int(hour or 0),
        int(minute or 0),
        int(second or 0),
        int(fraction.ljust(6, "0")) if fraction else 0,
    )
    return found, None if zone is None else _zone(zone)


def read_day(text: str) -> date:
    """Read a date.

    Raises:
        ValueError: the text is not a date, or has more than a date.
        OverflowError: the date is not in the years 1 to 9999.

    Example:
        >>> print(read_day("2024-2-29"))
        2024-02-29
    """
    match = _DAY.fullmatch(text)
    if match is None:
        raise ValueError("no day")
    year, month, day = match.groups()
    return date(_year(year), int(month), int(day))


def read_epoch_seconds(digits: str) -> datetime:
    """Read a number of seconds since 1970 as a time in UTC.

    Raises:
        OverflowError: the time is not in the years 1 to 9999.

    Example:
        >>> print(read_epoch_seconds("1709208000"))
        2024-02-29 12:00:00+00:00
    """
    if len(digits) > 13:
        raise OverflowError(digits)
    return EPOCH + timedelta(seconds=int(digits))


def _year(digits: str) -> int:
    year = int(digits)
    if not 1 <= year <= 9999:
        raise OverflowError(digits)
    return year


@functools.lru_cache(maxsize=1024)
def _zone(name: str) -> tzinfo:
    if name == "Z" or _PREFIXED.fullmatch(name):
        return timezone.utc
    if offset := _OFFSET.fullmatch(_PREFIXED.sub("", name, count=1)):
        sign, *parts = offset.groups()
        hours, minutes, seconds = (int(next((parts[i] for i in places if parts[i]), 0)) for places in _PLACES)
        distance = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if minutes > 59 or seconds > 59 or distance >= _MAX_OFFSET:
            raise ValueError("no zone")
        return timezone(-distance if sign == "-" else distance)
    if name not in _regions():
        raise ValueError("no zone")
    return ZoneInfo(name)


@functools.cache
def _regions() -> frozenset[str]:
    """Return the names of zones. No other name, which a message may contain, is looked up as a file or a module."""
    return frozenset(name for name in available_timezones() if not _NO_REGIONS.match(name))


# The groups of _OFFSET that may have the hours, the minutes and the seconds.
_PLACES = ((0, 4), (1, 2, 5), (3, 6))
