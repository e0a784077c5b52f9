"""Entries of others are taken over after the time that was set, or the default one, and not before."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stream_consumers.create import StreamSource
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, RedisGroupOptions
from stream_consumers.redis.claims import ClaimedEntries, ClaimName, RedisClaims
from stream_consumers.redis.group import RedisGroup
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.redis_streams import Place, numbers, take

GROUP, GONE = "billing", "gone"
PATIENCE = 60.0


def leave_behind(place: Place, *idle_seconds: float) -> list[bytes]:
    """An entry of a member that is gone for each of these idle times."""
    place.send(range(len(idle_seconds)))
    ids = place.leave_behind(GROUP, GONE, len(idle_seconds))
    for entry_id, seconds in zip(ids, idle_seconds):
        place.touch(GROUP, GONE, [entry_id], idle_ms=round(seconds * 1000))
    return ids


def claims_of(place: Place, options: dict[str, Any]) -> RedisClaims:
    return StreamSource(StreamUrl.parse(place.url), mode="load_balanced", client=options).claims(GROUP)


# The members of a group

POLICIES: list[Any] = [({}, 30.0), ({"min_idle_seconds": 90.0}, 90.0)]


@pytest.mark.parametrize(("options", "limit"), POLICIES)
def test_claims_move_what_was_idle_for_the_time_of_the_policy(
    place: Place, options: dict[str, Any], limit: float
) -> None:
    busy, idle = leave_behind(place, limit - 15, limit + 1)
    shard = Shard(place.stream)
    with claims_of(place, options) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        listed = {
            only_idle: [entry for page in claims.pending(shard, GONE.encode(), idle=only_idle) for entry in page]
            for only_idle in (False, True)
        }
        assert [[entry.id for entry in found] for found in listed.values()] == [[busy, idle], [idle]]
        name = ClaimName("me", 1, "a" * 32)
        held = ClaimedEntries(name, records=10, room=10_000)
        # The idle time is looked at again when they are moved: the member may have come back.
        assert claims.take_over(held, shard, GONE.encode(), listed[False]) == (False, [])
        assert held.ids == {shard: [idle]}
    assert place.pending(GROUP) == {busy.decode(): GONE, idle.decode(): str(name)}


# Members of a Redis group that are no claims


@pytest.mark.parametrize(("options", "limit"), [({}, 60.0), ({"auto_claim_idle_seconds": 90.0}, 90.0)])
def test_a_member_takes_over_what_was_idle_for_the_time_of_its_options(
    place: Place, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: float
) -> None:
    asked: list[float] = []

    def has_idle_peer(group: RedisGroup, shard: Shard, idle_seconds: float) -> bool:
        # The server tells nobody's idle time but the real one.
        asked.append(idle_seconds)
        return True

    monkeypatch.setattr(RedisGroup, "has_idle_peer", has_idle_peer)
    busy, idle = leave_behind(place, limit - 15, limit + 1)
    settings = RedisGroupOptions(auto_commit="disabled", consumer="me", auto_claim_interval_seconds=0.02, **options)
    with RedisGroupConsumer(
        StreamUrl.parse(place.url), mode="load_balanced", group=GROUP, options=settings
    ) as consumer:
        assert numbers(take(consumer, 1)) == [1]
        sweeps = len(asked)
        until(lambda: consumer.next(0) is not None or len(asked) > sweeps + 2, seconds=PATIENCE, what="three sweeps")
    assert set(asked) == {limit}
    assert place.pending(GROUP) == {busy.decode(): GONE, idle.decode(): "me"}


def test_the_first_search_comes_after_30_seconds_by_default(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Shard] = []

    def has_idle_peer(group: RedisGroup, shard: Shard, idle_seconds: float) -> bool:
        searches.append(shard)
        return False

    now = [time.monotonic()]
    monkeypatch.setattr(RedisGroup, "has_idle_peer", has_idle_peer)
    monkeypatch.setattr("stream_consumers.redis.group_consumer.time.monotonic", lambda: now[0])
    with RedisGroupConsumer(StreamUrl.parse(place.url), mode="load_balanced", group=GROUP) as consumer:
        for seconds, expected in ((29.0, 0), (2.0, 1), (1.0, 1), (30.0, 2)):
            now[0] += seconds
            assert consumer.next(0) is None
            assert len(searches) == expected
