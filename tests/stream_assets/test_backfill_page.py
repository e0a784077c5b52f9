"""A day is replayed from Dagster's own backfill page, in a real browser."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from pyspark.sql import SparkSession

from spark_jobs.run_ingestion import drain
from stream_assets import StreamAsset
from tests.support import days
from tests.support.browser import Browser
from tests.support.dagster_services import Dagster, dagster_services

pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.browser, pytest.mark.slow]
BACKFILL_SECONDS = 240.0
JOBS = "locations/tests.support.days/jobs"


def ingest(spark: SparkSession, stream: StreamAsset) -> Counter[days.Row]:
    list(drain(spark, stream.stream, stream.ingestion))
    return days.rows(stream.ingestion.table)


def test_a_day_is_replayed_from_the_backfill_page(spark: SparkSession, home: Path, page: Browser) -> None:
    tuesday = days.last_tuesday()
    days.write_days(home, tuesday)
    variables = {days.FOLDER_VARIABLE: str(home)}
    with dagster_services(home / "dagster", "tests.support.days", variables) as dagster:
        stream = days.declare(home, "old")
        old, new = ingest(spark, stream), ingest(spark, days.declare(home, "new", table="clean"))
        files = days.times(stream.ingestion.table)

        launch_backfill(page, dagster, tuesday.date().isoformat())
        await_backfill(page, dagster)

        def is_replayed(moment: datetime) -> bool:
            return tuesday <= moment < tuesday + timedelta(days=1)

        inside = Counter({row: count for row, count in new.items() if is_replayed(row[2])})
        outside = Counter({row: count for row, count in old.items() if not is_replayed(row[2])})
        assert days.rows(stream.ingestion.table) == inside + outside
        assert len(inside) == days.PER_DAY * 9 // 10
        untouched = {uri for uri, moments in files.items() if not any(map(is_replayed, moments))}
        assert {min(files[uri]) < tuesday for uri in untouched} == {True, False}, "there are some on either side"
        assert untouched <= days.times(stream.ingestion.table).keys()
        look_at_materializations(page, dagster, stream, replaced=days.PER_DAY * 9 // 10)
        look_at_a_wrong_key(page, dagster)


def test_three_days_are_replayed_by_one_run_from_the_page_of_an_asset_with_partitions(
    spark: SparkSession, home: Path, page: Browser
) -> None:
    tuesday = days.last_tuesday()
    days.write_days(home, tuesday)
    sunday = tuesday - timedelta(days=2)
    variables = {days.FOLDER_VARIABLE: str(home), days.PARTITIONS_VARIABLE: "yes"}
    with dagster_services(home / "dagster", "tests.support.days", variables) as dagster:
        stream = days.declare(home, "old", partitions=days.PARTITIONS)
        old, new = ingest(spark, stream), ingest(spark, days.declare(home, "new", table="clean"))
        page.open(f"{dagster.address}/assets/orders?view=overview")
        page.click("Materialize…")
        page.see("Partition selection", "Backfills all partitions in a single run")
        first, last = sunday.date().isoformat(), tuesday.date().isoformat()
        page.enter("//input[@placeholder='No matching partitions']", f"[{first}...{last}]")
        page.see("3 partitions")
        page.picture("backfill")
        save_config(page)
        page.click("Launch backfill")
        page.see("Created backfill")
        page.click("View")
        await_backfill(page, dagster)
        (run,) = dagster.instance.get_runs()
        assert run.tags["dagster/asset_partition_range_start"] == first
        assert run.tags["dagster/asset_partition_range_end"] == last

        def is_replayed(moment: datetime) -> bool:
            return sunday <= moment < tuesday + timedelta(days=1)

        inside = Counter({row: count for row, count in new.items() if is_replayed(row[2])})
        outside = Counter({row: count for row, count in old.items() if not is_replayed(row[2])})
        assert days.rows(stream.ingestion.table) == inside + outside
        found = dagster.instance.fetch_materializations(stream.key, limit=10).records
        told = [record.asset_materialization for record in found if record.asset_materialization]
        monday = tuesday - timedelta(days=1)
        kept = days.PER_DAY * 9 // 10
        assert {one.partition: one.metadata["dagster/partition_row_count"].value for one in told} == {
            first: 0,
            monday.date().isoformat(): kept,
            last: kept,
        }
        assert not any("replay/batches" in one.metadata for one in told), "it is a sum of the run"
        page.open(f"{dagster.address}/assets/orders?view=overview")
        page.see("replay/partitions\n", f"{first}, {monday.date().isoformat()}, {last}", "Latest check results\n4")


def save_config(page: Browser) -> None:
    """What the dialog says of a wrong run config, and one that is taken."""
    page.click("//*[normalize-space()='Config']")
    page.click("Add config")
    editor = "//*[contains(@class, 'CodeMirror-lines')]"
    save = "//button[normalize-space()='Save config']"
    page.replace(editor, "ops: {orders: {config: {on_replay: delete}}}\n")
    page.see("on_replay", "errors")
    page.until(lambda: not page.find(save).is_enabled(), what="a wrong run config that is refused")
    page.replace(editor, "ops: {orders: {config: {on_replay: replace, max_records: 50}}}\n")
    page.until(page.find(save).is_enabled, what="'Save config'")
    page.click("Save config")
    page.see("Config saved")


def launch_backfill(page: Browser, dagster: Dagster, partition: str) -> None:
    page.open(f"{dagster.address}/jobs")
    page.click("replay_orders")
    page.see("Read the messages of a partition, by their timestamps,", "tick Completed")
    page.click("Partitions")
    page.click("Launch backfill…")
    page.see("Launch replay_orders backfill", "Select partitions to submit")
    page.enter("//input[contains(@placeholder, '2025-01-01')]", partition)
    page.click("Submit 1 run")
    page.see("Created backfill")
    page.click("View")


def await_backfill(page: Browser, dagster: Dagster) -> None:
    def ended() -> PartitionBackfill | None:
        (backfill,) = dagster.instance.get_backfills()
        return None if backfill.status in (BulkActionStatus.REQUESTED, BulkActionStatus.FAILING) else backfill

    backfill = page.until(ended, seconds=BACKFILL_SECONDS, what="end of the backfill")
    (run,) = dagster.instance.get_runs()
    assert run.status is dg.DagsterRunStatus.SUCCESS, dagster.daemon_log.read_text()[-8000:]
    assert backfill.status is BulkActionStatus.COMPLETED_SUCCESS
    page.see("Status\nSucceeded", "100% completed")
    assert run.tags["dagster/backfill"] == backfill.backfill_id


def look_at_materializations(page: Browser, dagster: Dagster, stream: StreamAsset, replaced: int) -> None:
    found = dagster.instance.fetch_materializations(stream.key, limit=10).records
    metadata = [record.asset_materialization.metadata for record in found if record.asset_materialization]
    assert {one["stream/kind"].value for one in metadata} == {"replay"}
    assert sum(int(str(one["replay/replaced_rows"].value)) for one in metadata) == replaced
    page.open(f"{dagster.address}/assets/orders?view=events")
    page.see("stream/kind\nreplay\n", f"replay/replaced_rows\n{metadata[0]['replay/replaced_rows'].value}\n")
    page.open(f"{dagster.address}/assets/orders?view=overview")
    page.see("stream/replay_job", "Latest check results\n4")
    promises = {
        "no_dead_letters": "No message was unusable or gone.",
        "no_gaps": "Each shard is covered without a hole.",
    }
    for check, promise in promises.items():
        page.open(f"{dagster.address}/assets/orders?view=checks&checkDetail={check}")
        page.see(promise, "Passed")


def look_at_a_wrong_key(page: Browser, dagster: Dagster) -> None:
    page.open(f"{dagster.address}/{JOBS}/ingest_orders/playground")
    page.see("No errors")
    page.replace("//*[contains(@class, 'CodeMirror-lines')]", "ops: {orders: {config: {start: {rewnd: earliest}}}}\n")
    page.see('Received unexpected config entry "rewnd" at path root:ops:orders:config:start', "rewind?: Any?")
    assert not page.find("//button[normalize-space()='Launch Run']").is_enabled()
    page.picture("launchpad")
    page.replace("//*[contains(@class, 'CodeMirror-lines')]", "ops: {orders: {config: {start: {rewind: earliest}}}}\n")
    page.see("No errors")
    page.until(page.find("//button[normalize-space()='Launch Run']").is_enabled, what="'Launch Run'")
