"""Confluent's wire format: a byte 0, the id of the schema in four bytes, and what was encoded with that schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa

from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.rows import joined, shortened
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import SchemaMismatchError, SchemaNotFoundError

HEADER_BYTES = 5
MAGIC = 0
DEEPEST = 100
LONGEST_NUMBER_BITS = 35
_NO_FRAME = -1
_PLACES = 1 << np.arange(24, -1, -8, dtype=np.int64)
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
    numbers, is_framed = _numbers(payloads)
    places = [np.flatnonzero(~is_framed)]
    broken = _taken(payloads, places[0])
    parts: list[list[Column]] = [[*(pa.nulls(len(places[0]), field.type) for field in schema), _reasons(broken)]]
    with registry.open() if registry else nullcontext():
        for number in np.unique(numbers[is_framed]).tolist():
            rows = np.flatnonzero(numbers == number)
            places.append(rows)
            framed = payloads if len(rows) == len(payloads) else _taken(payloads, rows)
            parts.append(_part(framed, schema, number, part_of))
    filled = [part for part, rows in zip(parts, places) if len(rows)] or parts[:1]
    *columns, errors = joined(filled)
    if len(filled) > 1:
        order = np.empty(len(payloads), np.int64)
        order[np.concatenate(places)] = np.arange(len(payloads))
        *columns, errors = (_taken(column, order) for column in (*columns, errors))
    return DecodedColumns(columns, errors)


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


def _part(framed: Column, schema: pa.Schema, number: int, part_of: Callable[[int], Part]) -> list[Column]:
    """The columns, and the errors, of payloads with one id."""
    try:
        columns, errors = part_of(number)(_behind_headers(framed))
    except (SchemaNotFoundError, SchemaMismatchError) as error:
        columns = [pa.nulls(len(framed), field.type) for field in schema]
        errors = pa.array([shortened(error.what)] * len(framed), pa.string())
    return [*columns, errors]


def _taken(column: Column, places: Any) -> Column:
    return column.take(pa.array(places, pa.int64()))


def _numbers(payloads: Column) -> tuple[Any, Any]:
    """The id of each payload, and whether it has one."""
    ends, content = _buffers(payloads)
    is_whole = (np.diff(ends) >= HEADER_BYTES) & np.asarray(payloads.is_valid())
    heads = content[ends[:-1][is_whole, None] + np.arange(HEADER_BYTES)]
    numbers = np.full(len(payloads), _NO_FRAME, np.int64)
    numbers[is_whole] = np.where(heads[:, 0] == MAGIC, heads[:, 1:] @ _PLACES, _NO_FRAME)
    return numbers, numbers != _NO_FRAME


def _behind_headers(framed: Column) -> Column:
    """What is behind the header of each payload, all of which have one."""
    ends, content = _buffers(framed)
    is_kept = np.ones(len(content), bool)
    is_kept[ends[:-1, None] + np.arange(HEADER_BYTES)] = False
    rest = content[ends[0] : ends[-1]][is_kept[ends[0] : ends[-1]]]
    behind = (ends - ends[0] - HEADER_BYTES * np.arange(len(ends))).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(framed), [None, pa.py_buffer(behind), pa.py_buffer(rest)])


def _buffers(payloads: Column) -> tuple[Any, Any]:
    """Where each payload ends, with the start of the first one before it; and all bytes."""
    buffers: Any = payloads.buffers()
    _, ends, content = buffers
    if ends is None or content is None:
        return np.zeros(len(payloads) + 1, np.int64), np.zeros(0, np.uint8)
    own = np.frombuffer(ends, np.int32)[payloads.offset : payloads.offset + len(payloads) + 1]
    return own.astype(np.int64), np.frombuffer(content, np.uint8)


def _reasons(broken: Column) -> Column:
    """Why payloads without an id have none; null for a tombstone."""
    return pa.array(
        [
            None
            if payload is None
            else f"{len(payload)} bytes are too short for a schema id"
            if len(payload) < HEADER_BYTES
            else f"the first byte is {payload[0]}, and not the 0 before a schema id"
            for payload in broken.to_pylist()
        ],
        pa.string(),
    )
