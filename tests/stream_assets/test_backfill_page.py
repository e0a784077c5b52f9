"""A day is replayed from Dagster's own backfill page, in a real browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from pyspark.sql import SparkSession

from spark_jobs.run_ingestion import drain
from stream_assets import StreamAsset
from tests.support import days
from tests.support.browser import Browser, browser
from tests.support.dagster_services import Dagster, dagster_services

pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.browser, pytest.mark.slow]
BACKFILL_SECONDS = 240.0
JOBS = "locations/tests.support.days/jobs"


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def ingest(spark: SparkSession, stream: StreamAsset) -> Counter[days.Row]:
    list(drain(spark, stream.stream, stream.ingestion))
    return days.rows(stream.ingestion.table)


def test_a_day_is_replayed_from_the_backfill_page(spark: SparkSession, folder: Path, page: Browser) -> None:
    tuesday = days.last_tuesday()
    days.write_days(folder, tuesday)
    variables = {days.FOLDER_VARIABLE: str(folder)}
    with dagster_services(folder / "dagster", "tests.support.days", variables) as dagster:
        stream = days.declare(folder, "old")
        old, new = ingest(spark, stream), ingest(spark, days.declare(folder, "new", table="clean"))
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
    assert sum(int(str(one["stream/replaced_rows"].value)) for one in metadata) == replaced
    page.open(f"{dagster.address}/assets/orders?view=events")
    page.see("stream/kind\nreplay\n", f"stream/replaced_rows\n{metadata[0]['stream/replaced_rows'].value}\n")
    page.open(f"{dagster.address}/assets/orders?view=overview")
    page.see("stream/replay_job", "Latest check results\n2")
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
    page.replace("//*[contains(@class, 'CodeMirror-lines')]", "ops: {orders: {config: {start: {rewind: earliest}}}}\n")
    page.see("No errors")
    page.until(page.find("//button[normalize-space()='Launch Run']").is_enabled, what="'Launch Run'")
