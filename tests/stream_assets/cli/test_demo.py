"""The demo, with fewer messages: real daemon, sensor, runs, kills, retries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from tests.support.spark_servers import spark_servers
from tests.support.streams import assert_each_once

# A cold JVM, and Dagster: minutes where the machine has other work.
PATIENCE = 1500
pytestmark = [pytest.mark.dagster, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(PATIENCE + 60)]


def test_the_demo_survives_its_kills_and_proves_it(folder: Path) -> None:
    command = [sys.executable, "-m", "stream_assets.cli.main", "demo", "--messages", "8000"]
    with spark_servers(folder / "servers") as servers:
        environment = servers.environment(COLUMNS="200")
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert len(servers.living()) == 1, "the kills of its runs did not reach their Spark"
    log = folder / ".demo" / "daemon.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    last = done.stdout.strip().splitlines()[-1]
    assert last == "demo: 8000 produced, 7980 rows, 20 dead letters, 0 missing, 0 duplicated, lag 0"
    assert_each_once(folder / ".demo" / "orders.ss", folder / ".demo" / "lake" / "orders")
    killed = re.findall(r"run (\w+) killed with SIGKILL (in the middle of writing|right after)", done.stdout)
    assert [how for _, how in killed] == ["in the middle of writing", "right after"]
    with dg.DagsterInstance.from_config(str(folder / ".demo" / "dagster")) as instance:
        statuses = [record.dagster_run.status.value for record in reversed(instance.get_run_records())]
        assert statuses[-1] == "SUCCESS", "the sensor retried failed runs"
        assert statuses.count("SUCCESS") == 1, "and asked for no more"
        assert statuses.count("FAILURE") >= 2
        reported = instance.fetch_materializations(dg.AssetKey("orders"), limit=50).records
        assert reported, "what a run wrote is reported as a materialization"
        lags = instance.fetch_observations(dg.AssetKey(["file", "orders.ss", "orders"]), limit=50).records
        assert lags, "the lag is reported as observations of the stream"
