"""Converts Spark's types to SQL and to Arrow's types, and handles VARIANT columns.

Executors pass a VARIANT as JSON text, and Spark's ``try_parse_json`` creates the value, because PySpark itself is many
times slower. Decoders check the text first, see :func:`spark_jobs.decoding.json_values.variant_problem`, but Spark may
refuse more, such as many names with the same hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from inspect import signature
from operator import or_
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType, VariantType

from spark_jobs.decoding.ddl import quoted
from stream_consumers.errors import SchemaMismatchError

NOT_STORED = "Spark cannot parse JSON of this message as a VARIANT"
"""The error of messages that the decoder accepts, but Spark's ``try_parse_json`` does not."""
# The prefix of the columns of parsed values, which must not collide with columns of the user.
_MADE = "_stream_assets_variant_"


def as_text(schema: StructType) -> StructType:
    """Return the same columns with STRING for each VARIANT.

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
    """Return the rows with the columns of ``schema``, in which JSON text becomes a VARIANT.

    If Spark refuses a text, the row gets the error :data:`NOT_STORED`; without a column for it, the write fails.

    Args:
        rows: rows with the columns of :func:`as_text`.
        schema: the columns of the result.
    """
    found = [column for column in schema.fields if has_variant(column.dataType)]
    if not found:
        return rows
    texts = {column.name: f.col(quoted(column.name)) for column in found}
    made = {f"{_MADE}{column.name}": _parsed(texts[column.name], column.dataType) for column in found}
    parsed = rows.withColumns(made)
    values = {name: f.col(quoted(f"{_MADE}{name}")) for name in texts}
    is_refused = reduce(or_, (_differs(texts[c.name], values[c.name], c.dataType) for c in found))
    if "_error" in rows.columns:
        values["_error"] = f.coalesce("_error", f.when(is_refused, f.lit(NOT_STORED)))
    else:
        failed = f.raise_error(f.lit(NOT_STORED)).cast("boolean")
        parsed = parsed.where(f.when(is_refused, failed).otherwise(f.monotonically_increasing_id() >= 0))
    return parsed.withColumns(values).select(*map(quoted, rows.columns))


def _differs(text: Column, value: Column, kind: DataType) -> Column:
    """Return whether Spark has refused the text of a VARIANT in a value."""
    if isinstance(kind, VariantType):
        return f.isnull(text) != f.isnull(value)
    if isinstance(kind, MapType):
        text, value = f.map_values(text), f.map_values(value)
        kind = ArrayType(kind.valueType)
    if isinstance(kind, ArrayType):
        pairs = f.zip_with(text, value, lambda one, other: _differs(one, other, kind.elementType))
        return f.coalesce(f.exists(pairs, lambda differs: differs), f.lit(False))
    assert isinstance(kind, StructType)
    parts = [c for c in kind.fields if has_variant(c.dataType)]
    return reduce(or_, (_differs(text.getField(c.name), value.getField(c.name), c.dataType) for c in parts))


def has_variant(kind: DataType) -> bool:
    """Return whether the type contains a VARIANT."""
    return _as_text(kind) != kind


def _parsed(value: Column, kind: DataType) -> Column:
    """Parse the JSON text of each VARIANT in a value, at any depth."""
    if isinstance(kind, VariantType):
        return f.try_parse_json(value)
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
    """Return the same columns as an Arrow schema; times are in UTC."""
    # Before Spark 4.2 the helper always uses UTC, and has no such parameter.
    utc: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **utc)


def plain_strings(rows: DataFrame, columns: Sequence[StructField]) -> DataFrame:
    """Return the same rows, with the default collation removed from string columns.

    A Connect client adds the collation to each string type that it sends, as for ``mapInPandas``. In the schema of a
    Delta table that is a different type, which readers other than Spark do not support.

    Args:
        rows: the rows, of any session.
        columns: the columns of the rows.
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


def text(value: str) -> str:
    r"""Return a string as an SQL literal.

    Example:
        >>> print(text("the customer's"))
        'the customer\'s'
    """
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def properties(values: Mapping[str, str]) -> str:
    r"""Return table properties as SQL, in parentheses.

    Example:
        >>> print(properties({"a": "1' = '2"}))
        ('a' = '1\' = \'2')
    """
    return f"({', '.join(f'{text(name)} = {text(value)}' for name, value in values.items())})"


def ddl(kind: DataType, *, declared: bool = False, quote: Callable[[str], str] = quoted) -> str:
    """Return the DDL of a type, with any names of fields.

    Args:
        kind: the type.
        declared: whether to include NOT NULL and the comments of fields.
        quote: the function that quotes the name of a field.

    Example:
        >>> from pyspark.sql.types import StringType
        >>> ddl(StructType().add("first name", "string").add("tags", ArrayType(StringType())))
        'STRUCT<`first name`: string, `tags`: ARRAY<string>>'
    """

    def inner(part: DataType) -> str:
        return ddl(part, declared=declared, quote=quote)

    if isinstance(kind, StructType):
        fields = [f"{quote(f.name)}: {inner(f.dataType)}" for f in kind.fields]
        rest = [_not_null(f) + _comment(f) if declared else "" for f in kind.fields]
        return f"STRUCT<{', '.join(map(''.join, zip(fields, rest)))}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{inner(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{inner(kind.keyType)}, {inner(kind.valueType)}>"
    return kind.simpleString()


def column_ddl(column: StructField, *, declared: bool = False, required: bool = False) -> str:
    """Return a column of a new table as Spark DDL.

    Args:
        column: the column.
        declared: whether to include NOT NULL and the comments of nested fields.
        required: whether to include NOT NULL for the column itself.

    Example:
        >>> from pyspark.sql.types import LongType
        >>> column_ddl(StructField("id", LongType(), metadata={"comment": "of the customer"}))
        "`id` bigint COMMENT 'of the customer'"
        >>> column_ddl(StructField("id", LongType(), nullable=False), declared=True)
        '`id` bigint NOT NULL'
    """
    not_null = " NOT NULL" if required else _not_null(column) if declared else ""
    return f"{quoted(column.name)} {ddl(column.dataType, declared=declared)}{not_null}{_comment(column)}"


def _not_null(field: StructField) -> str:
    return "" if field.nullable else " NOT NULL"


def _comment(field: StructField) -> str:
    comment = field.metadata.get("comment")
    return f" COMMENT {text(str(comment))}" if comment else ""
