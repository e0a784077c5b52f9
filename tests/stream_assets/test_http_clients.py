"""HTTP clients and servers that answer what they like: no secret is shown, and no answer takes all time or memory."""

from __future__ import annotations

import base64
import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from socketserver import StreamRequestHandler, ThreadingTCPServer
from urllib.parse import quote_plus
from urllib.request import build_opener

import pytest

from spark_jobs.decoding import schema_registry
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_assets import UnityCatalog, catalogs
from stream_consumers.client_config import EnvironmentVariable
from stream_consumers.errors import (
    CatalogUnavailableError,
    InvalidOptionError,
    SchemaMismatchError,
    SchemaRegistryError,
    StreamAssetsError,
)
from tests.support.kept_errors import kept

SECRET = "hunter2-of-the-server"
CODED = [base64.b64encode(f"{user}:{SECRET}".encode()).decode().rstrip("=") for user in ("me", "lake")]
OPTIONS = {"basic.auth.user.info": f"me:{SECRET}", "max.retries": 0, "timeout": 5}
FETCHING = {
    "bearer.auth.credentials.source": "OAUTHBEARER",
    "bearer.auth.client.id": "lake",
    "bearer.auth.client.secret": SECRET,
    "bearer.auth.scope": "schemas",
    "bearer.auth.logical.cluster": "lsrc-1",
    "max.retries": 0,
    "timeout": 5,
}
"""The options of a client that fetches its tokens, without the address of the server that issues them."""
ISSUER = "bearer.auth.issuer.endpoint.url"
CLIENTS: dict[str, Callable[[str], object]] = {
    "unity": lambda url: UnityCatalog(url=url, token=SECRET).table("main.sales.orders").path,
    "registry": lambda url: SchemaRegistry(url, options=OPTIONS).subject("orders"),
    "issuer": lambda url: SchemaRegistry(url, options={**FETCHING, ISSUER: f"{url}/token"}).subject("orders"),
}
LIMITS = {"unity": catalogs, "registry": schema_registry}
"""The module that limits the answers to each client."""
ANSWERS = {
    "no status": "{said}\r\n",
    "status": "HTTP/1.1 {said}\r\n\r\n",
    "reason": "HTTP/1.1 400 {said}\r\nContent-Length: 0\r\n\r\n",
    "header": "HTTP/1.1 200 OK\r\n{said}\r\n\r\n",
    "address": "HTTP/1.1 302 Found\r\nLocation: http://{said}/\r\nContent-Length: 0\r\n\r\n",
    "chunk": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{said}\r\n",
    "text": "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n<html>{said}",
    "message": 'HTTP/1.1 401 No\r\nConnection: close\r\n\r\n{{"error_code": 40101, "message": "{said}"}}',
    "error": (
        "HTTP/1.1 401 No\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n"
        '{{"error": "invalid_client", "error_description": "{coded}"}}'
    ),
    "table": 'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{{"table_type": "{said}", "data_source_format": "{said}"}}',
}


BODY = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
DRIPS = {
    "header": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "statuses": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (BODY, b" "),
}
"""What an answer begins with, and what comes after that for ever."""

Answer = Callable[[str], Iterable[bytes]]


@pytest.fixture
def server() -> Iterator[tuple[str, list[Answer]]]:
    """The address of a server, and its answer: what it sends, a part each 10 ms, to a client with some credentials."""
    answers: list[Answer] = []
    has_ended = threading.Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            lines = [line.decode().strip() for line in iter(self.rfile.readline, b"\r\n")]
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            self.rfile.read(int(headers.get("content-length", 0)))
            credentials = headers.get("proxy-authorization") or headers["authorization"]
            with suppress(ConnectionError):
                for part in answers[0](credentials):
                    self.wfile.write(part)
                    if has_ended.wait(0.01):
                        return

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", answers
        has_ended.set()
        listening.shutdown()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_an_answer_that_repeats_the_request_shows_no_secret(
    client: str, answer: str, server: tuple[str, list[Answer]], caplog: pytest.LogCaptureFixture
) -> None:
    url, answers = server
    answers.append(lambda sent: [ANSWERS[answer].format(said=f"{sent} for {SECRET}", coded=sent.split()[1]).encode()])
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StreamAssetsError) as raised:
        CLIENTS[client](url)
    for shown in (kept(raised.value), caplog.text):
        # An end of the secret is as much a leak as all of it.
        assert [secret for secret in (SECRET, *CODED) if secret[-8:] in shown] == []


@pytest.mark.parametrize(("client", "answer"), [("unity", "table"), ("registry", "reason"), ("registry", "message")])
def test_a_proxy_of_the_environment_that_repeats_the_request_shows_no_secret(
    client: str,
    answer: str,
    server: tuple[str, list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, answers = server
    password = "pass/word-of-the-proxy"
    coded = base64.b64encode(f"me:{password}".encode()).decode().rstrip("=")
    answers.append(lambda sent: [ANSWERS[answer].format(said=f"{sent} for {password}").encode()])
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://me:{quote_plus(password)}@{url.partition('://')[2]}")
    # It reads the proxies when it is created.
    monkeypatch.setattr(catalogs, "_OPENER", build_opener(catalogs._RefuseRedirects))
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StreamAssetsError) as raised:
        CLIENTS[client](f"http://{client}.example")
    for shown in (kept(raised.value), caplog.text):
        assert [secret for secret in (password, coded) if secret[-8:] in shown] == []


@pytest.mark.parametrize(
    ("client", "proxy"),
    [
        *((client, "http:/me:{secret}@127.0.0.1:1") for client in CLIENTS),
        ("unity", "http://127.0.0.1:1:me:{secret}"),
        ("unity", "127.0.0.1:1:me:{secret}"),
        ("unity", "http://me:{secret}/127.0.0.1:1"),
    ],
)
def test_a_mistyped_proxy_of_the_environment_is_reported_without_its_password(
    client: str, proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", proxy.format(secret="pass-of-the-proxy"))
    monkeypatch.setattr(catalogs, "_OPENER", build_opener(catalogs._RefuseRedirects))
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StreamAssetsError) as raised:
        CLIENTS[client](f"http://{client}.example")
    assert "of-the-proxy" not in f"{kept(raised.value)} {caplog.text}"


@pytest.mark.parametrize("address", ["http://me:{secret}@{host}/token", "http://{host}/token?api_key={secret}"])
def test_an_address_in_the_options_has_no_credentials(
    address: str,
    server: tuple[str, list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, _ = server
    caplog.set_level(logging.DEBUG)
    address = address.format(secret=SECRET, host=url.partition("://")[2])
    monkeypatch.setenv("ISSUER", address)
    with pytest.raises(InvalidOptionError) as raised:
        SchemaRegistry(url, options={**FETCHING, ISSUER: address})
    later = SchemaRegistry(url, options={**FETCHING, ISSUER: EnvironmentVariable("ISSUER")})
    with pytest.raises(InvalidOptionError) as raised_later:
        later.subject("orders")
    assert SECRET not in f"{kept(raised.value)} {kept(raised_later.value)} {caplog.text}"


@pytest.mark.parametrize("drip", DRIPS)
@pytest.mark.parametrize(
    ("client", "error"), [("unity", CatalogUnavailableError), ("registry", SchemaRegistryError)], ids=LIMITS
)
def test_an_answer_that_never_ends_is_waited_for_for_a_while(
    client: str,
    error: type[StreamAssetsError],
    drip: str,
    server: tuple[str, list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, answers = server
    begin, part = DRIPS[drip]
    answers.append(lambda _: chain([begin], repeat(part)))
    monkeypatch.setattr(LIMITS[client], "MAX_ANSWER_SECONDS", 0.3)
    with pytest.raises(error):
        CLIENTS[client](url)


@pytest.mark.parametrize(
    ("client", "error"), [("unity", InvalidOptionError), ("registry", SchemaMismatchError)], ids=LIMITS
)
def test_an_answer_without_end_is_read_up_to_a_size(
    client: str, error: type[StreamAssetsError], server: tuple[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = server
    answers.append(lambda _: chain([BODY], repeat(b" " * (1 << 18))))
    monkeypatch.setattr(LIMITS[client], "MAX_ANSWER_BYTES", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(error):
            CLIENTS[client](url)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
