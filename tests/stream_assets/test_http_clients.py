"""No HTTP client shows its secret, whatever part of an answer repeats its request."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_assets import UnityCatalog
from stream_consumers.errors import StreamAssetsError
from tests.support.kept_errors import kept

SECRET = "hunter2-of-the-server"
CODED = base64.b64encode(f"me:{SECRET}".encode()).decode()
CLIENTS: dict[str, Callable[[str], object]] = {
    "unity": lambda url: UnityCatalog(url=url, token=SECRET).table("main.sales.orders").path,
    "registry": lambda url: SchemaRegistry(url, options={"basic.auth.user.info": f"me:{SECRET}"}).subject("orders"),
}
ANSWERS = {
    "no status": "{said}\r\n",
    "status": "HTTP/1.1 {said}\r\n\r\n",
    "reason": "HTTP/1.1 400 {said}\r\nContent-Length: 0\r\n\r\n",
    "header": "HTTP/1.1 200 OK\r\n{said}\r\n\r\n",
    "address": "HTTP/1.1 302 Found\r\nLocation: http://{said}/\r\nContent-Length: 0\r\n\r\n",
    "chunk": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{said}\r\n",
    "text": "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n<html>{said}",
    "message": 'HTTP/1.1 401 No\r\nConnection: close\r\n\r\n{{"error_code": 40101, "message": "{said}"}}',
    "table": 'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{{"table_type": "{said}", "data_source_format": "{said}"}}',
}


@pytest.fixture
def repeating() -> Iterator[tuple[str, list[str]]]:
    """Return the address of a server, and the answer that it gives."""
    answers: list[str] = []

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            lines = [line.decode().strip() for line in iter(self.rfile.readline, b"\r\n")]
            credentials = next(line.partition(":")[2].strip() for line in lines if line.lower().startswith("auth"))
            self.wfile.write(answers[0].format(said=f"{credentials} for {SECRET}").encode())

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", answers
        server.shutdown()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_an_answer_that_repeats_the_request_shows_no_secret(
    client: str, answer: str, repeating: tuple[str, list[str]]
) -> None:
    url, answers = repeating
    answers.append(ANSWERS[answer])
    with pytest.raises(StreamAssetsError) as raised:
        CLIENTS[client](url)
    shown = kept(raised.value)
    assert SECRET not in shown
    assert CODED.rstrip("=") not in shown
