"""Holds the port of a server, so that no other process can listen on it.

A client sends its token, its plans and its payloads to the process that listens on the port of its server. So the
process of the server and each of its runs have a socket open that is bound to the port and does not share it. The
kernel then lets no other process listen there until all of them have ended, even if the JVM, the server or both are
killed.

Ports are held on Linux only. Elsewhere the sockets of this module are bound to nothing, and the JVM chooses a port.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spark_jobs.spark_server.folder import ServerFolder, UnusableFolderError

LOOPBACK = "127.0.0.1"
HOLDS_PORTS = sys.platform == "linux"
_ANSWER_SECONDS = 30.0
PAUSE_SECONDS = 1.0
"""How many seconds a server waits before it accepts again after an error."""
_log = logging.getLogger(__name__)


def reserve_port() -> socket.socket:
    """Reserve a free port of the loopback interface; where ports are not held it is 0."""
    port = socket.socket()
    if HOLDS_PORTS:
        port.bind((LOOPBACK, 0))
    return port


@contextmanager
def allow_listening(port: socket.socket) -> Iterator[None]:
    """Let another process start to listen on the port within the block."""
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        yield
    finally:
        # A third process may have bound the port within the block; it cannot listen after the block either.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def check_unix_sockets(folder: ServerFolder) -> None:
    """Refuse a folder in which no server could offer its port; call it within :func:`folders_lock`.

    Some network mounts and sandboxes support no Unix sockets, and some create sockets that refuse every connection.

    Raises:
        UnusableFolderError: a socket in the folder cannot be created, or a client cannot connect to it.
    """
    if not HOLDS_PORTS:
        return
    probe = folder.path / "probe"
    try:
        # A process that was killed at this point has left the file.
        probe.unlink(missing_ok=True)
        with (
            _short_socket_path(probe) as name,
            socket.socket(socket.AF_UNIX) as server,
            socket.socket(socket.AF_UNIX) as client,
        ):
            server.bind(name)
            server.listen()
            client.connect(name)
        probe.unlink()
    except OSError as error:
        raise UnusableFolderError(f"{folder.path} does not support Unix sockets: {error}") from error


def offer_port(port: socket.socket, folder: ServerFolder) -> None:
    """Pass the port to each client that calls :func:`hold_port`, until this process ends."""
    if not HOLDS_PORTS:
        return
    folder.port.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with _short_socket_path(folder.port) as name:
        listener.bind(name)
    listener.listen()
    threading.Thread(target=_send_port, args=(port, listener), daemon=True).start()


def _send_port(port: socket.socket, listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            # The process may have too many open files for the moment. A run waits longer than this pause.
            _log.warning("a run did not get the port of this server: %s", error)
            time.sleep(PAUSE_SECONDS)
            continue
        # A client that has ended meanwhile does not need the port.
        with client, suppress(OSError):
            socket.send_fds(client, [b"."], [port.fileno()])


def hold_port(folder: ServerFolder, port: int) -> socket.socket:
    """Hold the port of a server, as long as the socket is open.

    Args:
        folder: the folder of the server; only processes of this user can create a socket in it.
        port: the port where the server listens.

    Raises:
        OSError: the server has ended, or listens on another port.
    """
    if not HOLDS_PORTS:
        return socket.socket()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWER_SECONDS)
        with _short_socket_path(folder.port) as name:
            server.connect(name)
        _, descriptors, _, _ = socket.recv_fds(server, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise ConnectionError("the server has ended")
    held = socket.socket(fileno=descriptors[0])
    if held.getsockname() != (LOOPBACK, port):
        held.close()
        raise ConnectionError(f"the server does not listen on port {port}")
    return held


@contextmanager
def _short_socket_path(path: Path) -> Iterator[str]:
    """Yield a path to the socket within the kernel's limit of 107 bytes, which the path of the folder may exceed."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
