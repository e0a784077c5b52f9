"""Kafka runs killed at each step, and members that sleep through a rebalance: each message once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import BatchReport, Ingestion
from spark_jobs.run_ingestion import drain
from stream_consumers.create import StreamSource
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import ORDERS
from tests.support.killed_runs import asleep, kill_in_turn, logs, running
from tests.support.one_run import QUICK
from tests.support.streams import sequences_in_table
from tests.support.topics import committed, create_topic, ends, fill, sequences_in_topic, unique_group

pytestmark = [pytest.mark.spark, pytest.mark.kill]
MESSAGES = 400
RECORDS = 150
PARTITIONS = 2
MALFORMED = frozenset(range(5, MESSAGES, 20))


class Pipeline:
    """A topic with messages, and the group that reads it into a table."""

    def __init__(
        self,
        address: str,
        folder: Path,
        mode: str,
        *,
        partitions: int = PARTITIONS,
        malformed: frozenset[int] = MALFORMED,
    ) -> None:
        self.address = address
        self.topic = create_topic(address, partitions)
        fill(address, self.topic, MESSAGES, partitions=partitions, malformed=malformed)
        self.group = unique_group()
        self.mode = ConsumerMode(mode)
        self.url = f"kafka://{address}/{self.topic}"
        self.table = folder / "t"

    def drain(self, spark: SparkSession) -> list[BatchReport]:
        """Run to the end in this process."""
        source = StreamSource(StreamUrl.parse(self.url), self.mode, QUICK)
        ingestion = Ingestion(
            group=self.group,
            table=str(self.table),
            decoder=ORDERS,
            sharing=self.mode,
            limits=Limits(max_records=RECORDS),
        )
        return list(drain(spark, source, ingestion))

    def assert_each_once(self) -> None:
        """Every message of the topic is in the table or its dead letters, once, and the group is told so."""
        found = sequences_in_table(self.table) + sequences_in_table(f"{self.table}_dead_letters")
        assert {identity: count for identity, count in found.items() if count != 1} == {}
        assert set(found) == sequences_in_topic(self.address, self.topic)
        assert committed(self.address, self.group, self.topic) == ends(self.address, self.topic)


def test_runs_that_are_killed_at_any_step_are_continued(
    spark: SparkSession, server: str, kafka: str, folder: Path
) -> None:
    """Over Connect the server may finish what its client began; that must not matter either."""
    # The first batch has dead letters, and the others go in one pass.
    pipeline = Pipeline(kafka, folder, "resumable", malformed=frozenset({5, 25}))
    faults = ["initialized", "planned", "mid-dead-letters", "dead letters written", "mid-write", "rows written"]
    faults += ["verified", "committed"]
    kill_in_turn(pipeline.url, pipeline.table, faults, pipeline.group, "resumable", server)
    assert 0 < sum(sequences_in_table(pipeline.table).values()) < MESSAGES, "each was killed on the way"
    pipeline.drain(spark)
    pipeline.assert_each_once()


@pytest.mark.slow
def test_the_shards_of_killed_members_are_taken_over(
    spark: SparkSession, server: str, kafka: str, folder: Path
) -> None:
    pipeline = Pipeline(kafka, folder, "load_balanced", partitions=4)
    kill_in_turn(pipeline.url, pipeline.table, ["mid-write", "verified"], pipeline.group, "load_balanced", server)
    pipeline.drain(spark)
    pipeline.assert_each_once()


@pytest.mark.slow
def test_a_run_killed_with_its_jvm_in_the_middle_of_its_write(spark: SparkSession, kafka: str, folder: Path) -> None:
    pipeline = Pipeline(kafka, folder, "resumable")
    fault = "mid-write@3!group-SIGKILL"
    with running(pipeline.url, pipeline.table, fault, pipeline.group) as process:
        assert process.wait() == -signal.SIGKILL, logs(pipeline.table)
    pipeline.drain(spark)
    pipeline.assert_each_once()


@pytest.mark.slow
def test_a_member_stopped_in_the_middle_of_its_write_wakes_up_after_its_shards_went_to_another(
    spark: SparkSession, kafka: str, folder: Path
) -> None:
    pipeline = Pipeline(kafka, folder, "load_balanced")
    fault = "mid-write@2!group-SIGSTOP"
    with asleep(pipeline.url, pipeline.table, fault, pipeline.group, "load_balanced"):
        pipeline.drain(spark)
        pipeline.assert_each_once()
    pipeline.assert_each_once()


@pytest.mark.slow
def test_two_members_share_the_shards(spark: SparkSession, server: str, kafka: str, folder: Path) -> None:
    pipeline = Pipeline(kafka, folder, "load_balanced", partitions=4)
    with running(pipeline.url, pipeline.table, "", pipeline.group, "load_balanced", server, records=20) as other:
        pipeline.drain(spark)
        assert other.wait() == 0, logs(pipeline.table)
    pipeline.assert_each_once()
