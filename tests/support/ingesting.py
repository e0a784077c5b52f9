"""What is ingested into which table, and a drain of all that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Continues, Event, Ingestion, Observer, ignore_steps
from spark_jobs.batches.job import BatchJob, drain_batches, written_events
from spark_jobs.batches.run_control import DeferredSignals
from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.entries import LedgerEntry
from stream_consumers.create import open_batch_source
from stream_consumers.options import AutoStreamReset, ErrorPolicy, Limits

ORDERS = Json("id BIGINT, user STRING")


def ingestion(
    table: Path,
    *,
    records: int = 1000,
    decoder: Decoder = ORDERS,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    group: str = "lakehouse",
    start: AutoStreamReset = AutoStreamReset.EARLIEST,
    errors: ErrorPolicy = ErrorPolicy(),
) -> Ingestion:
    """What to ingest; its batches are small, and are read by executors all the same."""
    return Ingestion(
        group=group,
        table=str(table),
        decoder=decoder,
        transform=transform,
        start=start,
        limits=Limits(max_records=records),
        errors=errors,
        retry_seconds=0.0,
        driver_records=0,
    )


def drain(spark: SparkSession, url: str, what: Ingestion, observer: Observer = ignore_steps) -> list[BatchReport]:
    with open_batch_source(url) as source:
        return list(drain_batches(IngestJob(spark, source, what, observer=observer)))


def run_batch(job: BatchJob, batch: Batch) -> BatchReport | None:
    """Write a planned batch; ``None`` if it has to be planned again."""
    events = written_events(job, batch, DeferredSignals())
    return next((event for event in events if isinstance(event, BatchReport)), None)


def reports_with(events: Iterable[Event], act: Callable[[], object]) -> Iterator[BatchReport]:
    """The batches of a run; ``act`` is called whenever it says that it goes on."""
    for event in events:
        if isinstance(event, Continues):
            act()
        elif isinstance(event, BatchReport):
            yield event


def entries(what: Ingestion) -> list[LedgerEntry]:
    log = what.ledger().log
    snapshot = log.snapshot()
    assert snapshot is not None
    commits = [log.commit(version) for version in range(snapshot.version + 1)]
    return [commit.entry for commit in commits if commit and commit.entry]
