"""Keyed tables of SCD type 2: whatever happens, there is a row per change, valid until the next change of its key."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.batches.source_checks import check_keys
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.writing import key_history
from spark_jobs.writing.delta_table import is_conflict
from spark_jobs.writing.key_history import lacking_history, merge_history
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError, KeyConflictError
from stream_consumers.options import ErrorPolicy
from tests.support.debezium_messages import PLACEHOLDER, envelope, field
from tests.support.ingesting import drain, ingestion
from tests.support.keyed_tables import (
    BY_POSITION,
    BY_VALUE,
    FIRST_MS,
    HISTORY_BY_POSITION,
    HISTORY_BY_VALUE,
    KeyedTable,
    random_changes,
)
from tests.support.polling import until
from tests.support.written_log import WrittenLog, made_entry

ORDERS = pytest.mark.parametrize("keys", [HISTORY_BY_POSITION, HISTORY_BY_VALUE], ids=["by position", "by value"])
SECONDS = 60.0


@pytest.mark.parametrize(
    "keys",
    [pytest.param(HISTORY_BY_POSITION, marks=pytest.mark.slow), HISTORY_BY_VALUE],
    ids=["by position", "by value"],
)
def test_a_table_has_a_row_per_change(spark: SparkSession, folder: Path, keys: Keys) -> None:
    """In two batches, of which the second one changes when rows of the first one are valid."""
    table = KeyedTable(spark, folder, keys, records=25)
    table.send(*random_changes(40, keys=6, seed=1), shards=2)
    reports = table.drain()
    assert table.history() == table.expected_history()
    assert {report.entry.mode for report in reports} == {"upsert"}
    assert sum(report.merged.inserted for report in reports if report.merged) == 40
    assert sum(report.merged.updated for report in reports if report.merged) > 0
    assert table.drain() == []


@pytest.mark.slow
@pytest.mark.parametrize("keys", [HISTORY_BY_POSITION], ids=["by position"])
def test_what_is_read_again_gives_the_same_table(spark: SparkSession, folder: Path, keys: Keys) -> None:
    """A RESTORE, a rewind to the middle, and a replay of a range, after which nothing has to be read again."""
    table = KeyedTable(spark, folder, keys)
    table.send(*random_changes(20, keys=4, seed=2))
    last = table.drain()[-1]
    table.send(*random_changes(20, keys=4, seed=3, first=20))
    table.drain()
    table.restore(last.version - 1)
    table.drain()
    assert table.history() == table.expected_history()
    with open_batch_source(table.url) as source:
        rewind(spark, source, table.ingestion, Bound.parse("5"))
    table.drain()
    assert table.history() == table.expected_history()
    with open_batch_source(table.url) as source:
        replay = Replay(start=Bound.parse("3"), stop=Bound.parse("9"))
        list(drain_batches(ReplayJob(spark, source, table.ingestion, replay)))
    assert all(not state.redo for state in table.ingestion.ledger().read().shards.values())
    assert table.history() == table.expected_history()
    assert table.verdict().is_right


@pytest.mark.slow
def test_timestamps_that_go_back_make_no_extent_that_ends_before_it_begins(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, HISTORY_BY_POSITION, records=2)
    changes = [{"id": 1, "name": f"n{at}", "op": "u", "at": at, "sent": sent} for at, sent in enumerate([5, 3, 5, 7])]
    table.send(*changes)
    table.drain()
    times = [(name, start - FIRST_MS, end and end - FIRST_MS) for _, name, _, start, end, _ in table.history()]
    assert times == [("n0", 5, 5), ("n1", 5, 5), ("n2", 5, 7), ("n3", 7, None)]


@pytest.mark.slow
def test_a_key_from_two_shards_is_refused_even_if_its_row_is_a_deletion(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, HISTORY_BY_POSITION)
    table.send({"id": 1, "name": "a", "op": "d", "at": 0}, shards=1)
    table.send({"id": 3, "name": "b", "op": "u", "at": 1}, shards=2)
    table.drain()
    before = table.history()
    table.send({"id": 1, "name": "c", "op": "u", "at": 2}, shards=2)
    with pytest.raises(KeyConflictError):
        table.drain()
    assert table.history() == before


@pytest.mark.parametrize(("was", "wanted"), [(BY_POSITION, HISTORY_BY_POSITION), (HISTORY_BY_VALUE, BY_VALUE)])
def test_a_table_keeps_its_scd_type(tmp_path: Path, was: Keys, wanted: Keys) -> None:
    log = WrittenLog(tmp_path / "t")
    log.ours(made_entry(1, -1, kind="init", keys=was.order))
    state = Ledger(log.log(), group="g", member="main").read()
    check_keys(state, Ingestion(group="g", table=str(log.path), keys=was))
    with pytest.raises(InvalidOptionError):
        check_keys(state, Ingestion(group="g", table=str(log.path), keys=wanted))


@pytest.mark.slow
@ORDERS
def test_verify_finds_each_fault(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = KeyedTable(spark, folder, keys, records=100)
    more = [{"id": 5, "name": f"m{at}", "op": "u", "at": at} for at in range(90, 93)]
    table.send(*random_changes(40, keys=4, seed=2), *more, {"id": 6, "name": "y", "op": "d", "at": 93})
    table.drain()
    verdict = table.verdict()
    updates = sum(change["op"] == "u" for change in table.sent)
    assert (verdict.is_right, verdict.messages, verdict.rows, verdict.keys) == (True, 44, updates, 6)
    path = f"delta.`{folder}/t`"
    spark.sql(f"DELETE FROM {path} WHERE name = 'm91'")
    verdict = table.verdict()
    # The row before it ends where the next one that is left does not begin.
    assert (verdict.missing, verdict.stale, verdict.unknown) == (1, 1, 0)
    spark.sql(f"UPDATE {path} SET _is_current = NOT _is_current WHERE name = 'm92'")
    spark.sql(f"UPDATE {path} SET _deleted = false WHERE id = 6")
    spark.sql(f"INSERT INTO {path} BY NAME SELECT * EXCEPT (id), 77 AS id FROM {path} WHERE id = 6")
    verdict = table.verdict()
    assert (verdict.missing, verdict.undeleted, verdict.unknown, verdict.is_right) == (1, 1, 1, False)
    assert verdict.stale == 4, "m90, m92, and that both rows of the deletion are not current"


@pytest.mark.slow
def test_a_value_that_debezium_leaves_out_is_that_of_the_change_before(spark: SparkSession, folder: Path) -> None:
    """Also where an older change comes later: the sequence is that of ``at``, and the batches have one message each."""
    fields = (field("id", "int64"), field("name", "string"), field("at", "int64"))
    changes = [
        envelope("c", after={"id": 1, "name": "a", "at": 1}, fields=fields),
        envelope("u", after={"id": 1, "name": PLACEHOLDER, "at": 5}, fields=fields),
        envelope("u", after={"id": 1, "name": "b", "at": 3}, fields=fields),
        envelope("u", after={"id": 1, "name": PLACEHOLDER, "at": 2}, fields=fields),
        envelope("d", before={"id": 1, "at": 8}, fields=fields),
    ]
    url = f"file://{folder}/changes.ss/changes"
    with create_producer(url) as producer:
        for payload in changes:
            producer.send(payload)
    keys = Keys(["id"], sequence_by="at", stored_as_scd_type=2)
    decoder = Debezium("id BIGINT NOT NULL, name STRING, at BIGINT")
    what = replace(ingestion(folder / "t", records=1, decoder=decoder), keys=keys)
    drain(spark, url, what)
    rows = spark.read.format("delta").load(f"{folder}/t").orderBy("at").collect()
    assert [(row["at"], row["name"], row["_valid_to"]) for row in rows] == [
        (1, "a", 2),
        (2, "a", 3),
        (3, "b", 5),
        (5, "b", 8),
        (8, None, None),
    ]
    with create_producer(url) as producer:
        producer.send(envelope("c", after={"id": 1, "name": PLACEHOLDER, "at": 9}, fields=fields))
    with pytest.raises(KeyConflictError):
        drain(spark, url, what)


@pytest.mark.slow
def test_all_changes_that_lack_a_value_are_found_at_once(spark: SparkSession) -> None:
    """Each of the first two has the value that the other one lacks, but is a dead letter itself."""
    decoder = Debezium("id BIGINT, name STRING, at BIGINT")
    keys = Keys(["id"], stored_as_scd_type=2).of_decoder(decoder)
    changes = [("u", ["at"]), ("u", ["name"]), ("u", []), ("u", ["at"]), ("d", []), ("u", ["at"]), ("u", ["name"])]
    columns = f"{decoder.ddl()}, _stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP"
    rows = spark.createDataFrame(
        [(1, "a", 1, operation, lacks, "s", 0, at, None) for at, (operation, lacks) in enumerate(changes)], columns
    )
    table = spark.createDataFrame([], keys.changes(rows).schema)
    found = lacking_history(keys.changes(rows), keys, table).collect()
    assert sorted(row["_sequence"] for row in found) == [0, 1, 5, 6]


@pytest.mark.slow
def test_the_rows_of_another_decoder_lack_no_value(spark: SparkSession, folder: Path) -> None:
    keys = Keys(["id"], stored_as_scd_type=2)
    url, columns = f"file://{folder}/changes.ss/changes", "id BIGINT NOT NULL, name STRING"
    with create_producer(url) as producer:
        for name in ("a", "b"):
            producer.send(json.dumps({"id": 1, "name": name}).encode())
    what = replace(ingestion(folder / "t", decoder=Json(columns)), keys=keys)
    drain(spark, url, what)
    fields = (field("id", "int64"), field("name", "string"))
    with create_producer(url) as producer:
        producer.send(envelope("u", after={"id": 1, "name": "c"}, fields=fields))
        producer.send(envelope("u", after={"id": 1, "name": PLACEHOLDER}, fields=fields))
    adds = ErrorPolicy(schema_changes="add_columns")
    drain(spark, url, replace(what, decoder=Debezium(columns), errors=adds))
    rows = spark.read.format("delta").load(f"{folder}/t").orderBy("_sequence").collect()
    assert [(row["name"], row["_is_current"]) for row in rows] == [
        ("a", False),
        ("b", False),
        ("c", False),
        ("c", True),
    ]


def _change(spark: SparkSession, at: int, name: str, *, key: int = 1) -> DataFrame:
    columns = "id BIGINT, name STRING, op STRING, at BIGINT, _stream STRING, _shard BIGINT, _sequence BIGINT"
    rows = spark.createDataFrame([(key, name, "u", at, "changes", 0, at)], columns)
    return rows.withColumn("_timestamp", f.lit("2026-01-01").cast("timestamp"))


def _merge(rows: DataFrame, table: KeyedTable, app: str, *, is_small: bool = True) -> None:
    settings = {
        "spark.databricks.delta.write.txnAppId": app,
        "spark.databricks.delta.write.txnVersion": "1",
    }
    changes = table.keys.changes(rows)
    merge_history(changes, table.keys, f"{table.folder}/t", adds_columns=False, is_small=is_small, settings=settings)


@pytest.fixture
def begun(spark: SparkSession, folder: Path) -> KeyedTable:
    """A table with one row."""
    table = KeyedTable(spark, folder, HISTORY_BY_VALUE)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1})
    table.drain()
    return table


@pytest.mark.slow
def test_a_merge_reads_what_landed_after_its_frame_was_made(
    spark: SparkSession, begun: KeyedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the key are those of the version that the MERGE changes, not those that Spark saw before."""
    statement = key_history.history_statement

    def after_another_one(*arguments: Any, **options: Any) -> str:
        monkeypatch.undo()
        _merge(_change(spark, 3, "c"), begun, "other")
        return statement(*arguments, **options)

    monkeypatch.setattr(key_history, "history_statement", after_another_one)
    _merge(_change(spark, 2, "b"), begun, "one")
    assert [row[3:] for row in begun.history()] == [(1, 2, False), (2, 3, False), (3, None, True)]


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [True, False], ids=["listed", "not listed"])
@pytest.mark.parametrize("key", [1, 2], ids=["a known key", "a new key"])
def test_a_commit_between_the_read_of_a_merge_and_its_write_is_a_conflict(
    spark: SparkSession, begun: KeyedTable, monkeypatch: pytest.MonkeyPatch, key: int, is_small: bool
) -> None:
    """Both commits insert a row of the key. The one that waits has read the table, and takes one of the two cores."""
    begun_reading, may_go_on = begun.folder / "reading", begun.folder / "go on"
    found = key_history.changed_rows

    def waits(name):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        begun_reading.touch()
        until(may_go_on.exists, seconds=SECONDS, what="the other commit")
        return name

    def slow(*arguments: Any) -> DataFrame:
        monkeypatch.undo()
        return found(*arguments).withColumn("name", f.udf(waits, "string")("name"))

    monkeypatch.setattr(key_history, "changed_rows", slow)
    with ThreadPoolExecutor(1) as pool:
        merging = pool.submit(_merge, _change(spark, 2, "b", key=key), begun, "one", is_small=is_small)
        until(begun_reading.exists, seconds=SECONDS, what="the read")
        _merge(_change(spark, 3, "c", key=key), begun, "other", is_small=is_small)
        may_go_on.touch()
        failure = merging.exception(SECONDS)
    assert failure is not None
    assert is_conflict(failure)
    assert sorted(row[3] for row in begun.history()) == [1, 3]
