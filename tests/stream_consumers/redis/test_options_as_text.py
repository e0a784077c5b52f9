"""Options given as text do what the members of their enumerations do: on Redis each of them would lose messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stream_consumers.consumer import log_dead_letter
from stream_consumers.options import RedisGroupOptions
from stream_consumers.redis.consumer import RedisConsumer
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.subscription.config import SubscriptionConfig
from stream_consumers.subscription.messages import EventMessage
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.subscription.subscription import Subscription
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.redis_streams import Place, numbers, take

GROUP = "billing"


@pytest.fixture
def place(redis_address: str) -> Iterator[Place]:
    found = Place(redis_address)
    yield found
    found.client.close()


def member(place: Place, *, auto_commit: Any = "disabled", **words: Any) -> RedisGroupConsumer:
    options = {name: words.pop(name) for name in list(words) if name.startswith("auto_") or name == "consumer"}
    settings = RedisGroupOptions(auto_commit=auto_commit, **options)
    return RedisGroupConsumer(StreamUrl.parse(place.url), group=GROUP, options=settings, **words)


def test_a_new_group_starts_at_the_earliest(place: Place) -> None:
    place.send(range(3))
    with member(place, reset="earliest") as consumer:
        assert numbers(take(consumer, 3)) == [0, 1, 2]


def test_a_new_group_starts_at_the_latest(place: Place) -> None:
    place.send(range(3))
    with member(place, reset="latest") as consumer:
        assert consumer.next(0) is None
        place.send([3])
        assert numbers(take(consumer, 1)) == [3]


@pytest.mark.parametrize(("reset", "found"), [("earliest", [0, 1, 2, 3]), ("latest", [3])])
def test_a_consumer_without_a_group_starts_there(place: Place, reset: Any, found: list[int]) -> None:
    place.send(range(3))
    with RedisConsumer(StreamUrl.parse(place.url), reset=reset, on_dead_letter=log_dead_letter) as consumer:
        place.send([3])
        assert numbers(take(consumer, len(found))) == found


def test_a_resumable_member_gets_its_pending_messages_back(place: Place) -> None:
    place.send(range(3))
    for _ in range(2):
        with member(place, mode="resumable") as consumer:
            assert numbers(take(consumer, 3)) == [0, 1, 2]


def test_a_load_balanced_member_takes_over(place: Place) -> None:
    place.send(range(3))
    place.leave_behind(GROUP, "gone", 3, idle_ms=60_000)
    often = {"auto_claim_interval_seconds": 0.01, "auto_claim_idle_seconds": 0.1}
    with member(place, mode="load_balanced", **often) as consumer:
        assert numbers(take(consumer, 3)) == [0, 1, 2]


def test_immediate_leaves_nothing_pending(place: Place) -> None:
    place.send(range(3))
    with member(place, auto_commit="immediate") as consumer:
        take(consumer, 1)
        assert place.pending(GROUP) == {}


def test_a_handler_that_settles_by_itself_is_not_helped(place: Place) -> None:
    handled = threading.Event()
    words: Any = {"ack_mode": "manual"}
    config = SubscriptionConfig(
        stream=place.stream, group=GROUP, dead_letter_stream=f"{place.stream}.dead", consumer="me", **words
    )
    with RedisBackend(StreamUrl.parse(place.url)) as backend:
        backend.publish(place.stream, EventMessage(b"{}"))
        with Subscription(backend, config, lambda received: handled.set()):
            until(handled.is_set)
        assert list(place.pending(GROUP).values()) == ["me"]
