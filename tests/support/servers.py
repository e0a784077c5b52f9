"""Servers as processes of their own: awaited by what they say, started anew when they fail, gone after the test."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spark_jobs.jars import check_parents, java, make_folders
from spark_jobs.spark_server.folder import make_private_folder
from tests.support.polling import until

T = TypeVar("T")
# What a server gets of the environment: a client that it trusts too much could ask it for the rest, such as keys.
VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "JAVA_HOME", "LD_LIBRARY_PATH", "TZ")
STOP_SECONDS = 30.0
TAIL = 4000


class ServerFailedError(AssertionError):
    """A server ended, or did not become what was waited for; the message ends with what it logged."""


@dataclass(frozen=True, slots=True)
class Server:
    """A process that serves, and the file with what it says."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self, pattern: str) -> list[str]:
        """What it has logged so far that matches."""
        return re.findall(pattern, self.log.read_text(errors="replace"))

    def until(self, condition: Callable[[], T | None], *, seconds: float, what: str) -> T:
        """The first truthy value of ``condition``, as long as the server runs.

        Raises:
            ServerFailedError: it ended, or nothing came within ``seconds``.
        """

        def check() -> T | None:
            value = condition()
            if not value and self.process.poll() is not None:
                raise self._failed(f"ended with {self.process.returncode} before {what}")
            return value

        try:
            return until(check, seconds=seconds, what=what)
        except ServerFailedError:
            raise
        except AssertionError as error:
            raise self._failed(f"still runs, but {error}") from None

    def _failed(self, what: str) -> ServerFailedError:
        return ServerFailedError(f"{self.name} {what}; it logged:\n{self.log.read_text(errors='replace')[-TAIL:]}")


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    stop: signal.Signals = signal.SIGKILL,
    stop_seconds: float = STOP_SECONDS,
    with_children: bool = False,
) -> Iterator[Server]:
    """A running process; it works in the folder of its log, and gets ``stop`` at the end.

    Without an ``environment`` it gets :data:`VARIABLES`, and a folder for temporary files that no other user can enter.
    It is killed if it does not end within ``stop_seconds``. With ``with_children`` what it has started is killed then,
    too, and does not see a Ctrl-C before.
    """
    if environment is None:
        own = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        environment = {**own, "TMPDIR": str(private_folder(log.parent))}
    with open(log, "wb", opener=_open_private) as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=with_children,
        )
        try:
            yield Server(name, process, log)
        finally:
            process.send_signal(stop)
            try:
                process.wait(stop_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if with_children:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def anew(start: Callable[[], AbstractContextManager[T]], *, times: int = 2) -> Iterator[T]:
    """What ``start`` starts; where that fails, what it starts when it is called again, up to so many ``times``."""
    with ExitStack() as stack:
        for left in reversed(range(times)):
            try:
                started = stack.enter_context(start())
                break
            except ServerFailedError:
                if not left:
                    raise
        yield started


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def private_folder(folder: Path) -> Path:
    """A folder for temporary files, within another one; only this user can enter it."""
    private = folder / "tmp"
    private.mkdir(mode=0o700, exist_ok=True)
    return private


def jvm(folder: Path, *options: str) -> list[str]:
    """How a small JVM starts that has its temporary files, such as libraries that it loads, in this folder."""
    words = ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Djava.io.tmpdir={private_folder(folder)}"]
    return [java(), *words, *options]


def some_port() -> int:
    """A port to try, for servers that cannot choose one and tell it; one that is in use fails, and is tried ``anew``.

    It is not among those that the system gives to clients, nor is the one that is 10,000 above it (the bus of a Redis
    cluster), so that only another server can have it.
    """
    return 10_000 + secrets.randbelow(12_000)


def kept_folder(folder: Path) -> Path:
    """Make a folder that only this user can enter, or replace.

    Raises:
        UnusableFolderError, UntrustedFileError: another user made it, or could replace it; or it is a link.
    """
    make_folders(folder.parent)
    check_parents(folder)
    make_private_folder(folder)
    return folder


def serve(name: str, port: int, start: Callable[[Path, int], AbstractContextManager[object]]) -> None:
    """Run a server by hand until Ctrl-C, on the port of ``--port``, with its data in the folder of ``--keep``."""
    parser = argparse.ArgumentParser(description=f"A real {name} on the loopback interface.")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--keep", type=Path, help="keep its data in this folder, also for the next start")
    options = parser.parse_args()
    port, kept = options.port, options.keep
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = kept_folder(kept) if kept else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(start(folder.resolve(), port))
        fate = f"its data stays in {kept}" if kept else "its data is removed"
        print(f"{name} is listening at 127.0.0.1:{port}; Ctrl-C stops it, and {fate}", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping", flush=True)
