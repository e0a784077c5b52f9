"""JSON payloads into typed Arrow columns, a block at a time.

A block of payloads is parsed by Arrow in one go. If that fails, the block is halved until the payloads that fail are
alone, so that what is accepted never depends on the neighbours; only those are looked at one by one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.json as pj

from stream_consumers.errors import SchemaMismatchError

Column: TypeAlias = "pa.Array[Any]"

_TYPES = (
    "BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BOOLEAN, DATE, TIMESTAMP, "
    "STRUCT and ARRAY of them (DATE only at the top level)"
)


def check_json_type(name: str, kind: pa.DataType, *, top: bool = True) -> None:
    """Refuse types that JSON cannot be read into alike.

    Raises:
        SchemaMismatchError: naming the column, its type, and the ones there are.
    """
    if pa.types.is_struct(kind):
        for field in kind:
            check_json_type(f"{name}.{field.name}", field.type, top=False)
    elif pa.types.is_list(kind):
        check_json_type(f"{name}[]", kind.value_type, top=False)
    elif not (
        pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_timestamp(kind)
        or (top and pa.types.is_date32(kind))
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
    if not len(payloads):
        return [pa.array([], field.type) for field in schema], pa.array([], pa.string())
    documents = payloads.to_pylist()
    tables: list[pa.Table] = []
    errors: list[str | None] = []
    for table, found in _decode(documents, schema):
        tables.append(table)
        errors.extend(found)
    merged = pa.concat_tables(tables)
    columns: list[Column] = [pa.concat_arrays(merged.column(i).chunks) for i in range(len(schema))]
    return columns, _require(columns, schema, errors)


def _require(columns: list[Column], schema: pa.Schema, errors: list[str | None]) -> Column:
    """Add an error where a NOT NULL column is null."""
    for column, field in zip(columns, schema):
        if not field.nullable and column.null_count:
            for row, value in enumerate(column.is_null().to_pylist()):
                if value:
                    errors[row] = errors[row] or f"field {field.name!r} is missing, but it is NOT NULL"
    return pa.array(errors, pa.string())


def _decode(documents: list[bytes | None], schema: pa.Schema) -> Iterator[tuple[pa.Table, list[str | None]]]:
    """Decode a block, halving it where it fails; yields parts in order."""
    failure = None
    try:
        yield _parse(documents, schema), [None] * len(documents)
        return
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, ValueError) as error:
        failure = _reason(error)
    if len(documents) > 1:
        middle = len(documents) // 2
        yield from _decode(documents[:middle], schema)
        yield from _decode(documents[middle:], schema)
        return
    rounded = _round_decimals(documents[0], schema)
    if rounded is not None:
        yield rounded, [None]
    else:
        yield pa.table([pa.nulls(1, field.type) for field in schema], schema=_nullable(schema)), [failure]


def _parse(documents: list[bytes | None], schema: pa.Schema) -> pa.Table:
    lines = []
    for document in documents:
        # Each line holds whole objects only, so that as many rows as lines means one row a line.
        line = (document or b"").strip().replace(b"\n", b" ")
        if line[:1] != b"{" or line[-1:] != b"}":
            raise ValueError("not a JSON object")
        lines.append(line)
    block = b"\n".join(lines) + b"\n"
    if b"NaN" in block or b"Inf" in block:
        _refuse_not_numbers(documents)
    block.decode()
    text_for_dates = [pa.field(f.name, pa.string() if pa.types.is_date32(f.type) else f.type) for f in schema]
    table = pj.read_json(
        io.BytesIO(block),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pj.ParseOptions(explicit_schema=pa.schema(text_for_dates), unexpected_field_behavior="ignore"),
    )
    if table.num_rows != len(documents):
        raise ValueError("more than one JSON object")
    return table.select(schema.names).cast(_nullable(schema))


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _refuse_not_numbers(documents: list[bytes | None]) -> None:
    for document in documents:
        json.loads(document or b"", parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start}"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.removesuffix(" in row 0").removeprefix("JSON parse error: ")


def _round_decimals(document: bytes | None, schema: pa.Schema) -> pa.Table | None:
    """Parse one payload again with its top-level DECIMAL columns rounded; ``None`` if that is not what it lacks."""
    decimals = {field.name: field.type for field in schema if pa.types.is_decimal(field.type)}
    if not decimals or document is None:
        return None
    try:
        values: Any = json.loads(document, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse)
        for name, kind in decimals.items():
            value = values.get(name)
            if isinstance(value, (Decimal, str)):
                values[name] = str(Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP))
        return _parse([json.dumps(values, default=_number).encode()], schema)
    except (ValueError, AttributeError, InvalidOperation, RecursionError, pa.ArrowInvalid):
        return None


def _number(value: object) -> object:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and "E" not in str(value) else float(value)
    raise TypeError(type(value).__name__)
