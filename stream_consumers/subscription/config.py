"""Options of a subscription, checked together."""

from __future__ import annotations

import enum
import itertools
import os
import random
import threading
import time
from dataclasses import dataclass, field

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import MIN_CLAIM_SECONDS, check_range, host_id

MAX_STREAM_BYTES = 1024
MAX_NAME_BYTES = 256
MAX_BACKOFF_SECONDS = 5.0
_numbers = itertools.count()


class AckMode(str, enum.Enum):
    """When a message is acknowledged.

    ``on_receive``: before its handler is called. That is *at most once*: what the handler fails on, or a killed process
    was working on, is gone. ``on_success``: when the handler has returned; one that raises is retried. ``manual``: the
    handler decides by calling ``ack``, ``nack`` or ``retry``; what it leaves undecided is delivered again when it is
    idle. The last two are *at least once*.

    Example:
        >>> SubscriptionConfig(stream="orders", group="billing", ack_mode=AckMode.ON_RECEIVE).ack_mode.value
        'on_receive'
    """

    ON_RECEIVE = "on_receive"
    ON_SUCCESS = "on_success"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The budget of a message, counted by the backend's delivery counter: what a killed process got counts, too.

    Args:
        max_retries: how often it is delivered after the first time; 0 makes the first failure a dead letter, and one
            whose process was killed as well.
        backoff_seconds: before the first retry, twice as long before each next one, give or take a half (eventbus's
            rule).
        max_backoff_seconds: the longest, at most 5.

    Raises:
        InvalidOptionError: a number that makes no sense.

    Example:
        >>> RetryPolicy(max_retries=2).max_attempts
        3
        >>> RetryPolicy(backoff_seconds=0.1).longest_backoff_seconds
        0.6
    """

    max_retries: int = 3
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = MAX_BACKOFF_SECONDS

    def __post_init__(self) -> None:
        check_range("max_retries", self.max_retries)
        check_range("backoff_seconds", self.backoff_seconds)
        check_range("max_backoff_seconds", self.max_backoff_seconds, at_most=MAX_BACKOFF_SECONDS)

    @property
    def max_attempts(self) -> int:
        """How often a message is delivered at most."""
        return self.max_retries + 1

    @property
    def longest_backoff_seconds(self) -> float:
        """The longest wait that can come out."""
        return round(min(1.5 * self._middle(max(1, self.max_retries)), self.max_backoff_seconds), 9)

    def delay(self, attempt: int) -> float:
        """Seconds to wait after so many failed attempts."""
        middle = self._middle(attempt)
        return min(middle / 2 + random.uniform(0.0, middle), self.max_backoff_seconds)  # noqa: S311 - spreads load

    def _middle(self, attempt: int) -> float:
        return min(self.backoff_seconds * 2.0 ** min(attempt - 1, 64), self.max_backoff_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionConfig:
    """What a subscription reads, and how (eventbus's names and defaults where it has them).

    Args:
        stream: what to read.
        group: who shares it.
        consumer: this member's name; a name that stays the same keeps the group small. By default a new one.
        ack_mode: see :class:`AckMode`.
        retry: the budget of each message.
        dead_letter_stream: gets what failed for good, with its bytes. Only with ``on_receive`` it may be left out.
        start: where a new group starts: ``0`` at what is there, ``$`` behind it, or an id.
        max_in_flight: how many messages are worked on at a time; with 1 they stay in order.
        block_seconds: how long one read waits for a message.
        claim_idle_seconds: how long nobody must have touched an entry until it is taken over.
        claim_interval_seconds: how often to look for such entries.
        ack_batch_size: acknowledgements to send together.
        ack_interval_seconds: how long the first of them waits for others.

    Raises:
        InvalidOptionError: naming the option, and what it is at odds with.

    Example:
        >>> SubscriptionConfig(stream="orders", group="billing", dead_letter_stream="orders.dead").start
        '0'
    """

    stream: str
    group: str
    consumer: str | None = None
    ack_mode: AckMode = AckMode.ON_SUCCESS
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter_stream: str | None = None
    start: str = "0"
    max_in_flight: int = 1
    block_seconds: float = 2.0
    claim_idle_seconds: float = 60.0
    claim_interval_seconds: float = 0.5
    ack_batch_size: int = 64
    ack_interval_seconds: float = 0.002

    def __post_init__(self) -> None:
        _check_name("stream", self.stream, MAX_STREAM_BYTES)
        _check_name("group", self.group, MAX_NAME_BYTES)
        if self.consumer is not None:
            _check_name("consumer", self.consumer, MAX_NAME_BYTES)
        if self.dead_letter_stream is not None:
            _check_name("dead_letter_stream", self.dead_letter_stream, MAX_STREAM_BYTES)
        if self.dead_letter_stream == self.stream:
            raise InvalidOptionError(
                f"dead_letter_stream={self.stream!r} is the stream itself: dead letters would be read again",
                remedy="Name another stream.",
            )
        if self.dead_letter_stream is None and self.ack_mode is not AckMode.ON_RECEIVE:
            raise InvalidOptionError(
                f"there is no dead_letter_stream, so that what fails for good would be lost (ack_mode="
                f"{self.ack_mode.value})",
                remedy="Set dead_letter_stream, or choose ack_mode on_receive, which loses it by intention.",
            )
        for name in ("max_in_flight", "ack_batch_size"):
            check_range(name, getattr(self, name), at_least=1)
        for name in ("block_seconds", "claim_interval_seconds", "claim_idle_seconds"):
            check_range(name, getattr(self, name), at_least=MIN_CLAIM_SECONDS)
        check_range("ack_interval_seconds", self.ack_interval_seconds)
        if self.retry.longest_backoff_seconds >= self.claim_idle_seconds:
            raise InvalidOptionError(
                f"the back-off of up to {self.retry.longest_backoff_seconds} s is not below claim_idle_seconds="
                f"{self.claim_idle_seconds}: somebody else would take the message over meanwhile",
                remedy="Make backoff_seconds or max_retries smaller, or claim_idle_seconds longer.",
            )


def new_consumer_name() -> str:
    """A name that nobody else has: host, process, thread, time.

    Example:
        >>> new_consumer_name() == new_consumer_name()
        False
    """
    return f"{host_id()}:{os.getpid()}:{threading.get_native_id()}:{time.time_ns()}-{next(_numbers)}"


def _check_name(option: str, name: str, most: int) -> None:
    if not name.strip() or len(name.encode()) > most or any(ord(letter) < 32 for letter in name):
        raise InvalidOptionError(
            f"{option}={name[:60]!r} is not a name",
            remedy=f"Use 1 to {most} bytes without control characters.",
            bytes=len(name.encode()),
        )
