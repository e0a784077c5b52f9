"""Two streams of Redis entries, and consumers of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis

from stream_consumers.redis.entry_consumer import Entry, EntryConsumer, GroupEntryConsumer, create_entry_consumer
from tests.support.redis_streams import unique_name

GROUP, ME = "group-a", "consumer-1"
PATIENCE = 60.0
Found = tuple[str, Entry]


class Keys:
    """Two streams on a server, not there yet."""

    def __init__(self, address: str, *, cluster: bool = False) -> None:
        self.address, self.options = address, {"cluster": True} if cluster else {}
        host, _, port = address.partition(":")
        made: Any = redis.RedisCluster if cluster else redis.Redis
        self.client: Any = made(host=host, port=int(port))
        self.a, self.b = sorted((unique_name("a"), unique_name("b")))

    def add(self, name: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.client.xadd(name, {"id": number})

    def make_groups(self, *names: str) -> None:
        for name in names:
            self.client.xgroup_create(name, GROUP, "0", mkstream=True)

    def pending(self, name: str) -> int:
        return int(self.client.xpending(name, GROUP)["pending"])

    def consumer(self, *names: str, **options: Any) -> EntryConsumer:
        streams = ",".join(names or (self.a, self.b))
        return create_entry_consumer(f"redis://{self.address}/{streams}", client=self.options, **options)

    def member(self, *names: str, **options: Any) -> GroupEntryConsumer:
        streams = ",".join(names or (self.a, self.b))
        settings = {"group": GROUP, "consumer": ME, "client": self.options, **options}
        return create_entry_consumer(f"redis://{self.address}/{streams}", **settings)

    def any(self, kind: str, *names: str, **options: Any) -> EntryConsumer | GroupEntryConsumer:
        return self.consumer(*names, **options) if kind == "simple" else self.member(*names, **options)


def number(entry: Entry) -> int:
    return int(entry.fields[0][1])


def by_stream(found: Iterable[Found]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for name, entry in found:
        numbers.setdefault(name, []).append(number(entry))
    return numbers


def take(consumer: EntryConsumer | GroupEntryConsumer, count: int) -> list[Found]:
    found = [consumer.get_entry(PATIENCE) for _ in range(count)]
    return [pair for pair in found if pair is not None]
