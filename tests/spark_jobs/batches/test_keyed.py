"""Keyed tables: whatever happens, the table has the newest change of each key."""

from __future__ import annotations

import json
import secrets
import shutil
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Literal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.writing import delta_table
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import open_batch_source
from stream_consumers.errors import (
    InvalidOptionError,
    KeyConflictError,
    SchemaMismatchError,
    SourceRecreatedError,
    TransformError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import ErrorPolicy
from tests.support.keyed_tables import (
    BY_POSITION,
    BY_VALUE,
    HISTORY_BY_POSITION,
    HISTORY_BY_VALUE,
    SCHEMA,
    KeyedTable,
    assert_own_commits,
    random_changes,
)
from tests.support.ss_files import break_length, cut_front


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


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, HISTORY_BY_POSITION], ids=["rows", "history"])
def test_a_key_from_two_shards_of_one_batch_is_refused(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = KeyedTable(spark, folder, keys)
    table.send({"id": 1, "name": "a", "op": "u", "at": 0}, shards=1)
    # The newest change of the key has another sequence than the one of the other shard.
    table.send(*({"id": key, "name": "b", "op": "u", "at": 1} for key in (3, 1)), shards=2)
    with pytest.raises(KeyConflictError):
        table.drain()
    assert spark.read.format("delta").load(f"{folder}/t").count() == 0


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
    path, right = f"delta.`{folder}/t`", table.ingestion.ledger().read().version
    spark.sql(f"DELETE FROM {path} WHERE id = 6")
    first = min(table.expected())
    last = spark.read.format("delta").load(f"{folder}/t").where(f"id = {first}").collect()[0]["_sequence"]
    assert first != 6, "the changes must leave another row"
    spark.sql(f"UPDATE {path} SET _sequence = 1 WHERE id = {first}")
    spark.sql(f"INSERT INTO {path} BY NAME SELECT * EXCEPT (id), 77 AS id FROM {path} WHERE id = {first}")
    verdict = table.verdict()
    assert (verdict.missing, verdict.stale, verdict.unknown, verdict.is_right) == (1, 1, 1, False)
    table.restore(right)
    spark.sql(f"UPDATE {path} SET _timestamp = _timestamp + INTERVAL 1 SECOND WHERE id = {first}")
    verdict = table.verdict()
    assert (verdict.other, [place for _, place in verdict.examples["other"]], verdict.is_right) == (1, [last], False)
    table.restore(right)
    assert table.verdict().is_right
    Path(folder, "changes.ss").unlink()
    table.send(*table.sent)
    with pytest.raises(SourceRecreatedError):
        table.verdict()


def test_verify_is_not_right_about_a_file_whose_end_cannot_be_read(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder)
    table.send(*random_changes(5, keys=4, seed=2))
    table.drain()
    table.send(*random_changes(5, keys=4, seed=3))
    offset = break_length(folder / "changes.ss", 6)
    verdict = table.verdict()
    assert (f"offset {offset}" in (verdict.unreadable_tail or ""), verdict.is_right) == (True, False)
    assert (verdict.messages, verdict.missing, verdict.stale) == (5, 0, 0)


@pytest.mark.slow
def test_rows_and_deletions_that_are_newer_than_what_the_stream_still_holds_are_no_faults(
    spark: SparkSession, folder: Path
) -> None:
    table = KeyedTable(spark, folder, BY_VALUE)
    kinds = {1: "u", 2: "d", 3: "u", 4: "d"}
    table.send(*({"id": key, "name": "new", "op": kind, "at": 9} for key, kind in kinds.items()))
    table.drain()
    table.send(*({"id": key, "name": "late", "op": "u", "at": 5} for key in (1, 2)))
    # Too few messages would not prove that the file has lost its oldest ones.
    table.send(*({"id": 5, "name": "new", "op": "u", "at": at} for at in (8, 9)))
    table.drain()
    cut_front(folder / "changes.ss", first=5)
    verdict = table.verdict()
    assert (verdict.is_right, verdict.rows, verdict.unread, verdict.keys) == (True, 3, 2, 3)
    path = f"delta.`{folder}/t`"
    spark.sql(f"UPDATE {path} SET _sequence_by = 4 WHERE id IN (1, 2)")
    assert (table.verdict().stale, table.verdict().is_right) == (2, False)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE, HISTORY_BY_POSITION], ids=["position", "value", "history"])
def test_a_column_that_is_no_longer_made_has_no_value_whatever_is_in_one_batch(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    """A deleted key is inserted again: the row of the next one does not get the value of the one before."""
    found = []
    for name, records in (("one by one", 1), ("together", 10)):
        (folder / name).mkdir()
        table = KeyedTable(spark, folder / name, keys, records=records)
        table.send({"id": 1, "name": "a", "op": "u", "at": 0}, {"id": 2, "name": "b", "op": "u", "at": 1})
        table.drain()
        path = f"delta.`{table.folder}/t`"
        spark.sql(f"ALTER TABLE {path} SET TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')")
        spark.sql(f"ALTER TABLE {path} ADD COLUMN (tier STRING)")
        spark.sql(f"ALTER TABLE {path} ALTER COLUMN tier SET DEFAULT 'new'")
        spark.sql(f"UPDATE {path} SET tier = 'gold'")
        table.send({"id": 1, "op": "d", "at": 2}, {"id": 1, "op": "u", "at": 3}, {"id": 2, "op": "u", "at": 4})
        without = replace(table.ingestion, transform=lambda rows: rows.drop("name"))
        with open_batch_source(table.url) as source:
            list(drain_batches(IngestJob(spark, source, without)))
        made = spark.read.format("delta").load(f"{table.folder}/t").orderBy("id", "_sequence")
        found.append([tuple(row) for row in made.select("id", "at", "name", "tier").collect()])
    assert found[0] == found[1]
    assert [row for row in found[0] if row[1] >= 2 and row[2:] != (None, "new")] == []


@pytest.mark.slow
def test_two_batches_at_once_in_one_session_write_their_own_commits(spark: SparkSession, folder: Path) -> None:
    """A MERGE takes transaction and ledger entry from settings of a session, which no other MERGE may see."""
    together = Barrier(2, timeout=120)

    def wait(step: Step, batch: Batch | None) -> None:
        if step is Step.WRITING:
            together.wait()

    def drained(table: KeyedTable) -> list[BatchReport]:
        try:
            return table.drain(wait)
        except BaseException:
            together.abort()
            raise

    tables = []
    for name, keys in (("one", BY_POSITION), ("other", BY_VALUE)):
        (folder / name).mkdir()
        tables.append(KeyedTable(spark, folder / name, keys, records=10))
        tables[-1].send(*random_changes(20, keys=4, seed=4))
    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(drained, table) for table in tables]:
            assert len(running.result()) == 2
    for table in tables:
        assert table.rows() == table.expected()
        assert_own_commits(table)
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@pytest.mark.slow
def test_change_data_feed_and_row_tracking_follow_the_changes(spark: SparkSession, folder: Path) -> None:
    options = {"delta.enableChangeDataFeed": "true", "delta.enableRowTracking": "true"}
    table, path = KeyedTable(spark, folder, properties=options), f"{folder}/t"

    def row_ids() -> dict[int, int]:
        rows = spark.read.format("delta").load(path).select("id", "_metadata.row_id")
        return {row["id"]: row["row_id"] for row in rows.collect()}

    table.send(*({"id": key, "name": "old", "op": "u", "at": key} for key in (1, 2, 3)))
    table.drain()
    before = row_ids()
    table.send({"id": 1, "name": "new", "op": "u", "at": 4}, {"id": 2, "name": "gone", "op": "d", "at": 5})
    table.send({"id": 4, "name": "more", "op": "u", "at": 6})
    (report,) = table.drain()
    reader = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", report.version)
    assert {(row["_change_type"], row["id"], row["name"]) for row in reader.load(path).collect()} == {
        ("update_preimage", 1, "old"),
        ("update_postimage", 1, "new"),
        ("delete", 2, "old"),
        ("insert", 4, "more"),
    }
    after = row_ids()
    assert (after[1], after[3]) == (before[1], before[3])
    assert after.keys() == {1, 3, 4}
    assert after[4] not in before.values()


@pytest.mark.slow
def test_any_text_is_a_key(spark: SparkSession, folder: Path) -> None:
    """Quotes, braces, variables and a long text in a key change no other row."""
    names = ["", " ", "O'Hara", "a\\", "'; --", "{changes}", "{", "${env:HOME}", "\u00e9\U0001f600", "x" * 5000]
    keys = Keys(["name", "id"], apply_as_deletes="op = 'd'", except_columns=["op"])
    table = KeyedTable(spark, folder, keys, records=100)
    for at, op in enumerate("uud"):
        table.send(*({"id": 2**63 - 1, "name": name, "op": op, "at": at} for name in names[at:]))
        table.drain()
    rows = spark.read.format("delta").load(f"{folder}/t").select("name", "at").collect()
    assert sorted((row["name"], row["at"]) for row in rows) == sorted([(names[0], 0), (names[1], 1)])


@pytest.mark.slow
@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_key_may_have_any_name_in_a_comparison(spark: SparkSession, folder: Path, scd_type: Literal[1, 2]) -> None:
    names = ["count", "row", "change", "shown", "is_held", "_key_1", "_stored", "_is_valid"]
    keys = Keys(names, apply_as_deletes="op = 'd'", except_columns=["op"], stored_as_scd_type=scd_type)
    columns = ", ".join(f"`{name}` BIGINT" for name in names)
    table = KeyedTable(spark, folder, keys, schema=f"{columns}, name STRING, op STRING")
    for at, op in enumerate("uud"):
        table.send(*({**dict.fromkeys(names, key), "name": f"{at}", "op": op} for key in range(at, 3)))
    table.drain()
    verdict = table.verdict()
    assert (verdict.is_right, verdict.keys, verdict.messages) == (True, 3, 6)


EXTREMES = (-(2**63), -5_000_000_000, -1, 0, 5_000_000_000, 2**63 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("id",), ("name", "id")], ids=["number", "text and number"])
@pytest.mark.parametrize(
    "keys",
    [BY_POSITION, BY_VALUE, HISTORY_BY_POSITION, HISTORY_BY_VALUE],
    ids=["position", "value", "history by position", "history by value"],
)
def test_a_small_batch_lists_the_whole_numbers_of_its_keys(
    spark: SparkSession, folder: Path, keys: Keys, names: tuple[str, ...]
) -> None:
    table = KeyedTable(spark, folder, replace(keys, columns=names), records=10)
    table.send(*({"id": key, "name": f"text{at}", "op": "u", "at": at} for at, key in enumerate(EXTREMES)))
    table.drain()
    table.send(*({"id": EXTREMES[at], "name": f"text{at}", "op": "ud"[at // 4], "at": at + 10} for at in (0, 2, 4)))
    table.drain()
    if keys.keeps_history:
        assert table.history() == table.expected_history()
    else:
        assert table.rows() == table.expected()
    predicate = table.predicate()
    assert [str(key) in predicate for key in EXTREMES if key not in (0, -1)] == [True, False, True, False]
    assert "text" not in predicate


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a transform", "many messages", "a truncate", "no whole number"])
def test_other_batches_list_no_key(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    keys = replace(BY_POSITION, columns=("name",)) if why == "no whole number" else BY_POSITION
    table = KeyedTable(spark, folder, TRUNCATED if why == "a truncate" else keys, records=10)
    table.send(*({"id": EXTREMES[at], "name": f"text{at}", "op": "u", "at": at} for at in (0, 1)))
    table.drain()
    if why == "a transform":
        table.transform = lambda rows: rows.where("true")
    if why == "many messages":
        monkeypatch.setattr(delta_table, "MAX_LISTED", 1)
    if why == "a truncate":
        table.send({"name": None, "op": "t", "at": 2})
    table.send(*({"id": EXTREMES[at], "name": f"text{at}", "op": "u", "at": at + 3} for at in (1, 4)))
    table.drain()
    assert table.rows() == table.expected()
    assert [str(EXTREMES[at]) for at in (0, 1, 4) if str(EXTREMES[at]) in table.predicate()] == []


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, HISTORY_BY_POSITION], ids=["rows", "history"])
def test_a_transform_may_make_other_keys_each_time_that_it_is_computed(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    def with_random_keys(rows: DataFrame) -> DataFrame:
        return rows.withColumn("id", f.udf(lambda: secrets.randbelow(3), "bigint").asNondeterministic()())

    table = KeyedTable(spark, folder, keys, records=3, transform=with_random_keys, errors=ErrorPolicy())
    table.send(*({"id": 0, "name": f"n{at}", "op": "u", "at": at} for at in range(21)))
    table.drain()
    if keys.keeps_history:
        current = [version[0] for version in table.history() if version[5]]
        assert (len(table.history()), len(set(current))) == (21, len(current))
    else:
        assert table.rows().keys() <= {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, HISTORY_BY_VALUE], ids=["rows", "history"])
def test_the_type_of_a_listed_key_may_become_wider(spark: SparkSession, folder: Path, keys: Keys) -> None:
    properties = {"delta.enableTypeWidening": "true"}
    table = KeyedTable(spark, folder, keys, properties=properties, errors=ErrorPolicy(schema_changes="add_columns"))
    for at, (kind, last) in enumerate([("INT", 2**31 - 1), ("INT", 2**31 - 1), ("BIGINT", 2**31), ("BIGINT", 2**31)]):
        table.schema = SCHEMA.replace("BIGINT", kind, 1)
        table.send(*({"id": key, "name": f"n{at}", "op": "u", "at": at} for key in (-(2**31), last)))
        table.drain()
        assert str(last) in table.predicate()
    if keys.keeps_history:
        assert table.history() == table.expected_history()
    else:
        assert table.rows() == table.expected()


def with_bytes(rows: DataFrame) -> DataFrame:
    return rows.withColumn("raw", rows.name.cast("binary"))


@pytest.mark.slow
def test_a_key_of_bytes_whose_name_is_spelled_otherwise(spark: SparkSession, folder: Path) -> None:
    """Delta clusters by no bytes, and only by names as they are spelled in the table."""
    keys = Keys(["RAW", "ID"], apply_as_deletes="op = 'd'", except_columns=["op"])
    table = KeyedTable(spark, folder, keys)
    for op in ("u", "u", "d"):
        table.send({"id": 1, "name": "a", "op": op, "at": 0}, {"id": 2, "name": "b", "op": "u", "at": 1})
        with open_batch_source(table.url) as source:
            list(drain_batches(IngestJob(spark, source, replace(table.ingestion, transform=with_bytes))))
    assert table.rows() == {2: "b"}


def with_numbers(rows: DataFrame) -> DataFrame:
    return rows.where("CAST(name AS INT) > 0")


@pytest.mark.slow
def test_verify_leaves_out_dead_letters_of_the_transform_and_shows_no_value(spark: SparkSession, folder: Path) -> None:
    class Cast(KeyedTable):
        @property
        def ingestion(self) -> Ingestion:
            return replace(super().ingestion, transform=with_numbers)

    table = Cast(spark, folder)
    table.send(*({"id": at, "name": name, "op": "u", "at": at} for at, name in enumerate(["1", "hunter2", "3"])))
    (report,) = table.drain()
    assert (report.rows, report.dead) == (2, 1)
    verdict = table.verdict()
    assert verdict.is_right
    assert (verdict.messages, verdict.rows) == (2, 2)
    spark.sql(f"UPDATE delta.`{folder}/t_dead_letters` SET _timestamp = _timestamp + INTERVAL 1 SECOND")
    verdict = table.verdict()
    assert (verdict.other, verdict.examples, verdict.is_right) == (1, {"other": [(Shard("changes"), 2)]}, False)
    shutil.rmtree(f"{folder}/t_dead_letters")
    with pytest.raises(TransformError) as raised:
        table.verdict()
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))
    assert "writ" not in str(raised.value), "nothing was to be written"


@pytest.mark.slow
def test_verify_leaves_out_messages_that_the_group_did_not_have_to_read(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder)
    changes = [{"id": at, "name": "n", "op": "u", "at": at} for at in range(6)]
    table.send(*changes[:2])
    with open_batch_source(table.url) as source:
        job = IngestJob(spark, source, table.ingestion, origin=Bound.parse("latest"))
        assert list(drain_batches(job)) == []
    table.send(*changes[2:5])
    with open_batch_source(table.url) as source:
        rewind(spark, source, table.ingestion, Bound.parse("5"))
    table.send(*changes[5:])
    table.drain()
    verdict = table.verdict()
    assert (table.rows().keys(), verdict.is_right, verdict.messages, verdict.rows) == ({4, 5}, True, 2, 2)
    with open_batch_source(table.url) as source:
        rewind(spark, source, table.ingestion, Bound.parse("2"))
    table.drain()
    verdict = table.verdict()
    assert (table.rows().keys(), verdict.is_right, verdict.messages, verdict.rows) == ({1, 2, 3, 4, 5}, True, 5, 5)
    spark.sql(f"DELETE FROM delta.`{folder}/t` WHERE id = 2")
    assert (table.verdict().missing, table.verdict().is_right) == (1, False)


TRUNCATED = Keys(["id"], apply_as_deletes="op = 'd'", apply_as_truncates="op = 't'", except_columns=["op"])


@pytest.mark.slow
@pytest.mark.parametrize("records", [2, 100])
def test_a_truncate_removes_all_older_rows(spark: SparkSession, folder: Path, records: int) -> None:
    table = KeyedTable(spark, folder, TRUNCATED, records=records)
    table.send(*({"id": key, "name": "old", "op": "u", "at": key} for key in (1, 2, 3)))
    table.drain()
    table.send(
        {"id": 2, "name": "older", "op": "u", "at": 3},
        {"name": None, "op": "t", "at": 4},
        {"id": 3, "name": "new", "op": "u", "at": 5},
        {"id": 4, "name": "gone", "op": "u", "at": 6},
        {"id": 4, "name": None, "op": "d", "at": 7},
    )
    reports = table.drain()
    assert (table.rows(), sum(report.dead for report in reports)) == ({3: "new"}, 0)
    assert table.verdict().is_right
    with open_batch_source(table.url) as source:
        list(drain_batches(ReplayJob(spark, source, table.ingestion, Replay(stop=Bound.parse("3")))))
    table.drain()
    assert table.rows() == table.expected() == {3: "new"}


@pytest.mark.slow
def test_a_truncate_among_several_shards_is_refused(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, TRUNCATED)
    table.send(*({"id": key, "name": "old", "op": "u", "at": key} for key in (1, 2)), shards=2)
    table.drain()
    before = table.rows()
    table.send({"id": 2, "name": None, "op": "t", "at": 4}, shards=2)
    with pytest.raises(KeyConflictError):
        table.drain()
    assert table.rows() == before


@pytest.mark.parametrize("column", ["_unavailable", "_Unavailable", "_la\u017ft_shard", "_truncates"])
def test_a_column_takes_no_name_that_a_keyed_table_uses(spark: SparkSession, column: str) -> None:
    with pytest.raises(SchemaMismatchError):
        Keys(["id"]).changes(spark.createDataFrame([], f"id BIGINT, `{column}` ARRAY<STRING>"))
    of_a_message = Json(f"id BIGINT, `{column}` ARRAY<STRING>")
    if column.lower() == "_unavailable":
        with pytest.raises(InvalidOptionError):
            Keys(["id"], except_columns=[column]).of_decoder(of_a_message)


@pytest.mark.parametrize(
    ("option", "expression"),
    [
        ("apply_as_deletes", "CAST(name AS BOOLEAN)"),
        pytest.param("apply_as_truncates", "CAST(name AS BOOLEAN)", marks=pytest.mark.slow),
        pytest.param("sequence_by", "CAST(name AS BIGINT)", marks=pytest.mark.slow),
    ],
)
def test_a_message_for_which_an_expression_fails_is_a_dead_letter(
    spark: SparkSession, folder: Path, option: str, expression: str
) -> None:
    table = KeyedTable(spark, folder, Keys(["id"], **{option: expression}))
    table.send(*({"id": number, "name": name, "op": "u", "at": 0} for number, name in enumerate(["0", "maybe", "0"])))
    (report,) = table.drain()
    assert (report.rows, report.dead, table.rows()) == (2, 1, {0: "0", 2: "0"})


def of_each_letter(rows: DataFrame) -> DataFrame:
    return rows.withColumn("id", f.expr("explode(transform(split(name, ''), c -> ascii(c)))"))


@pytest.mark.slow
def test_a_message_of_two_rows_with_one_key_is_a_dead_letter(spark: SparkSession, folder: Path) -> None:
    class Exploded(KeyedTable):
        @property
        def ingestion(self) -> Ingestion:
            return replace(super().ingestion, transform=of_each_letter)

    table = Exploded(spark, folder, Keys(["id"]))
    table.send(*({"id": at, "name": name, "op": "u", "at": at} for at, name in enumerate(["ab", "cdc", "b"])))
    (report,) = table.drain()
    assert (report.dead, table.rows()) == (1, {ord("a"): "ab", ord("b"): "b"})
    assert table.verdict().is_right


def test_debezium_knows_what_deletes_and_what_truncates() -> None:
    keys = Keys(["id"]).of_decoder(Debezium("id BIGINT"))
    assert (keys.apply_as_deletes, keys.apply_as_truncates) == ("_op = 'd'", "_op = 't'")
    assert not Keys(["id"], sequence_by="_source_order").of_decoder(Debezium("id BIGINT")).apply_as_truncates
    with pytest.raises(InvalidOptionError):
        Keys(["id"], sequence_by="at", apply_as_truncates="op = 't'")


@pytest.mark.slow
def test_undeclared_fields_of_a_keyed_table_are_rescued(spark: SparkSession, folder: Path) -> None:
    rescues = ErrorPolicy(schema_changes="rescue")
    table = KeyedTable(spark, folder, errors=rescues)
    for name in ("a", "b"):
        table.send({"id": 1, "name": name, "op": "u", "at": 1, "level": name})
        table.drain()
    (row,) = spark.read.format("delta").load(f"{folder}/t").collect()
    assert (row["name"], json.loads(row["_rescued"])) == ("b", {"level": "b"})
    table.send({"id": 1, "name": "c", "op": "d", "at": 2})
    table.drain()
    assert table.rows() == {}


@pytest.mark.slow
def test_fields_with_names_that_delta_adds_when_it_merges_become_no_columns(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, errors=ErrorPolicy(schema_changes="add_columns"))
    for name in ("a", "b", "c"):
        table.send({"id": 1, "name": name, "op": "u", "at": 1, "filePath": 1, "_Row_Id_": 2, "level": name})
        table.drain()
    (row,) = spark.read.format("delta").load(f"{folder}/t").collect()
    assert (row["name"], row["level"]) == ("c", "c")
    assert not {"filePath", "_Row_Id_"} & set(row.asDict())


@pytest.mark.slow
def test_a_key_of_type_char_is_refused(spark: SparkSession, folder: Path) -> None:
    columns = "name CHAR(5) NOT NULL, id BIGINT, at BIGINT, _stream STRING, _shard BIGINT, _sequence BIGINT"
    spark.sql(f"CREATE TABLE delta.`{folder}/t` ({columns}, _timestamp TIMESTAMP) USING DELTA")
    table = KeyedTable(spark, folder, keys=replace(BY_POSITION, columns=["name"]))
    table.send({"id": 1, "name": "a", "op": "u", "at": 1})
    with pytest.raises(SchemaMismatchError):
        table.drain()
