"""Protobuf's files: what a message is, out of text, of a descriptor set, of a generated class or of a registry."""

from __future__ import annotations

import base64
import binascii
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.rows import reason
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError

OWN_FILE = "schema.proto"
_COMPILE_SECONDS = 60.0
# Where the descriptors of what everybody may import are.
_KNOWN = {
    "google/protobuf/": "google.protobuf.",
    "google/type/": "google.type.",
    "confluent/": "confluent_kafka.schema_registry.confluent.",
}


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """A message and all files that it needs; picklable.

    Args:
        name: the full name of the message.
        files: a serialized ``FileDescriptorSet``, each file behind those that it imports.
    """

    name: str
    files: bytes = field(repr=False)

    def message_class(self) -> type[Message]:
        """A class for it."""
        return _message_class(self)

    @property
    def descriptor(self) -> Descriptor:
        """That of the message."""
        found: Any = self.message_class().DESCRIPTOR
        assert isinstance(found, Descriptor)
        return found


@lru_cache(maxsize=64)
def _message_class(schema: MessageSchema) -> type[Message]:
    # A pool of its own: two versions of a file do not go into one.
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(schema.files).file:
        pool.Add(file)
    found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName(schema.name))
    return found


def schema_of_class(message: type[Message]) -> MessageSchema:
    """That of a generated class."""
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
    """That of the text of a ``.proto`` file.

    Args:
        text: of the file; what it imports is Protobuf's own.
        message: the full name; the first message by default.

    Raises:
        SchemaMismatchError: it cannot be compiled, or has no such message.
        MissingDependencyError: there is no compiler.
    """
    files = compiled({OWN_FILE: text}, OWN_FILE).file
    return MessageSchema(_chosen(message, message_names(files[-1]).values()), _serialized(files))


def schema_of_set(content: bytes, message: str | None) -> MessageSchema:
    """That of a ``FileDescriptorSet``, as ``protoc --include_imports --descriptor_set_out`` writes it.

    Args:
        content: of the file.
        message: the full name; the first message of the last file by default.

    Raises:
        SchemaMismatchError: it is no such set, or has no such message.
    """
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(content).file
        ordered = _ordered({file.name: file for file in files})
    except DecodeError as error:
        raise SchemaMismatchError(
            "the descriptor set cannot be read", remedy="Write it with: protoc --include_imports --descriptor_set_out."
        ) from error
    if not files:
        raise SchemaMismatchError("the descriptor set has no files", remedy="Give one with a message.")
    names = [name for file in (files[-1], *files[:-1]) for name in message_names(file).values()]
    return MessageSchema(_chosen(message, names), _serialized(ordered))


@lru_cache(maxsize=256)
def files_of_stored(stored: StoredSchema) -> tuple[Any, ...]:
    """The files of a schema of a registry, each behind those that it imports; the last one is its own.

    Raises:
        SchemaMismatchError: it is no schema of Protobuf, or cannot be compiled.
        MissingDependencyError: the registry gives text only, and there is no compiler.
    """
    if stored.kind != "PROTOBUF":
        raise SchemaMismatchError(
            f"a schema is {stored.kind}, and not PROTOBUF", remedy="Decode it with the decoder of its format."
        )
    files: dict[str, Any] = {}
    texts: dict[str, str] = {}
    _add_stored(OWN_FILE, stored, files, texts)
    if texts:
        # The compiler takes files of both kinds.
        return tuple(compiled(texts, OWN_FILE, known=files.values()).file)
    return tuple(_ordered(files, last=OWN_FILE))


def schema_of_stored(stored: StoredSchema, message: str | None) -> MessageSchema:
    """That of a schema of a registry.

    Args:
        stored: the schema.
        message: the full name; the first message by default.

    Raises:
        SchemaMismatchError, MissingDependencyError: see :func:`files_of_stored`; or it has no such message.
    """
    files = files_of_stored(stored)
    return MessageSchema(_chosen(message, message_names(files[-1]).values()), _serialized(files))


def message_names(file: Any) -> dict[tuple[int, ...], str]:
    """The full names of the messages of a file, by their places in it, as the wire format has them."""
    found: dict[tuple[int, ...], str] = {}

    def add(messages: Iterable[Any], prefix: str, above: tuple[int, ...]) -> None:
        for place, message in enumerate(messages):
            name = f"{prefix}{message.name}"
            if not message.options.map_entry:
                place_of = (*above, place)
                found[place_of] = name
            add(message.nested_type, f"{name}.", (*above, place))

    add(file.message_type, f"{file.package}." if file.package else "", ())
    return found


def compiled(texts: Mapping[str, str], name: str, *, known: Iterable[Any] = ()) -> Any:
    """The ``FileDescriptorSet`` of a file and of what it imports, which stands before it.

    Args:
        texts: of files, by the names by which they are imported.
        name: of the file.
        known: descriptors of more files that may be imported.

    Raises:
        SchemaMismatchError: the compiler refuses it; says why.
        MissingDependencyError: there is no compiler.
    """
    imported("grpc_tools", extra="protobuf")
    with tempfile.TemporaryDirectory(prefix="stream-assets-proto-") as folder:
        root = Path(folder)
        for file, text in texts.items():
            path = (root / "source" / file).resolve()
            if not path.is_relative_to(root.resolve()):
                raise SchemaMismatchError(f"the schema imports {file!r}", remedy="Import files by their names.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "known").write_bytes(_serialized([*known, *_known_imports(texts.values())]))
        made = subprocess.run(  # noqa: S603 - the compiler that is installed with this Python
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"--proto_path={root / 'source'}",
                f"--descriptor_set_in={root / 'known'}",
                "--include_imports",
                f"--descriptor_set_out={root / 'set'}",
                name,
            ],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
        if made.returncode:
            said = next((line for line in made.stderr.splitlines() if "warning" not in line), "")
            raise SchemaMismatchError(
                f"the schema of Protobuf cannot be compiled: {said}", remedy="Correct it; protoc says the same."
            )
        return descriptor_pb2.FileDescriptorSet.FromString((root / "set").read_bytes())


def _known_imports(texts: Iterable[str]) -> list[Any]:
    """The files that everybody may import, of those that these texts name."""
    words = {word for text in texts for word in text.replace("'", '"').split('"')}
    found: dict[str, Any] = {}
    for word in words:
        _add_known(word, found)
    return list(_ordered(found))


def _add_known(name: str, files: dict[str, Any]) -> None:
    """A file that everybody may import, with what it imports itself; nothing if it is none."""
    folder = next((folder for folder in _KNOWN if name.startswith(folder)), None)
    if folder is None or not name.endswith(".proto") or name in files:
        return
    module = name.removeprefix(folder).removesuffix(".proto").replace("/", ".")
    try:
        descriptor = import_module(f"{_KNOWN[folder]}{module}_pb2").DESCRIPTOR
    except ImportError:
        return
    files[name] = _copied(descriptor)
    # It may be called otherwise there.
    files[name].name = name
    for needed in files[name].dependency:
        _add_known(needed, files)


def _add_stored(name: str, stored: StoredSchema, files: dict[str, Any], texts: dict[str, str]) -> None:
    for other, reference in stored.references:
        if other not in files and other not in texts:
            _add_stored(other, reference, files, texts)
    try:
        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(stored.text, validate=True))
    except (binascii.Error, DecodeError, ValueError):
        texts[name] = stored.text
        return
    file.name = name
    files[name] = file


def _ordered(files: Mapping[str, Any], last: str | None = None) -> list[Any]:
    """Each file behind those that it imports; those that everybody may import are added.

    Raises:
        SchemaMismatchError: one of them is not there.
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
                f"the schema of Protobuf lacks the file {name}",
                remedy="Give a descriptor set with all imports (protoc --include_imports); in a registry, a reference.",
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
        told = f"has no message {message!r}, but {', '.join(known)}" if known else "has no messages"
        raise SchemaMismatchError(f"the schema of Protobuf {told}", remedy="Give the full name of one of them.")
    return message


def check_files(schema: MessageSchema) -> MessageSchema:
    """Refuse files that do not fit together.

    Raises:
        SchemaMismatchError: saying why.
    """
    try:
        schema.message_class()
    except (TypeError, KeyError) as error:
        raise SchemaMismatchError(
            f"the files of {schema.name} do not fit together: {reason(error)}",
            remedy="Give a descriptor set with all imports (protoc --include_imports).",
        ) from error
    return schema
