"""A real Airflow: a task writes a stream into a table, and the trigger that schedules it fires."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource
from tests.support.airflow_home import LOWEST, NEWEST, AirflowHome
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, write_stream

pytestmark = pytest.mark.xdist_group("airflow")

# One process, because importing Airflow takes several seconds.
RUN_TWICE = """
import asyncio, json, os, sys
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
from stream_airflow.trigger import StreamLagTrigger
from tests.support.airflow_dags.orders import dag, messages
from tests.support.airflow_dags.runs import run_dag

async def first(trigger):
    async for event in trigger.run():
        return event.payload

path, arguments = messages.watchers[0].trigger.serialize()
trigger = StreamLagTrigger(**json.loads(json.dumps(arguments)))
found = {"path": path, "same": trigger.serialize() == (path, arguments)}
found["fired"] = asyncio.run(asyncio.wait_for(first(trigger), 60))
found["states"], found["xcoms"] = [], []
for _ in range(2):
    run = run_dag(dag)
    found["states"].append(run.state)
    # The next run may delete this one.
    found["xcoms"] += [one.xcom_pull(task_ids="ingest") for one in run.get_task_instances()]
try:
    found["silent"] = asyncio.run(asyncio.wait_for(first(trigger), 2))
except asyncio.TimeoutError:
    found["silent"] = True
with create_session() as session:
    found["events"] = [event.extra for event in session.query(AssetEvent).order_by(AssetEvent.id)]
found["imported"] = sorted({name.partition(".")[0] for name in sys.modules} & {"dagster", "sensors", "stream_assets"})
open(os.environ["TEST_RESULT"], "w").write(json.dumps(found, default=str))
"""


@pytest.fixture(params=[NEWEST, pytest.param(LOWEST, marks=pytest.mark.slow)])
def airflow(tmp_path: Path, request: pytest.FixtureRequest) -> AirflowHome:
    home = AirflowHome.make(tmp_path / "airflow", request.param)
    shutil.copy(ROOT / "tests" / "support" / "airflow_dags" / "orders.py", home.dags)
    return home


def test_a_task_writes_each_message_once_and_reports_it(tmp_path: Path, airflow: AirflowHome) -> None:
    source, table = write_stream(tmp_path / "orders.ss", 100, malformed=frozenset({5})), tmp_path / "orders"
    result = tmp_path / "result.json"
    airflow.python(RUN_TWICE, TEST_STREAM=source, TEST_TABLE=str(table), TEST_RESULT=str(result))
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["same"]
    assert found["fired"] == {
        "source": source,
        "group": "lakehouse",
        "table": str(table),
        "lag": 100,
        "shards": {"orders/0": 50, "orders/1": 50},
    }
    assert found["states"] == ["success", "success"]
    first, second = found["xcoms"]
    assert {name: first[name] for name in ("batches", "rows", "messages", "dead_letters", "lag", "version")} == {
        "batches": 1,
        "rows": 99,
        "messages": 99,
        "dead_letters": 1,
        "lag": 0,
        "version": 1,
    }
    assert (second["batches"], second["rows"], second["version"]) == (0, 0, 1)
    assert found["events"] == [first, second]
    assert found["silent"] is True, "everything has been read"
    assert not found["imported"]
    assert_each_once(tmp_path / "orders.ss", table)
    with StreamSource(source).open() as opened:
        verdicts = verify(opened, Ingestion("lakehouse", str(table)))
    assert [verdict.missing for verdict in verdicts] == [0, 0]
    assert all(verdict.is_right for verdict in verdicts)
