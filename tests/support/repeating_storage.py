"""A storage that answers with what it was asked with, as Amazon S3 does with a token that has expired.

It is a process of its own: delta-rs holds the lock of the interpreter while it waits for an answer.
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

_REFUSED, _BEHIND, _PORT = sys.argv[1:] if __name__ == "__main__" else ("", "", "0")


class Repeats(BaseHTTPRequestHandler):
    """Refuses requests, and repeats their token."""

    def do_GET(self) -> None:
        if not re.search(_REFUSED, f"{self.command} {unquote(self.path)}"):
            self._forward()
            return
        text = f"<Error><Code>ExpiredToken</Code><Token-0>{self.headers['x-amz-security-token']}</Token-0></Error>"
        self._answer(400, {}, b"" if self.command == "HEAD" else text.encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def _forward(self) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() in ("authorization", "range")}
        request = urllib.request.Request(f"{_BEHIND}{self.path}", headers=headers, method=self.command)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            self._answer(answer.status, dict(answer.headers), answer.read())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if name in ("Content-Length", "Content-Type", "Content-Range", "Last-Modified", "ETag"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Be quiet."""


@contextmanager
def repeating_storage(refused: str = "", behind: str = "", port: int = 0) -> Iterator[str]:
    """Its address.

    Args:
        refused: a pattern of the requests that it refuses, like ``GET .*parquet``; all by default.
        behind: the address of a storage that answers the other requests.
        port: of the address; any by default.
    """
    command = [sys.executable, "-m", __name__, refused, behind, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(_PORT)), Repeats) as running:
        print(running.server_port, flush=True)
        running.serve_forever()
