"""The Spark columns that a Protobuf message is, and its values in them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence, Set
from operator import attrgetter
from typing import Any, TypeAlias

import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from spark_jobs.decoding.ddl import TypeBudget, check_distinct, column_ddl, struct_ddl
from spark_jobs.decoding.decoders import UNNAMED
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.protobuf_files import OF_PROTOBUF
from spark_jobs.decoding.rows import list_offsets
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS

Build: TypeAlias = Callable[[Sequence[Any]], Column]
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
    FieldDescriptor.CPPTYPE_ENUM: "STRING",
}
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
# They contain themselves, and are JSON.
_DOCUMENTS = {f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")}


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
        return column_ddl(column or UNNAMED, tree.message_type(message, ()))
    return ", ".join(column_ddl(name, kind) for name, kind in tree.members(message, ()))


def is_one_value(message: Descriptor) -> bool:
    """Whether a message is a single value, like a Timestamp."""
    return _is_one_of({_TIMESTAMP, *_WRAPPERS, *_DOCUMENTS}, message)


def _is_one_of(names: Set[str], message: Descriptor) -> bool:
    """Whether a message is one of Protobuf's own, and not one that another file calls like it."""
    return message.full_name in names and message.file.name.startswith(OF_PROTOBUF)


def _columns(message: Descriptor) -> list[FieldDescriptor]:
    """The fields that have columns, in the order of the schema: messages without fields have nothing to keep."""
    return [field for field in message.fields if field.message_type is None or field.message_type.fields]


class _Tree:
    """Makes types of messages."""

    def __init__(self) -> None:
        self._budget = TypeBudget("Protobuf")

    def members(self, message: Descriptor, above: tuple[str, ...]) -> list[tuple[str, str]]:
        """The fields of a message with their types."""
        if message.full_name in above:
            raise SchemaMismatchError(
                f"the message {message.full_name} contains itself, and columns cannot",
                remedy="Read with a schema without that field; or keep the bytes with Raw().",
            )
        fields = _columns(message)
        if not fields:
            raise SchemaMismatchError(
                f"the message {message.full_name} has no fields", remedy="Read with a schema in which it has some."
            )
        check_distinct([field.name for field in fields], message.full_name)
        return [(field.name, self._field_type(field, (*above, message.full_name))) for field in fields]

    def _field_type(self, field: FieldDescriptor, above: tuple[str, ...]) -> str:
        if is_map(field):
            key, value = _parts_of_map(field)
            return f"MAP<{self._value_type(key, above)}, {self._value_type(value, above)}>"
        kind = self._value_type(field, above)
        return f"ARRAY<{kind}>" if is_repeated(field) else kind

    def _value_type(self, field: FieldDescriptor, above: tuple[str, ...]) -> str:
        with self._budget:
            if field.message_type is not None:
                return self.message_type(field.message_type, above)
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return "BINARY" if field.type == FieldDescriptor.TYPE_BYTES else "STRING"
        return _SCALARS[field.cpp_type]

    def message_type(self, message: Descriptor, above: tuple[str, ...]) -> str:
        if _is_one_of({_TIMESTAMP}, message):
            return "TIMESTAMP"
        if _is_one_of(_DOCUMENTS, message):
            return "STRING"
        if _is_one_of(_WRAPPERS, message):
            return self._value_type(message.fields_by_name["value"], above)
        return struct_ddl(self.members(message, above))


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map, which is stored as a repeated message."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field is a list, or a map."""
    is_many = getattr(field, "is_repeated", None)
    # The name is new in Protobuf 6; the label is told of as deprecated there.
    return bool(is_many) if is_many is not None else _label(field) == FieldDescriptor.LABEL_REPEATED


def _label(field: Any) -> Any:
    return field.label


def _parts_of_map(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    entry = field.message_type
    assert entry is not None
    return entry.fields_by_name["key"], entry.fields_by_name["value"]


def build_message(message: Descriptor, kind: pa.DataType) -> Build:
    """How a column is made of messages; ``None`` among them is null.

    Args:
        message: their descriptor.
        kind: of the column.
    """
    if _is_one_of({_TIMESTAMP}, message):
        return lambda values: _moments(values, kind)
    if _is_one_of(_DOCUMENTS, message):
        return lambda values: pa.array([None if value is None else _json(value) for value in values], kind)
    if _is_one_of(_WRAPPERS, message):
        inner = _build_value(message.fields_by_name["value"], kind)
        return lambda values: inner([None if value is None else value.value for value in values])
    assert isinstance(kind, pa.StructType)
    builds = [_build_field(field, child.type) for field, child in zip(_columns(message), kind)]

    def build(values: Sequence[Any]) -> Column:
        mask = pa.array([value is None for value in values], pa.bool_()) if None in values else None
        return pa.StructArray.from_arrays([one(values) for one in builds], fields=list(kind), mask=mask)

    return build


def _build_field(field: FieldDescriptor, kind: pa.DataType) -> Build:
    """How a column is made of a field of messages."""
    name = field.name
    if is_map(field):
        return _build_map(field, kind)
    if is_repeated(field):
        return _build_list(field, kind)
    build, get = _build_value(field, kind), attrgetter(name)
    if field.has_presence:
        return lambda values: build(
            [get(value) if value is not None and value.HasField(name) else None for value in values]
        )
    return lambda values: build(
        [None if value is None else get(value) for value in values] if None in values else list(map(get, values))
    )


def _build_list(field: FieldDescriptor, kind: pa.DataType) -> Build:
    assert isinstance(kind, pa.ListType)
    items, get = _build_value(field, kind.value_type), attrgetter(field.name)

    def build(values: Sequence[Any]) -> Column:
        lists = [None if value is None else get(value) for value in values]
        flat = list(itertools.chain.from_iterable(filter(None, lists)))
        offsets: Any = list_offsets(lists)
        return pa.ListArray.from_arrays(offsets, items(flat), type=kind)

    return build


def _build_map(field: FieldDescriptor, kind: pa.DataType) -> Build:
    assert isinstance(kind, pa.MapType)
    key, value = _parts_of_map(field)
    keys, items = _build_value(key, kind.key_type), _build_value(value, kind.item_type)
    get = attrgetter(field.name)

    def build(values: Sequence[Any]) -> Column:
        maps = [None if value is None else get(value) for value in values]
        pairs = [pair for one in maps if one for pair in one.items()]
        offsets: Any = list_offsets(maps)
        held = items([item for _, item in pairs])
        made: Column = pa.MapArray.from_arrays(offsets, keys([key for key, _ in pairs]), held)
        return made if made.type == kind else made.cast(kind)

    return build


def _build_value(field: FieldDescriptor, kind: pa.DataType) -> Build:
    """How a column is made of the values of a field."""
    if field.message_type is not None:
        return build_message(field.message_type, kind)
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        # A number that is newer than the schema is no reason to lose the message.
        return lambda values: pa.array(
            [None if value is None else names.get(value, str(value)) for value in values], kind
        )
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
        return lambda values: pa.array(values, pa.uint64()).cast(kind)
    return lambda values: pa.array(values, kind)


def _moments(values: Sequence[Any], kind: pa.DataType) -> Column:
    """Spark has microseconds: what is finer is cut off."""
    micros: list[int | None] = []
    for value in values:
        if value is None:
            micros.append(None)
        elif _FIRST_SECOND <= value.seconds <= _LAST_SECOND and 0 <= value.nanos < _NANOSECONDS:
            micros.append(value.seconds * 1_000_000 + value.nanos // 1000)
        else:
            raise ValueError(f"a Timestamp of {value.seconds} s and {value.nanos} ns is not in the years 1 to 9999")
    return pa.array(micros, pa.int64()).cast(kind)


def _json(value: Message) -> str:
    return json.dumps(json_format.MessageToDict(value), ensure_ascii=False, separators=(",", ":"))
