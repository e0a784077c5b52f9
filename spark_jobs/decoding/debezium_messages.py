"""Reads Debezium's messages of Kafka Connect's JSON converter: the operation, and the row as JSON.

The converter writes a schema into each message if it is to (``schemas.enable``). It is the same text in most messages
of a topic, so that it is parsed once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from spark_jobs.decoding.debezium_order import source_order
from spark_jobs.decoding.debezium_types import Convert, HandlingModes, Placeholder, conversion, schema_fields, unfit
from spark_jobs.decoding.decoders import RESCUED, Column
from spark_jobs.decoding.json_documents import object_text, read_object, why
from spark_jobs.decoding.json_values import (
    MAX_JSON_LEVELS,
    Constant,
    RepeatingObject,
    is_encodable,
    json_text,
    kind_of,
    scanner,
)

OPERATIONS = ("c", "u", "d", "r", "t")
"""Create, update, delete, read in a snapshot, and truncate."""
MESSAGE = "m"
"""The operation of a logical decoding message, which changes no row."""
MARKS = ("__deleted", "__op")
"""The fields that ``ExtractNewRecordState`` adds to a row."""
# The names of the schemas of messages that are no changes of rows.
_OTHER_SCHEMA = re.compile(
    r"io\.debezium\.connector\.(?:common\.(?:Heartbeat|TransactionMetadataValue|Notification)"
    r"|postgresql\.MessageValue|[a-z0-9_.]+\.SchemaChangeValue)"
)
_TIMES = {"ts_ms", "ts_us", "ts_ns"}
_OF_TRANSACTION = {"status", "id", "event_count", "data_collections"} | _TIMES
_OF_SCHEMA_CHANGE = {"source", "databaseName", "ddl"}
_CONVERTER = {"schema", "payload"}
# White space between the tokens of JSON, which is less than a pattern's \s or strip() without an argument.
_BETWEEN = " \t\n\r"
_SCHEMA_START = re.compile(rf'\{{[{_BETWEEN}]*"schema"[{_BETWEEN}]*:[{_BETWEEN}]*')
_PAYLOAD_START = re.compile(rf'[{_BETWEEN}]*,[{_BETWEEN}]*"payload"[{_BETWEEN}]*:[{_BETWEEN}]*')
# The schemas of a topic are few, and a message repeats one of them.
_KEPT_SCHEMAS = 8
_scan = scanner(parse_constant=Constant)


def names_column(lists: Sequence[list[str] | None]) -> Column:
    """A column of lists of names."""
    return pa.array(lists, pa.list_(pa.field("element", pa.string())))


def is_other_schema(name: str) -> bool:
    """Whether a schema is that of messages that are no changes, by its name."""
    return _OTHER_SCHEMA.fullmatch(name) is not None


def unwrapped_operation(deleted: Any, operation: Any = None) -> str:
    """The operation of an unwrapped row; an update if only ``__deleted`` is there."""
    if not (isinstance(deleted, bool) or deleted in ("true", "false")):
        raise ValueError("field '__deleted' is neither true nor false: set delete.tombstone.handling.mode to a rewrite")
    if deleted in (True, "true"):
        return "d"
    if operation is None:
        return "u"
    if operation not in ("c", "u", "r"):
        raise ValueError("field '__op' is not one of c, u and r, although '__deleted' is false")
    return str(operation)


def operation_of(operation: Any, before: Any, after: Any) -> str | None:
    """The operation of an envelope; ``None`` for a message that changes no row.

    Raises:
        ValueError: the operation is unknown, or its row is not there.
    """
    if operation == MESSAGE:
        return None
    if type(operation) is not str or operation not in OPERATIONS:
        found = "nothing" if operation is None else kind_of(operation)
        raise ValueError(f"field 'op' is not one of {', '.join(OPERATIONS)} and {MESSAGE}; found {found}")
    if operation == "d" and before is None:
        raise ValueError("field 'before' is null, which has the row of a delete unless REPLICA IDENTITY is NOTHING")
    if operation in ("c", "u", "r") and after is None:
        raise ValueError("field 'after' is null, which has the row")
    return operation


def may_lack(operation: str | None, was_lacking: bool) -> bool:
    """Whether a placeholder may say that a value is not there; otherwise the database holds this very text.

    A snapshot reads all values. Where ``before`` has the old value, Debezium repeats it in ``after`` if it stays.

    Args:
        operation: of the change.
        was_lacking: whether ``before`` has no value of the column, or a placeholder.
    """
    return operation != "r" and (operation != "u" or was_lacking)


class _Change(NamedTuple):
    """What a message says.

    Args:
        document: the row as JSON, with values as they are meant; ``None`` if there is none.
        operation: ``None`` if the message is no change.
        order: the place in the log of the database, if it is wanted.
        without: the names of columns whose values are not there; ``None`` if the message is no change.
    """

    document: bytes | None = None
    operation: str | None = None
    order: str | None = None
    without: list[str] | None = None


_NO_CHANGE = _Change()


class _Conversions(NamedTuple):
    """What the schema of a message means for its columns.

    Args:
        by_name: the conversions of columns.
        is_other: whether messages of the schema are no changes.
    """

    by_name: Mapping[str, Convert]
    is_other: bool = False


TOMBSTONE = (
    "the payload is null, which unwrapped='rewrite' does not expect: a delete may have been turned into a tombstone, "
    "which has no row"
)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How messages are written.

    Args:
        modes: how values are written that have no schema.
        types: the semantic types of columns, for messages without a schema.
        placeholder: marks values that are not there.
        is_unwrapped: whether messages are rows instead of envelopes.
        has_order: whether the place in the log is read.
        is_null_wrong: whether each null may be the only sign of a delete.
    """

    modes: HandlingModes
    types: tuple[tuple[str, str], ...]
    placeholder: Placeholder
    is_unwrapped: bool
    has_order: bool
    is_null_wrong: bool


@functools.lru_cache(maxsize=64)
def change_reader(columns: pa.Schema, form: MessageForm, keeps_all: bool) -> ChangeReader:
    """Make the reader once; see :class:`ChangeReader`."""
    return ChangeReader(columns, form, keeps_all=keeps_all)


class ChangeReader:
    """Reads messages one by one.

    Args:
        columns: the columns of the row.
        form: how messages are written.
        keeps_all: whether fields are kept that have no column.
    """

    def __init__(self, columns: pa.Schema, form: MessageForm, *, keeps_all: bool) -> None:
        self._columns = [column for column in columns if not (keeps_all and column.name == RESCUED)]
        self._names = frozenset(column.name for column in self._columns)
        self._required = [column.name for column in self._columns if not column.nullable]
        self._form = form
        self._texts, self._collections = form.placeholder.texts, form.placeholder.collections
        self._keeps_all = keeps_all
        self._without_schema = self._conversions({name: {"name": kind} for name, kind in form.types}, None)
        # The last schemas, by the text of the message up to their end.
        self._known: dict[str, _Conversions] = {}

    def read(self, payload: bytes) -> _Change:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.read`."""
        try:
            conversions, value = self._split(object_text(payload))
            if conversions.is_other:
                return _NO_CHANGE
            if value is None:
                if self._form.is_null_wrong:
                    raise ValueError(TOMBSTONE)
                return _NO_CHANGE
            return self._change(value, conversions.by_name)
        except (ValueError, RecursionError, StopIteration) as error:
            raise ValueError(why(error)) from None

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.columns`."""
        found = list(zip(*(value or _NO_CHANGE for value in values))) or [(), (), (), ()]
        kinds = (pa.binary(), pa.string(), pa.string())
        return [*(pa.array(part, kind) for part, kind in zip(found, kinds)), names_column(found[3])]

    def _split(self, text: str) -> tuple[_Conversions, Any]:
        """What the schema of a message means, and its payload; a schema that was seen before is not parsed again."""
        for known, conversions in tuple(self._known.items()):
            start = _PAYLOAD_START.match(text, len(known)) if text.startswith(known) else None
            if start is not None:
                value, end = _scan(text, start.end())
                if text[end:].strip(_BETWEEN) == "}":
                    return conversions, value
        found = read_object(text, _scan)
        schema = found.get("schema")
        if found.keys() != _CONVERTER or isinstance(found, RepeatingObject) or not _is_schema(schema):
            return self._without_schema, found
        if schema is None:
            return self._without_schema, found["payload"]
        conversions = self._of_schema(schema)
        if (start := _SCHEMA_START.match(text)) is not None:
            if len(self._known) >= _KEPT_SCHEMAS:
                del self._known[next(iter(self._known))]
            self._known[text[: _scan(text, start.end())[1]]] = conversions
        return conversions, found["payload"]

    def _of_schema(self, schema: Mapping[str, Any]) -> _Conversions:
        if is_other_schema(str(schema.get("name"))):
            return _Conversions({}, is_other=True)
        fields = schema_fields(schema)
        if not self._form.is_unwrapped:
            fields = schema_fields(fields.get("after") or fields.get("before") or {})
        return self._conversions(fields, {})

    def _conversions(self, fields: Mapping[str, Mapping[str, Any]], default: Mapping[str, Any] | None) -> _Conversions:
        made = {
            column.name: conversion(column.type, fields.get(column.name, default), column.name, self._form.modes)
            for column in self._columns
        }
        return _Conversions({name: convert for name, convert in made.items() if convert is not None})

    def _change(self, value: Any, conversions: Mapping[str, Convert]) -> _Change:
        if not isinstance(value, dict):
            raise ValueError(f"the payload in the message is not an object; found {kind_of(value)}")
        if isinstance(value, RepeatingObject):
            raise ValueError(f"field {min(value.repeated)!r} is there twice")
        if _is_other(value) and not (self._form.is_unwrapped and self._names & value.keys()):
            return _NO_CHANGE
        order, row, before = None, value, None
        operation: str | None
        if self._form.is_unwrapped:
            operation = unwrapped_operation(value.get(MARKS[0]), value.get(MARKS[1]))
        else:
            before = value.get("before")
            operation = operation_of(value.get("op"), before, value.get("after"))
            if operation is None:
                return _NO_CHANGE
            order = source_order(value.get("source")) if self._form.has_order else None
            if operation == "t":
                return _Change(None, operation, order, [])
            name = "before" if operation == "d" else "after"
            row = value[name]
            if not isinstance(row, dict):
                raise unfit(name, "an object", row)
        found, without = self._converted(row, conversions, operation, before if isinstance(before, dict) else {})
        if operation != "d":
            for name in self._required:
                if found.get(name) is None and name not in without:
                    raise ValueError(f"field {name!r} is missing, but it is NOT NULL")
        # The row is one level around its values.
        document = json_text(found, MAX_JSON_LEVELS + 1)
        if not is_encodable(document):
            raise ValueError("the row has text with half of a surrogate pair")
        return _Change(document.encode(), operation, order, without)

    def _converted(
        self, row: dict[str, Any], conversions: Mapping[str, Convert], operation: str, before: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """The values of the row as they are meant, and the names of those that are not there."""
        if isinstance(row, RepeatingObject):
            raise ValueError(f"field {min(row.repeated)!r} of the row is there twice")
        found: dict[str, Any] = {}
        without: list[str] = []
        for name, value in row.items():
            is_column = name in self._names
            if value is None or not (
                is_column or (self._keeps_all and not (self._form.is_unwrapped and name in MARKS))
            ):
                continue
            if self._is_placeholder(value) and may_lack(operation, self._is_lacking(before.get(name))):
                if is_column:
                    without.append(name)
                continue
            convert = conversions.get(name)
            found[name] = value if convert is None else convert(value)
        return found, without

    def _is_lacking(self, value: Any) -> bool:
        return value is None or self._is_placeholder(value)

    def _is_placeholder(self, value: Any) -> bool:
        if type(value) is str:
            return value in self._texts
        return isinstance(value, (list, dict)) and value in self._collections


def _is_schema(schema: Any) -> bool:
    """Whether a field ``schema`` is that of Kafka Connect's JSON converter."""
    return schema is None or (isinstance(schema, dict) and "type" in schema)


def _is_other(value: Mapping[str, Any]) -> bool:
    """Whether a message without a schema is a heartbeat, or of a topic of transactions or schema changes."""
    names = value.keys()
    if not names.isdisjoint(("op", *MARKS)):
        return False
    return (
        (names <= _TIMES and "ts_ms" in names)
        or (names <= _OF_TRANSACTION and value.get("status") in ("BEGIN", "END") and "id" in names)
        or (names >= _OF_SCHEMA_CHANGE and isinstance(value["source"], dict))
    )
