"""When Dagster is told of batches: each by itself, or from time to time of all that were written since."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import BatchReport, Ingestion
from spark_jobs.writing.storage import read_table
from stream_assets.metadata import BatchSum, sum_metadata
from stream_consumers.messages import Shard

Context = dg.AssetExecutionContext | dg.OpExecutionContext
_DATA_VERSION = "dagster/data_version"


class Materializations:
    """Tells Dagster of the batches of a run.

    Args:
        context: of the run.
        key: of the asset.
        ingestion: what went where.
        spark: the session.
        every_seconds: the least time between two materializations; 0 for one a batch.
        clock: the time in seconds; for tests.
    """

    def __init__(
        self,
        context: Context,
        key: dg.AssetKey,
        ingestion: Ingestion,
        spark: SparkSession,
        *,
        every_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._key = key
        self._table = ingestion.table
        self._log = ingestion.ledger().log
        self._spark = spark
        self._every_seconds = every_seconds
        self._clock = clock
        self._due_at = clock()
        self._sum: BatchSum | None = None

    def add(self, report: BatchReport) -> None:
        """A batch is in the table: Dagster is to be told of it."""
        if self._sum is None:
            self._sum = BatchSum(report)
        self._sum.add(report)

    def tell_if_due(self) -> None:
        """What was added is not the last of the run: tell of it, unless the last time was just now."""
        if self._sum is not None and self._sum.batches and self._clock() >= self._due_at:
            self._tell()
            self._due_at = self._clock() + self._every_seconds

    def tell_rest(self) -> None:
        """The run ends without a result: tell of what was written. Spark is not asked for anything any more."""
        if self._sum is None or not self._sum.batches:
            return
        try:
            self._tell(is_spark_asked=False)
        except Exception as error:  # noqa: BLE001 - what ends the run is to be seen, not what comes of it
            self._context.log.warning(f"Dagster could not be told of {self._sum.batches} batches: {error}")

    def _tell(self, *, is_spark_asked: bool = True) -> None:
        told, made = self._sum, self.materialization(is_spark_asked=is_spark_asked)
        try:
            self._context.log_event(made)
        except BaseException:
            # Dagster was not told: the next one, or that at the end, tells of it.
            self._sum = told
            raise

    def result(self) -> dg.MaterializeResult[Any] | None:
        """The run ends: what is left to tell, as the result of the asset; ``None`` if it wrote nothing."""
        if self._sum is None:
            return None
        made, version = self.materialization(), dg.DataVersion(f"delta:{self._sum.last.version}")
        return dg.MaterializeResult(self._key, metadata=made.metadata, data_version=version)

    def materialization(self, *, is_spark_asked: bool = True) -> dg.AssetMaterialization:
        """What was added since the last one.

        Args:
            is_spark_asked: for the columns of the table.
        """
        told = self._sum
        assert told is not None
        metadata = sum_metadata(
            told,
            table=self._table,
            total_rows=self._log.row_count(),
            columns=read_table(self._spark, self._log).schema.fields if is_spark_asked else None,
        )
        self._describe(told)
        self._sum = BatchSum(told.last)
        return dg.AssetMaterialization(self._key, metadata=metadata, tags={_DATA_VERSION: f"delta:{told.last.version}"})

    def _describe(self, told: BatchSum) -> None:
        entry, version = told.last.batch.entry, told.last.version
        if told.batches == 1:
            what = f"{entry.kind} {entry.number} is in version {version}"
        else:
            what = f"{told.batches} batches up to {entry.kind} {entry.number} are in versions up to {version}"
        if told.batches:
            self._context.log.info(f"{what} of {self._table}: {describe_ranges(told.ranges)}")


def describe_ranges(ranges: Mapping[Shard, tuple[int, ...]]) -> str:
    """Ranges for people.

    Example:
        >>> describe_ranges({Shard("orders", 1): (5, 9)})
        'orders/1 [5, 9)'
    """
    return ", ".join(f"{shard} [{start}, {end})" for shard, (start, end, *_) in sorted(ranges.items()))
