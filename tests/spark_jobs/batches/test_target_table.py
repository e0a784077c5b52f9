"""Runs that replace rows get a turn, and of groups that begin with one stream in one table only one writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches import target_table
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.batches.target_table import YIELD_SECONDS, OutdatedError, TargetTable, YieldRequests, check_unwritten
from spark_jobs.ledger.entries import PAUSE, REPLAYER, LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.verify import verify
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import AutoStreamReset
from stream_consumers.urls import StreamUrl
from tests.support.command_line import failing, run
from tests.support.ingesting import drain, entries, ingestion
from tests.support.one_run import slow
from tests.support.streams import assert_each_once, sequences_in_file, sequences_in_table, write_stream
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

    def write(
        self, kind: str, group: str, member: str, number: int, *, age_seconds: float = 0.0, app: str = ""
    ) -> None:
        base = self.log.next - 1
        app = app or f"{group}/{member}"
        entry = LedgerEntry(kind, group, app, number, member, f"{group}-{self.log.next}", base)
        self.log.ours(entry, timestamp_ms=int((time.time() - age_seconds) * 1000))

    def waits(self) -> bool:
        asked = self.yields.unanswered(self.log.next - 1)
        if asked is not None:
            self.told += [waiting.why for waiting in self.yields.wait(asked)]
        return asked is not None


@pytest.fixture
def table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(target_table, "YIELD_SECONDS", 1.0)
    return Table(folder / "t")


def test_nobody_waits_where_nobody_asks(table: Table) -> None:
    table.write("batch", "other", "main", 2)
    assert not table.waits()
    assert table.told == []


@pytest.mark.parametrize("group", ["g", "other"])
def test_a_request_is_waited_for_until_it_writes(table: Table, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another group, too: Delta does not tell their rows apart."""
    monkeypatch.setattr(target_table, "YIELD_SECONDS", YIELD_SECONDS)
    table.write(PAUSE, group, "replay", 1)
    table.write("batch", "other", "main", 2)
    answer = threading.Timer(1.0, lambda: table.write("replay", group, "replay", 2))
    answer.start()
    since = time.monotonic()
    assert table.waits()
    assert time.monotonic() - since < YIELD_SECONDS
    answer.join()
    assert len(table.told) == 1
    assert not table.waits()


def test_a_request_without_an_answer_is_waited_for_once(table: Table) -> None:
    table.write(PAUSE, "other", "replay", 1)
    assert table.waits()
    # Its clock is ahead: it is as young as before.
    table.write(PAUSE, "other", "replay", 2, age_seconds=-3600)
    assert table.waits(), "it is another one"
    assert not table.waits()


def test_a_request_in_the_same_transaction_sequence_is_waited_for(table: Table) -> None:
    """A replay of a keyed table takes its numbers from the sequence of ingestion."""
    table.write(PAUSE, "g", "replay", 2, app="g/main")
    assert table.waits()
    table.write(PAUSE, "g", "replay", 3, app="g/main")
    table.write("replay", "g", "replay", 4, app="g/main")
    assert not table.waits(), "it has written"


@pytest.mark.parametrize("keys", [None, Keys(["id"])])
def test_all_that_replaces_rows_has_one_transaction_sequence(folder: Path, keys: Keys | None) -> None:
    what = replace(ingestion(folder / "t", group="g"), keys=keys)
    assert {replace(what, member=member).ledger().app for member in ("main", REPLAYER)} == {"g/main"}


def test_an_old_request_and_an_own_one_are_none(table: Table) -> None:
    table.write(PAUSE, "other", "replay", 1, age_seconds=5)
    table.write(PAUSE, "g", "main", 2)
    assert not table.waits()


@pytest.mark.slow
def test_a_replay_ends_in_a_table_that_is_written_all_the_time(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_table, "MAX_PAUSE_SECONDS", 0.1)
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
    asked = [record for record in caplog.records if "it asks other runs to pause, and tries again" in record.message]
    assert asked, "or it was no race"
    told = [record for record in caplog.records if record.name == target_table.__name__]
    assert len(told) <= 2 + 3 * len(reports), told
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert len([entry for entry in entries(what) if entry.kind == PAUSE]) == len(asked)
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


def stream_of_users(folder: Path) -> str:
    url = f"file://{folder}/users-only.ss/users"
    with create_producer(url) as producer:
        producer.send(b'{"id": 1, "user": "u"}')
    return url


def after_check(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something once, between the next look for other groups and the commit that follows it."""
    look = target_table.check_unwritten

    def looking(*args: object, **options: object) -> None:
        monkeypatch.setattr(target_table, "check_unwritten", look)
        look(*args, **options)  # type: ignore[arg-type]
        action()

    monkeypatch.setattr(target_table, "check_unwritten", looking)


def assert_refused(spark: SparkSession, url: str, second: Ingestion) -> None:
    """The second group, at each try and by each command."""
    kinds = [entry.kind for entry in entries(second)]
    for _ in range(2):
        with pytest.raises(InvalidOptionError, match="group 'first' already writes"):
            drain(spark, url, second)
    options = ("--table", second.table, "--group", second.group)
    failing(run("lag", url, *options), "group 'first' already writes")
    failing(run("verify", "--source", url, *options), "group 'first' already writes")
    failing(run("seek", "--source", url, *options, "--to", "2030-01-01T00:00:00Z"), "group 'first' already writes")
    assert [entry.kind for entry in entries(second)] == kinds


@pytest.mark.parametrize(
    "begins", ["table", *(pytest.param(one, marks=pytest.mark.slow) for one in ("layout", "stream"))]
)
def test_second_group_is_refused(
    begins: str, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, users = write_stream(folder / "orders.ss", 10), stream_of_users(folder)
    first, second = (ingestion(folder / "t", group=group) for group in ("first", "second"))
    if begins == "layout":
        first, second = (replace(one, layout=TableLayout(partition_by=("_shard",))) for one in (first, second))
    else:
        drain(spark, users, second if begins == "stream" else ingestion(folder / "t", group="third"))
    after_check(monkeypatch, lambda: drain(spark, url, first))
    with pytest.raises(InvalidOptionError, match="group 'first' already writes"):
        drain(spark, url, second)
    assert_refused(spark, url, second)
    write_stream(folder / "orders.ss", 4)
    assert [report.rows for report in drain(spark, url, first)] == [4]
    found = sequences_in_table(folder / "t")
    assert {place for place in found if place[0] == "orders"} == sequences_in_file(folder / "orders.ss")
    assert set(found.values()) == {1}


def test_a_found_stream_does_not_begin_in_the_table_of_another(spark: SparkSession, folder: Path) -> None:
    url, users, owner = write_stream(folder / "orders.ss", 10), stream_of_users(folder), ingestion(folder / "t")
    owner = replace(owner, owns_table=True)
    assert [report.rows for report in drain(spark, url, owner)] == [10]
    before = owner.ledger().read()
    with pytest.raises(InvalidOptionError):
        drain(spark, users, owner)
    with pytest.raises(InvalidOptionError):
        drain(spark, users, replace(owner, group="other"))
    assert owner.ledger().read() == before
    write_stream(folder / "orders.ss", 4)
    assert [report.rows for report in drain(spark, url, owner)] == [4]
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
def test_a_rewind_spares_rows_of_other_groups(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is to replace was not there when it was rewound, and the other group did not see its claim."""
    monkeypatch.setattr("spark_jobs.ledger.ledger.NEWEST_VERSIONS", 1)
    url = write_stream(folder / "orders.ss", 10)
    first = ingestion(folder / "t", group="first", start=AutoStreamReset.LATEST)
    drain(spark, url, first)
    with open_batch_source(url) as source:
        assert rewind(spark, source, first, Bound.parse("earliest"))
    spark.sql(f"ALTER TABLE delta.`{first.table}` SET TBLPROPERTIES ('a' = 'b')")
    drain(spark, url, ingestion(folder / "t", group="second"))
    before = entries(first)
    with pytest.raises(InvalidOptionError):
        drain(spark, url, first)
    assert entries(first) == before
    assert_each_once(folder / "orders.ss", folder / "t")


def test_rows_of_another_member_that_began_meanwhile_are_no_copy(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 10), ingestion(folder / "t")
    before = what.ledger().read()
    drain(spark, url, what)
    target = TargetTable.of(spark, what, url=StreamUrl.parse(url), observer=ignore_steps)
    with pytest.raises(OutdatedError):
        check_unwritten(target, before, ["orders"])
