"""The messages of all backends as rows: executors read the splits of a plan and decode them on the way."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from spark_jobs.decoding.ddl import first_twice
from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.isolation import decode_here, decode_isolated
from spark_jobs.decoding.json_types import Column
from spark_jobs.reading.clean import CleanRead
from spark_jobs.reading.kept_columns import HEADERS_DDL, decode_kept, kept_fields
from spark_jobs.reading.spark_types import arrow_schema, declared_columns, plain_strings, struct_type
from spark_jobs.reading.variants import as_text, with_variants
from stream_consumers.batches import CountedSplit, Split
from stream_consumers.errors import SchemaMismatchError, StreamAssetsError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS

STREAM_TYPES = {"_stream": "string", "_shard": "bigint", "_sequence": "bigint", "_timestamp": "timestamp"}
STREAM_COLUMNS = tuple(STREAM_TYPES)
DEAD_LETTER_COLUMNS = ("_key", "_payload", "_headers", "_error", "_offset", "_is_message")
STREAM_DDL = ", ".join(f"{name} {kind}" for name, kind in STREAM_TYPES.items())
DEAD_LETTER_DDL = (
    f"_key BINARY, _payload BINARY, _headers {HEADERS_DDL}, _error STRING, _offset BIGINT, _is_message BOOLEAN"
)


@dataclass(frozen=True, slots=True)
class SourceColumns:
    """A decoder, and the columns of what is read with it: made once, since the session parses them.

    Args:
        decoder: of the payloads, with nothing left to look up.
        decoded: its own columns, with their NOT NULL.
        columns: all those of :func:`read_splits`.
        as_read: the same as they are read: of a VARIANT its JSON text.
    """

    decoder: Decoder
    decoded: StructType
    columns: StructType
    as_read: StructType

    @classmethod
    def of(cls, decoder: Decoder) -> SourceColumns:
        """The columns of a decoder.

        Raises:
            SchemaMismatchError: the DDL does not parse, or uses a name of ours.
        """
        decoded, kept = declared_columns(decoder.ddl()), kept_fields(decoder)
        _check_names([*decoded.names, *(field.name for field in kept)])
        decoder.check(arrow_schema(decoded))
        fields = [StructField(f.name, f.dataType, True, f.metadata) for f in decoded.fields]
        own = struct_type(f"{STREAM_DDL}, {DEAD_LETTER_DDL}").fields
        columns = StructType([*fields, *kept, *own])
        return cls(decoder, decoded, columns, as_text(columns))

    def decode(self, blocks: Iterable[pa.RecordBatch], *, keeps_payloads: bool = False) -> Iterator[pa.RecordBatch]:
        """Decode messages in a process of their own, so that none of them can crash this one.

        Args:
            blocks: as splits yield them.
            keeps_payloads: as in :func:`read_splits`.

        Raises:
            DecoderCrashedError: too many messages crash the decoder.
            Exception: whatever a decoder of the user's raises.
        """
        return BlockDecoder.of(self, keeps_payloads=keeps_payloads).isolated(blocks)


def _check_names(names: Sequence[str]) -> None:
    taken = [name for name in names if name.lower() in (*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)]
    if taken:
        raise SchemaMismatchError(
            f"the schema uses names of stream-assets: {', '.join(taken)}", remedy="Rename these columns."
        )
    if twice := first_twice(names):
        raise SchemaMismatchError(
            f"the column {twice!r} is there twice, whether in upper or lower case",
            remedy="Give each column, the key and the headers a name of their own.",
        )


def read_splits(
    spark: SparkSession,
    splits: Sequence[Split],
    source: SourceColumns,
    *,
    identities: Mapping[str, str] | None = None,
    keeps_payloads: bool = False,
    is_isolated: bool = False,
) -> DataFrame:
    """The messages of ``splits``: the decoded columns, then where each came from, then what is wrong with it.

    Rows with ``_error`` are dead letters; unless others are asked to, only they carry ``_payload``. Where there may be
    none, these columns are left out.

    Args:
        spark: reads them.
        splits: what to read.
        source: the decoder of the payloads, and its columns.
        identities: of the streams that were planned. With them, a read to the end fails unless it is clean, without
            any dead letter; see :class:`spark_jobs.reading.clean.CleanRead`.
        keeps_payloads: every row carries what its dead letter would need.
        is_isolated: executors decode in processes of their own, since a message may crash the decoder.
    """
    if not splits:
        # Everything planned is gone from the stream; Spark would ask for a partition all the same.
        return spark.createDataFrame([], source.columns)
    driver = socket.gethostname()
    schema = source.as_read
    partitions = [
        SplitPartition(
            split, source.decoder, source.decoded, driver, _clean(split, identities), keeps_payloads, is_isolated
        )
        for split in splits
    ]

    # The name shows in plans; see :func:`spark_jobs.reading.whole.plan_reads_everything`.
    def stream_assets_splits(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for block in numbers:
            column: Any = block.column(0)
            for number in column.to_pylist():
                yield from partitions[number].read(schema)

    # A partition for each split. A data source of Python would start three more Python processes a session, one after
    # the other, and ask two of them at each read.
    count = len(splits)
    given = schema if identities is None else StructType(schema.fields[: -len(DEAD_LETTER_COLUMNS)])
    rows = spark.range(0, count, 1, count).mapInArrow(stream_assets_splits, given)
    return with_variants(plain_strings(rows, given.fields), source.columns)


def _clean(split: Split, identities: Mapping[str, str] | None) -> CleanRead | None:
    if identities is None:
        return None
    counts = split.counts() if isinstance(split, CountedSplit) else None
    if counts is None:
        raise ValueError("a split that does not know what it holds cannot be checked while it is read")
    return CleanRead(counts, identities)


@dataclass(frozen=True, slots=True)
class SplitPartition:
    """One split and how to decode it.

    Args:
        split: what to read.
        decoder: of the payloads.
        columns: the decoder's, with their NOT NULL.
        driver: the machine that planned it.
        clean: what it must give; ``None`` if dead letters and holes are fine.
        keeps_payloads: every row carries what its dead letter would need.
        is_isolated: it is decoded in a process of its own.
    """

    split: Split
    decoder: Decoder
    columns: StructType
    driver: str
    clean: CleanRead | None = None
    keeps_payloads: bool = False
    is_isolated: bool = False

    def read(self, schema: StructType) -> Iterator[pa.RecordBatch]:
        """The rows of the split as record batches with these columns."""
        try:
            yield from self._rows(arrow_schema(schema))
        except StreamAssetsError as error:
            # What the driver reaches an executor may not.
            machine = socket.gethostname()
            if machine == self.driver:
                raise
            what = f"executor {machine}: {error.what}"
            raise type(error)(what, remedy=error.remedy, **error.facts) from error

    def _rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        decoder = BlockDecoder(self.decoder, arrow_schema(self.columns), schema, self.keeps_payloads)
        blocks = self.split.read()
        rows = decoder.isolated(blocks) if self.is_isolated else map(partial(decode_here, decoder), blocks)
        if self.clean is None:
            return rows
        assert isinstance(self.split, CountedSplit)
        return (batch.drop_columns(list(DEAD_LETTER_COLUMNS)) for batch in self.clean.checked(rows, self.split))


@dataclass(frozen=True, slots=True)
class BlockDecoder:
    """Decodes blocks of messages into the rows of :func:`read_splits`.

    Args:
        decoder: for the payloads.
        wanted: the decoder's columns.
        schema: all columns of the result.
        keeps_payloads: as in :func:`read_splits`.
    """

    decoder: Decoder
    wanted: pa.Schema
    schema: pa.Schema
    keeps_payloads: bool = False

    @classmethod
    def of(cls, source: SourceColumns, *, keeps_payloads: bool) -> BlockDecoder:
        """With the columns of a source."""
        return cls(source.decoder, arrow_schema(source.decoded), arrow_schema(source.as_read), keeps_payloads)

    def isolated(self, blocks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Decode in another process; see :func:`spark_jobs.decoding.isolation.decode_isolated`."""
        return decode_isolated(blocks, self, self._refused)

    def __call__(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Decode a block, as splits yield them."""
        timestamps, unreadable = _checked_timestamps(messages)
        payloads = messages.column("payload")
        if unreadable.null_count == len(messages):
            decoded = self.decoder.decode(payloads, self.wanted)
            columns, errors = list(decoded.columns), decoded.errors
        else:
            # What the stream itself could not read is not decoded; its place in the columns stays null.
            readable = pc.is_null(unreadable)
            decoded = self.decoder.decode(payloads.filter(readable), self.wanted)
            places = pc.if_else(readable, pc.subtract(pc.cumulative_sum(readable.cast(pa.int64())), 1), None)
            columns = [column.take(places) for column in decoded.columns]
            errors = pc.coalesce(unreadable, decoded.errors.take(places))
        kept_columns, wrong = decode_kept(messages, self.decoder, pa.schema(list(self.schema)[len(self.wanted) :]))
        return self._rows(messages, timestamps, unreadable, [*columns, *kept_columns], pc.coalesce(errors, wrong))

    def _refused(self, message: pa.RecordBatch, reason: str) -> pa.RecordBatch:
        """The dead letter of one message that cannot be decoded."""
        timestamps, unreadable = _checked_timestamps(message)
        places = len(self.schema) - len(STREAM_COLUMNS) - len(DEAD_LETTER_COLUMNS)
        columns = [pa.nulls(1, field.type) for field in list(self.schema)[:places]]
        return self._rows(
            message, timestamps, unreadable, columns, pc.coalesce(unreadable, pa.array([reason], pa.string()))
        )

    def _rows(
        self,
        messages: pa.RecordBatch,
        timestamps: Column,
        unreadable: Column,
        columns: Sequence[Column],
        errors: Column,
    ) -> pa.RecordBatch:
        """The columns of payload, key and headers together with those of the stream and of dead letters."""
        kept = [messages.column("key"), messages.column("payload"), messages.column("headers"), pc.is_null(unreadable)]
        failed = pc.is_valid(errors)
        is_clean = errors.null_count == len(errors)
        if not is_clean:
            columns = [pc.if_else(failed, pa.scalar(None, column.type), column) for column in columns]
        if is_clean and not self.keeps_payloads:
            kept = [pa.nulls(len(messages), column.type) for column in kept]
        elif not self.keeps_payloads:
            kept = [pc.if_else(failed, column, pa.scalar(None, column.type)) for column in kept]
        *kept, is_message = kept
        arrays = [
            *columns,
            messages.column("stream"),
            messages.column("shard"),
            messages.column("sequence"),
            timestamps.cast(pa.timestamp("ms", "UTC")),
            *kept,
            errors,
            messages.column("offset"),
            is_message,
        ]
        return pa.RecordBatch.from_arrays(
            [
                array if array.type == field.type else array.cast(field.type)
                for array, field in zip(arrays, self.schema)
            ],
            names=self.schema.names,
        )


def _checked_timestamps(messages: pa.RecordBatch) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """The times that a TIMESTAMP can say, the others null; and the errors, with one where it cannot."""
    times, errors = messages.column("timestamp_ms"), messages.column("error")
    least, most = pc.min(times).as_py(), pc.max(times).as_py()
    if least is None or (least >= MIN_TIMESTAMP_MS and most <= MAX_TIMESTAMP_MS):
        return times, errors
    kept: list[int | None] = []
    found: list[str | None] = []
    for time, error in zip(times.to_pylist(), errors.to_pylist()):
        is_kept = time is None or MIN_TIMESTAMP_MS <= time <= MAX_TIMESTAMP_MS
        kept.append(time if is_kept else None)
        found.append(error or (None if is_kept else f"timestamp {time} ms is not in the years 1 to 9999"))
    return pa.array(kept, pa.int64()), pa.array(found, pa.string())
