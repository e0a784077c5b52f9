"""Decodes blocks so that no payload can stop a run.

A block for which the decoder crashes, raises, takes too much memory or time, or makes too large rows is halved down to
single messages, which become dead letters. A separate process (:mod:`spark_jobs.decoding.isolated_process`) decodes, so
that a crash does not end the process that reads or writes.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
from pyspark import cloudpickle

from spark_jobs.decoding import isolated_process
from spark_jobs.decoding.isolated_process import (
    OUT_OF_MEMORY,
    Reply,
    Request,
    allowance,
    allowed_seconds,
    limited_memory,
    limited_time,
    receive,
    send,
    to_block,
    to_bytes,
)
from spark_jobs.decoding.row_size import MAX_ROW_BYTES, has_large_row
from spark_jobs.python_start import own_python
from stream_consumers.errors import DecoderCrashedError, StreamAssetsError

MAX_BLOCK_BYTES = 16 * 1024 * 1024
"""The most bytes of decoded rows, in Arrow, that the JVM gets at once."""
MAX_CRASHES = 20
"""Give up on a decoder after it fails for this many messages of a batch, or of an executor's split."""
Decode: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Decodes a block of messages; picklable."""
Refuse: TypeAlias = Callable[[pa.RecordBatch, str], pa.RecordBatch]
"""Returns the row of a message that cannot be decoded, from the message and the reason."""
Failure: TypeAlias = str
"""The reason why a block could not be decoded as a whole. It omits the texts of errors, which may hold payloads."""
_log = logging.getLogger(__name__)
_idle: list[_Process] = []


class _CrashError(Exception):
    """The process ended while it was decoding.

    Args:
        code: its exit code, or the negative number of the signal that ended it.
    """

    def __init__(self, code: int) -> None:
        how = next((known.name for known in signal.Signals if known == -code), f"exit code {code}")
        super().__init__(f"ended the process with {how}")
        self.code = code

    def failure(self, block: pa.RecordBatch) -> str:
        """Return the reason why the block was not decoded."""
        if self.code == OUT_OF_MEMORY:
            return f"needed more than {allowance(block.nbytes)} bytes of memory"
        if self.code == -signal.SIGPROF:
            return f"needed more than {allowed_seconds(block):.0f} s of CPU time"
        return str(self)


class _Process:
    """A process that decodes. It ends with this process, however this one ends."""

    def __init__(self) -> None:
        # It can import the same modules as this process. In its own session it gets no signal of a terminal.
        command = own_python(f"from {isolated_process.__name__} import serve; serve()")
        self._folder = Path.cwd()
        self._process = subprocess.Popen(  # noqa: S603 - fixed words
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._decode = b""

    def is_alive(self) -> bool:
        """Return whether the process can decode a block."""
        return self._process.poll() is None

    def is_here(self) -> bool:
        """Return whether the process was started in the working folder of this process, which may be gone otherwise."""
        return self._folder == Path.cwd()

    def run(self, decode: bytes, block: pa.RecordBatch) -> pa.RecordBatch | Exception:
        """Decode a block, and return the rows or the error that the decoder raised.

        Args:
            decode: a pickled :data:`Decode`.
            block: the argument of ``decode``.

        Raises:
            DecoderCrashedError: the process ended before it had a block.
            _CrashError: the process ended while it was decoding.
        """
        if decode != self._decode:
            try:
                reply, content = self._ask(Request.DECODER, decode)
            except _CrashError as error:
                raise DecoderCrashedError(
                    f"loading the decoder into a process of its own {error}",
                    remedy="Look for the reason in the standard error of the process. Nothing was written.",
                ) from error
            if reply is Reply.RAISED:
                raise _raised(content)
            self._decode = decode
        reply, content = self._ask(Request.BLOCK, to_bytes(block))
        return to_block(content) if reply is Reply.ROWS else _raised(content)

    def _ask(self, request: Request, content: bytes | pa.Buffer) -> tuple[Reply, bytes]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, request.value, content)
            kind, answer = receive(self._process.stdout)
        except (BrokenPipeError, EOFError):
            kind, answer = Reply.CRASHED.value, str(self._process.wait()).encode()
        if Reply(kind) is Reply.CRASHED:
            # The next child process has no decoder yet.
            self._decode = b""
            raise _CrashError(int(answer))
        return Reply(kind), answer

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        if self.is_alive():
            # It leads a process group, which includes the child that decodes.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _raised(content: bytes) -> Exception:
    error = pickle.loads(content)  # noqa: S301 - of our own process
    assert isinstance(error, Exception)
    return error


def prepare() -> None:
    """Start a process in advance unless one is idle, because its imports take as long as a small batch."""
    if not _idle:
        _idle.append(_Process())


def decode_isolated(
    blocks: Iterable[pa.RecordBatch], decode: Decode, refuse: Refuse, *, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[pa.RecordBatch]:
    """Decode blocks in another process; a block that crashes it is returned in parts.

    Args:
        blocks: blocks of messages.
        decode: decodes a block.
        refuse: returns the row of a message that on its own crashes the process, makes ``decode`` raise an error, or
            becomes a row that is too large.
        max_row_bytes: the most bytes of a row in Spark.

    Raises:
        DecoderCrashedError: there are more than :data:`MAX_CRASHES` such messages, or the decoder cannot be loaded.
        StreamAssetsError: ``decode`` raises it, for instance because a schema registry does not answer.
    """
    pickled: bytes = cloudpickle.dumps(decode)  # type: ignore[no-untyped-call]
    return _decode_in_halves(blocks, partial(_run, pickled), refuse, max_row_bytes)


def decode_here(
    blocks: Iterable[pa.RecordBatch], decode: Decode, refuse: Refuse, *, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[pa.RecordBatch]:
    """Decode blocks in this process, a Python worker of Spark, which ends if that takes too much memory or time.

    Spark then fails the job, as after any crash, and the batch is read again with :func:`decode_isolated`, which has
    the same arguments and errors.
    """
    return _decode_in_halves(blocks, partial(_run_here, decode), refuse, max_row_bytes)


def _decode_in_halves(
    blocks: Iterable[pa.RecordBatch],
    run: Callable[[pa.RecordBatch], pa.RecordBatch | Failure],
    refuse: Refuse,
    max_row_bytes: int,
) -> Iterator[pa.RecordBatch]:
    refused = 0
    for block in blocks:
        parts = [block]
        while parts:
            part = parts.pop()
            found = run(part)
            # This does not count as a failure of the decoder.
            is_large = not isinstance(found, str) and has_large_row(found, max_row_bytes)
            if is_large:
                found = f"made a row for which Spark needs more than {max_row_bytes} bytes"
            if not isinstance(found, str):
                yield from within_bytes(found)
                continue
            if part.num_rows > 1:
                _log.warning("decoding %d messages %s; trying halves of them", part.num_rows, found)
                half = part.num_rows // 2
                parts += [part.slice(half), part.slice(0, half)]
                continue
            refused += not is_large
            if refused > MAX_CRASHES or not part.num_rows:
                raise DecoderCrashedError(
                    f"the decoder fails for more than {MAX_CRASHES} messages of a batch: it {found}",
                    remedy="Correct the decoder; or read fewer messages per batch (max_records). Nothing was written.",
                )
            yield refuse(part, f"decoding this message {found}")


def within_bytes(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in blocks of at most :data:`MAX_BLOCK_BYTES`, unless one row has more.

    Small payloads may become large rows, and the JVM holds a whole block in its memory.
    """
    if rows.num_rows < 2 or rows.nbytes <= MAX_BLOCK_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from within_bytes(rows.slice(0, half))
    yield from within_bytes(rows.slice(half))


def _run(decode: bytes, part: pa.RecordBatch) -> pa.RecordBatch | Failure:
    try:
        return _try(decode, part)
    except _CrashError as error:
        if part.num_rows > 1:
            return error.failure(part)
    try:
        # The system may have killed the first process for another reason.
        return _try(decode, part)
    except _CrashError as error:
        return error.failure(part)


def _try(decode: bytes, part: pa.RecordBatch) -> pa.RecordBatch | Failure:
    process = _idle_process()
    try:
        found = process.run(decode, part)
    except _CrashError:
        _idle.append(process)
        raise
    except BaseException:
        process.end()
        raise
    _idle.append(process)
    return _failed(found) if isinstance(found, Exception) else found


def _run_here(decode: Decode, part: pa.RecordBatch) -> pa.RecordBatch | Failure:
    try:
        with limited_memory(part.nbytes), limited_time(part):
            return decode(part)
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything for a payload
        return _failed(error)


def _failed(error: Exception) -> Failure:
    """Describe an error that a decoder raised for a block.

    Raises:
        StreamAssetsError: the error itself, if it is not about a payload.
    """
    if isinstance(error, StreamAssetsError):
        raise error
    return f"raised {type(error).__name__}"


def _idle_process() -> _Process:
    """Take an idle process or start one; another thread may take the last idle one first."""
    with suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.is_alive() and process.is_here():
                return process
            process.end()
    return _Process()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


# A child that is forked from this process must not write into the same pipes.
os.register_at_fork(after_in_child=_idle.clear)
