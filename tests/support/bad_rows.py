"""A transform of whose rows some are bad in each way that there is."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from spark_jobs.reading.rejection import reject

FAILING = 123


def bad_rows(rows: DataFrame) -> DataFrame:
    """Rejects some rows, and fails for one message."""

    def picky(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        if number == FAILING:
            raise ValueError(number)
        return number

    rejected = reject(reject(rows, "id % 40 = 7", "seven"), "id % 100 = 1", "one")
    return rejected.withColumn("id", f.udf(picky, "bigint")("id"))


def is_bad(index: int) -> bool:
    """Whether the message of this number becomes a dead letter."""
    return index % 40 == 7 or index % 100 == 1 or index == FAILING
