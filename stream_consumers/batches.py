"""The micro-batch protocol: what a backend offers to an engine that writes bounded ranges exactly once.

A backend never decides where to read. The engine holds the positions (in the Delta log) and asks: how far do the
shards reach, which ranges of these gaps make one batch, and give me splits that executors can read.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import InvalidUrlError
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
"""What a split yields: a row a message; ``error`` is set (and ``sequence`` may be null) for a dead letter."""

BATCH_ROWS = 8192
BATCH_BYTES = 8 * 1024 * 1024


class Range(NamedTuple):
    """Sequences ``[start, end)`` of a shard. ``end - start`` is an upper bound of the messages in it.

    Example:
        >>> Range(0, 10).clamp(Range(5, 20))
        Range(start=5, end=10)
    """

    start: int
    end: int

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, int) and self.start <= sequence < self.end

    def clamp(self, other: Range) -> Range:
        """The part of this range within ``other``; empty (start == end) if there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.end, other.end)))


class Extent(NamedTuple):
    """What a shard holds now.

    Args:
        start: its first sequence.
        end: the end of what can be read now: the next sequence to come.
        blocked: the number of sequences after ``end`` that cannot be read yet, because a transaction is open (Kafka).
    """

    start: int
    end: int
    blocked: int = 0


def readable_gaps(gaps: Mapping[Shard, Range], extents: Mapping[Shard, Extent]) -> dict[Shard, Range]:
    """The parts of gaps before the ends of their shards; without those that are empty, and shards without an extent.

    Example:
        >>> readable_gaps({Shard("orders", n): Range(4, 20) for n in range(3)}, {Shard("orders", 1): Extent(0, 9)})
        {Shard(stream='orders', id=1): Range(start=4, end=9)}
    """
    within = {shard: gap.clamp(Range(0, extents[shard].end)) for shard, gap in gaps.items() if shard in extents}
    return {shard: gap for shard, gap in sorted(within.items()) if gap.start < gap.end}


class LastMessage(NamedTuple):
    """A message that was the last one of a range, remembered to recognise it when the stream is read again.

    Args:
        sequence: its sequence.
        timestamp_ms: its timestamp.
        checksum: see :func:`message_checksum`.
        epoch: the leader epoch in which it was written (Kafka); -1 if there is none.
    """

    sequence: int
    timestamp_ms: int
    checksum: int
    epoch: int = -1

    def is_replaced(self, found: LastMessage) -> bool:
        """Whether the stream holds another message in this place, or one after it where none was.

        Args:
            found: the last message that the stream holds before the position. If that is an earlier one, this message
                was removed, by compaction for instance. Leader epochs grow with the sequences, so an earlier message
                of a newer epoch shows that another log took the place of the one that was read.

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
    """The CRC-32 of a key and a payload."""
    return zlib.crc32(payload or b"", zlib.crc32(key or b""))


@dataclass(frozen=True, slots=True)
class Resume:
    """What an earlier batch recorded for the next one, so that a backend need not search again.

    Args:
        positions: the next sequence of each shard, as the ledger has them.
        hint: :attr:`BatchPlan.hint` of an earlier batch: a shortcut, and what is known at the positions, see
            :func:`position_facts_in`. Shards stand in it as keys, by their names: those of a stream that was
            recreated since are left out.
    """

    positions: Mapping[Shard, int]
    hint: Mapping[str, object] | None = None


class Split(Protocol):
    """A part of a batch that one executor reads; picklable."""

    def read(self) -> Iterator[pa.RecordBatch]:
        """The messages as Arrow record batches of :data:`MESSAGE_SCHEMA`.

        Raises:
            DataLossError: if messages of the range are gone.
        """
        ...


@runtime_checkable
class CountedSplit(Split, Protocol):
    """A split that knows before it is read how many messages it holds, and afterwards of which stream they were.

    An engine can then write a batch while it reads it: executors compare, and any difference fails the write.
    """

    def counts(self) -> Mapping[Shard, int] | None:
        """How many messages of each shard a read yields if each of them is there, and none is malformed.

        ``None`` where that is not known, or known not to be so: then the batch is read and counted first.
        """
        ...

    def identities(self) -> Mapping[str, str]:
        """The fingerprints of its streams at this moment, as :meth:`BatchSource.identities` has them.

        Asked where the split is read, at the end of the read: only then is it known of which stream the messages are.

        Raises:
            StreamAssetsError: they cannot be determined.
        """
        ...


def expected_counts(splits: Iterable[Split]) -> Mapping[Shard, int] | None:
    """How many messages of each shard a read of all these splits gives, if it is not damaged; ``None`` if unknown."""
    return total_counts(split.counts() if isinstance(split, CountedSplit) else None for split in splits)


def total_counts(parts: Iterable[Mapping[Shard, int] | None]) -> Mapping[Shard, int] | None:
    """The sum of counts; ``None`` if one of them is not known.

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
    """Add counts to a total in place, because there may be thousands of shards."""
    for shard, count in counts.items():
        total[shard] = total.get(shard, 0) + count


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One micro-batch: the planned ranges, and how to read them.

    Args:
        ranges: what becomes covered when the batch is written, a shard each.
        splits: disjoint parts that together hold every message of ``ranges`` once.
        records: messages in the batch as far as known now (an upper bound).
        hint: see :class:`Resume`.
        lost: what was removed from the stream before it was read, by the same look at the stream as the plan. Where
            only the number of lost messages is known it may reach beyond ``ranges``; the hint takes all of it as
            recorded.
    """

    ranges: Mapping[Shard, Range]
    splits: Sequence[Split] = field(repr=False)
    records: int
    hint: Mapping[str, object] | None = None
    lost: Mapping[Shard, Range] = field(default_factory=dict)


class BatchSource(ClosesOnExit, ABC):
    """A stream as a source of micro-batches. Close it when done; it is a context manager.

    A backend implements the abstract methods. The other methods have defaults for a stream that keeps every message,
    and has no broker that remembers groups.

    Args:
        url: where it reads from.
    """

    has_own_timestamps = True
    """Whether another message at the same sequence has another timestamp; not where it is a part of the sequence."""

    def __init__(self, url: str | StreamUrl) -> None:
        self.url = StreamUrl.parse(url)
        self.is_exact = True
        """Whether the last :meth:`extents` found the true ends; ``False`` if its time budget was too short."""

    @abstractmethod
    def identities(self) -> Mapping[str, str]:
        """The fingerprint of each stream that detects a recreated one: a topic id, the creation time of a file.

        It is asked for again after each read. Where there is none (Redis), the same text for ever: then a recreated
        stream is only known by an end that lies before the position.
        """

    @abstractmethod
    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """What each shard holds at this moment; plans that follow read no further than to these ends.

        Args:
            resume: positions and hint of the ledger, to look only at what is new.
            budget_seconds: answer within about this time, with lower bounds where that is too short.
        """

    @abstractmethod
    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """The next batch within ``gaps`` (clamped to what :meth:`extents` found); ``None`` if they hold nothing."""

    @abstractmethod
    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """The first sequence with a timestamp at or after this one, per shard; the end where there is none.

        As of the last :meth:`extents`. Ranges between two moments neither overlap nor leave anything out, also where
        timestamps do not grow with sequences.
        """

    def first(self, shard: Shard, extent: Extent) -> int:
        """Where a shard begins that appeared after its stream was read for the first time.

        By default at what it holds first, because nothing is known of what was before.

        Args:
            shard: the shard.
            extent: what it holds now.
        """
        return extent.start

    def is_in_claim_mode(self, group: str) -> bool:
        """Whether members of the group claim single messages: then no position says what was read.

        By default none do.
        """
        return False

    def set_request_timeout(self, seconds: float) -> None:
        """Let each request to a broker fail after about this time, or earlier if no broker answers; call it first.

        A caller that polls, such as the lag sensor, must not wait as long as a run. By default there is no broker.
        """

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """Whether there is more than ``extents``, which :meth:`extents` found last.

        A run that waits for messages calls it several times a second, so it should be cheap; it may overlook new
        shards. By default it determines the ends again.

        Args:
            extents: what was known.
            resume: see :meth:`extents`.
        """
        found = self.extents(resume=resume)
        return {shard: extent.end for shard, extent in found.items()} != {s: e.end for s, e in extents.items()}

    def remember(self, resume: Resume) -> None:
        """Use what the ledger knows at its positions for the plan that follows.

        Another run may have moved them since :meth:`extents`. By default a source keeps nothing by position.

        Args:
            resume: positions and hint of the ledger.
        """

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """The parts of ``gaps`` that were removed from the stream; by what :meth:`extents` found last."""
        return {}

    def hint(
        self, positions: Mapping[Shard, int], known: Mapping[str, object] | None = None
    ) -> Mapping[str, object] | None:
        """The hint of an entry that sets positions without a batch: of the first one of a group, or of a move.

        Args:
            positions: the new ones, as of the last :meth:`extents`.
            known: the hint before, which stays as it is by default.
        """
        return known

    def recreated(self, positions: Mapping[Shard, int]) -> frozenset[Shard]:
        """The shards that were recreated since these positions, where fingerprints do not show it.

        As of the last :meth:`extents` or :meth:`plan`.
        """
        return frozenset()

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """The last message of each range, as the stream holds it now, within what :meth:`extents` found last.

        A shard is left out if its range holds no message, or if finding the last one would take long. An engine that
        remembers the last message it has read detects by this a stream that lost its newest messages and grew again.
        By default all shards are left out: the stream never loses messages.
        """
        return {}

    def is_replaced(self, shard: Shard, read: LastMessage, held: LastMessage | None) -> bool:
        """Whether a message that was read is another one now, or was lost with what came after it.

        Args:
            shard: of the message.
            read: the last message that was read.
            held: the last message that the stream holds before the position, from :meth:`last_messages`; ``None`` if
                that found none.
        """
        return held is not None and read.is_replaced(held)

    def count(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, int]:
        """How many messages there are in ``gaps``, as of the last :meth:`extents`; it may be an upper bound."""
        return widths(gaps)

    def unreadable_tail(self) -> str | None:
        """Why the bytes after the last message are unreadable, if no producer is still writing them; else ``None``."""
        return None

    def committed(self, group: str) -> Mapping[Shard, int] | None:
        """The positions that were committed to the broker for the group; ``None`` where there is no broker."""
        return None

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """Commit the positions of the group to the broker; called only after the batch is in the table.

        Args:
            group: the group.
            positions: the next sequence of each shard.
            metadata: which batch they belong to; stored beside the positions where the broker can.
        """

    def committed_metadata(self, group: str) -> Mapping[Shard, str]:
        """The metadata of the last commits; a shard without any is left out."""
        return {}

    def close(self) -> None:
        """Release what is open; nothing is, between calls, unless a backend says so."""


class Membership(ClosesOnExit, ABC):
    """A live member of a group. Close it when done, so that others take its shards at once; it is a context manager."""

    @abstractmethod
    def shards(self) -> frozenset[Shard]:
        """The shards that are this member's now; they come and go as members do.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the membership failed.
        """

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for the first assignment; whether it came. It may be empty where there are more members than shards."""

    @abstractmethod
    def commit(self, positions: Mapping[Shard, int], *, metadata: str = "") -> bool:
        """Commit positions to the broker; ``False`` if it refused, because another member has the shards by now.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: as the broker says.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def fair_shares(wanted: Mapping[Shard, int], total: int, *, turn: int = 0) -> Mapping[Shard, int]:
    """Give each shard an equal share of a total; what one does not need goes to the others.

    Args:
        wanted: how much each shard could use.
        total: the total to share.
        turn: selects the shards that get a remainder: a number that grows by what was given, so that each shard gets
            something in the end where the total is below the number of shards.

    Returns:
        The shards that get something.

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
    """The shards in order, starting with number ``turn`` (modulo their count)."""
    ordered = sorted(shards)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


def widths(gaps: Mapping[Shard, Range]) -> Mapping[Shard, int]:
    """The sequences in each range: the most messages that can be in it where sequences grow by one.

    Example:
        >>> widths({Shard("orders"): Range(3, 10)})
        {Shard(stream='orders', id=0): 7}
    """
    return {shard: max(0, gap.end - gap.start) for shard, gap in gaps.items()}


Headers = Iterable[tuple[str, "str | bytes | None"]]
MessageRow = tuple[
    str, int, "int | None", "int | None", "bytes | None", "bytes | None", "Headers | None", "str | None", "int | None"
]
"""The values of one row of :data:`MESSAGE_SCHEMA`."""


def message_row(message: Message) -> MessageRow:
    """A message as a row."""
    shard, place = message.shard, (message.sequence, message.timestamp_ms)
    return (shard.stream, shard.id, *place, message.key, message.payload, message.headers or None, None, None)


def dead_letter_row(letter: DeadLetter) -> MessageRow:
    """A dead letter as a row."""
    shard = letter.shard
    place = (shard.stream, shard.id, letter.sequence, letter.timestamp_ms)
    return (*place, None, letter.payload, None, letter.error, letter.offset)


def record_batches(rows: Iterable[MessageRow]) -> Iterator[pa.RecordBatch]:
    """Pack rows into record batches of :data:`MESSAGE_SCHEMA`, of some thousand rows or some megabytes each."""
    block: list[MessageRow] = []
    size = 0
    for row in rows:
        block.append(row)
        size += len(row[5] or b"")
        if len(block) == BATCH_ROWS or size >= BATCH_BYTES:
            yield _record_batch(block)
            block, size = [], 0
    if block:
        yield _record_batch(block)


def plain_batch(
    stream: str,
    numbers: pa.Array[Any],
    sequences: pa.Array[Any],
    timestamps_ms: pa.Array[Any],
    payloads: pa.Array[Any],
) -> pa.RecordBatch:
    """Messages of one stream that have no keys and no headers, as a record batch of :data:`MESSAGE_SCHEMA`."""
    count = len(sequences)
    columns: list[pa.Array[Any]] = [
        pa.array(pa.repeat(stream, count), pa.string()),
        numbers,
        sequences,
        timestamps_ms,
        pa.nulls(count, pa.binary()),
        payloads,
        headers_array([None] * count),
        pa.nulls(count, pa.string()),
        pa.nulls(count, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small record batches into ones of some thousand rows or some megabytes each."""
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


def headers_array(headers: Sequence[Headers | None]) -> pa.Array[Any]:
    """Headers as a column of :data:`HEADERS_TYPE`; null where a message has none."""
    if not any(headers):
        return pa.array([None] * len(headers), HEADERS_TYPE)
    listed = [[{"name": name, "value": value} for name, value in pairs] if pairs else None for pairs in headers]
    return pa.array(listed, HEADERS_TYPE)


_ADDED = "added_before"
_MORE = ("deleted", "removed")


class PositionFacts(NamedTuple):
    """What is known of a stream at a position, when every entry that was lost after it is accounted for.

    Args:
        added: entries ever added before the position; entries that were lost after it and are accounted for count, too.
        deleted: the highest sequence that was deleted by then; ``None`` where that is unknown.
        removed: entries that were removed from the stream by then, in whatever way; ``None`` where that is unknown.
    """

    added: int
    deleted: int | None = None
    removed: int | None = None


PositionFactsByShard = Mapping[Shard, tuple[int, PositionFacts]]
"""The position of each shard, and what is known there."""


def position_facts_in(hint: object, of: Set[Shard] | None = None) -> PositionFactsByShard:
    """The position of each shard in a hint, or of some of them, and what is known there; other forms are ignored.

    Example:
        >>> position_facts_in({"added_before": {"orders/0": [5, 3], "orders/1": "?"}, "deleted": {"orders/0": 2}})
        {Shard(stream='orders', id=0): (5, PositionFacts(added=3, deleted=2, removed=None))}
    """
    names = None if of is None else {str(shard) for shard in of}
    more = {name: _listed(hint, name, 1, names) for name in _MORE}
    return {
        shard: (
            position,
            PositionFacts(added, **{key: found[shard][0] for key, found in more.items() if shard in found}),
        )
        for shard, (position, added) in _listed(hint, _ADDED, 2, names).items()
    }


def hint_with_facts(shortcut: Mapping[str, object] | None, places: PositionFactsByShard) -> Mapping[str, object] | None:
    """A hint with these places, and with all else that another hint says; ``None`` if it says nothing.

    Example:
        >>> hint_with_facts({"offset": 7}, {Shard("orders"): (5, PositionFacts(3))})
        {'offset': 7, 'added_before': {'orders/0': [5, 3]}, 'deleted': {}, 'removed': {}}
        >>> hint_with_facts({"added_before": {"orders/0": [5, 3]}}, {})
    """
    hint = {name: part for name, part in (shortcut or {}).items() if name not in (_ADDED, *_MORE)}
    if places:
        listed = [(str(shard), position, known) for shard, (position, known) in sorted(places.items())]
        hint[_ADDED] = {shard: [position, known.added] for shard, position, known in listed}
        hint["deleted"] = {shard: known.deleted for shard, _, known in listed if known.deleted is not None}
        hint["removed"] = {shard: known.removed for shard, _, known in listed if known.removed is not None}
    return hint or None


def _listed(hint: object, key: str, count: int, names: Set[str] | None) -> Mapping[Shard, list[int]]:
    listed = hint.get(key) if isinstance(hint, Mapping) else None
    found: dict[Shard, list[int]] = {}
    for name, value in listed.items() if isinstance(listed, Mapping) else ():
        # To parse the names of a thousand shards takes 25 ms.
        if names is not None and name not in names:
            continue
        with suppress(ValueError, TypeError, OverflowError, InvalidUrlError):
            numbers = [int(number) for number in (value if isinstance(value, list) else [value])]
            if len(numbers) == count:
                found[Shard.parse(str(name))] = numbers
    return found
