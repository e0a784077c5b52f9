"""Redis Streams, message by message, as a member of a consumer group."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import DeadLetterObserver, Edge, log_dead_letter
from stream_consumers.consumer_base import MessageIterator
from stream_consumers.errors import InvalidOptionError, NotSubscribedError, StreamEndedError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.options import AutoCommit, AutoStreamReset, ConsumerMode, RedisGroupOptions, host_id
from stream_consumers.redis.acknowledgements import Acknowledgements, Place
from stream_consumers.redis.consumer import RedisConsumer
from stream_consumers.redis.group import NOW, START, RedisGroup
from stream_consumers.redis.group_reader import RedisGroupReader
from stream_consumers.redis.ids import to_id
from stream_consumers.redis.server import RedisServer
from stream_consumers.urls import StreamUrl

BLOCK_SECONDS = 0.1


class RedisGroupConsumer(MessageIterator):
    """A member of a consumer group of Redis Streams; see :class:`stream_consumers.consumer.Consumer`.

    Every message is delivered at least once (with ``immediate`` at most once): first what is pending for this member's
    name, then what the group has not given to anybody. Commits happen within :meth:`next`, also while it waits, and in
    :meth:`close`; what the group gave and nobody committed stays pending, and is delivered again to the next consumer
    of the same name, or to a peer that claims it. Two live members must not have the same name: each would get the
    other's pending messages, too, when it starts.

    A :meth:`seek` or :meth:`rewind` leaves the group: from then on, every message of the assigned shards is read by
    position, and nothing new becomes pending. What the group gave before can still be acknowledged.

    Args:
        url: ``redis://host:6379/orders``.
        mode: ``resumable``: one member. ``load_balanced``: several share the messages, and take over what one that is
            gone has left behind.
        group: by default the host's id and ``:r``, or ``:s`` with ``load_balanced`` (SeaStreamer's rule).
        reset: where a group starts that is not there at the first :meth:`next`.
        live: wait at the end; without it the stream ends where the group has given everything out.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        options: see :class:`stream_consumers.options.RedisGroupOptions`.
        on_dead_letter: told of entries that cannot be used as a message, were trimmed while they were pending, or were
            delivered too often; they are acknowledged. If it raises, the entry stays pending.

    Raises:
        InvalidOptionError: mode ``real_time``, or an empty group name.
        BrokerUnavailableError, AccessDeniedError: as the server says.

    Example::

        url = StreamUrl.parse("redis://localhost:6379/orders")
        options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED)
        with RedisGroupConsumer(url, group="billing", options=options) as consumer:
            for message in consumer:
                bill(message)
                consumer.ack(message)
                consumer.commit()
    """

    def __init__(
        self,
        url: StreamUrl,
        *,
        mode: ConsumerMode = ConsumerMode.RESUMABLE,
        group: str | None = None,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        live: bool = True,
        client: ClientConfig | None = None,
        options: RedisGroupOptions | None = None,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
    ) -> None:
        self._options = options or RedisGroupOptions()
        name, consumer = _names(mode, group, self._options.consumer)
        self._url, self._mode, self._live, self._client = url, mode, live, client
        self._on_dead_letter = on_dead_letter
        self._streams = url.required_streams()
        server = RedisServer(url, client)
        is_immediate = self._options.auto_commit is AutoCommit.IMMEDIATE
        self._group = RedisGroup(server, name, consumer, acknowledge_on_read=is_immediate)
        self._acknowledgements = Acknowledgements(self._options)
        self._reader = RedisGroupReader(
            self._group,
            self._options,
            self._acknowledgements,
            self._put,
            is_shared=mode is ConsumerMode.LOAD_BALANCED,
            start=START if reset is AutoStreamReset.EARLIEST else NOW,
            message_field=server.message_field,
            meets_new_shards=live,
        )
        # A thread that waits for messages holds _reading only, so that nothing else waits for it.
        self._reading, self._moving, self._committing = threading.Lock(), threading.Lock(), threading.Lock()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._buffer: deque[tuple[Place, Message | DeadLetter]] = deque()
        self._by_position: RedisConsumer | None = None
        self._is_detached = False

    def __repr__(self) -> str:
        names = f"group={self.group!r}, consumer={self.consumer!r}"
        return f"RedisGroupConsumer({str(self._url)!r}, mode={self._mode.value!r}, {names})"

    @property
    def group(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def consumer(self) -> str:
        """This member's name in the group."""
        return self._group.consumer

    @property
    def auto_commit(self) -> AutoCommit:
        """When it acknowledges what it was given."""
        return self._options.auto_commit

    def next(self, timeout: float | None = None) -> Message | None:
        """See :meth:`stream_consumers.consumer.Consumer.next`.

        Raises:
            StreamEndedError: the consumer was closed, or everything was given out and ``live`` is off.
            StreamNotFoundError: there is no stream to make the group for.
            GroupRemovedError: the group or the stream was removed.
            BrokerUnavailableError: nothing is lost; call it again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_open()
            self._commit_what_is_due()
            if self._by_position is not None and self._is_detached:
                message, has_more = self._by_position.next(_slice(deadline)), False
            else:
                message = self._take()
                has_more = message is None and self._read(_slice(deadline))
            if message is not None:
                return message
            # A page without a message is no reason to give up before the next one.
            if deadline is not None and time.monotonic() >= deadline + (BLOCK_SECONDS if has_more else 0.0):
                return None

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`; leaves the group."""
        with self._moving:
            self._positions().seek(moment)
            self._detach()

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; leaves the group."""
        with self._moving:
            self._positions().rewind(to)
            self._detach()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._moving:
            self._positions().assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._moving:
            self._positions().unassign(shard)

    def ack(self, message: Message | tuple[Shard, int]) -> None:
        """Say that a message is done; the server is told with the next commit.

        Args:
            message: the message, or its shard and sequence.

        Raises:
            InvalidOptionError: auto_commit is ``delayed``.
            NotSubscribedError: it is of another stream.
        """
        self._check_open()
        shard, sequence = (message.shard, message.sequence) if isinstance(message, Message) else message
        place = (shard, to_id(sequence).encode())
        if self._is_detached and shard.stream in self._streams and not self._acknowledgements.is_held(place):
            # It was read by position: it is not the group's.
            return
        if shard not in self._group.keys:
            raise NotSubscribedError(
                f"{shard} is not read by this consumer", remedy=f"Known are: {', '.join(map(str, self._group.keys))}."
            )
        self._acknowledgements.acknowledge(place)

    def commit(self) -> int:
        """Tell the server what was acknowledged; returns how many entries are not pending any more.

        Fewer than were acknowledged is no error: a peer may have taken them over, or they were trimmed.

        Raises:
            InvalidOptionError: auto_commit is ``delayed`` or ``rolling``.
            GroupRemovedError: the group is gone.
            BrokerUnavailableError: the next commit tells it all again.
        """
        self._check_open()
        self._acknowledgements.check_manual()
        with self._committing:
            return self._send(self._acknowledgements.acknowledged())

    def close(self) -> None:
        """Commit what may be committed, and release what is open; a waiting :meth:`next` ends.

        What stays pending: messages that were read and not handed out; with ``delayed``, those that were handed out
        less than ``auto_commit_delay_seconds`` ago; with ``rolling``, those that were not acknowledged; with
        ``disabled``, those that no :meth:`commit` was called for.

        Raises:
            StreamAssetsError: the last commit failed; everything is released nevertheless.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        try:
            with self._committing:
                self._send(self._acknowledgements.due(is_last=True))
        finally:
            with self._moving:
                if self._by_position is not None:
                    self._by_position.close()
            with self._reading:
                self._group.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StreamEndedError("the consumer was closed", remedy="Create a new one.")

    # committing

    def _commit_what_is_due(self) -> None:
        # Whoever commits already does it for all.
        if self._committing.acquire(blocking=False):
            try:
                self._send(self._acknowledgements.due())
            finally:
                self._committing.release()

    def _send(self, places: Sequence[Place]) -> int:
        by_shard: dict[Shard, list[bytes]] = {}
        for shard, entry_id in places:
            by_shard.setdefault(shard, []).append(entry_id)
        done = 0
        for shard, ids in by_shard.items():
            done += self._group.acknowledge(shard, ids)
            self._acknowledgements.committed((shard, entry_id) for entry_id in ids)
        return done

    # positions

    def _positions(self) -> RedisConsumer:
        self._check_open()
        if self._by_position is None:
            self._by_position = RedisConsumer(
                self._url, live=self._live, client=self._client, on_dead_letter=self._on_dead_letter
            )
        return self._by_position

    def _detach(self) -> None:
        with self._lock:
            self._is_detached = True
            self._acknowledgements.forget(place for place, _ in self._buffer)
            self._buffer.clear()

    # reading

    def _take(self) -> Message | None:
        """The next message that is here; tells of the dead letters before it."""
        while True:
            with self._lock:
                if not self._buffer:
                    return None
                place, item = self._buffer.popleft()
                if isinstance(item, Message):
                    self._acknowledgements.hand_out(place)
                    return item
            self._on_dead_letter(item)
            self._acknowledgements.settle(place)

    def _read(self, seconds: float) -> bool:
        """Fill the buffer with a page, waiting at most so long; whether anything came.

        Raises:
            StreamEndedError: nothing did, and nothing is waited for.
        """
        if not self._reading.acquire(timeout=seconds):
            return False
        try:
            self._check_open()
            if self._buffer or self._is_detached:
                return True
            came = self._reader.read(seconds if self._live else 0.0)
        finally:
            self._reading.release()
        if not came and not self._live:
            raise StreamEndedError(
                "the group has no more messages for this member", remedy="Open it live to wait for more."
            )
        return came

    def _put(self, place: Place, item: Message | DeadLetter) -> None:
        with self._lock:
            if self._is_detached:
                self._acknowledgements.forget([place])
            else:
                self._buffer.append((place, item))


def _names(mode: ConsumerMode, group: str | None, consumer: str | None) -> tuple[str, str]:
    """The names of the group and of the member (SeaStreamer's defaults)."""
    if mode is ConsumerMode.REAL_TIME:
        raise InvalidOptionError("mode real_time has no group", remedy="Use mode resumable or load_balanced.")
    if group == "":
        raise InvalidOptionError("group='' names no group", remedy="Give it a name, or leave it out.")
    host = host_id()
    if mode is ConsumerMode.RESUMABLE:
        name = group or f"{host}:r"
        return name, consumer or name
    unique = f"{host}:{os.getpid()}:{threading.get_native_id()}:{time.time_ns()}"
    return group or f"{host}:s", consumer or unique


def _slice(deadline: float | None) -> float:
    """How long to wait at once: closing and committing happen in between."""
    return BLOCK_SECONDS if deadline is None else min(BLOCK_SECONDS, max(0.0, deadline - time.monotonic()))
