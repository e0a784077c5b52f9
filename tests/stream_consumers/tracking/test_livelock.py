"""The livelock watch: Faust's checks in their order, on a clock of the test's own; and what is no alarm."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stream_consumers.consumer import ProcessCommitter, ShardEnd
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import BrokerUnavailableError, InvalidOptionError
from stream_consumers.memory import MemoryCommitter, MemoryConsumer, forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.tracking.commits import CommitResult
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.livelock import (
    Livelock,
    LivelockKind,
    LivelockOptions,
    LivelockWatch,
    ShardProgress,
)
from stream_consumers.tracking.options import TrackingCallbacks, TrackingOptions
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.streams import write_stream

ONE = Shard("orders", 0)
OPTIONS = LivelockOptions(fetch_timeout_seconds=300, arrival_timeout_seconds=400, commit_timeout_seconds=500)
# Everything is well: it fetches, and is at the end.
WELL = ShardProgress(
    shard=ONE, started=1_000, fetched=1_000, arrived=1_000, committed_at=1_000, received=9, committed=9
)
_numbers = itertools.count()


class Place:
    """A watch over one shard whose progress, end and time the test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.shards = [WELL]
        self.ends: Mapping[Shard, ShardEnd] = {ONE: ShardEnd(9, 9)}
        self.told: list[Livelock] = []
        self.is_away = False
        self.watch = LivelockWatch(
            lambda: self.shards, self.ask, options=OPTIONS, on_livelock=self.told.append, clock=lambda: self.now
        )

    def ask(self) -> Mapping[Shard, ShardEnd]:
        if self.is_away:
            raise BrokerUnavailableError("no answer", remedy="Wait.")
        return self.ends

    def look(
        self, after: float, *, end: int | None = None, written: int | None = None, **changes: object
    ) -> list[LivelockKind]:
        """What is found so many seconds later; the consumer fetches all the time unless told otherwise."""
        self.now += after
        changes = {"fetched": self.now, **changes}
        self.shards = [replace(self.shards[0], **changes)]  # type: ignore[arg-type]
        if end is not None:
            self.ends = {ONE: ShardEnd(end, written or end)}
        return [livelock.kind for livelock in self.watch.check()]


@pytest.fixture
def place() -> Place:
    return Place()


def test_no_active_assignment(place: Place) -> None:
    place.shards = []
    place.now += 299
    assert place.watch.check() == []
    place.now += 1
    (found,) = place.watch.check()
    assert (found.kind, found.shard, found.seconds) == (LivelockKind.NO_ASSIGNMENT, None, 300)


def test_end_unknown(place: Place) -> None:
    place.is_away = True
    assert place.look(299) == []
    assert place.look(1) == [LivelockKind.END_UNKNOWN]
    place.is_away = False
    assert place.look(1) == []


NEVER = {"arrived": None, "received": None, "committed": None, "committed_at": None}
# Seconds that pass, what changes, and what is found then.
Steps = list[tuple[float, dict[str, Any], LivelockKind | None]]
WATCHED: dict[str, Steps] = {
    "nothing was fetched since the start": [
        (299, {"fetched": None}, None),
        (1, {"fetched": None}, LivelockKind.NEVER_FETCHED),
    ],
    "the last fetch is too long ago": [
        (0, {}, None),
        (299, {"fetched": 1_000.0}, None),
        (1, {"fetched": 1_000.0}, LivelockKind.FETCH_STOPPED),
    ],
    "nothing has ever arrived": [(0, {"end": 5, **NEVER}, None), (399, {}, None), (1, {}, LivelockKind.NEVER_ARRIVED)],
    "nothing arrives any more": [
        (0, {"end": 12}, None),
        (100, {"arrived": 1_100.0, "received": 10, "committed": 10, "committed_at": 1_100.0}, None),
        (399, {}, None),
        (1, {}, LivelockKind.ARRIVAL_STOPPED),
    ],
    "a message after a long silence is not late at once": [
        (10_000, {}, None),
        (1, {"end": 10}, None),
        (398, {}, None),
        (2, {}, LivelockKind.ARRIVAL_STOPPED),
    ],
    "nothing was ever committed": [
        (0, {"end": 12, "received": 12, "committed": None, "committed_at": None, "unfinished": 3}, None),
        (499, {}, None),
        (1, {}, LivelockKind.NEVER_COMMITTED),
    ],
    "nothing is committed any more": [
        (0, {"end": 12, "received": 12, "committable": 11}, None),
        (499, {}, None),
        (1, {}, LivelockKind.COMMIT_STOPPED),
    ],
    "the first check in order decides": [
        (0, {"end": 20, "committable": 12}, None),
        (1_000, {"fetched": 1_000.0}, LivelockKind.FETCH_STOPPED),
        (1_000, {}, LivelockKind.ARRIVAL_STOPPED),
        (1, {"received": 20, "arrived": 3_001.0}, LivelockKind.COMMIT_STOPPED),
    ],
    "nothing to read is no alarm": [(100_000, {}, None), (100_000, {}, None)],
    "an empty shard without a position is no alarm": [(0, {"end": 0, **NEVER}, None), (100_000, {}, None)],
    "time begins with the end of a pause": [
        (0, {"end": 30}, None),
        (100_000, {"is_paused": True, "fetched": None}, None),
        (1, {"is_paused": False}, None),
        (399, {}, None),
        (1, {}, LivelockKind.ARRIVAL_STOPPED),
    ],
    "an open transaction is no alarm": [(100_000, {"end": 9, "written": 50}, None)],
}
SETTINGS = {"FETCH": "fetch_timeout_seconds", "ARRI": "arrival_timeout_seconds", "COMMIT": "commit_timeout_seconds"}


@pytest.mark.parametrize("steps", WATCHED.values(), ids=WATCHED)
def test_what_stands_still_is_found_and_nothing_else(place: Place, steps: Steps) -> None:
    for after, changes, expected in steps:
        assert place.look(after, **changes) == ([] if expected is None else [expected])
    for livelock in place.told:
        assert any(setting in livelock.advice for kind, setting in SETTINGS.items() if kind in livelock.kind.name)


def test_the_callback_hears_of_a_finding_once_and_status_keeps_it(place: Place) -> None:
    place.look(0, end=12)
    for _ in range(3):
        assert place.look(400) == [LivelockKind.ARRIVAL_STOPPED] or place.now < 1_401
    assert [livelock.kind for livelock in place.told] == [LivelockKind.ARRIVAL_STOPPED]
    assert [livelock.kind for livelock in place.watch.status()] == [LivelockKind.ARRIVAL_STOPPED]
    assert place.look(1, received=12, committed=12, arrived=place.now, committed_at=place.now) == []
    assert place.watch.status() == []
    assert (place.told[0].shard, place.told[0].numbers["end"]) == (ONE, 12)


def test_options_out_of_range() -> None:
    with pytest.raises(InvalidOptionError):
        LivelockOptions(commit_timeout_seconds=0)


def test_a_tracked_consumer_watches_itself() -> None:
    url = StreamUrl.parse(f"memory://livelock-{next(_numbers)}/orders")
    memory_broker(url).append(ONE, b"1")

    class Refusing(MemoryCommitter):
        def commit(self, positions: Mapping[Shard, int]) -> None:
            raise BrokerUnavailableError("no answer", remedy="Wait.")

    told: list[Livelock] = []
    options = TrackingOptions(
        commit_interval_seconds=None,
        close_seconds=0,
        livelock=LivelockOptions(commit_timeout_seconds=0.05, check_interval_seconds=0.01),
    )
    callbacks = TrackingCallbacks(on_livelock=told.append)
    consumer = TrackedConsumer(MemoryConsumer(url), Refusing(url, "g"), options=options, callbacks=callbacks)
    message = consumer.next(1)
    assert message is not None
    consumer.ack(message)
    assert consumer.commit() is CommitResult.FAILED
    until(lambda: told)
    (found,) = consumer.livelocks
    assert found.seconds >= told[0].seconds, "the time goes on after the callback"
    assert replace(found, seconds=told[0].seconds) == told[0]
    assert told[0].kind is LivelockKind.NEVER_COMMITTED, "a failed commit is no progress"
    assert told[0].numbers["committable"] == 1
    with pytest.raises(BrokerUnavailableError):
        consumer.close()
    forget_memory_broker(url)


def test_the_watch_ends_with_its_consumer_and_there_is_none_unless_asked_for() -> None:
    url = StreamUrl.parse(f"memory://livelock-{next(_numbers)}/orders")
    memory_broker(url).append(ONE, b"1")

    def watches() -> int:
        return sum(thread.name == "livelock watch" for thread in threading.enumerate())

    before = watches()
    with TrackedConsumer(MemoryConsumer(url), MemoryCommitter(url, "g")) as consumer:
        assert (watches(), consumer.livelocks) == (before, [])
    options = TrackingOptions(livelock=LivelockOptions(), close_seconds=0)
    with TrackedConsumer(MemoryConsumer(url), MemoryCommitter(url, "g"), options=options):
        assert watches() == before + 1
    assert watches() == before
    forget_memory_broker(url)


def test_a_consumer_that_cannot_ask_for_ends_is_watched_for_what_it_received(tmp_path: Path) -> None:
    url = write_stream(tmp_path / "orders.ss", 3, shards=1)
    told: list[Livelock] = []
    livelock = LivelockOptions(commit_timeout_seconds=0.05, arrival_timeout_seconds=0.05, check_interval_seconds=0.01)
    options = TrackingOptions(commit_interval_seconds=None, close_seconds=0, livelock=livelock)
    callbacks = TrackingCallbacks(on_livelock=told.append)
    with TrackedConsumer(create_consumer(url), ProcessCommitter(), options=options, callbacks=callbacks) as consumer:
        for _ in range(3):
            message = consumer.next(1)
            assert message is not None
            consumer.ack(message)
        assert consumer.commit() is CommitResult.COMMITTED
        time.sleep(0.2)
        assert told == [], "everything that came is finished and committed"
        with create_producer(url) as producer:
            producer.send(b"{}")
        assert consumer.next(1) is not None
        until(lambda: told)
    assert [(found.kind, found.numbers["unfinished"]) for found in told] == [(LivelockKind.COMMIT_STOPPED, 1)]
