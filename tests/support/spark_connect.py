"""A Spark Connect server, for sessions without a JVM of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from spark_jobs.session import delta_spark_config
from tests.support.polling import until
from tests.support.settings import ROOT, SMALL


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A running server; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        **delta_spark_config(),
        **SMALL,
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
