"""Servers, and their clients, that only hold what real ones hold."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from spark_jobs.spark_server.folder import Address, ServerFolder

_processes = multiprocessing.get_context("forkserver")


def obedient(server: ServerFolder, started: Event) -> None:
    """Ends when its address is withdrawn."""
    with server.alive_lock() as life:
        _serve(server, life, started)
        while server.address() is not None:
            time.sleep(0.01)


def deaf(server: ServerFolder, started: Event) -> None:
    """Does not end when it is asked to."""
    with server.alive_lock() as life:
        _serve(server, life, started)
        signal.pause()


def _serve(server: ServerFolder, life: int, started: Event) -> None:
    os.setsid()
    os.pwrite(life, str(os.getpid()).encode(), 0)
    server.publish(Address(1, "secret", os.getpid(), 2, "local[2]", "/bin/python", "/work", 0.0))
    started.set()


def client_of(server: ServerFolder, started: Event) -> None:
    """Uses a server."""
    server.register_client("a-session")
    started.set()
    signal.pause()


@contextmanager
def process(act: Callable[[ServerFolder, Event], None], server: ServerFolder) -> Iterator[None]:
    started = _processes.Event()
    child = _processes.Process(target=act, args=(server, started))
    child.start()
    try:
        assert started.wait(60)
        yield
    finally:
        child.kill()
        child.join()


def made(folder: Path, name: str) -> ServerFolder:
    folder.mkdir(mode=0o700, exist_ok=True)
    server = ServerFolder(folder / name)
    server.create()
    return server
