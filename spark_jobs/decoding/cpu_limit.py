"""A limit on the CPU time of a block of code that another's pattern, or another's data, may hold up without end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
