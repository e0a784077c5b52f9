"""A message in the hands of its handler."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stream_consumers.errors import DeliverySettledError
from stream_consumers.subscription.messages import DecodedEntry, Delivery, EventMessage


class ReceivedMessage:
    """A message, and what its handler may decide about it: once.

    Args:
        entry: what came.
        max_attempts: how often it is delivered at most.
        acknowledge: acknowledges it.
        reject: makes a dead letter of it, for this reason.
        is_settled: it was acknowledged before the handler got it.

    Example:
        >>> from stream_consumers.subscription.memory_backend import MemoryBackend
        >>> from stream_consumers.subscription.subscription import Subscription
        >>> from stream_consumers.subscription.config import AckMode, SubscriptionConfig
        >>> def handle(received: ReceivedMessage) -> None:
        ...     received.nack("nobody wants it")
        ...     done.set()
        >>> backend, done = MemoryBackend(), threading.Event()
        >>> config = SubscriptionConfig(
        ...     stream="orders", group="billing", dead_letter_stream="orders.dead", ack_mode=AckMode.MANUAL
        ... )
        >>> _ = backend.publish("orders", EventMessage(b"{}"))
        >>> with Subscription(backend, config, handle):
        ...     done.wait(5)
        True
        >>> len(backend.entries("orders.dead")), backend.pending("orders", "billing")
        (1, {})
    """

    def __init__(
        self,
        entry: DecodedEntry,
        *,
        max_attempts: int,
        acknowledge: Callable[[], None],
        reject: Callable[[str], None],
        is_settled: bool = False,
    ) -> None:
        self.id: str = entry.id
        self.message: EventMessage = entry.message
        self.delivery: Delivery = entry.delivery
        self.max_attempts = max_attempts
        self._acknowledge, self._reject = acknowledge, reject
        self._lock = threading.Lock()
        self._is_settled, self._is_over = is_settled, False
        self._retry_reason: str | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it was decided."""
        return self._is_settled

    @property
    def retry_reason(self) -> str | None:
        """Why the handler wants it again; ``None`` if it does not."""
        return self._retry_reason

    def ack(self) -> None:
        """The group is done with it; returns when the server knows.

        Raises:
            DeliverySettledError: it was decided before.
            StreamAssetsError: the server does not know; the message stays pending, and will be delivered again.
        """
        self._settle()
        self._acknowledge()

    def nack(self, reason: str) -> None:
        """It can never be handled: it becomes a dead letter, and is acknowledged when that is published.

        Args:
            reason: why; goes into the dead letter.

        Raises:
            DeliverySettledError: it was decided before.
            StreamAssetsError: no dead letter was published, or it was not acknowledged; the message stays pending.
        """
        self._settle()
        self._reject(reason)

    def retry(self, reason: str) -> None:
        """Deliver it again: after the handler has returned and the back-off is over, if its budget allows that.

        It stays where it is in the stream, so that nobody else sees a copy.

        Args:
            reason: why; goes into the dead letter if the budget is spent.

        Raises:
            DeliverySettledError: it was decided before, or the handler has returned.
        """
        self._settle(only_within=True)
        self._retry_reason = reason

    def end(self) -> bool:
        """The handler has returned; whether it had decided."""
        with self._lock:
            self._is_over = True
            return self._is_settled

    def _settle(self, *, only_within: bool = False) -> None:
        with self._lock:
            if self._is_settled or (only_within and self._is_over):
                what = "was settled already" if self._is_settled else "is not with its handler any more"
                raise DeliverySettledError(
                    f"entry {self.id} {what}",
                    remedy="Call one of ack, nack and retry, once; none with ack_mode on_receive.",
                    attempt=self.delivery.attempt,
                )
            self._is_settled = True
