"""Reads the messages of a plan's splits as rows, on executors or, for a small batch, on the driver.

Executors decode while they read. If a batch is written while it is read, they also check that each split holds the
planned messages. The driver reads small batches itself, because passing a few thousand messages through Python workers
takes longer.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from spark_jobs.decoding.ddl import first_duplicate, folded, is_internal
from spark_jobs.decoding.decoders import Decoder, header_columns, is_one_column, key_columns
from spark_jobs.decoding.isolation import decode_here, decode_isolated
from spark_jobs.decoding.row_size import MAX_ROW_BYTES, spark_bytes
from spark_jobs.reading.blocks import BlockDecoder
from spark_jobs.reading.spark_types import (
    arrow_schema,
    as_text,
    declared_columns,
    has_variant,
    plain_strings,
    struct_type,
    with_variants,
)
from stream_consumers.batches import CountedSplit, Split
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.options import check_name

HEADERS_DDL = "ARRAY<STRUCT<name: STRING, value: BINARY>>"
MAX_DRIVER_BYTES = 32 << 20
"""The driver reads a batch whose rows need at most this many bytes in Spark; executors read larger ones.

Spark holds all rows of the driver in its heap at once, with copies.
"""


def kept_fields(decoder: Decoder) -> list[StructField]:
    """Return the columns for key and headers of a decoder; see :func:`key_columns`.

    Raises:
        InvalidOptionError: a name cannot be used.
        SchemaMismatchError: the columns of the key cannot be used.
    """
    kinds: list[DataType] = []
    if decoder.key:
        kinds.append(BinaryType() if isinstance(decoder.key, str) else _type_of_key(decoder.key))
    if isinstance(decoder.headers, Mapping):
        for column, name in decoder.headers.items():
            check_name("the column of a header", column)
            check_name("the name of a header", name)
        kinds += [StringType()] * len(decoder.headers)
    elif decoder.headers:
        kinds.append(struct_type(f"headers {HEADERS_DDL}").fields[0].dataType)
    names = [*key_columns(decoder), *header_columns(decoder)]
    return [StructField(name, kind) for name, kind in zip(names, kinds, strict=True)]


def _type_of_key(key: Decoder) -> DataType:
    if isinstance(key, type) or not callable(getattr(key, "ddl", None)):
        raise InvalidOptionError(f"key={key!r} is not a decoder", remedy="Use the name of a column, or a decoder.")
    columns = declared_columns(key.ddl())
    if has_variant(columns):
        raise SchemaMismatchError(
            f"the columns of the key, {key.ddl()!r}, have a VARIANT, which only columns of the payload may have",
            remedy="Declare it as STRING, and call parse_json in the transform.",
        )
    key.check(arrow_schema(columns))
    return columns.fields[0].dataType if is_one_column(key) else columns


STREAM_TYPES = {"_stream": "string", "_shard": "bigint", "_sequence": "bigint", "_timestamp": "timestamp"}
STREAM_COLUMNS = tuple(STREAM_TYPES)
DEAD_LETTER_TYPES = {
    "_key": "BINARY",
    "_payload": "BINARY",
    "_headers": HEADERS_DDL,
    "_error": "STRING",
    "_offset": "BIGINT",
    "_is_message": "BOOLEAN",
    "_undeclared": "STRING",
}
DEAD_LETTER_COLUMNS = tuple(DEAD_LETTER_TYPES)
"""The last columns of each row that is read; dead letters are made of them. The dead-letter table names them
without the underscore, does not have ``undeclared``, and has more columns."""
STREAM_DESCRIPTIONS = {
    "_stream": "The stream of the message.",
    "_shard": "The shard of the message: the partition of a Kafka topic.",
    "_sequence": "The place of the message in its shard: the offset in Kafka.",
    "_timestamp": "The time of the message, in UTC.",
}
"""The comments of these columns in a new table."""
STREAM_DDL = ", ".join(f"{name} {kind} COMMENT '{STREAM_DESCRIPTIONS[name]}'" for name, kind in STREAM_TYPES.items())
DEAD_LETTER_DDL = ", ".join(f"{name} {kind}" for name, kind in DEAD_LETTER_TYPES.items())


@dataclass(frozen=True, slots=True)
class SourceColumns:
    """A decoder and the columns of its rows, created once because the session parses them.

    Args:
        decoder: the resolved decoder of the payloads.
        decoded: the columns of the decoder, with their NOT NULL.
        columns: all columns of :func:`read_splits`.
        as_read: the same columns before conversion, with JSON text for a VARIANT.
        max_row_bytes: the most bytes of a row in Spark; see :data:`spark_jobs.decoding.row_size.ROWS_IN_HEAP`.
    """

    decoder: Decoder
    decoded: StructType
    columns: StructType
    as_read: StructType
    max_row_bytes: int = MAX_ROW_BYTES

    @classmethod
    def of(cls, decoder: Decoder, max_row_bytes: int = MAX_ROW_BYTES) -> SourceColumns:
        """Return the columns of a decoder.

        Raises:
            SchemaMismatchError: the DDL does not parse, or uses a reserved name.
        """
        decoded, kept = declared_columns(decoder.ddl()), kept_fields(decoder)
        _check_names([*decoded.names, *(field.name for field in kept)])
        decoder.check(arrow_schema(decoded))
        fields = [StructField(f.name, f.dataType, True, f.metadata) for f in decoded.fields]
        own = struct_type(f"{STREAM_DDL}, {DEAD_LETTER_DDL}").fields
        columns = StructType([*fields, *kept, *own])
        return cls(decoder, decoded, columns, as_text(columns), max_row_bytes)

    def decode(self, blocks: Iterable[pa.RecordBatch], *, keeps_payloads: bool = False) -> Iterator[pa.RecordBatch]:
        """Decode messages in another process, so that no message can crash this one.

        Args:
            blocks: the blocks that splits yield.
            keeps_payloads: see :func:`read_splits`.

        Raises:
            DecoderCrashedError: too many messages crash the decoder.
            Exception: a decoder of the user raises it.
        """
        wanted, schema = arrow_schema(self.decoded), arrow_schema(self.as_read)
        decoder = BlockDecoder(self.decoder, wanted, schema, keeps_payloads, self.max_row_bytes)
        return decode_isolated(blocks, decoder, decoder.refused, max_row_bytes=self.max_row_bytes)


def _check_names(names: Sequence[str]) -> None:
    own = (*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)
    taken = [name for name in names if folded(name) in own or is_internal(name)]
    if taken:
        raise SchemaMismatchError(
            f"the schema uses names of stream-assets, Spark or Delta: {', '.join(taken)}",
            remedy="Rename these columns.",
        )
    if twice := first_duplicate(names):
        raise SchemaMismatchError(
            f"the column {twice!r} occurs twice, in upper or lower case",
            remedy="Give each column, the key and the headers distinct names.",
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
    """Return a frame that reads ``splits`` on executors: decoded, stream and then dead-letter columns.

    Rows with ``_error`` are dead letters. Only these have ``_payload``, unless ``keeps_payloads``. With ``identities``
    dead letters are an error, and their columns are omitted.

    Args:
        spark: the session.
        splits: the splits to read.
        source: the decoder of the payloads, and its columns.
        identities: the fingerprints of the planned streams. With them, reading fails unless each split holds the
            planned messages, without any dead letter; see :class:`SplitCheck`.
        keeps_payloads: whether every row carries the columns that its dead letter would need.
        is_isolated: whether executors decode in separate processes, because a message may crash the decoder.
    """
    if not splits:
        # The stream has lost all planned messages, and Spark cannot read zero partitions.
        return spark.createDataFrame([], source.columns)
    driver = socket.gethostname()
    schema = source.as_read
    partitions = [
        SplitPartition(
            split,
            source.decoder,
            source.decoded,
            driver,
            _check(split, identities),
            keeps_payloads,
            is_isolated,
            source.max_row_bytes,
        )
        for split in splits
    ]

    # This name is shown in query plans.
    def stream_assets_splits(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for block in numbers:
            column: Any = block.column(0)
            for number in column.to_pylist():
                yield from partitions[number].read(schema)

    # Spark reads one partition for each split. A Python data source would start three more Python processes in each
    # session, one after the other, and call two of them for each read.
    count = len(splits)
    given = schema if identities is None else StructType(schema.fields[: -len(DEAD_LETTER_COLUMNS)])
    rows = spark.range(0, count, 1, count).mapInArrow(stream_assets_splits, given)
    return with_variants(plain_strings(rows, given.fields), source.columns)


def _check(split: Split, identities: Mapping[str, str] | None) -> SplitCheck | None:
    if identities is None:
        return None
    counts = split.counts() if isinstance(split, CountedSplit) else None
    if counts is None:
        raise ValueError("a split cannot be checked while it is read, because it has no counts")
    return SplitCheck(counts, identities)


@dataclass(frozen=True, slots=True)
class SplitPartition:
    """One split and how to decode it.

    Args:
        split: the split to read.
        decoder: the decoder of the payloads.
        columns: the columns of the decoder, with their NOT NULL.
        driver: the name of the machine that planned the split.
        check: the check of the split's messages; ``None`` if dead letters and gaps are allowed.
        keeps_payloads: whether every row carries the columns that its dead letter would need.
        is_isolated: whether the split is decoded in another process.
        max_row_bytes: the most bytes of a row in Spark.
    """

    split: Split
    decoder: Decoder
    columns: StructType
    driver: str
    check: SplitCheck | None = None
    keeps_payloads: bool = False
    is_isolated: bool = False
    max_row_bytes: int = MAX_ROW_BYTES

    def read(self, schema: StructType) -> Iterator[pa.RecordBatch]:
        """Read the rows of the split as record batches with these columns."""
        try:
            yield from self._rows(arrow_schema(schema))
        except StreamAssetsError as error:
            # An executor may fail to reach a broker that the driver reaches, so the error names the executor.
            machine = socket.gethostname()
            if machine != self.driver:
                error = type(error)(f"executor {machine}: {error.what}", remedy=error.remedy, **error.facts)
            # Without its cause, because the driver recognizes an error by the first traceback.
            raise error from None

    def _rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        columns = arrow_schema(self.columns)
        decoder = BlockDecoder(self.decoder, columns, schema, self.keeps_payloads, self.max_row_bytes)
        blocks = self.split.read()
        decode = decode_isolated if self.is_isolated else decode_here
        rows = decode(blocks, decoder, decoder.refused, max_row_bytes=self.max_row_bytes)
        if self.check is None:
            return rows
        assert isinstance(self.split, CountedSplit)
        return (batch.drop_columns(list(DEAD_LETTER_COLUMNS)) for batch in self.check.checked(rows, self.split))


class SplitMismatchError(Exception):
    """A split does not hold the planned messages. The Spark job fails before its commit, and the batch is read again.

    It is raised as early as possible, because a cluster runs a failing task four times.
    """


@dataclass(frozen=True, slots=True)
class SplitCheck:
    """Executor-side check that a split holds the planned messages.

    Args:
        counts: the number of planned messages of each shard.
        identities: the planned fingerprint of each epoch of each stream; there may be further streams.

    Example:
        >>> rows = pa.record_batch({"_stream": ["orders"], "_shard": [0], "_error": pa.nulls(1, pa.string())})
        >>> from stream_consumers.memory import MemorySplit
        >>> check = SplitCheck({Shard("orders"): 1}, {"orders": "first"})
        >>> [found.num_rows for found in check.checked([rows], MemorySplit((), {"orders": "first"}))]
        [1]
        >>> [found.num_rows for found in check.checked([rows], MemorySplit((), {"orders": "second"}))]
        Traceback (most recent call last):
        spark_jobs.reading.source.SplitMismatchError: the stream was recreated while it was read: {'orders': 'second'}
    """

    counts: Mapping[Shard, int]
    identities: Mapping[str, str]

    def checked(self, batches: Iterable[pa.RecordBatch], split: CountedSplit) -> Iterator[pa.RecordBatch]:
        """Yield the decoded rows of the split, and check that each planned message occurs once and is no dead letter.

        Args:
            batches: rows with the columns ``_stream``, ``_shard`` and ``_error``.
            split: the split; after the last row, its streams are compared with the planned ones.

        Raises:
            SplitMismatchError: the split does not hold the planned messages.
        """
        left = dict(self.counts)
        for rows in batches:
            dead = rows.num_rows - rows.column("_error").null_count
            if dead:
                raise SplitMismatchError(f"{dead} of {rows.num_rows} messages are dead letters")
            for shard, count in count_by_shard(rows):
                left[shard] = left.get(shard, 0) - count
                if left[shard] < 0:
                    raise SplitMismatchError(
                        f"{shard} holds more messages than the {self.counts.get(shard, 0)} planned"
                    )
            yield rows
        missing = {str(shard): count for shard, count in left.items() if count}
        if missing:
            raise SplitMismatchError(f"messages that were planned are missing: {missing}")
        found = split.identities()
        streams = {shard.stream for shard in self.counts}
        if not streams <= found.keys() or any(self.identities.get(name) != found[name] for name in found):
            raise SplitMismatchError(f"the stream was recreated while it was read: {dict(found)}")


def count_by_shard(rows: pa.RecordBatch) -> Iterator[tuple[Shard, int]]:
    """Count the rows of each shard, by the columns ``_stream`` and ``_shard``."""
    places = pa.Table.from_batches([rows.select(["_stream", "_shard"])])
    counted = places.group_by(["_stream", "_shard"], use_threads=False).aggregate([([], "count_all")])
    for row in counted.to_pylist():
        yield Shard(row["_stream"], row["_shard"]), row["count_all"]


@dataclass(frozen=True, slots=True)
class DriverBatch:
    """The messages that the driver read.

    Args:
        rows: the decoded rows.
        messages: the number of decoded messages of each shard.
        dead: the number of dead letters.
    """

    rows: pa.Table
    messages: Mapping[Shard, int]
    dead: int

    def frame(self, spark: SparkSession, source: SourceColumns) -> DataFrame:
        """Return a frame of one partition, because many small files would make the table slow to read."""
        # If all messages are lost there are no rows, and Spark does not accept an Arrow table without chunks.
        found: Any = self.rows if self.rows.num_rows else []
        rows = spark.createDataFrame(found, source.as_read).coalesce(1)
        return with_variants(rows, source.columns)


def read_on_driver(
    splits: Sequence[Split], source: SourceColumns, *, keeps_payloads: bool = False
) -> DriverBatch | None:
    """Read splits in this process and decode their messages in another one.

    Args:
        splits: the splits to read.
        source: the decoder of the payloads, and its columns.
        keeps_payloads: see :func:`read_splits`.

    Returns:
        ``None`` if the rows need more than :data:`MAX_DRIVER_BYTES`.

    Raises:
        StreamAssetsError: a split cannot be read.
        Exception: a decoder of the user raises it.
    """
    blocks = chain.from_iterable(split.read() for split in splits)
    found: list[pa.RecordBatch] = []
    size = 0
    for rows in source.decode(blocks, keeps_payloads=keeps_payloads):
        found.append(rows)
        size += sum(map(spark_bytes, rows.columns))
        if size > MAX_DRIVER_BYTES:
            return None
    messages: Counter[Shard] = Counter()
    for rows in found:
        messages.update(dict(count_by_shard(rows.filter(rows.column("_error").is_null()))))
    # PySpark cannot convert slices of lists with nulls, so every value is copied.
    table = pa.Table.from_batches(found, arrow_schema(source.as_read))
    table = table.take(pa.array(range(table.num_rows), pa.int64()))
    return DriverBatch(table, messages, table.num_rows - messages.total())
