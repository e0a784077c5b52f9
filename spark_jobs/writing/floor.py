"""The floor of a keyed table: a value of ``sequence_by``, below which the rows of deleted keys may be gone.

A purge removes rows that mark deleted keys, and raises the floor just above them. From then on, a change below the
floor whose key has no row must not insert one, because a newer change may have deleted the key. The ledger has the
floor as a number or a text whose order is that of the values.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from spark_jobs.ledger.entries import Floor
from spark_jobs.reading.spark_types import text
from stream_consumers.errors import UnsupportedError

MAX_LENGTH = 1000
"""The most characters or bytes of a floor, which each ledger entry has. The beginning of a value is not above it."""


def floor_of(value: Column, kind: DataType) -> Column:
    """Return values of ``sequence_by`` in the form in which the ledger has a floor.

    Args:
        value: the column.
        kind: its type.

    Raises:
        UnsupportedError: values of this type have no such form.
    """
    if isinstance(kind, IntegralType):
        return value.cast("bigint")
    if kind == StringType():
        return f.substring(value, 1, MAX_LENGTH)
    if isinstance(kind, DateType):
        return f.unix_date(value)
    if isinstance(kind, TimestampType):
        return f.unix_micros(value)
    if isinstance(kind, TimestampNTZType):
        # The order of the texts is that of the values, up to the year 9999.
        return value.cast("string")
    if isinstance(kind, BinaryType):
        return f.hex(f.substring(value, 1, MAX_LENGTH))
    raise UnsupportedError(
        f"sequence_by is {kind.simpleString()}, and rows of deleted keys cannot be purged by values of this type",
        remedy="Leave purge_after_days out; or make a new table whose sequence_by is a whole number, a time or a text.",
    )


def floor_above(value: Column, kind: DataType) -> Column:
    """Return the lowest floor that is above a value, with the arguments and errors of :func:`floor_of`.

    Of a value that is longer than :data:`MAX_LENGTH` the floor is below it.
    """
    if isinstance(kind, (StringType, BinaryType)):
        return floor_of(f.concat(value, f.lit("\0").cast(kind)), kind)
    if isinstance(kind, TimestampNTZType):
        return floor_of(value + f.expr("INTERVAL '0.000001' SECOND"), kind)
    return floor_of(value, kind) + 1


def floor_sql(floor: Floor, kind: DataType) -> str:
    r"""Return the floor as a SQL expression of the type of ``sequence_by``; the inverse of :func:`floor_of`.

    Example:
        >>> print(floor_sql(7, TimestampType()), floor_sql("it's", StringType()))
        timestamp_micros(7) 'it\'s'
    """
    if isinstance(floor, int):
        made = {"date": "date_from_unix_date", "timestamp": "timestamp_micros"}.get(kind.typeName(), "")
        return f"{made}({floor:d})"
    if isinstance(kind, BinaryType):
        return f"unhex({text(floor)})"
    return f"CAST({text(floor)} AS TIMESTAMP_NTZ)" if isinstance(kind, TimestampNTZType) else text(floor)
