"""How a Spark in this process is started."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from spark_jobs.spark_start import launch
from tests.support.settings import ROOT

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
more = {"spark.driver.memory": "600m", "spark.driver.extraJavaOptions": f"@{options}"}
session = create_session(SparkOptions(master="local[1]", in_process=True, config={**secrets, **more}))
assert session.sparkContext._jvm.java.lang.System.getProperty("trust") == mark, "options of Java may be in a file"
conf = dict(session.sparkContext.getConf().getAll())
assert secrets.items() <= conf.items(), "the context has them"
words = [path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")]
print("heap", any("-Xmx600m" in one for one in words), "secret", any(mark in one for one in words))
print("left", [name for name in os.environ if name == "PYSPARK_SUBMIT_ARGS"])
"""


@pytest.mark.spark
def test_no_setting_is_on_the_command_line_of_the_jvm(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(["s3cret", SECRETS]),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert "heap True secret False\nleft []\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.spark
def test_a_spark_that_does_not_start_says_why() -> None:
    program = """\
from spark_jobs.session import SparkOptions, create_session
create_session(SparkOptions(master="local[1]", in_process=True, config={"spark.driver.memory": "not much"}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
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
    done = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert "children 1\n" in done.stdout, done.stdout + done.stderr
