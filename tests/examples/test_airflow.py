"""The example with Airflow, and the page about it: DAGs are loaded; a real Airflow runs them and shows its pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from deltalake import DeltaTable

from tests.support.airflow_home import AirflowHome
from tests.support.airflow_standalone import Standalone, airflow_standalone
from tests.support.browser import Browser, browser
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.spark_servers import spark_servers
from tests.support.streams import assert_each_once

pytestmark = pytest.mark.xdist_group("airflow")
EXAMPLE = ROOT / "examples" / "airflow"
SECONDS = 900.0
PAGE = ROOT / "docs" / "airflow.md"
# What Airflow makes of a folder with DAGs.
LOADED = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(sys.argv[1], bundle_name="example")
loaded = {name: [type(task).__name__ for task in dag.tasks] for name, dag in bag.dags.items()}
print(json.dumps({"errors": bag.import_errors, "dags": loaded}))
"""


def test_airflow_loads_the_dags_of_the_example_and_of_the_page(tmp_path: Path) -> None:
    home = AirflowHome.make(tmp_path / "airflow")
    for path in (EXAMPLE / "dags").glob("*.py"):
        (home.dags / path.name).write_text(path.read_text())
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (home.dags / "page.py").write_text("\n".join(programs))
    found = json.loads(home.python(LOADED, home.dags).splitlines()[-1])
    assert found == {
        "errors": {},
        "dags": {
            "orders": ["IngestOperator"],
            "orders_on_arrival": ["IngestOperator"],
            "orders_hourly": ["IngestOperator", "VerifyOperator"],
            "orders_backfill": ["ReplayOperator"],
        },
    }


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser."""
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def shop() -> Iterator[Path]:
    """A folder with a short name, because pictures show it."""
    with tempfile.TemporaryDirectory(prefix="shop-", dir="/tmp") as made:
        yield Path(made)


def produce(shop: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SHOP": str(shop)}
    subprocess.run([sys.executable, EXAMPLE / "produce_orders.py"], env=environment, check=True, timeout=SECONDS)


def rows(table: Path) -> list[tuple[int, str, datetime]]:
    """The rows of a table: id, user and time."""
    found = DeltaTable(str(table)).to_pyarrow_table(columns=["id", "user", "_timestamp"]).to_pydict()
    return [*zip(found["id"], found["user"], found["_timestamp"])]


def finished(airflow: Standalone, dag: str, count: int) -> list[dict[str, Any]]:
    """The runs of a DAG, when there are this many or more and all have succeeded."""
    runs = airflow.runs(dag)
    assert "failed" not in [run["state"] for run in runs], airflow.log.read_text()[-8000:]
    return runs if len(runs) >= count and {run["state"] for run in runs} == {"success"} else []


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.browser
@pytest.mark.timeout(3 * SECONDS)
def test_airflow_runs_the_dags_of_the_example_and_shows_them(tmp_path: Path, shop: Path, page: Browser) -> None:
    home = AirflowHome.make(tmp_path / "airflow")
    produce(shop)
    variables = {"AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLE / "dags"), "SHOP": str(shop)}
    with (
        spark_servers(tmp_path / "servers") as servers,
        airflow_standalone(home, **servers.variables, **variables) as airflow,
    ):
        for count in (1, 2):
            if count == 2:
                produce(shop)
            until(lambda: airflow.start_dag("orders_on_arrival"), seconds=SECONDS, what="the DAG")
            until(lambda c=count: finished(airflow, "orders_on_arrival", c), seconds=SECONDS, what=f"run {count}")
            assert_each_once(shop / "orders.ss", shop / "lake" / "orders")
        until(lambda: airflow.start_dag("orders_hourly"), seconds=SECONDS, what="the DAG")
        until(lambda: finished(airflow, "orders_hourly", 1), seconds=SECONDS, what="the hourly run")
        assert {task["task_id"] for task in airflow.tasks("orders_hourly")} == {"ingest", "verify"}
        assert_each_once(shop / "orders.ss", shop / "lake" / "orders_hourly")

        before = rows(shop / "lake" / "orders")
        today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        days = {"from_date": today - timedelta(days=3), "to_date": today - timedelta(days=1)}
        body = {"dag_id": "orders_backfill", **{name: moment.isoformat() for name, moment in days.items()}}
        until(lambda: airflow.ask("backfills", method="POST", body=body), seconds=SECONDS, what="a backfill")
        until(lambda: airflow.start_dag("orders_backfill"), seconds=SECONDS, what="the DAG")
        until(lambda: finished(airflow, "orders_backfill", 3), seconds=SECONDS, what="the backfill")
        expected = [(i, user.upper() if moment < today else user, moment) for i, user, moment in before]
        assert sorted(rows(shop / "lake" / "orders")) == sorted(expected)
        assert 0 < sum(moment < today for _, _, moment in before) < len(before)
        assert_each_once(shop / "orders.ss", shop / "lake" / "orders")
        look(page, airflow)


def look(page: Browser, airflow: Standalone) -> None:
    (asset,) = airflow.ask("assets?name_pattern=order_messages")["assets"]
    page.open(airflow.address)
    page.driver.add_cookie({"name": "_token", "value": airflow.token})
    page.open(f"{airflow.address}/assets/{asset['id']}")
    page.see("order_messages", "orders_on_arrival")
    page.picture("airflow-asset")
    page.open(f"{airflow.address}/dags/orders_backfill/runs")
    page.see("orders_backfill", "backfill__")
    page.picture("airflow-grid")
    run = airflow.runs("orders_on_arrival")[-1]["dag_run_id"]
    page.open(f"{airflow.address}/dags/orders_on_arrival/runs/{quote(run)}/tasks/ingest")
    page.see("version 2 of")
    page.picture("airflow-log")
