"""Measures the steps of a small batch in a warm session, and a bare append."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks import messages
from benchmarks.harness import Bench
from benchmarks.messages import DDL, PARTITIONS, documents
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Step
from spark_jobs.batches.job import written_events
from spark_jobs.batches.run_control import DeferredSignals, IdleWait
from spark_jobs.decoding.json_decoder import Json
from stream_consumers.create import StreamSource
from stream_consumers.urls import StreamUrl
from tests.support.kafka_broker import kafka_broker
from tests.support.topics import create_topic

ROWS = 1000
WARM_BATCHES = 5
BATCHES = 10


class StepTimer:
    """An observer that records the seconds between the steps of a batch."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self.start()

    def start(self) -> None:
        """Start to measure a batch."""
        self._last = perf_counter()

    def __call__(self, step: Step, batch: Batch | None) -> None:
        now = perf_counter()
        self.taken.setdefault(f"until {step.value}", []).append(now - self._last)
        self._last = now


class BareAppend:
    """Appends rows that Spark already has, with a transaction number, as exactly-once writers do.

    Args:
        spark: the session.
        table: the path of a new table.
    """

    def __init__(self, spark: SparkSession, table: Path) -> None:
        columns: dict[str, list[Any]] = {
            "key": [b"k"] * ROWS,
            "payload": list(documents(ROWS)),
            "_sequence": list(range(ROWS)),
        }
        self._rows = spark.createDataFrame(pa.table(columns))
        self._table = str(table)
        self._number = 0

    def __call__(self) -> float:
        """Append, and return the seconds."""
        began = perf_counter()
        self._number += 1
        options = {"txnAppId": "bench", "txnVersion": str(self._number)}
        self._rows.write.format("delta").mode("append").options(**options).save(self._table)
        return perf_counter() - began


def micro_batch(bench: Bench) -> None:
    """Measure batches of 1,000 messages from Kafka, in turn with bare appends of 1,000 rows."""
    with bench.spark() as spark, bench.service(kafka_broker(bench.folder)) as (address, _):
        topic, table = create_topic(address, PARTITIONS), bench.new_path()
        append, steps = BareAppend(spark, bench.new_path()), StepTimer()
        whole: list[float] = []
        bare: list[float] = []
        url = StreamUrl.parse(f"kafka://{address}/{topic}")
        ingestion = Ingestion(group="bench", table=str(table), decoder=Json(DDL), retry_seconds=0.0)
        with StreamSource(url).open() as source:
            job = IngestJob(spark, source, ingestion, observer=steps, idle_wait=IdleWait(3600.0))
            for turn in range(WARM_BATCHES + BATCHES):
                messages.to_kafka(address, topic, documents(ROWS))
                if turn == WARM_BATCHES:
                    steps.taken.clear()
                    whole.clear()
                    bare.clear()
                steps.start()
                began = perf_counter()
                batch = job.plan()
                assert isinstance(batch, Batch)
                assert any(isinstance(event, BatchReport) for event in written_events(job, batch, DeferredSignals()))
                whole.append(perf_counter() - began)
                assert job.plan() is None
                bare.append(append())
                bench.log(f"  batch {turn + 1}: {whole[-1]:.2f} s, bare append: {bare[-1]:.2f} s")
        everything = {shard: range((WARM_BATCHES + BATCHES) * ROWS // PARTITIONS) for shard in range(PARTITIONS)}
        messages.check_delta(table, {shard: np.array(part) for shard, part in everything.items()})
    section = bench.section(
        "A warm micro-batch of 1,000 messages, step by step",
        f"JSON from Kafka, medians of {BATCHES} batches. The bare append writes 1,000 rows that Spark already has, "
        "with `txnAppId` and `txnVersion`.",
        ("seconds", "fastest", "slowest"),
    )
    for name, seconds in {"bare append": bare, "stream-assets": whole, **steps.taken}.items():
        bench.row(section, name, median(seconds), min(seconds), max(seconds))
    ratio = median(whole) / median(bare)
    bench.target(section, "a warm micro-batch: times a bare append with txnAppId", ratio, at_most=1.5)
