"""Maintenance of tables: few files, and nothing that the ledger promises is broken."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Step
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.ledger import LOG_RETENTION
from spark_jobs.maintenance import (
    FILE_RETENTION,
    SET_FILE_RETENTION,
    TableMaintenance,
    check_own_folder,
    file_retention,
    maintain,
)
from spark_jobs.table_location import sql_name
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError, UnsafeStorageError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.kafka_topics import Once, Pipeline, assert_each_once, orders
from tests.support.s3_server import object_store

DAY_MS = 86_400_000
_TIMES = {"commitInfo": "timestamp", "add": "modificationTime", "remove": "deletionTimestamp"}


def aged(table: str, into: Path, *, days: float) -> str:
    """Copy a table to a folder, so that Spark knows nothing of it, and let all that is in it have happened earlier."""
    shutil.copytree(table, into)
    for file in (into / "_delta_log").iterdir():
        # Checksums and checkpoints of what is changed here; Delta does without.
        if file.suffix == ".crc" or "checkpoint" in file.name:
            file.unlink()
        elif file.suffix == ".json":
            file.write_text("".join(f"{_earlier(line, days)}\n" for line in file.read_text().splitlines()))
    earlier = time.time() - days * DAY_MS / 1000
    for file in into.rglob("*"):
        os.utime(file, (earlier, earlier))
    return str(into)


def _earlier(line: str, days: float) -> str:
    action: dict[str, Any] = json.loads(line)
    for kind, name in _TIMES.items():
        if name in action.get(kind, {}):
            action[kind][name] -= int(days * DAY_MS)
    return json.dumps(action)


SHARD = Shard("orders")


@pytest.fixture
def url() -> Iterator[StreamUrl]:
    made = StreamUrl.parse(f"memory://{uuid.uuid4().hex}/{SHARD.stream}")
    yield made
    forget_memory_broker(made)


def send(url: StreamUrl, count: int) -> None:
    for payload in orders(count):
        memory_broker(url).append(SHARD, payload)


def messages(url: StreamUrl) -> set[tuple[str, int, int]]:
    return {(SHARD.stream, SHARD.id, message.sequence) for message in memory_broker(url).messages[SHARD]}


def data_files(what: Pipeline) -> int:
    return len(DeltaTable(what.table).file_uris())


def clean_before(table: str, version: int) -> None:
    """What Delta does behind a checkpoint with commits that are older than the log is kept."""
    DeltaTable(table).create_checkpoint()
    for commit in Path(table, "_delta_log").glob("*.json"):
        if commit.stem.isdigit() and int(commit.stem) < version:
            commit.unlink()


@pytest.mark.spark
def test_nothing_that_the_ledger_promises_is_broken(spark: SparkSession, url: StreamUrl, folder: Path) -> None:
    send(url, 3)
    what = Pipeline.of(spark, str(url), folder / "t", records=1)
    made: list[TableMaintenance] = []
    # In the middle of the third batch.
    what.drain(Once(Step.WRITING, lambda: made.extend(maintain(spark, what.ingestion)), number=4))
    (done,) = made
    assert (done.files_before, done.files_after, done.deleted_files, done.is_kept) == (2, 1, 0, False)
    assert data_files(what) == 2
    assert_each_once(what.rows(), messages(url))
    kept = DeltaTable(what.table).metadata().configuration
    assert kept[FILE_RETENTION] == kept[SET_FILE_RETENTION] == "interval 30 days"


@pytest.mark.spark
@pytest.mark.slow
def test_a_table_goes_back_behind_its_maintenance(spark: SparkSession, url: StreamUrl, folder: Path) -> None:
    send(url, 6)
    what = Pipeline.of(spark, str(url), folder / "t", records=2)
    what.drain()
    maintain(spark, what.ingestion)
    # Ten days are more than Delta keeps files by itself, and less than it keeps the log.
    later = what.having(table=aged(what.table, folder / "later", days=10))
    (done,) = maintain(spark, later.ingestion)
    assert (done.deleted_files, done.is_kept) == (0, True)
    assert later.ingestion.ledger().read().positions == {SHARD: 6}
    spark.sql(f"RESTORE TABLE {sql_name(later.table)} TO VERSION AS OF 1")
    assert later.ingestion.ledger().read().positions == {SHARD: 2}
    later.drain()
    assert_each_once(later.rows(), messages(url))


@pytest.mark.spark
@pytest.mark.slow
def test_what_is_older_than_the_log_is_deleted_and_the_log_may_be_cleaned(
    spark: SparkSession, url: StreamUrl, folder: Path
) -> None:
    send(url, 4)
    what = Pipeline.of(spark, str(url), folder / "t", records=2)
    what.drain()
    old = [Path(file).name for file in DeltaTable(what.table).file_uris()]
    maintain(spark, what.ingestion)
    later = what.having(table=aged(what.table, folder / "later", days=40))
    (done,) = maintain(spark, later.ingestion)
    assert done.is_kept
    assert (done.deleted_files or 0) >= len(old) > data_files(later) == 1
    assert not [name for name in old if Path(later.table, name).exists()]
    (again,) = maintain(spark, later.ingestion)
    assert (again.files_before, again.deleted_files, again.is_kept) == (0, 0, False)
    versions = {c.entry.kind: c.version for c in later.ingestion.ledger().newest_first() if c.entry}
    clean_before(later.table, versions["keep"])
    # Without what was said again there would be nothing to read.
    assert later.ingestion.ledger().read().positions == {SHARD: 4}
    send(url, 3)
    later.drain()
    assert_each_once(later.rows(), messages(url))


@pytest.mark.spark
def test_a_table_that_is_not_there_or_deletes_too_early_is_refused(
    spark: SparkSession, url: StreamUrl, folder: Path
) -> None:
    send(url, 1)
    what = Pipeline.of(spark, str(url), folder / "t")
    with pytest.raises(StreamNotFoundError):
        maintain(spark, what.ingestion)
    what.drain()
    inner = f"{what.table}/inner"
    write_deltalake(inner, pa.table({"id": [1]}))
    with pytest.raises(InvalidOptionError) as refused:
        maintain(spark, what.ingestion)
    assert refused.value.facts == {"other": inner}
    shutil.rmtree(inner)
    DeltaTable(what.table).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 2 hours"})
    with pytest.raises(InvalidOptionError, match="interval 2 hours"):
        maintain(spark, what.ingestion)
    unsafe = replace(what.ingestion, table="s3a://lake/orders")
    with pytest.raises(UnsafeStorageError):
        maintain(spark, unsafe)


def test_a_table_has_a_folder_of_its_own(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "day=1" / "inner"
    for table in (outer, tmp_path / "outer_dead_letters"):
        write_deltalake(str(table), pa.table({"id": [1], "day": [1]}), partition_by=["day"])
    (tmp_path / "_delta_log" / "outer").mkdir(parents=True)
    check_own_folder(DeltaLog(str(outer)))
    write_deltalake(str(inner), pa.table({"id": [1]}))
    for table, other in ((outer, inner), (inner, outer)):
        with pytest.raises(InvalidOptionError) as refused:
            check_own_folder(DeltaLog(str(table)))
        assert refused.value.facts == {"other": str(other)}


def test_a_table_in_a_bucket_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with object_store(tmp_path) as store:
        for table in ("s3://lake/orders", "s3://lake/sales/refunds"):
            write_deltalake(table, pa.table({"id": [1]}), storage_options=store.options)
            check_own_folder(DeltaLog(table, storage_options=store.options))
        write_deltalake("s3://lake/sales", pa.table({"id": [1]}), storage_options=store.options)
        for table, other in (("s3a://lake/sales", "refunds"), ("s3a://lake/sales/refunds", "s3a://lake/sales")):
            with pytest.raises(InvalidOptionError) as refused:
                check_own_folder(DeltaLog(table, storage_options=store.options))
            assert str(refused.value.facts["other"]).endswith(other)


def test_files_stay_as_long_as_the_log_and_a_day_at_least_until_somebody_chooses() -> None:
    table: dict[str, str] = {}

    def maintained(**changes: str) -> str:
        table.update({f"delta.{name}": value for name, value in changes.items()})
        table.update(file_retention(table, table="lake/orders"))
        assert not file_retention(table, table="lake/orders"), "the next run sets nothing, and refuses nothing"
        return table[FILE_RETENTION]

    table[LOG_RETENTION] = "interval 12 hours"
    assert maintained() == "interval 1 day"
    assert maintained(logRetentionDuration="interval 60 days") == "interval 60 days"
    assert maintained(logRetentionDuration="interval 20 days") == "interval 20 days"
    assert maintained(deletedFileRetentionDuration="interval 7 days") == "interval 7 days"
    assert maintained(logRetentionDuration="interval 90 days") == "interval 7 days", "somebody chose it"
    del table[FILE_RETENTION]
    assert maintained() == "interval 90 days"
