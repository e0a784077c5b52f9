"""Payloads that are JSON with a JSON Schema, which is in a registry or one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.cpu_limit import cpu_limit
from spark_jobs.decoding.decoders import DecodedColumns, Headers, Key
from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_schema_types import json_documents, json_schema_ddl
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.rows import reason, shortened
from spark_jobs.decoding.schema_registry import SchemaRegistry, StoredSchema, check_subject
from spark_jobs.decoding.schema_source import check_sources, given_schema, schema_use
from spark_jobs.decoding.wire_format import Part, decode_frames
from stream_consumers.options import check_switch

VALIDATION_SECONDS = 1.0
"""The CPU time in which a payload is validated, besides that for its bytes."""
VALIDATION_SECONDS_PER_BYTE = 1e-5


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """Payloads are JSON objects, and a JSON Schema names and types the columns; they are read as :class:`Json` does.

    With a registry each payload begins with the id of its schema. A payload whose id is unknown is a dead letter. What
    has no type of its own, like one of several types, is text, as it is written. Whether values keep to the rest of
    their schema is looked at only with ``validate``. A tombstone is a row of nulls.

    The types of the columns are in docs/payloads.md.

    Args:
        schema: the schema, as JSON text or what that is in Python.
        schema_file: the path of a file with it, which is read at once.
        registry: where the schemas are.
        subject: instead of a schema: its schema is taken, as it is when a batch is read. Like ``orders-value``.
        version: of the subject; the newest by default.
        framed: whether payloads begin with a schema id; by default they do with a registry.
        validate: make dead letters of payloads that their schema does not allow. With a subject it is the schema of
            their id, which must be registered under the subject; without one it is ours. It takes several times as
            long.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: they do not go together.
        SchemaMismatchError: the schema is none, or has no columns.
        MissingDependencyError: ``validate``, and jsonschema is not installed.

    Example:
        >>> JsonSchema({"type": "object", "properties": {"id": {"type": "integer"}, "at": {"type": "string", \
"format": "date-time"}}}).ddl()
        '`id` BIGINT, `at` TIMESTAMP'
    """

    schema: str | Mapping[str, Any] | StoredSchema | None = None
    schema_file: str | Path | None = field(default=None, kw_only=True)
    registry: SchemaRegistry | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    framed: bool | None = field(default=None, kw_only=True)
    validate: bool = field(default=False, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_sources(schema=self.schema, schema_file=self.schema_file, subject=self.subject)
        check_subject(self.registry, self.subject, self.version)
        if self.framed is not None:
            check_switch("framed", self.framed)
        if check_switch("validate", self.validate):
            imported("jsonschema", extra="json-schema")
        object.__setattr__(self, "schema", given_schema("JSON", self.schema, self.schema_file))
        object.__setattr__(self, "schema_file", None)
        if self.schema is not None:
            self.ddl()

    @property
    def is_resolved(self) -> bool:
        """Whether its columns are known without the registry, and executors can use it as it is."""
        return self.subject is None and (self.registry is None or self.registry.is_resolved)

    def resolved(self) -> JsonSchema:
        """The same with the schema that the subject has now.

        Raises:
            SchemaRegistryError: the registry does not answer for now.
            SchemaNotFoundError, AccessDeniedError, InvalidOptionError: it has none, or none for us.
            SchemaMismatchError: it is no JSON Schema, or has no columns.
        """
        if self.is_resolved or self.registry is None:
            return self
        registry = self.registry.resolved()
        if self.subject is None:
            return replace(self, registry=registry)
        stored = registry.subject(self.subject, self.version)
        return replace(self, schema=stored, registry=registry, subject=None, version=None)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        return json_schema_ddl(self._known())

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`."""
        Json(self.ddl()).check(schema)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        own, registry, documents = self._known(), self.registry, Json(self.ddl())
        # A pattern can take for ever: those of a schema that anybody may have registered are not tried.
        subject = own.subject if self.validate else ""

        def part_of_schema(stored: StoredSchema) -> Part:
            validator = _validator(stored) if self.validate else None

            def part(texts: Column) -> tuple[Sequence[Column], Column]:
                decoded = documents.decode(texts, schema)
                if validator is None:
                    return decoded.columns, decoded.errors
                return decoded.columns, pc.coalesce(decoded.errors, _violations(validator, texts))

            return part

        if not (self.framed if self.framed is not None else registry is not None):
            return DecodedColumns(*part_of_schema(own)(payloads))

        def part_of(number: int) -> Part:
            stored = own if registry is None else registry.schema(number, subject=subject)
            json_documents(stored)
            return part_of_schema(stored if subject else own)

        return decode_frames(payloads, schema, part_of, registry)

    def _known(self) -> StoredSchema:
        if self.subject is not None:
            return self.resolved()._known()
        assert isinstance(self.schema, StoredSchema)
        return self.schema


@lru_cache(maxsize=64)
def _validator(stored: StoredSchema) -> Any:
    """What tells whether a document keeps to a schema."""
    jsonschema = imported("jsonschema", extra="json-schema")
    referencing = imported("referencing", extra="json-schema")
    jsonschema_dialect = imported("referencing.jsonschema", extra="json-schema")
    documents = json_documents(stored)
    with schema_use("JSON"):
        # Without a way to retrieve others: a reference to an address, or to a file, leads nowhere.
        known = referencing.Registry().with_resources(
            (name, referencing.Resource.from_contents(one, default_specification=jsonschema_dialect.DRAFT7))
            for name, one in documents.items()
            if name
        )
        kind = jsonschema.validators.validator_for(documents[""], default=jsonschema.Draft7Validator)
        kind.check_schema(documents[""])
        return kind(documents[""], registry=known)


def _violations(validator: Any, texts: Column) -> Column:
    """Why payloads are not allowed; null for those that are, and for tombstones."""
    return pa.array([None if text is None else _violation(validator, text) for text in texts.to_pylist()], pa.string())


def _violation(validator: Any, text: bytes) -> str | None:
    try:
        with cpu_limit(VALIDATION_SECONDS + VALIDATION_SECONDS_PER_BYTE * len(text)):
            found = next(validator.iter_errors(json.loads(text)), None)
    except Exception as error:  # noqa: BLE001 - a reference that leads nowhere, for one
        return f"it cannot be validated: {reason(error)}"
    return None if found is None else shortened(f"{found.json_path!r}: {found.message}")
