"""What verify says of right tables and of damaged ones, whatever the transform makes of a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import SparkSession

from spark_jobs import verify as module
from spark_jobs.batches.adoption import adopt
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger import table_rows
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.verify import ShardVerdict, verify
from stream_consumers.batches import Range
from stream_consumers.create import open_batch_source
from stream_consumers.options import Limits
from tests.support.ingesting import drain, ingestion
from tests.support.streams import shard, write_stream

MESSAGES = 30
BATCH = 10


def verdict(url: str, what: Ingestion, **options: Any) -> ShardVerdict:
    with open_batch_source(url) as source:
        (found,) = verify(source, what, **options)
    return found


def wrong(found: ShardVerdict) -> tuple[int, int, int]:
    return found.missing, found.duplicated, found.unknown


class Lake:
    """Messages 1 to 30 of one shard, and the table that three batches of a transform made of them.

    It makes no row of a message whose sequence is divisible by three, and of the others as many as the remainder says:
    twenty messages are thirty rows.
    """

    def __init__(self, folder: Path, *, transform: str = "exploded") -> None:
        self.url = write_stream(folder / "orders.ss", MESSAGES, shards=1)
        self.what = ingestion(folder / "t")
        self.path = self.what.table
        with open_batch_source(self.url) as source:
            self.identities = source.identities()
        self.commit(1, [], kind="init", origin={shard(0): 1}, switch="resumable")
        for number in range(3):
            self.batch(number, [sequence for sequence in self.within(number) for _ in range(sequence % 3)], transform)

    def within(self, number: int) -> range:
        return range(1 + BATCH * number, 1 + BATCH * (number + 1))

    def batch(self, number: int, sequences: list[int], transform: str, **details: Any) -> None:
        covered = Intervals.of((MIN_SEQUENCE, 1 + BATCH * number))
        fields = {"ranges": {shard(0): Range(1 + BATCH * number, 1 + BATCH * (number + 1))}, "rows": BATCH}
        state = {shard(0): ShardState(covered, origin=1)}
        self.commit(number + 2, sequences, transform=transform, state=state, **{**fields, **details})

    def commit(self, number: int, sequences: list[int], *, kind: str = "batch", **fields: Any) -> None:
        """As a run would write it."""
        base = number - 2
        entry = LedgerEntry(
            kind,
            "lakehouse",
            "lakehouse/main",
            number,
            "main",
            f"b{number}",
            base,
            identities=self.identities,
            **fields,
        )
        properties = CommitProperties(
            custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, number)]
        )
        write_deltalake(self.path, self.rows(sequences), mode="append", commit_properties=properties)
        file = Path(self.path, "_delta_log", f"{DeltaTable(self.path).version():020d}.json")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for info in (line["commitInfo"] for line in lines if "commitInfo" in line):
            info["operationMetrics"] = {"numOutputRows": str(len(sequences))}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def rows(self, sequences: list[int]) -> pa.Table:
        count = len(sequences)
        places = {"_shard": pa.array([0] * count, pa.int64()), "_sequence": pa.array(sequences, pa.int64())}
        return pa.table(
            {"_stream": pa.array(["orders"] * count, pa.string()), **places, "item": pa.array(range(count), pa.int64())}
        )

    def insert(self, *sequences: int) -> None:
        """Somebody else does."""
        write_deltalake(self.path, self.rows(list(sequences)), mode="append")

    def delete(self, where: str) -> None:
        DeltaTable(self.path).delete(where)

    def verdict(self, **options: Any) -> ShardVerdict:
        return verdict(self.url, self.what, **options)


@pytest.fixture
def lake(folder: Path) -> Lake:
    return Lake(folder)


def test_a_transform_that_makes_none_or_many_rows_of_a_message(lake: Lake) -> None:
    found = lake.verdict()
    assert (found.messages, found.rows, found.filtered, found.untold) == (30, 30, 10, 0)
    assert found.is_right


def test_one_of_two_rows_is_gone(lake: Lake) -> None:
    lake.delete("_sequence = 2 AND item = 1")
    assert lake.verdict().examples == {"missing": [2]}


def test_a_message_without_its_rows(lake: Lake) -> None:
    lake.delete("_sequence IN (2, 22)")
    found = lake.verdict()
    assert (found.examples, found.filtered) == ({"missing": [2, 22]}, 10)


def test_as_many_rows_as_there_were_but_others(lake: Lake) -> None:
    lake.delete("_sequence = 2 AND item = 1")
    lake.insert(1)
    found = lake.verdict()
    assert found.rows == 30
    assert found.examples == {"missing": [2], "duplicated": [1]}


def test_a_row_of_a_message_that_the_transform_drops_and_of_none_at_all(lake: Lake) -> None:
    lake.insert(3, 1000)
    assert lake.verdict().examples == {"unknown": [1000, 3]}
    assert not lake.verdict().is_right


def test_the_newest_batch_that_wrote_a_range_tells_what_is_there(lake: Lake) -> None:
    """A replay with another transform: of each message one row, but not of the last."""
    lake.delete("_sequence > 10 AND _sequence <= 20")
    covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 31)), origin=1)}
    lake.commit(
        5,
        list(range(11, 20)),
        kind="replay",
        transform="one",
        mode="replace",
        state=covered,
        ranges={shard(0): Range(11, 21)},
        rows=BATCH,
    )
    found = lake.verdict()
    assert (found.rows, found.filtered, found.is_right) == (28, 8, True)


def test_all_of_it_in_small_parts(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.delete("_sequence IN (2, 28)")
    lake.insert(*range(1000, 1040))
    whole = lake.verdict()
    assert wrong(whole) == (2, 0, 40)
    sizes: list[int] = []
    read: Callable[[Iterable[pa.RecordBatch]], Any] = table_rows.sequences_of

    def watched(batches: Iterable[pa.RecordBatch]) -> Any:
        found = read(batches)
        sizes.append(sum(map(len, found.values())))
        return found

    monkeypatch.setattr(module, "sequences_of", watched)
    assert replace(lake.verdict(limits=Limits(max_records=4)), examples={}) == replace(whole, examples={})
    assert max(sizes) <= 8


def test_rows_that_were_rewritten_and_files_that_are_gone(lake: Lake) -> None:
    right = lake.verdict()
    DeltaTable(lake.path).optimize.compact()
    assert lake.verdict() == right
    DeltaTable(lake.path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    assert lake.verdict() == right
    # What is left is the number of rows of each batch.
    lake.delete("_sequence = 2")
    assert wrong(lake.verdict()) == (2, 0, 0)
    lake.insert(11)
    assert wrong(lake.verdict()) == (2, 1, 0)


def test_files_that_are_gone_of_a_batch_that_was_replaced_in_part(lake: Lake) -> None:
    lake.delete("_sequence > 10 AND _sequence <= 15")
    covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 31)), origin=1)}
    replay = {"kind": "replay", "mode": "replace", "transform": "one", "state": covered}
    lake.commit(5, list(range(11, 16)), ranges={shard(0): Range(11, 16)}, rows=5, **replay)
    assert lake.verdict().is_right
    DeltaTable(lake.path).optimize.compact()
    DeltaTable(lake.path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    found = lake.verdict()
    assert (found.is_right, found.untold) == (True, 1)


def test_a_log_that_does_not_tell_any_more_is_no_reason_to_call_a_table_wrong(lake: Lake) -> None:
    DeltaTable(lake.path).create_checkpoint()
    for version in range(3):
        Path(lake.path, "_delta_log", f"{version:020d}.json").unlink()
    found = lake.verdict()
    assert (found.filtered, found.untold, found.is_right) == (4, 6, True)


def test_without_a_transform_each_message_is_one_row(folder: Path) -> None:
    lake = Lake(folder)
    plain = ingestion(folder / "plain")
    other = Lake.__new__(Lake)
    other.url, other.what, other.path, other.identities = lake.url, plain, plain.table, lake.identities
    other.commit(1, [], kind="init", origin={shard(0): 1}, switch="resumable")
    for number in range(3):
        other.batch(number, [n for n in other.within(number) if n != 14] + [15] * (number == 1), "")
    found = other.verdict()
    assert found.examples == {"missing": [14], "duplicated": [15]}, "also if the batch itself was wrong"


def test_rows_that_were_adopted_are_what_they_are_until_a_batch_writes_them(folder: Path) -> None:
    lake = Lake(folder)
    copy = Lake.__new__(Lake)
    copy.url, copy.what, copy.identities = lake.url, ingestion(folder / "copy"), lake.identities
    copy.path = copy.what.table
    copy.insert(1, 2, 2, 4, 5, 5)
    copy.commit(2, [], kind="init", origin={shard(0): 11}, switch="resumable")
    begun = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 11)), origin=11)}
    copy.commit(3, list(copy.within(1)), state=begun, ranges={shard(0): Range(11, 21)}, rows=BATCH)
    found = copy.verdict()
    assert (found.messages, found.rows, found.is_right) == (10, 16, True)
    copy.insert(12)
    assert copy.verdict().examples == {"duplicated": [12]}
    # A replay of what lies before the origin is compared again.
    copy.delete("_sequence < 6 OR _sequence = 12")
    covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 21)), origin=11)}
    replay = {"kind": "replay", "mode": "replace", "state": covered}
    copy.commit(4, [1, 2, 3, 4], ranges={shard(0): Range(1, 6)}, rows=4, **replay)
    assert copy.verdict().examples == {"missing": [5, 12]}


@pytest.mark.spark
def test_deletion_vectors_renamed_columns_and_clones(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10, shards=1)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    table = f"delta.`{what.table}`"
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM {table} WHERE id = 3")
    found = verdict(url, what)
    assert (found.rows, found.missing, found.examples) == (9, 1, {"missing": [4]})
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN user TO customer")
    write_stream(folder / "orders.ss", 3, shards=1)
    drain(spark, url, replace(what, transform=lambda rows: rows.withColumnRenamed("user", "customer").where("id <> 1")))
    found = verdict(url, what)
    assert (found.rows, found.filtered, found.examples) == (11, 1, {"missing": [4]})
    clone = ingestion(folder / "clone")
    spark.sql(f"CREATE TABLE delta.`{clone.table}` SHALLOW CLONE {table}")
    with open_batch_source(url) as source:
        adopt(spark, source, clone)
    write_stream(folder / "orders.ss", 2, shards=1)
    drain(spark, url, replace(clone, transform=lambda rows: rows.withColumnRenamed("user", "customer")))
    found = verdict(url, clone)
    assert (found.messages, found.rows, found.lag, found.is_right) == (2, 13, 0, True)
