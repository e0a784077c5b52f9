"""Payloads that are Avro, with a schema registry or with a schema of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from spark_jobs.decoding.avro_blocks import avro_decoding
from spark_jobs.decoding.avro_types import columns_ddl, is_record, parse_avro
from spark_jobs.decoding.decoders import DecodedColumns, Headers, Key
from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.schema_registry import SchemaRegistry, StoredSchema, check_subject
from spark_jobs.decoding.schema_source import check_sources, given_schema
from spark_jobs.decoding.wire_format import Part, decode_frames
from stream_consumers.options import check_name, check_switch


@dataclass(frozen=True, slots=True)
class Avro:
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
        >>> Avro(registry=SchemaRegistry("https://registry:8081"), subject="orders-value").is_resolved
        False
    """

    schema: str | Mapping[str, Any] | list[Any] | StoredSchema | None = None
    schema_file: str | Path | None = field(default=None, kw_only=True)
    registry: SchemaRegistry | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    framed: bool | None = field(default=None, kw_only=True)
    column: str | None = field(default=None, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        imported("fastavro", extra="avro")
        check_sources(schema=self.schema, schema_file=self.schema_file, subject=self.subject)
        check_subject(self.registry, self.subject, self.version)
        if self.framed is not None:
            check_switch("framed", self.framed)
        if self.column is not None:
            check_name("column", self.column)
        object.__setattr__(self, "schema", given_schema("AVRO", self.schema, self.schema_file))
        object.__setattr__(self, "schema_file", None)
        if self.schema is not None:
            self.ddl()

    @property
    def is_resolved(self) -> bool:
        """Whether its columns are known without the registry, and executors can use it as it is."""
        return self.subject is None and (self.registry is None or self.registry.is_resolved)

    def resolved(self) -> Avro:
        """The same with the schema that the subject has now.

        Raises:
            SchemaRegistryError: the registry does not answer for now.
            SchemaNotFoundError, AccessDeniedError, InvalidOptionError: it has none, or none for us.
            SchemaMismatchError: it is no Avro schema, or has no columns in Spark.
        """
        if self.is_resolved or self.registry is None:
            return self
        registry = self.registry.resolved()
        if self.subject is None:
            return replace(self, registry=registry)
        stored = registry.subject(self.subject, self.version)
        return replace(self, schema=stored, registry=registry, subject=None, version=None)

    @property
    def is_one_column(self) -> bool:
        """Whether the value is one column, and not one a field."""
        return self.column is not None or not is_record(parse_avro(self._reader()))

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        return columns_ddl(parse_avro(self._reader()), self.column)

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its columns are its own."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        own = self._reader()
        is_one = self.is_one_column
        registry = self.registry
        if not (self.framed if self.framed is not None else registry is not None):
            return DecodedColumns(*avro_decoding(own, own, schema, is_one).decode(payloads))

        def part_of(number: int) -> Part:
            writer = own if registry is None else registry.schema(number)
            return avro_decoding(writer, own, schema, is_one).decode

        return decode_frames(payloads, schema, part_of, registry)

    def _reader(self) -> StoredSchema:
        """The reader's schema."""
        if self.subject is not None:
            return self.resolved()._reader()
        assert isinstance(self.schema, StoredSchema)
        return self.schema
