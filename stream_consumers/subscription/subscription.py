"""Calls a handler with the messages of a group, with retries, dead letters and a clean shutdown."""

from __future__ import annotations

import weakref
from typing import TypeVar

from stream_consumers.subscription.backend import StreamBackend
from stream_consumers.subscription.config import SubscriptionConfig
from stream_consumers.subscription.error_observer import ErrorObserver, log_error
from stream_consumers.subscription.messages import GroupPosition
from stream_consumers.subscription.processor import MessageHandler
from stream_consumers.subscription.runtime import SubscriptionRuntime

CLOSE_SECONDS = 30.0
Self = TypeVar("Self", bound="Subscription")


class Subscription:
    """A member of a group that works: reading, handling, retrying, acknowledging (eventbus-core's ``StreamBus``).

    Messages are handled on threads of its own, at most ``max_in_flight`` at a time, and no more are fetched than can be
    handled. Entries that a crashed member left pending are taken over, and entries that are worked on are kept by a
    heartbeat for as long as their handler takes. A failed message is not copied: it is delivered again after a
    back-off, and becomes a dead letter when no attempt is left.

    Args:
        backend: the streaming server; it stays open. The group is created if it does not exist.
        config: see :class:`stream_consumers.subscription.config.SubscriptionConfig`.
        handler: called with every message, a :class:`stream_consumers.subscription.received_message.ReceivedMessage`.
        on_error: called with every :class:`stream_consumers.subscription.error_observer.ErrorReport`, on a thread
            of its own.

    Raises:
        StreamAssetsError: the group could not be created.

    Example:
        >>> import threading
        >>> from stream_consumers.subscription.messages import EventMessage
        >>> from stream_consumers.subscription.memory_backend import MemoryBackend
        >>> backend, seen = MemoryBackend(), threading.Event()
        >>> config = SubscriptionConfig(stream="orders", group="billing", dead_letter_stream="orders.dead")
        >>> with Subscription(backend, config, lambda received: seen.set()):
        ...     _ = backend.publish("orders", EventMessage(b"{}"))
        ...     seen.wait(5)
        True
        >>> backend.pending("orders", "billing")
        {}
    """

    def __init__(
        self,
        backend: StreamBackend,
        config: SubscriptionConfig,
        handler: MessageHandler,
        *,
        on_error: ErrorObserver = log_error,
    ) -> None:
        self._position = backend.create_group(config.stream, config.group, config.start)
        self._runtime = SubscriptionRuntime(backend, config, handler, on_error)
        # The threads know the runtime only, so that they do not keep this alive.
        self._finalizer = weakref.finalize(self, SubscriptionRuntime.drop, self._runtime)
        self._finalizer.atexit = False
        self._runtime.start()

    @property
    def consumer(self) -> str:
        """This member's name."""
        return self._runtime.consumer

    @property
    def position(self) -> GroupPosition:
        """The position of the group at the start, and whether it is the one that was asked for."""
        return self._position

    @property
    def is_running(self) -> bool:
        """Whether it is still reading."""
        return self._runtime.is_running

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Stop reading, wait for the handlers, send their acknowledgements, and leave the group.

        Closing again does nothing. A retry that waits for its back-off is not waited for: its entry stays pending, and
        is delivered again when a member takes it over.

        Args:
            timeout_seconds: for all of that. Handlers that take longer keep running; their messages stay pending.

        Raises:
            ShutdownTimeoutError: handlers were still running.
            StreamAssetsError: otherwise the first lasting error since the start: an acknowledgement or a dead letter
                failed, or the group was removed.
            InvalidOptionError: a handler called it, and would wait for itself.
        """
        self._finalizer.detach()
        self._runtime.close(timeout_seconds)

    def abort(self) -> None:
        """Stop without waiting for handlers; messages that they have not acknowledged stay pending."""
        self._finalizer.detach()
        self._runtime.abort()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
