"""Acknowledgements, many in a round trip."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from stream_consumers.errors import StreamEndedError


class AckFlusher:
    """Gathers acknowledgements for a moment and sends them together (eventbus's ack flusher).

    The first one opens a window; it is sent when it is full, or when its time is over. If sending fails, everybody who
    waits gets the error, and ``on_error`` is told once; the entries stay pending.

    Args:
        send: sends these ids.
        on_error: told of a window that could not be sent: the error, and of how many ids.
        batch_size: how many fill a window.
        interval_seconds: how long a window stays open.

    Example:
        >>> sent = []
        >>> flusher = AckFlusher(sent.append, on_error=print, batch_size=2, interval_seconds=60)
        >>> first, second = flusher.submit("1-0"), flusher.submit("2-0")
        >>> second.result(), sent
        (None, [['1-0', '2-0']])
        >>> flusher.close(1.0)
        True
    """

    def __init__(
        self,
        send: Callable[[Sequence[str]], object],
        *,
        on_error: Callable[[Exception, int], None],
        batch_size: int = 64,
        interval_seconds: float = 0.002,
    ) -> None:
        self._send, self._on_error = send, on_error
        self._batch_size, self._interval = batch_size, interval_seconds
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, Future[None]]] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="ack-flusher", daemon=True)
        self._thread.start()

    def submit(self, entry_id: str) -> Future[None]:
        """Acknowledge an entry; the result is there when the server knows of it.

        Raises:
            StreamEndedError: it was closed; the entry stays pending.
        """
        future: Future[None] = Future()
        with self._changed:
            if self._is_closing:
                raise _closed()
            self._waiting.append((entry_id, future))
            self._changed.notify()
        return future

    def close(self, timeout: float) -> bool:
        """Send what waits; whether all of it was sent, or failed, in so many seconds."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def abort(self) -> None:
        """Send nothing more; who waits gets an error."""
        with self._changed:
            self._is_closing = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for _, future in waiting:
            future.set_exception(_closed())

    def _run(self) -> None:
        while window := self._next_window():
            ids = [entry_id for entry_id, _ in window]
            try:
                self._send(ids)
            except Exception as error:  # noqa: BLE001 - everybody who waits gets it
                self._on_error(error, len(ids))
                for _, future in window:
                    future.set_exception(error)
            else:
                for _, future in window:
                    future.set_result(None)

    def _next_window(self) -> list[tuple[str, Future[None]]]:
        """The next window; an empty one when it is closed and there is nothing left."""
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            ends = time.monotonic() + self._interval
            while len(self._waiting) < self._batch_size and not self._is_closing:
                left = ends - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            window, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            return window


def _closed() -> StreamEndedError:
    return StreamEndedError("the subscription was closed", remedy="The entry stays pending, and is delivered again.")
