"""The part of Unity Catalog's REST interface that says where tables are, served on the loopback interface.

Its server is in no package registry; the answers are those of its OpenAPI description, ``getTable`` of ``Tables``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

PREFIX = "/api/2.1/unity-catalog/tables/"
TOKEN = "t0ken-of-the-catalog"


@dataclass(slots=True)
class Unity:
    """A running catalog.

    Args:
        url: of it.
        tables: what it says of each table, by its full name.
        failure: answers this instead, if it is not 0: an HTTP status.
        body: answers this instead, if it is not empty.
        asked: what it was asked: the path and the headers of each request.
    """

    url: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: int = 0
    body: bytes = b""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def add(self, name: str, location: str | None, *, kind: str = "EXTERNAL", data_format: str = "DELTA") -> None:
        """Let the name be of a table at a place."""
        catalog, schema, table = name.split(".")
        self.tables[name] = {
            "name": table,
            "catalog_name": catalog,
            "schema_name": schema,
            "table_type": kind,
            "data_source_format": data_format,
            "storage_location": location,
            "table_id": f"id of {name}",
        }

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        """The status and the body of an answer."""
        self.asked.append((path, headers))
        if self.failure:
            return self.failure, {"error_code": "INTERNAL", "message": "it fails"}
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error_code": "UNAUTHENTICATED", "message": "who is it?"}
        name = unquote(path.removeprefix(PREFIX))
        if not path.startswith(PREFIX) or name not in self.tables:
            return 404, {"error_code": "TABLE_NOT_FOUND", "message": f"Table not found: {name}"}
        return 200, self.tables[name]


@contextmanager
def unity_catalog() -> Iterator[Unity]:
    """A catalog without tables; one that has ended refuses connections."""
    catalog = Unity("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = catalog.answer(self.path, dict(self.headers))
            content = catalog.body or json.dumps(body).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        catalog.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield catalog
        finally:
            server.shutdown()
            thread.join()
