"""Decodes JSON documents into typed Arrow columns: blocks by Arrow's parser, otherwise each document by Python.

Arrow parses a block of documents at once, without those that do not look like an object. If it rejects one of them, or
must not parse one, Python decodes each document to the same values, so that a result never depends on other documents
of its block. Python also decodes values that Arrow cannot: MAP and VARIANT, numbers that Arrow must not read, and
values that only lenient mode accepts, such as a number in a STRING column. Its reasons name the field.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from spark_jobs.decoding.decoders import Column, TextReader, columns_of, decode_rows, joined, reason
from spark_jobs.decoding.json_values import (
    WHITE_SPACE,
    WIDE_DECIMAL,
    Constant,
    RepeatingObject,
    Scan,
    UnfitError,
    are_in_range,
    are_surely_exact,
    decoded_type,
    is_encodable,
    is_parsed_by_arrow,
    is_variant,
    kind_of,
    leaf_conversion,
    read_base64,
    refuse_constant,
    scanner,
    variant_problem,
    variant_text,
)

Convert: TypeAlias = Callable[[Any], Any]
"""Converts a parsed value of JSON to one that Arrow accepts, or raises ``UnfitError``."""
_scan = scanner(parse_constant=Constant)
_scan_strictly = scanner(parse_constant=refuse_constant)
BLOCK_ROWS = 8192
BLOCK_BYTES = 64 << 20
# Arrow does not check for overflow when it scales: 38 digits before and 38 after the point cannot overflow 76.
_PARSED_DECIMAL = pa.decimal256(38, 38)
_TOMBSTONE = b"{}"
# An object with white space around it, in the syntax of RE2.
_OBJECT = rf"\A[{WHITE_SPACE}]*\{{(?s:.*)\}}[{WHITE_SPACE}]*\z"
# Constants where Arrow reads a value, which is never after a quotation mark, a letter or a digit, as in "Info".
_CONSTANT = re.compile(rb'(?<!["0-9A-Za-z_])-?(?:NaN|Inf)')
# Numbers that Arrow must not read for a DECIMAL. It does not check the exponent: 1e-9999999 is a segmentation fault,
# and with more than 114 digits after the point it reads beyond its table. It accepts text that is not a number of JSON,
# such as "+1" and "1.". Text with an escape is left to Python. The syntax is that of RE2.
_ODD_NUMBER = r'(?:"?[-+.0-9eE]*(?:[eE][-+0-9]{2}|[0-9.]{40}|\.["eE]|\\)|"[-+]*(?:[+.]|0[0-9]))'
# A name that is written with an escape may be the name of a DECIMAL field.
_ESCAPED_NAME = r'(?s:\\.(?:[^"\\]|\\.)*"\s*:)'
MANY_OBJECTS = "more than one JSON object"
FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError)


def decode_json(payloads: Column, schema: pa.Schema, *, is_lenient: bool) -> tuple[list[Column], Column]:
    """Decode documents into the columns of ``schema``.

    Args:
        payloads: the documents; null is a tombstone.
        schema: the columns; a VARIANT becomes its JSON text.
        is_lenient: whether to accept some values that are written differently from the type, see
            docs/decode-messages.md.

    Returns:
        The columns, and for each row the reason why it could not be decoded (null if it could).
    """
    parts: list[list[Column]] = []
    for block in blocks_of(payloads) if len(payloads) else [payloads]:
        columns, errors = _decode_block(block, schema, is_lenient=is_lenient)
        for column, field in zip(columns, schema):
            if not field.nullable and column.null_count:
                missing = f"field {field.name!r} is missing, but it is NOT NULL"
                errors = pc.coalesce(errors, pc.if_else(column.is_null(), missing, pa.scalar(None, pa.string())))
        parts.append([*columns, errors])
    *columns, errors = joined(parts)
    return columns, errors


def _decode_block(block: Column, schema: pa.Schema, *, is_lenient: bool) -> tuple[list[Column], Column]:
    """Decode a block as a whole, or document by document if Arrow rejects a document.

    Most malformed documents are cut or no JSON, and do not look like an object. Only these are decoded one by one if
    Arrow accepts the others.
    """
    if not (len(block) and is_parsed_by_arrow(schema)):
        return decode_documents(block, schema, is_lenient=is_lenient)
    with suppress(*FAILURES):
        return parse_block(block, schema), pa.nulls(len(block), pa.string())
    is_object: Any = pc.match_substring_regex(block, _OBJECT).fill_null(True)
    others = block.filter(pc.invert(is_object))
    if not 0 < len(others) < len(block):
        return decode_documents(block, schema, is_lenient=is_lenient)
    parts = (
        _decode_block(block.filter(is_object), schema, is_lenient=is_lenient),
        decode_documents(others, schema, is_lenient=is_lenient),
    )
    # The place of each document where the objects come first.
    places = np.argsort(np.argsort(~np.asarray(is_object), kind="stable"))
    *columns, errors = (
        column.take(pa.array(places, pa.int64())) for column in joined([[*own, why] for own, why in parts])
    )
    return columns, errors


def decode_documents(documents: Column, schema: pa.Schema, *, is_lenient: bool) -> tuple[list[Column], Column]:
    """Decode documents one by one; see :func:`decode_json`."""
    return decode_rows(_reader(schema, is_lenient), documents)


def decode_values(documents: Column) -> tuple[list[Column], Column]:
    """Decode documents of any kind, not only objects, into one VARIANT, as JSON text.

    Returns:
        See :func:`decode_json`.
    """
    return decode_rows(_ValueReader(), documents)


class _ValueReader(TextReader):
    """Checks that documents of any kind are JSON that a VARIANT can hold."""

    def read(self, payload: bytes) -> str:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.read`."""
        text = super().read(payload.strip())
        if problem := variant_problem(text):
            raise ValueError(problem)
        return text


def object_text(document: bytes) -> str:
    """Return the text of a document that looks like an object, without white space around it.

    Raises:
        ValueError: it does not look like an object, or is not UTF-8.
    """
    line = document.strip()
    if line[:1] != b"{" or line[-1:] != b"}":
        raise ValueError("not a JSON object")
    return line.decode()


def read_object(text: str, scan: Scan = _scan) -> dict[str, Any]:
    """Parse an object, and keep the text of numbers.

    Args:
        text: the text from :func:`object_text`.
        scan: the parser.

    Raises:
        ValueError, StopIteration, RecursionError: the text is not one object; see :func:`why`.
    """
    found, end = scan(text, 0)
    if end != len(text):
        raise ValueError(MANY_OBJECTS)
    return found  # type: ignore[no-any-return]


def why(error: Exception) -> str:
    """Return the reason for an error of :func:`read_object`."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start}"
    text = "not JSON" if isinstance(error, StopIteration) else reason(error)
    return MANY_OBJECTS if text.startswith("Extra data") else text


@functools.lru_cache(maxsize=64)
def _reader(schema: pa.Schema, is_lenient: bool) -> _DocumentReader:
    return _DocumentReader(schema, is_lenient)


class _DocumentReader:
    """Reads documents one by one into columns.

    Args:
        schema: the columns.
        is_lenient: see :func:`decode_json`.
    """

    def __init__(self, schema: pa.Schema, is_lenient: bool) -> None:
        self._schema = schema
        self._scan = _scan if is_lenient else _scan_strictly
        self._is_lenient = is_lenient
        self._kind = decoded_type(pa.struct(list(schema)))
        # decode_json checks NOT NULL columns, also for tombstones and for blocks that Arrow parses.
        nullable = pa.struct([field.with_nullable(True) for field in schema])
        self._convert = self._struct(nullable, "")

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.read`."""
        try:
            return self._convert(read_object(object_text(payload), self._scan))
        except (ValueError, RecursionError, StopIteration) as error:
            # Arrow reads deeper than Python, whose limit also counts the levels of its callers.
            if isinstance(error, RecursionError) and is_parsed_by_arrow(self._schema):
                with suppress(*FAILURES):
                    columns = parse_block(pa.array([payload], pa.binary()), self._schema)
                    return {field.name: column[0].as_py() for field, column in zip(self._schema, columns)}
            raise ValueError(why(error)) from None

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.columns`."""
        return columns_of(pa.array(values, self._kind), is_one=False)

    def _conversion(self, kind: pa.DataType, path: str) -> Convert:
        """Make the conversion of values other than null to a type."""
        if is_variant(kind):
            return functools.partial(_variant, path)
        if isinstance(kind, pa.StructType):
            return self._struct(kind, path)
        if isinstance(kind, pa.MapType):
            return self._map(kind, path)
        if isinstance(kind, pa.ListType):
            return self._list(kind, path)
        leaf = leaf_conversion(kind, is_lenient=self._is_lenient)

        def convert(value: Any) -> Any:
            try:
                return leaf(value)
            except UnfitError as error:
                raise UnfitError(f"field {path!r} is not {error}; found {kind_of(value)}") from None

        return convert

    def _struct(self, kind: pa.StructType, path: str) -> Convert:
        prefix = f"{path}." if path else ""
        fields = [
            (field.name, self._conversion(field.type, prefix + field.name), _null(field.type), field.nullable)
            for field in kind
        ]
        names = frozenset(kind.names)

        def convert(value: Any) -> dict[str, Any]:
            members = _members(value, path)
            if isinstance(members, RepeatingObject) and (twice := sorted(members.repeated & names)):
                raise UnfitError(f"field {prefix + twice[0]!r} occurs twice")
            found = {}
            for name, conversion, null, is_nullable in fields:
                one = members.get(name)
                if one is not None:
                    one = conversion(one)
                elif name in members:
                    one = null
                if one is None and not is_nullable:
                    raise UnfitError(f"field {prefix + name!r} is missing, but it is NOT NULL")
                found[name] = one
            return found

        return convert

    def _map(self, kind: pa.MapType[Any, Any], path: str) -> Convert:
        conversion, null = self._conversion(kind.item_type, f"{path}{{}}"), _null(kind.item_type)

        def convert(value: Any) -> list[tuple[str, Any]]:
            members = _members(value, path)
            if isinstance(members, RepeatingObject):
                raise UnfitError(f"field {path!r}: the key {min(members.repeated)!r} occurs twice")
            for name in members:
                if not is_encodable(name):
                    raise UnfitError(f"a key of field {path!r} is not text without half of a surrogate pair")
            return [(name, null if one is None else conversion(one)) for name, one in members.items()]

        return convert

    def _list(self, kind: pa.ListType[Any], path: str) -> Convert:
        conversion, null = self._conversion(kind.value_type, f"{path}[]"), _null(kind.value_type)

        def convert(value: Any) -> list[Any]:
            if not isinstance(value, list):
                raise UnfitError(f"field {path!r} is not an array; found {kind_of(value)}")
            return [null if one is None else conversion(one) for one in value]

        return convert


def _members(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnfitError(f"field {path!r} is not an object; found {kind_of(value)}")
    return value


def _null(kind: pa.DataType) -> str | None:
    """Return the value for ``null``; a VARIANT has its own null."""
    return "null" if is_variant(kind) else None


def _variant(path: str, value: Any) -> str:
    try:
        return variant_text(value)
    except ValueError as error:
        raise UnfitError(f"field {path!r}: {error}") from None


def blocks_of(payloads: Column) -> Iterator[Column]:
    """Split ``payloads`` into parts that Arrow parses at once."""
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
    """Parse documents with Arrow, if it may parse them for these columns.

    Args:
        payloads: the documents; null is a tombstone.
        schema: the columns, without any that :func:`spark_jobs.decoding.json_values.needs_python`.

    Raises:
        ArrowInvalid, ArrowNotImplementedError, ValueError: one of :data:`FAILURES`: a document is not text or not an
            object, does not fit, or has a value that Arrow would wrongly accept.
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
    """Return whether Arrow may parse all of these documents, and finds only fields of ``schema``."""
    try:
        _parsed(payloads, schema, "error")
    except FAILURES:
        return False
    return True


def _parsed(payloads: Column, schema: pa.Schema, unexpected: Literal["ignore", "error"]) -> pa.Table:
    """Parse documents, joined by line ends, with Arrow.

    If there are as many rows as documents, each document is one row. Arrow rejects a line end in a string, so no line
    end between documents is inside a string. It follows a ``}`` and precedes a ``{``, with which no object can
    continue. So each document consists of whole objects.
    """
    lines = _lines(payloads, schema)
    source: Any = pa.BufferReader(lines)
    return pj.read_json(
        source,
        read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pj.ParseOptions(explicit_schema=_parsed_schema(schema), unexpected_field_behavior=unexpected),
    )


def _lines(payloads: Column, schema: pa.Schema) -> bytes:
    """Join the documents as lines, each of which starts with ``{`` and ends with ``}``."""
    documents: Any = (payloads.fill_null(_TOMBSTONE) if payloads.null_count else payloads).cast(pa.string())
    if not _are_objects(documents):
        documents = pc.ascii_trim(documents, characters=WHITE_SPACE)
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
    """Refuse documents in which a DECIMAL may be a number that Arrow must not read."""
    if (pattern := _odd_decimals(schema)) is None:
        return
    is_odd = pc.match_substring_regex(documents, pattern)
    if pc.any(pc.match_substring(documents, "\\")).as_py():
        is_odd = pc.or_(is_odd, pc.match_substring_regex(documents, _ESCAPED_NAME))
    if pc.any(is_odd).as_py():
        raise ValueError("a number that Arrow must not read")


@functools.lru_cache(maxsize=64)
def _odd_decimals(schema: pa.Schema) -> str | None:
    """Return a pattern for documents with an odd number in a DECIMAL field; ``None`` without such fields."""
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
    """Return the names of the DECIMAL fields, and of the fields that are arrays of DECIMAL."""
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
    """Return whether Arrow could read a NaN or an Inf in ``text`` as a number, which it does not do in a string."""
    return (b"NaN" in text or b"Inf" in text) and _CONSTANT.search(text) is not None


def _check_syntax(text: str) -> None:
    """Check that a text is JSON.

    Raises:
        ValueError: it is not JSON, or is nested too deep to be parsed.
    """
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


@functools.lru_cache(maxsize=64)
def _parsed_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema that Arrow parses before the columns are converted to this one."""
    return pa.schema([pa.field(field.name, _parsed_type(field.type)) for field in schema])


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that Arrow parses for a column of type ``kind``: a wider DECIMAL, text, or the same type."""
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(field.name, _parsed_type(field.type)) for field in kind])
    if isinstance(kind, pa.ListType):
        return pa.list_(pa.field(kind.value_field.name, _parsed_type(kind.value_type)))
    if isinstance(kind, pa.Decimal128Type):
        return _PARSED_DECIMAL
    if isinstance(kind, pa.TimestampType):
        # The parser would drop the zone of a time, which a TIMESTAMP_NTZ must not have.
        return kind if kind.tz else pa.string()
    return pa.string() if pa.types.is_date32(kind) or pa.types.is_binary(kind) else kind


def _convert(column: Column, kind: pa.DataType, name: str) -> Column:
    """Convert a column from the parsed type to ``kind``.

    Raises:
        ValueError: a value does not fit; it names the field.
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
            column = column.view(WIDE_DECIMAL)
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
