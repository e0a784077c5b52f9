"""A message that a handler works on, and what the handler decides about it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stream_consumers.errors import DeliverySettledError
from stream_consumers.subscription.messages import DecodedEntry, Delivery, EventMessage


class ReceivedMessage:
    """A message that a handler works on. The handler may settle it once: acknowledge it, reject it, or ask for a retry.

    Args:
        entry: the entry that was delivered.
        max_attempts: the most times that it is delivered.
        acknowledge: called to acknowledge it.
        reject: called with a reason to make it a dead letter.
        is_settled: whether it was acknowledged before the handler got it.

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
        """Whether it was acknowledged or rejected, or a retry was asked for."""
        return self._is_settled

    @property
    def retry_reason(self) -> str | None:
        """The reason why the handler asked for a retry; ``None`` if it did not."""
        return self._retry_reason

    def ack(self) -> None:
        """Acknowledge the message; returns when the server has confirmed it.

        Raises:
            DeliverySettledError: it was settled before.
            StreamAssetsError: the server has not confirmed it; the message stays pending, and is delivered again.
        """
        self._settle()
        self._acknowledge()

    def nack(self, reason: str) -> None:
        """Reject the message, since it can never be handled: publish a dead letter, then acknowledge it.

        Args:
            reason: the reason, for the dead letter.

        Raises:
            DeliverySettledError: it was settled before.
            StreamAssetsError: the dead letter was not published, or the message was not acknowledged; it stays pending.
        """
        self._settle()
        self._reject(reason)

    def retry(self, reason: str) -> None:
        """Deliver the message again when the handler has returned and the back-off is over, if it has attempts left.

        It keeps its place in the stream, so that other groups see no copy.

        Args:
            reason: the reason, for the dead letter that it becomes if no attempt is left.

        Raises:
            DeliverySettledError: it was settled before, or the handler has returned.
        """
        self._settle(only_within=True)
        self._retry_reason = reason

    def end(self) -> None:
        """The handler has returned; it may not ask for a retry any more."""
        with self._lock:
            self._is_over = True

    def _settle(self, *, only_within: bool = False) -> None:
        with self._lock:
            if self._is_settled or (only_within and self._is_over):
                what = "was settled already" if self._is_settled else "cannot be retried after its handler returned"
                raise DeliverySettledError(
                    f"entry {self.id} {what}",
                    remedy="Call one of ack, nack and retry, once; none with ack_mode on_receive.",
                    attempt=self.delivery.attempt,
                )
            self._is_settled = True
