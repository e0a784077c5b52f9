"""A real Dagster webserver and daemon on the loopback interface, with everything they keep in a folder."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from tests.support.servers import anew, running, some_port
from tests.support.settings import ROOT

START_SECONDS = 240.0
DAGSTER_YAML = """\
telemetry:
  enabled: false
nux:
  enabled: false
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1
"""
WORKSPACE_YAML = """\
load_from:
  - python_module:
      module_name: {module}
      location_name: {module}
      working_directory: {root}
"""


@dataclass(frozen=True, slots=True)
class Dagster:
    """A webserver and a daemon that were started; the log of the daemon has what its runs say."""

    address: str
    instance: dg.DagsterInstance
    daemon_log: Path


@contextmanager
def dagster_services(home: Path, module: str, environment: Mapping[str, str]) -> Iterator[Dagster]:
    """Webserver and daemon, on the definitions of ``module``."""
    home.mkdir()
    (home / "dagster.yaml").write_text(DAGSTER_YAML)
    workspace = home / "workspace.yaml"
    workspace.write_text(WORKSPACE_YAML.format(module=module, root=ROOT))
    everything = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}
    daemon = [sys.executable, "-m", "tests.support.quick_daemon", "run", "-w", str(workspace)]
    log = home / "daemon.log"
    # The instance is opened first: two processes that make its database at the same time get in each other's way.
    # Interrupted, both end the code servers that they started.
    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        running("the Dagster daemon", daemon, log, environment=everything, stop=signal.SIGINT),
        anew(lambda: _webserver(workspace, everything)) as address,
    ):
        yield Dagster(address, instance, log)


@contextmanager
def _webserver(workspace: Path, environment: Mapping[str, str]) -> Iterator[str]:
    words = ["-w", str(workspace), "-h", "127.0.0.1", "-p", str(some_port()), "--uvicorn-log-level", "info"]
    command = [sys.executable, "-m", "dagster_webserver", *words]
    log = workspace.with_name("webserver.log")
    with running("the Dagster webserver", command, log, environment=environment, stop=signal.SIGINT) as server:
        (address,) = server.until(
            lambda: server.said(r"Uvicorn running on (http://[\w.:]+)"), seconds=START_SECONDS, what="its start"
        )
        yield address
