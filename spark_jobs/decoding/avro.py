"""Payloads that are Avro, with a schema registry or with a schema of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from spark_jobs.decoding.avro_blocks import avro_decoding
from spark_jobs.decoding.avro_types import columns_ddl, is_record, parse_avro
from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.schema_decoder import SchemaDecoder, given_schema
from spark_jobs.decoding.schema_registry import StoredSchema
from spark_jobs.decoding.wire_format import Part, decode_frames
from stream_consumers.options import check_name


@dataclass(frozen=True, slots=True)
class Avro(SchemaDecoder):
    """Payloads are Avro values; the reader's schema names and types the columns.

    With a registry each payload begins with the id of the schema that has written it, and is read as Avro's schema
    resolution has it: fields that the reader's schema does not have are left out, those that were not written get
    their default, numbers are widened. Without a registry all payloads are written with the reader's schema. A payload
    that does not fit its schema, that has bytes behind its end, or whose id is unknown, is a dead letter. A tombstone
    is a row of nulls.

    The types of the columns are in docs/payloads.md. A union of several types is a STRUCT with a field for each.

    Args:
        schema: the reader's schema, as JSON text or what that is in Python.
        schema_file: the path of a file with it, ``.avsc``, which is read at once.
        registry: where the schemas are.
        subject: instead of a schema: its schema is the reader's, as it is when a batch is read. Like ``orders-value``.
        version: of the subject; the newest by default.
        framed: whether payloads begin with a schema id; by default they do with a registry. Framed payloads without a
            registry are read with the reader's schema, whatever their id.
        column: one column for the whole value, as a STRUCT if it is a record; by default a record has a column a field,
            and anything else the column ``payload``.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: they do not go together.
        SchemaMismatchError: the schema is none, or has no columns in Spark.
        MissingDependencyError: fastavro is not installed.

    Example:
        >>> Avro('{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}').ddl()
        '`id` BIGINT'
        >>> from spark_jobs.decoding.schema_registry import SchemaRegistry
        >>> Avro(registry=SchemaRegistry("https://registry:8081"), subject="orders-value").is_resolved
        False
    """

    schema: str | Mapping[str, Any] | list[Any] | StoredSchema | None = None
    column: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        imported("fastavro", extra="avro")
        SchemaDecoder.__post_init__(self)
        if self.column is not None:
            check_name("column", self.column)
        object.__setattr__(self, "schema", given_schema("AVRO", self.schema, self.schema_file))
        object.__setattr__(self, "schema_file", None)
        if self.schema is not None:
            self.ddl()

    @property
    def is_one_column(self) -> bool:
        """Whether the value is one column, and not one a field."""
        return self.column is not None or not is_record(parse_avro(self._known()))

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        return columns_ddl(parse_avro(self._known()), self.column)

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its columns are its own."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        own = self._known()
        is_one = self.is_one_column
        registry = self.registry
        if not self.is_framed:
            return DecodedColumns(*avro_decoding(own, own, schema, is_one).decode(payloads))

        def part_of(number: int) -> Part:
            writer = own if registry is None else registry.schema(number)
            return avro_decoding(writer, own, schema, is_one).decode

        return decode_frames(payloads, schema, part_of, registry)
