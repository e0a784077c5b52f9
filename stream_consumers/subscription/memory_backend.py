"""A stream backend in memory, for tests of users' own handlers: the same contract, nothing to start."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from stream_consumers.errors import GroupRemovedError, StreamAssetsError
from stream_consumers.messages import from_milliseconds, now_milliseconds
from stream_consumers.subscription.backend import Published
from stream_consumers.subscription.codec import MAX_PAYLOAD_BYTES, Envelope, EventCodec, JsonCodec, removed
from stream_consumers.subscription.messages import Delivery, Entry, EventMessage, GroupPosition


@dataclass
class _Pending:
    consumer: str
    attempt: int
    first: datetime
    touched: float


@dataclass
class _Group:
    position: int
    pending: dict[int, _Pending] = field(default_factory=dict)
    consumers: set[str] = field(default_factory=set)
    cursors: dict[str, int] = field(default_factory=dict)


class MemoryBackend:
    """Streams in memory; see :class:`stream_consumers.subscription.backend.StreamBackend`. Ids are ``1-0``, ``2-0``, ….

    Args:
        codec: how messages become bytes.
        max_payload_bytes: the largest payload to publish and to receive; 0 sets no limit.

    Example:
        >>> from stream_consumers.subscription.messages import EventMessage
        >>> backend = MemoryBackend()
        >>> backend.publish("orders", EventMessage(b"{}"))
        '1-0'
    """

    def __init__(self, *, codec: EventCodec | None = None, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._envelope = Envelope(codec or JsonCodec(), max_payload_bytes)
        self._changed = threading.Condition()
        self._streams: dict[str, dict[int, bytes]] = {}
        self._ends: dict[str, int] = {}
        self._groups: dict[tuple[str, str], _Group] = {}

    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.create_group`."""
        with self._changed:
            end = self._ends.setdefault(stream, 0)
            wanted = end if start == "$" else _number(start)
            known = self._groups.get((stream, group))
            if known is None:
                self._groups[stream, group] = _Group(wanted)
            return GroupPosition(known is None, f"{wanted}-0", f"{known.position if known else wanted}-0")

    def publish(self, stream: str, message: EventMessage) -> str:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.publish`."""
        return self.append(stream, self._envelope.seal(message))

    def append(self, stream: str, raw: bytes) -> str:
        """Add an entry with these bytes, whatever they are; returns its id."""
        with self._changed:
            number = self._ends[stream] = self._ends.get(stream, 0) + 1
            self._streams.setdefault(stream, {})[number] = raw
            self._changed.notify_all()
            return f"{number}-0"

    def remove(self, stream: str, entry_id: str) -> None:
        """Remove an entry from a stream; where it is pending, it stays so."""
        with self._changed:
            del self._streams[stream][_number(entry_id)]

    def entries(self, stream: str) -> list[tuple[str, bytes]]:
        """Every entry of a stream: its id and its bytes."""
        with self._changed:
            return [(f"{number}-0", raw) for number, raw in self._streams.get(stream, {}).items()]

    def pending(self, stream: str, group: str) -> dict[str, str]:
        """Owner by id of what is pending."""
        with self._changed:
            return {f"{number}-0": held.consumer for number, held in self._group(stream, group).pending.items()}

    def consumers(self, stream: str, group: str) -> set[str]:
        """The consumers that the group knows."""
        with self._changed:
            return set(self._group(stream, group).consumers)

    def remove_group(self, stream: str, group: str) -> None:
        """Remove a group with what is pending."""
        with self._changed:
            del self._groups[stream, group]
            self._changed.notify_all()

    def publish_batch(self, stream: str, messages: Sequence[EventMessage]) -> list[Published]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.publish_batch`."""
        results: list[Published] = []
        for message in messages:
            try:
                results.append(self.publish(stream, message))
            except StreamAssetsError as error:
                results.append(error)
        return results

    def reclaim_idle(self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int) -> list[Entry]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.reclaim_idle`."""
        with self._changed:
            known = self._group(stream, group)
            known.consumers.add(consumer)
            cursor = known.cursors.get(consumer, 0)
            in_turn = sorted(known.pending, key=lambda number: (number <= cursor, number))
            idle = time.monotonic() - min_idle_seconds
            chosen = [number for number in in_turn if known.pending[number].touched <= idle][:count]
            known.cursors[consumer] = chosen[-1] if chosen else 0
            return [self._deliver(stream, known, consumer, number) for number in chosen]

    def read_new(self, stream: str, group: str, consumer: str, count: int, timeout: float) -> list[Entry]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.read_new`."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                known = self._group(stream, group)
                known.consumers.add(consumer)
                new = [number for number in self._streams.get(stream, {}) if number > known.position][:count]
                left = deadline - time.monotonic()
                if new or left <= 0:
                    break
                self._changed.wait(left)
            known.position = new[-1] if new else known.position
            return [self._deliver(stream, known, consumer, number) for number in new]

    def redeliver(self, stream: str, group: str, consumer: str, entry_id: str) -> Entry | None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.redeliver`."""
        with self._changed:
            known = self._group(stream, group)
            held = known.pending.get(_number(entry_id))
            if held is None or held.consumer != consumer:
                return None
            return self._deliver(stream, known, consumer, _number(entry_id))

    def touch(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.touch`."""
        with self._changed:
            known = self._group(stream, group)
            for number in map(_number, entry_ids):
                held = known.pending.get(number)
                if held is not None and held.consumer == consumer:
                    held.touched = time.monotonic()

    def ack(self, stream: str, group: str, entry_id: str) -> int:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.ack`."""
        return self.ack_many(stream, group, [entry_id])

    def ack_many(self, stream: str, group: str, entry_ids: Sequence[str]) -> int:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.ack_many`."""
        with self._changed:
            pending = self._group(stream, group).pending
            return sum(pending.pop(_number(entry_id), None) is not None for entry_id in entry_ids)

    def forget_consumer(self, stream: str, group: str, consumer: str) -> bool:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.forget_consumer`."""
        with self._changed:
            known = self._groups.get((stream, group))
            if known is not None:
                known.cursors.pop(consumer, None)
            if known is None or any(held.consumer == consumer for held in known.pending.values()):
                return False
            known.consumers.discard(consumer)
            return True

    def close(self) -> None:
        """Nothing to release."""

    def _group(self, stream: str, group: str) -> _Group:
        known = self._groups.get((stream, group))
        if known is None:
            raise GroupRemovedError(
                f"there is no group {group!r} of {stream!r}", remedy="Make it where it should go on (create_group)."
            )
        return known

    def _deliver(self, stream: str, group: _Group, consumer: str, number: int) -> Entry:
        raw, entry_id = self._streams.get(stream, {}).get(number), f"{number}-0"
        now = from_milliseconds(now_milliseconds())
        held = group.pending.setdefault(number, _Pending(consumer, 0, now, 0.0))
        if raw is None:
            # As on Redis: not claimed, so that whoever finds it tells that it is lost.
            return removed(entry_id, Delivery(held.attempt, held.first, now))
        held.consumer, held.touched = consumer, time.monotonic()
        held.attempt += 1
        return self._envelope.open(entry_id, raw, Delivery(held.attempt, held.first, now))


def _number(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])
