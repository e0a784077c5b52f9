"""Limits for decoding a block: memory, and CPU time where the pattern of a schema could take it without end."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block once the process has used this much CPU time.

    Python delivers signals to the main thread only: in another thread there is no limit.

    Args:
        seconds: of CPU time, of all threads.

    Raises:
        TimeoutError: out of the block.

    Example:
        >>> with cpu_limit(0.1):
        ...     while True:
        ...         pass
        Traceback (most recent call last):
        TimeoutError: it takes more than 0.1 s
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:.3g} s")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


MOST_BYTES = 2 << 30
"""Memory that decoding a block may take whatever its size, in bytes; at most a quarter of the machine's."""
BYTES_PER_BYTE = 32
"""Memory that it may take for each byte of the block, in bytes."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def allowance(size: int) -> int:
    """Memory that decoding a block may take, in bytes.

    Args:
        size: of the block, in bytes.
    """
    return min(MOST_BYTES, machine_bytes() // 4) + BYTES_PER_BYTE * size


@cache
def machine_bytes() -> int:
    """The memory of the machine, or of the container if that is less, in bytes."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _CGROUP_LIMITS:
        # The file of version 2 may say "max", and one of the two is missing.
        with suppress(OSError, ValueError):
            found.append(int(Path(file).read_text()))
    return min(found)


# The memory that was free when the blocks that are being decoded were begun.
_free_at_start: list[int] = []


def is_memory_short() -> bool:
    """Whether more than a quarter of the memory that was free when :func:`limited_memory` was entered is taken.

    A library that does not say why it fails may have failed for this.
    """
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return bool(_free_at_start) and _free_bytes(limit) < 0.75 * _free_at_start[-1]


def _free_bytes(limit: int) -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    return limit - pages * resource.getpagesize()


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Limit the memory of this process to what it has plus the allowance for a block; no limit where Linux is not.

    What needs more raises ``MemoryError``, or ends the process if its code cannot.

    Args:
        size: of the block, in bytes.
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
