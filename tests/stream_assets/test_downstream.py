"""When Dagster makes the assets downstream of a table: once for each run, and for what changed."""

# Dagster looks at the annotations of assets themselves, so that they cannot be text.
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from spark_jobs.batches.ingestion import BatchReport
from stream_assets import ErrorPolicy, stream_asset
from stream_assets.materializations import (
    IngestMaterializations,
    PartitionMaterialization,
    ReplayMaterialization,
    RunScope,
    to_materialize_result,
)
from stream_assets.partitions import is_partition_run
from tests.support.batch_reports import report
from tests.support.dagster_runs import declare
from tests.support.ledger_tables import write_batch

pytestmark = [
    pytest.mark.dagster,
    pytest.mark.usefixtures("no_spark"),
    # Dagster's own tester of automation conditions takes a parameter of Dagster's that is new.
    pytest.mark.filterwarnings("ignore:Parameter `include_sources`"),
]

CONDITION = dg.AutomationCondition
DAYS = dg.DailyPartitionsDefinition("2026-11-16", end_date="2026-11-20")


class Automation:
    """Dagster's own look at the automation conditions of some definitions, one after the other."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._definitions = definitions
        self._instance = instance
        self._cursor: Any = None

    def asks(self) -> int:
        """How many assets, or partitions of them, are to be made since the last look."""
        return self._look().total_requested

    def asks_for(self, asset: str) -> set[str | None]:
        """Which partitions of an asset are to be made since the last look."""
        return set(self._look().get_requested_partitions(dg.AssetKey(asset)))

    def requests(self) -> set[tuple[str, str | None]]:
        """Which assets, and which partitions of them, are to be made since the last look."""
        found = self._look()
        keys = (key for key in self._definitions.resolve_asset_graph().get_all_asset_keys())
        return {(key.to_user_string(), part) for key in keys for part in found.get_requested_partitions(key)}

    def _look(self) -> Any:
        found = dg.evaluate_automation_conditions(self._definitions, self._instance, cursor=self._cursor)
        self._cursor = found.cursor
        return found


@pytest.mark.parametrize("is_replay", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_eager_assets_are_made_once_a_run_and_never_of_a_part_of_it(
    tmp_path: Path, instance: dg.DagsterInstance, is_replay: bool
) -> None:
    stream = declare(tmp_path)
    looks: list[int] = []

    def batches() -> Iterator[BatchReport]:
        for number in (1, 2, 3):
            yield report(number)
            looks.append(automation.asks())

    @dg.multi_asset(specs=[dg.AssetSpec("orders", skippable=True)])
    def orders(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:  # type: ignore[type-arg]
        spark: Any = None
        run = RunScope.of(context, stream.key, stream.declared, spark)
        told = ReplayMaterialization(run, replay_id="id", what={}) if is_replay else IngestMaterializations(run)
        made = told.report(batches())
        if made is not None:
            yield to_materialize_result(made)

    @dg.asset(deps=["orders"], automation_condition=dg.AutomationCondition.eager())
    def totals() -> None:
        """Made of the orders."""

    automation = Automation(dg.Definitions([orders, totals]), instance)
    assert automation.asks() == 0
    for _ in range(2):
        assert dg.materialize([orders], instance=instance).success
        assert automation.asks() == 1
        assert dg.materialize([orders, totals], selection=[totals], instance=instance).success
        assert automation.asks() == 0
    assert looks == [0] * 6, "the run goes on"


def test_daily_assets_are_made_once_for_each_day_that_was_touched_or_replayed(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    stream = declare(tmp_path)
    batches: list[dict[int, str]] = []
    spark: Any = None

    def replayed() -> Iterator[BatchReport]:
        yield replace(report(1), version=0)
        assert automation.asks_for("revenue") == set(), "the replay is not whole"

    @dg.multi_asset(
        specs=[dg.AssetSpec("orders", partitions_def=DAYS, skippable=True)],
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def orders(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:  # type: ignore[type-arg]
        declared: Any = SimpleNamespace(partitions=DAYS, errors=ErrorPolicy())
        run = RunScope(context, stream.key, declared, stream.declared.stream, stream.declared.ingestion, spark)
        if is_partition_run(context):
            made = PartitionMaterialization(run, context, DAYS, "id").report(replayed())
            assert made is not None
            yield to_materialize_result(made)
            return
        told = IngestMaterializations(run)
        for rows in batches:
            write_batch(tmp_path / "t", rows)
            assert automation.asks_for("revenue") == set(), "the run goes on"
        whole = told.report(())
        if whole is not None:
            yield to_materialize_result(whole)

    @dg.asset(
        deps=["orders"],
        partitions_def=DAYS,
        automation_condition=dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window()),
    )
    def revenue() -> None:
        """By day."""

    @dg.asset(deps=["orders"])
    def dashboard() -> None:
        """Of all days, in the run of the orders."""

    automation = Automation(dg.Definitions([orders, revenue]), instance)
    assert automation.asks_for("revenue") == set()

    def ingest(*written: dict[int, str]) -> set[str | None]:
        batches[:] = written
        run = dg.materialize([orders, dashboard], instance=instance)
        assert run.success
        is_made = bool(run.asset_materializations_for_node("dashboard"))
        assert is_made == bool(written), "skipped where nothing came"
        asked = automation.asks_for("revenue")
        assert automation.asks_for("revenue") == set(), "once"
        return asked

    assert ingest({0: "2026-11-16"}, {1: "2026-11-16", 2: "2026-11-18"}) == {"2026-11-16", "2026-11-18"}
    assert ingest({3: "2026-11-18"}) == {"2026-11-18"}
    assert ingest() == set()
    job = dg.Definitions([orders], jobs=[dg.define_asset_job("replay", selection=[orders])]).resolve_job_def("replay")
    days = {"dagster/asset_partition_range_start": "2026-11-16", "dagster/asset_partition_range_end": "2026-11-18"}
    assert job.execute_in_process(instance=instance, tags=days).success
    assert automation.asks_for("revenue") == {"2026-11-16", "2026-11-17", "2026-11-18"}
    assert automation.asks_for("revenue") == set()
    found = instance.fetch_materializations(dg.AssetKey("orders"), limit=3).records
    told = [record.asset_materialization for record in found if record.asset_materialization]
    assert {one.partition: one.metadata["dagster/partition_row_count"].value for one in told} == {
        "2026-11-16": 2,
        "2026-11-17": 0,
        "2026-11-18": 2,
    }
    assert {one.metadata["replay/partitions"].value for one in told} == {"2026-11-16, 2026-11-17, 2026-11-18"}


def test_rows_of_today_make_what_the_documentation_puts_downstream(instance: dg.DagsterInstance) -> None:
    today, before = ((datetime.now(timezone.utc) - timedelta(days=back)).date().isoformat() for back in (0, 2))
    days = dg.DailyPartitionsDefinition(before, end_offset=1)

    @stream_asset(
        source="memory://downstream/clicks",
        group="g",
        table="lake/clicks",
        spec=dg.AssetSpec("clicks", partitions_def=days),
    )
    def clicks(batch: Any) -> Any:
        return batch

    @dg.asset(deps=[clicks], automation_condition=CONDITION.eager().without(~CONDITION.any_deps_missing()))
    def all_clicks() -> None:
        """Of all days."""

    @dg.asset(
        deps=[clicks],
        partitions_def=days,
        automation_condition=CONDITION.eager().without(CONDITION.in_latest_time_window()),
    )
    def clicks_by_day() -> None:
        """Of each day."""

    automation = Automation(dg.Definitions([clicks, all_clicks, clicks_by_day]), instance)
    assert automation.asks() == 0
    for day in (today, before, today):
        instance.report_runless_asset_event(dg.AssetMaterialization(clicks.key, partition=day))
        assert automation.requests() == {("all_clicks", None), ("clicks_by_day", day)}
        assert automation.asks() == 0, "once"
