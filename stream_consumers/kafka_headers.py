"""Headers of Kafka messages."""

from __future__ import annotations

from confluent_kafka import Message as KafkaMessage

NOT_UTF8 = "a header's name is not UTF-8"
# The client lets a UnicodeDecodeError escape as a SystemError, and keeps half a list: asking such a message for its
# headers once more would end the process.
UNREADABLE = (UnicodeDecodeError, SystemError)
HeaderPairs = tuple[tuple[str, "bytes | None"], ...]


def read_headers(message: KafkaMessage) -> tuple[HeaderPairs, str | None]:
    """The headers in order, and why they cannot be read (the client knows names that are UTF-8 only)."""
    try:
        found = message.headers() or ()
    except UNREADABLE:
        return (), NOT_UTF8
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs), None
