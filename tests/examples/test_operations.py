"""The example for operators: it loads, and sends what it promises to a real server."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import pytest

from stream_assets import NewDeadLetters
from tests.support.settings import ROOT

EXAMPLE = ROOT / "examples" / "operations" / "definitions.py"


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the webhook was told."""
    texts: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            """Nothing is printed."""

    with HTTPServer(("127.0.0.1", 0), Webhook) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("ALERT_WEBHOOK", f"http://127.0.0.1:{server.server_port}/hook")
        yield texts
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_the_example_loads_and_tells_of_what_goes_wrong(
    received: list[str], folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    example = runpy.run_path(str(EXAMPLE))
    defs = example["defs"]
    dg.Definitions.validate_loadable(defs)
    assert {schedule.name for schedule in defs.schedules} == {"orders_maintenance", "check_orders_schedule"}
    assert {sensor.name for sensor in defs.sensors} == {
        "orders_lag",
        "orders_dead_letters",
        "failed_runs",
        "failed_checks",
    }
    found = NewDeadLetters(dg.AssetKey("orders"), "lake/orders_dead_letters", 2, 5, 0)
    example["alert_of_dead_letters"](None, found)
    # The stream is not there, so that a run of the asset fails.
    job = defs.resolve_job_def("ingest_orders")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    context = dg.build_run_status_sensor_context(
        sensor_name="failed_runs",
        dagster_instance=instance,
        dagster_run=result.dagster_run,
        dagster_event=result.get_run_failure_event(),
    ).for_run_failure()
    example["failed_runs"](context)
    dead, failed = received
    assert dead == "lake/orders_dead_letters has 2 new dead letters of orders, 5 in all"
    assert failed.startswith(f"run {result.run_id} of ingest_orders failed: ")


def test_failed_checks_of_a_run_that_succeeds_are_reported(
    received: list[str], folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    example = runpy.run_path(str(EXAMPLE))
    # All checks fail until the group has written the table.
    result = example["defs"].resolve_job_def("check_orders").execute_in_process(instance=instance)
    assert result.success
    context = dg.build_run_status_sensor_context(
        sensor_name="failed_checks",
        dagster_instance=instance,
        dagster_run=result.dagster_run,
        dagster_event=result.get_run_success_event(),
    )
    example["failed_checks"](context)
    failed = {check.check_name for check in result.get_asset_check_evaluations() if not check.passed}
    assert {"lag", "freshness"} <= failed
    assert sorted(text.split()[1] for text in received) == sorted(failed)
    assert all(result.run_id in text for text in received)
