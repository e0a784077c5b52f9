"""The livelock watch: Faust's checks in their order, on a clock of the test's own; and what is no alarm."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from stream_consumers.capabilities import ShardEnd
from stream_consumers.committer import ProcessCommitter
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import BrokerUnavailableError, InvalidOptionError
from stream_consumers.memory import MemoryCommitter, MemoryConsumer, forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.tracking.committers import CommitResult
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.livelock import (
    Livelock,
    LivelockKind,
    LivelockOptions,
    LivelockWatch,
    ShardProgress,
    Standstill,
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


def test_no_fetch_since_start(place: Place) -> None:
    assert place.look(299, fetched=None) == []
    assert place.look(1, fetched=None) == [LivelockKind.NEVER_FETCHED]


def test_last_fetch_too_long_ago(place: Place) -> None:
    place.look(0)
    assert place.look(299, fetched=1_000.0) == []
    assert place.look(1, fetched=1_000.0) == [LivelockKind.FETCH_STOPPED]
    assert place.told[0].seconds == 300
    assert "fetch_timeout_seconds" in place.told[0].advice


def test_end_unknown(place: Place) -> None:
    place.is_away = True
    assert place.look(299) == []
    assert place.look(1) == [LivelockKind.END_UNKNOWN]
    place.is_away = False
    assert place.look(1) == []


def test_nothing_has_ever_arrived(place: Place) -> None:
    never = {"arrived": None, "received": None, "committed": None, "committed_at": None}
    assert place.look(0, end=5, **never) == []
    assert place.look(399) == []
    assert place.look(1) == [LivelockKind.NEVER_ARRIVED]
    assert place.told[0].numbers["end"] == 5
    assert "arrival_timeout_seconds" in place.told[0].advice


def test_arrivals_stopped(place: Place) -> None:
    assert place.look(0, end=12) == []
    assert place.look(100, arrived=1_100.0, received=10, committed=10, committed_at=1_100.0) == []
    assert place.look(399) == []
    assert place.look(1) == [LivelockKind.ARRIVAL_STOPPED]


def test_a_message_after_a_long_silence_is_not_late_at_once(place: Place) -> None:
    assert place.look(10_000) == []
    assert place.look(1, end=10) == []
    assert place.look(398) == []
    assert place.look(2) == [LivelockKind.ARRIVAL_STOPPED]


def test_never_committed(place: Place) -> None:
    running = {"received": 12, "committed": None, "committed_at": None, "committable": None, "unfinished": 3}
    assert place.look(0, end=12, **running) == []
    assert place.look(499) == []
    assert place.look(1) == [LivelockKind.NEVER_COMMITTED]
    assert "handler hangs" in place.told[0].advice
    assert place.told[0].numbers["unfinished"] == 3


def test_commits_stopped(place: Place) -> None:
    assert place.look(0, end=12, received=12, committable=11) == []
    assert place.look(499) == []
    assert place.look(1) == [LivelockKind.COMMIT_STOPPED]
    assert "commit_error" in place.told[0].advice
    assert "commit_timeout_seconds" in place.told[0].advice


def test_the_first_check_in_order_is_the_one_that_is_told(place: Place) -> None:
    assert place.look(0, end=20, committable=12) == []
    assert place.look(1_000, fetched=1_000.0) == [LivelockKind.FETCH_STOPPED]
    assert place.look(1_000) == [LivelockKind.ARRIVAL_STOPPED]
    assert place.look(1, received=20, arrived=3_001.0) == [LivelockKind.COMMIT_STOPPED]


def test_nothing_to_read_is_no_alarm(place: Place) -> None:
    assert place.look(100_000) == []
    assert place.watch.standstills == {ONE: Standstill.NOTHING_TO_READ}
    assert place.look(100_000) == []


def test_an_empty_shard_that_has_no_position_is_no_alarm(place: Place) -> None:
    place.look(0, end=0, arrived=None, received=None, committed=None, committed_at=None)
    assert place.look(100_000) == []


def test_paused_is_no_alarm_and_time_begins_with_the_end_of_the_pause(place: Place) -> None:
    assert place.look(0, end=30) == []
    assert place.look(100_000, is_paused=True, fetched=None) == []
    assert place.watch.standstills == {ONE: Standstill.PAUSED}
    assert place.look(1, is_paused=False) == []
    assert place.look(399) == []
    assert place.look(1) == [LivelockKind.ARRIVAL_STOPPED]


def test_an_open_transaction_is_no_alarm(place: Place) -> None:
    assert place.look(100_000, end=9, written=50) == []
    assert place.watch.standstills == {ONE: Standstill.OPEN_TRANSACTION}


def test_the_callback_hears_of_a_finding_once_and_status_keeps_it(place: Place) -> None:
    place.look(0, end=12)
    for _ in range(3):
        assert place.look(400) == [LivelockKind.ARRIVAL_STOPPED] or place.now < 1_401
    assert [livelock.kind for livelock in place.told] == [LivelockKind.ARRIVAL_STOPPED]
    assert [livelock.kind for livelock in place.watch.status()] == [LivelockKind.ARRIVAL_STOPPED]
    assert place.look(1, received=12, committed=12, arrived=place.now, committed_at=place.now) == []
    assert place.watch.status() == []
    assert "orders/0" in str(place.told[0])


def test_a_finding_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    now = 1_000.0
    watch = LivelockWatch(lambda: [], dict, options=OPTIONS, clock=lambda: now)
    now += 300
    watch.check()
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("ERROR", "stream_consumers.tracking.livelock")
    assert "300" in record.getMessage()


def test_options_out_of_range() -> None:
    with pytest.raises(InvalidOptionError, match="commit_timeout_seconds"):
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
    assert consumer.livelocks == told
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
        until(lambda: consumer._watch is not None and consumer._watch.standstills)
        assert told == [], "everything that came is finished and committed"
        with create_producer(url) as producer:
            producer.send(b"{}")
        assert consumer.next(1) is not None
        until(lambda: told)
    assert [(found.kind, found.numbers["unfinished"]) for found in told] == [(LivelockKind.COMMIT_STOPPED, 1)]
