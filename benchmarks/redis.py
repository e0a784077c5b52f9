"""Entries from Redis Streams into Delta, by position and by claims, next to what just reading them costs.

``python -m benchmarks.redis --entries 500000 --shards 4``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.claims.status import claim_state
from spark_jobs.reading.decode import Json
from spark_jobs.run_ingestion import drain
from spark_jobs.session import SparkOptions, create_session
from spark_jobs.verify import ShardVerdict, verify
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.urls import StreamUrl
from tests.support.redis_server import redis_server

ORDERS = Json("id BIGINT, user STRING")


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Measurement:
    """One stream, read in several ways."""

    def __init__(self, spark: SparkSession, address: str, folder: Path, *, entries: int, shards: int) -> None:
        self.spark, self.folder, self.entries, self.shards = spark, folder, entries, shards
        self.url = StreamUrl.parse(f"redis://{address}/orders")

    def produce(self) -> None:
        """One producer, in turn to the shards."""
        with create_producer(self.url, shards=self.shards) as producer:
            for number in range(self.entries):
                producer.send(b'{"id": %d, "user": "user-%d"}' % (number, number % 97), shard=number % self.shards)

    def read(self) -> None:
        """One process after the other's splits: Arrow record batches, nothing done with them."""
        with StreamSource(self.url).open() as source:
            gaps = {shard: Range(extent.start, extent.end) for shard, extent in source.extents().items()}
            plan = source.plan(gaps, limits=Limits(self.entries, 2**40), parallelism=2)
            assert plan is not None
            found = sum(len(batch) for split in plan.splits for batch in split.read())
        assert found == self.entries

    def ingest(self, mode: ConsumerMode) -> list[ShardVerdict]:
        """All of it into a table of its own, and what ``verify`` says then."""
        source = StreamSource(self.url, mode)
        ingestion = Ingestion(
            group=mode.value,
            table=str(self.folder / mode.value),
            decoder=ORDERS,
            sharing=mode,
            claims=source.is_claimed,
        )
        for _ in drain(self.spark, source, ingestion):
            pass
        claimed = None
        if source.is_claimed:
            with source.claims(ingestion.group) as claims:
                claimed = claim_state(claims, ingestion.ledger(), ingestion.ledger().read().shards)
        with StreamSource(self.url).open() as opened:
            return verify(opened, ingestion, claims=claimed)


def main() -> None:
    """Print one JSON line: seconds, ratios to just reading, and what verify found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=500_000)
    parser.add_argument("--shards", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as address:
        spark = create_session(SparkOptions(master="local[2]"))
        run = Measurement(spark, address, Path(folder), entries=options.entries, shards=options.shards)
        report: dict[str, object] = {"entries": options.entries, "shards": options.shards}
        report["produce_seconds"] = round(seconds(run.produce), 2)
        read = seconds(run.read)
        report["read_seconds"] = round(read, 2)
        for mode in (ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED):
            began = time.perf_counter()
            verdicts = run.ingest(mode)
            taken = time.perf_counter() - began
            report[mode.value] = {
                "ingest_and_verify_seconds": round(taken, 2),
                "times_reading": round(taken / read, 2),
                "rows": sum(verdict.rows for verdict in verdicts),
                "missing": sum(verdict.missing for verdict in verdicts),
                "duplicated": sum(verdict.duplicated for verdict in verdicts),
                "lag": sum(verdict.lag for verdict in verdicts),
            }
        print(json.dumps(report))
        spark.stop()


if __name__ == "__main__":
    main()
