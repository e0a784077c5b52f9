"""What is made of a table when it changes: once, for what changed, under a real daemon."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import dagster as dg
import pytest

from tests.support import downstream_tables
from tests.support.dagster_services import Dagster, dagster_services
from tests.support.downstream_tables import DAY_VARIABLE, FOLDER_VARIABLE, KEYS, write_days
from tests.support.polling import until
from tests.support.spark_servers import spark_servers
from tests.support.user_interface import TICKS, UserInterface

pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.slow]
SECONDS = 600.0
REPLAY = """mutation ($keys: [String!]!) {
  launchPartitionBackfill(backfillParams: {assetSelection: [{path: ["payments"]}], partitionNames: $keys}) {
    __typename ... on LaunchBackfillSuccess { backfillId }
  }
}"""


class Watched:
    """A Dagster whose assets are counted."""

    def __init__(self, dagster: Dagster) -> None:
        self.dagster = dagster
        self.ui = UserInterface(dagster, downstream_tables.__name__)

    def made(self, asset: str) -> Counter[str | None]:
        """How often each partition of an asset was made."""
        found = self.dagster.instance.fetch_materializations(dg.AssetKey(asset), limit=1000).records
        return Counter(record.partition_key for record in found)

    def looks(self) -> list[float]:
        """When the automation conditions were looked at, the last time first."""
        asked = self.ui.ask(TICKS, sensor={**self.ui.location, "sensorName": "automation"})
        return [float(tick["timestamp"]) for tick in asked["sensorOrError"]["sensorState"]["ticks"]]

    def until_quiet(self) -> None:
        """Nothing runs, and the next looks have asked for nothing."""

        def is_quiet() -> bool:
            runs, last = self.ui.runs(), self.looks()[0]
            until(lambda: sum(look > last for look in self.looks()) >= 3, seconds=SECONDS, what="more ticks")
            return self.ui.runs() == runs and all(run.is_finished for run in self.dagster.instance.get_runs())

        until(is_quiet, seconds=SECONDS, what="the end of all runs")
        failed = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE])
        assert not self.dagster.instance.get_runs(failed), self.dagster.daemon_log.read_text()[-8000:]


def test_each_table_is_made_once_for_what_came_and_for_what_was_replayed(folder: Path) -> None:
    for name in ("orders", "payments"):
        write_days(folder, name, [KEYS[0], KEYS[2]])
    own = {FOLDER_VARIABLE: str(folder), DAY_VARIABLE: KEYS[2]}
    with (
        spark_servers(folder / "servers") as servers,
        dagster_services(folder / "dagster", downstream_tables.__name__, {**servers.variables, **own}) as dagster,
    ):
        watched = Watched(dagster)
        until(lambda: watched.made("totals") and watched.made("revenue"), seconds=SECONDS, what="the first tables")
        watched.until_quiet()
        assert watched.made("orders") == {None: 1}, "four batches"
        assert watched.made("totals") == {None: 1}
        assert watched.made("payments") == {KEYS[0]: 1, KEYS[2]: 1, None: 1}
        assert watched.made("revenue") == {KEYS[0]: 1, KEYS[2]: 1}, "the last one is today"
        assert watched.made("all_payments") == {None: 1}

        # A day that is late.
        write_days(folder, "payments", [KEYS[0]])
        until(lambda: watched.made("revenue")[KEYS[0]] == 2, seconds=SECONDS, what="the late day")
        before = watched.ui.runs()
        asked = watched.ui.ask(REPLAY, keys=KEYS)
        assert asked["launchPartitionBackfill"]["__typename"] == "LaunchBackfillSuccess", asked
        until(lambda: watched.made("revenue")[KEYS[1]] == 1, seconds=SECONDS, what="the replayed days")
        watched.until_quiet()
        assert watched.made("payments") == {KEYS[0]: 3, KEYS[1]: 1, KEYS[2]: 2, None: 2}
        assert watched.made("revenue") == {KEYS[0]: 3, KEYS[1]: 1, KEYS[2]: 2}
        assert watched.made("all_payments") == {None: 3}
        assert watched.made("totals") == {None: 1}
        replays = [
            run
            for run in dagster.instance.get_runs()
            if run.run_id not in before and "dagster/asset_partition_range_start" in run.tags
        ]
        assert len(replays) == 1, "three days in one run"
