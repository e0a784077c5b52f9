"""The batch protocol on a real Spark and a real Delta table."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Step
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.verify import verify
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import (
    DataLossError,
    InvalidOptionError,
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
from tests.support.kafka_topics import CrashError, Once, crash
from tests.support.ss_files import cut_front
from tests.support.streams import assert_each_once, sequences_in_file, sequences_in_table, shard, write_stream

pytestmark = pytest.mark.spark


def test_a_file_becomes_a_table_and_its_malformed_messages_dead_letters(spark: SparkSession, folder: Path) -> None:
    bad = frozenset({3, 500, 999})
    url = write_stream(folder / "orders.ss", 1000, malformed=bad)
    reports = drain(spark, url, ingestion(folder / "t", records=400))
    assert_each_once(folder / "orders.ss", folder / "t")
    assert [(r.entry.number, r.version, r.dead) for r in reports] == [(2, 1, 1), (3, 2, 1), (4, 3, 1)]
    assert sum(r.rows for r in reports) == 997
    assert sum(reports[-1].lag.values()) == 0
    letters = spark.read.format("delta").load(f"{folder}/t_dead_letters").collect()
    assert {(row["_shard"], row["_sequence"]) for row in letters} == {(i % 2, i // 2 + 1) for i in bad}
    assert {bytes(row["payload"]) for row in letters} == {b'{"id": '}
    assert {row["_batch"] for row in letters} == {r.entry.bid for r in reports}
    assert all(row["error"] for row in letters)
    row = spark.read.format("delta").load(f"{folder}/t").where("_shard = 1 and _sequence = 1").collect()[0]
    assert (row["id"], row["user"]) == (1, "u1")
    assert row["_timestamp"].timestamp() == 1_700_000_000.001
    assert drain(spark, url, ingestion(folder / "t")) == []


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


def test_what_is_appended_later_is_read_once_and_new_shards_from_their_beginning(
    spark: SparkSession, folder: Path
) -> None:
    url = write_stream(folder / "orders.ss", 100)
    drain(spark, url, ingestion(folder / "t"))
    write_stream(folder / "orders.ss", 90, shards=3)
    drain(spark, url, ingestion(folder / "t"))
    assert_each_once(folder / "orders.ss", folder / "t")
    assert {s.id for s in ingestion(folder / "t").ledger().read().positions} == {0, 1, 2}


def test_latest_is_anchored_by_the_first_commit(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 50, shards=1)
    what = ingestion(folder / "t", start=AutoStreamReset.LATEST)
    assert drain(spark, url, what) == []
    assert dict(what.ledger().read().positions) == {shard(0): 51}
    write_stream(folder / "orders.ss", 5, shards=1)
    drain(spark, url, what)
    assert sequences_in_table(folder / "t") == dict.fromkeys((("orders", 0, n) for n in range(51, 56)), 1)


def test_memory_streams_are_ingested_and_told_where_the_group_is(spark: SparkSession, folder: Path) -> None:
    url = StreamUrl.parse("memory://ingest/orders")
    broker = memory_broker(url)
    for index in range(30):
        broker.append(shard(index % 3), b'{"id": %d}' % index)
    drain(spark, str(url), ingestion(folder / "t", records=7))
    assert set(sequences_in_table(folder / "t").values()) == {1}
    assert len(sequences_in_table(folder / "t")) == 30
    assert broker.committed == {("lakehouse", shard(n)): 10 for n in range(3)}
    broker.committed[("lakehouse", shard(0))] = 3
    drain(spark, str(url), ingestion(folder / "t"))
    assert broker.committed[("lakehouse", shard(0))] == 10, "the next start repairs what the broker was told"
    forget_memory_broker(url)


def test_the_commit_to_the_broker_never_runs_ahead_of_the_table(spark: SparkSession, folder: Path) -> None:
    url = StreamUrl.parse("memory://ahead/orders")
    broker = memory_broker(url)
    for index in range(20):
        broker.append(shard(0), b'{"id": %d}' % index)
    what = ingestion(folder / "t", records=10)

    def watch(step: Step, batch: Batch | None) -> None:
        covered = what.ledger().read().positions.get(shard(0), 0)
        assert broker.committed.get(("lakehouse", shard(0)), 0) <= covered
        seen.append((step, broker.committed.get(("lakehouse", shard(0)), 0)))

    seen: list[tuple[Step, int]] = []
    drain(spark, str(url), what, watch)
    assert [end for step, end in seen if step is Step.VERIFIED] == [0, 10]
    assert [end for step, end in seen if step is Step.COMMITTED] == [10, 20]
    forget_memory_broker(url)


def test_d6_a_lost_race_is_noticed_and_planned_again(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 100, malformed=frozenset({10, 60}))
    what = ingestion(folder / "t", records=40)
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


def double_and_repair(spark: SparkSession, url: str, what: Ingestion) -> None:
    """Drain; restore away the second batch, and back while it is being written again; drain what that leaves."""
    drain(spark, url, what)
    spark.sql(f"RESTORE TABLE delta.`{what.table}` TO VERSION AS OF 1")
    restore = f"RESTORE TABLE delta.`{what.table}` TO VERSION AS OF 2"
    drain(spark, url, what, Once(Step.WRITING, lambda: spark.sql(restore)))
    drain(spark, url, what)


def test_a_file_cut_below_the_position_is_an_error(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 50)
    whole = (folder / "orders.ss").read_bytes()
    drain(spark, url, ingestion(folder / "t"))
    (folder / "orders.ss").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceRecreatedError, match="position=26"):
        drain(spark, url, ingestion(folder / "t"))


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
    for place in ("_sequence + 8", "_sequence * 0", "IF(_sequence < 8, _sequence, NULL)"):
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
    ({"decoder": Json("_shard BIGINT")}, "uses names of stream-assets: _shard"),
    ({"decoder": Json("_Shard BIGINT")}, "uses names of stream-assets: _Shard"),
    ({"decoder": Json("id BIGINT, Id INT")}, "the column 'Id' is there twice"),
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


def test_a_file_that_vanishes_after_the_plan_leaves_everything_resumable(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    hidden = folder / "hidden.ss"
    vanish = Once(Step.PLANNED, lambda: (folder / "orders.ss").rename(hidden))
    with pytest.raises(StreamNotFoundError, match="there is no file"):
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
    with pytest.raises(SourceRecreatedError, match="stream-assets accept"):
        drain(spark, orders, ingestion(folder / "t"))


def test_a_second_group_for_the_same_stream_and_table_is_refused(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 20)
    drain(spark, url, ingestion(folder / "t"))
    with pytest.raises(InvalidOptionError, match="group 'lakehouse' already writes"):
        drain(spark, url, ingestion(folder / "t", group="other"))
    assert_each_once(folder / "orders.ss", folder / "t")


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
    url = write_stream(folder / "orders.ss", 40, malformed=frozenset({2, 30}))
    what = ingestion(folder / "t", records=20)
    drain(spark, url, what)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)]
    spark.sql(f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF 1")
    assert counted_letters(spark, what) == [(0, 2)], "the restore took the second batch away"
    drain(spark, url, what)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)]
    spark.sql(f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF 2")
    assert counted_letters(spark, what) == [(0, 2), (0, 16)], "the first reading of the second batch is back"
    drain(spark, url, what)
    with open_batch_source(url) as source:
        assert [(v.missing, v.duplicated, v.unknown, v.dead) for v in verify(source, what)] == [
            (0, 0, 0, 2),
            (0, 0, 0, 0),
        ]


@pytest.mark.slow
def test_f5_rows_doubled_by_restores_are_replaced_and_i8_bring_their_own_dead_letters(
    spark: SparkSession, folder: Path
) -> None:
    url = write_stream(folder / "orders.ss", 40, malformed=frozenset({2, 30}))
    what = ingestion(folder / "t", records=20)
    double_and_repair(spark, url, what)
    assert "replace" in {entry.mode for entry in entries(what)}
    rows = {("orders", n % 2, n // 2 + 1) for n in range(40) if n not in (2, 30)}
    assert sequences_in_table(folder / "t") == dict.fromkeys(rows, 1)
    assert counted_letters(spark, what) == [(0, 2), (0, 16)]
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


def test_verify_judges_what_the_group_has_read_and_refuses_another_stream(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 50, shards=1)
    what = ingestion(folder / "t", start=AutoStreamReset.LATEST)
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 5, shards=1)
    drain(spark, url, what)
    with open_batch_source(url) as source:
        assert [(v.first, v.rows, v.missing, v.is_right) for v in verify(source, what)] == [(51, 5, 0, True)]
    clicks = write_clicks(folder / "clicks.ss", 3)
    with open_batch_source(clicks) as source, pytest.raises(StreamNotFoundError, match="has written nothing of"):
        verify(source, what)


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
