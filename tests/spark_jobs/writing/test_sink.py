"""The log says whether a write landed, whatever the write itself said, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.writing.delta_table import DeltaWriter
from stream_consumers.errors import StorageMismatchError, WriteError
from tests.support.written_log import WrittenLog


class _NoHistory:
    """A session in whose view of the table there is no commit of ours either."""

    def sql(self, statement: str) -> SimpleNamespace:
        return SimpleNamespace(collect=list)


LOST_REPLY = RuntimeError("the answer was lost")
CONFLICT = RuntimeError("io.delta.exceptions.ConcurrentTransactionException")
ROWS: Any = SimpleNamespace(sparkSession=_NoHistory())


class Table:
    """A table with one commit of the group; the next write lands, or somebody else's does, or nothing does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = WrittenLog(folder / "t")
        self.log.ours(LedgerEntry("init", "g", "g/main", 1, "main", "first", -1))
        self.ledger = Ledger(self.log.log(), group="g", member="main")
        self.entry = self.ledger.entry("batch", self.ledger.read())
        self.lands: LedgerEntry | None = None
        self.error: Exception | None = None
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(DeltaWriter, "write", lambda sink, rows, entry, **_: self.write())

    def write(self) -> None:
        if self.lands is not None:
            self.log.ours(self.lands)
        if self.error is not None:
            raise self.error

    def commit(self) -> int | None:
        sink = DeltaWriter(str(self.log.path))
        commit = sink.commit(ROWS, self.entry, ledger=self.ledger)
        return None if commit is None else commit.version

    def other(self) -> LedgerEntry:
        return self.ledger.entry("fence", self.ledger.read())


@pytest.fixture
def table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(folder, monkeypatch)


@pytest.mark.parametrize("error", [None, LOST_REPLY, CONFLICT])
def test_a_commit_with_our_batch_id_is_ours_whatever_the_write_raised(table: Table, error: Exception | None) -> None:
    table.lands, table.error = table.entry, error
    assert table.commit() == 1


@pytest.mark.parametrize("error", [None, LOST_REPLY, CONFLICT])
def test_a_number_that_somebody_else_has_taken_is_a_lost_race(table: Table, error: Exception | None) -> None:
    table.lands, table.error = table.other(), error
    assert table.commit() is None


@pytest.mark.parametrize("error", [None, CONFLICT])
def test_a_write_that_delta_ignored_or_refused_is_a_lost_race(table: Table, error: Exception | None) -> None:
    table.error = error
    assert table.commit() is None


def test_a_write_that_failed_and_did_not_land_is_an_error(table: Table) -> None:
    table.error = LOST_REPLY
    with pytest.raises(WriteError) as caught:
        table.commit()
    assert caught.value.detail == str(LOST_REPLY)


def test_files_that_executors_wrote_on_other_machines_are_an_error(table: Table) -> None:
    there, elsewhere = table.log.path / "part 1%.parquet", "part%202.parquet"

    def write(sink: DeltaWriter, rows: Any, entry: LedgerEntry, **_: Any) -> None:
        version = table.log.ours(entry)
        with table.log.file(version).open("a") as commit:
            for path in ("part%201%25.parquet", elsewhere):
                add = {"path": path, "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
                commit.write(json.dumps({"add": add}) + "\n")

    table.monkeypatch.setattr(DeltaWriter, "write", write)
    there.touch()
    with pytest.raises(StorageMismatchError, match=r"part 2\.parquet"):
        table.commit()
    (table.log.path / "part 2.parquet").touch()
    assert table.ledger.log.missing_files(1) == []
