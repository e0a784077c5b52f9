"""What the UI asks of a Dagster webserver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import dagster as dg

from tests.support.dagster_services import Dagster
from tests.support.polling import until

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

    def launch(self, job: str, config: Mapping[str, Any] | None = None) -> str:
        what = {"selector": {**self.location, "jobName": job}, "runConfigData": config or {}}
        launched = self.ask(LAUNCH, what=what)
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
