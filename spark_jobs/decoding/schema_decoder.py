"""The base of decoders with a schema, which is an argument, in a file, or in a registry; and Confluent's wire format.

A framed payload begins with a byte 0 and the id of its schema in four bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.decoders import Column, DecodedColumns, Headers, Key, joined, shortened
from spark_jobs.decoding.schema_limits import schema_use
from spark_jobs.decoding.schema_registry import SchemaRegistry, StoredSchema
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError, SchemaNotFoundError
from stream_consumers.options import check_count, check_name, check_switch

HEADER_BYTES = 5
MAGIC = 0
_TOMBSTONE = -1
BodyDecoder = Callable[[Column], tuple[Sequence[Column], Column]]


def read_file(path: str | Path) -> bytes:
    """Read a schema file.

    Raises:
        InvalidOptionError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidOptionError(
            f"the schema file {path} cannot be read: {error.strerror}", remedy="Check the path and its permissions."
        ) from error


def read_text(path: str | Path) -> str:
    """Read a schema file as text.

    Raises:
        InvalidOptionError: it cannot be read, or is not UTF-8.
    """
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidOptionError(f"the schema file {path} is not UTF-8", remedy="Convert it to UTF-8.") from error


Own = TypeVar("Own", bound="SchemaDecoder")


@dataclass(frozen=True, slots=True)
class SchemaDecoder:
    """A decoder with a schema. The decoders describe the arguments.

    Raises:
        InvalidOptionError: the arguments contradict each other.
        SchemaMismatchError: the given schema cannot be used.
    """

    form: ClassVar[str] = ""
    """The format of the schema, for errors; in upper case as registries call it."""

    schema: Any = None
    schema_file: str | Path | None = field(default=None, kw_only=True)
    registry: SchemaRegistry | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    framed: bool | None = field(default=None, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check_sources()
        if self.framed is not None:
            check_switch("framed", self.framed)
        if self.subject is None:
            with schema_use(self.form):
                object.__setattr__(self, "schema", self._given())
                object.__setattr__(self, "schema_file", None)
                self.ddl()

    def _check_sources(self) -> None:
        """Check that the arguments name exactly one schema, a registry for a subject, and a subject for a version."""
        sources = {"schema": self.schema, "schema_file": self.schema_file, "subject": self.subject}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "no schema is given"
            raise InvalidOptionError(what, remedy=f"Set one of: {', '.join(sources)}.")
        if self.registry is not None and not isinstance(self.registry, SchemaRegistry):
            raise InvalidOptionError(
                f"registry must be a SchemaRegistry, got a {type(self.registry).__name__}",
                remedy="Use SchemaRegistry('https://registry:8081').",
            )
        if self.subject is not None:
            check_name("subject", self.subject)
            if self.registry is None:
                raise InvalidOptionError(
                    f"subject={self.subject!r} needs a registry", remedy="Set registry=SchemaRegistry(url), too."
                )
        if self.version is not None:
            check_count("version", self.version)
            if self.subject is None:
                raise InvalidOptionError(f"version={self.version} needs a subject", remedy="Set subject=, too.")

    @property
    def is_resolved(self) -> bool:
        """Whether its columns are known without the registry, so that executors can use it unchanged."""
        return self.subject is None and (self.registry is None or self.registry.is_resolved)

    @property
    def is_framed(self) -> bool:
        """Whether payloads begin with a schema id."""
        return self.registry is not None if self.framed is None else self.framed

    def resolved(self: Own) -> Own:
        """Return the decoder with the current schema of its subject.

        Raises:
            SchemaRegistryError: the registry does not answer for now.
            SchemaNotFoundError, AccessDeniedError, InvalidOptionError: it has no such schema, or does not return it.
            SchemaMismatchError: the schema has another format, or no columns in Spark.
            MissingDependencyError: the text of the schema has to be compiled, and the compiler is not installed.
        """
        if self.is_resolved or self.registry is None:
            return self
        registry = self.registry.resolved()
        if self.subject is None:
            return replace(self, registry=registry)
        schema = self._of_subject(registry, self.subject)
        return replace(self, schema=schema, registry=registry.with_known_id(), subject=None, version=None)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        raise NotImplementedError

    def _given(self) -> Any:
        """Return the given schema, which is JSON text, Python values, or a file."""
        given = self.schema if self.schema_file is None else read_text(self.schema_file)
        if isinstance(given, StoredSchema):
            return given
        return StoredSchema(self.form.upper(), given if isinstance(given, str) else json.dumps(given))

    def _of_subject(self, registry: SchemaRegistry, subject: str) -> Any:
        """Look up the schema of a subject."""
        return registry.subject(subject, self.version)

    def _known(self) -> Any:
        """Return the schema, from the registry unless it is known."""
        return self.schema if self.subject is None else self.resolved().schema


def decode_frames(
    payloads: Column, schema: pa.Schema, decoder_of: Callable[[int], BodyDecoder], registry: SchemaRegistry | None
) -> DecodedColumns:
    """Decode framed payloads, grouped by schema.

    Args:
        payloads: binary; null is a tombstone.
        schema: the columns.
        decoder_of: returns for a schema id the function that decodes the bytes after the ids. If there is none, or the
            schema cannot be used, all messages with this id become dead letters.
        registry: the registry that ``decoder_of`` asks; its connections are kept open meanwhile.

    Raises:
        StreamAssetsError: the registry does not answer, so that it is unknown whether there is such a schema.
    """
    headers: Any = pc.binary_slice(payloads, 0, HEADER_BYTES).dictionary_encode()
    headers_of_rows = np.asarray(headers.indices.fill_null(_TOMBSTONE))
    places = [np.flatnonzero(headers_of_rows == _TOMBSTONE)]
    parts = [_nulls(schema, len(places[0]), None)]
    with registry.open() if registry else nullcontext():
        # The most frequent ids first, because a registry is recognized by a schema that it has returned.
        counts = np.bincount(headers_of_rows[headers_of_rows != _TOMBSTONE], minlength=len(headers.dictionary))
        for place in np.argsort(-counts, kind="stable").tolist():
            header = headers.dictionary[place].as_py()
            rows = np.flatnonzero(headers_of_rows == place)
            places.append(rows)
            framed = payloads if len(rows) == len(payloads) else payloads.take(pa.array(rows, pa.int64()))
            parts.append(_decode(framed, schema, header, decoder_of))
    *columns, errors = joined(parts)
    order = np.empty(len(payloads), np.int64)
    order[np.concatenate(places)] = np.arange(len(payloads))
    if len(parts) > 2 or len(places[0]):
        *columns, errors = (column.take(pa.array(order, pa.int64())) for column in (*columns, errors))
    return DecodedColumns(columns, errors)


def _decode(framed: Column, schema: pa.Schema, header: bytes, decoder_of: Callable[[int], BodyDecoder]) -> list[Column]:
    """Return the columns and the errors of payloads with one header."""
    if len(header) < HEADER_BYTES:
        return _nulls(schema, len(framed), f"{len(header)} bytes are too short for a schema id")
    if header[0] != MAGIC:
        return _nulls(schema, len(framed), f"the first byte is {header[0]}, not the 0 before a schema id")
    try:
        columns, errors = decoder_of(int.from_bytes(header[1:], "big"))(_without_headers(framed))
    except (SchemaNotFoundError, SchemaMismatchError) as error:
        return _nulls(schema, len(framed), shortened(error.what))
    return [*columns, errors]


def _nulls(schema: pa.Schema, count: int, error: str | None) -> list[Column]:
    return [*(pa.nulls(count, field.type) for field in schema), pa.array([error] * count, pa.string())]


def _without_headers(framed: Column) -> Column:
    """Strip the header from payloads, all of which have one; Arrow's ``binary_slice`` fails for some."""
    buffers: Any = framed.buffers()
    own = np.frombuffer(buffers[1], np.int32)[framed.offset : framed.offset + len(framed) + 1]
    ends = own.astype(np.int64) - own[0]
    content = np.frombuffer(buffers[2], np.uint8)[own[0] : own[-1]]
    is_kept = np.ones(len(content), bool)
    is_kept[ends[:-1, None] + np.arange(HEADER_BYTES)] = False
    behind = (ends - HEADER_BYTES * np.arange(len(ends))).astype(np.int32)
    kept: Any = content[is_kept]
    return pa.Array.from_buffers(pa.binary(), len(framed), [None, pa.py_buffer(behind), pa.py_buffer(kept)])
