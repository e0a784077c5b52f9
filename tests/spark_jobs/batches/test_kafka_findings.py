"""What an adversary found in Kafka ingestion, each mended and held by a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from sensors.lag import measure
from spark_jobs.batches.ingestion import Step
from stream_consumers.errors import DataLossError, LedgerTruncatedError
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from tests.support.delta_writes import clean_log
from tests.support.kafka_topics import Broker, Once, assert_each_once, filled, orders, pipeline

pytestmark = pytest.mark.spark


def test_a_shard_that_never_wrote_does_not_begin_the_group_anew_on_a_cleaned_log(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    broker.send(topic, orders(6))
    what = pipeline(spark, broker, folder, topic).shared()
    what.drain()
    before = what.rows()
    clean_log(what.table)
    broker.add_partitions(topic, 2)
    # By hand, so that the group's position does not say with which batch it got there.
    KafkaBrokers(what.source.url).commit(what.ingestion.group, {Shard(topic): 6})
    for _ in range(2):
        with pytest.raises(LedgerTruncatedError):
            what.drain()
    with pytest.raises(LedgerTruncatedError):
        measure(what.source, what.ingestion)
    assert what.rows() == before


def test_messages_of_an_added_partition_that_are_gone_before_its_first_batch_are_a_loss(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, orders(2))
    what.drain()
    broker.add_partitions(topic, 2)
    broker.send(topic, orders(10), partition=1)
    broker.remove_before(topic, 6, partition=1)
    with pytest.raises(DataLossError, match=f"{topic}/1 from 0 to 6"):
        what.drain()


@pytest.mark.slow
def test_dead_letters_of_batches_that_a_restore_removed_during_a_run_count_once(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(
        spark, broker, folder, [b"{" if number % 4 == 0 else order for number, order in enumerate(orders(16))]
    )
    what = what.having(limits=Limits(max_records=4))
    what.drain(max_batches=2)
    restore = Once(Step.COMMITTED, lambda: DeltaTable(what.table).restore(1))
    what.drain(restore)
    what.drain()
    assert restore.is_done
    assert_each_once(what.rows() + what.letters(), broker.messages(topic))
    assert all(verdict.is_right for verdict in what.verify())
