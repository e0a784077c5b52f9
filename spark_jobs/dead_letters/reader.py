"""Reads dead letters without Spark: filtered, in order, counted by kind of reason, and as messages for a redrive."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.dead_letters.table import (
    COPIED_COLUMNS,
    DEAD_LETTER_SCHEMA,
    HAS_NO_SEQUENCE,
    NO_TABLE,
    DeadLetterTable,
    NotCounting,
    counts,
    dead_letter_path,
)
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import ROW_PLACE, Sequences, by_shard, column_names, in_places, in_ranges, scan
from spark_jobs.table_location import check_location
from stream_consumers.batches import MESSAGE_SCHEMA, Range
from stream_consumers.display import printable, shortened, shown_bytes
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import check_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SequencesByShard = Mapping[Shard, Sequences]
"""The places of dead letters: per shard, the sorted sequences without repetitions."""
_TIME = pa.timestamp("ms", "UTC")
_UNREAD = "the stream held no whole message"
MAX_DEAD_LETTERS = 8192
"""The most dead letters in memory at a time."""
MAX_DEAD_LETTER_BYTES = 32 * 1024 * 1024
"""The most bytes of dead letters in memory at a time; a single larger one is still read."""
COUNTS, DISMISSED, REPLACED, ORPHANED, CORRECTED = "counts", "dismissed", "replaced", "orphaned", "corrected"
STATUS = "status"
_FIRST_READ = 8
_GROWTH = 4
STATUS_KEY = (*ROW_PLACE, "_timestamp", "_batch", "dismissed_by", "corrected_by")
"""The columns that decide whether a dead letter is selected, and whether it counts."""
MAX_REASON_KINDS = 100
"""The most kinds of reasons that are counted separately; further ones are counted as :data:`OTHER_REASONS`."""
MAX_SHOWN_CHARACTERS = 200
"""The most characters of a payload in an example."""
_EXAMPLES_AT_A_TIME = 20
Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)
_COLUMNS_OF_KINDS = [*ROW_PLACE, "_timestamp", "error", "_batch", "_recorded_at"]
MAX_REASON_CHARACTERS = 200
"""The most characters of a kind of reason; the end of a longer one is cut off."""
_MAX_PARSED_CHARACTERS = 50 * MAX_REASON_CHARACTERS
NO_REASON = "no reason is given"
OTHER_REASONS = "other reasons"
"""The kind that counts all kinds beyond :data:`MAX_REASON_KINDS`."""
_VALUES = re.compile(
    r"""
    (?P<quoted>(?<!\w)[bru]?(?P<mark>['"`])(?:\\.|(?!(?P=mark))[^\\])*(?:(?P=mark)(?!\w)|\\?\Z))
    # Times, and ids of at least eight hexadecimal digits.
    | (?<![\w.])(?:
        \d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?
        | 0[xX][0-9a-fA-F]+
        | (?=[a-f-]*[0-9])[0-9a-f]{8,}(?:-[0-9a-f]{4,12})*
      )(?!\w)
    # Numbers, but not in UTF-8 or after the letters of a name.
    | (?<![A-Za-z_0-9])(?<![A-Za-z]-)(?:(?<![0-9])[-+](?=\d))?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Span:
    """Selects dead letters by the time of their messages and by their sequences.

    Args:
        start_ms: the start time, in milliseconds since 1970.
        stop_ms: the end time, exclusive.
        start: the first sequence of each shard; other shards are not selected. ``None`` for all shards.
        stop: the end of each shard, exclusive; other shards are selected up to their ends.
        start_sequence, stop_sequence: the same for every shard.

    Example:
        >>> Span(start_ms=0).is_unbounded, Span().is_unbounded
        (False, True)
    """

    start_ms: int | None = None
    stop_ms: int | None = None
    start: Mapping[Shard, int] | None = None
    stop: Mapping[Shard, int] = field(default_factory=dict)
    start_sequence: int | None = None
    stop_sequence: int | None = None

    @property
    def is_unbounded(self) -> bool:
        """Whether every dead letter is selected."""
        return self == Span()

    @property
    def has_sequences(self) -> bool:
        """Whether it is bounded by a sequence, so that dead letters without one are not selected."""
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

    def filtered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows in the span of time, which includes rows without a time only if it has no bounds of time."""
        for bound, compare in ((self.start_ms, pc.greater_equal), (self.stop_ms, pc.less)):
            if bound is not None:
                times = batch.column("_timestamp").cast(_TIME)
                batch = batch.filter(compare(times, pa.scalar(bound, pa.int64()).cast(_TIME)))
        return batch


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Selects dead letters; by default those that count and are not dismissed.

    Args:
        streams: the keys of streams, which select all their epochs.
        span: selects by sequences, or by times of messages.
        reason: a text that the reason contains, in upper or lower case.
        places: selects single dead letters.
        batches: the ids of batches.
        includes_uncounted: whether to include those that do not count, those that were dismissed, and records of
            corrections.
        is_dismissed: whether to select only those that were dismissed.
    """

    streams: Collection[str] = ()
    span: Span = field(default_factory=Span)
    reason: str = ""
    places: Mapping[Shard, Intervals] | None = None
    batches: Collection[str] | None = None
    includes_uncounted: bool = False
    is_dismissed: bool = False

    def where(self) -> str:
        """Return the part of the filter that a SQL condition can express."""
        parts = self.span.where()
        if self.places is not None:
            parts.append(f"({in_places(self.places)})")
        if self.batches is not None:
            listed = ", ".join("'" + bid.replace("'", "''") + "'" for bid in sorted(self.batches))
            parts.append(f"_batch IN ({listed})" if listed else "FALSE")
        return " AND ".join(parts)

    def filtered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Apply the part of the filter that :meth:`where` cannot express."""
        if self.streams:
            names = batch.column("_stream").dictionary_encode()
            own = [split_epoch(str(name))[0] in self.streams for name in names.dictionary.to_pylist()]
            is_selected: Any = pa.array(own, pa.bool_()).take(names.indices)
            batch = batch.filter(is_selected)
        if self.reason:
            found: Any = pc.match_substring(batch.column("error"), self.reason, ignore_case=True)
            batch = batch.filter(found)
        return self.span.filtered(batch)


COUNTING = DeadLetterFilter()
"""Selects all dead letters that count and are not dismissed."""


@dataclass(frozen=True, slots=True)
class DeadLetterSnapshot:
    """One version of a dead-letter table, with the dead letters in it that do not count."""

    table: DeadLetterTable
    group: str
    left_out: NotCounting
    columns: Collection[str]

    @classmethod
    def of(cls, table: DeadLetterTable, ledger: Ledger) -> DeadLetterSnapshot:
        """Return the newest version."""
        left_out = table.not_counting(ledger)
        has_table = left_out.version != NO_TABLE
        columns = column_names(table.log(), version=left_out.version) if has_table else ()
        return cls(table, ledger.group, left_out, frozenset(columns))

    def scan(self, wanted: DeadLetterFilter, names: Sequence[str], where: str = "") -> Iterator[pa.RecordBatch]:
        """Yield the selected dead letters with their status, in no order."""
        condition = " AND ".join(filter(None, (wanted.where(), where)))
        key = (*STATUS_KEY, *(("error", "offset") if wanted.reason or self.left_out.unplaced else ()))
        needed = [name for name in dict.fromkeys([*names, *key]) if name in self.columns]
        has_all = wanted.includes_uncounted
        every = NotCounting(version=self.left_out.version)
        for found in self.table.scan(self.group, every, needed, where=condition, has_corrected=has_all):
            batch = wanted.filtered(found)
            status = _status(batch, self.left_out)
            if wanted.is_dismissed or not has_all:
                is_selected: Any = pc.equal(status, pa.scalar(DISMISSED if wanted.is_dismissed else COUNTS))
                batch, status = batch.filter(is_selected), status.filter(is_selected)
            if batch.num_rows:
                yield _with_columns(batch, [*names, STATUS], status)

    def in_order(self, wanted: DeadLetterFilter, names: Sequence[str], limit: int | None) -> Iterator[pa.Table]:
        """Yield the selected dead letters in chunks, in the order of their places."""
        places = self.places(wanted)
        if limit is not None:
            places = first_places(places, limit)
        # The file reader prefetches before we can stop it, so start with small requests.
        most = _FIRST_READ
        while chunk := first_places(places, min(most, MAX_DEAD_LETTERS)):
            count = sum(map(len, chunk.values()))
            found = self.read(wanted, chunk, names, max_bytes=MAX_DEAD_LETTER_BYTES)
            if found is None:
                most = count // 2
                continue
            yield found
            places = without_first(places, count)
            most *= _GROWTH if found.nbytes * _GROWTH < MAX_DEAD_LETTER_BYTES else 1
        if not self._has_places(wanted):
            for part in self.scan(wanted, names, HAS_NO_SEQUENCE):
                yield _ordered(pa.Table.from_batches([part]), names)

    def _has_places(self, wanted: DeadLetterFilter) -> bool:
        """Return whether only dead letters with a sequence are selected."""
        return wanted.span.has_sequences or wanted.places is not None

    def places(self, wanted: DeadLetterFilter) -> SequencesByShard:
        """Return the places of the selected dead letters that have a sequence."""
        found: dict[Shard, list[Sequences]] = {}
        for batch in self.scan(wanted, ROW_PLACE):
            placed = batch.filter(batch.column("_sequence").is_valid())
            for shard, sequences in by_shard(placed.to_pandas(), *ROW_PLACE):
                found.setdefault(shard, []).append(sequences)
        return {shard: np.unique(np.concatenate(found[shard])) for shard in sorted(found)}

    def read(
        self, wanted: DeadLetterFilter, places: SequencesByShard, names: Sequence[str], max_bytes: int
    ) -> pa.Table | None:
        """Read the selected ones between the first and last of these places, in order; ``None`` if too large."""
        parts = [DEAD_LETTER_SCHEMA.empty_table()]
        size = 0
        is_one = sum(map(len, places.values())) == 1
        hulls = {shard: Range(int(own[0]), int(own[-1]) + 1) for shard, own in places.items()}
        for part in self.scan(wanted, [*names, *STATUS_KEY, "_recorded_at"], f"({in_ranges(hulls)})"):
            size += part.nbytes
            if size > max_bytes and not is_one:
                return None
            parts.append(pa.Table.from_batches([part]))
        return _ordered(pa.concat_tables(parts, promote_options="default"), names)


def _ordered(table: pa.Table, names: Sequence[str]) -> pa.Table:
    known = set(table.column_names)
    order: Any = [(name, "ascending") for name in (*ROW_PLACE, "_recorded_at", "_batch") if name in known]
    return table.sort_by(order).select(list(names))


def _with_columns(batch: pa.RecordBatch, names: Sequence[str], status: pa.Array[Any]) -> pa.RecordBatch:
    """Return the batch with exactly these columns; those that an older version of the table lacks are null."""
    known = set(batch.schema.names)
    arrays, schema = [], []
    for name in dict.fromkeys(names):
        if name == STATUS:
            arrays.append(status)
            schema.append(pa.field(STATUS, pa.string()))
            continue
        kind = DEAD_LETTER_SCHEMA.field(name)
        arrays.append(batch.column(name) if name in known else pa.nulls(batch.num_rows, kind.type))
        schema.append(kind)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema))


def _status(batch: pa.RecordBatch, left_out: NotCounting) -> pa.Array[Any]:
    """Return the status of each dead letter."""
    whole = pa.array([bid for bid, ranges in left_out.ranges.items() if not ranges], pa.string())
    of_uncounted = pc.if_else(pc.is_in(batch.column("_batch"), whole), ORPHANED, REPLACED)
    of_counted: Any = COUNTS
    for name, status in (("dismissed_by", DISMISSED), ("corrected_by", CORRECTED)):
        if name in batch.schema.names:
            of_counted = pc.if_else(batch.column(name).is_valid(), status, of_counted)
    found: pa.Array[Any] = pc.if_else(counts(batch, left_out), of_counted, of_uncounted)
    return found


@dataclass(frozen=True, slots=True)
class DeadLetterReader:
    """Reads the dead letters of a group that count and are not dismissed.

    Args:
        table: the dead-letter table.
        ledger: the ledger of the main table.
        streams: the keys of the streams, which select all their epochs.
        span: selects by sequences, or by times of messages.
    """

    table: DeadLetterTable
    ledger: Ledger
    streams: Collection[str]
    span: Span = field(default_factory=Span)

    def places(self) -> tuple[SequencesByShard, int]:
        """Return the places of the dead letters, and how many more have no place, so that no row can replace them.

        Raises:
            TableUnreadableError: delta-rs cannot read their table.
        """
        now = DeadLetterSnapshot.of(self.table, self.ledger)
        unplaced = now.scan(self._wanted, (), HAS_NO_SEQUENCE) if self.span.is_unbounded else ()
        return now.places(self._wanted), sum(part.num_rows for part in unplaced)

    def dead_letters(self, places: SequencesByShard, *, max_bytes: int) -> pa.Table | None:
        """Return the dead letters at these places with the columns that copies of them have, one for each place.

        Args:
            places: successive places of selected dead letters.
            max_bytes: the most bytes in memory; a single larger dead letter is still read.

        Returns:
            The dead letters; ``None`` if they are too large, so that fewer must be read.
        """
        now = DeadLetterSnapshot.of(self.table, self.ledger)
        found = now.read(self._wanted, places, COPIED_COLUMNS, max_bytes=max_bytes)
        return None if found is None else at_places(found.select(list(COPIED_COLUMNS)), places)

    def selected(self, records: pa.Table) -> pa.Table:
        """Return the records of corrections whose streams are selected; none if there are other bounds."""
        wanted = DeadLetterFilter(self.streams)
        parts = records.to_batches() if self.span.is_unbounded else []
        return pa.Table.from_batches([wanted.filtered(part) for part in parts], records.schema)

    @property
    def _wanted(self) -> DeadLetterFilter:
        return DeadLetterFilter(self.streams, self.span)


def at_places(table: pa.Table, places: SequencesByShard) -> pa.Table:
    """Return the first row of each of these places."""
    wanted = {(shard.stream, shard.id, sequence) for shard, own in places.items() for sequence in own.tolist()}
    rows = []
    for row, place in enumerate(each_place(table)):
        if place in wanted:
            wanted.discard(place)
            rows.append(row)
    return table.take(pa.array(rows, pa.int64()))


def each_place(table: pa.Table | pa.RecordBatch, names: Sequence[str] = ROW_PLACE) -> Iterator[tuple[str, int, int]]:
    """Yield the stream, the shard and the sequence of each row, from the columns with these names."""
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def first_places(places: SequencesByShard, most: int) -> SequencesByShard:
    """Return the first ``most`` places.

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


def without_first(places: SequencesByShard, count: int) -> SequencesByShard:
    """Return the places after the first ``count``.

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


def messages_of(table: pa.Table) -> pa.Table:
    """Convert dead letters to messages, in :data:`stream_consumers.batches.MESSAGE_SCHEMA`.

    Those that were not whole messages keep their error.
    """
    # Older releases did not write is_message. Then an offset marks a damaged part of a file.
    is_message = pc.coalesce(table.column("is_message"), pc.is_null(table.column("offset")))
    errors = pc.coalesce(table.column("error"), pa.scalar(_UNREAD))
    own = {name: table.column(name) for name in ("key", "payload", "headers", "offset")}
    columns = {
        **own,
        "stream": table.column("_stream"),
        "shard": table.column("_shard"),
        "sequence": table.column("_sequence"),
        "timestamp_ms": table.column("_timestamp").cast(_TIME).cast(pa.int64()),
        "error": pc.if_else(is_message, pa.scalar(None, pa.string()), errors),
    }
    return pa.table([columns[column.name].cast(column.type) for column in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)


@dataclass(frozen=True, slots=True)
class DeadLetterExample:
    """An example of a kind of dead letters.

    Args:
        place: the place of its message in the stream, as ``orders/0=17``; without a sequence only the shard.
        reason: the reason.
        payload: its payload, shortened, as text if it is text, otherwise as hexadecimal digits.
    """

    place: str
    reason: str
    payload: str


@dataclass(slots=True)
class DeadLetterKind:
    """Dead letters whose reasons are of one kind.

    Args:
        reason: the kind; see :func:`spark_jobs.dead_letters.reader.kind_of_reason`.
        count: the number of dead letters that count.
        replaced: the number of others that do not count, because their messages were redriven or replayed.
        orphaned: the number of others that do not count, because their batch is not in the table.
        dismissed: the number of others that were dismissed.
        first: the earliest time of a message; of one without a time, the time when the dead letter was recorded.
        last: the latest such time.
        shards: the shards of the messages, sorted.
        example: the first one, by its place in the stream.
    """

    reason: str
    count: int = 0
    replaced: int = 0
    orphaned: int = 0
    dismissed: int = 0
    first: datetime | None = None
    last: datetime | None = None
    shards: Sequence[Shard] = ()
    example: DeadLetterExample | None = None
    # The sort key of the example: dead letters that count come first, then those with a sequence.
    _at: tuple[bool, bool, Shard, int] | None = None
    _key: tuple[str, str] | None = None

    @property
    def total(self) -> int:
        """The number of all dead letters, whether they count or not."""
        return self.count + self.replaced + self.orphaned + self.dismissed


@dataclass(frozen=True)
class DeadLetters:
    """The dead letters of a table; only :meth:`create_view` needs Spark.

    A dead letter counts while its batch is in the table, and until a redrive or a replay replaces it. Each call reads
    the newest version of the table.

    Args:
        table: the table of the rows, a path or URI.
        group: the consumer group.
        storage_options: the options of an object store.

    Raises:
        InvalidOptionError: the table or the group is not valid.

    Example::

        dead_letters = DeadLetters("lake/orders", group="lakehouse")
        dead_letters.to_arrow(columns=["_sequence", "error", "payload"]).to_pandas()
        dead_letters.create_view(spark, "orders_dead_letters")  # for SQL
    """

    table: str
    group: str = field(kw_only=True)
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_name("group", self.group, without="/")
        object.__setattr__(self, "table", check_location(self.table))

    @property
    def _table(self) -> DeadLetterTable:
        return DeadLetterTable(dead_letter_path(self.table), self.storage_options)

    def kinds(
        self, wanted: DeadLetterFilter = COUNTING, *, limit: int | None = None, max_shown: int = MAX_SHOWN_CHARACTERS
    ) -> list[DeadLetterKind]:
        """Count the dead letters of each kind of reason, the most frequent kind first.

        Beyond :data:`MAX_REASON_KINDS` kinds, further ones are counted as :data:`OTHER_REASONS`.

        Args:
            wanted: selects the dead letters.
            limit: read at most this number.
            max_shown: the most characters of the payload of an example; with 0 it is not read.

        Raises:
            StreamNotFoundError: the group has written nothing into the table.
            TableUnreadableError: delta-rs cannot read the dead letters.
        """
        snapshot = self._snapshot()
        found: dict[str, DeadLetterKind] = {}
        for batch in _first(snapshot.scan(wanted, _COLUMNS_OF_KINDS), limit):
            _tally(batch, found)
        kinds = sorted(found.values(), key=lambda kind: (-kind.total, kind.reason))
        _find_examples(snapshot, wanted, kinds, max_shown)
        return kinds

    def tables(
        self, wanted: DeadLetterFilter = COUNTING, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Iterator[pa.Table]:
        """Yield the dead letters with the columns of the table, in chunks.

        They are in the order of their places; those without a place come last.

        Args:
            wanted: selects the dead letters. With ``includes_uncounted`` there is a last column ``status``.
            columns: all by default.
            limit: the most to return.

        Raises:
            InvalidOptionError: there is no column of this name.
            StreamNotFoundError, TableUnreadableError: see :meth:`kinds`.
        """
        names = self.schema(wanted, columns).names
        for found in _first(self._snapshot().in_order(wanted, names, limit), limit):
            if found.num_rows:
                yield found

    def to_arrow(
        self, wanted: DeadLetterFilter = COUNTING, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> pa.Table:
        """Return the dead letters as one table, which pandas, Polars and DuckDB can read; see :meth:`tables`."""
        found = self.tables(wanted, columns=columns, limit=limit)
        return pa.concat_tables([self.schema(wanted, columns).empty_table(), *found])

    @staticmethod
    def schema(wanted: DeadLetterFilter = COUNTING, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the columns of :meth:`tables`.

        Raises:
            InvalidOptionError: there is no column of this name.
        """
        known = {**{column.name: column for column in DEAD_LETTER_SCHEMA}, STATUS: pa.field(STATUS, pa.string())}
        names = list(DEAD_LETTER_SCHEMA.names if columns is None else columns)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InvalidOptionError(
                f"dead letters have no column {unknown[0]!r}", remedy=f"Use {', '.join(DEAD_LETTER_SCHEMA.names)}."
            )
        names += [STATUS] if wanted.includes_uncounted else []
        return pa.schema([known[name] for name in dict.fromkeys(names)])

    def create_view(self, spark: SparkSession, name: str) -> None:
        """Create a temporary view for Spark SQL of the dead letters that count now and are not dismissed.

        The view is a snapshot: it keeps these dead letters, whatever is added or redriven later.

        Args:
            spark: the session of the view.
            name: the name of the view; a view with this name is replaced.

        Raises:
            StreamNotFoundError: see :meth:`kinds`.
            StorageMismatchError: Spark sees another table.
        """
        counted = self._table.counted(spark, self._written_ledger())
        if counted is None:
            counted = spark.createDataFrame([], from_arrow_schema(DEAD_LETTER_SCHEMA))
        elif "dismissed_by" in counted.columns:
            counted = counted.where("dismissed_by IS NULL")
        counted.createOrReplaceTempView(name)

    def _snapshot(self) -> DeadLetterSnapshot:
        return DeadLetterSnapshot.of(self._table, self._written_ledger())

    def _written_ledger(self) -> Ledger:
        """Return the ledger, and raise an error if the group has written nothing, as the name may be mistyped."""
        ledger = Ledger(DeltaLog(self.table, storage_options=self.storage_options), group=self.group, member="main")
        if ledger.read().newest is not None:
            return ledger
        log = self._table.log()
        groups: Counter[str] = Counter()
        for batch in scan(log, ["_group"]) if log.snapshot() else ():
            groups.update(map(str, batch.column("_group").to_pylist()))
        others = ", ".join(f"{group!r} ({count})" for group, count in groups.most_common(5))
        raise StreamNotFoundError(
            f"group {self.group!r} has written nothing into {self.table}, so none of its dead letters count",
            remedy=f"Correct the table or the group. Groups with dead letters of this table: {others}."
            if others
            else "Correct the table or the group, or ingest first.",
        )


def _first(batches: Iterator[Rows], limit: int | None) -> Iterator[Rows]:
    """Yield the first rows, up to the limit."""
    for batch in batches:
        yield batch if limit is None else batch.slice(0, limit)
        limit = None if limit is None else limit - batch.num_rows
        if limit is not None and limit <= 0:
            return


def _tally(batch: pa.RecordBatch, found: dict[str, DeadLetterKind]) -> None:
    """Add dead letters to the counts of their kinds, without records of corrections."""
    is_dead_letter: Any = pc.not_equal(batch.column(STATUS), pa.scalar(CORRECTED))
    batch = batch.filter(is_dead_letter)
    reasons = batch.column("error").dictionary_encode()
    kinds = pa.array([kind_of_reason(reason) for reason in reasons.dictionary.to_pylist()], pa.string())
    table = pa.table(
        {
            **{name: batch.column(name) for name in (*ROW_PLACE, STATUS)},
            "kind": kinds.take(reasons.indices).fill_null(NO_REASON),
            "time": pc.coalesce(batch.column("_timestamp"), batch.column("_recorded_at")),
        }
    )
    groups = table.group_by(["kind", STATUS, "_stream", "_shard"]).aggregate(
        [("_sequence", "min"), ("time", "min"), ("time", "max"), ([], "count_all")]
    )
    for row in groups.to_pylist():
        reason = row["kind"] if row["kind"] in found or len(found) < MAX_REASON_KINDS else OTHER_REASONS
        kind = found.setdefault(reason, DeadLetterKind(reason))
        counted = "count" if row[STATUS] == COUNTS else row[STATUS]
        setattr(kind, counted, getattr(kind, counted) + row["count_all"])
        times = [time for time in (kind.first, kind.last, row["time_min"], row["time_max"]) if time is not None]
        kind.first, kind.last = min(times, default=None), max(times, default=None)
        shard, sequence = Shard(row["_stream"], row["_shard"]), row["_sequence_min"]
        kind.shards = sorted({*kind.shards, shard})
        at = (row[STATUS] != COUNTS, sequence is None, shard, sequence or 0)
        kind._at = at if kind._at is None else min(kind._at, at)


def _find_examples(
    snapshot: DeadLetterSnapshot, wanted: DeadLetterFilter, kinds: Sequence[DeadLetterKind], max_shown: int
) -> None:
    """Read the example of each kind, for some kinds at a time, because each may be large."""
    of_kinds = iter([kind for kind in kinds if kind._at is not None and kind.reason != OTHER_REASONS])
    names = [*_COLUMNS_OF_KINDS, "payload"] if max_shown else _COLUMNS_OF_KINDS
    while some := list(islice(of_kinds, _EXAMPLES_AT_A_TIME)):
        conditions = []
        by_place: dict[tuple[Shard, int | None], list[DeadLetterKind]] = {}
        for kind in some:
            assert kind._at is not None
            _, is_unplaced, shard, sequence = kind._at
            by_place.setdefault((shard, None if is_unplaced else sequence), []).append(kind)
            part = HAS_NO_SEQUENCE if is_unplaced else f"_sequence = {sequence}"
            conditions.append(f"(_stream = '{shard.stream}' AND _shard = {shard.id} AND {part})")
        for batch in snapshot.scan(wanted, names, f"({' OR '.join(dict.fromkeys(conditions))})"):
            for index in range(batch.num_rows):
                # One at a time, so that at most one large payload is in memory twice.
                row = batch.slice(index, 1).to_pylist()[0]
                place = Shard(row["_stream"], row["_shard"]), row["_sequence"]
                for kind in by_place.get(place, ()):
                    _show(kind, row, max_shown)


def _show(kind: DeadLetterKind, row: Mapping[str, Any], max_shown: int) -> None:
    """Make a dead letter the example of a kind if it is of that kind, and the first one at its place."""
    assert kind._at is not None
    key = (str(row["_batch"]), str(row["error"]))
    is_of_kind = kind_of_reason(row["error"]) == kind.reason and (row[STATUS] != COUNTS) == kind._at[0]
    if not is_of_kind or (kind._key is not None and kind._key <= key):
        return
    shard = Shard(row["_stream"], row["_shard"])
    place = str(shard) if row["_sequence"] is None else f"{shard}={row['_sequence']}"
    shown = shown_bytes(row["payload"], most=max_shown) if max_shown else ""
    kind._key = key
    kind.example = DeadLetterExample(place, shortened(row["error"] or NO_REASON, 10 * MAX_SHOWN_CHARACTERS), shown)


def kind_of_reason(reason: str | None) -> str:
    r"""Return the kind of a reason: quoted text in it becomes ``'…'``, and a number, a time or an id becomes ``#``.

    Reasons of one kind usually have one cause and one remedy. The same reason always has the same kind. Logs and
    Dagster show kinds, so a reason must put quotes around every value from a payload that is not a number.

    Example:
        >>> kind_of_reason("field 'amount' is not a whole number of 64 bits")
        "field '…' is not a whole number of # bits"
        >>> kind_of_reason("lost: sequences 5 to 9 were removed from the stream; the first left is 10")
        'lost: sequences # to # were removed from the stream; the first left is #'
        >>> kind_of_reason("not UTF-8: invalid start byte at byte 17")
        'not UTF-8: invalid start byte at byte #'
    """
    if not reason or reason.isspace():
        return NO_REASON
    found = _VALUES.sub(lambda value: "'…'" if value["quoted"] else "#", reason[:_MAX_PARSED_CHARACTERS])
    return shortened(printable(" ".join(found.split())), MAX_REASON_CHARACTERS)
