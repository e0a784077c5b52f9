"""Spark's types out of DDL, and as Arrow's."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from spark_jobs.decoding.ddl import quoted
from spark_jobs.reading.sql_types import ddl
from stream_consumers.errors import SchemaMismatchError


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
