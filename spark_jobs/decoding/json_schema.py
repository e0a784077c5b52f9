"""Payloads that are JSON with a JSON Schema, which is in a registry or one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.ddl import DEEPEST_TYPES, WeightBudget, check_distinct, column_ddl, struct_ddl
from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.limits import cpu_limit
from spark_jobs.decoding.rows import reason, shortened
from spark_jobs.decoding.schema_cache import kept_by_size
from spark_jobs.decoding.schema_decoder import SchemaDecoder, given_schema, schema_document, schema_use
from spark_jobs.decoding.schema_registry import StoredSchema
from spark_jobs.decoding.wire_format import Part, decode_frames
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.options import check_switch

# What has no columns of its own is kept as it is written.
TEXT = "STRING"
_PLAIN = {"boolean": "BOOLEAN", "integer": "BIGINT", "number": "DOUBLE", "string": TEXT}
# Of Kafka Connect's converter, and of OpenAPI.
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


@kept_by_size(len)
def json_schema_ddl(stored: StoredSchema) -> str:
    """The columns of a schema, as Spark DDL.

    Raises:
        SchemaMismatchError: it is none, contains itself, or is not of objects with properties.
    """
    documents = _documents(stored)
    with schema_use("JSON"):
        fields = _Tree(documents).fields(documents[""])
    if not fields:
        raise SchemaMismatchError(
            "the JSON Schema is not of an object with properties, so that it has no columns",
            remedy="Take Json(schema) or Text().",
        )
    return ", ".join(column_ddl(name, kind) for name, kind in fields)


def _documents(stored: StoredSchema) -> Mapping[str, Any]:
    """A schema, by the name ``""``, and those that it refers to, by the names that it uses.

    Raises:
        SchemaMismatchError: one of them is no JSON Schema.
    """
    found: dict[str, Any] = {}
    for name, one in (("", stored), *stored.references):
        if one.kind != "JSON":
            raise SchemaMismatchError(
                f"a schema is {one.kind}, and not JSON", remedy="Decode it with the decoder of its format."
            )
        with schema_use("JSON"):
            found[name] = schema_document(one.text)
    return found


@kept_by_size(lambda made: 0)
def _check_documents(stored: StoredSchema) -> None:
    """Refuse what is no JSON Schema. Its documents take thirty times as much as its text, and are not kept."""
    _documents(stored)


class _Tree:
    """Makes types of schemas."""

    def __init__(self, documents: Mapping[str, Any]) -> None:
        by_id = {str(document.get("$id")): document for document in documents.values() if isinstance(document, dict)}
        self._documents = {**by_id, **documents}
        self._budget = WeightBudget("JSON")

    def fields(self, root: Any) -> list[tuple[str, str]]:
        """The properties of an object with their types; none for anything else."""
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
        """Null and one other type are that type; anything else has no type in common, unless they are all alike."""
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
        """The schema behind references, its document, and the references that were followed."""
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
            if len(above) > DEEPEST_TYPES:
                raise SchemaMismatchError(
                    f"the JSON Schema follows more than {DEEPEST_TYPES} references to one type", remedy="Shorten it."
                )
            if place in above:
                raise SchemaMismatchError(
                    f"the JSON Schema contains itself: {schema['$ref']}, and columns cannot",
                    remedy="Give a schema of your own without that field; framed=True, if payloads have schema ids.",
                )
            schema, above = _pointed(document, pointer, schema["$ref"]), (*above, place)
        return schema if isinstance(schema, dict) else {}, document, above


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names or shows, without null; ``["null"]`` where there is nothing else."""
    named = schema.get("type")
    if named is None:
        examples = schema.get("enum", [schema["const"]] if "const" in schema else [])
        # Of many values one of each type is enough.
        named = sorted({_kind_of(value) for value in {type(value): value for value in examples}.values()})
        if not named and not any(word in schema for word in _SEVERAL):
            named = [kind for kind, word in (("object", "properties"), ("array", "items")) if word in schema]
    found = [named] if isinstance(named, str) else list(named)
    return [kind for kind in found if kind != "null"] or found[:1]


def _kind_of(value: Any) -> str:
    """The type of a value.

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
    """What a JSON pointer points at.

    Raises:
        SchemaMismatchError: nothing.
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
            f"the JSON Schema refers to {reference}, which is not there",
            remedy="Correct it; in a registry, add the schema to its references.",
        )
    return found


VALIDATION_SECONDS = 1.0
"""The CPU time in which a payload is validated, besides that for its bytes."""
VALIDATION_SECONDS_PER_BYTE = 1e-5


@dataclass(frozen=True, slots=True)
class JsonSchema(SchemaDecoder):
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
    validate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        SchemaDecoder.__post_init__(self)
        if check_switch("validate", self.validate):
            imported("jsonschema", extra="json-schema")
        object.__setattr__(self, "schema", given_schema("JSON", self.schema, self.schema_file))
        object.__setattr__(self, "schema_file", None)
        if self.schema is not None:
            self.ddl()

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

        if not self.is_framed:
            return DecodedColumns(*part_of_schema(own)(payloads))

        def part_of(number: int) -> Part:
            stored = own if registry is None else registry.schema(number, subject=subject)
            _check_documents(stored)
            return part_of_schema(stored if subject else own)

        return decode_frames(payloads, schema, part_of, registry)


@kept_by_size(lambda validator: 0)
def _validator(stored: StoredSchema) -> Any:
    """What tells whether a document keeps to a schema."""
    jsonschema = imported("jsonschema", extra="json-schema")
    referencing = imported("referencing", extra="json-schema")
    jsonschema_dialect = imported("referencing.jsonschema", extra="json-schema")
    documents = _documents(stored)
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
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a reference that leads nowhere, for one
        return f"it cannot be validated: {reason(error)}"
    return None if found is None else shortened(f"{found.json_path!r}: {found.message}")
