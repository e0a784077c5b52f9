"""Servers that a test stops and starts again on the same port, with what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from tests.support.kafka_broker import broker_in
from tests.support.redis_server import redis_server
from tests.support.servers import anew, some_port


class Stoppable:
    """A server that runs now, and may be killed and started again.

    Args:
        start: starts it; ends it as a context manager does.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[object]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self.is_up = False
        self.told: list[str] = []

    def start(self) -> None:
        """Start it, if it does not run."""
        if not self.is_up:
            self._stack.enter_context(self._start())
            self.is_up = True

    def stop(self) -> None:
        """Kill it."""
        self._stack.close()
        self.is_up = False

    def start_when_told(self, why: str) -> None:
        """Start it as soon as somebody says that they wait for it."""
        self.told.append(why)
        self.start()


@contextmanager
def stoppable_redis(folder: Path) -> Iterator[tuple[Stoppable, str]]:
    """A Redis server that keeps its data, and its address."""
    with anew(lambda: _stoppable_redis(folder, some_port()), times=5) as found:
        yield found


@contextmanager
def _stoppable_redis(folder: Path, port: int) -> Iterator[tuple[Stoppable, str]]:
    server = Stoppable(lambda: redis_server(folder, "--appendonly", "yes", "--appendfsync", "always", port=port))
    try:
        server.start()
        yield server, f"127.0.0.1:{port}"
    finally:
        server.stop()


@contextmanager
def stoppable_kafka(folder: Path) -> Iterator[tuple[Stoppable, str]]:
    """A Kafka broker that keeps its data, and its address."""
    with anew(lambda: _stoppable_kafka(folder, some_port()), times=5) as found:
        yield found


@contextmanager
def _stoppable_kafka(folder: Path, port: int) -> Iterator[tuple[Stoppable, str]]:
    home = folder / f"broker-{port}"
    home.mkdir()
    server = Stoppable(lambda: broker_in(home, port))
    try:
        server.start()
        yield server, f"127.0.0.1:{port}"
    finally:
        server.stop()
