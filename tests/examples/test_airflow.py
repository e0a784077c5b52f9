"""The example with Airflow, and the page about it: Airflow loads their DAGs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.airflow_home import AirflowHome
from tests.support.settings import ROOT

pytestmark = pytest.mark.xdist_group("airflow")
EXAMPLE = ROOT / "examples" / "airflow"
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
