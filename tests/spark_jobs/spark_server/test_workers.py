"""The interpreter that a server has for its Python workers, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spark_jobs.spark_server.workers import end_workers, write_interpreter
from tests.support.polling import until
from tests.support.settings import ROOT

MODULE = """\
import json, os, sys, time
print(json.dumps([os.getcwd(), sys.argv[1:], __name__]), flush=True)
time.sleep(600)
"""


def test_workers_work_where_the_run_works_and_end_with_their_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "some_worker.py").write_text(MODULE)
    interpreter, folder = tmp_path / "it's python", tmp_path / "workers of a session"
    write_interpreter(interpreter, python=sys.executable, folder=folder)
    started = {}
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for session in ("one", "other"):
        started[session] = subprocess.Popen(
            [str(interpreter), "-m", "some_worker", "word"],
            cwd="/",
            env={**os.environ, "SPARK_JOB_ARTIFACT_UUID": session, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
    signal.signal(signal.SIGTERM, before)
    for process in started.values():
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == [str(tmp_path), ["word"], "__main__"]
    end_workers(folder, "one")
    assert until(lambda: started["one"].poll() is not None, seconds=20)
    assert started["other"].poll() is None
    end_workers(folder, "other")
    assert until(lambda: started["other"].poll() is not None, seconds=20)
    assert {file.name for file in folder.iterdir()} == {"ended.one", "ended.other"}
    for process in started.values():
        process.communicate()


def test_workers_import_nothing_from_the_working_folder_unless_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, modules = tmp_path / "here", tmp_path / "modules"
    here.mkdir()
    modules.mkdir()
    (modules / "some_worker.py").write_text("import json; print('the worker')")
    (here / "json.py").write_text("print('of the working folder')")
    monkeypatch.chdir(here)
    environment = {**os.environ, "SPARK_JOB_ARTIFACT_UUID": "one", "PYTHONPATH": f"{ROOT}:{modules}"}
    said = []
    for _ in range(2):
        write_interpreter(tmp_path / "python", python=sys.executable, folder=tmp_path / "workers")
        command = [str(tmp_path / "python"), "-m", "some_worker"]
        said.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30))
        monkeypatch.syspath_prepend(str(here))
    assert [done.stdout for done in said] == ["the worker\n", "of the working folder\nthe worker\n"]


def test_a_worker_that_starts_when_its_session_has_ended_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of a killed run may be planned while its session is closed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_worker.py").write_text(MODULE)
    interpreter, folder = tmp_path / "python", tmp_path / "workers"
    write_interpreter(interpreter, python=sys.executable, folder=folder)
    end_workers(folder, "one")
    done = subprocess.run(
        [str(interpreter), "-m", "some_worker"],
        env={**os.environ, "SPARK_JOB_ARTIFACT_UUID": "one", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "the session one has ended\n"
    assert [file.name for file in folder.iterdir()] == ["ended.one"]


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"gone.{os.getpid()}").touch()
    end_workers(tmp_path, "gone")
    assert [file.name for file in tmp_path.iterdir()] == ["ended.gone"]


def test_what_is_no_worker_is_answered_by_the_interpreter(tmp_path: Path) -> None:
    interpreter, folder = tmp_path / "python", tmp_path / "workers"
    write_interpreter(interpreter, python=sys.executable, folder=folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (["-c", "import sys; print(sys.version)"], ["--version"]):
        done = subprocess.run([str(interpreter), *words], env=environment, capture_output=True, text=True, check=True)
        assert sys.version.split()[0] in done.stdout
        assert done.stderr == ""
    assert list(folder.iterdir()) == []


def test_a_daemon_may_remove_its_file_by_itself_and_a_server_begins_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gone = tmp_path / "workers", f"one.{os.getpid()}"
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", lambda path, pattern: iter([path / gone]))
        end_workers(folder, "one")
    assert [file.name for file in folder.iterdir()] == ["ended.one"]
    write_interpreter(tmp_path / "python", python=sys.executable, folder=folder)
    assert list(folder.iterdir()) == []
