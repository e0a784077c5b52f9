"""The consumer of Redis Streams without a group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import (
    DeadLetterObserver,
    Edge,
    LockedConsumer,
    ShardEnd,
    end_of_stream,
    no_message_error,
    resolve_positions,
    rewind_target,
)
from stream_consumers.messages import DeadLetter, Message, Shard, to_milliseconds
from stream_consumers.options import AutoStreamReset, choose_reset
from stream_consumers.redis.entries import SUB_BITS, id_before, read_entry
from stream_consumers.redis.server import REPLY_SECONDS, RedisConnection, RemovalDetector
from stream_consumers.urls import StreamUrl

PAGE_SIZE = 100
SHARD_SEARCH_SECONDS = 5.0


class RedisConsumer(LockedConsumer):
    """A consumer of Redis Streams; see :class:`stream_consumers.consumer.Consumer`.

    Ids grow with time, so a seek is a range request. A shard that has no message at or after the moment yet continues
    with the first one that is added.

    If a stream is deleted, :meth:`next` raises :class:`stream_consumers.errors.StreamRemovedError` within several
    seconds, even if the stream was created again with lower ids meanwhile. With ``*``, a deleted stream is no longer
    read.

    Args:
        url: ``redis://host:6379/orders``; ``*`` stands for all streams of the database, including future ones.
        reset: where to start.
        live: wait for more messages at the end; without it, reading ends there.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        on_dead_letter: called for entries that cannot be read as a message.

    Raises:
        BrokerUnavailableError, AccessDeniedError: the server returned an error.

    Example::

        url = "redis://localhost:6379/orders"
        with RedisConsumer(url, live=False, on_dead_letter=log_dead_letter) as consumer:
            for message in consumer:
                print(message.shard, message.sequence, message.text())
    """

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        live: bool = True,
        client: ClientConfig | None = None,
        on_dead_letter: DeadLetterObserver,
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url.subscribed_streams(), on_dead_letter)
        self._live = live
        reset = choose_reset(reset, live=live)
        self._server = RedisConnection(url, client)
        self._reading = self._server.new_connection(REPLY_SECONDS)
        self._buffer: deque[Message | DeadLetter] = deque()
        self._removals = RemovalDetector(self._server)
        self._known = frozenset(self._server.shards())
        self._next_shard_search = time.monotonic() + SHARD_SEARCH_SECONDS
        self._next: dict[Shard, int] = dict.fromkeys(self._known, 0)
        if reset is not AutoStreamReset.EARLIEST:
            self.rewind(Edge.END)

    def assigned(self) -> frozenset[Shard]:
        """Return the shards that are read now."""
        return frozenset(self._next)

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """See :meth:`stream_consumers.consumer.MeasurableConsumer.ends`."""
        self._check_open()
        return {shard: ShardEnd(end, end) for shard, end in self._ends(frozenset(self._next)).items()}

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        self._move(to_milliseconds(moment) << SUB_BITS, f"at or after {moment.isoformat()}")

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        to = rewind_target(to)
        if not isinstance(to, Edge):
            self._move(to, f"from sequence {to} on")
            return
        with self._lock.moving():
            self._check_open()
            shards = frozenset(self._selected())
            places = self._ends(shards) if to is Edge.END else dict.fromkeys(shards, 0)
            self._go_to(places, places)

    def go_to(self, positions: Mapping[Shard, int]) -> None:
        """See :meth:`stream_consumers.consumer.PositionedConsumer.go_to`."""
        with self._lock.moving():
            self._check_open()
            places = resolve_positions(positions, self.assigned(), lambda: self._ends(frozenset(positions)))
            self._buffer = deque(item for item in self._buffer if item.shard not in places)
            self._next |= places
            # The caller got the position from this stream, so the stream must have reached it.
            self._record_progress(places)

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock.moving():
            self._reading.close()
            self._server.close()

    def _take(self, seconds: float) -> Message | DeadLetter | None:
        if not self._buffer:
            self._read(seconds if self._live else 0.0)
            if not self._buffer and not self._live:
                self._removals.check(self._keys(), now=True)
                raise end_of_stream()
        return self._buffer.popleft() if self._buffer else None

    def _read(self, seconds: float) -> None:
        """Fill the buffer with a page of entries, waiting at most this long for an entry."""
        self._find_new_shards()
        if not self._next:
            self._closed.wait(seconds)
            return
        if self._live:
            self._removals.check(self._keys())
        keys = {key: shard for shard, key in self._keys().items()}
        after = {key: id_before(self._next[shard]) for key, shard in keys.items()}
        reply = self._server.read(self._reading, ["XREAD", "COUNT", PAGE_SIZE], after, seconds=seconds)
        for key, entries in reply:
            shard = keys[key]
            self._removals.record(shard, entries[-1][0].decode())
            for entry_id, fields in entries:
                item = read_entry(shard, entry_id, fields or [], self._server.message_field)
                self._next[shard] = (item.sequence or 0) + 1
                self._buffer.append(item)

    def _find_new_shards(self) -> None:
        if not self._live or not self._assignment.is_all_read or time.monotonic() < self._next_shard_search:
            return
        self._next_shard_search = time.monotonic() + SHARD_SEARCH_SECONDS
        found = frozenset(self._server.shards())
        # Create a new dictionary, because other threads may iterate over the old one.
        left = dict(self._next)
        if self._assignment.has_wildcard:
            left = {shard: sequence for shard, sequence in left.items() if shard in found}
            self._removals.reset(self._known - found)
        self._next = left | dict.fromkeys(found - self._known, 0)
        # With the wildcard, forget deleted shards; otherwise keep them, so that their removal is detected.
        self._known = found if self._assignment.has_wildcard else self._known | found

    def _keys(self) -> dict[Shard, bytes]:
        return {shard: self._server.key(shard) for shard in sorted(self._next)}

    def _selected(self) -> list[Shard]:
        return self._assignment.select(self._known)

    def _ends(self, shards: frozenset[Shard]) -> dict[Shard, int]:
        return {shard: found.end if found else 0 for shard, found in self._server.facts_of(shards).items()}

    def _move(self, sequence: int, place: str) -> None:
        sequence = max(0, sequence)
        with self._lock.moving():
            self._check_open()
            ends = self._ends(frozenset(self._selected()))
            if not any(end > sequence for end in ends.values()):
                raise no_message_error(place)
            self._go_to(dict.fromkeys(ends, sequence), ends)

    def _record_progress(self, ends: Mapping[Shard, int]) -> None:
        for shard, end in ends.items():
            self._removals.record(shard, id_before(end))

    def _go_to(self, positions: dict[Shard, int], ends: Mapping[Shard, int]) -> None:
        self._buffer.clear()
        self._removals.reset()
        self._record_progress(ends)
        self._next = positions
        self._assignment.apply()
