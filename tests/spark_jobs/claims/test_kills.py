"""Members of a Redis group killed at each step, asleep in the middle of a write, or poisoned: each entry once."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.decoders_of_runs import decoder_of, in_registry, order_in_avro
from tests.support.killed_runs import asleep, logs, running
from tests.support.polling import until
from tests.support.redis_tables import Stream
from tests.support.schema_registry import schema_registry
from tests.support.streams import sequences_in_table

pytestmark = [pytest.mark.kill, pytest.mark.slow]
ENTRIES = 400
FAULTS = ["initialized", "planned", "dead letters written", "mid-write", "rows written", "verified", "committed"]


@pytest.fixture
def empty(redis_address: str, folder: Path) -> Iterator[Stream]:
    made = Stream(redis_address, folder, shards=2, mode="load_balanced")
    yield made
    made.client.close()


@pytest.fixture
def stream(empty: Stream) -> Stream:
    empty.add(ENTRIES)
    return empty


def assert_taken_over(
    spark: SparkSession, server: str, stream: Stream, environment: Mapping[str, str] | None = None
) -> None:
    """Every process takes over what the one before left, under a name of its own."""
    stream.client.xadd(stream.keys[0], {"msg": b'{"id": '})
    for member, fault in enumerate(FAULTS):
        words = (fault, stream.group, "load_balanced", server, f"m{member}")
        with running(stream.url, stream.table, *words, records=60, environment=environment) as process:
            assert process.wait() == -signal.SIGKILL, logs(stream.table)
    before = len(stream.rows())
    assert 0 < before < ENTRIES, "the last ones had something to do"
    stream.drain(spark, stream.ingestion(decoder=decoder_of(environment or {})))
    stream.assert_each_once()


def test_a_member_killed_at_each_step_is_continued(spark: SparkSession, server: str, stream: Stream) -> None:
    assert_taken_over(spark, server, stream)


def test_members_whose_schema_is_in_a_registry_are_killed(spark: SparkSession, server: str, empty: Stream) -> None:
    with schema_registry() as registry:
        empty.add(ENTRIES, payload=partial(order_in_avro, registry))
        assert_taken_over(spark, server, empty, in_registry(registry))
        letters = sequences_in_table(f"{empty.table}_dead_letters")
        assert letters.total() == 1, "only what is no Avro"


def test_a_member_stopped_in_its_write_wakes_up_after_a_takeover(spark: SparkSession, stream: Stream) -> None:
    words = ("mid-write@2!group-SIGSTOP", stream.group, "load_balanced", "", "sleeper")
    with asleep(stream.url, stream.table, *words):
        stream.drain(spark, stream.ingestion(member="other"))
        stream.assert_each_once()
    stream.assert_each_once()


def test_two_members_share_the_entries(spark: SparkSession, server: str, stream: Stream) -> None:
    words = ("", stream.group, "load_balanced", server, "other")
    with running(stream.url, stream.table, *words, records=50) as process:
        until(stream.table.exists, seconds=60, what="the other member's first commit")
        stream.drain(spark, stream.ingestion(50))
        assert process.wait() == 0, logs(stream.table)
    stream.assert_each_once()
    apps = {c.entry.app for c in stream.ingestion().ledger().newest_first() if c.entry and c.entry.kind == "batch"}
    assert len(apps) == 2, "both had their part"


def test_r11_an_entry_that_kills_its_process_each_time_becomes_a_dead_letter(
    spark: SparkSession, server: str, redis_address: str, folder: Path
) -> None:
    """Delivered three times, at last alone: the innocent ones that came with it are written."""
    stream = Stream(redis_address, folder, shards=1, mode="load_balanced")
    stream.add(5)
    stream.client.xadd(stream.keys[0], {"msg": b'{"id": 13, "user": "poison"}'})
    stream.add(3, first=6)
    killed = 0
    while killed < 8:
        words = ("poison", stream.group, "load_balanced", server)
        with running(stream.url, stream.table, *words, records=8) as process:
            ended = process.wait()
            if ended == 0:
                break
            assert ended == -signal.SIGKILL, logs(stream.table)
            killed += 1
    assert killed == 3
    stream.assert_each_once()
    (letter,) = spark.read.format("delta").load(f"{stream.table}_dead_letters").collect()
    assert "given up after 3 deliveries" in letter["error"]
    assert bytes(letter["payload"]) == b'{"id": 13, "user": "poison"}'
    stream.client.close()
