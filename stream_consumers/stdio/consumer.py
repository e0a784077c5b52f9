"""Reads the lines of stdin message by message."""

from __future__ import annotations

from datetime import datetime

from stream_consumers.consumer import Edge, rewind_place
from stream_consumers.consumer_base import Assignment, PollingConsumer
from stream_consumers.errors import InvalidOptionError, UnsupportedError
from stream_consumers.messages import Message, Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode, Modes, choice
from stream_consumers.stdio.broker import StdioBroker, check_stdio_url, process_broker
from stream_consumers.stdio.lines import BROADCAST
from stream_consumers.urls import StreamUrl

_NOT_A_PIPE = "Spool the pipe into a file, and read that: stream-assets relay stdio:///orders file://orders.ss/orders."
CONSUMER_MODES = Modes(of="consumers of stdio", available=(ConsumerMode.REAL_TIME, ConsumerMode.LOAD_BALANCED))


class StdioConsumer(PollingConsumer):
    r"""A consumer of the lines of stdin; see :class:`stream_consumers.consumer.Consumer`.

    A line is for the consumers of its stream; one without a stream is in the stream ``broadcast``, and for all of them.
    So is a whole line whose header lacks a time or a sequence and names a stream that no consumer reads: it is text.
    A line without a sequence has the one after the last of its shard, from 0 on. (After an explicit n that is n + 1;
    SeaStreamer uses n again.) The stream ends with the pipe, live or not, after all of its messages were delivered.

    All consumers of a process share the pipe: create them before the first :meth:`next`. An open consumer that is not
    read blocks the others, since its queue is bounded.

    Args:
        url: ``stdio:///orders,clicks``.
        mode: ``real_time``: every message. ``load_balanced``: each message is for one member of the group, for number
            sequence modulo members, in the order in which they were created (SeaStreamer's rule). Messages that wait
            for a member are lost when it closes.
        group: the group, with mode ``load_balanced``.
        reset: ``earliest`` only, since a pipe has no other place to start.
        broker: other pipes than stdin and stdout.

    Raises:
        InvalidUrlError: it names a host, or no stream.
        InvalidOptionError: mode ``resumable``, a group that the mode does not have or lacks, or ``latest``.
        StreamEndedError: from ``next``, if the consumer was closed, or if the pipe is at its end and everything was
            delivered.
        StreamNotFoundError, StreamRemovedError: from ``next``, if stdin is closed, or cannot be read.
        FormatError: from ``next``, if a line is longer than 256 MiB.

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
            raise InvalidOptionError("a pipe has no latest message to start from", remedy="Leave the reset out.")
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
        """Do nothing: the group remembers nothing, a message is done when it was handed out."""
        self._check_open()

    def commit(self) -> int:
        """Do nothing, see :meth:`ack`."""
        self._check_open()
        return 0

    @property
    def unclaimed(self) -> int:
        """The number of lines so far that were for none of the pipe's consumers."""
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
        """Refuse, since a pipe cannot be read twice.

        Raises:
            UnsupportedError: always.
        """
        self._check_open()
        raise UnsupportedError(f"{self._url}: a pipe cannot seek", remedy=_NOT_A_PIPE)

    def rewind(self, to: Edge | int) -> None:
        """Refuse, since a pipe cannot be read twice.

        Raises:
            UnsupportedError: always.
        """
        rewind_place(to)
        self._check_open()
        raise UnsupportedError(f"{self._url}: a pipe cannot rewind", remedy=_NOT_A_PIPE)

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`; at once, as there is no seek."""
        self._check_open()
        self._assignment.assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`; at once, as there is no seek."""
        self._check_open()
        self._assignment.unassign(shard, self._seen)

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`; messages that wait for it are dropped."""
        self._closed.set()
        self._broker.unsubscribe(self._queue)
