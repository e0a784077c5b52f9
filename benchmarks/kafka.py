"""Messages from Kafka into Delta, next to what just reading and just decoding them costs in the same run.

``make bench``, or ``python -m benchmarks.kafka --messages 1000000 --partitions 8``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.reading.decode import Json
from spark_jobs.run_ingestion import drain
from spark_jobs.session import SparkOptions, create_session
from spark_jobs.verify import verify
from stream_consumers.batches import Range, Split
from stream_consumers.create import StreamSource
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.urls import StreamUrl
from tests.support.kafka_broker import kafka_broker
from tests.support.topics import create_topic, fill

ORDERS = Json("id BIGINT, user STRING")
SCHEMA = pa.schema([("id", pa.int64()), ("user", pa.string())])


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Measurement:
    """One topic, read in several ways."""

    def __init__(self, spark: SparkSession, address: str, folder: Path, *, messages: int, partitions: int) -> None:
        self.spark, self.folder, self.messages = spark, folder, messages
        topic = create_topic(address, partitions)
        fill(address, topic, messages, partitions=partitions)
        self.url = StreamUrl.parse(f"kafka://{address}/{topic}")
        self.tables = 0

    def splits(self) -> list[Split]:
        with StreamSource(self.url).open() as source:
            gaps = {shard: Range(0, extent.end) for shard, extent in source.extents().items()}
            plan = source.plan(gaps, limits=Limits(self.messages, 2**40), parallelism=2)
            assert plan is not None
            return list(plan.splits)

    def read(self) -> None:
        """One process after the other's splits: Arrow record batches, nothing done with them."""
        assert sum(batch.num_rows for split in self.splits() for batch in split.read()) == self.messages

    def read_and_decode(self) -> None:
        for split in self.splits():
            for batch in split.read():
                ORDERS.decode(batch.column("payload"), SCHEMA)

    def ingest(self, mode: ConsumerMode) -> None:
        self.tables += 1
        source = StreamSource(self.url, mode)
        table = str(self.folder / f"t{self.tables}")
        ingestion = Ingestion(group=f"g{self.tables}", table=table, decoder=ORDERS, sharing=mode)
        for _ in drain(self.spark, source, ingestion):
            pass
        with source.open() as opened:
            verdicts = verify(opened, ingestion)
        assert sum(v.rows for v in verdicts) == self.messages
        assert all(v.is_right and not v.lag for v in verdicts), verdicts


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Run it and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, kafka_broker(Path(scratch)) as (address, _):
        spark = create_session(SparkOptions(master="local[2]"))
        place = Measurement(spark, address, Path(scratch), messages=options.messages, partitions=options.partitions)
        ways: dict[str, Callable[[], None]] = {
            "read": place.read,
            "read and decode": place.read_and_decode,
            "ingest and verify, resumable": lambda: place.ingest(ConsumerMode.RESUMABLE),
            "ingest and verify, load_balanced": lambda: place.ingest(ConsumerMode.LOAD_BALANCED),
        }
        place.ingest(ConsumerMode.RESUMABLE)  # the first one pays for a cold JVM
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, work in ways.items():
                taken[name].append(seconds(work))
        spark.stop()
    medians = {name: median(times) for name, times in taken.items()}
    report: dict[str, object] = {
        "messages": options.messages,
        "partitions": options.partitions,
        "missing": 0,
        "duplicated": 0,
        "seconds": {name: [round(t, 2) for t in times] for name, times in taken.items()},
        "times reading": {name: round(value / medians["read"], 2) for name, value in medians.items()},
        "messages a second": {name: round(options.messages / value) for name, value in medians.items()},
    }
    print(json.dumps(report, indent=2))
    return report


if __name__ == "__main__":
    main()
