"""What a batch source knows of a Redis stream from one batch to the next."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping

import pytest
import redis

from stream_consumers.batches import Range, Resume
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.urls import StreamUrl


class Reader:
    """Reads a stream by position, as runs do: each with a source of its own, and the hint of the one before."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.client = redis.Redis(host, int(port))
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self.url = StreamUrl.parse(f"redis://{address}/{self.name}")
        self.shard = Shard(self.name)
        self.position = 0
        self.hint: Mapping[str, object] | None = None

    def add(self, count: int) -> None:
        for _ in range(count):
            self.client.xadd(self.name, {"msg": b"{}"})

    def read(self, most: int = 1000) -> frozenset[Shard]:
        """Look whether it was recreated, then read a batch."""
        with RedisBatchSource(self.url) as source:
            resume = Resume({self.shard: self.position}, self.hint) if self.hint else None
            start, end, _ = source.extents(resume=resume)[self.shard]
            self.position = self.position or start
            found = source.recreated({self.shard: self.position})
            plan = source.plan({self.shard: Range(self.position, end)}, limits=Limits(most), parallelism=1)
            if plan is not None:
                self.position, self.hint = plan.ranges[self.shard].end, plan.hint
            return found


@pytest.fixture
def reader(redis_address: str) -> Iterator[Reader]:
    made = Reader(redis_address)
    made.add(10)
    assert made.read(6) == frozenset()
    yield made
    made.client.close()


def test_a_stream_that_goes_on_is_the_same_whatever_is_removed(reader: Reader) -> None:
    for remove in (
        lambda: None,
        lambda: reader.client.xtrim(reader.name, maxlen=3, approximate=False),
        lambda: reader.client.xdel(reader.name, reader.client.xrange(reader.name)[-1][0]),
        lambda: reader.client.xtrim(reader.name, maxlen=0, approximate=False),
    ):
        remove()
        reader.add(2)
        assert reader.read() == frozenset()
        assert reader.read() == frozenset()


@pytest.mark.parametrize("count", [1, 6, 10, 40])
def test_a_stream_that_was_made_again_is_another_also_where_its_ids_go_on(reader: Reader, count: int) -> None:
    """What was not read of the old one is gone."""
    reader.client.delete(reader.name)
    reader.add(count)
    assert reader.read() == {reader.shard}
