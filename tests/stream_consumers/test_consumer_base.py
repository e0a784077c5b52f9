"""The loop around a poll, and the checks, that all consumers have."""

from __future__ import annotations

import math

import pytest

from stream_consumers.consumer_base import PollingConsumer, end_of
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.messages import Message, Shard
from stream_consumers.options import check_range

MESSAGE = Message(Shard("orders"), 0, 1, b"{}")


class Scripted(PollingConsumer):
    """Answers its polls in order, then that there is nothing; notes how long each might have waited."""

    poll_seconds = 0.002

    def __init__(self, *answers: Message | None) -> None:
        super().__init__()
        self.answers, self.waits = list(answers), list[float]()

    def _poll(self, seconds: float) -> Message | None:
        self.waits.append(seconds)
        return self.answers.pop(0) if self.answers else None

    def close(self) -> None:
        self._closed.set()


def test_without_time_it_polls_once_and_does_not_wait() -> None:
    consumer = Scripted()
    assert (consumer.next(0), consumer.waits) == (None, [0.0])


def test_it_looks_before_it_waits_and_after() -> None:
    consumer = Scripted()
    assert consumer.next(0.01) is None
    first, *waits, last = consumer.waits
    assert (first, last) == (0.0, 0.0)
    assert waits
    assert all(0 < wait <= 0.002 for wait in waits)


def test_a_poll_that_found_nothing_is_no_reason_to_give_up() -> None:
    assert Scripted(None, None, MESSAGE).next(5) == MESSAGE
    assert Scripted(None, None, MESSAGE).next() == MESSAGE


def test_a_closed_consumer_is_not_polled() -> None:
    consumer = Scripted(MESSAGE)
    with consumer:
        pass
    with pytest.raises(StreamEndedError, match="closed"):
        consumer.next(0)
    assert not consumer.waits
    assert list(consumer) == []


def test_an_end_ends_an_iteration() -> None:
    class Ending(Scripted):
        def _poll(self, seconds: float) -> Message | None:
            if not self.answers:
                raise end_of()
            return super()._poll(seconds)

    assert list(Ending(MESSAGE, None, MESSAGE)) == [MESSAGE, MESSAGE]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, -1, 11])
def test_a_number_outside_of_its_range_is_named(value: float | None) -> None:
    with pytest.raises(InvalidOptionError, match=rf"retry_seconds={value} .* >= 0 and <= 10"):
        check_range("retry_seconds", value, at_most=10)


def test_the_limits_of_a_range_belong_to_it_unless_it_must_be_more() -> None:
    check_range("retry_seconds", 0, at_most=10)
    check_range("retry_seconds", 10, at_most=10)
    with pytest.raises(InvalidOptionError, match="> 0"):
        check_range("retry_seconds", 0, more_than=0)
