"""Dead letters as messages of a stream of their own."""

from __future__ import annotations

from stream_consumers.subscription.messages import Decoded, Entry, EventMessage

MALFORMED_KIND = "stream-assets.malformed"
REASON, STREAM, GROUP = "dead-letter-reason", "dead-letter-stream", "dead-letter-group"
ID, ATTEMPT, SIZE = "dead-letter-id", "dead-letter-attempt", "dead-letter-size"
MAX_REASON = 2000


def dead_letter(entry: Entry, *, stream: str, group: str, reason: str, only_place: bool = False) -> EventMessage:
    """The dead letter of an entry: the message itself, or the bytes that are none, and where it was and why.

    Args:
        entry: what failed.
        stream: where it was read.
        group: whose member gave it up.
        reason: why; cut after 2000 letters.
        only_place: leave the message itself out.

    Example:
        >>> from datetime import datetime, timezone
        >>> from stream_consumers.subscription.messages import Delivery, Malformed
        >>> now = datetime.now(timezone.utc)
        >>> entry = Malformed("7-0", "no JSON", b"{", Delivery(1, now, now), 1)
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
    if isinstance(entry, Decoded):
        was = entry.message
        if only_place:
            return EventMessage(b"", was.uid[:MAX_REASON], kind=was.kind[:MAX_REASON], headers=place)
        headers = {**was.headers, **place}
        return EventMessage(was.payload, was.uid, was.key, was.kind, was.idempotency_key, headers)
    headers = {**place, SIZE: str(entry.size)}
    return EventMessage(entry.original, f"malformed-{entry.id}", entry.id, MALFORMED_KIND, headers=headers)
