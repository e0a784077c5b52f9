"""The base class of producers: it checks messages, fills in defaults, and closes once."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import InvalidOptionError, InvalidStreamKeyError, ProducerEndedError, StreamAssetsError
from stream_consumers.messages import (
    INTERNAL_KEY,
    MAX_SHARD,
    MAX_TIMESTAMP_MS,
    MIN_TIMESTAMP_MS,
    WILDCARD,
    Receipt,
    Shard,
    now_milliseconds,
)
from stream_consumers.options import check_count
from stream_consumers.urls import StreamUrl


class Producer(ClosesOnExit, ABC):
    """Sends messages; a context manager that flushes on exit. Close it when done.

    A backend implements :meth:`_send` and :meth:`_flush`, and :meth:`_end` if it has resources to release. A backend
    whose ``send`` has more parameters overrides ``send`` and passes them to its :meth:`_send`. Every backend ensures:

    * ``send`` rejects an invalid message before it is queued. If ``send`` raises, its message was not queued, and the
      state of earlier messages did not change.
    * Messages that the backend has not acknowledged stay queued, in the order of each shard, until a :meth:`flush`
      succeeds. If that is impossible (the client has given up a message, or the producer ends), :func:`undelivered`
      counts them in the error.

    Args:
        url: the stream URL; its first stream is the default for ``send``.

    Example:
        >>> from stream_consumers.create import create_producer
        >>> with create_producer("memory://example-producer/orders") as producer:
        ...     receipt = producer.send(b"{}", shard=2, timestamp_ms=1_700_000_000_000)
        ...     receipt.shard, receipt.sequence
        (Shard(stream='orders', id=2), 0)
    """

    def __init__(self, url: str | StreamUrl) -> None:
        url = StreamUrl.parse(url)
        self._url = url
        self._stream = url.required_streams()[0]
        # The lock is re-entrant, so that a backend can flush while it sends.
        self._lock = threading.RLock()
        self._ended = False

    def send(
        self, payload: bytes, *, stream: str | None = None, shard: int = 0, timestamp_ms: int | None = None
    ) -> Receipt:
        """Queue one message; its delivery is confirmed by :meth:`flush`.

        Args:
            payload: the bytes.
            stream: the stream key; by default, the first stream of the URL.
            shard: the shard id.
            timestamp_ms: the timestamp in Unix milliseconds; now by default.

        Raises:
            ProducerEndedError: the producer has ended.
            InvalidOptionError, InvalidStreamKeyError: the message is invalid.
            StreamAssetsError: earlier messages could not be delivered. After any error, this message was not queued.
        """
        return self._send(*self._defaults(stream, shard, timestamp_ms), check_payload(payload))

    def flush(self) -> None:
        """Wait until the backend has acknowledged all messages.

        Raises:
            ProducerEndedError: the producer was closed; closing flushes.
            StreamAssetsError: the fact ``undelivered`` counts messages that may not have arrived. They stay queued, in
                the order of each shard: flush again. If the error says that they were given up, send them again.
        """
        self._check_not_ended()
        self._flush()

    def close(self) -> None:
        """Flush and end; closing again does nothing.

        Raises:
            StreamAssetsError: as :meth:`flush`; the counted messages are dropped, because the producer has ended.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._end()

    @abstractmethod
    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        """Send one message. If a concurrent :meth:`close` could do harm, check again under the lock."""

    @abstractmethod
    def _flush(self) -> None:
        """Wait for all acknowledgements. If a concurrent :meth:`close` could do harm, take the lock."""

    def _end(self) -> None:
        """Flush and release open resources; called once, without the lock."""
        self._flush()

    def _defaults(self, stream: str | None, shard: int, timestamp_ms: int | None) -> tuple[Shard, int]:
        """Return the checked shard and timestamp of a message, with defaults filled in.

        Raises:
            ProducerEndedError: the producer has ended.
            InvalidStreamKeyError, InvalidOptionError: the message is invalid.
        """
        self._check_not_ended()
        check_count("shard", shard, at_least=0, at_most=MAX_SHARD)
        target = check_target(self._url, self._stream if stream is None else stream)
        return Shard(target, shard), check_timestamp(timestamp_ms)

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ProducerEndedError(f"the producer of {self._url} has ended", remedy="Create a new one.")


def check_payload(payload: object, *, option: str = "payload") -> bytes:
    """Return the bytes of a message; a buffer is copied, because it may change after sending.

    Args:
        payload: the payload, or a key or the value of a header.
        option: its name, for the error.

    Raises:
        InvalidOptionError: the payload is not bytes.

    Example:
        >>> check_payload(bytearray(b"{}"))
        b'{}'
        >>> check_payload("{}")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: payload is a str, and a message holds bytes. Encode it first, like \
text.encode(); nothing was sent.
    """
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, (bytearray, memoryview)):
        return bytes(payload)
    raise InvalidOptionError(
        f"{option} is a {type(payload).__name__}, and a message holds bytes",
        remedy="Encode it first, like text.encode(); nothing was sent.",
    )


def check_headers(headers: Iterable[object], *, may_be_none: bool = False) -> list[tuple[str, Any]]:
    """Return the headers of a message as names and bytes; text values are encoded as UTF-8.

    Args:
        headers: pairs of a name and a value.
        may_be_none: whether a value may be ``None``.

    Raises:
        InvalidOptionError: an item is not a header.

    Example:
        >>> check_headers({"source": "web"}.items())
        [('source', b'web')]
    """
    found = []
    for header in headers:
        if not (isinstance(header, (tuple, list)) and len(header) == 2 and isinstance(header[0], str)):
            raise InvalidOptionError(
                f"{header!r} is not a header", remedy="Give pairs of a name (text) and a value (bytes)."
            )
        name, value = header
        if not (may_be_none and value is None):
            value = check_payload(value.encode() if isinstance(value, str) else value, option=f"the header {name!r}")
        found.append((name, value))
    return found


def check_target(url: StreamUrl, stream: object) -> str:
    """Return the key of a stream to send to, if a consumer can subscribe to it.

    Args:
        url: the URL of the servers.
        stream: the key as in a URL; see :meth:`stream_consumers.urls.StreamUrl.stream_key`.

    Raises:
        InvalidStreamKeyError: it is not a stream key, or SeaStreamer reserves it.

    Example:
        >>> check_target(StreamUrl.parse("memory://shop/clicks"), "orders")
        'orders'
    """
    if not isinstance(stream, str) or stream in {"", "*", WILDCARD, INTERNAL_KEY}:
        raise InvalidStreamKeyError(
            f"no consumer can subscribe to the stream {stream!r}", remedy="Give the stream a key like 'orders'."
        )
    return url.stream_key(stream)


def check_timestamp(timestamp_ms: object) -> int:
    """Return the timestamp of a message; now if none is given.

    Raises:
        InvalidOptionError: it is not a whole number of milliseconds in the years 1 to 9999.

    Example:
        >>> check_timestamp(1_700_000_000_000)
        1700000000000
    """
    if timestamp_ms is None:
        return now_milliseconds()
    return check_count("timestamp_ms", timestamp_ms, at_least=MIN_TIMESTAMP_MS, at_most=MAX_TIMESTAMP_MS)


def undelivered(error: StreamAssetsError, shards: Iterable[Shard], *, remedy: str) -> StreamAssetsError:
    """Return the error with the number of undelivered messages, in total and per shard.

    Args:
        error: the reason.
        shards: the shard of each message that may not have arrived.
        remedy: the remedy of the new error.

    Example:
        >>> from stream_consumers.errors import BrokerUnavailableError
        >>> error = BrokerUnavailableError("no answer", remedy="Try again.")
        >>> print(undelivered(error, [Shard("orders"), Shard("orders"), Shard("orders", 1)], remedy="Flush again."))
        no answer (undelivered=3, to=2 to orders/0, 1 to orders/1). Flush again.
    """
    counts: dict[Shard, int] = {}
    for shard in shards:
        counts[shard] = counts.get(shard, 0) + 1
    listed = ", ".join(f"{count} to {shard}" for shard, count in sorted(counts.items()))
    return type(error)(error.what, remedy=remedy, **{**error.facts, "undelivered": sum(counts.values()), "to": listed})
