"""``JsonSchema``: decodes JSON with a JSON Schema, which is given or in a registry."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.ddl import check_distinct, column_ddl, struct_ddl
from spark_jobs.decoding.decoders import Column, DecodedColumns, import_library, reason, shortened
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.schema_decoder import BodyDecoder, SchemaDecoder, decode_frames
from spark_jobs.decoding.schema_limits import MAX_TYPE_DEPTH, WeightBudget, cached_by_size, schema_document, schema_use
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.options import check_switch

# The type for values whose schema has no column type, which keep their JSON text.
TEXT = "STRING"
_PLAIN = {"boolean": "BOOLEAN", "integer": "BIGINT", "number": "DOUBLE", "string": TEXT}
# The types of Kafka Connect's converter, and below the formats of OpenAPI.
_CONNECT = {
    "int8": "TINYINT",
    "int16": "SMALLINT",
    "int32": "INT",
    "int64": "BIGINT",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "bytes": "BINARY",
}
_FORMATS = {
    ("string", "date-time"): "TIMESTAMP",
    ("string", "date"): "DATE",
    ("string", "byte"): "BINARY",
    ("integer", "int32"): "INT",
    ("number", "float"): "FLOAT",
}
_SEVERAL = ("anyOf", "oneOf")


@cached_by_size(len)
def json_schema_ddl(stored: StoredSchema) -> str:
    """Return the columns of a schema, as Spark DDL.

    Raises:
        SchemaMismatchError: the schema cannot be used, contains itself, or does not describe an object with properties.
    """
    documents = _documents(stored)
    with schema_use("JSON"):
        fields = _TypeBuilder(documents).fields(documents[""])
    if not fields:
        raise SchemaMismatchError(
            "the JSON Schema does not describe an object with properties, so that it has no columns",
            remedy="Use Json(schema) or Text().",
        )
    return ", ".join(column_ddl(name, kind) for name, kind in fields)


def _documents(stored: StoredSchema) -> Mapping[str, Any]:
    """Return the document of a schema, by the name ``""``, and those of the schemas that it refers to, by their names.

    Raises:
        SchemaMismatchError: one of them is not a JSON Schema.
    """
    found: dict[str, Any] = {}
    for name, one in (("", stored), *stored.references):
        one.check_kind("JSON")
        with schema_use("JSON"):
            found[name] = schema_document(one.text)
    return found


@cached_by_size(lambda made: 0)
def _check_documents(stored: StoredSchema) -> None:
    """Check that this is a JSON Schema, but do not cache its documents, which need 30 times the memory of its text."""
    _documents(stored)


class _TypeBuilder:
    """Converts schemas to column types."""

    def __init__(self, documents: Mapping[str, Any]) -> None:
        by_id = {str(document.get("$id")): document for document in documents.values() if isinstance(document, dict)}
        self._documents = {**by_id, **documents}
        self._budget = WeightBudget("JSON")

    def fields(self, root: Any) -> list[tuple[str, str]]:
        """Return the properties of an object with their types; an empty list for other schemas."""
        schema, document, above = self._followed(root, root, ())
        return self._members(schema, document, above, "the JSON Schema") if self._kinds(schema) == ["object"] else []

    def _kinds(self, schema: Mapping[str, Any]) -> list[str]:
        self._budget.spend(sum(len(schema.get(word) or ()) for word in ("type", "enum")))
        return _kinds(schema)

    def _kind(self, schema: Any, document: Any, above: tuple[str, ...], path: str) -> str:
        with self._budget:
            schema, document, above = self._followed(schema, document, above)
            kinds = self._kinds(schema)
            if len(kinds) != 1:
                several = next((schema[word] for word in _SEVERAL if word in schema), None)
                return TEXT if kinds or several is None else self._of_several(several, document, above, path)
            (kind,) = kinds
            if kind == "object":
                return self._of_object(schema, document, above, path)
            if kind == "array":
                items = schema.get("items")
                is_list = isinstance(items, dict) and "prefixItems" not in schema
                return f"ARRAY<{self._kind(items, document, above, f'{path}[]')}>" if is_list else TEXT
            return _scalar(schema, kind)

    def _of_object(self, schema: Mapping[str, Any], document: Any, above: tuple[str, ...], path: str) -> str:
        fields = self._members(schema, document, above, path)
        if fields:
            return struct_ddl(fields)
        more = schema.get("additionalProperties")
        return f"MAP<STRING, {self._kind(more, document, above, f'{path}{{}}')}>" if isinstance(more, dict) else TEXT

    def _of_several(self, schemas: Sequence[Any], document: Any, above: tuple[str, ...], path: str) -> str:
        """Return the type that all schemas but null have in common, otherwise text."""
        self._budget.spend(len(schemas))
        others = [one for one in schemas if self._kinds(self._followed(one, document, above)[0]) != ["null"]]
        found = {self._kind(one, document, above, path) for one in others}
        return found.pop() if len(found) == 1 else TEXT

    def _members(
        self, schema: Mapping[str, Any], document: Any, above: tuple[str, ...], path: str
    ) -> list[tuple[str, str]]:
        properties = schema.get("properties") or {}
        check_distinct(list(properties), path)
        return [(name, self._kind(one, document, above, f"{path}.{name}")) for name, one in properties.items()]

    def _followed(self, schema: Any, document: Any, above: tuple[str, ...]) -> tuple[Any, Any, tuple[str, ...]]:
        """Follow references; return the schema, its document, and the references that were followed."""
        while isinstance(schema, dict):
            self._budget.spend(len(schema) + len(str(schema.get("$ref", ""))))
            one = schema.get("allOf")
            if isinstance(one, list) and len(one) == 1 and "properties" not in schema:
                schema = {**{k: v for k, v in schema.items() if k != "allOf"}, **one[0]}
                continue
            if "$ref" not in schema:
                break
            name, _, pointer = str(schema["$ref"]).partition("#")
            if name:
                document = self._documents.get(name)
            place = f"{id(document)}#{pointer}"
            if len(above) > MAX_TYPE_DEPTH:
                raise SchemaMismatchError(
                    f"the JSON Schema follows more than {MAX_TYPE_DEPTH} references to one type", remedy="Shorten it."
                )
            if place in above:
                raise SchemaMismatchError(
                    f"the JSON Schema contains itself: {schema['$ref']}, but columns cannot",
                    remedy="Use your own schema without that field, with framed=True if payloads have schema ids.",
                )
            schema, above = _pointed(document, pointer, schema["$ref"]), (*above, place)
        return schema if isinstance(schema, dict) else {}, document, above


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names or that its keywords imply, without null; ``["null"]`` if that is all."""
    named = schema.get("type")
    if named is None:
        examples = schema.get("enum", [schema["const"]] if "const" in schema else [])
        # One value of each type is enough.
        named = sorted({_kind_of(value) for value in {type(value): value for value in examples}.values()})
        if not named and not any(word in schema for word in _SEVERAL):
            named = [kind for kind, word in (("object", "properties"), ("array", "items")) if word in schema]
    found = [named] if isinstance(named, str) else list(named)
    return [kind for kind in found if kind != "null"] or found[:1]


def _kind_of(value: Any) -> str:
    """Return the JSON type of a value.

    Example:
        >>> [_kind_of(value) for value in (None, True, 1, 1.5, "x", [], {})]
        ['null', 'boolean', 'integer', 'number', 'string', 'array', 'object']
    """
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _scalar(schema: Mapping[str, Any], kind: str) -> str:
    connect = _CONNECT.get(str(schema.get("connect.type")))
    if connect and kind != "null":
        return connect
    if kind == "string" and schema.get("contentEncoding") == "base64":
        return "BINARY"
    return _FORMATS.get((kind, str(schema.get("format"))), _PLAIN.get(kind, TEXT))


def _pointed(document: Any, pointer: str, reference: object) -> Any:
    """Follow a JSON pointer.

    Raises:
        SchemaMismatchError: the document has no such place.
    """
    found = document
    try:
        for word in pointer.split("/")[1:]:
            name = word.replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
    except (KeyError, IndexError, TypeError, ValueError):
        found = None
    if found is None or (pointer and not pointer.startswith("/")):
        raise SchemaMismatchError(
            f"the JSON Schema refers to {reference}, which does not exist",
            remedy="Correct it; in a registry, add the schema to its references.",
        )
    return found


SCHEMA_SECONDS = 10.0
"""The CPU time for checking a schema, in seconds."""
VALIDATION_SECONDS = 1.0
"""The CPU time for validating a payload, in seconds, besides that for its bytes."""
VALIDATION_SECONDS_PER_BYTE = 1e-5


@dataclass(frozen=True, slots=True)
class JsonSchema(SchemaDecoder):
    """Decodes JSON objects like :class:`Json`, into the columns of a JSON Schema.

    With a registry each payload begins with the id of its schema. A payload with an unknown id becomes a dead letter.
    Values without a column type, such as values of several types, become their JSON text. Other rules of the schema are
    checked only with ``validate``. A tombstone becomes a row of nulls.

    The types of the columns are in docs/decode-messages.md.

    Args:
        schema: the schema, as JSON text or as Python values.
        schema_file: the path of a file with the schema, which is read immediately.
        registry: the registry with the schemas.
        subject: the subject whose schema is used, looked up for each batch, like ``orders-value``.
        version: the version of the subject; the newest by default.
        framed: whether payloads begin with a schema id; by default they do with a registry.
        validate: whether payloads that do not conform to their schema become dead letters. With a subject this is the
            schema of their id, which must be registered under the subject; otherwise the given one. Decoding then takes
            several times as long.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: the arguments contradict each other.
        SchemaMismatchError: the schema cannot be used, or has no columns.
        MissingDependencyError: ``validate`` is set, but jsonschema is not installed.

    Example:
        >>> JsonSchema({"type": "object", "properties": {"id": {"type": "integer"}, "at": {"type": "string", \
"format": "date-time"}}}).ddl()
        '`id` BIGINT, `at` TIMESTAMP'
    """

    form: ClassVar[str] = "JSON"
    schema: str | Mapping[str, Any] | StoredSchema | None = None
    validate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if check_switch("validate", self.validate):
            import_library("jsonschema", extra="json-schema")
        SchemaDecoder.__post_init__(self)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        return json_schema_ddl(self._known())

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`."""
        Json(self.ddl()).check(schema)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        own, registry, documents = self._known(), self.registry, Json(self.ddl())
        # A pattern may never finish, so only schemas of the own subject are used.
        subject = own.subject if self.validate else ""

        def decoder_of_schema(stored: StoredSchema) -> BodyDecoder:
            validator = _validator(stored) if self.validate else None

            def part(texts: Column) -> tuple[Sequence[Column], Column]:
                decoded = documents.decode(texts, schema)
                if validator is None:
                    return decoded.columns, decoded.errors
                return decoded.columns, pc.coalesce(decoded.errors, _violations(validator, texts))

            return part

        if not self.is_framed:
            return DecodedColumns(*decoder_of_schema(own)(payloads))

        def decoder_of(number: int) -> BodyDecoder:
            stored = own if registry is None else registry.schema(number, subject=subject)
            _check_documents(stored)
            return decoder_of_schema(stored if subject else own)

        return decode_frames(payloads, schema, decoder_of, registry)


@cached_by_size(lambda validator: 0)
def _validator(stored: StoredSchema) -> Any:
    """Create the validator of a schema."""
    jsonschema = import_library("jsonschema", extra="json-schema")
    referencing = import_library("referencing", extra="json-schema")
    jsonschema_dialect = import_library("referencing.jsonschema", extra="json-schema")
    documents = _documents(stored)
    with schema_use("JSON"):
        # It cannot retrieve other schemas, so that a reference to a URL or a file fails.
        known = referencing.Registry().with_resources(
            (name, referencing.Resource.from_contents(one, default_specification=jsonschema_dialect.DRAFT7))
            for name, one in documents.items()
            if name
        )
        kind = jsonschema.validators.validator_for(documents[""], default=jsonschema.Draft7Validator)
        # It compiles the patterns, which takes longer than in proportion to their size.
        with cpu_limit(SCHEMA_SECONDS):
            kind.check_schema(documents[""])
        return kind(documents[""], registry=known)


def _violations(validator: Any, texts: Column) -> Column:
    """Return for each payload the reason why it does not conform; null if it does, and for tombstones."""
    return pa.array([None if text is None else _violation(validator, text) for text in texts.to_pylist()], pa.string())


def _violation(validator: Any, text: bytes) -> str | None:
    try:
        with cpu_limit(VALIDATION_SECONDS + VALIDATION_SECONDS_PER_BYTE * len(text)):
            found = next(validator.iter_errors(json.loads(text)), None)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - such as a reference that fails
        return f"it cannot be validated: {reason(error)}"
    return None if found is None else shortened(f"{found.json_path!r}: {found.message}")


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block once the process has used this much CPU time.

    Python delivers signals to the main thread only: in another thread there is no limit.

    Args:
        seconds: the CPU time of all threads, in seconds.

    Raises:
        TimeoutError: raised in the block.

    Example:
        >>> with cpu_limit(0.1):
        ...     while True:
        ...         pass
        Traceback (most recent call last):
        TimeoutError: it takes more than 0.1 s
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:.3g} s")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
