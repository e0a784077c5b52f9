"""The traps of a Kafka log (K1 to K8 in the list of hidden traps), on a real broker."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from sensors.lag import measure
from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Extent, Range
from stream_consumers.errors import DataLossError, SourceRecreatedError, SourceTruncatedError, TransformError
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.options import AutoStreamReset, DataLoss, ErrorPolicy, Limits
from tests.support.kafka_topics import (
    MALFORMED,
    Broker,
    Once,
    Pipeline,
    assert_each_once,
    filled,
    orders,
    pipeline,
    shard,
)
from tests.support.polling import until

pytestmark = pytest.mark.spark
RECORD = ErrorPolicy(on_data_loss="record")


def test_k01_a_first_message_that_fails_commits_nothing_before_it_is_a_dead_letter(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, [MALFORMED, *orders(9)])
    seen: dict[Step, int] = {}

    def watch(step: Step, batch: Batch | None) -> None:
        seen[step] = broker.committed(what.group, topic).get(0, 0)

    (report,) = what.drain(watch)
    assert {step: offset for step, offset in seen.items() if offset} == {Step.COMMITTED: 10}
    assert report.dead == 1
    assert_each_once(what.letters(), [(topic, 0, 0)])
    assert_each_once(what.rows() + what.letters(), broker.messages(topic))


def test_k01_a_transform_that_fails_on_the_first_message_commits_nothing(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    broker.send(topic, orders(10))

    def refuse(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        if number == 0:
            raise ArithmeticError("the first one")
        return number

    refusing = f.udf(refuse, "bigint")
    what = pipeline(spark, broker, folder, topic)
    with pytest.raises(TransformError, match="ArithmeticError") as raised:
        what.having(transform=lambda rows: rows.withColumn("id", refusing("id"))).drain()
    assert raised.value.detail == "the first one"
    assert broker.committed(what.group, topic) == {0: 0}
    assert what.rows() == {}
    what.drain()
    assert broker.committed(what.group, topic) == {0: 10}
    assert_each_once(what.rows(), broker.messages(topic))


def test_k02_offset_0_is_a_position_and_none_is_not(spark: SparkSession, broker: Broker, folder: Path) -> None:
    topic = broker.create()
    latest = pipeline(spark, broker, folder, topic, start=AutoStreamReset.LATEST)
    assert latest.drain() == []
    assert latest.positions() == {0: 0}
    assert broker.committed(latest.group, topic) == {0: 0}
    broker.send(topic, orders(5))
    broker.remove_before(topic, 3)
    with pytest.raises(DataLossError, match="committed 0, earliest 3, latest 5"):
        latest.drain()
    fresh = pipeline(spark, broker, folder / "fresh", topic)
    with fresh.source.open() as opened:
        assert opened.committed(fresh.group) == {}
        broker.move(fresh.group, topic, 0)
        assert opened.committed(fresh.group) == {shard(topic): 0}
    fresh.drain()
    assert fresh.positions() == {0: 5}, "what the broker has committed is no position: the ledger has none"
    assert_each_once(fresh.rows(), broker.messages(topic))


def test_k02_the_first_messages_of_an_empty_topic_are_read(spark: SparkSession, broker: Broker, folder: Path) -> None:
    topic = broker.create(partitions=2)
    what = pipeline(spark, broker, folder, topic, start=AutoStreamReset.LATEST)
    assert what.drain() == []
    broker.send(topic, orders(3))
    what.drain()
    assert what.positions() == broker.committed(what.group, topic) == {0: 3, 1: 0}
    assert_each_once(what.rows(), broker.messages(topic))


def test_k03_a_range_that_ends_in_transaction_markers_reaches_lag_0(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    broker.commit(topic, 3)
    broker.abort(topic, 4)
    broker.commit(topic, 2, first=10)
    broker.abort(topic, 3)
    end = broker.end(topic)
    assert end == 16, "12 messages and 4 markers"
    what = pipeline(spark, broker, folder, topic, records=9)
    reports = what.drain()
    assert [dict(report.entry.ranges) for report in reports] == [
        {shard(topic): Range(0, 9)},
        {shard(topic): Range(9, end)},
    ]
    assert broker.committed(what.group, topic) == {0: end}
    assert sum(reports[-1].lag.values()) == measure(what.source, what.ingestion).total == 0
    assert_each_once(what.rows(), broker.messages(topic))
    assert [(v.messages, v.lag, v.is_right) for v in what.verify()] == [(5, 0, True)]
    assert what.drain() == []


@pytest.mark.slow
def test_k03_messages_of_aborted_transactions_are_read_only_if_asked_for(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    broker.commit(topic, 2)
    broker.abort(topic, 3)
    uncommitted = {"isolation.level": "read_uncommitted"}
    what = pipeline(spark, broker, folder, topic, client=uncommitted)
    open_transaction = broker.begin(topic, 4)
    what.drain()
    assert len(broker.messages(topic)) == 2
    assert_each_once(what.rows(), broker.messages(topic, level="read_uncommitted"))
    assert broker.committed(what.group, topic) == {0: broker.end(topic, committed=False)}
    open_transaction.abort_transaction()


@pytest.mark.slow
def test_k04_a_compacted_range_with_one_message_left_and_ranges_with_none(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    topic = broker.create(config=config)
    broker.send(topic, orders(100), key=b"a")
    keys = itertools.count()

    def old() -> list[int]:
        # Messages are compacted when they lie before the segment of the newest one.
        broker.send(topic, orders(1), key=b"%d" % next(keys))
        return [offset for _, _, offset in broker.messages(topic) if offset < 100]

    until(lambda: len(old()) == 1, what="compaction")
    left = broker.messages(topic)
    assert min(left) == (topic, 0, 99)
    what = pipeline(spark, broker, folder, topic, records=70)
    found = [sum(report.messages.values()) for report in what.drain()]
    assert (found[0], sum(found)) == (0, len(left))
    assert broker.committed(what.group, topic) == {0: broker.end(topic)}
    assert_each_once(what.rows(), left)
    assert [v.is_right for v in what.verify()] == [True]


def test_k04_a_range_of_nothing_but_an_aborted_transaction_is_covered(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    broker.abort(topic, 6)
    what = pipeline(spark, broker, folder, topic)
    (report,) = what.drain()
    assert (report.rows, dict(report.messages)) == (0, {})
    assert what.positions() == broker.committed(what.group, topic) == {0: 7}
    assert what.drain() == []
    assert what.rows() == {}


def test_k05_an_open_transaction_is_told_of_and_waited_for(spark: SparkSession, broker: Broker, folder: Path) -> None:
    topic = broker.create()
    broker.send(topic, orders(5))
    transaction = broker.begin(topic, 3, first=5)
    broker.send(topic, orders(4, first=8))
    what = pipeline(spark, broker, folder, topic)
    (report,) = what.drain()
    assert report.messages == {shard(topic): 5}
    assert what.drain() == []
    found = measure(what.source, what.ingestion)
    assert found.extents == {shard(topic): Extent(0, 5, 7)}
    assert found.total == 0
    assert found.describe() == f"lag 0 in 1 shard; blocked by an open transaction: {topic}/0: 7"
    assert broker.committed(what.group, topic) == {0: 5}
    transaction.commit_transaction()
    broker.settle(topic)
    assert measure(what.source, what.ingestion).describe() == f"lag 8 ({topic}/0: 8)"
    what.drain()
    assert broker.committed(what.group, topic) == {0: 13}
    assert_each_once(what.rows(), broker.messages(topic))


def test_k06_messages_that_retention_removed_between_runs_are_an_error_with_numbers(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, orders(4), partitions=2)
    what.drain()
    before = what.rows()
    broker.send(topic, orders(6, first=4))
    broker.send(topic, orders(3), partition=1)
    broker.remove_before(topic, 7)
    with pytest.raises(DataLossError, match=f"{topic}/0 from 4 to 7.*committed 4, earliest 7, latest 10"):
        what.drain()
    assert what.rows() == before
    assert broker.committed(what.group, topic) == {0: 4, 1: 0}
    assert [(verdict.lost, verdict.is_right) for verdict in what.verify()] == [(Range(4, 7), False), (None, True)]


@pytest.mark.slow
def test_k06_messages_that_retention_removed_between_runs_are_recorded_where_that_is_chosen(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, orders(4), errors=RECORD)
    what.drain()
    broker.send(topic, orders(6, first=4))
    broker.remove_before(topic, 7)
    (report,) = what.drain()
    assert_lost(what, topic, 4, 7)
    assert report.entry.lost == {shard(topic): Intervals.of((4, 7))}
    assert report.messages == {shard(topic): 3}
    assert_each_once(what.rows(), {(topic, 0, number) for number in (0, 1, 2, 3, 7, 8, 9)})
    assert broker.committed(what.group, topic) == {0: 10}
    assert what.drain() == []
    # All that is left is gone as well: nothing to read, and still to be told of.
    broker.send(topic, orders(5, first=10))
    broker.remove_before(topic, 15)
    (report,) = what.drain()
    assert report.entry.lost == {shard(topic): Intervals.of((10, 15))}
    assert_lost(what, topic, 10, 15)
    assert broker.committed(what.group, topic) == {0: 15}


def assert_lost(what: Pipeline, topic: str, start: int, end: int) -> None:
    """The newest loss is in the ledger and in the dead letters, with its exact range."""
    entries = [commit.entry for commit in what.ingestion.ledger().newest_first() if commit.entry]
    assert entries[0].lost == {shard(topic): Intervals.of((start, end))}
    letters = what.ingestion.dead_letters().counted(what.spark, what.ingestion.ledger())
    assert letters is not None
    reason = f"sequences {start} to {end - 1} were removed"
    assert letters.where(f.col("_sequence").isNull() & f.col("error").contains(reason)).count() == 1


@pytest.mark.slow
def test_k06_messages_that_retention_removed_after_they_were_written_are_nothing_wrong(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, [MALFORMED, *orders(9)])
    what.drain()
    written = broker.messages(topic)
    broker.remove_before(topic, 6)
    assert what.drain() == []
    assert_each_once(what.rows() + what.letters(), written)
    assert [(v.missing, v.duplicated, v.unknown, v.is_right) for v in what.verify()] == [(0, 0, 0, True)]


# Where the next plan finds the messages gone, and where the read does.
@pytest.mark.parametrize(
    ("policy", "step"),
    [
        (DataLoss.ERROR, Step.PLANNED),
        pytest.param(DataLoss.ERROR, Step.COMMITTED, marks=pytest.mark.slow),
        pytest.param(DataLoss.RECORD, Step.PLANNED, marks=pytest.mark.slow),
        pytest.param(DataLoss.RECORD, Step.COMMITTED, marks=pytest.mark.slow),
    ],
)
def test_k06_messages_that_retention_removes_during_a_run(
    spark: SparkSession, broker: Broker, folder: Path, policy: DataLoss, step: Step
) -> None:
    topic, what = filled(spark, broker, folder, orders(10), records=4, errors=ErrorPolicy(on_data_loss=policy))
    number = 3 if step is Step.PLANNED else 2
    remove = Once(step, lambda: broker.remove_before(topic, 6), number=number)
    if policy is DataLoss.ERROR:
        with pytest.raises(DataLossError, match="committed 4, earliest 6, latest 10"):
            what.drain(remove)
        assert broker.committed(what.group, topic) == {0: 4}
        assert_each_once(what.rows(), {(topic, 0, number) for number in range(4)})
    else:
        what.drain(remove)
        assert_lost(what, topic, 4, 6)
        assert broker.committed(what.group, topic) == {0: 10}
        assert_each_once(what.rows(), {(topic, 0, number) for number in (0, 1, 2, 3, 6, 7, 8, 9)})
    assert remove.is_done


@pytest.mark.parametrize("count", [3, 20], ids=["shorter", "longer"])
def test_k07_a_topic_recreated_between_runs_is_another_one(
    spark: SparkSession, broker: Broker, folder: Path, count: int
) -> None:
    topic, what = filled(spark, broker, folder, orders(8), errors=RECORD)
    what.drain()
    before = what.rows()
    broker.recreate(topic)
    broker.send(topic, orders(count, first=100))
    with pytest.raises(SourceRecreatedError, match="stream-assets accept"):
        what.drain()
    with pytest.raises(SourceRecreatedError, match="stream-assets accept"):
        measure(what.source, what.ingestion)
    assert what.rows() == before
    assert broker.committed(what.group, topic) == {}


@pytest.mark.parametrize(
    ("count", "step"),
    [
        (5, Step.PLANNED),
        pytest.param(20, Step.PLANNED, marks=pytest.mark.slow),
        pytest.param(5, Step.COMMITTED, marks=pytest.mark.slow),
    ],
)
def test_k07_a_topic_recreated_during_a_run_is_another_one(
    spark: SparkSession, broker: Broker, folder: Path, count: int, step: Step
) -> None:
    topic, what = filled(spark, broker, folder, orders(8), records=4, errors=RECORD)

    def recreate() -> None:
        broker.recreate(topic)
        broker.send(topic, orders(count, first=100))

    swap = Once(step, recreate, number=3 if step is Step.PLANNED else 2)
    with pytest.raises(SourceRecreatedError):
        what.drain(swap)
    assert swap.is_done
    assert_each_once(what.rows(), {(topic, 0, number) for number in range(4)})


def test_k07_a_position_beyond_the_end_is_an_error_whatever_the_topic_says_it_is(
    spark: SparkSession, broker: Broker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an unclean election: the same topic, but its last messages are gone."""
    topic, what = filled(spark, broker, folder, orders(8))
    what.drain()
    monkeypatch.setattr(KafkaBrokers, "ends", lambda self, shards, level=None: {shard(topic): 5})
    with pytest.raises(SourceTruncatedError, match=r"position=8, end=5"):
        what.drain()
    with pytest.raises(SourceTruncatedError):
        measure(what.source, what.ingestion)
    assert broker.committed(what.group, topic) == {0: 8}
    assert what.having(errors=RECORD).drain() == []
    assert what.ingestion.ledger().read().positions == {shard(topic): 8, shard(f"{topic}#2"): 5}


def test_k08_partitions_added_between_runs_and_after_the_plan_are_read_from_their_beginning(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, orders(3), start=AutoStreamReset.LATEST)
    assert what.drain() == []
    before = broker.messages(topic)
    broker.send(topic, orders(2))
    broker.add_partitions(topic, 2)
    broker.send(topic, orders(4), partition=1)

    def add() -> None:
        broker.add_partitions(topic, 3)
        broker.send(topic, orders(5), partition=2)

    added = Once(Step.PLANNED, add)
    what.drain(added)
    assert added.is_done
    assert what.positions() == {0: 5, 1: 4}
    what.drain()
    assert what.positions() == broker.committed(what.group, topic) == {0: 5, 1: 4, 2: 5}
    assert_each_once(what.rows(), broker.messages(topic) - before)


@pytest.mark.parametrize("driver_records", [0, 10_000], ids=["executors", "driver"])
def test_k09_large_messages_between_small_samples_do_not_pass_max_bytes(
    spark: SparkSession, broker: Broker, folder: Path, driver_records: int
) -> None:
    topic = broker.create()
    sizes = [1] * 600 + [50_000] * 40 + [1] * 600
    broker.send(topic, [b'{"id": %d, "more": "%s"}' % (number, b"x" * size) for number, size in enumerate(sizes)])
    what = pipeline(
        spark,
        broker,
        folder,
        topic,
        limits=Limits(max_records=10_000, max_bytes=500_000),
        driver_records=driver_records,
    )
    reports = what.drain()
    assert len(reports) > 4
    for report in reports:
        assert sum(sizes[slice(*report.plan.ranges[shard(topic)])]) <= 500_000
    assert_each_once(what.rows(), broker.messages(topic))
