"""``make demo-airflow``: a real Airflow, whose trigger schedules a DAG, and two of whose tasks are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.settings import ROOT
from tests.support.spark_servers import spark_servers
from tests.support.streams import assert_each_once

# Airflow has four processes that start beside Spark: minutes where the machine has other work.
PATIENCE = 1500
pytestmark = [
    pytest.mark.kill,
    pytest.mark.slow,
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.xdist_group("airflow"),
]


def test_the_demo_on_airflow_survives_its_kills_and_proves_it(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    with spark_servers(tmp_path / "servers") as servers:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.airflow_demo", str(demo)],
            cwd=ROOT,
            env=servers.environment(COLUMNS="300"),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last == "demo: 100000 produced, 99980 rows, 20 dead letters, 0 missing, 0 duplicated, lag 0"
    assert re.findall(r"killed with SIGKILL (in the middle of writing|right after)", done.stdout) == [
        "in the middle of writing",
        "right after",
    ]
    assert "the trigger scheduled the run: lag 100000" in done.stdout
    assert_each_once(demo / "orders.ss", demo / "lake" / "orders")
