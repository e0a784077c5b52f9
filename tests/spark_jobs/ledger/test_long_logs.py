"""Of a log of 2,000 commits a group that begins, or begins with a stream, opens only the newest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.lag import measure
from spark_jobs.ledger.delta_log import DeltaLog, TableSnapshot
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import NEWEST_VERSIONS, Ledger
from spark_jobs.verify import verify
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource
from stream_consumers.errors import StreamNotFoundError
from stream_consumers.messages import Shard
from tests.support.command_line import run
from tests.support.letter_tables import ORDERS, Tables
from tests.support.streams import write_stream
from tests.support.written_log import WrittenLog, made_entry

pytestmark = pytest.mark.xdist_group("long_log")
COMMITS = 2_000
CHECKPOINT_EVERY = 10
# Those after the checkpoint, and those that are always looked at.
MAX_OPENED = NEWEST_VERSIONS + CHECKPOINT_EVERY + 5
SHARD = Shard("orders", 0)


def batch(version: int, group: str = "g", *, stream: str = "orders") -> LedgerEntry:
    shard = Shard(stream, 0)
    state = {shard: ShardState(Intervals.of((MIN_SEQUENCE, version)), origin=0)}
    ranges = {shard: Range(version, version + 1)}
    return made_entry(version + 1, version - 1, group=group, ranges=ranges, state=state, sharing="resumable")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the group ``g``, but for one commit at the beginning, of the group ``silent``."""
    log = WrittenLog(tmp_path_factory.mktemp("long") / "table")
    log.ours(batch(0, "silent", stream="returns"))
    for version in range(1, COMMITS):
        if version == COMMITS - CHECKPOINT_EVERY + 1:
            DeltaTable(str(log.path)).create_checkpoint()
        log.commit(metadata=batch(version).to_json(), transactions={"g/main": version + 1}, files=frozenset())
    return log.path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of the log that this package opens."""
    names: list[str] = []
    read = DeltaLog._read

    def counting(log: DeltaLog, name: str) -> str:
        names.append(name)
        return read(log, name)

    monkeypatch.setattr(DeltaLog, "_read", counting)
    return names


def ledger(table: Path, group: str) -> Ledger:
    return Ledger(DeltaLog(str(table)), group=group, member="main")


def test_a_new_group_is_known_to_be_new(table: Path, opened: list[str]) -> None:
    new = ledger(table, "new")
    assert new.read().newest is None
    new.check_first([SHARD])
    assert len(opened) <= MAX_OPENED


def test_a_new_stream_is_known_to_be_of_no_other_group(table: Path, opened: list[str]) -> None:
    assert ledger(table, "new").other_group(frozenset({"payments"})) is None
    assert ledger(table, "g").other_group(frozenset({"payments"})) is None
    assert len(opened) <= 2 * MAX_OPENED


def test_an_active_group_is_found(table: Path, opened: list[str]) -> None:
    assert ledger(table, "new").other_group(frozenset({"orders"})) == "g"
    assert len(opened) <= MAX_OPENED


def test_a_silent_group_is_found_where_the_table_may_hold_its_rows(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableSnapshot, "may_hold", lambda snapshot, streams: True)
    assert ledger(table, "new").other_group(frozenset({"returns"})) == "silent"
    assert ledger(table, "new").other_group(frozenset({"payments"})) is None


def test_lag_and_a_tick_of_a_new_group(table: Path, tmp_path: Path, opened: list[str]) -> None:
    url = write_stream(tmp_path / "orders.ss", 5)
    assert measure(StreamSource(url), Ingestion("new", str(table)), budget_seconds=20).total == 5
    assert len(opened) <= 2 * MAX_OPENED


def test_the_commands_of_a_new_group(table: Path, tmp_path: Path, opened: list[str]) -> None:
    url = write_stream(tmp_path / "orders.ss", 5)
    told = run("lag", url, "--group", "new", "--table", table, "--json")
    assert [row["lag"] for row in json.loads(told.stdout)["rows"]] == [3, 2]
    with pytest.raises(StreamNotFoundError), StreamSource(url).open() as source:
        verify(source, Ingestion("new", str(table)))
    assert len(opened) <= 4 * MAX_OPENED


def test_dead_letters_of_a_sequence_that_has_no_commit_are_orphaned_without_a_search(
    table: Path, tmp_path: Path, opened: list[str]
) -> None:
    tables = Tables(tmp_path)
    tables.add(ORDERS, 3, group="new", batch="lost")
    assert [batch.bid for batch in tables.table.orphaned(ledger(table, "new"))] == ["lost"]
    assert len(opened) <= MAX_OPENED


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("properties", "settings"),
    [
        ({}, {"spark.databricks.delta.checkpoint.partSize": "2"}),
        ({"delta.checkpointPolicy": "v2"}, {"spark.databricks.delta.checkpointV2.topLevelFileFormat": "parquet"}),
        ({"delta.checkpointPolicy": "v2"}, {"spark.databricks.delta.checkpointV2.topLevelFileFormat": "json"}),
    ],
    ids=["parts", "version 2", "version 2 in JSON"],
)
def test_transactions_are_read_from_every_kind_of_checkpoint(
    spark: SparkSession, tmp_path: Path, properties: Mapping[str, str], settings: Mapping[str, str]
) -> None:
    path = str(tmp_path / "t")
    row = spark.createDataFrame([(1,)], StructType([StructField("id", LongType())]))
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        for number in range(5):
            writer = (
                row.write.format("delta").mode("append").option("txnAppId", f"g/m{number}").option("txnVersion", "1")
            )
            writer.options(**{"delta.checkpointInterval": "3", **properties}).save(path)
    finally:
        for name in settings:
            spark.conf.unset(name)
    log = DeltaLog(path)
    snapshot = log.snapshot()
    assert snapshot is not None
    assert json.loads((tmp_path / "t/_delta_log/_last_checkpoint").read_text())["version"] == 3
    # Only what the checkpoint tells, and the one commit after it.
    for version in range(4):
        (tmp_path / f"t/_delta_log/{version:020d}.json").unlink()
    assert log.transactions(snapshot) == {f"g/m{number}" for number in range(5)}
