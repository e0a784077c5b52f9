"""Values that a change of a keyed table does not have, because PostgreSQL logs no large value that stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Transform
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.verify_keyed import verify_keyed
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError, KeyConflictError, SchemaMismatchError
from stream_consumers.options import ErrorPolicy, Limits
from stream_consumers.urls import StreamUrl
from tests.support.debezium_messages import PLACEHOLDER, POSTGRES, envelope
from tests.support.ingesting import drain, ingestion

BY_POSITION, BY_LOG = Keys(["id"]), Keys(["id"], sequence_by="_source_order")
HISTORY = Keys(["id"], stored_as_scd_type=2)
DEAD = ErrorPolicy(on_bad_rows="dead_letter")
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
                lsn = values.get("lsn", self._sent)
                row = {side: {"id": 7, "name": f"n{self._sent}", **values}}
                order = {"lsn": lsn, "sequence": f'[null,"{lsn}"]'}
                producer.send(envelope(operation, source={**POSTGRES, **order}, **row))

    def drain(self) -> list[BatchReport]:
        return drain(self.spark, self.url, self.ingestion)

    def dead_letters(self) -> list[int]:
        """The sequences of the dead letters that count."""
        places = self.ingestion.dead_letters().counted_places(self.ingestion.ledger())
        return sorted(sequence for part in places for sequence in part.column("_sequence").to_pylist())

    def rows(self) -> list[tuple[str, str]]:
        table = self.spark.read.format("delta").load(f"{self.folder}/t")
        shown = next((where for where in ("_is_current", "NOT _deleted") if where.split()[-1] in table.columns), "TRUE")
        found = table.where(shown).collect()
        return [(row["name"], row["notes"]) for row in found]


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
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG, HISTORY], ids=["position", "log", "history"])
def test_a_change_without_a_value_that_nothing_has_is_a_dead_letter(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    table = Table(spark, folder, keys, records=100)
    table.ingestion = replace(table.ingestion, errors=DEAD)
    table.send(CREATE, DELETE, MOVED_HERE, UPDATE)
    assert [report.dead for report in table.drain()] == [2]
    with open_batch_source(table.url) as source:
        list(drain_batches(ReplayJob(spark, source, table.ingestion, Replay())))
        assert verify_keyed(spark, source, table.ingestion).is_right
    assert (table.rows(), table.dead_letters()) == ([], [3, 4])
    table.send(UPDATE, ("u", {"notes": "new"}), UPDATE)
    table.drain()
    # Where only the newest change has a row, the first of these does not matter.
    assert (table.rows(), table.dead_letters()) == ([("n7", "new")], [3, 4, 5] if keys is HISTORY else [3, 4])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG, HISTORY], ids=["position", "log", "history"])
def test_a_row_in_the_table_gives_no_value_to_a_row_after_its_delete(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    table = Table(spark, folder, keys, records=100)
    table.ingestion = replace(table.ingestion, errors=DEAD)
    table.send(CREATE)
    table.drain()
    table.send(DELETE, MOVED_HERE)
    table.drain()
    assert (table.rows(), table.dead_letters()) == ([], [3])


@pytest.mark.slow
@pytest.mark.parametrize("errors", [ErrorPolicy(), DEAD], ids=["fail", "dead letter"])
def test_a_row_before_a_truncate_gives_no_value(spark: SparkSession, folder: Path, errors: ErrorPolicy) -> None:
    table = Table(spark, folder, BY_POSITION, records=100)
    table.ingestion = replace(table.ingestion, errors=errors)
    table.send(CREATE)
    table.drain()
    table.send(("t", {}), MOVED_HERE)
    if errors is DEAD:
        table.drain()
        assert (table.rows(), table.dead_letters()) == ([], [3])
        return
    with pytest.raises(KeyConflictError):
        table.drain()
    assert table.rows() == [("n1", LARGE)]
    # The way out: a batch that has the value, too.
    table.send(("u", {"notes": "new"}))
    table.drain()
    assert table.rows() == [("n4", "new")]


@pytest.mark.slow
def test_a_value_that_is_older_than_the_row_does_not_replace_that_of_the_row(spark: SparkSession, folder: Path) -> None:
    table = Table(spark, folder, BY_LOG, records=100)
    table.send(("u", {"notes": "newer", "lsn": 20}))
    table.drain()
    table.send(("c", {"notes": "older", "lsn": 10}), ("u", {"notes": PLACEHOLDER, "lsn": 30}))
    table.drain()
    assert table.rows() == [("n3", "newer")]
    table.send(("c", {"notes": "newest", "lsn": 40}), ("u", {"notes": PLACEHOLDER, "lsn": 50}))
    table.drain()
    assert table.rows() == [("n5", "newest")]


@pytest.mark.slow
def test_a_value_that_is_older_than_the_delete_of_the_row_is_none(spark: SparkSession, folder: Path) -> None:
    table = Table(spark, folder, BY_LOG, records=100)
    table.send(("c", {"notes": "first", "lsn": 10}), ("d", {"lsn": 20}))
    table.drain()
    table.send(("u", {"notes": "older", "lsn": 15}), ("c", {"notes": PLACEHOLDER, "lsn": 30}))
    with pytest.raises(KeyConflictError):
        table.drain()
    table.ingestion = replace(table.ingestion, errors=DEAD)
    table.drain()
    assert (table.rows(), table.dead_letters()) == ([], [4])


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
    if transform is renamed:
        table.ingestion = replace(table.ingestion, errors=DEAD)
        table.drain()
        assert table.dead_letters() == [2]


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


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG, HISTORY], ids=["position", "log", "history"])
def test_a_dead_letter_without_a_value_stays_one_where_bad_rows_end_a_run(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    table = Table(spark, folder, keys, records=100)
    table.ingestion = replace(table.ingestion, errors=DEAD)
    table.send(UPDATE)
    table.drain()
    table.ingestion = replace(table.ingestion, errors=ErrorPolicy())
    job = RedriveJob(spark, table.ingestion, Redrive(), url=StreamUrl.parse(table.url))
    list(drain_batches(job))
    assert (job.outcome.decoded, job.outcome.dead, table.dead_letters()) == (0, 1, [1])
    with open_batch_source(table.url) as source:
        list(drain_batches(ReplayJob(spark, source, table.ingestion, Replay())))
        assert table.dead_letters() == [1]
        rewind(spark, source, table.ingestion, Bound.parse("1"))
        table.drain()
        assert verify_keyed(spark, source, table.ingestion).is_right
    assert (table.rows(), table.dead_letters()) == ([], [1])


def with_size(rows: DataFrame) -> DataFrame:
    return rows.withColumn("size", f.length("notes"))


def with_kept_size(rows: DataFrame) -> DataFrame:
    lacks = f.when(f.array_contains("_unavailable", "notes"), f.array(f.lit("size"))).otherwise(f.array())
    return with_size(rows).withColumn("_unavailable", f.array_union("_unavailable", lacks))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, HISTORY], ids=["position", "history"])
def test_a_column_that_is_derived_from_a_value_is_not_lost_with_it(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    table = Table(spark, folder, keys, records=100)
    table.ingestion = replace(table.ingestion, transform=with_size)
    table.send(CREATE)
    table.drain()
    table.send(UPDATE)
    with pytest.raises(SchemaMismatchError):
        table.drain()
    table.ingestion = replace(table.ingestion, transform=with_kept_size)
    table.drain()
    sizes = [row["size"] for row in spark.read.format("delta").load(f"{folder}/t").collect()]
    assert (table.rows(), set(sizes)) == ([("n2", LARGE)], {len(LARGE)})


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_LOG], ids=["position", "log"])
def test_a_constraint_is_one_on_rows_that_a_merge_writes(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = Table(spark, folder, keys, records=100)
    table.ingestion = replace(table.ingestion, errors=DEAD)
    table.send(CREATE, ("c", {"id": 8, "notes": LARGE}))
    table.drain()
    is_deleted = "" if keys is BY_POSITION else "_deleted OR "
    for name in ("name", "notes"):
        spark.sql(f"ALTER TABLE delta.`{folder}/t` ADD CONSTRAINT {name} CHECK ({is_deleted}length({name}) > 1)")
    # The delete has no name, and the update no notes.
    table.send(("u", {"id": 8, "notes": PLACEHOLDER}), ("d", {"name": None}), ("c", {"id": 9, "notes": ""}))
    assert [report.dead for report in table.drain()] == [1]
    assert (table.rows(), table.dead_letters()) == ([("n3", LARGE)], [5])


def test_a_decoder_of_changes_rescues_nothing_in_a_keyed_table(tmp_path: Path) -> None:
    made = ingestion(tmp_path / "t", decoder=Debezium("id BIGINT"))
    with pytest.raises(InvalidOptionError):
        replace(made, keys=BY_POSITION, errors=ErrorPolicy(schema_changes="rescue"))
