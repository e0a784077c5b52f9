"""The commands for the local Spark servers that runs share: ``spark status`` and ``spark stop``."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import json_option
from stream_assets.cli.output import print_rows, tell
from stream_consumers.errors import SparkSessionError
from stream_consumers.wording import counted

if TYPE_CHECKING:
    from spark_jobs.spark_server.folder import ServerFolder


@click.group()
def spark() -> None:
    """Look at the local Spark servers that runs share, and end them.

    A run that needs a local Spark starts a server, and the next runs with the same Python, settings, working directory
    and environment use it, until nobody has for 15 minutes.

    \b
    Examples:
      stream-assets spark status
      stream-assets spark stop
    """


@spark.command()
@json_option
def status(as_json: bool) -> None:
    """The servers of this user on this machine.

    \b
    Examples:
      stream-assets spark status
      stream-assets spark status --json
    """
    rows = [_row(server) for server in _living()]
    print_rows(rows, as_json=as_json, title="Spark servers", empty="no Spark server runs")


@spark.command()
@click.option("--force", is_flag=True, help="Also those that a run uses; it fails, and nothing is lost.")
def stop(force: bool) -> None:
    """End the servers that no run uses; the next run starts one.

    \b
    Examples:
      stream-assets spark stop
      stream-assets spark stop --force
    """
    from spark_jobs.spark_server.client import end

    living = 0
    for server in _living():
        if server.address() is None:
            tell(f"{server.path.name} is starting, which is waited for", style="yellow")
        with server.starting():
            runs = 0 if force else len(server.connected())
            has_ended = not runs and end(server)
        living += not has_ended
        if runs:
            tell(f"{server.path.name} is used by {counted(runs, 'run')}: it stays; --force ends it", style="yellow")
        elif has_ended:
            tell(f"{server.path.name} has ended", style="green")
        else:
            tell(f"{server.path.name} does not end; its process is {server.process()}: kill it", style="red")
    sys.exit(1 if living else 0)


def _living() -> list[ServerFolder]:
    from spark_jobs.spark_server.folder import UnusableFolderError, server_folders

    try:
        return [server for server in server_folders() if server.is_alive()]
    except UnusableFolderError as error:
        raise SparkSessionError(
            f"no Spark server is kept here: {error}", remedy="Runs have their own Spark."
        ) from error


def _row(server: ServerFolder) -> dict[str, Any]:
    address = server.address()
    since = datetime.fromtimestamp(address.started, timezone.utc).isoformat(timespec="seconds") if address else None
    return {
        "server": server.path.name,
        "state": "ready" if address else "starting",
        "runs": len(server.connected()),
        "master": address and address.master,
        "process": server.process(),
        "since": since,
        "python": address and address.python,
        "folder": address and address.cwd,
        "log": str(server.log),
    }
