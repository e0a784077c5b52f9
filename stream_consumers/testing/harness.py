"""What the contract suite needs of a backend, and an empty place with streams for each of its tests."""

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
    """A backend, as its contract tests see it: by URL.

    Args:
        name: shown in the ids of the tests.
        create: makes an empty place for the streams :data:`STREAMS`, each of which can have the shards 0 to 2; it gets
            an empty folder, and returns the URL without streams, with a slash at its end. The folder has the same name
            in the next session of pytest: on a broker that goes on running, take a new name each time.
        remove: removes the place at this URL again.
        outage: a context in which the place at this URL can be read and takes nothing; without it, what a producer does
            in one is not tested.

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
    """A place with streams, empty at first.

    Args:
        location: its URL without streams.

    Example:
        >>> Stream("memory://place-1/").url("orders", "clicks")
        'memory://place-1/orders,clicks'
    """

    location: str

    def url(self, *streams: str) -> str:
        """Its URL with these streams, ``orders`` by default."""
        return self.location + ",".join(streams or STREAMS[:1])

    def send(self, places: Iterable[Shard], *, first_ms: int = 1_000, payload: bytes | None = None) -> list[Receipt]:
        """Send a message to each of ``places`` in turn, 10 ms apart, and flush."""
        with create_producer(self.url()) as producer:
            return [
                producer.send(
                    b"%s %d" % (str(place).encode(), index) if payload is None else payload,
                    stream=place.stream,
                    shard=place.id,
                    timestamp_ms=first_ms + 10 * index,
                )
                for index, place in enumerate(places)
            ]


def round_robin(count: int, shards: int = 1, streams: Sequence[str] = STREAMS[:1]) -> list[Shard]:
    """``count`` places, all shards of all streams in turn."""
    every = [Shard(stream, number) for stream in streams for number in range(shards)]
    return [every[index % len(every)] for index in range(count)]


class Contract:
    """Tests that get an empty ``stream`` each, made by a fixture ``harness`` of the backend's author."""

    @pytest.fixture
    def stream(self, harness: Harness, tmp_path: Path) -> Iterator[Stream]:
        """An empty place, removed after the test."""
        location = harness.create(tmp_path)
        yield Stream(location)
        harness.remove(location)
