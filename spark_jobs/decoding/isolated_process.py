"""The process of :mod:`spark_jobs.decoding.isolation`, and the protocol on its standard input and output.

The process does the imports and forks another one, which decodes, and a new one whenever that crashes. A request is the
pickled decoder, then blocks, each as an Arrow stream; each request gets one reply.
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
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from spark_jobs.decoding.limits import limited_memory

# Imported before the first request comes; the pickled decoder would import them.
_IMPORTED_EARLY = ("spark_jobs.reading.blocks", "spark_jobs.decoding.json_decoder")
_HEADER = struct.Struct("<cQ")
OUT_OF_MEMORY = 117
"""The exit code of a process that decoding a block needed more memory for than it may take."""


class Request(enum.Enum):
    """What the process is asked."""

    DECODER = b"D"
    BLOCK = b"B"


class Reply(enum.Enum):
    """What it answers."""

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
    """Read a request or a reply: its kind and content.

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
    """A block as an Arrow stream."""
    made = pa.BufferOutputStream()
    with pa.ipc.new_stream(made, block.schema) as writer:
        writer.write_batch(block)
    return made.getvalue()


def to_block(content: bytes) -> pa.RecordBatch:
    """The block of an Arrow stream."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_next_batch()


def serve() -> None:
    """Decode blocks until the standard input ends."""
    # A signal to all processes of a service must not look like a crash; the process ends with its parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What a decoder prints is no reply.
    requests, replies = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Payloads stay out of core files; and of all processes the kernel ends this one when memory is short.
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
                # Its input has ended; or it died with half a reply written, and the other process must not wait for it.
                os._exit(0)
            is_busy[0] = False
            _end_with_parent(False)
            send(replies, Reply.CRASHED.value, str(code).encode())
        _decode_blocks(requests, replies, is_busy)
    # A reply that the other process did not live to read would be tried once more at a normal exit.
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
                decode = pickle.loads(content)  # noqa: S301 - of the process that started this one
                answer: tuple[Any, ...] = (Reply.READY.value,)
            else:
                block = to_block(content)
                with limited_memory(block.nbytes):
                    answer = (Reply.ROWS.value, to_bytes(decode(block)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = (Reply.RAISED.value, _pickled(error))
        _end_with_parent(False)
        is_busy[0] = False
        send(replies, *answer)


def _end_with_parent(ends: bool) -> None:
    """Let the kernel end this process as soon as its input ends, whatever it is doing; SIGIO does, unless handled."""
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
