"""What a power cut may leave of the files of a table: an error with file, size and remedy, never a guess."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import ROW_PLACE, count_where, open_files, scan
from stream_consumers.errors import LedgerUnreadableError, TableUnreadableError
from tests.support.ledger_tables import write_batch

VERSIONS = 4
NEWEST = f"_delta_log/{VERSIONS - 1:020d}.json"
CHECKPOINT = f"_delta_log/{VERSIONS - 1:020d}.checkpoint.parquet"
POINTER = "_delta_log/_last_checkpoint"
TORN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut in its last line": lambda whole: whole[:-30],
    "cut in its first line": lambda whole: whole[:30],
    "cut, then zeros": lambda whole: whole[:200] + bytes(len(whole) - 200),
    "zeros": lambda whole: bytes(len(whole)),
    "zeros within": lambda whole: whole[:-300] + bytes(100) + whole[-200:],
    "not JSON": lambda whole: b"\x89PNG" + whole,
    "not JSON, but text": lambda whole: b"hello\n",
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for number in range(VERSIONS):
        write_batch(tmp_path / "t", {number + 1: "2026-11-17"})
    return tmp_path / "t"


def ledger(table: Path) -> Ledger:
    return Ledger(DeltaLog(str(table)), group="lakehouse", member="main")


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_torn_commit_is_neither_a_strangers_nor_the_end_of_the_log(
    table: Path, tear: Callable[[bytes], bytes]
) -> None:
    (table / NEWEST).write_bytes(tear((table / NEWEST).read_bytes()))
    size = (table / NEWEST).stat().st_size
    with pytest.raises(
        LedgerUnreadableError, match=rf"version {VERSIONS - 1} of .* is torn: {NEWEST} has {size:,} bytes"
    ):
        ledger(table).read()


def test_without_the_torn_commit_the_log_is_whole(table: Path) -> None:
    before = ledger(table).read()
    write_batch(table, {VERSIONS + 1: "2026-11-17"})
    (table / f"_delta_log/{VERSIONS:020d}.json").write_bytes(b"")
    with pytest.raises(LedgerUnreadableError):
        ledger(table).read()
    (table / f"_delta_log/{VERSIONS:020d}.json").unlink()
    assert ledger(table).read() == before


@pytest.mark.parametrize("size", [0, 100])
def test_a_torn_checkpoint_is_named_and_the_log_before_it_is_whole(table: Path, size: int) -> None:
    before = ledger(table).read()
    DeltaTable(str(table)).create_checkpoint()
    (table / CHECKPOINT).write_bytes((table / CHECKPOINT).read_bytes()[:size])
    with pytest.raises(LedgerUnreadableError, match=rf"{CHECKPOINT} is torn: it has {size} bytes"):
        ledger(table).read()
    (table / CHECKPOINT).unlink()
    (table / POINTER).unlink()
    assert ledger(table).read() == before


@pytest.mark.parametrize("name", [POINTER, NEWEST.replace(".json", ".crc")])
def test_files_that_only_save_time_may_be_torn(table: Path, name: str) -> None:
    before = ledger(table).read()
    DeltaTable(str(table)).create_checkpoint()
    (table / name).write_bytes(b"")
    assert ledger(table).read() == before
    assert count_where(DeltaLog(str(table)), "TRUE") == VERSIONS


@pytest.mark.parametrize("size", [0, 100])
def test_a_torn_data_file_is_named_with_its_size(table: Path, size: int) -> None:
    data = next(table.glob("*.parquet"))
    whole = data.stat().st_size
    data.write_bytes(data.read_bytes()[:size])
    with pytest.raises(TableUnreadableError, match=rf"1 data files.*{data} has {size} of {whole:,} bytes"):
        list(scan(DeltaLog(str(table))))


def rename_file(table: Path, path: str) -> None:
    """Let the newest commit name another data file."""
    commit = table / NEWEST
    lines = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in lines:
        if "add" in action:
            action["add"]["path"] = path
    commit.write_text("".join(f"{json.dumps(action)}\n" for action in lines))


@pytest.mark.parametrize(
    "path", ["../t/own", "..%2Ft/own", "fifo", "/dev/null", "x" * 5000, "a%00b"], ids=lambda path: path[:9]
)
def test_what_is_no_data_file_of_the_table_is_not_opened(table: Path, path: str) -> None:
    next(table.glob("*.parquet")).rename(table / "own")
    os.mkfifo(table / "fifo")
    rename_file(table, path)
    log = DeltaLog(str(table))
    for look in (
        lambda: list(scan(log)),
        lambda: log.missing_files(VERSIONS - 1),
        log.torn_files,
        lambda: open_files(log, log.added_files(VERSIONS - 1), ROW_PLACE),
    ):
        with pytest.raises(LedgerUnreadableError):
            look()


@pytest.mark.parametrize("name", [POINTER, NEWEST])
def test_a_pipe_in_the_place_of_a_file_of_the_log_is_not_waited_for(table: Path, name: str) -> None:
    log = DeltaLog(str(table))
    # delta-rs does not read commits up to a checkpoint.
    DeltaTable(table).create_checkpoint()
    (table / name).unlink()
    os.mkfifo(table / name)
    with pytest.raises(LedgerUnreadableError):
        list(log.readable())


@pytest.mark.parametrize("form", ["{}", "file://{}", "file:{}"])
def test_the_files_of_a_shallow_clone_are_read_where_they_are(table: Path, tmp_path: Path, form: str) -> None:
    log = DeltaLog(str(table))
    (file,) = log.added_files(VERSIONS - 1)
    moved = (table / file.path).rename(tmp_path / "elsewhere.parquet")
    rename_file(table, form.format(moved))
    assert count_where(log, "TRUE") == VERSIONS
    assert log.torn_files() == []


def test_a_file_of_the_folder_is_not_taken_for_that_of_a_clone(table: Path) -> None:
    os.mkfifo(table / "fifo")
    rename_file(table, "/fifo")
    log = DeltaLog(str(table))
    with pytest.raises(FileNotFoundError):
        open_files(log, log.added_files(VERSIONS - 1), ROW_PLACE)


@pytest.mark.parametrize(
    "hint",
    [
        *('{"version":1e400,"size":1}', '{"version":-1e400}', '{"version":1,"size":1,"parts":1e400}'),
        *('{"version":NaN}', '{"version":"x"}'),
    ],
    ids=lambda hint: hint[:30],
)
def test_a_pointer_to_no_checkpoint_is_passed_over(table: Path, hint: str) -> None:
    (table / POINTER).write_text(hint)
    log = DeltaLog(str(table))
    snapshot = log.snapshot()
    assert snapshot is not None
    assert log.transactions(snapshot) is None
    assert ledger(table).read().version == VERSIONS - 1
