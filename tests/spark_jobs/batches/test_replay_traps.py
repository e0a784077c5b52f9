"""The traps of Delta and of consumers, for replays and rewinds."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from delta.exceptions import ConcurrentTransactionException
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches import target_table
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from spark_jobs.writing.delta_table import DeltaWriter, is_conflict
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.delta_writes import APP, VERSION, Writes
from tests.support.feeds import FILES_FIRST, SHARDS, Feed, FileFeed, make_feed
from tests.support.kafka_topics import CrashError, FailOnce, Once, crash
from tests.support.old_and_new import Row, made, new, old, rows_of
from tests.support.polling import until

pytestmark = pytest.mark.spark
MESSAGES = 60
MIDDLE = range(21, 42)


@dataclass(frozen=True)
class Lake:
    """A feed, and the table that all of it is in."""

    spark: SparkSession
    feed: Feed
    what: Ingestion

    @classmethod
    def of(cls, spark: SparkSession, feed: Feed, folder: Path, *, malformed: frozenset[int] = frozenset()) -> Lake:
        feed.send(MESSAGES, malformed=malformed)
        decoder = Json("id BIGINT, user STRING")
        lake = cls(spark, feed, Ingestion(feed.group, str(folder / "t"), decoder, old, limits=Limits(max_records=30)))
        lake.drain()
        return lake

    @property
    def replay(self) -> Replay:
        """Of the middle; with the same id at each call."""
        bounds = (Bound.parse(self.feed.bound(number)) for number in (MIDDLE.start, MIDDLE.stop))
        return Replay(*bounds, id="the-middle")

    def drain(self, observer: Observer = ignore_steps) -> list[BatchReport]:
        source = StreamSource(StreamUrl.parse(self.feed.url))
        return list(drain(self.spark, source, self.what, observer=observer))

    def rerun(self, wanted: Replay, observer: Observer = ignore_steps) -> list[BatchReport]:
        """The replay, to its end."""
        with open_batch_source(self.feed.url) as source:
            job = ReplayJob(self.spark, source, self.what, wanted, observer=observer)
            return list(drain_batches(job))

    def rewind(self, number: int, *, run_id: str = "") -> int:
        """Move the group; how many shards moved."""
        with open_batch_source(self.feed.url) as source:
            to = Bound.parse(self.feed.bound(number))
            return len(rewind(self.spark, source, self.what, to, replay_id=run_id))

    def with_transform(self, transform: object) -> Lake:
        return replace(self, what=replace(self.what, transform=transform))  # type: ignore[arg-type]

    def restore(self, version: int) -> None:
        self.spark.sql(f"RESTORE delta.`{self.what.table}` TO VERSION AS OF {version}").collect()

    def rows(self) -> Counter[Row]:
        return rows_of(self.what.table)

    def numbers(self, kind: str = "replay") -> list[int]:
        """The transaction numbers of what is in the table, oldest first."""
        return [c.entry.number for c in self.what.ledger().surviving() if c.entry and c.entry.kind == kind][::-1]

    def assert_made(self, *, by_new: range) -> None:
        assert self.rows() == made(self.feed, range(MESSAGES), by_new=by_new)
        with open_batch_source(self.feed.url) as source:
            assert [verdict.is_right for verdict in verify(source, self.what)] == [True] * SHARDS


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_table, "LONGEST_PAUSE_SECONDS", 0.05)


@pytest.fixture
def lake(spark: SparkSession, folder: Path) -> Lake:
    """A claim and two batches: version 2."""
    return Lake.of(spark, FileFeed(folder), folder)


def nothing(rows: DataFrame) -> DataFrame:
    """Drops every message."""
    return new(rows).where("id < 0")


@pytest.mark.slow
def test_d04_a_replay_without_rows_takes_the_rows_away_and_is_done(lake: Lake) -> None:
    emptied = lake.with_transform(nothing)
    (report,) = emptied.rerun(lake.replay)
    assert (report.rows, report.replaced, report.entry.number) == (0, 19, 1)
    app = f"{lake.feed.group}/replay"
    assert DeltaTable(lake.what.table).transaction_version(app) == 1
    outside = [number for number in range(MESSAGES) if number not in MIDDLE]
    assert lake.rows() == made(lake.feed, outside)
    assert emptied.rerun(lake.replay) == [], "it is not begun again"
    (report,) = lake.with_transform(new).rerun(replace(lake.replay, id="another"))
    assert (report.rows, report.replaced, report.entry.number) == (19, 0, 2), "its number is not used again"
    lake.assert_made(by_new=MIDDLE)


@pytest.mark.slow
def test_d04_a_rewind_and_batches_without_rows_move_on(lake: Lake) -> None:
    assert lake.rewind(30) == SHARDS
    (report,) = lake.with_transform(nothing).drain()
    assert (report.rows, report.replaced) == (0, 27)
    assert lake.rows() == made(lake.feed, range(30))
    assert lake.drain() == []
    lake.rewind(30)
    lake.with_transform(new).drain()
    lake.assert_made(by_new=range(30, MESSAGES))


@pytest.mark.slow
def test_d05_no_transaction_of_a_replay_or_a_rewind_leaks_into_the_session(lake: Lake, folder: Path) -> None:
    fresh = lake.with_transform(new)
    with suppress(CrashError):
        fresh.rerun(lake.replay, Once(Step.WRITING, crash))
    fresh.rerun(lake.replay)
    lake.rewind(30)
    assert (lake.spark.conf.get(APP, None), lake.spark.conf.get(VERSION, None)) == (None, None)
    path = str(folder / "plain")
    lake.spark.createDataFrame([(1,), (2,)], "id BIGINT").write.format("delta").mode("append").save(path)
    lake.spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 2")
    assert DeltaTable(path).to_pyarrow_table().column("id").to_pylist() == [1]


@pytest.mark.slow
def test_d05_a_leaked_transaction_hides_no_replay_and_no_rewind(spark: SparkSession, folder: Path) -> None:
    bad = frozenset({25, 45})
    lake = Lake.of(spark, FileFeed(folder), folder, malformed=bad)
    good = [number for number in range(MESSAGES) if number not in bad]
    for path in (lake.what.table, f"{lake.what.table}_dead_letters"):
        seen = spark.read.format("delta").load(path).limit(0).write.format("delta").mode("append")
        seen.option("txnAppId", "somebody").option("txnVersion", "7").save(path)
    # From here on Delta skips what has no transaction of its own.
    spark.conf.set(APP, "somebody")
    spark.conf.set(VERSION, "7")
    fresh = lake.with_transform(new)
    try:
        fresh.rerun(lake.replay)
        assert lake.rows() == made(lake.feed, good, by_new=MIDDLE)
        assert lake.rewind(30) == SHARDS
        assert lake.what.ledger().read().positions == lake.feed.places(30)
        fresh.drain()
    finally:
        spark.conf.unset(APP)
        spark.conf.unset(VERSION)
    assert lake.rows() == made(lake.feed, good, by_new=range(MIDDLE.start, MESSAGES))
    letters = lake.what.dead_letters().counted(spark, lake.what.ledger())
    assert letters is not None
    assert sorted(row["_sequence"] for row in letters.collect()) == sorted(lake.feed.sequence(n) for n in bad)


class ReplayWrites(Writes):
    """The same for replays."""

    def write(self, sink: DeltaWriter, rows: DataFrame, entry: LedgerEntry, creates: bool) -> None:
        if entry.kind != "replay":
            self._write(sink, rows, entry, creates=creates)
            return
        try:
            self.before()
            self._write(sink, rows, entry, creates=creates)
            self.after()
        except Exception as error:
            self.outcomes[entry.bid] = error
            raise
        self.outcomes[entry.bid] = None


@pytest.mark.slow
def test_d06_a_conflict_drops_the_slower_replay(lake: Lake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes run the same replay; the slow one finds that its range is done."""
    started, landed = folder / "started", folder / "landed"

    def wait(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        started.touch()
        until(landed.exists)
        return number

    slow_id = f.udf(wait, "bigint")
    slow = lake.with_transform(lambda rows: new(rows).withColumn("id", slow_id("id")))
    writes = ReplayWrites(monkeypatch)
    done: list[BatchReport] = []

    def overtake() -> None:
        until(started.exists)
        done.extend(lake.with_transform(new).rerun(lake.replay))
        landed.touch()

    thread = threading.Thread(target=overtake)
    # The first look at the rows of the batch is in its write.
    assert slow.rerun(lake.replay, Once(Step.WRITING, thread.start)) == []
    thread.join()
    assert [is_conflict(error) for error in writes.outcomes.values() if error is not None] == [True]
    assert [report.rows for report in done] == [19]
    lake.assert_made(by_new=MIDDLE)


@pytest.mark.slow
def test_d06_a_number_that_delta_skips_without_a_word_is_planned_again(lake: Lake) -> None:
    fresh, other = lake.with_transform(new), replace(lake.replay, id="another")
    hijack = Once(Step.WRITING, lambda: fresh.rerun(other))
    (report,) = fresh.rerun(lake.replay, hijack)
    assert hijack.is_done
    assert (report.entry.number, report.replaced) == (2, 19)
    assert lake.numbers() == [1, 2]
    lake.assert_made(by_new=MIDDLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [ConcurrentTransactionException("txn"), pytest.param(RuntimeError("the answer was lost"), marks=pytest.mark.slow)],
)
def test_d06_a_replay_that_landed_counts(lake: Lake, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    writes = ReplayWrites(monkeypatch)
    writes.after = FailOnce(error)
    (report,) = lake.with_transform(new).rerun(lake.replay)
    assert writes.outcomes[report.entry.bid] is error
    assert lake.numbers() == [1]
    lake.assert_made(by_new=MIDDLE)


@pytest.mark.slow
def test_d06_a_rewind_next_to_a_batch_is_tried_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.feed.send(9)
    write, met = DeltaWriter.write, []

    def overtake(sink: DeltaWriter, rows: DataFrame, entry: LedgerEntry, *, creates: bool = False) -> None:
        if entry.until and not met:
            met.append(entry.number)
            lake.drain()
        write(sink, rows, entry, creates=creates)

    monkeypatch.setattr(DeltaWriter, "write", overtake)
    assert lake.rewind(30) == SHARDS
    assert met, "a batch took the number of the rewind"
    assert lake.what.ledger().read().positions == lake.feed.places(30)
    monkeypatch.undo()
    lake.with_transform(new).drain()
    assert lake.rows() == made(lake.feed, range(69), by_new=range(30, 69))


@pytest.mark.slow
def test_d07_a_replay_that_a_restore_took_away_is_written_under_new_numbers(lake: Lake) -> None:
    fresh = lake.with_transform(new)
    fresh.rerun(lake.replay)
    lake.restore(2)
    assert lake.rows() == made(lake.feed, range(MESSAGES))
    assert DeltaTable(lake.what.table).transaction_version(f"{lake.feed.group}/replay") == 1
    (report,) = fresh.rerun(lake.replay)
    assert (report.entry.number, report.rows, report.replaced) == (2, 19, 19), "it is not skipped without a word"
    lake.assert_made(by_new=MIDDLE)


@pytest.mark.slow
def test_d07_a_rewind_that_a_restore_took_away_is_made_again_by_its_id(lake: Lake) -> None:
    assert lake.rewind(30, run_id="the-rewind") == SHARDS
    lake.restore(2)
    assert lake.what.ledger().read().positions == lake.feed.positions(MESSAGES), "a RESTORE takes a rewind back"
    assert lake.drain() == []
    assert lake.rewind(30, run_id="the-rewind") == SHARDS
    lake.with_transform(new).drain()
    lake.assert_made(by_new=range(30, MESSAGES))


@pytest.mark.slow
def test_d07_a_restore_in_the_middle_of_what_a_rewind_left_to_do(lake: Lake) -> None:
    """What the RESTORE brings back is to be replaced again, and nothing is appended to it."""
    lake.rewind(0)
    fresh = lake.with_transform(new)
    (first, _) = fresh.drain()
    lake.restore(first.version - 1)
    assert lake.what.ledger().read().positions == lake.feed.places(0)
    reports = fresh.drain()
    assert [(report.entry.mode, report.rows) for report in reports] == [("replace", 27), ("replace", 27)]
    lake.assert_made(by_new=range(MESSAGES))


@pytest.fixture(params=FILES_FIRST)
def any_lake(request: pytest.FixtureRequest, spark: SparkSession, folder: Path) -> Lake:
    return Lake.of(spark, make_feed(request.param, folder, request.getfixturevalue), folder)


def test_k14_after_a_rewind_the_rows_are_really_written_again(any_lake: Lake) -> None:
    """With the same transform: the rows are equal, and others than before."""
    lake = any_lake
    before, files = lake.rows(), set(DeltaTable(lake.what.table).file_uris())
    numbers = lake.numbers("batch")
    assert lake.rewind(0) == SHARDS
    assert lake.feed.told() == lake.feed.done(0), "the broker follows the ledger back"
    assert set(DeltaTable(lake.what.table).file_uris()) == files
    reports = lake.drain()
    assert [(report.rows, report.replaced) for report in reports] == [(27, 27), (27, 27)]
    assert lake.numbers("batch") == [*numbers, *range(numbers[-1] + 1, numbers[-1] + 4)]
    assert not files & set(DeltaTable(lake.what.table).file_uris())
    assert lake.rows() == before
    assert lake.feed.told() == lake.feed.done(MESSAGES)
    assert lake.drain() == []


@pytest.mark.slow
def test_k14_after_a_replay_the_rows_are_really_written_again(any_lake: Lake) -> None:
    lake = any_lake
    before, files = lake.rows(), set(DeltaTable(lake.what.table).file_uris())
    (report,) = lake.rerun(Replay(id="all"))[-1:]
    assert report.replaced == 27
    assert not files & set(DeltaTable(lake.what.table).file_uris())
    assert lake.rows() == before
    assert lake.drain() == []
