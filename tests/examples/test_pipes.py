"""The example of a job on a cluster: Dagster starts it, and is told what it wrote."""

from __future__ import annotations

import runpy
import stat
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from spark_jobs.spark_start import GUARD
from tests.support.settings import ROOT
from tests.support.spark_cluster import spark_cluster
from tests.support.streams import assert_each_once, write_stream

# Dagster warns of what its own client does.
pytestmark = pytest.mark.filterwarnings("default")
# Copies the settings and the mode of their folder, and fails.
SPARK_SUBMIT = """#!/bin/sh
while [ "$1" != --properties-file ]; do shift; done
cp "$2" "{folder}/settings.conf"
stat -c %a "$(dirname "$2")" > "{folder}/mode"
exit 1
"""


@pytest.mark.spark
@pytest.mark.slow
def test_a_job_of_spark_submit_tells_dagster_what_it_wrote(
    folder: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    write_stream(folder / "orders.ss", 300, malformed=frozenset({7}))
    with spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster:
        monkeypatch.setenv("SPARK_MASTER", cluster.master)
        monkeypatch.setenv("SPARK_CONF_DIR", str(cluster.configuration))
        defs: Any = runpy.run_path(str(ROOT / "examples" / "pipes" / "definitions.py"))["defs"]
        found = [materialized(defs, instance) for _ in range(2)]
    assert_each_once(folder / "orders.ss", folder / "lake" / "orders")
    assert [(one["rows"], one["dead_letters"]) for one in found] == [(299, 1), (0, 0)]
    assert found[0]["delta/version"] == found[1]["delta/version"]


def test_no_other_user_reads_what_the_job_holds(
    folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = folder / "bin" / "spark-submit"
    program.parent.mkdir()
    program.write_text(SPARK_SUBMIT.format(folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("SPARK_MASTER", raising=False)
    defs: Any = runpy.run_path(str(ROOT / "examples" / "pipes" / "definitions.py"))["defs"]
    job = defs.resolve_implicit_global_asset_job_def()
    assert not job.execute_in_process(instance=instance, raise_on_error=False).success
    settings = dict(line.split(" ", 1) for line in (folder / "settings.conf").read_text().splitlines())
    assert settings.items() >= {**GUARD, "spark.ui.enabled": "false"}.items()
    private = settings["spark.local.dir"]
    assert f"-Djava.io.tmpdir={private}" in settings["spark.driver.extraJavaOptions"]
    assert (folder / "mode").read_text().strip() == "700"


def materialized(defs: dg.Definitions, instance: dg.DagsterInstance) -> dict[str, object]:
    """What Dagster knows of the table after a run."""
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    (made,) = result.asset_materializations_for_node("orders")
    return {name: value.value for name, value in made.metadata.items()}
