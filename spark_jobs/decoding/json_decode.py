"""JSON payloads into typed Arrow columns, a block at a time.

Arrow parses a block of documents at once. Where it refuses one, or must not see one, the block goes to a slower way.
That takes each document that Arrow takes, with the same values: a result never depends on the rest of the block.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from spark_jobs.decoding.json_types import Column, decoded_type, has_own_way
from spark_jobs.decoding.json_values import ROOMY_DECIMAL, are_in_range, are_surely_exact, read_base64, refuse_constant
from spark_jobs.decoding.rows import reason

Careful: TypeAlias = Callable[[list[bytes | None], pa.Schema], tuple[list[Column], list[str | None]]]

BLOCK_ROWS = 8192
BLOCK_BYTES = 64 << 20
# Arrow does not check for overflow when it scales: 38 digits before and 38 after the point cannot overflow 76.
_PARSED_DECIMAL = pa.decimal256(38, 38)
_TOMBSTONE = b"{}"
_WHITE_SPACE = " \t\n\r\x0b\x0c"
# Where Arrow reads a value. Behind a quotation mark, a letter or a digit there is none, so that "Info" is no suspect.
_CONSTANT = re.compile(rb'(?<!["0-9A-Za-z_])-?(?:NaN|Inf)')
# What Arrow must not read for a DECIMAL. It has no check of the exponent: 1e-9999999 is a segmentation fault, and with
# more than 114 digits after the point it reads beyond its table. It takes text that is no number of JSON, like "+1" and
# "1.". Where the text has an escape, Python has to look. This is syntax of RE2.
_ODD_NUMBER = r'(?:"?[-+.0-9eE]*(?:[eE][-+0-9]{2}|[0-9.]{40}|\.["eE]|\\)|"[-+]*(?:[+.]|0[0-9]))'
# A name that is written with an escape may be that of a DECIMAL.
_ESCAPED_NAME = r'(?s:\\.(?:[^"\\]|\\.)*"\s*:)'
_NAMED_ROW = re.compile(r" in row ([0-9]+)\Z")
FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError)


def decode_json(payloads: Column, schema: pa.Schema, careful: Careful) -> tuple[list[Column], Column]:
    """Decode ``payloads`` into the columns of ``schema``.

    Args:
        payloads: the documents.
        schema: the columns.
        careful: decodes the documents of a block that Arrow does not parse as a whole (``None`` is a tombstone), and
            gives the columns, and per row why it could not be decoded. What Arrow parses, it has to give alike.

    Returns:
        The columns, and per row why it could not be decoded (null: it could).
    """
    is_parsed = not any(has_own_way(field.type) for field in schema)
    empty = [pa.array([], decoded_type(field.type)) for field in schema]
    parts: list[list[Column]] = [[*empty, pa.array([], pa.string())]]
    for start in range(0, len(payloads), BLOCK_ROWS):
        for block in bounded(payloads.slice(start, BLOCK_ROWS)):
            columns, errors = _decode_block(block, schema, careful, is_parsed=is_parsed)
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
            return _parse(document_lines(payloads, schema), len(payloads), schema), pa.nulls(len(payloads), pa.string())
    columns, errors = careful(payloads.to_pylist(), schema)
    return columns, pa.array(errors, pa.string())


def document_lines(payloads: Column, schema: pa.Schema) -> bytes:
    """The documents as lines, if Arrow may parse them for these columns.

    Raises:
        ArrowInvalid, ValueError: it may not, since one of them is no text, no object, or has a value that Arrow takes
            though it should not.
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
        for document in documents.filter(suspects).to_pylist():
            if may_hold_constants(document.encode()):
                check_syntax(document)
    if pc.any(may_hold_odd_decimals(documents, schema)).as_py():
        raise ValueError("a number that Arrow must not read")
    return lines


def may_hold_odd_decimals(documents: Column, schema: pa.Schema) -> Column:
    """For each document whether it may have a number for a DECIMAL that Arrow must not read.

    Args:
        documents: as text.
        schema: the columns, without those that Arrow does not parse.
    """
    if (pattern := _odd_decimals(schema)) is None:
        return pa.repeat(False, len(documents))
    odd = pc.match_substring_regex(documents, pattern)
    escaped = pc.match_substring(documents, "\\")
    if pc.any(escaped).as_py():
        odd = pc.or_(odd, pc.match_substring_regex(documents, _ESCAPED_NAME))
    found: Column = odd
    return found


@functools.lru_cache(maxsize=64)
def _odd_decimals(schema: pa.Schema) -> str | None:
    """A pattern of documents with an odd number in one of the DECIMAL fields; ``None`` if there are no such fields."""
    single, listed = _decimal_fields(pa.struct(list(schema)))
    # Within an array the number may be anywhere after the name.
    places = [(single, ""), (listed, r"(?s:.*[\[,\s])?")]
    patterns = [
        f'"(?:{"|".join(map(re.escape, sorted(names)))})"\\s*:\\s*{between}{_ODD_NUMBER}'
        for names, between in places
        if names
    ]
    return "|".join(patterns) or None


def _decimal_fields(kind: pa.DataType) -> tuple[set[str], set[str]]:
    """The names of the fields that are DECIMAL, and of those that are arrays of it."""
    single: set[str] = set()
    listed: set[str] = set()
    for field in kind if isinstance(kind, pa.StructType) else ():
        inner = field.type
        while isinstance(inner, pa.ListType):
            inner = inner.value_type
        if pa.types.is_decimal(inner):
            (single if inner is field.type else listed).add(field.name)
        more_single, more_listed = _decimal_fields(inner)
        single |= more_single
        listed |= more_listed
    return single, listed


def _are_objects(documents: Column) -> bool:
    starts, ends = pc.starts_with(documents, "{"), pc.ends_with(documents, "}")
    return bool(pc.all(pc.and_(starts, ends)).as_py())


def may_hold_constants(text: bytes) -> bool:
    """Whether Arrow could find a NaN or an Inf in ``text`` and take it for a number; within a string it does not."""
    return (b"NaN" in text or b"Inf" in text) and _CONSTANT.search(text) is not None


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


def joined(parts: list[list[Column]]) -> list[Column]:
    """The columns of all parts, one behind the other."""
    return parts[0] if len(parts) == 1 else [pa.concat_arrays(list(chunks)) for chunks in zip(*parts)]


def check_syntax(text: str) -> None:
    """Refuse what is no JSON.

    Raises:
        ValueError: it is none, or is nested too deep to be sure.
    """
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_lines(lines: list[bytes], schema: pa.Schema) -> list[Column]:
    """Parse documents of which each is text, an object, and without what :func:`document_lines` keeps from Arrow.

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
            column = column.view(ROOMY_DECIMAL)
        converted = column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise ValueError(f"field {name!r}: {reason_of(error)}") from error
    if not are_surely_exact(converted):
        raise ValueError(f"field {name!r} may have been rounded")
    if not are_in_range(converted):
        raise ValueError(f"field {name!r} is not in the years 1 to 9999")
    return converted


def _from_base64(column: Column, name: str) -> Column:
    try:
        return pa.array([None if text is None else read_base64(text) for text in column.to_pylist()], pa.binary())
    except ValueError:
        raise ValueError(f"field {name!r} is not base64") from None


def reason_of(error: Exception) -> str:
    """What is wrong with a document, of an error of a parser."""
    text = reason(error)
    return "more than one JSON object" if text.startswith("Extra data") else text
