"""The traps of Delta, over streams in memory."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches import ingest_job, job
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.batches.ledger_recovery import keep, read_or_recover
from spark_jobs.batches.replay import rewind
from spark_jobs.lag import measure
from spark_jobs.writing.delta_table import compute_state, is_conflict
from stream_consumers.batches import Range
from stream_consumers.errors import LedgerTruncatedError, StreamAssetsError, WriteError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.delta_writes import APP, VERSION, Writes, clean_log, waiting
from tests.support.kafka_topics import (
    MALFORMED,
    CrashError,
    FailOnce,
    Once,
    Payload,
    Pipeline,
    assert_each_once,
    crash,
    orders,
)
from tests.support.polling import until
from tests.support.streams import Identity

pytestmark = pytest.mark.spark
SHARD = Shard("orders")


class Stream:
    """A stream in memory with one shard, and what its broker was told."""

    def __init__(self) -> None:
        self.url = StreamUrl.parse(f"memory://{uuid.uuid4().hex}/{SHARD.stream}")
        self.broker = memory_broker(self.url)

    def send(self, *payloads: Payload) -> None:
        for payload in payloads:
            self.broker.append(SHARD, payload)

    def messages(self) -> set[Identity]:
        return {(SHARD.stream, SHARD.id, message.sequence) for message in self.broker.messages[SHARD]}

    def committed(self, what: Pipeline) -> int | None:
        return self.broker.committed.get((what.group, SHARD))


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    forget_memory_broker(made.url)


def pipeline(spark: SparkSession, stream: Stream, folder: Path, **options: Any) -> Pipeline:
    return Pipeline.of(spark, str(stream.url), folder / "t", **options)


@pytest.fixture
def what(spark: SparkSession, stream: Stream, folder: Path) -> Pipeline:
    return pipeline(spark, stream, folder)


def lose_ledger(stream: Stream, what: Pipeline) -> None:
    """Write four messages, clean the log of the table, and send three more."""
    stream.send(*orders(4))
    what.drain()
    clean_log(what.table)
    stream.send(*orders(3))


def test_d01_a_number_that_delta_skips_without_a_word_is_planned_again(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, what: Pipeline
) -> None:
    stream.send(*orders(6))
    other = what.having(limits=Limits(max_records=2))
    writes = Writes(monkeypatch)
    planned: list[Batch] = []
    # Before our write of [0, 6) another run writes [0, 2) under the number that ours has.
    hijack = Once(Step.WRITING, lambda: other.drain(max_batches=1))
    (report,) = what.drain(lambda step, batch: (batch and planned.append(batch), hijack(step, batch)))
    assert hijack.is_done
    assert (planned[0].number, planned[0].plan.ranges) == (2, {SHARD: Range(0, 6)})
    assert writes.outcomes[planned[0].bid] is None, "Delta says nothing"
    assert (report.entry.number, report.entry.ranges) == (3, {SHARD: Range(2, 6)})
    assert_each_once(what.rows(), stream.messages())
    assert stream.committed(what) == 6


def test_d02_a_table_that_is_ahead_of_a_lost_ledger_is_refused(stream: Stream, what: Pipeline) -> None:
    lose_ledger(stream, what)
    before = what.rows()
    with what.source.open() as opened:
        # Moved by hand, so that the broker does not say with which batch it got there.
        opened.commit(what.ingestion.group, {SHARD: 4})
    with pytest.raises(LedgerTruncatedError, match=r"none is readable(?s:.*)stream-assets rewind --to"):
        what.drain()
    with pytest.raises(LedgerTruncatedError):
        measure(what.source, what.ingestion)
    assert what.rows() == before
    assert stream.committed(what) == 4


@pytest.mark.slow
def test_a_lost_ledger_is_made_anew_from_what_the_broker_was_told_last(stream: Stream, what: Pipeline) -> None:
    lose_ledger(stream, what)
    assert measure(what.source, what.ingestion).total == 3
    what.drain()
    assert_each_once(what.rows(), stream.messages())
    assert what.ingestion.ledger().read().positions == {SHARD: 7}
    clean_log(what.table)
    what.drain()
    assert_each_once(what.rows(), stream.messages())


@pytest.mark.slow
def test_a_lost_ledger_that_another_run_has_made_anew_is_left_as_it_is(
    spark: SparkSession, stream: Stream, what: Pipeline
) -> None:
    lose_ledger(stream, what)
    with what.source.open() as opened:
        state, is_recovered = read_or_recover(opened, what.ingestion, what.ingestion.ledger())
        assert is_recovered
        what.drain()
        version = DeltaTable(what.table).version()
        keep(spark, opened, what.ingestion, state)
    assert DeltaTable(what.table).version() == version
    what.drain()
    assert_each_once(what.rows(), stream.messages())


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [True, False])
def test_rows_that_a_restore_removed_before_the_log_was_cleaned_are_not_lost(
    spark: SparkSession, stream: Stream, folder: Path, is_told: bool
) -> None:
    # The last message is a dead letter, which the RESTORE does not remove.
    stream.send(*orders(5), b"garbage")
    what = pipeline(spark, stream, folder, limits=Limits(max_records=2))
    what.drain()
    spark.sql(f"RESTORE TABLE delta.`{what.table}` TO VERSION AS OF 1")
    if not is_told:
        clean_log(what.table)
    DeltaTable(what.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 2 days"})
    restore = DeltaTable(what.table).version() - 1
    DeltaTable(what.table).create_checkpoint()
    for version in range(restore):
        Path(what.table, "_delta_log", f"{version:020d}.json").unlink(missing_ok=True)
    with pytest.raises(LedgerTruncatedError, match="stream-assets rewind --to"):
        what.drain()
    with what.source.open() as opened:
        rewind(spark, opened, what.ingestion, Bound(sequence=0))
    what.drain()
    assert_each_once(what.rows(), {(SHARD.stream, SHARD.id, sequence) for sequence in range(5)})


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_lost_ledger_goes_on_anywhere_without_doubling(
    spark: SparkSession, stream: Stream, folder: Path, position: int
) -> None:
    stream.send(*orders(6))
    what = pipeline(spark, stream, folder, limits=Limits(max_records=2))
    what.drain()
    clean_log(what.table)
    stream.send(*orders(3))
    with what.source.open() as opened:
        opened.commit(what.ingestion.group, {SHARD: 4})
        moves = rewind(spark, opened, what.ingestion, Bound(sequence=position))
    assert [(move.position, move.to) for move in moves] == [(6, position)]
    assert measure(what.source, what.ingestion).total == 9 - position
    what.drain()
    assert_each_once(what.rows(), stream.messages())


@pytest.mark.slow
def test_a_position_of_a_rewind_is_no_mirror_of_the_ledger(spark: SparkSession, stream: Stream, what: Pipeline) -> None:
    stream.send(*orders(6))
    what.drain()
    with what.source.open() as opened:
        rewind(spark, opened, what.ingestion, Bound(sequence=2))
        assert opened.committed(what.ingestion.group) == {SHARD: 2}
        assert opened.committed_metadata(what.ingestion.group) == {}
    clean_log(what.table)
    # The newest commit is still there, and another one hides it.
    DeltaTable(what.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 2 days"})
    clean_log(what.table)
    with pytest.raises(LedgerTruncatedError):
        what.drain()


def test_d02_a_new_group_does_not_write_again_what_a_lost_ledger_no_longer_tells_of(
    stream: Stream, what: Pipeline
) -> None:
    stream.send(*orders(4))
    what.drain()
    clean_log(what.table)
    with pytest.raises(StreamAssetsError):
        what.having(group="another").drain()
    assert_each_once(what.rows(), stream.messages())


def test_d03_dead_letters_that_are_written_before_a_failure_count_once_after_the_replay(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, what: Pipeline
) -> None:
    stream.send(MALFORMED, *orders(3))
    monkeypatch.setattr(job, "one_pass_counts", lambda batch, ingestion: None)
    writes = Writes(monkeypatch)
    writes.before = FailOnce(RuntimeError("the disk is full"))
    with pytest.raises(WriteError):
        what.drain()
    letters = f"{what.table}_dead_letters"
    assert DeltaTable(letters).to_pyarrow_table().num_rows == 1
    assert what.letters() == {}, "its batch is not in the ledger"
    assert what.rows() == {}
    (report,) = what.drain()
    assert report.dead == 1
    assert_each_once(what.letters(), [("orders", 0, 0)])
    assert_each_once(what.rows() + what.letters(), stream.messages())
    what.drain()
    assert DeltaTable(letters).to_pyarrow_table().num_rows == 1, "the stray is deleted"


def test_d04_a_batch_without_rows_moves_position_and_number(stream: Stream, what: Pipeline) -> None:
    stream.send(*orders(4))
    app = what.ingestion.ledger().app
    (report,) = what.having(transform=lambda rows: rows.where("id < 0")).drain()
    assert (report.rows, report.entry.number) == (0, 2)
    assert DeltaTable(what.table).transaction_version(app) == 2
    assert what.positions() == {0: 4}
    assert stream.committed(what) == 4
    stream.send(*orders(2))
    (report,) = what.drain()
    assert (report.rows, report.entry.number) == (2, 3)
    assert_each_once(what.rows(), [("orders", 0, 4), ("orders", 0, 5)])


def test_d05_no_transaction_of_ours_leaks_into_the_session(
    spark: SparkSession, stream: Stream, folder: Path, what: Pipeline
) -> None:
    stream.send(MALFORMED, *orders(3))
    with suppress(CrashError):
        what.drain(Once(Step.WRITING, crash))
    what.drain()
    assert (spark.conf.get(APP, None), spark.conf.get(VERSION, None)) == (None, None)
    path = str(folder / "plain")
    spark.createDataFrame([(1,), (2,)], "id BIGINT").write.format("delta").mode("append").save(path)
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 2")
    assert DeltaTable(path).to_pyarrow_table().column("id").to_pylist() == [1]


@pytest.mark.slow
def test_d05_a_transaction_that_leaked_into_the_session_hides_nothing_of_ours(
    spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch, what: Pipeline
) -> None:
    monkeypatch.setattr(job, "one_pass_counts", lambda batch, ingestion: None)
    stream.send(MALFORMED, *orders(2))
    with suppress(CrashError):
        what.drain(Once(Step.WRITING, crash))
    letters = f"{what.table}_dead_letters"
    stray = spark.read.format("delta").load(letters)
    seen = stray.limit(0).write.format("delta").option("txnAppId", "somebody").option("txnVersion", "7")
    seen.mode("append").save(letters)
    # From here on Delta skips what has no transaction of its own, like the DELETE of the stray dead letter.
    spark.conf.set(APP, "somebody")
    spark.conf.set(VERSION, "7")
    try:
        what.drain()
        stream.send(*orders(1))
        what.drain()
    finally:
        spark.conf.unset(APP)
        spark.conf.unset(VERSION)
    assert_each_once(what.letters(), [("orders", 0, 0)])
    assert_each_once(what.rows() + what.letters(), stream.messages())


def test_d06_a_conflict_over_our_number_drops_the_batch_if_the_other_commit_has_it(
    stream: Stream, folder: Path, monkeypatch: pytest.MonkeyPatch, what: Pipeline
) -> None:
    stream.send(*orders(1))
    started, landed = folder / "started", folder / "landed"
    slow = what.having(transform=lambda rows: rows.withColumn("id", waiting("id", started=started, landed=landed)))
    writes = Writes(monkeypatch)
    bids: list[str] = []

    def overtake() -> None:
        until(started.exists)
        bids.extend(report.entry.bid for report in what.drain())
        landed.touch()

    thread = threading.Thread(target=overtake)
    assert slow.drain(Once(Step.WRITING, thread.start)) == []
    thread.join()
    conflicts = [error for error in writes.outcomes.values() if error is not None]
    assert [is_conflict(error) for error in conflicts] == [True]
    assert len(bids) == 1
    assert_each_once(what.rows(), stream.messages())
    assert stream.committed(what) == 1


def test_d07_rows_that_a_restore_removed_are_written_under_new_numbers(
    spark: SparkSession, stream: Stream, folder: Path
) -> None:
    stream.send(*orders(6))
    what = pipeline(spark, stream, folder, records=3)
    what.drain()
    DeltaTable(what.table).restore(0)
    assert what.rows() == {}
    app = what.ingestion.ledger().app
    assert DeltaTable(what.table).transaction_version(app) == 3, "a RESTORE leaves the numbers as they are"
    reports = what.drain()
    assert [(report.entry.number, report.rows) for report in reports] == [(4, 3), (5, 3)]
    assert_each_once(what.rows(), stream.messages())
    assert stream.committed(what) == 6


def test_d11_delta_computes_the_state_for_the_next_write_while_the_batch_is_planned(
    spark: SparkSession, stream: Stream, what: Pipeline
) -> None:
    """Delta looks up the number of the transaction in it."""
    stream.send(*orders(1))
    what.drain()
    jvm: Any = spark.sparkContext._jvm
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, what.table)
    is_computed = log.unsafeVolatileSnapshot()._computedStateTriggered
    with what.source.open() as source:
        planning = IngestJob(spark, source, what.ingestion)
        assert planning.plan() is None
        assert not is_computed(), "nothing is to be written"
        stream.send(*orders(1))
        assert IngestJob(spark, source, what.ingestion).plan() is not None
        until(is_computed)


def test_d11_batches_are_written_also_if_delta_cannot_compute_the_state_ahead(
    spark: SparkSession, stream: Stream, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []

    def of_no_table(session: SparkSession, table: str) -> None:
        failed.append(compute_state(session, str(folder / "absent")))

    monkeypatch.setattr(ingest_job, "compute_state", of_no_table)
    stream.send(*orders(6))
    what = pipeline(spark, stream, folder, records=3)
    assert [report.rows for report in what.drain()] == [3, 3]
    assert_each_once(what.rows(), stream.messages())
    assert [one.result() for one in failed] == [None, None]
