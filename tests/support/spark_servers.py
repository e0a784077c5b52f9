"""Servers of a test run: in a folder of their own, and ended with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_jobs.session import SPARK_VARIABLE
from spark_jobs.spark_server.client import end_server
from spark_jobs.spark_server.folder import SERVERS_VARIABLE, ServerFolder
from tests.support.settings import ROOT

SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Servers:
    """A folder for servers, and the environment in which they are used.

    Args:
        folder: where they are kept.
    """

    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        """For a process that uses them."""
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.variables, **more}

    @property
    def variables(self) -> dict[str, str]:
        """What an environment needs for that, where the tests have Spark in the process."""
        return {SPARK_VARIABLE: "", SERVERS_VARIABLE: str(self.folder)}

    def living(self) -> list[ServerFolder]:
        """Those that run."""
        found = [ServerFolder(path) for path in sorted(self.folder.glob("*")) if path.is_dir()]
        return [server for server in found if server.is_alive()]

    def start(self, *words: str | Path, cwd: Path, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A process of Python that uses them."""
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            env=self.environment(**(more or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, cwd: Path, more: Mapping[str, str] | None = None) -> Any:
        """What such a process says, as JSON."""
        return said(self.start(*words, cwd=cwd, more=more))


def said(process: subprocess.Popen[str]) -> Any:
    """What a process that ends well says, as JSON."""
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output + errors
    return json.loads(output.splitlines()[-1])


@contextmanager
def spark_servers(folder: Path) -> Iterator[Servers]:
    """Servers that are ended, whoever uses them."""
    servers = Servers(folder)
    try:
        yield servers
    finally:
        for server in servers.living():
            end_server(server)
