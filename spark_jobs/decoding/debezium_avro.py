"""Debezium's envelope in Avro: the columns of its rows, with the semantic types that Avro does not have.

Connect's converter writes the name of a semantic type beside the type, and the plain number as the value. So a schema,
that of the reader and that of the writer alike, gets the logical type of Avro that means the same, before it is parsed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.avro import avro_decoding
from spark_jobs.decoding.avro_schema import AvroType, is_record, members, parse_avro, spark_type
from spark_jobs.decoding.debezium_messages import (
    MARKS,
    is_other_schema,
    may_lack,
    names_column,
    operation_of,
    unwrapped_operation,
)
from spark_jobs.decoding.debezium_order import ORDER_FIELDS, source_order
from spark_jobs.decoding.debezium_types import CONNECT, DATA, TIME, Placeholder, decimal_text
from spark_jobs.decoding.decoders import Column, DecodedColumns, reason
from spark_jobs.decoding.json_values import read_moment
from spark_jobs.decoding.schema_decoder import BodyDecoder
from spark_jobs.decoding.schema_limits import cached_by_size, schema_document, schema_use
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError

# NanoTimestamp stays a number, because Spark has microseconds.
_LOGICAL = {
    f"{TIME}Date": "date",
    f"{CONNECT}Date": "date",
    f"{TIME}Timestamp": "timestamp-millis",
    f"{CONNECT}Timestamp": "timestamp-millis",
    f"{TIME}MicroTimestamp": "timestamp-micros",
    f"{TIME}Time": "time-millis",
    f"{CONNECT}Time": "time-millis",
    f"{TIME}MicroTime": "time-micros",
}
_ROWS = ("before", "after")
_SOURCE_TYPES: Mapping[str, pa.DataType] = {"long": pa.int64(), "int": pa.int32(), "string": pa.string()}


def _read_moment(text: str, path: str) -> datetime:
    try:
        return read_moment(text)
    except (ValueError, OverflowError):
        raise ValueError(f"field {path!r} is not a time that a TIMESTAMP can hold exactly") from None


def _scaled(value: Mapping[str, Any], path: str) -> str:
    return decimal_text(value["value"] or b"", value["scale"] or 0, path)


# What the values of a column are made of after Avro has decoded them, and the type of the column then.
_CONVERTED: Mapping[str, tuple[str, pa.DataType, Callable[[Any, str], Any]]] = {
    f"{TIME}ZonedTimestamp": ("TIMESTAMP", pa.timestamp("us", "UTC"), _read_moment),
    f"{TIME}IsoTimestamp": ("TIMESTAMP", pa.timestamp("us", "UTC"), _read_moment),
    f"{DATA}VariableScaleDecimal": ("STRING", pa.string(), _scaled),
}


@dataclass(frozen=True, slots=True)
class AvroEnvelope:
    """The schema of an envelope, or of an unwrapped row.

    Args:
        schema: with logical types, and of an envelope only with the fields that are read.
        row: the type of the row.
        semantic: the names of the semantic types of its fields that are converted after they are decoded.
        is_unwrapped: whether the schema is that of the row.
    """

    schema: StoredSchema
    row: AvroType
    semantic: Mapping[str, str]
    is_unwrapped: bool

    def columns(self) -> list[tuple[str, str]]:
        """The names of the columns of the row with their Spark types."""
        found = [(n, kind) for n, kind in members(self.row, "") if not (self.is_unwrapped and n in MARKS)]
        return [
            (name, _CONVERTED[self.semantic[name]][0] if name in self.semantic else spark_type(kind, name))
            for name, kind in found
        ]

    def decoder_of(self, writer: StoredSchema, columns: pa.Schema) -> BodyDecoder:
        """The function that decodes payloads of a writer's schema into :meth:`decoded` columns."""
        typed = typed_schema(writer)
        if is_other_schema(parse_avro(typed).name):
            return lambda payloads: (
                [pa.nulls(len(payloads), field.type) for field in self.decoded(columns)],
                pa.nulls(len(payloads), pa.string()),
            )
        return avro_decoding(typed, self.schema, self.decoded(columns), False).decode

    def decoded(self, columns: pa.Schema) -> pa.Schema:
        """The columns that Avro decodes: those of the envelope, or those of the unwrapped row."""
        declared = {field.name: field.type for field in columns}
        arrow: dict[str, pa.DataType] = {
            name: declared[name] if name in declared and name not in self.semantic else _plain_type(kind)
            for name, kind in members(self.row, "")
        }
        if self.is_unwrapped:
            return pa.schema(arrow)
        row: pa.DataType = pa.struct(list(arrow.items()))
        found: dict[str, pa.DataType] = {"before": row, "after": row, "op": pa.string()}
        own = dict(members(parse_avro(self.schema), ""))
        if "source" in own:
            source = members(own["source"].branches[0], "source")
            types = {name: _SOURCE_TYPES[kind.branches[0].kind] for name, kind in source}
            found["source"] = pa.struct([pa.field(name, kind) for name, kind in types.items()])
        return pa.schema({name: found[name] for name in own})

    def changes(
        self, decoded: DecodedColumns, columns: pa.Schema, placeholder: Placeholder
    ) -> tuple[list[Column], list[Column], Column]:
        """Make the changes of what was decoded.

        Args:
            decoded: :meth:`decoded` columns.
            columns: the columns of the row.
            placeholder: marks values that are not there.

        Returns:
            The columns of the row; the operations, the places in the log of the database, and the names of the columns
            whose values are not there; and for each row the reason why it is no change.
        """
        named = dict(zip(self.decoded(columns).names, decoded.columns))
        errors = decoded.errors.to_pylist()
        is_empty = functools.reduce(pc.and_, [column.is_null() for column in named.values()]).to_pylist()
        if self.is_unwrapped:
            signs = zip(*(named[name].to_pylist() for name in MARKS if name in named))
            operations = _each_row(unwrapped_operation, signs, errors, is_empty)
        else:
            are_there = ([is_there or None for is_there in named[name].is_valid().to_pylist()] for name in _ROWS)
            operations = _each_row(operation_of, zip(named["op"].to_pylist(), *are_there), errors, is_empty)
        orders: list[str | None] = [None] * len(errors)
        if "source" in named:
            is_none = [operation is None for operation in operations]
            orders = _each_row(source_order, ((one,) for one in named["source"].to_pylist()), errors, is_none)
        rows = named if self.is_unwrapped else _rows(named)
        without: list[list[str] | None] = [None if operation is None else [] for operation in operations]
        found = []
        for field in columns:
            column = rows[field.name]
            is_missing = _are_missing(column, placeholder)
            if any(is_missing):
                old = None if self.is_unwrapped else pc.struct_field(named["before"], field.name)
                were_lacking = [True] * len(operations) if old is None else _lack(old, placeholder)
                is_missing = [
                    one and may_lack(operation, was_lacking)
                    for one, operation, was_lacking in zip(is_missing, operations, were_lacking, strict=True)
                ]
                column = pc.if_else(pa.array(is_missing), pa.scalar(None, column.type), column)
                for names in [names for names, one in zip(without, is_missing) if one and names is not None]:
                    names.append(field.name)
            if field.name in self.semantic:
                _, kind, convert = _CONVERTED[self.semantic[field.name]]
                values = ((one, field.name) for one in column.to_pylist())
                column = pa.array(_each_row(convert, values, errors, column.is_null().to_pylist()), kind)
            found.append(column)
        marks = [pa.array(operations, pa.string()), pa.array(orders, pa.string()), names_column(without)]
        return found, marks, pa.array(errors, pa.string())


@dataclass(frozen=True, slots=True)
class ChangeRows:
    """Makes changes of what was decoded, so that a row for which that fails stops no other one: a ``RowReader``.

    Args:
        envelope: the schema.
        decoded: see :meth:`AvroEnvelope.changes`.
        row: the columns of the row.
        placeholder: marks values that are not there.
    """

    envelope: AvroEnvelope
    decoded: DecodedColumns
    row: pa.Schema
    placeholder: Placeholder

    def read(self, payload: Any) -> Any:
        """Return the number of a row, which is its own payload here."""
        return payload

    def columns(self, values: Sequence[int | None]) -> list[Column]:
        """Return the columns of rows with these numbers, and at last their errors."""
        rows = pa.array(values, pa.int64())
        decoded = DecodedColumns([one.take(rows) for one in self.decoded.columns], self.decoded.errors.take(rows))
        found, marks, errors = self.envelope.changes(decoded, self.row, self.placeholder)
        return [*found, *marks, errors]


def _each_row(
    make: Callable[..., Any],
    arguments: Iterable[Sequence[Any]],
    errors: list[str | None],
    are_null: Sequence[bool | None],
) -> list[Any]:
    """What a function makes of each row without an error; adds the reasons of the rows that it refuses."""
    found = []
    for row, (given, is_null) in enumerate(zip(arguments, are_null, strict=True)):
        one = None
        if errors[row] is None and not is_null:
            try:
                one = make(*given)
            except (ValueError, OverflowError) as error:
                errors[row] = reason(error)
        found.append(one)
    return found


@cached_by_size(lambda envelope: 2 * envelope.schema.characters)
def avro_envelope(stored: StoredSchema, is_unwrapped: bool, has_order: bool) -> AvroEnvelope:
    """Read the schema of an envelope.

    Args:
        stored: the reader's schema.
        is_unwrapped: whether it is the schema of the row, without an envelope.
        has_order: whether ``source`` is read.

    Raises:
        SchemaMismatchError: it is not the schema of an envelope of Debezium.
    """
    typed = typed_schema(stored)
    with schema_use("Avro"):
        document = schema_document(typed.text)
        if is_unwrapped:
            kind = parse_avro(typed)
            if not is_record(kind) or not any(field.name == MARKS[0] for field in kind.branches[0].fields):
                raise _no_envelope(f"an unwrapped row, a record with {MARKS[0]}")
            return AvroEnvelope(typed, kind.branches[0], _semantic(document), True)
        names = [*_ROWS, "op", *(["source"] if has_order else [])]
        given = document.get("fields", ()) if isinstance(document, dict) else ()
        kept = [_of_order(field) if field["name"] == "source" else field for field in given if field["name"] in names]
        schema = replace(typed, text=json.dumps({**document, "fields": kept} if kept else document))
        parsed = {field.name: field.type for field in parse_avro(schema).fields if field.type.has_column}
        kinds = {"op": "string"}
        if parsed.keys() != set(names) or any(
            [branch.kind for branch in parsed[name].branches] != [kinds.get(name, "record")] for name in names
        ):
            raise _no_envelope(f"an envelope of Debezium, a record with {', '.join(names)}")
        row = next(part for field in kept for part in _branches(field["type"]) if "fields" in part)
        return AvroEnvelope(schema, parsed["after"].branches[0], _semantic(row), False)


def _no_envelope(wanted: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"the Avro schema is not that of {wanted}",
        remedy="Give the schema of the values of a table's topic; and unwrapped= if ExtractNewRecordState wrote them.",
    )


def _branches(kind: Any) -> list[Any]:
    """The types of a union, or the type itself: names, or what is defined there."""
    return kind if isinstance(kind, list) else [kind]


def _semantic(record: Mapping[str, Any]) -> dict[str, str]:
    """The semantic types of fields that are converted after they are decoded."""
    found: dict[str, str] = {}
    for field in record["fields"]:
        for part in _branches(field["type"]):
            # A record is defined once, with the name of its semantic type.
            name = part.get("connect.name") if isinstance(part, dict) else part
            if name is not None and name in _CONVERTED:
                found[field["name"]] = name
    return found


def _of_order(field: dict[str, Any]) -> dict[str, Any]:
    """The field ``source`` with only the fields that decide the order."""

    def is_kept(own: Mapping[str, Any]) -> bool:
        plain = [kind["type"] if isinstance(kind, dict) else kind for kind in _branches(own["type"])]
        return own["name"] in ORDER_FIELDS and len([kind for kind in plain if kind in _SOURCE_TYPES]) == 1

    kind = field["type"]
    return {**field, "type": {**kind, "fields": [own for own in kind["fields"] if is_kept(own)]}}


def _plain_type(kind: AvroType) -> pa.DataType:
    """The Arrow type of a value that is converted after it is decoded, or that is no column."""
    if is_record(kind):
        return pa.struct([("scale", pa.int32()), ("value", pa.binary())])
    return pa.bool_() if kind.branches[0].kind == "boolean" else pa.string()


@cached_by_size(lambda stored: stored.characters)
def typed_schema(stored: StoredSchema) -> StoredSchema:
    """A schema with the logical types of Avro in place of the semantic types that mean the same.

    Raises:
        SchemaMismatchError: it is not an Avro schema.

    Example:
        >>> kind = '{"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}'
        >>> typed_schema(StoredSchema("AVRO", kind)).text
        '{"type": "long", "connect.name": "io.debezium.time.MicroTimestamp", "logicalType": "timestamp-micros"}'
    """
    stored.check_kind("AVRO")
    with schema_use("Avro"):
        document = schema_document(stored.text)
        parts = [document]
        while parts:
            one = parts.pop()
            if isinstance(one, dict) and one.get("connect.name") in _LOGICAL and one.get("type") in ("int", "long"):
                one["logicalType"] = _LOGICAL[one["connect.name"]]
            parts += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        references = tuple((name, typed_schema(part)) for name, part in stored.references)
        return replace(stored, text=json.dumps(document), references=references)


def _rows(named: Mapping[str, Column]) -> Mapping[str, Column]:
    """The columns of the row: those of ``before`` of deletes, and those of ``after`` of other changes."""
    before, after = (cast("pa.StructArray", named[name]) for name in _ROWS)
    is_delete = pa.array([operation == "d" for operation in named["op"].to_pylist()])
    columns = zip(after.type.names, before.flatten(), after.flatten())
    return {name: pc.if_else(is_delete, old, new) for name, old, new in columns}


def _lack(column: Column, placeholder: Placeholder) -> list[bool]:
    """Whether each value of a column is null or a placeholder."""
    pairs = zip(column.is_null().to_pylist(), _are_missing(column, placeholder), strict=True)
    return [bool(is_null or is_missing) for is_null, is_missing in pairs]


def _are_missing(column: Column, placeholder: Placeholder) -> Sequence[bool | None]:
    """Whether each value of a column is a placeholder."""
    kind: Any = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        texts = list(placeholder.texts) if pa.types.is_string(kind) else [placeholder.data]
        return pc.is_in(column, value_set=pa.array(texts, kind)).to_pylist()
    if not pa.types.is_nested(kind):
        return []
    collections = placeholder.collections
    return [value in collections for value in column.to_pylist()]
