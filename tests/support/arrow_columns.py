"""Columns that decoders declare, as Arrow has them, without the parser of a Spark session."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t

from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.isolation import decode_isolated
from spark_jobs.reading.spark_types import arrow_schema

CRASHED = "crashed"
_TOKEN = re.compile(r"`((?:[^`]|``)*)`|([A-Za-z_][A-Za-z_0-9]*)|([<>(),:]|\d+)")
_SIMPLE = {
    "BIGINT": t.LongType(),
    "INT": t.IntegerType(),
    "SMALLINT": t.ShortType(),
    "TINYINT": t.ByteType(),
    "DOUBLE": t.DoubleType(),
    "FLOAT": t.FloatType(),
    "STRING": t.StringType(),
    "BINARY": t.BinaryType(),
    "BOOLEAN": t.BooleanType(),
    "DATE": t.DateType(),
    "TIMESTAMP": t.TimestampType(),
    "TIMESTAMP_NTZ": t.TimestampNTZType(),
}


def arrow_columns(ddl: str) -> pa.Schema:
    """The columns of DDL, as Arrow has them."""
    return arrow_schema(spark_columns(ddl))


def decode(decoder: Decoder, payloads: Sequence[bytes | None]) -> tuple[list[dict[str, Any]], list[str | None]]:
    """The rows that a decoder makes of payloads, and why it refuses some."""
    schema = arrow_columns(decoder.ddl())
    decoded = decoder.decode(pa.array(payloads, pa.binary()), schema)
    rows = pa.RecordBatch.from_arrays(list(decoded.columns), schema=schema)
    rows.validate(full=True)
    assert len(decoded.errors) == len(payloads)
    return rows.to_pylist(), decoded.errors.to_pylist()


def decode_isolated_each(decoder: Decoder, payloads: Sequence[bytes]) -> tuple[list[dict[str, Any]], list[str | None]]:
    """The rows and errors of payloads in blocks of their own; the error of one that ends a process is ``CRASHED``."""
    schema = arrow_columns(decoder.ddl())
    blocks = [pa.record_batch({"payload": pa.array([payload], pa.binary())}) for payload in payloads]
    batches = decode_isolated(blocks, partial(_decoded, decoder, schema), partial(_crashed, schema))
    found = pa.Table.from_batches(batches).to_pylist()
    return [row["row"] for row in found], [row["error"] for row in found]


def _decoded(decoder: Decoder, schema: pa.Schema, block: pa.RecordBatch) -> pa.RecordBatch:
    decoded = decoder.decode(block["payload"], schema)
    rows = pa.StructArray.from_arrays(list(decoded.columns), fields=list(schema))
    return pa.record_batch({"row": rows, "error": decoded.errors})


def _crashed(schema: pa.Schema, message: pa.RecordBatch, reason: str) -> pa.RecordBatch:
    return pa.record_batch({"row": pa.nulls(1, pa.struct(list(schema))), "error": [CRASHED]})


def spark_columns(ddl: str) -> t.StructType:
    """The columns of DDL like ``id BIGINT, tags MAP<STRING, ARRAY<INT>>``."""
    tokens = [name.replace("``", "`") or word or sign for name, word, sign in _TOKEN.findall(ddl)]
    fields, rest = _fields(tokens, separator="")
    assert not rest, (ddl, rest)
    return t.StructType(fields)


def _fields(tokens: list[str], separator: str) -> tuple[list[t.StructField], list[str]]:
    fields = []
    while True:
        name, tokens = tokens[0], tokens[2:] if separator else tokens[1:]
        kind, tokens = _kind(tokens)
        fields.append(t.StructField(name, kind))
        if tokens[:1] != [","]:
            return fields, tokens
        tokens = tokens[1:]


def _kind(tokens: list[str]) -> tuple[t.DataType, list[str]]:
    word, tokens = tokens[0], tokens[1:]
    if word == "DECIMAL":
        return t.DecimalType(int(tokens[1]), int(tokens[3])), tokens[5:]
    if word == "ARRAY":
        kind, tokens = _kind(tokens[1:])
        return t.ArrayType(kind), tokens[1:]
    if word == "MAP":
        key, tokens = _kind(tokens[1:])
        value, tokens = _kind(tokens[1:])
        return t.MapType(key, value), tokens[1:]
    if word == "STRUCT":
        fields, tokens = _fields(tokens[1:], separator=":")
        return t.StructType(fields), tokens[1:]
    return _SIMPLE[word], tokens
