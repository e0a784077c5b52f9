"""Decoding that no payload can stop: a block for which the decoder crashes or raises is halved down to single messages.

A process of its own decodes, so that a crash does not end the process that reads or writes.
The protocol between the two processes is in :mod:`spark_jobs.decoding.isolated_process`.
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
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import pyarrow as pa
from pyspark import cloudpickle

from spark_jobs.decoding import isolated_process
from spark_jobs.decoding.isolated_process import OUT_OF_MEMORY, Reply, Request, receive, send, to_block, to_bytes
from spark_jobs.decoding.limits import allowance, limited_memory
from spark_jobs.python_start import own_python
from stream_consumers.errors import DecoderCrashedError, StreamAssetsError

MOST_CRASHES = 20
"""How many messages of a batch, or of an executor's split, the decoder may fail for before it counts as broken."""
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

    def failure(self, block: pa.RecordBatch) -> _Failure:
        """What decoding a block did."""
        if self.code == OUT_OF_MEMORY:
            return _Failure(f"needed more than {allowance(block.nbytes)} bytes of memory")
        return _Failure(str(self))


@dataclass(frozen=True, slots=True)
class _Failure:
    """A block that could not be decoded as a whole; the reason holds no text of an error, which may hold payloads."""

    reason: str


class _Process:
    """A process that decodes; it ends when this one does, however that ends."""

    def __init__(self) -> None:
        # It imports what this process can. In a session of its own no signal of a terminal reaches it.
        command = own_python(f"from {isolated_process.__name__} import serve; serve()")
        self._process = subprocess.Popen(  # noqa: S603 - fixed words
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
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
        refuse: makes the result for a message that alone crashes the process, or for which ``decode`` raises.

    Raises:
        DecoderCrashedError: there are more than :data:`MOST_CRASHES` such messages, or the decoder cannot be loaded.
        StreamAssetsError: what ``decode`` raises, like a schema registry that does not answer.
    """
    pickled: bytes = cloudpickle.dumps(decode)  # type: ignore[no-untyped-call]
    return _halved(blocks, partial(_run, pickled), refuse)


def decode_here(blocks: Iterable[pa.RecordBatch], decode: Decode, refuse: Refuse) -> Iterator[pa.RecordBatch]:
    """Decode blocks in this process, a Python worker of Spark; it ends if that takes too much memory.

    Spark fails the job then, as for any crash, and the messages are read once more by :func:`decode_isolated`, which
    says what the arguments are, and what else is raised.
    """
    return _halved(blocks, partial(_run_here, decode), refuse)


def _halved(
    blocks: Iterable[pa.RecordBatch], run: Callable[[pa.RecordBatch], pa.RecordBatch | _Failure], refuse: Refuse
) -> Iterator[pa.RecordBatch]:
    refused = 0
    for block in blocks:
        parts = [block]
        while parts:
            part = parts.pop()
            found = run(part)
            if not isinstance(found, _Failure):
                yield found
                continue
            if part.num_rows > 1:
                _log.warning("decoding %d messages %s; halves of them are tried", part.num_rows, found.reason)
                half = part.num_rows // 2
                parts += [part.slice(half), part.slice(0, half)]
                continue
            refused += 1
            if refused > MOST_CRASHES or not part.num_rows:
                raise DecoderCrashedError(
                    f"the decoder fails for more than {MOST_CRASHES} messages of a batch: it {found.reason}",
                    remedy="Correct the decoder; or take fewer messages a batch (max_records). Nothing was written.",
                )
            yield refuse(part, f"decoding this message {found.reason}")


def _run(decode: bytes, part: pa.RecordBatch) -> pa.RecordBatch | _Failure:
    try:
        return _try(decode, part)
    except _CrashError as error:
        if part.num_rows > 1:
            return error.failure(part)
    try:
        # The system may have ended the first process for another reason.
        return _try(decode, part)
    except _CrashError as error:
        return error.failure(part)


def _try(decode: bytes, part: pa.RecordBatch) -> pa.RecordBatch | _Failure:
    process = _take()
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


def _run_here(decode: Decode, part: pa.RecordBatch) -> pa.RecordBatch | _Failure:
    try:
        with limited_memory(part.nbytes):
            return decode(part)
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything for a payload
        return _failed(error)


def _failed(error: Exception) -> _Failure:
    """What a decoder did that raised.

    Raises:
        StreamAssetsError: the error, if it is not about a payload.
    """
    if isinstance(error, StreamAssetsError):
        raise error
    return _Failure(f"raised {type(error).__name__}")


def _take() -> _Process:
    """A process that waits, or a new one; another thread may take the last one first."""
    with suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.is_alive():
                return process
            process.end()
    return _Process()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


# A process that is forked from this one must not write into the same pipes.
os.register_at_fork(after_in_child=_idle.clear)
