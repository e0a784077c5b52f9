"""What is ingested into which table, and a drain of all that there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.ingest import IngestJob
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Observer, ignore_steps
from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.entries import LedgerEntry
from stream_consumers.create import open_batch_source
from stream_consumers.options import AutoStreamReset, Limits, SchemaChanges

ORDERS = Json("id BIGINT, user STRING")


def ingestion(
    table: Path,
    *,
    records: int = 1000,
    decoder: Decoder = ORDERS,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    group: str = "lakehouse",
    start: AutoStreamReset = AutoStreamReset.EARLIEST,
    schema_changes: SchemaChanges = SchemaChanges.FAIL,
) -> Ingestion:
    """What to ingest; its batches are small, and are read by executors all the same."""
    return Ingestion(
        group=group,
        table=str(table),
        decoder=decoder,
        transform=transform,
        start=start,
        limits=Limits(max_records=records),
        schema_changes=schema_changes,
        retry_seconds=0.0,
        driver_records=0,
    )


def drain(spark: SparkSession, url: str, what: Ingestion, observer: Observer = ignore_steps) -> list[BatchReport]:
    reports = []
    with open_batch_source(url) as source:
        job = IngestJob(spark, source, what, observer=observer)
        while (batch := job.plan()) is not None:
            report = job.run(batch)
            if report is not None:
                reports.append(report)
    return reports


def entries(what: Ingestion) -> list[LedgerEntry]:
    log = what.ledger().log
    snapshot = log.snapshot()
    assert snapshot is not None
    commits = [log.commit(version) for version in range(snapshot.version + 1)]
    return [commit.entry for commit in commits if commit and commit.entry]
