"""Redis Streams in tests: written and looked at with the plain client, not with the code under test."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import redis

from stream_consumers.create import create_producer
from stream_consumers.messages import Message, Receipt
from tests.support.polling import until

PATIENCE = 60.0
_numbers = itertools.count()


def unique_name(kind: str = "stream") -> str:
    """A stream or group that no other test uses."""
    return f"{kind}-{os.getpid()}-{next(_numbers)}"


class Place:
    """A server and a stream on it, empty at first."""

    def __init__(self, address: str, *, cluster: bool = False) -> None:
        self.address = address
        self.stream = unique_name()
        host, _, port = address.partition(":")
        made: Any = redis.RedisCluster if cluster else redis.Redis
        self.client: Any = made(host=host, port=int(port))

    @property
    def url(self) -> str:
        return f"redis://{self.address}/{self.stream}"

    def send(self, numbers: Iterable[int], *, shards: int = 1, is_sharded: bool = False) -> list[Receipt]:
        """Messages with these numbers, 10 ms apart, in turn over the shards."""
        with create_producer(self.url, shards=shards if is_sharded else None) as producer:
            receipts = [
                producer.send(b"%d" % n, shard=n % shards, timestamp_ms=1_700_000_000_000 + 10 * n) for n in numbers
            ]
        return receipts

    def add(self, entry_id: str, *words: bytes | str) -> bytes:
        """An entry as it is, fields in this order."""
        found: bytes = self.client.execute_command("XADD", self.stream, entry_id, *(words or ("msg", entry_id)))
        return found

    def pending(self, group: str) -> dict[str, str]:
        """Owner by id of what is pending."""
        found = self.client.xpending_range(self.stream, group, "-", "+", 10_000)
        return {entry["message_id"].decode(): entry["consumer"].decode() for entry in found}

    def deliveries(self, group: str) -> dict[str, int]:
        """Delivery counter by id of what is pending."""
        found = self.client.xpending_range(self.stream, group, "-", "+", 10_000)
        return {entry["message_id"].decode(): entry["times_delivered"] for entry in found}

    def leave_behind(self, group: str, consumer: str, count: int, *, idle_ms: int = 0) -> list[bytes]:
        """Let a member read so many entries and do nothing with them; returns their ids."""
        if not self._has(group):
            self.client.xgroup_create(self.stream, group, "0", mkstream=True)
        reply = self.client.xreadgroup(group, consumer, {self.stream: ">"}, count=count)
        ids = [entry_id for entry_id, _ in reply[0][1]]
        if idle_ms:
            self.touch(group, consumer, ids, idle_ms=idle_ms)
        return ids

    def touch(self, group: str, consumer: str, ids: Sequence[bytes], *, idle_ms: int = 0) -> None:
        """Set how long nobody has touched these entries."""
        self.client.xclaim(self.stream, group, consumer, 0, ids, idle=idle_ms, retrycount=1, justid=True)

    def _has(self, group: str) -> bool:
        if not self.client.exists(self.stream):
            return False
        return any(found["name"] == group.encode() for found in self.client.xinfo_groups(self.stream))


def take(consumer: Any, count: int) -> list[Message]:
    """The next so many messages."""
    found: list[Message] = []
    deadline = time.monotonic() + PATIENCE
    while len(found) < count:
        message = consumer.next(max(0.0, deadline - time.monotonic()))
        assert message is not None, f"only {len(found)} of {count} messages: {numbers(found)}"
        found.append(message)
    return found


def take_until_silent(consumer: Any) -> list[int]:
    """The numbers of what there is without waiting."""
    found = []
    while (message := consumer.next(0)) is not None:
        found.append(int(message.payload or b""))
    return found


def numbers(messages: Iterable[Message]) -> list[int]:
    """What :meth:`Place.send` sent."""
    return [int(message.payload or b"") for message in messages]


def poll(consumer: Any, count: int, found: list[Message]) -> None:
    """Wait until ``found`` has so many messages."""

    def has_enough() -> bool:
        message = consumer.next(0.02)
        if message is not None:
            found.append(message)
        return len(found) >= count

    until(has_enough, seconds=PATIENCE, what=f"{count} messages")
