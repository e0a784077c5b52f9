"""Calls a handler with the messages of a group, with retries, dead letters and a clean shutdown."""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from stream_consumers.display import counted
from stream_consumers.errors import (
    DeliverySettledError,
    FormatError,
    InvalidOptionError,
    ShutdownTimeoutError,
    SizeLimitError,
    StreamEndedError,
    Terminal,
    log_text,
)
from stream_consumers.options import choose_fields, new_consumer_name
from stream_consumers.subscription.backend import (
    DecodedEntry,
    Delivery,
    EventMessage,
    FetchedEntry,
    GroupPosition,
    MalformedEntry,
    StreamBackend,
)
from stream_consumers.subscription.config import AckMode, RetryPolicy, SubscriptionConfig

_log = logging.getLogger(__name__)
MALFORMED_KIND = "stream-assets.malformed"
REASON, STREAM, GROUP = "dead-letter-reason", "dead-letter-stream", "dead-letter-group"
ID, ATTEMPT, SIZE = "dead-letter-id", "dead-letter-attempt", "dead-letter-size"
MAX_REASON = 2000
CLOSE_SECONDS = 30.0
# Seconds to wait for an operation that should end soon, unless the caller has set a time.
SHORT_WAIT_SECONDS = 2.0
TOUCHES_PER_IDLE = 3
_LOOP_BACKOFF = RetryPolicy(backoff_seconds=0.1)
Self = TypeVar("Self", bound="Subscription")
MessageHandler = Callable[["ReceivedMessage"], object]


class ReceivedMessage:
    """A message for a handler, which may settle it once: acknowledge it, reject it, or request a retry.

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
        ...     received.nack("it is not for us")
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
        """Whether it was acknowledged or rejected, or a retry was requested."""
        return self._is_settled

    @property
    def retry_reason(self) -> str | None:
        """The reason why the handler requested a retry; ``None`` if it did not."""
        return self._retry_reason

    def ack(self) -> None:
        """Acknowledge the message, and return once the server has confirmed it.

        Raises:
            DeliverySettledError: it was settled before.
            StreamAssetsError: the server has not confirmed it; the message stays pending, and is delivered again.
        """
        self._settle()
        self._acknowledge()

    def nack(self, reason: str) -> None:
        """Reject a message that can never be handled: publish a dead letter, then acknowledge it.

        Args:
            reason: the reason, for the dead letter.

        Raises:
            DeliverySettledError: it was settled before.
            StreamAssetsError: the dead letter was not published, or the message was not acknowledged; it stays pending.
        """
        self._settle()
        self._reject(reason)

    def retry(self, reason: str) -> None:
        """Request another delivery, after the handler has returned and the back-off is over, if attempts are left.

        The message stays in its place in the stream, so that other groups see no copy.

        Args:
            reason: the reason, for the dead letter that it becomes if no attempt is left.

        Raises:
            DeliverySettledError: it was settled before, or the handler has returned.
        """
        self._settle(only_within=True)
        self._retry_reason = reason

    def end(self) -> None:
        """Record that the handler has returned, after which it cannot request a retry."""
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


class ErrorScope(str, enum.Enum):
    """The operation that failed (eventbus's scopes).

    ``read``: reading entries, or a malformed entry. ``reclaim``: taking entries over, keeping them by a heartbeat, or
    delivering them again. ``ack``: acknowledging. ``dead_letter``: publishing a dead letter. ``handler``: the handler
    raised. ``drop``: the subscription was garbage-collected without being closed.

    Example:
        >>> ErrorScope("handler") is ErrorScope.HANDLER
        True
    """

    READ = "read"
    RECLAIM = "reclaim"
    ACK = "ack"
    DEAD_LETTER = "dead_letter"
    HANDLER = "handler"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """One error, and the subscription and entry that it belongs to.

    Args:
        scope: the operation that failed.
        error: the exception.
        stream: the stream of the subscription.
        group: the group of the subscription.
        consumer: the name of the group's member.
        entry_id: the entry that the error belongs to; ``None`` without one.
        attempt: the number of the entry's delivery, from 1.

    Example:
        >>> report = ErrorReport(ErrorScope.HANDLER, ValueError("no"), "orders", "billing", "me", "7-0", 2)
        >>> report.scope.value, report.attempt
        ('handler', 2)
    """

    scope: ErrorScope
    error: BaseException
    stream: str
    group: str
    consumer: str
    entry_id: str | None = None
    attempt: int | None = None

    def __post_init__(self) -> None:
        choose_fields(self, scope=ErrorScope)


ErrorObserver = Callable[[ErrorReport], None]


def log_error(report: ErrorReport) -> None:
    """Log a warning without the text of a handler's error, which may repeat the message; the default observer.

    Example:
        >>> observe: ErrorObserver = log_error
        >>> observe(ErrorReport(ErrorScope.READ, ValueError("no"), "orders", "billing", "me"))
    """
    place = f" entry {report.entry_id} (attempt {report.attempt})" if report.entry_id else ""
    said = log_text(report.error)
    _log.warning("%s of %r as %r:%s %s", report.scope.value, report.stream, report.group, place, said)


class ObserverThread:
    """Calls an observer on a thread of its own.

    Its first error is logged; reports are dropped while the observer is too slow.

    Args:
        observer: gets the reports in order.
        capacity: the most reports that may wait for it.
    """

    def __init__(self, observer: ErrorObserver, *, capacity: int = 1000) -> None:
        self.dropped = 0
        self._observer, self._capacity = observer, capacity
        # SimpleQueue.put may be called anywhere, even during a garbage collection.
        self._reports: queue.SimpleQueue[ErrorReport | None] = queue.SimpleQueue()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="error-observer", daemon=True)
        self._thread.start()

    def report(self, report: ErrorReport) -> None:
        """Pass a report to the observer, without waiting and without raising an error."""
        if self._reports.qsize() >= self._capacity:
            if not self.dropped:
                _log.warning("the error observer is too slow: reports are dropped (capacity=%d)", self._capacity)
            self.dropped += 1
        else:
            self._reports.put(report)

    def close(self, timeout_seconds: float) -> None:
        """Wait at most ``timeout_seconds`` until the observer has got every report."""
        self._reports.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, timeout_seconds))

    def _run(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._observer(report)
            except BaseException as error:  # noqa: BLE001 - an observer must not end what it observes
                if not self._has_failed:
                    _log.warning(
                        "the error observer raised an error, and its later ones are not logged: %s", log_text(error)
                    )
                self._has_failed = True


def dead_letter(entry: FetchedEntry, *, stream: str, group: str, reason: str, is_pointer: bool = False) -> EventMessage:
    """Make the dead letter of an entry: its message or bytes, with its origin and the reason in the headers.

    Args:
        entry: the entry that failed.
        stream: the stream that it was read from.
        group: the group that could not process it.
        reason: the reason, which is truncated to 2000 characters.
        is_pointer: whether to leave the message itself out.

    Example:
        >>> from datetime import datetime, timezone
        >>> from stream_consumers.subscription.backend import Delivery, MalformedEntry
        >>> now = datetime.now(timezone.utc)
        >>> entry = MalformedEntry("7-0", "no JSON", b"{", Delivery(1, now, now), 1)
        >>> found = dead_letter(entry, stream="orders", group="billing", reason=entry.error)
        >>> found.payload, found.headers["dead-letter-id"]
        (b'{', '7-0')
    """
    place = {
        REASON: reason[:MAX_REASON].encode("utf-8", "replace").decode(),
        STREAM: stream,
        GROUP: group,
        ID: entry.id,
        ATTEMPT: str(entry.delivery.attempt),
    }
    if isinstance(entry, DecodedEntry):
        was = entry.message
        if is_pointer:
            return EventMessage(b"", was.uid[:MAX_REASON], kind=was.kind[:MAX_REASON], headers=place)
        headers = {**was.headers, **place}
        return EventMessage(was.payload, was.uid, was.key, was.kind, was.idempotency_key, headers)
    headers = {**place, SIZE: str(entry.size)}
    original = b"" if is_pointer else entry.original
    return EventMessage(original, f"malformed-{entry.id}", entry.id, MALFORMED_KIND, headers=headers)


class Subscription:
    """A member of a group that reads, handles, retries and acknowledges messages (eventbus-core's ``StreamBus``).

    Background threads handle at most ``max_in_flight`` messages at a time, and no more are fetched than can be handled.
    Entries that a crashed member left pending are claimed, and a heartbeat keeps the entries of a running handler. A
    failed message is not copied: it is delivered again after a back-off, and becomes a dead letter when no attempt is
    left.

    Args:
        backend: the streaming server; it stays open. The group is created if it does not exist.
        config: see :class:`stream_consumers.subscription.config.SubscriptionConfig`.
        handler: called with every message, a :class:`stream_consumers.subscription.subscription.ReceivedMessage`.
        on_error: called with every :class:`stream_consumers.subscription.subscription.ErrorReport`, on a thread
            of its own.

    Raises:
        StreamAssetsError: the group could not be created.

    Example:
        >>> import threading
        >>> from stream_consumers.subscription.backend import EventMessage
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
        # The threads refer to the runtime only, so that this object can be garbage-collected.
        self._finalizer = weakref.finalize(self, _Runtime.drop, self._runtime)
        self._finalizer.atexit = False
        self._runtime.start()

    @property
    def consumer(self) -> str:
        """This member's name."""
        return self._runtime.consumer

    @property
    def position(self) -> GroupPosition:
        """The position of the group at the start, and whether it is the requested one."""
        return self._position

    @property
    def is_running(self) -> bool:
        """Whether it is still reading."""
        return self._runtime.is_running

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Stop reading, wait for the handlers, send their acknowledgements, and leave the group.

        Closing again does nothing. A message in its back-off is not retried: its entry stays pending, and is delivered
        again when a member claims it.

        Args:
            timeout_seconds: for all of that. Handlers that take longer keep running; their messages stay pending.

        Raises:
            ShutdownTimeoutError: handlers were still running.
            StreamAssetsError: otherwise the first lasting error since the start: an acknowledgement or a dead letter
                failed, or the group was removed.
            InvalidOptionError: a handler called this, so that it would wait for itself.
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
    heartbeats in turn, so that no claim is abandoned while the server executes it.
    """

    def __init__(
        self, backend: StreamBackend, config: SubscriptionConfig, handler: MessageHandler, observer: ErrorObserver
    ) -> None:
        self._backend, self._config = backend, config
        self.consumer = config.consumer or new_consumer_name()
        self._observer = ObserverThread(observer)
        # The entries that are being handled; the condition is notified when one is done, and when all threads stop.
        self._working: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._is_aborted = self._is_dropped = self._is_closed = False
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None
        self._flusher = AckFlusher(
            lambda ids: backend.ack_many(config.stream, config.group, ids),
            on_error=lambda error, count: self.report(ErrorScope.ACK, error, lasting=True),
            # A batch larger than the number of messages in flight would never be full.
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
        """Stop, because the subscription was garbage-collected without being closed; this acquires no lock."""
        self._is_dropped = True

    def report(
        self, scope: ErrorScope, error: BaseException, entry: FetchedEntry | None = None, *, lasting: bool = False
    ) -> None:
        """Report an error to the observer; a ``lasting`` one is also raised when the subscription is closed."""
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
                remedy="Their messages stay pending and are delivered again. Allow more time, or lower max_in_flight.",
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
        """Leave the group, even after errors; only the first call of close or abort does this."""
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
                        "the subscription was garbage-collected without being closed", remedy="Close it after use."
                    )
                    self.report(ErrorScope.DROP, error)
                    self.abort()
                    return
                failures = 0 if self._turn() else failures + 1
                if failures:
                    # The wait ends before the next heartbeat.
                    self._stopping.wait(min(_LOOP_BACKOFF.delay(failures), self._touch_seconds))
        finally:
            for _ in self._workers:
                self._entries.put(None)

    def _turn(self) -> bool:
        """Send the heartbeat if it is due, and fetch as many entries as have room; return whether that succeeded."""
        most = self._config.max_in_flight
        try:
            self._send_heartbeat()
            seconds = min(SHORT_WAIT_SECONDS, max(0.0, self._next_touch - time.monotonic()))
            self._wait_until(lambda: len(self._working) < most or self._stopping.is_set(), seconds)
            # Only this thread adds entries, so the room cannot shrink.
            room = most - len(self._working)
            for entry in self._fetch(room) if room and not self._stopping.is_set() else ():
                # An entry that a handler already has was reclaimed from this member itself.
                if entry.id not in self._working:
                    with self._changed:
                        self._working.add(entry.id)
                    self._entries.put(entry)
        except Exception as error:  # noqa: BLE001 - retried, because the cause may be repaired
            self.report(self._doing, error, lasting=isinstance(error, Terminal))
            return False
        return True

    def _send_heartbeat(self) -> None:
        """Keep the entries that are being handled, so that neither a peer nor this member reclaims them."""
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
        """Return at most ``room`` entries: idle ones if it is time to reclaim, else new ones."""
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
        """Deliver an entry until it is settled, stays pending, or belongs to another member."""
        next_entry: FetchedEntry | None = entry
        while next_entry is not None:
            next_entry = self._deliver(next_entry)

    def _deliver(self, entry: FetchedEntry) -> FetchedEntry | None:
        """Deliver the entry once; return its next delivery if it is retried now."""
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
        """Call the handler and apply its decision; return the next delivery if the entry is retried now."""
        received, failure = self._call(entry)
        if received.retry_reason is not None:
            return self._retry(entry, received.retry_reason)
        if received.is_settled or self._config.ack_mode is AckMode.MANUAL:
            return None
        if failure is None:
            self._acknowledged(entry)
            return None
        return self._retry(entry, f"{type(failure).__name__}: {failure}")

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
        except BaseException as error:  # noqa: BLE001 - an error of a handler fails its message only
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
            # The message is not copied in the stream, because every other group would get the copy as a new message.
            return self._backend.redeliver(self._config.stream, self._config.group, self.consumer, entry.id)
        except Exception as error:  # noqa: BLE001 - the entry stays pending and is reclaimed when it is idle
            self.report(ErrorScope.RECLAIM, error, entry)
            return None

    def _acknowledged(self, entry: FetchedEntry) -> bool:
        """Acknowledge an entry; return whether that succeeded. The flusher reports a failure."""
        try:
            self._flusher.acknowledge(entry.id)
        except Exception:  # noqa: BLE001 - the flusher reported it; the entry stays pending
            return False
        return True

    def _reject(self, entry: FetchedEntry, reason: str) -> None:
        """Publish a dead letter, then acknowledge the entry; without a dead letter it is never acknowledged."""
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
            # The headers with reason and origin have made the message too large.
            pointer = dead_letter(entry, stream=source, group=group, reason=reason, is_pointer=True)
            self._backend.publish(stream, pointer)

    def _dead_letter(self, entry: FetchedEntry, reason: str) -> None:
        try:
            self._reject(entry, reason)
        except Exception:  # noqa: BLE001 - reported where it happened; the entry stays pending
            return


@dataclass(eq=False)
class _Batch:
    """The ids of a batch, and the result of sending it."""

    ids: list[str] = field(default_factory=list)
    answer: Future[None] = field(default_factory=Future)


class AckFlusher:
    """Collects acknowledgements for a moment and sends them in one batch (eventbus's ack flusher).

    The first thread that acknowledges opens a batch, and sends it when it is full or its interval has passed. If that
    fails, each thread of the batch gets the error, ``on_error`` is called once, and the entries stay pending.

    Args:
        send: called with the ids of a batch; it acknowledges them.
        on_error: called with the error and the number of ids when a batch could not be sent.
        batch_size: the number of acknowledgements that fill a batch.
        interval_seconds: seconds that a batch waits for more acknowledgements.

    Example:
        >>> sent = []
        >>> flusher = AckFlusher(sent.append, on_error=print, batch_size=1)
        >>> flusher.acknowledge("1-0")
        >>> sent, flusher.close(1.0)
        ([['1-0']], True)
    """

    def __init__(
        self,
        send: Callable[[Sequence[str]], object],
        *,
        on_error: Callable[[Exception, int], None],
        batch_size: int = 64,
        interval_seconds: float = 0.002,
    ) -> None:
        self._send, self._on_error = send, on_error
        self._batch_size, self._interval = batch_size, interval_seconds
        self._changed = threading.Condition()
        self._open: _Batch | None = None
        self._unsent = 0
        self._is_closing = self._is_aborted = False

    def acknowledge(self, entry_id: str) -> None:
        """Acknowledge an entry, and return once the server has confirmed it.

        Raises:
            StreamEndedError: the flusher was closed; the entry stays pending.
        """
        with self._changed:
            if self._is_closing:
                raise _closed()
            batch = self._open or _Batch()
            batch.ids.append(entry_id)
            is_first, is_full = self._open is None, len(batch.ids) >= self._batch_size
            self._open = None if is_full else batch
            self._unsent += is_first
            if is_full:
                self._changed.notify_all()
            elif is_first:
                self._changed.wait_for(lambda: self._open is not batch or self._is_closing, self._interval)
                self._open = None if self._open is batch else self._open
        if is_first:
            self._send_batch(batch)
        batch.answer.result()

    def _send_batch(self, batch: _Batch) -> None:
        try:
            if self._is_aborted:
                batch.answer.set_exception(_closed())
                return
            self._send(batch.ids)
            batch.answer.set_result(None)
        except Exception as error:  # noqa: BLE001 - each thread that waits gets the error
            self._on_error(error, len(batch.ids))
            batch.answer.set_exception(error)
        finally:
            with self._changed:
                self._unsent -= 1
                self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Send all waiting acknowledgements; return whether that ended within ``timeout_seconds``."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._unsent, max(0.0, timeout_seconds))

    def abort(self) -> None:
        """Send no more acknowledgements; every waiting thread gets an error."""
        with self._changed:
            self._is_closing = self._is_aborted = True
            self._changed.notify_all()


def _closed() -> StreamEndedError:
    return StreamEndedError("the subscription was closed", remedy="The entry stays pending, and is delivered again.")
