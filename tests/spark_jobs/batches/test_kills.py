"""Runs in processes of their own, killed with SIGKILL at each step or put to sleep, then resumed: each message once."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from stream_consumers.options import ErrorPolicy
from tests.support.bad_rows import bad_rows, is_bad
from tests.support.ingesting import ORDERS, drain, ingestion
from tests.support.kafka_topics import Pipeline, Topics
from tests.support.kafka_topics import assert_each_once as assert_these_once
from tests.support.killed_runs import asleep, kill_in_turn, logs, running
from tests.support.one_run import DRIVER_RECORDS_VARIABLE, QUICK
from tests.support.redis_tables import Stream
from tests.support.streams import assert_each_once, sequences_in_table, write_stream
from tests.support.topics import fill

pytestmark = pytest.mark.kill
MESSAGES = 400
FEW, MANY = (50, 170, 290), range(5, MESSAGES, 20)
CAREFUL = ["initialized", "planned", "read", "dead letters written", "rows written", "verified", "committed"]
ONE_PASS = ["writing", "rows written", "verified", "unclean", "mid-dead-letters", "mid-write", "committed"]
DRIVER = ["planned", "read", "mid-dead-letters", "dead letters written", "mid-write", "rows written", "committed"]
BAD_ROWS = ["planned", "writing", "unclean", "read@4", "mid-dead-letters", "dead letters written", "mid-write"]


@pytest.mark.parametrize(
    ("faults", "malformed", "driver_records", "transform"),
    [
        pytest.param(["planned", "dead letters written", "verified"], MANY, 0, "", id="some steps"),
        pytest.param(CAREFUL, MANY, 0, "", marks=pytest.mark.slow, id="read first"),
        pytest.param(ONE_PASS, FEW, 0, "", marks=pytest.mark.slow, id="one pass and back"),
        pytest.param(DRIVER, FEW, 1000, "", marks=pytest.mark.slow, id="read by the driver"),
        pytest.param([*BAD_ROWS, *CAREFUL[-3:]], FEW, 0, "bad rows", marks=pytest.mark.slow, id="bad rows"),
    ],
)
def test_runs_that_are_killed_at_any_step_are_continued(
    spark: SparkSession,
    server: str,
    folder: Path,
    faults: list[str],
    malformed: Iterable[int],
    driver_records: int,
    transform: str,
) -> None:
    """Over Connect the server may finish what its client began; that must not matter either."""
    url, table = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(malformed)), folder / "t"
    words = ("lakehouse", "resumable", server, "main", transform)
    kill_in_turn(url, table, faults, *words, environment={DRIVER_RECORDS_VARIABLE: str(driver_records)})
    assert 0 < sum(sequences_in_table(table).values()) < MESSAGES, "each was killed on the way"
    what, dead = replace(ingestion(table, records=100), driver_records=driver_records), set(malformed)
    if transform:
        what = replace(what, transform=bad_rows, errors=ErrorPolicy(on_bad_rows="dead_letter"))
        dead |= set(filter(is_bad, range(MESSAGES)))
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", table)
    assert set(sequences_in_table(f"{table}_dead_letters")) == {("orders", n % 2, n // 2 + 1) for n in dead}


@pytest.mark.slow
def test_runs_that_are_killed_in_the_middle_of_a_write_are_continued(spark: SparkSession, folder: Path) -> None:
    """With and without the JVM."""
    url, table = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(MANY)), folder / "t"
    kill_in_turn(url, table, ["mid-dead-letters!group-SIGKILL", "mid-write", "mid-write!group-SIGKILL"])
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
def test_a_run_stopped_in_its_write_wakes_up_after_another_one_finished(spark: SparkSession, folder: Path) -> None:
    url, table = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(FEW)), folder / "t"
    with asleep(url, table, "mid-write@3!group-SIGSTOP"):
        drain(spark, url, ingestion(table))
        assert_each_once(folder / "orders.ss", table)
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
def test_two_runs_at_the_same_time_write_each_message_once(server: str, folder: Path) -> None:
    url, table = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(FEW)), folder / "t"
    words = ("", "lakehouse", "resumable", server)
    with running(url, table, *words, records=40) as one, running(url, table, *words, records=60) as other:
        assert (one.wait(), other.wait()) == (0, 0), logs(table)
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
def test_redis_runs_killed_at_any_step(spark: SparkSession, server: str, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder)
    stream.add(MESSAGES)
    faults = ["planned", "mid-write", "rows written", "verified"]
    kill_in_turn(stream.url, stream.table, faults, stream.group, "resumable", server)
    assert 0 < len(stream.rows()) < MESSAGES, "each was killed on the way"
    stream.drain(spark)
    stream.assert_each_once()
    stream.client.close()


# Kafka, and members that share its shards


def filled(topics: Topics, *, partitions: int = 2, malformed: Iterable[int] = MANY) -> Pipeline:
    """A topic with messages, and the group that reads it."""
    topic = topics.create(partitions=partitions)
    fill(topics.address, topic, MESSAGES, partitions=partitions, malformed=frozenset(malformed))
    return topics.pipeline(topic, records=150, decoder=ORDERS, client=QUICK, retry_seconds=300.0)


def assert_topic_once(topics: Topics, what: Pipeline, *, partitions: int = 2) -> None:
    """Every message is in the table or its dead letters, once, and the group's positions are the ends."""
    assert_these_once(what.rows() + sequences_in_table(f"{what.table}_dead_letters"), topics.messages(what.topic))
    ends = {number: topics.end(what.topic, partition=number) for number in range(partitions)}
    assert topics.committed(what.group, what.topic) == ends


@pytest.mark.slow
def test_kafka_runs_that_are_killed_at_any_step_are_continued(topics: Topics, server: str) -> None:
    # The first batch has dead letters, and the others go in one pass.
    what = filled(topics, malformed=(5, 25))
    faults = ["initialized", "planned", "mid-dead-letters", "dead letters written", "mid-write", *CAREFUL[-3:]]
    kill_in_turn(what.url, Path(what.table), faults, what.group, "resumable", server)
    assert 0 < what.rows().total() < MESSAGES, "each was killed on the way"
    what.drain()
    assert_topic_once(topics, what)


@pytest.mark.slow
def test_the_shards_of_killed_members_are_taken_over(topics: Topics, server: str) -> None:
    what = filled(topics, partitions=4).shared()
    kill_in_turn(what.url, Path(what.table), ["mid-write", "verified"], what.group, "load_balanced", server)
    what.drain()
    assert_topic_once(topics, what, partitions=4)


@pytest.mark.slow
def test_a_kafka_run_killed_with_its_jvm_in_the_middle_of_its_write(topics: Topics) -> None:
    what = filled(topics)
    with running(what.url, Path(what.table), "mid-write@3!group-SIGKILL", what.group) as process:
        assert process.wait() == -signal.SIGKILL, logs(Path(what.table))
    what.drain()
    assert_topic_once(topics, what)


@pytest.mark.slow
def test_a_member_stopped_in_its_write_wakes_up_after_its_shards_went_to_another(topics: Topics) -> None:
    what = filled(topics).shared()
    with asleep(what.url, Path(what.table), "mid-write@2!group-SIGSTOP", what.group, "load_balanced"):
        what.drain()
        assert_topic_once(topics, what)
    assert_topic_once(topics, what)


@pytest.mark.slow
def test_two_members_share_the_shards(topics: Topics, server: str) -> None:
    what = filled(topics, partitions=4).shared()
    with running(what.url, Path(what.table), "", what.group, "load_balanced", server, records=20) as other:
        what.drain()
        assert other.wait() == 0, logs(Path(what.table))
    assert_topic_once(topics, what, partitions=4)
