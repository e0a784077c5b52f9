"""CPU-seconds and memory of a tree of processes, from ``/proc``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAUSE_SECONDS = 0.25


@dataclass(slots=True)
class Cost:
    """The CPU time and memory that processes used during a block.

    Args:
        cpu_seconds: the CPU time of all processes, including those that ended.
        peak_bytes: the peak memory; shared memory counts once.
        peak_java_bytes: the peak memory of the JVMs among them.
    """

    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    peak_java_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of processes at one moment.

    Args:
        processes: the number of processes.
        bytes: their memory; shared memory counts once.
        java_bytes: the memory of the JVMs among them.
    """

    processes: int
    bytes: int
    java_bytes: int


class ProcessTree:
    """Some processes and their descendants.

    Args:
        roots: the ids of the processes.
        without: the ids of processes that are left out with their descendants.
    """

    def __init__(self, *roots: int, without: Set[int] = frozenset()) -> None:
        self._roots = set(roots)
        self._ignored = without

    def processes(self) -> set[int]:
        """The ids of the processes that are alive."""
        found: set[int] = set()
        left = self._roots - self._ignored
        while left:
            found |= left
            left = {child for parent in left for child in _children(parent)} - found - self._ignored
        return found

    def memory(self) -> Memory:
        """The memory of the processes that are alive."""
        sizes = {process: _memory(process) for process in self.processes()}
        java = sum(size for process, size in sizes.items() if _is_java(process))
        return Memory(len(sizes), sum(sizes.values()), java)

    @contextmanager
    def measured(self) -> Iterator[Cost]:
        """Measure the block; the yielded cost is complete when the block has ended."""
        cost, over = Cost(), threading.Event()
        before = self._cpu_seconds()

        def watch() -> None:
            while True:
                memory = self.memory()
                cost.peak_bytes = max(cost.peak_bytes, memory.bytes)
                cost.peak_java_bytes = max(cost.peak_java_bytes, memory.java_bytes)
                if over.wait(_PAUSE_SECONDS):
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield cost
        finally:
            over.set()
            watcher.join()
            cost.cpu_seconds = self._cpu_seconds() - before

    def _cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, self.processes()))


def _children(process: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):
                found |= set(map(int, (thread / "children").read_text().split()))
    return found


def _cpu_seconds(process: int) -> float:
    """The CPU-seconds of a process, including those of the children that it waited for."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICK


def _memory(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _is_java(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip() == "java"
    return False
