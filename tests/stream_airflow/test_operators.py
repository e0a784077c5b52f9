"""Each operator in a real run of Airflow: by the data interval of the run, with errors that are not retried."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from stream_consumers.create import create_producer
from tests.support.airflow_home import AirflowHome
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, sequences_in_table

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("airflow")]
SECRET = "hunter2hunter2"
DAYS = [int(datetime(2026, 11, day, 12, tzinfo=timezone.utc).timestamp() * 1000) for day in (16, 17, 18)]

RUN = """
import json, os
from datetime import datetime, timezone
from types import SimpleNamespace
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
from tests.support.airflow_dags.runs import run_dag
from tests.support.airflow_dags.tables import dag, missing

# A run by hand is of the last interval that is over.
run = run_dag(dag, logical_date=datetime(2026, 11, 18, 6, tzinfo=timezone.utc))
failed = run_dag(missing)
found = {"state": run.state, "failed": [[one.state, one.try_number] for one in failed.get_task_instances()]}
found["xcoms"] = {one.task_id: one.xcom_pull(task_ids=one.task_id) for one in run.get_task_instances()}
with create_session() as session:
    found["events"] = [event.extra for event in session.query(AssetEvent)]

def replay(max_tries, begun=1, **interval):
    run = SimpleNamespace(start_date=datetime(2026, 11, 19, begun))
    task = SimpleNamespace(dag_id="tables", task_id="replay", map_index=-1, run_id="r", max_tries=max_tries)
    return dag.get_task("replay").replay({"ti": task, "dag_run": run, "run_id": "r", **interval})

day = {"data_interval_start": datetime(2026, 11, 17), "data_interval_end": datetime(2026, 11, 18)}
print(dag.get_task("ingest").declared())
found["ids"] = [replay(tries, **day).id for tries in (0, 0, 3)]
found["ids"].append(replay(0, begun=2, **day).id)
try:
    replay(0, **{**day, "data_interval_end": datetime(2026, 11, 17)})
except Exception as error:
    found["empty"] = type(error).__name__
open(os.environ["TEST_RESULT"], "w").write(json.dumps(found, default=str))
"""


def write_days(path: Path) -> str:
    """Ten messages a day for three days, one of which is malformed."""
    url = f"file://{path}/orders"
    with create_producer(url) as producer:
        for day, begin in enumerate(DAYS):
            for index in range(10):
                payload = b"{" if (day, index) == (2, 3) else b'{"id": %d, "user": "u"}' % index
                producer.send(payload, timestamp_ms=begin + index)
    return url


def test_each_operator_does_what_its_job_does(tmp_path: Path) -> None:
    airflow = AirflowHome.make(tmp_path / "airflow")
    shutil.copy(ROOT / "tests" / "support" / "airflow_dags" / "tables.py", airflow.dags)
    source, table, result = write_days(tmp_path / "orders.ss"), tmp_path / "orders", tmp_path / "result.json"
    variables = {"TEST_STREAM": source, "TEST_TABLE": str(table), "TEST_RESULT": str(result)}
    printed = airflow.python(RUN, TEST_SECRET=SECRET, **variables)
    assert SECRET not in printed + result.read_text()
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["state"] == "success"
    assert found["failed"] == [["failed", 1]], "a retry cannot make the stream"
    xcoms = found["xcoms"]
    assert xcoms["wait"]["lag"] == 30
    assert (xcoms["ingest"]["rows"], xcoms["ingest"]["dead_letters"]) == (29, 1)
    assert xcoms["ingest"]["intervals"] == ["2026-11-16", "2026-11-17", "2026-11-18"]
    replayed = xcoms["replay"]
    assert replayed["intervals"] == ["2026-11-17T12"]
    assert (replayed["rows"], replayed["replaced_rows"], replayed["rows_left_out"]) == (10, 10, 0)
    assert (replayed["start"], replayed["stop"]) == ("2026-11-17T00:00:00+00:00", "2026-11-18T00:00:00+00:00")
    assert found["events"] == [replayed]
    for task in ("preview", "redrive"):
        assert (xcoms[task]["decoded"], xcoms[task]["still_dead"]) == (0, 1)
    assert xcoms["rebuild"]["rows"] == 29
    assert xcoms["verify"]["is_right"]
    assert (xcoms["verify"]["messages"], xcoms["verify"]["missing"], xcoms["verify"]["duplicated"]) == (30, 0, 0)
    assert set(sequences_in_table(table).values()) == {1}
    retry, same, *others = found["ids"]
    assert retry == same
    assert len({retry, *others}) == 3, "it was cleared, or its run was deleted and created again"
    assert found["empty"] == "InvalidOptionError"


MANY_AND_KILLED = """
import json, os, signal, threading, time
from pathlib import Path
from tests.support.airflow_dags.runs import run_dag
from tests.support.airflow_dags.tables import many, stays

run = run_dag(many)
found = {"state": run.state, "rows": [one.xcom_pull(task_ids="ingest", map_indexes=one.map_index)["rows"] for one in
    run.get_task_instances()]}

def end_it():
    # The task is in the loop of its batches as soon as it has written one.
    while not list(Path(os.environ["TEST_TABLE"]).glob("_delta_log/*1.json")):
        time.sleep(0.05)
    found["asked"] = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_it, daemon=True).start()
found["killed"] = run_dag(stays).state
found["seconds"] = time.monotonic() - found["asked"]
open(os.environ["TEST_RESULT"], "w").write(json.dumps(found, default=str))
"""


def test_streams_are_mapped_and_a_task_that_is_asked_to_end_does(tmp_path: Path) -> None:
    airflow = AirflowHome.make(tmp_path / "airflow")
    shutil.copy(ROOT / "tests" / "support" / "airflow_dags" / "tables.py", airflow.dags)
    source, table, result = write_days(tmp_path / "orders.ss"), tmp_path / "orders", tmp_path / "result.json"
    variables = {"TEST_STREAM": source, "TEST_TABLE": str(table), "TEST_RESULT": str(result)}
    airflow.python(MANY_AND_KILLED, TEST_SECRET=SECRET, **variables)
    found: dict[str, Any] = json.loads(result.read_text())
    assert (found["state"], found["rows"]) == ("success", [29, 29])
    assert found["killed"] == "failed"
    assert found["seconds"] < 60, "it would have stayed for ten minutes"
    for written in (f"{table}_one", f"{table}_two", table):
        assert_each_once(tmp_path / "orders.ss", written)
