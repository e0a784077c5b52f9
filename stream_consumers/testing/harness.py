"""The harness of a backend for the contract suite, which gives each test an empty location with streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stream_consumers.create import create_producer
from stream_consumers.messages import Receipt, Shard

STREAMS = ("orders", "clicks")
SHARDS = 3


@dataclass(frozen=True)
class Harness:
    """A backend as the contract tests access it: by URL.

    Args:
        name: the name shown in the ids of the tests.
        create: creates an empty location for the streams :data:`STREAMS`, each with up to :data:`SHARDS` shards. It
            gets an empty folder, and returns the URL without streams, with a slash at the end. The folder has the same
            name in the next pytest session: on a broker that keeps running, choose a new name each time.
        remove: removes the location with this URL.
        outage: a context in which the location with this URL can be read but rejects writes; without it, the behavior
            of producers during an outage is not tested.

    Example:
        >>> harness = Harness("memory", create=lambda folder: f"memory://{folder.name}/")
        >>> harness.create(Path("place-1"))
        'memory://place-1/'
    """

    name: str
    create: Callable[[Path], str]
    remove: Callable[[str], None] = lambda url: None
    outage: Callable[[str], AbstractContextManager[None]] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Stream:
    """A location with streams, empty at first.

    Args:
        location: the URL without streams.

    Example:
        >>> Stream("memory://place-1/").url("orders", "clicks")
        'memory://place-1/orders,clicks'
    """

    location: str

    def url(self, *streams: str) -> str:
        """Return the URL with these streams, ``orders`` by default."""
        return self.location + ",".join(streams or STREAMS[:1])

    def send(self, shards: Iterable[Shard], *, first_ms: int = 1_000, payload: bytes | None = None) -> list[Receipt]:
        """Send a message to each of ``shards`` in turn, with timestamps 10 ms apart, and flush."""
        with create_producer(self.url()) as producer:
            return [
                producer.send(
                    b"%s %d" % (str(shard).encode(), index) if payload is None else payload,
                    stream=shard.stream,
                    shard=shard.id,
                    timestamp_ms=first_ms + 10 * index,
                )
                for index, shard in enumerate(shards)
            ]


def round_robin(count: int, shards: int = 1, streams: Sequence[str] = STREAMS[:1]) -> list[Shard]:
    """Return ``count`` shards: all shards of all streams in turn."""
    every = [Shard(stream, number) for stream in streams for number in range(shards)]
    return [every[index % len(every)] for index in range(count)]


class Contract:
    """A base class for tests; the fixture ``harness`` of the backend creates an empty ``stream`` for each test."""

    @pytest.fixture
    def stream(self, harness: Harness, tmp_path: Path) -> Iterator[Stream]:
        """Yield an empty location, which is removed after the test."""
        location = harness.create(tmp_path)
        yield Stream(location)
        harness.remove(location)
