"""What a Spark in this process says as it starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pyspark
import pyspark.java_gateway
import pytest

from spark_jobs import spark_start
from spark_jobs.spark_start import start_context, without_needless_lines
from tests.support.polling import until
from tests.support.settings import ROOT

START_SECONDS = 300
# What Spark 4 says, with lines of others between.
SAID = """\
WARNING: Using incubator modules: jdk.incubator.vector
Picked up JAVA_TOOL_OPTIONS: -Xss4m
26/11/22 16:17:09 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform... using builtin-java
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
Setting default log level to "WARN".
To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).
Setting Spark log level to "FATAL".
Error occurred during initialization of VM
[Stage 0:>        (0 + 2) / 2]\r[Stage 0:=>       (1 + 2) / 2]\rthe end, without an end of the line"""
PASSED_ON = """\
Picked up JAVA_TOOL_OPTIONS: -Xss4m
Error occurred during initialization of VM
[Stage 0:>        (0 + 2) / 2]\r[Stage 0:=>       (1 + 2) / 2]\rthe end, without an end of the line"""


def test_needless_lines_are_left_out_and_all_others_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    # In pieces that do not end where lines do.
    program = "import os, sys; [os.write(2, sys.argv[1].encode()[at : at + 7]) for at in range(0, len(sys.argv[1]), 7)]"
    with without_needless_lines() as descriptor:
        subprocess.run([sys.executable, "-c", program, SAID], stderr=descriptor, check=True)
    heard = ""

    def all_of_it() -> bool:
        nonlocal heard
        heard += capfd.readouterr().err
        return heard.endswith("of the line")

    until(all_of_it, seconds=60, what="the end of what was said")
    assert heard == PASSED_ON


def test_what_cannot_be_passed_on_does_not_stop_who_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM that nobody reads stands still with the first line that is too much for the pipe."""

    def is_full(descriptor: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(spark_start, "os", Mock(wraps=os, write=is_full))
    program = "import os; [os.write(2, b'x' * 1000 + b'\\n') for _ in range(1000)]"
    with without_needless_lines() as descriptor:
        subprocess.run([sys.executable, "-c", program], stderr=descriptor, check=True, timeout=100)


def test_a_secret_is_not_on_the_command_line_of_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: dict[str, str] = {}
    given: dict[str, str] = {}

    class Context:
        _active_spark_context = None
        _gateway = None

        def __init__(self, *, conf: pyspark.SparkConf, gateway: Mock) -> None:
            given.update(conf.getAll())

    def launch(conf: pyspark.SparkConf, kwargs: dict[str, Any]) -> Mock:
        spoken.update(conf.getAll())
        gateway = Mock()
        gateway.jvm.SparkConf.return_value.get.return_value = ""
        return gateway

    monkeypatch.setattr(pyspark, "SparkContext", Context)
    monkeypatch.setattr(pyspark.java_gateway, "launch_gateway", launch)
    names = ("secret.key", "access.key", "session.token")
    secrets = {f"spark.hadoop.fs.s3a.{name}": "s3cret-of-the-lake" for name in names}
    more = (
        "azure.account.key.lake.dfs.core.windows.net",
        "azure.sas.fixed.token.lake",
        "azure.sas.box.lake.dfs.core.windows.net",
        "gs.auth.service.account.private.key",
        "gs.encryption.key",
        "s3a.encryption.key",
        "s3a.server-side-encryption.key",
    )
    secrets |= {f"spark.hadoop.fs.{name}": "s3cret-of-the-lake" for name in more}
    start_context({**secrets, "spark.driver.memory": "1g"}, "local[1]")
    assert "s3cret-of-the-lake" not in spoken.values()
    assert (spoken["spark.driver.memory"], spoken["spark.master"]) == ("1g", "local[1]")
    assert secrets.items() <= given.items(), "the context has them"


@pytest.mark.slow
@pytest.mark.spark
def test_a_spark_in_the_process_starts_without_a_word() -> None:
    program = """\
from spark_jobs.session import SparkOptions, create_session
spark = create_session(SparkOptions(master="local[1]", in_process=True))
print(spark.range(3).count())
spark.stop()
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
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


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
    assert "WARNING: Using incubator modules" not in done.stderr


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
