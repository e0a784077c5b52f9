"""Processes one entry: calls the handler, then acknowledges, retries, or publishes a dead letter."""

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
from stream_consumers.wording import counted

MALFORMED_KIND = "stream-assets.malformed"
REASON, STREAM, GROUP = "dead-letter-reason", "dead-letter-stream", "dead-letter-group"
ID, ATTEMPT, SIZE = "dead-letter-id", "dead-letter-attempt", "dead-letter-size"
MAX_REASON = 2000
MessageHandler = Callable[[ReceivedMessage], object]


class ReportError(Protocol):
    """Reports an error to the observer. One that is ``lasting`` is raised when the subscription is closed, too."""

    def __call__(
        self, scope: ErrorScope, error: BaseException, entry: FetchedEntry | None = None, *, lasting: bool = False
    ) -> None:
        """Pass the error on."""
        ...


class EntryProcessor:
    """Processes entries, each on the thread that calls :meth:`process`.

    Args:
        backend: the backend that the entries come from.
        config: the options of the subscription.
        consumer: this member's name in the group.
        handler: called with every message.
        flusher: sends the acknowledgements.
        report: called with every error; nothing is raised.
        stopping: set when no further retry is to begin.
    """

    def __init__(
        self,
        backend: StreamBackend,
        config: SubscriptionConfig,
        consumer: str,
        handler: MessageHandler,
        *,
        flusher: AckFlusher,
        report: ReportError,
        stopping: threading.Event,
    ) -> None:
        self._backend, self._config, self._consumer, self._handler = backend, config, consumer, handler
        self._flusher, self._report, self._stopping = flusher, report, stopping

    def process(self, entry: FetchedEntry) -> None:
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
            self._report(ErrorScope.READ, error, entry)
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
            acknowledge=lambda: self._acknowledge(entry),
            reject=lambda reason: self._reject(entry, reason),
            is_settled=is_settled,
        )
        failure: BaseException | None = None
        try:
            self._handler(received)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is about its message only
            failure = error
            self._report(ErrorScope.HANDLER, error, entry)
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
            return self._backend.redeliver(self._config.stream, self._config.group, self._consumer, entry.id)
        except Exception as error:  # noqa: BLE001 - the entry stays pending and is reclaimed when it is idle
            self._report(ErrorScope.RECLAIM, error, entry)
            return None

    def _acknowledge(self, entry: FetchedEntry) -> None:
        self._flusher.submit(entry.id).result()

    def _acknowledged(self, entry: FetchedEntry) -> bool:
        """Acknowledge; returns whether that worked. If not, the flusher reports it."""
        try:
            self._acknowledge(entry)
        except Exception:  # noqa: BLE001 - the flusher reported it; the entry stays pending
            return False
        return True

    def _reject(self, entry: FetchedEntry, reason: str) -> None:
        """Publish a dead letter, then acknowledge; an entry without a dead letter is never acknowledged."""
        if self._config.dead_letter_stream is not None:
            try:
                self._publish_dead_letter(self._config.dead_letter_stream, entry, reason)
            except Exception as error:
                self._report(ErrorScope.DEAD_LETTER, error, entry, lasting=True)
                raise
        self._acknowledge(entry)

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


def dead_letter(entry: FetchedEntry, *, stream: str, group: str, reason: str, only_place: bool = False) -> EventMessage:
    """The dead letter of an entry: its message or undecodable bytes, with the place and the reason in the headers.

    Args:
        entry: the entry that failed.
        stream: the stream that it was read from.
        group: the group that gave it up.
        reason: the reason; cut after 2000 characters.
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
