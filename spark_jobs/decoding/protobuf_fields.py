"""Fields of Protobuf messages, and whether what another schema has written can be read as their values.

Protobuf reads a field by its number, whatever its type was when it was written: it drops the upper bits of a number,
all but the last value of a list, and a value that another type encodes differently.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import DecodeError, Message

from spark_jobs.decoding.limits import is_memory_short
from spark_jobs.decoding.protobuf_files import OF_PROTOBUF, MessageSchema
from spark_jobs.decoding.schema_cache import kept_by_size
from spark_jobs.decoding.schema_decoder import schema_use

Check: TypeAlias = Callable[[bytes, Message], None]
"""Compares a payload with the message that was read from it; raises ``ValueError`` if the values differ."""
# They contain themselves.
DOCUMENTS = {f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")}
# The numbers of the types that are written alike, as numbers of variable length: the first and the last one.
_NUMBERS = {
    FieldDescriptor.TYPE_BOOL: (0, 1),
    FieldDescriptor.TYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_TYPES = FieldDescriptorProto.DESCRIPTOR.enum_types_by_name["Type"]
# Bytes that are no text are no value of a text, and refused as such.
_ALIKE = {
    (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64),
    (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES),
    (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING),
}


def is_one_of(names: Set[str], message: Descriptor) -> bool:
    """Whether a message is one of Protobuf's own, and not one that another file calls like it."""
    return message.full_name in names and message.file.name.startswith(OF_PROTOBUF)


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field is a list, or a map."""
    is_many = getattr(field, "is_repeated", None)
    # The name is new in Protobuf 6, where the label is deprecated.
    return bool(is_many) if is_many is not None else _label(field) == FieldDescriptor.LABEL_REPEATED


def _label(field: Any) -> Any:
    return field.label


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def parsed(parse: Callable[[bytes], Message], payload: bytes) -> Message:
    """A payload as a message.

    Args:
        parse: the parser of its class.
        payload: of the message.

    Raises:
        DecodeError: it is damaged.
        MemoryError: it needs more memory than the process may take now.
    """
    try:
        return parse(payload)
    except DecodeError:
        # Protobuf raises the same for damaged bytes and for want of memory.
        if is_memory_short():
            raise MemoryError from None
        raise


@kept_by_size(lambda check: 0)
def message_check(writer: MessageSchema, reader: MessageSchema) -> Check | None:
    """The check of messages of one schema that are read with another one.

    Returns:
        ``None`` if every value that the writer's schema allows is one of the reader's.

    Raises:
        SchemaMismatchError: the writer's schema cannot be used.
    """
    if writer == reader:
        return None
    with schema_use("Protobuf"):
        found = _comparisons(writer.descriptor, reader.descriptor)
        parse = writer.reading_class().FromString

    def check(payload: bytes, message: Message) -> None:
        written = parsed(parse, payload)
        for one in found:
            one.check(written, message, "")

    return check if found else None


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A field whose value may be another one than was written.

    Args:
        written: the field in the writer's schema.
        read: the field in the reader's schema.
        within: what to compare in messages; ``None`` to compare the values themselves.
    """

    written: FieldDescriptor
    read: FieldDescriptor
    within: tuple[_Comparison, ...] | None

    def check(self, written: Any, read: Any, above: str) -> None:
        """Compare the field of two messages.

        Args:
            written: as the writer's schema reads it.
            read: as the reader's schema reads it.
            above: the path of the message, with a point behind it.

        Raises:
            ValueError: naming the field, if its values differ.
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
                f"field {path!r} was written as {_shown(self.written)}, and is another value as {_shown(self.read)}"
            )


def _comparisons(writer: Descriptor, reader: Descriptor) -> tuple[_Comparison, ...]:
    """The fields of a message that have to be compared."""
    pairs = [(writer.fields_by_number.get(field.number), field) for field in reader.fields]
    found = [_comparison(written, read) for written, read in pairs if written is not None]
    return tuple(one for one in found if one is not None)


def _comparison(written: FieldDescriptor, read: FieldDescriptor) -> _Comparison | None:
    """How to compare a field; ``None`` if each value that is written is one that is read."""
    is_exact = not _are_apart(written, read) and (is_repeated(read) or not is_repeated(written))
    if is_map(written) or is_map(read):
        is_exact = is_map(written) and is_map(read) and _is_exact(*(_part(field, "key") for field in (written, read)))
    own, other = (_part(field, "value") if is_map(field) else field for field in (written, read))
    if own.message_type is None or other.message_type is None or is_one_of(DOCUMENTS, other.message_type):
        return None if is_exact and _is_exact(own, other) else _Comparison(written, read, None)
    within = _comparisons(own.message_type, other.message_type)
    return None if is_exact and own.type == other.type and not within else _Comparison(written, read, within)


def _part(field: FieldDescriptor, name: str) -> FieldDescriptor:
    """The key or the value of a map."""
    assert field.message_type is not None
    return field.message_type.fields_by_name[name]


def _is_exact(written: FieldDescriptor, read: FieldDescriptor) -> bool:
    """Whether each value of one type is read as the same value of another one; of messages only documents can be."""
    if written.message_type is not None and read.message_type is not None:
        return is_one_of({read.message_type.full_name}, written.message_type)
    if written.type in _NUMBERS and read.type in _NUMBERS:
        (first, last), (least, most) = _NUMBERS[written.type], _NUMBERS[read.type]
        return least <= first and last <= most
    return written.type == read.type or (written.type, read.type) in _ALIKE


def _are_apart(written: FieldDescriptor, read: FieldDescriptor) -> bool:
    """Whether the writer may set several fields of which the reader keeps only the last, as they are one choice."""
    if read.containing_oneof is None:
        return False
    assert written.containing_type is not None
    fields = written.containing_type.fields_by_number
    others = [fields[field.number] for field in read.containing_oneof.fields if field.number in fields]
    choices = {field.containing_oneof.name if field.containing_oneof else "" for field in others}
    return len(others) > 1 and (len(choices) > 1 or "" in choices)


def _content(field: FieldDescriptor, message: Any) -> tuple[list[Any], list[Any]]:
    """The keys of a map in order, and the values of any field that is set."""
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
