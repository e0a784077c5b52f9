"""When Dagster makes the assets downstream of a table: once for each run, and for what changed."""

# Dagster looks at the annotations of assets themselves, so that they cannot be text.
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from spark_jobs.batches.ingestion import BatchReport
from stream_assets import materializations as module
from stream_assets.materializations import IngestMaterializations, ReplayMaterialization, as_result
from tests.support.batch_reports import report
from tests.support.dagster_runs import declare

pytestmark = [
    pytest.mark.dagster,
    # Dagster's own tester of automation conditions takes a parameter of Dagster's that is new.
    pytest.mark.filterwarnings("ignore:Parameter `include_sources`"),
]


class Automation:
    """Dagster's own look at the automation conditions of some definitions, one after the other."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._definitions = definitions
        self._instance = instance
        self._cursor: Any = None

    def asks(self) -> int:
        """How many assets, or partitions of them, are to be made since the last look."""
        found = dg.evaluate_automation_conditions(self._definitions, self._instance, cursor=self._cursor)
        self._cursor = found.cursor
        return found.total_requested


@pytest.mark.parametrize("is_replay", [False, True])
def test_eager_assets_are_made_once_a_run_and_never_of_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, is_replay: bool
) -> None:
    monkeypatch.setattr(module, "read_table", lambda spark, log: SimpleNamespace(schema=SimpleNamespace(fields=[])))
    stream = declare(tmp_path)
    looks: list[int] = []

    def batches() -> Iterator[BatchReport]:
        for number in (1, 2, 3):
            yield report(number)
            looks.append(automation.asks())

    @dg.multi_asset(specs=[dg.AssetSpec("orders", skippable=True)])
    def orders(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:  # type: ignore[type-arg]
        spark: Any = None
        what = context, stream.key, stream.ingestion, spark
        told = ReplayMaterialization(*what, what={}) if is_replay else IngestMaterializations(*what)
        made = stream._result(told, batches())
        if made is not None:
            yield as_result(made)

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
