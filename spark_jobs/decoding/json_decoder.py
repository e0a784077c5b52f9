"""``Json``: decodes JSON into the columns of a DDL schema or one VARIANT, and finds fields that have no column."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.ddl import MAX_COLUMN_NAME_LENGTH, declared_types
from spark_jobs.decoding.decoders import RESCUED, UNNAMED, Column, DecodedColumns, Decoder, Headers, Key
from spark_jobs.decoding.json_documents import blocks_of, decode_json, decode_values, has_only
from spark_jobs.decoding.json_inference import MAX_COUNTED_LEVELS
from spark_jobs.decoding.json_values import (
    MAX_JSON_LEVELS,
    TOO_DEEP,
    WHITE_SPACE,
    Constant,
    Float,
    Integer,
    Number,
    RepeatingObject,
    check_json_type,
    is_parsed_by_arrow,
    is_variant,
    scanner,
)
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_switch, choose_fields

MAX_FORM_CHARACTERS = 1 << 20
"""The most characters that describe the undeclared fields of a message, of which the driver reads each."""
# More fields of an object become a MAP, or end the run.
_MAX_ALIKE = 1000
# Any number of this many digits is longer than a BIGINT.
_WIDE_INTEGER = 21
_UNDECLARED = "it has fields that are not declared"
Path: TypeAlias = "tuple[str, ...]"
"""The names of a field and of all fields around it, outermost first."""
IN_ARRAY, IN_MAP = "[]", "{}"
"""The names of an item of an array and of a value of a map in a path."""
_scan = scanner(parse_constant=Constant)


class JsonMode(str, enum.Enum):
    """The values of JSON that a column accepts.

    ``lenient`` also accepts some values that are written differently from the type; ``strict`` does not.

    Example:
        >>> JsonMode("strict") is JsonMode.STRICT
        True
    """

    LENIENT = "lenient"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Json:
    """Decodes JSON objects into the columns of a DDL schema.

    Fields that the schema does not name are ignored; missing fields and ``null`` become null. A message becomes a dead
    letter if a value does not fit its column, a ``NOT NULL`` field is missing, or the payload is not an object. Times
    without a zone are read as UTC; dates and times are of the years 1 to 9999. A tombstone (a message without a
    payload) becomes a row of nulls.

    A column gets exactly the value of the message in each ``mode``: nothing is rounded or cut to fit, except that
    DOUBLE and FLOAT get the number nearest to one with a point or an exponent. See the table in
    docs/decode-messages.md. ``lenient``, the default, accepts any value for a STRING, with numbers as written, and for
    a TIMESTAMP also names of zones and whole numbers of seconds. ``strict`` accepts only values written as the type.

    Args:
        schema: Spark DDL of BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BINARY (of base64),
            BOOLEAN, DATE, TIMESTAMP, VARIANT, and of STRUCT, ARRAY and MAP of them. By default there is one column, a
            VARIANT of the whole payload, which then may be any JSON.
        mode: a :class:`JsonMode`, or its name.
        column: the name of the VARIANT if there is no schema.
        rescue: whether to put fields that the schema does not name into a column ``_rescued``, as a JSON object, like
            ``schema_changes="rescue"`` of an asset; they are ignored by default.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        SchemaMismatchError: the schema is not DDL; the error names the first wrong token and its position.
        InvalidOptionError: the schema has no columns, or has an INTERVAL.

    Example:
        >>> Json("id BIGINT, user STRING").ddl()
        'id BIGINT, user STRING'
        >>> Json().ddl()
        '`payload` VARIANT'
    """

    schema: str | None = None
    mode: JsonMode | str = field(default=JsonMode.LENIENT, kw_only=True)
    column: str = field(default=UNNAMED, kw_only=True)
    rescue: bool = field(default=False, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        choose_fields(self, mode=JsonMode)
        check_switch("rescue", self.rescue)
        if self.schema is None:
            return
        if not isinstance(self.schema, str) or not self.schema.strip():
            raise InvalidOptionError(
                f"schema={self.schema!r} has no columns, so that no part of a message would be kept",
                remedy="Write it like 'id BIGINT, user STRING'; leave it out for one VARIANT of the whole payload; or "
                "use Raw() or Text() for undecoded payloads.",
            )
        if "interval" in declared_types(self.schema):
            raise InvalidOptionError(
                f"the schema {self.schema!r} has the type INTERVAL, but Delta tables have no intervals",
                remedy="Declare it as STRING, and use CAST(… AS INTERVAL …) in the transform.",
            )

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        if self.schema is not None:
            return f"{self.schema}, {RESCUED} STRING" if self.rescue else self.schema
        escaped = self.column.replace("`", "``")
        return f"`{escaped}` VARIANT"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`."""
        for column in schema:
            check_json_type(column.name, column.type)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        self.check(schema)
        if self.schema is None:
            return DecodedColumns(*decode_values(payloads))
        declared = self.declared(schema)
        columns, errors = decode_json(payloads, declared, is_lenient=self.mode is JsonMode.LENIENT)
        if not self.rescue:
            return DecodedColumns(columns, errors)
        found = rescued(payloads, declared)
        return DecodedColumns([*columns, found.fields], pc.coalesce(errors, found.errors))

    def declared(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns of ``schema`` that the DDL names."""
        return schema.remove(schema.get_field_index(RESCUED)) if self.rescue else schema


def with_rescue(decoder: Decoder) -> Decoder:
    """Return the decoder with ``rescue``, if it ignores fields."""
    if isinstance(decoder, Json):
        return decoder if decoder.schema is None else replace(decoder, rescue=True)
    # Debezium rescues the fields of its rows.
    wrapped: Callable[[], Decoder] | None = getattr(decoder, "with_rescue", None)
    return decoder if wrapped is None else wrapped()


@dataclass(frozen=True, slots=True)
class FieldFinder:
    """Decodes JSON, and marks documents with fields that the schema does not name as undeclared and as errors.

    Fields without content (null, empty objects and arrays) are ignored, because their type is still unknown.

    Args:
        decoder: a decoder with a schema.
        known: paths of further fields to ignore, with everything in them.

    Example:
        >>> finder = FieldFinder(Json("id BIGINT"))
        >>> documents = pa.array([b'{"id": 1}', b'{"id": 2, "color": "red", "empty": {}}'])
        >>> finder.decode(documents, pa.schema({"id": pa.int64()})).undeclared.to_pylist()
        [None, '{"color": ""}']
    """

    decoder: Json
    known: frozenset[Path] = frozenset()

    @property
    def key(self) -> Key:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        return self.decoder.key

    @property
    def headers(self) -> Headers:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        return self.decoder.headers

    def ddl(self) -> str:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        return self.decoder.ddl()

    def check(self, schema: pa.Schema) -> None:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        self.decoder.check(schema)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        decoded = self.decoder.decode(payloads, schema)
        fields, twice = rescued(payloads, self.decoder.declared(schema), self.known)
        # Until they have columns, such a document must not be written.
        unwritten = pc.if_else(fields.is_valid(), pa.scalar(_UNDECLARED), pa.scalar(None, pa.string()))
        undeclared = None if fields.null_count == len(fields) else fields
        return DecodedColumns(decoded.columns, pc.coalesce(decoded.errors, twice, unwritten), undeclared)


def field_finder(decoder: Decoder) -> FieldFinder | None:
    """Wrap a decoder so that it finds undeclared fields; ``None`` if it ignores no fields or cannot find them."""
    return FieldFinder(decoder) if isinstance(decoder, Json) and decoder.schema is not None else None


class RescuedFields(NamedTuple):
    """The parts of documents that have no column.

    Args:
        fields: for each document a JSON object; null if every part has a column. If known fields are omitted, it has
            other values of the same kinds, and fewer: see :func:`_form`.
        errors: for each document the reason why these parts cannot be kept unchanged; null if they can.
    """

    fields: Column
    errors: Column


class _UnkeptFieldsError(Exception):
    """The fields of a document without a column cannot be kept, or become columns."""


def rescued(payloads: Column, schema: pa.Schema, known: Collection[Path] | None = None) -> RescuedFields:
    """Find the fields of each document that the schema does not name, at any depth, and keep them in their places.

    The text of numbers is kept. Fields that are null are omitted. A payload that is not a JSON object has no fields.

    Args:
        payloads: the documents; null is a tombstone.
        schema: the declared columns.
        known: also omit these fields with everything in them, fields whose names are too long for a column, and fields
            without content (null, empty objects and arrays).

    Example:
        >>> schema = pa.schema([("id", pa.int64()), ("shop", pa.struct([("name", pa.string())]))])
        >>> documents = [b'{"id": 1, "shop": {"name": "a", "zip": 1.10}, "new": [1]}', b'{"id": 2, "new": null}']
        >>> rescued(pa.array(documents), schema).fields.to_pylist()
        ['{"shop": {"zip": 1.10}, "new": [1]}', None]
    """
    kind = pa.struct(list(schema))
    found: list[str | None] = []
    errors: list[str | None] = []
    for block in blocks_of(payloads):
        # Arrow finds no fields in types that it cannot parse.
        if is_parsed_by_arrow(schema) and has_only(block, schema):
            found += [None] * len(block)
            errors += [None] * len(block)
            continue
        for document in block.to_pylist():
            error = fields = None
            try:
                fields = _rescued(document, kind, known)
            except _UnkeptFieldsError as unkept:
                error = str(unkept)
            except (ValueError, StopIteration):
                # If the decoder cannot read the document either, it returns the reason.
                error = "its fields without a column cannot be read"
            except RecursionError:
                error = "nested too deep"
            found.append(fields)
            errors.append(error)
    return RescuedFields(pa.array(found, pa.string()), pa.array(errors, pa.string()))


def merge_objects(first: str | None, second: str | None) -> str | None:
    """Merge two JSON objects, and recursively their objects of the same name; keep the text of numbers.

    Example:
        >>> merge_objects('{"shop": {"zip": 1.10}}', '{"shop":{"city":"b"},"user":"ada"}')
        '{"shop": {"zip": 1.10, "city": "b"}, "user": "ada"}'
    """
    if first is None or second is None:
        return first or second
    (merged, _), (other, _) = _scan(first, 0), _scan(second, 0)
    # A VARIANT may have as many levels as what is merged.
    left = [(merged, other)]
    for one, more in left:
        for name, value in more.items():
            if isinstance(value, dict) and isinstance(one.get(name), dict):
                left.append((one[name], value))
            else:
                one[name] = value
    return _written(merged, 2 * MAX_JSON_LEVELS)


def share_values(first: str | None, second: str | None) -> bool:
    """Return whether two JSON objects have values of the same name, so that :func:`merge_objects` would drop one.

    Example:
        >>> share_values('{"shop": {"zip": 1}}', '{"shop":{"city":"b"}}'), share_values('{"a": 1}', '{"a": {}}')
        (False, True)
    """
    if first is None or second is None:
        return False
    left = [(_scan(first, 0)[0], _scan(second, 0)[0])]
    for one, other in left:
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return True
        left += ((one[name], value) for name, value in other.items() if name in one)
    return False


def _rescued(document: bytes | None, kind: pa.DataType, known: Collection[Path] | None) -> str | None:
    if document is None:
        return None
    value, _ = _scan(document.decode().strip(WHITE_SPACE), 0)
    left = _left(value, kind, (), known) if isinstance(value, dict) else None
    if left is None or known is None:
        return None if left is None else _written(left)
    form = _form(left)
    if len(form) > MAX_FORM_CHARACTERS:
        raise _UnkeptFieldsError("there are too many undeclared fields and kinds of their values")
    return form


def _left(value: Any, kind: pa.DataType, path: Path, known: Collection[Path] | None) -> Any:
    """Return the part of a value that has no place in a type; ``None`` if everything has one."""
    found: dict[str, Any] = {}
    if is_variant(kind):
        return None
    if isinstance(value, dict) and isinstance(kind, pa.StructType):
        declared = {field.name: field.type for field in kind}
        repeated = value.repeated if isinstance(value, RepeatingObject) else frozenset[str]()
        for name, one in value.items():
            inner = (*path, name)
            if name in declared:
                found[name] = _left(one, declared[name], inner, known)
            elif known is None or (
                len(name) <= MAX_COLUMN_NAME_LENGTH and has_content(one, len(inner)) and not _is_within(inner, known)
            ):
                if name in repeated:
                    raise _twice(name)
                found[name] = one
    elif isinstance(value, dict) and isinstance(kind, pa.MapType):
        found = {name: _left(one, kind.item_type, (*path, IN_MAP), known) for name, one in value.items()}
    elif isinstance(value, list) and isinstance(kind, pa.ListType):
        parts = [_left(one, kind.value_type, (*path, IN_ARRAY), known) for one in value]
        return parts if any(part is not None for part in parts) else None
    return {name: one for name, one in found.items() if one is not None} or None


def _twice(name: str) -> _UnkeptFieldsError:
    return _UnkeptFieldsError(f"the field {name!r:.200}, for which there is no column, occurs twice")


def _is_within(path: Path, known: Collection[Path]) -> bool:
    return any(path[:length] in known for length in range(1, len(path) + 1))


def has_content(value: Any, level: int = 0) -> bool:
    """Return whether a parsed value has anything but null, empty objects and arrays.

    Args:
        value: the value.
        level: its level in the document. Those that the driver does not count are ignored.

    Example:
        >>> has_content({"a": [None, {}]}), has_content({"a": [0]})
        (False, True)
    """
    left = [(value, level)]
    while left:
        one, at = left.pop()
        if isinstance(one, (dict, list)):
            parts = one.values() if isinstance(one, dict) else one
            left.extend((part, at + 1) for part in parts if at < MAX_COUNTED_LEVELS)
        elif one is not None:
            return True
    return False


def _form(value: Any, level: int = 0) -> str:
    """Write a document with the same names and kinds of values, which gets the same columns but has no values.

    It is small enough for the driver, because items of an array that have the same form occur once.
    """
    if isinstance(value, Integer):
        return value[:_WIDE_INTEGER]
    if isinstance(value, str):
        return "0.5" if type(value) is Float and not math.isinf(float(value)) else '""'
    if not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, RepeatingObject):
        raise _twice(min(value.repeated))
    forms: dict[str, None] = {}
    if isinstance(value, list):
        for item in value if level < MAX_COUNTED_LEVELS else ():
            forms[_form(item, level + 1)] = None
        return f"[{', '.join(forms)}]"
    members: list[str] = []
    for name, one in value.items() if level < MAX_COUNTED_LEVELS else ():
        form = _form(one, level + 1)
        if len(members) <= _MAX_ALIKE or form not in forms:
            members.append(f"{json.dumps(name)}: {form}")
            forms[form] = None
    return f"{{{', '.join(members)}}}"


def _written(value: Any, levels: int = MAX_JSON_LEVELS) -> str:
    if isinstance(value, Number) and not isinstance(value, Constant):
        return str(value)
    if not isinstance(value, (dict, list)):
        return json.dumps(str(value) if isinstance(value, Constant) else value)
    if isinstance(value, RepeatingObject):
        raise _twice(min(value.repeated))
    if not levels:
        raise _UnkeptFieldsError(f"its fields without a column are {TOO_DEEP}")
    # A comprehension would use twice as many of the stack levels that Python allows.
    parts: list[str] = []
    if isinstance(value, list):
        for item in value:
            parts.append(_written(item, levels - 1))
        return f"[{', '.join(parts)}]"
    for name, one in value.items():
        parts.append(f"{json.dumps(name)}: {_written(one, levels - 1)}")
    return f"{{{', '.join(parts)}}}"
