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
from spark_jobs.batches.interruption import HeldSignals, nothing_in_hand
from spark_jobs.batches.linger import Linger
from spark_jobs.batches.pace import Pace
from spark_jobs.batches.retries import Retries
from spark_jobs.batches.telemetry import BatchTelemetry
from spark_jobs.batches.turns import Turns
from spark_jobs.batches.writer import BatchWriter, OutdatedError, Written
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.spark_server.configuration import CORES
from spark_jobs.structured_logs import about
from spark_jobs.writing.failures import explained
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
        self._observer = self._telemetry = BatchTelemetry(ingestion, observer)
        self._on_wait = on_wait
        self._retries = Retries(ingestion.retry_seconds, on_wait=on_wait)
        self._writer = BatchWriter(spark, ingestion, url=url, observer=self._telemetry)
        self._ledger = self._writer.ledger
        self._parallelism = parallelism(spark)
        self._pace = Pace(ingestion.limits)
        self._turns = Turns(spark, ingestion, self._ledger, on_wait)

    def plan(self) -> Batch | None:
        """Steps 1 to 4: the next batch; ``None`` if there is none.

        Raises:
            StreamAssetsError: see :meth:`_next_batch`.
        """
        self._telemetry.planning()
        while True:
            try:
                with explained(self._ingestion.table):
                    return self._next_batch()
            except StreamAssetsError as error:
                self._wait(error)

    def has_more(self) -> bool:
        """Whether there may be another batch, after a plan that found none: a cheap look, without Spark.

        Raises:
            StreamAssetsError: the stream cannot be looked at.
        """
        return False

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
            with explained(self._ingestion.table):
                written = self._write(batch)
        except OutdatedError as outdated:
            self._look_again(outdated)
            return None
        except StreamAssetsError as error:
            self._wait(error)
            return None
        if written is None:
            return None
        self._pace.took(batch.plan.records, time.monotonic() - began)
        lag = self._retries.call(lambda: self._finish(batch))
        self._retries.reset()
        report = BatchReport(
            Batch(written.entry, batch.plan),
            written.commit.version,
            written.messages,
            written.commit.output_rows or 0,
            written.entry.dead,
            lag,
            time.monotonic() - began,
            replaced=self._ledger.log.deleted_rows(written.commit),
            bytes=written.commit.output_bytes,
        )
        self._telemetry.written(report)
        return report

    def _wait(self, error: StreamAssetsError) -> None:
        with nothing_in_hand():
            self._retries.wait(error)

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
        identities: Mapping[str, str],
        doubtful: Mapping[Shard, Range] | None = None,
        **fields: Any,
    ) -> Batch:
        entry = self._writer.entry(kind, state, identities=identities, **fields)
        batch = Batch(entry, plan, doubtful or {}, state.newest, identities)
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
        self._source = ingestion.in_epochs(source, self._ledger)

    @cached_property
    def _identities(self) -> Mapping[str, str]:
        """The fingerprints at the beginning."""
        return self._source.identities()

    def _plan_ranges(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        try:
            return self._source.plan(gaps, limits=self._pace.limits, parallelism=self._parallelism)
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


def drain_batches(
    job: BatchJob,
    *,
    max_batches: int | None = None,
    linger: Linger | None = None,
    on_next: Callable[[], object] = lambda: None,
) -> Iterator[BatchReport]:
    """The batches of a job when they are in the table.

    A signal that asks the process to end waits for the batch in hand, and for what is done with its report.

    Args:
        job: plans and writes them.
        max_batches: stop after so many.
        linger: how long to stay when everything is in the table.
        on_next: called before each batch is written, and from time to time while the job stays without any: what was
            yielded so far is not the last.

    Raises:
        StreamAssetsError: whatever stops it; what was yielded before is in the table.
    """
    linger = linger or Linger()
    count = 0
    while count != max_batches:
        batch = job.plan()
        if batch is None:
            if not linger.until(job.has_more, on_idle=on_next):
                return
            continue
        on_next()
        with HeldSignals():
            report = job.run(batch)
            if report is not None:
                count += 1
                yield from handed_over(report)


def handed_over(report: BatchReport) -> Iterator[BatchReport]:
    """The report of a batch; what the process logs when it was told is not about the batch any more."""
    try:
        yield report
    finally:
        about({})


def parallelism(spark: SparkSession) -> int:
    """How many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not tell, unless the server is ours; others may have more or fewer cores.
        return int(spark.conf.get(CORES, "8") or 8)
