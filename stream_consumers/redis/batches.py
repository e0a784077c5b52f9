"""Micro-batches from Redis Streams: ranges of ids, read by XRANGE in parallel slices.

Redis does not report how many entries an id range holds. A script on the server counts them, so that no payload crosses
the network, and the plan records the count. A slice that yields fewer entries was trimmed meanwhile: data loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from stream_consumers.batches import (
    BatchPlan,
    BatchSource,
    Extent,
    FactsByShard,
    LastMessage,
    MessageRow,
    PositionFacts,
    Range,
    Resume,
    check_shard_count,
    dead_letter_row,
    fair_shares,
    hint_with_facts,
    message_checksum,
    message_row,
    plain_batch,
    position_facts_in,
    readable_gaps,
    record_batches,
    total_counts,
)
from stream_consumers.client_config import ClientConfig, Scalar
from stream_consumers.display import counted
from stream_consumers.errors import DataLossError
from stream_consumers.messages import MAX_SEQUENCE, Message, Shard
from stream_consumers.options import ConsumerMode, Limits, choice
from stream_consumers.redis.entries import (
    MAX_MS,
    MAX_SUB,
    SUB_BITS,
    id_range,
    read_entry,
    sequence_after,
    to_id,
    to_sequence,
    to_timestamp_ms,
)
from stream_consumers.redis.group import RedisGroup
from stream_consumers.redis.scripts import MEASURE_RANGE
from stream_consumers.redis.server import EXACT_COUNT, Look, RedisConnection, StreamFacts
from stream_consumers.urls import StreamUrl

SCAN_PAGE_SIZE = 4096
_log = logging.getLogger(__name__)
PAGE_BYTES = 4 * 1024 * 1024
MAX_PAGE_SIZE = 5000
StoredEntry: TypeAlias = tuple[bytes, list[bytes]]
"""An entry of a stream: its id, and alternating names and values."""


def plain_entries(
    page: Sequence[StoredEntry], message_field: bytes
) -> tuple[pa.Array[Any], pa.Array[Any], pa.Array[Any]] | None:
    """Return sequences, timestamps and payloads of entries with only the message field; ``None`` if some have more.

    The result equals that of :func:`read_entry` for each entry.

    Example:
        >>> [column.to_pylist() for column in plain_entries([(b"1-2", [b"msg", b"{}"])], b"msg")]
        [[65538], [1], [b'{}']]
    """
    fields = [entry[1] for entry in page]
    if not page or any(len(pairs) != 2 or pairs[0] != message_field for pairs in fields):
        return None
    try:
        ids = pa.array(b"-".join([entry[0] for entry in page]).split(b"-"), pa.string()).cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    if len(ids) != 2 * len(page):
        return None
    milliseconds, subs = ids[::2], ids[1::2]
    if pc.max(milliseconds).as_py() > MAX_MS or pc.max(subs).as_py() > MAX_SUB:
        return None
    sequences = pc.bit_wise_or(pc.shift_left(milliseconds, SUB_BITS), subs)
    if pc.max(sequences).as_py() > MAX_SEQUENCE:
        return None
    return sequences, milliseconds, pa.array([pairs[1] for pairs in fields], pa.binary())


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a range, with the number of entries that it held when it was planned.

    Args:
        shard: the shard.
        key: the Redis key of the shard.
        id_range: the range of sequences.
        count: the number of entries in the range.
        sequences: read only these entries, one by one.
        error: the reason, if the entries are to become dead letters.
    """

    shard: Shard
    key: bytes
    id_range: Range
    count: int
    sequences: tuple[int, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RedisSplit:
    """Slices of streams that one executor reads.

    Args:
        url: the URL of the server.
        client: configuration of the client, with the secrets looked up; never shown.
        slices: the slices to read.
        page_size: the number of entries per request, chosen so that a page has several megabytes.
    """

    url: StreamUrl
    client: Mapping[str, Scalar] = field(repr=False)
    slices: tuple[Slice, ...]
    page_size: int

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        server = RedisConnection(self.url, self.client)
        try:
            for piece in self.slices:
                yield from self._slice(server, piece)
        finally:
            server.close()

    def counts(self) -> Mapping[Shard, int] | None:
        """Return the planned counts of the slices; ``None`` if some entries are to become dead letters."""
        if any(piece.error is not None for piece in self.slices):
            return None
        return total_counts({piece.shard: piece.count} for piece in self.slices)

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.redis.server.RedisConnection.identities`."""
        return RedisConnection(self.url, self.client).identities()

    def _slice(self, server: RedisConnection, piece: Slice) -> Iterator[pa.RecordBatch]:
        count = 0
        for page in self._pages(server, piece):
            count += len(page)
            plain = plain_entries(page, server.message_field)
            if plain is None or piece.error is not None:
                yield from record_batches(_rows(page, piece, server.message_field))
            else:
                stream, number = (pa.repeat(part, len(page)) for part in (piece.shard.stream, piece.shard.id))
                yield plain_batch(stream, number, *plain)
        if count < piece.count:
            raise DataLossError(
                f"{piece.shard} lacks {counted(piece.count - count, 'entry', 'entries')} that the plan had counted",
                remedy="Run again to see what is missing; keep more entries (MAXLEN, MINID), or ingest more often.",
                planned=piece.count,
                read=count,
            )

    def _pages(self, server: RedisConnection, piece: Slice) -> Iterator[list[StoredEntry]]:
        if piece.sequences is not None:
            for begin in range(0, len(piece.sequences), self.page_size):
                ids = map(to_id, piece.sequences[begin : begin + self.page_size])
                ranges = [("XRANGE", piece.key, entry_id, entry_id) for entry_id in ids]
                replies = server.replies(ranges, f"reading {piece.shard}", page_size=self.page_size)
                yield [entry for reply in replies for entry in reply]
            return
        start, end = id_range(piece.id_range.start, piece.id_range.end)
        while True:
            with server.explained(f"reading {piece.shard}"):
                page = server.connection.execute_command("XRANGE", piece.key, start, end, "COUNT", self.page_size)
            yield page
            if len(page) < self.page_size:
                return
            start = f"({page[-1][0].decode()}"


def _last_message(entry: StoredEntry) -> LastMessage:
    sequence = to_sequence(entry[0])
    return LastMessage(sequence, to_timestamp_ms(sequence), message_checksum(None, b"\0".join(entry[1])))


def _rows(page: Iterable[StoredEntry], piece: Slice, message_field: bytes) -> Iterator[MessageRow]:
    for entry_id, fields in page:
        found = read_entry(piece.shard, entry_id, fields, message_field)
        if not isinstance(found, Message):
            yield dead_letter_row(found)
        elif piece.error is None:
            yield message_row(found)
        else:
            yield (*message_row(found)[:7], piece.error, None)


def split_slices(
    url: StreamUrl, client: Mapping[str, Scalar], slices: Sequence[Slice], *, size: int, parallelism: int
) -> list[RedisSplit]:
    """Distribute slices over executors.

    Args:
        url: the URL of the server.
        client: configuration of the client, with the secrets looked up.
        slices: the slices to read.
        size: the size of all slices in bytes.
        parallelism: the most splits.
    """
    records = sum(piece.count for piece in slices)
    page = max(1, min(MAX_PAGE_SIZE, PAGE_BYTES // max(1, size // max(1, records))))
    share = max(1, math.ceil(records / parallelism))
    groups: list[list[Slice]] = [[]]
    held = 0
    for piece in slices:
        if held >= share and len(groups) < parallelism:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += piece.count
    return [RedisSplit(url, client, tuple(group), page) for group in groups if group]


class Loss(NamedTuple):
    """Entries that were removed before they were read.

    Args:
        entries: the number of removed entries.
        id_range: the smallest range that certainly contains all of them.
    """

    entries: int
    id_range: Range


class _RangeScan:
    """Scans an id range of one shard on the server, and records its slices and counts."""

    def __init__(self, server: RedisConnection, shard: Shard, gap: Range) -> None:
        self.shard = shard
        self.gap = gap
        self.slices: list[Slice] = []
        self.count = 0
        self.bytes = 0
        self.position = gap.start
        self._server = server

    @property
    def is_done(self) -> bool:
        """Whether the gap was scanned to its end."""
        return self.position >= self.gap.end

    def advance(self, records: int, room: int, *, take_one: bool) -> bool:
        """Scan at most this many entries and bytes; return whether the limit of bytes was reached."""
        key = self._server.key(self.shard)
        left = records
        while left > 0 and not self.is_done:
            asked = min(left, SCAN_PAGE_SIZE)
            words = [*id_range(self.position, self.gap.end), asked, room, int(take_one and not self.count)]
            found = self._server.run(MEASURE_RANGE, [key], words, f"measuring {self.shard}")
            count, size, last, is_full, are_all = found
            stop = self.gap.end if are_all else (to_sequence(last) + 1 if last else self.position)
            if count or stop > self.position:
                self.slices.append(Slice(self.shard, key, Range(self.position, stop), count))
            self.position, self.count, self.bytes = stop, self.count + count, self.bytes + size
            left, room = left - count, room - size
            if is_full:
                return True
        return False


class RedisBatchSource(BatchSource):
    """Redis Streams as a batch source, by position.

    Args:
        url: ``redis://host:6379/orders``; a stream is the key ``orders``, or its shards ``orders:0``, ``orders:1``, ….
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        mode: with ``real_time``, the server has no group.

    Raises:
        InvalidUrlError, InvalidOptionError: the URL contains credentials, or a reserved option is set.
    """

    has_own_timestamps = False

    def __init__(
        self, url: str | StreamUrl, client: ClientConfig | None = None, *, mode: ConsumerMode = ConsumerMode.RESUMABLE
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._mode = choice(ConsumerMode, mode, option="mode")
        self.server = RedisConnection(url, client)
        self._extents: dict[Shard, Extent] = {}
        # The newest facts.
        self._facts: dict[Shard, StreamFacts] = {}
        # The facts at the positions that the ledger has.
        self._recorded: dict[Shard, tuple[int, PositionFacts]] = {}
        # The facts at other positions as of the first look at them, which do not count what was removed before.
        self._assumed: dict[Shard, tuple[int, PositionFacts]] = {}

    def set_request_timeout(self, seconds: float) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.set_request_timeout`."""
        self.server.answer_seconds = seconds

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.redis.server.RedisConnection.identities`."""
        return self.server.identities()

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """See :meth:`stream_consumers.batches.BatchSource.extents`."""
        shards = self.server.shards()
        check_shard_count(self.url, len(shards))
        found = self.server.facts_of(shards)
        self._facts = {shard: facts for shard, facts in found.items() if facts is not None}
        self._extents = {
            shard: Extent(facts.end if facts.first is None else facts.first, facts.end)
            for shard, facts in self._facts.items()
        }
        resume = resume or Resume({})
        self.remember(resume)
        begun = {shard.stream for shard in resume.positions}
        for shard, extent in self._extents.items():
            # If a stream was never read, entries that are already removed do not count as lost.
            first = self.first(shard, extent) if shard.stream in begun else extent.start
            position = resume.positions.get(shard, first)
            if self._facts_at(shard, position) is None and (now := self._facts_before(shard, position)) is not None:
                self._assumed[shard] = (position, now)
                if shard in resume.positions and 0 < position < extent.end:
                    _log.warning(
                        "the ledger does not have the number of entries that were added to %s before %d: entries that "
                        "are already removed unread are not detected, only entries that are removed from now on",
                        shard,
                        position,
                    )
        return self._extents

    def first(self, shard: Shard, extent: Extent) -> int:
        """Return 0: a new shard was never read, so entries that are already removed from it are lost."""
        return 0

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.has_grown`; new keys are not detected."""
        ends = list(extents.values())
        grown = self.server.progress([self.server.key(shard) for shard in extents])
        return any(now is None or sequence_after(now.last) != extent.end for now, extent in zip(grown, ends))

    def remember(self, resume: Resume) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.remember`; stores the facts at the positions."""
        self._recorded |= position_facts_in(resume.hint)

    def _facts_at(self, shard: Shard, position: int) -> PositionFacts | None:
        places = (known.get(shard, (None, None)) for known in (self._recorded, self._assumed))
        return next((facts for place, facts in places if place == position), None)

    def _look(self, shard: Shard, position: int) -> Look:
        look = self.server.look(shard, position, self._facts[shard])
        self._facts[shard] = look.facts
        return look

    def _facts_before(self, shard: Shard, position: int) -> PositionFacts | None:
        """Return the facts at a position, if the server counts; entries that are already removed count as recorded.

        An entry that was deleted since the last facts may have been one after the position, so it counts as not
        recorded. If the first entry changed and the highest deleted id did not, earlier entries were trimmed.
        """
        before = self._facts[shard]
        if before.added is None or before.removed is None:
            return None
        if position <= 0:
            return PositionFacts(0, 0, 0)
        facts, least, most = self._look(shard, position)
        added = (facts.added or 0) - most
        is_deleted = facts.deleted != before.deleted or facts.first == before.first
        if facts.first_or_end > position or ((facts.deleted or 0) >= position and is_deleted):
            added -= max(0, (facts.removed or 0) - before.removed)
        return PositionFacts(added, before.deleted, before.removed - (most - least))

    def hint(
        self, positions: Mapping[Shard, int], known: Mapping[str, object] | None = None
    ) -> Mapping[str, object] | None:
        """See :meth:`stream_consumers.batches.BatchSource.hint`; entries already removed do not count as lost."""
        places = dict(position_facts_in(known))
        for shard, position in positions.items():
            if shard in self._facts and (now := self._facts_before(shard, position)) is not None:
                places[shard] = (position, now)
        return hint_with_facts(None, places)

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.at`; the id of an entry contains its time."""
        return {s: max(e.start, min(timestamp_ms << 16, e.end)) for s, e in self._extents.items()}

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """Return ranges with entries that were added after the position and removed before they were read.

        Redis 7 counts the entries ever added, so the number of removed entries is exact. Of deleted entries, it stores
        only the highest id, so the range of several deleted entries may contain existing ones. With an older server,
        losses are unknown.
        """
        losses = {shard: self._loss(shard, gap.start) for shard, gap in gaps.items()}
        return {shard: loss.id_range for shard, loss in losses.items() if loss is not None}

    def maybe_lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """See :meth:`stream_consumers.batches.BatchSource.maybe_lost`.

        Where no batch has recorded how many entries were added before a gap, the gap lacks none if the first entry of
        the stream is not after its start, and no entry was deleted after it.
        """
        lost: dict[Shard, Range] = {}
        for shard, gap in gaps.items():
            facts = self._facts.get(shard)
            if facts is not None and facts.added is not None and gap.start == self._recorded.get(shard, (None,))[0]:
                lost |= self.lost({shard: gap})
                continue
            end = gap.end if facts is None else max(facts.first_or_end, (facts.deleted or 0) + 1)
            part = gap.clamp(Range(gap.start, max(gap.start, end)))
            if part.start < part.end:
                lost[shard] = part
        return lost

    def _loss(self, shard: Shard, position: int) -> Loss | None:
        """Return the entries removed after a position that are not recorded as lost."""
        known, facts = self._facts_at(shard, position), self._facts.get(shard)
        if facts is None or facts.added is None or known is None:
            return None
        if known.removed is not None and facts.first_or_end < position and (facts.deleted or 0) < position:
            return None
        facts, least, most = self._look(shard, position)
        since, deleted = (facts.added or 0) - known.added, facts.deleted or 0
        if since <= least:
            return None
        is_new = known.deleted is not None and deleted > max(known.deleted, position - 1)
        if since - least == since - most == 1 and is_new:
            return Loss(1, Range(deleted, deleted + 1))
        entries, end = max(0, since - most), max(facts.first_or_end, deleted + 1)
        if end > position:
            return Loss(entries, Range(position, end))
        # Members in claim mode have passed the missing entries. Only the last deleted one is known.
        return Loss(entries, Range(deleted, position) if known.removed is None else Range(position, facts.end))

    def _contradicts(self, shard: Shard, position: int, known: PositionFacts, look: Look | None = None) -> bool:
        """Return whether the stream cannot have these facts at a position; ``look`` is there if it was counted."""
        facts = look.facts if look else self._facts[shard]
        before = None if known.removed is None else known.deleted
        if before is not None and (facts.deleted or 0) < before >= position:
            return True  # Redis never lowers the highest deleted id.
        if facts.first_or_end < position and (facts.deleted or 0) < position:
            # If the server has lost the newest entries, the last one that was read is missing.
            return (facts.added or 0) < known.added
        facts, least, _ = look or self._look(shard, position)
        # An entry after the position was deleted since, in addition to those that exist.
        is_one_deleted = before is not None and (facts.deleted or 0) >= max(position, before + 1)
        return (facts.added or 0) - known.added < least + is_one_deleted

    def recreated(self, positions: Mapping[Shard, int]) -> frozenset[Shard]:
        """Return shards whose counts contradict those of an earlier batch.

        Fewer entries were ever added than the batch has counted, or fewer since than exist or were deleted after its
        position. A recreated stream counts from 0, even if its ids continue with the time, and a server that has lost
        its newest entries counts on from fewer. Only Redis 7 counts.
        """
        found = set()
        for known in (self._recorded, self._assumed):
            for shard in positions.keys() & known.keys():
                facts = self._facts.get(shard)
                if facts is not None and facts.added is not None and self._contradicts(shard, *known[shard]):
                    found.add(shard)
        return frozenset(found)

    def with_late_messages(
        self, facts: Mapping[Shard, Collection[tuple[int, PositionFacts]]], *, counts_all: bool
    ) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.with_late_messages`.

        A server that lost its newest entries may get older ones, and then the last one again. If no entry was removed
        from a position on, as many exist there as were added since. Otherwise no more are missing there than were
        removed in all since. With ``counts_all``, all is compared that :meth:`recreated` compares.
        """
        # Those of the last extents stay as they are, so that what was removed since is not taken for accounted.
        now = {shard: self._facts[shard] for shard in facts.keys() & self._facts.keys()}
        if counts_all:
            now |= {shard: newer for shard, newer in self.server.facts_of(now).items() if newer is not None}
        found = {shard: self._first_late(shard, now[shard], sorted(facts[shard]), counts_all) for shard in now}
        return {shard: position for shard, position in found.items() if position is not None}

    def _first_late(
        self, shard: Shard, now: StreamFacts, places: Iterable[tuple[int, PositionFacts]], counts_all: bool
    ) -> int | None:
        look: Look | None = None
        counted_from = 0
        for position, known in places:
            if now.added is None or known.removed is None:
                continue
            if now.held_from(position) is None and now.added - known.added > EXACT_COUNT and not counts_all:
                continue  # A later batch finds it: what one counts too few, all later ones do.
            if look is None:
                look = self.server.look(shard, position, now)
            else:
                look = self._look_ahead(shard, look, counted_from, position)
            now, counted_from = look.facts, position
            missing = (now.added or 0) - known.added - look.most
            if now.is_complete_from(position):
                is_late = missing != 0
            else:
                is_late = missing > max(0, (now.removed or 0) - known.removed)
            if is_late or (counts_all and self._contradicts(shard, position, known, look)):
                return position
        return None

    def _look_ahead(self, shard: Shard, look: Look, start: int, position: int) -> Look:
        """Return what a look at a position would show, from that at an earlier one; count only what is between them."""
        between = self.server.count(shard, start, position)
        now = self.server.facts(shard)
        if now is None or not (now.is_complete_from(start) or now.removed == look.facts.removed):
            return self.server.look(shard, position, look.facts)
        return Look(look.facts, look.least - between, look.most - between)

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """See :meth:`stream_consumers.batches.BatchSource.last_messages`."""
        asked = {shard: part for shard, part in ranges.items() if shard in self._extents and part.end > 0}
        words = [
            ("XREVRANGE", self.server.key(shard), to_id(part.end - 1), to_id(max(0, part.start)), "COUNT", 1)
            for shard, part in asked.items()
        ]
        replies = self.server.replies(words, f"reading the last entries of {self.url}")
        found = {shard: entry for shard, entries in zip(asked, replies) for entry in entries}
        return {shard: _last_message(entry) for shard, entry in found.items()}

    def is_replaced(self, shard: Shard, read: LastMessage, held: LastMessage | None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.is_replaced`.

        A missing entry was deleted, or trimmed with all entries before it, or the server lost it. Redis 7 stores the
        highest deleted id, which is read after the search for the entry.
        """
        if held is not None and held.sequence >= read.sequence:
            return super().is_replaced(shard, read, held)
        facts = self.server.facts(shard)
        if facts is None or facts.deleted is None:
            return False
        return facts.deleted < read.sequence and (held is not None or facts.first_or_end <= read.sequence)

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """See :meth:`stream_consumers.batches.BatchSource.plan`; each shard gets an equal share of both limits."""
        scans = {s: _RangeScan(self.server, s, gap) for s, gap in readable_gaps(gaps, self._extents).items()}
        if not scans:
            return None
        self._scan_shards(scans, limits)
        scans = {shard: scan for shard, scan in scans.items() if scan.position > scan.gap.start}
        losses = self._find_losses(scans)
        ranges = {shard: Range(scan.gap.start, scan.position) for shard, scan in scans.items()}
        records, size = sum(scan.count for scan in scans.values()), sum(scan.bytes for scan in scans.values())
        slices = [piece for scan in scans.values() for piece in scan.slices if piece.count]
        splits = split_slices(self.url, self.server.client_options, slices, size=size, parallelism=parallelism)
        lost = {shard: loss.id_range for shard, loss in losses.items()}
        return BatchPlan(ranges, splits, records, hint_with_facts(None, self._next_facts(scans, losses)), lost)

    def _find_losses(self, scans: Mapping[Shard, _RangeScan]) -> Mapping[Shard, Loss]:
        """Find losses from facts newer than the scans, so that every entry a scan missed is included."""
        losses = {}
        for shard, facts in self.server.facts_of(scans).items():
            if facts is None or facts.end < scans[shard].gap.end:
                raise DataLossError(
                    f"{shard} of {self.url} was deleted or truncated during planning", remedy="Run again to see why."
                )
            self._facts[shard] = facts
            loss = self._loss(shard, scans[shard].gap.start)
            if loss is not None:
                losses[shard] = loss
        return losses

    def _scan_shards(self, scans: Mapping[Shard, _RangeScan], limits: Limits) -> None:
        turn = sum(scan.gap.start for scan in scans.values())
        while True:
            left = limits.max_records - sum(scan.count for scan in scans.values())
            room = limits.max_bytes - sum(scan.bytes for scan in scans.values())
            open_scans = {shard: self._facts[shard].length for shard, scan in scans.items() if not scan.is_done}
            shares = fair_shares({s: max(1, length) for s, length in open_scans.items()}, left, turn=turn)
            if not shares:
                return
            for shard, share in shares.items():
                is_first = not any(scan.count for scan in scans.values())
                before = scans[shard].bytes
                if scans[shard].advance(share, room, take_one=is_first):
                    return
                room -= scans[shard].bytes - before

    def _next_facts(self, scans: Mapping[Shard, _RangeScan], losses: Mapping[Shard, Loss]) -> FactsByShard:
        """Return the facts at the new positions, assuming that the losses are recorded with the batch."""
        places = {}
        for shard, scan in scans.items():
            facts, before = self._facts[shard], self._facts_at(shard, scan.gap.start)
            if facts.added is None or (scan.position < facts.end and before is None):
                continue
            # Counts of deletions after a position are uncertain. Once all of those are before it, it is counted anew.
            is_certain = before is not None and before.removed is not None and (facts.deleted or 0) < scan.gap.start
            is_new = facts.is_complete_from(scan.position) and not is_certain
            look = self.server.look(shard, scan.position, facts) if is_new else None
            if look is not None and (before is None or look.facts == facts):
                added = (look.facts.added or 0) - look.most
                removed = (facts.removed or 0) - (look.most - look.least)
            elif before is not None:
                lost = losses[shard].entries if shard in losses else 0
                added, removed = before.added + scan.count + lost, facts.removed or 0
                if lost or not facts.is_complete_from(scan.position):
                    # Others may be removed after the position. Before it, at most the entries that were read are added.
                    removed = min(removed, (before.removed or 0) + lost)
            else:
                continue
            places[shard] = (scan.position, PositionFacts(added, facts.deleted, removed))
        return places

    def count(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.count`; the ids do not determine the number of entries."""
        counted = {}
        for shard, gap in gaps.items():
            # A caller that only needs the lag does not call extents() first.
            facts = self._facts.get(shard) if self._extents else self.server.facts(shard)
            if facts is None or gap.start >= gap.end:
                counted[shard] = 0
                continue
            known = self._facts_at(shard, gap.start)
            if gap.end >= facts.end:
                counted[shard] = self.server.count_unread(shard, gap.start, facts, known.added if known else None)
            else:
                counted[shard] = self.server.count(shard, gap.start, gap.end, length=facts.length)
        return counted

    def committed(self, group: str) -> Mapping[Shard, int] | None:
        """Return the sequence after the group's last-delivered-id, per shard."""
        if self._mode is ConsumerMode.REAL_TIME:
            return None
        found = RedisGroup(self.server, group).facts_of(self._extents or self.extents())
        return {shard: facts.position for shard, facts in found.items() if facts is not None}

    def is_in_claim_mode(self, group: str) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.is_in_claim_mode`."""
        known = RedisGroup(self.server, group)
        return any(
            facts is not None and known.is_in_claim_mode(shard)
            for shard, facts in known.facts_of(self._extents or self.extents()).items()
        )

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """Set the group's last-delivered-id, and acknowledge entries below it that are pending for other clients."""
        if self._mode is ConsumerMode.REAL_TIME:
            return
        there = self._extents or self.extents()
        for shard, position in sorted(positions.items()):
            if shard not in there:
                continue
            known = RedisGroup(self.server, group)
            # In claim mode, no position is set: pending entries belong to the members that claimed them.
            facts = self._facts_at(shard, position)
            if known.set_position(shard, position, entries_read=None if facts is None else facts.added):
                known.acknowledge_below(shard, position)

    def close(self) -> None:
        """Close the connection."""
        self.server.close()
