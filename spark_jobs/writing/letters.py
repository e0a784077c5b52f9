"""Dead letters as messages again: read from their table without Spark, in order, some at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, Sequences, by_shard, in_ranges
from spark_jobs.writing.dead_letters import DeadLetterTable
from stream_consumers.batches import MESSAGE_SCHEMA, Range
from stream_consumers.epochs import split_epoch
from stream_consumers.messages import Shard

Places = Mapping[Shard, Sequences]
"""The places of dead letters: growing sequences, each once."""
_TIME = pa.timestamp("ms", "UTC")
_UNREAD = "the stream held no whole message"


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

    def of(self, shard: Shard) -> Range:
        """The sequences of a shard that are meant."""
        lowest, highest = -(2**63), 2**63 - 1
        first = lowest if self.start_sequence is None else self.start_sequence
        if self.start is not None:
            first = self.start.get(shard, highest)
        end = highest if self.stop_sequence is None else self.stop_sequence
        return Range(first, self.stop.get(shard, end))

    def times(self, letters: pa.RecordBatch) -> pa.RecordBatch:
        """The rows whose time is meant; those without a time only where none is asked for."""
        for bound, compare in ((self.start_ms, pc.greater_equal), (self.stop_ms, pc.less)):
            if bound is not None:
                times = letters.column("_timestamp").cast(_TIME)
                letters = letters.filter(compare(times, pa.scalar(bound, pa.int64()).cast(_TIME)))
        return letters

    def sequences(self, letters: pa.RecordBatch) -> pa.Array[Any]:
        """For each row whether its sequence is meant; not of those without one."""
        names = zip(letters.column("_stream").to_pylist(), letters.column("_shard").to_pylist())
        shards = [Shard(str(stream), int(number or 0)) for stream, number in names]
        known = {shard: self.of(shard) for shard in set(shards)}
        found = letters.column("_sequence")
        starts, ends = (pa.array([known[shard][edge] for shard in shards], pa.int64()) for edge in (0, 1))
        meant: pa.Array[Any] = pc.and_(pc.greater_equal(found, starts), pc.less(found, ends))
        return meant


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
        found: dict[Shard, list[Sequences]] = {}
        unplaced = 0
        for letters in self._scan([*PLACE, "_timestamp"]):
            names = map(str, letters.column("_stream").to_pylist())
            own = letters.filter(pa.array([split_epoch(name)[0] in self.streams for name in names], pa.bool_()))
            is_placed = own.column("_sequence").is_valid()
            unplaced += len(own) - is_placed.true_count
            # Next to one that is missing, pandas would make the sequences imprecise.
            for shard, sequences in by_shard(self.span.times(own.filter(is_placed)).to_pandas(), *PLACE):
                start, end = self.span.of(shard)
                found.setdefault(shard, []).append(sequences[(sequences >= start) & (sequences < end)])
        joined = {shard: np.unique(np.concatenate(found[shard])) for shard in sorted(found)}
        return {shard: places for shard, places in joined.items() if len(places)}, unplaced if self.span.is_all else 0

    def messages(self, places: Places, *, max_bytes: int) -> pa.Table | None:
        """What the stream held at these places, as in :data:`stream_consumers.batches.MESSAGE_SCHEMA`.

        Args:
            places: neighbours among those that are meant.
            max_bytes: the most to hold in memory; one message is read whatever its size.

        Returns:
            In the order of their places; ``None``: there is more, ask for fewer.
        """
        ranges = {shard: Range(int(own[0]), int(own[-1]) + 1) for shard, own in places.items()}
        is_one = sum(map(len, places.values())) == 1
        parts: list[pa.RecordBatch] = []
        seen: set[tuple[str, int, int]] = set()
        size = 0
        for batch in self._scan(where=in_ranges(ranges)):
            wanted = []
            places_of_batch = zip(*(batch.column(name).to_pylist() for name in PLACE), strict=True)
            for row, (stream, number, sequence) in enumerate(places_of_batch):
                own = places.get(Shard(stream, number))
                key = (stream, number, sequence)
                if own is not None and key not in seen and _holds(own, sequence):
                    seen.add(key)
                    wanted.append(row)
            if wanted:
                parts.append(_messages(batch.take(pa.array(wanted))))
                size += parts[-1].nbytes
            if size > max_bytes and not is_one:
                return None
        return pa.Table.from_batches(parts, MESSAGE_SCHEMA).sort_by(
            [("stream", "ascending"), ("shard", "ascending"), ("sequence", "ascending")]
        )

    def letters(self, places: Places) -> pa.Table:
        """The dead letters at these places as their table has them, one of each place."""
        ranges = {shard: Range(int(own[0]), int(own[-1]) + 1) for shard, own in places.items()}
        wanted = {(shard.stream, shard.id, sequence) for shard, own in places.items() for sequence in own.tolist()}
        parts: list[pa.RecordBatch] = []
        for batch in self._scan(where=in_ranges(ranges)):
            rows = []
            for row, place in enumerate(zip(*(batch.column(name).to_pylist() for name in PLACE), strict=True)):
                if place in wanted:
                    wanted.discard(place)
                    rows.append(row)
            if rows:
                parts.append(batch.take(pa.array(rows)))
        return pa.Table.from_batches(parts)

    def _scan(self, columns: list[str] | None = None, where: str = "") -> Iterator[pa.RecordBatch]:
        left_out = self.table.not_counting(self.ledger)
        yield from self.table.scan(self.ledger.group, left_out, columns, where=where, is_open=True)


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


def _holds(own: Sequences, sequence: int) -> bool:
    at = int(np.searchsorted(own, sequence))
    return at < len(own) and int(own[at]) == sequence


def _messages(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Dead letters as the stream gave them; what was no whole message keeps its error."""
    known = set(letters.schema.names)
    offset = letters.column("offset") if "offset" in known else pa.nulls(len(letters), pa.int64())
    told = letters.column("is_message") if "is_message" in known else pa.nulls(len(letters), pa.bool_())
    # Older versions did not tell; only files have offsets, of places that are damaged.
    is_message = pc.coalesce(told, pc.is_null(offset))
    errors = pc.coalesce(letters.column("error").cast(pa.string()), pa.scalar(_UNREAD))
    columns = {
        "stream": letters.column("_stream"),
        "shard": letters.column("_shard"),
        "sequence": letters.column("_sequence"),
        "timestamp_ms": letters.column("_timestamp").cast(_TIME).cast(pa.int64()),
        "key": letters.column("key"),
        "payload": letters.column("payload"),
        "headers": letters.column("headers"),
        "error": pc.if_else(is_message, pa.scalar(None, pa.string()), errors),
        "offset": offset,
    }
    return pa.RecordBatch.from_arrays(
        [columns[column.name].cast(column.type) for column in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA
    )
