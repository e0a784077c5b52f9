"""JSON payloads into typed Arrow columns, a block at a time.

A block of payloads is parsed by Arrow in one go. If that fails, what is not JSON at all is set aside, and the rest is
halved until the payloads that fail are alone, so that what is accepted never depends on the neighbours.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterator
from datetime import date, datetime, timezone
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from stream_consumers.errors import SchemaMismatchError

Column: TypeAlias = "pa.Array[Any]"

BLOCK_ROWS = 8192
BLOCK_BYTES = 64 << 20
FEW = 8
_TYPES = "BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BOOLEAN, DATE, TIMESTAMP, STRUCT and ARRAY"
# Arrow does not check for overflow when it scales: 38 digits before and 38 behind the point cannot overflow 76.
_PARSED_DECIMAL = pa.decimal256(38, 38)
_ROOMY_DECIMAL = pa.decimal256(76, 38)
_WHOLE = re.compile(r"-?[0-9]{1,19}")
# From half a step behind the largest number of so many bits on, the nearest one is infinity.
_ROUNDED_TO_INFINITY = {32: 2**128 - 2**103, 64: 2**1024 - 2**970}
_FLOATS = {32: "FLOAT", 64: "DOUBLE"}
_FIRST_INSTANT = datetime(1, 1, 1, tzinfo=timezone.utc)
_LAST_INSTANT = datetime.max.replace(tzinfo=timezone.utc)
_FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError)


def check_json_type(name: str, kind: pa.DataType) -> None:
    """Refuse types that JSON cannot be read into alike.

    Raises:
        SchemaMismatchError: naming the column, its type, and the ones there are.
    """
    if isinstance(kind, pa.StructType):
        for field in kind:
            check_json_type(f"{name}.{field.name}", field.type)
    elif isinstance(kind, pa.ListType):
        check_json_type(f"{name}[]", kind.value_type)
    elif not (
        pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date32(kind)
    ):
        raise SchemaMismatchError(
            f"column {name} is {kind}, which JSON payloads are not decoded into",
            remedy=f"Use one of {_TYPES}; or decode=Text() and from_json in the transform.",
        )


def decode_json(payloads: Column, schema: pa.Schema) -> tuple[list[Column], Column]:
    """Decode ``payloads`` into the columns of ``schema``.

    Returns:
        The columns, and per row why it could not be decoded (null: it could).
    """
    parts: list[list[Column]] = [[pa.array([], field.type) for field in schema]]
    errors: list[str | None] = []
    # A tombstone is an object without fields.
    for documents in _blocks([b"{}" if document is None else document for document in payloads.to_pylist()]):
        columns, found = _decode_block(documents, schema)
        parts.append(columns)
        errors.extend(found)
    merged = _joined(parts)
    return merged, _require(merged, schema, errors)


def _blocks(documents: list[bytes | None]) -> Iterator[list[bytes | None]]:
    """Blocks that Arrow can hold."""
    block: list[bytes | None] = []
    size = 0
    for document in documents:
        length = len(document or b"")
        if block and (len(block) == BLOCK_ROWS or size + length > BLOCK_BYTES):
            yield block
            block, size = [], 0
        block.append(document)
        size += length
    if block:
        yield block


def _require(columns: list[Column], schema: pa.Schema, errors: list[str | None]) -> Column:
    """Add an error where a NOT NULL column is null."""
    for column, field in zip(columns, schema):
        if not field.nullable and column.null_count:
            for row, value in enumerate(column.is_null().to_pylist()):
                if value:
                    errors[row] = errors[row] or f"field {field.name!r} is missing, but it is NOT NULL"
    return pa.array(errors, pa.string())


def _decode_block(documents: list[bytes | None], schema: pa.Schema) -> tuple[list[Column], list[str | None]]:
    errors = [_refusal(document) for document in documents]
    rows = [row for row, error in enumerate(errors) if error is None]
    # Each line holds whole objects only, so that as many rows as lines means one row a line.
    lines = [(documents[row] or b"").strip().replace(b"\n", b" ") for row in rows]
    try:
        columns = _parse(lines, schema)
    except _FAILURES:
        for row, line in zip(rows, lines):
            errors[row] = _mismatch(line, schema)
        lines = [line for row, line in zip(rows, lines) if errors[row] is None]
        rows = [row for row in rows if errors[row] is None]
        parts = [[pa.nulls(0, field.type) for field in schema]]
        found: list[str | None] = []
        for part, part_errors in _halve(lines, schema):
            parts.append(part)
            found.extend(part_errors)
        columns = _joined(parts)
        for row, error in zip(rows, found):
            errors[row] = error
    if len(rows) == len(documents):
        return columns, errors
    places: list[int | None] = [None] * len(documents)
    for place, row in enumerate(rows):
        places[row] = place
    return [column.take(pa.array(places, pa.int64())) for column in columns], errors


def _halve(lines: list[bytes], schema: pa.Schema) -> Iterator[tuple[list[Column], list[str | None]]]:
    """Parse lines, dividing them where they fail; yields parts in order."""
    if not lines:
        return
    try:
        columns = _parse(lines, schema)
    except _FAILURES as error:
        if len(lines) == 1:
            yield [pa.nulls(1, field.type) for field in schema], [_reason(error)]
            return
        size = 1 if len(lines) <= FEW else (len(lines) + 1) // 2
        for start in range(0, len(lines), size):
            yield from _halve(lines[start : start + size], schema)
        return
    yield columns, [None] * len(lines)


def _joined(parts: list[list[Column]]) -> list[Column]:
    return [pa.concat_arrays(list(chunks)) for chunks in zip(*parts)]


def _refusal(document: bytes | None) -> str | None:
    """What Arrow would not refuse, or not in a block of lines; ``None`` if there is nothing of it."""
    line = (document or b"").strip()
    if line[:1] != b"{" or line[-1:] != b"}":
        return "not a JSON object"
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    # Arrow takes NaN and Inf for numbers, and it must not see line ends: those in strings are not JSON.
    if "\n" in text or "NaN" in text or "Inf" in text:
        try:
            _check_syntax(text)
        except (ValueError, RecursionError) as error:
            return _reason(error)
    return None


def _mismatch(line: bytes, schema: pa.Schema) -> str | None:
    """Why Arrow is sure to refuse a line, told without it, which is faster and clearer; ``None`` if it may not."""
    try:
        document = _check_syntax(line.decode())
    except json.JSONDecodeError as error:
        return _reason(error)
    except (ValueError, RecursionError):
        return None
    for field in schema:
        value = document.get(field.name)
        if value is not None and (wanted := _unlike(value, field.type)):
            return f"field {field.name!r} is not {wanted}"
    return None


def _unlike(value: object, kind: pa.DataType) -> str | None:
    """What ``value`` should have been but is not."""
    is_number = isinstance(value, _Number)
    if isinstance(kind, pa.StructType):
        is_alike, wanted = isinstance(value, dict), "an object"
    elif isinstance(kind, pa.ListType):
        is_alike, wanted = isinstance(value, list), "an array"
    elif pa.types.is_boolean(kind):
        is_alike, wanted = isinstance(value, bool), "true or false"
    elif pa.types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        is_whole = isinstance(value, _Number) and _WHOLE.fullmatch(value) and -limit <= int(value) < limit
        is_alike, wanted = bool(is_whole), f"a whole number of {kind.bit_width} bits"
    elif isinstance(kind, pa.Decimal128Type):
        digits = kind.precision - kind.scale
        is_alike = isinstance(value, str) and _digits(value) <= digits
        wanted = f"a number with at most {digits} digits before the point"
    elif pa.types.is_floating(kind):
        is_alike = is_number and not _is_infinite(str(value), kind.bit_width)
        wanted = f"a number that {_FLOATS[kind.bit_width]} can hold" if is_number else "a number"
    else:
        is_alike, wanted = isinstance(value, str) and not is_number, "a string"
    return None if is_alike else wanted


def _digits(text: str) -> int:
    """Digits before the point; 0 for what is no number."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return 0
    return number.adjusted() + 1 if number.is_finite() and number else 0


def _is_infinite(text: str, bits: int) -> bool:
    """Whether the nearest floating point number is infinity; ``False`` where Arrow has to say."""
    try:
        return Decimal(text).copy_abs() >= _ROUNDED_TO_INFINITY[bits]
    except InvalidOperation:
        return False


class _Number(str):
    """A number as it is written."""

    __slots__ = ()


def _check_syntax(text: str) -> Any:
    return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse(lines: list[bytes], schema: pa.Schema) -> list[Column]:
    block = b"\n".join(lines) + b"\n"
    table = pj.read_json(
        io.BytesIO(block),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pj.ParseOptions(explicit_schema=_parsed(schema), unexpected_field_behavior="ignore"),
    )
    if table.num_rows != len(lines):
        raise ValueError("more than one JSON object")
    columns: list[Column] = []
    for field in schema:
        column: Column = pa.concat_arrays(table.column(field.name).chunks)
        columns.append(_convert(column, field.type, field.name))
    return columns


@functools.lru_cache(maxsize=64)
def _parsed(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, _parsed_type(field.type)) for field in schema])


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """What Arrow parses on the way to ``kind``: DECIMAL with room for more places, DATE as text, nothing NOT NULL."""
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(field.name, _parsed_type(field.type)) for field in kind])
    if isinstance(kind, pa.ListType):
        return pa.list_(pa.field(kind.value_field.name, _parsed_type(kind.value_type)))
    if isinstance(kind, pa.Decimal128Type):
        return _PARSED_DECIMAL
    return pa.string() if pa.types.is_date32(kind) else kind


def _convert(column: Column, kind: pa.DataType, name: str) -> Column:
    """From the parsed type to ``kind``.

    Raises:
        ValueError: naming the field.
    """
    if isinstance(column, pa.StructArray) and isinstance(kind, pa.StructType):
        children = [_convert(column.field(i), f.type, f"{name}.{f.name}") for i, f in enumerate(kind)]
        for child, field in zip(children, kind):
            if not field.nullable and pc.any(pc.and_(child.is_null(), column.is_valid())).as_py():
                raise ValueError(f"field {name + '.' + field.name!r} is missing, but it is NOT NULL")
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=column.is_null())
    if isinstance(column, pa.ListArray) and isinstance(kind, pa.ListType):
        values = _convert(column.values, kind.value_type, f"{name}[]")
        return pa.ListArray.from_arrays(column.offsets, values, type=kind, mask=column.is_null())
    try:
        if isinstance(kind, pa.Decimal128Type):
            column = _rounded(column, kind.scale)
        converted = column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise ValueError(f"field {name!r}: {_reason(error)}") from error
    _check_range(converted, name)
    return converted


def _check_range(column: Column, name: str) -> None:
    """Refuse what Arrow lets pass: numbers that became infinite, and times that Spark does not have.

    Raises:
        ValueError: naming the field.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        # JSON has no word for infinity, so it was a number.
        if pc.any(pc.is_inf(column)).as_py():
            raise ValueError(f"field {name!r} is not a number that {_FLOATS[kind.bit_width]} can hold")
    elif pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        first, last = (date.min, date.max) if pa.types.is_date32(kind) else (_FIRST_INSTANT, _LAST_INSTANT)
        is_beyond = pc.or_(pc.less(column, pa.scalar(first, kind)), pc.greater(column, pa.scalar(last, kind)))
        if pc.any(is_beyond).as_py():
            raise ValueError(f"field {name!r} is not in the years 1 to 9999")


def _rounded(column: Column, places: int) -> Column:
    roomy = column.view(_ROOMY_DECIMAL)
    rounded: Column = pc.round(roomy, ndigits=places, round_mode="half_towards_infinity")
    return rounded


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if text.startswith("Extra data"):
        return "more than one JSON object"
    return text.removesuffix(" in row 0").removeprefix("JSON parse error: ")
