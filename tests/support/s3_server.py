"""An S3 server as a process of its own: moto's, which honours ``If-None-Match``."""

from __future__ import annotations

import os
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import running
from tests.support.settings import ROOT

START_SECONDS = 100.0
BUCKET = "lake"
SECRET = "s3cret-of-the-lake"


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A running server with a bucket."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        """The storage options of its tables."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """A server that keeps its objects in memory."""
    command = [sys.executable, "-m", "tests.support.s3_server", "-H", "127.0.0.1", "-p", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with running("the S3 server", command, folder / "s3.log", environment=environment) as server:
        (endpoint,) = server.until(
            lambda: server.said(r"Running on (http://[0-9.]+:\d+)"), seconds=START_SECONDS, what="its address"
        )
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", endpoint)
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield ObjectStore(endpoint)


def _put_one_at_a_time() -> None:
    """As S3 does: moto looks for an object, and puts one then, in threads that do not wait for each other."""
    from moto.s3.responses import S3Response

    put, turn = S3Response.put_object, threading.Lock()

    def put_object(self: S3Response) -> Any:
        with turn:
            return put(self)

    S3Response.put_object = put_object  # type: ignore[method-assign]


if __name__ == "__main__":
    from moto.server import main

    _put_one_at_a_time()
    main(sys.argv[1:])
