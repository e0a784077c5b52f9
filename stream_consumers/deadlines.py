"""Deadlines of calls that wait for a server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call, or abandon it if it takes longer.

    The timeout of a client starts again with each byte, so a server that sends a byte from time to time holds it
    forever. The thread of an abandoned call ends with its connection, or with the process.

    Args:
        seconds: how long to wait.
        call: the call, which may go on after it was abandoned.

    Raises:
        TimeoutError: it takes longer.
        BaseException: whatever the call raises.

    Example:
        >>> within(10, lambda: 7)
        7
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            found.set_exception(error)

    thread = Thread(target=run, name="with a deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found.done():
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    return found.result()
