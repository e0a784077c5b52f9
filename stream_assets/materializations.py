"""What Dagster is told of a run: each micro-batch as an observation, and what the run made as one materialization."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import BatchReport, Ingestion
from spark_jobs.writing.storage import read_table
from stream_assets.metadata import (
    KIND,
    REPLAY,
    BatchSum,
    batch_metadata,
    ingest_metadata,
    replay_metadata,
    table_metadata,
)
from stream_consumers.messages import Shard

Context = dg.AssetExecutionContext | dg.OpExecutionContext
_DATA_VERSION = "dagster/data_version"
_PAGE = 100


class Told(ABC):
    """Tells Dagster of the batches of a run.

    Args:
        context: of the run.
        key: of the asset.
        ingestion: what went where.
        spark: the session.
    """

    def __init__(self, context: Context, key: dg.AssetKey, ingestion: Ingestion, spark: SparkSession) -> None:
        self._context = context
        self._key = key
        self._table = ingestion.table
        self._ledger = ingestion.ledger()
        self._spark = spark
        self._sum: BatchSum | None = None

    def add(self, report: BatchReport) -> None:
        """A batch is in the table."""
        if self._sum is None:
            self._sum = BatchSum(report)
        self._sum.add(report)
        entry = report.batch.entry
        ranges = describe_ranges({**entry.ranges, **entry.claims})
        self._context.log.info(f"{entry.kind} {entry.number} is in version {report.version} of {self._table}: {ranges}")

    @abstractmethod
    def tell_rest(self) -> None:
        """The run ends with an error. Spark is not asked for anything any more."""

    @abstractmethod
    def result(self) -> dg.AssetMaterialization | None:
        """The run ends well: what is left to tell; ``None`` if there is nothing."""

    def _made(
        self, metadata: Mapping[str, dg.MetadataValue], version: int, *, is_spark_asked: bool = True
    ) -> dg.AssetMaterialization:
        log = self._ledger.log
        columns = read_table(self._spark, log).schema.fields if is_spark_asked else None
        table = table_metadata(self._table, version=version, total_rows=log.row_count(), columns=columns)
        return dg.AssetMaterialization(
            self._key, metadata={**metadata, **table}, tags={_DATA_VERSION: f"delta:{version}"}
        )


class IngestMaterializations(Told):
    """Each batch is an observation when it is written; what they add up to is a materialization, at the end of the run.

    Whoever makes a table of this one when it is materialized does so once a run, for all that came. What a run wrote
    that was killed before it could tell is told by the next one.

    Args:
        context: of the run.
        key: of the asset.
        ingestion: what went where.
        spark: the session.
        every_seconds: materialize before the end, too, but no sooner than so long after the last time; 0 for each
            batch, ``None`` for the end only.
        clock: the time in seconds; for tests.
    """

    def __init__(
        self,
        context: Context,
        key: dg.AssetKey,
        ingestion: Ingestion,
        spark: SparkSession,
        *,
        every_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(context, key, ingestion, spark)
        self._every_seconds = every_seconds
        self._clock = clock
        self._due_at = clock()

    def add(self, report: BatchReport) -> None:
        """A batch is in the table: it is a point in the plots of the asset."""
        super().add(report)
        self._context.log_event(dg.AssetObservation(self._key, metadata=batch_metadata(report)))

    def tell_if_due(self) -> None:
        """What was added is not the last of the run: materialize, unless the last time was just now."""
        if self._every_seconds is not None and self._sum is not None and self._clock() >= self._due_at:
            self._tell(self._sum)
            self._due_at = self._clock() + self._every_seconds

    def tell_rest(self) -> None:
        """The run ends with an error: what was written is in the table, whatever comes now."""
        if self._sum is None:
            return
        try:
            self._tell(self._sum, is_spark_asked=False)
        except Exception as error:  # noqa: BLE001 - what ends the run is to be seen, not what comes of it
            self._context.log.warning(f"Dagster could not be told of {self._sum.batches} batches: {error}")

    def result(self) -> dg.AssetMaterialization | None:
        """What is left to tell, of this run or of one that was killed; ``None`` if Dagster knows of all batches."""
        if self._sum is not None:
            return self._made(ingest_metadata(self._sum), self._sum.last.version)
        version = self._untold()
        return None if version is None else self._made(ingest_metadata(None), version)

    def _tell(self, told: BatchSum, *, is_spark_asked: bool = True) -> None:
        self._context.log_event(self._made(ingest_metadata(told), told.last.version, is_spark_asked=is_spark_asked))
        # Only now: if Dagster could not be told, the next one, or that at the end, tells of it.
        self._sum = None

    def _untold(self) -> int | None:
        """The version of the newest batch of the group, if Dagster was not told of it."""
        known = told_version(self._context.instance, self._key)
        for commit in self._ledger.surviving():
            if known is not None and commit.version <= known:
                break
            if commit.entry is not None and commit.entry.kind == "batch":
                return commit.version
        return None


class ReplayMaterialization(Told):
    """A replay is materialized when it is whole: until then the table has a part of the rows it is to have.

    Args:
        context: of the run.
        key: of the asset.
        ingestion: what went where.
        spark: the session.
        what: what is replayed, like the partitions.
    """

    def __init__(
        self,
        context: Context,
        key: dg.AssetKey,
        ingestion: Ingestion,
        spark: SparkSession,
        *,
        what: Mapping[str, str],
    ) -> None:
        super().__init__(context, key, ingestion, spark)
        self._what = what
        self._messages = 0
        self._left: int | None = None

    def add(self, report: BatchReport) -> None:
        """A batch is in the table: say how far the replay is."""
        super().add(report)
        self._messages += sum(report.messages.values()) + report.dead
        self._left = sum(report.lag.values())
        self._context.log.info(f"{self._messages} messages are replayed, {self._left} are left")

    def tell_rest(self) -> None:
        """The run ends with an error: the rows are not yet those of the replay."""
        if self._left:
            self._context.log.warning(
                f"the replay is not whole: {self._left} messages are left, and no materialization tells of the others; "
                "a retry of this run continues it"
            )

    def result(self) -> dg.AssetMaterialization | None:
        """What was replaced; ``None`` if there was nothing."""
        if self._sum is None:
            return None
        return self._made(replay_metadata(self._sum, self._what), self._sum.last.version)


def told_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> int | None:
    """The version of the table up to which Dagster was told of ingested batches; ``None`` if it never was.

    Args:
        instance: where the materializations are.
        key: of the asset.
    """
    cursor = None
    while True:
        page = instance.fetch_materializations(key, limit=_PAGE, cursor=cursor)
        for record in page.records:
            made = record.asset_materialization
            # Replays write to the same table, and tell nothing of what ingestion has done meanwhile.
            if made is None or (kind := made.metadata.get(KIND)) is None or kind.value == REPLAY:
                continue
            version = made.metadata["delta/version"].value
            return version if isinstance(version, int) else None
        if not page.has_more:
            return None
        cursor = page.cursor


def describe_ranges(ranges: Mapping[Shard, tuple[int, ...]]) -> str:
    """Ranges for people.

    Example:
        >>> describe_ranges({Shard("orders", 1): (5, 9)})
        'orders/1 [5, 9)'
    """
    return ", ".join(f"{shard} [{start}, {end})" for shard, (start, end, *_) in sorted(ranges.items()))


def as_result(made: dg.AssetMaterialization) -> dg.MaterializeResult[Any]:
    """The same as the result of an asset."""
    version = dg.DataVersion((made.tags or {})[_DATA_VERSION])
    return dg.MaterializeResult(made.asset_key, metadata=made.metadata, data_version=version)
