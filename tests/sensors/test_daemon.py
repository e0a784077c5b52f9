"""The lag sensor under a real daemon, with runs that somebody else starts and cancels in the UI."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import dagster as dg
import pytest

from tests.support import staying_runs, waiting_jobs
from tests.support.dagster_services import Dagster, dagster_services
from tests.support.polling import until
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [pytest.mark.dagster, pytest.mark.slow]
SECONDS = 240.0
LAUNCH = """mutation ($what: ExecutionParams!) {
  launchRun(executionParams: $what) { __typename ... on LaunchRunSuccess { run { runId } } }
}"""
TERMINATE = "mutation ($run: String!) { terminateRun(runId: $run) { __typename } }"
TICKS = """query ($sensor: SensorSelector!) {
  sensorOrError(sensorSelector: $sensor) {
    ... on Sensor { sensorState { ticks(limit: 100) { timestamp status skipReason } } }
  }
}"""


@dataclass(frozen=True)
class UserInterface:
    """What the UI asks of the webserver when somebody presses a button there, or looks at a sensor."""

    dagster: Dagster
    module: str

    @property
    def location(self) -> dict[str, str]:
        return {"repositoryLocationName": self.module, "repositoryName": "__repository__"}

    def ask(self, query: str, **variables: Any) -> Any:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = Request(f"{self.dagster.address}/graphql", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer
        return answer["data"]

    def launch(self, job: str) -> str:
        launched = self.ask(LAUNCH, what={"selector": {**self.location, "jobName": job}, "runConfigData": {}})
        return str(launched["launchRun"]["run"]["runId"])

    def cancel(self, run_id: str) -> None:
        self.ask(TERMINATE, run=run_id)
        self.until_status(run_id, dg.DagsterRunStatus.CANCELED)

    def until_status(self, run_id: str, status: dg.DagsterRunStatus) -> None:
        def run_is_there() -> bool:
            run = self.dagster.instance.get_run_by_id(run_id)
            return run is not None and run.status is status

        until(run_is_there, seconds=SECONDS, what=f"run {run_id} being {status.value}")

    def reasons(self) -> list[str]:
        """Why the ticks so far asked for no run."""
        found = self.ask(TICKS, sensor={**self.location, "sensorName": "orders_lag"})
        return [tick["skipReason"] or "" for tick in found["sensorOrError"]["sensorState"]["ticks"]]

    def until_ticks_say(self, text: str) -> None:
        """Two ticks one after the other: the first one may have begun before."""
        until(
            lambda: sum(text in reason for reason in self.reasons()) > 1, seconds=SECONDS, what=f"ticks that say {text}"
        )

    def runs(self) -> set[str]:
        return {run.run_id for run in self.dagster.instance.get_runs()}


def test_runs_of_other_jobs_and_cancelled_ones_hold_the_sensor_back(folder: Path) -> None:
    write_stream(folder / "orders.ss", 5)
    variables = {waiting_jobs.FOLDER_VARIABLE: str(folder)}
    with dagster_services(folder / "dagster", waiting_jobs.__name__, variables) as dagster:
        ui = UserInterface(dagster, waiting_jobs.__name__)
        (asked,) = until(ui.runs, seconds=SECONDS, what="the run that the sensor asks for")
        ui.until_status(asked, dg.DagsterRunStatus.STARTED)
        ui.cancel(asked)
        ui.until_ticks_say(f"run {asked} was cancelled")
        assert ui.runs() == {asked}, "what somebody cancelled is not asked for again"

        started = ui.launch("nightly")
        ui.until_ticks_say(f"run {started} is STARTED")
        assert ui.runs() == {asked, started}, "it makes the asset already"
        assert any("(job nightly); lag 5 (orders/0: 3, orders/1: 2)" in reason for reason in ui.reasons())
        ui.cancel(started)


def until_rows(table: Path, count: int) -> None:
    first = table / "_delta_log" / f"{0:020d}.json"

    def is_there() -> bool:
        return first.exists() and sum(sequences_in_table(table).values()) == count

    until(is_there, seconds=SECONDS, what=f"{count} rows")


@pytest.mark.spark
def test_a_run_that_stays_is_followed_and_cancelled_in_the_ui(folder: Path) -> None:
    """What it wrote since its last materialization is told when it is cancelled."""
    path, table = folder / "orders.ss", folder / "t"
    write_stream(path, 5)
    variables = {staying_runs.FOLDER_VARIABLE: str(folder)}
    with dagster_services(folder / "dagster", staying_runs.__name__, variables) as dagster:
        ui = UserInterface(dagster, staying_runs.__name__)
        (asked,) = until(ui.runs, seconds=SECONDS, what="the run that the sensor asks for")
        until_rows(table, 5)
        write_stream(path, 7)
        until_rows(table, 12)
        write_stream(path, 7)
        until_rows(table, 19)
        assert ui.runs() == {asked}, "one run has written all of it"
        ui.cancel(asked)
        found = dagster.instance.fetch_materializations(staying_runs.stream.key, limit=100, ascending=True).records
        told = [event.asset_materialization for event in found]
        assert sum(one.metadata["ingest/messages"].value for one in told if one) == 19
        assert len(told) == 2, "the first batch, and the others together"
        ui.until_ticks_say(f"run {asked} was cancelled")
    assert_each_once(path, table)
