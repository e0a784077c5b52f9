"""What all jobs have in common: how a planned batch is written and reported, and the loop that drains a job."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step
from spark_jobs.batches.retries import Retries
from spark_jobs.batches.writer import BatchWriter, OutdatedError, Written
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.batches import BatchPlan, BatchSource, Range
from stream_consumers.errors import DataLossError, SourceRecreatedError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl


class BatchJob(ABC):
    """Plans batches and writes them, in the commit order of :mod:`spark_jobs.batches`.

    Args:
        spark: a session that can write Delta tables.
        ingestion: what goes where.
        url: of the stream, for messages.
        observer: told of each step, for progress bars and for tests that kill the process there.
        on_wait: told why the job waits, and how long.

    What fails for a reason that may be gone soon is tried again here, for ``ingestion.retry_seconds``: a plan is made
    anew, from the ledger, and so is a batch that could not be read or written.

    Raises:
        SparkSessionError: the session cannot write Delta tables.

    Example::

        while (batch := job.plan()) is not None:
            report = job.run(batch)
    """

    def __init__(
        self,
        spark: SparkSession,
        ingestion: Ingestion,
        *,
        url: StreamUrl,
        observer: Observer,
        on_wait: Callable[[str], object],
    ) -> None:
        self._spark = spark
        self._ingestion = ingestion
        self._observer = observer
        self._on_wait = on_wait
        self._retries = Retries(ingestion.retry_seconds, on_wait=on_wait)
        self._writer = BatchWriter(spark, ingestion, url=url, observer=observer)
        self._ledger = self._writer.ledger
        self._parallelism = parallelism(spark)

    def plan(self) -> Batch | None:
        """Steps 1 to 4: the next batch; ``None`` if there is none.

        Raises:
            StreamAssetsError: see :meth:`_next_batch`.
        """
        return self._retries.call(self._next_batch)

    @abstractmethod
    def _next_batch(self) -> Batch | None:
        """Steps 1 to 4, from the ledger as it is now."""

    def run(self, batch: Batch) -> BatchReport | None:
        """Steps 5 to 8; ``None`` if the batch is not in the table and has to be planned again.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            DataLossError: rows would be replaced whose messages the stream does not hold any more.
            LedgerUnreadableError: whether it is cannot be told; the broker was told nothing.
        """
        began = time.monotonic()
        try:
            written = self._write(batch)
        except OutdatedError as outdated:
            self._look_again(outdated)
            return None
        except StreamAssetsError as error:
            self._retries.wait(error)
            return None
        if written is None:
            return None
        lag = self._retries.call(lambda: self._finish(batch))
        self._retries.reset()
        return BatchReport(
            Batch(written.entry, batch.plan),
            written.commit.version,
            written.messages,
            written.commit.output_rows or 0,
            written.entry.dead,
            lag,
            time.monotonic() - began,
            replaced=self._ledger.log.deleted_rows(written.commit),
        )

    @abstractmethod
    def _write(self, batch: Batch) -> Written | None:
        """Steps 5 to 7."""

    @abstractmethod
    def _finish(self, batch: Batch) -> Mapping[Shard, int]:
        """Step 8, for a batch that is in the table; the messages that are left, per shard. It may be repeated."""

    def _look_again(self, outdated: OutdatedError) -> None:
        self._writer.look_again(outdated)

    def _planned(
        self,
        kind: str,
        state: LedgerState,
        plan: BatchPlan,
        *,
        doubtful: Mapping[Shard, Range] | None = None,
        **fields: Any,
    ) -> Batch:
        batch = Batch(self._writer.entry(kind, state, **fields), plan, doubtful or {})
        self._observer(Step.PLANNED, batch)
        return batch


class SourceJob(BatchJob):
    """A job that reads ranges of a source.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: what goes where.
        observer: told of each step.
        on_wait: told why the job waits, and how long.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: BatchSource,
        ingestion: Ingestion,
        *,
        observer: Observer,
        on_wait: Callable[[str], object],
    ) -> None:
        super().__init__(spark, ingestion, url=source.url, observer=observer, on_wait=on_wait)
        self._source = ingestion.in_epochs(source)

    @cached_property
    def _identities(self) -> Mapping[str, str]:
        """The fingerprints at the beginning."""
        return self._source.identities()

    def _plan_ranges(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        try:
            return self._source.plan(gaps, limits=self._ingestion.limits, parallelism=self._parallelism)
        except DataLossError as error:
            raise OutdatedError(error) from error

    def _check_identity(self) -> None:
        """After the read: only then is it known that it was the stream that was planned."""
        found = self._source.identities()
        if found != self._identities:
            raise SourceRecreatedError(
                f"{self._source.url} was recreated while it was read",
                remedy="Nothing was written. The next run says how to accept it, if it was recreated on purpose.",
                planned=dict(self._identities),
                found=dict(found),
            )


def drain_batches(job: BatchJob, *, max_batches: int | None = None) -> Iterator[tuple[BatchReport, bool]]:
    """The batches of a job when they are in the table, and whether it is the last one.

    Args:
        job: plans and writes them.
        max_batches: stop after so many.

    Raises:
        StreamAssetsError: whatever stops it; what was yielded before is in the table.
    """
    count = 0
    batch = job.plan()
    while batch is not None:
        report = job.run(batch)
        count += report is not None
        try:
            batch = None if count == max_batches else job.plan()
        except Exception:
            # The batch is in the table whatever comes next: tell of it first.
            if report is not None:
                yield report, False
            raise
        if report is not None:
            yield report, batch is None


def parallelism(spark: SparkSession) -> int:
    """How many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not tell; the server may have more or fewer cores.
        return 8
