"""``make demo-airflow``: a stream file into a Delta table by a DAG of ``examples/airflow``, with two tasks killed.

Airflow is a real one, with scheduler, triggerer, DAG processor and API server. Its trigger schedules the DAG,
because there are unread messages.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

from spark_jobs.jars import delta_jars
from stream_assets.cli.demo import DemoFolder, console, covered, make_empty, print_first_rows, print_result, produce
from stream_assets.cli.output import progress_bar
from stream_consumers.display import counted
from tests.support.airflow_home import AirflowHome
from tests.support.airflow_standalone import SETTINGS, Standalone, airflow_standalone
from tests.support.settings import ROOT

MESSAGES = 100_000
DAG = "orders_on_arrival"
DAGS = ROOT / "examples" / "airflow" / "dags"
DEADLINE_SECONDS = 1200.0
POLL_SECONDS = 0.5
FILE_POLL_SECONDS = 0.005


def run_demo(folder: DemoFolder) -> int:
    """Run the demo in an empty folder; return 0 only if each message is written exactly once."""
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    make_empty(folder.path)
    console.print(f"[bold]stream-assets demo on Airflow[/] in {folder.path}", soft_wrap=True)
    home = AirflowHome.make(folder.path / "airflow")
    variables = {"AIRFLOW__CORE__DAGS_FOLDER": str(DAGS), "SHOP": str(folder.path)}
    with progress_bar(console) as progress:
        delta_jars()
        produce(folder, progress)
        console.print("  Airflow starts")
        with airflow_standalone(home, **variables) as airflow:
            kills = _follow(folder, airflow, progress)
    print_first_rows(folder)
    # Airflow would listen on all interfaces. It prints the password of the user admin.
    names = {"AIRFLOW_HOME": str(home.folder), **variables, "AIRFLOW__API__HOST": SETTINGS["AIRFLOW__API__HOST"]}
    words = " ".join(f"{name}={value}" for name, value in names.items())
    console.print(
        f"the Airflow UI of these runs: {words} {home.place}/bin/airflow standalone", markup=False, soft_wrap=True
    )
    return print_result(folder, kills=kills)


def _follow(folder: DemoFolder, airflow: Standalone, progress: Progress) -> int:
    """Show what Airflow does until a run has succeeded and nothing is left to read; return how many tasks were killed.

    Raises:
        AssertionError: the demo took too long, or a run failed.
    """
    bar = progress.add_task("positions in the Delta log", total=folder.messages)
    plans = [(_starts_a_file, "in the middle of writing a batch"), (_commits, "right after its Delta commit")]
    killed, seen = 0, ""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not airflow.start_dag(DAG):
        assert time.monotonic() < deadline, airflow.log.read_text()[-8000:]
        time.sleep(POLL_SECONDS)
    while time.monotonic() < deadline:
        for task in airflow.tasks(DAG):
            state = f"attempt {task['try_number']} {task['state']}"
            if state != seen and task["state"] in ("running", "success", "failed"):
                seen = state
                console.print(f"  {task['dag_run_id'][:31]}: {_described(airflow, task)}", soft_wrap=True)
            if task["state"] == "running" and task["pid"] and killed < min(task["try_number"], len(plans)):
                is_due, how = plans[killed]
                if _kill(folder, task["pid"], is_due):
                    killed += 1
                    console.print(
                        f"  {task['dag_run_id'][:31]}: [red]killed with SIGKILL {how}[/]; "
                        f"the ledger has {counted(covered(folder), 'message')}",
                        soft_wrap=True,
                    )
        done = covered(folder)
        progress.update(bar, completed=done)
        states = [run["state"] for run in airflow.runs(DAG)]
        if "failed" in states:
            break
        if done == folder.messages and states and set(states) == {"success"}:
            return killed
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"the demo did not finish; read {airflow.log}, and the logs in {airflow.log.parent / 'logs'}")


def _described(airflow: Standalone, task: dict[str, Any]) -> str:
    if task["state"] != "running":
        return f"attempt {task['try_number']} {task['state']}"
    if task["try_number"] > 1:
        return f"Airflow retries the task: attempt {task['try_number']}"
    run = airflow.ask(f"dags/{DAG}/dagRuns/{task['dag_run_id']}/upstreamAssetEvents")
    (event,) = run["asset_events"]
    return f"the trigger scheduled the run: lag {event['extra']['payload']['lag']}"


def _kill(folder: DemoFolder, pid: int, is_due: Callable[[DemoFolder], Callable[[], bool]]) -> bool:
    """Kill a task when something has happened; returns whether it happened before the end of the task."""
    has_happened = is_due(folder)
    while not has_happened():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(FILE_POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    return True


def _starts_a_file(folder: DemoFolder) -> Callable[[], bool]:
    before = _files(folder)
    return lambda: not _files(folder) <= before


def _commits(folder: DemoFolder) -> Callable[[], bool]:
    before = _files(folder, "_delta_log", ending=".json")
    # A new group begins with a commit without rows.
    rows = 1 if before else 2
    return lambda: len(_files(folder, "_delta_log", ending=".json") - before) >= rows


def _files(folder: DemoFolder, *inside: str, ending: str = ".parquet") -> frozenset[str]:
    place = Path(folder.table, *inside)
    return frozenset(name for name in os.listdir(place) if name.endswith(ending)) if place.exists() else frozenset()


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".demo" / "airflow"
    sys.exit(run_demo(DemoFolder(place, MESSAGES, group="lakehouse")))
