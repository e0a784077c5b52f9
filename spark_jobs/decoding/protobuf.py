"""``Protobuf``: decodes Protobuf messages, with a schema registry or a given schema.

Protobuf reads a field by its number, even if it was written with another type: it drops the upper bits of a number, all
but the last value of a list, and a value that another type encodes differently. So messages of another schema are also
read with the fields of that schema that may differ, and the values are compared (:func:`message_check`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError, Message

from spark_jobs.decoding.ddl import check_distinct, column_ddl, struct_ddl
from spark_jobs.decoding.decoders import UNNAMED, Column, DecodedColumns, columns_of, decode_rows
from spark_jobs.decoding.isolated_process import is_memory_short
from spark_jobs.decoding.protobuf_schema import (
    PROTOBUF_FOLDER,
    MessageSchema,
    check_name_length,
    class_in,
    files_of_stored,
    is_map,
    is_repeated,
    is_required,
    schema_of_class,
    schema_of_set,
    schema_of_stored,
    schema_of_text,
)
from spark_jobs.decoding.schema_decoder import BodyDecoder, SchemaDecoder, decode_frames, read_file, read_text
from spark_jobs.decoding.schema_limits import WeightBudget, cached_by_size, schema_use
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from stream_consumers.options import check_name

Convert: TypeAlias = Callable[[Any], Any]
MAX_MESSAGE_DEPTH = 100
"""The deepest nesting of a message in other messages of its schema."""
MAX_NUMBER_BITS = 35
"""The longest number in the indexes of a message, in bits."""
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
Check: TypeAlias = Callable[[bytes, Message], None]
"""Compares a payload with the message that was read from it, and raises ``ValueError`` if the values differ."""
# Types of Protobuf that contain themselves.
DOCUMENTS = {f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")}
# The types that are written as numbers of variable length, with their smallest and largest numbers.
_NUMBERS = {
    FieldDescriptor.TYPE_BOOL: (0, 1),
    FieldDescriptor.TYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_TYPES = FieldDescriptorProto.DESCRIPTOR.enum_types_by_name["Type"]
# Types that are read as the same value; Protobuf rejects bytes that are not UTF-8 as text.
_ALIKE = {
    (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64),
    (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES),
    (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING),
}


def columns_ddl(message: Descriptor, column: str | None) -> str:
    """Return the columns of a message, as Spark DDL.

    Args:
        message: the descriptor of the message.
        column: one column for the whole message; ``None`` for a column for each field.

    Raises:
        SchemaMismatchError: the message contains itself, or has no columns.
    """
    tree = _TypeBuilder()
    if column is not None or is_one_value(message):
        return column_ddl(column or UNNAMED, tree.message(message).ddl)
    return ", ".join(column_ddl(name, kind) for name, kind, _ in tree.members(message, ()))


def is_one_value(message: Descriptor) -> bool:
    """Return whether a message represents a single value, like a Timestamp."""
    return is_builtin_message({_TIMESTAMP, *_WRAPPERS, *DOCUMENTS}, message)


@dataclass(frozen=True, slots=True)
class _Value:
    """The type of a column and the conversion of its values.

    Args:
        ddl: the type of the column.
        convert: converts the value to one that Arrow accepts; ``None`` if Arrow accepts the unchanged value.
    """

    ddl: str
    convert: Convert | None = None


class _TypeBuilder:
    """Converts message types to columns."""

    def __init__(self) -> None:
        self._budget = WeightBudget("Protobuf")
        self._symbols: dict[str, dict[int, str]] = {}

    def members(self, message: Descriptor, above: tuple[str, ...]) -> list[tuple[str, str, Convert]]:
        """Return the fields of a message, each with its type and the function that gets its value from the message."""
        if message.full_name in above:
            raise SchemaMismatchError(
                f"the message {message.full_name} contains itself, but columns cannot",
                remedy="Read with a schema without that field; or keep the bytes with Raw().",
            )
        # A message without fields has no value to keep.
        fields = [field for field in message.fields if field.message_type is None or field.message_type.fields]
        if not fields:
            raise SchemaMismatchError(
                f"the message {message.full_name} has no fields", remedy="Read with a schema in which it has some."
            )
        check_distinct([field.name for field in fields], message.full_name)
        found = [(field, self._field(field, (*above, message.full_name))) for field in fields]
        return [(field.name, value.ddl, _of_message(field, value.convert)) for field, value in found]

    def message(self, message: Descriptor, above: tuple[str, ...] = ()) -> _Value:
        """Return the column for a message as one value."""
        if is_builtin_message({_TIMESTAMP}, message):
            return _Value("TIMESTAMP", _moment)
        if is_builtin_message(DOCUMENTS, message):
            return _Value("STRING", _json)
        if is_builtin_message(_WRAPPERS, message):
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
        # Fields of one type share its names, which may be numerous.
        enum = field.enum_type
        if enum.full_name not in self._symbols:
            self._symbols[enum.full_name] = {number: one.name for number, one in enum.values_by_number.items()}
            for name in self._symbols[enum.full_name].values():
                check_name_length(name)
        names = self._symbols[enum.full_name]
        # An enum number without a name in the schema must not make the message a dead letter.
        return _Value("STRING", lambda value: names.get(value) or str(value))


def _of_message(field: FieldDescriptor, convert: Convert | None) -> Convert:
    """Return the function that gets a field of a message as a value that Arrow accepts."""
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
    """Convert a Timestamp to microseconds, the precision of Spark; the rest is cut off."""
    if _FIRST_SECOND <= value.seconds <= _LAST_SECOND and 0 <= value.nanos < _NANOSECONDS:
        return int(value.seconds * 1_000_000 + value.nanos // 1000)
    raise ValueError(f"a Timestamp of {value.seconds} s and {value.nanos} ns is not in the years 1 to 9999")


def _json(value: Message) -> str:
    return json.dumps(json_format.MessageToDict(value), ensure_ascii=False, separators=(",", ":"))


SERIALIZED = "serialized"


@dataclass(frozen=True, slots=True)
class Protobuf(SchemaDecoder):
    """Decodes Protobuf messages of one type into columns for its fields.

    Fields are identified by their numbers: fields that the schema lacks are ignored, and fields that were not written
    are null, or the default if Protobuf does not record the difference. With a registry each payload begins with the id
    of a schema and the indexes of the message in it. A payload that is damaged, of another message type, or with an
    unknown id becomes a dead letter. A tombstone becomes a row of nulls.

    The types of the columns are in docs/decode-messages.md.

    Args:
        schema: a generated class, or the text of a ``.proto`` file, which is compiled immediately.
        schema_file: the path of a ``.proto`` file, or of a descriptor set (``protoc --include_imports
            --descriptor_set_out``), which is read immediately.
        registry: the registry with the schemas.
        subject: the subject whose schema is used, looked up for each batch, like ``orders-value``.
        version: the version of the subject; the newest by default.
        message: the full name of the message, like ``shop.Order``; the first one of the schema by default.
        framed: whether payloads begin with a schema id; by default they do with a registry.
        column: one STRUCT for the whole message; by default there is a column for each field.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: the arguments contradict each other.
        SchemaMismatchError: the schema cannot be used, or has no columns in Spark.
        MissingDependencyError: a ``.proto`` file is given, but the compiler is not installed.

    Example:
        >>> from google.protobuf.duration_pb2 import Duration
        >>> Protobuf(Duration).ddl()
        '`seconds` BIGINT, `nanos` INT'
    """

    form: ClassVar[str] = "Protobuf"
    schema: type[Message] | str | MessageSchema | None = None
    message: str | None = field(default=None, kw_only=True)
    column: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("column", "message"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        SchemaDecoder.__post_init__(self)

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
            f"schema={self.schema!r} is not a Protobuf schema",
            remedy="Use a generated class, or the text of a .proto file.",
        )

    def _of_subject(self, registry: SchemaRegistry, subject: str) -> MessageSchema:
        return schema_of_stored(registry.subject(subject, self.version, form=SERIALIZED), self.message)

    @property
    def is_one_column(self) -> bool:
        """Whether the whole message is one column, instead of one for each field."""
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

        def decoder_of(number: int) -> BodyDecoder:
            if registry is None:
                return partial(decode_rows, IndexedMessageReader(reader, None, own.name))
            found = files_of_stored(registry.schema(number, form=SERIALIZED))
            is_there = own.name in found.names.values()
            check = message_check(MessageSchema(own.name, found.files), own) if is_there else None
            return partial(decode_rows, IndexedMessageReader(reader, found.names, own.name, check))

        return decode_frames(payloads, schema, decoder_of, registry)


class MessageReader:
    """Reads messages of one schema into columns.

    Args:
        message: the schema of the messages.
        schema: the columns.
        is_one: whether the whole message is one column.
    """

    def __init__(self, message: MessageSchema, schema: pa.Schema, *, is_one: bool) -> None:
        self._parse = message.reading_class().FromString
        self._kind = schema.field(0).type if is_one else pa.struct(list(schema))
        self._convert: Any = _TypeBuilder().message(message.descriptor).convert
        self._is_one = is_one

    def read(self, payload: bytes, check: Check | None = None) -> Any:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.read`.

        Args:
            payload: the bytes of the message.
            check: checks the message before it is converted.
        """
        message: Any = parsed(self._parse, payload)
        if not message.IsInitialized():
            raise ValueError(f"the message lacks {', '.join(dict.fromkeys(_missing(message)))}")
        if check is not None:
            check(payload, message)
        return self._convert(message)

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.columns`."""
        return columns_of(pa.array(values, self._kind), is_one=self._is_one)


class IndexedMessageReader:
    """Reads payloads that begin with the indexes of the message in a schema.

    Args:
        reader: reads the messages.
        names: the full names of the messages of the schema by their indexes; ``None`` if they are unknown.
        name: the full name of the messages to read.
        check: checks each message, if the reader's schema may read other values than were written.
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
        """See :meth:`spark_jobs.decoding.decoders.RowReader.read`."""
        place, start = message_indexes(payload)
        if self._names is not None and (found := self._names.get(place)) != self._name:
            what = f"the message {found}" if found else f"an unknown message at {list(place)}"
            raise ValueError(f"the payload is of {what}, not of {self._name}")
        return self._reader.read(payload[start:], self._check)


def message_indexes(payload: bytes) -> tuple[tuple[int, ...], int]:
    r"""Read the indexes of a message in its schema; return them and the start of the message.

    They are the indexes of the message and those around it, outermost first. They are written as their count and the
    indexes; a single 0 is the first message.

    Raises:
        ValueError: the payload does not begin with indexes.

    Example:
        >>> message_indexes(b"\0rest"), message_indexes(b"\4\2\0rest")
        (((0,), 1), ((1, 0), 3))
    """
    count, place = _number(payload, 0)
    if count == 0:
        return (0,), place
    if not 0 < count <= MAX_MESSAGE_DEPTH:
        raise ValueError(f"the number of message indexes is {count}, not from 0 to {MAX_MESSAGE_DEPTH}")
    numbers = []
    for _ in range(count):
        number, place = _number(payload, place)
        numbers.append(number)
    return tuple(numbers), place


def _number(payload: bytes, place: int) -> tuple[int, int]:
    """Read a number of variable length, and return it and the place after it."""
    number = shift = 0
    while place < len(payload) and shift < MAX_NUMBER_BITS:
        byte = payload[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), place
    raise ValueError("the payload has no message indexes after its schema id")


def is_builtin_message(names: Set[str], message: Descriptor) -> bool:
    """Return whether a message is one of Protobuf's own, and not of the same name in another file."""
    return message.full_name in names and message.file.name.startswith(PROTOBUF_FOLDER)


def parsed(parse: Callable[[bytes], Message], payload: bytes) -> Message:
    """Parse a payload.

    Args:
        parse: the parser of the message class.
        payload: the bytes of the message.

    Raises:
        DecodeError: the payload is damaged.
        MemoryError: parsing needs more memory than the process may use.
    """
    try:
        return parse(payload)
    except DecodeError:
        # Protobuf raises the same error for damaged bytes and for a lack of memory.
        if is_memory_short():
            raise MemoryError from None
        raise


@cached_by_size(lambda check: 0)
def message_check(writer: MessageSchema, reader: MessageSchema) -> Check | None:
    """Return the check for messages of one schema that are read with another one.

    Returns:
        ``None`` if the reader's schema reads every value that the writer's schema allows as the same value.

    Raises:
        SchemaMismatchError: the writer's schema cannot be used.
    """
    if writer == reader:
        return None
    with schema_use("Protobuf"):
        found = _comparisons(writer.descriptor, reader.descriptor)
        if not found:
            return None
        parse = _compared_class(found).FromString

    def check(payload: bytes, message: Message) -> None:
        written = parsed(parse, payload)
        for one in found:
            one.check(written, message, "")

    return check


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A field that may be read as another value than was written.

    Args:
        written: the field in the writer's schema.
        read: the field in the reader's schema.
        within: the fields to compare in messages; ``None`` to compare the values themselves.
    """

    written: FieldDescriptor
    read: FieldDescriptor
    within: tuple[_Comparison, ...] | None

    def check(self, written: Any, read: Any, above: str) -> None:
        """Compare the field of two messages.

        Args:
            written: the message that the writer's schema reads.
            read: the message that the reader's schema reads.
            above: the path of the message, followed by a point.

        Raises:
            ValueError: the values differ; it names the field.
        """
        path = f"{above}{self.read.name}"
        keys, values = _content(self.written, written)
        keys_read, values_read = _content(self.read, read)
        if values and not (values_read or is_repeated(self.read) or self.read.has_presence):
            values_read = [self.read.default_value]
        is_same = keys == keys_read and len(values) == len(values_read)
        if is_same and self.within is not None:
            for pair in zip(values, values_read):
                for one in self.within:
                    one.check(*pair, f"{path}.")
        elif not is_same or list(map(_plain, values)) != list(map(_plain, values_read)):
            raise ValueError(
                f"field {path!r} was written as {_shown(self.written)}, but has another value as {_shown(self.read)}"
            )


def _compared_class(comparisons: Sequence[_Comparison]) -> type[Message]:
    """Create a class that reads only the fields to compare from messages of a writer.

    Protobuf allocates all fields of a nested message even if it has no bytes, and a writer's schema may have any number
    of fields. A message at several places gets a type for each, which has only the fields to compare there.
    """
    # Protobuf 2, the default, reads all that the other editions write.
    file = FileDescriptorProto(name="stream_assets/compared.proto")
    return class_in([file], _add_message(file, comparisons))


def _add_message(file: FileDescriptorProto, comparisons: Sequence[_Comparison]) -> str:
    message = file.message_type.add(name=f"M{len(file.message_type)}")
    choices = {choice.name: choice for one in comparisons if (choice := one.written.containing_oneof) is not None}
    # Each member of a oneof removes the others.
    fields: dict[int, tuple[FieldDescriptor, Sequence[_Comparison]]] = {}
    fields |= {member.number: (member, ()) for choice in choices.values() for member in choice.fields}
    fields |= {one.written.number: (one.written, one.within or ()) for one in comparisons}
    places = {name: place for place, name in enumerate(choices)}
    for name in places:
        message.oneof_decl.add(name=name)
    for written, within in fields.values():
        made = _add_field(file, message, written, within)
        if written.containing_oneof is not None:
            made.oneof_index = places[written.containing_oneof.name]
    return message.name


def _add_field(
    file: FileDescriptorProto, message: DescriptorProto, field: FieldDescriptor, within: Sequence[_Comparison]
) -> Any:
    made: Any = message.field.add(name=field.name, number=field.number, json_name=field.json_name)
    made.label = made.LABEL_REPEATED if is_repeated(field) else made.LABEL_OPTIONAL
    # As in MessageSchema.reading_class.
    made.type = made.TYPE_INT32 if field.enum_type is not None else field.type
    if is_map(field):
        entry = message.nested_type.add(name=f"Entry{len(message.nested_type)}")
        entry.options.map_entry = True
        _add_field(file, entry, _part(field, "key"), ())
        _add_field(file, entry, _part(field, "value"), within)
        made.type_name = f".{message.name}.{entry.name}"
    elif field.message_type is not None:
        made.type_name = f".{_add_message(file, within)}"
    return made


def _missing(message: Any, above: str = "") -> Iterator[str]:
    """Yield the paths of the required fields of Protobuf 2 that are missing, without the keys of maps.

    The library's own search ends the process if a key is no Unicode.
    """
    for own in message.DESCRIPTOR.fields:
        if is_required(own) and not message.HasField(own.name):
            yield f"{above}{own.name}"
    for own, value in message.ListFields():
        if is_map(own):
            parts = value.values() if _part(own, "value").message_type is not None else ()
        elif own.message_type is not None:
            parts = value if is_repeated(own) else (value,)
        else:
            continue
        for part in parts:
            yield from _missing(part, f"{above}{own.name}{'[]' if is_repeated(own) else ''}.")


def _comparisons(writer: Descriptor, reader: Descriptor) -> tuple[_Comparison, ...]:
    """Return the fields of a message that have to be compared."""
    pairs = [(writer.fields_by_number.get(field.number), field) for field in reader.fields]
    apart = {one.name for one in reader.oneofs if _is_apart(writer, one)}
    found = [
        _comparison(written, read, is_apart=read.containing_oneof is not None and read.containing_oneof.name in apart)
        for written, read in pairs
        if written is not None
    ]
    return tuple(one for one in found if one is not None)


def _comparison(written: FieldDescriptor, read: FieldDescriptor, *, is_apart: bool) -> _Comparison | None:
    """Return the comparison of a field; ``None`` if each written value is read as the same value."""
    is_exact = not is_apart and (is_repeated(read) or not is_repeated(written))
    if is_map(written) or is_map(read):
        is_exact = is_map(written) and is_map(read) and _is_exact(*(_part(field, "key") for field in (written, read)))
    own, other = (_part(field, "value") if is_map(field) else field for field in (written, read))
    if own.message_type is None or other.message_type is None or is_builtin_message(DOCUMENTS, other.message_type):
        return None if is_exact and _is_exact(own, other) else _Comparison(written, read, None)
    within = _comparisons(own.message_type, other.message_type)
    return None if is_exact and own.type == other.type and not within else _Comparison(written, read, within)


def _part(field: FieldDescriptor, name: str) -> FieldDescriptor:
    """Return the key or the value of a map."""
    assert field.message_type is not None
    return field.message_type.fields_by_name[name]


def _is_exact(written: FieldDescriptor, read: FieldDescriptor) -> bool:
    """Return whether each value of one type is read as the same value of another; for messages only documents."""
    if written.message_type is not None and read.message_type is not None:
        return is_builtin_message({read.message_type.full_name}, written.message_type)
    if written.type in _NUMBERS and read.type in _NUMBERS:
        (first, last), (least, most) = _NUMBERS[written.type], _NUMBERS[read.type]
        return least <= first and last <= most
    return written.type == read.type or (written.type, read.type) in _ALIKE


def _is_apart(writer: Descriptor, oneof: OneofDescriptor) -> bool:
    """Return whether the writer may set several fields of one oneof of the reader, which keeps only the last."""
    fields = writer.fields_by_number
    others = [fields[field.number] for field in oneof.fields if field.number in fields]
    choices = {field.containing_oneof.name if field.containing_oneof else "" for field in others}
    return len(others) > 1 and (len(choices) > 1 or "" in choices)


def _content(field: FieldDescriptor, message: Any) -> tuple[list[Any], list[Any]]:
    """Return the sorted keys of a map, and the values of a field that is set."""
    value = getattr(message, field.name)
    if is_map(field):
        keys = sorted(value)
        return keys, [value[key] for key in keys]
    if is_repeated(field):
        return [], list(value)
    is_set = message.HasField(field.name) if field.has_presence else value != field.default_value
    return [], [value] if is_set else []


def _plain(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _shown(field: FieldDescriptor) -> str:
    if is_map(field):
        return "map"
    kind = _TYPES.values_by_number[field.type].name.removeprefix("TYPE_").lower()
    return f"repeated {kind}" if is_repeated(field) else kind
