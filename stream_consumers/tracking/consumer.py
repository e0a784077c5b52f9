"""A consumer that tracks which messages are finished, and commits only those (Faust's ``Consumer``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from stream_consumers.consumer import (
    Consumer,
    Edge,
    EndReportingConsumer,
    EntryCommitter,
    MeasurableConsumer,
    ObservableConsumer,
    PausableConsumer,
    PollingLock,
    PositionCommitter,
    Positions,
    ShardEnd,
    require_positioned,
    rewind_target,
)
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, StreamEndedError
from stream_consumers.messages import Message, Shard, check_shard
from stream_consumers.options import check_count, check_iterable, check_timeout
from stream_consumers.tracking.commits import BackgroundCommit, CommitResult, check_committer
from stream_consumers.tracking.livelock import Livelock, LivelockWatch, ShardProgress
from stream_consumers.tracking.options import (
    READ_AHEAD,
    Activities,
    Activity,
    Shards,
    TrackingCallbacks,
    TrackingOptions,
)
from stream_consumers.tracking.shards import TrackedShards

_log = logging.getLogger(__name__)
# Kafka's max.poll.records.
MAX_MESSAGES = 500


class TrackedConsumer(Consumer):
    """Wraps any consumer, and tracks its messages; see :class:`stream_consumers.consumer.Consumer`.

    Every message that is returned counts as unfinished until :meth:`ack`. A commit sets the position after the longest
    run of finished messages, so that a crash repeats messages and loses none. All methods are thread-safe.

    Unlike in Faust, messages that were fetched for a paused or full shard are kept and returned later, shards are
    committed *before* they are released, a failed commit is retried, and waits have a deadline.

    With a member of a Redis group, no positions are committed: the member is the committer, each finished message is
    acknowledged by itself, and an unfinished one stays pending.

    Args:
        consumer: the consumer to read from; it is closed with this one.
        committer: stores the positions.
        options: see :class:`stream_consumers.tracking.options.TrackingOptions`.
        callbacks: lifecycle callbacks.

    Raises:
        InvalidOptionError: background commits are enabled for a transaction that another thread is filling, or the
            committer stores positions although the entries of a Redis group are acknowledged one by one.
        StreamAssetsError: ``committer.committed`` raised it.

    Example:
        >>> from stream_consumers.memory import MemoryCommitter
        >>> from stream_consumers.memory import MemoryConsumer, MemoryProducer
        >>> from stream_consumers.urls import StreamUrl
        >>> url = "memory://tracked/orders"
        >>> _ = [MemoryProducer(url).send(b"%d" % number) for number in range(3)]
        >>> committer = MemoryCommitter(url, "billing")
        >>> with TrackedConsumer(MemoryConsumer(url), committer) as consumer:
        ...     messages = [message for shard, message in consumer.getmany(timeout_seconds=1)]
        ...     _ = [consumer.ack(message) for message in messages[1:]]
        ...     print(consumer.commit(), committer.committed())
        ...     _ = consumer.ack(messages[0])
        ...     print(consumer.commit(), committer.committed())
        CommitResult.NOTHING_TO_DO {}
        CommitResult.COMMITTED {Shard(stream='orders', id=0): 3}
    """

    def __init__(
        self,
        consumer: Consumer,
        committer: PositionCommitter,
        *,
        options: TrackingOptions | None = None,
        callbacks: TrackingCallbacks | None = None,
    ) -> None:
        super().__init__()
        self._options = options or TrackingOptions()
        if committer.is_transactional and self._options.commit_interval_seconds is not None:
            raise InvalidOptionError(
                "background commits would end a transaction while messages are still added to it",
                remedy="Set commit_interval_seconds=None and commit_every=None, and call commit between messages.",
            )
        check_committer(consumer, committer)
        self._consumer, self._committer = consumer, committer
        self._callbacks = (callbacks or TrackingCallbacks()).guarded()
        self._changed = threading.Condition()
        self._shards = TrackedShards(self._options, keeps_entries=isinstance(committer, EntryCommitter))
        self._commits = BackgroundCommit(committer, self._shards, self._changed, self._options)
        self._activities = Activities()
        # One thread at a time fetches for all threads that wait for a message.
        self._fetching = PollingLock()
        self._fetched_at: float | None = None
        self._is_flowing = True
        self._returning = 0
        self._paused_in_client: Shards = frozenset()
        self._watch: LivelockWatch | None = None
        if self._options.livelock is not None:
            self._watch = LivelockWatch(
                self.progress,
                self._ends,
                options=self._options.livelock,
                on_livelock=self._callbacks.on_livelock,
            )
        self._is_closing = False
        self._releasing: int | None = None
        for shard, position in committer.committed().items():
            self._shards.start(shard, position)
        if isinstance(consumer, ObservableConsumer):
            consumer.observe(self)
        if not committer.is_transactional:
            self._commits.start()
        if self._watch is not None:
            self._watch.__enter__()

    def __exit__(self, *error: object) -> None:
        """Close; after an error, do not wait for unfinished messages."""
        self.close(timeout_seconds=0.0 if any(error) else None)

    # reading

    def _poll(self, seconds: float) -> Message | None:
        """Return the next message; wait at most ``seconds`` each for the flow, for a commit and for the message."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_flowing, seconds):
                return None
            self._returning += 1
        try:
            return self._take_or_fetch(seconds)
        finally:
            with self._changed:
                self._returning -= 1
                if not self._returning and not self._is_flowing:
                    self._changed.notify_all()

    def _take_or_fetch(self, seconds: float) -> Message | None:
        message = self._take_message()
        # Another thread may be fetching for this one, too.
        if message is not None or not self._fetching.acquire(seconds):
            return message
        try:
            message, has_more = self._take_message(), True
            # Messages of paused or full shards do not end the search.
            while message is None and has_more and self._may_fetch(seconds):
                with self._activities.doing(Activity.FETCHING):
                    has_more = self._fetch(seconds)
                    if has_more and self._options.scheduler is not None:
                        self._fetch_ahead()
                message = self._take_message()
            return message
        finally:
            self._fetching.release()

    def _take_message(self) -> Message | None:
        with self._changed:
            message = self._shards.take() if self._is_flowing else None
            is_full = message is not None and self._shards.becomes_full(message.shard)
            if message is not None and is_full:
                self._shards.full.add(message.shard)
        if message is not None and is_full:
            self._callbacks.on_buffer_full(message.shard)
        return message

    def _may_fetch(self, seconds: float) -> bool:
        with self._changed:
            # A fetch may revoke shards and assign them again: a commit that began before must not end after that.
            self._changed.wait_for(lambda: not self._commits.is_running, seconds)
            if not self._is_flowing:
                return False
            if not self._shards.can_hold:
                self._changed.wait(seconds)
            return self._shards.can_hold

    def _fetch(self, seconds: float) -> bool:
        self._pause_in_client()
        message = None
        try:
            message = self._consumer.next(seconds)
        except StreamEndedError:
            with self._changed:
                if not self._shards.is_holding:
                    raise
                # The stream has ended, but messages of paused shards are still held.
                self._changed.wait(seconds)
        finally:
            ends = self._consumer.reached_ends() if isinstance(self._consumer, EndReportingConsumer) else {}
            with self._changed:
                self._fetched_at = time.monotonic()
                if message is not None:
                    self._shards.hold(message)
                self._shards.reach_ends(ends)
        return message is not None

    def _fetch_ahead(self) -> None:
        """Fetch available messages, so that the scheduler can choose."""
        for _ in range(READ_AHEAD - 1):
            if not self._may_fetch(0.0) or not self._fetch(0.0):
                return

    def _pause_in_client(self) -> None:
        if isinstance(self._consumer, PausableConsumer):
            with self._changed:
                closed = self._shards.closed
            if closed != self._paused_in_client:
                self._consumer.resume(self._paused_in_client - closed)
                self._consumer.pause(closed - self._paused_in_client)
                self._paused_in_client = closed

    def getmany(
        self, timeout_seconds: float | None = None, *, max_messages: int = MAX_MESSAGES
    ) -> Iterator[tuple[Shard, Message]]:
        """Return available messages, each with its shard; wait for the first one only.

        A message counts as returned when the iterator yields it, so that ending the iteration early loses none. The
        iteration ends when the flow is stopped.

        Args:
            timeout_seconds: how long to wait for the first message; ``None`` waits forever, 0 does not wait.
            max_messages: the most messages to return.

        Raises:
            StreamEndedError: the end of the stream was reached before the first message.
            InvalidOptionError: ``max_messages`` is less than 1.
        """
        check_count("max_messages", max_messages)
        return self._getmany(timeout_seconds, max_messages)

    def _getmany(self, timeout_seconds: float | None, max_messages: int) -> Iterator[tuple[Shard, Message]]:
        message = self.next(timeout_seconds)
        for left in range(max_messages - 1, -1, -1):
            if message is None:
                return
            yield message.shard, message
            try:
                message = self.next(0) if left else None
            except StreamEndedError:
                return

    @property
    def group(self) -> str | None:
        """The group of the wrapped consumer; ``None`` without one."""
        return self._consumer.group

    def track_message(self, message: Message, *, readers: int = 1) -> None:
        """Count a message as unfinished until this number of readers have acknowledged it.

        Messages that this consumer returns are tracked already, for one reader.
        """
        check_count("readers", readers)
        self._check_usable()
        with self._changed:
            self._shards.track(message, readers)

    def ack(self, message: Message) -> bool:
        """Mark a message as finished; return ``False`` if it already was, or no longer belongs to this consumer.

        Raises:
            StreamEndedError: the consumer was closed, and cannot commit the message.
        """
        self._check_usable()
        with self._changed:
            is_finished = self._shards.acknowledge(message.shard, message.sequence)
            is_drained = is_finished and self._shards.is_drained(message.shard)
            if is_finished:
                self._commits.count_acknowledged()
            if is_drained:
                self._shards.full.discard(message.shard)
            if is_drained or not self._shards.unacked_count:
                self._changed.notify_all()
        if is_drained:
            self._callbacks.on_buffer_drop(message.shard)
        return is_finished

    @contextmanager
    def processing(self, message: Message) -> Iterator[Message]:
        """Acknowledge the message if the block succeeds; else call :meth:`on_task_error`, and raise the error."""
        try:
            yield message
        except BaseException as error:
            self.on_task_error(error)
            raise
        self.ack(message)

    def on_task_error(self, error: BaseException) -> CommitResult:
        """Report that processing a message failed, and commit other finished messages unless the consumer is closed."""
        self._callbacks.on_task_error(error)
        return CommitResult.NOTHING_TO_DO if self._closed.is_set() else self.commit()

    @property
    def unacked(self) -> list[Message]:
        """The messages that were returned and are not finished."""
        with self._changed:
            return self._shards.messages

    # committing

    def commit(
        self, streams_or_shards: Collection[str | Shard] | None = None, *, start_new_transaction: bool = True
    ) -> CommitResult:
        """Commit the finished messages of all or some shards; one commit runs at a time.

        Args:
            streams_or_shards: the streams and shards to commit; all of them by default.
            start_new_transaction: where a commit ends a transaction, begin the next one. If false, an open transaction
                is ended even without a position to commit, and :meth:`KafkaTransactions.begin` begins the next.

        Returns:
            ``ANOTHER_WAS_RUNNING`` after another commit has ended, which may have left out the latest
            acknowledgements; ``FAILED`` if :attr:`commit_error` has an error, and the background thread retries.

        Raises:
            InvalidOptionError: ``streams_or_shards`` is not a collection of streams and shards.
            StreamEndedError: the consumer was closed.
        """
        return self._commit(streams_or_shards, start_new_transaction=start_new_transaction, is_forced=False)

    def force_commit(
        self, streams_or_shards: Collection[str | Shard] | None = None, *, start_new_transaction: bool = True
    ) -> CommitResult:
        """Commit as :meth:`commit` does, but after waiting for a running commit, commit as well."""
        return self._commit(streams_or_shards, start_new_transaction=start_new_transaction, is_forced=True)

    def _commit(
        self, chosen: Collection[str | Shard] | None, *, start_new_transaction: bool, is_forced: bool
    ) -> CommitResult:
        self._check_usable()
        _check_choice(chosen)
        with self._activities.doing(Activity.COMMITTING):
            if self._releasing == threading.get_ident():
                return self._commits.commit_now(chosen, start_new_transaction=start_new_transaction)
            return self._commits.commit(chosen, start_new_transaction=start_new_transaction, is_forced=is_forced)

    def commit_and_end_transactions(self) -> CommitResult:
        """Commit finished messages and end the transaction, without beginning the next one."""
        return self.commit(start_new_transaction=False)

    @property
    def commit_error(self) -> Exception | None:
        """The error of the last commit; ``None`` after one that succeeded."""
        return self._commits.error

    def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """Commit until every returned message is finished; return whether that happened in time.

        Args:
            timeout_seconds: how long to wait; ``close_seconds`` by default.
        """
        self._check_usable()
        seconds = self._options.close_seconds if timeout_seconds is None else check_timeout(timeout_seconds)
        deadline = time.monotonic() + seconds
        with self._activities.doing(Activity.WAITING_EMPTY):
            while True:
                with self._changed:
                    left = min(1.0, max(0.0, deadline - time.monotonic()))
                    is_empty = self._changed.wait_for(lambda: not self._shards.unacked_count, left)
                if is_empty or time.monotonic() >= deadline:
                    self.force_commit()
                    return is_empty
                self.commit()

    # flow

    def pause_partitions(self, shards: Iterable[Shard]) -> None:
        """Return no messages of these shards; fetched ones are kept."""
        self._check_usable()
        check_iterable("shards", shards)
        chosen = frozenset(map(check_shard, shards))
        with self._changed:
            self._shards.paused |= chosen

    def resume_partitions(self, shards: Iterable[Shard]) -> None:
        """Return messages of these shards again, starting with the kept ones."""
        self._check_usable()
        check_iterable("shards", shards)
        chosen = frozenset(map(check_shard, shards))
        with self._changed:
            self._shards.paused -= chosen
            self._changed.notify_all()

    def on_buffer_full(self, shard: Shard) -> None:
        """Return no messages of a shard until :meth:`on_buffer_drop`, or until few of its messages are unfinished."""
        with self._changed:
            is_new = shard not in self._shards.full
            self._shards.full.add(shard)
        if is_new:
            self._callbacks.on_buffer_full(shard)

    def on_buffer_drop(self, shard: Shard) -> None:
        """Return messages of a full shard again; do nothing for a shard that is not full."""
        with self._changed:
            was_full = shard in self._shards.full
            self._shards.full.discard(shard)
            self._changed.notify_all()
        if was_full:
            self._callbacks.on_buffer_drop(shard)

    def stop_flow(self) -> None:
        """Return no more messages; :meth:`wait_for_stopped_flow` waits until no thread is returning one."""
        self._set_flowing(False)

    def resume_flow(self) -> None:
        """Return messages again."""
        self._set_flowing(True)

    def _set_flowing(self, is_flowing: bool) -> None:
        with self._changed:
            self._is_flowing = is_flowing
            self._changed.notify_all()

    def wait_for_stopped_flow(self, timeout_seconds: float) -> bool:
        """Wait until no thread is returning a message; return whether that happened in time."""
        seconds = check_timeout(timeout_seconds)
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_flowing and not self._returning, seconds)

    # positions

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Allow the block to move the consumer: no thread fetches meanwhile."""
        with self._fetching.moving(), self._activities.doing(Activity.SEEKING):
            # Some clients forget pauses with a seek, others do not; the next fetch pauses the shards again. A client of
            # Kafka must not be resumed while it starts to read elsewhere.
            if isinstance(self._consumer, PausableConsumer):
                self._consumer.resume(self._paused_in_client)
            self._paused_in_client = frozenset()
            yield

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        with self._moving():
            self._consumer.seek(moment)
            with self._changed:
                self._shards.seek(None)

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; committed positions do not move back."""
        to = rewind_target(to)
        with self._moving():
            self._consumer.rewind(to)
            with self._changed:
                self._shards.seek(None if to is Edge.END else 0 if isinstance(to, Edge) else max(0, to))

    def go_to(self, positions: Positions) -> None:
        """Continue these shards at these sequences (Faust's ``seek``); committed positions do not move back.

        Raises:
            InvalidOptionError: the backend cannot move single shards.
            NotSubscribedError: this consumer does not read one of the shards.
            OutOfBoundsError: a position is after the end of its shard.
        """
        consumer = require_positioned(self._consumer)
        with self._moving():
            consumer.go_to(positions)
            with self._changed:
                self._shards.go_to({shard: max(0, position) for shard, position in positions.items()})

    def seek_to_committed(self) -> Mapping[Shard, int]:
        """Continue every assigned shard at its committed position, else at this consumer's first message of it.

        Returns:
            The committed positions.

        Raises:
            InvalidOptionError: the backend cannot move single shards.
            StreamAssetsError: the committer raised it.
        """
        self._check_usable()
        with self._fetching.moving():
            committed = self._committer.committed()
            with self._changed:
                begun = {shard: found.first for shard, found in self._shards.known.items() if found.first is not None}
                # The group may have a newer commit than the one that this consumer made.
                known = {shard: position for shard, position in committed.items() if shard in self._shards.known}
            read = require_positioned(self._consumer).assigned()
            self.go_to({shard: position for shard, position in {**begun, **known}.items() if shard in read})
            with self._changed:
                self._shards.record_committed(known)
                self._commits.clear_abort()
        return committed

    def perform_seek(self) -> None:
        """Do the same as :meth:`seek_to_committed`, without returning the positions."""
        self.seek_to_committed()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        self._consumer.assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        self._consumer.unassign(shard)

    # the group

    def on_revoked(self, shards: Shards) -> None:
        """Release shards that the group revokes, after the callback and a commit."""
        with self._activities.doing(Activity.SHARDS_REVOKED):
            self._releasing = threading.get_ident()
            try:
                self._callbacks.on_revoked(shards)
            finally:
                self._commits.commit_now(shards)
                self._releasing = None
                with self._changed:
                    self._shards.forget(shards)
                    self._paused_in_client -= shards
                    self._changed.notify_all()

    def on_assigned(self, shards: Shards) -> None:
        """Start shards that the group has assigned, at their committed positions."""
        with self._activities.doing(Activity.SHARDS_ASSIGNED):
            try:
                committed = self._committer.committed()
            except StreamAssetsError as error:
                _log.warning("positions of %s: %s", ", ".join(map(str, sorted(shards))), error)
                committed = {}
            with self._changed:
                for shard in shards:
                    self._shards.start(shard, committed.get(shard))
                self._paused_in_client -= shards
            self._callbacks.on_assigned(shards)

    # state

    @property
    def status(self) -> Activity:
        """What the consumer is doing now.

        Example:
            ``Activity.COMMITTING in consumer.status``
        """
        return self._activities.now | (Activity.NOTHING if self._is_flowing else Activity.FLOW_STOPPED)

    def progress(self) -> list[ShardProgress]:
        """Return the progress of every shard, for :class:`stream_consumers.tracking.livelock.LivelockWatch`."""
        with self._changed:
            return self._shards.progress(self._fetched_at)

    @property
    def livelocks(self) -> list[Livelock]:
        """The findings of the last check by the option ``livelock``; none without it."""
        return [] if self._watch is None else self._watch.status()

    def _check_usable(self) -> None:
        """Refuse a closed consumer, except in the callback for shards that are being released."""
        if self._releasing != threading.get_ident():
            self._check_open()

    def _ends(self) -> Mapping[Shard, ShardEnd]:
        """Return the ends of the shards, or the received positions if the consumer cannot look up ends."""
        if isinstance(self._consumer, MeasurableConsumer):
            return self._consumer.ends()
        received = {found.shard: found.received or 0 for found in self.progress()}
        return {shard: ShardEnd(end, end) for shard, end in received.items()}

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Return no more messages, wait for unfinished ones, commit, and release all resources.

        Args:
            timeout_seconds: how long to wait; ``close_seconds`` by default, 0 does not wait.

        Raises:
            StreamAssetsError: the last commit failed; all resources are released nevertheless.
        """
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        self.stop_flow()
        try:
            if self._watch is not None:
                self._watch.close()
            self.wait_empty(timeout_seconds)
            error = self.commit_error
        finally:
            self._commits.close()
            self._closed.set()
            self._consumer.close()
        if error is not None:
            raise error


def _check_choice(streams_or_shards: Collection[str | Shard] | None) -> None:
    if streams_or_shards is not None:
        check_iterable("streams_or_shards", streams_or_shards)
        for chosen in streams_or_shards:
            if not isinstance(chosen, str):
                check_shard(chosen)
