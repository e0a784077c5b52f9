"""Where coredis' stream consumers lose, hang or mislead, and ours must not."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from stream_consumers.errors import (
    BrokerUnavailableError,
    FormatError,
    GroupRemovedError,
    InvalidOptionError,
    NotSubscribedError,
    StreamEndedError,
)
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.redis.entry_consumer import EntryConsumer, EntryReader, create_entry_consumer
from stream_consumers.testing.consumer_contract import usual_seconds
from tests.support.lossy_proxy import LossyProxy
from tests.support.polling import until
from tests.support.redis_entries import GROUP, ME, PATIENCE, Found, Keys, by_stream, take

# order and places


def test_streams_take_turns_without_a_buffer(keys: Keys) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(3))
    beginning = dict.fromkeys((keys.a, keys.b), "0-0")
    with keys.consumer(identifiers=beginning) as consumer:
        found = [(name, int(entry.fields[0][1])) for name, entry in consumer]
    assert found == [(keys.a, 0), (keys.b, 0), (keys.a, 1), (keys.b, 1), (keys.a, 2), (keys.b, 2)]


@pytest.mark.parametrize("buffer_size", [0, 5])
def test_a_place_moves_when_its_entry_is_returned(keys: Keys, buffer_size: int) -> None:
    keys.add(keys.a, range(4))
    with keys.consumer(keys.a, identifiers={keys.a: "0-0"}, buffer_size=buffer_size) as consumer:
        assert consumer.positions == {keys.a: "0-0"}
        (_, first), (_, second) = take(consumer, 2)
        assert consumer.positions == {keys.a: second.identifier} != {keys.a: first.identifier}
        places = consumer.positions
    with keys.consumer(keys.a, identifiers=places) as other:
        assert by_stream(other) == {keys.a: [2, 3]}


def test_an_entry_is_given_as_it_is_and_as_a_message(keys: Keys) -> None:
    words = (b"n\xff", b"1", b"msg", b"\x00", b"n\xff", b"2")
    keys.client.execute_command("XADD", f"{keys.a}:7", "5-1", *words)
    with keys.consumer(keys.b) as consumer:
        consumer.add_stream(f"{keys.a}:7", "0-0")
        ((name, entry),) = list(consumer)
    assert (name, entry.identifier) == (f"{keys.a}:7", "5-1")
    assert entry.fields == ((b"n\xff", b"1"), (b"msg", b"\x00"), (b"n\xff", b"2"))
    assert isinstance(entry.message, Message)
    assert (entry.message.shard, entry.message.payload) == (Shard(keys.a, 7), b"\x00")


def test_an_entry_that_is_no_message_is_returned_nevertheless(keys: Keys) -> None:
    keys.client.xadd(keys.a, {"id": 1}, id=f"1-{2**16}")
    with keys.member(keys.a, buffer_size=3) as consumer:
        keys.add(keys.a, [2])
        (_, first), (_, second) = list(consumer)
    assert isinstance(first.message, DeadLetter)
    assert "has no sequence" in first.message.error
    assert isinstance(second.message, DeadLetter)
    assert "no field" in second.message.error


@pytest.mark.parametrize("kind", [pytest.param("simple", marks=pytest.mark.slow), "group"])
def test_0_never_waits_beside_threads_that_wait(keys: Keys, kind: str) -> None:
    keys.make_groups(keys.a, keys.b)
    found: list[Found | None] = []
    with keys.any(kind, keys.a) as consumer:
        threads = [threading.Thread(target=lambda: found.append(consumer.get_entry(PATIENCE))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert usual_seconds(lambda: consumer.get_entry(0)) < 0.05
        assert usual_seconds(lambda: consumer.add_stream(keys.b)) < 0.5
        assert all(thread.is_alive() for thread in threads)
        keys.add(keys.a, range(3))
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(int(entry.fields[0][1]) for _, entry in filter(None, found)) == [0, 1, 2]


# where a group starts


@pytest.mark.parametrize(("start", "expected"), [(None, [0, 1, 2, 3]), ("$", [3]), ("1-2", [2, 3])])
def test_a_group_that_is_made_starts_where_it_is_told(keys: Keys, start: str | None, expected: list[int]) -> None:
    for index in range(3):
        keys.client.xadd(keys.a, {"id": index}, id=f"1-{index + 1}")
    with keys.member(keys.a, **({"start": start} if start else {})) as consumer:
        keys.add(keys.a, [3])
        assert by_stream(consumer) == {keys.a: expected}


def test_the_backlog_of_one_stream_from_an_id_on(keys: Keys) -> None:
    """coredis returns the first pending entry for ever."""
    for name in (keys.a, keys.b):
        keys.add(name, range(3))
    with keys.member() as consumer:
        found = take(consumer, 6)
    first = next(entry.identifier for name, entry in found if name == keys.a)
    keys.add(keys.a, [3])
    with keys.member(identifiers={keys.a: first}) as consumer:
        assert by_stream(consumer) == {keys.a: [1, 2, 3]}
    with keys.member(identifiers={keys.a: ">"}, start_from_backlog=True) as consumer:
        assert by_stream(consumer) == {keys.b: [0, 1, 2]}


# the backlog


@pytest.mark.parametrize(("buffer_size", "auto_acknowledge"), [(0, False), (2, False), (20, True)])
def test_a_trimmed_entry_is_told_and_acknowledged(keys: Keys, buffer_size: int, auto_acknowledge: bool) -> None:
    """coredis raises a TypeError, at every start."""
    keys.add(keys.a, range(6))
    with keys.member(keys.a) as consumer:
        ids = [entry.identifier for _, entry in take(consumer, 6)]
    keys.client.xdel(keys.a, *ids[:4])
    keys.add(keys.a, [6])
    told: list[DeadLetter] = []
    options = {"start_from_backlog": True, "buffer_size": buffer_size, "auto_acknowledge": auto_acknowledge}
    with keys.member(keys.a, on_dead_letter=told.append, **options) as consumer:
        assert by_stream(consumer) == {keys.a: [4, 5, 6]}
    assert ["trimmed or deleted" in letter.error for letter in told] == [True] * 4
    assert keys.pending(keys.a) == (0 if auto_acknowledge else 3)


def test_an_observer_that_raises_leaves_the_entry_pending(keys: Keys) -> None:
    keys.add(keys.a, range(2))
    with keys.member(keys.a) as consumer:
        ids = [entry.identifier for _, entry in take(consumer, 2)]
    keys.client.xdel(keys.a, ids[0])

    def refuse(letter: DeadLetter) -> None:
        raise ValueError(letter.error)

    with keys.member(keys.a, on_dead_letter=refuse, start_from_backlog=True, buffer_size=5) as consumer:
        with pytest.raises(ValueError, match="trimmed"):
            consumer.get_entry()
        assert by_stream(consumer) == {keys.a: [1]}
    assert keys.pending(keys.a) == 2


def test_auto_acknowledge_leaves_nothing_pending_of_new_entries(keys: Keys) -> None:
    keys.add(keys.a, range(4))
    with keys.member(keys.a, auto_acknowledge=True, buffer_size=9) as consumer:
        assert by_stream(take(consumer, 2)) == {keys.a: [0, 1]}
        assert keys.pending(keys.a) == 0
    # At most once: what was buffered is gone for this group.
    with keys.member(keys.a, auto_acknowledge=True, start_from_backlog=True) as consumer:
        assert list(consumer) == []


def test_auto_acknowledge_drains_the_backlog_entry_by_entry(keys: Keys) -> None:
    """coredis leaves them all pending."""
    keys.add(keys.a, range(6))
    with keys.member(keys.a) as consumer:
        take(consumer, 6)
    with keys.member(keys.a, auto_acknowledge=True, start_from_backlog=True, buffer_size=9) as consumer:
        assert by_stream(take(consumer, 2)) == {keys.a: [0, 1]}
        assert keys.pending(keys.a) == 4
        assert by_stream(consumer) == {keys.a: [2, 3, 4, 5]}
        assert keys.pending(keys.a) == 0


# a group that is removed


@pytest.mark.parametrize("remove", ["group", "stream"])
def test_a_group_that_is_removed_is_told_and_never_made_again(keys: Keys, remove: str) -> None:
    consumer = keys.member(start_from_backlog=True)
    with consumer:
        keys.add(keys.a, range(2))
        ((name, entry),) = take(consumer, 1)
        assert list(consumer)
        keys.client.xgroup_destroy(keys.a, consumer.group) if remove == "group" else keys.client.delete(keys.a)
        for _ in range(2):
            with pytest.raises(GroupRemovedError):
                consumer.get_entry()
        with pytest.raises(GroupRemovedError):
            consumer.acknowledge(name, entry)
    with consumer, pytest.raises(GroupRemovedError):
        consumer.get_entry()
    assert not keys.client.exists(keys.a) or keys.client.xinfo_groups(keys.a) == []


# lost answers


@pytest.mark.parametrize("before", [0, 2])
def test_entries_of_an_answer_that_got_lost_come_with_the_next(keys: Keys, redis_address: str, before: int) -> None:
    # Ids of several lengths.
    for number in range(7, 9):
        keys.client.xadd(keys.a, {"id": number}, id=f"{number}-1")
    with keys.member(keys.a) as earlier:
        # Pending from before: not wanted again.
        take(earlier, 2)
    with LossyProxy(redis_address) as proxy:
        url = f"redis://{proxy.address}/{keys.a}"
        with create_entry_consumer(url, group=GROUP, consumer=ME) as consumer:
            for number in range(9, 14):
                keys.client.xadd(keys.a, {"id": number}, id=f"{number}-1")
            found = take(consumer, before)
            proxy.drop_the_reply_of(b"XREADGROUP")
            with pytest.raises(BrokerUnavailableError):
                consumer.get_entry()
            assert proxy.dropped == 1
            assert by_stream([*found, *consumer]) == {keys.a: list(range(9, 14))}


def test_an_entry_that_could_not_be_acknowledged_is_returned_by_the_next_call(keys: Keys, redis_address: str) -> None:
    keys.add(keys.a, range(3))
    with keys.member(keys.a) as earlier:
        take(earlier, 3)
    with LossyProxy(redis_address) as proxy:
        options = {"start_from_backlog": True, "auto_acknowledge": True, "buffer_size": 5}
        url = f"redis://{proxy.address}/{keys.a}"
        with create_entry_consumer(url, group=GROUP, consumer=ME, **options) as consumer:
            found = take(consumer, 1)
            proxy.drop_the_reply_of(b"XACK")
            with pytest.raises(BrokerUnavailableError):
                consumer.get_entry()
            assert by_stream([*found, *consumer]) == {keys.a: [0, 1, 2]}
            assert keys.pending(keys.a) == 0


# waiting


def test_waiting_for_ever_ends_with_the_context(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[BaseException] = []
    asked: list[float] = []
    fetch = EntryConsumer._fetch
    monkeypatch.setattr(EntryConsumer, "_fetch", lambda self, seconds: asked.append(seconds) or fetch(self, seconds))

    def wait() -> None:
        try:
            consumer.get_entry(math.inf)
        except StreamEndedError as error:
            caught.append(error)

    with keys.consumer() as consumer:
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: len(asked) > 1, what="the wait")
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert len(caught) == 1
    with pytest.raises(StreamEndedError):
        consumer.get_entry()


@pytest.mark.parametrize("timeout", [None, -1])
def test_no_timeout_does_not_wait(keys: Keys, monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
    monkeypatch.setattr(EntryReader, "poll_seconds", 1000.0)
    with keys.consumer(timeout_seconds=timeout) as consumer:
        assert consumer.get_entry() is None
        keys.add(keys.a, [1])
        assert by_stream(consumer) == {keys.a: [1]}


# what cannot be


@pytest.mark.parametrize(
    "options",
    [
        {"group": "g"},
        {"consumer": "c"},
        {"buffer_size": -1},
        {"identifiers": {"other": "0-0"}},
        {"identifiers": {"one": "soon"}},
        {"identifiers": {"one": ">"}},
        {"identifiers": {"one": "$"}, "group": "g", "consumer": "c"},
        {"start": ">", "group": "g", "consumer": "c"},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        create_entry_consumer("redis://127.0.0.1/one", **options)


def test_a_key_of_the_wrong_type(keys: Keys) -> None:
    keys.client.set(keys.a, "text")
    for kind in ("simple", "group"):
        with pytest.raises(FormatError), keys.any(kind) as consumer:
            consumer.get_entry()


def test_only_own_streams_can_be_acknowledged(keys: Keys) -> None:
    with keys.member(keys.a) as consumer, pytest.raises(NotSubscribedError):
        consumer.acknowledge(keys.b, "1-0")
