"""Options of a subscription, checked together."""

from __future__ import annotations

import enum
import itertools
import os
import threading
import time
from dataclasses import dataclass, field

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import MIN_CLAIM_SECONDS, host_id
from stream_consumers.subscription.retry_policy import RetryPolicy

MAX_STREAM_BYTES = 1024
MAX_NAME_BYTES = 256
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
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"{name}={getattr(self, name)} does nothing", remedy="Use 1 or more.")
        for name in ("block_seconds", "claim_interval_seconds", "ack_interval_seconds", "claim_idle_seconds"):
            least = MIN_CLAIM_SECONDS if name != "ack_interval_seconds" else 0.0
            if not least <= getattr(self, name) < float("inf"):
                raise InvalidOptionError(f"{name}={getattr(self, name)} is not a time", remedy=f"Use {least} or more.")
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
