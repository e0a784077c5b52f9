"""Rows of deleted keys are purged, and nothing that is older than they were brings a key back."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.dead_letters.reader import DeadLetters
from spark_jobs.purge import purge_deleted
from spark_jobs.writing.floor import MAX_LENGTH, floor_above, floor_of, floor_sql
from stream_consumers.create import open_batch_source
from stream_consumers.errors import InvalidOptionError, KeyConflictError
from stream_consumers.options import ErrorPolicy
from tests.support.keyed_tables import BY_POSITION, BY_VALUE, KeyedTable

MONTH = timedelta(days=30)


def change(key: int, operation: str, at: int) -> dict[str, Any]:
    return {"id": key, "name": f"{key}@{at}", "op": operation, "at": at}


def deleted_table(spark: SparkSession, folder: Path) -> KeyedTable:
    """Keys 1 and 2 were deleted long ago, at 20 and 30; the newest change, of key 4, is at 25."""
    table = KeyedTable(spark, folder, BY_VALUE)
    table.send(change(1, "u", 10), change(1, "d", 20), change(2, "d", 30), change(3, "u", 11))
    table.drain()
    table.first_ms = int(time.time() * 1000)
    table.send(change(4, "u", 25))
    table.drain()
    return table


def stored(table: KeyedTable) -> set[int]:
    """The keys that have a row, also those that are deleted."""
    return {row["id"] for row in table.spark.read.format("delta").load(f"{table.folder}/t").collect()}


def purge(table: KeyedTable) -> int:
    return purge_deleted(table.spark, table.ingestion, older_than=MONTH)


def floor(table: KeyedTable) -> object:
    return table.ingestion.ledger().read().floor


@pytest.mark.slow
def test_an_older_change_than_what_was_purged_is_a_dead_letter(spark: SparkSession, folder: Path) -> None:
    table = deleted_table(spark, folder)
    assert (purge(table), stored(table), floor(table)) == (1, {2, 3, 4}, 21)
    sent = len(table.sent)
    table.send(change(1, "u", 15), change(2, "u", 16), change(3, "u", 17), change(5, "d", 18), change(6, "u", 26))
    (report,) = table.drain()
    assert report.dead == 1, "key 1 was deleted, and key 5 has nothing to delete"
    letters = DeadLetters(table.ingestion.table, group="mirror").to_arrow().to_pylist()
    assert [row["_sequence"] for row in letters] == [sent + 1]
    assert table.rows() == {3: "3@17", 4: "4@25", 6: "6@26"}
    assert report.entry.floor == 21
    assert table.verdict().is_right


@pytest.mark.slow
def test_where_bad_rows_fail_a_run_so_does_an_older_change(spark: SparkSession, folder: Path) -> None:
    table = deleted_table(spark, folder)
    purge(table)
    table.send(change(1, "u", 15))
    ingestion = replace(table.ingestion, errors=ErrorPolicy())
    before = table.rows()
    with open_batch_source(table.url) as source, pytest.raises(KeyConflictError):
        list(drain_batches(IngestJob(spark, source, ingestion)))
    assert table.rows() == before


@pytest.mark.slow
def test_a_batch_in_flight_is_planned_again_with_the_floor(spark: SparkSession, folder: Path) -> None:
    table = deleted_table(spark, folder)
    table.send(change(1, "u", 15))
    purged = []

    def observer(step: Step, batch: Batch | None) -> None:
        if step is Step.WRITING and not purged:
            purged.append(purge(table))

    with open_batch_source(table.url) as source:
        (report,) = drain_batches(IngestJob(spark, source, table.ingestion, observer=observer))
    assert (purged, report.dead, report.entry.floor) == ([1], 1, 21)
    assert table.rows() == {3: "3@11", 4: "4@25"}


@pytest.mark.slow
def test_a_restore_takes_the_floor_back_with_the_rows(spark: SparkSession, folder: Path) -> None:
    table = deleted_table(spark, folder)
    version = table.ingestion.ledger().read().version
    purge(table)
    table.restore(version)
    assert (stored(table), floor(table)) == ({1, 2, 3, 4}, None)
    table.send(change(1, "u", 15), change(7, "u", 5))
    (report,) = table.drain()
    assert (report.dead, table.rows()) == (0, table.expected())
    assert (purge(table), floor(table)) == (0, None), "a newer message has a change that is older than the others"


@pytest.mark.slow
def test_only_old_rows_are_purged_and_only_where_there_are_some(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, BY_VALUE)
    table.send(change(1, "d", 20))
    table.drain()
    assert (purge(table), floor(table)) == (0, None), "there is no newer message"
    with pytest.raises(InvalidOptionError):
        purge_deleted(spark, replace(table.ingestion, keys=BY_POSITION), older_than=MONTH)


@pytest.mark.slow
def test_a_far_value_does_not_raise_the_floor_above_later_changes(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, BY_VALUE)
    table.send(change(1, "d", 20))
    table.drain()
    table.first_ms = int(time.time() * 1000)
    table.send(change(2, "u", 2**62))
    table.drain()
    assert (purge(table), floor(table)) == (1, 21)
    table.send(change(1, "u", 15), change(3, "u", 22))
    (report,) = table.drain()
    assert (report.dead, table.rows()) == (1, {2: f"2@{2**62}", 3: "3@22"})


def test_a_text_of_a_message_in_the_metadata_is_no_variable(spark: SparkSession, folder: Path) -> None:
    """Spark replaces variables in settings, from which Delta takes the metadata, by values that are secrets."""
    name = "${env:PATH} ${system:line.separator} ${spark.app.id}"
    table = KeyedTable(spark, folder, replace(BY_VALUE, sequence_by="name"))
    table.send({**change(1, "d", 1), "name": name})
    table.drain()
    table.first_ms = int(time.time() * 1000)
    table.send({**change(2, "u", 2), "name": "~"})
    table.drain()
    assert (purge(table), floor(table)) == (1, f"{name}\0")
    table.send({**change(3, "u", 3), "name": "~"})
    (report,) = table.drain()
    assert report.entry.floor == floor(table) == f"{name}\0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        "-3, 0, 9000000000",
        "'', 'A', 'a''b{}', 'ä'",
        "DATE'0001-01-01', DATE'1969-12-31', DATE'2026-11-01'",
        "TIMESTAMP'1960-01-01 00:00:00.000001Z', TIMESTAMP'2026-10-25 00:30:00Z', TIMESTAMP'2026-10-25 01:30:00Z'",
        "TIMESTAMP_NTZ'0001-01-01 00:00:00', TIMESTAMP_NTZ'2026-10-25 02:30:00', TIMESTAMP_NTZ'2026-10-25 02:30:00.5'",
        "X'', X'00', X'7F', X'FF01'",
    ],
)
def test_a_floor_has_the_order_of_its_values_and_names_the_same_one(spark: SparkSession, values: str) -> None:
    frame = spark.sql(f"SELECT explode(array({values})) AS one").orderBy("one")
    kind = frame.schema["one"].dataType
    floors = [row["floor"] for row in frame.select(floor_of(f.col("one"), kind).alias("floor")).collect()]
    assert floors == sorted(floors)
    for number, known in enumerate(floors):
        assert frame.where(f"one < {floor_sql(known, kind)}").count() == number
    for number, row in enumerate(frame.select(floor_above(f.col("one"), kind).alias("floor")).collect(), start=1):
        assert frame.where(f"one < {floor_sql(row['floor'], kind)}").count() == number


@pytest.mark.slow
@pytest.mark.parametrize("value", ["repeat('a', 5000)", "CAST(repeat('a', 5000) AS BINARY)"])
def test_a_floor_has_a_greatest_length(spark: SparkSession, value: str) -> None:
    frame = spark.sql(f"SELECT {value} AS one")
    kind = frame.schema["one"].dataType
    (row,) = frame.select(floor_of(f.col("one"), kind).alias("floor")).collect()
    assert len(row["floor"]) <= 2 * MAX_LENGTH
    assert frame.where(f"one < {floor_sql(row['floor'], kind)}").count() == 0
