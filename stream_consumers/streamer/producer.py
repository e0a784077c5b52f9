"""Producers of a :class:`stream_consumers.streamer.streamer.Streamer`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import Producer
from stream_consumers.errors import InvalidOptionError, ProducerEndedError
from stream_consumers.messages import Receipt
from stream_consumers.producer_base import check_payload
from stream_consumers.streamer.sharders import Sharder

OpenWriter = Callable[[str], Producer]


class StreamerProducer(ClosesOnExit):
    """A producer of a :class:`Streamer`; see :class:`stream_consumers.consumer.Producer`.

    Args:
        open_writer: opens what writes to a stream, at the first message or when there is an anchor.
        check_key: see :func:`stream_consumers.producer_base.check_target`.
        stream: the anchor: where messages go that name no stream.
        sharder: chooses the shard of a message that names none.
        is_shared: others write with the same writer, so that :meth:`close` leaves it open.

    Example:
        >>> from stream_consumers.streamer.streamer import connect
        >>> with connect("memory://anchored/") as streamer:
        ...     producer = streamer.create_producer()
        ...     producer.anchor("orders")
        ...     producer.send(b"{}").shard
        Shard(stream='orders', id=0)
    """

    def __init__(
        self,
        open_writer: OpenWriter,
        check_key: Callable[[str], str],
        *,
        stream: str | None,
        sharder: Sharder | None,
        is_shared: bool,
    ) -> None:
        self._open_writer, self._check_key = open_writer, check_key
        self._sharder, self._is_shared = sharder, is_shared
        self._stream: str | None = None
        self._writer: Producer | None = None
        self._lock = threading.RLock()
        self._ended = False
        if stream is not None:
            self.anchor(stream)

    @property
    def stream(self) -> str | None:
        """The anchor."""
        return self._stream

    @property
    def is_ended(self) -> bool:
        """Whether it was ended or closed."""
        return self._ended

    def anchor(self, stream: str) -> None:
        """Say where messages go that name no stream; once.

        Raises:
            InvalidOptionError: there is an anchor already.
            InvalidStreamKeyError: it is no stream key.
            StreamNotFoundError: as the backend says.
        """
        with self._lock:
            if self._stream is not None:
                raise InvalidOptionError(
                    f"the producer is anchored to {self._stream!r} already", remedy="Name the stream when sending."
                )
            key = self._check_key(stream)
            self._opened(key)
            self._stream = key

    def send(
        self, payload: bytes, *, stream: str | None = None, shard: int | None = None, timestamp_ms: int | None = None
    ) -> Receipt:
        """See :meth:`stream_consumers.consumer.Producer.send`.

        Args:
            payload: the bytes.
            stream: the stream key; the anchor by default.
            shard: the shard id; by default the sharder's choice, 0 without one.
            timestamp_ms: unix milliseconds; now by default.

        Raises:
            InvalidOptionError: neither a stream nor an anchor.
            ProducerEndedError: the producer was ended, or the streamer was disconnected.
        """
        with self._lock:
            target = self._stream if stream is None else self._check_key(stream)
            if target is None:
                raise InvalidOptionError("the message has no stream", remedy="Name it, or anchor the producer.")
            writer, data = self._opened(target), check_payload(payload)
            if shard is None:
                shard = 0 if self._sharder is None else self._sharder.choose(target, data)
            return writer.send(data, stream=target, shard=shard, timestamp_ms=timestamp_ms)

    def flush(self) -> None:
        """Wait until everything sent is with the backend."""
        with self._lock:
            self._check_not_ended()
            if self._writer is not None:
                self._writer.flush()

    def end(self) -> None:
        """Flush and end; a file gets its end-of-stream message if that was asked for.

        No producer of this streamer writes to the file again: connect again to append.
        """
        with self._lock:
            self._ended = True
            if self._writer is not None:
                self._writer.close()

    def close(self) -> None:
        """Flush and end; other producers of the same file go on."""
        with self._lock:
            if not self._is_shared:
                self.end()
            elif not self._ended:
                self.flush()
                self._ended = True

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ProducerEndedError("the producer has ended", remedy="Create a new one.")

    def _opened(self, stream: str) -> Producer:
        self._check_not_ended()
        if self._writer is None:
            self._writer = self._open_writer(stream)
        return self._writer
