"""Sends acknowledgements in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from stream_consumers.errors import StreamEndedError


@dataclass(eq=False)
class _Batch:
    """The ids of a batch, and what became of it."""

    ids: list[str] = field(default_factory=list)
    answer: Future[None] = field(default_factory=Future)


class AckFlusher:
    """Collects acknowledgements for a moment and sends them in one batch (eventbus's ack flusher).

    The first thread that acknowledges opens a batch, and sends it when it is full or when its time is over. If sending
    fails, each thread of the batch gets the error, ``on_error`` is called once, and the entries stay pending.

    Args:
        send: called with the ids of a batch; it acknowledges them.
        on_error: called with the error and the number of ids when a batch could not be sent.
        batch_size: the number of acknowledgements that fill a batch.
        interval_seconds: seconds that a batch waits for more acknowledgements.

    Example:
        >>> sent = []
        >>> flusher = AckFlusher(sent.append, on_error=print, batch_size=1)
        >>> flusher.acknowledge("1-0")
        >>> sent, flusher.close(1.0)
        ([['1-0']], True)
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
        self._open: _Batch | None = None
        self._unsent = 0
        self._is_closing = self._is_aborted = False

    def acknowledge(self, entry_id: str) -> None:
        """Acknowledge an entry; returns when the server has confirmed it.

        Raises:
            StreamEndedError: the flusher was closed; the entry stays pending.
        """
        with self._changed:
            if self._is_closing:
                raise _closed()
            batch = self._open or _Batch()
            batch.ids.append(entry_id)
            is_first, is_full = self._open is None, len(batch.ids) >= self._batch_size
            self._open = None if is_full else batch
            self._unsent += is_first
            if is_full:
                self._changed.notify_all()
            elif is_first:
                self._changed.wait_for(lambda: self._open is not batch or self._is_closing, self._interval)
                self._open = None if self._open is batch else self._open
        if is_first:
            self._send_batch(batch)
        batch.answer.result()

    def _send_batch(self, batch: _Batch) -> None:
        try:
            if self._is_aborted:
                batch.answer.set_exception(_closed())
                return
            self._send(batch.ids)
            batch.answer.set_result(None)
        except Exception as error:  # noqa: BLE001 - each thread that waits gets the error
            self._on_error(error, len(batch.ids))
            batch.answer.set_exception(error)
        finally:
            with self._changed:
                self._unsent -= 1
                self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Send what waits; returns whether all of it was sent, or failed, within ``timeout_seconds``."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._unsent, max(0.0, timeout_seconds))

    def abort(self) -> None:
        """Send nothing more; every thread that waits gets an error."""
        with self._changed:
            self._is_closing = self._is_aborted = True
            self._changed.notify_all()


def _closed() -> StreamEndedError:
    return StreamEndedError("the subscription was closed", remedy="The entry stays pending, and is delivered again.")
