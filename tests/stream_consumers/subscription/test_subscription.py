"""Subscriptions over a real Redis server: eventbus's own statements (s…), and its defects, which must not be here."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from stream_consumers.errors import (
    BrokerUnavailableError,
    DeliverySettledError,
    GroupRemovedError,
    InvalidOptionError,
    ShutdownTimeoutError,
    StreamEndedError,
)
from stream_consumers.subscription.backend import EventMessage, JsonCodec
from stream_consumers.subscription.config import AckMode, RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.subscription.subscription import (
    ATTEMPT,
    ID,
    MALFORMED_KIND,
    REASON,
    SIZE,
    STREAM,
    ErrorReport,
    ErrorScope,
    ObserverThread,
    ReceivedMessage,
    Subscription,
)
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.raising import raises_with
from tests.support.redis_streams import unique_name
from tests.support.stream_backends import behind

GROUP = "billing"
PATIENCE = 60.0
QUICK = RetryPolicy(max_retries=1, backoff_seconds=0.01)


class Bench:
    """A stream, its dead letters, and what a handler and an observer got."""

    def __init__(self, other: Any) -> None:
        self.other, self.backend = other, other.backend
        self.stream = unique_name()
        self.dead_stream = f"{self.stream}.dead"
        self.calls: list[tuple[bytes, int]] = []
        self.reports: list[ErrorReport] = []

    def subscribe(
        self, handler: Callable[[ReceivedMessage], object] | None = None, *, backend: Any = None, **options: Any
    ) -> Subscription:
        def record(received: ReceivedMessage) -> None:
            self.calls.append((received.message.payload, received.delivery.attempt))
            if handler is not None:
                handler(received)

        return Subscription(backend or self.backend, self.config(**options), record, on_error=self.reports.append)

    def config(self, **options: Any) -> SubscriptionConfig:
        given: dict[str, Any] = {
            "stream": self.stream,
            "group": GROUP,
            "dead_letter_stream": self.dead_stream,
            "retry": QUICK,
            "claim_idle_seconds": 30.0,
            "claim_interval_seconds": 0.02,
            **options,
        }
        return SubscriptionConfig(**given)

    def send(self, *payloads: bytes) -> list[str]:
        return [self.backend.publish(self.stream, EventMessage(payload)) for payload in payloads]

    def leave_behind(self, *payloads: bytes, consumer: str = "gone") -> list[str]:
        ids = self.send(*payloads)
        self.backend.create_group(self.stream, GROUP, "0")
        if ids:
            self.backend.read_new(self.stream, GROUP, consumer, len(ids), 0)
        return ids

    @property
    def pending(self) -> dict[str, str]:
        found: dict[str, str] = self.other.pending(self.stream, GROUP)
        return found

    @property
    def dead(self) -> list[EventMessage]:
        return [JsonCodec().decode(raw) for _, raw in self.other.entries(self.dead_stream)]

    @property
    def attempts(self) -> list[int]:
        return [attempt for _, attempt in self.calls]

    def scopes(self) -> Counter[ErrorScope]:
        return Counter(report.scope for report in self.reports)

    def wait_for_calls(self, count: int) -> None:
        until(lambda: len(self.calls) >= count, seconds=PATIENCE, what=f"{count} calls")

    def wait_for_nothing_pending(self) -> None:
        until(lambda: self.pending == {}, seconds=PATIENCE, what="everything acknowledged")


@pytest.fixture
def bench(redis_address: str) -> Iterator[Bench]:
    with behind("redis", redis_address, max_payload_bytes=1000) as other:
        yield Bench(other)


class Wrapped:
    """A backend with other methods in place of some of its own, that notes the calls."""

    def __init__(self, backend: Any, **instead: Any) -> None:
        self._backend, self._instead = backend, instead
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def __getattr__(self, name: str) -> Any:
        method = self._instead.get(name, getattr(self._backend, name))

        def noted(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return method(*arguments)

        return noted


def fail(*_: Any) -> Any:
    raise BrokerUnavailableError("no way", remedy="None.")


def raise_value_error(received: ReceivedMessage) -> None:
    raise ValueError(f"cannot handle {received.message.payload!r}")


# acknowledging


def test_s22_on_receive_acknowledges_before_the_handler(bench: Bench) -> None:
    pending_in_handler = []
    with bench.subscribe(
        lambda received: pending_in_handler.append(bench.pending), ack_mode=AckMode.ON_RECEIVE, dead_letter_stream=None
    ):
        bench.send(b"0")
        bench.wait_for_calls(1)
    assert pending_in_handler == [{}]


def test_on_receive_calls_no_handler_when_it_could_not_acknowledge(bench: Bench) -> None:
    broken = Wrapped(bench.backend, ack_many=fail)
    subscription = bench.subscribe(backend=broken, ack_mode=AckMode.ON_RECEIVE, dead_letter_stream=None)
    bench.send(b"0")
    until(lambda: bench.scopes()[ErrorScope.ACK], seconds=PATIENCE)
    with pytest.raises(BrokerUnavailableError):
        subscription.close()
    assert bench.calls == []


def test_s7_manual_and_a_handler_that_raises_publishes_nothing(bench: Bench) -> None:
    with bench.subscribe(raise_value_error, ack_mode=AckMode.MANUAL):
        (entry_id,) = bench.send(b"0")
        until(lambda: bench.scopes()[ErrorScope.HANDLER], seconds=PATIENCE)
    assert [found for found, _ in bench.other.entries(bench.stream)] == [entry_id]
    assert list(bench.pending) == [entry_id]
    assert bench.dead == []


def test_s27_a_message_left_undecided_frees_its_place_and_comes_again(bench: Bench) -> None:
    with bench.subscribe(ack_mode=AckMode.MANUAL, claim_idle_seconds=0.3):
        bench.send(b"0", b"1")
        # The second does not wait for the first; then both come again, to the consumer that abandoned them.
        until(lambda: {(b"0", 2), (b"1", 2)} <= set(bench.calls), seconds=PATIENCE)
    assert bench.calls[:2] == [(b"0", 1), (b"1", 1)]


def test_s16_acknowledgements_are_coalesced(bench: Bench) -> None:
    ready = threading.Barrier(16)
    wrapped = Wrapped(bench.backend)
    with bench.subscribe(lambda received: ready.wait(5), backend=wrapped, max_in_flight=16, ack_interval_seconds=0.2):
        bench.send(*(b"%d" % number for number in range(16)))
        bench.wait_for_calls(16)
        bench.wait_for_nothing_pending()
    assert wrapped.named("ack") == []
    windows = [len(ids) for _, _, ids in wrapped.named("ack_many")]
    assert sum(windows) == 16
    assert len(windows) < 16


def test_s15_a_failed_acknowledgement_is_told_once_and_raised_at_close(bench: Bench) -> None:
    ready = threading.Barrier(4)
    raised: list[Exception] = []

    def acknowledge(received: ReceivedMessage) -> None:
        ready.wait(5)
        try:
            received.ack()
        except BrokerUnavailableError as error:
            raised.append(error)

    broken = Wrapped(bench.backend, ack_many=fail)
    subscription = bench.subscribe(
        acknowledge, backend=broken, max_in_flight=4, ack_mode=AckMode.MANUAL, ack_interval_seconds=1.0
    )
    bench.send(b"0", b"1", b"2", b"3")
    until(lambda: len(raised) == 4, seconds=PATIENCE, what="everybody who waits got the error")
    with pytest.raises(BrokerUnavailableError):
        subscription.close()
    assert bench.scopes() == {ErrorScope.ACK: 1}
    assert len(bench.pending) == 4


# retries and dead letters


def test_s3_a_retry_is_the_same_entry_again_and_no_copy(bench: Bench) -> None:
    def fail_once(received: ReceivedMessage) -> None:
        if received.delivery.attempt == 1:
            raise ValueError("not yet")

    bench.backend.create_group(bench.stream, "second", "0")
    with bench.subscribe(fail_once):
        bench.send(b"0", b"1")
        bench.wait_for_calls(4)
        bench.wait_for_nothing_pending()
    # With one in flight the order stays, too.
    assert bench.calls == [(b"0", 1), (b"0", 2), (b"1", 1), (b"1", 2)]
    assert len(bench.other.entries(bench.stream)) == 2
    assert len(bench.backend.read_new(bench.stream, "second", "x", 10, 0)) == 2
    assert bench.dead == []


def test_s6_max_retries_1_means_two_calls_and_a_dead_letter_with_the_bytes(bench: Bench) -> None:
    with bench.subscribe(raise_value_error):
        bench.send(b"\xff0")
        until(lambda: bench.dead, seconds=PATIENCE)
        bench.wait_for_nothing_pending()
    assert bench.attempts == [1, 2]
    (letter,) = bench.dead
    assert letter.payload == b"\xff0"
    assert "cannot handle" in letter.headers[REASON]
    ((entry_id, _),) = bench.other.entries(bench.stream)
    assert (letter.headers[ID], letter.headers[STREAM], letter.headers[ATTEMPT]) == (entry_id, bench.stream, "2")


def test_s5_a_nack_is_a_dead_letter_at_once(bench: Bench) -> None:
    with bench.subscribe(lambda received: received.nack("poison"), ack_mode=AckMode.MANUAL):
        bench.send(b"0", b"1")
        bench.wait_for_calls(2)
        bench.wait_for_nothing_pending()
    assert [(letter.payload, letter.headers[REASON]) for letter in bench.dead] == [(b"0", "poison"), (b"1", "poison")]
    assert bench.attempts == [1, 1]


def test_a_retry_waits_for_its_back_off(bench: Bench) -> None:
    times: list[float] = []

    def note(received: ReceivedMessage) -> None:
        times.append(time.monotonic())
        raise ValueError

    with bench.subscribe(note, retry=RetryPolicy(max_retries=2, backoff_seconds=0.2)):
        bench.send(b"0")
        until(lambda: bench.dead, seconds=PATIENCE)
    assert times[1] - times[0] >= 0.1
    assert times[2] - times[1] >= 0.2


def _die(address: str, stream: str) -> None:
    backend = RedisBackend(StreamUrl.parse(f"redis://{address}/any"))
    config = SubscriptionConfig(
        stream=stream,
        group=GROUP,
        dead_letter_stream=f"{stream}.dead",
        retry=RetryPolicy(max_retries=1, backoff_seconds=0.01),
        claim_idle_seconds=0.05,
        claim_interval_seconds=0.01,
    )
    with Subscription(backend, config, lambda received: os._exit(9)):
        time.sleep(30)


def test_r11_a_message_that_kills_its_process_runs_out_of_its_budget(bench: Bench, redis_address: str) -> None:
    bench.send(b"poison")
    spawn = multiprocessing.get_context("spawn")
    for _ in range(2):
        process = spawn.Process(target=_die, args=(redis_address, bench.stream))
        process.start()
        process.join(20)
        assert process.exitcode == 9
    with bench.subscribe(claim_idle_seconds=0.05):
        bench.send(b"good")
        until(lambda: bench.dead and bench.calls, seconds=PATIENCE)
        bench.wait_for_nothing_pending()
    # The third delivery is one too many, so that the handler is not called.
    assert bench.calls == [(b"good", 1)]
    (letter,) = bench.dead
    assert (letter.payload, letter.headers[ATTEMPT]) == (b"poison", "3")
    assert "delivered 3 times" in letter.headers[REASON]


@pytest.mark.parametrize("kind", ["exhausted", "malformed", "nack"])
def test_nothing_is_acknowledged_when_its_dead_letter_was_not_published(bench: Bench, kind: str) -> None:
    broken = Wrapped(bench.backend, publish=fail)
    nack = kind == "nack"
    subscription = bench.subscribe(
        (lambda received: received.nack("no")) if nack else raise_value_error,
        backend=broken,
        ack_mode=AckMode.MANUAL if nack else AckMode.ON_SUCCESS,
    )
    entry_id = bench.other.append(bench.stream, b"{") if kind == "malformed" else bench.send(b"0")[0]
    until(lambda: bench.scopes()[ErrorScope.DEAD_LETTER], seconds=PATIENCE)
    with pytest.raises(BrokerUnavailableError):
        subscription.close()
    assert list(bench.pending) == [entry_id]


def test_s21_a_malformed_entry_is_a_dead_letter_with_its_bytes_and_the_next_ones_come(bench: Bench) -> None:
    bad_id = bench.other.append(bench.stream, b"\xff{")
    bench.send(b"good")
    with bench.subscribe():
        bench.wait_for_calls(1)
        until(lambda: bench.dead, seconds=PATIENCE)
        bench.wait_for_nothing_pending()
    (letter,) = bench.dead
    assert (letter.payload, letter.kind, letter.key) == (b"\xff{", MALFORMED_KIND, bad_id)
    assert (letter.uid, letter.headers[ATTEMPT], letter.headers[SIZE]) == (f"malformed-{bad_id}", "1", "2")
    assert [(report.scope, report.entry_id) for report in bench.reports] == [(ErrorScope.READ, bad_id)]


def test_the_largest_message_and_the_largest_malformed_entry_fit_into_a_dead_letter(bench: Bench) -> None:
    bench.other.append(bench.stream, b"\xff" * 1000)
    bench.send(b"\xff" * 1000)
    with bench.subscribe(raise_value_error):
        until(lambda: len(bench.dead) == 2, seconds=PATIENCE)
        bench.wait_for_nothing_pending()
    assert [letter.payload for letter in bench.dead] == [b"\xff" * 1000] * 2


def test_a_message_that_is_too_large_with_its_reason_is_a_dead_letter_with_its_place(bench: Bench) -> None:
    headers = {"a": "x" * (2 * 1000 + 64 * 1024 - 100)}
    entry_id = bench.backend.publish(bench.stream, EventMessage(b"", headers=headers))
    with bench.subscribe(raise_value_error):
        until(lambda: bench.dead, seconds=PATIENCE)
        bench.wait_for_nothing_pending()
    (letter,) = bench.dead
    assert letter.headers[ID] == entry_id
    assert "a" not in letter.headers


def test_r1_an_entry_that_was_removed_while_pending_is_told_and_does_not_stay(bench: Bench) -> None:
    first, _ = bench.leave_behind(b"0", b"1")
    bench.other.remove(bench.stream, first)
    with bench.subscribe(claim_idle_seconds=0.05):
        bench.wait_for_calls(1)
        bench.wait_for_nothing_pending()
    assert bench.calls == [(b"1", 2)]
    assert "removed while it was pending" in bench.dead[0].headers[REASON]


def test_a_delivery_is_settled_once(bench: Bench) -> None:
    raised: list[DeliverySettledError] = []
    kept: list[ReceivedMessage] = []

    def settle_twice(received: ReceivedMessage) -> None:
        kept.append(received)
        if received.message.payload == b"undecided":
            return
        received.ack()
        for again in (received.ack, lambda: received.nack("x"), lambda: received.retry("x")):
            try:
                again()
            except DeliverySettledError as error:
                raised.append(error)

    with bench.subscribe(settle_twice, ack_mode=AckMode.MANUAL):
        bench.send(b"decided", b"undecided")
        bench.wait_for_calls(2)
        until(lambda: bench.pending and len(bench.pending) == 1, seconds=PATIENCE)
        # Nobody would do it any more.
        until(lambda: _is_over(kept[1]), seconds=PATIENCE)
        kept[1].ack()
    assert len(raised) == 3
    assert bench.pending == {}


def _is_over(received: ReceivedMessage) -> bool:
    try:
        received.retry("too late")
    except DeliverySettledError as error:
        return "cannot be retried after its handler returned" in str(error)
    raise AssertionError("the handler had not returned")


def test_a_handler_that_acknowledged_and_then_raises_is_not_retried(bench: Bench) -> None:
    def acknowledge_and_raise(received: ReceivedMessage) -> None:
        received.ack()
        raise ValueError

    with bench.subscribe(acknowledge_and_raise, retry=RetryPolicy(max_retries=0)):
        bench.send(b"0", b"1")
        bench.wait_for_calls(2)
    assert bench.attempts == [1, 1]
    assert bench.pending == {}
    assert bench.dead == []


# taking over


def test_a_claim_takes_no_more_than_there_are_places_for(bench: Bench) -> None:
    bench.leave_behind(*(b"%d" % number for number in range(10)))
    release = threading.Event()
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 0.06)
    with bench.subscribe(lambda received: release.wait(PATIENCE), max_in_flight=2, claim_idle_seconds=0.05) as found:
        bench.wait_for_calls(2)
        assert Counter(bench.pending.values()) == {"gone": 8, found.consumer: 2}
        release.set()
        bench.wait_for_nothing_pending()
    assert sorted(bench.calls) == [(b"%d" % number, 2) for number in range(10)]


def test_a_claim_that_takes_long_is_not_given_up_when_something_new_comes(bench: Bench) -> None:
    bench.leave_behind(b"old")
    claiming, release = threading.Event(), threading.Event()

    def claim_slowly(*arguments: Any) -> Any:
        found = bench.backend.reclaim_idle(*arguments)
        claiming.set()
        release.wait(PATIENCE)
        return found

    began = time.monotonic()
    until(lambda: time.monotonic() - began > 0.06)
    # Given up, it would come with a third delivery.
    slow = Wrapped(bench.backend, reclaim_idle=claim_slowly)
    with bench.subscribe(backend=slow, claim_idle_seconds=0.05, max_in_flight=2, retry=RetryPolicy(backoff_seconds=0)):
        assert claiming.wait(PATIENCE)
        bench.send(b"new")
        release.set()
        bench.wait_for_calls(2)
    assert sorted(bench.calls) == [(b"new", 1), (b"old", 2)]


def test_new_messages_come_while_a_long_backlog_is_taken_over(bench: Bench) -> None:
    bench.leave_behind(*(b"old" for _ in range(50)))
    bench.send(b"new")
    with bench.subscribe(claim_idle_seconds=0.01, claim_interval_seconds=0.01, retry=RetryPolicy(backoff_seconds=0)):
        bench.wait_for_calls(51)
    assert bench.calls.index((b"new", 1)) < 5


def test_a_handler_that_takes_longer_than_the_claim_idle_time_keeps_its_message(bench: Bench) -> None:
    release = threading.Event()
    with (
        bench.subscribe(lambda received: release.wait(PATIENCE), max_in_flight=2, claim_idle_seconds=1.5),
        bench.subscribe(claim_idle_seconds=1.5),
    ):
        bench.leave_behind(consumer="x")
        bench.send(b"0", b"1", b"2")
        bench.wait_for_calls(3)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 3.3)
        release.set()
        bench.wait_for_nothing_pending()
    assert sorted(bench.calls) == [(b"0", 1), (b"1", 1), (b"2", 1)]


# concurrency


def test_as_many_as_allowed_are_in_flight_and_never_more(bench: Bench) -> None:
    running, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(4)

    def count(received: ReceivedMessage) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(PATIENCE)
        with lock:
            running[0] -= 1

    with bench.subscribe(count, max_in_flight=4):
        bench.send(*(b"%d" % number for number in range(40)))
        bench.wait_for_calls(40)
    assert most == [4]


# errors


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit], ids=str)
def test_s24_a_handler_that_raises_anything_is_told_and_the_loop_goes_on(
    bench: Bench, raised: type[BaseException]
) -> None:
    def fail_on_bad(received: ReceivedMessage) -> None:
        if received.message.payload == b"bad":
            raise raised

    with bench.subscribe(fail_on_bad) as subscription:
        (entry_id, _) = bench.send(b"bad", b"good")
        bench.wait_for_calls(3)
        assert subscription.is_running
    assert bench.calls == [(b"bad", 1), (b"bad", 2), (b"good", 1)]
    assert [(r.scope, r.entry_id, r.attempt) for r in bench.reports] == [
        (ErrorScope.HANDLER, entry_id, 1),
        (ErrorScope.HANDLER, entry_id, 2),
    ]


def test_an_observer_that_raises_or_blocks_holds_nothing_up(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    seen: list[ErrorReport] = []

    def observe(report: ErrorReport) -> None:
        seen.append(report)
        release.wait(PATIENCE)
        raise ValueError("the observer is broken")

    handled: list[bytes] = []

    def handler(received: ReceivedMessage) -> None:
        handled.append(received.message.payload)
        raise ValueError

    subscription = Subscription(
        bench.backend, bench.config(retry=RetryPolicy(max_retries=0)), handler, on_error=observe
    )
    bench.send(b"0", b"1", b"2")
    until(lambda: len(bench.dead) == 3, seconds=PATIENCE)
    assert len(seen) == 1
    release.set()
    subscription.close()
    assert len(seen) == 3
    (logged,) = [record.getMessage() for record in caplog.records if "observer" in record.getMessage()]
    assert "ValueError" in logged
    assert "the observer is broken" not in logged


def test_reports_that_an_observer_is_too_slow_for_are_dropped_and_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    release, started = threading.Event(), threading.Event()
    seen: list[ErrorReport] = []

    def observe(report: ErrorReport) -> None:
        seen.append(report)
        started.set()
        release.wait(PATIENCE)

    thread = ObserverThread(observe, capacity=2)
    report = ErrorReport(ErrorScope.READ, ValueError("x"), bench.stream, GROUP, "me")
    thread.report(report)
    assert started.wait(PATIENCE)
    for _ in range(10):
        thread.report(report)
    release.set()
    thread.close(PATIENCE)
    assert (len(seen), thread.dropped) == (3, 8)
    assert len([record for record in caplog.records if "too slow" in record.getMessage()]) == 1


@pytest.mark.parametrize(("method", "scope"), [("read_new", ErrorScope.READ), ("reclaim_idle", ErrorScope.RECLAIM)])
def test_a_server_that_fails_is_told_and_tried_again(bench: Bench, method: str, scope: ErrorScope) -> None:
    left = [2]
    working = getattr(bench.backend, method)

    def fail_twice(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            fail()
        return working(*arguments)

    bench.send(b"0")
    with bench.subscribe(backend=Wrapped(bench.backend, **{method: fail_twice})):
        bench.wait_for_calls(1)
        until(lambda: bench.scopes()[scope] == 2, seconds=PATIENCE)


def test_r8_a_group_that_is_removed_is_told_and_not_made_again(bench: Bench) -> None:
    subscription = bench.subscribe()
    bench.send(b"0")
    bench.wait_for_calls(1)
    bench.wait_for_nothing_pending()
    bench.other.remove_group(bench.stream, GROUP)
    until(lambda: bench.reports, seconds=PATIENCE)
    assert bench.other.client.xinfo_groups(bench.stream) == []
    # Whoever makes it again gets it going again.
    bench.backend.create_group(bench.stream, GROUP, "$")
    bench.send(b"1")
    bench.wait_for_calls(2)
    bench.wait_for_nothing_pending()
    with pytest.raises(GroupRemovedError):
        subscription.close()


# closing


def test_s25_close_and_abort_forget_the_consumer_once(bench: Bench) -> None:
    for end in (Subscription.close, Subscription.abort):
        wrapped = Wrapped(bench.backend)
        subscription = bench.subscribe(backend=wrapped, consumer="me")
        end(subscription)
        subscription.close()
        assert wrapped.named("forget_consumer") == [(bench.stream, GROUP, "me")]
    assert bench.other.consumers(bench.stream, GROUP) == set()


def test_close_waits_for_handlers_and_sends_their_acknowledgements(bench: Bench) -> None:
    release, closed = threading.Event(), threading.Event()
    subscription = bench.subscribe(lambda received: release.wait(PATIENCE), max_in_flight=3)
    bench.send(b"0", b"1", b"2", b"3")
    bench.wait_for_calls(3)
    closing = threading.Thread(target=lambda: (subscription.close(), closed.set()))
    closing.start()
    until(lambda: not subscription.is_running, seconds=PATIENCE)
    assert not closed.is_set()
    release.set()
    closing.join(PATIENCE)
    assert closed.is_set()
    assert bench.pending == {}
    # What was not fetched is not fetched any more.
    assert len(bench.calls) == 3
    assert bench.other.consumers(bench.stream, GROUP) == set()


def test_close_does_not_wait_longer_than_it_may(bench: Bench) -> None:
    release, late = threading.Event(), []

    def wait(received: ReceivedMessage) -> None:
        release.wait(PATIENCE)
        try:
            received.ack()
        except StreamEndedError as error:
            late.append(error)

    subscription = bench.subscribe(wait, ack_mode=AckMode.MANUAL)
    (entry_id,) = bench.send(b"0")
    bench.wait_for_calls(1)
    began = time.monotonic()
    with raises_with(ShutdownTimeoutError, timeout_seconds=0.1, running=1):
        subscription.close(0.1)
    assert time.monotonic() - began < 3
    release.set()
    until(lambda: late, seconds=PATIENCE, what="the late acknowledgement to be refused")
    # The consumer holds it still, so that it is in the group still, and a peer can take it over.
    assert list(bench.pending) == [entry_id]
    assert len(bench.other.consumers(bench.stream, GROUP)) == 1


def test_close_does_not_wait_for_a_back_off(bench: Bench) -> None:
    subscription = bench.subscribe(raise_value_error, retry=RetryPolicy(backoff_seconds=5.0))
    (entry_id,) = bench.send(b"0")
    bench.wait_for_calls(1)
    began = time.monotonic()
    subscription.close()
    assert time.monotonic() - began < 2
    assert list(bench.pending) == [entry_id]


def test_abort_does_not_wait_for_handlers_and_acknowledges_nothing_more(bench: Bench) -> None:
    release, ended = threading.Event(), threading.Event()

    def wait(received: ReceivedMessage) -> None:
        release.wait(PATIENCE)
        ended.set()

    subscription = bench.subscribe(wait, max_in_flight=2)
    ids = bench.send(b"0", b"1", b"2")
    bench.wait_for_calls(2)
    began = time.monotonic()
    subscription.abort()
    assert time.monotonic() - began < 3
    assert not subscription.is_running
    release.set()
    assert ended.wait(PATIENCE)
    assert list(bench.pending) == ids[:2]


@pytest.mark.parametrize("end", ["abort", "close"])
def test_what_was_fetched_while_it_stopped_is_handled_by_close_only(bench: Bench, end: str) -> None:
    reading, release = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> Any:
        found = bench.backend.read_new(*arguments)
        if found:
            reading.set()
            release.wait(PATIENCE)
        return found

    (entry_id,) = bench.send(b"0")
    before = set(threading.enumerate())
    subscription = bench.subscribe(backend=Wrapped(bench.backend, read_new=read_slowly))
    assert reading.wait(PATIENCE)
    stopping = threading.Thread(target=getattr(subscription, end))
    stopping.start()
    until(lambda: not subscription.is_running, seconds=PATIENCE)
    release.set()
    stopping.join(PATIENCE)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
    if end == "abort":
        assert (bench.calls, list(bench.pending)) == ([], [entry_id])
    else:
        assert (bench.calls, bench.pending) == ([(b"0", 1)], {})


def test_a_handler_cannot_close_what_waits_for_it(bench: Bench) -> None:
    made: list[Subscription] = []
    raised: list[Exception] = []

    def close(received: ReceivedMessage) -> None:
        try:
            made[0].close()
        except InvalidOptionError as error:
            raised.append(error)

    made.append(bench.subscribe(close))
    bench.send(b"0")
    until(lambda: raised, seconds=PATIENCE)
    assert made[0].is_running
    made[0].close()


def test_s9_s23_a_dropped_subscription_says_so_and_delivers_nothing_more(bench: Bench) -> None:
    wrapped = Wrapped(bench.backend)
    subscription = bench.subscribe(backend=wrapped)
    bench.send(b"0")
    bench.wait_for_calls(1)
    bench.wait_for_nothing_pending()
    del subscription
    gc.collect()
    until(lambda: bench.scopes()[ErrorScope.DROP], seconds=PATIENCE)
    until(lambda: wrapped.named("forget_consumer"), seconds=PATIENCE)
    bench.send(b"1")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("subscription")]
    for thread in threads:
        thread.join(PATIENCE)
    assert bench.calls == [(b"0", 1)]
    assert bench.scopes() == {ErrorScope.DROP: 1}


def test_no_thread_and_no_connection_is_left(redis_address: str) -> None:
    before = set(threading.enumerate())
    host, _, port = redis_address.partition(":")
    name = unique_name("client")
    url = StreamUrl.parse(f"redis://{redis_address}/any")
    with redis.Redis(host, int(port)) as client:
        with RedisBackend(url, {"client_name": name}) as backend:
            config = SubscriptionConfig(stream=unique_name(), group=GROUP, dead_letter_stream="dead", max_in_flight=8)
            with Subscription(backend, config, print):
                until(lambda: any(one["name"] == name for one in client.client_list()))
        until(lambda: not any(one["name"] == name for one in client.client_list()))
    until(lambda: set(threading.enumerate()) <= before, what="all threads ended")


# options


def test_s19_without_a_dead_letter_stream_there_is_no_subscription(bench: Bench) -> None:
    for mode in (AckMode.ON_SUCCESS, AckMode.MANUAL):
        with pytest.raises(InvalidOptionError):
            bench.config(ack_mode=mode, dead_letter_stream=None)
    assert bench.config(ack_mode=AckMode.ON_RECEIVE, dead_letter_stream=None).dead_letter_stream is None


@pytest.mark.parametrize(
    "options",
    [
        {"stream": " "},
        {"stream": "a\nb"},
        {"stream": "x" * 1025},
        {"group": "x" * 257},
        {"consumer": ""},
        {"stream": "s", "dead_letter_stream": "s"},
        {"block_seconds": 0.0},
        {"claim_idle_seconds": float("nan")},
        {"claim_interval_seconds": float("inf")},
        {"claim_idle_seconds": 0.3, "retry": RetryPolicy(max_retries=2)},
    ],
    ids=str,
)
def test_options_that_cannot_be(bench: Bench, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        bench.config(**options)


def test_retry_policies_that_cannot_be() -> None:
    for name, value in (("backoff_seconds", -1.0), ("max_backoff_seconds", 5.1), ("backoff_seconds", float("nan"))):
        with pytest.raises(InvalidOptionError):
            RetryPolicy(**{name: value})  # type: ignore[arg-type]


def test_back_offs_double_with_jitter_up_to_5_seconds() -> None:
    policy = RetryPolicy(max_retries=20)
    for attempt, middle in ((1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (1000, 5.0)):
        found: Sequence[float] = [policy.delay(attempt) for _ in range(200)]
        assert all(middle / 2 <= seconds <= min(1.5 * middle, 5.0) for seconds in found)
        assert len(set(found)) > 10
    assert max(policy.delay(1000) for _ in range(200)) == 5.0
