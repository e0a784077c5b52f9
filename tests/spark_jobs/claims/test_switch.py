"""Switching a Redis group between positions and claims: what was on its way on the other side never doubles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs import mode_switch as sharing
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Step
from spark_jobs.claims.claim_job import ClaimJob
from spark_jobs.ledger.entries import CLAIMS
from spark_jobs.mode_switch import switch_sharing
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource
from stream_consumers.errors import DataLossError, GroupActiveError, InvalidOptionError, SourceRecreatedError
from stream_consumers.options import ConsumerMode, ErrorPolicy
from stream_consumers.redis.entries import to_sequence
from stream_consumers.redis.group import CLAIM_MODE_SENTINEL
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import run_batch
from tests.support.kafka_topics import CrashError, Once, crash
from tests.support.redis_tables import Stream


@pytest.fixture
def stream(redis_address: str, folder: Path) -> Iterator[Stream]:
    made = Stream(redis_address, folder)
    made.add(20)
    yield made
    made.client.close()


def switch(spark: SparkSession, stream: Stream, to: str) -> bool:
    source = StreamSource(StreamUrl.parse(stream.url), client=stream.options)
    with source.open() as opened, source.claims(stream.group) as claims:
        changed = switch_sharing(spark, stream.ingestion(), to=ConsumerMode(to), source=opened, claims=claims)
    stream.mode = ConsumerMode(to)
    return changed


def even(batch: DataFrame) -> DataFrame:
    return batch.where("id % 2 = 0")


def test_a_batch_by_position_that_is_on_its_way_never_lands_after_a_switch(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark)
    stream.add(20, first=20)
    with stream.source.open() as opened:
        job = IngestJob(spark, opened, stream.ingestion())
        batch = job.plan()
        assert batch is not None
        assert switch(spark, stream, "load_balanced")
        stream.drain(spark, max_batches=1)
        assert run_batch(job, batch) is None
        opened.commit(stream.group, stream.ingestion().ledger().read().positions)
        with pytest.raises(InvalidOptionError, match="load_balanced by claims"):
            job.plan()
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.slow
def test_claims_that_are_on_their_way_stop_a_switch(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    stream.add(20, first=20)
    with stream.source.claims(stream.group) as claims:
        job = ClaimJob(spark, claims, stream.ingestion(claims=True))
        batch = job.plan()
        assert batch is not None
        with pytest.raises(GroupActiveError, match="20 pending"):
            switch(spark, stream, "resumable")
        assert run_batch(job, batch) is not None
    assert switch(spark, stream, "resumable")
    stream.add(4, first=40)
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["load_balanced", "resumable"])
def test_switches_are_run_again(spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    other = "resumable" if to == "load_balanced" else "load_balanced"
    stream.mode = ConsumerMode(other)
    stream.drain(spark)
    fence, steps = sharing._fence, 2 if to == "load_balanced" else 3
    for step in range(steps):
        left = [step]

        def interrupted(*words: object, left: list[int] = left, **options: object) -> None:
            if not left[0]:
                raise InterruptedError
            left[0] -= 1
            fence(*words, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(sharing, "_fence", interrupted)
        with pytest.raises(InterruptedError):
            switch(spark, stream, to)
        monkeypatch.setattr(sharing, "_fence", fence)
    stream.add(20, first=20)
    assert switch(spark, stream, to)
    stream.drain(spark)
    stream.assert_each_once()
    stream.mode = ConsumerMode(to)
    assert switch(spark, stream, other)
    stream.add(4, first=40)
    stream.drain(spark)
    stream.assert_each_once()


def test_a_group_cannot_be_used_the_other_way(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark)
    stream.mode = ConsumerMode.LOAD_BALANCED
    with pytest.raises(InvalidOptionError, match="switch --to load_balanced"):
        stream.drain(spark)


# what a review found


@pytest.mark.slow
def test_losses_are_told_across_a_switch_in_both_directions(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark)
    for to in ("load_balanced", "resumable"):
        switch(spark, stream, to)
        if to == "resumable":
            state = stream.ingestion().ledger().read()
            read = {shard: message.sequence + 1 for shard, message in state.last_messages.items()}
            assert read == state.positions, "so that a stream that is cut below a position is detected"
        stream.add(20, first=20)
        for key in stream.keys:
            stream.client.xtrim(key, maxlen=4, approximate=False)
        with pytest.raises(DataLossError):
            stream.drain(spark)
        stream.drain(spark, stream.ingestion(errors=ErrorPolicy(on_data_loss="record")))
        assert stream.there() <= stream.rows()


@pytest.mark.slow
def test_what_a_foreign_client_held_before_the_switch_is_not_written_again(spark: SparkSession, stream: Stream) -> None:
    for shard, key in enumerate(stream.keys):
        stream.client.xgroup_create(key, stream.group, id="0")
        stream.read_as("worker-1", 5, shard)
    with pytest.raises(CrashError):
        stream.drain(spark, observer=Once(Step.VERIFIED, crash))
    switch(spark, stream, "load_balanced")
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.slow
def test_a_mark_that_somebody_removed_comes_back_and_moves_nothing(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    for key in stream.keys:
        stream.client.xgroup_delconsumer(key, stream.group, CLAIM_MODE_SENTINEL)
    assert not switch(spark, stream, "load_balanced")
    stream.add(4, first=20)
    stream.drain(spark)
    stream.assert_each_once()


def test_a_late_commit_by_position_acknowledges_nothing_that_is_claimed(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    stream.add(4, first=20)
    stream.read_as(f"main/99/{'a' * 32}", 2)
    with StreamSource(StreamUrl.parse(stream.url)).open() as opened:
        opened.commit(stream.group, {shard: extent.end for shard, extent in opened.extents().items()})
    assert sum(stream.held().values()) == 2
    with stream.source.claims(stream.group) as claims:
        for shard in claims.shards:
            assert not claims.group.set_position(shard, 5, entries_read=None)


@pytest.mark.slow
def test_a_switch_away_from_claims_after_a_restore_is_refused(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark, stream.ingestion(10))
    spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF 1").collect()
    with pytest.raises(DataLossError):
        switch(spark, stream, "resumable")


@pytest.mark.slow
def test_no_switch_back_after_a_restore(spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark, stream.ingestion(10))

    def killed(claims: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(sharing, "leave_claim_mode", killed)
        with pytest.raises(InterruptedError):
            switch(spark, stream, "resumable")
    spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF 1").collect()
    for to in ("resumable", "load_balanced", "load_balanced"):
        with pytest.raises(DataLossError) as caught:
            switch(spark, stream, to)
        assert caught.value.facts["batches"] == 1
    spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF 2").collect()
    assert switch(spark, stream, "load_balanced")
    stream.add(4, first=20)
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.slow
def test_after_a_restore_only_missing_rows_are_written(spark: SparkSession, stream: Stream) -> None:
    """Of the claimed entries, one batch stays and one is removed; the position is where the claims began."""
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark, stream.ingestion(10, transform=even))
    assert switch(spark, stream, "resumable")
    stream.add(4, first=20)
    stream.drain(spark, stream.ingestion(transform=even))
    written = stream.rows()
    spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF 1").collect()
    with pytest.raises(InvalidOptionError):
        switch(spark, stream, "load_balanced")
    stream.mode = ConsumerMode.RESUMABLE
    stream.drain(spark, stream.ingestion(transform=even))
    assert stream.rows() == written
    with StreamSource(StreamUrl.parse(stream.url)).open() as opened:
        assert all(verdict.is_right for verdict in verify(opened, stream.ingestion()))
    assert switch(spark, stream, "load_balanced")


def test_a_switch_from_claims_is_refused_where_the_group_skipped_entries(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    stream.add(8, first=20)
    stream.client.xgroup_setid(stream.keys[0], stream.group, stream.entry_ids()[-1])
    with pytest.raises(DataLossError) as error:
        switch(spark, stream, "resumable")
    assert error.value.facts["given"] == to_sequence(stream.entry_ids()[-5]) + 1


@pytest.mark.slow
def test_a_switch_from_claims_is_refused_where_the_group_was_moved_back(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    end = stream.entry_ids()[-1]
    stream.client.xgroup_setid(stream.keys[0], stream.group, stream.entry_ids()[3])
    with pytest.raises(SourceRecreatedError):
        switch(spark, stream, "resumable")
    stream.client.execute_command("XGROUP", "SETID", stream.keys[0], stream.group, end, "ENTRIESREAD", 10)
    assert switch(spark, stream, "resumable")
    stream.add(4, first=20)
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.slow
def test_a_switch_from_claims_is_refused_where_the_group_is_gone(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    stream.client.xgroup_destroy(stream.keys[0], stream.group)
    with pytest.raises(SourceRecreatedError):
        switch(spark, stream, "resumable")
    assert stream.ingestion().ledger().read().sharing == CLAIMS


@pytest.mark.slow
def test_a_shard_without_a_group_is_no_obstacle_to_a_switch(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    stream.keys.append(f"{stream.name}:2")
    stream.add(3, first=20)
    assert switch(spark, stream, "resumable")
    stream.drain(spark)
    assert stream.rows() == stream.there()


@pytest.mark.slow
def test_a_group_that_is_moved_back_before_its_first_claim_is_an_error(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark)
    assert switch(spark, stream, "load_balanced")
    stream.client.xgroup_setid(stream.keys[0], stream.group, stream.entry_ids()[3])
    with pytest.raises(SourceRecreatedError):
        stream.drain(spark)
    assert len(stream.rows()) == 20


@pytest.mark.slow
def test_a_switch_to_claims_waits_for_what_a_restore_left_to_do(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark, stream.ingestion(10))
    for version in (1, 2):
        spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF {version}").collect()
    with StreamSource(StreamUrl.parse(stream.url)).open() as opened:
        job = IngestJob(spark, opened, stream.ingestion(5))
        batch = job.plan()
        assert batch is None or run_batch(job, batch) is not None
    stream.drain(spark)
    assert switch(spark, stream, "load_balanced")
    stream.drain(spark)
    stream.assert_each_once()


def test_all_streams_of_a_group_are_switched_together(spark: SparkSession, redis_address: str, folder: Path) -> None:
    one, other = (Stream(redis_address, folder, mode="load_balanced") for _ in range(2))
    for stream in (one, other):
        stream.add(6)
    one.url, one.group = f"{one.url},{other.name}", "both"
    one.drain(spark)
    one.url = f"redis://{redis_address}/{one.name}"
    with pytest.raises(InvalidOptionError, match=other.name):
        switch(spark, one, "resumable")
