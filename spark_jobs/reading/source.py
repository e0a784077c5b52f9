"""The messages of all backends as rows: executors read the splits of a plan and decode them on the way."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from spark_jobs.decoding.ddl import first_twice
from spark_jobs.decoding.decoders import Decoder, header_columns, is_one_column, key_columns
from spark_jobs.decoding.isolation import decode_here, decode_isolated
from spark_jobs.reading.blocks import BlockDecoder
from spark_jobs.reading.clean import CleanRead
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
from stream_consumers.options import check_name

HEADERS_DDL = "ARRAY<STRUCT<name: STRING, value: BINARY>>"


def kept_fields(decoder: Decoder) -> list[StructField]:
    """The columns for key and headers that a decoder asks for; see :func:`key_columns`.

    Raises:
        InvalidOptionError: names that are none.
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
        raise InvalidOptionError(f"key={key!r} decodes nothing", remedy="Give the name of a column, or a decoder.")
    columns = declared_columns(key.ddl())
    if has_variant(columns):
        raise SchemaMismatchError(
            f"the columns of the key, {key.ddl()!r}, have a VARIANT, which only those of the payload may have",
            remedy="Make it STRING, and take parse_json in the transform.",
        )
    key.check(arrow_schema(columns))
    return columns.fields[0].dataType if is_one_column(key) else columns


STREAM_TYPES = {"_stream": "string", "_shard": "bigint", "_sequence": "bigint", "_timestamp": "timestamp"}
STREAM_COLUMNS = tuple(STREAM_TYPES)
DEAD_LETTER_COLUMNS = ("_key", "_payload", "_headers", "_error", "_offset", "_is_message", "_undeclared")
STREAM_DESCRIPTIONS = {
    "_stream": "The stream of the message.",
    "_shard": "The shard of the message: the partition of a Kafka topic.",
    "_sequence": "The place of the message in its shard: the offset in Kafka.",
    "_timestamp": "The time of the message, in UTC.",
}
"""The comments of these columns in a new table."""
STREAM_DDL = ", ".join(f"{name} {kind} COMMENT '{STREAM_DESCRIPTIONS[name]}'" for name, kind in STREAM_TYPES.items())
DEAD_LETTER_DDL = (
    f"_key BINARY, _payload BINARY, _headers {HEADERS_DDL}, _error STRING, _offset BIGINT, _is_message BOOLEAN, "
    "_undeclared STRING"
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
        wanted, schema = arrow_schema(self.decoded), arrow_schema(self.as_read)
        decoder = BlockDecoder(self.decoder, wanted, schema, keeps_payloads)
        return decode_isolated(blocks, decoder, decoder.refused)


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

    # Query plans show the name of this function.
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
        decode = decode_isolated if self.is_isolated else decode_here
        rows = decode(blocks, decoder, decoder.refused)
        if self.clean is None:
            return rows
        assert isinstance(self.split, CountedSplit)
        return (batch.drop_columns(list(DEAD_LETTER_COLUMNS)) for batch in self.clean.checked(rows, self.split))
