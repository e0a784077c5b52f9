"""The part of a producer that is the same on every backend: defaults of a message, and ending once."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import ProducerEndedError
from stream_consumers.messages import Receipt, Shard, now_milliseconds
from stream_consumers.urls import StreamUrl


class ProducerBase(ClosesOnExit, ABC):
    """A producer that fills in the defaults of a message and ends once; leaving its ``with`` block closes it.

    A backend implements :meth:`_send` and :meth:`flush`, and :meth:`_end` if there is something to release. One whose
    ``send`` has more parameters overrides it, and passes them on to its :meth:`_send`.

    Args:
        url: the stream URL; its first stream is the default of ``send``.

    Example:
        >>> class Printer(ProducerBase):
        ...     def _send(self, shard, timestamp_ms, payload):
        ...         print(shard, payload)
        ...         return Receipt(shard, 0, timestamp_ms)
        ...
        ...     def flush(self):
        ...         pass
        >>> with Printer(StreamUrl.parse("printer://room/orders")) as printer:
        ...     receipt = printer.send(b"{}", timestamp_ms=1000)
        orders/0 b'{}'
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
        """See :meth:`stream_consumers.consumer.Producer.send`."""
        return self._send(*self._defaults(stream, shard, timestamp_ms), payload)

    @abstractmethod
    def flush(self) -> None:
        """See :meth:`stream_consumers.consumer.Producer.flush`."""

    def close(self) -> None:
        """Flush and end; closing again does nothing.

        Raises:
            StreamAssetsError: as :meth:`flush` does; the producer has ended all the same.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._end()

    @abstractmethod
    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        """Send one message. Check again under the lock where a concurrent :meth:`close` would do harm."""

    def _end(self) -> None:
        """Flush, and release what is open; called once, without the lock."""
        self.flush()

    def _defaults(self, stream: str | None, shard: int, timestamp_ms: int | None) -> tuple[Shard, int]:
        """The shard and the timestamp of a message, filled in where they were not given.

        Raises:
            ProducerEndedError: the producer has ended.
            InvalidStreamKeyError: no consumer could name the stream.
        """
        self._check_not_ended()
        key = self._url.stream_key(stream) if stream else self._stream
        return Shard(key, shard), now_milliseconds() if timestamp_ms is None else timestamp_ms

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ProducerEndedError(f"the producer of {self._url} has ended", remedy="Create a new one.")
