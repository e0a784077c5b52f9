"""Runs in processes of their own, to be killed; forked from one that has done the imports, which take seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.polling import until

RECORDS = 150
SECONDS = 600.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "pytest",
        "pyspark.sql.connect.session",
        "tests.support.one_run",
        "tests.support.one_replay",
        "tests.support.one_redrive",
    ]
)


class Run:
    """A run in a process group of its own."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def wait(self) -> int:
        """How it ended: 0, or the negative number of the signal that killed it."""
        self._process.join(SECONDS)
        assert self._process.exitcode is not None, f"process {self.pid} still runs after {SECONDS} s"
        return self._process.exitcode

    def has_ended(self) -> bool:
        """Whether nobody has to wait for it any more."""
        return self._process.exitcode is not None

    def is_stopped(self) -> bool:
        """Whether SIGSTOP has reached it."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        """Whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


@contextmanager
def running(
    url: str,
    table: Path,
    fault: str = "",
    *more: str,
    records: int = RECORDS,
    module: str = "one_run",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """A run; whatever is left of it is killed at the end."""
    log = table.with_name(f"run-{len(os.listdir(table.parent))}.log")
    words = (url, str(table), str(records), fault, *more)
    process = _processes.Process(target=_run, args=(module, str(log), words, environment or {}))
    process.start()
    run = Run(process)
    try:
        yield run
    finally:
        run.kill()


@contextmanager
def asleep(url: str, table: Path, fault: str, *more: str, records: int = RECORDS, **options: Any) -> Iterator[None]:
    """A run that is stopped at a fault as long as the block takes; then it wakes up, and ends well."""
    with running(url, table, fault, *more, records=records, **options) as zombie:
        until(zombie.is_stopped, seconds=SECONDS, what="the stop")
        yield
        os.killpg(zombie.pid, signal.SIGCONT)
        assert zombie.wait() == 0, logs(table)
    assert "drained" in logs(table)


def _run(module: str, log: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    with Path(log).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    import_module(f"tests.support.{module}").main(*words)


def logs(table: Path) -> str:
    """What all runs on a table said."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(table.parent.glob("run-*.log")))


def kill_in_turn(
    url: str,
    table: Path,
    faults: Sequence[str],
    *more: str,
    records: int = 40,
    module: str = "one_run",
    environment: Mapping[str, str] | None = None,
) -> None:
    """A run after the other, each killed at its fault, so that each one finds what the one before left behind."""
    for fault in faults:
        with running(url, table, fault, *more, records=records, module=module, environment=environment) as run:
            assert run.wait() == -signal.SIGKILL, logs(table)
