"""Gives the messages of a group to a handler, and takes care of what it leaves undone."""

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

    Messages are handled on threads of its own, at most ``max_in_flight`` at a time; places are claimed before anything
    is fetched, so that nothing waits in memory. Entries that a member which is gone has left behind are taken over, and
    those in hand are kept by a heartbeat for as long as their handler takes. A failed message stays the entry that it
    is, and is delivered again after a back-off; when its budget is spent it becomes a dead letter.

    Args:
        backend: where the stream is; not closed with this. Its group is made if it is not there.
        config: see :class:`stream_consumers.subscription.config.SubscriptionConfig`.
        handler: gets every message, as a :class:`stream_consumers.subscription.received_message.ReceivedMessage`.
        on_error: gets every :class:`stream_consumers.subscription.error_observer.ErrorReport`, on a thread of its own.

    Raises:
        StreamAssetsError: the group could not be made.

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
        """Where the group stood at the start, and whether that is where it was asked to."""
        return self._position

    @property
    def is_running(self) -> bool:
        """Whether it still reads."""
        return self._runtime.is_running

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Stop reading, wait for the handlers, send their acknowledgements, leave the group. Again it does nothing.

        A retry that waits for its back-off is not waited for: its entry stays pending, and is delivered again when
        somebody takes it over.

        Args:
            timeout: seconds for all of it. Handlers that take longer are left alone; their messages stay pending.

        Raises:
            ShutdownTimeoutError: handlers were still running.
            StreamAssetsError: else the first error in acknowledging or publishing a dead letter since the start, or
                that the group was removed.
            InvalidOptionError: called by a handler, which would wait for itself.
        """
        self._finalizer.detach()
        self._runtime.close(timeout)

    def abort(self) -> None:
        """Stop without waiting for handlers; what they do not acknowledge from here on stays pending."""
        self._finalizer.detach()
        self._runtime.abort()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
