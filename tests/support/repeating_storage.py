"""A storage that answers with what it was asked with, as Amazon S3 does with a token that has expired.

It is a process of its own: delta-rs holds the lock of the interpreter while it waits for an answer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Repeats(BaseHTTPRequestHandler):
    """Refuses each request, and repeats its token."""

    def do_GET(self) -> None:
        text = f"<Error><Code>ExpiredToken</Code><Token-0>{self.headers['x-amz-security-token']}</Token-0></Error>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Be quiet."""


@contextmanager
def repeating_storage() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Repeats) as running:
        print(running.server_port, flush=True)
        running.serve_forever()
