"""What is on the disk after a power cut that comes when a commit has just returned.

With the setting that leaves forcing out, the same tests show that the disk loses what is not forced.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.jars import LOG_STORE_CLASS
from tests.support.ingesting import drain, ingestion
from tests.support.log_stores import LogStore, log_store
from tests.support.power_cut import Disk, disk
from tests.support.redis_tables import Stream
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

FSYNC = "spark.stream_assets.fsync"
FIRST = "00000000000000000000.json"
# Of inotify: the mask, and the fixed part of an event, which is followed by a name.
IN_OPEN, EVENT = 0x20, struct.Struct("iIII")
# The number of a deletion vector as Delta encodes it, and as it stands in the name of the file.
ENCODED, NUMBER = "^-aqEH.-t@S}K{vb[*k^", UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61")


@pytest.fixture
def lazy(folder: Path) -> Iterator[Disk]:
    with disk(folder) as made:
        yield made


@pytest.fixture(scope="module")
def store(spark: SparkSession) -> Iterator[LogStore]:
    """After the session: what pyspark changes in py4j for all JVMs of the process stays as it is."""
    with log_store(LOG_STORE_CLASS) as made:
        yield made


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, with their names."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write_files(table: Path) -> dict[str, bytes]:
    """The files of a commit, as Spark leaves them: in the memory of the kernel."""
    named = {
        "part-0.parquet": b"0" * 5000,
        ".part-0.parquet.crc": b"1" * 50,
        "day=a b/part-1.parquet": b"2" * 5000,
        "_change_data/cdc-2.parquet": b"3" * 5000,
        f"x/deletion_vector_{NUMBER}.bin": b"4" * 50,
        "beside.bin": b"5" * 50,
    }
    for name, data in named.items():
        (table / name).parent.mkdir(parents=True, exist_ok=True)
        (table / name).write_bytes(data)
    return named


def lines(table: Path) -> list[str]:
    """A commit that names them."""
    vector = {"storageType": "u", "pathOrInlineDv": f"x{ENCODED}", "offset": 1, "sizeInBytes": 50, "cardinality": 1}
    beside = {"storageType": "p", "pathOrInlineDv": f"file://{table}/beside.bin", "sizeInBytes": 50, "cardinality": 1}
    actions = [
        {"commitInfo": {"userMetadata": "x" * 100}},
        {"add": {"path": "part-0.parquet", "deletionVector": vector}},
        {"add": {"path": "day=a%20b/part-1.parquet", "deletionVector": beside}},
        {"cdc": {"path": f"file://{table}/_change_data/cdc-2.parquet"}},
        {"add": {"path": "on-another-machine.parquet"}},
    ]
    return [json.dumps(action) for action in actions]


@pytest.mark.parametrize("is_forced", [False, True], ids=["not forced", "forced"])
def test_a_commit_and_all_that_it_names_survive(lazy: Disk, store: LogStore, is_forced: bool) -> None:
    table = lazy.folder / "lake" / "orders"
    (table / "_delta_log").mkdir(parents=True)
    named = write_files(table)
    with store.having({FSYNC: str(is_forced).lower()}):
        assert store.put(table / "_delta_log" / FIRST, *lines(table))
    whole = "".join(f"{line}\n" for line in lines(table)).encode()
    with lazy.after_power_cut() as found:
        kept = contents(found / "lake" / "orders")
    assert kept.pop(f"_delta_log/{FIRST}", b"") == (whole if is_forced else b"")
    assert kept == (named if is_forced else {})


@pytest.mark.slow
def test_a_later_commit_and_new_folders_survive(lazy: Disk, store: LogStore) -> None:
    table = lazy.folder
    (table / "_delta_log").mkdir()
    assert store.put(table / "_delta_log" / FIRST, '{"commitInfo":{}}')
    (table / "day=1" / "hour=2").mkdir(parents=True)
    (table / "day=1" / "hour=2" / "part-0.parquet").write_bytes(b"0" * 5000)
    assert store.put(table / "_delta_log" / f"{1:020d}.json", '{"add":{"path":"day=1/hour=2/part-0.parquet"}}')
    with lazy.after_power_cut() as found:
        assert (found / "day=1" / "hour=2" / "part-0.parquet").read_bytes() == b"0" * 5000
        assert (found / "_delta_log" / f"{1:020d}.json").stat().st_size


@contextmanager
def opened_folders(folders: Iterable[Path]) -> Iterator[set[Path]]:
    """Those of these folders that are opened meanwhile, as a folder is to be forced to the disk.

    On ext4 no power cut shows whether folders were forced: forcing one file also writes all names that are in memory.
    """
    kernel = ctypes.CDLL(None)
    descriptor = kernel.inotify_init1(os.O_NONBLOCK)
    watched = {kernel.inotify_add_watch(descriptor, os.fsencode(folder), IN_OPEN): folder for folder in folders}
    found: set[Path] = set()
    yield found
    events, at = os.read(descriptor, 1 << 20), 0
    while at < len(events):
        watch, _, _, length = EVENT.unpack_from(events, at)
        at += EVENT.size + length
        # An event with a name is about something in the folder.
        found |= set() if length else {watched[watch]}
    os.close(descriptor)


@pytest.mark.parametrize("name", [FIRST, f"{1:020d}.json"], ids=["first", "later"])
def test_the_folders_of_all_that_a_commit_names_are_forced(store: LogStore, folder: Path, name: str) -> None:
    table = folder / "lake" / "orders"
    log, inner = table / "_delta_log", table / "day=1" / "hour=2"
    log.mkdir(parents=True)
    inner.mkdir(parents=True)
    (inner / "part-0.parquet").write_bytes(b"0" * 5000)
    above = [folder, table.parent]
    with opened_folders([*above, table, log, inner.parent, inner]) as opened:
        assert store.put(log / name, '{"add":{"path":"day=1/hour=2/part-0.parquet"}}')
    # A new table may be in new folders.
    assert opened == {table, log, inner.parent, inner, *(above if name == FIRST else ())}


def test_a_checkpoint_survives_before_it_is_named(lazy: Disk, store: LogStore) -> None:
    log = lazy.folder / "_delta_log"
    (log / "_sidecars").mkdir(parents=True)
    names = [f"{7:020d}.checkpoint.{NUMBER}.json", f"_sidecars/{NUMBER}.parquet"]
    for name in names:
        (log / name).write_bytes(b"0" * 5000)
    pointer = {"version": 7, "v2Checkpoint": {"path": names[0], "sidecarFiles": [{"path": f"{NUMBER}.parquet"}]}}
    for _ in range(2):
        assert store.put(log / "_last_checkpoint", json.dumps(pointer), overwrite=True)
    with lazy.after_power_cut() as found:
        kept = contents(found / "_delta_log")
    assert json.loads(kept.pop("_last_checkpoint")) == pointer
    assert kept == dict.fromkeys(names, b"0" * 5000)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["not forced", "forced"])
def is_forced(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[bool]:
    spark.conf.set(FSYNC, str(request.param).lower())
    yield request.param
    spark.conf.unset(FSYNC)


@pytest.mark.spark
def test_batches_and_dead_letters_survive(lazy: Disk, spark: SparkSession, folder: Path, is_forced: bool) -> None:
    table = lazy.folder / "orders"
    url = write_stream(folder / "orders.ss", 100, malformed=frozenset({3}))
    assert [report.dead for report in drain(spark, url, ingestion(table))] == [1]
    positions = ingestion(table).ledger().read().positions
    with lazy.after_power_cut() as found:
        cut = found / "orders"
        if is_forced:
            assert_each_once(folder / "orders.ss", cut)
            assert ingestion(cut).ledger().read().positions == positions
        else:
            assert not any(contents(cut).values())


@pytest.mark.slow
@pytest.mark.spark
def test_entries_that_were_acknowledged_survive(
    lazy: Disk, spark: SparkSession, redis_address: str, is_forced: bool
) -> None:
    """The server does not deliver them again."""
    stream = Stream(redis_address, lazy.folder, shards=1, mode="load_balanced")
    stream.add(500)
    stream.drain(spark, stream.ingestion(500))
    assert [pending for _, _, pending in stream.groups()] == [0]
    with lazy.after_power_cut() as found:
        assert set(sequences_in_table(found / "t")) == (stream.there() if is_forced else set())


@pytest.mark.slow
@pytest.mark.spark
def test_what_maintenance_writes_survives(lazy: Disk, spark: SparkSession) -> None:
    name = f"delta.`file://{lazy.folder}/numbers`"
    spark.sql(
        f"CREATE TABLE {name} (id BIGINT, part INT) USING delta PARTITIONED BY (part) TBLPROPERTIES "
        "(delta.enableDeletionVectors = true, delta.enableChangeDataFeed = true, delta.checkpointInterval = 4)"
    )
    for part in range(2):
        spark.range(100).selectExpr("id", f"{part} AS part").repartition(2).write.format("delta").mode("append").save(
            f"file://{lazy.folder}/numbers"
        )
    spark.sql(f"DELETE FROM {name} WHERE id % 3 = 0 AND part = 0")
    spark.sql(f"UPDATE {name} SET id = -id WHERE id % 3 = 1")
    spark.sql(f"OPTIMIZE {name}")
    before = contents(lazy.folder / "numbers")
    for kind in ("_last_checkpoint", "checkpoint.parquet", "deletion_vector", "_change_data/"):
        assert any(kind in file for file in before), kind
    with lazy.after_power_cut() as found:
        kept = contents(found / "numbers")
        # Delta writes the checksums of versions without its log store, and does without them.
        lost = {file for file, data in before.items() if kept.get(file) != data}
        assert {file for file in lost if not file.endswith(".crc")} == set()
        assert DeltaTable(str(found / "numbers")).version() == 5
