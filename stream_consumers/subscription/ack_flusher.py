"""Sends acknowledgements in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from stream_consumers.errors import StreamEndedError


class AckFlusher:
    """Collects acknowledgements for a moment and sends them in one batch (eventbus's ack flusher).

    The first acknowledgement opens a batch. The batch is sent when it is full, or when its time is over. If sending
    fails, everybody who waits for one of its acknowledgements gets the error, ``on_error`` is called once, and the
    entries stay pending.

    Args:
        send: called with the ids of a batch; it acknowledges them.
        on_error: called with the error and the number of ids when a batch could not be sent.
        batch_size: the number of acknowledgements that fill a batch.
        interval_seconds: seconds that a batch waits for more acknowledgements.

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
        """Acknowledge an entry; the future has its result when the server has confirmed it.

        Raises:
            StreamEndedError: the flusher was closed; the entry stays pending.
        """
        future: Future[None] = Future()
        with self._changed:
            if self._is_closing:
                raise _closed()
            self._waiting.append((entry_id, future))
            self._changed.notify()
        return future

    def close(self, timeout_seconds: float) -> bool:
        """Send what waits; returns whether all of it was sent, or failed, within ``timeout_seconds``."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, timeout_seconds))
        return not self._thread.is_alive()

    def abort(self) -> None:
        """Send nothing more; everybody who waits gets an error."""
        with self._changed:
            self._is_closing = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for _, future in waiting:
            future.set_exception(_closed())

    def _run(self) -> None:
        while batch := self._next_batch():
            ids = [entry_id for entry_id, _ in batch]
            try:
                self._send(ids)
            except Exception as error:  # noqa: BLE001 - everybody who waits gets the error
                self._on_error(error, len(ids))
                for _, future in batch:
                    future.set_exception(error)
            else:
                for _, future in batch:
                    future.set_result(None)

    def _next_batch(self) -> list[tuple[str, Future[None]]]:
        """The next batch; an empty one when the flusher is closed and nothing is left."""
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            ends = time.monotonic() + self._interval
            while len(self._waiting) < self._batch_size and not self._is_closing:
                left = ends - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            return batch


def _closed() -> StreamEndedError:
    return StreamEndedError("the subscription was closed", remedy="The entry stays pending, and is delivered again.")
