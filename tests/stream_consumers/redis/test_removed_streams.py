"""A stream that is deleted under a reader, and made again with lower ids, is told: nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stream_consumers.consumer import Edge
from stream_consumers.create import create_consumer
from stream_consumers.errors import StreamEndedError, StreamRemovedError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset
from stream_consumers.redis import server
from stream_consumers.redis.entry_consumer import create_entry_consumer
from tests.support.polling import until
from tests.support.redis_streams import Place, numbers, take, take_until_silent

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REMOVAL_CHECK_SECONDS", 0.05)


def make_again(place: Place, *, entries: int = 3) -> None:
    """With lower ids than :meth:`Place.send` makes."""
    place.client.delete(place.stream)
    for number in range(1, entries + 1):
        place.add(f"{number}-0", "msg", "9")


def assert_told(read: Callable[[], object], match: str) -> StreamRemovedError:
    with pytest.raises(StreamRemovedError, match=match) as told:
        until(lambda: read() and None, seconds=PATIENCE)
    return told.value


@pytest.mark.parametrize("reset", list(AutoStreamReset))
def test_a_stream_made_again_with_lower_ids_is_told(place: Place, reset: AutoStreamReset) -> None:
    place.send(range(5))
    with create_consumer(place.url, reset=reset) as consumer:
        take_until_silent(consumer)
        make_again(place)
        told = assert_told(lambda: consumer.next(0.1), "was deleted and created again")
        assert (told.facts["last_id"], told.facts["last_id_now"]) == ("1700000000040-0", "3-0")
        with pytest.raises(StreamRemovedError):
            consumer.next(0)
        # Rewound, it reads what there is now.
        consumer.rewind(Edge.BEGINNING)
        assert numbers(take(consumer, 3)) == [9, 9, 9]


def test_a_stream_that_is_deleted_is_told_before_somebody_makes_it_again(place: Place) -> None:
    place.send(range(2))
    with create_consumer(place.url) as consumer:
        take(consumer, 2)
        place.client.delete(place.stream)
        told = assert_told(lambda: consumer.next(0.1), "was deleted while it was read")
        assert told.facts["last_id_now"] is None


def test_fewer_entries_tell_it_too_whatever_their_ids(place: Place) -> None:
    """From Redis 7 on, a stream counts the entries ever added."""
    place.send(range(5))
    with create_consumer(place.url) as consumer:
        take(consumer, 5)
        until(lambda: consumer.next(0) is None and consumer._removals._recorded[Shard(place.stream)].added == 5)
        place.client.delete(place.stream)
        place.add("1800000000000-0", "msg", "9")
        assert_told(lambda: consumer.next(0), "created again")


def test_the_end_of_a_stream_that_is_gone_is_no_end(place: Place) -> None:
    place.send(range(5))
    with create_consumer(place.url, live=False) as consumer:
        take(consumer, 5)
        make_again(place)
        with pytest.raises(StreamRemovedError):
            consumer.next()
    with create_consumer(place.url, live=False) as consumer:
        assert numbers(list(consumer)) == [9, 9, 9]
        with pytest.raises(StreamEndedError):
            consumer.next()


def test_what_is_trimmed_or_not_there_yet_is_not_gone(place: Place) -> None:
    with create_consumer(place.url) as consumer:
        for _ in range(3):
            assert consumer.next(0.1) is None
        place.send(range(3))
        assert numbers(take(consumer, 3)) == [0, 1, 2]
        place.client.xtrim(place.stream, maxlen=0, approximate=False)
        assert consumer.next(0.2) is None
        place.send(range(3, 4))
        assert numbers(take(consumer, 1)) == [3]
        place.client.xdel(place.stream, *(entry_id for entry_id, _ in place.client.xrange(place.stream)))
        assert consumer.next(0.2) is None


def test_with_the_wildcard_a_stream_that_is_gone_is_no_longer_read(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stream_consumers.redis import consumer as redis_consumer
    from tests.support.redis_server import redis_server

    monkeypatch.setattr(redis_consumer, "SHARD_SEARCH_SECONDS", 0.05)
    with redis_server(tmp_path_factory.mktemp("wildcard")) as address:
        kept, gone = Place(address), Place(address)
        kept.send([1])
        gone.send([2])
        with create_consumer(f"redis://{address}/*") as consumer:
            assert sorted(numbers(take(consumer, 2))) == [1, 2]
            gone.client.delete(gone.stream)
            until(lambda: consumer.next(0.05) is None and consumer.assigned() == {Shard(kept.stream)})
            kept.send([3])
            assert numbers(take(consumer, 1)) == [3]


@pytest.mark.parametrize("start", ["0-0", "$"])
def test_an_entry_consumer_tells_it_and_starts_anew_when_it_is_entered_again(place: Place, start: str) -> None:
    place.send(range(3))
    consumer = create_entry_consumer(place.url, identifiers={place.stream: start})
    with consumer:
        assert len(list(consumer)) == (3 if start == "0-0" else 0)
        make_again(place)
        assert_told(lambda: consumer.get_entry(0.1), "created again")
    with consumer:
        assert consumer.get_entry(0.2) is None or start == "0-0"


@pytest.mark.slow
def test_in_a_cluster(nodes: list[str]) -> None:
    place = Place(nodes[0], cluster=True)
    for number in range(4):
        place.client.xadd(f"{place.stream}:{number}", {"msg": str(number)})
    with create_consumer(place.url, client={"cluster": True}) as consumer:
        assert sorted(numbers(take(consumer, 4))) == [0, 1, 2, 3]
        assert consumer.next(0.2) is None
        place.client.delete(f"{place.stream}:2")
        place.client.xadd(f"{place.stream}:2", {"msg": "9"}, id="1-0")
        assert_told(lambda: consumer.next(0.1), "created again")


def test_many_streams_are_looked_at_in_turn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REMOVAL_CHECK_STREAMS", 2)
    place.send(range(7), shards=7, is_sharded=True)
    with create_consumer(place.url) as consumer:
        take(consumer, 7)
        place.client.delete(f"{place.stream}:6")
        assert_told(lambda: consumer.next(0.02), f"{place.stream}:6")
