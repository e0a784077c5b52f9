"""100,000 messages, and the middle 20,000 again with another transform: as if it had been ingested so at first."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.run_ingestion import drain
from stream_assets import RunLimits, stream_asset, stream_definitions
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.feeds import FILES_FIRST, FIRST_MS, Feed, make_feed
from tests.support.old_and_new import Row, made, new, old, rows_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]
DAY_MS = 86_400_000
MESSAGES = 100_000
TUESDAY = range(40_000, 60_000)
LATE = 300
RECORDS = 12_500


def moment(number: int) -> int:
    """Monday, Tuesday and Wednesday; each message a millisecond behind the one before, from midnight on."""
    day = (number >= TUESDAY.start) + (number >= TUESDAY.stop)
    return FIRST_MS + day * DAY_MS + number - (0, TUESDAY.start, TUESDAY.stop)[day]


@dataclass(frozen=True)
class Lake:
    """A feed, and the table that its first 100,000 messages are in.

    Args:
        feed: the messages.
        what: what goes where.
        rows: those of the table.
        files: its data files, with the ids of the messages in each.
    """

    feed: Feed
    what: Ingestion
    rows: Counter[Row]
    files: Mapping[str, set[int]]

    @classmethod
    def of(cls, feed: Feed, what: Ingestion) -> Lake:
        names = {Path(uri).name: uri for uri in DeltaTable(what.table).file_uris()}
        files = {name: set(pq.read_table(uri, columns=["id"])["id"].to_pylist()) for name, uri in names.items()}
        return cls(feed, what, rows_of(what.table), files)

    def replay(self, spark: SparkSession, start: str, stop: str) -> None:
        """Run a replay with the new transform to its end."""
        wanted = Replay(Bound.parse(start), Bound.parse(stop))
        with open_batch_source(self.feed.url) as source:
            job = ReplayJob(spark, source, replace(self.what, transform=new), wanted)
            assert sum(report.rows > 0 for report in drain_batches(job)) == 2

    def assert_replayed(self, numbers: range) -> None:
        """Row by row as if these had been ingested with the new transform at first, and nothing else was touched."""
        clean = self.rows - made(self.feed, numbers) + made(self.feed, numbers, by_new=numbers)
        found = rows_of(self.what.table)
        assert sorted((clean - found).elements())[:5] == []
        assert sorted((found - clean).elements())[:5] == []
        others = {name for name, ids in self.files.items() if ids.isdisjoint(numbers)}
        assert len(others) >= len(self.files) // 2
        assert others <= {Path(uri).name for uri in DeltaTable(self.what.table).file_uris()}
        state = self.what.ledger().read()
        assert state.positions == self.feed.positions(MESSAGES)
        assert self.feed.told() == self.feed.done(MESSAGES)


@pytest.fixture(scope="module", params=FILES_FIRST)
def ingested(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    """One ingestion for each backend; a few messages more are in the stream, but not in the table."""
    folder = tmp_path_factory.mktemp(f"lake-{request.param}")
    feed = make_feed(request.param, folder, request.getfixturevalue, moment)
    feed.send(MESSAGES)
    decoder, limits = Json("id BIGINT, user STRING"), Limits(max_records=20_000)
    what = Ingestion(feed.group, str(folder / "t"), decoder, old, limits=limits)
    for _ in drain(spark, StreamSource(StreamUrl.parse(feed.url)), what):
        pass
    lake = Lake.of(feed, replace(what, limits=Limits(max_records=RECORDS)))
    assert lake.rows == made(feed, range(MESSAGES))
    feed.send(LATE)
    yield lake
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def lake(ingested: Lake, folder: Path) -> Lake:
    """A copy for one test, which may replay but not move the group."""
    shutil.copytree(ingested.what.table, folder / "t")
    return replace(ingested, what=replace(ingested.what, table=str(folder / "t")))


def test_the_middle_is_replayed_by_sequence(spark: SparkSession, lake: Lake) -> None:
    lake.replay(spark, lake.feed.bound(TUESDAY.start), lake.feed.bound(TUESDAY.stop))
    lake.assert_replayed(TUESDAY)


def test_the_middle_is_replayed_by_timestamp(spark: SparkSession, lake: Lake) -> None:
    """Over midnight: the last 5 seconds of Monday, and the first 15 of Tuesday."""
    lake.replay(spark, "2025-03-10T00:00:35Z", "2025-03-11T00:00:15Z")
    lake.assert_replayed(range(35_000, 55_000))


def test_the_middle_is_replayed_as_the_partition_of_a_day(
    spark: SparkSession, lake: Lake, instance: dg.DagsterInstance
) -> None:
    what = lake.what
    declared = stream_asset(
        source=lake.feed.url,
        table=what.table,
        group=what.group,
        decode=what.decoder,
        limits=RunLimits(max_records=RECORDS),
        spec=dg.AssetSpec("orders"),
    )
    job = stream_definitions([declared(new)]).resolve_job_def("replay_orders")
    assert job.execute_in_process(instance=instance, partition_key="2025-03-11").success
    lake.assert_replayed(TUESDAY)


def test_a_replay_up_to_the_latest_message_ends_where_the_group_is(spark: SparkSession, lake: Lake) -> None:
    lake.replay(spark, lake.feed.bound(85_000), "latest")
    lake.assert_replayed(range(85_000, MESSAGES))
