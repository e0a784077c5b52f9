"""The batch protocol on a real Spark and a real Delta table, and which way its batches go."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Step
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import MAX_ALWAYS_FULL_ITEMS
from spark_jobs.verify import verify
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import (
    DataLossError,
    SchemaMismatchError,
    SourceRecreatedError,
    SparkSessionError,
    StreamNotFoundError,
    TransformError,
)
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode, ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.command_line import run
from tests.support.ingesting import drain, entries, ingestion
from tests.support.kafka_topics import CrashError, Once, Topics, crash, orders
from tests.support.kafka_topics import assert_each_once as assert_these_once
from tests.support.ss_files import cut_front
from tests.support.steps import Steps
from tests.support.streams import assert_each_once, sequences_in_file, sequences_in_table, shard, write_stream


def test_a_file_becomes_a_table_and_its_malformed_messages_dead_letters(spark: SparkSession, folder: Path) -> None:
    bad = frozenset({3, 199})
    url, what = write_stream(folder / "orders.ss", 200, malformed=bad), ingestion(folder / "t", records=120)
    Path(what.table).mkdir(0o750)
    reports = drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert stat.S_IMODE((folder / "t_dead_letters").stat().st_mode) == 0o750, "its access is that of the table"
    assert [(r.entry.number, r.version, r.rows, r.dead) for r in reports] == [(2, 1, 119, 1), (3, 2, 79, 1)]
    assert sum(reports[-1].lag.values()) == 0
    letters = spark.read.format("delta").load(f"{folder}/t_dead_letters").collect()
    assert {(row["_shard"], row["_sequence"]) for row in letters} == {(i % 2, i // 2 + 1) for i in bad}
    assert {bytes(row["payload"]) for row in letters} == {b'{"id": '}
    assert {row["_batch"] for row in letters} == {r.entry.bid for r in reports}
    assert all(row["error"] for row in letters)
    row = spark.read.format("delta").load(f"{folder}/t").where("_shard = 1 and _sequence = 1").collect()[0]
    assert (row["id"], row["user"]) == (1, "u1")
    assert row["_timestamp"].timestamp() == 1_700_000_000.001
    assert drain(spark, url, what) == []
    write_stream(folder / "orders.ss", 90, shards=3)
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert {s.id for s in what.ledger().read().positions} == {0, 1, 2}, "a new shard is read from its beginning"


def test_latest_is_anchored_by_the_first_commit(spark: SparkSession, folder: Path) -> None:
    """And verify judges what the group has read, and refuses another stream."""
    url = write_stream(folder / "orders.ss", 50, shards=1)
    what = ingestion(folder / "t", start=AutoStreamReset.LATEST)
    assert drain(spark, url, what) == []
    assert dict(what.ledger().read().positions) == {shard(0): 51}
    write_stream(folder / "orders.ss", 5, shards=1)
    drain(spark, url, what)
    assert sequences_in_table(folder / "t") == dict.fromkeys((("orders", 0, n) for n in range(51, 56)), 1)
    with open_batch_source(url) as source:
        assert [(v.first, v.rows, v.missing, v.is_right) for v in verify(source, what)] == [(51, 5, 0, True)]
    clicks = write_clicks(folder / "clicks.ss", 3)
    with open_batch_source(clicks) as source, pytest.raises(StreamNotFoundError):
        verify(source, what)


def test_the_commit_to_the_broker_never_runs_ahead_of_the_table(spark: SparkSession, folder: Path) -> None:
    url = StreamUrl.parse("memory://ahead/orders")
    broker = memory_broker(url)
    places = [(0, number) for number in range(20)] + [(1, number) for number in range(10)]
    for place, number in places:
        broker.append(shard(place), b'{"id": %d}' % number)
    # The broker fills a batch up shard by shard.
    what = ingestion(folder / "t", records=15)

    def told() -> list[int]:
        return [broker.committed.get(("lakehouse", shard(number)), 0) for number in (0, 1)]

    def watch(step: Step, batch: Batch | None) -> None:
        positions = what.ledger().read().positions
        assert all(end <= positions.get(shard(number), 0) for number, end in enumerate(told()))
        seen.append((step, told()))

    seen: list[tuple[Step, list[int]]] = []
    drain(spark, str(url), what, watch)
    assert [ends for step, ends in seen if step is Step.VERIFIED] == [[0, 0], [15, 0]]
    assert [ends for step, ends in seen if step is Step.COMMITTED] == [[15, 0], [20, 10]]
    assert sequences_in_table(folder / "t") == {("orders", *place): 1 for place in places}
    broker.committed[("lakehouse", shard(0))] = 3
    drain(spark, str(url), what)
    assert told() == [20, 10], "the next start repairs the position at the broker"
    forget_memory_broker(url)


def test_d6_a_lost_race_is_noticed_and_planned_again(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 50, malformed=frozenset({10}))
    what = ingestion(folder / "t")
    # Between our plan and our write another run writes exactly this number.
    interfere = Once(Step.WRITING, lambda: drain(spark, url, what))
    reports = drain(spark, url, what, interfere)
    assert interfere.is_done
    assert reports == [], "the other run wrote everything; ours dropped its batch"
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")


def test_i8_dead_letters_of_a_dropped_batch_do_not_count_and_are_removed(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 20, malformed=frozenset({5}))
    what = ingestion(folder / "t", group="Marie's")
    with pytest.raises(CrashError):
        drain(spark, url, what, Once(Step.DEAD_LETTERS_WRITTEN, crash))
    assert sum(sequences_in_table(f"{folder}/t_dead_letters").values()) == 1
    assert counted_letters(spark, what) == []
    drain(spark, url, what)
    assert counted_letters(spark, what) == [(1, 3)]
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
def test_a_member_that_has_one_shard_of_a_new_stream_claims_all_of_them(spark: SparkSession, folder: Path) -> None:
    """A shard that is not in the claim counts as one that appeared later: what it no longer holds would be lost."""
    url = "memory://one-more/orders,users"
    what = replace(ingestion(folder / "t"), sharing=ConsumerMode.LOAD_BALANCED)
    broker = memory_broker(url)
    try:
        broker.append(Shard("orders"), b'{"id": 1}')
        drain(spark, url, replace(what, shard=Shard("orders")))
        for number in range(2):
            for _ in range(5):
                broker.append(Shard("users", number), b'{"id": 1}')
            # As retention would.
            del broker.messages[Shard("users", number)][: 2 + number]
        with open_batch_source(url) as source:
            assert IngestJob(spark, source, replace(what, shard=Shard("users", 1))).plan() is not None
        claim = entries(what)[-1]
        assert (claim.kind, claim.origin) == ("init", {Shard("users", 0): 2, Shard("users", 1): 3})
    finally:
        forget_memory_broker(StreamUrl.parse(url))


@pytest.mark.slow
def test_a_claim_that_was_killed_before_its_commit_does_not_block_the_next(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    # What such a claim leaves: an empty data file, and no log.
    spark.createDataFrame([], "id BIGINT").coalesce(1).write.parquet(f"{folder}/t")
    (folder / "t" / "_SUCCESS").unlink()
    drain(spark, url, ingestion(folder / "t"))
    assert_each_once(folder / "orders.ss", folder / "t")


def test_f13_a_batch_in_flight_over_a_restore_loses_nothing(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 40)
    what = ingestion(folder / "t", records=20)
    restore = f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF 0"
    restored = Once(Step.WRITING, lambda: spark.sql(restore), number=3)
    drain(spark, url, what, restored)
    assert restored.is_done
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")


def broken_transform(rows: DataFrame) -> DataFrame:
    raise KeyError("no such column")


def test_a_file_that_lost_unread_messages_is_an_error_or_recorded(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 20, shards=1)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 40, shards=1)
    cut_front(folder / "orders.ss", first=31)
    with pytest.raises(DataLossError):
        drain(spark, url, what)
    options = ("--table", what.table, "--group", what.group)
    assert [run("lag", url, *options).exit_code, run("verify", "--source", url, *options).exit_code] == [1, 1]
    (report,) = drain(spark, url, replace(what, errors=ErrorPolicy(on_data_loss="record")))
    assert (report.rows, report.entry.lost) == (30, {shard(0): Intervals.of((21, 31))})
    assert [run("lag", url, *options).exit_code, run("verify", "--source", url, *options).exit_code] == [0, 0]


def test_a_transform_that_raises_names_itself_and_leaves_the_batch(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    with pytest.raises(TransformError, match="'broken_transform' raised KeyError"):
        drain(spark, url, ingestion(folder / "t", transform=broken_transform))
    drain(spark, url, ingestion(folder / "t"))
    assert_each_once(folder / "orders.ss", folder / "t")


def _moved(rows: DataFrame, *, place: str) -> DataFrame:
    return rows.withColumn("_sequence", f.expr(place))


@pytest.mark.parametrize(
    "malformed",
    [pytest.param(frozenset(), id="one pass"), pytest.param(frozenset({3}), id="read first", marks=pytest.mark.slow)],
)
def test_a_row_with_the_place_of_another_message_leaves_the_batch(
    malformed: frozenset[int], spark: SparkSession, folder: Path
) -> None:
    url = write_stream(folder / "orders.ss", 20, malformed=malformed)
    what = ingestion(folder / "t", records=10)
    for place in ("_sequence + 8", "IF(_sequence < 8, _sequence, NULL)"):
        moved = replace(what, transform=partial(_moved, place=place))
        with pytest.raises(TransformError) as raised:
            drain(spark, url, moved)
        assert re.search(r"no message of this batch at orders [01] (\d+|null)", raised.value.detail)
        assert "Keep _stream, _shard and _sequence" in raised.value.remedy
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")


MISFITS = [
    ({"decoder": Json("id STRING, user STRING")}, "id is string but bigint in the table"),
    ({"decoder": Json("id BIGINT, user STRING, x INT")}, "x is not in the table"),
    ({"transform": lambda rows: rows.drop("_shard")}, "drops _shard"),
    ({"decoder": Json("_shard BIGINT")}, "uses names of .*: _shard"),
    ({"decoder": Json("_Shard BIGINT")}, "uses names of .*: _Shard"),
    ({"decoder": Json("_tmp_metadata_row_index BIGINT")}, "uses names of .*: _tmp_metadata_row_index"),
    ({"decoder": Json("id BIGINT, Id INT")}, "the column 'Id' occurs twice"),
    ({"decoder": Json("id MAP<INT, INT>")}, "id is a MAP with keys that are int32"),
]


def test_a_schema_that_does_not_fit_is_refused_before_anything_is_read(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 10)
    for change, problem in MISFITS:
        with pytest.raises(SchemaMismatchError, match=problem):
            drain(spark, url, replace(what, **change))
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
def test_a_file_that_vanishes_after_the_plan_leaves_everything_resumable(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    hidden = folder / "hidden.ss"
    vanish = Once(Step.PLANNED, lambda: (folder / "orders.ss").rename(hidden))
    with pytest.raises(StreamNotFoundError):
        drain(spark, url, ingestion(folder / "t"), vanish)
    hidden.rename(folder / "orders.ss")
    drain(spark, url, ingestion(folder / "t"))
    assert_each_once(folder / "orders.ss", folder / "t")


def write_clicks(file: Path, count: int) -> str:
    url = f"file://{file}/clicks"
    with create_producer(url) as producer:
        for index in range(count):
            producer.send(b'{"id": %d}' % index)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("group", ["lakehouse", "other"])
def test_two_streams_share_a_table_without_noticing_each_other(spark: SparkSession, folder: Path, group: str) -> None:
    orders = write_stream(folder / "orders.ss", 20)
    clicks = write_clicks(folder / "clicks.ss", 30)
    drain(spark, orders, ingestion(folder / "t", records=7))
    drain(spark, clicks, ingestion(folder / "t", group=group, records=11))
    # What the group noted last is of the other file: its hint and its identity must not be taken for this one's.
    write_stream(folder / "orders.ss", 20)
    drain(spark, orders, ingestion(folder / "t"))
    write_clicks(folder / "clicks.ss", 5)
    drain(spark, clicks, ingestion(folder / "t", group=group))
    wanted = sequences_in_file(folder / "orders.ss") | sequences_in_file(folder / "clicks.ss")
    assert sequences_in_table(folder / "t") == dict.fromkeys(wanted, 1)
    (folder / "orders.ss").unlink()
    write_stream(folder / "orders.ss", 90)
    with pytest.raises(SourceRecreatedError):
        drain(spark, orders, ingestion(folder / "t"))


@pytest.mark.slow
def test_a_run_that_another_one_overtook_beyond_its_frozen_end_just_ends(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 40)
    what = ingestion(folder / "t", records=20)

    def overtake() -> None:
        write_stream(folder / "orders.ss", 60, shards=3)
        drain(spark, url, what)

    overtaken = Once(Step.WRITING, overtake)
    assert drain(spark, url, what, overtaken) == []
    assert overtaken.is_done
    assert_each_once(folder / "orders.ss", folder / "t")


def counted_letters(spark: SparkSession, what: Ingestion) -> list[tuple[int, int]]:
    letters = what.dead_letters().counted(spark, what.ledger())
    assert letters is not None
    return sorted((row["_shard"], row["_sequence"]) for row in letters.collect())


@pytest.mark.slow
def test_i8_dead_letters_count_once_over_restores_back_and_forth(spark: SparkSession, folder: Path) -> None:
    """And, F5, rows that are doubled by a RESTORE under a batch are replaced, and bring their own dead letters."""
    url = write_stream(folder / "orders.ss", 40, malformed=frozenset({2, 30}))
    what = ingestion(folder / "t", records=20)

    def restore(version: int) -> None:
        spark.sql(f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF {version}")

    drain(spark, url, what)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)]
    restore(1)
    assert counted_letters(spark, what) == [(0, 2)], "the restore took the second batch away"
    drain(spark, url, what)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)]
    restore(2)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)], "the first reading of the second batch is back"
    restore(1)
    drain(spark, url, what, Once(Step.WRITING, lambda: restore(2)))
    drain(spark, url, what)
    assert "replace" in {entry.mode for entry in entries(what)}
    rows = {("orders", n % 2, n // 2 + 1) for n in range(40) if n not in (2, 30)}
    assert sequences_in_table(folder / "t") == dict.fromkeys(rows, 1)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)]
    with open_batch_source(url) as source:
        assert [(v.is_right, v.dead) for v in verify(source, what)] == [(True, 2), (True, 0)]


def test_a_session_without_delta_is_refused_with_the_settings_it_lacks(spark: SparkSession, folder: Path) -> None:
    bare = spark.newSession()
    url = write_stream(folder / "orders.ss", 1)

    class Stripped:
        """A session whose settings lack Delta: one cannot be made beside a running one."""

        class conf:  # noqa: N801
            @staticmethod
            def get(name: str, default: str = "") -> str:
                return default

    with open_batch_source(url) as source, pytest.raises(SparkSessionError, match=r"spark\.sql\.extensions"):
        IngestJob(Stripped, source, ingestion(folder / "t"))  # type: ignore[arg-type]
    drain(bare, url, ingestion(folder / "t"))


Transform = Callable[[DataFrame], DataFrame]


def test_each_batch_goes_the_way_that_the_one_before_it_suggests(spark: SparkSession, folder: Path) -> None:
    """The second one has a dead letter, so that the third one is not tried, and a new run begins as the ledger says."""
    url = write_stream(folder / "orders.ss", 80, malformed=frozenset({39}))
    what, steps, again = ingestion(folder / "t", records=20), Steps(), Steps()
    drain(spark, url, what, steps)
    assert steps.ways() == ["one", "both", "careful", "one"]
    assert_each_once(folder / "orders.ss", folder / "t")
    written = [entry for entry in entries(what) if entry.kind == "batch"]
    assert [(entry.messages, entry.dead) for entry in written] == [(20, 0), (19, 1), (20, 0), (20, 0)]
    assert [entry.number for entry in written] == [2, 3, 4, 5], "a try takes no number"
    write_stream(folder / "orders.ss", 20, malformed=frozenset({19}))
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 20)
    drain(spark, url, what, again)
    assert again.ways() == ["careful"]
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
def test_batches_whose_entries_say_only_what_is_new_go_in_one_pass(spark: SparkSession, folder: Path) -> None:
    """Of many shards most entries do not name the stream once more."""
    url = write_stream(folder / "orders.ss", 2 * MAX_ALWAYS_FULL_ITEMS, shards=MAX_ALWAYS_FULL_ITEMS + 8)
    what, steps = ingestion(folder / "t", records=MAX_ALWAYS_FULL_ITEMS // 2), Steps()
    drain(spark, url, what, steps)
    assert not all(entry.is_full for entry in entries(what))
    assert set(steps.ways()) == {"one"}
    assert_each_once(folder / "orders.ss", folder / "t")


def stops_early(rows: DataFrame) -> DataFrame:
    def first(blocks: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for block in blocks:
            yield block.head(1)
            return

    return rows.mapInPandas(first, rows.schema)


def joined_with_nothing(rows: DataFrame) -> DataFrame:
    return rows.join(rows.sparkSession.createDataFrame([], "id BIGINT"), "id")


def plus_one(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
    return None if number is None else number + 1


TRANSFORMS: dict[str, tuple[Transform, bool]] = {
    "where false": (lambda rows: rows.where("false"), False),
    "join with an empty table": (joined_with_nothing, False),
    "a function that stops early": (stops_early, False),
    "where": (lambda rows: rows.where("id % 2 = 0"), True),
    "function": (lambda rows: rows.withColumn("id", f.udf(plus_one, "bigint")("id")), True),
    "explode": (lambda rows: rows.withColumn("id", f.explode(f.array("id", f.lit(-1)))), True),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "where" else pytest.param(name, marks=pytest.mark.slow) for name in TRANSFORMS],
)
def test_no_transform_lets_a_dead_letter_pass_unseen(name: str, spark: SparkSession, folder: Path) -> None:
    transform, is_row_wise = TRANSFORMS[name]
    url = write_stream(folder / "orders.ss", 100, shards=1, malformed=frozenset({99}))
    steps, committed = Steps(), list[Batch | None]()

    def watch(step: Step, batch: Batch | None) -> None:
        steps(step, batch)
        committed.extend([batch] if step is Step.COMMITTED else [])

    what = replace(ingestion(folder / "t", transform=transform), is_row_wise=is_row_wise)
    (report,) = drain(spark, url, what, watch)
    assert steps.ways() == ["both" if is_row_wise else "careful"]
    assert [batch and batch.bid for batch in committed] == [report.entry.bid], "the batch as it was written"
    assert (report.dead, sum(report.messages.values())) == (1, 99)
    assert sequences_in_table(f"{folder}/t_dead_letters") == {("orders", 0, 100): 1}


@pytest.mark.slow
def test_a_topic_recreated_in_the_middle_is_not_written(topics: Topics) -> None:
    """With just as many messages, so that only the identity tells."""
    topic, what = topics.filled(orders(10))

    def recreate() -> None:
        topics.recreate(topic)
        topics.send(topic, orders(10, first=100))

    steps = Steps()
    recreated = Once(Step.WRITING, recreate)

    def watch(step: Step, batch: Batch | None) -> None:
        recreated(step, batch)
        steps(step, batch)

    with pytest.raises(SourceRecreatedError):
        what.drain(watch)
    assert steps.ways() == ["both"]
    assert what.rows() == {}


@pytest.mark.slow
def test_a_topic_with_holes_is_tried_once_a_run(topics: Topics) -> None:
    topic = topics.create()
    topics.commit(topic, 5)
    topics.commit(topic, 4)
    assert topics.end(topic) == 11, "9 messages and 2 markers"
    what, steps, later = topics.pipeline(topic), Steps(), Steps()
    (report,) = what.drain(steps)
    assert (steps.ways(), dict(report.messages)) == (["both"], {Shard(topic): 9})
    topics.commit(topic, 3)
    what.drain(later)
    assert later.ways() == ["careful"]
    assert [entry.messages for entry in entries(what.ingestion) if entry.kind == "batch"] == [9, 3]
    assert_these_once(what.rows(), topics.messages(topic))
