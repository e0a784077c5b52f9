"""Parses Avro schemas into trees of types, and converts these to Spark columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spark_jobs.decoding.ddl import MAX_COLUMN_NAME_LENGTH, check_distinct, column_ddl, first_duplicate, struct_ddl
from spark_jobs.decoding.decoders import UNNAMED, import_library
from spark_jobs.decoding.schema_limits import (
    TYPE_WEIGHT,
    cached_by_size,
    check_weight,
    schema_document,
    schema_use,
)
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError

MAX_DIGITS = 38
MAX_FIXED_BYTES = 1 << 20
UUID_BYTES = 16
DURATION_BYTES = 12
DURATION_DDL = "STRUCT<months: BIGINT, days: BIGINT, milliseconds: BIGINT>"
_PRIMITIVES = {
    "boolean": "BOOLEAN",
    "int": "INT",
    "long": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "bytes": "BINARY",
    "string": "STRING",
}
# The attributes of types and fields that a schema is made of, and those of them that hold further types or fields.
_ATTRIBUTES = (
    *("type", "name", "namespace", "aliases", "fields", "default", "items", "values", "symbols", "size"),
    *("logicalType", "precision", "scale"),
)
_NESTING = ("type", "fields", "items", "values")
_TIMES = {"timestamp": "TIMESTAMP", "local-timestamp": "TIMESTAMP_NTZ"}
_UNITS = ("millis", "micros", "nanos")
# The types that each logical type may annotate; Avro ignores it on other types.
_STORED_AS = {
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    **{f"{kind}-{unit}": ("long",) for kind in _TIMES for unit in _UNITS},
    "uuid": ("string", "fixed"),
    "decimal": ("bytes", "fixed"),
    "duration": ("fixed",),
}


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record.

    Args:
        name: its name.
        type: its type.
        aliases: names that a writer may use for it.
        default: its default as JSON text, if any.
    """

    name: str
    type: AvroType
    aliases: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True, slots=True)
class AvroType:
    """A type with all its parts. A named type that is referred to several times is one object.

    Args:
        kind: the name of the type in Avro.
        name: the full name of a record, an enum or a fixed.
        logical: the logical type, if it is known and fits the type.
        precision: the digits of a decimal.
        scale: the digits of a decimal after the point.
        size: the size of a fixed in bytes.
        symbols: the symbols of an enum.
        default: the symbol of an enum that stands for unknown ones.
        fields: the fields of a record.
        parts: the branches of a union, the items of an array, or the values of a map.
        aliases: full names that a writer may use.
        weight: see :func:`spark_jobs.decoding.schema_limits.check_weight`.
        depth: the number of nested types, including this one.
        has_column: whether the type has any value to keep; null and records without fields do not.
    """

    kind: str
    name: str = ""
    logical: str = ""
    precision: int = 0
    scale: int = 0
    size: int = 0
    symbols: tuple[str, ...] = ()
    default: str | None = None
    fields: tuple[AvroField, ...] = ()
    parts: tuple[AvroType, ...] = ()
    aliases: tuple[str, ...] = ()
    weight: int = field(init=False, repr=False)
    depth: int = field(init=False, repr=False)
    has_column: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        within = (*self.parts, *(one.type for one in self.fields))
        written = _length((self.name, *self.symbols, *self.aliases))
        written += sum(_length((one.name, *one.aliases, one.default or "")) for one in self.fields)
        is_group = self.kind in ("record", "union")
        has_column = any(one.has_column for one in within) if is_group else self.kind != "null"
        object.__setattr__(self, "weight", TYPE_WEIGHT + written + sum(one.weight for one in within))
        object.__setattr__(self, "depth", 1 + max((one.depth for one in within), default=0))
        object.__setattr__(self, "has_column", has_column)

    @property
    def short_name(self) -> str:
        """The name without its namespace, or the kind of a type without a name."""
        return self.name.rpartition(".")[2] or self.kind

    @property
    def is_nullable(self) -> bool:
        """Whether a value may be null."""
        return self.kind == "null" or (self.kind == "union" and any(part.kind == "null" for part in self.parts))

    @property
    def branches(self) -> tuple[AvroType, ...]:
        """The types that a value may have besides null."""
        parts = self.parts if self.kind == "union" else (self,)
        return tuple(part for part in parts if part.kind != "null")

    @property
    def unit(self) -> str:
        """The unit of a timestamp, millis, micros or nanos; empty for other types."""
        head, _, unit = self.logical.rpartition("-")
        return unit if head in _TIMES else ""

    def __str__(self) -> str:
        shown = self.logical or self.kind
        if self.logical == "decimal":
            shown = f"decimal({self.precision}, {self.scale})"
        return f"{shown} {self.name}" if self.name else shown


def _length(texts: Iterable[str]) -> int:
    return sum(len(text) + 1 for text in texts)


_SIMPLE = {kind: AvroType(kind) for kind in ("null", *_PRIMITIVES)}


@cached_by_size(lambda tree: 0)
def parse_avro(stored: StoredSchema) -> AvroType:
    """Parse a schema.

    Raises:
        SchemaMismatchError: it is not an Avro schema, contains itself, or is too large.
    """
    stored.check_kind("AVRO")
    fastavro = import_library("fastavro", extra="avro")
    named: dict[str, Any] = {}
    with schema_use("Avro"):
        for name, reference in stored.references:
            if name not in named:
                fastavro.parse_schema(_document(reference.text), named)
        return _TypeBuilder(named).node(fastavro.parse_schema(_document(stored.text), named), ())


def _document(text: str) -> Any:
    """Parse the JSON of a schema."""
    return _own_attributes(schema_document(text))


def _own_attributes(part: Any) -> Any:
    """Drop the attributes of types and fields that Avro does not know, and reject long names.

    The library has attributes of its own, with which a schema says that it need not be checked. A name must not be
    long, because a namespace is repeated in each type within it.
    """
    if isinstance(part, list):
        return [_own_attributes(one) for one in part]
    if not isinstance(part, dict):
        return part
    for name in (part.get("name") or "", part.get("namespace") or ""):
        if not isinstance(name, str) or len(name) > MAX_COLUMN_NAME_LENGTH:
            raise ValueError(f"a name is no text, or is longer than {MAX_COLUMN_NAME_LENGTH} characters")
    own = {name: part[name] for name in _ATTRIBUTES if name in part}
    return {name: _own_attributes(value) if name in _NESTING else value for name, value in own.items()}


class _TypeBuilder:
    """Builds the tree of a parsed schema, and replaces each name by its type."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._made: dict[str, AvroType] = {}

    def node(self, schema: Any, above: tuple[str, ...]) -> AvroType:
        if isinstance(schema, str):
            made = _SIMPLE.get(schema) or self._made.get(schema)
            found = made or self._defined(self._named[schema], above)
        else:
            found = self._defined(schema, above)
        if found.name:
            self._made[found.name] = found
        check_weight("Avro", found.weight, found.depth)
        return found

    def _defined(self, schema: Any, above: tuple[str, ...]) -> AvroType:
        if isinstance(schema, list):
            parts = tuple(self.node(part, above) for part in schema)
            if any(part.kind == "union" for part in parts):
                raise SchemaMismatchError("the Avro schema has a union in a union", remedy="Merge them into one.")
            return AvroType("union", parts=parts)
        kind = "record" if schema["type"] == "error" else schema["type"]
        if kind in ("array", "map"):
            return AvroType(kind, parts=(self.node(schema["items" if kind == "array" else "values"], above),))
        name = schema.get("name", "")
        aliases = _texts(schema.get("aliases", []), "aliases")
        if kind == "record":
            if name in above:
                raise SchemaMismatchError(
                    f"the Avro record {name} contains itself, but columns cannot",
                    remedy="Use a reader's schema without that field; or keep the bytes with Raw().",
                )
            names = _texts([field["name"] for field in schema["fields"]], "names of fields")
            if len(set(names)) < len(names):
                raise ValueError(f"the record {name} has two fields of one name")
            fields = tuple(self._field(field, (*above, name)) for field in schema["fields"])
            return AvroType(kind, name, fields=fields, aliases=aliases)
        if kind == "enum":
            symbols = _texts(schema["symbols"], "symbols")
            if max(map(len, (*symbols, schema.get("default") or "")), default=0) > MAX_COLUMN_NAME_LENGTH:
                raise ValueError(f"a symbol is longer than {MAX_COLUMN_NAME_LENGTH} characters")
            return AvroType(kind, name, symbols=symbols, default=schema.get("default"), aliases=aliases)
        size = _whole(schema, "size") if kind == "fixed" else 0
        if not 0 <= size <= MAX_FIXED_BYTES:
            raise SchemaMismatchError(
                f"the Avro type {name} has a fixed size of {size} bytes",
                remedy=f"Use a size from 0 to {MAX_FIXED_BYTES}, or the type bytes.",
            )
        return _with_logical(schema, AvroType(kind, name if kind == "fixed" else "", size=size, aliases=aliases))

    def _field(self, field: Mapping[str, Any], above: tuple[str, ...]) -> AvroField:
        default = json.dumps(field["default"]) if "default" in field else None
        aliases = _texts(field.get("aliases", []), "aliases")
        return AvroField(field["name"], self.node(field["type"], above), aliases, default)


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise ValueError(f"the {what} are no list of texts")
    return tuple(values)


def _whole(schema: Mapping[str, Any], name: str) -> int:
    value = schema.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the {name} is no whole number")
    return value


def _with_logical(schema: Mapping[str, Any], plain: AvroType) -> AvroType:
    """Add the logical type, unless Avro ignores it on this type."""
    logical = schema.get("logicalType")
    if not isinstance(logical, str) or plain.kind not in _STORED_AS.get(logical, ()):
        return plain
    needed = {"uuid": UUID_BYTES, "duration": DURATION_BYTES}.get(logical, plain.size)
    if plain.kind == "fixed" and plain.size != needed:
        return plain
    precision, scale = (_whole(schema, name) if logical == "decimal" else 0 for name in ("precision", "scale"))
    return replace(plain, logical=logical, precision=precision, scale=scale)


def columns_ddl(schema: AvroType, column: str | None) -> str:
    """Return the columns of a schema, as Spark DDL.

    Args:
        schema: the reader's schema.
        column: one column for the whole value; ``None`` for a column for each field.

    Raises:
        SchemaMismatchError: the schema has no columns.
    """
    branches = schema.branches
    if not schema.has_column:
        raise SchemaMismatchError("the Avro schema has no columns", remedy="Use a schema with fields.")
    if column is None and len(branches) == 1 and branches[0].kind == "record":
        return ", ".join(column_ddl(name, spark_type(kind, name)) for name, kind in members(branches[0], ""))
    return column_ddl(column or UNNAMED, spark_type(schema, column or UNNAMED))


def is_record(schema: AvroType) -> bool:
    """Return whether a schema is a record, or a record or null."""
    return [branch.kind for branch in schema.branches] == ["record"]


def members(schema: AvroType, path: str) -> Sequence[tuple[str, AvroType]]:
    """Return the names and types of the fields of the STRUCT for a record, or for a union of several types.

    Args:
        schema: the record or the union.
        path: the path of the value, for errors.

    Raises:
        SchemaMismatchError: Spark cannot distinguish their names.
    """
    if schema.kind == "record":
        found = [(field.name, field.type) for field in schema.fields if field.type.has_column]
    else:
        branches = [branch for branch in schema.branches if branch.has_column]
        names = [branch.short_name for branch in branches]
        if first_duplicate(names):
            names = [branch.name.replace(".", "_") or branch.kind for branch in branches]
        found = list(zip(names, branches))
    check_distinct([name for name, _ in found], path or schema.name)
    return found


def spark_type(schema: AvroType, path: str) -> str:
    """Return the Spark type of a schema, as DDL.

    Args:
        schema: the type.
        path: the path of the value, for errors.

    Raises:
        SchemaMismatchError: Spark has no such type.
    """
    branches = schema.branches
    if len(branches) > 1:
        return struct_ddl([(name, spark_type(kind, f"{path}.{name}")) for name, kind in members(schema, path)])
    if not schema.has_column:
        raise SchemaMismatchError(
            f"{path} is always null in the Avro schema", remedy="Use a reader's schema without it."
        )
    (only,) = branches
    if only.kind == "record":
        return struct_ddl([(name, spark_type(kind, f"{path}.{name}")) for name, kind in members(only, path)])
    if only.kind == "array":
        return f"ARRAY<{spark_type(only.parts[0], f'{path}[]')}>"
    if only.kind == "map":
        return f"MAP<STRING, {spark_type(only.parts[0], f'{path}{{}}')}>"
    return _scalar_type(only, path)


def _scalar_type(schema: AvroType, path: str) -> str:
    if schema.logical == "decimal":
        if schema.precision > MAX_DIGITS:
            raise SchemaMismatchError(
                f"{path} is a decimal of {schema.precision} digits, but DECIMAL has at most {MAX_DIGITS}",
                remedy="Use a reader's schema in which it is bytes without the logical type.",
            )
        return f"DECIMAL({schema.precision},{schema.scale})"
    if schema.logical == "date":
        return "DATE"
    if schema.unit:
        return _TIMES[schema.logical.rpartition("-")[0]]
    if schema.logical == "duration":
        return DURATION_DDL
    if schema.logical == "uuid" or schema.kind == "enum":
        return "STRING"
    return "BINARY" if schema.kind == "fixed" else _PRIMITIVES[schema.kind]
