"""Replays and rewinds of groups that several members share: shards on Kafka, claimed entries on Redis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches import target_table
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from stream_assets import StreamAsset, stream_asset, stream_definitions
from stream_assets.definitions_builder import build_replay_job
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.errors import InvalidOptionError, UnsupportedError
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.urls import StreamUrl
from tests.support.dagster_runs import execute, source_with
from tests.support.feeds import SHARDS, Feed, KafkaFeed, RedisFeed
from tests.support.kafka_topics import Once
from tests.support.killed_runs import logs, running
from tests.support.old_and_new import made, new, old, rows_of
from tests.support.one_run import QUICK, QUICK_CLAIMS
from tests.support.polling import until

SHARED = ConsumerMode.LOAD_BALANCED
DECODER = Json("id BIGINT, user STRING")
MESSAGES = 90


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_table, "MAX_PAUSE_SECONDS", 0.05)


class Group:
    """A group that shares a feed, and the table that its members write."""

    def __init__(self, spark: SparkSession, feed: Feed, folder: Path, *, records: int = 10) -> None:
        self.spark = spark
        self.feed = feed
        self.url = StreamUrl.parse(feed.url)
        client = QUICK if feed.kind == "kafka" else QUICK_CLAIMS
        self.source = StreamSource(self.url, SHARED, client)
        limits = Limits(max_records=records)
        self.what = Ingestion(feed.group, str(folder / "t"), DECODER, old, sharing=SHARED, limits=limits)
        feed.send(MESSAGES)
        self.drain()

    def drain(self, transform: object = old, observer: Observer = ignore_steps) -> list[BatchReport]:
        """One member to the end."""
        what = replace(self.what, transform=transform)  # type: ignore[arg-type]
        return list(drain(self.spark, self.source, what, observer=observer))

    def replay(self, numbers: range, observer: Observer = ignore_steps) -> list[BatchReport]:
        """Replay these with the new transform."""
        bounds = [Bound.parse(self.feed.bound(number)) for number in (numbers.start, numbers.stop)]
        with open_batch_source(self.url) as source:
            what = replace(self.what, transform=new)
            job = ReplayJob(self.spark, source, what, Replay(*bounds), observer=observer)
            return list(drain_batches(job))

    def rewind(self, number: int) -> int:
        """How many shards moved."""
        with open_batch_source(self.url) as source:
            return len(rewind(self.spark, source, self.what, Bound.parse(self.feed.bound(number))))

    def assert_made(self, *, by_new: range, count: int = MESSAGES) -> None:
        assert rows_of(self.what.table) == made(self.feed, range(count), by_new=by_new)
        assert self.what.ledger().read().positions == self.feed.positions(count)
        assert self.feed.told() == self.feed.done(count)
        with open_batch_source(self.url) as source:
            assert [verdict.is_right for verdict in verify(source, self.what)] == [True] * SHARDS

    def lines(self) -> set[str]:
        """The transaction sequences of the shards."""
        return {f"{self.feed.group}/{self.feed.stream}/{number}" for number in range(SHARDS)}


@pytest.fixture
def group(spark: SparkSession, kafka: str, folder: Path) -> Group:
    return Group(spark, KafkaFeed(kafka), folder)


@pytest.mark.slow
def test_a_rewind_is_one_commit_on_the_line_of_each_shard(group: Group) -> None:
    before = DeltaTable(group.what.table).version()
    assert group.rewind(30) == SHARDS
    ledger = group.what.ledger()
    commits = [c.entry for c in ledger.newest_first() if c.entry and c.version > before]
    assert {entry.app for entry in commits} == group.lines()
    assert [(len(entry.until), entry.messages) for entry in commits] == [(1, 0)] * SHARDS
    assert ledger.read().positions == group.feed.places(30)
    assert group.feed.told() == group.feed.done(30)
    reports = group.drain(new)
    assert {report.entry.mode for report in reports} == {"replace"}
    group.assert_made(by_new=range(30, MESSAGES))
    assert group.drain() == []


@pytest.mark.slow
def test_a_rewind_of_one_shard_leaves_the_others_alone(group: Group) -> None:
    shard = group.feed.shard(1)
    with open_batch_source(group.url) as source:
        (move,) = rewind(group.spark, source, group.what, Bound(sequences={shard: 10}))
    assert (move.shard, move.position, move.to) == (shard, 30, 10)
    assert group.feed.told() == {**group.feed.done(MESSAGES), 1: 10}
    group.drain(new)
    assert rows_of(group.what.table) == made(group.feed, range(MESSAGES), by_new=range(31, MESSAGES, SHARDS))


@pytest.mark.slow
def test_a_batch_of_a_member_that_was_planned_before_a_rewind_never_lands(group: Group) -> None:
    group.feed.send(30)
    back = Once(Step.WRITING, lambda: group.rewind(30))
    reports = group.drain(new, back)
    assert back.is_done
    # A shard that was drained before the rewind came is for the next run.
    reports += group.drain(new)
    assert {report.entry.mode for report in reports} == {"replace", "append"}
    group.assert_made(by_new=range(30, 120), count=120)


@pytest.mark.slow
def test_a_replay_while_a_member_ingests_is_written_again(group: Group) -> None:
    """Between the plan of each replay and its commit the member writes."""
    met: list[int] = []

    def meddle(step: Step, batch: object) -> None:
        if step is Step.WRITING and len(met) < 2:
            met.append(1)
            group.feed.send(30)
            group.drain()

    group.replay(range(30, 60), meddle)
    assert len(met) == 2
    group.assert_made(by_new=range(30, 60), count=MESSAGES + 60)
    entries = [c.entry for c in group.what.ledger().newest_first() if c.entry and c.entry.kind == "replay"]
    assert len(entries) == 3
    assert {entry.app for entry in entries} == {f"{group.feed.group}/main"}


@pytest.mark.slow
@pytest.mark.kill
def test_a_replay_next_to_a_member_in_a_process_of_its_own(group: Group, server: str) -> None:
    group.feed.send(600)
    table = Path(group.what.table)
    before = DeltaTable(table).version()
    words = ("", group.feed.group, "load_balanced", server, "main", "old")
    with running(group.feed.url, table, *words, records=15) as member:
        until(lambda: DeltaTable(table).version() > before, seconds=120, what="the member's first batch")
        group.replay(range(30, 60))
        assert member.wait() == 0, logs(table)
    group.assert_made(by_new=range(30, 60), count=MESSAGES + 600)


@pytest.fixture
def claiming(spark: SparkSession, redis_address: str, folder: Path) -> Group:
    return Group(spark, RedisFeed(redis_address), folder, records=MESSAGES)


def facts(group: Group) -> tuple[int, Counter[object], object]:
    table = DeltaTable(group.what.table)
    return table.version(), Counter(rows_of(group.what.table)), group.feed.told()


def test_where_entries_are_claimed_nothing_is_replayed_or_moved(claiming: Group) -> None:
    before = facts(claiming)
    for refused in (lambda: claiming.replay(range(30, 60)), lambda: claiming.rewind(30)):
        with pytest.raises(UnsupportedError, match="switch --to resumable"):
            refused()
    for more in ({"origin": Bound.parse("earliest")}, {"stop": Bound.parse("latest")}):
        with pytest.raises(UnsupportedError):
            list(drain(claiming.spark, claiming.source, claiming.what, **more))
    assert facts(claiming) == before


@pytest.mark.slow
@pytest.mark.dagster
def test_where_entries_are_claimed_there_is_no_replay_job(claiming: Group, instance: dg.DagsterInstance) -> None:
    declared = stream_asset(
        source=source_with(str(claiming.feed.url), QUICK_CLAIMS),
        group=claiming.feed.group,
        table=claiming.what.table,
        decode=DECODER,
        mode="load_balanced",
        spec=dg.AssetSpec("orders"),
    )
    asset: StreamAsset = declared(new)
    before = facts(claiming)
    start = {"rewind": "earliest"}
    for config in ({"start": start}, {"start": start, "move_group": True}, {"stop": {"rewind": "latest"}}):
        failed = execute(asset, instance, config=config)
        (event,) = failed.get_step_failure_events()
        assert "claims entries one by one" in (event.step_failure_data.user_failure_data.description or "")
    assert facts(claiming) == before
    assert "replay_orders" not in {job.name for job in stream_definitions([asset]).jobs or []}
    with pytest.raises(InvalidOptionError):
        build_replay_job(asset)
