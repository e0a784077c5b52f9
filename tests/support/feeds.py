"""The same messages in a file, a topic or a Redis stream, with places that a test can tell beforehand.

Written and asked without the code under test, but for the file, which only its own producer can write.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import redis
from confluent_kafka import Producer

from stream_consumers.create import create_producer
from stream_consumers.messages import Shard
from tests.support.redis_streams import unique_name
from tests.support.topics import committed, create_topic, unique_group

KINDS = ("file", "kafka", "redis")
# For what is the same code on each: files in the first tier.
FILES_FIRST = ("file", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kafka", "redis")))
SHARDS = 3
FIRST_MS = 1_741_564_800_000
"""2025-03-10 in UTC: brokers refuse messages from the future."""
_ROUND_TRIP = 5000


def every_millisecond(number: int) -> int:
    """Message ``number`` is sent so many milliseconds after the first one."""
    return FIRST_MS + number


class Feed(ABC):
    """A stream whose message ``number`` is in shard ``number % SHARDS``, behind the smaller numbers of that shard.

    Args:
        url: of the stream.
        stream: its key.
        moment: the timestamp of each message, growing with its number.
    """

    kind: str
    payload: Callable[[int], bytes]
    """What is in a message that can be decoded: JSON, unless a test says otherwise."""

    def __init__(self, url: str, stream: str, moment: Callable[[int], int]) -> None:
        self.payload = lambda number: b'{"id": %d, "user": "u%d"}' % (number, number % 7)
        self.url = url
        self.stream = stream
        self.moment = moment
        self.group = unique_group()
        self.sent = 0

    def send(self, count: int, *, malformed: frozenset[int] = frozenset()) -> None:
        """So many more messages."""
        numbers = range(self.sent, self.sent + count)
        self._send((n, b'{"id": ' if n in malformed else self.payload(n)) for n in numbers)
        self.sent += count

    @abstractmethod
    def _send(self, payloads: Iterable[tuple[int, bytes]]) -> None: ...

    @abstractmethod
    def sequence(self, number: int) -> int:
        """The sequence of a message."""

    @abstractmethod
    def told(self) -> Mapping[int, int]:
        """How many messages of each shard the broker says that the group is done with; files have no broker."""

    def shard(self, number: int) -> Shard:
        """The shard of a message."""
        return Shard(self.stream, number % SHARDS)

    def places(self, number: int) -> Mapping[Shard, int]:
        """In each shard, the sequence of the first message that is ``number`` or behind it."""
        return {self.shard(n): self.sequence(n) for n in range(number, number + SHARDS)}

    def moments(self, number: int) -> Mapping[Shard, int]:
        """Where a seek to the timestamp of a message leads."""
        return self.places(number)

    def positions(self, number: int) -> Mapping[Shard, int]:
        """In each shard, the sequence behind the last message before ``number``."""
        return {self.shard(n): self.sequence(n) + 1 for n in range(number - SHARDS, number)}

    def bound(self, number: int) -> str:
        """These places, as a user writes them."""
        return ",".join(f"{shard}={sequence}" for shard, sequence in sorted(self.places(number).items()))

    def done(self, number: int) -> Mapping[int, int]:
        """What :meth:`told` answers if the group is to go on with message ``number``."""
        return {shard: (number - shard + SHARDS - 1) // SHARDS for shard in range(SHARDS)} if self.has_broker else {}

    @property
    def has_broker(self) -> bool:
        """Whether somebody is told of the group's position."""
        return True


class FileFeed(Feed):
    kind = "file"
    has_broker = False

    def __init__(self, folder: Path, moment: Callable[[int], int] = every_millisecond) -> None:
        super().__init__(f"file://{folder}/orders.ss/orders", "orders", moment)

    def _send(self, payloads: Iterable[tuple[int, bytes]]) -> None:
        with create_producer(self.url) as producer:
            for number, payload in payloads:
                producer.send(payload, shard=number % SHARDS, timestamp_ms=self.moment(number))

    def sequence(self, number: int) -> int:
        return number // SHARDS + 1

    def told(self) -> Mapping[int, int]:
        return {}


class KafkaFeed(Feed):
    kind = "kafka"

    def __init__(self, address: str, moment: Callable[[int], int] = every_millisecond) -> None:
        self.address = address
        topic = create_topic(address, SHARDS)
        super().__init__(f"kafka://{address}/{topic}", topic, moment)

    def _send(self, payloads: Iterable[tuple[int, bytes]]) -> None:
        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 5, "log_level": 2})
        for number, payload in payloads:
            producer.produce(self.stream, payload, partition=number % SHARDS, timestamp=self.moment(number))
            if number % _ROUND_TRIP == 0:
                producer.flush()
        assert producer.flush(20) == 0

    def sequence(self, number: int) -> int:
        return number // SHARDS

    def told(self) -> Mapping[int, int]:
        return committed(self.address, self.group, self.stream)


class RedisFeed(Feed):
    kind = "redis"

    def __init__(self, address: str, moment: Callable[[int], int] = every_millisecond) -> None:
        host, _, port = address.partition(":")
        self.client = redis.Redis(host, int(port))
        name = unique_name("orders")
        super().__init__(f"redis://{address}/{name}", name, moment)

    def _send(self, payloads: Iterable[tuple[int, bytes]]) -> None:
        left = iter(payloads)
        while some := list(itertools.islice(left, _ROUND_TRIP)):
            pipeline = self.client.pipeline(transaction=False)
            for number, payload in some:
                words = (f"{self.stream}:{number % SHARDS}", f"{self.moment(number)}-0", "msg", payload)
                pipeline.execute_command("XADD", *words)
            pipeline.execute()

    def sequence(self, number: int) -> int:
        return self.moment(number) << 16

    def moments(self, number: int) -> Mapping[Shard, int]:
        return dict.fromkeys(self.places(number), self.sequence(number))

    def told(self) -> Mapping[int, int]:
        found = {}
        for shard in range(SHARDS):
            for info in self.client.xinfo_groups(f"{self.stream}:{shard}"):
                if info["name"] == self.group.encode():
                    milliseconds = int(info["last-delivered-id"].partition(b"-")[0])
                    numbers = range(shard, self.sent, SHARDS)
                    found[shard] = bisect_right([self.moment(number) for number in numbers], milliseconds)
        return found


def make_feed(
    kind: str, folder: Path, address: Callable[[str], str], moment: Callable[[int], int] = every_millisecond
) -> Feed:
    """An empty feed.

    Args:
        kind: one of :data:`KINDS`.
        folder: for a file.
        address: of the service with the fixture of this name; asked for only where one is needed.
        moment: see :class:`Feed`.
    """
    if kind == "kafka":
        return KafkaFeed(address("kafka"), moment)
    if kind == "redis":
        return RedisFeed(address("redis_address"), moment)
    return FileFeed(folder, moment)
