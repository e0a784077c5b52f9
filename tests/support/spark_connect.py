"""A Spark Connect server, for sessions without a JVM of their own."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark

from spark_jobs.session import delta_spark_config
from spark_jobs.spark_server.configuration import CORES
from tests.support.servers import STOP_SECONDS, ServerFailedError, anew, running
from tests.support.settings import ROOT, SMALL

START_SECONDS = 240.0
MAIN = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextmanager
def connect_server(
    folder: Path,
    *,
    table: str = "",
    storage_options: Mapping[str, str] | None = None,
    packages: Path = ROOT,
    more: Mapping[str, str] | None = None,
    stop_seconds: float = 0,
) -> Iterator[str]:
    """A running server; its address.

    Args:
        folder: for what it logs.
        table: in an object store, that it writes.
        storage_options: for that table.
        packages: a folder that its Python workers import from.
        more: settings of Spark.
        stop_seconds: how long it has to end by itself; it is killed at once by default.

    Raises:
        ServerFailedError: it did not end within ``stop_seconds``, and was killed.
    """
    config = {**delta_spark_config(table, storage_options), **(more or {})}
    with anew(lambda: _server(Path(tempfile.mkdtemp(dir=folder)), config, packages, stop_seconds)) as address:
        yield address


@contextmanager
def _server(folder: Path, config: Mapping[str, str], packages: Path, stop_seconds: float) -> Iterator[str]:
    settings = {
        **config,
        **SMALL,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        CORES: "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    if packages == ROOT:
        # Runs that are killed one after the other share the Python workers, which take seconds to start.
        settings["spark.sql.artifact.isolation.enabled"] = "false"
        settings["spark.python.daemon.module"] = "spark_jobs.reading.worker_daemon"
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [str(submit), "--master", "local[2]", "--class", MAIN, *words, "spark-internal"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(packages)}
    with running(
        "the Spark Connect server",
        command,
        folder / "server.log",
        environment=environment,
        stop=signal.SIGTERM if stop_seconds else signal.SIGKILL,
        stop_seconds=stop_seconds or STOP_SECONDS,
    ) as server:
        said = server.until(
            lambda: server.said(r"Spark Connect server started at: (\S+:\d+)"), seconds=START_SECONDS, what="its start"
        )
        yield f"sc://{said[0]}"
    if stop_seconds and server.process.returncode == -signal.SIGKILL:
        raise ServerFailedError(f"the Spark Connect server did not end within {stop_seconds:g} seconds")


def end_python_workers() -> None:
    """End the Python workers of the servers that this process started.

    Spark forks the workers of each session from a process of its own, of 100 MB, and keeps that until the server
    stops. A session that still needs one has it started again.
    """
    for server in _children(os.getpid(), MAIN):
        for workers in _children(server, "worker_daemon"):
            with suppress(ProcessLookupError):
                os.kill(workers, signal.SIGTERM)


def _children(process: int, word: str) -> list[int]:
    """The processes that a process has started, with a word in their command."""
    found = []
    for threads in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, threads.read_text().split()):
                if word in Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace"):
                    found.append(child)
    return found
