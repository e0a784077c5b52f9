"""What a table has no column for goes into one column of it, as JSON, so that nothing is lost and nothing changes."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from spark_jobs.decoding.ddl import quoted
from spark_jobs.decoding.decoders import RESCUED
from spark_jobs.decoding.json_rescue import united

_OPTIONS = {
    "ignoreNullFields": "true",
    # Without these, times have milliseconds only, and the zone of whoever wrote them.
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}


def rescue(rows: DataFrame, table: StructType | None) -> DataFrame:
    """The same rows in the columns of the table, and in ``_rescued`` as a JSON object what it has no column for.

    Fields that a struct of the table lacks are rescued, too, within an object of its name; those within arrays and maps
    stay where they are, and do not fit. What is null is not rescued. What ``_rescued`` holds already stays in it.

    Args:
        rows: to be written.
        table: the columns of the table; ``None`` if it is made of these rows.
    """
    columns = [(f.col(quoted(field.name)), field) for field in rows.schema.fields if field.name != RESCUED]
    kept, rest = _parts(columns, table if table is not None else rows.schema)
    if RESCUED not in rows.columns:
        return rows.select(*kept, _object(rest).alias(RESCUED))
    # A struct of the table may lack fields that the decoder has, and have others around it that it has not, either.
    has_parts = len(kept) + len(rest) > len(columns)
    return rows.select(*kept, _together(f.col(RESCUED), _object(rest), has_parts=has_parts).alias(RESCUED))


def _parts(fields: Iterable[tuple[Column, StructField]], own: StructType) -> tuple[list[Column], list[Column]]:
    """What there is a place for, and what there is none for, each by its name."""
    known = {field.name.lower(): field for field in own.fields}
    kept: list[Column] = []
    rest: list[Column] = []
    for column, field in fields:
        place = known.get(field.name.lower())
        if place is None:
            rest.append(column.alias(field.name))
            continue
        inside, outside = _divided(column, field, place)
        kept.append(inside.alias(field.name, metadata=field.metadata))
        rest += [outside.alias(field.name)] if outside is not None else []
    return kept, rest


def _divided(column: Column, field: StructField, own: StructField) -> tuple[Column, Column | None]:
    """The part of a column that the table has a place for, and the other one, if there may be any."""
    if not isinstance(field.dataType, StructType) or not isinstance(own.dataType, StructType):
        return column, None
    kept, rest = _parts([(column.getField(one.name), one) for one in field.dataType.fields], own.dataType)
    if not rest:
        return column, None
    # An object in which nothing is left is none.
    outside = f.when(f.to_json(f.struct(*rest), _OPTIONS) != "{}", f.struct(*rest))
    whole = f.struct(*kept) if kept else f.lit(None).cast(own.dataType)
    return f.when(column.isNotNull(), whole), outside


def _object(columns: list[Column]) -> Column:
    """A JSON object of those that are not null; null if all are."""
    if not columns:
        return f.lit(None).cast(StringType())
    return f.nullif(f.to_json(f.struct(*columns), _OPTIONS), f.lit("{}"))


def _together(first: Column, second: Column, *, has_parts: bool) -> Column:
    """Two JSON objects in one; ``has_parts`` says that both may have an object of the same name."""
    if has_parts:
        # Without Arrow, Spark would look for its way in the annotations, and warn.
        return f.udf(united, StringType(), useArrow=False)(first, second)
    head = f.substring(first, 1, f.length(first) - 1)
    both = f.concat(head, f.lit(","), f.substring(second, 2, f.length(second)))
    return f.coalesce(f.when(first.isNotNull() & second.isNotNull(), both), first, second)
