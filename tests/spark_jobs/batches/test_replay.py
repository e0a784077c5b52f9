"""Replays and rewinds: what they replace, leave alone and refuse, and the traps of Delta and of consumers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from delta.exceptions import ConcurrentTransactionException
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches import target_table
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Dismissal, DismissJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import (
    LeftOut,
    OnReplay,
    Replay,
    ReplayJob,
    ReplayPlan,
    goal_of,
    last_copies,
    plan_moves,
    plan_replay,
    rewind,
)
from spark_jobs.dead_letters.reader import DeadLetterFilter, DeadLetters
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from spark_jobs.writing.delta_table import DeltaWriter, is_conflict
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import DataLossError, InvalidOptionError, StreamNotFoundError
from stream_consumers.file.scanner import Frame
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import DataLoss, ErrorPolicy, Limits
from stream_consumers.urls import StreamUrl
from tests.support.command_line import run
from tests.support.delta_writes import APP, VERSION, Writes, waiting
from tests.support.feeds import FILES_FIRST, SHARDS, Feed, FileFeed, make_feed
from tests.support.kafka_topics import CrashError, FailOnce, Once, crash
from tests.support.ledger_tables import at, write_batch
from tests.support.old_and_new import Row, made, new, old, rows_of
from tests.support.polling import until
from tests.support.ss_files import flip, items, payload_offset
from tests.support.streams import shard, write_stream

Place = tuple[int, int, int, str]


def ingestion(table: Path, *, records: int = 100, **more: object) -> Ingestion:
    what = Ingestion("lakehouse", str(table), Json("id BIGINT, user STRING"), old, limits=Limits(max_records=records))
    return replace(what, **more)  # type: ignore[arg-type]


def ingest(spark: SparkSession, url: str, what: Ingestion, **more: object) -> list[BatchReport]:
    source = StreamSource(StreamUrl.parse(url))
    return list(drain(spark, source, what, **more))  # type: ignore[arg-type]


def run_replay(
    spark: SparkSession, url: str, what: Ingestion, wanted: Replay, observer: Observer = ignore_steps
) -> list[BatchReport]:
    with open_batch_source(url) as source:
        job = ReplayJob(spark, source, replace(what, transform=new), wanted, observer=observer)
        return list(drain_batches(job))


def places_of(folder: Path) -> Counter[Place]:
    """Shard, sequence, id and maker of each row."""
    rows = rows_of(folder / "t").elements()
    return Counter((number, sequence, row_id, made_by) for _, number, sequence, _, row_id, made_by in rows)


def expected(count: int, is_replayed: object = None, *, shards: int = 2, first: int = 1) -> Counter[Place]:
    """The rows of a table made by :func:`old`, and by :func:`new` where ``is_replayed(shard, sequence)``."""
    found: Counter[Place] = Counter()
    for index in range(count):
        place = (index % shards, index // shards + first)
        by_new = callable(is_replayed) and is_replayed(*place)
        if index % 10 != (4 if by_new else 3):
            found[(*place, index, "new" if by_new else "old")] += 1
    return found


def files_of(table: Path | str) -> set[str]:
    return set(DeltaTable(table).file_uris())


def between(start: str, stop: str) -> Replay:
    return Replay(start=Bound.parse(start), stop=Bound.parse(stop))


def is_right(url: str, what: Ingestion) -> bool:
    """What verify says of each shard."""
    with open_batch_source(url) as source:
        return all(verdict.is_right for verdict in verify(source, what))


def test_a_replay_by_sequence_replaces_its_range_and_nothing_else(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 300), ingestion(folder / "t")
    ingest(spark, url, what)
    before, outside = files_of(folder / "t"), what.ledger().read()
    (report,) = run_replay(spark, url, what, between("51", "101"))
    assert places_of(folder) == expected(300, lambda _, sequence: 51 <= sequence < 101)
    assert (report.replaced, report.rows) == (90, 90)
    assert len(before & files_of(folder / "t")) == 2, "the other two batches keep their files"
    after = what.ledger().read()
    assert after.positions == outside.positions
    assert after.last_number == outside.last_number + 1, "batches that were planned before it are planned again"
    assert is_right(url, what)


@pytest.mark.slow
def test_a_replay_by_time_replaces_what_has_such_timestamps(spark: SparkSession, folder: Path) -> None:
    url, what = f"file://{folder}/orders.ss/orders", ingestion(folder / "t")
    with create_producer(url) as producer:
        for index in range(100):
            text = f'{{"id": {index}, "user": "u"}}'.encode()
            producer.send(text, shard=index % 2, timestamp_ms=1_700_000_000_000 + 1000 * index)
    ingest(spark, url, what)
    run_replay(spark, url, what, between("2023-11-14T22:13:40Z", "2023-11-14T22:14:00Z"))
    assert places_of(folder) == expected(100, lambda number, sequence: 20 <= (sequence - 1) * 2 + number < 40)


@pytest.mark.slow
def test_a_replay_is_clamped_to_what_was_ingested(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 200), ingestion(folder / "t")
    ingest(spark, url, what, max_batches=1)
    run_replay(spark, url, what, between("1", "101"))
    assert places_of(folder) == expected(100, lambda *_: True)
    ingest(spark, url, what)
    assert places_of(folder) == expected(200, lambda _, sequence: sequence <= 50)


@pytest.mark.slow
def test_what_lies_before_the_origin_can_be_replayed_into_the_table(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    ingest(spark, url, what, origin=Bound.parse("11"))
    run_replay(spark, url, what, between("earliest", "11"))
    assert places_of(folder) == expected(40, lambda _, sequence: sequence < 11)


def test_ingestion_stops_where_it_is_told_to(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    ingest(spark, url, what, stop=Bound.parse("orders/0=11,orders/1=6"))
    assert what.ledger().read().positions == {shard(0): 11, shard(1): 6}


@pytest.mark.slow
def test_append_adds_to_what_is_there(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    ingest(spark, url, what)
    positions = what.ledger().read().positions
    run_replay(spark, url, what, replace(between("1", "6"), on_replay=OnReplay.APPEND))
    assert places_of(folder) == expected(40) + Counter({row: 1 for row in expected(40, lambda *_: True) if row[1] < 6})
    assert what.ledger().read().positions == positions


@pytest.mark.slow
def test_dead_letters_of_a_replayed_range_are_replaced(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 100, malformed=frozenset({5, 50}))
    what = ingestion(folder / "t")
    ingest(spark, url, what)
    run_replay(spark, url, what, between("1", "20"))
    letters = what.dead_letters().counted(spark, what.ledger())
    assert letters is not None
    assert sorted((row["_shard"], row["_sequence"]) for row in letters.collect()) == [(0, 26), (1, 3)]
    assert is_right(url, what)


@pytest.mark.slow
def test_a_replay_that_was_stopped_goes_on_behind_its_last_batch(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 1000), ingestion(folder / "t")
    ingest(spark, url, what)
    wanted, number = between("101", "401"), what.ledger().read().last_number + 3
    with pytest.raises(CrashError):
        run_replay(spark, url, what, wanted, Once(Step.WRITING, crash, number=number))
    with create_producer(url) as producer:
        producer.send(b'{"id": 1000, "user": "late"}', shard=0)
    assert len(run_replay(spark, url, what, wanted)) == 4
    assert places_of(folder) == expected(1000, lambda _, sequence: 101 <= sequence < 401)
    assert run_replay(spark, url, what, wanted) == [], "it is done"


@pytest.mark.slow
def test_a_replay_next_to_ingestion_is_written_again_not_read_again(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 200), ingestion(folder / "t")
    ingest(spark, url, what, max_batches=1)
    steps: list[Step] = []

    def meddle(step: Step, batch: Batch | None) -> None:
        steps.append(step)
        if step is Step.WRITING and steps.count(Step.WRITING) == 1:
            ingest(spark, url, what, max_batches=1)

    run_replay(spark, url, what, between("1", "51"), meddle)
    assert places_of(folder) == expected(200, lambda _, sequence: sequence < 51)
    assert steps.count(Step.READ) == 1


@pytest.mark.slow
def test_f16_a_replay_over_a_restore_loses_nothing(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 100), ingestion(folder / "t", records=20)
    ingest(spark, url, what)
    restore = f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF 1"
    run_replay(spark, url, what, between("1", "41"), Once(Step.WRITING, lambda: spark.sql(restore)))
    ingest(spark, url, what)
    assert_each_once_filtered(folder, 100)
    assert is_right(url, what)


def assert_each_once_filtered(folder: Path, count: int) -> None:
    found = places_of(folder)
    places = Counter((number, sequence) for number, sequence, _, _ in found.elements())
    assert set(places.values()) == {1}
    lacking = {(i % 2, i // 2 + 1) for i in range(count) if i % 10 not in (3, 4)} - places.keys()
    assert not lacking


@pytest.mark.slow
def test_rewind_moves_the_position_and_the_next_run_replaces(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 200), ingestion(folder / "t", records=40)
    ingest(spark, url, what)
    with open_batch_source(url) as source:
        (first, second) = rewind(spark, source, what, Bound.parse("51"))
    assert (first.shard, first.position, first.to) == (shard(0), 101, 51)
    assert second.replaced == (51, 101)
    state = what.ledger().read()
    assert state.positions == {shard(0): 51, shard(1): 51}
    assert places_of(folder) == expected(200), "nothing is replaced yet"
    fresh = replace(what, transform=new)
    ingest(spark, url, fresh, max_batches=1)
    assert sum(row[3] == "new" for row in places_of(folder).elements()) == 36
    ingest(spark, url, fresh)
    assert places_of(folder) == expected(200, lambda _, sequence: sequence >= 51)
    assert what.ledger().read().positions == {shard(0): 101, shard(1): 101}
    assert is_right(url, what)


def test_a_rewind_replaces_rows_once_whatever_runs_have_its_id(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    ingest(spark, url, what)
    with open_batch_source(url) as source:
        assert len(rewind(spark, source, what, Bound.parse("earliest"), replay_id="run")) == 2
        assert [(report.rows, report.replaced) for report in ingest(spark, url, what)] == [(36, 36)]
        assert rewind(spark, source, what, Bound.parse("earliest"), replay_id="run") == []
    assert what.ledger().read().positions == {shard(0): 21, shard(1): 21}


@pytest.mark.slow
def test_forwards_is_a_skip_that_the_ledger_and_verify_know(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 200), ingestion(folder / "t", records=40)
    ingest(spark, url, what, max_batches=1)
    with open_batch_source(url) as source:
        rewind(spark, source, what, Bound.parse("orders/0=81"))
    ingest(spark, url, what)
    missing = [row for row in expected(200) if row[0] == 0 and 21 <= row[1] < 81]
    assert places_of(folder) == expected(200) - Counter(missing)
    with open_batch_source(url) as source:
        verdicts = verify(source, what)
    assert all(verdict.is_right for verdict in verdicts)
    assert [verdict.skipped for verdict in verdicts] == [60, 0]
    run_replay(spark, url, replace(what, transform=old), between("earliest", "latest"))
    with open_batch_source(url) as source:
        assert [verdict.skipped for verdict in verify(source, what)] == [0, 0]


def test_a_place_that_the_stream_does_not_hold_is_refused(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    with pytest.raises(StreamNotFoundError):
        run_replay(spark, url, what, between("1", "5"))
    ingest(spark, url, what)
    with pytest.raises(InvalidOptionError) as raised:
        run_replay(spark, url, what, between("1", "22"))
    assert raised.value.facts == {"earliest": 1, "latest": 21}
    with pytest.raises(InvalidOptionError, match="no shard clicks/0"):
        run_replay(spark, url, what, Replay(start=Bound(sequences={Shard("clicks"): 1})))
    with pytest.raises(InvalidOptionError, match="before its start"):
        run_replay(spark, url, what, between("9", "3"))
    with open_batch_source(url) as source:
        rewind(spark, source, what, Bound.parse("5"))
        with pytest.raises(InvalidOptionError, match="cannot be moved forwards to 9"):
            plan_moves(source, what, Bound.parse("9"), state=what.ledger().read())
    assert_each_once_filtered(folder, 40)


def test_rows_whose_messages_are_gone_are_never_replaced(spark: SparkSession, folder: Path) -> None:
    url, what = "memory://replay-gone/orders", ingestion(folder / "t")
    with create_producer(url) as producer:
        for index in range(40):
            producer.send(b'{"id": %d, "user": "u"}' % index, shard=index % 2)
    ingest(spark, url, what)
    # As a compacted topic or XDEL would.
    log = memory_broker(StreamUrl.parse(url)).messages[shard(0)]
    log[:] = [message for message in log if message.sequence not in (3, 5)]
    with pytest.raises(DataLossError, match=r"2 rows of .* between sequences 3 and 5 would be replaced"):
        run_replay(spark, url, what, between("1", "11"))
    assert places_of(folder) == expected(40, first=0)
    run_replay(spark, url, replace(what, errors=ErrorPolicy(on_data_loss="record")), between("1", "11"))
    gone = {(0, 3), (0, 5)}
    is_new = expected(40, lambda *place: 1 <= place[1] < 11 and place not in gone, first=0)
    assert places_of(folder) == is_new
    # As retention would.
    del log[:8]
    with pytest.raises(DataLossError) as raised:
        run_replay(spark, url, what, Replay(start=Bound.parse("2026-01-01T00:00:00Z")))
    assert raised.value.facts == {"orders/0": "0 to 10"}
    assert places_of(folder) == is_new
    forget_memory_broker(StreamUrl.parse(url))


@pytest.mark.parametrize("way", ["replay", "rewind"])
def test_rows_whose_messages_were_damaged_since_are_never_replaced(spark: SparkSession, folder: Path, way: str) -> None:
    path, places = folder / "orders.ss", [(0, 3), (0, 4), (0, 5)]
    url, what = write_stream(path, 40, malformed=frozenset({6})), ingestion(folder / "t")
    ingest(spark, url, what)
    rows, letters = places_of(folder), letters_of(spark, what)
    assert [place for place, _ in letters] == [(0, 4)]
    for item in items(path):
        if isinstance(item, Frame) and (item.shard.id, item.sequence) in places:
            flip(path, payload_offset(item))
    if way == "rewind":
        with open_batch_source(url) as source:
            rewind(spark, source, what, Bound.parse("1"))

    def read_again(loss: DataLoss) -> list[BatchReport]:
        asked = replace(what, errors=ErrorPolicy(on_data_loss=loss))
        return ingest(spark, url, asked) if way == "rewind" else run_replay(spark, url, asked, between("1", "20"))

    with pytest.raises(DataLossError, match=r"2 rows of .* between sequences 3 and 5"):
        read_again(DataLoss.ERROR)
    assert (places_of(folder), letters_of(spark, what)) == (rows, letters)
    assert sum(report.dead for report in read_again(DataLoss.RECORD)) == 1
    kept = Counter({row: count for row, count in rows.items() if row[:2] in places})
    assert Counter({row: count for row, count in places_of(folder).items() if row[:2] in places}) == kept
    assert letters_of(spark, what) == letters
    assert is_right(url, what)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replay", "rewind"])
def test_dead_letters_whose_messages_are_gone_are_never_dropped(spark: SparkSession, folder: Path, way: str) -> None:
    url, what = f"memory://letters-gone-{way}/orders", ingestion(folder / "t")
    with create_producer(url) as producer:
        for index in range(40):
            bad = index in (6, 10, 12)
            producer.send(b"garbage %d" % index if bad else b'{"id": %d, "user": "u"}' % index, shard=index % 2)
    ingest(spark, url, what)
    list(drain_batches(DismissJob(spark, what, DeadLetterFilter(), Dismissal("ann", "a test"), limit=1)))
    written = letters_of(spark, what)
    assert [place for place, _ in written] == [(0, 3), (0, 5), (0, 6)]
    assert open_sequences(what) == [5, 6]
    log = memory_broker(StreamUrl.parse(url)).messages[shard(0)]
    log[:] = [message for message in log if message.sequence not in (3, 5)]
    if way == "rewind":
        with open_batch_source(url) as source:
            rewind(spark, source, what, Bound.parse("1"))

    def read_again(loss: DataLoss, start: str = "1") -> list[BatchReport]:
        asked = replace(what, errors=ErrorPolicy(on_data_loss=loss))
        return ingest(spark, url, asked) if way == "rewind" else run_replay(spark, url, asked, between(start, "20"))

    with pytest.raises(DataLossError, match=r"2 dead letters of .* between sequences 3 and 5"):
        read_again(DataLoss.ERROR)
    assert letters_of(spark, what) == written
    assert sum(report.dead for report in read_again(DataLoss.RECORD)) == 3
    assert letters_of(spark, what) == written
    if way == "replay":
        # What was kept is kept again.
        read_again(DataLoss.RECORD, start="5")
        assert letters_of(spark, what) == written
    assert open_sequences(what) == [5, 6], "a dismissed one stays dismissed"
    with open_batch_source(url) as source:
        (verdict, _) = verify(source, what)
        assert (verdict.missing, verdict.duplicated, verdict.unknown, verdict.other) == (0, 0, 2, 0)
        spark.sql(f"DELETE FROM delta.`{what.dead_letters().path}` WHERE _sequence = 5")
        missing = [count for verdict in verify(source, what) for count in verdict.missing_dead.values()]
    assert missing == [1]
    forget_memory_broker(StreamUrl.parse(url))


def letters_of(spark: SparkSession, what: Ingestion) -> list[tuple[tuple[int, int], bytes]]:
    """The places and payloads of the dead letters that count."""
    letters = what.dead_letters().counted(spark, what.ledger())
    assert letters is not None
    return sorted(((row["_shard"], row["_sequence"]), bytes(row["payload"])) for row in letters.collect())


def open_sequences(what: Ingestion) -> list[int]:
    """The sequences of the dead letters that count and are not dismissed."""
    found: list[int] = DeadLetters(what.table, group=what.group).to_arrow().column("_sequence").to_pylist()
    return found


# Rows of the time of a replay whose messages the stream does not hold any more


URL = "memory://last-copies/orders"
ORDERS = Shard("orders")
ROWS = {0: "2026-11-16", 1: "2026-11-17", 2: "2026-11-17T12:00", 3: "2026-11-17T18:00", 4: "2026-11-18"}


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Ingestion]:
    """A table with all messages of a stream that has lost the first two."""
    with create_producer(URL) as producer:
        for moment in ROWS.values():
            producer.send(b"{}", timestamp_ms=at(moment))
    write_batch(tmp_path / "t", ROWS)
    del memory_broker(StreamUrl.parse(URL)).messages[ORDERS][:2]
    yield Ingestion("lakehouse", str(tmp_path / "t"))
    forget_memory_broker(StreamUrl.parse(URL))


def goal_and_last_copies(
    half: Ingestion, replay: Replay, *, url: str = URL
) -> tuple[dict[Shard, Range], dict[Shard, Range]]:
    ledger = half.ledger()
    with open_batch_source(url) as source:
        extents = source.extents()
        goal = goal_of(replay, source, ledger.read(), extents)
        return dict(goal), dict(last_copies(replay, source, ledger, extents=extents, goal=goal))


@pytest.mark.parametrize(
    ("replay", "replaced", "gone"),
    [
        (between("2026-11-16", "2026-11-17"), {}, {ORDERS: Range(0, 1)}),
        (between("2026-11-17", "2026-11-18"), {ORDERS: Range(2, 4)}, {ORDERS: Range(1, 2)}),
        (between("2026-11-18", "2026-11-19"), {ORDERS: Range(4, 5)}, {}),
        (Replay(Bound.at_time("2026-11-01")), {ORDERS: Range(2, 5)}, {ORDERS: Range(0, 2)}),
        (Replay(Bound.parse("earliest")), {ORDERS: Range(2, 5)}, {}),
        (Replay(), {ORDERS: Range(2, 5)}, {}),
    ],
    ids=["a day that is gone", "a half", "a day that is held", "an open end", "what is held", "all that is held"],
)
def test_a_replay_of_a_time_knows_the_rows_that_it_cannot_make_again(
    half: Ingestion, replay: Replay, replaced: dict[Shard, Range], gone: dict[Shard, Range]
) -> None:
    assert goal_and_last_copies(half, replay) == (replaced, gone)


def test_rows_of_another_stream_are_not_meant(half: Ingestion) -> None:
    other = "memory://last-copies/returns"
    with create_producer(other) as producer:
        producer.send(b"{}", timestamp_ms=at("2026-11-16"))
    assert goal_and_last_copies(half, between("2026-11-16", "2026-11-17"), url=other) == ({}, {})


def test_a_dry_run_refuses_what_the_replay_refuses(half: Ingestion) -> None:
    words = ("replay", "--source", URL, "--table", half.table, "--group", half.group, "--dry-run", "--json")
    gone_day = ("--from", "2026-11-16", "--until", "2026-11-17")
    refused = run(*words, *gone_day)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--on-data-loss record" in refused.stderr
    assert run(*words, *gone_day, "--on-data-loss", "record").exit_code == 0
    with open_batch_source(URL) as source, pytest.raises(DataLossError) as error:
        plan_replay(between("2026-11-16", "2026-11-17"), source, half, half.ledger(), half.ledger().read())
    assert error.value.facts == {"orders/0": "0 to 1"}


def test_a_plan_keeps_the_rows_that_are_the_last_copies(half: Ingestion) -> None:
    recording = replace(half, errors=ErrorPolicy(on_data_loss="record"))
    with open_batch_source(URL) as source:
        plan = plan_replay(between("2026-11-17", "2026-11-18"), source, recording, half.ledger(), half.ledger().read())
    assert (plan.left, plan.last_copies) == ({ORDERS: Range(2, 4)}, {ORDERS: Range(1, 2)})


# Rows of the time of a replay that it leaves out

# The message 3 is of a producer whose clock was wrong; the message 9 came late.
CLOCKS = ["2026-11-16", "2026-11-16T08:00", "2026-11-16T12:00", "2030-01-01", "2026-11-16T18:00", "2026-11-17",
          "2026-11-17T12:00", "2030-01-02", "2030-01-03", "2029-12-31T23:00"]  # fmt: skip


@pytest.fixture
def clocks(tmp_path: Path) -> Iterator[Ingestion]:
    """A table with all messages of a stream whose times do not only grow."""
    with create_producer(URL) as producer:
        for moment in CLOCKS:
            producer.send(b"{}", timestamp_ms=at(moment))
    write_batch(tmp_path / "t", dict(enumerate(CLOCKS)))
    yield Ingestion("lakehouse", str(tmp_path / "t"))
    forget_memory_broker(StreamUrl.parse(URL))


def planned(clocks: Ingestion, replay: Replay) -> ReplayPlan:
    with open_batch_source(URL) as source:
        return plan_replay(replay, source, clocks, clocks.ledger(), clocks.ledger().read())


@pytest.mark.parametrize(
    ("replay", "replaced", "left_out"),
    [
        (between("2026-11-16", "2026-11-17"), Range(0, 3), LeftOut(1, Range(4, 5))),
        (between("2026-11-16", "2026-11-18"), Range(0, 3), LeftOut(3, Range(4, 7))),
        (between("earliest", "2026-11-17"), Range(0, 3), LeftOut(1, Range(4, 5))),
        (between("orders/0=1", "2026-11-17"), Range(1, 3), LeftOut(1, Range(4, 5))),
        (between("2030-01-01", "2030-01-02"), Range(3, 7), None),
        (between("2026-11-17", "orders/0=6"), Range(3, 6), None),
        (between("2026-11-16", "latest"), Range(0, 10), None),
        (between("orders/0=2", "orders/0=3"), Range(2, 3), None),
    ],
)
def test_a_replay_by_time_counts_the_rows_that_it_leaves_out(
    clocks: Ingestion, replay: Replay, replaced: Range, left_out: LeftOut | None
) -> None:
    plan = planned(clocks, replay)
    assert plan.progress.goal == {ORDERS: replaced}
    assert plan.left_out == ({ORDERS: left_out} if left_out else {})
    assert bool(plan.note) == bool(left_out)


def test_a_time_whose_range_is_empty_although_the_table_has_rows_of_it_is_refused(clocks: Ingestion) -> None:
    """After a message with a time in the future, each day before that time begins and ends at that message."""
    with pytest.raises(InvalidOptionError) as error:
        planned(clocks, between("2026-11-17", "2026-11-18"))
    assert error.value.facts == {"orders/0": "2 rows from 5 to 6"}
    assert "--from orders/0=5 --until orders/0=7" in error.value.remedy


def test_rows_that_came_after_the_plan_are_not_left_out(clocks: Ingestion) -> None:
    state = clocks.ledger().read()
    write_batch(Path(clocks.table), {10: "2026-11-19"})
    with open_batch_source(URL) as source:
        plan = plan_replay(between("2026-11-19", "2026-11-20"), source, clocks, clocks.ledger(), state)
    assert (plan.progress.goal, plan.left_out) == ({}, {})


def test_a_replay_that_has_begun_is_not_refused_for_rows_that_came_meanwhile(clocks: Ingestion) -> None:
    write_batch(Path(clocks.table), {0: CLOCKS[0]}, kind="replay", ranges=[0], replay="begun")
    plan = planned(clocks, replace(between("2026-11-17", "2026-11-18"), id="begun"))
    assert plan.left_out == {ORDERS: LeftOut(2, Range(5, 7))}


def test_the_command_replay_refuses_an_empty_time_and_notes_late_rows(clocks: Ingestion) -> None:
    words = ("replay", "--source", URL, "--table", clocks.table, "--group", clocks.group, "--dry-run", "--json")
    empty = run(*words, "--from", "2026-11-17", "--until", "2026-11-18")
    assert (empty.exit_code, empty.stdout) == (1, "")
    assert "2 rows from 5 to 6" in empty.stderr
    instead = run(*words, "--from", "orders/0=5", "--until", "orders/0=7")
    assert (instead.exit_code, '"rows replaced": 2' in instead.stdout) == (0, True)
    late = run(*words, "--from", "2026-11-16", "--until", "2026-11-17")
    assert late.exit_code == 0
    assert "not replayed: 1 (orders/0: 1 row from 4 to 4)" in late.stderr
    assert "--from orders/0=0 --until orders/0=5" in late.stderr


# The traps


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


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_table, "MAX_PAUSE_SECONDS", 0.05)


@pytest.fixture
def lake(spark: SparkSession, folder: Path, short_pauses: None) -> Lake:
    """A claim and two batches: version 2."""
    return Lake.of(spark, FileFeed(folder), folder)


def nothing(rows: DataFrame) -> DataFrame:
    """Drops every message."""
    return new(rows).where("id < 0")


@pytest.mark.slow
def test_d04_a_replay_without_rows_takes_the_rows_away_and_is_done(lake: Lake) -> None:
    emptied = lake.with_transform(nothing)
    (report,) = emptied.rerun(lake.replay)
    assert (report.rows, report.replaced, report.entry.number) == (0, 19, 4)
    assert DeltaTable(lake.what.table).transaction_version(f"{lake.feed.group}/main") == 4
    outside = [number for number in range(MESSAGES) if number not in MIDDLE]
    assert lake.rows() == made(lake.feed, outside)
    assert emptied.rerun(lake.replay) == [], "it is not begun again"
    (report,) = lake.with_transform(new).rerun(replace(lake.replay, id="another"))
    assert (report.rows, report.replaced, report.entry.number) == (19, 0, 5), "its number is not used again"
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

    def write(self, sink: DeltaWriter, rows: DataFrame, entry: LedgerEntry, **options: Any) -> None:
        if entry.kind != "replay":
            self._write(sink, rows, entry, **options)
            return
        try:
            self.before()
            self._write(sink, rows, entry, **options)
            self.after()
        except Exception as error:
            self.outcomes[entry.bid] = error
            raise
        self.outcomes[entry.bid] = None


@pytest.mark.slow
def test_d06_a_conflict_drops_the_slower_replay(lake: Lake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes run the same replay; the slow one finds that its range is done."""
    started, landed = folder / "started", folder / "landed"
    slow = lake.with_transform(lambda rows: new(rows).withColumn("id", waiting("id", started=started, landed=landed)))
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
    assert (report.entry.number, report.replaced) == (5, 19)
    assert lake.numbers() == [4, 5]
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
    assert lake.numbers() == [4]
    lake.assert_made(by_new=MIDDLE)


@pytest.mark.slow
def test_d06_a_rewind_next_to_a_batch_is_tried_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.feed.send(9)
    write, met = DeltaWriter.write, []

    def overtake(sink: DeltaWriter, rows: DataFrame, entry: LedgerEntry, **options: Any) -> None:
        if entry.until and not met:
            met.append(entry.number)
            lake.drain()
        write(sink, rows, entry, **options)

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
    assert DeltaTable(lake.what.table).transaction_version(f"{lake.feed.group}/main") == 4
    (report,) = fresh.rerun(lake.replay)
    assert (report.entry.number, report.rows, report.replaced) == (5, 19, 19), "it is not skipped without a word"
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
def any_lake(request: pytest.FixtureRequest, spark: SparkSession, folder: Path, short_pauses: None) -> Lake:
    return Lake.of(spark, make_feed(request.param, folder, request.getfixturevalue), folder)


@pytest.mark.slow
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
