"""100,000 messages, and the middle 20,000 again with another transform: as if it had been ingested so at first."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.bounds import Bound
from spark_jobs.decode import Json
from spark_jobs.draining import drain
from spark_jobs.ingestion import Ingestion
from spark_jobs.replay import Replay, ReplayJob, drain_replay
from spark_jobs.verify import verify
from stream_assets import stream_asset, stream_definitions
from stream_consumers.connect import StreamSource, open_batch_source
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.dagster.test_assets import instance
from tests.services.feeds import FIRST_MS, KINDS, Feed, make_feed
from tests.spark.old_and_new import made, new, old, rows_of

pytestmark = pytest.mark.spark
__all__ = ["instance"]
DAY_MS = 86_400_000
MESSAGES = 100_000
TUESDAY = range(40_000, 60_000)
LATE = 300


def moment(number: int) -> int:
    """Monday, Tuesday and Wednesday; each message a millisecond behind the one before, from midnight on."""
    day = (number >= TUESDAY.start) + (number >= TUESDAY.stop)
    return FIRST_MS + day * DAY_MS + number - (0, TUESDAY.start, TUESDAY.stop)[day]


@dataclass(frozen=True)
class Lake:
    """A feed, and the table that its first 100,000 messages are in."""

    feed: Feed
    what: Ingestion

    def copied_to(self, folder: Path) -> Lake:
        """The same with a table of its own."""
        shutil.copytree(self.what.table, folder / "t")
        return replace(self, what=replace(self.what, table=str(folder / "t")))

    def replay(self, spark: SparkSession, start: str, stop: str) -> None:
        """Run a replay with the new transform to its end."""
        wanted = Replay(Bound.parse(start), Bound.parse(stop))
        with open_batch_source(self.feed.url) as source:
            job = ReplayJob(spark, source, replace(self.what, transform=new), wanted)
            for report, _ in drain_replay(job):
                assert report.rows > 0

    def files(self) -> dict[str, set[int]]:
        """The data files of the table with the ids of the messages in each."""
        names = DeltaTable(self.what.table).file_uris()
        return {name: set(pq.read_table(name, columns=["id"])["id"].to_pylist()) for name in names}


@pytest.fixture(scope="module", params=KINDS)
def ingested(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    """One ingestion for each backend; a few messages more are in the stream, but not in the table."""
    folder = tmp_path_factory.mktemp(f"lake-{request.param}")
    feed = make_feed(request.param, folder, request.getfixturevalue, moment)
    feed.send(MESSAGES)
    what = Ingestion(
        feed.group, str(folder / "t"), Json("id BIGINT, user STRING"), old, limits=Limits(max_records=12_500)
    )
    for _ in drain(spark, StreamSource(StreamUrl.parse(feed.url)), what):
        pass
    assert rows_of(what.table) == made(feed, range(MESSAGES))
    feed.send(LATE)
    yield Lake(feed, what)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def lake(ingested: Lake, folder: Path) -> Iterator[Lake]:
    """A copy for one test, which may replay but not move the group."""
    copy = ingested.copied_to(folder)
    files, state = copy.files(), copy.what.ledger().read()
    yield copy
    after = copy.what.ledger().read()
    assert after.positions == state.positions == {shard: s.position for shard, s in after.shards.items()}
    assert after.last_number == state.last_number, "the line of the group goes on where it was"
    assert copy.feed.told() == copy.feed.done(MESSAGES)
    changed = {row[4] for row in (rows_of(copy.what.table) - rows_of(ingested.what.table))}
    replayed = range(min(changed), max(changed) + 1)
    kept = {name for name, ids in files.items() if ids.isdisjoint(replayed)}
    assert kept <= set(DeltaTable(copy.what.table).file_uris())
    assert len(kept) >= 6, "most of the table is not rewritten"
    with open_batch_source(copy.feed.url) as source:
        assert [verdict.lag > 0 and verdict.is_right for verdict in verify(source, copy.what)] == [True] * 3


def assert_made(lake: Lake, *, by_new: range) -> None:
    """Row by row the table is what it would be if ``by_new`` had been ingested with the new transform at first."""
    found, wanted = rows_of(lake.what.table), made(lake.feed, range(MESSAGES), by_new=by_new)
    assert sorted((wanted - found).elements())[:5] == []
    assert sorted((found - wanted).elements())[:5] == []


def test_the_middle_is_replayed_by_sequence(spark: SparkSession, lake: Lake) -> None:
    lake.replay(spark, lake.feed.bound(TUESDAY.start), lake.feed.bound(TUESDAY.stop))
    assert_made(lake, by_new=TUESDAY)


def test_the_middle_is_replayed_by_timestamp(spark: SparkSession, lake: Lake) -> None:
    """Over midnight: the last 5 seconds of Monday, and the first 15 of Tuesday."""
    lake.replay(spark, "2025-03-10T00:00:35Z", "2025-03-11T00:00:15Z")
    assert_made(lake, by_new=range(35_000, 55_000))


@pytest.mark.dagster
def test_the_middle_is_replayed_as_the_partition_of_a_day(
    spark: SparkSession, lake: Lake, instance: dg.DagsterInstance
) -> None:
    what = lake.what
    declared = stream_asset(
        source=lake.feed.url, table=what.table, group=what.group, decode=what.decoder, max_records=12_500, name="orders"
    )
    job = stream_definitions([declared(new)]).resolve_job_def("replay_orders")
    assert job.execute_in_process(instance=instance, partition_key="2025-03-11").success
    assert_made(lake, by_new=TUESDAY)


def test_a_replay_up_to_the_latest_message_ends_where_the_group_is(spark: SparkSession, lake: Lake) -> None:
    lake.replay(spark, lake.feed.bound(90_000), "latest")
    assert_made(lake, by_new=range(90_000, MESSAGES))
