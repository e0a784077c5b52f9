"""RESTORE, one tick of the sensor, and the run that it asks for: the table is complete, each message once."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from sensors.lag_sensor import LAG_TAG
from spark_jobs.mode_switch import switch_sharing
from spark_jobs.verify import verify
from stream_assets import Json, RunLimits, StreamAsset, stream_asset
from stream_consumers.create import open_batch_source
from stream_consumers.options import ConsumerMode
from tests.support.dagster_runs import execute, skip_message, tick
from tests.support.feeds import FILES_FIRST, SHARDS, Feed, make_feed
from tests.support.old_and_new import Row, made, old, rows_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MESSAGES = 60
RECORDS = 30


@dataclass(frozen=True)
class Lake:
    """A feed, and the asset of the table that all of it is in."""

    spark: SparkSession
    instance: dg.DagsterInstance
    feed: Feed
    asset: StreamAsset

    @property
    def table(self) -> str:
        return self.asset.declared.ingestion.table

    @property
    def version(self) -> int:
        return DeltaTable(self.table).version()

    def sql(self, words: str) -> None:
        """A statement, with ``{t}`` for the table."""
        self.spark.sql(words.replace("{t}", f"delta.`{self.table}`")).collect()

    def vacuum(self) -> None:
        """Delete every file that the table does not hold now."""
        settings = {
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
            # Else it lists the one folder in hundreds of tasks.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
        }
        for name, value in settings.items():
            self.spark.conf.set(name, value)
        try:
            self.sql("VACUUM {t} RETAIN 0 HOURS")
        finally:
            for name in settings:
                self.spark.conf.unset(name)

    def run(self, **config: Any) -> None:
        result = execute(self.asset, self.instance, config=config)
        assert [str(event.step_failure_data.error) for event in result.get_step_failure_events()] == []

    def lag(self) -> int:
        """What the sensor asks for; 0 if it asks for nothing."""
        ticked = tick(self.asset, self.instance)
        if not ticked.run_requests:
            assert "no lag" in skip_message(ticked)
            return 0
        return int(ticked.run_requests[0].tags[LAG_TAG])

    def tick_and_run(self, *, lag: int) -> None:
        """One tick that asks, one run, and one that asks no more."""
        assert self.lag() == lag
        self.run()
        assert self.lag() == 0

    def rows(self) -> Counter[Row]:
        """Those of the feed."""
        return Counter({row: count for row, count in rows_of(self.table).items() if row[0] == self.feed.stream})

    def assert_whole(self) -> None:
        """Each message is there once, and the group is at the end."""
        assert self.rows() == made(self.feed, range(self.feed.sent))
        assert self.feed.told() == self.feed.done(self.feed.sent)
        with open_batch_source(self.feed.url) as source:
            assert [verdict.is_right for verdict in verify(source, self.asset.declared.ingestion)] == [True] * SHARDS

    def shared(self, mode: ConsumerMode) -> Lake:
        """The same with another way of sharing."""
        made_anew = declare(self.feed, self.table, mode=mode.value)
        with made_anew.declared.stream.open() as source:
            assert switch_sharing(self.spark, made_anew.declared.ingestion, to=mode, source=source)
        return replace(self, asset=made_anew)


def declare(feed: Feed, table: str, **options: Any) -> StreamAsset:
    return stream_asset(
        source=feed.url,
        group=feed.group,
        table=table,
        decode=Json("id BIGINT, user STRING"),
        limits=RunLimits(max_records=RECORDS),
        spec=dg.AssetSpec("orders"),
        **options,
    )(old)


def fill(spark: SparkSession, instance: dg.DagsterInstance, feed: Feed, folder: Path) -> Lake:
    feed.send(MESSAGES)
    lake = Lake(spark, instance, feed, declare(feed, str(folder / "t")))
    lake.run()
    lake.assert_whole()
    return lake


@pytest.fixture(params=FILES_FIRST)
def lake(request: pytest.FixtureRequest, spark: SparkSession, folder: Path, instance: dg.DagsterInstance) -> Lake:
    """A claim and two batches: version 2."""
    feed = make_feed(request.param, folder, request.getfixturevalue)
    return fill(spark, instance, feed, folder)


def test_after_a_restore_the_next_run_writes_again_what_it_took_away(lake: Lake) -> None:
    lake.sql("RESTORE {t} TO VERSION AS OF 1")
    lake.feed.send(6)
    lake.tick_and_run(lag=36)
    lake.assert_whole()
    lake.sql("RESTORE {t} TO VERSION AS OF 0")
    lake.sql("RESTORE {t} TO VERSION AS OF 2")
    lake.tick_and_run(lag=6)
    lake.assert_whole()


@pytest.mark.parametrize("lake", ["file"], indirect=True)
def test_a_restore_after_optimize_and_before_and_after_a_vacuum(lake: Lake) -> None:
    lake.sql("OPTIMIZE {t}")
    lake.feed.send(6)
    lake.run()
    lake.sql("RESTORE {t} TO VERSION AS OF 3")
    assert len(DeltaTable(lake.table).file_uris()) == 1
    lake.tick_and_run(lag=6)
    lake.assert_whole()
    lake.sql("RESTORE {t} TO VERSION AS OF 1")
    lake.vacuum()
    # What the RESTORE took away is in the stream only.
    with pytest.raises(Exception, match="Not all files from version 3 are available"):
        lake.sql("RESTORE {t} TO VERSION AS OF 3")
    lake.tick_and_run(lag=36)
    lake.assert_whole()


@pytest.mark.parametrize("lake", ["redis"], indirect=True)
def test_a_restore_over_the_commits_of_other_writers(lake: Lake) -> None:
    rows = DeltaTable(lake.table).to_pyarrow_table().slice(0, 8)
    for name, values in (("_stream", ["by-hand"] * 8), ("_sequence", list(range(8)))):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))
    write_deltalake(lake.table, rows, mode="append")
    lake.sql("UPDATE {t} SET made_by = 'hand' WHERE _stream = 'by-hand' AND _sequence < 4")
    restored = lake.version
    lake.sql("DELETE FROM {t} WHERE _stream = 'by-hand' AND _sequence >= 6")
    lake.feed.send(6)
    lake.run()
    assert sum((rows_of(lake.table) - lake.rows()).values()) == 6
    lake.sql(f"RESTORE {{t}} TO VERSION AS OF {restored}")
    lake.tick_and_run(lag=6)
    lake.assert_whole()
    by_hand = rows_of(lake.table) - lake.rows()
    assert sorted((row[2], row[5]) for row in by_hand.elements()) == [(n, "hand" if n < 4 else "old") for n in range(8)]
    lake.sql("RESTORE {t} TO VERSION AS OF 1")
    lake.tick_and_run(lag=36)
    lake.assert_whole()
    assert rows_of(lake.table) == lake.rows(), "theirs are gone, as the RESTORE wanted"


@pytest.mark.parametrize("lake", ["file", "kafka"], indirect=True)
def test_a_table_that_was_deleted_is_ingested_anew_from_its_start(lake: Lake) -> None:
    shutil.rmtree(lake.table)
    assert lake.lag() == MESSAGES
    lake.run(max_batches=1)
    assert sum(lake.feed.told().values()) == (RECORDS if lake.feed.has_broker else 0), "the group follows the table"
    lake.tick_and_run(lag=MESSAGES - RECORDS)
    lake.assert_whole()


@pytest.mark.parametrize("lake", ["kafka"], indirect=True)
def test_a_table_that_somebody_made_anew_is_ingested_from_its_start(lake: Lake) -> None:
    schema = DeltaTable(lake.table).schema()
    shutil.rmtree(lake.table)
    DeltaTable.create(lake.table, schema)
    lake.tick_and_run(lag=MESSAGES)
    lake.assert_whole()


@pytest.mark.parametrize("first", [ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED])
def test_a_restore_across_a_switch_of_how_a_group_shares(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance, first: ConsumerMode
) -> None:
    """The group goes on with the transaction sequences that it has now, whatever the table had then."""
    second = next(mode for mode in (ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED) if mode is not first)
    lake = fill(spark, instance, make_feed("kafka", folder, lambda _: kafka), folder)
    if first is ConsumerMode.LOAD_BALANCED:
        lake = lake.shared(first)
        lake.feed.send(30)
        lake.run()
    before = lake.version
    lake.feed.send(30)
    lake.run()
    lake = lake.shared(second)
    lake.feed.send(30)
    lake.run()
    lake.assert_whole()
    lake.sql(f"RESTORE {{t}} TO VERSION AS OF {before}")
    restored = lake.version
    lake.tick_and_run(lag=60)
    lake.assert_whole()
    ledger = lake.asset.declared.ingestion.ledger()
    assert ledger.read().sharing == second.value
    lines = {c.entry.app for c in ledger.newest_first() if c.entry and c.version > restored}
    shards = {f"{lake.feed.group}/{lake.feed.stream}/{n}" for n in range(SHARDS)}
    assert lines == (shards if second is ConsumerMode.LOAD_BALANCED else {f"{lake.feed.group}/main"})
