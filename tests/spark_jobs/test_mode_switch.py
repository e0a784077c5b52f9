"""Switching how a group shares, on a real table: what was planned before it never lands after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.entries import SWITCHING
from spark_jobs.mode_switch import _fence, switch_sharing
from spark_jobs.run_ingestion import drain
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import run_batch
from tests.support.one_run import QUICK
from tests.support.streams import sequences_in_table
from tests.support.topics import create_topic, fill, sequences_in_topic, unique_group

pytestmark = pytest.mark.spark
ONE, SHARED = ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED


class Group:
    """A topic with 40 messages, 20 of them in the table, and one batch of each transaction sequence in flight."""

    def __init__(self, spark: SparkSession, address: str, folder: Path, mode: ConsumerMode) -> None:
        self.spark = spark
        self.address, self.topic = address, create_topic(address, 2)
        fill(address, self.topic, 20, partitions=2)
        self.table = folder / "t"
        self.group = unique_group()
        self.run(mode)
        fill(address, self.topic, 20, partitions=2)

    def source(self, mode: ConsumerMode) -> StreamSource:
        return StreamSource(StreamUrl.parse(f"kafka://{self.address}/{self.topic}"), mode, QUICK)

    def ingestion(self, mode: ConsumerMode, shard: Shard | None = None) -> Ingestion:
        wanted = Ingestion(group=self.group, table=str(self.table), sharing=mode, limits=Limits(max_records=1000))
        return replace(wanted, shard=shard)

    def run(self, mode: ConsumerMode) -> None:
        for _ in drain(self.spark, self.source(mode), self.ingestion(mode)):
            pass

    def switch(self, to: ConsumerMode) -> bool:
        with self.source(to).open() as source:
            return switch_sharing(self.spark, self.ingestion(to), to=to, source=source)

    def assert_each_once(self) -> None:
        found = sequences_in_table(self.table)
        assert set(found) == sequences_in_topic(self.address, self.topic)
        assert set(found.values()) == {1}


@pytest.mark.parametrize(("before", "after"), [(ONE, SHARED), pytest.param(SHARED, ONE, marks=pytest.mark.slow)])
def test_a_batch_in_flight_over_a_switch_is_dropped(
    spark: SparkSession, kafka: str, folder: Path, before: ConsumerMode, after: ConsumerMode
) -> None:
    group = Group(spark, kafka, folder, before)
    lines = [None] if before is ONE else [Shard(group.topic, 0), Shard(group.topic, 1)]
    jobs = [IngestJob(spark, group.source(ONE).open(), group.ingestion(before, line)) for line in lines]
    batches = [job.plan() for job in jobs]
    with pytest.raises(InvalidOptionError, match="switch --to"):
        group.run(after)
    assert group.switch(after)
    for job, batch in zip(jobs, batches):
        assert batch is not None
        assert run_batch(job, batch) is None, "its transaction sequence was fenced"
        with pytest.raises(InvalidOptionError, match=f"is {after.value}, not {before.value}"):
            job.plan()
    group.run(after)
    group.assert_each_once()
    assert not group.switch(after)


@pytest.mark.slow
def test_a_switch_that_was_interrupted_lets_nobody_plan_until_it_is_run_again(
    spark: SparkSession, kafka: str, folder: Path
) -> None:
    group = Group(spark, kafka, folder, SHARED)
    _fence(spark, group.ingestion(ONE), switch=SWITCHING)
    for mode in (ONE, SHARED):
        with pytest.raises(InvalidOptionError):
            group.run(mode)
    assert group.switch(SHARED)
    group.run(SHARED)
    group.assert_each_once()


def test_a_group_without_commits_has_nothing_to_switch(spark: SparkSession, kafka: str, folder: Path) -> None:
    topic = create_topic(kafka, 1)
    with (
        StreamSource(StreamUrl.parse(f"kafka://{kafka}/{topic}")).open() as source,
        pytest.raises(StreamNotFoundError),
    ):
        switch_sharing(spark, Ingestion(group="g", table=str(folder / "t")), to=SHARED, source=source)
