"""Private folders of Spark: made, locked, removed, and cleaned up after a process that was killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_jobs.spark_start import PREFIX, launch, private_folders, set_private_folders
from tests.support.settings import ROOT

MAKE = """\
import os, sys
from pathlib import Path
from spark_jobs.spark_start import private_folders
os.umask(0)
folder = Path(private_folders(sys.argv[1]))
(folder / "blockmgr").mkdir()
(folder / "blockmgr" / "shuffle").write_text("4111")
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(folder, folder.exists(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a private folder until its input ends."""
    command = [sys.executable, "-c", MAKE, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        folder, exists = process.stdout.readline().split()
        assert exists == "True", "a forked child has removed it"
        yield process, Path(folder)


def test_a_folder_is_private_and_goes_with_its_process(tmp_path: Path) -> None:
    with holding(tmp_path / "new") as (_, folder):
        assert folder.parent == tmp_path / "new"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "target"
    foreign.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(foreign)
    with holding(tmp_path) as (process, killed):
        process.kill()
    assert killed.exists()
    with holding(tmp_path) as (_, living), holding(tmp_path) as (_, another):
        assert (killed.exists(), living.exists(), another.exists(), foreign.exists()) == (False, True, True, True)


def test_the_folders_of_the_variable_are_those_of_the_user_but_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = f"{tmp_path / 'fast'},{tmp_path / 'large'}"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", given)
    seen: list[str] = []

    def launch_gateway() -> SimpleNamespace:
        seen.append(os.environ["SPARK_LOCAL_DIRS"])
        return SimpleNamespace(_gateway_client=SimpleNamespace(_get_connection=None), proc=None)

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch_gateway)
    launch({})
    made = [Path(one) for one in seen[0].split(",")]
    assert [one.parent for one in made] == [tmp_path / "fast", tmp_path / "large"]
    assert {stat.S_IMODE(one.stat().st_mode) for one in made} == {0o700}
    assert os.environ["SPARK_LOCAL_DIRS"] == given
    assert private_folders(given) == ",".join(map(str, made)), "a process has one folder in each of them"


class Settings(dict[str, str]):
    """Stands for the settings of a context."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,1,1024]", "spark://m:7077", "k8s://https://m"])
def test_the_executors_of_a_cluster_do_not_get_the_folder_of_the_driver(master: str, tmp_path: Path) -> None:
    given = {"spark.local.dir": str(tmp_path), "spark.hadoop.hadoop.tmp.dir": str(tmp_path)}
    settings = Settings({"spark.master": master, **given})
    set_private_folders(settings, SimpleNamespace(jvm=SimpleNamespace(SparkConf=lambda _: {})))  # type: ignore[arg-type]
    private = {name for name in given if Path(settings[name]).parent == tmp_path}
    assert private == (set(given) if master.startswith("local") else {"spark.local.dir"})


@pytest.mark.parametrize("folder", ["/data/hadoop-${user.name}", "file:///data"])
def test_a_folder_that_only_hadoop_can_read_is_replaced(folder: str) -> None:
    settings = Settings({"spark.hadoop.hadoop.tmp.dir": folder})
    set_private_folders(settings, SimpleNamespace(jvm=SimpleNamespace(SparkConf=lambda _: {})))  # type: ignore[arg-type]
    assert stat.S_IMODE(Path(settings["spark.hadoop.hadoop.tmp.dir"]).stat().st_mode) == 0o700
