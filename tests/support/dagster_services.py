"""A real Dagster webserver and daemon on the loopback interface, with everything they keep in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import dagster as dg

from tests.support.kafka_broker import free_port
from tests.support.polling import until
from tests.support.settings import ROOT

START_SECONDS = 120.0
STOP_SECONDS = 30.0
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
_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True, slots=True)
class Dagster:
    """A webserver and a daemon that were started; the log of the daemon has what its runs say."""

    address: str
    instance: dg.DagsterInstance
    webserver: subprocess.Popen[bytes]
    webserver_log: Path
    daemon_log: Path

    def wait(self) -> None:
        """Until the webserver answers."""
        until(self._answers, seconds=START_SECONDS, what="the Dagster webserver")

    def _answers(self) -> bool:
        ended = self.webserver.poll()
        assert ended is None, f"the webserver ended with {ended}:\n{self.webserver_log.read_text()[-4000:]}"
        try:
            with _open(f"{self.address}/server_info", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@contextmanager
def dagster_services(home: Path, module: str, environment: Mapping[str, str]) -> Iterator[Dagster]:
    """Webserver and daemon, on the definitions of ``module``; they need some seconds until they answer."""
    home.mkdir()
    (home / "dagster.yaml").write_text(DAGSTER_YAML)
    workspace = home / "workspace.yaml"
    workspace.write_text(WORKSPACE_YAML.format(module=module, root=ROOT))
    port = free_port()
    everything = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}
    webserver = ("dagster_webserver", "-w", str(workspace), "-h", "127.0.0.1", "-p", str(port))
    daemon = ("tests.support.quick_daemon", "run", "-w", str(workspace))
    # The instance is opened first: two processes that make its database at the same time get in each other's way.
    with dg.DagsterInstance.from_config(str(home)) as instance, ExitStack() as running:
        logs = (home / "webserver.log", home / "daemon.log")
        running.enter_context(_running(daemon, everything, logs[1]))
        process = running.enter_context(_running(webserver, everything, logs[0]))
        yield Dagster(f"http://127.0.0.1:{port}", instance, process, *logs)


@contextmanager
def _running(module: tuple[str, ...], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            # Interrupted, they end the code servers that they started.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
