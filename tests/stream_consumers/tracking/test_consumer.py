"""What Faust's Consumer promises, on every backend that can: in memory, where every step can be seen."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from stream_consumers.consumer import Edge, Positions, ProcessCommitter
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import (
    BrokerUnavailableError,
    GroupActiveError,
    GroupsNotRememberedError,
    InvalidOptionError,
    NotSubscribedError,
    StreamEndedError,
    TransactionAbortedError,
)
from stream_consumers.memory import MemoryConsumer, forget_memory_broker, memory_broker
from stream_consumers.messages import Message, Shard
from stream_consumers.redis.group import RedisCommitter
from stream_consumers.testing.consumer_contract import median_seconds, wait_in_threads
from stream_consumers.tracking.commits import CommitResult, create_committer
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import Activity, TrackingCallbacks, TrackingOptions
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.tracking import fetched

PATIENCE = 60.0
BY_HAND = TrackingOptions(commit_interval_seconds=None, commit_every=None, close_seconds=0.0)
_numbers = itertools.count()
ONE, TWO, THREE = Shard("orders", 0), Shard("orders", 1), Shard("orders", 2)


class Broker:
    """Where commits go: counts them, and fails or waits when told to."""

    is_transactional = False

    def __init__(self, positions: Positions | None = None) -> None:
        self.positions = dict(positions or {})
        self.calls: list[Positions] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def commit(self, positions: Positions) -> None:
        self.calls.append(dict(positions))
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.positions |= positions

    def committed(self) -> Positions:
        return dict(self.positions)


class Gated:
    """A consumer whose next waits, so that a test can act in the middle of it."""

    def __init__(self, inner: MemoryConsumer) -> None:
        self.inner = inner
        self.fetching, self.release = threading.Event(), threading.Event()

    def next(self, timeout_seconds: float | None = None) -> Message | None:
        message = self.inner.next(timeout_seconds)
        if message is not None:
            self.fetching.set()
            assert self.release.wait(PATIENCE)
        return message

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class InARow(Gated):
    """A consumer that gives the messages of one shard after those of another, as a client that fetches them does."""

    def __init__(self, inner: MemoryConsumer) -> None:
        super().__init__(inner)
        self.messages: list[Message] = []

    def next(self, timeout_seconds: float | None = None) -> Message | None:
        while (message := self.inner.next(0)) is not None:
            self.messages.append(message)
        self.messages.sort(key=lambda message: message.shard)
        return self.messages.pop(0) if self.messages else None


@pytest.fixture
def url() -> Iterator[StreamUrl]:
    made = StreamUrl.parse(f"memory://faust-{next(_numbers)}/orders")
    yield made
    forget_memory_broker(made)


@pytest.fixture
def broker() -> Broker:
    return Broker()


def send(url: StreamUrl, *shards: Shard) -> None:
    for shard in shards:
        memory_broker(url).append(shard, b"{}", 1_000 + len(memory_broker(url).messages.get(shard, [])))


def tracked(
    url: StreamUrl, broker: Broker, options: TrackingOptions = BY_HAND, callbacks: TrackingCallbacks | None = None
) -> TrackedConsumer:
    return TrackedConsumer(MemoryConsumer(url), broker, options=options, callbacks=callbacks)


def places(messages: list[Message]) -> list[tuple[int, int]]:
    return [(message.shard.id, message.sequence) for message in messages]


def finish_one(consumer: TrackedConsumer) -> None:
    """Take the next message, and acknowledge it."""
    message = consumer.next(1)
    assert message is not None
    consumer.ack(message)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


def test_0_never_waits_beside_threads_that_wait(url: StreamUrl, broker: Broker) -> None:
    send(url, TWO)
    with tracked(url, broker) as consumer:
        finish_one(consumer)
        threads, found = wait_in_threads(consumer, 3)
        assert median_seconds(lambda: consumer.next(0)) < 0.05
        assert median_seconds(lambda: consumer.rewind(Edge.END)) < 0.5
        assert all(thread.is_alive() for thread in threads)
        send(url, TWO, TWO, TWO)
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(places(found)) == [(TWO.id, 1), (TWO.id, 2), (TWO.id, 3)]


# getmany and the flow (statements 2-9, 15)


def test_getmany_flow_inactive_when_the_fetch_returns_yields_nothing_and_keeps_the_message(
    url: StreamUrl, broker: Broker
) -> None:
    send(url, ONE, ONE)
    gated = Gated(MemoryConsumer(url))
    with TrackedConsumer(gated, broker, options=BY_HAND) as consumer:  # type: ignore[arg-type]
        thread, found = in_thread(lambda: fetched(consumer, 10, seconds=0.2))
        assert gated.fetching.wait(PATIENCE)
        consumer.stop_flow()
        assert not consumer.wait_for_stopped_flow(0.05), "a thread is in the middle of it"
        gated.release.set()
        assert consumer.wait_for_stopped_flow(PATIENCE)
        thread.join(PATIENCE)
        assert (found, consumer.unacked) == ([[]], [])
        consumer.resume_flow()
        assert places(fetched(consumer, 10, seconds=1)) == [(0, 0), (0, 1)]


def test_getmany_gives_each_message_with_its_shard_and_leaves_the_rest(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, ONE, ONE, TWO)
    with tracked(url, broker) as consumer:
        for shard, message in consumer.getmany(1):
            assert shard == message.shard
            break
        assert len(consumer.unacked) == 1, "what nobody came to was not handed out"
        assert places(fetched(consumer, 2, seconds=1)) == [(1, 0), (0, 1)]
        assert places(fetched(consumer, 9, seconds=1)) == [(0, 2)]
        assert list(consumer.getmany(0)) == []
        for wrong in (0, -1):
            with pytest.raises(InvalidOptionError, match="max_messages"):
                consumer.getmany(0, max_messages=wrong)


def test_a_scheduler_chooses_the_shard(url: StreamUrl, broker: Broker) -> None:
    asked: list[list[Shard]] = []

    def last_one(shards: Sequence[Shard]) -> Shard:
        asked.append(list(shards))
        return max(shards)

    send(url, *[ONE] * 3, *[TWO] * 2, THREE)
    with tracked(url, broker, replace(BY_HAND, scheduler=last_one)) as consumer:
        assert places(fetched(consumer, 9, seconds=1)) == [(2, 0), (1, 0), (1, 1), (0, 0), (0, 1), (0, 2)]
        assert set(asked[0]) == {ONE, TWO, THREE}
        send(url, ONE, TWO)
        consumer.pause_partitions([TWO])
        assert places(fetched(consumer, 9, seconds=1)) == [(0, 3)]
        consumer.resume_partitions([TWO])
        assert places(fetched(consumer, 9, seconds=1)) == [(1, 2)]
        for message in consumer.unacked:
            consumer.ack(message)
        assert consumer.commit() is CommitResult.COMMITTED
    assert broker.positions == {ONE: 4, TWO: 3, THREE: 1}


def test_a_scheduler_that_takes_the_first_takes_shards_in_turn(url: StreamUrl, broker: Broker) -> None:
    """However many messages of one shard the backend gives in a row."""
    send(url, *[ONE] * 3, *[TWO] * 3)
    options = replace(BY_HAND, scheduler=lambda shards: shards[0])
    with TrackedConsumer(InARow(MemoryConsumer(url)), broker, options=options) as consumer:
        assert places(fetched(consumer, 9, seconds=1)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    with TrackedConsumer(InARow(MemoryConsumer(url)), Broker(), options=BY_HAND) as consumer:
        assert places(fetched(consumer, 9, seconds=1)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_what_was_fetched_ahead_is_dropped_by_a_move_and_never_committed(url: StreamUrl, broker: Broker) -> None:
    send(url, *[ONE] * 6)
    with tracked(url, broker, replace(BY_HAND, scheduler=min)) as consumer:
        first = consumer.next(1)
        assert first is not None
        consumer.ack(first)
        assert consumer.commit() is CommitResult.COMMITTED
        assert broker.positions == {ONE: 1}
        consumer.go_to({ONE: 3})
        assert places(fetched(consumer, 9, seconds=1)) == [(0, 3), (0, 4), (0, 5)]


def test_a_scheduler_that_chooses_a_shard_without_a_message(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with (
        tracked(url, broker, replace(BY_HAND, scheduler=lambda shards: THREE)) as consumer,
        pytest.raises(InvalidOptionError),
    ):
        consumer.next(1)


def test_flow_inactive_waits_until_it_is_resumed(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        consumer.stop_flow()
        assert Activity.FLOW_STOPPED in consumer.status
        assert consumer.next(0) is None
        thread, found = in_thread(lambda: consumer.next(PATIENCE))
        assert consumer.wait_for_stopped_flow(0)
        consumer.resume_flow()
        thread.join(PATIENCE)
        assert [message.sequence for message in found if isinstance(message, Message)] == [0]
        assert Activity.FLOW_STOPPED not in consumer.status


# positions (12, 13, 17)


def test_seek_to_committed_leaves_unassigned_shards_out(url: StreamUrl, broker: Broker) -> None:
    send(url, *[ONE, TWO] * 4)
    broker.positions = {ONE: 2, TWO: 3}
    with tracked(url, broker) as consumer:
        fetched(consumer, 99, seconds=1)
        consumer.unassign(TWO)
        consumer.rewind(Edge.BEGINNING)
        for again in (consumer.seek_to_committed, consumer.perform_seek):
            again()
            assert places(fetched(consumer, 99, seconds=1)) == [(0, 2), (0, 3)]
        with pytest.raises(NotSubscribedError):
            consumer.go_to({TWO: 0})


def test_after_a_rewind_before_everything_nothing_is_to_be_committed(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        for message in fetched(consumer, 9, seconds=1):
            consumer.ack(message)
        consumer.rewind(-1)
        assert consumer.commit() is CommitResult.NOTHING_TO_DO
    assert broker.positions == {}


def test_a_backend_that_cannot_move_single_shards_says_so(tmp_path: Path) -> None:
    location = f"file://{tmp_path}/a.ss/orders"
    create_producer(location).close()
    with (
        TrackedConsumer(create_consumer(location), ProcessCommitter(), options=BY_HAND) as consumer,
        pytest.raises(InvalidOptionError),
    ):
        consumer.go_to({ONE: 0})


# pause and resume (16)


def test_pause_keeps_what_was_fetched_and_resume_hands_it_out_in_order(url: StreamUrl, broker: Broker) -> None:
    send(url, *[ONE, TWO] * 20)
    with tracked(url, broker) as consumer:
        fetched(consumer, 4, seconds=1)
        consumer.pause_partitions([TWO])
        assert places(fetched(consumer, 99, seconds=1)) == [(0, n) for n in range(2, 20)]
        consumer.resume_partitions([TWO])
        send(url, TWO)
        assert places(fetched(consumer, 99, seconds=1)) == [(1, n) for n in range(2, 21)]


def test_a_paused_shard_holds_so_much_and_no_more(url: StreamUrl, broker: Broker) -> None:
    options = TrackingOptions(commit_interval_seconds=None, buffer_size=10, close_seconds=0)
    send(url, *[ONE] * 100)
    inner = MemoryConsumer(url)
    with TrackedConsumer(inner, broker, options=options) as consumer:
        consumer.pause_partitions([ONE])
        for _ in range(30):
            assert consumer.next(0) is None
        rest = 0
        while inner.next(0) is not None:
            rest += 1
        assert rest == 90
        consumer.resume_partitions([ONE])
        assert places(fetched(consumer, 99, seconds=1)) == [(0, n) for n in range(8)], "full at 80 %"


def test_the_end_of_a_replay_waits_for_a_paused_shard(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with TrackedConsumer(MemoryConsumer(url, live=False), broker, options=BY_HAND) as consumer:
        consumer.pause_partitions([ONE])
        for _ in range(3):
            assert consumer.next(0) is None
        consumer.resume_partitions([ONE])
        assert consumer.next(0) is not None
        with pytest.raises(StreamEndedError):
            consumer.next(0)


# acknowledgements (21, 22)


def test_track_message_is_in_unacked_until_every_reader_is_done(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        message = consumer.next(1)
        assert message is not None
        assert consumer.unacked == [message]
        consumer.track_message(message, readers=2)
        assert not consumer.ack(message)
        assert consumer.commit() is CommitResult.NOTHING_TO_DO
        assert consumer.ack(message)
        assert consumer.unacked == []
        assert consumer.commit() is CommitResult.COMMITTED


def test_many_threads_never_commit_past_an_unfinished_message(url: StreamUrl) -> None:
    unfinished: set[tuple[Shard, int]] = set()
    lock = threading.Lock()
    wrong: list[object] = []

    class Checked(Broker):
        def commit(self, positions: Positions) -> None:
            with lock:
                wrong.extend(place for place in unfinished if place[1] < positions.get(place[0], 0))
            super().commit(positions)

    checked = Checked()
    send(url, *[ONE, TWO, THREE] * 400)
    options = TrackingOptions(commit_interval_seconds=0.001, commit_every=5)
    with TrackedConsumer(MemoryConsumer(url, live=False), checked, options=options) as consumer:

        def work() -> None:
            for message in consumer:
                place = (message.shard, message.sequence)
                with lock:
                    unfinished.add(place)
                if message.sequence % 7 == 0:
                    time.sleep(0.0005)
                with lock:
                    unfinished.discard(place)
                    assert consumer.ack(message)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert consumer.wait_empty(PATIENCE)
    assert wrong == []
    assert checked.positions == dict.fromkeys((ONE, TWO, THREE), 400)


# committing (25, 27-33, 37, 38)


def deliver(consumer: TrackedConsumer, count: int) -> dict[tuple[int, int], Message]:
    return {(m.shard.id, m.sequence): m for m in fetched(consumer, count, seconds=1)}


def test_the_filter_takes_shards_and_streams(broker: Broker) -> None:
    url = StreamUrl.parse(f"memory://faust-filter-{next(_numbers)}/orders,clicks")
    other = Shard("clicks")
    send(url, ONE, TWO, other)
    with tracked(url, broker) as consumer:
        for message in fetched(consumer, 3, seconds=1):
            consumer.ack(message)
        assert consumer.commit({"views"}) is CommitResult.NOTHING_TO_DO
        assert consumer.commit({TWO}) is CommitResult.COMMITTED
        assert consumer.force_commit({"clicks"}) is CommitResult.COMMITTED
        assert broker.calls == [{TWO: 1}, {other: 1}]
        consumer.commit()
        assert broker.calls[2:] == [{ONE: 1}]
    forget_memory_broker(url)


def test_commit_while_another_runs_waits_and_commits_nothing(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, ONE)
    with tracked(url, broker) as consumer:
        first, second = fetched(consumer, 2, seconds=1)
        consumer.ack(first)
        broker.gate.clear()
        thread, found = in_thread(consumer.commit)
        assert broker.entered.wait(PATIENCE)
        assert Activity.COMMITTING in consumer.status
        consumer.ack(second)
        waiting, told = in_thread(consumer.commit)
        waiting.join(0.05)
        assert waiting.is_alive()
        forcing, forced = in_thread(consumer.force_commit)
        broker.gate.set()
        for one in (thread, waiting, forcing):
            one.join(PATIENCE)
        assert found == [CommitResult.COMMITTED]
        assert told == [CommitResult.ANOTHER_WAS_RUNNING]
        assert forced == [CommitResult.COMMITTED]
        assert broker.calls == [{ONE: 1}, {ONE: 2}]
        assert Activity.COMMITTING not in consumer.status


def test_a_failed_commit_advances_nothing_and_keeps_the_error(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        finish_one(consumer)
        broker.error = BrokerUnavailableError("no answer", remedy="Wait.")
        assert [consumer.commit(), consumer.commit()] == [CommitResult.FAILED] * 2
        assert consumer.commit_error is broker.error
        assert consumer._commits._acknowledged == 1
        assert consumer.progress()[0].committed_at is None
        broker.error = None
        assert consumer.commit() is CommitResult.COMMITTED
        assert (consumer.commit_error, consumer._commits._acknowledged) == (None, 0)
    assert broker.calls == [{ONE: 1}] * 3


def test_a_failed_commit_is_tried_again_by_itself_on_an_idle_shard(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    options = TrackingOptions(commit_interval_seconds=None, commit_every=None, retry_seconds=0.02)
    with tracked(url, broker, options) as consumer:
        finish_one(consumer)
        broker.error = BrokerUnavailableError("no answer", remedy="Wait.")
        begin = time.monotonic()
        assert consumer.commit() is CommitResult.FAILED
        until(lambda: len(broker.calls) == 4)
        assert time.monotonic() - begin >= 0.02 + 0.04 + 0.08, "without a back-off"
        broker.error = None
        until(lambda: broker.positions == {ONE: 1})
        until(lambda: consumer.commit_error is None)


def test_commit_every_so_many_acks_also_when_the_first_message_still_runs(url: StreamUrl, broker: Broker) -> None:
    send(url, *[ONE] * 20)
    options = TrackingOptions(commit_interval_seconds=None, commit_every=5, close_seconds=0)
    with tracked(url, broker, options) as consumer:
        messages = fetched(consumer, 20, seconds=1)
        for message in messages[:4]:
            consumer.ack(message)
        assert broker.calls == []
        consumer.ack(messages[4])
        until(lambda: broker.calls == [{ONE: 5}])
        until(lambda: consumer._commits._acknowledged == 0)
        for message in messages[6:16]:
            consumer.ack(message)
        assert consumer.force_commit() is CommitResult.NOTHING_TO_DO
        assert consumer._commits._acknowledged == 10, "counted until a commit has succeeded"
        consumer.ack(messages[5])
        for message in messages[16:]:
            consumer.ack(message)
        until(lambda: broker.positions[ONE] >= 16)


def test_on_task_error_commits_what_is_finished_and_not_the_message(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, ONE, ONE)
    errors: list[BaseException] = []
    with tracked(url, broker, callbacks=TrackingCallbacks(on_task_error=errors.append)) as consumer:
        first, second, third = fetched(consumer, 3, seconds=1)
        with consumer.processing(first):
            pass
        with pytest.raises(ValueError, match="poison"), consumer.processing(second):
            raise ValueError("poison")
        with consumer.processing(third):
            pass
        assert [str(error) for error in errors] == ["poison"]
        assert broker.calls == [{ONE: 1}]
        assert consumer.unacked == [second]
        assert consumer.commit() is CommitResult.NOTHING_TO_DO


def test_it_commits_after_the_interval_and_not_before(url: StreamUrl, broker: Broker) -> None:
    assert TrackingOptions().commit_interval_seconds == 2.8
    send(url, ONE)
    began = time.monotonic()
    with tracked(url, broker, TrackingOptions(commit_interval_seconds=0.2)) as consumer:
        finish_one(consumer)
        until(lambda: broker.calls, what="a commit in the background")
        assert time.monotonic() - began > 0.19
        assert broker.positions == {ONE: 1}


def test_callbacks_that_raise_lose_no_message_and_no_commit(
    url: StreamUrl, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def failing(name: str) -> Callable[[object], None]:
        def fail(subject: object) -> None:
            told.append(name)
            raise RuntimeError(f"{name} is broken")

        return fail

    names = ("on_assigned", "on_revoked", "on_buffer_full", "on_buffer_drop", "on_task_error")
    send(url, *[ONE] * 4)
    callbacks = TrackingCallbacks(**{name: failing(name) for name in names})
    options = replace(BY_HAND, buffer_size=5)
    with tracked(url, broker, options, callbacks) as consumer:
        consumer.on_assigned(frozenset([ONE]))
        messages = fetched(consumer, 4, seconds=1)
        assert places(messages) == [(0, 0), (0, 1), (0, 2), (0, 3)]
        assert [consumer.ack(message) for message in messages] == [True] * 4
        with pytest.raises(ValueError, match="poison"), consumer.processing(messages[0]):
            raise ValueError("poison")
        assert broker.positions == {ONE: 4}
        consumer.on_revoked(frozenset([ONE]))
    assert told == ["on_assigned", "on_buffer_full", "on_buffer_drop", "on_task_error", "on_revoked"]
    assert all(f"callback {name} failed" in caplog.text for name in names)
    # The text of an error may hold values of messages.
    assert "is broken" not in caplog.text
    assert "poison" not in caplog.text


def test_an_error_that_is_none_of_ours_is_kept_too(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        finish_one(consumer)
        broker.error = ZeroDivisionError("in the committer")
        assert consumer.commit() is CommitResult.FAILED
        assert consumer.commit_error is broker.error
        broker.error = None


def test_an_aborted_transaction_is_not_committed_by_trying_again(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, ONE)
    with tracked(url, broker) as consumer:
        for message in fetched(consumer, 2, seconds=1):
            consumer.ack(message)
        broker.error = TransactionAbortedError("gone", remedy="Seek.")
        assert consumer.commit() is CommitResult.FAILED
        broker.error = None
        assert consumer.commit() is CommitResult.FAILED, "the results of the messages are gone"
        assert len(broker.calls) == 1
        consumer.seek_to_committed()
        messages = fetched(consumer, 9, seconds=1)
        assert places(messages) == [(0, 0), (0, 1)]
        for message in messages:
            consumer.ack(message)
        assert consumer.commit() is CommitResult.COMMITTED


# wait_empty and closing (23, 24)


def test_wait_empty_commits_until_everything_is_finished(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, ONE)
    with tracked(url, broker) as consumer:
        first, second = fetched(consumer, 2, seconds=1)
        thread, found = in_thread(lambda: consumer.wait_empty(PATIENCE))
        until(lambda: Activity.WAITING_EMPTY in consumer.status)
        consumer.ack(first)
        thread.join(0.02)
        assert thread.is_alive()
        consumer.ack(second)
        thread.join(PATIENCE)
        assert found == [True]
        assert broker.positions == {ONE: 2}
        assert Activity.WAITING_EMPTY not in consumer.status


def test_wait_empty_has_a_deadline_and_commits_what_it_may(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, ONE)
    with tracked(url, broker) as consumer:
        first, _ = fetched(consumer, 2, seconds=1)
        consumer.ack(first)
        begin = time.monotonic()
        assert not consumer.wait_empty(0.05)
        assert 0.04 < time.monotonic() - begin < 1
        assert broker.positions == {ONE: 1}


@pytest.mark.parametrize("waits", [True, False])
def test_on_stop_honours_stream_wait_empty(url: StreamUrl, broker: Broker, waits: bool) -> None:
    send(url, ONE)
    options = TrackingOptions(commit_interval_seconds=None, close_seconds=PATIENCE if waits else 0)
    consumer = tracked(url, broker, options)
    message = consumer.next(1)
    assert message is not None
    thread, _ = in_thread(consumer.close)
    thread.join(0.1)
    assert thread.is_alive() == waits
    with nullcontext() if waits else pytest.raises(StreamEndedError):
        consumer.ack(message)
    thread.join(PATIENCE)
    assert broker.positions == ({ONE: 1} if waits else {})
    consumer.close()
    with pytest.raises(StreamEndedError):
        consumer.next(0)


def test_close_raises_what_the_last_commit_failed_with_and_releases(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    inner = MemoryConsumer(url)
    consumer = TrackedConsumer(inner, broker, options=BY_HAND)
    finish_one(consumer)
    broker.error = BrokerUnavailableError("no answer", remedy="Wait.")
    with pytest.raises(BrokerUnavailableError):
        consumer.close()
    with pytest.raises(StreamEndedError):
        inner.next(0)


def test_close_ends_threads_that_wait(url: StreamUrl, broker: Broker) -> None:
    consumer = tracked(url, broker)
    threads = [threading.Thread(target=list, args=(consumer,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: Activity.FETCHING in consumer.status)
    consumer.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_leaving_after_an_error_does_not_wait_for_what_nobody_finishes(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    begin = time.monotonic()

    def fail() -> None:
        with tracked(url, broker, TrackingOptions(close_seconds=60)) as consumer:
            consumer.next(1)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert time.monotonic() - begin < 5


# full buffers


def test_a_full_shard_stops_at_80_percent_and_goes_on_at_40(url: StreamUrl, broker: Broker) -> None:
    told: list[tuple[str, Shard]] = []
    callbacks = TrackingCallbacks(
        on_buffer_full=lambda shard: told.append(("full", shard)),
        on_buffer_drop=lambda shard: told.append(("drop", shard)),
    )
    options = TrackingOptions(commit_interval_seconds=None, buffer_size=10, close_seconds=0)
    send(url, *[ONE] * 30, TWO)
    with tracked(url, broker, options, callbacks) as consumer:
        messages = fetched(consumer, 99, seconds=1)
        assert places([m for m in messages if m.shard == ONE]) == [(0, n) for n in range(8)]
        assert places([m for m in messages if m.shard == TWO]) == [(1, 0)], "the others go on"
        assert told == [("full", ONE)]
        own = [m for m in messages if m.shard == ONE]
        for message in own[:3]:
            consumer.ack(message)
        assert fetched(consumer, 9, seconds=0.02) == []
        consumer.ack(own[3])
        assert told == [("full", ONE), ("drop", ONE)]
        assert places(fetched(consumer, 99, seconds=1)) == [(0, n) for n in range(8, 12)]
        assert told[2:] == [("full", ONE)]


# revoked and assigned (19, 20), without a broker


def test_revoked_calls_back_once_commits_and_then_forgets(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE, *[TWO] * 3)
    steps: list[object] = []
    consumer: TrackedConsumer

    def on_revoked(shards: frozenset[Shard]) -> None:
        steps.append((shards, dict(broker.positions), consumer.status))
        consumer.ack(messages[1, 0])
        steps.append(consumer.commit())
        consumer.ack(messages[1, 1])

    callbacks = TrackingCallbacks(on_revoked=on_revoked)
    with tracked(url, broker, callbacks=callbacks) as consumer:
        messages = deliver(consumer, 9)
        consumer.pause_partitions([TWO])
        consumer.on_revoked(frozenset([TWO]))
        assert steps == [(frozenset([TWO]), {}, Activity.SHARDS_REVOKED), CommitResult.COMMITTED]
        assert broker.calls == [{TWO: 1}, {TWO: 2}]
        assert [m.shard for m in consumer.unacked] == [ONE]
        assert [p.shard for p in consumer.progress()] == [ONE]
        assert not consumer.ack(messages[1, 2])


def test_revoked_commits_while_another_commit_is_stuck(url: StreamUrl, broker: Broker) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        finish_one(consumer)
        broker.gate.clear()
        thread, _ = in_thread(consumer.commit)
        assert broker.entered.wait(PATIENCE)
        broker.entered.clear()
        revoking, _ = in_thread(lambda: consumer.on_revoked(frozenset([ONE])))
        assert broker.entered.wait(PATIENCE), "it waits for the other one"
        broker.gate.set()
        thread.join(PATIENCE)
        revoking.join(PATIENCE)
        assert broker.calls == [{ONE: 1}] * 2


def test_a_commit_that_failed_since_the_shard_was_given_away_is_no_error_at_the_end(
    url: StreamUrl, broker: Broker
) -> None:
    send(url, ONE)
    with tracked(url, broker) as consumer:
        finish_one(consumer)
        broker.error = GroupActiveError("given to another member", remedy="Its new owner reads it again.")
        consumer.on_revoked(frozenset([ONE]))
        assert consumer.commit_error is broker.error
        assert consumer.commit([ONE]) is CommitResult.NOTHING_TO_DO
        assert consumer.commit_error is broker.error, "only of this shard"
        # Leaving raises the error of the last commit.
    assert consumer.commit_error is None


def test_assigned_calls_back_and_begins_at_what_is_committed(url: StreamUrl, broker: Broker) -> None:
    told: list[frozenset[Shard]] = []
    with tracked(url, broker, callbacks=TrackingCallbacks(on_assigned=told.append)) as consumer:
        broker.positions = {ONE: 7, TWO: 0}
        consumer.on_assigned(frozenset([ONE, TWO, THREE]))
        assert told == [frozenset([ONE, TWO, THREE])]
        assert [progress.committed for progress in consumer.progress()] == [7, 0, None]


# where positions are kept


def test_a_redis_group_that_claims_takes_no_position(redis_address: str) -> None:
    from stream_consumers.redis.group import RedisGroup
    from stream_consumers.redis.server import RedisConnection

    url = StreamUrl.parse(f"redis://{redis_address}/faust-{next(_numbers)}-{time.time_ns()}")
    with create_producer(url) as producer:
        shard = producer.send(b"1").shard
    group = RedisGroup(RedisConnection(url), "claimed")
    group.create(shard, "0-0")
    group.enter_claim_mode(shard)
    with pytest.raises(GroupActiveError):
        RedisCommitter(url, "claimed").commit({shard: 5})


def test_files_remember_no_groups() -> None:
    with pytest.raises(GroupsNotRememberedError, match="billing"):
        create_committer(StreamUrl.parse("file:///tmp/a.ss/orders"), "billing")
    with pytest.raises(GroupsNotRememberedError, match="KafkaConsumer"):
        create_committer(StreamUrl.parse("kafka://host/orders"), "billing")


@pytest.mark.parametrize(
    "wrong",
    [{"commit_interval_seconds": 0}, {"retry_seconds": float("nan")}, {"buffer_size": 1}, {"close_seconds": -1}],
)
def test_options_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(wrong))):
        TrackingOptions(**wrong)  # type: ignore[arg-type]
