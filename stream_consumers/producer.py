"""Producers send messages, the same on every backend; this part checks a message, fills in defaults, and ends once."""

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
    """Sends messages. Close it when done; it is a context manager, and leaving it flushes.

    A backend implements :meth:`_send` and :meth:`_flush`, and :meth:`_end` if there is something to release. One whose
    ``send`` has more parameters overrides it, and passes them on to its :meth:`_send`. What every backend keeps:

    * A message that cannot be sent is refused by ``send``, before it is queued. Whenever ``send`` raises, its message
      was not taken, and those before it are where they were.
    * What the backend has not acknowledged stays queued, in the order of each shard, until a :meth:`flush` succeeds;
      where that cannot be (the client has given a message up, the producer ends), :func:`undelivered` names it.

    Args:
        url: the stream URL; its first stream is the default of ``send``.

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
        # Re-entrant, so that a backend may flush while it sends.
        self._lock = threading.RLock()
        self._ended = False

    def send(
        self, payload: bytes, *, stream: str | None = None, shard: int = 0, timestamp_ms: int | None = None
    ) -> Receipt:
        """Send one message; it is on its way when this returns, and safe after :meth:`flush`.

        Args:
            payload: the bytes.
            stream: the stream key; the first of the URL by default.
            shard: the shard id.
            timestamp_ms: unix milliseconds; now by default.

        Raises:
            ProducerEndedError: the producer was ended.
            InvalidOptionError, InvalidStreamKeyError: there cannot be such a message.
            StreamAssetsError: what was sent before does not arrive. Whatever is raised, this message was not taken.
        """
        return self._send(*self._defaults(stream, shard, timestamp_ms), check_payload(payload))

    def flush(self) -> None:
        """Wait until everything sent is with the backend.

        Raises:
            ProducerEndedError: the producer was closed, which has flushed it.
            StreamAssetsError: ``undelivered`` messages are not known to have arrived. They stay queued, in the order
                of each shard: flush again. Where the error says that they were given up, send them again.
        """
        self._check_not_ended()
        self._flush()

    def close(self) -> None:
        """Flush and end; closing again does nothing.

        Raises:
            StreamAssetsError: as :meth:`flush`; what is counted in it is dropped, as the producer has ended.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._end()

    @abstractmethod
    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        """Send one message. Check again under the lock where a concurrent :meth:`close` would do harm."""

    @abstractmethod
    def _flush(self) -> None:
        """Wait until everything sent is with the backend. Take the lock where a concurrent :meth:`close` does harm."""

    def _end(self) -> None:
        """Flush, and release what is open; called once, without the lock."""
        self._flush()

    def _defaults(self, stream: str | None, shard: int, timestamp_ms: int | None) -> tuple[Shard, int]:
        """The shard and the timestamp of a message, checked, and filled in where they were not given.

        Raises:
            ProducerEndedError: the producer has ended.
            InvalidStreamKeyError, InvalidOptionError: there cannot be such a message.
        """
        self._check_not_ended()
        check_count("shard", shard, at_least=0, at_most=MAX_SHARD)
        target = check_target(self._url, self._stream if stream is None else stream)
        return Shard(target, shard), check_timestamp(timestamp_ms)

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ProducerEndedError(f"the producer of {self._url} has ended", remedy="Create a new one.")


def check_payload(payload: object, *, option: str = "payload") -> bytes:
    """The bytes of a message, as they are now: a buffer may change after it was sent.

    Args:
        payload: what was given.
        option: what to call it in the error: a key and the value of a header are bytes, too.

    Raises:
        InvalidOptionError: it is something else than bytes.

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
    """The headers of a message, as names and bytes; a value that is text becomes UTF-8.

    Args:
        headers: pairs of a name and a value.
        may_be_none: whether there are headers without a value.

    Raises:
        InvalidOptionError: naming the first one that is not a header.

    Example:
        >>> check_headers({"source": "web"}.items())
        [('source', b'web')]
    """
    found = []
    for header in headers:
        if not (isinstance(header, (tuple, list)) and len(header) == 2 and isinstance(header[0], str)):
            raise InvalidOptionError(
                f"{header!r} is not a header", remedy="Give pairs of a name, which is text, and a value of bytes."
            )
        name, value = header
        if not (may_be_none and value is None):
            value = check_payload(value.encode() if isinstance(value, str) else value, option=f"the header {name!r}")
        found.append((name, value))
    return found


def check_target(url: StreamUrl, stream: object) -> str:
    """The key of a stream to send to, if a consumer can name it.

    Args:
        url: of the servers.
        stream: as in a URL; see :meth:`stream_consumers.urls.StreamUrl.stream_key`.

    Raises:
        InvalidStreamKeyError: it is not a stream key, or one that SeaStreamer keeps for itself.

    Example:
        >>> check_target(StreamUrl.parse("memory://shop/clicks"), "orders")
        'orders'
    """
    if not isinstance(stream, str) or stream in {"", "*", WILDCARD, INTERNAL_KEY}:
        raise InvalidStreamKeyError(
            f"{stream!r} is not a stream that a consumer can name", remedy="Give the stream a key like 'orders'."
        )
    return url.stream_key(stream)


def check_timestamp(timestamp_ms: object) -> int:
    """The timestamp of a message: now, unless one was given.

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
    """The same error, with how many messages are not known to have arrived, and to which shards they go.

    Args:
        error: why.
        shards: of each message.
        remedy: what to do about it.

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
