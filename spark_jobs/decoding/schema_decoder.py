"""What decoders have in common whose schema is in the program, in a file, or in a registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from spark_jobs.decoding.decoders import Headers, Key
from spark_jobs.decoding.rows import reason
from spark_jobs.decoding.schema_registry import SchemaRegistry, StoredSchema, check_subject
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError, StreamAssetsError
from stream_consumers.options import check_switch

DEEPEST_JSON = 256


def check_sources(**sources: object) -> None:
    """Refuse none, and more than one, of the places where a schema may be.

    Args:
        **sources: by the name of the argument; ``None`` if it was not given.

    Raises:
        InvalidOptionError: naming them.

    Example:
        >>> check_sources(schema=None, subject="orders-value")
        >>> check_sources(schema=None, subject=None)
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: no schema is given. Give one of: schema, subject.
    """
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} are given" if given else "no schema is given"
        raise InvalidOptionError(what, remedy=f"Give one of: {', '.join(sources)}.")


def read_file(path: str | Path) -> bytes:
    """What is in a file.

    Raises:
        InvalidOptionError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidOptionError(
            f"the schema file {path} cannot be read: {error.strerror}", remedy="Check the path, and its rights."
        ) from error


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        InvalidOptionError: it cannot be read, or is no text.
    """
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidOptionError(f"the schema file {path} is no text", remedy="Give one in UTF-8.") from error


def given_schema(form: str, schema: object, file: str | Path | None) -> StoredSchema | None:
    """A schema that is JSON, as text or as what that is in Python, or in a file; ``None`` if neither is given.

    Args:
        form: what kind of schema it is, as registries call it.
        schema: the schema; one that is stored already stays what it is.
        file: the path of a file with it, instead.

    Raises:
        InvalidOptionError: the file cannot be read.
    """
    given = schema if file is None else read_text(file)
    if given is None or isinstance(given, StoredSchema):
        return given
    return StoredSchema(form, given if isinstance(given, str) else json.dumps(given))


@contextmanager
def schema_use(form: str) -> Iterator[None]:
    """Report whatever a schema makes our code or a library raise as a schema that cannot be used.

    A message chooses its schema by an id, so that anything else would fail the run at each try.

    Args:
        form: of the schema, for the error.

    Raises:
        SchemaMismatchError: with the reason.
        MemoryError: as it comes, since it depends on the rest of the block.

    Example:
        >>> with schema_use("Avro"):
        ...     {}["name"]
        Traceback (most recent call last):
        stream_consumers.errors.SchemaMismatchError: the Avro schema cannot be used: KeyError: 'name'. Correct it, or \
read with another one.
    """
    try:
        yield
    except (StreamAssetsError, MemoryError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {reason(error)}"
        raise SchemaMismatchError(
            f"the {form} schema cannot be used: {why}", remedy="Correct it, or read with another one."
        ) from error


def schema_document(text: str) -> Any:
    """The document of a schema that is JSON.

    Raises:
        ValueError: it is no JSON, or is nested deeper than :data:`DEEPEST_JSON`.

    Example:
        >>> schema_document('{"type": "long"}')
        {'type': 'long'}
    """
    document = json.loads(text)
    level = [document]
    for _ in range(DEEPEST_JSON):
        level = parts_of_document(level)
        if not level:
            return document
    raise ValueError(f"it is nested deeper than {DEEPEST_JSON} levels")


def parts_of_document(level: list[Any]) -> list[Any]:
    """What is directly within some parts of a document."""
    return [part for one in level for part in _parts(one)]


def _parts(document: Any) -> list[Any]:
    if isinstance(document, dict):
        return list(document.values())
    return document if isinstance(document, list) else []


Own = TypeVar("Own", bound="SchemaDecoder")


@dataclass(frozen=True, slots=True)
class SchemaDecoder:
    """A decoder with a schema; the arguments are described at the decoders.

    Raises:
        InvalidOptionError: they do not go together.
    """

    schema: Any = None
    schema_file: str | Path | None = field(default=None, kw_only=True)
    registry: SchemaRegistry | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    framed: bool | None = field(default=None, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_sources(schema=self.schema, schema_file=self.schema_file, subject=self.subject)
        check_subject(self.registry, self.subject, self.version)
        if self.framed is not None:
            check_switch("framed", self.framed)

    @property
    def is_resolved(self) -> bool:
        """Whether its columns are known without the registry, and executors can use it as it is."""
        return self.subject is None and (self.registry is None or self.registry.is_resolved)

    @property
    def is_framed(self) -> bool:
        """Whether payloads begin with a schema id."""
        return self.registry is not None if self.framed is None else self.framed

    def resolved(self: Own) -> Own:
        """The same with the schema that the subject has now.

        Raises:
            SchemaRegistryError: the registry does not answer for now.
            SchemaNotFoundError, AccessDeniedError, InvalidOptionError: it has none, or none for us.
            SchemaMismatchError: it is none of this format, or has no columns in Spark.
            MissingDependencyError: the text of the schema has to be compiled, and there is no compiler.
        """
        if self.is_resolved or self.registry is None:
            return self
        registry = self.registry.resolved()
        if self.subject is None:
            return replace(self, registry=registry)
        schema = self._of_subject(registry, self.subject)
        return replace(self, schema=schema, registry=registry.with_known_id(), subject=None, version=None)

    def _of_subject(self, registry: SchemaRegistry, subject: str) -> Any:
        """The schema that a subject has in the registry."""
        return registry.subject(subject, self.version)

    def _known(self) -> Any:
        """The schema; it is asked for unless it is known."""
        return self.schema if self.subject is None else self.resolved().schema
