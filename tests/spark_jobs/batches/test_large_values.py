"""Values that a change of a keyed table does not have, because PostgreSQL logs no large value that stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion, Transform
from spark_jobs.batches.replay import rewind
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import KeyConflictError, SchemaMismatchError
from stream_consumers.options import Limits
from tests.support.debezium_messages import PLACEHOLDER, POSTGRES, envelope
from tests.support.ingesting import drain, ingestion

BY_POSITION, BY_LOG = Keys(["id"]), Keys(["id"], sequence_by="_source_order")
LARGE = "x" * 9
CREATE, UPDATE, DELETE = ("c", {"notes": LARGE}), ("u", {"notes": PLACEHOLDER}), ("d", {})
# The row had another key before, under which its value is.
MOVED_HERE = ("c", {"notes": PLACEHOLDER})


class Table:
    """One key, whose changes are in a stream file."""

    def __init__(self, spark: SparkSession, folder: Path, keys: Keys, *, records: int) -> None:
        self.spark, self.folder = spark, folder
        self.url = f"file://{folder}/changes.ss/changes"
        decoder = Debezium("id BIGINT, name STRING, notes STRING", source_order=True)
        made = ingestion(folder / "t", decoder=decoder)
        self.ingestion: Ingestion = replace(made, keys=keys, limits=Limits(max_records=records), driver_records=1000)
        self._sent = 0

    def send(self, *changes: tuple[str, dict[str, Any]]) -> None:
        with create_producer(self.url) as producer:
            for operation, values in changes:
                self._sent += 1
                side = "before" if operation == "d" else "after"
                row = {side: {"id": 7, "name": f"n{self._sent}", **values}}
                order = {"lsn": self._sent, "sequence": f'[null,"{self._sent}"]'}
                producer.send(envelope(operation, source={**POSTGRES, **order}, **row))

    def drain(self) -> None:
        drain(self.spark, self.url, self.ingestion)

    def rows(self) -> list[tuple[str, str]]:
        table = self.spark.read.format("delta").load(f"{self.folder}/t")
        found = table.where("NOT _deleted") if "_deleted" in table.columns else table
        return [(row["name"], row["notes"]) for row in found.collect()]


@pytest.mark.parametrize("keys", [BY_POSITION, pytest.param(BY_LOG, marks=pytest.mark.slow)], ids=["position", "log"])
@pytest.mark.parametrize("records", [pytest.param(1, marks=pytest.mark.slow), 100])
def test_a_value_that_a_change_lacks_is_that_of_the_row(
    spark: SparkSession, folder: Path, keys: Keys, records: int
) -> None:
    table = Table(spark, folder, keys, records=records)
    table.send(("c", {"notes": "old"}), DELETE, CREATE, UPDATE, UPDATE)
    table.drain()
    assert table.rows() == [("n5", LARGE)]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG], ids=["position", "log"])
@pytest.mark.parametrize("records", [1, 100])
def test_a_value_of_a_row_that_was_deleted_is_not_that_of_the_next_one(
    spark: SparkSession, folder: Path, keys: Keys, records: int
) -> None:
    table = Table(spark, folder, keys, records=records)
    table.send(CREATE, DELETE, MOVED_HERE)
    with pytest.raises(KeyConflictError):
        table.drain()
    assert table.rows() == []
    if records > 1:
        # The way out: a batch that has the value, too.
        table.send(("u", {"notes": "new"}))
        table.drain()
        assert table.rows() == [("n4", "new")]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG], ids=["position", "log"])
def test_a_row_that_was_deleted_in_the_batch_gives_no_value(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = Table(spark, folder, keys, records=100)
    table.send(CREATE)
    table.drain()
    table.send(DELETE, MOVED_HERE)
    with pytest.raises(KeyConflictError):
        table.drain()
    assert table.rows() == [("n1", LARGE)]


def without_marks(rows: DataFrame) -> DataFrame:
    return rows.drop("_unavailable")


def renamed(rows: DataFrame) -> DataFrame:
    return rows.withColumnRenamed("notes", "remarks")


@pytest.mark.slow
@pytest.mark.parametrize("transform", [without_marks, renamed])
def test_a_transform_must_keep_what_tells_that_a_value_is_lacking(
    spark: SparkSession, folder: Path, transform: Transform
) -> None:
    table = Table(spark, folder, BY_POSITION, records=100)
    table.ingestion = replace(table.ingestion, transform=transform)
    table.send(CREATE, ("u", {"notes": PLACEHOLDER}))
    with pytest.raises(SchemaMismatchError):
        table.drain()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG], ids=["position", "log"])
def test_a_new_column_beside_a_value_that_a_change_lacks(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = Table(spark, folder, keys, records=100)
    table.send(CREATE)
    table.drain()
    wider = Debezium("id BIGINT, name STRING, notes STRING, level BIGINT", source_order=True)
    adds = replace(table.ingestion.errors, schema_changes="add_columns")
    table.ingestion = replace(table.ingestion, decoder=wider, errors=adds)
    table.send(("u", {"notes": PLACEHOLDER, "level": 5}))
    table.drain()
    assert table.rows() == [("n2", LARGE)]
    assert [row["level"] for row in spark.read.format("delta").load(f"{folder}/t").collect()] == [5]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG], ids=["position", "log"])
def test_what_is_read_again_may_lack_values_of_a_row_that_is_gone(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    table = Table(spark, folder, keys, records=1)
    table.send(CREATE, UPDATE, DELETE)
    table.drain()
    with open_batch_source(table.url) as source:
        rewind(spark, source, table.ingestion, Bound.parse("1"))
    table.drain()
    assert table.rows() == []
    table.send(CREATE, UPDATE)
    table.drain()
    assert table.rows() == [("n5", LARGE)]
