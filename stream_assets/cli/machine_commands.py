"""The commands for the local machine: ``doctor``, ``spark status`` and ``spark stop``."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import SparkSettings, json_option, report_download, spark_options, storage_option
from stream_assets.cli.output import inform, print_rows
from stream_consumers.display import counted
from stream_consumers.errors import MissingDependencyError, SparkSessionError, StreamAssetsError

if TYPE_CHECKING:
    from spark_jobs.spark_server.folder import ServerFolder

NEEDED_JAVA = 17
PACKAGES = ("pyspark", "delta-spark", "deltalake", "dagster", "pyarrow", "confluent-kafka", "redis")
TWO_RUNS = (
    "safe on local disks, HDFS, Azure and Google storage, and on Amazon S3 with the log store that sessions of "
    "stream-assets use; check with doctor --table s3a://…"
)


@click.command()
@click.option("--table", help="Also start Spark, and check which log store it has for this table.")
@storage_option
@spark_options
def doctor(table: str | None, storage: dict[str, str], spark: SparkSettings) -> None:
    """Check Java, the Delta jars and packages, and whether two runs may write a table at the same time.

    \b
    Examples:
      stream-assets doctor && stream-assets demo
      stream-assets doctor --table s3a://lake/orders
    """
    report_download()
    checks: dict[str, Callable[[], str]] = {
        "Python": platform.python_version,
        "Java": _java_version,
        "Delta jars": _delta_jars,
        **{name: partial(_package_version, name) for name in PACKAGES},
        "local Spark": _local_spark,
        "two runs at once": lambda: TWO_RUNS,
    }
    if table:
        checks[table] = partial(_log_store, table, storage, spark)
    rows = [_check_row(what, find) for what, find in checks.items()]
    print_rows(rows, title="doctor")
    if any(row["state"] != "ok" for row in rows):
        sys.exit(1)


def _check_row(what: str, find: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"what": what, "found": find(), "state": "ok"}
    except StreamAssetsError as error:
        return {"what": what, "found": "–", "state": str(error)}


def _java_version() -> str:
    from spark_jobs.jars import SPARK_LINE, java
    from spark_jobs.redaction import jvm_output

    remedy = f"Install Java {NEEDED_JAVA} or newer and set JAVA_HOME."
    answer = subprocess.run([java(), "-version"], capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
    # Java repeats options of the environment before its version.
    found = re.search(r'version "((\d+)[^"]*)"', answer.stderr)
    if not found:
        raise MissingDependencyError(f"{java()} does not show its version: {jvm_output(answer.stderr)}", remedy=remedy)
    if int(found[2]) < NEEDED_JAVA:
        raise MissingDependencyError(f"Java {found[1]} is too old for Spark {SPARK_LINE}", remedy=remedy)
    return found[1]


def _delta_jars() -> str:
    from spark_jobs.jars import DELTA_COORDINATE, delta_jars

    return f"{len(delta_jars())} for {DELTA_COORDINATE[1]} {DELTA_COORDINATE[2]}"


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise MissingDependencyError(f"{package} is missing", remedy=f"Install it: pip install {package}.") from error


def _local_spark() -> str:
    """Return whether runs share a local Spark server, and how many servers run."""
    from spark_jobs.session import SPARK_VARIABLE
    from spark_jobs.spark_server.folder import (
        ServerFolder,
        UnusableFolderError,
        folders_lock,
        server_folders,
        servers_folder,
    )
    from spark_jobs.spark_server.port import check_unix_sockets

    if os.environ.get(SPARK_VARIABLE):
        return f"starts with each run: {SPARK_VARIABLE} is set"
    try:
        with folders_lock():
            check_unix_sockets(ServerFolder(servers_folder()))
        living = sum(server.is_alive() for server in server_folders())
        return f"a server that outlives runs, in {servers_folder()}; {counted(living, 'server')} running"
    except UnusableFolderError as error:
        return f"starts with each run: {error}"


def _log_store(table: str, storage: dict[str, str], spark: SparkSettings) -> str:
    """Return the log store that keeps concurrent writers of a table apart, in a session like those of runs."""
    from spark_jobs.writing.delta_table import check_log_store, log_store_of

    session = spark.session(table, storage)
    check_log_store(session, table, single_writer=spark.single_writer)
    return log_store_of(session, table) or "the default log store of Delta"


@click.group()
def spark() -> None:
    """List or stop the local Spark servers that runs share.

    A run that needs a local Spark starts a server. Later runs with the same Python, settings, working directory and
    environment use it. It stops after 15 minutes without a run.

    \b
    Examples:
      stream-assets spark status
      stream-assets spark stop
    """


@spark.command()
@json_option
def status(as_json: bool) -> None:
    """List the servers of this user on this machine.

    \b
    Examples:
      stream-assets spark status
      stream-assets spark status --json
    """
    rows = [_server_row(server) for server in _live_servers()]
    print_rows(rows, as_json=as_json, title="Spark servers", empty="no Spark server runs")


@spark.command()
@click.option("--force", is_flag=True, help="Also stop servers that a run uses; the run fails, but nothing is lost.")
def stop(force: bool) -> None:
    """Stop the servers that no run uses; the next run starts a new one.

    \b
    Examples:
      stream-assets spark stop
      stream-assets spark stop --force
    """
    from spark_jobs.spark_server.client import end_server

    living = 0
    for server in _live_servers():
        if server.address() is None:
            inform(f"waiting for {server.path.name}, which is starting", style="yellow")
        with server.start_lock():
            runs = 0 if force else len(server.connected_sessions())
            has_ended = not runs and end_server(server)
        living += not has_ended
        if runs:
            inform(f"{server.path.name} is used by {counted(runs, 'run')}; --force stops it", style="yellow")
        elif has_ended:
            inform(f"{server.path.name} has stopped", style="green")
        else:
            inform(f"{server.path.name} does not stop; kill its process {server.process()}", style="red")
    sys.exit(1 if living else 0)


def _live_servers() -> list[ServerFolder]:
    from spark_jobs.spark_server.folder import UnusableFolderError, server_folders

    try:
        return [server for server in server_folders() if server.is_alive()]
    except UnusableFolderError as error:
        raise SparkSessionError(
            f"Spark servers are not used here: {error}", remedy="Each run starts its own Spark."
        ) from error


def _server_row(server: ServerFolder) -> dict[str, Any]:
    address = server.address()
    since = datetime.fromtimestamp(address.started, timezone.utc).isoformat(timespec="seconds") if address else None
    return {
        "server": server.path.name,
        "state": "ready" if address else "starting",
        "runs": len(server.connected_sessions()),
        "master": address and address.master,
        "process": server.process(),
        "since": since,
        "python": address and address.python,
        "folder": address and address.cwd,
        "log": str(server.log),
    }
