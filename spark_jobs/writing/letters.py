"""Dead letters read from their table without Spark: which ones, in order, some at a time, and as messages again."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, Sequences, by_shard, column_names, in_places, in_ranges
from spark_jobs.writing.dead_letters import LETTER_SCHEMA, RECORDED, UNPLACED, DeadLetterTable, NotCounting, counts
from stream_consumers.batches import MESSAGE_SCHEMA, Range
from stream_consumers.epochs import split_epoch
from stream_consumers.messages import Shard

Places = Mapping[Shard, Sequences]
"""The places of dead letters: growing sequences, each once."""
_TIME = pa.timestamp("ms", "UTC")
_UNREAD = "the stream held no whole message"
MOST_LETTERS = 8192
"""The most dead letters that are held at a time,"""
MOST_BYTES = 32 * 1024 * 1024
"""and their most bytes; but one is held whatever its size."""
COUNTS, DISMISSED, REPLACED, ORPHANED, CORRECTED = "counts", "dismissed", "replaced", "orphaned", "corrected"
STATUS = "status"
_FIRST_LETTERS = 8
_GROWTH = 4
STATUS_KEY = (*PLACE, "_timestamp", "_batch", "dismissed_by", "corrected_by")
"""The columns that tell whether a dead letter is meant, and whether it counts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Which dead letters are meant, by the time of their messages and by their sequences.

    Args:
        start_ms: the first time, in milliseconds since 1970.
        stop_ms: the first time that is not meant any more.
        start: the first sequence of each shard; other shards are not meant. ``None`` for all.
        stop: likewise the first sequence that is not meant any more; other shards are meant to their ends.
        start_sequence, stop_sequence: the same for every shard.

    Example:
        >>> Span(start_ms=0).is_all, Span().is_all
        (False, True)
    """

    start_ms: int | None = None
    stop_ms: int | None = None
    start: Mapping[Shard, int] | None = None
    stop: Mapping[Shard, int] = field(default_factory=dict)
    start_sequence: int | None = None
    stop_sequence: int | None = None

    @property
    def is_all(self) -> bool:
        """Whether every dead letter is meant."""
        return self == Span()

    @property
    def has_sequences(self) -> bool:
        """Whether it is bounded by a sequence, so that nothing without one is meant."""
        return replace(self, start_ms=None, stop_ms=None) != Span()

    def where(self) -> list[str]:
        """Return the SQL conditions of its sequences."""
        last = 2**63 - 1
        parts = ["_sequence IS NOT NULL"] if self.has_sequences else []
        if self.start is not None:
            parts.append(
                f"({in_ranges({shard: Range(start, last) for shard, start in self.start.items()}) or 'FALSE'})"
            )
        elif self.start_sequence is not None:
            parts.append(f"_sequence >= {self.start_sequence}")
        if self.stop_sequence is not None:
            parts.append(f"_sequence < {self.stop_sequence}")
        return [*parts, *(f"NOT ({in_ranges({shard: Range(end, last)})})" for shard, end in sorted(self.stop.items()))]

    def times(self, letters: pa.RecordBatch) -> pa.RecordBatch:
        """The rows whose time is meant; those without a time only where none is asked for."""
        for bound, compare in ((self.start_ms, pc.greater_equal), (self.stop_ms, pc.less)):
            if bound is not None:
                times = letters.column("_timestamp").cast(_TIME)
                letters = letters.filter(compare(times, pa.scalar(bound, pa.int64()).cast(_TIME)))
        return letters


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which dead letters are looked at; all that count, if it says nothing.

    Args:
        streams: the keys of streams, in all their epochs.
        span: between two places of the stream, or two times of messages.
        reason: a text that the reason has in it, in upper or lower case.
        places: single ones.
        batches: the ids of the batches that they are of.
        is_all: whether those that do not count, those that were dismissed, and records of corrections are meant, too.
        is_dismissed: whether those that were dismissed are meant, and no others.
    """

    streams: Collection[str] = ()
    span: Span = field(default_factory=Span)
    reason: str = ""
    places: Mapping[Shard, Intervals] | None = None
    batches: Collection[str] | None = None
    is_all: bool = False
    is_dismissed: bool = False

    def where(self) -> str:
        """What a SQL condition can say of it."""
        parts = self.span.where()
        if self.places is not None:
            parts.append(f"({in_places(self.places)})")
        if self.batches is not None:
            listed = ", ".join("'" + bid.replace("'", "''") + "'" for bid in sorted(self.batches))
            parts.append(f"_batch IN ({listed})" if listed else "FALSE")
        return " AND ".join(parts)

    def filtered(self, letters: pa.RecordBatch) -> pa.RecordBatch:
        """Those of these that are meant, as far as :meth:`where` does not say so."""
        if self.streams:
            names = letters.column("_stream").dictionary_encode()
            own = [split_epoch(str(name))[0] in self.streams for name in names.dictionary.to_pylist()]
            meant: Any = pa.array(own, pa.bool_()).take(names.indices)
            letters = letters.filter(meant)
        if self.reason:
            found: Any = pc.match_substring(letters.column("error"), self.reason, ignore_case=True)
            letters = letters.filter(found)
        return self.span.times(letters)


@dataclass(frozen=True, slots=True)
class LetterSnapshot:
    """One version of a dead-letter table, and what of it does not count."""

    table: DeadLetterTable
    group: str
    version: int
    left_out: NotCounting
    columns: Collection[str]

    @classmethod
    def of(cls, table: DeadLetterTable, ledger: Ledger) -> LetterSnapshot:
        """The newest version."""
        now = table.log().snapshot()
        if now is None:
            return cls(table, ledger.group, -1, NotCounting(), frozenset())
        # Behind the version: what comes later may be of a batch on its way, which is not known not to count.
        left_out = table.not_counting(ledger, version=now.version)
        columns = frozenset(column_names(table.log(), version=now.version))
        return cls(table, ledger.group, now.version, left_out, columns)

    def scan(self, wanted: LetterFilter, names: Sequence[str], where: str = "") -> Iterator[pa.RecordBatch]:
        """Those that are meant, in no order, with their status."""
        if self.version < 0:
            return
        condition = " AND ".join(filter(None, (wanted.where(), where)))
        key = (*STATUS_KEY, *(("error", "offset") if wanted.reason or self.left_out.dismissed else ()))
        needed = [name for name in dict.fromkeys([*names, *key]) if name in self.columns]
        for found in self.table.scan(
            self.group, NotCounting(), needed, where=condition, version=self.version, has_corrected=wanted.is_all
        ):
            letters = wanted.filtered(found)
            status = _status(letters, self.left_out)
            if wanted.is_dismissed or not wanted.is_all:
                is_meant: Any = pc.equal(status, pa.scalar(DISMISSED if wanted.is_dismissed else COUNTS))
                letters, status = letters.filter(is_meant), status.filter(is_meant)
            if letters.num_rows:
                yield _with_columns(letters, [*names, STATUS], status)

    def in_order(self, wanted: LetterFilter, names: Sequence[str], limit: int | None) -> Iterator[pa.Table]:
        """Those that are meant, some at a time, in the order of their places."""
        places = self.places(wanted)
        if limit is not None:
            places = first_places(places, limit)
        # The reader of the files is ahead of who stops it, so that large ones are not asked for many at a time.
        most = _FIRST_LETTERS
        while chunk := first_places(places, min(most, MOST_LETTERS)):
            count = sum(map(len, chunk.values()))
            found = self.read(wanted, chunk, names, max_bytes=MOST_BYTES)
            if found is None:
                most = count // 2
                continue
            yield found
            places = without_first(places, count)
            most *= _GROWTH if found.nbytes * _GROWTH < MOST_BYTES else 1
        if not self._has_places(wanted):
            for part in self.scan(wanted, names, UNPLACED):
                yield _ordered(pa.Table.from_batches([part]), names)

    def _has_places(self, wanted: LetterFilter) -> bool:
        """Whether only those with a sequence are meant."""
        return wanted.span.has_sequences or wanted.places is not None

    def places(self, wanted: LetterFilter) -> Places:
        """Where those are that are meant and have a sequence."""
        found: dict[Shard, list[Sequences]] = {}
        for letters in self.scan(wanted, PLACE):
            placed = letters.filter(letters.column("_sequence").is_valid())
            for shard, sequences in by_shard(placed.to_pandas(), *PLACE):
                found.setdefault(shard, []).append(sequences)
        return {shard: np.unique(np.concatenate(found[shard])) for shard in sorted(found)}

    def read(self, wanted: LetterFilter, places: Places, names: Sequence[str], *, max_bytes: int) -> pa.Table | None:
        """All that are meant between the first and the last of these places, in order; ``None`` if that is too much."""
        parts = [LETTER_SCHEMA.empty_table()]
        size = 0
        is_one = sum(map(len, places.values())) == 1
        hulls = {shard: Range(int(own[0]), int(own[-1]) + 1) for shard, own in places.items()}
        for part in self.scan(wanted, [*names, *STATUS_KEY, "_recorded_at"], f"({in_ranges(hulls)})"):
            size += part.nbytes
            if size > max_bytes and not is_one:
                return None
            parts.append(pa.Table.from_batches([part]))
        return _ordered(pa.concat_tables(parts, promote_options="default"), names)


def _ordered(letters: pa.Table, names: Sequence[str]) -> pa.Table:
    known = set(letters.column_names)
    order: Any = [(name, "ascending") for name in (*PLACE, "_recorded_at", "_batch") if name in known]
    return letters.sort_by(order).select(list(names))


def _with_columns(letters: pa.RecordBatch, names: Sequence[str], status: pa.Array[Any]) -> pa.RecordBatch:
    """With these columns and no others; what an older version of the table lacks is null."""
    known = set(letters.schema.names)
    arrays, schema = [], []
    for name in dict.fromkeys(names):
        if name == STATUS:
            arrays.append(status)
            schema.append(pa.field(STATUS, pa.string()))
            continue
        kind = LETTER_SCHEMA.field(name)
        arrays.append(letters.column(name) if name in known else pa.nulls(letters.num_rows, kind.type))
        schema.append(kind)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema))


def _status(letters: pa.RecordBatch, left_out: NotCounting) -> pa.Array[Any]:
    """Of each dead letter whether it counts, or why it does not."""
    whole = pa.array([bid for bid, ranges in left_out.ranges.items() if not ranges], pa.string())
    not_counting = pc.if_else(pc.is_in(letters.column("_batch"), whole), ORPHANED, REPLACED)
    counting: Any = COUNTS
    for name, status in (("dismissed_by", DISMISSED), ("corrected_by", CORRECTED)):
        if name in letters.schema.names:
            counting = pc.if_else(letters.column(name).is_valid(), status, counting)
    found: pa.Array[Any] = pc.if_else(counts(letters, left_out), counting, not_counting)
    return found


@dataclass(frozen=True, slots=True)
class LetterReader:
    """Reads the dead letters of a group that count and are not dismissed.

    Args:
        table: of the dead letters.
        ledger: of the main table.
        streams: the keys of the streams that are meant, in all their epochs.
        span: which of them.
    """

    table: DeadLetterTable
    ledger: Ledger
    streams: Collection[str]
    span: Span = field(default_factory=Span)

    def places(self) -> tuple[Places, int]:
        """Where they are, and how many more have no sequence, so that nobody knows where their rows would belong.

        Raises:
            TableUnreadableError: delta-rs cannot read their table.
        """
        now = LetterSnapshot.of(self.table, self.ledger)
        unplaced = now.scan(self._wanted, (), UNPLACED) if self.span.is_all else ()
        return now.places(self._wanted), sum(part.num_rows for part in unplaced)

    def messages(self, places: Places, *, max_bytes: int) -> pa.Table | None:
        """What the stream held at these places, as in :data:`stream_consumers.batches.MESSAGE_SCHEMA`.

        Args:
            places: neighbours among those that are meant.
            max_bytes: the most to hold in memory; one message is read whatever its size.

        Returns:
            In the order of their places; ``None``: there is more, ask for fewer.
        """
        letters = self._read(places, max_bytes)
        return None if letters is None else _messages(letters)

    def letters(self, places: Places) -> pa.Table:
        """The dead letters at these places as their table has them, one of each place."""
        letters = self._read(places, sys.maxsize)
        assert letters is not None
        return letters

    def _read(self, places: Places, max_bytes: int) -> pa.Table | None:
        now = LetterSnapshot.of(self.table, self.ledger)
        found = now.read(self._wanted, places, RECORDED, max_bytes=max_bytes)
        if found is None:
            return None
        wanted = {(shard.stream, shard.id, sequence) for shard, own in places.items() for sequence in own.tolist()}
        rows = []
        for row, place in enumerate(zip(*(found.column(name).to_pylist() for name in PLACE), strict=True)):
            if place in wanted:
                wanted.discard(place)
                rows.append(row)
        return found.take(pa.array(rows, pa.int64()))

    @property
    def _wanted(self) -> LetterFilter:
        return LetterFilter(self.streams, self.span)


def first_places(places: Places, most: int) -> Places:
    """The first so many of them.

    Example:
        >>> found = first_places({Shard("a"): np.array([1, 2]), Shard("b"): np.array([5, 6])}, 3)
        >>> {str(shard): own.tolist() for shard, own in found.items()}
        {'a/0': [1, 2], 'b/0': [5]}
    """
    found: dict[Shard, Sequences] = {}
    for shard, own in places.items():
        if most <= 0:
            break
        found[shard] = own[:most]
        most -= len(found[shard])
    return found


def without_first(places: Places, count: int) -> Places:
    """The others.

    Example:
        >>> found = without_first({Shard("a"): np.array([1, 2]), Shard("b"): np.array([5, 6])}, 3)
        >>> {str(shard): own.tolist() for shard, own in found.items()}
        {'b/0': [6]}
    """
    found: dict[Shard, Sequences] = {}
    for shard, own in places.items():
        left = own[count:]
        count = max(0, count - len(own))
        if len(left):
            found[shard] = left
    return found


def _messages(letters: pa.Table) -> pa.Table:
    """Dead letters as the stream gave them; what was no whole message keeps its error."""
    # Older versions did not tell; only files have offsets, of places that are damaged.
    is_message = pc.coalesce(letters.column("is_message"), pc.is_null(letters.column("offset")))
    errors = pc.coalesce(letters.column("error"), pa.scalar(_UNREAD))
    own = {name: letters.column(name) for name in ("key", "payload", "headers", "offset")}
    columns = {
        **own,
        "stream": letters.column("_stream"),
        "shard": letters.column("_shard"),
        "sequence": letters.column("_sequence"),
        "timestamp_ms": letters.column("_timestamp").cast(_TIME).cast(pa.int64()),
        "error": pc.if_else(is_message, pa.scalar(None, pa.string()), errors),
    }
    return pa.table([columns[column.name].cast(column.type) for column in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)
