"""A consumer that knows which messages are finished, and commits no more than that (Faust's ``Consumer``)."""

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
    """Wraps any consumer; see :class:`stream_consumers.consumer.Consumer`.

    Every message that is handed out counts as unfinished until :meth:`ack`. What is committed is behind the longest
    run of finished messages, so that a crash repeats messages and loses none. Any number of threads may call
    anything.

    Unlike Faust's: what was fetched for a paused or a full shard is kept and handed out later; shards are committed
    *before* they are given back; a commit that failed is tried again; waiting has a deadline.

    Over a member of a Redis group there are no positions: the member is the committer, every finished message is
    acknowledged by itself, and one that is not stays pending.

    Args:
        consumer: what to read from; it is closed with this one.
        committer: where positions are kept.
        options: see :class:`stream_consumers.tracking.options.TrackingOptions`.
        callbacks: lifecycle callbacks.

    Raises:
        InvalidOptionError: commits in the background, of a transaction that another thread is filling; or positions for
            a member of a Redis group, whose entries are acknowledged one by one.
        StreamAssetsError: as ``committer.committed`` does.

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
                "commits in the background would end a transaction that is being filled",
                remedy="Set commit_interval_seconds=None and commit_every=None, and call commit between messages.",
            )
        check_committer(consumer, committer)
        self._consumer, self._committer = consumer, committer
        self._callbacks = (callbacks or TrackingCallbacks()).guarded()
        self._changed = threading.Condition()
        self._shards = TrackedShards(self._options, keeps_entries=isinstance(committer, EntryCommitter))
        self._commits = BackgroundCommit(committer, self._shards, self._changed, self._options)
        self._activities = Activities()
        # One thread fetches at a time, for all that wait for a message.
        self._fetching = PollingLock()
        self._fetched_at: float | None = None
        self._is_flowing = True
        self._handing = 0
        self._natively_paused: Shards = frozenset()
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
        """Close; after an error, without waiting for messages that will not be finished."""
        self.close(timeout_seconds=0.0 if any(error) else None)

    # reading

    def _poll(self, seconds: float) -> Message | None:
        """Hand out the next message; waits for it, for the flow and for a commit, at most this many seconds each."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_flowing, seconds):
                return None
            self._handing += 1
        try:
            return self._obtain(seconds)
        finally:
            with self._changed:
                self._handing -= 1
                if not self._handing and not self._is_flowing:
                    self._changed.notify_all()

    def _obtain(self, seconds: float) -> Message | None:
        message = self._hand_out()
        # A thread that fetches already may get it for this one, too.
        if message is not None or not self._fetching.acquire(seconds):
            return message
        try:
            message, has_more = self._hand_out(), True
            # What came may be of a closed shard: that is no reason to say that there is nothing.
            while message is None and has_more and self._may_fetch(seconds):
                with self._activities.doing(Activity.FETCHING):
                    has_more = self._fetch(seconds)
                    if has_more and self._options.scheduler is not None:
                        self._fetch_ahead()
                message = self._hand_out()
            return message
        finally:
            self._fetching.release()

    def _hand_out(self) -> Message | None:
        with self._changed:
            message = self._shards.take() if self._is_flowing else None
            is_full = message is not None and self._shards.is_too_full(message.shard)
            if message is not None and is_full:
                self._shards.full.add(message.shard)
        if message is not None and is_full:
            self._callbacks.on_buffer_full(message.shard)
        return message

    def _may_fetch(self, seconds: float) -> bool:
        with self._changed:
            # The group may take shards in a fetch, and give them back: a commit from before must not come behind that.
            self._changed.wait_for(lambda: not self._commits.is_running, seconds)
            if not self._is_flowing:
                return False
            if not self._shards.can_hold:
                self._changed.wait(seconds)
            return self._shards.can_hold

    def _fetch(self, seconds: float) -> bool:
        self._pause_natively()
        message = None
        try:
            message = self._consumer.next(seconds)
        except StreamEndedError:
            with self._changed:
                if not self._shards.is_holding:
                    raise
                # The stream has ended, but messages of paused shards are held.
                self._changed.wait(seconds)
        finally:
            ends = self._consumer.reached_ends() if isinstance(self._consumer, EndReportingConsumer) else {}
            with self._changed:
                self._fetched_at = time.monotonic()
                if message is not None:
                    self._shards.hold(message)
                self._shards.reach(ends)
        return message is not None

    def _fetch_ahead(self) -> None:
        """Fetch what is there, so that the scheduler has messages to choose from."""
        for _ in range(READ_AHEAD - 1):
            if not self._may_fetch(0.0) or not self._fetch(0.0):
                return

    def _pause_natively(self) -> None:
        if isinstance(self._consumer, PausableConsumer):
            with self._changed:
                closed = self._shards.closed
            if closed != self._natively_paused:
                self._consumer.resume(self._natively_paused - closed)
                self._consumer.pause(closed - self._natively_paused)
                self._natively_paused = closed

    def getmany(
        self, timeout_seconds: float | None = None, *, max_messages: int = MAX_MESSAGES
    ) -> Iterator[tuple[Shard, Message]]:
        """Hand out what is there, each message with its shard; wait for the first one only.

        A message is handed out when the iterator comes to it, so that leaving it early loses nothing. A flow that is
        stopped in between ends it.

        Args:
            timeout_seconds: how long to wait for the first message; ``None`` until there is one, 0 not at all.
            max_messages: the most messages to hand out.

        Raises:
            StreamEndedError: the stream has an end, and it was reached before the first one.
            InvalidOptionError: ``max_messages`` is not at least 1.
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
        """The group of the consumer that is read; ``None`` without one."""
        return self._consumer.group

    def track_message(self, message: Message, *, readers: int = 1) -> None:
        """Count a message as unfinished until this number of readers have acknowledged it.

        Messages that are handed out are tracked already, for one reader.
        """
        check_count("readers", readers)
        self._check_usable()
        with self._changed:
            self._shards.track(message, readers)

    def ack(self, message: Message) -> bool:
        """A message is finished; ``False`` if it was before, or is not this consumer's any more.

        Raises:
            StreamEndedError: the consumer was closed, so that nothing commits it.
        """
        self._check_usable()
        with self._changed:
            is_finished = self._shards.acknowledge(message.shard, message.sequence)
            is_drained = is_finished and self._shards.is_drained(message.shard)
            if is_finished:
                self._commits.acknowledged()
            if is_drained:
                self._shards.full.discard(message.shard)
            if is_drained or not self._shards.unacked_count:
                self._changed.notify_all()
        if is_drained:
            self._callbacks.on_buffer_drop(message.shard)
        return is_finished

    @contextmanager
    def processing(self, message: Message) -> Iterator[Message]:
        """Acknowledge the message if the block ends well; else :meth:`on_task_error`, and the error goes on."""
        try:
            yield message
        except BaseException as error:
            self.on_task_error(error)
            raise
        self.ack(message)

    def on_task_error(self, error: BaseException) -> CommitResult:
        """Processing a message failed: what others have finished is committed, the message is not.

        After the consumer was closed, nothing is committed.
        """
        self._callbacks.on_task_error(error)
        return CommitResult.NOTHING_TO_DO if self._closed.is_set() else self.commit()

    @property
    def unacked(self) -> list[Message]:
        """The messages that were handed out and are not finished."""
        with self._changed:
            return self._shards.messages

    # committing

    def commit(
        self, streams_or_shards: Collection[str | Shard] | None = None, *, start_new_transaction: bool = True
    ) -> CommitResult:
        """Commit what is finished, of all shards or of these; one commit at a time.

        Args:
            streams_or_shards: which; all of them by default.
            start_new_transaction: where commits end a transaction, begin the next one. Without it the open one is
                ended also if there is no position to commit, and :meth:`KafkaTransactions.begin` begins the next.

        Returns:
            ``ANOTHER_WAS_RUNNING`` when that one has ended: it may have left out what was acknowledged last. ``FAILED``
            keeps the error in :attr:`commit_error`; the background tries again.

        Raises:
            InvalidOptionError: ``streams_or_shards`` is no collection of streams and shards.
            StreamEndedError: the consumer was closed.
        """
        return self._commit(streams_or_shards, start_new_transaction=start_new_transaction, is_forced=False)

    def force_commit(
        self, streams_or_shards: Collection[str | Shard] | None = None, *, start_new_transaction: bool = True
    ) -> CommitResult:
        """As :meth:`commit`, but after one that is under way it commits itself."""
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
        """Commit what is finished and end the transaction, without beginning the next one."""
        return self.commit(start_new_transaction=False)

    @property
    def commit_error(self) -> Exception | None:
        """Why the last commit failed; ``None`` after one that succeeded."""
        return self._commits.error

    def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """Commit until every message that was handed out is finished; whether that came true in time.

        Args:
            timeout_seconds: ``close_seconds`` by default.
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
        """Hand out nothing of these shards; what was fetched is kept."""
        self._check_usable()
        check_iterable("shards", shards)
        chosen = frozenset(map(check_shard, shards))
        with self._changed:
            self._shards.paused |= chosen

    def resume_partitions(self, shards: Iterable[Shard]) -> None:
        """Hand out these shards again, from where they were."""
        self._check_usable()
        check_iterable("shards", shards)
        chosen = frozenset(map(check_shard, shards))
        with self._changed:
            self._shards.paused -= chosen
            self._changed.notify_all()

    def on_buffer_full(self, shard: Shard) -> None:
        """Hand out nothing of a shard until :meth:`on_buffer_drop`, or until few of its messages are unfinished."""
        with self._changed:
            is_new = shard not in self._shards.full
            self._shards.full.add(shard)
        if is_new:
            self._callbacks.on_buffer_full(shard)

    def on_buffer_drop(self, shard: Shard) -> None:
        """Hand a full shard out again; one that was not full stays as it is."""
        with self._changed:
            was_full = shard in self._shards.full
            self._shards.full.discard(shard)
            self._changed.notify_all()
        if was_full:
            self._callbacks.on_buffer_drop(shard)

    def stop_flow(self) -> None:
        """Hand out nothing more; :meth:`wait_for_stopped_flow` waits until that is so."""
        self._let_flow(False)

    def resume_flow(self) -> None:
        """Hand out messages again."""
        self._let_flow(True)

    def _let_flow(self, is_flowing: bool) -> None:
        with self._changed:
            self._is_flowing = is_flowing
            self._changed.notify_all()

    def wait_for_stopped_flow(self, timeout_seconds: float) -> bool:
        """Wait until no thread is handing out a message any more; returns whether that came true in time."""
        seconds = check_timeout(timeout_seconds)
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_flowing and not self._handing, seconds)

    # positions

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Within, nothing is fetched, and the consumer may be moved."""
        with self._fetching.moving(), self._activities.doing(Activity.SEEKING):
            try:
                yield
            finally:
                # A client may or may not forget it with a seek; it is paused again before the next fetch.
                if isinstance(self._consumer, PausableConsumer):
                    self._consumer.resume(self._natively_paused)
                self._natively_paused = frozenset()

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        with self._moving():
            self._consumer.seek(moment)
            with self._changed:
                self._shards.seek(None)

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; what is committed does not move back."""
        to = rewind_target(to)
        with self._moving():
            self._consumer.rewind(to)
            with self._changed:
                self._shards.seek(None if to is Edge.END else 0 if isinstance(to, Edge) else max(0, to))

    def go_to(self, positions: Positions) -> None:
        """Continue these shards at these sequences (Faust's ``seek``); what is committed does not move back.

        Raises:
            InvalidOptionError: the backend cannot move single shards.
            NotSubscribedError: a shard is not read by this consumer.
            OutOfBoundsError: a position is behind the end of its shard.
        """
        consumer = require_positioned(self._consumer)
        with self._moving():
            consumer.go_to(positions)
            with self._changed:
                self._shards.go_to({shard: max(0, position) for shard, position in positions.items()})

    def seek_to_committed(self) -> Mapping[Shard, int]:
        """Continue every shard at what is committed, or where this consumer began with it; returns what is committed.

        Shards that were unassigned stay so.

        Raises:
            InvalidOptionError: the backend cannot move single shards.
            StreamAssetsError: as the committer says.
        """
        self._check_usable()
        with self._fetching.moving():
            committed = self._committer.committed()
            with self._changed:
                begun = {shard: found.first for shard, found in self._shards.known.items() if found.first is not None}
                # A commit of the group's own may be newer than what is known here.
                known = {shard: position for shard, position in committed.items() if shard in self._shards.known}
            read = require_positioned(self._consumer).assigned()
            self.go_to({shard: position for shard, position in {**begun, **known}.items() if shard in read})
            with self._changed:
                self._shards.learn(known)
                self._commits.forgive()
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
        """The group takes these shards: the callback, then a commit, and only then they are let go."""
        with self._activities.doing(Activity.SHARDS_REVOKED):
            self._releasing = threading.get_ident()
            try:
                self._callbacks.on_revoked(shards)
            finally:
                self._commits.commit_now(shards)
                self._releasing = None
                with self._changed:
                    self._shards.forget(shards)
                    self._natively_paused -= shards
                    self._changed.notify_all()

    def on_assigned(self, shards: Shards) -> None:
        """The group gave these shards: they begin anew, at what is committed."""
        with self._activities.doing(Activity.SHARDS_ASSIGNED):
            try:
                committed = self._committer.committed()
            except StreamAssetsError as error:
                _log.warning("positions of %s: %s", ", ".join(map(str, sorted(shards))), error)
                committed = {}
            with self._changed:
                for shard in shards:
                    self._shards.start(shard, committed.get(shard))
                self._natively_paused -= shards
            self._callbacks.on_assigned(shards)

    # state

    @property
    def status(self) -> Activity:
        """What it is doing now.

        Example:
            ``Activity.COMMITTING in consumer.status``
        """
        return self._activities.now | (Activity.NOTHING if self._is_flowing else Activity.FLOW_STOPPED)

    def progress(self) -> list[ShardProgress]:
        """How far every shard is, for :class:`stream_consumers.tracking.livelock.LivelockWatch`."""
        with self._changed:
            return self._shards.progress(self._fetched_at)

    @property
    def livelocks(self) -> list[Livelock]:
        """What the watch of the option ``livelock`` found when it last looked; nothing without it."""
        return [] if self._watch is None else self._watch.status()

    def _check_usable(self) -> None:
        """Refuse a consumer that was closed; a callback for shards that are given back meanwhile may go on."""
        if self._releasing != threading.get_ident():
            self._check_open()

    def _ends(self) -> Mapping[Shard, ShardEnd]:
        """Where the shards end; what was received, where the consumer cannot ask."""
        if isinstance(self._consumer, MeasurableConsumer):
            return self._consumer.ends()
        received = {found.shard: found.received or 0 for found in self.progress()}
        return {shard: ShardEnd(end, end) for shard, end in received.items()}

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Hand out nothing more, wait for what is unfinished, commit, and release what is open.

        Args:
            timeout_seconds: how long to wait; ``close_seconds`` by default, 0 does not wait.

        Raises:
            StreamAssetsError: the last commit failed; everything is released nevertheless.
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
