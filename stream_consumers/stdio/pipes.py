"""The two ends of a pipe: chunks and lines in, whole lines out."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import BinaryIO

from stream_consumers.errors import BrokerError, FormatError, StreamAssetsError, StreamNotFoundError, StreamRemovedError
from stream_consumers.messages import Message, Receipt, Shard
from stream_consumers.producer_base import undelivered
from stream_consumers.wording import counted

CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 256 * 1024 * 1024


def read_lines(stream: BinaryIO | None, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    """The lines of a pipe as they come, without their newlines; the last one counts without one, too.

    The pipe is held open from this call on, so that it is read even if it is closed before the first line. A duplicate
    of the file descriptor is read where there is one: a thread that waits inside Python's buffer would not let the
    interpreter end, and one that waits on a number would read another file's bytes when that is reused.

    Args:
        stream: the pipe to read; nothing else may read it.
        max_line_bytes: a longer line is an error, so that it does not fill the memory.

    Raises:
        StreamNotFoundError: at the first line: it is closed.
        StreamRemovedError: it cannot be read.
        FormatError: a line is longer than ``max_line_bytes``.
    """
    held: int | None = None
    if stream is not None and (descriptor := _descriptor(stream)) is not None:
        # A pipe that cannot be duplicated cannot be read either: that is the error of the first line.
        with suppress(OSError):
            held = os.dup(descriptor)
    return _read_lines(stream, held, max_line_bytes)


def _read_lines(stream: BinaryIO | None, held: int | None, max_line_bytes: int) -> Iterator[list[bytes]]:
    if stream is None or (held is None and stream.closed):
        raise StreamNotFoundError("stdin is closed", remedy="Pipe something into it.")
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
            f"stdin cannot be read: {error}", remedy="Pipe something into it.", lines=lines_read
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
        """Queue one message to be written; writes when enough bytes are queued.

        Raises:
            BrokenPipeError, BrokerError: what was queued before cannot be written; this message was not taken.
            StreamAssetsError: ``form`` raised it; nothing of the message is written.
        """
        with self._lock:
            if len(self._pending) >= self.COALESCE_BYTES:
                self._write()
            message = Message(shard, self._next.get(shard, 0), timestamp_ms, payload)
            self._pending += form(message)
            self._next[shard] = message.sequence + 1
            self._waiting.append(shard)
            if len(self._pending) >= self.COALESCE_BYTES:
                # What fails now is raised by the next send or flush: this message was taken.
                with suppress(BrokerError):
                    self._write()
        return Receipt(shard, message.sequence, timestamp_ms)

    def flush(self) -> None:
        """Write what is queued.

        Raises:
            BrokenPipeError: nobody reads the pipe any more; what was queued is dropped, and counted in the error.
            BrokerError: the pipe cannot be written; what is queued is written by the next call.
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
                f"nobody reads stdout any more: the last {counted(lost, 'message')} could not be written",
            ) from error
        except OSError as error:
            raise self._unwritten(
                f"stdout cannot be written: {error}", "Make room, then flush again: the messages stay queued, in order."
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
