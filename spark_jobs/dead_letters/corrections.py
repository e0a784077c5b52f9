"""Corrected payloads: whatever reads a message again reads its correction in place of the payload in the stream.

A redrive records a correction in the dead-letter table before it commits the row. From then on the correction is in
force for each replay, rewind, rebuild, merge and redrive of its message, until a redrive corrects the message again, or
a RESTORE removes the batch of the correction. A correction has no influence on the first read of a message, which is
before it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.dead_letters.reader import each_place, messages_of
from stream_consumers.batches import Range, Split
from stream_consumers.messages import Shard

MESSAGE_PLACE = ("stream", "shard", "sequence")
"""The columns of a message that have its place."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrected payloads of messages, and who corrected them.

    Args:
        payloads: the new payloads by the place of the message.
        by: a person, or a run.
        note: why they were corrected.
    """

    payloads: Mapping[tuple[Shard, int], bytes] = field(repr=False)
    by: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class StoredSplit:
    """A :class:`stream_consumers.batches.Split` of messages that are sent with the plan.

    Args:
        content: the messages as an Arrow stream.
    """

    content: bytes = field(repr=False)

    @classmethod
    def of(cls, messages: pa.Table) -> StoredSplit:
        """Return a split of the messages in a table."""
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, messages.schema) as writer:
            writer.write_table(messages)
        return cls(sink.getvalue())

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        with pa.ipc.open_stream(self.content) as reader:
            yield from reader


@dataclass(frozen=True, slots=True)
class CorrectedSplit:
    """A split, some of whose messages have corrected payloads.

    Args:
        split: the split.
        corrected: the corrected messages.
    """

    split: Split
    corrected: StoredSplit

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        corrected = pa.Table.from_batches(self.corrected.read())
        for block in self.split.read():
            yield with_payloads(block, corrected)


def corrected_splits(splits: Sequence[Split], records: pa.Table) -> list[Split]:
    """Return splits that yield the corrections in place of the payloads.

    Args:
        splits: what reads the messages; other corrections that they have are left out.
        records: see :meth:`spark_jobs.dead_letters.table.DeadLetterTable.corrections`.
    """
    plain = [one.split if isinstance(one, CorrectedSplit) else one for one in splits]
    if not records.num_rows:
        return plain
    corrected = StoredSplit.of(corrected_messages(records))
    return [CorrectedSplit(split, corrected) for split in plain]


def with_payloads(messages: pa.RecordBatch, corrected: pa.Table) -> pa.RecordBatch:
    """Return the messages, with the payloads of those in ``corrected`` that have the same places."""
    known = {place: row for row, place in enumerate(each_place(corrected, MESSAGE_PLACE))}
    rows = pa.array([known.get(place) for place in each_place(messages, MESSAGE_PLACE)], pa.int64())
    if rows.null_count == len(rows):
        return messages
    columns = {name: messages.column(name) for name in messages.schema.names}
    for name in ("payload", "error"):
        values: Any = corrected.column(name).combine_chunks().take(rows)
        columns[name] = pc.if_else(rows.is_valid(), values, columns[name])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=messages.schema)


def corrected_messages(records: pa.Table) -> pa.Table:
    """Return the messages of records of corrections, with the corrected payloads.

    A corrected payload is whole, even if the stream held no whole message.
    """
    records = records.drop_columns(["payload", "is_message"]).append_column("payload", records.column("correction"))
    return messages_of(records.append_column("is_message", pa.array([True] * records.num_rows, pa.bool_())))


def records_within(records: pa.Table, ranges: Mapping[Shard, Range]) -> pa.Table:
    """Return the records of the messages in these ranges."""
    nothing = Range(0, 0)
    parts = ((ranges.get(Shard(stream, number), nothing), at) for stream, number, at in each_place(records))
    return records.filter(pa.array([part.start <= at < part.end for part, at in parts], pa.bool_()))
