"""The process in which :mod:`spark_jobs.decoding.isolation` decodes, its protocol, and its limits.

The process imports modules and forks a child, which decodes; if the child crashes, it forks another one. It reads
requests from its standard input, the pickled decoder and then blocks as Arrow streams, and writes one reply to each on
its standard output.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import pickle
import resource
import select
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

# Imported before the first request, because unpickling the decoder would import them.
_IMPORTED_EARLY = ("spark_jobs.reading.blocks", "spark_jobs.decoding.json_decoder")
_HEADER = struct.Struct("<cQ")
OUT_OF_MEMORY = 117
"""The exit code of a process that needed more memory for a block than its limit."""
BASE_MEMORY = 2 << 30
"""Memory for decoding a block of any size, in bytes; at most a quarter of the machine's memory."""
MEMORY_PER_BYTE = 32
"""Additional memory for each byte of the block, in bytes."""
BASE_SECONDS = 30.0
"""CPU time for decoding a block of any size, in seconds. Slow decoders of honest messages take a fraction of it."""
SECONDS_PER_MESSAGE = 0.05
"""Additional CPU time for each message of the block, in seconds."""
SECONDS_PER_BYTE = 2e-5
"""Additional CPU time for each byte of the block, in seconds."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Request(enum.Enum):
    """The kinds of requests."""

    DECODER = b"D"
    BLOCK = b"B"


class Reply(enum.Enum):
    """The kinds of replies."""

    READY = b"D"
    ROWS = b"B"
    RAISED = b"E"
    CRASHED = b"C"


def send(stream: IO[bytes], kind: bytes, content: bytes | pa.Buffer = b"") -> None:
    """Write a request or a reply."""
    stream.write(_HEADER.pack(kind, len(content)))
    stream.write(memoryview(content))
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """Read a request or a reply, and return its kind and content.

    Raises:
        EOFError: the other process has ended.
    """
    kind, size = _HEADER.unpack(_exactly(stream, _HEADER.size))
    return kind, _exactly(stream, size)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found


def to_bytes(block: pa.RecordBatch) -> pa.Buffer:
    """Serialize a block as an Arrow stream."""
    made = pa.BufferOutputStream()
    with pa.ipc.new_stream(made, block.schema) as writer:
        writer.write_batch(block)
    return made.getvalue()


def to_block(content: bytes) -> pa.RecordBatch:
    """Read the block of an Arrow stream."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_next_batch()


def serve() -> None:
    """Decode blocks until the standard input ends."""
    # A signal to all processes of a service must not look like a crash. The process ends with its parent anyway.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Output that a decoder prints must not be read as a reply.
    requests, replies = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Payloads must not be in core files; and if memory is short, the kernel should kill this process first.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for name in _IMPORTED_EARLY:
        import_module(name)
    is_busy = mmap.mmap(-1, 1)
    with suppress(EOFError, BrokenPipeError):
        while process := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            if not is_busy[0]:
                # The input has ended, or the child died while it wrote a reply: end, so that the parent stops reading.
                os._exit(0)
            is_busy[0] = False
            _end_with_parent(False)
            send(replies, Reply.CRASHED.value, str(code).encode())
        _decode_blocks(requests, replies, is_busy)
    # A normal exit would flush a reply again that the other process did not live to read.
    os._exit(0)


def _decode_blocks(requests: IO[bytes], replies: IO[bytes], is_busy: mmap.mmap) -> None:
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    decode: Any = None
    while True:
        kind, content = receive(requests)
        is_busy[0] = True
        _end_with_parent(True)
        try:
            if Request(kind) is Request.DECODER:
                decode = pickle.loads(content)  # noqa: S301 - sent by the process that started this one
                answer: tuple[Any, ...] = (Reply.READY.value,)
            else:
                block = to_block(content)
                with limited_memory(block.nbytes), limited_time(block):
                    answer = (Reply.ROWS.value, to_bytes(decode(block)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = (Reply.RAISED.value, _pickled(error))
        _end_with_parent(False)
        is_busy[0] = False
        send(replies, *answer)


def _end_with_parent(ends: bool) -> None:
    """Let the kernel end this process by SIGIO as soon as its input ends, whatever it is doing."""
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) & ~os.O_ASYNC | (os.O_ASYNC if ends else 0))
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    if ends and poll.poll(0):
        sys.exit()


def _pickled(error: Exception) -> bytes:
    try:
        found = pickle.dumps(error)
        pickle.loads(found)  # noqa: S301 - just made
    except Exception:  # noqa: BLE001 - errors of other packages may do anything here
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return found


def allowance(size: int) -> int:
    """Return the memory that decoding a block of this size may use, both in bytes."""
    return min(BASE_MEMORY, machine_bytes() // 4) + MEMORY_PER_BYTE * size


@cache
def machine_bytes() -> int:
    """Return the memory of the machine, or of the container if it has less, in bytes."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _CGROUP_LIMITS:
        # Only one of the two files exists, and the one of version 2 may contain "max".
        with suppress(OSError, ValueError):
            found.append(int(Path(file).read_text()))
    return min(found)


# For each block that is being decoded, the memory that was free at its start.
_free_at_start: list[int] = []


def is_memory_short() -> bool:
    """Return whether more than a quarter of the memory that was free on entry to :func:`limited_memory` is used.

    A library that fails without a reason may have run out of memory.
    """
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return bool(_free_at_start) and _free_bytes(limit) < 0.75 * _free_at_start[-1]


def _free_bytes(limit: int) -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    return limit - pages * resource.getpagesize()


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Limit the memory of this process to what it uses now plus the allowance for a block; on Linux only.

    Code that needs more raises ``MemoryError``, or ends the process if it cannot raise it.

    Args:
        size: the size of the block in bytes.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        limit = allowance(size) - _free_bytes(0)
    except OSError:
        yield
        return
    given = [limit, *(one for one in (before, hard) if one != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(given), hard))
    _free_at_start.append(_free_bytes(min(given)))
    try:
        yield
    finally:
        _free_at_start.pop()
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def allowed_seconds(block: pa.RecordBatch) -> float:
    """CPU time that decoding a block may take, in seconds."""
    return BASE_SECONDS + SECONDS_PER_MESSAGE * block.num_rows + SECONDS_PER_BYTE * block.nbytes


@contextmanager
def limited_time(block: pa.RecordBatch) -> Iterator[None]:
    """Let the kernel end this process by SIGPROF once decoding has used the CPU time that its block may take.

    An exception would not do, because a library that never returns to Python cannot raise it. Time in which the process
    waits, for instance for a schema registry, does not count.
    """
    signal.setitimer(signal.ITIMER_PROF, allowed_seconds(block))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
