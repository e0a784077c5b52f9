"""JSON payloads into typed Arrow columns, a block at a time.

A block of payloads is checked, joined and parsed by Arrow in one go. If that fails, the careful way looks at each
payload: what is not JSON at all is set aside, and the rest is halved until the payloads that fail are alone, so that
what is accepted never depends on the neighbours.
"""

from __future__ import annotations

import functools
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
CHUNK_ROWS = 512
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
_TOMBSTONE = b"{}"
_WHITE_SPACE = " \t\n\r\x0b\x0c"
# Where Arrow reads a value. Behind a quotation mark, a letter or a digit there is none, so that "Info" is no suspect.
_CONSTANT = re.compile(rb'(?<!["0-9A-Za-z_])-?(?:NaN|Inf)')
_NAMED_ROW = re.compile(r" in row ([0-9]+)\Z")
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
    parts: list[list[Column]] = [[*(pa.array([], field.type) for field in schema), pa.array([], pa.string())]]
    for start in range(0, len(payloads), BLOCK_ROWS):
        for block in _bounded(payloads.slice(start, BLOCK_ROWS)):
            columns, errors = _decode_block(block, schema)
            parts.append([*columns, errors])
    *merged, found = _joined(parts[1:] or parts)
    return merged, _require(merged, schema, found)


def _bounded(block: Column) -> Iterator[Column]:
    """Parts of ``block`` that Arrow can hold."""
    if len(block) == 1 or block.nbytes <= BLOCK_BYTES:
        yield block
        return
    half = len(block) // 2
    yield from _bounded(block.slice(0, half))
    yield from _bounded(block.slice(half))


def _require(columns: list[Column], schema: pa.Schema, errors: Column) -> Column:
    """Add an error where a NOT NULL column is null."""
    for column, field in zip(columns, schema):
        if not field.nullable and column.null_count:
            missing = f"field {field.name!r} is missing, but it is NOT NULL"
            errors = pc.coalesce(errors, pc.if_else(column.is_null(), missing, pa.scalar(None, pa.string())))
    return errors


def _decode_block(payloads: Column, schema: pa.Schema) -> tuple[list[Column], Column]:
    """Decode a block as a whole, or if there is anything to refuse in it, document by document."""
    try:
        columns = _parse(_lines(payloads), len(payloads), schema)
    except _FAILURES:
        columns, errors = decode_carefully(payloads.to_pylist(), schema)
        return columns, pa.array(errors, pa.string())
    return columns, pa.nulls(len(payloads), pa.string())


def _lines(payloads: Column) -> bytes:
    """What :func:`_refusal` checks, checked for all documents at once, and the documents as lines.

    Raises:
        ArrowInvalid, ValueError: some documents are to be refused; which ones is for :func:`_refusal` to say.
    """
    documents: Any = (payloads.fill_null(_TOMBSTONE) if payloads.null_count else payloads).cast(pa.string())
    if not _are_objects(documents):
        documents = pc.ascii_trim(documents, characters=_WHITE_SPACE)
        if not _are_objects(documents):
            raise ValueError("not a JSON object")
    every = pa.ListArray.from_arrays(pa.array([0, len(documents)], pa.int32()), documents)
    joined: Any = pc.binary_join(every, "\n")
    lines: bytes = joined[0].as_buffer().to_pybytes() + b"\n"
    if _may_hold_constants(lines):
        suspects = pc.or_(pc.match_substring(documents, "NaN"), pc.match_substring(documents, "Inf"))
        if any(_refusal(document.encode()) for document in documents.filter(suspects).to_pylist()):
            raise ValueError("NaN and Inf are not JSON")
    return lines


def _are_objects(documents: Column) -> bool:
    starts, ends = pc.starts_with(documents, "{"), pc.ends_with(documents, "}")
    return bool(pc.all(pc.and_(starts, ends)).as_py())


def _may_hold_constants(text: bytes) -> bool:
    """Whether Arrow could find a NaN or an Inf in ``text`` and take it for a number; within a string it does not."""
    return (b"NaN" in text or b"Inf" in text) and _CONSTANT.search(text) is not None


def decode_carefully(documents: list[bytes | None], schema: pa.Schema) -> tuple[list[Column], list[str | None]]:
    """Decode a block document by document, as far as that is needed to tell what is wrong with which of them.

    Args:
        documents: as many as Arrow can parse at once; ``None`` is a tombstone.
        schema: the columns.

    Returns:
        The columns, and per row why it could not be decoded.
    """
    # A tombstone is an object without fields.
    stripped = [_TOMBSTONE if document is None else document.strip() for document in documents]
    errors = [_refusal(line) for line in stripped]
    rows = [row for row, error in enumerate(errors) if error is None]
    lines = [stripped[row] for row in rows]
    try:
        columns = _parse_lines(lines, schema)
    except _FAILURES:
        parts = [[pa.nulls(0, field.type) for field in schema]]
        found: list[str | None] = []
        for start in range(0, len(lines), CHUNK_ROWS):
            for part, part_errors in _divided(lines[start : start + CHUNK_ROWS], schema):
                parts.append(part)
                found.extend(part_errors)
        columns = _joined(parts)
        for row, error in zip(rows, found):
            errors[row] = error
    return _placed(columns, rows, len(documents)), errors


def _divided(lines: list[bytes], schema: pa.Schema) -> Iterator[tuple[list[Column], list[str | None]]]:
    """Parse lines without those that fail; yields parts in order.

    Arrow names the first that it cannot parse. Is that one of few, and bad by itself, the others need no look.
    """
    for _ in range(FEW):
        try:
            columns = _parse_lines(lines, schema)
        except _FAILURES as error:
            named = _NAMED_ROW.search(str(error))
            row = int(named[1]) if named else len(lines)
            reason = _mismatch(lines[row], schema) if row < len(lines) else None
            if reason is None:
                break
            yield from _halve(lines[:row], schema)
            yield [pa.nulls(1, field.type) for field in schema], [reason]
            lines = lines[row + 1 :]
            if not lines:
                return
        else:
            yield columns, [None] * len(lines)
            return
    reasons = [_mismatch(line, schema) for line in lines]
    rows = [row for row, reason in enumerate(reasons) if reason is None]
    parts = [[pa.nulls(0, field.type) for field in schema]]
    for part, part_errors in _halve([lines[row] for row in rows], schema):
        for row, reason in zip(rows[len(parts[0][0]) :], part_errors):
            reasons[row] = reason
        parts = [_joined([*parts, part])]
    yield _placed(parts[0], rows, len(lines)), reasons


def _placed(columns: list[Column], rows: list[int], count: int) -> list[Column]:
    """The columns of these rows among ``count`` rows, the others null."""
    if len(rows) == count:
        return columns
    places: list[int | None] = [None] * count
    for place, row in enumerate(rows):
        places[row] = place
    return [column.take(pa.array(places, pa.int64())) for column in columns]


def _halve(lines: list[bytes], schema: pa.Schema) -> Iterator[tuple[list[Column], list[str | None]]]:
    """Parse lines, dividing them where they fail; yields parts in order."""
    if not lines:
        return
    try:
        columns = _parse_lines(lines, schema)
    except _FAILURES as error:
        if len(lines) == 1:
            yield [pa.nulls(1, field.type) for field in schema], [_mismatch(lines[0], schema) or _reason(error)]
            return
        size = 1 if len(lines) <= FEW else (len(lines) + 1) // 2
        for start in range(0, len(lines), size):
            yield from _halve(lines[start : start + size], schema)
        return
    yield columns, [None] * len(lines)


def _joined(parts: list[list[Column]]) -> list[Column]:
    return parts[0] if len(parts) == 1 else [pa.concat_arrays(list(chunks)) for chunks in zip(*parts)]


def _refusal(line: bytes) -> str | None:
    """What Arrow would not refuse, or not in a block of lines; ``None`` if there is nothing of it."""
    if line[:1] != b"{" or line[-1:] != b"}":
        return "not a JSON object"
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    if _may_hold_constants(line):
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


def _parse_lines(lines: list[bytes], schema: pa.Schema) -> list[Column]:
    return _parse(b"\n".join(lines) + b"\n", len(lines), schema)


def _parse(lines: bytes, count: int, schema: pa.Schema) -> list[Column]:
    """Parse so many documents, each of which starts with ``{`` and ends with ``}``, with line ends between them.

    As many rows as documents means one row each. Arrow refuses a line end in a string, so that none of those between
    the documents is in one; what stands before it is a ``}`` and behind it a ``{``, which no object continues with: so
    each document holds whole objects only.

    Raises:
        ArrowInvalid, ArrowNotImplementedError, ValueError: one of them cannot be decoded.
    """
    source: Any = pa.BufferReader(lines)
    table = pj.read_json(
        source,
        read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pj.ParseOptions(explicit_schema=_parsed(schema), unexpected_field_behavior="ignore"),
    )
    if table.num_rows != count:
        raise ValueError("more than one JSON object")
    columns: list[Column] = []
    for field in schema:
        chunks = table.column(field.name).chunks
        column: Column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
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
