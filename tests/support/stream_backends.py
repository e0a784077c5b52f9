"""The stream backends that their contract test runs over, and what the test does behind their backs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from stream_consumers.subscription.backend import EventCodec, JsonCodec
from stream_consumers.subscription.memory_backend import MemoryBackend
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.urls import StreamUrl


@dataclass
class BehindMemory:
    backend: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def blocked_reads(self) -> int:
        """How many reads wait for a message."""
        return len(self.backend._broker.changed._waiters)

    def age(self, stream: str, group: str, entry_id: str, seconds: float) -> None:
        """Let a pending entry be idle for so long."""
        pending = self.backend._group(stream, group).pending
        pending[int(entry_id.partition("-")[0]) - 1].last_touched = time.monotonic() - seconds


@dataclass
class BehindRedis:
    backend: Any
    client: Any

    def append(self, stream: str, raw: bytes) -> str:
        added: bytes = self.client.xadd(stream, {"msg": raw})
        return added.decode()

    def remove(self, stream: str, entry_id: str) -> None:
        assert self.client.xdel(stream, entry_id) == 1

    def remove_group(self, stream: str, group: str) -> None:
        assert self.client.xgroup_destroy(stream, group)

    def entries(self, stream: str) -> list[tuple[str, bytes]]:
        return [(entry_id.decode(), fields[b"msg"]) for entry_id, fields in self.client.xrange(stream)]

    def pending(self, stream: str, group: str) -> dict[str, str]:
        found = self.client.xpending_range(stream, group, "-", "+", 10_000)
        return {entry["message_id"].decode(): entry["consumer"].decode() for entry in found}

    def consumers(self, stream: str, group: str) -> set[str]:
        return {found["name"].decode() for found in self.client.xinfo_consumers(stream, group)}

    def blocked_reads(self) -> int:
        found: int = self.client.info("clients")["blocked_clients"]
        return found

    def age(self, stream: str, group: str, entry_id: str, seconds: float) -> None:
        idle, owner = round(seconds * 1000), self.pending(stream, group)[entry_id]
        self.client.xclaim(stream, group, owner, 0, [entry_id], idle=idle, justid=True)


KINDS = ("memory", "redis")


@contextmanager
def behind(kind: str, address: str, *, max_payload_bytes: int = 1000, codec: EventCodec | None = None) -> Iterator[Any]:
    """A backend of that kind; ``address`` is that of the Redis server."""
    codec = codec or JsonCodec()
    if kind == "memory":
        yield BehindMemory(MemoryBackend(codec=codec, max_payload_bytes=max_payload_bytes))
        return
    host, _, port = address.partition(":")
    url = StreamUrl.parse(f"redis://{address}/any")
    with (
        redis.Redis(host, int(port)) as client,
        RedisBackend(url, codec=codec, max_payload_bytes=max_payload_bytes) as backend,
    ):
        yield BehindRedis(backend, client)
