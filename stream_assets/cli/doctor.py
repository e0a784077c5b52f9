"""Checks of the machine, for ``stream-assets doctor``."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from spark_jobs.jars import DELTA_COORDINATE, SPARK_LINE, delta_jars, java
from spark_jobs.session import SPARK_VARIABLE
from spark_jobs.spark_server.folder import ServerFolder, UnusableFolderError, server_folders, servers_folder, tidying
from spark_jobs.spark_server.port import check_offer
from stream_assets.cli.options import SparkChoice, tell_of_download
from stream_consumers.errors import MissingDependencyError, StreamAssetsError

NEEDED_JAVA = 17
PACKAGES = ("pyspark", "delta-spark", "deltalake", "dagster", "pyarrow", "confluent-kafka", "redis")

TWO_RUNS = (
    "safe on local disks, HDFS, Azure and Google storage, and on Amazon S3 with the log store of our sessions: "
    "doctor --table s3a://…"
)


def examine() -> list[dict[str, str]]:
    """What was looked at, what was found, and ``ok`` or what to do."""
    tell_of_download()
    looks: dict[str, Callable[[], str]] = {
        "Python": platform.python_version,
        "Java": _java_version,
        "Delta jars": lambda: f"{len(delta_jars())} for {DELTA_COORDINATE[1]} {DELTA_COORDINATE[2]}",
        **{name: partial(_version, name) for name in PACKAGES},
        "local Spark": _local_spark,
        "two runs at once": lambda: TWO_RUNS,
    }
    return [_look(what, find) for what, find in looks.items()]


def examine_table(table: str, spark: SparkChoice, storage: Mapping[str, str]) -> dict[str, str]:
    """Whether two runs may write a table at once, with the log store of a session."""
    from spark_jobs.writing.delta_table import check_log_store, log_store_of

    def find() -> str:
        session = spark.session(table, storage)
        check_log_store(session, table, single_writer=spark.single_writer)
        return log_store_of(session, table) or "the log store that Delta takes by itself"

    return _look(table, find)


def _look(what: str, find: Callable[[], str]) -> dict[str, str]:
    try:
        return {"what": what, "found": find(), "state": "ok"}
    except StreamAssetsError as error:
        return {"what": what, "found": "–", "state": str(error)}


def _local_spark() -> str:
    """Whether runs with a local Spark find it warm."""
    if os.environ.get(SPARK_VARIABLE):
        return f"starts with each run: {SPARK_VARIABLE} is set"
    try:
        with tidying():
            check_offer(ServerFolder(servers_folder()))
        living = sum(server.is_alive() for server in server_folders())
        return f"a server that outlives runs, kept in {servers_folder()}; {living} of them live"
    except UnusableFolderError as error:
        return f"starts with each run: {error}"


def _java_version() -> str:
    report = subprocess.run([java(), "-version"], capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
    line = (report.stderr or report.stdout).splitlines()[0]
    found = line.split('"')[1] if '"' in line else line
    if not found.split(".")[0].isdigit() or int(found.split(".")[0]) < NEEDED_JAVA:
        raise MissingDependencyError(
            f"Java {found} is too old for Spark {SPARK_LINE}",
            remedy=f"Install Java {NEEDED_JAVA} or newer and set JAVA_HOME.",
        )
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise MissingDependencyError(f"{package} is missing", remedy=f"Install it: pip install {package}.") from error
