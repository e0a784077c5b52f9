"""Redis Streams as a stream backend: an entry's field ``msg`` has the encoded message."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis

from stream_consumers.client_config import ClientConfig
from stream_consumers.display import counted
from stream_consumers.errors import GroupRemovedError, StreamAssetsError
from stream_consumers.messages import Shard, from_milliseconds
from stream_consumers.options import check_count, check_iterable, check_name, check_timeout
from stream_consumers.redis.entries import check_entry_id, check_entry_ids, original_bytes, to_key
from stream_consumers.redis.group import ACK_CHUNK, BEGIN, NEW, NOW, RedisGroup
from stream_consumers.redis.scripts import RECLAIM, REDELIVER, REMOVE_CONSUMER, TOUCH_ENTRIES
from stream_consumers.redis.server import REPLY_SECONDS, RedisConnection
from stream_consumers.subscription.backend import (
    MAX_PAYLOAD_BYTES,
    Delivery,
    Envelope,
    EventCodec,
    EventMessage,
    FetchedEntry,
    GroupPosition,
    JsonCodec,
    Published,
    StreamBackend,
    removed_entry,
)
from stream_consumers.urls import StreamUrl

PIPELINE = 512
# This is less than the time that a client waits for an answer.
MAX_BLOCK_SECONDS = REPLY_SECONDS / 2
# The numbers of pending entries in a page, and of pages, that one search for idle entries examines.
_PAGE, _PAGES = 1000, 20
_MILLISECONDS = re.compile(rb"[0-9]{1,15}")
_HASH_TAG = re.compile(r"[^{]*\{[^}]+\}")
_log = logging.getLogger(__name__)
_Triple = tuple[str, str, str]


class RedisBackend(StreamBackend):
    """Redis Streams as a stream backend. A stream is the key of that name.

    Beside a stream, a hash ``{stream}:first-received:group`` is kept for entries that were delivered more than once.

    Args:
        url: ``redis://host:6379/``; streams in it do not matter.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        codec: encodes and decodes messages.
        max_payload_bytes: the largest payload to publish and to receive; 0 sets no limit.

    Raises:
        InvalidUrlError, InvalidOptionError: see :class:`stream_consumers.redis.server.RedisConnection`.

    Example::

        backend = RedisBackend("redis://localhost:6379/")
        config = SubscriptionConfig(stream="orders", group="billing", dead_letter_stream="orders.dead")
        with Subscription(backend, config, handle):
            backend.publish("orders", EventMessage(b"{}"))
    """

    def __init__(
        self,
        url: str | StreamUrl,
        client: ClientConfig | None = None,
        *,
        codec: EventCodec | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        url = StreamUrl.parse(url)
        self._server = RedisConnection(url, client)
        self._envelope = Envelope(codec or JsonCodec(), max_payload_bytes)
        self._lock = threading.Lock()
        self._groups: dict[_Triple, RedisGroup] = {}
        self._cursors: dict[_Triple, str] = {}

    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.create_group`."""
        check_entry_id(start, special=("$",))
        known, shard = self._group(stream, group), Shard(stream)
        wanted = self._server.last_id(to_key(stream)) if start == NOW else start if "-" in start else f"{start}-0"
        is_new = known.create(shard, start)
        facts = known.facts(shard)
        position = GroupPosition(is_new=is_new, start=wanted, position=facts.delivered if facts else wanted)
        if position.difference:
            _log.info("group %r of %r: %s", group, stream, position.difference)
        return position

    def publish(self, stream: str, message: EventMessage) -> str:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.publish`."""
        sealed = self._envelope.seal(message)
        with self._server.explained(f"publishing to {stream!r}"):
            added: bytes = self._server.connection.execute_command(
                "XADD", to_key(stream), "*", self._server.message_field, sealed
            )
        return added.decode()

    def publish_batch(self, stream: str, messages: Sequence[EventMessage]) -> list[Published]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.publish_batch`."""
        check_iterable("messages", messages)
        results: list[Published] = []
        for begin in range(0, len(messages), PIPELINE):
            results += self._publish_page(stream, messages[begin : begin + PIPELINE])
        return results

    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.reclaim_idle`."""
        check_count("count", count)
        triple = (stream, group, consumer)
        self._member(*triple)
        idle = max(0, round(min_idle_seconds * 1000))
        found: list[FetchedEntry] = []
        cursor = self._cursors.get(triple, BEGIN)
        # Search from where the last search ended, then from the beginning, and examine no entry twice.
        turns_left = 1 if cursor == BEGIN else 2
        try:
            for _ in range(_PAGES):
                reply = self._run(triple, RECLAIM, [idle, cursor, count - len(found), _PAGE])
                found += self._redelivered(reply)
                cursor = reply[0].decode() or BEGIN
                turns_left -= cursor == BEGIN
                if len(found) >= count or turns_left == 0 or (cursor == BEGIN and found):
                    break
        except GroupRemovedError:
            self._cursors.pop(triple, None)
            raise
        self._cursors[triple] = cursor
        return found

    def read_new(
        self, stream: str, group: str, consumer: str, count: int, timeout_seconds: float
    ) -> list[FetchedEntry]:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.read_new`."""
        check_count("count", count)
        timeout_seconds = check_timeout(timeout_seconds)
        member, shard = self._member(stream, group, consumer), Shard(stream)
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            pages = member.read({shard: NEW}, count=count, seconds=min(left, MAX_BLOCK_SECONDS))
            if pages or left <= MAX_BLOCK_SECONDS:
                break
        now = from_milliseconds(time.time_ns() // 1_000_000)
        return [
            self._entry(entry_id.decode(), fields, Delivery(1, now, now)) for entry_id, fields in pages.get(shard, [])
        ]

    def redeliver(self, stream: str, group: str, consumer: str, entry_id: str) -> FetchedEntry | None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.redeliver`."""
        check_entry_id(entry_id)
        triple = (stream, group, consumer)
        return next(iter(self._redelivered(self._run(triple, REDELIVER, [entry_id]))), None)

    def touch(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.touch`."""
        check_entry_ids(entry_ids)
        for begin in range(0, len(entry_ids), ACK_CHUNK):
            self._run((stream, group, consumer), TOUCH_ENTRIES, entry_ids[begin : begin + ACK_CHUNK])

    def ack(self, stream: str, group: str, entry_id: str) -> int:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.ack`."""
        return self.ack_many(stream, group, [entry_id])

    def ack_many(self, stream: str, group: str, entry_ids: Sequence[str]) -> int:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.ack_many`."""
        check_entry_ids(entry_ids)
        return self._group(stream, group).acknowledge(Shard(stream), entry_ids, times=_times(stream, group))

    def forget_consumer(self, stream: str, group: str, consumer: str) -> bool:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.forget_consumer`."""
        triple = (stream, group, consumer)
        member = self._member(*triple)
        with self._lock:
            self._cursors.pop(triple, None)
            self._groups.pop(triple, None)
        member.stop_reading()
        try:
            return bool(member.run(Shard(stream), REMOVE_CONSUMER, [consumer]))
        except GroupRemovedError:
            return False

    def close(self) -> None:
        """See :meth:`stream_consumers.subscription.backend.StreamBackend.close`."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.stop_reading()
        self._server.close()

    def _member(self, stream: str, group: str, consumer: str) -> RedisGroup:
        return self._group(stream, group, check_name("consumer", consumer))

    def _group(self, stream: str, group: str, consumer: str = "") -> RedisGroup:
        key, triple = to_key(stream), (stream, check_name("group", group), consumer)
        with self._lock:
            found = self._groups.get(triple)
            if found is None:
                found = RedisGroup(self._server, group, consumer)
                found.keys = {Shard(stream): key}
                self._groups[triple] = found
            return found

    def _run(self, triple: _Triple, script: str, arguments: Sequence[object]) -> Any:
        stream, group, consumer = triple
        member, times = self._member(*triple), _times(stream, group)
        return member.run(Shard(stream), script, [consumer, *arguments], more_keys=[times])

    def _redelivered(self, reply: Any) -> list[FetchedEntry]:
        _, now, rows = reply
        return [
            self._entry(
                entry_id.decode(),
                fields,
                Delivery(attempt, from_milliseconds(_first_received(first, now)), from_milliseconds(now)),
            )
            for entry_id, attempt, first, fields in rows
        ]

    def _entry(self, entry_id: str, fields: list[bytes] | None, delivery: Delivery) -> FetchedEntry:
        if fields is None:
            return removed_entry(entry_id, delivery)
        field = self._server.message_field
        sealed = [value for name, value in zip(fields[::2], fields[1::2]) if name == field]
        if len(sealed) == 1:
            return self._envelope.open(entry_id, sealed[0], delivery)
        said = f"the field {field.decode()!r} occurs {counted(len(sealed), 'time')}, not once"
        return self._envelope.malformed(entry_id, original_bytes(fields), said, delivery)

    def _publish_page(self, stream: str, messages: Sequence[EventMessage]) -> list[Published]:
        sealed = [self._seal(message) for message in messages]
        start = "XADD", to_key(stream), "*", self._server.message_field
        try:
            answers = self._server.add([(*start, one) for one in sealed if isinstance(one, bytes)])
        except redis.RedisError as error:
            # Which of them were added is unknown.
            answers = [error] * len(sealed)
        what, left = f"publishing to {stream!r} at {self._server.url}", iter(answers)
        return [self._published(next(left), what) if isinstance(one, bytes) else one for one in sealed]

    def _seal(self, message: EventMessage) -> bytes | StreamAssetsError:
        try:
            return self._envelope.seal(message)
        except StreamAssetsError as error:
            return error

    def _published(self, answer: Any, what: str) -> Published:
        return self._server.error(answer, what) if isinstance(answer, redis.RedisError) else answer.decode()


def _first_received(stored: bytes, now: int) -> int:
    """Return the time of the first delivery; ``now`` if other clients have stored something else in its place.

    Example:
        >>> [_first_received(stored, 2000) for stored in (b"1000", b"3000", b"9" * 5000, b"x")]
        [1000, 2000, 2000, 2000]
    """
    return min(int(stored), now) if _MILLISECONDS.fullmatch(stored) else now


def _times(stream: str, group: str) -> bytes:
    """Return the key of the first deliveries, in the slot of the stream.

    Example:
        >>> _times("orders", "billing"), _times("{shop}orders", "billing")
        (b'{orders}:first-received:billing', b'{shop}orders:first-received:billing')
    """
    tagged = stream if _HASH_TAG.match(stream) else f"{{{stream}}}"
    return to_key(f"{tagged}:first-received:{group}")
