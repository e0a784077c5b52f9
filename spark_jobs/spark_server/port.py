"""The port of a server, held so that no other process can listen on it.

A client sends its token, its plans and its payloads to the process that listens on the port of its server. So the
process of the server and each of its runs have a socket open that is bound to the port and does not share it. The
kernel then lets no other process listen there until all of them have ended, even if the JVM, the server or both are
killed.

Ports are held on Linux only. Elsewhere the sockets of this module are bound to nothing, and the JVM chooses a port.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from spark_jobs.spark_server.folder import ServerFolder

LOOPBACK = "127.0.0.1"
IS_HELD = sys.platform == "linux"
_ANSWER_SECONDS = 30.0


def reserve() -> socket.socket:
    """Reserve a free port of the loopback interface; where ports are not held it is 0."""
    port = socket.socket()
    if IS_HELD:
        port.bind((LOOPBACK, 0))
    return port


@contextmanager
def shared(port: socket.socket) -> Iterator[None]:
    """Let another process start to listen on the port within the block."""
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        yield
    finally:
        # A third process may have bound the port within the block; it cannot listen after the block either.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def offer(port: socket.socket, folder: ServerFolder) -> None:
    """Pass the port to each client that calls :func:`hold`, until this process ends."""
    if not IS_HELD:
        return
    folder.port.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with _short_name(folder) as name:
        listener.bind(name)
    listener.listen()
    threading.Thread(target=_give, args=(port, listener), daemon=True).start()


def _give(port: socket.socket, listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        # A client that has ended meanwhile does not need it.
        with client, suppress(OSError):
            socket.send_fds(client, [b"."], [port.fileno()])


def hold(folder: ServerFolder, port: int) -> socket.socket:
    """Hold the port of a server, as long as the socket is open.

    Args:
        folder: of the server; only processes of this user can make a socket in it.
        port: where the server listens.

    Raises:
        OSError: the server has ended, or listens on another port.
    """
    if not IS_HELD:
        return socket.socket()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWER_SECONDS)
        with _short_name(folder) as name:
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
def _short_name(folder: ServerFolder) -> Iterator[str]:
    """A path of the socket that is short enough: the kernel takes 107 bytes, and folders may have longer paths."""
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{folder.port.name}"
    finally:
        os.close(descriptor)
