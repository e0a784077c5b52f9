"""Which key of Redis a shard is: never one that makes readers overlook another."""

from __future__ import annotations

import pytest

from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, UnsupportedError
from stream_consumers.messages import Message
from stream_consumers.redis.batches import RedisBatchSource
from tests.support.redis_streams import Place


def read(place: Place) -> list[Message]:
    with create_consumer(place.url, live=False) as consumer:
        return list(consumer)


def test_the_first_message_decides_how_a_new_stream_is_kept(place: Place) -> None:
    with create_producer(place.url) as producer:
        for shard in (2, 0, 1):
            producer.send(b"%d" % shard, shard=shard)
    assert sorted((m.shard.id, m.text()) for m in read(place)) == [(0, "0"), (1, "1"), (2, "2")]
    assert not place.client.exists(place.stream)


def test_a_number_beside_a_plain_key_is_refused(place: Place) -> None:
    with create_producer(place.url) as producer:
        producer.send(b"plain")
        with pytest.raises(InvalidOptionError, match=f"nobody reads the messages in the key {place.stream}"):
            producer.send(b"numbered", shard=1)
        producer.send(b"plain, too")
    for shards in (None, 3):
        with create_producer(place.url, shards=shards) as producer, pytest.raises(InvalidOptionError):
            producer.send(b"numbered", shard=2)
    with create_producer(place.url, shards=3) as producer, pytest.raises(InvalidOptionError):
        producer.send(b"numbered", shard=0)
    assert [message.text() for message in read(place)] == ["plain", "plain, too"]


def test_a_plain_key_without_messages_hides_nothing(place: Place) -> None:
    """A group that was made before the first message has made the key."""
    place.client.xgroup_create(place.stream, "g", "0", mkstream=True)
    with create_producer(place.url, shards=2) as producer:
        producer.send(b"one", shard=1)
    assert [str(message.shard) for message in read(place)] == [f"{place.stream}/1"]


def test_a_plain_key_with_messages_beside_numbered_ones_is_refused_by_readers(place: Place) -> None:
    place.send(range(2), shards=2, is_sharded=True)
    place.client.xadd(place.stream, {"msg": b"hidden"})
    for look in (lambda: read(place), lambda: RedisBatchSource(place.url).extents()):
        with pytest.raises(UnsupportedError) as caught:
            look()
        assert caught.value.facts["plain_key"] == place.stream
        assert caught.value.facts["numbered_keys"] == [f"{place.stream}:0", f"{place.stream}:1"]
    place.client.delete(place.stream)
    place.client.set(place.stream, "no stream")
    assert len(read(place)) == 2


def test_numbered_keys_go_on_with_numbers(place: Place) -> None:
    place.send(range(2), shards=2, is_sharded=True)
    with create_producer(place.url) as producer:
        producer.send(b"2")
        producer.send(b"3", shard=5)
    assert sorted((m.shard.id, m.text()) for m in read(place)) == [(0, "0"), (0, "2"), (1, "1"), (5, "3")]
