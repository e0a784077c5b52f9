"""The backends that the contract tests run over; a new backend adds one :class:`Backend` here."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from stream_consumers.create import create_producer
from stream_consumers.memory import forget_memory_broker
from stream_consumers.options import ConsumerMode, FileProducerOptions
from stream_consumers.testing.harness import SHARDS, STREAMS, Harness
from stream_consumers.urls import StreamUrl
from tests.support.topics import create_topic, delete_topics

_numbers = itertools.count()


@dataclass(frozen=True)
class Backend:
    """One of our own backends, with what only tests beyond the contract suite ask.

    Args:
        name: shown in the test ids.
        create: make an empty place for :data:`STREAMS`, each with the shards 0..2; returns its URL without streams.
            It gets a folder, and the address of the service.
        remove: remove it again.
        service: the fixture with the address of the server that it needs.
        first_sequence: of a shard's first message; ``None`` where that depends on the time.
        has_all_shards: the shards are there before their first message.
        reads_at_once: what was flushed is there for a consumer that does not wait.
        is_in_order_of_time: a message from before the last one gets the time of that one.
        outage: see :class:`stream_consumers.testing.Harness`.
        positions_mode: of a consumer whose positions a group of the broker keeps; ``None`` where there are no groups.
    """

    name: str
    create: Callable[[Path, str], str]
    remove: Callable[[str], None]
    service: str | None = None
    first_sequence: int | None = 0
    has_all_shards: bool = False
    reads_at_once: bool = True
    is_in_order_of_time: bool = False
    positions_mode: ConsumerMode | None = None
    outage: Callable[[str], AbstractContextManager[None]] | None = None

    def __str__(self) -> str:
        return self.name

    def harness(self, address: str) -> Harness:
        """For the contract suite.

        Args:
            address: of the server.
        """
        return Harness(self.name, lambda folder: self.create(folder, address), self.remove, self.outage)


def _create_file(folder: Path, address: str) -> str:
    url = f"file://{folder}/stream-{next(_numbers)}.ss/"
    create_producer(f"{url}orders", producer_options=FileProducerOptions(beacon_interval=1024)).close()
    return url


@contextmanager
def _disk_is_full(url: str) -> Iterator[None]:
    """No file of this process may grow beyond the size that this one has."""
    size = Path(StreamUrl.parse(f"{url}orders").path).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _create_topics(folder: Path, address: str) -> str:
    for name in STREAMS:
        create_topic(address, SHARDS, name=name)
    return f"kafka://{address}/"


def _remove_topics(url: str) -> None:
    delete_topics(StreamUrl.parse(url).nodes[0], STREAMS)


def _create_keys(folder: Path, address: str) -> str:
    host, _, port = address.partition(":")
    with redis.Redis(host, int(port)) as client:
        for name in STREAMS:
            for number in range(SHARDS):
                client.xgroup_create(f"{name}:{number}", "maker", mkstream=True)
                client.xgroup_destroy(f"{name}:{number}", "maker")
    return f"redis://{address}/"


def _remove_keys(url: str) -> None:
    host, _, port = StreamUrl.parse(url).nodes[0].partition(":")
    with redis.Redis(host, int(port)) as client:
        client.flushdb()


@contextmanager
def _memory_is_full(url: str) -> Iterator[None]:
    host, _, port = StreamUrl.parse(url).nodes[0].partition(":")
    with redis.Redis(host, int(port)) as client:
        client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            client.config_set("maxmemory", "0")


BACKENDS = (
    Backend(
        "memory",
        create=lambda folder, address: f"memory://contract-{next(_numbers)}/",
        remove=lambda url: forget_memory_broker(StreamUrl.parse(url)),
        positions_mode=ConsumerMode.REAL_TIME,
    ),
    Backend("file", create=_create_file, remove=lambda url: None, first_sequence=1, outage=_disk_is_full),
    Backend(
        "kafka",
        create=_create_topics,
        remove=_remove_topics,
        service="kafka",
        has_all_shards=True,
        reads_at_once=False,
        positions_mode=ConsumerMode.RESUMABLE,
    ),
    Backend(
        "redis",
        create=_create_keys,
        remove=_remove_keys,
        service="redis_address",
        first_sequence=None,
        has_all_shards=True,
        is_in_order_of_time=True,
        outage=_memory_is_full,
        positions_mode=ConsumerMode.REAL_TIME,
    ),
)
