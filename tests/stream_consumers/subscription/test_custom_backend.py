"""A backend of a user's own, with the five methods that eventbus-core's trait requires: the others are provided."""

from __future__ import annotations

import pytest

from stream_consumers.errors import BrokerUnavailableError
from stream_consumers.subscription.backend import EventMessage, FetchedEntry, GroupPosition, StreamBackend
from stream_consumers.subscription.config import RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.memory_backend import MemoryBackend
from stream_consumers.subscription.subscription import ErrorReport, ReceivedMessage, Subscription
from tests.support.polling import until

STREAM, DEAD, GROUP = "orders", "orders.dead", "billing"
IDLE_SECONDS = 0.3


class FiveMethods(StreamBackend):
    """What somebody writes who brings a backend along from eventbus-core."""

    def __init__(self) -> None:
        self.memory = MemoryBackend()
        self.acknowledged: list[str] = []
        self.fails_at: str | None = None

    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        return self.memory.create_group(stream, group, start)

    def publish(self, stream: str, message: EventMessage) -> str:
        return self.memory.publish(stream, message)

    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        return self.memory.reclaim_idle(stream, group, consumer, min_idle_seconds, count)

    def read_new(self, stream: str, group: str, consumer: str, count: int, timeout: float) -> list[FetchedEntry]:
        return self.memory.read_new(stream, group, consumer, count, timeout)

    def ack(self, stream: str, group: str, entry_id: str) -> int:
        if entry_id == self.fails_at:
            raise BrokerUnavailableError("it does not answer", remedy="Wait.")
        self.acknowledged.append(entry_id)
        return self.memory.ack(stream, group, entry_id)


def handled(*payloads: bytes, failures: int, max_retries: int) -> tuple[FiveMethods, list[int], list[ErrorReport]]:
    """Messages whose handler fails so often for each of them; the attempts, and what was reported."""
    backend, attempts, reports = FiveMethods(), list[int](), list[ErrorReport]()

    def handle(received: ReceivedMessage) -> None:
        attempts.append(received.delivery.attempt)
        if received.delivery.attempt <= failures:
            raise ValueError("not yet")

    config = SubscriptionConfig(
        stream=STREAM,
        group=GROUP,
        dead_letter_stream=DEAD,
        retry=RetryPolicy(max_retries=max_retries, backoff_seconds=0.01),
        max_in_flight=4,
        claim_idle_seconds=IDLE_SECONDS,
        claim_interval_seconds=0.1,
    )
    with Subscription(backend, config, handle, on_error=reports.append):
        for payload in payloads:
            backend.publish(STREAM, EventMessage(payload))
        calls = len(payloads) * (min(failures, max_retries) + 1)
        until(lambda: len(attempts) >= calls and not backend.memory.pending(STREAM, GROUP), what="all settled")
    return backend, attempts, reports


def test_what_failed_is_tried_again_when_it_is_idle() -> None:
    backend, attempts, reports = handled(b"0", failures=1, max_retries=2)
    assert attempts == [1, 2]
    assert backend.acknowledged == ["1-0"]
    assert [(report.scope.value, report.attempt) for report in reports] == [("handler", 1)]


def test_many_are_acknowledged_one_by_one_up_to_the_first_that_fails() -> None:
    backend = FiveMethods()
    for number in range(4):
        backend.publish(STREAM, EventMessage(b"%d" % number))
    backend.create_group(STREAM, GROUP, "0")
    assert len(backend.read_new(STREAM, GROUP, "me", 10, 0)) == 4
    assert backend.ack_many(STREAM, GROUP, ["1-0", "1-0", "2-0"]) == 2
    backend.fails_at = "4-0"
    with pytest.raises(BrokerUnavailableError):
        backend.ack_many(STREAM, GROUP, ["3-0", "4-0"])
    assert list(backend.memory.pending(STREAM, GROUP)) == ["4-0"]
