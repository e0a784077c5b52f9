"""A broker of Kafka that refuses each client, and repeats its password."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

API_VERSIONS, HANDSHAKE, AUTHENTICATE = 18, 17, 36
UNSUPPORTED_VERSION, AUTHENTICATION_FAILED = 35, 58
# What it takes: the number of a request, and its first and last version.
REQUESTS = [(API_VERSIONS, 0, 0), (HANDSHAKE, 0, 1), (AUTHENTICATE, 0, 0), (3, 0, 4), (1, 0, 11), (10, 0, 2)]


class _Client(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while size := self.rfile.read(4):
            request = self.rfile.read(struct.unpack(">i", size)[0])
            kind, version, number, name = struct.unpack(">hhih", request[:10])
            answer = _answer(kind, version, request[10 + max(name, 0) :])
            self.wfile.write(struct.pack(">ii", 4 + len(answer), number) + answer)


def _answer(kind: int, version: int, body: bytes) -> bytes:
    if kind == API_VERSIONS:
        code = UNSUPPORTED_VERSION if version else 0
        return struct.pack(">hi", code, len(REQUESTS)) + b"".join(struct.pack(">hhh", *one) for one in REQUESTS)
    if kind == HANDSHAKE:
        return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
    said = b"bad password " + body.split(b"\0")[-1]
    return struct.pack(">hh", AUTHENTICATION_FAILED, len(said)) + said + struct.pack(">i", 0)


class _Broker(socketserver.ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def repeating_broker() -> Iterator[str]:
    """Its address; it takes SASL/PLAIN."""
    with _Broker(("127.0.0.1", 0), _Client) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
