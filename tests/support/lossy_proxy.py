"""A TCP proxy that can swallow the reply to one request and then drop the connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class LossyProxy:
    """Stands between a client and a server; a context manager.

    Args:
        target: the server, as host:port.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wanted: bytes | None = None
        self._scripts: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self.dropped = 0

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def drop_the_reply_of(self, word: bytes) -> None:
        """Swallow the reply to the next script that has ``word`` in it (or to a command with it)."""
        with self._lock:
            self._wanted = word

    def __enter__(self) -> LossyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                lost = threading.Event()
                threading.Thread(target=self._requests, args=(client, server, lost), daemon=True).start()
                threading.Thread(target=self._replies, args=(client, server, lost), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 20):
                if self._is_wanted(data):
                    lost.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _is_wanted(self, data: bytes) -> bool:
        with self._lock:
            if self._wanted is None or self._wanted not in data:
                return False
            self._wanted = None
            return True

    def _replies(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                if lost.is_set():
                    self.dropped += 1
                    break
                client.sendall(data)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
