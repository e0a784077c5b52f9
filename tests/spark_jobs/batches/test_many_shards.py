"""A thousand shards: one batch for all of them, small commits, quick looks, and each message once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.lag import measure
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource
from tests.support.streams import sequences_in_table
from tests.support.topics import create_topic, delete_topics

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SHARDS = 1000
EACH = 3
# Ten times what they may take alone.
TICK_SECONDS = 10.0
COMMIT_BYTES = 10 * 1024


def assert_quick_and_right(spark: SparkSession, url: str, folder: Path, send: Callable[[int, int], None]) -> None:
    """Send some messages to each shard, then one to a few; look at the batches, the lag and the rows."""
    for _ in range(EACH):
        send(0, SHARDS)
    source = StreamSource(url)
    what = Ingestion("lakehouse", str(folder / "t"), Json("id BIGINT"), sharing=source.mode)
    (first,) = list(drain(spark, source, what))
    assert (len(first.entry.ranges), first.rows) == (SHARDS, EACH * SHARDS)
    for number in range(3):
        send(10 * number, 10 * number + 10)
        (few,) = list(drain(spark, source, what))
        assert few.rows == 10
        if not few.entry.is_full:
            assert len(few.entry.to_json()) <= COMMIT_BYTES
    send(0, 1)
    began = time.monotonic()
    assert measure(source, what).total == 1
    assert time.monotonic() - began < TICK_SECONDS
    list(drain(spark, source, what))
    found = sequences_in_table(folder / "t")
    assert set(found.values()) == {1}
    assert len({(stream, shard) for stream, shard, _ in found}) == SHARDS
    with source.open() as opened:
        verdicts = verify(opened, what)
        told = opened.committed("lakehouse")
    assert sum(verdict.messages for verdict in verdicts) == len(found) == EACH * SHARDS + 31
    assert all(verdict.is_right and not verdict.lag for verdict in verdicts)
    assert told is None or told == what.ledger().read().positions


def test_a_thousand_partitions(spark: SparkSession, kafka: str, folder: Path) -> None:
    topic = create_topic(kafka, SHARDS)
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 5})

    def send(first: int, behind: int) -> None:
        for partition in range(first, behind):
            producer.produce(topic, b'{"id": %d}' % partition, partition=partition)
        assert producer.flush(60) == 0

    try:
        assert_quick_and_right(spark, f"kafka://{kafka}/{topic}", folder, send)
    finally:
        delete_topics(kafka, [topic])


def test_a_thousand_keys(spark: SparkSession, redis_address: str, folder: Path) -> None:
    server = redis.Redis.from_url(f"redis://{redis_address}")

    def send(first: int, behind: int) -> None:
        pipeline = server.pipeline(transaction=False)
        for number in range(first, behind):
            pipeline.xadd(f"{folder.name}:{number}", {b"msg": b'{"id": %d}' % number})
        pipeline.execute()

    with server:
        assert_quick_and_right(spark, f"redis://{redis_address}/{folder.name}", folder, send)
