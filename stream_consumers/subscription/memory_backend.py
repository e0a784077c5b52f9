"""A stream backend in memory, with which users can test their handlers without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

from stream_consumers.errors import GroupRemovedError
from stream_consumers.memory import HeldEntry, MemoryBroker, MemoryGroup, memory_broker
from stream_consumers.messages import Shard, from_milliseconds, now_milliseconds
from stream_consumers.options import check_count, check_name, check_timeout
from stream_consumers.redis.entries import check_entry_id, check_entry_ids
from stream_consumers.subscription.backend import (
    MAX_PAYLOAD_BYTES,
    Delivery,
    Envelope,
    EventCodec,
    EventMessage,
    FetchedEntry,
    GroupPosition,
    JsonCodec,
    StreamBackend,
    removed_entry,
)
from stream_consumers.urls import StreamUrl


class MemoryBackend(StreamBackend):
    """Streams in memory; see :class:`stream_consumers.subscription.backend.StreamBackend`. Ids are ``1-0``, ``2-0``, ….

    A stream is shard 0 of that name, and entry ``n-0`` the message with sequence n - 1.

    Args:
        url: ``memory://name/``, so that consumers and producers of that name see the same streams; streams in it do not
            matter. By default no other client sees them.
        codec: encodes and decodes messages.
        max_payload_bytes: the largest payload to publish and to receive; 0 sets no limit.

    Example:
        >>> from stream_consumers.subscription.backend import EventMessage
        >>> backend = MemoryBackend()
        >>> backend.publish("orders", EventMessage(b"{}"))
        '1-0'
    """

    def __init__(
        self,
        url: str | StreamUrl | None = None,
        *,
        codec: EventCodec | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._broker = MemoryBroker() if url is None else memory_broker(url)
        self._envelope = Envelope(codec or JsonCodec(), max_payload_bytes)

    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.create_group`."""
        check_entry_id(start, special=("$",))
        broker, shard = self._broker, _shard(stream)
        check_name("group", group)
        with broker.changed:
            end = broker.ends.setdefault(shard, 0)
            wanted = end if start == "$" else _number(start)
            is_new = (shard, group) not in broker.groups
            known = broker.groups.setdefault((shard, group), MemoryGroup(wanted))
            return GroupPosition(is_new, f"{wanted}-0", f"{known.position}-0")

    def publish(self, stream: str, message: EventMessage) -> str:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.publish`."""
        return self.append(stream, self._envelope.seal(message))

    def append(self, stream: str, raw: bytes) -> str:
        """Add an entry with any bytes, and return its id."""
        return _id(self._broker.append(_shard(stream), raw).sequence)

    def remove(self, stream: str, entry_id: str) -> None:
        """Remove an entry from a stream; it stays pending in groups where it is pending."""
        with self._broker.changed:
            log = self._broker.messages[_shard(stream)]
            log[:] = [message for message in log if _id(message.sequence) != entry_id]

    def entries(self, stream: str) -> list[tuple[str, bytes]]:
        """Return the id and the bytes of every entry of a stream."""
        with self._broker.changed:
            return [(_id(message.sequence), message.payload or b"") for message in self._broker.between(_shard(stream))]

    def pending(self, stream: str, group: str) -> dict[str, str]:
        """Return the owners of the pending entries, by id."""
        with self._broker.changed:
            return {_id(sequence): held.consumer for sequence, held in self._group(stream, group).pending.items()}

    def consumers(self, stream: str, group: str) -> set[str]:
        """Return the consumers that the group knows."""
        with self._broker.changed:
            return set(self._group(stream, group).consumers)

    def remove_group(self, stream: str, group: str) -> None:
        """Remove a group with its pending entries."""
        with self._broker.changed:
            del self._broker.groups[_shard(stream), group]
            self._broker.changed.notify_all()

    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.reclaim_idle`."""
        check_count("count", count)
        check_name("consumer", consumer)
        with self._broker.changed:
            known = self._group(stream, group)
            known.consumers.add(consumer)
            cursor = known.cursors.get(consumer, -1)
            in_turn = sorted(known.pending, key=lambda sequence: (sequence <= cursor, sequence))
            idle = time.monotonic() - min_idle_seconds
            chosen = [sequence for sequence in in_turn if known.pending[sequence].last_touched <= idle][:count]
            known.cursors[consumer] = chosen[-1] if chosen else -1
            return [self._deliver(stream, known, consumer, sequence) for sequence in chosen]

    def read_new(
        self, stream: str, group: str, consumer: str, count: int, timeout_seconds: float
    ) -> list[FetchedEntry]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.read_new`."""
        check_count("count", count)
        check_name("consumer", consumer)
        timeout_seconds = check_timeout(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        with self._broker.changed:
            while True:
                known = self._group(stream, group)
                known.consumers.add(consumer)
                new = [m.sequence for m in islice(self._broker.between(_shard(stream), known.position), count)]
                left = deadline - time.monotonic()
                if new or left <= 0:
                    break
                self._broker.changed.wait(left)
            known.position = new[-1] + 1 if new else known.position
            return [self._deliver(stream, known, consumer, sequence) for sequence in new]

    def redeliver(self, stream: str, group: str, consumer: str, entry_id: str) -> FetchedEntry | None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.redeliver`."""
        check_entry_id(entry_id)
        with self._broker.changed:
            known = self._group(stream, group)
            held = known.held_by(consumer, [_sequence(entry_id)])
            return self._deliver(stream, known, consumer, _sequence(entry_id)) if held else None

    def touch(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.touch`."""
        check_entry_ids(entry_ids)
        with self._broker.changed:
            for held in self._group(stream, group).held_by(consumer, map(_sequence, entry_ids)):
                held.last_touched = time.monotonic()

    def ack(self, stream: str, group: str, entry_id: str) -> int:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.ack`."""
        return self.ack_many(stream, group, [entry_id])

    def ack_many(self, stream: str, group: str, entry_ids: Sequence[str]) -> int:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.ack_many`."""
        check_entry_ids(entry_ids)
        with self._broker.changed:
            pending = self._group(stream, group).pending
            return sum(pending.pop(_sequence(entry_id), None) is not None for entry_id in entry_ids)

    def forget_consumer(self, stream: str, group: str, consumer: str) -> bool:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.forget_consumer`."""
        with self._broker.changed:
            known = self._broker.groups.get((_shard(stream), group))
            if known is not None:
                known.cursors.pop(consumer, None)
            if known is None or any(held.consumer == consumer for held in known.pending.values()):
                return False
            known.consumers.discard(consumer)
            return True

    def _group(self, stream: str, group: str) -> MemoryGroup:
        known = self._broker.groups.get((_shard(stream), group))
        if known is None:
            raise GroupRemovedError(
                f"the stream {stream!r} has no group {group!r}",
                remedy="Create it at the position where it should continue (create_group).",
            )
        return known

    def _deliver(self, stream: str, group: MemoryGroup, consumer: str, sequence: int) -> FetchedEntry:
        message = next(self._broker.between(_shard(stream), sequence, sequence + 1), None)
        now = now_milliseconds()
        held = group.pending.setdefault(sequence, HeldEntry(consumer, 0, now, 0.0))
        if message is not None:
            held.consumer, held.last_touched, held.attempt = consumer, time.monotonic(), held.attempt + 1
        delivery = Delivery(held.attempt, from_milliseconds(held.first_delivered_ms), from_milliseconds(now))
        if message is None:
            # As on Redis, a removed entry is not claimed; the consumer that finds it reports the loss.
            return removed_entry(_id(sequence), delivery)
        return self._envelope.open(_id(sequence), message.payload or b"", delivery)


def _shard(stream: str) -> Shard:
    return Shard(check_name("stream", stream))


def _number(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


def _sequence(entry_id: str) -> int:
    return _number(entry_id) - 1


def _id(sequence: int) -> str:
    return f"{sequence + 1}-0"
