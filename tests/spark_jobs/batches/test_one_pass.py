"""Batches that are written while they are read, and the turn to the careful way where they are not clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.ledger.ledger import FEW
from stream_consumers.errors import SourceRecreatedError
from tests.support.ingesting import drain, entries, ingestion
from tests.support.kafka_topics import Once, Topics, orders, shard
from tests.support.kafka_topics import assert_each_once as assert_these_once
from tests.support.steps import Steps
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = pytest.mark.spark
Transform = Callable[[DataFrame], DataFrame]


def test_each_batch_goes_the_way_that_the_one_before_it_suggests(spark: SparkSession, folder: Path) -> None:
    """The second one has a dead letter, so that the third one is not tried, and a new run begins as the ledger says."""
    url = write_stream(folder / "orders.ss", 400, malformed=frozenset({199}))
    what, steps, again = ingestion(folder / "t", records=100), Steps(), Steps()
    drain(spark, url, what, steps)
    assert steps.ways() == ["one", "both", "careful", "one"]
    assert_each_once(folder / "orders.ss", folder / "t")
    written = [entry for entry in entries(what) if entry.kind == "batch"]
    assert [(entry.messages, entry.dead) for entry in written] == [(100, 0), (99, 1), (100, 0), (100, 0)]
    assert [entry.number for entry in written] == [2, 3, 4, 5], "a try takes no number"
    write_stream(folder / "orders.ss", 50, malformed=frozenset({49}))
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 50)
    drain(spark, url, what, again)
    assert again.ways() == ["careful"]
    assert_each_once(folder / "orders.ss", folder / "t")


def test_batches_whose_entries_say_only_what_is_new_go_in_one_pass(spark: SparkSession, folder: Path) -> None:
    """Of many shards most entries do not name the stream once more."""
    url = write_stream(folder / "orders.ss", 2 * FEW, shards=FEW + 8)
    what, steps = ingestion(folder / "t", records=FEW // 2), Steps()
    drain(spark, url, what, steps)
    assert not all(entry.is_full for entry in entries(what))
    assert set(steps.ways()) == {"one"}
    assert_each_once(folder / "orders.ss", folder / "t")


def stops_early(rows: DataFrame) -> DataFrame:
    def first(blocks: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for block in blocks:
            yield block.head(1)
            return

    return rows.mapInPandas(first, rows.schema)


def joined_with_nothing(rows: DataFrame) -> DataFrame:
    return rows.join(rows.sparkSession.createDataFrame([], "id BIGINT"), "id")


def plus_one(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
    return None if number is None else number + 1


TRANSFORMS: dict[str, tuple[Transform, bool]] = {
    "where false": (lambda rows: rows.where("false"), False),
    "limit": (lambda rows: rows.limit(1), False),
    "join with an empty table": (joined_with_nothing, False),
    "a function that stops early": (stops_early, False),
    "where": (lambda rows: rows.where("id % 2 = 0"), True),
    "function": (lambda rows: rows.withColumn("id", f.udf(plus_one, "bigint")("id")), True),
    "explode": (lambda rows: rows.withColumn("id", f.explode(f.array("id", f.lit(-1)))), True),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("where false", "where") else pytest.param(name, marks=pytest.mark.slow) for name in TRANSFORMS],
)
def test_no_transform_lets_a_dead_letter_pass_unseen(name: str, spark: SparkSession, folder: Path) -> None:
    transform, is_row_wise = TRANSFORMS[name]
    url = write_stream(folder / "orders.ss", 100, shards=1, malformed=frozenset({99}))
    steps, committed = Steps(), list[Batch | None]()

    def watch(step: Step, batch: Batch | None) -> None:
        steps(step, batch)
        committed.extend([batch] if step is Step.COMMITTED else [])

    what = replace(ingestion(folder / "t", transform=transform), is_row_wise=is_row_wise)
    (report,) = drain(spark, url, what, watch)
    assert steps.ways() == ["both" if is_row_wise else "careful"]
    assert [batch and batch.bid for batch in committed] == [report.entry.bid], "the batch as it was written"
    assert (report.dead, sum(report.messages.values())) == (1, 99)
    assert sequences_in_table(f"{folder}/t_dead_letters") == {("orders", 0, 100): 1}


def test_a_topic_recreated_in_the_middle_is_not_written(topics: Topics) -> None:
    """With just as many messages, so that only the identity tells."""
    topic, what = topics.filled(orders(10))

    def recreate() -> None:
        topics.recreate(topic)
        topics.send(topic, orders(10, first=100))

    steps = Steps()
    recreated = Once(Step.WRITING, recreate)

    def watch(step: Step, batch: Batch | None) -> None:
        recreated(step, batch)
        steps(step, batch)

    with pytest.raises(SourceRecreatedError, match="recreated while it was read"):
        what.drain(watch)
    assert steps.ways() == ["both"]
    assert what.rows() == {}


@pytest.mark.slow
def test_a_topic_with_holes_is_tried_once_a_run(topics: Topics) -> None:
    topic = topics.create()
    topics.commit(topic, 5)
    topics.commit(topic, 4)
    assert topics.end(topic) == 11, "9 messages and 2 markers"
    what, steps, later = topics.pipeline(topic), Steps(), Steps()
    (report,) = what.drain(steps)
    assert (steps.ways(), dict(report.messages)) == (["both"], {shard(topic): 9})
    topics.commit(topic, 3)
    what.drain(later)
    assert later.ways() == ["careful"]
    assert [entry.messages for entry in entries(what.ingestion) if entry.kind == "batch"] == [9, 3]
    assert_these_once(what.rows(), topics.messages(topic))
