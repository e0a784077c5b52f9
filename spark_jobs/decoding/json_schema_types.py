"""The Spark columns that a JSON Schema describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from spark_jobs.decoding.ddl import DEEPEST_TYPES, TypeBudget, check_distinct, column_ddl, struct_ddl
from spark_jobs.decoding.schema_registry import StoredSchema
from spark_jobs.decoding.schema_source import schema_document, schema_use
from stream_consumers.errors import SchemaMismatchError

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


@lru_cache(maxsize=64)
def json_schema_ddl(stored: StoredSchema) -> str:
    """The columns of a schema, as Spark DDL.

    Raises:
        SchemaMismatchError: it is none, contains itself, or is not of objects with properties.
    """
    documents = json_documents(stored)
    with schema_use("JSON"):
        fields = _Tree(documents).fields(documents[""])
    if not fields:
        raise SchemaMismatchError(
            "the JSON Schema is not of an object with properties, so that it has no columns",
            remedy="Take Json(schema) or Text().",
        )
    return ", ".join(column_ddl(name, kind) for name, kind in fields)


@lru_cache(maxsize=64)
def json_documents(stored: StoredSchema) -> Mapping[str, Any]:
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


class _Tree:
    """Makes types of schemas."""

    def __init__(self, documents: Mapping[str, Any]) -> None:
        by_id = {str(document.get("$id")): document for document in documents.values() if isinstance(document, dict)}
        self._documents = {**by_id, **documents}
        self._budget = TypeBudget("JSON")

    def fields(self, root: Any) -> list[tuple[str, str]]:
        """The properties of an object with their types; none for anything else."""
        schema, document, above = self._followed(root, root, ())
        return self._members(schema, document, above, "the JSON Schema") if _kinds(schema) == ["object"] else []

    def _kind(self, schema: Any, document: Any, above: tuple[str, ...], path: str) -> str:
        with self._budget:
            schema, document, above = self._followed(schema, document, above)
            kinds = _kinds(schema)
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
        others = [one for one in schemas if _kinds(self._followed(one, document, above)[0]) != ["null"]]
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
        named = sorted({_kind_of(value) for value in examples})
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
