"""The samples of examples/deployment: Dagster loads each ``dagster.yaml``, and the values of its chart are read."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from spark_jobs.batches.run_control import FINISH_SECONDS
from spark_jobs.session import IN_PROCESS, LOCAL_DEFAULTS, SPARK_VARIABLE
from tests.support.dagster_services import WORKSPACE_YAML
from tests.support.dying_runs import DIED
from tests.support.postgres import postgres_server
from tests.support.servers import running
from tests.support.settings import ROOT

SAMPLES = ROOT / "examples" / "deployment"
# Ten times what it takes alone.
RETRY_SECONDS = 600.0
PACKAGES = ["stream_assets", "sensors", "spark_jobs", "stream_consumers"]


@dg.asset(pool="replay_orders")
def orders() -> None:
    """In a pool, as replays are."""


@contextmanager
def loaded(sample: str, home: Path) -> Iterator[dg.DagsterInstance]:
    home.mkdir(exist_ok=True)
    shutil.copy(SAMPLES / sample / "dagster.yaml", home)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


def check_settings(instance: dg.DagsterInstance) -> None:
    """What both samples promise."""
    names = ("run_monitoring", "run_retries", "concurrency", "sensors")
    settings = {name: instance.get_settings(name) for name in names}
    assert settings["run_monitoring"]["enabled"]
    # A run that is cancelled has some time for its batch; it is not given up before.
    assert settings["run_monitoring"]["cancel_timeout_seconds"] > FINISH_SECONDS
    assert settings["run_retries"]["enabled"]
    assert not settings["run_retries"]["retry_on_asset_or_op_failure"], "the sensor tries those again"
    assert settings["concurrency"]["pools"] == {"default_limit": 1, "granularity": "run"}
    assert settings["concurrency"]["runs"]["max_concurrent_runs"] > 1
    assert settings["sensors"]["use_threads"], "one broker that does not answer would hold up all sensors"
    assert sorted(instance.managed_python_loggers) == sorted(PACKAGES)


def check_runs(instance: dg.DagsterInstance) -> None:
    """Runs, events and pools are kept where the sample says."""
    assert dg.materialize([orders], instance=instance).success
    assert instance.get_latest_materialization_event(orders.key) is not None
    assert [run.status for run in instance.get_runs()] == [dg.DagsterRunStatus.SUCCESS]


def test_the_sample_for_one_machine(tmp_path: Path) -> None:
    with loaded("one-machine", tmp_path) as instance:
        check_settings(instance)
        check_runs(instance)
    assert list(tmp_path.rglob("*.db")), "the files of SQLite are in the home of Dagster"


@pytest.mark.slow
# Dagster says so of each handler that a dagster.yaml configures.
@pytest.mark.filterwarnings("ignore:.*yaml-defined logging:dagster.BetaWarning")
def test_the_sample_with_postgres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with postgres_server() as server:
        for name, value in {**asdict(server), "db": server.database}.items():
            monkeypatch.setenv(f"DAGSTER_POSTGRES_{name.upper()}", str(value))
        with loaded("postgres", tmp_path) as instance:
            check_settings(instance)
            check_runs(instance)
            assert server.rows("SELECT status FROM runs") == [("SUCCESS",)]
            check_killed_run(instance, tmp_path)
        assert not list(tmp_path.rglob("*.db")), "nothing is in SQLite"
    assert server.password not in capsys.readouterr().err


def check_killed_run(instance: dg.DagsterInstance, home: Path) -> None:
    """A daemon with these settings starts a run again whose process was killed."""
    workspace = home / "workspace.yaml"
    module = "tests.support.dying_runs"
    workspace.write_text(WORKSPACE_YAML.format(module=module, root=ROOT))
    environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT), DIED: str(home / "has-died")}
    command = [sys.executable, "-m", "tests.support.quick_daemon", "run", "-w", str(workspace)]
    log = home / "daemon.log"
    # Its code server would wait for the run that was killed, for ever.
    with running(
        "the Dagster daemon", command, log, environment=environment, stop=signal.SIGINT, with_children=True
    ) as it:
        wanted = dg.RunsFilter(job_name="die", statuses=[dg.DagsterRunStatus.SUCCESS])
        (again,) = it.until(lambda: instance.get_runs(wanted), seconds=RETRY_SECONDS, what="a run that succeeds")
    assert again.parent_run_id is not None
    killed = instance.get_run_by_id(again.parent_run_id)
    assert killed is not None
    assert killed.status is dg.DagsterRunStatus.FAILURE


def test_the_values_of_the_chart_name_secrets_and_leave_a_cancelled_run_its_time() -> None:
    values = yaml.safe_load((SAMPLES / "kubernetes" / "values.yaml").read_text())
    (deployment,) = values["dagster-user-deployments"]["deployments"]
    assert deployment["envSecrets"] == [{"name": "orders"}]
    assert not [one["name"] for one in deployment["env"] if re.search("PASSWORD|SECRET|TOKEN", one["name"])]
    assert "postgresqlPassword" not in values["postgresql"]
    pods = values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]
    assert pods["podSpecConfig"]["terminationGracePeriodSeconds"] > FINISH_SECONDS


def merged(onto: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge as dagster-k8s does: fields of objects one by one, the second ones first in priority; lists are joined."""
    result = dict(onto)
    for name, value in over.items():
        now = result.get(name)
        if isinstance(now, dict):
            result[name] = merged(now, value)
        elif isinstance(now, list):
            result[name] = [*now, *value]
        else:
            result[name] = value
    return result


def container_of_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """The container of a run: the settings of its code location have priority over those of the run launcher."""
    container = values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]["containerConfig"]
    (deployment,) = values["dagster-user-deployments"]["deployments"]
    if not deployment["includeConfigInLaunchedRuns"]["enabled"]:
        return dict(container)
    return merged(container, {name: deployment[name] for name in ("resources", "env") if deployment.get(name)})


def test_the_pod_of_a_run_has_the_memory_and_the_environment_of_a_run() -> None:
    values = yaml.safe_load((SAMPLES / "kubernetes" / "values.yaml").read_text())
    container = container_of_run(values)
    heap = int(LOCAL_DEFAULTS["spark.driver.memory"].removesuffix("g"))
    assert int(container["resources"]["requests"]["memory"].removesuffix("Gi")) >= 2 * heap
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) > 2 * heap
    assert {"name": SPARK_VARIABLE, "value": IN_PROCESS} in container["env"]
