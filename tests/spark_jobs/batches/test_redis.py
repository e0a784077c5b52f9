"""Redis Streams into Delta by position, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingest_job import _hint_after
from spark_jobs.batches.ingestion import Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.decoders import Raw
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.reading.rejection import reject
from spark_jobs.verify import verify
from spark_jobs.writing.keyed import Keys
from stream_consumers.batches import PositionFacts, Range, Resume, position_facts_in
from stream_consumers.create import StreamSource
from stream_consumers.errors import AccessDeniedError, DataLossError, SourceRecreatedError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ErrorPolicy, Limits
from stream_consumers.redis.entries import to_sequence
from stream_consumers.urls import StreamUrl
from tests.support.kafka_topics import Once
from tests.support.redis_server import redis_server
from tests.support.redis_tables import Stream
from tests.support.streams import sequences_in_table

RECORD = ErrorPolicy(on_data_loss="record")


@pytest.fixture
def stream(redis_address: str, folder: Path) -> Iterator[Stream]:
    made = Stream(redis_address, folder)
    yield made
    made.client.close()


def test_a_stream_becomes_a_table_and_its_group_is_told(spark: SparkSession, stream: Stream) -> None:
    stream.add(100)
    reports = stream.drain(spark, stream.ingestion(30))
    assert [sum(report.messages.values()) for report in reports] == [30, 30, 30, 10]
    assert stream.rows() == stream.there()
    ends = [stream.client.xinfo_stream(key)["last-generated-id"] for key in stream.keys]
    assert stream.groups() == [(end, 0, 0) for end in ends]
    stream.add(7)
    assert [lag for _, lag, _ in stream.groups()] == [4, 3], "Redis' own lag is right"
    with stream.source.open() as source:
        verdicts = verify(source, stream.ingestion())
    assert all(verdict.is_right for verdict in verdicts)
    assert sum(verdict.lag > 0 for verdict in verdicts) == 2


@pytest.mark.slow
@pytest.mark.parametrize("records", [2, 1000])
def test_entries_deleted_unread_are_a_loss_though_older_ones_stay(
    spark: SparkSession, redis_address: str, folder: Path, records: int
) -> None:
    stream = Stream(redis_address, folder, shards=1)
    (key,) = stream.keys
    stream.add(4)
    stream.client.xdel(key, stream.entry_ids()[1])
    stream.drain(spark)
    assert len(stream.rows()) == 3, "what was deleted before the group began is no loss of its"
    stream.client.xdel(key, stream.entry_ids()[0])
    stream.add(6)
    stream.drain(spark, stream.ingestion(records))
    assert len(stream.rows()) == 3 + 6, "nor is what was read"
    stream.add(6)
    gone = stream.entry_ids()[-2]
    stream.client.xdel(key, gone)
    with pytest.raises(DataLossError) as error:
        stream.drain(spark, stream.ingestion(records))
    assert str(to_sequence(gone)) in error.value.facts[f"{stream.name}/0"]
    reports = stream.drain(spark, stream.ingestion(records, errors=RECORD))
    (lost,) = (report.entry.lost for report in reports if report.entry.lost)
    assert [list(parts) for parts in lost.values()] == [[Range(to_sequence(gone), to_sequence(gone) + 1)]]
    assert len(stream.rows()) == 9 + 5
    stream.add(2)
    stream.drain(spark, stream.ingestion(records))
    assert len(stream.rows()) == 14 + 2, "it is accounted for"


@pytest.mark.parametrize("mode", ["resumable", pytest.param("load_balanced", marks=pytest.mark.slow)])
def test_an_entry_without_one_message_is_a_dead_letter_and_other_fields_are_headers(
    spark: SparkSession, redis_address: str, folder: Path, mode: str
) -> None:
    stream = Stream(redis_address, folder, shards=1, mode=mode)
    for words in (["other", "x"], ["msg", "1", "msg", "2"], ["a", "1", "msg", "x", "a", "2", b"\xff", b"\xfe"]):
        stream.client.execute_command("XADD", stream.name, "*", *words)
    (report,) = stream.drain(spark, stream.ingestion(decoder=Raw()))
    assert (report.rows, report.dead) == (1, 2)
    stream.assert_each_once()
    letters = DeltaTable(f"{stream.table}_dead_letters").to_pyarrow_table().to_pylist()
    errors = sorted(letter["error"] for letter in letters)
    assert errors == ["the entry has no field 'msg'", "the field 'msg' occurs 2 times"]
    (row,) = DeltaTable(stream.table).to_pyarrow_table().to_pylist()
    assert row["payload"] == b"x"
    fields = [("a", b"1"), ("a", b"2"), ("\\xff", b"\xfe")]
    assert [(pair["name"], pair["value"]) for pair in row["headers"]] == fields


def test_what_was_trimmed_before_it_was_read_is_told_or_recorded(spark: SparkSession, stream: Stream) -> None:
    stream.add(20)
    stream.drain(spark)
    stream.add(20)
    for key in stream.keys:
        stream.client.xtrim(key, maxlen=4, approximate=False)
    with pytest.raises(DataLossError):
        stream.drain(spark)
    (report,) = stream.drain(spark, stream.ingestion(errors=RECORD))
    assert sum(report.messages.values()) == 8
    assert len(report.entry.lost) == 2
    assert stream.there() <= stream.rows()
    assert stream.drain(spark) == []


@pytest.mark.slow
def test_what_is_trimmed_after_it_was_read_is_no_loss(spark: SparkSession, stream: Stream) -> None:
    stream.add(20)
    stream.drain(spark, stream.ingestion(12))
    for key in stream.keys:
        stream.client.xtrim(key, maxlen=0, approximate=False)
    assert stream.drain(spark) == []
    stream.add(6)
    (report,) = stream.drain(spark)
    assert sum(report.messages.values()) == 6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_what_is_lost_between_batches_is_told(spark: SparkSession, redis_address: str, folder: Path, how: str) -> None:
    stream = Stream(redis_address, folder, shards=1)
    (key,) = stream.keys
    stream.add(30)
    ids = stream.entry_ids()
    remove = {
        "trimmed": lambda: stream.client.xtrim(key, maxlen=5, approximate=False),
        "deleted": lambda: stream.client.xdel(key, ids[12], ids[24]),
    }[how]
    with pytest.raises(DataLossError):
        stream.drain(spark, stream.ingestion(10), Once(Step.COMMITTED, remove))
    assert len(stream.rows()) == 10
    with pytest.raises(DataLossError):
        stream.drain(spark, stream.ingestion(10))
    reports = stream.drain(spark, stream.ingestion(10, errors=RECORD))
    (lost,) = (report.entry.lost for report in reports if report.entry.lost)
    (part,) = lost[Shard(stream.name)]
    gone = {to_sequence(entry_id) for entry_id in ids[10:]} - {sequence for *_, sequence in stream.there()}
    assert min(gone) >= part.start
    assert max(gone) < part.end
    assert stream.there() <= stream.rows()
    stream.add(2, first=30)
    assert [report.entry.lost for report in stream.drain(spark)] == [{}]


@pytest.mark.slow
def test_what_is_gone_during_a_run_is_recorded_by_it(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=1)
    stream.add(30)
    trim = Once(Step.COMMITTED, lambda: stream.client.xtrim(stream.name, maxlen=5, approximate=False))
    reports = stream.drain(spark, stream.ingestion(10, errors=RECORD), trim)
    assert [(report.rows, bool(report.entry.lost)) for report in reports] == [(10, False), (5, True)]


@pytest.mark.slow
def test_the_last_entry_may_be_deleted_after_it_was_read(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=1)
    stream.add(20)
    delete = Once(Step.COMMITTED, lambda: stream.client.xdel(stream.name, stream.entry_ids()[9]))
    assert [report.rows for report in stream.drain(spark, stream.ingestion(10), delete)] == [10, 10]


@pytest.mark.slow
def test_what_is_gone_after_moves_or_restores_is_noticed(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=1)
    stream.add(5)
    latest = stream.ingestion(10, start=AutoStreamReset.LATEST)
    recording = replace(latest, errors=RECORD)
    assert stream.drain(spark, latest) == []

    def lose(count: int) -> list[Range]:
        """The stream loses the older ones of these entries: an error, or what is recorded."""
        stream.add(count)
        stream.client.xtrim(stream.name, maxlen=count - 3, approximate=False)
        with pytest.raises(DataLossError):
            stream.drain(spark, latest)
        return [part for report in stream.drain(spark, recording) for part in report.entry.lost[Shard(stream.name)]]

    def in_table() -> int:
        return sequences_in_table(stream.table).total()

    assert len(lose(8)) == 1
    assert in_table() == 5

    stream.add(4)
    with stream.source.open() as source:
        rewind(spark, source, latest, Bound.parse("latest"))
    assert len(lose(7)) == 1
    assert in_table() == 5 + 4

    (version,) = DeltaLog(str(stream.table)).newest_versions()[:1]
    stream.add(10)
    stream.drain(spark, latest)
    assert in_table() == 9 + 10
    spark.sql(f"RESTORE TABLE delta.`{stream.table}` TO VERSION AS OF {version}")
    stream.client.xtrim(stream.name, maxlen=6, approximate=False)
    with pytest.raises(DataLossError):
        stream.drain(spark, latest)
    reports = stream.drain(spark, recording)
    assert [(report.rows, len(report.entry.lost)) for report in reports] == [(6, 1)]


def test_a_stream_that_is_added_empty_loses_nothing_in_silence(
    spark: SparkSession, redis_address: str, folder: Path
) -> None:
    stream = Stream(redis_address, folder, shards=1)
    stream.add(2)
    stream.drain(spark)
    added = f"{stream.name}-added"
    stream.client.xadd(added, {"msg": b"{}"})
    stream.client.xtrim(added, maxlen=0)
    stream.url += f",{added}"
    assert stream.drain(spark) == []
    ids = [stream.client.xadd(added, {"msg": b"{}"}) for _ in range(5)]
    (version,) = DeltaLog(str(stream.table)).newest_versions()[:1]
    stream.drain(spark)
    stream.client.xtrim(added, maxlen=3, approximate=False)
    assert stream.drain(spark) == []
    spark.sql(f"RESTORE TABLE delta.`{stream.table}` TO VERSION AS OF {version}")
    with pytest.raises(DataLossError):
        stream.drain(spark)
    (report,) = stream.drain(spark, stream.ingestion(errors=RECORD))
    (lost,) = report.entry.lost[Shard(added)]
    assert (report.rows, lost.end) == (3, to_sequence(ids[2]))


def test_the_count_behind_a_hole_is_that_after_it_is_filled(redis_address: str, folder: Path) -> None:
    """A batch landed after a RESTORE had removed those before it."""
    stream = Stream(redis_address, folder, shards=1)
    stream.add(6)
    own, ids = Shard(stream.name), [to_sequence(entry_id) for entry_id in stream.entry_ids()]
    hole, covered = Range(0, ids[2]), {own: Intervals.of((ids[2], ids[4]))}
    with stream.source.open() as source:
        source.extents(resume=Resume({own: 0}))
        plan = source.plan({own: hole}, limits=Limits(), parallelism=1)
        assert plan is not None
        covered[own] |= Intervals.of((MIN_SEQUENCE, 0))
        hint = _hint_after(source, plan, covered)
        assert position_facts_in(hint) == {own: (ids[4], PositionFacts(4, 0, 0))}
        plan = source.plan({own: Range(ids[4], ids[5])}, limits=Limits(), parallelism=1)
        assert plan is not None
        assert _hint_after(source, plan, {own: Intervals.of((MIN_SEQUENCE, ids[4]))}) == plan.hint


def test_what_is_trimmed_between_plan_and_read_is_told(spark: SparkSession, stream: Stream) -> None:
    stream.add(20)

    def trim() -> None:
        for key in stream.keys:
            stream.client.xtrim(key, maxlen=1, approximate=False)

    with pytest.raises(DataLossError):
        stream.drain(spark, observer=Once(Step.PLANNED, trim))
    assert stream.rows() == set()


def test_a_stream_made_anew_with_lower_ids_is_told(spark: SparkSession, stream: Stream) -> None:
    stream.add(4)
    stream.drain(spark)
    for key in stream.keys:
        stream.client.delete(key)
        stream.client.xadd(key, {"msg": "{}"}, id="1-0")
    with pytest.raises(SourceRecreatedError):
        stream.drain(spark)


def test_what_another_client_left_pending_is_read_and_acknowledged(spark: SparkSession, stream: Stream) -> None:
    stream.add(10)
    for key in stream.keys:
        stream.client.xgroup_create(key, stream.group, id="0")
        stream.client.xreadgroup(stream.group, "somebody", {key: ">"}, count=3)
    stream.drain(spark)
    assert stream.rows() == stream.there()
    assert [pending for *_, pending in stream.groups()] == [0, 0]


def test_a_password_that_is_wrong(spark: SparkSession, folder: Path) -> None:
    with redis_server(folder, "--requirepass", "hunter2") as address:
        source = StreamSource(StreamUrl.parse(f"redis://{address}/orders"), client={"password": "wrong-one"})
        with source.open() as opened, pytest.raises(AccessDeniedError) as refused:
            opened.extents()
        assert "wrong-one" not in str(refused.value) + repr(source)
        right = StreamSource(StreamUrl.parse(f"redis://{address}/orders"), client={"password": "hunter2"})
        with right.open() as opened:
            assert opened.extents() == {}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["held", "trimmed", "deleted"])
def test_a_redrive_in_the_order_of_positions_needs_all_later_entries(
    spark: SparkSession, redis_address: str, folder: Path, how: str
) -> None:
    """The dead letter is an update of a key that a later entry deletes."""
    stream = Stream(redis_address, folder, shards=1)
    users = [(1, "new"), (2, "b"), (1, "deletes"), (4, "e")]
    stream.add(4, payload=lambda at: b'{"id": %d, "user": "%s"}' % (users[at][0], users[at][1].encode()))
    keys = Keys(["id"], apply_as_deletes="user = 'deletes'")
    strict = stream.ingestion(keys=keys, transform=lambda rows: reject(rows, "user = 'new'", "a test"))
    assert [report.dead for report in stream.drain(spark, strict)] == [1]
    second, third = stream.entry_ids()[1:3]
    if how == "trimmed":
        stream.client.xtrim(stream.name, maxlen=1, approximate=False)
    if how == "deleted":
        stream.client.xdel(stream.name, third)
    today = replace(strict, transform=None)
    job = RedriveJob(spark, today, Redrive(), url=StreamUrl.parse(stream.url))
    list(drain_batches(job))
    if how == "held":
        assert (job.outcome.decoded, job.outcome.dead) == (1, 0)
        stream.client.xdel(stream.name, third)
        with pytest.raises(DataLossError):
            stream.drain(spark, today)
        return
    assert (job.outcome.decoded, job.outcome.dead) == (0, 1)
    assert stream.drain(spark, today) == []
    assert {row["id"] for row in spark.read.format("delta").load(str(stream.table)).collect()} == {2, 4}
    if how == "deleted":
        with stream.source.open() as source:
            with pytest.raises(DataLossError):
                rewind(spark, source, today, Bound.parse("earliest"))
            until = Replay(stop=Bound.at_sequences({f"{stream.name}/0": to_sequence(second)}))
            with pytest.raises(DataLossError):
                ReplayJob(spark, source, today, until).plan()
