"""``stdio://``: the lines of stdin and stdout as a backend, with its consumer and its producer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from stream_consumers.backend import Backend, ConsumerOptions
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Assignment, Consumer, Edge, rewind_target
from stream_consumers.errors import InvalidOptionError, UnsupportedError
from stream_consumers.messages import Message, Receipt, Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode, Modes, check_switch, choice
from stream_consumers.producer import Producer
from stream_consumers.stdio.broker import StdioBroker, check_stdio_url, process_broker
from stream_consumers.stdio.lines import BROADCAST, format_bare_line, format_line
from stream_consumers.urls import StreamUrl

_NOT_A_PIPE = "Spool the pipe into a file, and read that: stream-assets relay stdio:///orders file://orders.ss/orders."
CONSUMER_MODES = Modes(of="consumers of stdio", available=(ConsumerMode.REAL_TIME, ConsumerMode.LOAD_BALANCED))


class StdioConsumer(Consumer):
    r"""A consumer of the lines of stdin; see :class:`stream_consumers.consumer.Consumer`.

    Consumers get the lines of their streams, and all consumers get lines without a stream, in the stream ``broadcast``.
    If the header lacks a time or a sequence, and names a stream that no consumer reads, the whole line is text in
    ``broadcast``. A line without a sequence gets the next one of its shard, from 0 on. (After an explicit n
    that is n + 1; SeaStreamer uses n again.) The stream ends with the pipe, live or not, after all messages were
    delivered.

    All consumers of a process share the pipe: create them before the first :meth:`next`. An open consumer that is not
    read blocks the others, because its queue is bounded.

    Args:
        url: ``stdio:///orders,clicks``.
        mode: with ``real_time`` the consumer gets every message. With ``load_balanced`` each message goes to one member
            of the group: to member number (sequence modulo number of members), in the order of creation (SeaStreamer's
            rule). Messages that wait for a member are lost when it closes.
        group: the group, with mode ``load_balanced``.
        reset: ``earliest`` only, because a pipe can only be read from its beginning.
        broker: other pipes than stdin and stdout.

    Raises:
        InvalidUrlError: the URL names a host, or no stream.
        InvalidOptionError: the mode is ``resumable``, the group does not fit the mode, or ``reset`` is ``latest``.
        StreamEndedError: from ``next``: the consumer was closed, or the pipe is at its end and all messages were
            delivered.
        StreamNotFoundError, StreamRemovedError: from ``next``: stdin is closed, or cannot be read.
        FormatError: from ``next``: a line is longer than 256 MiB.

    Example:
        >>> import io
        >>> pipes = StdioBroker(io.BytesIO(b"[orders | 7] seven\nfor all\n"), io.BytesIO())
        >>> with StdioConsumer("stdio:///orders", broker=pipes) as orders:
        ...     [(str(message.shard), message.sequence, message.text()) for message in orders]
        [('orders/0', 7, 'seven'), ('broadcast/0', 0, 'for all')]
    """

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        mode: ConsumerMode = ConsumerMode.REAL_TIME,
        group: str | None = None,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        broker: StdioBroker | None = None,
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__()
        mode, reset = CONSUMER_MODES.check(mode), choice(AutoStreamReset, reset, option="reset")
        streams = check_stdio_url(url)
        name = CONSUMER_MODES.group(mode, group)
        if reset is AutoStreamReset.LATEST:
            raise InvalidOptionError("a pipe cannot be read from its latest message", remedy="Leave reset out.")
        self._url = url
        self._assignment = Assignment(streams)
        self._seen = {Shard(stream) for stream in streams}
        self._broker = broker or process_broker()
        self._queue = self._broker.subscribe(list(streams), name)

    @property
    def group(self) -> str | None:
        """The group's name; ``None`` with mode ``real_time``."""
        return self._queue.group

    def ack(self, message: Message) -> None:
        """Do nothing: the group stores no positions, and a message is finished once it was returned."""
        self._check_open()

    def commit(self) -> int:
        """Do nothing, see :meth:`ack`."""
        self._check_open()
        return 0

    @property
    def unclaimed(self) -> int:
        """The number of lines so far that were for no consumer of the pipe."""
        return self._broker.unclaimed

    @property
    def waiting(self) -> int:
        """The number of lines that were read and not delivered; they are lost when the process ends."""
        return self._broker.waiting(self._queue)

    def _poll(self, seconds: float) -> Message | None:
        while True:
            message = self._broker.take(self._queue, seconds)
            if message is None or message.shard.stream == BROADCAST:
                return message
            self._seen.add(message.shard)
            if message.shard in self._assignment:
                return message

    def seek(self, moment: datetime) -> None:
        """Refuse, because a pipe cannot be read twice.

        Raises:
            UnsupportedError: always.
        """
        self._check_open()
        raise UnsupportedError(f"{self._url}: a pipe cannot seek", remedy=_NOT_A_PIPE)

    def rewind(self, to: Edge | int) -> None:
        """Refuse, because a pipe cannot be read twice.

        Raises:
            UnsupportedError: always.
        """
        rewind_target(to)
        self._check_open()
        raise UnsupportedError(f"{self._url}: a pipe cannot rewind", remedy=_NOT_A_PIPE)

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`; takes effect at once, because a pipe cannot seek."""
        self._check_open()
        self._assignment.assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`; takes effect at once, because a pipe cannot seek."""
        self._check_open()
        self._assignment.unassign(shard, self._seen)

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`; messages that wait for it are dropped."""
        self._closed.set()
        self._broker.unsubscribe(self._queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioProducerOptions:
    r"""Options of a producer of lines.

    Args:
        bare: write payloads without headers, for tools that are not stream processors.
        loopback: also deliver sent messages to the consumers of this process (SeaStreamer's option).

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


class StdioProducer(Producer):
    r"""A producer of lines on stdout; see :class:`stream_consumers.producer.Producer`.

    A line is ``[timestamp | stream | sequence] payload``, with the shard after the sequence unless it is 0, as
    SeaStreamer reads it. Sequences count from 0 in each shard, for all producers of the process together. Payloads that
    a line cannot contain are written in base64; see :mod:`stream_consumers.stdio.lines`.

    Args:
        url: ``stdio:///orders``; ``send`` uses its first stream by default.
        options: see :class:`StdioProducerOptions`.
        broker: other pipes than stdin and stdout.

    Raises:
        InvalidUrlError: the URL names a host, or no stream.
        InvalidStreamKeyError, InvalidOptionError, FormatError: from ``send``: a line cannot contain the message; no
            part of it is written.
        BrokenPipeError: from ``send`` and ``flush``: stdout has no reader any more.
        BrokerError: from ``send`` and ``flush``: stdout cannot be written.

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
            # This waits while a consumer's buffer is full.
            self._broker.loop_back(Message(shard, receipt.sequence, timestamp_ms, payload))
        return receipt

    def _flush(self) -> None:
        """Write all sent messages.

        Raises:
            BrokenPipeError: stdout has no reader any more; unwritten messages are dropped.
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


class StdioStreams(Backend):
    """Lines of stdin and stdout."""

    consumer_modes = CONSUMER_MODES
    producer_options = StdioProducerOptions
    is_pipe = True

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """See :meth:`stream_consumers.backend.Backend.open_consumer`."""
        return StdioConsumer(url, mode=options.mode, group=options.group, reset=options.reset)

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """See :meth:`stream_consumers.backend.Backend.open_producer`."""
        return StdioProducer(url, options if isinstance(options, StdioProducerOptions) else None)
