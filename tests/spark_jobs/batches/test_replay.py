"""Replays and rewinds: what they replace, what they leave alone, and what they refuse."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import OnReplay, Replay, ReplayJob, plan_moves, rewind
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import DataLossError, InvalidOptionError, StreamNotFoundError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import DataLoss, ErrorPolicy, Limits
from stream_consumers.urls import StreamUrl
from tests.support.kafka_topics import CrashError, Once, crash
from tests.support.streams import shard, write_stream

pytestmark = pytest.mark.spark
Row = tuple[int, int, int, str]


def old(rows: DataFrame) -> DataFrame:
    """Drops every tenth message, and says who made the row."""
    return rows.where("id % 10 <> 3").withColumn("made_by", f.lit("old"))


def new(rows: DataFrame) -> DataFrame:
    """Drops others."""
    return rows.where("id % 10 <> 4").withColumn("made_by", f.lit("new"))


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


def rows_of(table: Path | str) -> Counter[Row]:
    frame = DeltaTable(str(table)).to_pyarrow_table(columns=["_shard", "_sequence", "id", "made_by"]).to_pylist()
    return Counter((row["_shard"], row["_sequence"], row["id"], row["made_by"]) for row in frame)


def expected(count: int, is_replayed: object = None, *, shards: int = 2, first: int = 1) -> Counter[Row]:
    """The rows of a table made by :func:`old`, and by :func:`new` where ``is_replayed(shard, sequence)``."""
    found: Counter[Row] = Counter()
    for index in range(count):
        place = (index % shards, index // shards + first)
        by_new = callable(is_replayed) and is_replayed(*place)
        if index % 10 != (4 if by_new else 3):
            found[(*place, index, "new" if by_new else "old")] += 1
    return found


def files_of(table: Path | str) -> set[str]:
    return set(DeltaTable(str(table)).file_uris())


def between(start: str, stop: str) -> Replay:
    return Replay(start=Bound.parse(start), stop=Bound.parse(stop))


def test_a_replay_by_sequence_replaces_its_range_and_nothing_else(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 300), ingestion(folder / "t")
    ingest(spark, url, what)
    before, outside = files_of(folder / "t"), what.ledger().read()
    (report,) = run_replay(spark, url, what, between("51", "101"))
    assert rows_of(folder / "t") == expected(300, lambda _, sequence: 51 <= sequence < 101)
    assert (report.replaced, report.rows) == (90, 90)
    assert len(before & files_of(folder / "t")) == 2, "the other two batches keep their files"
    after = what.ledger().read()
    assert after.positions == outside.positions
    assert after.last_number == outside.last_number, "the line of the group goes on where it was"
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


@pytest.mark.slow
def test_a_replay_by_time_replaces_what_has_such_timestamps(spark: SparkSession, folder: Path) -> None:
    url, what = f"file://{folder}/orders.ss/orders", ingestion(folder / "t")
    with create_producer(url) as producer:
        for index in range(100):
            text = f'{{"id": {index}, "user": "u"}}'.encode()
            producer.send(text, shard=index % 2, timestamp_ms=1_700_000_000_000 + 1000 * index)
    ingest(spark, url, what)
    run_replay(spark, url, what, between("2023-11-14T22:13:40Z", "2023-11-14T22:14:00Z"))
    assert rows_of(folder / "t") == expected(100, lambda number, sequence: 20 <= (sequence - 1) * 2 + number < 40)


@pytest.mark.slow
def test_a_replay_is_clamped_to_what_was_ingested(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 200), ingestion(folder / "t")
    ingest(spark, url, what, max_batches=1)
    run_replay(spark, url, what, between("1", "101"))
    assert rows_of(folder / "t") == expected(100, lambda *_: True)
    ingest(spark, url, what)
    assert rows_of(folder / "t") == expected(200, lambda _, sequence: sequence <= 50)


@pytest.mark.slow
def test_what_lies_before_the_origin_can_be_replayed_into_the_table(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    ingest(spark, url, what, origin=Bound.parse("11"))
    run_replay(spark, url, what, between("earliest", "11"))
    assert rows_of(folder / "t") == expected(40, lambda _, sequence: sequence < 11)


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
    assert rows_of(folder / "t") == expected(40) + Counter(
        {row: 1 for row in expected(40, lambda *_: True) if row[1] < 6}
    )
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
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


@pytest.mark.slow
def test_a_replay_that_was_stopped_goes_on_behind_its_last_batch(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 1000), ingestion(folder / "t")
    ingest(spark, url, what)
    wanted = between("101", "401")
    with pytest.raises(CrashError):
        run_replay(spark, url, what, wanted, Once(Step.WRITING, crash, number=3))
    with create_producer(url) as producer:
        producer.send(b'{"id": 1000, "user": "late"}', shard=0)
    assert len(run_replay(spark, url, what, wanted)) == 4
    assert rows_of(folder / "t") == expected(1000, lambda _, sequence: 101 <= sequence < 401)
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
    assert rows_of(folder / "t") == expected(200, lambda _, sequence: sequence < 51)
    assert steps.count(Step.READ) == 1


@pytest.mark.slow
def test_f16_a_replay_over_a_restore_loses_nothing(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 100), ingestion(folder / "t", records=20)
    ingest(spark, url, what)
    restore = f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF 1"
    run_replay(spark, url, what, between("1", "41"), Once(Step.WRITING, lambda: spark.sql(restore)))
    ingest(spark, url, what)
    assert_each_once_filtered(folder, 100)
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


def assert_each_once_filtered(folder: Path, count: int) -> None:
    found = rows_of(folder / "t")
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
    assert rows_of(folder / "t") == expected(200), "nothing is replaced yet"
    fresh = replace(what, transform=new)
    ingest(spark, url, fresh, max_batches=1)
    assert sum(row[3] == "new" for row in rows_of(folder / "t").elements()) == 36
    ingest(spark, url, fresh)
    assert rows_of(folder / "t") == expected(200, lambda _, sequence: sequence >= 51)
    assert what.ledger().read().positions == {shard(0): 101, shard(1): 101}
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


@pytest.mark.slow
def test_rewind_with_the_id_of_one_that_is_done_does_nothing(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    ingest(spark, url, what)
    with open_batch_source(url) as source:
        assert len(rewind(spark, source, what, Bound.parse("earliest"), replay_id="run")) == 2
        ingest(spark, url, what)
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
    assert rows_of(folder / "t") == expected(200) - Counter(missing)
    with open_batch_source(url) as source:
        verdicts = verify(source, what)
    assert all(verdict.is_right for verdict in verdicts)
    assert [verdict.skipped for verdict in verdicts] == [60, 0]
    run_replay(spark, url, replace(what, transform=old), between("earliest", "latest"))
    with open_batch_source(url) as source:
        assert [verdict.skipped for verdict in verify(source, what)] == [0, 0]


def test_a_place_that_the_stream_does_not_hold_is_refused(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 40), ingestion(folder / "t")
    with pytest.raises(StreamNotFoundError, match="nothing to replay"):
        run_replay(spark, url, what, between("1", "5"))
    ingest(spark, url, what)
    with pytest.raises(InvalidOptionError, match=r"does not hold sequence 22(?s:.*)1 to 20"):
        run_replay(spark, url, what, between("1", "22"))
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
    assert rows_of(folder / "t") == expected(40, first=0)
    run_replay(spark, url, replace(what, errors=ErrorPolicy(on_data_loss="record")), between("1", "11"))
    gone = {(0, 3), (0, 5)}
    is_new = expected(40, lambda *place: 1 <= place[1] < 11 and place not in gone, first=0)
    assert rows_of(folder / "t") == is_new
    # As retention would.
    del log[:8]
    with pytest.raises(DataLossError, match=r"no longer holds all messages of the time(?s:.*)orders/0=0 to 10"):
        run_replay(spark, url, what, Replay(start=Bound.parse("2026-01-01T00:00:00Z")))
    assert rows_of(folder / "t") == is_new
    forget_memory_broker(StreamUrl.parse(url))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replay", "rewind"])
def test_dead_letters_whose_messages_are_gone_are_never_dropped(spark: SparkSession, folder: Path, way: str) -> None:
    url, what = f"memory://letters-gone-{way}/orders", ingestion(folder / "t")
    with create_producer(url) as producer:
        for index in range(40):
            bad = index in (6, 10, 12)
            producer.send(b"garbage %d" % index if bad else b'{"id": %d, "user": "u"}' % index, shard=index % 2)
    ingest(spark, url, what)
    written = letters_of(spark, what)
    assert [place for place, _ in written] == [(0, 3), (0, 5), (0, 6)]
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
