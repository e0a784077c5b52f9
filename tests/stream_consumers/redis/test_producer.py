"""The Redis producer: its queue keeps what is not acknowledged, in order, and its keys hide no other shard."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import (
    BrokerUnavailableError,
    FormatError,
    InvalidOptionError,
    SizeLimitError,
    UnsupportedError,
)
from stream_consumers.messages import Message
from stream_consumers.redis import producer as redis_producer
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.producer import RedisProducer
from stream_consumers.subscription.backend import EventMessage
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.urls import StreamUrl
from tests.support.lossy_proxy import LossyProxy
from tests.support.polling import until
from tests.support.raising import raises_with
from tests.support.redis_server import redis_server
from tests.support.redis_streams import Place, unique_name
from tests.support.servers import some_port


def producer_of(place: Place, address: str | None = None, *streams: str) -> RedisProducer:
    url = f"redis://{address or place.address}/{','.join(streams or (place.stream,))}"
    return RedisProducer(StreamUrl.parse(url))


def payloads(place: Place, stream: str | None = None) -> list[bytes]:
    return [fields[b"msg"] for _, fields in place.client.xrange(stream or place.stream)]


def test_what_is_sent_while_the_server_is_away_comes_when_it_is_back(tmp_path: Path) -> None:
    port = some_port()
    with redis_server(tmp_path, port=port) as address:
        producer: Any = create_producer(f"redis://{address}/orders")
        producer.send(b"0")
        producer.flush()
    receipts = [producer.send(b"%d" % number) for number in range(1, 5)]
    for _ in range(2):
        with raises_with(BrokerUnavailableError, undelivered=4, to="4 to orders/0"):
            producer.flush()
    with pytest.raises(BrokerUnavailableError):
        _ = receipts[0].sequence
    with redis_server(tmp_path, port=port), redis.Redis("127.0.0.1", port) as client:
        producer.close()
        entries = client.xrange("orders")
        assert [fields[b"msg"] for _, fields in entries] == [b"1", b"2", b"3", b"4"]
        assert [receipt.sequence for receipt in receipts] == sorted(receipt.sequence for receipt in receipts)


def test_messages_whose_acknowledgement_was_lost_are_there_at_least_once(place: Place) -> None:
    with LossyProxy(place.address) as proxy, producer_of(place, proxy.address) as producer:
        producer.send(b"0")
        producer.flush()
        for number in range(1, 4):
            producer.send(b"%d" % number)
        proxy.drop_the_reply_of(b"EVALSHA")
        with raises_with(BrokerUnavailableError, undelivered=3):
            producer.flush()
        producer.flush()
    found = payloads(place)
    assert found[0] == b"0"
    assert found[-3:] == [b"1", b"2", b"3"]
    assert set(found[1:-3]) <= {b"1", b"2", b"3"}


def test_a_cluster_gets_nothing_a_second_time_without_an_error(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--cluster-enabled", "yes") as address, LossyProxy(address) as proxy:
        host, _, port = address.partition(":")
        with redis.Redis(host, int(port)) as admin:
            admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            admin.config_set("cluster-announce-port", proxy.address.partition(":")[2])
            admin.config_set("cluster-announce-ip", host)
            until(lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok", seconds=30, what="ok")
            # Old versions of redis-py forget the name of a node whose connection was lost.
            nodes = f"redis://{proxy.address},{proxy.address.replace(host, 'localhost')}"
            producer: Any = create_producer(f"{nodes}/orders", client={"cluster": True})
            producer.send(b"0")
            proxy.drop_the_reply_of(b"EVALSHA")
            with raises_with(BrokerUnavailableError, undelivered=1):
                producer.flush()
            assert (proxy.dropped, admin.xlen("orders")) == (1, 1)
            producer.close()
            assert admin.xlen("orders") == 2
            with closing(RedisBackend(f"{nodes}/", {"cluster": True})) as backend:
                proxy.drop_the_reply_of(b"XADD")
                answers = backend.publish_batch("events", [EventMessage(b"{}"), EventMessage(b"{}")])
            assert [type(answer) for answer in answers] == [BrokerUnavailableError] * 2
            assert (proxy.dropped, admin.xlen("events")) == (2, 1)


def test_a_key_that_takes_nothing_holds_up_only_its_own_messages(place: Place) -> None:
    other = unique_name()
    producer = producer_of(place, None, place.stream, other)
    # The producer looks at a key once.
    producer.send(b"0", stream=other)
    producer.flush()
    place.client.delete(other)
    place.client.set(other, "no stream")
    for number in range(3):
        producer.send(b"%d" % number)
        producer.send(b"later %d" % number, stream=other)
    with raises_with(FormatError, undelivered=3, to=f"3 to {other}/0"):
        producer.flush()
    assert payloads(place) == [b"0", b"1", b"2"]
    place.client.delete(other)
    producer.close()
    assert payloads(place, other) == [b"later 0", b"later 1", b"later 2"]


def test_a_producer_that_ends_names_what_it_drops(place: Place) -> None:
    producer = producer_of(place)
    producer.send(b"0")
    producer.flush()
    place.client.delete(place.stream)
    place.client.set(place.stream, "no stream")
    receipts = [producer.send(b"lost") for _ in range(2)]
    with raises_with(FormatError, undelivered=2):
        producer.close()
    for receipt in receipts:
        with pytest.raises(FormatError):
            _ = receipt.sequence
    producer.close()


def test_large_messages_do_not_pile_up(place: Place) -> None:
    with producer_of(place) as producer:
        for _ in range(10):
            producer.send(b"x" * 1_000_000)
        assert place.client.xlen(place.stream) == 9


@pytest.mark.parametrize("words", [{"payload": None}, {"headers": [(b"name", b"value")]}, {"timestamp_ms": 1 << 47}])
def test_what_cannot_be_sent_is_refused_and_takes_nobody_with_it(place: Place, words: dict[str, Any]) -> None:
    with producer_of(place) as producer:
        producer.send(b"before")
        with pytest.raises(InvalidOptionError):
            producer.send(**{"payload": b"{}", **words})
        producer.send(b"behind")
    assert payloads(place) == [b"before", b"behind"]


def test_a_payload_that_redis_cannot_hold_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_producer, "MAX_PAYLOAD_BYTES", 10)
    with producer_of(place) as producer, raises_with(SizeLimitError, bytes=11, limit=10):
        producer.send(b"x" * 11)


def test_ids_grow_when_a_millisecond_is_full(place: Place) -> None:
    place.add("1000-65534")
    with producer_of(place) as producer:
        for number in range(3):
            producer.send(b"%d" % number, timestamp_ms=900)
    assert [entry_id for entry_id, _ in place.client.xrange(place.stream)][1:] == [b"1000-65535", b"1001-0", b"1001-1"]


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
        with pytest.raises(InvalidOptionError):
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


def test_a_wildcard_refuses_a_plain_key_with_messages_beside_numbered_ones(place: Place) -> None:
    place.send(range(2), shards=2, is_sharded=True)
    place.client.xadd(place.stream, {"msg": b"hidden"})
    try:
        with pytest.raises(UnsupportedError) as caught:
            create_consumer(f"{place.url.rpartition('/')[0]}/*", live=False)
    finally:
        place.client.delete(place.stream)
    assert caught.value.facts["plain_key"] == place.stream


def test_numbered_keys_go_on_with_numbers(place: Place) -> None:
    place.send(range(2), shards=2, is_sharded=True)
    with create_producer(place.url) as producer:
        producer.send(b"2")
        producer.send(b"3", shard=5)
    assert sorted((m.shard.id, m.text()) for m in read(place)) == [(0, "0"), (0, "2"), (1, "1"), (5, "3")]
