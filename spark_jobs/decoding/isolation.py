"""Decoding in a process of its own, which a payload may crash without ending the process that reads or writes.

A block whose decoding crashes is halved, and each half is decoded by a new process, until single messages are found.
The protocol between the two processes is in :mod:`spark_jobs.decoding.isolated_process`.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

import pyarrow as pa
from pyspark import cloudpickle

from spark_jobs.decoding import isolated_process
from spark_jobs.decoding.isolated_process import OUT_OF_MEMORY, Reply, Request, receive, send, to_block, to_bytes
from spark_jobs.decoding.memory import allowance, limited_memory
from stream_consumers.errors import DecoderCrashedError

MOST_CRASHES = 20
"""Messages of a batch, or of a split that an executor reads, that may crash the decoder before it counts as broken."""
Decode: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Decodes a block of messages; picklable."""
Refuse: TypeAlias = Callable[[pa.RecordBatch, str], pa.RecordBatch]
"""Makes the result for one message that cannot be decoded, of the message and the reason."""
_log = logging.getLogger(__name__)
_idle: list[_Process] = []


class _CrashError(Exception):
    """The process ended while it decoded.

    Args:
        code: its exit code, or the negative number of the signal that ended it.
    """

    def __init__(self, code: int) -> None:
        how = next((known.name for known in signal.Signals if known == -code), f"exit code {code}")
        super().__init__(f"ended the process with {how}")
        self.code = code

    def reason(self, block: pa.RecordBatch) -> str:
        """What decoding a block did."""
        if self.code == OUT_OF_MEMORY:
            return f"needed more than {allowance(block.nbytes)} bytes of memory"
        return str(self)


class _Process:
    """A process that decodes; it ends when this one does, however that ends."""

    def __init__(self) -> None:
        # It imports what this process can. In a session of its own no signal of a terminal reaches it.
        program = f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        program += f"from {isolated_process.__name__} import serve; serve()"
        self._process = subprocess.Popen(  # noqa: S603 - fixed words
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._decode = b""

    def is_alive(self) -> bool:
        """Whether it waits for a block."""
        return self._process.poll() is None

    def run(self, decode: bytes, block: pa.RecordBatch) -> pa.RecordBatch | Exception:
        """What decoding a block returns or raises.

        Args:
            decode: a pickled :data:`Decode`.
            block: its argument.

        Raises:
            DecoderCrashedError: the process ended before it had a block.
            _CrashError: the process ended.
        """
        if decode != self._decode:
            try:
                reply, content = self._ask(Request.DECODER, decode)
            except _CrashError as error:
                raise DecoderCrashedError(
                    f"loading the decoder into a process of its own {error}",
                    remedy="What the process wrote to the standard error says why. Nothing was written.",
                ) from error
            if reply is Reply.RAISED:
                return _raised(content)
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
            # The next one has no decoder yet.
            self._decode = b""
            raise _CrashError(int(answer))
        return Reply(kind), answer

    def end(self) -> None:
        """Kill it, and wait for it."""
        if self.is_alive():
            # It leads a process group.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _raised(content: bytes) -> Exception:
    error = pickle.loads(content)  # noqa: S301 - of our own process
    assert isinstance(error, Exception)
    return error


def prepare() -> None:
    """Start a process, if none waits already: its imports take as long as a small batch."""
    if not _idle:
        _idle.append(_Process())


def decode_isolated(blocks: Iterable[pa.RecordBatch], decode: Decode, refuse: Refuse) -> Iterator[pa.RecordBatch]:
    """Decode blocks in another process; a block that crashes it comes in parts.

    Args:
        blocks: of messages.
        decode: decodes a block.
        refuse: makes the result for a message that crashes the process alone.

    Raises:
        DecoderCrashedError: more than :data:`MOST_CRASHES` messages do, or the decoder cannot be loaded.
        Exception: whatever ``decode`` raises.
    """
    pickled: bytes = cloudpickle.dumps(decode)  # type: ignore[no-untyped-call]
    refused = 0
    for block in blocks:
        parts = [block]
        while parts:
            part = parts.pop()
            found = _run(pickled, part)
            if not isinstance(found, _CrashError):
                yield found
                continue
            if part.num_rows > 1:
                _log.warning("decoding %d messages %s; halves of them are tried", part.num_rows, found.reason(part))
                half = part.num_rows // 2
                parts += [part.slice(half), part.slice(0, half)]
                continue
            refused += 1
            if refused > MOST_CRASHES or not part.num_rows:
                raise DecoderCrashedError(
                    f"the decoder crashes for more than {MOST_CRASHES} messages of a batch: it {found.reason(part)}",
                    remedy="Correct the decoder; or take fewer messages a batch (max_records). Nothing was written.",
                )
            yield refuse(part, f"decoding this message {found.reason(part)}")


def _run(decode: bytes, part: pa.RecordBatch) -> pa.RecordBatch | _CrashError:
    found = _try(decode, part)
    if isinstance(found, _CrashError) and part.num_rows == 1:
        # The system may have ended the first process for another reason.
        found = _try(decode, part)
    return found


def _try(decode: bytes, part: pa.RecordBatch) -> pa.RecordBatch | _CrashError:
    process = _take()
    try:
        found = process.run(decode, part)
    except _CrashError as error:
        found = error
    except BaseException:
        process.end()
        raise
    _idle.append(process)
    if isinstance(found, _CrashError):
        return found
    if isinstance(found, Exception):
        raise found
    return found


def _take() -> _Process:
    """A process that waits, or a new one; another thread may take the last one first."""
    with suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.is_alive():
                return process
            process.end()
    return _Process()


def decode_here(decode: Decode, block: pa.RecordBatch) -> pa.RecordBatch:
    """Decode a block in this process, a Python worker of Spark; it ends if that takes too much memory.

    Spark fails the job then, as for any crash, and the messages are read once more by :func:`decode_isolated`.
    """
    try:
        with limited_memory(block.nbytes):
            return decode(block)
    except MemoryError:
        os._exit(1)


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


# A process that is forked from this one must not write into the same pipes.
os.register_at_fork(after_in_child=_idle.clear)
