"""The dead letter of an entry: a message with the place and the reason in its headers."""

from __future__ import annotations

from stream_consumers.subscription.messages import DecodedEntry, EventMessage, FetchedEntry

MALFORMED_KIND = "stream-assets.malformed"
REASON, STREAM, GROUP = "dead-letter-reason", "dead-letter-stream", "dead-letter-group"
ID, ATTEMPT, SIZE = "dead-letter-id", "dead-letter-attempt", "dead-letter-size"
MAX_REASON = 2000


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
