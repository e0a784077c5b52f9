"""Commits of a tracked consumer: its committer, and the thread that commits and retries."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Collection

from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer, EntryCommitter, PositionCommitter, TransactionCommitter
from stream_consumers.errors import InvalidOptionError, TransactionAbortedError, log_text
from stream_consumers.in_process_groups import SharedGroupConsumer
from stream_consumers.messages import Shard
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.tracking.options import TrackingOptions
from stream_consumers.tracking.shards import TrackedShards
from stream_consumers.urls import StreamUrl

_log = logging.getLogger(__name__)


class CommitResult(enum.Enum):
    """The result of a commit; Faust's ``bool`` does not distinguish the four.

    Example:
        >>> CommitResult.FAILED.value, bool(CommitResult.FAILED)
        ('failed', False)
    """

    NOTHING_TO_DO = "nothing to do"
    COMMITTED = "committed"
    ANOTHER_WAS_RUNNING = "another was running"
    FAILED = "failed"

    def __bool__(self) -> bool:
        """Return whether something was committed, as Faust's commit returns."""
        return self is CommitResult.COMMITTED


def check_committer(consumer: Consumer, committer: PositionCommitter) -> None:
    """Refuse to commit positions for a consumer that shares the messages of each shard with other members.

    Args:
        consumer: the consumer that reads.
        committer: the committer that would store its positions.

    Raises:
        InvalidOptionError: the committer cannot commit for the consumer; the remedy names one that can.

    Example:
        >>> from stream_consumers.consumer import ProcessCommitter
        >>> from stream_consumers.create import create_consumer
        >>> check_committer(create_consumer("file://orders.ss/orders"), ProcessCommitter())
    """
    if isinstance(consumer, SharedGroupConsumer):
        raise InvalidOptionError(
            f"a member of group {consumer.group!r} gets only some messages of each shard: a position would also "
            "commit the messages of other members",
            remedy="Track a consumer without a group, and share its messages between threads.",
        )
    if isinstance(committer, RedisGroupConsumer):
        committer.check_waits_for_ack()
    elif isinstance(consumer, RedisGroupConsumer) and not isinstance(committer, EntryCommitter):
        raise InvalidOptionError(
            f"{type(committer).__name__} stores positions, but {consumer} gets entries that must be acknowledged one "
            "by one: no entry would be acknowledged",
            remedy="Give the consumer itself as the committer, or use create_committer with it.",
        )


def create_committer(
    url: str | StreamUrl, group: str, *, consumer: Consumer | None = None, client: ClientConfig | None = None
) -> PositionCommitter:
    """Create the committer that stores the positions of a group of this stream.

    Args:
        url: the stream.
        group: the group.
        consumer: the consumer that reads. A Kafka group accepts positions from its members only, and only the member
            that holds an entry of a Redis group acknowledges it.
        client: the configuration of the broker's client.

    Raises:
        GroupsNotRememberedError: no broker stores positions of groups, or ``consumer`` is missing for Kafka.
        InvalidOptionError: the consumer is a member of another group, or acknowledges automatically.

    Example:
        >>> create_committer(StreamUrl.parse("file:///tmp/a.ss/orders"), "billing")
        Traceback (most recent call last):
        stream_consumers.errors.GroupsNotRememberedError: no broker stores group positions of file:///tmp/a.ss/orders \
(group=billing). Store the positions yourself, or use ProcessCommitter to keep them for the life of this process.
    """
    url = StreamUrl.parse(url)
    return find_backend(url.protocol).committer(url, group, consumer=consumer, client=client or {})


class BackgroundCommit:
    """Commits the positions that may be committed, on request and in a background thread.

    Args:
        committer: stores the positions.
        shards: the progress of the shards; only used with ``changed`` held.
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
        # Whether a commit is running, and the error of the last one; ``None`` after one that succeeded.
        self.is_running = False
        self.error: Exception | None = None
        self._ended_commits = 0
        self._acknowledged = self._tried = 0
        self._failures = 0
        self._ended_at = time.monotonic()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to commit in the background."""
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the background thread without a commit."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def count_acknowledged(self) -> None:
        """Count an acknowledged message; call this with ``changed`` held."""
        self._acknowledged += 1
        every = self._options.commit_every
        if every is not None and self._acknowledged - self._tried >= every:
            self._wake.set()

    def clear_abort(self) -> None:
        """Clear the error of an aborted transaction, after every shard was moved back to its committed position."""
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
                ended = self._ended_commits
                self._changed.wait_for(lambda: self._ended_commits != ended)  # noqa: B023 - not used later
                if not is_forced:
                    return CommitResult.ANOTHER_WAS_RUNNING
            self.is_running = True
        try:
            return self.commit_now(chosen, start_new_transaction=start_new_transaction)
        finally:
            with self._changed:
                self.is_running = False
                self._ended_commits += 1
                self._ended_at = time.monotonic()
                self._changed.notify_all()

    def commit_now(
        self, chosen: Collection[str | Shard] | None = None, *, start_new_transaction: bool = True
    ) -> CommitResult:
        """Commit without waiting for a running commit, in the thread that releases revoked shards.

        The running commit may be waiting for the consumer that this thread holds.
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
                    # The position of a failed commit was committed since, or its shard has another owner now.
                    self.error, self._failures = None, 0
                return CommitResult.NOTHING_TO_DO
        try:
            if self._entries is not None:
                self._entries.commit_entries(entries)
            elif self._transactions is not None:
                self._transactions.commit(positions, start_new_transaction=start_new_transaction)
            else:
                self._committer.commit(positions)
        except Exception as error:  # noqa: BLE001 - a committer may raise anything; the commit is retried
            _log.warning("committing %d shards failed: %s", len(positions or entries), log_text(error))
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
        """Return the seconds until the next commit by interval or retry; ``None`` if neither is due."""
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
            # 32 doublings exceed every limit.
            grown: float = self._options.retry_seconds * 2.0 ** min(self._failures - 1, 32)
            return min(grown, self._options.retry_limit_seconds)
        return self._options.commit_interval_seconds
