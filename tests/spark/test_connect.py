"""The same job over Spark Connect: the session lives in a server, the client has no JVM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from spark_jobs.session import delta_spark_config
from tests.conftest import ROOT, SHORT_LIVED, assert_each_once, write_stream
from tests.polling import until

pytestmark = pytest.mark.spark


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """A Spark Connect server of its own; the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        **delta_spark_config(),
        **SHORT_LIVED,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    main = "org.apache.spark.sql.connect.service.SparkConnectServer"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(submit), "--master", "local[2]", "--class", main, *words, "spark-internal"],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            until(lambda: listens(port) or process.poll() is not None, seconds=90, what="the Connect server")
            assert process.poll() is None, log.read_text()
            yield f"sc://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_ingest_over_connect(server: str, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 300, malformed=frozenset({7}))
    command = [sys.executable, "-m", "stream_assets.cli", "ingest", "--source", url, "--table", str(folder / "t")]
    command += ["--decode", "json", "--schema", "id BIGINT, user STRING", "--max-records", "200", "--json"]
    done = subprocess.run(
        [*command, "--remote", server], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["rows"], row["dead letters"]) for row in json.loads(done.stdout)["rows"]] == [(199, 1), (100, 0)]
    assert_each_once(folder / "orders.ss", folder / "t")
    wrong = subprocess.run(
        [*command, "--remote", "sc://127.0.0.1:1/;token=secret"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert wrong.returncode == 1
    assert "error: no Spark session at sc://127.0.0.1:1: " in wrong.stderr
    assert "secret" not in wrong.stderr + wrong.stdout
