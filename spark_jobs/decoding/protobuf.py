"""Payloads that are Protobuf messages, with a schema registry or with a schema of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from spark_jobs.decoding.ddl import WeightBudget, check_distinct, column_ddl, struct_ddl
from spark_jobs.decoding.decoders import UNNAMED, DecodedColumns
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.protobuf_fields import DOCUMENTS, Check, is_map, is_one_of, is_repeated, message_check, parsed
from spark_jobs.decoding.protobuf_files import (
    MessageSchema,
    files_of_stored,
    schema_of_class,
    schema_of_set,
    schema_of_stored,
    schema_of_text,
)
from spark_jobs.decoding.rows import columns_of, decode_rows
from spark_jobs.decoding.schema_decoder import SchemaDecoder, read_file, read_text, schema_use
from spark_jobs.decoding.schema_registry import SchemaRegistry
from spark_jobs.decoding.wire_format import Part, decode_frames, message_place
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from stream_consumers.options import check_name

Convert: TypeAlias = Callable[[Any], Any]
_NANOSECONDS = 1_000_000_000
_FIRST_SECOND, _LAST_SECOND = MIN_TIMESTAMP_MS // 1000, MAX_TIMESTAMP_MS // 1000
_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "INT",
    FieldDescriptor.CPPTYPE_INT64: "BIGINT",
    FieldDescriptor.CPPTYPE_UINT32: "BIGINT",
    FieldDescriptor.CPPTYPE_UINT64: "DECIMAL(20,0)",
    FieldDescriptor.CPPTYPE_DOUBLE: "DOUBLE",
    FieldDescriptor.CPPTYPE_FLOAT: "FLOAT",
    FieldDescriptor.CPPTYPE_BOOL: "BOOLEAN",
}
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}


def columns_ddl(message: Descriptor, column: str | None) -> str:
    """The columns of a message, as Spark DDL.

    Args:
        message: its descriptor.
        column: one column for all of it; ``None`` for a column a field.

    Raises:
        SchemaMismatchError: it contains itself, or has no columns.
    """
    tree = _Tree()
    if column is not None or is_one_value(message):
        return column_ddl(column or UNNAMED, tree.message(message).ddl)
    return ", ".join(column_ddl(name, kind) for name, kind, _ in tree.members(message, ()))


def is_one_value(message: Descriptor) -> bool:
    """Whether a message is a single value, like a Timestamp."""
    return is_one_of({_TIMESTAMP, *_WRAPPERS, *DOCUMENTS}, message)


@dataclass(frozen=True, slots=True)
class _Value:
    """How a value becomes one of a column.

    Args:
        ddl: the type of the column.
        convert: from the value to what Arrow takes for it; ``None`` if it takes the value as it is.
    """

    ddl: str
    convert: Convert | None = None


class _Tree:
    """Makes columns of messages."""

    def __init__(self) -> None:
        self._budget = WeightBudget("Protobuf")
        self._symbols: dict[str, dict[int, str]] = {}

    def members(self, message: Descriptor, above: tuple[str, ...]) -> list[tuple[str, str, Convert]]:
        """The fields of a message, each with its type and the function from the message to its value."""
        if message.full_name in above:
            raise SchemaMismatchError(
                f"the message {message.full_name} contains itself, and columns cannot",
                remedy="Read with a schema without that field; or keep the bytes with Raw().",
            )
        # Of messages without fields there is nothing to keep.
        fields = [field for field in message.fields if field.message_type is None or field.message_type.fields]
        if not fields:
            raise SchemaMismatchError(
                f"the message {message.full_name} has no fields", remedy="Read with a schema in which it has some."
            )
        check_distinct([field.name for field in fields], message.full_name)
        found = [(field, self._field(field, (*above, message.full_name))) for field in fields]
        return [(field.name, value.ddl, _of_message(field, value.convert)) for field, value in found]

    def message(self, message: Descriptor, above: tuple[str, ...] = ()) -> _Value:
        """A message as one value."""
        if is_one_of({_TIMESTAMP}, message):
            return _Value("TIMESTAMP", _moment)
        if is_one_of(DOCUMENTS, message):
            return _Value("STRING", _json)
        if is_one_of(_WRAPPERS, message):
            return _Value(self._value(message.fields_by_name["value"], above).ddl, attrgetter("value"))
        members = self.members(message, above)
        fields = [(name, read) for name, _, read in members]
        return _Value(
            struct_ddl([(name, kind) for name, kind, _ in members]),
            lambda value: {name: read(value) for name, read in fields},
        )

    def _field(self, field: FieldDescriptor, above: tuple[str, ...]) -> _Value:
        if is_map(field) and field.message_type is not None:
            key, value = (self._value(field.message_type.fields_by_name[name], above) for name in ("key", "value"))
            return _Value(f"MAP<{key.ddl}, {value.ddl}>", partial(_pairs, value.convert))
        found = self._value(field, above)
        return _Value(f"ARRAY<{found.ddl}>", partial(_items, found.convert)) if is_repeated(field) else found

    def _value(self, field: FieldDescriptor, above: tuple[str, ...]) -> _Value:
        with self._budget:
            if field.message_type is not None:
                return self.message(field.message_type, above)
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return _Value("BINARY" if field.type == FieldDescriptor.TYPE_BYTES else "STRING")
        if field.enum_type is None:
            return _Value(_SCALARS[field.cpp_type])
        # Fields of one type share its names, which may be many.
        enum = field.enum_type
        if enum.full_name not in self._symbols:
            self._symbols[enum.full_name] = {number: one.name for number, one in enum.values_by_number.items()}
        names = self._symbols[enum.full_name]
        # A number that is newer than the schema is no reason to lose the message.
        return _Value("STRING", lambda value: names.get(value) or str(value))


def _of_message(field: FieldDescriptor, convert: Convert | None) -> Convert:
    """The function from a message to what Arrow takes for one of its fields."""
    name, get = field.name, attrgetter(field.name)
    if convert is None:
        return (lambda message: get(message) if message.HasField(name) else None) if field.has_presence else get
    if field.has_presence:
        return lambda message: convert(get(message)) if message.HasField(name) else None
    return lambda message: convert(get(message))


def _items(convert: Convert | None, value: Any) -> list[Any]:
    return list(value) if convert is None else list(map(convert, value))


def _pairs(convert: Convert | None, value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if convert is None else [(key, convert(one)) for key, one in value.items()]


def _moment(value: Any) -> int:
    """Spark has microseconds: what is finer is cut off."""
    if _FIRST_SECOND <= value.seconds <= _LAST_SECOND and 0 <= value.nanos < _NANOSECONDS:
        return int(value.seconds * 1_000_000 + value.nanos // 1000)
    raise ValueError(f"a Timestamp of {value.seconds} s and {value.nanos} ns is not in the years 1 to 9999")


def _json(value: Message) -> str:
    return json.dumps(json_format.MessageToDict(value), ensure_ascii=False, separators=(",", ":"))


SERIALIZED = "serialized"


@dataclass(frozen=True, slots=True)
class Protobuf(SchemaDecoder):
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
    message: str | None = field(default=None, kw_only=True)
    column: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        SchemaDecoder.__post_init__(self)
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

    def _of_subject(self, registry: SchemaRegistry, subject: str) -> MessageSchema:
        return schema_of_stored(registry.subject(subject, self.version, form=SERIALIZED), self.message)

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
        if not self.is_framed:
            return DecodedColumns(*decode_rows(reader, payloads))

        def part_of(number: int) -> Part:
            if registry is None:
                return partial(decode_rows, Unframed(reader, None, own.name))
            found = files_of_stored(registry.schema(number, form=SERIALIZED))
            is_there = own.name in found.names.values()
            check = message_check(MessageSchema(own.name, found.files), own) if is_there else None
            return partial(decode_rows, Unframed(reader, found.names, own.name, check))

        return decode_frames(payloads, schema, part_of, registry)


class MessageReader:
    """Reads messages of one schema into columns.

    Args:
        message: their schema.
        schema: the columns.
        is_one: whether the message is one column.
    """

    def __init__(self, message: MessageSchema, schema: pa.Schema, *, is_one: bool) -> None:
        self._parse = message.reading_class().FromString
        self._kind = schema.field(0).type if is_one else pa.struct(list(schema))
        self._convert: Any = _Tree().message(message.descriptor).convert
        self._is_one = is_one

    def read(self, payload: bytes, check: Check | None = None) -> Any:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`.

        Args:
            payload: of the message.
            check: of what was read, before it becomes values of columns.
        """
        message: Any = parsed(self._parse, payload)
        if not message.IsInitialized():
            # Protobuf 2 has fields that are required.
            raise ValueError(f"the message lacks {', '.join(message.FindInitializationErrors())}")
        if check is not None:
            check(payload, message)
        return self._convert(message)

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.rows.RowReader.columns`."""
        return columns_of(pa.array(values, self._kind), is_one=self._is_one)


class Unframed:
    """Reads messages behind their place in a schema.

    Args:
        reader: of the messages.
        names: the full names of the messages of the schema, by their places; ``None`` if they are not known.
        name: that of the messages to read.
        check: of each message, if values of the schema that has written them may be none of the reader's.
    """

    def __init__(
        self,
        reader: MessageReader,
        names: Mapping[tuple[int, ...], str] | None,
        name: str,
        check: Check | None = None,
    ) -> None:
        self._reader = reader
        self._names = names
        self._name = name
        self._check = check
        self.columns = reader.columns

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`."""
        place, start = message_place(payload)
        if self._names is not None and (found := self._names.get(place)) != self._name:
            what = f"message {found}" if found else f"place {list(place)} of no message"
            raise ValueError(f"the payload is of the {what}, and not of {self._name}")
        return self._reader.read(payload[start:], self._check)
