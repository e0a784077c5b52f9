"""JSON payloads into typed Arrow columns, a block at a time.

A block of payloads is checked, joined and parsed by Arrow in one go. If that fails, the careful way looks at each
payload: what is not JSON at all is set aside, and the rest is halved until the payloads that fail are alone, so that
what is accepted never depends on the neighbours.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from spark_jobs.decoding.json_types import Column, decoded_type, has_own_way
from spark_jobs.decoding.json_values import FLOATS, ROOMY_DECIMAL, Number, are_in_range, read_base64, rounded
from spark_jobs.decoding.rows import reason

Careful: TypeAlias = Callable[[list[bytes | None], pa.Schema], tuple[list[Column], list[str | None]]]

BLOCK_ROWS = 8192
BLOCK_BYTES = 64 << 20
FEW = 8
CHUNK_ROWS = 512
# Arrow does not check for overflow when it scales: 38 digits before and 38 behind the point cannot overflow 76.
_PARSED_DECIMAL = pa.decimal256(38, 38)
_WHOLE = re.compile(r"-?[0-9]{1,19}")
# From half a step behind the largest number of so many bits on, the nearest one is infinity.
_ROUNDED_TO_INFINITY = {32: 2**128 - 2**103, 64: 2**1024 - 2**970}
_TOMBSTONE = b"{}"
_WHITE_SPACE = " \t\n\r\x0b\x0c"
# Where Arrow reads a value. Behind a quotation mark, a letter or a digit there is none, so that "Info" is no suspect.
_CONSTANT = re.compile(rb'(?<!["0-9A-Za-z_])-?(?:NaN|Inf)')
_NAMED_ROW = re.compile(r" in row ([0-9]+)\Z")
FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError)


def decode_json(payloads: Column, schema: pa.Schema, careful: Careful | None = None) -> tuple[list[Column], Column]:
    """Decode ``payloads`` into the columns of ``schema``.

    Args:
        payloads: the documents.
        schema: the columns.
        careful: decodes blocks that Arrow does not parse as a whole; :func:`decode_carefully` by default. What Arrow
            parses, it has to give alike.

    Returns:
        The columns, and per row why it could not be decoded (null: it could).
    """
    is_parsed = not any(has_own_way(field.type) for field in schema)
    empty = [pa.array([], decoded_type(field.type)) for field in schema]
    parts: list[list[Column]] = [[*empty, pa.array([], pa.string())]]
    for start in range(0, len(payloads), BLOCK_ROWS):
        for block in bounded(payloads.slice(start, BLOCK_ROWS)):
            columns, errors = _decode_block(block, schema, careful or decode_carefully, is_parsed=is_parsed)
            parts.append([*columns, errors])
    *merged, found = joined(parts[1:] or parts)
    return merged, _require(merged, schema, found)


def bounded(block: Column) -> Iterator[Column]:
    """Parts of ``block`` that Arrow can hold."""
    if len(block) == 1 or block.nbytes <= BLOCK_BYTES:
        yield block
        return
    half = len(block) // 2
    yield from bounded(block.slice(0, half))
    yield from bounded(block.slice(half))


def _require(columns: list[Column], schema: pa.Schema, errors: Column) -> Column:
    """Add an error where a NOT NULL column is null."""
    for column, field in zip(columns, schema):
        if not field.nullable and column.null_count:
            missing = f"field {field.name!r} is missing, but it is NOT NULL"
            errors = pc.coalesce(errors, pc.if_else(column.is_null(), missing, pa.scalar(None, pa.string())))
    return errors


def _decode_block(
    payloads: Column, schema: pa.Schema, careful: Careful, *, is_parsed: bool
) -> tuple[list[Column], Column]:
    """Decode a block as a whole, or if there is anything to refuse in it, document by document."""
    if is_parsed:
        with suppress(*FAILURES):
            return _parse(document_lines(payloads), len(payloads), schema), pa.nulls(len(payloads), pa.string())
    columns, errors = careful(payloads.to_pylist(), schema)
    return columns, pa.array(errors, pa.string())


def document_lines(payloads: Column) -> bytes:
    """What :func:`refusal` checks, checked for all documents at once, and the documents as lines.

    Raises:
        ArrowInvalid, ValueError: some documents are to be refused; which ones is for :func:`refusal` to say.
    """
    documents: Any = (payloads.fill_null(_TOMBSTONE) if payloads.null_count else payloads).cast(pa.string())
    if not _are_objects(documents):
        documents = pc.ascii_trim(documents, characters=_WHITE_SPACE)
        if not _are_objects(documents):
            raise ValueError("not a JSON object")
    every = pa.ListArray.from_arrays(pa.array([0, len(documents)], pa.int32()), documents)
    joined: Any = pc.binary_join(every, "\n")
    lines: bytes = joined[0].as_buffer().to_pybytes() + b"\n"
    if may_hold_constants(lines):
        suspects = pc.or_(pc.match_substring(documents, "NaN"), pc.match_substring(documents, "Inf"))
        if any(refusal(document.encode()) for document in documents.filter(suspects).to_pylist()):
            raise ValueError("NaN and Inf are not JSON")
    return lines


def _are_objects(documents: Column) -> bool:
    starts, ends = pc.starts_with(documents, "{"), pc.ends_with(documents, "}")
    return bool(pc.all(pc.and_(starts, ends)).as_py())


def may_hold_constants(text: bytes) -> bool:
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
    errors = [refusal(line) for line in stripped]
    rows = [row for row, error in enumerate(errors) if error is None]
    lines = [stripped[row] for row in rows]
    try:
        columns = parse_lines(lines, schema)
    except FAILURES:
        parts = [[pa.nulls(0, field.type) for field in schema]]
        found: list[str | None] = []
        for start in range(0, len(lines), CHUNK_ROWS):
            for part, part_errors in _divided(lines[start : start + CHUNK_ROWS], schema):
                parts.append(part)
                found.extend(part_errors)
        columns = joined(parts)
        for row, error in zip(rows, found):
            errors[row] = error
    return placed(columns, rows, len(documents)), errors


def _divided(lines: list[bytes], schema: pa.Schema) -> Iterator[tuple[list[Column], list[str | None]]]:
    """Parse lines without those that fail; yields parts in order.

    Arrow names the first that it cannot parse. Is that one of few, and bad by itself, the others need no look.
    """
    for _ in range(FEW):
        try:
            columns = parse_lines(lines, schema)
        except FAILURES as error:
            row = named_row(error)
            reason = _mismatch(lines[row], schema) if row is not None and row < len(lines) else None
            if row is None or reason is None:
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
        parts = [joined([*parts, part])]
    yield placed(parts[0], rows, len(lines)), reasons


def named_row(error: Exception) -> int | None:
    """The first row that Arrow could not parse, if it tells."""
    named = _NAMED_ROW.search(str(error))
    return int(named[1]) if named else None


def placed(columns: list[Column], rows: list[int], count: int) -> list[Column]:
    """The columns of these rows, in whatever order, among ``count`` rows, the others null."""
    if rows == list(range(count)):
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
        columns = parse_lines(lines, schema)
    except FAILURES as error:
        if len(lines) == 1:
            yield [pa.nulls(1, field.type) for field in schema], [_mismatch(lines[0], schema) or reason_of(error)]
            return
        size = 1 if len(lines) <= FEW else (len(lines) + 1) // 2
        for start in range(0, len(lines), size):
            yield from _halve(lines[start : start + size], schema)
        return
    yield columns, [None] * len(lines)


def joined(parts: list[list[Column]]) -> list[Column]:
    """The columns of all parts, one behind the other."""
    return parts[0] if len(parts) == 1 else [pa.concat_arrays(list(chunks)) for chunks in zip(*parts)]


def refusal(line: bytes) -> str | None:
    """What Arrow would not refuse, or not in a block of lines; ``None`` if there is nothing of it."""
    if line[:1] != b"{" or line[-1:] != b"}":
        return "not a JSON object"
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    if may_hold_constants(line):
        try:
            _check_syntax(text)
        except (ValueError, RecursionError) as error:
            return reason_of(error)
    return None


def _mismatch(line: bytes, schema: pa.Schema) -> str | None:
    """Why Arrow is sure to refuse a line, told without it, which is faster and clearer; ``None`` if it may not."""
    try:
        document = _check_syntax(line.decode())
    except json.JSONDecodeError as error:
        return reason_of(error)
    except (ValueError, RecursionError):
        return None
    for field in schema:
        value = document.get(field.name)
        if value is not None and (wanted := _unlike(value, field.type)):
            return f"field {field.name!r} is not {wanted}"
    return None


def _unlike(value: object, kind: pa.DataType) -> str | None:
    """What ``value`` should have been but is not."""
    is_number = isinstance(value, Number)
    if isinstance(kind, pa.StructType):
        is_alike, wanted = isinstance(value, dict), "an object"
    elif isinstance(kind, pa.ListType):
        is_alike, wanted = isinstance(value, list), "an array"
    elif pa.types.is_boolean(kind):
        is_alike, wanted = isinstance(value, bool), "true or false"
    elif pa.types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        is_whole = isinstance(value, Number) and _WHOLE.fullmatch(value) and -limit <= int(value) < limit
        is_alike, wanted = bool(is_whole), f"a whole number of {kind.bit_width} bits"
    elif isinstance(kind, pa.Decimal128Type):
        digits = kind.precision - kind.scale
        is_alike = isinstance(value, str) and _digits(value) <= digits
        wanted = f"a number with at most {digits} digits before the point"
    elif pa.types.is_floating(kind):
        is_alike = is_number and not _is_infinite(str(value), kind.bit_width)
        wanted = f"a number that {FLOATS[kind.bit_width]} can hold" if is_number else "a number"
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


def _check_syntax(text: str) -> Any:
    return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parse_lines(lines: list[bytes], schema: pa.Schema) -> list[Column]:
    """Parse documents of which :func:`refusal` refuses none.

    Raises:
        ArrowInvalid, ArrowNotImplementedError, ValueError: one of them cannot be decoded.
    """
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
        parse_options=pj.ParseOptions(explicit_schema=parsed_schema(schema), unexpected_field_behavior="ignore"),
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
def parsed_schema(schema: pa.Schema) -> pa.Schema:
    """What Arrow parses on the way to these columns."""
    return pa.schema([pa.field(field.name, _parsed_type(field.type)) for field in schema])


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """What Arrow parses on the way to ``kind``: DECIMAL with room for more places; others as text."""
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(field.name, _parsed_type(field.type)) for field in kind])
    if isinstance(kind, pa.ListType):
        return pa.list_(pa.field(kind.value_field.name, _parsed_type(kind.value_type)))
    if isinstance(kind, pa.Decimal128Type):
        return _PARSED_DECIMAL
    if isinstance(kind, pa.TimestampType):
        # The parser would drop a zone that a TIMESTAMP_NTZ cannot have.
        return kind if kind.tz else pa.string()
    return pa.string() if pa.types.is_date32(kind) or pa.types.is_binary(kind) else kind


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
    if pa.types.is_binary(kind):
        return _from_base64(column, name)
    try:
        if isinstance(kind, pa.Decimal128Type):
            column = rounded(column.view(ROOMY_DECIMAL), kind.scale)
        converted = column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise ValueError(f"field {name!r}: {reason_of(error)}") from error
    _check_finite(converted, name)
    if not are_in_range(converted):
        raise ValueError(f"field {name!r} is not in the years 1 to 9999")
    return converted


def _from_base64(column: Column, name: str) -> Column:
    try:
        return pa.array([None if text is None else read_base64(text) for text in column.to_pylist()], pa.binary())
    except ValueError:
        raise ValueError(f"field {name!r} is not base64") from None


def _check_finite(column: Column, name: str) -> None:
    """Refuse numbers that became infinite, which Arrow lets pass.

    Raises:
        ValueError: naming the field.
    """
    # JSON has no word for infinity, so it was a number.
    if pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
        raise ValueError(f"field {name!r} is not a number that {FLOATS[column.type.bit_width]} can hold")


def reason_of(error: Exception) -> str:
    """What is wrong with a document, of an error of a parser."""
    text = reason(error)
    return "more than one JSON object" if text.startswith("Extra data") else text
