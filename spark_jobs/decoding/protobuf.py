"""Payloads that are Protobuf messages, with a schema registry or with a schema of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message

from spark_jobs.decoding.decoders import DecodedColumns, Headers, Key
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.protobuf_files import (
    MessageSchema,
    files_of_stored,
    message_names,
    schema_of_class,
    schema_of_set,
    schema_of_stored,
    schema_of_text,
)
from spark_jobs.decoding.protobuf_types import build_message, columns_ddl, is_one_value
from spark_jobs.decoding.rows import RowReader, columns_of, decode_rows
from spark_jobs.decoding.schema_registry import SchemaRegistry, check_subject
from spark_jobs.decoding.schema_source import check_sources, read_file, read_text, schema_use
from spark_jobs.decoding.wire_format import Part, decode_frames, message_place
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_name, check_switch

SERIALIZED = "serialized"


@dataclass(frozen=True, slots=True)
class Protobuf:
    """Payloads are Protobuf messages of one type; its fields are the columns.

    Fields are told apart by their numbers, as Protobuf has it: those that the schema does not have are left out, those
    that were not written are null, or the default where Protobuf cannot tell. With a registry each payload begins with
    the id of a schema and the place of the message in it. A payload that is damaged, that is another message, or whose
    id is unknown, is a dead letter. A tombstone is a row of nulls.

    The types of the columns are in docs/payloads.md.

    Args:
        schema: a generated class, or the text of a ``.proto`` file, which is compiled at once.
        schema_file: the path of a ``.proto`` file, or of a descriptor set (``protoc --include_imports
            --descriptor_set_out``), which is read at once.
        registry: where the schemas are.
        subject: instead of a schema: its schema is taken, as it is when a batch is read. Like ``orders-value``.
        version: of the subject; the newest by default.
        message: the full name of the message, like ``shop.Order``; the first one of the schema by default.
        framed: whether payloads begin with a schema id; by default they do with a registry.
        column: one STRUCT for the whole message; by default there is a column a field.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: they do not go together.
        SchemaMismatchError: the schema is none, or has no columns in Spark.
        MissingDependencyError: a ``.proto`` file is given, and there is no compiler.

    Example:
        >>> from google.protobuf.duration_pb2 import Duration
        >>> Protobuf(Duration).ddl()
        '`seconds` BIGINT, `nanos` INT'
    """

    schema: type[Message] | str | MessageSchema | None = None
    schema_file: str | Path | None = field(default=None, kw_only=True)
    registry: SchemaRegistry | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    message: str | None = field(default=None, kw_only=True)
    framed: bool | None = field(default=None, kw_only=True)
    column: str | None = field(default=None, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_sources(schema=self.schema, schema_file=self.schema_file, subject=self.subject)
        check_subject(self.registry, self.subject, self.version)
        if self.framed is not None:
            check_switch("framed", self.framed)
        for name in ("column", "message"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        if self.subject is None:
            with schema_use("Protobuf"):
                object.__setattr__(self, "schema", self._given())
                object.__setattr__(self, "schema_file", None)
                self.ddl()

    def _given(self) -> MessageSchema:
        if isinstance(self.schema, MessageSchema):
            return self.schema
        if isinstance(self.schema, str):
            return schema_of_text(self.schema, self.message)
        if self.schema_file is not None:
            if str(self.schema_file).endswith(".proto"):
                return schema_of_text(read_text(self.schema_file), self.message)
            return schema_of_set(read_file(self.schema_file), self.message)
        if isinstance(self.schema, type) and issubclass(self.schema, Message):
            return schema_of_class(self.schema)
        raise InvalidOptionError(
            f"schema={self.schema!r} is no schema of Protobuf",
            remedy="Give a generated class, or the text of a .proto file.",
        )

    @property
    def is_resolved(self) -> bool:
        """Whether its columns are known without the registry, and executors can use it as it is."""
        return self.subject is None and (self.registry is None or self.registry.is_resolved)

    def resolved(self) -> Protobuf:
        """The same with the schema that the subject has now.

        Raises:
            SchemaRegistryError: the registry does not answer for now.
            SchemaNotFoundError, AccessDeniedError, InvalidOptionError: it has none, or none for us.
            SchemaMismatchError: it is no schema of Protobuf, or has no columns in Spark.
            MissingDependencyError: the registry gives the text of the schema only, and there is no compiler.
        """
        if self.is_resolved or self.registry is None:
            return self
        registry = self.registry.resolved()
        if self.subject is None:
            return replace(self, registry=registry)
        stored = registry.subject(self.subject, self.version, form=SERIALIZED)
        schema = schema_of_stored(stored, self.message)
        return replace(self, schema=schema, registry=registry, subject=None, version=None)

    @property
    def is_one_column(self) -> bool:
        """Whether the message is one column, and not one a field."""
        return self.column is not None or is_one_value(self._known().descriptor)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        return columns_ddl(self._known().descriptor, self.column)

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its columns are its own."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        own, registry = self._known(), self.registry
        reader = MessageReader(own, schema, is_one=self.is_one_column)
        if not (self.framed if self.framed is not None else registry is not None):
            return DecodedColumns(*_decoded(reader, payloads))

        def part_of(number: int) -> Part:
            if registry is None:
                return partial(_decoded, Unframed(reader, None, own.name))
            names = message_names(files_of_stored(registry.schema(number, form=SERIALIZED))[-1])
            return partial(_decoded, Unframed(reader, names, own.name))

        return decode_frames(payloads, schema, part_of, registry)

    def _known(self) -> MessageSchema:
        if self.subject is not None:
            return self.resolved()._known()
        assert isinstance(self.schema, MessageSchema)
        return self.schema


class MessageReader:
    """Reads messages of one schema into columns.

    Args:
        message: their schema.
        schema: the columns.
        is_one: whether the message is one column.
    """

    def __init__(self, message: MessageSchema, schema: pa.Schema, *, is_one: bool) -> None:
        self._parse = message.message_class().FromString
        kind = schema.field(0).type if is_one else pa.struct(list(schema))
        self._build = build_message(message.descriptor, kind)
        self._is_one = is_one

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`."""
        message: Any = self._parse(payload)
        if not message.IsInitialized():
            # Protobuf 2 has fields that are required.
            raise ValueError(f"the message lacks {', '.join(message.FindInitializationErrors())}")
        return message

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.rows.RowReader.columns`."""
        return columns_of(self._build(values), is_one=self._is_one)


class Unframed:
    """Reads messages behind their place in a schema.

    Args:
        reader: of the messages.
        names: the full names of the messages of the schema, by their places; ``None`` if they are not known.
        name: that of the messages to read.
    """

    def __init__(self, reader: MessageReader, names: Mapping[tuple[int, ...], str] | None, name: str) -> None:
        self._reader = reader
        self._names = names
        self._name = name
        self.columns = reader.columns

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`."""
        place, start = message_place(payload)
        if self._names is not None and (found := self._names.get(place)) != self._name:
            what = f"message {found}" if found else f"place {list(place)} of no message"
            raise ValueError(f"the payload is of the {what}, and not of {self._name}")
        return self._reader.read(payload[start:])


def _decoded(reader: RowReader, payloads: Column) -> tuple[list[Column], Column]:
    columns, errors = decode_rows(reader, payloads.to_pylist())
    return columns, pa.array(errors, pa.string())
