"""Decodes blocks of messages into rows with the columns of payload, key and headers and those of dead letters.

It must not import Spark, because the processes that decode import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.decoders import Column, Decoder, decode_texts, is_one_column
from spark_jobs.decoding.row_size import MAX_ROW_BYTES, has_large_row
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS


@dataclass(frozen=True, slots=True)
class BlockDecoder:
    """Decodes blocks of messages into the rows of :func:`spark_jobs.reading.source.read_splits`.

    Args:
        decoder: the decoder of the payloads.
        wanted: the decoder's columns.
        schema: all columns of the result.
        keeps_payloads: whether every row carries the columns that its dead letter would need.
        max_row_bytes: the most bytes of a row; the dead letter of a larger message lacks its content.
    """

    decoder: Decoder
    wanted: pa.Schema
    schema: pa.Schema
    keeps_payloads: bool = False
    max_row_bytes: int = MAX_ROW_BYTES

    def __call__(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Decode a block that a split yields."""
        timestamps, unreadable = _checked_timestamps(messages)
        payloads = messages.column("payload")
        if unreadable.null_count == len(messages):
            decoded = self.decoder.decode(payloads, self.wanted)
            columns, errors, undeclared = list(decoded.columns), decoded.errors, decoded.undeclared
        else:
            # Messages that the backend could not read are not decoded; their columns stay null.
            readable = pc.is_null(unreadable)
            decoded = self.decoder.decode(payloads.filter(readable), self.wanted)
            places = pc.if_else(readable, pc.subtract(pc.cumulative_sum(readable.cast(pa.int64())), 1), None)
            columns = [column.take(places) for column in decoded.columns]
            errors = pc.coalesce(unreadable, decoded.errors.take(places))
            undeclared = None if decoded.undeclared is None else decoded.undeclared.take(places)
        key_and_headers, wrong = decode_kept(messages, self.decoder, pa.schema(list(self.schema)[len(self.wanted) :]))
        columns += key_and_headers
        return self._rows(messages, timestamps, unreadable, columns, pc.coalesce(errors, wrong), undeclared=undeclared)

    def refused(self, message: pa.RecordBatch, reason: str) -> pa.RecordBatch:
        """Make the dead letter of one message that cannot be decoded; without its content if that is too large."""
        timestamps, unreadable = _checked_timestamps(message)
        if has_large_row(message, self.max_row_bytes):
            parts = {field.name: message.column(field.name) for field in message.schema}
            parts |= {name: pa.nulls(1, parts[name].type) for name in ("key", "payload", "headers")}
            message = pa.RecordBatch.from_arrays(list(parts.values()), schema=message.schema)
            unreadable = pa.array([reason], pa.string())
        own = list(self.schema)[: self.schema.get_field_index("_stream")]
        errors = pc.coalesce(unreadable, pa.array([reason], pa.string()))
        return self._rows(message, timestamps, unreadable, [pa.nulls(1, field.type) for field in own], errors)

    def _rows(
        self,
        messages: pa.RecordBatch,
        timestamps: Column,
        unreadable: Column,
        columns: Sequence[Column],
        errors: Column,
        *,
        undeclared: Column | None = None,
    ) -> pa.RecordBatch:
        """Add the columns of the stream and of dead letters to the decoded ones."""
        originals = [
            messages.column("key"),
            messages.column("payload"),
            messages.column("headers"),
            pc.is_null(unreadable),
        ]
        failed = pc.is_valid(errors)
        is_clean = errors.null_count == len(errors)
        if not is_clean:
            columns = [pc.if_else(failed, pa.scalar(None, column.type), column) for column in columns]
        if is_clean and not self.keeps_payloads:
            originals = [pa.nulls(len(messages), column.type) for column in originals]
        elif not self.keeps_payloads:
            originals = [pc.if_else(failed, column, pa.scalar(None, column.type)) for column in originals]
        key, payload, headers, is_message = originals
        arrays = [
            *columns,
            messages.column("stream"),
            messages.column("shard"),
            messages.column("sequence"),
            timestamps.cast(pa.timestamp("ms", "UTC")),
            key,
            payload,
            headers,
            errors,
            messages.column("offset"),
            is_message,
            pa.nulls(len(messages), pa.string()) if undeclared is None else undeclared,
        ]
        return pa.RecordBatch.from_arrays(
            [
                array if array.type == field.type else array.cast(field.type)
                for array, field in zip(arrays, self.schema, strict=True)
            ],
            names=self.schema.names,
        )


def _checked_timestamps(messages: pa.RecordBatch) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """Replace times that a TIMESTAMP cannot hold by null, and add errors for them."""
    times: Any = messages.column("timestamp_ms")
    errors = messages.column("error")
    first, last = pa.scalar(MIN_TIMESTAMP_MS), pa.scalar(MAX_TIMESTAMP_MS)
    is_odd = pc.or_(pc.less(times, first), pc.greater(times, last)).fill_null(False)
    if not pc.any(is_odd).as_py():
        return times, errors
    parts: Any = (pa.scalar("timestamp "), times.cast(pa.string()), pa.scalar(" ms is not in the years 1 to 9999"))
    found = pc.if_else(is_odd, pc.binary_join_element_wise(*parts, ""), pa.scalar(None, pa.string()))
    return pc.if_else(is_odd, pa.scalar(None, pa.int64()), times), pc.coalesce(errors, found)


def decode_kept(messages: pa.RecordBatch, decoder: Decoder, kept: pa.Schema) -> tuple[list[Column], Column]:
    """Decode the columns for key and headers; return them, and for each row the error (null without one).

    Args:
        messages: a block that a split yields.
        decoder: the decoder, with the columns to decode.
        kept: the columns from :func:`spark_jobs.reading.source.kept_fields`.
    """
    columns: list[Column] = []
    errors: Column = pa.nulls(len(messages), pa.string())
    if isinstance(decoder.key, str):
        columns += [messages.column("key")] if decoder.key else []
    elif decoder.key:
        column, errors = _key(messages.column("key"), decoder.key, kept.field(0).type)
        columns.append(column)
    headers = messages.column("headers")
    if isinstance(decoder.headers, Mapping):
        for name in decoder.headers.values():
            column, wrong = _header(headers, name)
            columns.append(column)
            errors = pc.coalesce(errors, wrong)
    elif decoder.headers:
        columns.append(headers)
    return columns, errors


def _key(keys: Column, decoder: Decoder, kind: pa.DataType) -> tuple[Column, Column]:
    fields = list(kind) if isinstance(kind, pa.StructType) and not is_one_column(decoder) else None
    decoded = decoder.decode(keys, pa.schema(fields or [pa.field("key", kind)]))
    prefix: Any = pa.scalar("the key: ")
    errors: Column = pc.binary_join_element_wise(prefix, decoded.errors, "")
    # A message without a key has no error of its key, and a null STRUCT.
    is_none = keys.is_null()
    errors = pc.if_else(is_none, pa.scalar(None, pa.string()), errors)
    if fields is None:
        return decoded.columns[0], errors
    return pa.StructArray.from_arrays(list(decoded.columns), fields=fields, mask=is_none), errors


def _header(headers: Column, name: str) -> tuple[Column, Column]:
    """Decode the last header of a name as text; Kafka's clients also return the last one."""
    pairs: Any = pc.list_flatten(headers)
    names, values = pairs.field("name"), pairs.field("value")
    is_it = np.asarray(pc.equal(names, pa.scalar(name)).fill_null(False))
    last = np.full(len(headers), -1, np.int64)
    # If an element is assigned several times, numpy keeps the last value.
    last[np.asarray(pc.list_parent_indices(headers))[is_it]] = np.flatnonzero(is_it)
    places = pa.array(last, mask=last < 0)
    (texts,), errors = decode_texts(values.take(places))
    why: Any = pa.scalar(f"the header {name!r} is ")
    return texts, pc.binary_join_element_wise(why, errors, "")
