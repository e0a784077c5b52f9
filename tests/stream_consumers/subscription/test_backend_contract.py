"""What every stream backend must do, over memory and Redis, and what one with five methods of its own is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from stream_consumers.errors import BrokerUnavailableError, FormatError, GroupRemovedError, SizeLimitError
from stream_consumers.memory import MemoryConsumer, forget_memory_broker
from stream_consumers.subscription.backend import (
    DecodedEntry,
    EventMessage,
    FetchedEntry,
    GroupPosition,
    JsonCodec,
    MalformedEntry,
    StreamBackend,
)
from stream_consumers.subscription.config import RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.memory_backend import MemoryBackend
from stream_consumers.subscription.redis_backend import _times
from stream_consumers.subscription.subscription import ErrorReport, ReceivedMessage, Subscription
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.raising import raises_with
from tests.support.redis_streams import unique_name
from tests.support.stream_backends import KINDS, behind

GROUP, ME, PEER = "billing", "me", "peer"
LIMIT = 1000


@pytest.fixture(params=KINDS)
def other(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What somebody else can do, with the backend under test."""
    address = request.getfixturevalue("redis_address") if request.param == "redis" else ""
    with behind(request.param, address, max_payload_bytes=LIMIT) as found:
        yield found


@pytest.fixture
def backend(other: Any) -> StreamBackend:
    found: StreamBackend = other.backend
    return found


@pytest.fixture
def stream() -> str:
    return unique_name()


def filled(backend: StreamBackend, stream: str, count: int) -> list[str]:
    """A group of a stream with so many messages, all of them new to it."""
    ids = [backend.publish(stream, EventMessage(b"%d" % number)) for number in range(count)]
    backend.create_group(stream, GROUP, "0")
    return ids


def payloads(entries: list[FetchedEntry]) -> list[bytes]:
    assert all(isinstance(entry, DecodedEntry) for entry in entries), entries
    return [entry.message.payload for entry in entries if isinstance(entry, DecodedEntry)]


def attempts(entries: list[FetchedEntry]) -> list[int]:
    return [entry.delivery.attempt for entry in entries]


# groups


def test_a_group_that_starts_at_the_end_gets_only_what_comes(backend: StreamBackend, stream: str) -> None:
    backend.publish(stream, EventMessage(b"old"))
    backend.create_group(stream, GROUP, "$")
    backend.publish(stream, EventMessage(b"new"))
    assert payloads(backend.read_new(stream, GROUP, ME, 10, 0)) == [b"new"]


def test_create_group_makes_the_stream_and_is_idempotent(backend: StreamBackend, stream: str) -> None:
    first = backend.create_group(stream, GROUP, "0")
    again = backend.create_group(stream, GROUP, "0")
    assert (first.is_new, first.difference) == (True, None)
    assert (again.is_new, again.difference) == (False, None)


def test_r10_a_group_that_stands_elsewhere_is_told_and_left_alone(backend: StreamBackend, stream: str) -> None:
    ids = [backend.publish(stream, EventMessage(b"%d" % number)) for number in range(3)]
    assert backend.create_group(stream, GROUP, "$").difference is None
    found = backend.create_group(stream, GROUP, "0")
    assert (found.is_new, found.start, found.position) == (False, "0-0", ids[-1])
    assert f"position is {ids[-1]}, not 0-0" in (found.difference or "")
    assert backend.read_new(stream, GROUP, ME, 10, 0) == []


@pytest.mark.parametrize("call", ["read", "reclaim", "redeliver", "touch", "ack"])
def test_r8_a_group_that_is_gone_is_an_error_and_not_made_again(other: Any, stream: str, call: str) -> None:
    backend: StreamBackend = other.backend
    (entry_id,) = filled(backend, stream, 1)
    backend.read_new(stream, GROUP, ME, 1, 0)
    other.remove_group(stream, GROUP)
    calls = {
        "read": lambda: backend.read_new(stream, GROUP, ME, 1, 0),
        "reclaim": lambda: backend.reclaim_idle(stream, GROUP, ME, 0, 1),
        "redeliver": lambda: backend.redeliver(stream, GROUP, ME, entry_id),
        "touch": lambda: backend.touch(stream, GROUP, ME, [entry_id]),
        "ack": lambda: backend.ack(stream, GROUP, entry_id),
    }
    for _ in range(2):
        with pytest.raises(GroupRemovedError):
            calls[call]()
    # Forgetting somebody of a group that is gone is no failure.
    assert backend.forget_consumer(stream, GROUP, ME) is False


# publishing


def test_a_message_arrives_with_all_its_fields(backend: StreamBackend, stream: str) -> None:
    sent = EventMessage(bytes(range(256)), "uid-7", "key", "order.created", "once", {"trace": "ä", "": "empty name"})
    entry_id = backend.publish(stream, sent)
    backend.create_group(stream, GROUP, "0")
    (entry,) = backend.read_new(stream, GROUP, ME, 10, 0)
    assert isinstance(entry, DecodedEntry)
    assert (entry.id, entry.message) == (entry_id, sent)


def test_s18_an_oversize_message_is_refused(other: Any, stream: str) -> None:
    with raises_with(SizeLimitError, bytes=LIMIT + 1, max_payload_bytes=LIMIT):
        other.backend.publish(stream, EventMessage(b"x" * (LIMIT + 1)))
    assert other.entries(stream) == []
    with pytest.raises(SizeLimitError):
        other.backend.publish(stream, EventMessage(b"", headers={"a": "x" * (2 * LIMIT + 64 * 1024)}))
    assert other.entries(stream) == []
    # The limit is about the payload, not about what the codec makes of it.
    other.backend.publish(stream, EventMessage(b"\xff" * LIMIT))
    other.backend.create_group(stream, GROUP, "0")
    assert payloads(other.backend.read_new(stream, GROUP, ME, 1, 0)) == [b"\xff" * LIMIT]


def test_s13_publish_batch_has_one_result_per_input_and_a_bad_one_fails_alone(other: Any, stream: str) -> None:
    unencodable = EventMessage(b"x", uid=b"bytes")  # type: ignore[arg-type]
    messages = [
        EventMessage(b"0"),
        EventMessage(b"x" * (LIMIT + 1)),
        EventMessage(b"2"),
        unencodable,
        EventMessage(b"4"),
    ]
    results = other.backend.publish_batch(stream, messages)
    assert [type(result) for result in results] == [str, SizeLimitError, str, FormatError, str]
    assert [entry_id for entry_id, _ in other.entries(stream)] == [results[0], results[2], results[4]]
    assert other.backend.publish_batch(stream, []) == []


def test_publish_batch_keeps_the_order_over_more_than_a_page(other: Any, stream: str) -> None:
    results = other.backend.publish_batch(stream, [EventMessage(b"%d" % number) for number in range(1100)])
    assert [entry_id for entry_id, _ in other.entries(stream)] == results
    other.backend.create_group(stream, GROUP, "0")
    assert payloads(other.backend.read_new(stream, GROUP, ME, 2000, 0)) == [b"%d" % number for number in range(1100)]


# reading


def test_a_read_waits_for_a_message_and_not_longer(backend: StreamBackend, stream: str) -> None:
    backend.create_group(stream, GROUP, "0")
    begin = time.monotonic()
    assert backend.read_new(stream, GROUP, ME, 10, 0) == []
    assert time.monotonic() - begin < 1
    begin = time.monotonic()
    assert backend.read_new(stream, GROUP, ME, 10, 0.05) == []
    assert 0.05 <= time.monotonic() - begin < 2
    found: list[FetchedEntry] = []
    waiting = threading.Thread(target=lambda: found.extend(backend.read_new(stream, GROUP, ME, 10, 20)))
    waiting.start()
    backend.publish(stream, EventMessage(b"late"))
    waiting.join(5)
    assert payloads(found) == [b"late"]


def test_r15_a_read_that_waits_holds_nothing_else_back(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    first, second = filled(backend, stream, 2)
    assert len(backend.read_new(stream, GROUP, ME, 2, 0)) == 2
    found: list[FetchedEntry] = []
    waiting = threading.Thread(target=lambda: found.extend(backend.read_new(stream, GROUP, ME, 1, 20)))
    waiting.start()
    until(lambda: other.blocked_reads() == 1, what="a read that waits")
    begin = time.monotonic()
    assert backend.ack(stream, GROUP, first) == 1
    backend.touch(stream, GROUP, ME, [second])
    assert backend.read_new(stream, GROUP, PEER, 1, 0) == []
    assert time.monotonic() - begin < 3
    assert waiting.is_alive()
    assert other.blocked_reads() == 1
    backend.publish(stream, EventMessage(b"wake"))
    waiting.join(5)
    assert payloads(found) == [b"wake"]


# malformed entries


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"uid": "1"}',
        b'{"payload": 1}',
        b'{"payload_base64": "="}',
        b'{"payload": "\\ud800"}',
        b'{"payload": "", "uid": "\\ud800"}',
        b'{"payload": "", "uid": 99999999999999999999}',
        b'{"payload": "", "headers": {"retry": 1}}',
        b'{"payload": "", "headers": {"a": "\\ud800"}}',
        b'{"payload": "", "headers": {"\\ud800": "a"}}',
    ],
    ids=repr,
)
def test_s30_an_entry_that_cannot_be_decoded_poisons_neither_read_nor_reclaim(
    other: Any, stream: str, raw: bytes
) -> None:
    backend: StreamBackend = other.backend
    filled(backend, stream, 1)
    bad_id = other.append(stream, raw)
    backend.publish(stream, EventMessage(b"good"))
    for entries in (backend.read_new(stream, GROUP, ME, 10, 0), backend.reclaim_idle(stream, GROUP, PEER, 0, 10)):
        first, bad, last = entries
        assert payloads([first, last]) == [b"0", b"good"]
        assert isinstance(bad, MalformedEntry)
        assert (bad.id, bad.original, bad.size) == (bad_id, raw, len(raw))
        assert "cannot be decoded" in bad.error
    assert attempts(entries) == [2, 2, 2]


def test_an_oversize_entry_is_told_with_size_and_place_and_not_kept(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    backend.create_group(stream, GROUP, "0")
    payload = JsonCodec().encode(EventMessage(b"x" * (LIMIT + 1)))
    huge = b"x" * (2 * LIMIT + 64 * 1024 + 1)
    for raw in (payload, huge):
        bad_id = other.append(stream, raw)
        (entry,) = backend.read_new(stream, GROUP, ME, 10, 0)
        assert isinstance(entry, MalformedEntry)
        assert (entry.original, entry.size) == (b"", len(raw))
        assert f"{len(raw)} bytes, more than max_payload_bytes={LIMIT}" in entry.error
        assert bad_id in entry.error


def test_a_codec_that_raises_anything_makes_an_entry_malformed(redis_address: str, stream: str) -> None:
    class Broken(JsonCodec):
        def decode(self, raw: bytes) -> EventMessage:
            raise KeyError("retry-attempt overflow")

    for kind in KINDS:
        with behind(kind, redis_address, codec=Broken()) as other:
            filled(other.backend, stream, 1)
            (entry,) = other.backend.read_new(stream, GROUP, ME, 1, 0)
            assert isinstance(entry, MalformedEntry)
            assert entry.error == "it cannot be decoded: KeyError"


def test_r1_r4_an_entry_that_was_removed_while_it_was_pending_is_told(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 3)
    backend.read_new(stream, GROUP, PEER, 3, 0)
    other.remove(stream, ids[1])
    # Told until somebody acknowledges it: who found it may be killed.
    for _ in range(2):
        found = {entry.id: entry for entry in backend.reclaim_idle(stream, GROUP, ME, 0, 10)}
        gone = found[ids[1]]
        assert isinstance(gone, MalformedEntry)
        assert (gone.original, gone.size) == (b"", 0)
        assert "removed while it was pending" in gone.error
        assert isinstance(found[ids[0]], DecodedEntry)
        assert isinstance(found[ids[2]], DecodedEntry)
    assert backend.ack(stream, GROUP, ids[1]) == 1
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 0, 10)] == [ids[0], ids[2]]


# taking over


def seconds_now() -> float:
    return time.time_ns() // 1_000_000 / 1000


@pytest.mark.parametrize("touches", [0, 2])
def test_the_time_of_the_first_delivery_stays_that(backend: StreamBackend, stream: str, touches: int) -> None:
    (entry_id,) = filled(backend, stream, 1)
    earliest = seconds_now()
    backend.read_new(stream, GROUP, PEER, 1, 0)
    latest = seconds_now()
    pause()
    for _ in range(touches):
        backend.touch(stream, GROUP, PEER, [entry_id])
        pause()
    (second,) = backend.reclaim_idle(stream, GROUP, ME, 0, 1)
    pause()
    third = backend.redeliver(stream, GROUP, ME, entry_id)
    assert third is not None
    for entry in (second, third):
        # Idle times are whole milliseconds.
        assert earliest - 0.002 <= entry.delivery.first_received.timestamp() <= latest + 0.002
        assert entry.delivery.last_received.timestamp() > latest + 0.02
    assert third.delivery.last_received > second.delivery.last_received


def pause(seconds: float = 0.03) -> None:
    """Let entries become idle: time is what this is about, not somebody who might be late."""
    began = time.monotonic()
    until(lambda: time.monotonic() - began > seconds)


def test_entries_are_taken_over_when_they_were_idle_for_so_long_and_not_before(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 3)
    assert len(backend.read_new(stream, GROUP, PEER, 3, 0)) == 3
    for entry_id, seconds in zip(ids, (45.0, 61.0, 75.0)):
        other.age(stream, GROUP, entry_id, seconds)
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 60.0, 10)] == ids[1:]
    assert other.pending(stream, GROUP) == dict(zip(ids, (PEER, ME, ME)))
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 30.0, 10)] == ids[:1]


def test_no_more_is_claimed_than_asked_for_and_the_next_search_goes_on(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 5)
    backend.read_new(stream, GROUP, PEER, 5, 0)
    first = backend.reclaim_idle(stream, GROUP, ME, 0, 2)
    assert [entry.id for entry in first] == ids[:2]
    assert list(other.pending(stream, GROUP).values()) == [ME, ME, PEER, PEER, PEER]
    second = backend.reclaim_idle(stream, GROUP, ME, 0, 2)
    assert [entry.id for entry in second] == ids[2:4]
    assert attempts(first + second) == [1 + 1] * 4


def test_a_search_that_finds_nothing_to_the_end_begins_again(backend: StreamBackend, stream: str) -> None:
    ids = filled(backend, stream, 4)
    backend.read_new(stream, GROUP, PEER, 4, 0)
    backend.reclaim_idle(stream, GROUP, ME, 0, 2)
    backend.ack_many(stream, GROUP, ids[2:])
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 0, 2)] == ids[:2]


def test_r3_idle_entries_behind_many_that_are_not_are_found(backend: StreamBackend, stream: str) -> None:
    ids = filled(backend, stream, 2500)
    backend.read_new(stream, GROUP, PEER, 2500, 0)
    pause(0.7)
    backend.touch(stream, GROUP, PEER, ids[:-1])
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 0.7, 5)] == ids[-1:]


def test_a_heartbeat_keeps_what_the_consumer_holds_and_nothing_else(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 3)
    backend.read_new(stream, GROUP, ME, 1, 0)
    backend.read_new(stream, GROUP, PEER, 2, 0)
    pause(0.5)
    backend.touch(stream, GROUP, ME, ids[:2])
    entries = backend.reclaim_idle(stream, GROUP, "third", 0.5, 10)
    assert [entry.id for entry in entries] == ids[1:]
    # A heartbeat is no delivery.
    assert attempts(backend.reclaim_idle(stream, GROUP, "third", 0, 10)) == [2, 3, 3]


def test_an_entry_is_redelivered_to_who_holds_it_only(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    (entry_id,) = filled(backend, stream, 1)
    backend.read_new(stream, GROUP, ME, 1, 0)
    again = backend.redeliver(stream, GROUP, ME, entry_id)
    assert again is not None
    assert (again.id, again.delivery.attempt) == (entry_id, 2)
    assert backend.redeliver(stream, GROUP, PEER, entry_id) is None
    assert other.pending(stream, GROUP) == {entry_id: ME}
    backend.ack(stream, GROUP, entry_id)
    assert backend.redeliver(stream, GROUP, ME, entry_id) is None


# acknowledging


def test_ack_counts_what_was_pending(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 3)
    backend.read_new(stream, GROUP, ME, 3, 0)
    assert backend.ack(stream, GROUP, ids[0]) == 1
    # Fewer than given is no error.
    assert backend.ack_many(stream, GROUP, ids) == 2
    assert backend.ack_many(stream, GROUP, []) == 0
    assert other.pending(stream, GROUP) == {}


# leaving


def test_r12_a_consumer_is_removed_only_when_nothing_is_pending(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 1)
    backend.read_new(stream, GROUP, ME, 1, 0)
    assert backend.forget_consumer(stream, GROUP, ME) is False
    assert other.pending(stream, GROUP) == {ids[0]: ME}
    backend.ack(stream, GROUP, ids[0])
    assert backend.forget_consumer(stream, GROUP, ME) is True
    assert other.consumers(stream, GROUP) == set()


def test_forgetting_a_consumer_drops_its_place_in_the_search(backend: StreamBackend, stream: str) -> None:
    ids = filled(backend, stream, 4)
    backend.read_new(stream, GROUP, PEER, 4, 0)
    backend.reclaim_idle(stream, GROUP, ME, 0, 2)
    backend.forget_consumer(stream, GROUP, ME)
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 0, 2)] == ids[:2]


def test_a_group_that_was_made_again_is_searched_from_the_beginning(other: Any, stream: str) -> None:
    backend: StreamBackend = other.backend
    ids = filled(backend, stream, 4)
    backend.read_new(stream, GROUP, PEER, 4, 0)
    backend.reclaim_idle(stream, GROUP, ME, 0, 2)
    other.remove_group(stream, GROUP)
    with pytest.raises(GroupRemovedError):
        backend.reclaim_idle(stream, GROUP, ME, 0, 2)
    backend.create_group(stream, GROUP, "0")
    backend.read_new(stream, GROUP, PEER, 4, 0)
    assert [entry.id for entry in backend.reclaim_idle(stream, GROUP, ME, 0, 2)] == ids[:2]


# Redis only


def test_acknowledging_takes_two_commands_per_1000_entries(redis_address: str, stream: str) -> None:
    with behind("redis", redis_address) as other:
        ids = filled(other.backend, stream, 2300)
        other.backend.read_new(stream, GROUP, ME, 2300, 0)

        def commands() -> int:
            return int(other.client.info("stats")["total_commands_processed"])

        asking = commands()
        cost = commands() - asking
        before = commands()
        assert other.backend.ack_many(stream, GROUP, ids) == 2300
        assert commands() - before - cost == 6, "XACK, and HDEL of the times of first deliveries"


def test_r17_an_entry_without_the_message_field_is_malformed_with_its_bytes(redis_address: str, stream: str) -> None:
    with behind("redis", redis_address) as other:
        other.backend.create_group(stream, GROUP, "0")
        other.client.xadd(stream, {"a": b"\xff"})
        other.client.execute_command("XADD", stream, "*", "msg", "1", "msg", "2")
        none, two = other.backend.read_new(stream, GROUP, ME, 10, 0)
        assert isinstance(none, MalformedEntry)
        assert isinstance(two, MalformedEntry)
        assert (none.original, none.error) == (
            b'[["a", "\\u00ff"]]',
            "the field 'msg' occurs 0 times, not once",
        )
        assert "occurs 2 times" in two.error


def test_streams_whose_names_look_like_shards_are_apart(redis_address: str, stream: str) -> None:
    with behind("redis", redis_address) as other:
        for name in (stream, f"{stream}:0"):
            other.backend.publish(name, EventMessage(name.encode()))
            other.backend.create_group(name, GROUP, "0")
        for name in (stream, f"{stream}:0"):
            assert payloads(other.backend.read_new(name, GROUP, ME, 10, 0)) == [name.encode()]


def test_nothing_is_left_beside_a_stream_when_all_is_acknowledged(redis_address: str, stream: str) -> None:
    with behind("redis", redis_address) as other:
        ids = filled(other.backend, stream, 2)
        other.backend.read_new(stream, GROUP, PEER, 2, 0)
        other.backend.reclaim_idle(stream, GROUP, ME, 0, 10)
        times = f"{{{stream}}}:first-received:{GROUP}"
        assert set(other.client.hkeys(times)) == {entry_id.encode() for entry_id in ids}
        assert other.client.pttl(times) > 0
        other.backend.ack_many(stream, GROUP, ids)
        assert not other.client.exists(times)


@pytest.mark.parametrize("name", ["orders", "orders:0", "{shop}orders", "shop{orders}", "{a}{b}"])
def test_what_is_kept_beside_a_stream_is_in_its_slot(name: str) -> None:
    assert key_slot(_times(name, GROUP)) == key_slot(name.encode())


def test_streams_in_memory_are_those_of_consumers_and_other_backends_of_the_url(stream: str) -> None:
    url = StreamUrl.parse(f"memory://{stream}/orders")
    backend, peer = MemoryBackend(url), MemoryBackend(url)
    ids = filled(backend, "orders", 2)
    assert payloads(backend.read_new("orders", GROUP, ME, 1, 0)) == [b"0"]
    assert payloads(peer.read_new("orders", GROUP, PEER, 10, 0)) == [b"1"]
    assert peer.pending("orders", GROUP) == dict(zip(ids, (ME, PEER)))
    with MemoryConsumer(url, live=False) as consumer:
        assert [(message.sequence, JsonCodec().decode(message.payload or b"").payload) for message in consumer] == [
            (0, b"0"),
            (1, b"1"),
        ]
    backend.remove("orders", ids[1])
    assert backend.publish("orders", EventMessage(b"2")) == "3-0", "the id of a removed entry is not used again"
    with MemoryConsumer(url, live=False) as consumer:
        assert [message.sequence for message in consumer] == [0, 2]
    assert MemoryBackend().entries("orders") == []
    forget_memory_broker(url)


@pytest.mark.parametrize(
    "words",
    [{"payload": None}, {"payload": "text"}, {"uid": 7}, {"key": b"7"}, {"headers": {"n": 7}}, {"headers": {7: "n"}}],
    ids=repr,
)
def test_a_message_that_no_receiver_could_read_is_refused_and_fails_alone(
    backend: StreamBackend, stream: str, words: dict[str, Any]
) -> None:
    unreadable = EventMessage(**{"payload": b"{}", **words})
    with pytest.raises(FormatError):
        backend.publish(stream, unreadable)
    results = backend.publish_batch(stream, [EventMessage(b"one"), unreadable, EventMessage(b"two")])
    assert isinstance(results[1], FormatError)
    backend.create_group(stream, GROUP, "0")
    assert payloads(backend.read_new(stream, GROUP, ME, 10, 0)) == [b"one", b"two"]


# a backend of a user's own, with the five methods that eventbus-core's trait requires


STREAM, DEAD = "orders", "orders.dead"
IDLE_SECONDS = 0.3


class FiveMethods(StreamBackend):
    """What somebody writes who brings a backend along from eventbus-core."""

    def __init__(self) -> None:
        self.memory = MemoryBackend()
        self.acknowledged: list[str] = []
        self.fails_at: str | None = None

    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        return self.memory.create_group(stream, group, start)

    def publish(self, stream: str, message: EventMessage) -> str:
        return self.memory.publish(stream, message)

    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        return self.memory.reclaim_idle(stream, group, consumer, min_idle_seconds, count)

    def read_new(self, stream: str, group: str, consumer: str, count: int, timeout: float) -> list[FetchedEntry]:
        return self.memory.read_new(stream, group, consumer, count, timeout)

    def ack(self, stream: str, group: str, entry_id: str) -> int:
        if entry_id == self.fails_at:
            raise BrokerUnavailableError("it does not answer", remedy="Wait.")
        self.acknowledged.append(entry_id)
        return self.memory.ack(stream, group, entry_id)


def handled(*payloads: bytes, failures: int, max_retries: int) -> tuple[FiveMethods, list[int], list[ErrorReport]]:
    """Messages whose handler fails so often for each of them; the attempts, and what was reported."""
    backend, attempts, reports = FiveMethods(), list[int](), list[ErrorReport]()

    def handle(received: ReceivedMessage) -> None:
        attempts.append(received.delivery.attempt)
        if received.delivery.attempt <= failures:
            raise ValueError("not yet")

    config = SubscriptionConfig(
        stream=STREAM,
        group=GROUP,
        dead_letter_stream=DEAD,
        retry=RetryPolicy(max_retries=max_retries, backoff_seconds=0.01),
        max_in_flight=4,
        claim_idle_seconds=IDLE_SECONDS,
        claim_interval_seconds=0.1,
    )
    with Subscription(backend, config, handle, on_error=reports.append):
        for payload in payloads:
            backend.publish(STREAM, EventMessage(payload))
        calls = len(payloads) * (min(failures, max_retries) + 1)
        until(lambda: len(attempts) >= calls and not backend.memory.pending(STREAM, GROUP), what="all settled")
    return backend, attempts, reports


def test_what_failed_is_tried_again_when_it_is_idle() -> None:
    backend, attempts, reports = handled(b"0", failures=1, max_retries=2)
    assert attempts == [1, 2]
    assert backend.acknowledged == ["1-0"]
    assert [(report.scope.value, report.attempt) for report in reports] == [("handler", 1)]


def test_many_are_acknowledged_one_by_one_up_to_the_first_that_fails() -> None:
    backend = FiveMethods()
    for number in range(4):
        backend.publish(STREAM, EventMessage(b"%d" % number))
    backend.create_group(STREAM, GROUP, "0")
    assert len(backend.read_new(STREAM, GROUP, "me", 10, 0)) == 4
    assert backend.ack_many(STREAM, GROUP, ["1-0", "1-0", "2-0"]) == 2
    backend.fails_at = "4-0"
    with pytest.raises(BrokerUnavailableError):
        backend.ack_many(STREAM, GROUP, ["3-0", "4-0"])
    assert list(backend.memory.pending(STREAM, GROUP)) == ["4-0"]
