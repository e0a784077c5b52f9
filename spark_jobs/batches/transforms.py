"""Calls the transform of an asset on decoded rows."""

from __future__ import annotations

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from spark_jobs.batches.ingestion import Transform
from spark_jobs.decoding.ddl import first_twice
from spark_jobs.reading.rejection import Treatment, let_pass, treating
from spark_jobs.reading.spark_types import plain_strings
from spark_jobs.session import first_line
from spark_jobs.writing.failures import place_of, public_text
from stream_consumers.errors import StreamAssetsError, TransformError

_CORRECT_IT = "Correct it; nothing was written, and the next run reads the same messages."
# PySpark decides so when the decorator runs.
_MADE_EARLY = (
    "A UDF that is made while its module is imported works only with a Spark in the process of the run. Make it inside "
    "the transform; or have such a Spark: SparkSessionResource(in_process=True), --in-process."
)
_NO_SESSION = "SESSION_OR_CONTEXT_NOT_EXISTS"


def transformed(rows: DataFrame, transform: Transform | None, treatment: Treatment = let_pass) -> DataFrame:
    """The rows that the transform makes; the same rows without one.

    Args:
        rows: with the columns of the decoder and those of the stream.
        transform: of the asset.
        treatment: of what the transform rejects.

    Raises:
        TransformError: it raised, or makes a column twice.
    """
    if transform is None:
        return rows
    name = getattr(transform, "__name__", "transform")
    try:
        with treating(treatment):
            result = transform(rows)
        fields = result.schema.fields
    except StreamAssetsError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        said = f": {public_text(error)}" if isinstance(error, PySparkException) else ""
        failure = TransformError(
            f"the transform {name!r} raised {type(error).__name__}{place_of(error)}{said}",
            remedy=_MADE_EARLY if condition == _NO_SESSION else _CORRECT_IT,
        )
        failure.detail = first_line(error)
        # Its text may hold values of rows, and Dagster keeps the text of each cause.
        raise failure from None
    if twice := first_twice(field.name for field in fields):
        raise TransformError(
            f"the transform {name!r} makes the column {twice!r} twice, whether in upper or lower case",
            remedy=_CORRECT_IT,
        )
    return plain_strings(result, fields)
