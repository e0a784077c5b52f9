"""Reads the schema of a Protobuf message from text, a descriptor set, a generated class or a registry."""

from __future__ import annotations

import base64
import binascii
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from spark_jobs.decoding.ddl import MAX_COLUMN_NAME_LENGTH
from spark_jobs.decoding.decoders import import_library, shortened
from spark_jobs.decoding.schema_limits import TYPE_WEIGHT, WeightBudget, cached_by_size, schema_use
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.client_config import environment
from stream_consumers.errors import SchemaMismatchError, SchemaRegistryError

OWN_FILE = "stream_assets/schema.proto"
PROTOBUF_FOLDER = "google/protobuf/"
MAX_FILE_NAME_LENGTH = 255
_COMPILE_SECONDS = 60.0
_COMPILE_CPU_SECONDS = 2
_MAX_PRINTED_BYTES = 64 << 10
# Each part begins with a letter, a digit or an underscore, so that no part is "." or ".." and no name is an option.
_FILE_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.+-]*/)*[A-Za-z0-9_][A-Za-z0-9_.+-]*\.proto")
# The packages with the descriptors of files that every schema may import.
_KNOWN = {
    "google/protobuf": "google.protobuf",
    "google/type": "google.type",
    "confluent": "confluent_kafka.schema_registry.confluent",
}
_KNOWN_NAME = re.compile(rf"({'|'.join(_KNOWN)})/((?:[a-z0-9_]+/)*[a-z0-9_]+)\.proto")
# The types that the key of a map does not have.
_OTHER_TYPES = {
    FieldDescriptor.TYPE_DOUBLE,
    FieldDescriptor.TYPE_FLOAT,
    FieldDescriptor.TYPE_GROUP,
    FieldDescriptor.TYPE_MESSAGE,
    FieldDescriptor.TYPE_BYTES,
    FieldDescriptor.TYPE_ENUM,
}
# Schemas are hostile input for the compiler. It imports nothing from other folders, and ends before it exhausts the
# memory or the disk of the machine. Some systems lack some of these limits.
_COMPILER = """
import resource, sys
seconds = int(sys.argv.pop(1))
for name, most in ("RLIMIT_CPU", seconds), ("RLIMIT_AS", 2 << 30), ("RLIMIT_FSIZE", 64 << 20), ("RLIMIT_CORE", 0):
    try:
        resource.setrlimit(getattr(resource, name), (most, most))
    except (AttributeError, OSError, ValueError):
        pass
sys.path.append(sys.argv.pop(1))
from grpc_tools import protoc
sys.exit(protoc.main(sys.argv))
"""


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """A message and all files that it needs; picklable.

    Args:
        name: the full name of the message.
        files: a serialized ``FileDescriptorSet``, each file after those that it imports.
    """

    name: str
    files: bytes = field(repr=False)

    @property
    def characters(self) -> int:
        """The size, for :func:`spark_jobs.decoding.schema_limits.cached_by_size`."""
        return len(self.files)

    def message_class(self) -> type[Message]:
        """Create a class for the message."""
        return _message_class(self)

    def reading_class(self) -> type[Message]:
        """Create a class to read the message with, in which closed enums are INT32, to keep numbers without a name."""
        return _reading_class(self)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the message."""
        found: Any = self.message_class().DESCRIPTOR
        assert isinstance(found, Descriptor)
        return found


@cached_by_size(lambda message: 0)
def _message_class(schema: MessageSchema) -> type[Message]:
    return class_in(descriptor_pb2.FileDescriptorSet.FromString(schema.files).file, schema.name)


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field is a list, or a map."""
    is_many = getattr(field, "is_repeated", None)
    # The attribute is new in Protobuf 6, where the label is deprecated.
    return bool(is_many) if is_many is not None else _label(field) == FieldDescriptor.LABEL_REPEATED


def is_required(field: FieldDescriptor) -> bool:
    """Return whether a field of Protobuf 2 must be there."""
    is_needed = getattr(field, "is_required", None)
    return bool(is_needed) if is_needed is not None else _label(field) == FieldDescriptor.LABEL_REQUIRED


def _label(field: Any) -> Any:
    return field.label


def is_map(field: FieldDescriptor) -> bool:
    """Return whether a field is a map."""
    return field.message_type is not None and _is_entry(field.message_type)


def _is_entry(message: Descriptor) -> bool:
    return bool(message.GetOptions().map_entry)


def _check_maps(message: Descriptor) -> None:
    """Refuse entries of maps that the compiler does not make, with which the library ends the process.

    Raises:
        SchemaMismatchError: an entry has other fields than a key and a value, or is used otherwise than for a map.
    """
    if _is_entry(message):
        fields = {(one.number, one.name): one.type for one in message.fields if not is_repeated(one)}
        is_plain = len(message.fields) == 2 and fields.keys() == {(1, "key"), (2, "value")}
        if not is_plain or fields[1, "key"] in _OTHER_TYPES or message.nested_types or message.is_extendable:
            raise _odd_map(message.full_name)
    _check_fields((*message.fields, *message.extensions), message)
    for nested in message.nested_types:
        _check_maps(nested)


def _check_fields(fields: Iterable[FieldDescriptor], message: Descriptor | None) -> None:
    for one in fields:
        if one.message_type is None or not _is_entry(one.message_type):
            continue
        is_own = message is not None and one.message_type.containing_type == message
        if not is_own or one.is_extension or one.type != one.TYPE_MESSAGE or not is_repeated(one):
            raise _odd_map(one.full_name)


def _odd_map(name: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"{shortened(name)} in the Protobuf schema is not a map as the compiler makes it",
        remedy="Declare it as map<…>, and compile the schema with protoc.",
    )


def class_in(files: Iterable[Any], name: str) -> type[Message]:
    """Create a class for a message of these files, each after those that it imports."""
    # Each class has its own pool, because a pool cannot have two versions of a file.
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
        added = pool.FindFileByName(file.name)
        for message in added.message_types_by_name.values():
            _check_maps(message)
        _check_fields(added.extensions_by_name.values(), None)
    found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    return found


@cached_by_size(lambda message: 0)
def _reading_class(schema: MessageSchema) -> type[Message]:
    pool = schema.descriptor.file.pool
    files = descriptor_pb2.FileDescriptorSet.FromString(schema.files).file
    closed = [
        enum
        for file in files
        for message in file.message_type
        for enum in _closed_fields(message, pool.FindFileByName(file.name).message_types_by_name[message.name])
    ]
    if not closed:
        return schema.message_class()
    for enum in closed:
        enum.type = enum.TYPE_INT32
        enum.ClearField("type_name")
        enum.ClearField("default_value")
    return class_in(files, schema.name)


def _closed_fields(message: Any, descriptor: Descriptor) -> Iterator[Any]:
    """Yield the fields of closed enums in a message and in the messages nested in it.

    Args:
        message: the ``DescriptorProto`` of the message, whose fields are yielded.
        descriptor: the descriptor of the message.
    """
    for own in message.field:
        kind = descriptor.fields_by_number[own.number].enum_type
        if kind is not None and kind.is_closed:
            yield own
    for nested in message.nested_type:
        yield from _closed_fields(nested, descriptor.nested_types_by_name[nested.name])


def schema_of_class(message: type[Message]) -> MessageSchema:
    """Return the schema of a generated class."""
    files: dict[str, Any] = {}

    def add(file: FileDescriptor) -> None:
        for needed in file.dependencies:
            add(needed)
        if file.name not in files:
            files[file.name] = _copied(file)

    descriptor: Any = message.DESCRIPTOR
    add(descriptor.file)
    return MessageSchema(descriptor.full_name, _serialized(files.values()))


def schema_of_text(text: str, message: str | None) -> MessageSchema:
    """Compile the text of a ``.proto`` file.

    Args:
        text: the text; it may import only Protobuf's own files.
        message: the full name of the message; the first message by default.

    Raises:
        SchemaMismatchError: the text cannot be compiled, or has no such message.
        MissingDependencyError: the compiler is not installed.
    """
    files = compiled({OWN_FILE: text}, OWN_FILE).file
    return MessageSchema(_chosen(message, message_names(files[-1]).values()), _serialized(files))


def schema_of_set(content: bytes, message: str | None) -> MessageSchema:
    """Read a ``FileDescriptorSet``, which ``protoc --include_imports --descriptor_set_out`` writes.

    Args:
        content: the content of the file.
        message: the full name of the message; the first message of the last file by default.

    Raises:
        SchemaMismatchError: the content is not such a set, or has no such message.
    """
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(content).file
        ordered = _ordered({file.name: file for file in files})
    except DecodeError as error:
        raise SchemaMismatchError(
            "the descriptor set cannot be read", remedy="Write it with: protoc --include_imports --descriptor_set_out."
        ) from error
    if not files:
        raise SchemaMismatchError("the descriptor set has no files", remedy="Use one with a message.")
    names = [name for file in (files[-1], *files[:-1]) for name in message_names(file).values()]
    return MessageSchema(_chosen(message, names), _serialized(ordered))


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files of a schema from a registry.

    Args:
        names: the names of the messages, see :func:`message_names`.
        files: a serialized ``FileDescriptorSet``, each file after those that it imports; the last one is the schema's.
    """

    names: Mapping[tuple[int, ...], str]
    files: bytes = field(repr=False)

    @property
    def weight(self) -> int:
        """The weight for :func:`spark_jobs.decoding.schema_limits.cached_by_size`."""
        return len(self.files) + len(self.names) * TYPE_WEIGHT


@cached_by_size(lambda found: found.weight)
def files_of_stored(stored: StoredSchema) -> StoredFiles:
    """Read the files of a schema from a registry.

    Raises:
        SchemaMismatchError: it is not a Protobuf schema, cannot be compiled, or is too large.
        MissingDependencyError: the registry returns only text, but the compiler is not installed.
    """
    stored.check_kind("PROTOBUF")
    files: dict[str, Any] = {}
    texts: dict[str, str] = {}
    with schema_use("Protobuf"):
        for name, reference in stored.references:
            check_file_name(name)
            # The registry must not replace Protobuf's own files, because some of their messages are read as values.
            if not name.startswith(PROTOBUF_FOLDER):
                _add_stored(name, reference.text, files, texts)
        _add_stored(OWN_FILE, stored.text, files, texts)
        if texts:
            # The compiler accepts files of both kinds.
            ordered = list(compiled(texts, OWN_FILE, known=files.values()).file)
        else:
            ordered = _ordered(files, last=OWN_FILE)
        *_, names = map(message_names, ordered)
        return StoredFiles(names, _serialized(ordered))


def schema_of_stored(stored: StoredSchema, message: str | None) -> MessageSchema:
    """Return the schema of a message from a registry.

    Args:
        stored: the schema.
        message: the full name of the message; the first message by default.

    Raises:
        SchemaMismatchError, MissingDependencyError: see :func:`files_of_stored`; or there is no such message.
    """
    found = files_of_stored(stored)
    return MessageSchema(_chosen(message, found.names.values()), found.files)


def message_names(file: Any) -> dict[tuple[int, ...], str]:
    """Return the full names of the messages of a file, by their indexes in the wire format.

    Raises:
        SchemaMismatchError: there are too many names, or one is too long. Nested messages repeat the outer names.
    """
    found: dict[tuple[int, ...], str] = {}
    budget = WeightBudget("Protobuf")
    for scope in (file.package, *(service.name for service in file.service)):
        check_name_length(scope)

    def add(messages: Iterable[Any], prefix: str, above: tuple[int, ...]) -> None:
        for place, message in enumerate(messages):
            name = f"{prefix}{message.name}"
            check_name_length(name)
            budget.spend(TYPE_WEIGHT + len(name))
            if not message.options.map_entry:
                place_of = (*above, place)
                found[place_of] = name
            add(message.nested_type, f"{name}.", (*above, place))

    add(file.message_type, f"{file.package}." if file.package else "", ())
    return found


def check_name_length(name: str) -> None:
    """Refuse a long name, which each type in it or each value may repeat.

    Raises:
        SchemaMismatchError: it has more than :data:`MAX_COLUMN_NAME_LENGTH` characters.
    """
    if len(name) > MAX_COLUMN_NAME_LENGTH:
        raise SchemaMismatchError(
            f"the Protobuf schema has a name of {len(name)} characters",
            remedy=f"Use names of at most {MAX_COLUMN_NAME_LENGTH}.",
        )


def compiled(texts: Mapping[str, str], name: str, *, known: Iterable[Any] = ()) -> Any:
    """Compile a file to a ``FileDescriptorSet`` of the files that it imports and, last, itself.

    Args:
        texts: the texts of files, by the names by which they are imported.
        name: the name of the file to compile.
        known: descriptors of further files that may be imported.

    Raises:
        SchemaMismatchError: the compiler rejects the file; the error has its reason.
        SchemaRegistryError: the compiler does not get enough time on this machine for now.
        MissingDependencyError: the compiler is not installed.
    """
    package = import_library("grpc_tools", extra="protobuf")
    # Some file systems do not distinguish upper and lower case.
    lowered = {file.lower() for file in texts}
    for file in texts:
        check_file_name(file)
        if any(str(folder).lower() in lowered for folder in PurePosixPath(file).parents):
            raise SchemaMismatchError(
                f"the Protobuf schema has the file {shortened(repr(file))} within another file", remedy="Rename it."
            )
    with tempfile.TemporaryDirectory(prefix="stream-assets-proto-") as folder, tempfile.TemporaryFile() as printed:
        root = Path(folder)
        for file, text in texts.items():
            path = root / "source" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "known").write_bytes(_serialized([*known, *_known_imports(texts.values())]))
        (root / "empty").mkdir()
        try:
            made = subprocess.run(  # noqa: S603 - the compiler that is installed with this Python
                [
                    sys.executable,
                    "-I",
                    "-c",
                    _COMPILER,
                    str(_COMPILE_CPU_SECONDS),
                    str(Path(package.__path__[0]).parent),
                    f"--proto_path={root / 'source'}",
                    f"--descriptor_set_in={root / 'known'}",
                    "--include_imports",
                    f"--descriptor_set_out={root / 'set'}",
                    name,
                ],
                cwd=root / "empty",
                # Some builds of Python find their libraries by it.
                env={name: value for name, value in environment().items() if name == "LD_LIBRARY_PATH"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A small schema can make the compiler print gigabytes, but no file may be so large.
                stderr=printed,
                timeout=_COMPILE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            # A schema that takes long reaches the limit of CPU time before.
            raise SchemaRegistryError(
                "this machine cannot compile the Protobuf schema in time for now",
                remedy="Check the load of the machine; nothing was lost, run again.",
                seconds=_COMPILE_SECONDS,
            ) from error
        if made.returncode:
            printed.seek(0)
            lines = printed.read(_MAX_PRINTED_BYTES).decode(errors="replace").splitlines()
            said = next((line for line in lines if "warning" not in line.lower()), "")
            said = said.removeprefix(f"{root}/source/")
            raise SchemaMismatchError(
                f"the Protobuf schema cannot be compiled: {shortened(said) or 'it takes too long'}",
                remedy="Correct it; protoc reports the same error.",
                exit_code=made.returncode,
            )
        return descriptor_pb2.FileDescriptorSet.FromString((root / "set").read_bytes())


def check_file_name(name: str) -> None:
    """Check that the name of a file is a plain relative path.

    Raises:
        SchemaMismatchError: it is not.

    Example:
        >>> check_file_name("shop/order.proto")
        >>> check_file_name("../order.proto")
        Traceback (most recent call last):
        stream_consumers.errors.SchemaMismatchError: the Protobuf schema refers to the file '../order.proto'. Call \
it by a relative path that ends in .proto, of letters, digits and _ . + -, of at most 255 characters.
    """
    if len(name) > MAX_FILE_NAME_LENGTH or not _FILE_NAME.fullmatch(name):
        raise SchemaMismatchError(
            f"the Protobuf schema refers to the file {shortened(repr(name))}",
            remedy="Call it by a relative path that ends in .proto, of letters, digits and _ . + -, of at most "
            f"{MAX_FILE_NAME_LENGTH} characters.",
        )


def _known_imports(texts: Iterable[str]) -> list[Any]:
    """Return the descriptors of files that these texts name and that every schema may import."""
    words = {word for text in texts for word in text.replace("'", '"').split('"')}
    found: dict[str, Any] = {}
    for word in words:
        _add_known(word, found)
    return list(_ordered(found))


def _add_known(name: str, files: dict[str, Any]) -> None:
    """Add a file that every schema may import, with its own imports; other names are ignored."""
    known = _KNOWN_NAME.fullmatch(name)
    if known is None or name in files:
        return
    folder, stem = known.groups()
    try:
        descriptor = import_module(f"{_KNOWN[folder]}.{stem.replace('/', '.')}_pb2").DESCRIPTOR
    except ImportError:
        return
    files[name] = _copied(descriptor)
    # Its name may differ there.
    files[name].name = name
    for needed in files[name].dependency:
        _add_known(needed, files)


def _add_stored(name: str, text: str, files: dict[str, Any], texts: dict[str, str]) -> None:
    """Add a file of a registry to the descriptors or to the texts."""
    try:
        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError, ValueError):
        texts[name] = text
        return
    file.name = name
    files[name] = file


def _ordered(files: Mapping[str, Any], last: str | None = None) -> list[Any]:
    """Sort files so that each is after those that it imports; files that every schema may import are added.

    Raises:
        SchemaMismatchError: an imported file is missing.
    """
    given = dict(files)
    done: dict[str, Any] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in done:
            return
        if name not in given:
            _add_known(name, given)
        if name not in given or name in above:
            raise SchemaMismatchError(
                f"the Protobuf schema lacks the file {name}",
                remedy="Use a descriptor set with all imports (protoc --include_imports); in a registry, a reference.",
            )
        for needed in given[name].dependency:
            add(needed, (*above, name))
        done[name] = given[name]

    for name in sorted(given, key=lambda name: name == last):
        add(name, ())
    return list(done.values())


def _copied(file: FileDescriptor) -> Any:
    copy = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(copy)
    return copy


def _serialized(files: Iterable[Any]) -> bytes:
    return descriptor_pb2.FileDescriptorSet(file=list(files)).SerializeToString(deterministic=True)


def _chosen(message: str | None, names: Iterable[str]) -> str:
    known = list(names)
    if message is None and known:
        return known[0]
    if message not in known:
        what = f"has no message {message!r}, but {', '.join(known)}" if known else "has no messages"
        raise SchemaMismatchError(f"the Protobuf schema {what}", remedy="Use the full name of a message.")
    return message
