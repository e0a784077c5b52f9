"""Writes messages to stdout, one a line."""

from __future__ import annotations

from dataclasses import dataclass

from stream_consumers.messages import Message, Receipt, Shard
from stream_consumers.options import check_switch
from stream_consumers.producer_base import ProducerBase
from stream_consumers.stdio.broker import StdioBroker, check_stdio_url, process_broker
from stream_consumers.stdio.lines import format_bare_line, format_line
from stream_consumers.urls import StreamUrl


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioProducerOptions:
    r"""Options of a producer of lines.

    Args:
        bare: write payloads alone, without headers: for tools that are not stream processors.
        loopback: give what is sent to the consumers of this process, too (SeaStreamer's option).

    Example:
        >>> import io
        >>> pipes = StdioBroker(io.BytesIO(), out := io.BytesIO())
        >>> options = StdioProducerOptions(bare=True)
        >>> with StdioProducer("stdio:///orders", options, broker=pipes) as producer:
        ...     _ = producer.send(b"alone")
        >>> out.getvalue()
        b'alone\n'
    """

    bare: bool = False
    loopback: bool = False

    def __post_init__(self) -> None:
        for name in ("bare", "loopback"):
            check_switch(name, getattr(self, name))


class StdioProducer(ProducerBase):
    r"""A producer of lines on stdout; see :class:`stream_consumers.consumer.Producer`.

    A line is ``[timestamp | stream | sequence] payload``, with the shard behind the sequence unless it is 0, as
    SeaStreamer reads it. Sequences count from 0 in each shard, for all producers of the process together. Payloads that
    a line cannot hold are written in base64; see :mod:`stream_consumers.stdio.lines`.

    Args:
        url: ``stdio:///orders``; ``send`` uses its first stream by default.
        options: see :class:`StdioProducerOptions`.
        broker: other pipes than stdin and stdout.

    Raises:
        InvalidUrlError: it names a host, or no stream.
        InvalidStreamKeyError, InvalidOptionError, FormatError: from ``send``, if a line cannot hold the message; then
            nothing of it is written.
        BrokenPipeError: from ``send`` and ``flush``, if nobody reads stdout any more.
        BrokerError: from ``send`` and ``flush``, if stdout cannot be written.

    Example:
        >>> import io
        >>> pipes = StdioBroker(io.BytesIO(), out := io.BytesIO())
        >>> with StdioProducer("stdio:///orders", broker=pipes) as producer:
        ...     producer.send(b"{}", timestamp_ms=1_700_000_000_000).sequence
        0
        >>> out.getvalue()
        b'[2023-11-14T22:13:20 | orders | 0] {}\n'
    """

    def __init__(
        self, url: str | StreamUrl, options: StdioProducerOptions | None = None, *, broker: StdioBroker | None = None
    ) -> None:
        url = StreamUrl.parse(url)
        check_stdio_url(url)
        super().__init__(url)
        self._options = options or StdioProducerOptions()
        self._form = format_bare_line if self._options.bare else format_line
        self._broker = broker or process_broker()
        if self._options.loopback:
            self._broker.open_loopback()

    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        receipt = self._broker.output.send(shard, timestamp_ms, payload, self._form)
        if self._options.loopback:
            # It waits while a consumer's buffer is full.
            self._broker.loop_back(Message(shard, receipt.sequence, timestamp_ms, payload))
        return receipt

    def _flush(self) -> None:
        """Write what was sent.

        Raises:
            BrokenPipeError: nobody reads stdout any more; what was not written is dropped.
            BrokerError: stdout cannot be written; flush again when it can.
        """
        self._broker.output.flush()

    def _end(self) -> None:
        """Flush; stdout stays open."""
        try:
            self._flush()
        finally:
            if self._options.loopback:
                self._broker.close_loopback()
