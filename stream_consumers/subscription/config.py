"""The options of a subscription: acknowledgements, retries, limits and intervals."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import MIN_CLAIM_SECONDS, check_count, check_name, check_range, choose_fields

MAX_STREAM_BYTES = 1024
MAX_NAME_BYTES = 256
MAX_BACKOFF_SECONDS = 5.0


class AckMode(str, enum.Enum):
    """When a message is acknowledged.

    ``on_receive``: before its handler is called. That is *at most once*: a message is lost if its handler fails or its
    process crashes. ``on_success``: when the handler has returned; if it raises, the message is retried. ``manual``:
    when the handler calls ``ack``, ``nack`` or ``retry``; a message that it does not settle is delivered again when it
    has been idle. The last two are *at least once*.

    Example:
        >>> SubscriptionConfig(stream="orders", group="billing", ack_mode=AckMode.ON_RECEIVE).ack_mode.value
        'on_receive'
    """

    ON_RECEIVE = "on_receive"
    ON_SUCCESS = "on_success"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The retries of a message, counted by the backend's delivery counter: deliveries to crashed consumers count.

    Args:
        max_retries: the most deliveries after the first one; with 0, a message becomes a dead letter as soon as its
            handler fails or its process crashes.
        backoff_seconds: seconds to wait before the first retry, twice as long before each further one, with a random
            deviation of up to a half (eventbus's rule).
        max_backoff_seconds: the longest wait in seconds, at most 5.

    Raises:
        InvalidOptionError: a number is out of its range.

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
        check_count("max_retries", self.max_retries, at_least=0)
        check_range("backoff_seconds", self.backoff_seconds)
        check_range("max_backoff_seconds", self.max_backoff_seconds, at_most=MAX_BACKOFF_SECONDS)

    @property
    def max_attempts(self) -> int:
        """The most times that a message is delivered."""
        return self.max_retries + 1

    @property
    def longest_backoff_seconds(self) -> float:
        """The longest wait that :meth:`delay` returns."""
        return round(min(1.5 * self._middle(max(1, self.max_retries)), self.max_backoff_seconds), 9)

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after ``attempt`` failed attempts, with the random deviation."""
        middle = self._middle(attempt)
        return min(middle / 2 + random.uniform(0.0, middle), self.max_backoff_seconds)  # noqa: S311 - spreads load

    def _middle(self, attempt: int) -> float:
        return min(self.backoff_seconds * 2.0 ** min(attempt - 1, 64), self.max_backoff_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionConfig:
    """The stream and group of a subscription, and how it reads (eventbus's names and defaults where it has them).

    Args:
        stream: the stream to read.
        group: the group whose members share its messages.
        consumer: this member's name, by default a new one. A name that is used again after a restart keeps the group
            small.
        ack_mode: see :class:`AckMode`.
        retry: the retries of each message.
        dead_letter_stream: the stream for messages that failed for good, with their bytes. It may only be left out with
            ``on_receive``.
        start: where a new group starts: ``0`` at the beginning, ``$`` at the end, or after an id.
        max_in_flight: the most messages that are handled at a time; with 1 they stay in order.
        block_seconds: seconds that one read waits for a message.
        claim_idle_seconds: seconds without a heartbeat after which another member claims an entry.
        claim_interval_seconds: seconds between two searches for such entries.
        ack_batch_size: the most acknowledgements that are sent together.
        ack_interval_seconds: seconds that the first of them waits for others.

    Raises:
        InvalidOptionError: an option is out of range, or contradicts another one.

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
        choose_fields(self, ack_mode=AckMode)
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
                f"without dead_letter_stream, messages that fail for good would be lost (ack_mode="
                f"{self.ack_mode.value})",
                remedy="Set dead_letter_stream, or choose ack_mode on_receive, which loses them by design.",
            )
        for name in ("max_in_flight", "ack_batch_size"):
            check_count(name, getattr(self, name))
        for name in ("block_seconds", "claim_interval_seconds", "claim_idle_seconds"):
            check_range(name, getattr(self, name), at_least=MIN_CLAIM_SECONDS)
        check_range("ack_interval_seconds", self.ack_interval_seconds)
        if self.retry.longest_backoff_seconds >= self.claim_idle_seconds:
            raise InvalidOptionError(
                f"the back-off of up to {self.retry.longest_backoff_seconds} s is not below claim_idle_seconds="
                f"{self.claim_idle_seconds}: another member would claim the message meanwhile",
                remedy="Make backoff_seconds or max_retries smaller, or claim_idle_seconds longer.",
            )


def _check_name(option: str, name: str, most: int) -> None:
    check_name(option, name)
    if len(name.encode()) > most or any(ord(letter) < 32 for letter in name):
        raise InvalidOptionError(
            f"{option}={name[:60]!r} is not a valid name",
            remedy=f"Use 1 to {most} bytes without control characters.",
            bytes=len(name.encode()),
        )
