"""JSON documents into typed Arrow columns: blocks by Arrow, and what it does not take by Python, each by itself.

Python knows what Arrow's parser does not: MAP and VARIANT, numbers that Arrow must not read, and what lenient mode
takes though it is written in another way, like a number where text is wanted. What Arrow refuses is decided here, so
that the reason of a dead letter names the field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.json_decode import FAILURES, MANY_OBJECTS, blocks_of, parse_block
from spark_jobs.decoding.json_types import Column, decoded_type, is_parsed, is_variant
from spark_jobs.decoding.json_values import (
    Constant,
    RepeatingObject,
    Scan,
    UnfitError,
    is_encodable,
    kind_of,
    leaf_conversion,
    refuse_constant,
    scanner,
    variant_problem,
    variant_text,
)
from spark_jobs.decoding.rows import Texts, columns_of, decode_rows, joined, reason

Convert: TypeAlias = Callable[[Any], Any]
"""From a parsed value of JSON to one that Arrow takes; raises ``UnfitError``."""
_scan = scanner(parse_constant=Constant)
_scan_strictly = scanner(parse_constant=refuse_constant)


def decode_json(payloads: Column, schema: pa.Schema, *, is_lenient: bool) -> tuple[list[Column], Column]:
    """Decode documents into the columns of ``schema``.

    Args:
        payloads: the documents; null is a tombstone.
        schema: the columns; a VARIANT becomes its JSON text.
        is_lenient: take what is written in another way than the type is, see docs/payloads.md.

    Returns:
        The columns, and per row why it could not be decoded (null: it could).
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
    """Decode a block as a whole, or if there is anything to refuse in it, document by document."""
    if len(block) and is_parsed(schema):
        with suppress(*FAILURES):
            return parse_block(block, schema), pa.nulls(len(block), pa.string())
    return decode_documents(block, schema, is_lenient=is_lenient)


def decode_documents(documents: Column, schema: pa.Schema, *, is_lenient: bool) -> tuple[list[Column], Column]:
    """Decode documents one by one; see :func:`decode_json`."""
    return decode_rows(_reader(schema, is_lenient), documents)


def decode_values(documents: Column) -> tuple[list[Column], Column]:
    """Decode documents of any kind, not only objects, as one VARIANT, which is the JSON text of it.

    Returns:
        See :func:`decode_json`.
    """
    return decode_rows(_ValueReader(), documents)


class _ValueReader(Texts):
    """Reads documents of any kind."""

    def read(self, payload: bytes) -> str:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`."""
        text = super().read(payload.strip())
        if problem := variant_problem(text):
            raise ValueError(problem)
        return text


def object_text(document: bytes) -> str:
    """A document that looks like an object, as text without white space around it.

    Raises:
        ValueError: it does not, or is not UTF-8.
    """
    line = document.strip()
    if line[:1] != b"{" or line[-1:] != b"}":
        raise ValueError("not a JSON object")
    return line.decode()


def read_object(text: str, scan: Scan = _scan) -> dict[str, Any]:
    """An object as it is parsed, with numbers as they are written.

    Args:
        text: of :func:`object_text`.
        scan: parses.

    Raises:
        ValueError, StopIteration, RecursionError: it is none, or cannot be read; see :func:`why`.
    """
    found, end = scan(text, 0)
    if end != len(text):
        raise ValueError(MANY_OBJECTS)
    return found  # type: ignore[no-any-return]


def why(error: Exception) -> str:
    """What is wrong with a document, of what :func:`read_object` raises."""
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
    """Reads documents into columns, one by one.

    Args:
        schema: the columns.
        is_lenient: see :func:`decode_json`.
    """

    def __init__(self, schema: pa.Schema, is_lenient: bool) -> None:
        self._schema = schema
        self._scan = _scan if is_lenient else _scan_strictly
        self._is_lenient = is_lenient
        self._kind = decoded_type(pa.struct(list(schema)))
        # Whether a column is null is known for tombstones, and for what Arrow parses, elsewhere.
        nullable = pa.struct([field.with_nullable(True) for field in schema])
        self._convert = self._struct(nullable, "")

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`."""
        try:
            return self._convert(read_object(object_text(payload), self._scan))
        except (ValueError, RecursionError, StopIteration) as error:
            # Arrow reads deeper than Python, for which it counts from where it is called, too.
            if isinstance(error, RecursionError) and is_parsed(self._schema):
                with suppress(*FAILURES):
                    columns = parse_block(pa.array([payload], pa.binary()), self._schema)
                    return {field.name: column[0].as_py() for field, column in zip(self._schema, columns)}
            raise ValueError(why(error)) from None

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.rows.RowReader.columns`."""
        return columns_of(pa.array(values, self._kind), is_one=False)

    def _conversion(self, kind: pa.DataType, path: str) -> Convert:
        """The conversion to a type, of values other than null."""
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
                raise UnfitError(f"field {prefix + twice[0]!r} is there twice")
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
                raise UnfitError(f"field {path!r}: the key {min(members.repeated)!r} is there twice")
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
    """What ``null`` becomes; a VARIANT has one of its own."""
    return "null" if is_variant(kind) else None


def _variant(path: str, value: Any) -> str:
    try:
        return variant_text(value)
    except ValueError as error:
        raise UnfitError(f"field {path!r}: {error}") from None
