"""The threads of a subscription: one that fetches, some that handle."""

from __future__ import annotations

import queue
import threading
import time

from stream_consumers.errors import InvalidOptionError, ShutdownTimeoutError, StreamEndedError, Terminal
from stream_consumers.options import new_consumer_name
from stream_consumers.subscription.ack_flusher import AckFlusher
from stream_consumers.subscription.backend import StreamBackend
from stream_consumers.subscription.config import RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.error_observer import ErrorObserver, ErrorReport, ErrorScope, ObserverThread
from stream_consumers.subscription.messages import FetchedEntry
from stream_consumers.subscription.processor import EntryProcessor, MessageHandler

# The wait for something that must end soon, where the caller has set no time.
SHORT_WAIT_SECONDS = 2.0
TOUCHES_PER_IDLE = 3
_LOOP_BACKOFF = RetryPolicy(backoff_seconds=0.1)


class InFlight:
    """Limits the messages that are worked on at a time: places are claimed before anything is fetched.

    Args:
        limit: the number of places.

    Example:
        >>> places = InFlight(2)
        >>> places.claim(0.0), places.claim(0.0)
        (2, 0)
        >>> places.enter("1-0"), places.enter("1-0"), places.ids
        (True, False, ['1-0'])
        >>> places.release(1)
        >>> places.leave("1-0")
        >>> places.wait_until_empty(0.0)
        True
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._entries: set[str] = set()
        self._is_woken = False
        self._changed = threading.Condition()

    @property
    def ids(self) -> list[str]:
        """The entries that are being worked on."""
        with self._changed:
            return sorted(self._entries)

    def claim(self, timeout_seconds: float) -> int:
        """Take all free places, waiting at most ``timeout_seconds`` for one; returns their number."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._free <= 0 and not self._is_woken:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            claimed, self._free = max(0, self._free), min(0, self._free)
            return claimed

    def enter(self, entry_id: str) -> bool:
        """Put an entry into a claimed place; returns false if it is in one already."""
        with self._changed:
            if entry_id in self._entries:
                return False
            self._entries.add(entry_id)
            return True

    def leave(self, entry_id: str) -> None:
        """Free the place of an entry that was processed."""
        with self._changed:
            self._entries.discard(entry_id)
            self._free += 1
            self._changed.notify_all()

    def release(self, places: int) -> None:
        """Free claimed places that were not needed."""
        with self._changed:
            self._free += places
            self._changed.notify_all()

    def wake(self) -> None:
        """End every wait for a place, now and later."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Wait until no entry is worked on; returns whether that came within ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout_seconds)


class SubscriptionRuntime:
    """The threads of a :class:`stream_consumers.subscription.subscription.Subscription`, and their shutdown.

    One thread reads, reclaims and sends heartbeats in turn, so that no claim is given up while the server executes it.
    """

    def __init__(
        self, backend: StreamBackend, config: SubscriptionConfig, handler: MessageHandler, observer: ErrorObserver
    ) -> None:
        self._backend, self._config = backend, config
        self.consumer = config.consumer or new_consumer_name()
        self._observer = ObserverThread(observer)
        self._places = InFlight(config.max_in_flight)
        self._stopping = threading.Event()
        self._is_aborted = self._is_dropped = self._is_closed = False
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None
        self._flusher = AckFlusher(
            lambda ids: backend.ack_many(config.stream, config.group, ids),
            on_error=lambda error, count: self.report(ErrorScope.ACK, error, lasting=True),
            # A batch of more than all places could never fill up.
            batch_size=min(config.ack_batch_size, config.max_in_flight),
            interval_seconds=config.ack_interval_seconds,
        )
        self._processor = EntryProcessor(
            backend, config, self.consumer, handler, flusher=self._flusher, report=self.report, stopping=self._stopping
        )
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
        """See :class:`stream_consumers.subscription.processor.ReportError`."""
        with self._lock:
            if lasting and self._first_error is None:
                self._first_error = error
        config = self._config
        place = (None, None) if entry is None else (entry.id, entry.delivery.attempt)
        self._observer.report(ErrorReport(scope, error, config.stream, config.group, self.consumer, *place))

    def close(self, timeout_seconds: float) -> None:
        """See :meth:`stream_consumers.subscription.subscription.Subscription.close`."""
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
            is_done = not self._loop.is_alive() and self._places.wait_until_empty(left())
            is_done = self._flusher.close(left()) and is_done
        finally:
            self._leave()
            self._observer.close(left())
        if not is_done:
            raise ShutdownTimeoutError(
                f"the subscription of {self._config.stream!r} was closed, but handlers were still running",
                remedy="Their messages stay pending and are delivered again; allow more time, or less in flight.",
                timeout_seconds=timeout_seconds,
                running=len(self._places.ids),
            )
        if self._first_error is not None:
            raise self._first_error

    def abort(self) -> None:
        """See :meth:`stream_consumers.subscription.subscription.Subscription.abort`."""
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
        self._places.wake()

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
        """Send the heartbeat if it is due, and fetch what there are places for; returns false if that failed."""
        room, found = 0, 0
        try:
            self._send_heartbeat()
            room = self._places.claim(min(SHORT_WAIT_SECONDS, max(0.0, self._next_touch - time.monotonic())))
            for entry in self._fetch(room) if room and not self._stopping.is_set() else ():
                # An entry that is worked on already was reclaimed from ourselves.
                if self._places.enter(entry.id):
                    found += 1
                    self._entries.put(entry)
        except Exception as error:  # noqa: BLE001 - tried again, since the cause may be repaired
            self.report(self._doing, error, lasting=isinstance(error, Terminal))
            return False
        finally:
            self._places.release(room - found)
        return True

    def _send_heartbeat(self) -> None:
        """Keep the entries that are worked on, so that neither a peer nor this member reclaims them."""
        now = time.monotonic()
        if now < self._next_touch:
            return
        self._doing = ErrorScope.RECLAIM
        ids = self._places.ids
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
                    self._processor.process(entry)
            except Exception as error:  # noqa: BLE001 - one entry must not end the thread
                self.report(ErrorScope.HANDLER, error, entry, lasting=True)
            finally:
                self._places.leave(entry.id)
