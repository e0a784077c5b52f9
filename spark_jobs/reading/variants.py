"""VARIANT columns: executors pass JSON text, and Spark makes the values of it.

PySpark could take them from Python, too, but would have to be given Spark's own encoding, which ``parse_json`` makes
many times as fast. It fails a run on text that is no JSON, so decoders give none: see
:func:`spark_jobs.decoding.json_values.variant_problem`.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType, VariantType

from spark_jobs.decoding.ddl import quoted


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
