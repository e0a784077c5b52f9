"""The wheel, installed into an empty environment outside of the repository: README's example, and the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.settings import ROOT

# An environment of some 400 MB is downloaded unless it is cached, and five JVMs start one after the other.
PATIENCE = 1500
pytestmark = [
    pytest.mark.slow,
    pytest.mark.dagster,
    pytest.mark.kill,
    pytest.mark.timeout(3 * PATIENCE),
    pytest.mark.xdist_group("wheel"),
]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command of that environment in a folder, where nothing of the repository can be imported."""
    place = tmp_path_factory.mktemp("wheel")
    uv = str(Path(sys.executable).with_name("uv"))
    cleared = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}

    def call(folder: Path, command: str, *words: str) -> str:
        environment = {**cleared, "DAGSTER_HOME": str(folder), "COLUMNS": "200"}
        done = subprocess.run(
            [command, *words],
            cwd=folder,
            env={**environment, "PATH": f"{place}/venv/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(place, uv, "build", "--quiet", "--out-dir", str(place), str(ROOT))
    call(place, uv, "venv", "--quiet", "--python", sys.executable, "venv")
    (wheel,) = place.glob("*.whl")
    # Or where nothing is to write bytecode, each of some twenty processes would compile Dagster and PySpark.
    call(place, uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", "venv/bin/python", str(wheel))

    def run_installed(folder: Path, command: str, *words: str) -> str:
        return call(folder, str(place / "venv" / "bin" / command), *words)

    return run_installed


def test_the_package_is_that_of_the_wheel_and_typed(run: Run, folder: Path) -> None:
    packages = "import stream_consumers, spark_jobs, sensors, stream_assets as last"
    shown = run(folder, "python", "-c", f"{packages}; print(last.stream_asset.__module__, last.__file__)")
    assert shown.startswith("stream_assets.asset ")
    assert str(ROOT) not in shown
    site = Path(shown.split(maxsplit=1)[1].strip()).parents[1]
    for package in ("stream_consumers", "spark_jobs", "sensors", "stream_assets"):
        assert (site / package / "py.typed").exists(), package


def test_the_example_of_the_readme(run: Run, folder: Path) -> None:
    (example,) = re.findall(
        r"```python\n(from stream_assets import .*?defs = .*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert "kafka://localhost:9092/orders" in example
    (folder / "definitions.py").write_text(example.replace("kafka://localhost:9092/", "file://orders.ss/"))
    run(folder, "stream-assets", "produce", "file://orders.ss/orders", "--count", "1000")
    run(folder, "dagster", "job", "execute", "-f", "definitions.py", "-j", "ingest_orders")
    table = ["--table", "lake/orders", "--group", "lakehouse"]
    assert '"lag": 0' in run(folder, "stream-assets", "lag", "file://orders.ss/orders", *table, "--json")
    run(folder, "stream-assets", "verify", "--source", "file://orders.ss/orders", *table)
