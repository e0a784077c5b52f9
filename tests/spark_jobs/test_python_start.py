"""What another Python imports that this project starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_jobs.python_start import SAFE_PATH_VARIABLE, forget_worker_variables, worker_variables
from tests.support.settings import ROOT

SECONDS = 300
DEFINITIONS = """
import json
import subprocess
import sys
from pathlib import Path

import dagster

from spark_jobs.python_start import own_python, worker_python


@dagster.op
def say():
    assert not {"", str(Path.cwd())} & set(sys.path), "Dagster looks there no longer"
    statement = f"import {__name__} as found; print(found.__file__)"
    commands = [own_python(statement), worker_python(sys.executable, statement)]
    said = [subprocess.run(one, cwd="/", capture_output=True, text=True).stdout.strip() for one in commands]
    Path("said.json").write_text(json.dumps(said))


@dagster.job
def job():
    say()
"""
IMPORTED = """
import sys
from importlib import import_module
from pathlib import Path

from spark_jobs.python_start import imports_from_here

sys.path[0] = str(Path.cwd())
import_module(sys.argv[1])
del sys.path[0]
print(imports_from_here())
"""


@pytest.mark.slow
def test_what_dagster_loaded_from_the_working_folder_can_be_imported(tmp_path: Path) -> None:
    """``dagster code-server start -f definitions.py``, for instance, looks there only while it loads them."""
    file = tmp_path / "some_code.py"
    file.write_text(DEFINITIONS)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dagster")), "job", "execute", "-f", file.name, "-j", "job"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "said.json").read_text()) == [str(file)] * 2


@pytest.mark.parametrize(
    ("module", "files", "is_here"),
    [
        ("some_code", ["here/some_code.py"], True),
        ("a_package", ["here/a_package/__init__.py"], True),
        ("a_folder.some_code", ["here/a_folder/some_code.py"], True),
        ("some_code", ["installed/some_code.py"], False),
        ("a_package", ["installed/a_package/__init__.py", "here/a_package.txt"], False),
    ],
)
def test_modules_of_the_working_folder_are_known(tmp_path: Path, module: str, files: list[str], is_here: bool) -> None:
    for name in ("here", *files):
        file = tmp_path / name
        (file.parent if file.suffix else file).mkdir(parents=True, exist_ok=True)
        if file.suffix:
            # As where Kubernetes mounts it.
            (tmp_path / "mounted").touch()
            file.symlink_to(tmp_path / "mounted")
    (tmp_path / "program.py").write_text(IMPORTED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), module],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'installed'}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    assert done.stdout == f"{is_here}\n"


@pytest.mark.parametrize("given", [None, "1"])
def test_what_workers_start_has_the_variables_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SAFE_PATH_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(SAFE_PATH_VARIABLE, given)
    for name, value in worker_variables().items():
        monkeypatch.setenv(name, value)
    assert os.environ[SAFE_PATH_VARIABLE], "a worker looks elsewhere"
    forget_worker_variables()
    assert os.environ.get(SAFE_PATH_VARIABLE) == given
