"""A schema registry over HTTP that speaks Confluent's protocol, as far as serializers and our decoders ask it."""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from spark_jobs.decoding import schema_registry as registries
from spark_jobs.decoding.protobuf_schema import compiled
from tests.support.avro_schemas import encoded

SCHEMA_MISSING, SUBJECT_MISSING, VERSION_MISSING = 40403, 40401, 40402


@dataclass
class Registry:
    """A running registry: its address, what it holds, and how it behaves.

    Args:
        url: of the server.
        failing: a status with which it answers everything; 0 for none.
        password: of the user ``me``; empty where nobody is asked.
        asked: the paths that were asked for.
        redirect: an address to which it redirects everything; empty for none.
        serializes: whether it gives descriptors of Protobuf where they are asked for, and not only text.
        headers: what each answer has besides.
        parts: the bytes of each answer, instead of what it would be, until the client goes away.
        odd_path: what a path ends with if ``parts`` are answered to it; empty for each path.
        replies: the status and the document of some paths, instead of what they would be.
    """

    url: str = ""
    failing: int = 0
    password: str = ""
    asked: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    redirect: str = ""
    serializes: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    parts: Callable[[], Iterable[bytes]] | None = None
    odd_path: str = ""
    replies: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def register(self, subject: str, schema: str, kind: str = "AVRO", references: Any = ()) -> int:
        """A schema as the newest version of a subject; its id."""
        found = {"schemaType": kind, "schema": schema, "references": [*references]}
        if found not in self.schemas:
            self.schemas.append(found)
        number = self.schemas.index(found) + 1
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return number

    def framed(self, subject: str, schema: Any, value: Any) -> bytes:
        """A value in Confluent's wire format, of an Avro schema that is registered."""
        return b"\0" + self.register(subject, json.dumps(schema)).to_bytes(4, "big") + encoded(schema, value)

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """The status and the document of an answer."""
        self.asked.append(f"{method} {path}")
        if path in self.replies:
            return self.replies[path]
        for pattern, wanted, reply in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and wanted == method:
                return reply(self, [unquote(group) for group in found.groups()], query, body)
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def shown(self, number: int, query: dict[str, list[str]]) -> dict[str, Any]:
        """A schema as it is answered; Avro is what is meant where no type is told."""
        schema = dict(self.schemas[number - 1])
        if schema["schemaType"] == "AVRO":
            del schema["schemaType"]
        elif schema["schemaType"] == "PROTOBUF" and query.get("format") == ["serialized"] and self.serializes:
            schema["schema"] = self._serialized(schema)
        if not schema["references"]:
            del schema["references"]
        return schema

    def _serialized(self, schema: dict[str, Any]) -> str:
        if "syntax" not in schema["schema"]:
            return str(schema["schema"])
        files = compiled({**dict(self._texts(schema)), "default.proto": schema["schema"]}, "default.proto")
        return base64.b64encode(files.file[-1].SerializeToString()).decode()

    def _texts(self, schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for reference in schema["references"]:
            number = self.subjects[reference["subject"]][reference["version"] - 1]
            yield reference["name"], self.schemas[number - 1]["schema"]
            yield from self._texts(self.schemas[number - 1])


Reply = Callable[[Registry, list[str], dict[str, list[str]], Any], tuple[int, Any]]


def _missing(code: int) -> tuple[int, Any]:
    return 404, {"error_code": code, "message": "not found"}


def _register(registry: Registry, names: list[str], query: Any, body: Any) -> tuple[int, Any]:
    kind, references = body.get("schemaType", "AVRO"), body.get("references") or ()
    return 200, {"id": registry.register(names[0], body["schema"], kind, references)}


def _look_up(registry: Registry, names: list[str], query: Any, body: Any) -> tuple[int, Any]:
    for version, number in enumerate(registry.subjects.get(names[0], ()), start=1):
        if registry.schemas[number - 1]["schema"] == body["schema"]:
            shown = registry.shown(number, query)
            return 200, {"subject": names[0], "id": number, "version": version, **shown}
    return _missing(SCHEMA_MISSING)


def _version(registry: Registry, names: list[str], query: Any, body: Any) -> tuple[int, Any]:
    versions = registry.subjects.get(names[0])
    if not versions:
        return _missing(SUBJECT_MISSING)
    version = len(versions) if names[1] in ("latest", "-1") else int(names[1])
    if not 1 <= version <= len(versions):
        return _missing(VERSION_MISSING)
    number = versions[version - 1]
    return 200, {"subject": names[0], "id": number, "version": version, **registry.shown(number, query)}


def _schema(registry: Registry, names: list[str], query: Any, body: Any) -> tuple[int, Any]:
    number = int(names[0])
    if not 1 <= number <= len(registry.schemas):
        return _missing(SCHEMA_MISSING)
    return 200, registry.shown(number, query)


def _subjects(registry: Registry, names: list[str], query: Any, body: Any) -> tuple[int, Any]:
    number = int(names[0])
    if not 1 <= number <= len(registry.schemas):
        return _missing(SCHEMA_MISSING)
    return 200, [subject for subject, versions in registry.subjects.items() if number in versions]


def _all_subjects(registry: Registry, names: list[str], query: Any, body: Any) -> tuple[int, Any]:
    return 200, list(registry.subjects)


_ROUTES: list[tuple[str, str, Reply]] = [
    (r"/subjects", "GET", _all_subjects),
    (r"/subjects/([^/]+)/versions", "POST", _register),
    (r"/subjects/([^/]+)", "POST", _look_up),
    (r"/subjects/([^/]+)/versions/([^/]+)", "GET", _version),
    (r"/schemas/ids/(\d+)", "GET", _schema),
    (r"/schemas/ids/(\d+)/subjects", "GET", _subjects),
]


@contextmanager
def schema_registry(tls: ssl.SSLContext | None = None) -> Iterator[Registry]:
    """A registry in a thread of this process.

    Args:
        tls: the certificate of the server; ``None`` for plain HTTP.
    """
    registry = Registry()
    # The port may have been that of an earlier registry, whose schemas this process remembers.
    registries._lookups.clear()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are sent separately, and the body would wait 40 ms until the client confirms the head.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._reply()

        do_POST = do_GET  # noqa: N815

        def _reply(self) -> None:
            url, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            # A request for a token has a form.
            body = json.loads(text) if text.startswith(b"{") else None
            expected = base64.b64encode(f"me:{registry.password}".encode()).decode()
            if registry.failing:
                status, document = registry.failing, {"error_code": registry.failing * 100, "message": "out of order"}
            elif registry.password and self.headers.get("Authorization") != f"Basic {expected}":
                status, document = 401, {"error_code": 401, "message": "Unauthorized"}
            else:
                status, document = registry.answer(self.command, url.path, parse_qs(url.query), body)
            content = json.dumps(document).encode()
            self.send_response(307 if registry.redirect else status)
            if registry.redirect:
                self.send_header("Location", registry.redirect + self.path)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            for name, value in registry.headers.items():
                self.send_header(name, value)
            if registry.parts is not None and url.path.endswith(registry.odd_path):
                self.send_header("Connection", "close")
                self.end_headers()
                with suppress(ConnectionError):
                    for part in registry.parts():
                        self.wfile.write(part)
                self.close_connection = True
                return
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing of it is worth a line."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        registry.url = f"{'https' if tls else 'http'}://localhost:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        serving.start()
        try:
            yield registry
        finally:
            server.shutdown()
            serving.join()
