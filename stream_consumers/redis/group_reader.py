"""What a member of a Redis group reads, in which order: its own pending entries, those of who is gone, new ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stream_consumers.errors import StreamAssetsError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.options import AutoCommit, RedisGroupOptions
from stream_consumers.redis.acknowledgements import Acknowledgements, Place
from stream_consumers.redis.entries import read_reply
from stream_consumers.redis.group import NEW, START, RedisGroup
from stream_consumers.redis.server import RawEntry

BATCH = 100
SHARED_BATCH = 10
SHARDS_SECONDS = 5.0
# How many pages of what is pending one read may look through before it turns to new entries again.
CLAIM_PAGES = 100
Sink = Callable[[Place, "Message | DeadLetter"], None]


class RedisGroupReader:
    """Reads for one member of a group; one thread at a time may.

    Args:
        group: the group as this member sees it.
        options: batch size, claims, deliveries.
        acknowledgements: what this member holds already.
        put: gets what was read, in order.
        is_shared: take over what members that are gone have left behind.
        start: the id that a group is made behind where it is not there.
        message_field: the name of the payload's field.
        meets_new_shards: look for shards that were added.
    """

    def __init__(
        self,
        group: RedisGroup,
        options: RedisGroupOptions,
        acknowledgements: Acknowledgements,
        put: Sink,
        *,
        is_shared: bool,
        start: str,
        message_field: bytes,
        meets_new_shards: bool,
    ) -> None:
        self._group, self._options, self._acknowledgements, self._put = group, options, acknowledgements, put
        self._message_field, self._meets_new_shards = message_field, meets_new_shards
        self._is_immediate = options.auto_commit is AutoCommit.IMMEDIATE
        self._batch = options.batch_size or (SHARED_BATCH if is_shared else BATCH)
        self._to_join: dict[Shard, str] = dict.fromkeys(group.find_shards(), start)
        self._look_again = time.monotonic() + SHARDS_SECONDS
        self._joined: set[Shard] = set()
        # Per shard, up to where what is pending for this member was read; the others are at the new entries.
        self._backlog: dict[Shard, str] = {}
        # Per shard, where the search for entries of members that are gone goes on.
        self._sweeps: dict[Shard, str] = {}
        interval = options.auto_claim_interval_seconds if is_shared else None
        self._next_sweep = None if interval is None else time.monotonic() + interval

    def read(self, seconds: float) -> bool:
        """Read a page, waiting for new entries at most so long; whether anything came, of use or not.

        Raises:
            StreamAssetsError: as the server says; what it gave meanwhile comes with a later call.
        """
        self._meet_new_shards()
        for shard, start in list(self._to_join.items()):
            self._group.create(shard, start, create_stream=self._options.create_stream)
            del self._to_join[shard]
            self._joined.add(shard)
            self._backlog[shard] = START
        try:
            return self._read_backlog() or self._sweep() or self._read_new(seconds)
        except StreamAssetsError:
            # What the server gave while its answer was lost is pending for us: ask for it.
            self._backlog = dict.fromkeys(self._joined, START)
            raise

    def _meet_new_shards(self) -> None:
        if not self._meets_new_shards or time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + SHARDS_SECONDS
        before = self._group.keys
        for shard, key in self._group.find_shards().items():
            if before.get(shard) != key:
                self._to_join[shard] = START

    def _read_backlog(self) -> bool:
        """What is pending for this member, page by page until an empty one: trimmed entries count, too."""
        while self._backlog:
            pages = self._group.read(dict(sorted(self._backlog.items())), count=self._batch)
            for shard in list(self._backlog):
                entries = pages.get(shard)
                if not entries:
                    del self._backlog[shard]
                    continue
                self._receive(shard, entries, is_again=True)
                self._backlog[shard] = entries[-1][0].decode()
            if any(pages.values()):
                return True
        return False

    def _read_new(self, seconds: float) -> bool:
        pages = self._group.read(dict.fromkeys(sorted(self._joined), NEW), count=self._batch, seconds=seconds)
        for shard, entries in pages.items():
            self._receive(shard, entries)
        return bool(pages)

    def _sweep(self) -> bool:
        """Take over what members that are gone have left behind; whether there was something."""
        interval, idle = self._options.auto_claim_interval_seconds, self._options.auto_claim_idle_seconds
        if self._next_sweep is None or interval is None:
            return False
        if not self._sweeps and time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + interval
            self._sweeps = {s: START for s in sorted(self._joined) if self._group.has_idle_peer(s, idle)}
        room, came = self._batch, False
        for _ in range(CLAIM_PAGES):
            if not self._sweeps or room <= 0:
                break
            shard, cursor = next(iter(self._sweeps.items()))
            page = self._group.claim(shard, cursor, idle_seconds=idle, count=room)
            # XAUTOCLAIM finds the caller's own entries, too, and those are in somebody's hands.
            wanted = [entry_id for entry_id in page.ids if not self._acknowledgements.is_held((shard, entry_id))]
            deleted = [entry_id for entry_id in page.deleted if not self._acknowledgements.is_held((shard, entry_id))]
            entries = self._group.deliver(shard, wanted)
            self._receive(shard, [*entries, *((entry_id, None) for entry_id in deleted)], is_again=True)
            came = came or bool(entries or deleted)
            room -= len(entries)
            if page.cursor == START:
                del self._sweeps[shard]
            else:
                self._sweeps[shard] = page.cursor
        return came

    def _receive(self, shard: Shard, entries: Sequence[RawEntry], *, is_again: bool = False) -> None:
        """Pass entries on, except those that this member holds already."""
        counts: dict[bytes, int] = {}
        most = self._options.max_deliveries
        if is_again and most is not None:
            counts = self._group.deliveries(shard, [entry_id for entry_id, _ in entries])
        if is_again and self._is_immediate:
            # The server acknowledges on reading new entries only.
            self._group.acknowledge(shard, [entry_id for entry_id, _ in entries])
        for entry_id, fields in entries:
            if self._acknowledgements.receive((shard, entry_id)):
                item = read_reply(shard, entry_id, fields, self._message_field)
                if most is not None and counts.get(entry_id, 1) > most and isinstance(item, Message):
                    item = _too_often(item, counts[entry_id], most)
                self._put((shard, entry_id), item)


def _too_often(message: Message, count: int, most: int) -> DeadLetter:
    said = f"the message was delivered {count} times, more often than max_deliveries={most} allows"
    return DeadLetter(message.shard, message.sequence, message.timestamp_ms, message.payload or b"", said)
