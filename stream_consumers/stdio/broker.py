"""The pipes that all consumers and producers of a process share: one thread reads stdin and distributes its lines."""

from __future__ import annotations

import errno
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

from stream_consumers.display import counted
from stream_consumers.errors import (
    BrokerError,
    FormatError,
    InvalidUrlError,
    StreamAssetsError,
    StreamEndedError,
    StreamNotFoundError,
    StreamRemovedError,
)
from stream_consumers.messages import Message, Receipt, Shard, now_milliseconds
from stream_consumers.producer import undelivered
from stream_consumers.stdio.lines import BROADCAST, SEQUENCES, Line, parse_line
from stream_consumers.urls import StreamUrl

BUFFER_MESSAGES = 1024
BUFFER_BYTES = 16 * 1024 * 1024
WARN_AFTER_SECONDS = 10.0
# How often a waiting reader checks whether a consumer was garbage-collected, which sends no notification.
CONSUMER_CHECK_SECONDS = 0.5
_log = logging.getLogger(__name__)


class ShardLimit:
    """Admits shards until there are too many.

    Args:
        streams: the streams of a URL, which share one limit; all other streams share another one. Messages for all
            consumers are of the first one.
        known: the shards that exist.
        most: the most shards.
    """

    def __init__(self, streams: Collection[str], known: Iterable[Shard], *, most: int) -> None:
        self._most = most
        self._first, self._streams = next(iter(streams)), frozenset(streams)
        self._known = set(known)
        self._counts = Counter(map(self._is_named, self._known))

    def admits(self, shard: Shard) -> bool:
        """Return whether the shard exists or may be added; if so, it exists from now on."""
        if shard.stream == BROADCAST:
            shard = Shard(self._first, shard.id)
        if shard not in self._known:
            is_named = self._is_named(shard)
            if self._counts[is_named] >= self._most:
                return False
            self._counts[is_named] += 1
            self._known.add(shard)
        return True

    def _is_named(self, shard: Shard) -> bool:
        return shard.stream in self._streams


@dataclass(eq=False)
class ConsumerQueue:
    """The messages that were read for one consumer and not delivered yet.

    Args:
        streams: the streams that the consumer reads.
        group: the consumer's group.
        takes_all: whether it also gets the messages of all other streams.
        shard_limit: limits the shards that lines may name; ``None`` if they may name any.
        buffer: the messages, oldest first.
        buffered_bytes: the bytes of their payloads.
        is_open: whether the consumer still gets messages.
    """

    streams: frozenset[str]
    group: str | None = None
    takes_all: bool = False
    shard_limit: ShardLimit | None = None
    buffer: deque[Message] = field(default_factory=deque)
    buffered_bytes: int = 0
    is_open: bool = True

    def wants(self, shard: Shard) -> bool:
        """Return whether the consumer gets messages of this shard."""
        return self.takes_all or shard.stream == BROADCAST or shard.stream in self.streams


class StdioBroker:
    r"""One pair of pipes, shared by all consumers and producers that use them.

    Reading starts with the first :meth:`take`, in one thread, so that consumers that were created before it miss no
    message. Reading pauses while no consumer is open, and while a consumer that is to get the next message has a full
    queue; then the process that writes into the pipe waits, too. An open consumer that is not read blocks the others,
    until it is closed or garbage-collected.

    Args:
        source: the pipe to read; without one, taking raises StreamNotFoundError.
        target: the pipe to write; without one, flushing raises BrokerError.
        buffer_messages: the most messages that wait for one consumer.
        buffer_bytes: the most payload bytes of these; one message always fits.

    Example:
        >>> import io
        >>> lines = b"[orders | 7] a\n[INFO] b\n[2022-01-02T03:04:05 | clicks | 1] c\n[orders] d\n"
        >>> broker = StdioBroker(io.BytesIO(lines), io.BytesIO())
        >>> orders = broker.subscribe(["orders"])
        >>> [broker.take(orders).payload for _ in range(3)], broker.unclaimed
        ([b'a', b'[INFO] b', b'd'], 1)
    """

    def __init__(
        self,
        source: BinaryIO | None,
        target: BinaryIO | None,
        *,
        buffer_messages: int = BUFFER_MESSAGES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.output = OutputPipe(target)
        self._source = source
        self._buffer_messages, self._buffer_bytes = buffer_messages, buffer_bytes
        self._changed = threading.Condition()
        # Weak references, so that a consumer that is garbage-collected without being closed blocks no other.
        self._known: list[weakref.ref[ConsumerQueue]] = []
        # The streams of all consumers so far: a header with another stream counts only if it is complete.
        self._named: set[str | None] = set()
        # The next sequence in the shard 0 of streams that are read; lines without a sequence are of this shard.
        self._next: dict[str, int] = {}
        self._reader: threading.Thread | None = None
        self._is_read = False
        self._failure: StreamAssetsError | None = None
        self._unclaimed = self._undelivered = self._loopbacks = 0

    @property
    def unclaimed(self) -> int:
        """The number of lines that were for no consumer."""
        with self._changed:
            return self._unclaimed

    def subscribe(
        self,
        streams: list[str],
        group: str | None = None,
        *,
        takes_all: bool = False,
        shard_limit: ShardLimit | None = None,
    ) -> ConsumerQueue:
        """Create a queue for the messages of these streams; members of a group are in the order of these calls.

        Args:
            streams: the keys of the streams.
            group: the group that shares them.
            takes_all: also get the messages of other streams, if their headers are complete. Lines with a time before
                1970 are then text, because a file cannot store this time.
            shard_limit: lines whose shard it does not admit are text, too.
        """
        queue = ConsumerQueue(frozenset(streams), group, takes_all, shard_limit)
        with self._changed:
            self._known.append(weakref.ref(queue))
            self._named.update(streams)
            self._changed.notify_all()
        return queue

    def unsubscribe(self, queue: ConsumerQueue) -> None:
        """Close a queue: it gets no more messages, and those in it are dropped."""
        with self._changed:
            if queue.is_open:
                queue.is_open = False
                self._known.remove(weakref.ref(queue))
                self._changed.notify_all()

    def take(self, queue: ConsumerQueue, seconds: float | None = None) -> Message | None:
        """Return the next message of the queue, waiting at most ``seconds`` for it.

        Raises:
            StreamEndedError: the queue was closed; or the pipe is at its end, no producer loops messages back, and all
                messages were delivered.
            StreamNotFoundError, StreamRemovedError, FormatError: the pipe cannot be read any further; all messages
                before that were delivered.
        """
        with self._changed:
            self._start()
            self._changed.wait_for(lambda: queue.buffer or not queue.is_open or self._is_at_end, seconds)
            if not queue.is_open:
                raise StreamEndedError("the consumer was closed", remedy="Create a new one.")
            if queue.buffer:
                message = queue.buffer.popleft()
                queue.buffered_bytes -= len(message.payload or b"")
                self._changed.notify_all()
                return message
            if self._failure is not None:
                raise self._failure
            if self._is_at_end:
                raise StreamEndedError("stdin is at its end", remedy="Pipe more messages into a new process.")
            return None

    def waiting(self, queue: ConsumerQueue) -> int:
        """Return the number of messages that were read and not delivered; they are lost when the process ends.

        The number includes lines that were read and not distributed to the consumers yet.
        """
        with self._changed:
            return len(queue.buffer) + self._undelivered

    def open_loopback(self) -> None:
        """Register a producer that sends to the consumers, whose streams do not end before :meth:`close_loopback`."""
        with self._changed:
            self._loopbacks += 1

    def close_loopback(self) -> None:
        """Remove a producer that sent to the consumers."""
        with self._changed:
            self._loopbacks -= 1
            self._changed.notify_all()

    def loop_back(self, message: Message) -> None:
        """Deliver a message to the consumers as if it had been read, waiting while a queue is full."""
        with self._changed:
            self._record_next(message)
            self._deliver(message, waits_for_consumers=False)

    @property
    def _queues(self) -> list[ConsumerQueue]:
        """The queues whose consumers were not garbage-collected."""
        queues = [queue for known in self._known if (queue := known()) is not None]
        self._known = [weakref.ref(queue) for queue in queues]
        return queues

    @property
    def _is_at_end(self) -> bool:
        """Whether no more messages can arrive: the pipe was read to its end, or cannot be read any further."""
        return self._failure is not None or (self._is_read and not self._loopbacks)

    def _start(self) -> None:
        if self._reader is None:
            # Not opened in the thread: before it runs, the pipe may be closed and its descriptor reused.
            lines = read_lines(self._source)
            self._reader = threading.Thread(target=self._read, args=(lines,), name="stdin", daemon=True)
            self._reader.start()

    def _read(self, blocks: Iterator[list[bytes]]) -> None:
        failure: StreamAssetsError | None = StreamRemovedError(
            "reading stdin failed", remedy="See the traceback of the thread 'stdin'."
        )
        try:
            for lines in blocks:
                moment = now_milliseconds()
                with self._changed:
                    self._undelivered = len(lines)
                for line in lines:
                    read = parse_line(line)
                    with self._changed:
                        if not self._counts(read):
                            read = Line(line)
                        self._unclaimed += not self._deliver(self._numbered(read, moment), waits_for_consumers=True)
                        self._undelivered -= 1
            failure = None
        except StreamAssetsError as error:
            failure = error
        finally:
            with self._changed:
                self._is_read, self._failure = True, failure
                self._changed.notify_all()

    def _counts(self, line: Line) -> bool:
        """Return whether a line has a header; text has none, like "[INFO] …" or "[2022-01-02T03:04:05] …" in logs."""
        if (line.timestamp_ms or 0) < 0 and any(queue.takes_all for queue in self._queues):
            return False
        if line.stream is None or not (line.is_certain or line.stream in self._named):
            return False
        shard = Shard(line.stream, line.shard or 0)
        return all(queue.shard_limit is None or queue.shard_limit.admits(shard) for queue in self._queues)

    def _numbered(self, line: Line, moment: int) -> Message:
        shard = Shard(BROADCAST if line.stream is None else line.stream, line.shard or 0)
        sequence = self._next.get(shard.stream, 0) if line.sequence is None else line.sequence
        message = Message(shard, sequence, moment if line.timestamp_ms is None else line.timestamp_ms, line.payload)
        self._record_next(message)
        return message

    def _record_next(self, message: Message) -> None:
        """Record the sequence that comes after a message, if a line may need it."""
        shard = message.shard
        if shard.id == 0 and (shard.stream == BROADCAST or shard.stream in self._named):
            self._next[shard.stream] = (message.sequence + 1) % SEQUENCES

    def _deliver(self, message: Message, *, waits_for_consumers: bool) -> int:
        """Deliver the message to all its receivers once all of them have room; return their number."""
        size = len(message.payload or b"")
        begin, is_logged = time.monotonic(), False
        while True:
            # Consumers may be created and closed during a wait, so the receivers are looked up again.
            takers = self._takers(message)
            has_consumers = bool(self._queues) or not waits_for_consumers
            if has_consumers and all(self._has_room(taker, size) for taker in takers):
                break
            if takers and not is_logged and time.monotonic() - begin > WARN_AFTER_SECONDS:
                is_logged = True
                _log.warning(
                    "reading stdin is paused: a consumer of %s does not read its messages; read them, or close it",
                    ", ".join(sorted(set().union(*(taker.streams for taker in takers)))),
                )
            # A reference to a queue would keep it from being garbage-collected.
            del takers
            self._changed.wait(CONSUMER_CHECK_SECONDS)
        for taker in takers:
            taker.buffer.append(message)
            taker.buffered_bytes += size
        self._changed.notify_all()
        return len(takers)

    def _takers(self, message: Message) -> list[ConsumerQueue]:
        """Return the queues of all consumers without a group, and of one member of each group."""
        alone: list[ConsumerQueue] = []
        groups: dict[str, list[ConsumerQueue]] = {}
        for queue in self._queues:
            if queue.wants(message.shard):
                members = alone if queue.group is None else groups.setdefault(queue.group, [])
                members.append(queue)
        return alone + [members[message.sequence % len(members)] for members in groups.values()]

    def _has_room(self, taker: ConsumerQueue, size: int) -> bool:
        return not taker.buffer or (
            len(taker.buffer) < self._buffer_messages and taker.buffered_bytes + size <= self._buffer_bytes
        )


_process: StdioBroker | None = None
_process_pipes: tuple[object, object] = (None, None)
_process_lock = threading.Lock()


def process_broker() -> StdioBroker:
    """Return the broker of this process's stdin and stdout, a new one if they were replaced."""
    global _process, _process_pipes
    source: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    target: BinaryIO | None = getattr(sys.stdout, "buffer", None)
    with _process_lock:
        if _process is None or _process_pipes[0] is not source or _process_pipes[1] is not target:
            _process, _process_pipes = StdioBroker(source, target), (source, target)
        return _process


def check_stdio_url(url: StreamUrl) -> tuple[str, ...]:
    """Return the streams of a ``stdio`` URL.

    Raises:
        InvalidUrlError: the URL names a host, or no stream.
    """
    if url.nodes != (".",):
        raise InvalidUrlError(f"{url.shown}: a pipe has no host", remedy=f"Write stdio:///{','.join(url.streams)}.")
    return url.required_streams()


CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 256 * 1024 * 1024


def read_lines(stream: BinaryIO | None, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    """Return the lines of a pipe as they arrive, without their newlines; the last line needs none.

    The pipe is held open from this call on, so that it is read even if it is closed before the first line. If it has a
    file descriptor, a duplicate of that is read: a thread that waits inside Python's buffer would keep the interpreter
    from ending, and a thread that waits on the descriptor itself would read another file once that is reused.

    Args:
        stream: the pipe; no other code may read it.
        max_line_bytes: the longest line, so that a line cannot fill the memory.

    Raises:
        StreamNotFoundError: at the first line, if the pipe is closed.
        StreamRemovedError: the pipe cannot be read.
        FormatError: a line is longer than ``max_line_bytes``.
    """
    held: int | None = None
    if stream is not None and (descriptor := _descriptor(stream)) is not None:
        # A pipe that cannot be duplicated cannot be read either, so the first line raises the error.
        with suppress(OSError):
            held = os.dup(descriptor)
    return _read_lines(stream, held, max_line_bytes)


def _read_lines(stream: BinaryIO | None, held: int | None, max_line_bytes: int) -> Iterator[list[bytes]]:
    if stream is None or (held is None and stream.closed):
        raise StreamNotFoundError("stdin is closed", remedy="Pipe messages into it.")
    rest: list[bytes] = []
    lines_read = size = 0
    try:
        for chunk in _chunks(stream, held):
            first, *more = chunk.split(b"\n")
            rest.append(first)
            size += len(first)
            if size > max_line_bytes:
                raise FormatError(
                    "a line of stdin is too long",
                    remedy="End messages with a newline.",
                    line=lines_read + 1,
                    limit=max_line_bytes,
                )
            if more:
                lines = [b"".join(rest), *more[:-1]]
                lines_read += len(lines)
                rest, size = [more[-1]], len(more[-1])
                yield lines
        if size:
            yield [b"".join(rest)]
    except (OSError, ValueError) as error:
        raise StreamRemovedError(
            f"stdin cannot be read: {error}", remedy="Pipe messages into it.", lines=lines_read
        ) from error
    finally:
        if held is not None:
            os.close(held)


def _chunks(stream: BinaryIO, held: int | None) -> Iterator[bytes]:
    read = stream.readline if held is None else partial(os.read, held)
    while True:
        try:
            chunk = read(CHUNK_BYTES)
        except BlockingIOError:
            select.select([stream if held is None else held], [], [])
            continue
        if not chunk:
            return
        yield chunk


class OutputPipe:
    """Writes whole lines to a pipe, and numbers the messages of each shard from 0.

    Args:
        stream: the pipe to write.
    """

    COALESCE_BYTES = 64 * 1024

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._waiting: list[Shard] = []
        self._next: dict[Shard, int] = {}

    def send(self, shard: Shard, timestamp_ms: int, payload: bytes, form: Callable[[Message], bytes]) -> Receipt:
        """Queue one message, and write when enough bytes are queued.

        Raises:
            BrokenPipeError, BrokerError: queued messages cannot be written; this message was not queued.
            StreamAssetsError: ``form`` raised it; no part of the message is written.
        """
        with self._lock:
            if len(self._pending) >= self.COALESCE_BYTES:
                self._write()
            message = Message(shard, self._next.get(shard, 0), timestamp_ms, payload)
            self._pending += form(message)
            self._next[shard] = message.sequence + 1
            self._waiting.append(shard)
            if len(self._pending) >= self.COALESCE_BYTES:
                # The next send or flush raises this error, because this message was queued.
                with suppress(BrokerError):
                    self._write()
        return Receipt(shard, message.sequence, timestamp_ms)

    def flush(self) -> None:
        """Write all queued messages.

        Raises:
            BrokenPipeError: the pipe has no reader any more; the queued messages are dropped, and counted in the error.
            BrokerError: the pipe cannot be written; the next call writes the queued messages.
        """
        with self._lock:
            self._write()

    def _write(self) -> None:
        if not self._pending:
            return
        if self._stream is None or self._stream.closed:
            raise self._unwritten("stdout is closed", "Leave it open.")
        try:
            self._stream.flush()
            descriptor = _descriptor(self._stream)
            if descriptor is None:
                self._stream.write(self._pending)
                self._stream.flush()
                self._pending.clear()
            while self._pending and descriptor is not None:
                try:
                    del self._pending[: os.write(descriptor, self._pending)]
                except BlockingIOError:
                    select.select([], [descriptor], [])
        except BrokenPipeError as error:
            lost = len(self._waiting)
            self._pending.clear()
            self._waiting.clear()
            raise BrokenPipeError(
                errno.EPIPE,
                f"stdout has no reader any more; the last {counted(lost, 'message')} could not be written",
            ) from error
        except OSError as error:
            raise self._unwritten(
                f"stdout cannot be written: {error}", "Make room, then flush again; the messages stay queued, in order."
            ) from error
        self._waiting.clear()

    def _unwritten(self, what: str, remedy: str) -> StreamAssetsError:
        error = BrokerError(what, remedy=remedy, bytes=len(self._pending))
        return undelivered(error, self._waiting, remedy=remedy)


def _descriptor(stream: BinaryIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
