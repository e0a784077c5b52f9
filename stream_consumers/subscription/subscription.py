"""Calls a handler with the messages of a group, with retries, dead letters and a clean shutdown."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from stream_consumers.errors import (
    FormatError,
    InvalidOptionError,
    ShutdownTimeoutError,
    SizeLimitError,
    StreamEndedError,
    Terminal,
)
from stream_consumers.options import new_consumer_name
from stream_consumers.subscription.ack_flusher import AckFlusher
from stream_consumers.subscription.backend import StreamBackend
from stream_consumers.subscription.config import AckMode, RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.dead_letter import dead_letter
from stream_consumers.subscription.error_observer import (
    ErrorObserver,
    ErrorReport,
    ErrorScope,
    ObserverThread,
    log_error,
)
from stream_consumers.subscription.messages import DecodedEntry, FetchedEntry, GroupPosition, MalformedEntry
from stream_consumers.subscription.received_message import ReceivedMessage
from stream_consumers.wording import counted

CLOSE_SECONDS = 30.0
# The wait for something that must end soon, where the caller has set no time.
SHORT_WAIT_SECONDS = 2.0
TOUCHES_PER_IDLE = 3
_LOOP_BACKOFF = RetryPolicy(backoff_seconds=0.1)
Self = TypeVar("Self", bound="Subscription")
MessageHandler = Callable[[ReceivedMessage], object]


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
        self._runtime = _Runtime(backend, config, handler, on_error)
        # The threads know the runtime only, so that they do not keep this alive.
        self._finalizer = weakref.finalize(self, _Runtime.drop, self._runtime)
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


class _Runtime:
    """The threads of a :class:`Subscription`, and their shutdown.

    They do not refer to the subscription, so that it can be garbage-collected. One thread reads, reclaims and sends
    heartbeats in turn, so that no claim is given up while the server executes it.
    """

    def __init__(
        self, backend: StreamBackend, config: SubscriptionConfig, handler: MessageHandler, observer: ErrorObserver
    ) -> None:
        self._backend, self._config = backend, config
        self.consumer = config.consumer or new_consumer_name()
        self._observer = ObserverThread(observer)
        # The entries that are being worked on; the condition is notified when one is done, and when everything stops.
        self._working: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._is_aborted = self._is_dropped = self._is_closed = False
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None
        self._flusher = AckFlusher(
            lambda ids: backend.ack_many(config.stream, config.group, ids),
            on_error=lambda error, count: self.report(ErrorScope.ACK, error, lasting=True),
            # A batch of more than all messages in flight could never fill up.
            batch_size=min(config.ack_batch_size, config.max_in_flight),
            interval_seconds=config.ack_interval_seconds,
        )
        self._handler = handler
        self._entries: queue.SimpleQueue[FetchedEntry | None] = queue.SimpleQueue()
        self._touch_seconds = config.claim_idle_seconds / TOUCHES_PER_IDLE
        self._next_claim = self._next_touch = 0.0
        self._is_turn_of_new = False
        self._doing = ErrorScope.READ
        self._loop = threading.Thread(target=self._run, name="subscription", daemon=True)
        self._workers = [
            threading.Thread(target=self._work, name=f"subscription-worker-{number}", daemon=True)
            for number in range(config.max_in_flight)
        ]

    @property
    def is_running(self) -> bool:
        """Whether it is still reading."""
        return self._loop.is_alive() and not self._stopping.is_set()

    def start(self) -> None:
        """Start the threads."""
        for thread in (self._loop, *self._workers):
            thread.start()

    def drop(self) -> None:
        """End, since the subscription was garbage-collected without being closed. It takes no lock."""
        self._is_dropped = True

    def report(
        self, scope: ErrorScope, error: BaseException, entry: FetchedEntry | None = None, *, lasting: bool = False
    ) -> None:
        """Report an error to the observer. One that is ``lasting`` is raised when the subscription is closed, too."""
        with self._lock:
            if lasting and self._first_error is None:
                self._first_error = error
        config = self._config
        place = (None, None) if entry is None else (entry.id, entry.delivery.attempt)
        self._observer.report(ErrorReport(scope, error, config.stream, config.group, self.consumer, *place))

    def close(self, timeout_seconds: float) -> None:
        """See :meth:`Subscription.close`."""
        if threading.current_thread() in self._workers:
            raise InvalidOptionError("close was called by a handler", remedy="Call it from another thread, or abort.")
        if not self._begin_to_close():
            return
        deadline = time.monotonic() + timeout_seconds

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        try:
            self._stop()
            self._loop.join(left())
            is_done = not self._loop.is_alive() and self._wait_until(lambda: not self._working, left())
            is_done = self._flusher.close(left()) and is_done
        finally:
            self._leave()
            self._observer.close(left())
        if not is_done:
            raise ShutdownTimeoutError(
                f"the subscription of {self._config.stream!r} was closed, but handlers were still running",
                remedy="Their messages stay pending and are delivered again; allow more time, or less in flight.",
                timeout_seconds=timeout_seconds,
                running=len(self._working),
            )
        if self._first_error is not None:
            raise self._first_error

    def abort(self) -> None:
        """See :meth:`Subscription.abort`."""
        if not self._begin_to_close():
            return
        self._is_aborted = True
        self._stop()
        self._flusher.abort()
        if threading.current_thread() is not self._loop:
            self._loop.join(SHORT_WAIT_SECONDS)
        self._leave()
        self._observer.close(SHORT_WAIT_SECONDS)

    def _begin_to_close(self) -> bool:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    def _stop(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, seconds)

    def _leave(self) -> None:
        """Leave the group, whatever happened before. Only the call that begins to close does it."""
        try:
            self._backend.forget_consumer(self._config.stream, self._config.group, self.consumer)
        except Exception as error:  # noqa: BLE001 - the name stays in the group, and no message is lost
            self.report(ErrorScope.RECLAIM, error)

    # The thread that fetches.

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                if self._is_dropped:
                    error = StreamEndedError(
                        "the subscription was dropped", remedy="Close it when you are done with it."
                    )
                    self.report(ErrorScope.DROP, error)
                    self.abort()
                    return
                failures = 0 if self._turn() else failures + 1
                if failures:
                    # Not longer than until the next heartbeat.
                    self._stopping.wait(min(_LOOP_BACKOFF.delay(failures), self._touch_seconds))
        finally:
            for _ in self._workers:
                self._entries.put(None)

    def _turn(self) -> bool:
        """Send the heartbeat if it is due, and fetch what there is room for; returns false if that failed."""
        most = self._config.max_in_flight
        try:
            self._send_heartbeat()
            seconds = min(SHORT_WAIT_SECONDS, max(0.0, self._next_touch - time.monotonic()))
            self._wait_until(lambda: len(self._working) < most or self._stopping.is_set(), seconds)
            # Only this thread adds entries, so that the room can only grow.
            room = most - len(self._working)
            for entry in self._fetch(room) if room and not self._stopping.is_set() else ():
                # An entry that is worked on already was reclaimed from ourselves.
                if entry.id not in self._working:
                    with self._changed:
                        self._working.add(entry.id)
                    self._entries.put(entry)
        except Exception as error:  # noqa: BLE001 - tried again, since the cause may be repaired
            self.report(self._doing, error, lasting=isinstance(error, Terminal))
            return False
        return True

    def _send_heartbeat(self) -> None:
        """Keep the entries that are worked on, so that neither a peer nor this member reclaims them."""
        now = time.monotonic()
        if now < self._next_touch:
            return
        self._doing = ErrorScope.RECLAIM
        with self._changed:
            ids = sorted(self._working)
        if ids:
            self._backend.touch(self._config.stream, self._config.group, self.consumer, ids)
        self._next_touch = now + self._touch_seconds

    def _fetch(self, room: int) -> list[FetchedEntry]:
        """At most ``room`` entries: idle ones if it is time to reclaim, else new ones."""
        config, now = self._config, time.monotonic()
        if now >= self._next_claim and not self._is_turn_of_new:
            self._doing = ErrorScope.RECLAIM
            self._next_claim = now + config.claim_interval_seconds
            found = self._backend.reclaim_idle(
                config.stream, config.group, self.consumer, config.claim_idle_seconds, room
            )
            if len(found) >= room:
                # There may be more idle entries: reclaim again, but read new ones in between.
                self._next_claim, self._is_turn_of_new = now, True
            if found:
                return found
        self._doing = ErrorScope.READ
        seconds = 0.0 if self._is_turn_of_new else min(config.block_seconds, self._seconds_to_next_duty())
        self._is_turn_of_new = False
        return self._backend.read_new(config.stream, config.group, self.consumer, room, seconds)

    def _seconds_to_next_duty(self) -> float:
        return max(0.0, min(self._next_claim, self._next_touch) - time.monotonic())

    # The threads that call the handler.

    def _work(self) -> None:
        while (entry := self._entries.get()) is not None:
            try:
                if not (self._is_aborted or self._is_dropped):
                    self._process(entry)
            except Exception as error:  # noqa: BLE001 - one entry must not end the thread
                self.report(ErrorScope.HANDLER, error, entry, lasting=True)
            finally:
                with self._changed:
                    self._working.discard(entry.id)
                    self._changed.notify_all()

    def _process(self, entry: FetchedEntry) -> None:
        """Deliver an entry until it is settled, is left pending, or belongs to another member."""
        next_entry: FetchedEntry | None = entry
        while next_entry is not None:
            next_entry = self._deliver(next_entry)

    def _deliver(self, entry: FetchedEntry) -> FetchedEntry | None:
        """Deliver the entry once; returns its next delivery if it is retried now."""
        if isinstance(entry, MalformedEntry):
            error = FormatError(
                f"entry {entry.id} of {self._config.stream!r}: {entry.error}", remedy="Correct its producer."
            )
            self.report(ErrorScope.READ, error, entry)
            self._dead_letter(entry, entry.error)
            return None
        mode, attempt, most = self._config.ack_mode, entry.delivery.attempt, self._config.retry.max_attempts
        if mode is AckMode.ON_RECEIVE:
            # If the acknowledgement may have failed, the entry may be delivered again, and would be handled twice.
            if self._acknowledged(entry):
                self._call(entry, is_settled=True)
            return None
        if attempt > most:
            times = counted(attempt, "time")
            reason = f"it was delivered {times}, and max_retries={most - 1} allows {most}; none settled it"
            self._dead_letter(entry, reason)
            return None
        return self._handle(entry)

    def _handle(self, entry: DecodedEntry) -> FetchedEntry | None:
        """Call the handler and do what it decides; returns the next delivery if the entry is retried now."""
        received, failure = self._call(entry)
        if received.retry_reason is not None:
            return self._retry(entry, received.retry_reason)
        if received.is_settled or self._config.ack_mode is AckMode.MANUAL:
            return None
        if failure is None:
            self._acknowledged(entry)
            return None
        return self._retry(entry, repr(failure))

    def _call(self, entry: DecodedEntry, *, is_settled: bool = False) -> tuple[ReceivedMessage, BaseException | None]:
        received = ReceivedMessage(
            entry,
            max_attempts=self._config.retry.max_attempts,
            acknowledge=lambda: self._flusher.acknowledge(entry.id),
            reject=lambda reason: self._reject(entry, reason),
            is_settled=is_settled,
        )
        failure: BaseException | None = None
        try:
            self._handler(received)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is about its message only
            failure = error
            self.report(ErrorScope.HANDLER, error, entry)
        received.end()
        return received, failure

    def _retry(self, entry: DecodedEntry, reason: str) -> FetchedEntry | None:
        attempt = entry.delivery.attempt
        if attempt >= self._config.retry.max_attempts:
            self._dead_letter(entry, reason)
            return None
        if self._stopping.wait(self._config.retry.delay(attempt)):
            return None
        try:
            # Not a copy in the stream, which would be a new message for every other group.
            return self._backend.redeliver(self._config.stream, self._config.group, self.consumer, entry.id)
        except Exception as error:  # noqa: BLE001 - the entry stays pending and is reclaimed when it is idle
            self.report(ErrorScope.RECLAIM, error, entry)
            return None

    def _acknowledged(self, entry: FetchedEntry) -> bool:
        """Acknowledge; returns whether that worked. If not, the flusher reports it."""
        try:
            self._flusher.acknowledge(entry.id)
        except Exception:  # noqa: BLE001 - the flusher reported it; the entry stays pending
            return False
        return True

    def _reject(self, entry: FetchedEntry, reason: str) -> None:
        """Publish a dead letter, then acknowledge; an entry without a dead letter is never acknowledged."""
        if self._config.dead_letter_stream is not None:
            try:
                self._publish_dead_letter(self._config.dead_letter_stream, entry, reason)
            except Exception as error:
                self.report(ErrorScope.DEAD_LETTER, error, entry, lasting=True)
                raise
        self._flusher.acknowledge(entry.id)

    def _publish_dead_letter(self, stream: str, entry: FetchedEntry, reason: str) -> None:
        source, group = self._config.stream, self._config.group
        try:
            self._backend.publish(stream, dead_letter(entry, stream=source, group=group, reason=reason))
        except SizeLimitError:
            # The reason and the place have made the message larger than it was.
            pointer = dead_letter(entry, stream=source, group=group, reason=reason, only_place=True)
            self._backend.publish(stream, pointer)

    def _dead_letter(self, entry: FetchedEntry, reason: str) -> None:
        try:
            self._reject(entry, reason)
        except Exception:  # noqa: BLE001 - reported where it happened; the entry stays pending
            return
