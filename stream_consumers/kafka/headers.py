"""Headers of Kafka messages."""

from __future__ import annotations

from operator import methodcaller

from confluent_kafka import Message as KafkaMessage

_NOT_UTF8 = "a header's name is not UTF-8"
# The client lets a UnicodeDecodeError escape as a SystemError, and keeps half a list: asking such a message for its
# headers once more would end the process.
_UNREADABLE = (UnicodeDecodeError, SystemError)
# Not message.headers(): where the interpreter has specialised that call it does not look for the error that the client
# leaves behind, and raises it at some later line. This call is always checked.
_ask_headers = methodcaller("headers")
HeaderPairs = tuple[tuple[str, "bytes | None"], ...]


def read_headers(message: KafkaMessage) -> tuple[HeaderPairs, str | None]:
    """The headers in order, and why they cannot be read (the client knows names that are UTF-8 only)."""
    try:
        found = _ask_headers(message)
    except _UNREADABLE:
        return (), _NOT_UTF8
    if not found:
        return (), None
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs), None
