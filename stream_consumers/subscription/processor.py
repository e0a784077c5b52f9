"""What becomes of one entry: its handler, acknowledgement, retries, dead letter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from stream_consumers.errors import FormatError, SizeLimitError
from stream_consumers.subscription.ack_flusher import AckFlusher
from stream_consumers.subscription.backend import StreamBackend
from stream_consumers.subscription.config import AckMode, SubscriptionConfig
from stream_consumers.subscription.error_observer import ErrorScope
from stream_consumers.subscription.messages import DecodedEntry, EventMessage, FetchedEntry, MalformedEntry
from stream_consumers.subscription.received_message import ReceivedMessage

MALFORMED_KIND = "stream-assets.malformed"
REASON, STREAM, GROUP = "dead-letter-reason", "dead-letter-stream", "dead-letter-group"
ID, ATTEMPT, SIZE = "dead-letter-id", "dead-letter-attempt", "dead-letter-size"
MAX_REASON = 2000
MessageHandler = Callable[[ReceivedMessage], object]


class Tell(Protocol):
    """Tells the observer of an error; one that is ``lasting`` is raised when the subscription is closed, too."""

    def __call__(
        self, scope: ErrorScope, error: BaseException, entry: FetchedEntry | None = None, *, lasting: bool = False
    ) -> None:
        """Pass it on."""
        ...


class EntryProcessor:
    """Works on one entry at a time per thread.

    Args:
        backend: where the entries come from.
        config: of the subscription.
        consumer: this member's name.
        handler: gets every message.
        flusher: acknowledges.
        tell: gets the errors; nothing is raised.
        stopping: set when no further delivery is to begin.
    """

    def __init__(
        self,
        backend: StreamBackend,
        config: SubscriptionConfig,
        consumer: str,
        handler: MessageHandler,
        *,
        flusher: AckFlusher,
        tell: Tell,
        stopping: threading.Event,
    ) -> None:
        self._backend, self._config, self._consumer, self._handler = backend, config, consumer, handler
        self._flusher, self._tell, self._stopping = flusher, tell, stopping

    def process(self, entry: FetchedEntry) -> None:
        """Deliver an entry until it is settled, left pending, or somebody else's."""
        next_entry: FetchedEntry | None = entry
        while next_entry is not None:
            next_entry = self._deliver(next_entry)

    def _deliver(self, entry: FetchedEntry) -> FetchedEntry | None:
        """Deliver once; returns the next delivery if there is to be one at once."""
        if isinstance(entry, MalformedEntry):
            error = FormatError(
                f"entry {entry.id} of {self._config.stream!r}: {entry.error}", remedy="See its producer."
            )
            self._tell(ErrorScope.READ, error, entry)
            self._bury(entry, entry.error)
            return None
        mode, attempt, most = self._config.ack_mode, entry.delivery.attempt, self._config.retry.max_attempts
        if mode is AckMode.ON_RECEIVE:
            # Where it is not known whether that worked, calling the handler could make it twice.
            if self._acknowledged(entry):
                self._call(entry, is_settled=True)
            return None
        if attempt > most:
            reason = f"it was delivered {attempt} times, and max_retries={most - 1} allows {most}; nobody settled it"
            self._bury(entry, reason)
            return None
        return self._handle(entry)

    def _handle(self, entry: DecodedEntry) -> FetchedEntry | None:
        """Call the handler and do what it decides; returns the next delivery if there is to be one at once."""
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
            acknowledge=lambda: self._acknowledge(entry),
            reject=lambda reason: self._reject(entry, reason),
            is_settled=is_settled,
        )
        failure: BaseException | None = None
        try:
            self._handler(received)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is about its message only
            failure = error
            self._tell(ErrorScope.HANDLER, error, entry)
        received.end()
        return received, failure

    def _retry(self, entry: DecodedEntry, reason: str) -> FetchedEntry | None:
        attempt = entry.delivery.attempt
        if attempt >= self._config.retry.max_attempts:
            self._bury(entry, reason)
            return None
        if self._stopping.wait(self._config.retry.delay(attempt)):
            return None
        try:
            # It stays the entry that it is: a copy in the stream would be a new message for every other group.
            return self._backend.redeliver(self._config.stream, self._config.group, self._consumer, entry.id)
        except Exception as error:  # noqa: BLE001 - it stays pending and is found when it is idle
            self._tell(ErrorScope.RECLAIM, error, entry)
            return None

    def _acknowledge(self, entry: FetchedEntry) -> None:
        self._flusher.submit(entry.id).result()

    def _acknowledged(self, entry: FetchedEntry) -> bool:
        """Acknowledge; whether that worked. The flusher tells of it if not."""
        try:
            self._acknowledge(entry)
        except Exception:  # noqa: BLE001 - told by the flusher; the entry stays pending
            return False
        return True

    def _reject(self, entry: FetchedEntry, reason: str) -> None:
        """Publish a dead letter and acknowledge; without the one never the other."""
        if self._config.dead_letter_stream is not None:
            try:
                self._publish_dead_letter(self._config.dead_letter_stream, entry, reason)
            except Exception as error:
                self._tell(ErrorScope.DEAD_LETTER, error, entry, lasting=True)
                raise
        self._acknowledge(entry)

    def _publish_dead_letter(self, stream: str, entry: FetchedEntry, reason: str) -> None:
        source, group = self._config.stream, self._config.group
        try:
            self._backend.publish(stream, dead_letter(entry, stream=source, group=group, reason=reason))
        except SizeLimitError:
            # With its reason the message is larger than it was.
            pointer = dead_letter(entry, stream=source, group=group, reason=reason, only_place=True)
            self._backend.publish(stream, pointer)

    def _bury(self, entry: FetchedEntry, reason: str) -> None:
        try:
            self._reject(entry, reason)
        except Exception:  # noqa: BLE001 - told where it happened; the entry stays pending
            return


def dead_letter(entry: FetchedEntry, *, stream: str, group: str, reason: str, only_place: bool = False) -> EventMessage:
    """The dead letter of an entry: the message itself, or the bytes that are none, and where it was and why.

    Args:
        entry: what failed.
        stream: where it was read.
        group: whose member gave it up.
        reason: why; cut after 2000 letters.
        only_place: leave the message itself out.

    Example:
        >>> from datetime import datetime, timezone
        >>> from stream_consumers.subscription.messages import Delivery, MalformedEntry
        >>> now = datetime.now(timezone.utc)
        >>> entry = MalformedEntry("7-0", "no JSON", b"{", Delivery(1, now, now), 1)
        >>> letter = dead_letter(entry, stream="orders", group="billing", reason=entry.error)
        >>> letter.payload, letter.headers["dead-letter-id"]
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
        if only_place:
            return EventMessage(b"", was.uid[:MAX_REASON], kind=was.kind[:MAX_REASON], headers=place)
        headers = {**was.headers, **place}
        return EventMessage(was.payload, was.uid, was.key, was.kind, was.idempotency_key, headers)
    headers = {**place, SIZE: str(entry.size)}
    return EventMessage(entry.original, f"malformed-{entry.id}", entry.id, MALFORMED_KIND, headers=headers)
