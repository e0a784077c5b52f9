"""coredis' own tests of its stream consumers, statement by statement, with our meaning where that differs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stream_consumers.errors import GroupNotFoundError
from tests.support.polling import until
from tests.support.redis_entries import PATIENCE, Found, Keys, by_stream, take
from tests.support.redis_streams import unique_name

both = pytest.mark.parametrize("kind", ["simple", "group"])


def test_02_the_same_in_a_group_that_is_there(keys: Keys) -> None:
    keys.make_groups(keys.a, keys.b)
    with keys.member(auto_create=False) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(10))
        found = take(consumer, 20)
        assert by_stream(found) == {keys.a: list(range(10)), keys.b: list(range(10))}
        assert (keys.pending(keys.a), keys.pending(keys.b)) == (10, 10)
        assert consumer.acknowledge(keys.a, *(entry for name, entry in found if name == keys.a)) == 10
        assert (keys.pending(keys.a), keys.pending(keys.b)) == (0, 10)


def test_05_one_stream_from_the_beginning(keys: Keys) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(5))
    with keys.consumer(identifiers={keys.a: "0-0"}) as consumer:
        keys.add(keys.b, range(5, 8))
        assert by_stream(consumer) == {keys.a: list(range(5)), keys.b: list(range(5, 8))}


@pytest.mark.parametrize("buffer_size", [0, 3])
def test_06_entering_again_replays_from_the_identifiers(keys: Keys, buffer_size: int) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(5))
    consumer = keys.consumer(identifiers={keys.a: "0-0"}, buffer_size=buffer_size)
    with consumer:
        assert by_stream(take(consumer, 3)) == {keys.a: [0, 1, 2]}
    keys.add(keys.b, [5])
    with consumer:
        assert by_stream(consumer) == {keys.a: list(range(5))}
        keys.add(keys.b, [6])
        assert by_stream(consumer) == {keys.b: [6]}


def test_07_a_group_goes_on_and_keeps_pending_what_was_buffered(keys: Keys) -> None:
    consumer = keys.member(keys.a, buffer_size=5)
    with consumer:
        keys.add(keys.a, range(5))
        assert by_stream(take(consumer, 2)) == {keys.a: [0, 1]}
    keys.add(keys.a, [5])
    with consumer:
        assert by_stream(consumer) == {keys.a: [5]}
    assert keys.pending(keys.a) == 6


def test_08_a_missing_group_names_the_streams_that_lack_it(keys: Keys) -> None:
    keys.make_groups(keys.a)
    with pytest.raises(GroupNotFoundError) as caught, keys.member(auto_create=False):
        pass
    assert keys.b in caught.value.what
    assert keys.a not in caught.value.what
    assert not keys.client.exists(keys.b)
    keys.make_groups(keys.b)
    with keys.member(auto_create=False) as consumer:
        assert consumer.get_entry() is None


def test_09_a_stream_that_is_added(keys: Keys) -> None:
    later = unique_name("later")
    for name in (keys.a, keys.b, later):
        keys.add(name, range(3))
    with keys.consumer(keys.a) as consumer:
        keys.add(keys.a, [3])
        assert consumer.add_stream(keys.b)
        assert consumer.add_stream(later, "0-0")
        assert not consumer.add_stream(later, "0-0")
        keys.add(keys.b, [3])
        assert by_stream(consumer) == {keys.a: [3], keys.b: [3], later: [0, 1, 2]}
        assert not consumer.add_stream(later, "0-0")
        assert list(consumer) == []
    assert consumer.streams == (keys.a, keys.b, later)


def test_10_a_stream_that_is_added_to_a_group(keys: Keys) -> None:
    keys.make_groups(keys.a)
    keys.add(keys.b, range(3))
    with keys.member(keys.a, auto_create=False) as consumer:
        with pytest.raises(GroupNotFoundError, match=keys.b):
            consumer.add_stream(keys.b)
        keys.add(keys.a, [0])
        assert by_stream(consumer) == {keys.a: [0]}
        keys.make_groups(keys.b)
        assert consumer.add_stream(keys.b)
        assert not consumer.add_stream(keys.b)
        assert by_stream(consumer) == {keys.b: [0, 1, 2]}
    later = unique_name("later")
    with keys.member(keys.a) as consumer:
        assert consumer.add_stream(later)
        keys.add(later, range(3))
        assert by_stream(consumer) == {later: [0, 1, 2]}


def test_12_two_members_share_everything(keys: Keys) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(100))
    with keys.member() as one, keys.member(consumer="consumer-2") as other, ThreadPoolExecutor(2) as threads:
        first, second = threads.map(list, (one, other))
    places = [(name, entry.identifier) for name, entry in [*first, *second]]
    assert len(places) == len(set(places)) == 200


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_13_the_backlog_comes_first(keys: Keys, buffer_size: int) -> None:
    options = {"start_from_backlog": True, "buffer_size": buffer_size}
    with keys.member(**options) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(10))
        assert len(take(consumer, 10)) == 10
    for name in (keys.a, keys.b):
        keys.add(name, range(10, 15))
    with keys.member(**options) as consumer:
        assert by_stream(take(consumer, 30)) == {keys.a: list(range(15)), keys.b: list(range(15))}
        assert consumer.get_entry() is None
        keys.add(keys.a, [15])
        assert by_stream(consumer) == {keys.a: [15]}


@both
def test_14_buffered(keys: Keys, kind: str) -> None:
    with keys.any(kind, buffer_size=10) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(10))
        found = list(consumer)
    assert by_stream(found) == {keys.a: list(range(10)), keys.b: list(range(10))}
    # A whole buffer of one stream, then of the other.
    assert [name for name, _ in found] == [keys.a] * 10 + [keys.b] * 10


@both
@pytest.mark.parametrize("is_iterated", [False, True])
def test_15_waiting_gets_what_is_added_meanwhile(keys: Keys, kind: str, is_iterated: bool) -> None:
    with keys.any(kind, timeout_seconds=PATIENCE) as consumer:
        found: list[Found | None] = []
        read = (lambda: next(iter(consumer))) if is_iterated else consumer.get_entry
        waiting = threading.Thread(target=lambda: found.append(read()))
        waiting.start()
        until(lambda: consumer._is_started, what="the start")
        assert not found
        keys.add(keys.b, [7])
        waiting.join(PATIENCE)
        assert by_stream(pair for pair in found if pair) == {keys.b: [7]}


@both
def test_16_iterating_without_waiting_drains_everything_and_ends(keys: Keys, kind: str) -> None:
    with keys.any(kind) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(20))
        assert len(list(consumer)) == 40
        assert list(consumer) == []
        keys.add(keys.a, [20])
        assert by_stream(consumer) == {keys.a: [20]}
