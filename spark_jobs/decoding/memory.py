"""A limit for the memory that decoding a block may take, so that one payload cannot exhaust the machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

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


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Limit the memory of this process to what it has plus the allowance for a block; no limit where Linux is not.

    What needs more raises ``MemoryError``, or ends the process if its code cannot.

    Args:
        size: of the block, in bytes.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    except OSError:
        yield
        return
    limit = pages * resource.getpagesize() + allowance(size)
    given = [limit, *(one for one in (before, hard) if one != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(given), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
