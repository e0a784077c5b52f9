"""How a Spark in this process is started, and what another Python imports that this project starts."""

from __future__ import annotations

import json
import logging
import os
import signal
import socketserver
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext

from spark_jobs.python_start import SAFE_PATH_VARIABLE, forget_worker_variables, worker_variables
from spark_jobs.spark_start import launch, start_context
from tests.support.python_programs import run_python
from tests.support.settings import ROOT
from tests.support.spark_servers import spark_servers

START_SECONDS = 300


SECRET = "s3cret of\\the=läke"
SECRETS = {
    "spark.hadoop.fs.s3a.secret.key": SECRET,
    "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:postgresql://db/hive?user=hive&password={SECRET}",
    "spark.executorEnv.PGPASS": SECRET,
}
STARTED = """
import json, os, sys
from pathlib import Path
from spark_jobs.session import SparkOptions, create_session

mark, secrets = json.loads(sys.stdin.read())
options = Path("options")
options.write_text(f"-Dtrust={mark}")
more = {"spark.driver.memory": "600m", "spark.driver.extraJavaOptions": f"-XX:VMOptionsFile={options}"}
session = create_session(SparkOptions(master="local[1]", in_process=True, config={**secrets, **more}))
assert session.sparkContext._jvm.java.lang.System.getProperty("trust") == mark, "options of Java may be in a file"
conf = dict(session.sparkContext.getConf().getAll())
assert secrets.items() <= conf.items(), "the context has them"
words = [path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")]
of_heap = any("-Xmx600m" in one and "MaxHeapFreeRatio=30" in one for one in words)
print("heap", of_heap, "secret", any(mark in one for one in words))
print("left", [name for name in os.environ if name == "PYSPARK_SUBMIT_ARGS"])
"""


@pytest.mark.spark
def test_no_setting_is_on_the_command_line_of_the_jvm(tmp_path: Path) -> None:
    done = run_python(STARTED, cwd=tmp_path, text=json.dumps(["s3cret", SECRETS]))
    assert "heap True secret False\nleft []\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.spark
def test_a_spark_that_does_not_start_says_why() -> None:
    program = """\
from spark_jobs.session import SparkOptions, create_session
create_session(SparkOptions(master="local[1]", in_process=True, config={"spark.driver.memory": "not much"}))
"""
    done = run_python(program)
    assert done.returncode != 0
    assert "Xmxnot much" in done.stderr


class Taker(socketserver.TCPServer):
    """Listens on a port that another process had, and reads what comes."""

    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        self.taken: list[bytes] = []
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.taken.append(request.recv(1000))
        request.close()


@pytest.mark.spark
def test_nothing_is_sent_to_the_port_of_a_jvm_that_was_killed() -> None:
    gateway = launch({})
    assert gateway.jvm.java.lang.System.nanoTime()
    gateway.proc.kill()
    # It stays a zombie, as in a run that does not know yet that its JVM has ended.
    os.waitid(os.P_PID, gateway.proc.pid, os.WEXITED | os.WNOWAIT)
    with Taker(gateway.java_parameters.port) as taker:
        threading.Thread(target=taker.serve_forever, daemon=True).start()
        with pytest.raises((Py4JError, ConnectionError)):
            gateway.jvm.java.lang.System.nanoTime()
        taker.shutdown()
    assert taker.taken == []


TWICE = """
import os
from spark_jobs.session import SparkOptions, create_session

for _ in range(2):
    session = create_session(SparkOptions(master="local[1]", in_process=True))
    assert session.range(3).count() == 3
    session.stop()
here = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
print("children", len(open(here).read().split()))
"""


@pytest.mark.slow
@pytest.mark.spark
def test_a_session_after_another_one_takes_the_same_jvm() -> None:
    done = run_python(TWICE)
    assert "children 1\n" in done.stdout, done.stdout + done.stderr


SHADOWED = """
import subprocess
import sys
from pathlib import Path
from pyspark.sql import functions as f
from spark_jobs.session import SparkOptions, create_session

session = create_session(SparkOptions(master="local[1]", in_process=sys.argv[1] == "in_process"))
tool = str(Path(__file__).with_name("tool.py"))
made = f.udf(lambda number: subprocess.check_output([sys.executable, tool], text=True), "string")
assert [row[0] for row in session.range(1).select(made("id")).collect()] == ["made"]
session.stop()
"""


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("place", ["in_process", "server"])
def test_no_python_of_spark_imports_from_the_working_folder(tmp_path: Path, place: str) -> None:
    if place == "in_process" and sys.version_info < (3, 11):
        pytest.skip("this Python knows no PYTHONSAFEPATH")
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    (here / "json.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit(3)\n")
    (tmp_path / "shadowed.py").write_text(SHADOWED)
    # What a worker starts imports as ever.
    (tmp_path / "tool.py").write_text("import beside")
    (tmp_path / "beside.py").write_text("print('made', end='')")
    with spark_servers(tmp_path / "servers") as servers:
        done = servers.start(tmp_path / "shadowed.py", place, cwd=here)
        output, errors = done.communicate(timeout=START_SECONDS)
    assert not mark.exists()
    assert done.returncode == 0, output + errors


@pytest.mark.spark
@pytest.mark.parametrize("is_given", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_report_of_a_crashed_jvm_is_in_a_private_folder_or_where_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAM_ASSETS_CACHE", str(tmp_path / "50%pure cache"))
    given = {"spark.driver.extraJavaOptions": f"-XX:ErrorFile={tmp_path}/own.log -XX:-CreateCoredumpOnCrash"}
    gateway = launch(given if is_given else {"spark.driver.extraJavaOptions": "-XX:-CreateCoredumpOnCrash"})
    gateway.proc.send_signal(signal.SIGSEGV)
    gateway.proc.wait(60)
    crashes = tmp_path / "50%pure cache" / "crashes"
    assert stat.S_IMODE(crashes.stat().st_mode) == 0o700
    reports = sorted(file.name for file in (*tmp_path.glob("*.log"), *crashes.iterdir()))
    assert reports == (["own.log"] if is_given else [f"hs_err_pid{gateway.proc.pid}.log"])
    assert list(tmp_path.glob("hs_err*")) == []
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize(
    ("of_root", "own", "expected"),
    [
        (logging.DEBUG, logging.NOTSET, logging.INFO),
        (logging.WARNING, logging.DEBUG, logging.INFO),
        (logging.WARNING, logging.NOTSET, logging.WARNING),
        (logging.DEBUG, logging.ERROR, logging.ERROR),
    ],
)
def test_no_call_of_java_is_logged_with_its_arguments_and_no_more_than_the_user_wants(
    monkeypatch: pytest.MonkeyPatch, of_root: int, own: int, expected: int
) -> None:
    root, logger = logging.getLogger(), logging.getLogger("py4j")
    levels = root.level, logger.level
    monkeypatch.setattr(SparkContext, "_active_spark_context", object())
    try:
        # An attribute that is set does not change the level that is cached.
        root.setLevel(of_root)
        logger.setLevel(own)
        start_context({}, "local[1]")
        assert logger.getEffectiveLevel() == expected
    finally:
        root.setLevel(levels[0])
        logger.setLevel(levels[1])


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
