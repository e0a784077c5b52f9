"""Infers a schema from a sample of JSON payloads, by the same rules by which undeclared fields become columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from spark_jobs.decoding.ddl import name_ddl
from spark_jobs.decoding.isolation import decode_isolated
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_documents import object_text, read_object, why
from spark_jobs.decoding.json_inference import MAX_LEVELS, NEEDS_MAPPING, FieldStats
from spark_jobs.reading.spark_types import arrow_schema, ddl
from spark_jobs.writing.schema_evolution import columns_of
from stream_consumers.display import counted, shortened

# Names that cannot become columns are shown up to this many characters.
_SHOWN = 100
# The schema is pasted into a command in single quotes, or into a defs.yaml, whose templates Dagster renders.
_INTERPRETED = re.compile(r"['${]")
_COLUMNS = pa.struct([])
# Values of these kinds fit one type, and need no remark.
_ALIKE = ({"whole number", "number"}, {"date", "time"})


@dataclass(frozen=True, slots=True)
class InferredField:
    """An inferred column.

    Args:
        name: the name of the field.
        ddl: its type.
        messages: the number of messages in which it is not null.
        remarks: values that contradict each other or the table.
    """

    name: str
    ddl: str
    messages: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InferredSchema:
    """The columns for a sample of payloads.

    Args:
        messages: the number of payloads, without tombstones.
        fields: the columns, in the order in which they were found.
        refused: the number of payloads that are no JSON objects, by reason.
        remarks: fields that cannot become columns, and why.
    """

    messages: int
    fields: Sequence[InferredField]
    refused: Mapping[str, int] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    def ddl(self) -> str:
        """Return the schema for ``Json``."""
        return ", ".join(f"{name_ddl(field.name)} {field.ddl}" for field in self.fields)


def infer(payloads: Iterable[bytes | None]) -> InferredSchema:
    """Infer the columns of payloads that are JSON objects.

    Whole numbers become BIGINT, others DOUBLE, and ISO 8601 TIMESTAMP or DATE. Fields of mixed types become STRING.

    Args:
        payloads: the payloads; ``None`` is a tombstone, and has no fields.

    Example:
        >>> found = infer([b'{"id": 1, "at": "2024-02-29T12:00:00Z"}', b'{"id": 2.5, "tags": ["a"]}'])
        >>> found.ddl()
        'id double, at timestamp, tags ARRAY<string>'
        >>> [column.messages for column in found.fields]
        [2, 1, 1]
    """
    seen, refused, messages = FieldStats(), Counter[str](), 0
    for payload in payloads:
        if payload is None:
            continue
        messages += 1
        try:
            seen.add(read_object(object_text(payload)), _COLUMNS)
        except Exception as error:  # noqa: BLE001 - the reason is counted, whatever it is
            refused[why(error)] += 1
    columns, no_columns = columns_of(seen)
    inferred = [_inferred(column, seen.fields[column.name]) for column in columns.fields]
    fields = [one for one in inferred if not _INTERPRETED.search(f"{one.name} {one.ddl}")]
    odd = [f"{shortened(one.name, _SHOWN)!a} has names with ', $ or {{" for one in inferred if one not in fields]
    empty = [f"{name!r} is always null or empty" for name, inner in seen.fields.items() if not inner.has_content()]
    names = sorted(ascii(shortened(".".join(path), _SHOWN)) for path in no_columns)
    return InferredSchema(messages, fields, refused, [*empty, *odd, *(f"{name} cannot be a column" for name in names)])


def fitted(found: InferredSchema, payloads: Sequence[bytes | None], table: StructType) -> InferredSchema:
    """Return the schema with the types of a table, for fields whose values fit them.

    Args:
        found: the result of :func:`infer` for the payloads.
        payloads: the same payloads.
        table: the columns of the table.
    """
    known = {column.name.lower(): column for column in table.fields}
    fields = []
    for one in found.fields:
        column = known.pop(one.name.lower(), None)
        if column is None:
            fields.append(replace(one, remarks=(*one.remarks, "not in the table")))
            continue
        kind = ddl(column.dataType, quote=name_ddl)
        schema = arrow_schema(StructType([StructField(one.name, column.dataType)]))
        decode = _Errors(Json(f"{name_ddl(one.name)} {kind}"), schema)
        block = pa.record_batch({"payload": pa.array(payloads, pa.binary())})
        parts = [part.column("error") for part in decode_isolated([block], decode, _error)]
        misfits = sum(len(part) - part.null_count for part in parts) - sum(found.refused.values())
        if misfits:
            remark = f"{kind} in the table, which {misfits} of the messages do not fit"
            fields.append(replace(one, remarks=(*one.remarks, remark)))
        else:
            fields.append(replace(one, ddl=kind, remarks=()))
    missing = [f"{column.name!r} of the table has no value in any message" for column in known.values()]
    return replace(found, fields=fields, remarks=[*found.remarks, *missing])


@dataclass(frozen=True, slots=True)
class _Errors:
    """Decodes payloads, and keeps only the errors."""

    decoder: Json
    schema: pa.Schema

    def __call__(self, block: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"error": self.decoder.decode(block.column("payload"), self.schema).errors})


def _error(block: pa.RecordBatch, reason: str) -> pa.RecordBatch:
    return pa.record_batch({"error": [reason]})


def _inferred(column: StructField, seen: FieldStats) -> InferredField:
    remarks = list(_disagreements(seen, column.name, 1))
    if NEEDS_MAPPING.search(column.name):
        remarks.append("Delta accepts this name only with delta.columnMapping.mode=name")
    return InferredField(column.name, ddl(column.dataType, quote=name_ddl), seen.count, tuple(remarks))


def _disagreements(seen: FieldStats, path: str, level: int) -> Iterator[str]:
    """Yield a remark for each field whose values are not of one kind."""
    kinds = {kind: count for kind, count in seen.kinds.most_common() if kind != "null"}
    if len(kinds) > 1 and not any(kinds.keys() <= alike for alike in _ALIKE):
        yield f"{path} is " + " and ".join(f"{kind} {counted(count, 'time')}" for kind, count in kinds.items())
    if level < MAX_LEVELS:
        for name, inner in seen.fields.items():
            yield from _disagreements(inner, f"{path}.{name}", level + 1)
        for mark, part in (("{}", seen.values), ("[]", seen.items)):
            if part is not None:
                yield from _disagreements(part, f"{path}{mark}", level + 1)
