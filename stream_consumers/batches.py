"""The micro-batch protocol between a backend and an engine that writes bounded ranges exactly once.

A backend never decides where to read. The engine holds the positions (in the Delta log). It asks the backend how far
the shards reach, which ranges within given gaps make up the next batch, and for splits that executors can read.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import pyarrow as pa

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import InvalidUrlError, UnsupportedError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl

HEADERS_TYPE: pa.DataType = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())]))
"""Headers in order; a name may occur more than once, a value may be null."""

MESSAGE_SCHEMA: pa.Schema = pa.schema(
    (
        pa.field("stream", pa.string(), nullable=False),
        pa.field("shard", pa.int64(), nullable=False),
        pa.field("sequence", pa.int64()),
        pa.field("timestamp_ms", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
        pa.field("error", pa.string()),
        pa.field("offset", pa.int64()),
    )
)
"""The schema that a split yields: one row per message. A dead letter has an ``error`` and may have no ``sequence``."""

MAX_SHARDS = 100_000
"""The most shards of a source, because the ledger keeps a position of each."""
BATCH_ROWS = 8192
BATCH_BYTES = 8 * 1024 * 1024
HEADER_BYTES = 64
"""What a header counts in addition to its bytes, because even an empty one takes about as much memory."""


class Range(NamedTuple):
    """The sequences ``[start, end)`` of a shard; ``end - start`` is an upper bound for the number of messages.

    Example:
        >>> Range(0, 10).clamp(Range(5, 20))
        Range(start=5, end=10)
    """

    start: int
    end: int

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, int) and self.start <= sequence < self.end

    def clamp(self, other: Range) -> Range:
        """Return the part of this range within ``other``; an empty range (start == end) if they do not overlap."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.end, other.end)))


class Extent(NamedTuple):
    """The sequences that a shard holds now.

    Args:
        start: the first sequence.
        end: the end of the readable sequences: the next sequence to come.
        blocked: the number of sequences after ``end`` that cannot be read yet because a transaction is open (Kafka).
    """

    start: int
    end: int
    blocked: int = 0


def check_shard_count(url: StreamUrl, count: int) -> None:
    """Check that a source has few enough shards for the ledger.

    Raises:
        UnsupportedError: it has more than :data:`MAX_SHARDS`.
    """
    if count > MAX_SHARDS:
        raise UnsupportedError(
            f"{url} has more than {MAX_SHARDS:,} shards",
            remedy="Write the messages into fewer shards; a shard is for messages that need an order among themselves.",
            shards=count,
        )


def readable_gaps(gaps: Mapping[Shard, Range], extents: Mapping[Shard, Extent]) -> dict[Shard, Range]:
    """Clamp gaps to the ends of their shards; empty gaps and shards without an extent are left out.

    Example:
        >>> readable_gaps({Shard("orders", n): Range(4, 20) for n in range(3)}, {Shard("orders", 1): Extent(0, 9)})
        {Shard(stream='orders', id=1): Range(start=4, end=9)}
    """
    within = {shard: gap.clamp(Range(0, extents[shard].end)) for shard, gap in gaps.items() if shard in extents}
    return {shard: gap for shard, gap in sorted(within.items()) if gap.start < gap.end}


class LastMessage(NamedTuple):
    """The last message of a range, stored in the ledger to recognize it when the stream is read again.

    Args:
        sequence: its sequence.
        timestamp_ms: its timestamp.
        checksum: see :func:`message_checksum`.
        epoch: the leader epoch in which it was written (Kafka); -1 without one.
    """

    sequence: int
    timestamp_ms: int
    checksum: int
    epoch: int = -1

    def is_replaced(self, found: LastMessage) -> bool:
        """Return whether the stream now has another message at this sequence, or a message after it where it had none.

        Args:
            found: the last message that the stream holds before the position. If it is an earlier message, this message
                was removed, by compaction for example. Leader epochs grow with the sequences, so an earlier message
                with a newer epoch shows that another log replaced the one that was read.

        Example:
            >>> read = LastMessage(99, 1000, 7, epoch=3)
            >>> read.is_replaced(LastMessage(99, 1000, 7, epoch=3)), read.is_replaced(LastMessage(99, 2000, 8, epoch=3))
            (False, True)
            >>> read.is_replaced(LastMessage(98, 990, 5, epoch=3)), read.is_replaced(LastMessage(98, 1990, 6, epoch=4))
            (False, True)
        """
        if found.sequence == self.sequence:
            return (found.timestamp_ms, found.checksum) != (self.timestamp_ms, self.checksum)
        return found.sequence > self.sequence or 0 <= self.epoch < found.epoch


def message_checksum(key: bytes | None, payload: bytes | None) -> int:
    """Return the CRC-32 of a key and a payload."""
    return zlib.crc32(payload or b"", zlib.crc32(key or b""))


@dataclass(frozen=True, slots=True)
class Resume:
    """The state that an earlier batch recorded for the next one, so that a backend need not search again.

    Args:
        positions: the next sequence of each shard, from the ledger.
        hint: :attr:`BatchPlan.hint` of an earlier batch: a shortcut, and the facts known at the positions, see
            :func:`position_facts_in`. Its keys are the names of shards; shards of a stream that was recreated since
            are left out.
    """

    positions: Mapping[Shard, int]
    hint: Mapping[str, object] | None = None


class Split(Protocol):
    """A part of a batch that one executor reads; picklable."""

    def read(self) -> Iterator[pa.RecordBatch]:
        """Read the messages as Arrow record batches of :data:`MESSAGE_SCHEMA`.

        Raises:
            DataLossError: messages of the range were removed.
        """
        ...


@runtime_checkable
class CountedSplit(Split, Protocol):
    """A split that knows its number of messages before the read, and the identities of its streams after the read.

    An engine can then write a batch while it reads it: executors compare both, and any difference fails the write.
    """

    def counts(self) -> Mapping[Shard, int] | None:
        """Return how many messages of each shard a read yields if none is missing or malformed.

        Return ``None`` if the numbers are unknown, or if some messages are known to be missing or malformed: the engine
        then reads and counts the batch first.
        """
        ...

    def identities(self) -> Mapping[str, str]:
        """Return the current fingerprints of its streams, as :meth:`BatchSource.identities` does.

        The executor calls this method at the end of the read: only then is it certain from which stream the messages
        came.

        Raises:
            StreamAssetsError: the fingerprints cannot be determined.
        """
        ...


def expected_counts(splits: Iterable[Split]) -> Mapping[Shard, int] | None:
    """Return how many messages of each shard these splits yield if no message is damaged; ``None`` if unknown."""
    return total_counts(split.counts() if isinstance(split, CountedSplit) else None for split in splits)


def total_counts(parts: Iterable[Mapping[Shard, int] | None]) -> Mapping[Shard, int] | None:
    """Return the sum of counts; ``None`` if one of them is unknown.

    Example:
        >>> total_counts([{Shard("orders"): 3}, {Shard("orders"): 4}])
        {Shard(stream='orders', id=0): 7}
        >>> total_counts([{Shard("orders"): 3}, None])
    """
    total: dict[Shard, int] = {}
    for counts in parts:
        if counts is None:
            return None
        add_counts(total, counts)
    return total


def add_counts(total: dict[Shard, int], counts: Mapping[Shard, int]) -> None:
    """Add counts to a total in place, because a batch may have thousands of shards."""
    for shard, count in counts.items():
        total[shard] = total.get(shard, 0) + count


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One micro-batch: the planned ranges, and how to read them.

    Args:
        ranges: the range of each shard that the batch covers once it is written.
        splits: disjoint splits that together hold every message of ``ranges`` once.
        records: an upper bound for the number of messages in the batch.
        hint: see :class:`Resume`.
        lost: the ranges that were removed from the stream before they were read, found in the same state of the stream
            as the plan. If only the number of lost messages is known, a range may extend beyond ``ranges``; the hint
            counts all of it as recorded.
    """

    ranges: Mapping[Shard, Range]
    splits: Sequence[Split] = field(repr=False)
    records: int
    hint: Mapping[str, object] | None = None
    lost: Mapping[Shard, Range] = field(default_factory=dict)


class BatchSource(ClosesOnExit, ABC):
    """A stream as a source of micro-batches. Close it when done; it is a context manager.

    A backend implements the abstract methods. The defaults of the other methods fit a stream that keeps every message
    and has no broker that stores positions of groups.

    Args:
        url: the streams to read.
    """

    has_own_timestamps = True
    """Whether timestamps are independent of sequences; ``False`` if the timestamp is a part of the sequence."""

    def __init__(self, url: str | StreamUrl) -> None:
        self.url = StreamUrl.parse(url)
        self.is_exact = True
        """Whether the last :meth:`extents` found the exact ends; ``False`` if its time budget was too short."""

    @abstractmethod
    def identities(self) -> Mapping[str, str]:
        """Return a fingerprint of each stream that detects a recreated one: a topic id, the creation time of a file.

        The engine asks for it again after each read. A backend without fingerprints (Redis) always returns the same
        text: a recreated stream is then detected only by an end before the position.
        """

    @abstractmethod
    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """Return what each shard holds now; later plans do not read beyond these ends.

        Args:
            resume: positions and hint of the ledger; with them, only the new part of a shard is searched.
            budget_seconds: return within about this time; ends that were not found in time are lower bounds.
        """

    @abstractmethod
    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """Plan the next batch within ``gaps``, clamped to the last :meth:`extents`; ``None`` if they hold nothing."""

    @abstractmethod
    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """Return the first sequence of each shard with a timestamp at or after this one; the end if it has none.

        The result refers to the last :meth:`extents`. Ranges between successive moments neither overlap nor leave
        anything out, even if timestamps do not grow with sequences.
        """

    def first(self, shard: Shard, extent: Extent) -> int:
        """Return where to start in a shard that appeared after its stream was first read.

        By default, this is the first sequence that the shard holds, because nothing is known about earlier messages.

        Args:
            shard: the shard.
            extent: the current extent of the shard.
        """
        return extent.start

    def is_in_claim_mode(self, group: str) -> bool:
        """Return whether members of the group claim single messages, so that positions do not show what was read.

        By default they do not.
        """
        return False

    def set_request_timeout(self, seconds: float) -> None:
        """Limit the time of each request to a broker; call this method before all others.

        A request fails after about this time, or earlier if no broker answers. A caller that polls, such as the lag
        sensor, must not wait as long as a run. The default does nothing, for a stream without a broker.
        """

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """Return whether the stream has grown since ``extents``, the result of the last :meth:`extents`.

        A run that waits for messages calls this method several times a second, so it should be cheap; it may overlook
        new shards. By default it determines the ends again.

        Args:
            extents: the last known extents.
            resume: see :meth:`extents`.
        """
        found = self.extents(resume=resume)
        return {shard: extent.end for shard, extent in found.items()} != {s: e.end for s, e in extents.items()}

    def remember(self, resume: Resume) -> None:
        """Use the ledger's hint at its positions for the next plan.

        Another run may have moved the positions since :meth:`extents`. By default, a source stores nothing by position.

        Args:
            resume: positions and hint of the ledger.
        """

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """Return the parts of ``gaps`` that were removed from the stream, as of the last :meth:`extents`."""
        return {}

    def maybe_lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """Return the parts of ``gaps`` of which messages may have been removed, also where that is not certain.

        By default, :meth:`lost` knows it for certain.
        """
        return self.lost(gaps)

    def hint(
        self, positions: Mapping[Shard, int], known: Mapping[str, object] | None = None
    ) -> Mapping[str, object] | None:
        """Return the hint for a ledger entry that sets positions without a batch: a group's first entry, or a move.

        Args:
            positions: the new positions, as of the last :meth:`extents`.
            known: the previous hint; the default returns it unchanged.
        """
        return known

    def recreated(self, positions: Mapping[Shard, int]) -> frozenset[Shard]:
        """Return the shards that were recreated since these positions, if fingerprints do not show it.

        The result refers to the last :meth:`extents` or :meth:`plan`.
        """
        return frozenset()

    def with_late_messages(
        self, facts: Mapping[Shard, Collection[tuple[int, PositionFacts]]], *, counts_all: bool
    ) -> Mapping[Shard, int]:
        """Return the shards that got messages before one of these positions after a batch had these facts there.

        The result refers to the last :meth:`extents` or :meth:`plan`, or with ``counts_all`` to this moment.

        Args:
            facts: positions, and the facts at each.
            counts_all: for an accept; count messages even if that takes long, and also return shards whose counts are
                uncertain, because an epoch that begins too early loses nothing.

        Returns:
            The first such position of each of these shards.
        """
        return {}

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """Return the last message that the stream now holds in each range, within the last :meth:`extents`.

        A shard is left out if its range holds no message, or if finding the last one would take long. An engine that
        stores the last message it has read uses this method to detect a stream that lost its newest messages and grew
        again. By default all shards are left out, for a stream that never loses messages.
        """
        return {}

    def is_replaced(self, shard: Shard, read: LastMessage, held: LastMessage | None) -> bool:
        """Return whether a message that was read was replaced, or lost together with all messages after it.

        Args:
            shard: the shard of the message.
            read: the last message that was read.
            held: the last message that the stream holds before the position, from :meth:`last_messages`; ``None`` if
                that method left the shard out.
        """
        return held is not None and read.is_replaced(held)

    def count(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, int]:
        """Return the number of messages in ``gaps``, or an upper bound, as of the last :meth:`extents`."""
        return widths(gaps)

    def unreadable_tail(self) -> str | None:
        """Return why the bytes after the last message are unreadable, unless a producer is still writing them."""
        return None

    def committed(self, group: str) -> Mapping[Shard, int] | None:
        """Return the positions of the group that the broker stores; ``None`` without a broker."""
        return None

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """Commit the positions of the group to the broker; called only after the batch is in the table.

        Args:
            group: the group.
            positions: the next sequence of each shard.
            metadata: identifies the batch; stored with the positions if the broker supports it.
        """

    def committed_metadata(self, group: str) -> Mapping[Shard, str]:
        """Return the metadata of the last commits; shards without metadata are left out."""
        return {}

    def close(self) -> None:
        """Release open resources; the default assumes that none stay open between calls."""


class Membership(ClosesOnExit, ABC):
    """A live member of a group; a context manager. Close it when done, so that other members get its shards at once."""

    @abstractmethod
    def shards(self) -> frozenset[Shard]:
        """Return the shards that are assigned to this member now; they change as members join and leave.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the membership failed.
        """

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for the first assignment, which may be empty if members outnumber shards; return whether it arrived."""

    @abstractmethod
    def commit(self, positions: Mapping[Shard, int], *, metadata: str = "") -> bool:
        """Commit positions to the broker; return ``False`` if it refuses because another member now has the shards.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the commit failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def fair_shares(wanted: Mapping[Shard, int], total: int, *, turn: int = 0) -> Mapping[Shard, int]:
    """Give each shard an equal share of a total; the unused part of a share goes to the other shards.

    Args:
        wanted: the most that each shard can use.
        total: the total to share.
        turn: selects the shards that get the remainder. It should grow with what was given, so that each shard gets a
            share eventually even if the total is smaller than the number of shards.

    Returns:
        The share of each shard whose share is not zero.

    Example:
        >>> a, b, c = (Shard("orders", n) for n in range(3))
        >>> fair_shares({a: 100, b: 2, c: 100}, 12) == {a: 5, b: 2, c: 5}
        True
        >>> fair_shares({a: 9, b: 9, c: 9}, 2, turn=2) == {c: 1, a: 1}
        True
    """
    shares = {shard: 0 for shard in sorted(wanted)}
    open_shards = [shard for shard in _in_turn(shares, turn) if wanted[shard] > 0]
    left = total
    while open_shards and left:
        each = left // len(open_shards)
        if each == 0:
            for shard in open_shards[:left]:
                shares[shard] += 1
            break
        for shard in open_shards:
            given = min(each, wanted[shard] - shares[shard])
            shares[shard] += given
            left -= given
        open_shards = [shard for shard in open_shards if shares[shard] < wanted[shard]]
    return {shard: share for shard, share in shares.items() if share}


def _in_turn(shards: Mapping[Shard, object], turn: int) -> list[Shard]:
    """Return the shards in order, starting with number ``turn`` (modulo their count)."""
    ordered = sorted(shards)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


def widths(gaps: Mapping[Shard, Range]) -> Mapping[Shard, int]:
    """Return the number of sequences in each range, an upper bound for the messages if sequences grow by one.

    Example:
        >>> widths({Shard("orders"): Range(3, 10)})
        {Shard(stream='orders', id=0): 7}
    """
    return {shard: max(0, gap.end - gap.start) for shard, gap in gaps.items()}


Headers = Collection[tuple[str, "str | bytes | None"]]
MessageRow = tuple[
    str, int, "int | None", "int | None", "bytes | None", "bytes | None", "Headers | None", "str | None", "int | None"
]
"""The values of one row of :data:`MESSAGE_SCHEMA`."""


def message_row(message: Message) -> MessageRow:
    """Return a message as a row."""
    shard, position = message.shard, (message.sequence, message.timestamp_ms)
    return (shard.stream, shard.id, *position, message.key, message.payload, message.headers or None, None, None)


def dead_letter_row(dead_letter: DeadLetter) -> MessageRow:
    """Return a dead letter as a row."""
    shard = dead_letter.shard
    position = (shard.stream, shard.id, dead_letter.sequence, dead_letter.timestamp_ms)
    return (*position, None, dead_letter.payload, None, dead_letter.error, dead_letter.offset)


def record_batches(rows: Iterable[MessageRow]) -> Iterator[pa.RecordBatch]:
    """Pack rows into record batches of :data:`MESSAGE_SCHEMA` of several thousand rows or several megabytes each."""
    block: list[MessageRow] = []
    size = 0
    for row in rows:
        block.append(row)
        size += len(row[4] or b"") + len(row[5] or b"") + headers_bytes(row[6] or ())
        if len(block) == BATCH_ROWS or size >= BATCH_BYTES:
            yield _record_batch(block)
            block, size = [], 0
    if block:
        yield _record_batch(block)


def plain_batch(
    streams: pa.Array[Any],
    numbers: pa.Array[Any],
    sequences: pa.Array[Any],
    timestamps_ms: pa.Array[Any],
    payloads: pa.Array[Any],
) -> pa.RecordBatch:
    """Return messages without keys and headers as a record batch of :data:`MESSAGE_SCHEMA`."""
    count = len(sequences)
    columns: list[pa.Array[Any]] = [
        streams,
        numbers,
        sequences,
        timestamps_ms,
        pa.nulls(count, pa.binary()),
        payloads,
        pa.nulls(count, cast(Any, HEADERS_TYPE)),
        pa.nulls(count, pa.string()),
        pa.nulls(count, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small record batches into batches of several thousand rows or several megabytes each."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in chain(batches, [None]):
        if batch is not None:
            held.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
        if held and (batch is None or rows >= BATCH_ROWS // 2 or size >= BATCH_BYTES):
            yield from held if len(held) == 1 else pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows, size = [], 0, 0


def _record_batch(rows: list[MessageRow]) -> pa.RecordBatch:
    columns: list[Sequence[Any]] = list(zip(*rows))
    arrays = [
        headers_array(column) if field.name == "headers" else pa.array(column, field.type)
        for column, field in zip(columns, MESSAGE_SCHEMA)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


def headers_bytes(headers: Headers) -> int:
    """Return what the headers of a message count.

    Example:
        >>> headers_bytes([("source", b"web"), ("", None)])
        137
    """
    return sum(HEADER_BYTES + len(name.encode()) + len(value or b"") for name, value in headers)


def headers_array(headers: Sequence[Headers | None]) -> pa.Array[Any]:
    """Return headers as a column of :data:`HEADERS_TYPE`; null for a message without headers.

    The column has several chunks if names or values have more than 2 GiB.
    """
    names: Any = pa.array([name for pairs in headers for name, _ in pairs or ()], pa.string())
    values: Any = pa.array([value for pairs in headers for _, value in pairs or ()], pa.binary())
    if isinstance(names, pa.ChunkedArray) or isinstance(values, pa.ChunkedArray):
        half = len(headers) // 2
        parts: list[Any] = [headers_array(headers[:half]), headers_array(headers[half:])]
        chunks = [chunk for part in parts for chunk in getattr(part, "chunks", [part])]
        return cast("pa.Array[Any]", pa.chunked_array(chunks))
    counts = np.array([len(pairs or ()) for pairs in headers], np.int32)
    offsets: Any = pa.array(np.append(np.int32(0), np.cumsum(counts, dtype=np.int32)))
    pairs: Any = pa.StructArray.from_arrays([names, values], names=["name", "value"])
    made = pa.ListArray.from_arrays(offsets, pairs, type=cast(Any, HEADERS_TYPE), mask=pa.array(counts == 0))
    return cast("pa.Array[Any]", made)


_ADDED = "added_before"
_MORE = ("deleted", "removed")


class PositionFacts(NamedTuple):
    """The facts known about a stream at a position, once every loss after the position is recorded.

    Args:
        added: the number of entries ever added before the position, plus the recorded losses after it.
        deleted: the highest sequence that was deleted by then; ``None`` if unknown.
        removed: the number of entries removed from the stream by then, in any way; ``None`` if unknown.
    """

    added: int
    deleted: int | None = None
    removed: int | None = None


FactsByShard = Mapping[Shard, tuple[int, PositionFacts]]
"""The position of each shard, and the facts known there."""


def position_facts_in(hint: object, of: Set[Shard] | None = None) -> FactsByShard:
    """Return the position facts in a hint, of all shards or of some; malformed ones are ignored.

    Example:
        >>> position_facts_in({"added_before": {"orders/0": [5, 3], "orders/1": "?"}, "deleted": {"orders/0": 2}})
        {Shard(stream='orders', id=0): (5, PositionFacts(added=3, deleted=2, removed=None))}
    """
    names = None if of is None else {str(shard) for shard in of}
    more = {name: _listed(hint, name, 1, names) for name in _MORE}
    return {
        shard: (position, PositionFacts(added, **{key: at[shard][0] for key, at in more.items() if shard in at}))
        for shard, (position, added) in _listed(hint, _ADDED, 2, names).items()
    }


def hint_with_facts(shortcut: Mapping[str, object] | None, facts: FactsByShard) -> Mapping[str, object] | None:
    """Return a hint with these position facts and the other keys of ``shortcut``; ``None`` if it is empty.

    Example:
        >>> hint_with_facts({"offset": 7}, {Shard("orders"): (5, PositionFacts(3))})
        {'offset': 7, 'added_before': {'orders/0': [5, 3]}, 'deleted': {}, 'removed': {}}
        >>> hint_with_facts({"added_before": {"orders/0": [5, 3]}}, {})
    """
    hint = {name: part for name, part in (shortcut or {}).items() if name not in (_ADDED, *_MORE)}
    if facts:
        listed = [(str(shard), position, known) for shard, (position, known) in sorted(facts.items())]
        hint[_ADDED] = {shard: [position, known.added] for shard, position, known in listed}
        hint["deleted"] = {shard: known.deleted for shard, _, known in listed if known.deleted is not None}
        hint["removed"] = {shard: known.removed for shard, _, known in listed if known.removed is not None}
    return hint or None


def _listed(hint: object, key: str, count: int, names: Set[str] | None) -> Mapping[Shard, list[int]]:
    listed = hint.get(key) if isinstance(hint, Mapping) else None
    found: dict[Shard, list[int]] = {}
    for name, value in listed.items() if isinstance(listed, Mapping) else ():
        # Parsing the names of a thousand shards takes 25 ms, so names that are not wanted are skipped.
        if names is not None and name not in names:
            continue
        with suppress(ValueError, TypeError, OverflowError, InvalidUrlError):
            numbers = [int(number) for number in (value if isinstance(value, list) else [value])]
            if len(numbers) == count:
                found[Shard.parse(str(name))] = numbers
    return found
