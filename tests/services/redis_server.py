"""A real redis-server on the loopback interface, without persistence, gone with its folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from tests.polling import until
from tests.services.kafka_broker import free_port


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """A running server, as ``host:port``; ``options`` go on its command line."""
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed; make setup does it where it may"
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    log = folder / "redis.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            until(lambda: _answers(port), seconds=20, what="the Redis server")
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with redis.Redis("127.0.0.1", port) as client, suppress(redis.ConnectionError):
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
    return False
