"""Blocks of JSON documents into typed Arrow columns by Arrow's parser, and what it must not see.

It parses a block of documents at once. Where it refuses one, or must not see one, :mod:`json_documents` decodes each
document of the block by Python, with the same values: a result never depends on the rest of the block.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.json_values import ROOMY_DECIMAL, are_in_range, are_surely_exact, read_base64, refuse_constant
from spark_jobs.decoding.rows import reason

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
MANY_OBJECTS = "more than one JSON object"
FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError)


def blocks_of(payloads: Column) -> Iterator[Column]:
    """Parts of ``payloads`` that Arrow parses at once."""
    for start in range(0, len(payloads), BLOCK_ROWS):
        yield from _bounded(payloads.slice(start, BLOCK_ROWS))


def _bounded(block: Column) -> Iterator[Column]:
    if len(block) == 1 or block.nbytes <= BLOCK_BYTES:
        yield block
        return
    half = len(block) // 2
    yield from _bounded(block.slice(0, half))
    yield from _bounded(block.slice(half))


def parse_block(payloads: Column, schema: pa.Schema) -> list[Column]:
    """Parse documents, if Arrow may parse them for these columns.

    Args:
        payloads: the documents; null is a tombstone.
        schema: the columns, without any that :func:`json_types.has_own_way`.

    Raises:
        ArrowInvalid, ArrowNotImplementedError, ValueError: one of :data:`FAILURES`: one of them is no text, no object,
            does not fit, or has a value that Arrow takes though it should not.
    """
    table = _parsed(payloads, schema, "ignore")
    if table.num_rows != len(payloads):
        raise ValueError(MANY_OBJECTS)
    columns: list[Column] = []
    for field in schema:
        chunks = table.column(field.name).chunks
        column: Column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        columns.append(_convert(column, field.type, field.name))
    return columns


def has_only(payloads: Column, schema: pa.Schema) -> bool:
    """Whether Arrow finds only fields of ``schema`` in these documents; what it must not see may have others."""
    try:
        _parsed(payloads, schema, "error")
    except FAILURES:
        return False
    return True


def _parsed(payloads: Column, schema: pa.Schema, unexpected: Literal["ignore", "error"]) -> pa.Table:
    """The rows of documents as Arrow parses them.

    As many rows as documents means one row each. Arrow refuses a line end in a string, so that none of those between
    the documents is in one; what stands before it is a ``}`` and behind it a ``{``, which no object continues with: so
    each document holds whole objects only.
    """
    lines = _lines(payloads, schema)
    source: Any = pa.BufferReader(lines)
    return pj.read_json(
        source,
        read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pj.ParseOptions(explicit_schema=_parsed_schema(schema), unexpected_field_behavior=unexpected),
    )


def _lines(payloads: Column, schema: pa.Schema) -> bytes:
    """The documents as lines, each of which starts with ``{`` and ends with ``}``."""
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
        for document in documents.filter(suspects).to_pylist():
            if _may_hold_constants(document.encode()):
                _check_syntax(document)
    _check_decimals(documents, schema)
    return lines


def _check_decimals(documents: Column, schema: pa.Schema) -> None:
    """Refuse documents that may have a number for a DECIMAL that Arrow must not read."""
    if (pattern := _odd_decimals(schema)) is None:
        return
    is_odd = pc.match_substring_regex(documents, pattern)
    if pc.any(pc.match_substring(documents, "\\")).as_py():
        is_odd = pc.or_(is_odd, pc.match_substring_regex(documents, _ESCAPED_NAME))
    if pc.any(is_odd).as_py():
        raise ValueError("a number that Arrow must not read")


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


def _may_hold_constants(text: bytes) -> bool:
    """Whether Arrow could find a NaN or an Inf in ``text`` and take it for a number; within a string it does not."""
    return (b"NaN" in text or b"Inf" in text) and _CONSTANT.search(text) is not None


def _check_syntax(text: str) -> None:
    """Refuse what is no JSON.

    Raises:
        ValueError: it is none, or is nested too deep to be sure.
    """
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


@functools.lru_cache(maxsize=64)
def _parsed_schema(schema: pa.Schema) -> pa.Schema:
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
        raise ValueError(f"field {name!r}: {reason(error)}") from error
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
