"""Commands on a group: when it is created, Redis 7 learns how many entries count as read, so that its lag is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from stream_consumers.errors import StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset
from stream_consumers.redis import server
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.entries import to_sequence
from stream_consumers.redis.entry_consumer import GroupEntryConsumer
from stream_consumers.redis.group import GroupFacts, RedisCommitter, RedisGroup
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.redis.server import RedisConnection
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.urls import StreamUrl
from tests.support.redis_streams import Place

GROUP = "billing"


@pytest.fixture
def place(redis_address: str) -> Iterator[Place]:
    """A stream of ten entries, the first four of which are trimmed, and a deleted one among the others."""
    found = Place(redis_address)
    for number in range(10):
        found.client.xadd(found.stream, {"msg": "{}"}, id=f"{number + 1}-1")
    found.client.xtrim(found.stream, minid="5-1", approximate=False)
    found.client.xdel(found.stream, "7-1")
    yield found
    found.client.close()


@pytest.fixture
def group(place: Place) -> RedisGroup:
    return RedisGroup(RedisConnection(StreamUrl.parse(place.url)), GROUP)


def facts_of(group: RedisGroup, place: Place) -> GroupFacts:
    found = group.facts(Shard(place.stream))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("start", "read"), [("0-0", 5), ("0", 5), ("4-9", 5), ("5-1", None), ("8-1", None), ("10-1", 10), ("$", 10)]
)
def test_the_count_of_read_entries_is_set_where_it_is_known(
    place: Place, group: RedisGroup, start: str, read: int | None
) -> None:
    assert group.create(Shard(place.stream), start)
    assert facts_of(group, place).read == read
    assert not group.create(Shard(place.stream), "0-0"), "it exists already, and stays where it is"
    assert facts_of(group, place).read == read


@pytest.mark.parametrize("is_known", [False, True])
def test_a_group_of_a_new_shard_of_a_known_stream_has_read_nothing(place: Place, is_known: bool) -> None:
    """The first four entries of the new shard are trimmed, and another one is deleted."""
    place.client.rename(place.stream, f"{place.stream}:1")
    place.client.xgroup_create(f"{place.stream}:0", GROUP, mkstream=True)
    old, new = (Shard(place.stream, number) for number in range(2))
    with RedisClaims(StreamUrl.parse(place.url), GROUP) as claims:
        claims.prepare(AutoStreamReset.EARLIEST, known={old: None} if is_known else {})
        facts = claims.group.facts(new)
        assert facts is not None
        assert facts.read == (0 if is_known else 5)
        assert [trimmed.entries for trimmed in claims.trimmed().values()] == ([5] if is_known else [])


def test_losses_are_counted_exactly_however_many_entries_are_unread(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the lag, the length of the stream is near enough, once counting takes too long."""
    monkeypatch.setattr(server, "COUNT_PAGE_SIZE", 2)
    monkeypatch.setattr(server, "MAX_COUNT_PAGES", 1)
    stream = f"{place.stream}-many"
    for number in range(1, 31):
        place.client.xadd(stream, {"msg": b"{}"}, id=f"{number}-1")
    place.client.xgroup_create(stream, GROUP, "10-1", entries_read=10)
    place.client.xdel(stream, "12-1", "13-1")
    with RedisClaims(StreamUrl.parse(place.url.replace(place.stream, stream)), GROUP) as claims:
        assert [trimmed.entries for trimmed in claims.trimmed().values()] == [2]
        place.client.execute_command("XGROUP", "SETID", stream, GROUP, "20-1")
        claims.count_reads()
        facts = claims.group.facts(Shard(stream))
        assert facts is not None
        assert facts.read == 20
        assert not claims.trimmed()


@pytest.mark.parametrize("kept", [0, 3, 10])
@pytest.mark.parametrize("deleted", [["12-1"], ["12-1", "13-1"], ["11-1", "13-1"], ["14-1"]])
def test_the_range_of_a_loss_has_all_lost_entries(place: Place, deleted: list[str], kept: int) -> None:
    """Only entries that were read are trimmed; unread ones are deleted."""
    stream = f"{place.stream}-lost"
    for number in range(1, 11):
        place.client.xadd(stream, {"msg": b"{}"}, id=f"{number}-1")
    place.client.xgroup_create(stream, GROUP, "10-1", entries_read=10)
    place.client.xtrim(stream, maxlen=kept, approximate=False)
    for number in range(11, 15):
        place.client.xadd(stream, {"msg": b"{}"}, id=f"{number}-1")
    place.client.xdel(stream, *deleted)
    with RedisClaims(StreamUrl.parse(place.url.replace(place.stream, stream)), GROUP) as claims:
        (lost,) = claims.trimmed().values()
    assert (lost.start, lost.end) == (to_sequence("10-1") + 1, to_sequence(deleted[-1]) + 1)
    assert lost.entries == len(deleted)


def test_a_count_that_leaves_many_entries_is_not_compared_with_the_stream(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at them would take long, and the entries are claimed anyway."""
    monkeypatch.setattr(server, "EXACT_COUNT", 2)
    place.client.xgroup_create(place.stream, GROUP, "5-1", entries_read=5)
    with RedisClaims(StreamUrl.parse(place.url), GROUP) as claims:
        for read, unread in ((7, 3), (8, 2), (9, 4), (11, 4)):
            place.client.xgroup_setid(place.stream, GROUP, "5-1", entries_read=read)
            assert claims.backlog()[Shard(place.stream)].unread == unread


def test_a_stream_that_is_made_with_its_group_has_nothing_read(place: Place, group: RedisGroup) -> None:
    fresh = Shard(f"{place.stream}-fresh")
    with pytest.raises(StreamNotFoundError):
        group.create(fresh, "0-0", create_stream=False)
    with pytest.raises(StreamNotFoundError):
        group.set_position(fresh, 7, entries_read=None)
    assert group.create(fresh, "$")
    assert group.facts(fresh) == GroupFacts("0-0", 0, 0)


def by_claims(place: Place) -> None:
    with RedisClaims(StreamUrl.parse(place.url), GROUP) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)


def by_a_member(place: Place) -> None:
    # The member reads no entry: Redis would give up counting at the deleted one.
    with RedisGroupConsumer(StreamUrl.parse(place.url), group=GROUP, reset=AutoStreamReset.LATEST) as member:
        assert member.next(0.0) is None


def by_a_member_that_reads_entries(place: Place) -> None:
    with GroupEntryConsumer(StreamUrl.parse(place.url), group=GROUP, consumer="me"):
        pass


def by_a_subscription(place: Place) -> None:
    backend = RedisBackend(StreamUrl.parse(place.url))
    backend.create_group(place.stream, GROUP, "0")
    backend.close()


def by_a_position(place: Place) -> None:
    shard = Shard(place.stream)
    RedisCommitter(StreamUrl.parse(place.url), GROUP).commit({shard: to_sequence("10-1") + 1})


@pytest.mark.parametrize(
    ("create", "read"),
    [
        (by_claims, 5),
        (by_a_member, 10),
        (by_a_member_that_reads_entries, 5),
        (by_a_subscription, 5),
        (by_a_position, 10),
    ],
)
def test_whoever_creates_a_group_sets_the_count_of_read_entries(
    place: Place, group: RedisGroup, create: Callable[[Place], None], read: int
) -> None:
    create(place)
    assert facts_of(group, place).read == read
