"""Keyed tables: whatever happens, the table has the newest change of each key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import open_batch_source
from stream_consumers.errors import InvalidOptionError, KeyConflictError
from tests.support.keyed_tables import BY_POSITION, BY_VALUE, KeyedTable, random_changes


@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["by position", "by value"])
@pytest.mark.parametrize(
    "driver_records", [pytest.param(0, marks=pytest.mark.slow), 10_000], ids=["executors", "driver"]
)
def test_a_table_has_the_newest_change_of_each_key(
    spark: SparkSession, folder: Path, keys: Keys, driver_records: int
) -> None:
    table = KeyedTable(spark, folder, keys, records=15, driver_records=driver_records)
    table.send(*random_changes(40, keys=6, seed=1), shards=2)
    reports = table.drain()
    assert table.rows() == table.expected()
    assert sum(sum(report.messages.values()) for report in reports) == 40
    assert {report.entry.mode for report in reports} == {"merge" if keys is BY_POSITION else "upsert"}
    assert table.drain() == []
    hidden = ["_deleted", "_sequence_by"] if keys is BY_VALUE else []
    stored = spark.read.format("delta").load(f"{folder}/t")
    assert stored.columns == ["id", "name", "at", "_stream", "_shard", "_sequence", "_timestamp", *hidden]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["by position", "by value"])
def test_what_is_read_again_gives_the_same_table(spark: SparkSession, folder: Path, keys: Keys) -> None:
    """A RESTORE, a rewind to the middle, and a replay of a range bring no deleted row back."""
    table = KeyedTable(spark, folder, keys)
    table.send(*random_changes(20, keys=4, seed=2))
    last = table.drain()[-1]
    table.send(*random_changes(20, keys=4, seed=3, first=20))
    table.drain()
    table.restore(last.version - 1)
    table.drain()
    assert table.rows() == table.expected()
    with open_batch_source(table.url) as source:
        rewind(spark, source, table.ingestion, Bound.parse("5"))
    table.drain()
    assert table.rows() == table.expected()
    with open_batch_source(table.url) as source:
        replay = Replay(start=Bound.parse("3"), stop=Bound.parse("9"))
        list(drain_batches(ReplayJob(spark, source, table.ingestion, replay)))
    table.drain()
    assert table.rows() == table.expected()
    assert all(not state.redo for state in table.ingestion.ledger().read().shards.values())
    written = [commit.entry for commit in table.ingestion.ledger().surviving() if commit.entry]
    assert {entry.app for entry in written} == {"mirror/main"}
    assert {entry.kind for entry in written} == {"init", "batch", "replay"}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["by position", "by value"])
def test_of_ingestion_and_a_replay_in_flight_one_plans_again(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = KeyedTable(spark, folder, keys)
    table.send(*random_changes(12, keys=4, seed=2))
    table.drain()
    table.send(*random_changes(12, keys=4, seed=3, first=12))
    writing = 0

    def observer(step: Step, batch: Batch | None) -> None:
        nonlocal writing
        if step is Step.WRITING and batch is not None:
            writing += 1
            if writing == 1:
                table.drain()

    with open_batch_source(table.url) as source:
        replay = ReplayJob(spark, source, table.ingestion, Replay(stop=Bound.parse("9")), observer=observer)
        list(drain_batches(replay))
    assert writing > 2, "the number of its first batch was taken"
    table.drain()
    assert table.rows() == table.expected()


def test_a_key_from_two_shards_is_refused_and_nothing_is_written(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder)
    table.send({"id": 1, "name": "a", "op": "u", "at": 0}, shards=1)
    table.send({"id": 3, "name": "b", "op": "u", "at": 1}, shards=2)
    table.drain()
    before = table.rows()
    table.send({"id": 1, "name": "c", "op": "u", "at": 2}, shards=2)
    with pytest.raises(KeyConflictError):
        table.drain()
    assert table.rows() == before


def test_a_message_without_a_key_is_a_dead_letter(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder)
    table.send({"id": 1, "name": "a", "op": "u", "at": 0}, {"name": "b", "op": "u", "at": 1})
    (report,) = table.drain()
    assert (report.dead, table.rows()) == (1, {1: "a"})


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["by position", "by value"])
def test_a_replay_counts_rows_that_its_messages_no_longer_make(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = KeyedTable(spark, folder, keys)
    table.send(*({"id": number, "name": "a", "op": "d" if number == 3 else "u", "at": number} for number in range(5)))
    table.drain()
    ingestion = replace(table.ingestion, transform=lambda rows: rows.where("id NOT IN (1, 3, 4)"))
    with open_batch_source(table.url) as source:
        (report,) = drain_batches(ReplayJob(spark, source, ingestion, Replay(stop=Bound.parse("4"))))
    assert report.stale == 1
    assert table.rows() == table.expected()


@pytest.mark.slow
def test_a_table_stays_keyed_by_the_same_key(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder)
    table.send({"id": 1, "name": "a", "op": "u", "at": 0})
    table.drain()
    for other in (BY_VALUE, Keys(["name"])):
        with pytest.raises(InvalidOptionError):
            KeyedTable(spark, folder, other).drain()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["by position", "by value"])
def test_verify_finds_each_fault(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = KeyedTable(spark, folder, keys, records=100)
    gone = [{"id": 5, "name": "x", "op": "d", "at": 90}, {"id": 6, "name": "y", "op": "u", "at": 91}]
    table.send(*random_changes(40, keys=4, seed=2), {"id": 5, "name": "w", "op": "u", "at": 89}, *gone)
    table.drain()
    verdict = table.verdict()
    assert (verdict.is_right, verdict.messages, verdict.rows) == (True, 43, len(table.expected()))
    path = f"delta.`{folder}/t`"
    spark.sql(f"DELETE FROM {path} WHERE id = 6")
    first = min(table.expected())
    assert first != 6, "the changes must leave another row"
    spark.sql(f"UPDATE {path} SET _sequence = 1 WHERE id = {first}")
    spark.sql(f"INSERT INTO {path} BY NAME SELECT * EXCEPT (id), 77 AS id FROM {path} WHERE id = {first}")
    verdict = table.verdict()
    assert (verdict.missing, verdict.stale, verdict.unknown, verdict.is_right) == (1, 1, 1, False)
