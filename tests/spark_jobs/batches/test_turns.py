"""A run that replaces rows gets its turn in a table that others write every second."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches import target_table
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.batches.target_table import PATIENCE_SECONDS, YieldRequests
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.verify import verify
from stream_consumers.create import open_batch_source
from tests.support.ingesting import drain, entries, ingestion
from tests.support.one_run import slow
from tests.support.streams import assert_each_once, write_stream
from tests.support.written_log import WrittenLog

NO_SPARK: Any = None


class Table:
    """A table of two groups, one of which replays, and what a run of the other one is told."""

    def __init__(self, path: Path) -> None:
        self.log = WrittenLog(path)
        self.told: list[str] = []
        self.write("init", "g", "main", 1)
        self.write("init", "other", "main", 1)
        what = ingestion(path, group="g")
        self.yields = YieldRequests(NO_SPARK, what, Ledger(self.log.log(), group="g", member="main"))

    def write(self, kind: str, group: str, member: str, number: int, *, age_seconds: float = 0.0) -> None:
        base = self.log.next - 1
        entry = LedgerEntry(kind, group, f"{group}/{member}", number, member, f"{group}-{self.log.next}", base)
        self.log.ours(entry, timestamp_ms=int((time.time() - age_seconds) * 1000))

    def waits(self) -> bool:
        asked = self.yields.open(self.log.next - 1)
        if asked is not None:
            self.told += [waiting.why for waiting in self.yields.wait(asked)]
        return asked is not None


@pytest.fixture
def table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(target_table, "PATIENCE_SECONDS", 1.0)
    return Table(folder / "t")


def test_nobody_waits_where_nobody_asks(table: Table) -> None:
    table.write("batch", "other", "main", 2)
    assert not table.waits()
    assert table.told == []


@pytest.mark.parametrize("group", ["g", "other"])
def test_a_request_is_waited_for_until_it_has_written(
    table: Table, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another group, too: Delta does not tell their rows apart."""
    monkeypatch.setattr(target_table, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    table.write("turn", group, "replay", 1)
    table.write("batch", "other", "main", 2)
    answer = threading.Timer(1.0, lambda: table.write("replay", group, "replay", 2))
    answer.start()
    since = time.monotonic()
    assert table.waits()
    assert time.monotonic() - since < PATIENCE_SECONDS
    answer.join()
    (told,) = table.told
    assert "has asked for its turn (version 2); this one waits until that has written, up to 60 s" in told
    assert not table.waits()


def test_a_request_without_an_answer_is_waited_for_once(table: Table) -> None:
    table.write("turn", "other", "replay", 1)
    assert table.waits()
    # Its clock is ahead: it is as young as before.
    table.write("turn", "other", "replay", 2, age_seconds=-3600)
    assert table.waits(), "it is another one"
    assert not table.waits()


def test_an_old_request_and_an_own_one_are_none(table: Table) -> None:
    table.write("turn", "other", "replay", 1, age_seconds=5)
    table.write("turn", "g", "main", 2)
    assert not table.waits()


@pytest.mark.spark
@pytest.mark.slow
def test_a_replay_ends_in_a_table_that_is_written_all_the_time(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_table, "LONGEST_PAUSE_SECONDS", 0.1)
    url = write_stream(folder / "orders.ss", 200)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    is_over = threading.Event()

    def ingest() -> None:
        while not is_over.is_set():
            write_stream(folder / "orders.ss", 10)
            drain(spark, url, what)

    ingesting = threading.Thread(target=ingest)
    ingesting.start()
    try:
        with open_batch_source(url) as source:
            # Its write lasts longer than a batch of the others.
            own = replace(what, transform=partial(slow, seconds=0.02))
            reports = list(drain_batches(ReplayJob(spark, source, own, Replay())))
    finally:
        is_over.set()
        ingesting.join()
    asked = [record for record in caplog.records if "the others are asked to wait" in record.message]
    assert asked, "or it was no race"
    told = [record for record in caplog.records if record.name == target_table.__name__]
    assert len(told) <= 2 + 3 * len(reports), told
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert len([entry for entry in entries(what) if entry.kind == "turn"]) == len(asked)
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))
