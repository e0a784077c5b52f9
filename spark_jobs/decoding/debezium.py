"""``Debezium``: decodes change events into the columns of the row, the operation, and the place in the database's log.

The row is ``after`` of the envelope, or ``before`` of a delete. Messages that change no row, such as tombstones,
heartbeats and the topics of transactions, become rows of nulls, which :data:`IS_CHANGE` leaves out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.ddl import column_ddl
from spark_jobs.decoding.debezium_avro import AvroEnvelope, ChangeRows, avro_envelope
from spark_jobs.decoding.debezium_messages import TOMBSTONE, MessageForm, change_reader
from spark_jobs.decoding.debezium_types import (
    DecimalHandlingMode,
    HandlingModes,
    Placeholder,
    TimePrecisionMode,
)
from spark_jobs.decoding.decoders import Column, DecodedColumns, Headers, Key, decode_rows
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.schema_decoder import BodyDecoder, decode_frames
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_switch, choose_fields

IS_CHANGE = "_op IS NOT NULL"
"""The SQL condition of rows that are changes; see :attr:`Debezium.rows_where`."""
_OP, _ORDER, _UNAVAILABLE = "_op", "_source_order", "_unavailable"


class Unwrapped(str, enum.Enum):
    """The ``delete.tombstone.handling.mode`` of ``ExtractNewRecordState``, of those that keep the row of a delete."""

    REWRITE = "rewrite"
    REWRITE_WITHTOMBSTONE = "rewrite-with-tombstone"


@dataclass(frozen=True, slots=True)
class Debezium:
    """Decodes change events of Debezium into the columns of the row and those of the change.

    After the columns of the row come ``_op`` (STRING: ``c``, ``u``, ``d``, ``r`` or ``t``), with ``source_order`` also
    ``_source_order`` (STRING), and ``_unavailable`` (ARRAY<STRING>): the names of columns whose values Debezium does
    not have, because PostgreSQL logs no large value that an update leaves alone; these columns are null. The row is
    ``after``, and ``before`` of a delete, in which PostgreSQL has only the key by default: columns that are not there
    are null, and NOT NULL is not checked. A truncate is a row of nulls.

    Tombstones, heartbeats, logical decoding messages, and the messages of transaction and schema change topics become a
    row of nulls with a null ``_op``, and are left out of the table. What is no change event is a dead letter.

    Values become what they mean, by the schema in the message (``schemas.enable=true``). Without it the declared type
    decides, with the options that are named like Debezium's. A value that the column cannot hold exactly is a dead
    letter.

    | type of Debezium or Connect | column, of JSON | column, of Avro |
    |---|---|---|
    | `time.Date`, Connect `Date` | DATE, STRING; INT for the days | DATE |
    | `time.Timestamp`, `MicroTimestamp`, Connect `Timestamp` | TIMESTAMP, TIMESTAMP_NTZ, STRING; BIGINT | TIMESTAMP |
    | `time.NanoTimestamp` | the same, if it is whole microseconds | BIGINT |
    | `time.ZonedTimestamp`, `IsoTimestamp` | TIMESTAMP, STRING | TIMESTAMP |
    | `time.Time`, `MicroTime`, `NanoTime`, Connect `Time` | STRING like `-01:00:00.5`; INT, BIGINT | INT, BIGINT |
    | `time.ZonedTime`, `IsoTime`, `Interval` | STRING | STRING |
    | `time.IsoDate` | DATE, STRING | STRING |
    | `time.Year` | INT | INT |
    | `time.MicroDuration`, `NanoDuration` | BIGINT | BIGINT |
    | Connect `Decimal`, `data.VariableScaleDecimal` | DECIMAL, STRING, BIGINT; DOUBLE (nearest) | DECIMAL, STRING |
    | decimals as double or string | DOUBLE or STRING; DECIMAL | DOUBLE, STRING |
    | bytes, `data.Bits` (the lowest byte first) | BINARY | BINARY |
    | the text of `binary.handling.mode` | STRING | STRING |
    | `data.Json` | STRING; VARIANT, STRUCT, MAP or ARRAY of what it means | STRING |
    | `data.Uuid`, `Xml`, `Enum`, `EnumSet`, `Ltree`, `Tsvector` | STRING | STRING |
    | `data.geometry.*`, structured times and durations | STRUCT of their fields, like `wkb BINARY` | STRUCT |
    | arrays, maps, structures, vectors | ARRAY, MAP, STRUCT of the above | the same |
    | an unknown semantic type | what it is written as, but no time and no decimal | the same |

    A message without a schema does not show the unit of times nor the scale of decimals: a number in a TIMESTAMP column
    is refused unless ``time_precision_mode`` or ``types`` gives the unit, and with ``decimal_handling_mode='precise'``
    a DECIMAL column must have the scale of its source.

    Args:
        schema: the columns of the row: Spark DDL, or ``Json`` with it; or ``Avro`` with the schema of the envelope.
        registry: the registry with the schema of the envelope in Avro; the same as ``Avro(registry=…)``.
        subject: the subject of the values, like ``shop.public.customers-value``.
        version: of the subject; the newest by default.
        schema_file: the path of a file with the Avro schema of the envelope instead.
        unwrapped: messages are rows that ``ExtractNewRecordState`` has written, with its
            ``delete.tombstone.handling.mode``, ``rewrite`` or ``rewrite-with-tombstone``; the others keep no row of a
            delete. By default messages are envelopes.
        source_order: add ``_source_order``, the place of the change in the log of its database, as text that is sorted
            like the log of one server of PostgreSQL, MySQL, MariaDB, SQL Server or Oracle.
        time_precision_mode: ``time.precision.mode`` of the connector, for messages without a schema.
        decimal_handling_mode: ``decimal.handling.mode`` of the connector, for messages without a schema.
        types: the semantic types of columns, like ``io.debezium.time.MicroTimestamp``, for messages without a schema.
        unavailable_value_placeholder: ``unavailable.value.placeholder`` of the connector.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: the arguments contradict each other.
        SchemaMismatchError: the schema is not DDL, or not that of an envelope.

    Example:
        >>> Debezium("id BIGINT, name STRING").ddl()
        'id BIGINT, name STRING, `_op` STRING, `_unavailable` ARRAY<STRING>'
    """

    rows_where: ClassVar[str] = IS_CHANGE
    """The SQL condition of decoded rows that are written; the others are of messages that make no row."""
    deletes_where: ClassVar[str] = f"{_OP} = 'd'"
    """The SQL condition of rows that delete their key in a keyed table."""
    truncates_where: ClassVar[str] = f"{_OP} = 't'"
    """The SQL condition of rows that remove all older rows of a keyed table."""

    schema: str | Json | Avro | None = None
    registry: SchemaRegistry | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    schema_file: str | Path | None = field(default=None, kw_only=True)
    unwrapped: Unwrapped | str | None = field(default=None, kw_only=True)
    source_order: bool = field(default=False, kw_only=True)
    time_precision_mode: TimePrecisionMode | str = field(default=TimePrecisionMode.ADAPTIVE, kw_only=True)
    decimal_handling_mode: DecimalHandlingMode | str = field(default=DecimalHandlingMode.PRECISE, kw_only=True)
    types: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    unavailable_value_placeholder: str = field(default="__debezium_unavailable_value", kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        choose_fields(
            self,
            time_precision_mode=TimePrecisionMode,
            decimal_handling_mode=DecimalHandlingMode,
            **({} if self.unwrapped is None else {"unwrapped": Unwrapped}),
        )
        check_switch("source_order", self.source_order)
        if self.source_order and self.unwrapped:
            raise InvalidOptionError(
                "source_order needs the source of an envelope, which unwrapped rows do not have",
                remedy="Declare the fields that add.fields adds, like __source_lsn BIGINT, and order by them.",
            )
        try:
            Placeholder.of(self.unavailable_value_placeholder)
        except (ValueError, AttributeError):
            raise InvalidOptionError(
                "unavailable_value_placeholder is neither text nor hex: with hexadecimal digits",
                remedy="Give that of the connector; leave it out for the default.",
            ) from None
        object.__setattr__(self, "schema", self._given())
        for name in ("registry", "subject", "version", "schema_file"):
            object.__setattr__(self, name, None)
        if isinstance(self.schema, Avro) and self.schema.is_resolved:
            self.ddl()

    def _given(self) -> Json | Avro:
        """The decoder of the rows, from the arguments for it."""
        stored = {n: getattr(self, n) for n in ("registry", "subject", "version", "schema_file")}
        stored = {name: value for name, value in stored.items() if value is not None}
        if stored and self.schema is None:
            return Avro(**stored)
        inner = Json(self.schema) if isinstance(self.schema, str) else self.schema
        has_columns = isinstance(inner, Avro) or (isinstance(inner, Json) and inner.schema is not None)
        if stored or not has_columns or not isinstance(inner, (Json, Avro)):
            raise InvalidOptionError(
                "schema must be the columns of the row, or the schema of the envelope, and only one of them is given",
                remedy="Write Debezium('id BIGINT, name STRING'), or Debezium(Avro(registry=…, subject=…)).",
            )
        if inner.key or inner.headers or (isinstance(inner, Avro) and inner.column is not None):
            raise InvalidOptionError(
                "the decoder of the row has a key, headers or column of its own", remedy="Give key= to Debezium itself."
            )
        return inner

    @property
    def is_resolved(self) -> bool:
        """See :attr:`spark_jobs.decoding.decoders.StoredDecoder.is_resolved`."""
        return isinstance(self.schema, Json) or self._avro.is_resolved

    def resolved(self) -> Debezium:
        """See :meth:`spark_jobs.decoding.decoders.StoredDecoder.resolved`."""
        return self if self.is_resolved else replace(self, schema=self._avro.resolved())

    @property
    def _avro(self) -> Avro:
        assert isinstance(self.schema, Avro)
        return self.schema

    def with_rescue(self) -> Debezium:
        """The same decoder with a column for the fields of the row that have none, if it decodes JSON."""
        return replace(self, schema=replace(self.schema, rescue=True)) if isinstance(self.schema, Json) else self

    @property
    def change_columns(self) -> tuple[str, ...]:
        """The columns about the change, which a keyed table does not get."""
        return (_OP, *((_ORDER,) if self.source_order else ()), _UNAVAILABLE)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        if isinstance(self.schema, Json):
            row = self.schema.ddl()
        else:
            columns = self._envelope(self._avro).columns()
            row = ", ".join(column_ddl(name, kind) for name, kind in columns)
        order = f"{column_ddl(_ORDER, 'STRING')}, " if self.source_order else ""
        return f"{row}, {column_ddl(_OP, 'STRING')}, {order}{column_ddl(_UNAVAILABLE, 'ARRAY<STRING>')}"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`."""
        if isinstance(self.schema, Json):
            self.schema.check(self._of_row(schema))

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        self.check(schema)
        if isinstance(self.schema, Json):
            return self._decode_json(self.schema, payloads, self._of_row(schema))
        return self._decode_avro(self._avro, payloads, self._of_row(schema))

    def _of_row(self, schema: pa.Schema) -> pa.Schema:
        return pa.schema(list(schema)[: -3 if self.source_order else -2])

    @property
    def _placeholder(self) -> Placeholder:
        return Placeholder.of(self.unavailable_value_placeholder)

    def _envelope(self, inner: Avro) -> AvroEnvelope:
        return avro_envelope(inner.resolved().schema, self.unwrapped is not None, self.source_order)

    def _decode_json(self, inner: Json, payloads: Column, columns: pa.Schema) -> DecodedColumns:
        modes = HandlingModes(self.time_precision_mode, self.decimal_handling_mode)
        types = tuple(sorted(self.types.items()))
        form = MessageForm(
            modes,
            types,
            self._placeholder,
            is_unwrapped=self.unwrapped is not None,
            has_order=self.source_order,
            is_null_wrong=self.unwrapped is Unwrapped.REWRITE,
        )
        reader = change_reader(columns, form, inner.rescue)
        (documents, *marks), errors = decode_rows(reader, payloads)
        # The rows of some operations lack columns, so that the reader checks NOT NULL.
        decoded = inner.decode(documents, pa.schema([column.with_nullable(True) for column in columns]))
        return self._decoded(payloads, [*decoded.columns], marks, pc.coalesce(errors, decoded.errors))

    def _decode_avro(self, inner: Avro, payloads: Column, columns: pa.Schema) -> DecodedColumns:
        envelope, registry = self._envelope(inner), inner.registry
        known: Any = inner.schema

        def decoder_of(number: int) -> BodyDecoder:
            return envelope.decoder_of(known if registry is None else registry.schema(number), columns)

        if inner.is_framed:
            found = decode_frames(payloads, envelope.decoded(columns), decoder_of, registry)
        else:
            found = DecodedColumns(*decoder_of(0)(payloads))
        (*rows, own), errors = decode_rows(
            ChangeRows(envelope, found, columns, self._placeholder), pa.array(range(len(payloads)), pa.int64())
        )
        return self._decoded(payloads, rows[:-3], rows[-3:], pc.coalesce(errors, own))

    def _decoded(
        self, payloads: Column, rows: Sequence[Column], marks: Sequence[Column], errors: Column
    ) -> DecodedColumns:
        """All columns, and tombstones among the errors where each may be the only sign of a delete."""
        if self.unwrapped is Unwrapped.REWRITE and payloads.null_count:
            unexpected = pc.if_else(payloads.is_null(), TOMBSTONE, pa.scalar(None, pa.string()))
            errors = pc.coalesce(errors, unexpected)
        operations, orders, without = marks
        return DecodedColumns([*rows, operations, *([orders] if self.source_order else []), without], errors)
