"""Spark's types out of DDL, and as Arrow's; and VARIANT columns, of which executors pass the JSON text.

PySpark would have to be given Spark's own encoding of a VARIANT. ``parse_json`` makes it many times as fast, but fails
a run on text that is no JSON, so decoders give none: see :func:`spark_jobs.decoding.json_values.variant_text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType, VariantType

from spark_jobs.decoding.ddl import quoted
from spark_jobs.reading.sql_types import ddl
from stream_consumers.errors import SchemaMismatchError


def as_text(schema: StructType) -> StructType:
    """The same columns with STRING for each VARIANT.

    Example:
        >>> as_text(StructType().add("id", "long").add("all", ArrayType(VariantType()))).simpleString()
        'struct<id:bigint,all:array<string>>'
    """
    found = _as_text(schema)
    assert isinstance(found, StructType)
    return found


def _as_text(kind: DataType) -> DataType:
    if isinstance(kind, VariantType):
        return StringType()
    if isinstance(kind, StructType):
        return StructType([StructField(c.name, _as_text(c.dataType), c.nullable, c.metadata) for c in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_as_text(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _as_text(kind.valueType), kind.valueContainsNull)
    return kind


def with_variants(rows: DataFrame, schema: StructType) -> DataFrame:
    """The rows with the columns of ``schema``.

    Args:
        rows: with the columns of :func:`as_text`.
        schema: the columns.
    """
    found = [column for column in schema.fields if has_variant(column.dataType)]
    made = {column.name: _parsed(f.col(quoted(column.name)), column.dataType) for column in found}
    return rows.withColumns(made) if made else rows


def has_variant(kind: DataType) -> bool:
    """Whether a VARIANT is in the type."""
    return _as_text(kind) != kind


def _parsed(value: Column, kind: DataType) -> Column:
    """The value of such text, within whatever is around it."""
    if isinstance(kind, VariantType):
        return f.parse_json(value)
    if isinstance(kind, ArrayType) and has_variant(kind):
        return f.transform(value, lambda item: _parsed(item, kind.elementType))
    if isinstance(kind, MapType) and has_variant(kind):
        return f.transform_values(value, lambda key, item: _parsed(item, kind.valueType))
    if isinstance(kind, StructType) and has_variant(kind):
        fields = [_parsed(value.getField(c.name), c.dataType).alias(c.name) for c in kind.fields]
        return f.when(value.isNotNull(), f.struct(*fields))
    return value


def struct_type(ddl: str) -> StructType:
    """Parse column definitions with the running session."""
    parsed = StructType.fromDDL(ddl)
    assert isinstance(parsed, StructType)
    return parsed


def declared_columns(ddl: str) -> StructType:
    """Parse the columns of a decoder.

    Raises:
        SchemaMismatchError: they do not parse.
    """
    try:
        return struct_type(ddl)
    except Exception as error:  # the parser's errors have no common type over classic and Connect sessions
        why = str(error).strip().partition("\n")[0]
        raise SchemaMismatchError(
            f"the schema {ddl!r} is not Spark DDL: {why}", remedy="Write it like 'id BIGINT, user STRING'."
        ) from error


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same columns for Arrow; times are in UTC."""
    # Before Spark 4.2 the helper has no such parameter, and says UTC by itself.
    utc: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **utc)


def plain_strings(rows: DataFrame, columns: Sequence[StructField]) -> DataFrame:
    """The same columns, with strings whose collation is the usual one as strings without any.

    A Connect client names the collation of each type that it sends, as for ``mapInPandas``. In the schema of a Delta
    table that is another type, which readers other than Spark do not know.

    Args:
        rows: of any session.
        columns: their columns.
    """
    named = [f.col(quoted(column.name)) for column in columns]
    if isinstance(rows.sparkSession, SparkSession):
        return rows.select(*named)
    return rows.select(
        *(
            source.cast(ddl(column.dataType)).alias(column.name, metadata=column.metadata)
            if "string" in column.dataType.simpleString()
            else source
            for source, column in zip(named, columns)
        )
    )
