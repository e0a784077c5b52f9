"""Commits of a tracked consumer: one at a time, again after a failure, also while nothing else happens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection

from stream_consumers.committer import EntryCommitter, PositionCommitter, TransactionCommitter
from stream_consumers.errors import StreamAssetsError, TransactionAbortedError
from stream_consumers.messages import Shard
from stream_consumers.tracking.committers import CommitResult
from stream_consumers.tracking.options import TrackingOptions
from stream_consumers.tracking.shards import TrackedShards

_log = logging.getLogger(__name__)


class BackgroundCommit:
    """Commits what may be committed, when it is asked to and in a thread of its own.

    Args:
        committer: where to.
        shards: what may be committed; only touched with ``changed`` held.
        changed: the lock of ``shards``, notified when a commit ends.
        options: when to commit in the background.
    """

    def __init__(
        self,
        committer: PositionCommitter,
        shards: TrackedShards,
        changed: threading.Condition,
        options: TrackingOptions,
    ) -> None:
        self._committer, self._shards, self._changed, self._options = committer, shards, changed, options
        self._entries = committer if isinstance(committer, EntryCommitter) else None
        self._transactions = committer if isinstance(committer, TransactionCommitter) else None
        # Whether a commit is under way, and why the last one failed; ``None`` after one that did not.
        self.is_running = False
        self.error: Exception | None = None
        self._turns = 0
        self._acknowledged = self._tried = 0
        self._failures = 0
        self._ended_at = time.monotonic()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Commit in the background, too."""
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the background thread; nothing is committed by this."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def acknowledged(self) -> None:
        """Count a message; call it with ``changed`` held."""
        self._acknowledged += 1
        every = self._options.commit_every
        if every is not None and self._acknowledged - self._tried >= every:
            self._wake.set()

    def forgive(self) -> None:
        """Everything was moved back to what is committed: an aborted transaction is over."""
        if isinstance(self.error, TransactionAbortedError):
            self.error, self._failures = None, 0

    def commit(
        self,
        chosen: Collection[str | Shard] | None = None,
        *,
        start_new_transaction: bool = True,
        is_forced: bool = False,
    ) -> CommitResult:
        """See :meth:`stream_consumers.tracking.consumer.TrackedConsumer.commit`."""
        with self._changed:
            while self.is_running:
                turn = self._turns
                self._changed.wait_for(lambda: self._turns != turn)  # noqa: B023 - it is waited for at once
                if not is_forced:
                    return CommitResult.ANOTHER_WAS_RUNNING
            self.is_running = True
        try:
            return self.commit_now(chosen, start_new_transaction=start_new_transaction)
        finally:
            with self._changed:
                self.is_running = False
                self._turns += 1
                self._ended_at = time.monotonic()
                self._changed.notify_all()

    def commit_now(
        self, chosen: Collection[str | Shard] | None = None, *, start_new_transaction: bool = True
    ) -> CommitResult:
        """Commit without waiting for one that is under way: by the thread that gives shards back.

        That one may wait for the very consumer that this thread holds.
        """
        with self._changed:
            if isinstance(self.error, TransactionAbortedError):
                return CommitResult.FAILED
            positions, counted = self._shards.committable(chosen), self._acknowledged
            entries = {} if self._entries is None else self._shards.finished(chosen)
            is_ending = not start_new_transaction and self._transactions is not None and self._transactions.is_open
            if not (entries if self._entries is not None else positions or is_ending):
                self._tried = counted
                if chosen is None:
                    # What failed before is committed since, or its shard has another owner now.
                    self.error, self._failures = None, 0
                return CommitResult.NOTHING_TO_DO
        try:
            if self._entries is not None:
                self._entries.commit_entries(entries)
            elif self._transactions is not None:
                self._transactions.commit(positions, start_new_transaction=start_new_transaction)
            else:
                self._committer.commit(positions)
        except Exception as error:  # noqa: BLE001 - a committer may raise anything; it is kept, and tried again
            if isinstance(error, StreamAssetsError):
                _log.warning("committing %d shards failed: %s", len(positions or entries), error)
            else:
                _log.exception("committing %d shards failed", len(positions or entries))
            with self._changed:
                self.error = error
                self._failures += 1
                self._ended_at = time.monotonic()
            self._wake.set()
            return CommitResult.FAILED
        with self._changed:
            self._shards.committed(positions)
            self._shards.settled(entries)
            self.error, self._failures = None, 0
            if chosen is None:
                self._acknowledged -= counted
                self._tried = 0
        return CommitResult.COMMITTED

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._delay())
            self._wake.clear()
            if not self._closing.is_set() and self._is_due():
                self.commit()

    def _delay(self) -> float | None:
        """Seconds until something is due by itself."""
        with self._changed:
            wait = self._wait_seconds()
            return None if wait is None else max(0.0, self._ended_at + wait - time.monotonic())

    def _is_due(self) -> bool:
        with self._changed:
            wait, every = self._wait_seconds(), self._options.commit_every
            if wait is not None and time.monotonic() >= self._ended_at + wait:
                return True
            is_enough = every is not None and self._acknowledged - self._tried >= every
            return is_enough and not self._failures

    def _wait_seconds(self) -> float | None:
        if self._failures:
            # Beyond 32 doublings every limit is reached.
            grown: float = self._options.retry_seconds * 2.0 ** min(self._failures - 1, 32)
            return min(grown, self._options.retry_limit_seconds)
        return self._options.commit_interval_seconds
