"""Confluent's wire format: a byte 0, the id of the schema in four bytes, and what was encoded with that schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.rows import joined, shortened
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import SchemaMismatchError, SchemaNotFoundError

HEADER_BYTES = 5
MAGIC = 0
DEEPEST = 100
LONGEST_NUMBER_BITS = 35
_TOMBSTONE = -1
Part = Callable[[Column], tuple[Sequence[Column], Column]]


def decode_frames(
    payloads: Column, schema: pa.Schema, part_of: Callable[[int], Part], registry: SchemaRegistry | None
) -> DecodedColumns:
    """Decode framed payloads, those of each schema together.

    Args:
        payloads: binary; null is a tombstone.
        schema: the columns.
        part_of: for the id of a schema, what decodes the payloads that are behind it. If there is no such schema, or it
            cannot be read, all messages with this id are dead letters.
        registry: that it asks.

    Raises:
        StreamAssetsError: it cannot be told whether there is such a schema.
    """
    headers: Any = pc.binary_slice(payloads, 0, HEADER_BYTES).dictionary_encode()
    headers_of_rows = np.asarray(headers.indices.fill_null(_TOMBSTONE))
    places = [np.flatnonzero(headers_of_rows == _TOMBSTONE)]
    parts = [_nulls(schema, len(places[0]), None)]
    with registry.open() if registry else nullcontext():
        # Those of most messages first: what the registry says of them makes the others plausible or not.
        counts = np.bincount(headers_of_rows[headers_of_rows != _TOMBSTONE], minlength=len(headers.dictionary))
        for place in np.argsort(-counts, kind="stable").tolist():
            header = headers.dictionary[place].as_py()
            rows = np.flatnonzero(headers_of_rows == place)
            places.append(rows)
            framed = payloads if len(rows) == len(payloads) else payloads.take(pa.array(rows, pa.int64()))
            parts.append(_part(framed, schema, header, part_of))
    *columns, errors = joined(parts)
    order = np.empty(len(payloads), np.int64)
    order[np.concatenate(places)] = np.arange(len(payloads))
    if len(parts) > 2 or len(places[0]):
        *columns, errors = (column.take(pa.array(order, pa.int64())) for column in (*columns, errors))
    return DecodedColumns(columns, errors)


def _part(framed: Column, schema: pa.Schema, header: bytes, part_of: Callable[[int], Part]) -> list[Column]:
    """The columns, and the errors, of payloads with one header."""
    if len(header) < HEADER_BYTES:
        return _nulls(schema, len(framed), f"{len(header)} bytes are too short for a schema id")
    if header[0] != MAGIC:
        return _nulls(schema, len(framed), f"the first byte is {header[0]}, and not the 0 before a schema id")
    try:
        columns, errors = part_of(int.from_bytes(header[1:], "big"))(_behind_headers(framed))
    except (SchemaNotFoundError, SchemaMismatchError) as error:
        return _nulls(schema, len(framed), shortened(error.what))
    return [*columns, errors]


def _nulls(schema: pa.Schema, count: int, error: str | None) -> list[Column]:
    return [*(pa.nulls(count, field.type) for field in schema), pa.array([error] * count, pa.string())]


def message_place(payload: bytes) -> tuple[tuple[int, ...], int]:
    r"""The place of a Protobuf message among those of its schema, and where it begins.

    The numbers of the messages around it, outermost first, are written as their count and themselves; a single 0 is the
    first message.

    Raises:
        ValueError: there is none.

    Example:
        >>> message_place(b"\0rest"), message_place(b"\4\2\0rest")
        (((0,), 1), ((1, 0), 3))
    """
    count, place = _number(payload, 0)
    if count == 0:
        return (0,), place
    if not 0 < count <= DEEPEST:
        raise ValueError(f"{count} is no depth of a message")
    numbers = []
    for _ in range(count):
        number, place = _number(payload, place)
        numbers.append(number)
    return tuple(numbers), place


def _number(payload: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    number = shift = 0
    while place < len(payload) and shift < LONGEST_NUMBER_BITS:
        byte = payload[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), place
    raise ValueError("the payload has no place of a message behind its schema id")


def _behind_headers(framed: Column) -> Column:
    """What is behind the header of each payload, all of which have one; Arrow's ``binary_slice`` fails for some."""
    buffers: Any = framed.buffers()
    own = np.frombuffer(buffers[1], np.int32)[framed.offset : framed.offset + len(framed) + 1]
    ends = own.astype(np.int64) - own[0]
    content = np.frombuffer(buffers[2], np.uint8)[own[0] : own[-1]]
    is_kept = np.ones(len(content), bool)
    is_kept[ends[:-1, None] + np.arange(HEADER_BYTES)] = False
    behind = (ends - HEADER_BYTES * np.arange(len(ends))).astype(np.int32)
    kept: Any = content[is_kept]
    return pa.Array.from_buffers(pa.binary(), len(framed), [None, pa.py_buffer(behind), pa.py_buffer(kept)])
