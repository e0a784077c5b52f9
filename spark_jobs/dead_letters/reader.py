"""Reads dead letters without Spark: filtered, in order, by kind of reason, and as messages again for a redrive."""

from __future__ import annotations

import re
import sys
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
    DEAD_LETTER_SCHEMA,
    RECORDED,
    UNPLACED,
    DeadLetterTable,
    NotCounting,
    counts,
    dead_letter_path,
)
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, Sequences, by_shard, column_names, in_places, in_ranges, scan
from spark_jobs.table_location import check_location
from stream_consumers.batches import MESSAGE_SCHEMA, Range
from stream_consumers.display import printable, shortened, shown_bytes
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import check_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Places = Mapping[Shard, Sequences]
"""The places of dead letters: growing sequences, each once."""
_TIME = pa.timestamp("ms", "UTC")
_UNREAD = "the stream held no whole message"
MAX_DEAD_LETTERS = 8192
"""The most dead letters that are held at a time,"""
MOST_BYTES = 32 * 1024 * 1024
"""and their most bytes; but one is held whatever its size."""
COUNTS, DISMISSED, REPLACED, ORPHANED, CORRECTED = "counts", "dismissed", "replaced", "orphaned", "corrected"
STATUS = "status"
_FIRST_LETTERS = 8
_GROWTH = 4
STATUS_KEY = (*PLACE, "_timestamp", "_batch", "dismissed_by", "corrected_by")
"""The columns that decide whether a dead letter is meant, and whether it counts."""
MOST_KINDS = 100
MOST_SHOWN = 200
"""The most characters of the payload of an example."""
_EXAMPLES_AT_A_TIME = 20
Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)
_KEY = [*PLACE, "_timestamp", "error", "_batch", "_recorded_at"]
MOST_CHARACTERS = 200
"""A longer reason is of the kind of its beginning."""
_MOST_READ = 50 * MOST_CHARACTERS
NO_REASON = "no reason is given"
OTHER_REASONS = "other reasons"
"""What those of very many kinds are counted as that are met last."""
_VALUES = re.compile(
    r"""
    (?P<quoted>(?<!\w)[bru]?(?P<mark>['"`])(?:\\.|(?!(?P=mark)).)*(?:(?P=mark)(?!\w)|\Z))
    # Times, and ids of eight hexadecimal digits and more, which have letters in them.
    | (?<![\w.])(?:
        \d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?
        | 0[xX][0-9a-fA-F]+
        | (?=[a-f-]*[0-9])[0-9a-f]{8,}(?:-[0-9a-f]{4,12})*
      )(?!\w)
    # No number: the one in UTF-8, or behind the letters of a name.
    | (?<![A-Za-z_0-9])(?<![A-Za-z]-)(?:(?<![0-9])[-+](?=\d))?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?
    """,
    re.VERBOSE | re.DOTALL,
)


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


COUNTING = LetterFilter()
"""All that count."""


@dataclass(frozen=True, slots=True)
class DeadLetterSnapshot:
    """One version of a dead-letter table, and what of it does not count."""

    table: DeadLetterTable
    group: str
    version: int
    left_out: NotCounting
    columns: Collection[str]

    @classmethod
    def of(cls, table: DeadLetterTable, ledger: Ledger) -> DeadLetterSnapshot:
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
        while chunk := first_places(places, min(most, MAX_DEAD_LETTERS)):
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
        kind = DEAD_LETTER_SCHEMA.field(name)
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
class DeadLetterReader:
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
        """Where they are, and how many more have no sequence, so that it is unknown where their rows would belong.

        Raises:
            TableUnreadableError: delta-rs cannot read their table.
        """
        now = DeadLetterSnapshot.of(self.table, self.ledger)
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
        now = DeadLetterSnapshot.of(self.table, self.ledger)
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
    """The first ``most`` of them.

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
    # Older versions did not write it; only files have offsets, of places that are damaged.
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


@dataclass(frozen=True, slots=True)
class DeadLetterExample:
    """One dead letter of a kind.

    Args:
        place: where its message is in the stream, as ``orders/0=17``; without a sequence only the shard.
        reason: why it is one.
        payload: its payload, shortened: text where it is, else hexadecimal digits.
    """

    place: str
    reason: str
    payload: str


@dataclass(slots=True)
class DeadLetterKind:
    """Dead letters whose reasons are of one kind.

    Args:
        reason: the kind; see :func:`spark_jobs.dead_letters.reader.kind_of_reason`.
        count: how many count.
        replaced: how many more do not, since their messages were redriven or replayed.
        orphaned: how many more do not, since their batch is not in the table.
        dismissed: how many more were dismissed.
        first: the earliest time of a message; where that is not known, when the dead letter was recorded.
        last: the latest.
        shards: of the messages, sorted.
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
    # Of the example: those that count go first, then those with a sequence.
    _at: tuple[bool, bool, Shard, int] | None = None
    _key: tuple[str, str] | None = None

    @property
    def total(self) -> int:
        """How many there are, whether they count or not."""
        return self.count + self.replaced + self.orphaned + self.dismissed


@dataclass(frozen=True)
class DeadLetters:
    """The dead letters of a table that count; nothing here needs Spark but the view.

    One counts while its batch is in the table, and nothing has replaced it since, as a redrive or a replay does. Each
    call looks at the table anew.

    Args:
        table: the table of the rows, a path or URI; its dead letters are in the one beside it.
        group: the consumer group.
        storage_options: of an object store.

    Raises:
        InvalidOptionError: there cannot be such a table, or such a group.

    Example::

        letters = DeadLetters("lake/orders", group="lakehouse")
        letters.to_arrow(columns=["_sequence", "error", "payload"]).to_pandas()
        letters.create_view(spark, "orders_dead_letters")  # for SQL
    """

    table: str
    group: str = field(kw_only=True)
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_name("group", self.group, without="/")
        object.__setattr__(self, "table", check_location(self.table))

    @property
    def _letters(self) -> DeadLetterTable:
        return DeadLetterTable(dead_letter_path(self.table), self.storage_options)

    def kinds(
        self, wanted: LetterFilter = COUNTING, *, limit: int | None = None, most_shown: int = MOST_SHOWN
    ) -> list[DeadLetterKind]:
        """How many there are of each kind of reason, the most frequent kind first.

        Of very many kinds those that are met last are counted together.

        Args:
            wanted: which of them.
            limit: look at no more than this number.
            most_shown: the most characters of the payload of an example; without any it is not read.

        Raises:
            StreamNotFoundError: the group has written nothing into the table.
            TableUnreadableError: delta-rs cannot read the dead letters.
        """
        snapshot = self._snapshot()
        found: dict[str, DeadLetterKind] = {}
        for letters in _first(snapshot.scan(wanted, _KEY), limit):
            _tally(letters, found)
        kinds = sorted(found.values(), key=lambda kind: (-kind.total, kind.reason))
        _find_examples(snapshot, wanted, kinds, most_shown)
        return kinds

    def tables(
        self, wanted: LetterFilter = COUNTING, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Iterator[pa.Table]:
        """Them as the table has them, some at a time, in the order of their places; those without a place at last.

        Args:
            wanted: which of them. With those that do not count there is a column ``status`` behind the others.
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
        self, wanted: LetterFilter = COUNTING, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> pa.Table:
        """Them as one table, which pandas, Polars and DuckDB take; see :meth:`tables`."""
        found = self.tables(wanted, columns=columns, limit=limit)
        return pa.concat_tables([self.schema(wanted, columns).empty_table(), *found])

    @staticmethod
    def schema(wanted: LetterFilter = COUNTING, columns: Sequence[str] | None = None) -> pa.Schema:
        """The columns of :meth:`tables`.

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
        names += [STATUS] if wanted.is_all else []
        return pa.schema([known[name] for name in dict.fromkeys(names)])

    def create_view(self, spark: SparkSession, name: str) -> None:
        """A temporary view of them for Spark SQL: those that count now, also where others come or are redriven later.

        Args:
            spark: the session that knows the view.
            name: of the view, as Spark takes it; one of this name is replaced.

        Raises:
            StreamNotFoundError: see :meth:`kinds`.
            StorageMismatchError: Spark sees another table.
        """
        counted = self._letters.counted(spark, self._written_ledger())
        if counted is None:
            counted = spark.createDataFrame([], from_arrow_schema(DEAD_LETTER_SCHEMA))
        elif "dismissed_by" in counted.columns:
            counted = counted.where("dismissed_by IS NULL")
        counted.createOrReplaceTempView(name)

    def _snapshot(self) -> DeadLetterSnapshot:
        return DeadLetterSnapshot.of(self._letters, self._written_ledger())

    def _written_ledger(self) -> Ledger:
        """The ledger; a mistyped table or group is an error, and not an empty list."""
        ledger = Ledger(DeltaLog(self.table, storage_options=self.storage_options), group=self.group, member="main")
        if ledger.read().newest is not None:
            return ledger
        log = self._letters.log()
        groups: Counter[str] = Counter()
        for letters in scan(log, ["_group"]) if log.snapshot() else ():
            groups.update(map(str, letters.column("_group").to_pylist()))
        others = ", ".join(f"{group!r} ({count})" for group, count in groups.most_common(5))
        raise StreamNotFoundError(
            f"group {self.group!r} has written nothing into {self.table}, so that no dead letter of it counts",
            remedy=f"Correct the table or the group; dead letters there are of {others}."
            if others
            else "Correct the table or the group, or ingest first.",
        )


def _first(batches: Iterator[Rows], limit: int | None) -> Iterator[Rows]:
    """The first rows, as many as the limit allows."""
    for batch in batches:
        yield batch if limit is None else batch.slice(0, limit)
        limit = None if limit is None else limit - batch.num_rows
        if limit is not None and limit <= 0:
            return


def _tally(letters: pa.RecordBatch, found: dict[str, DeadLetterKind]) -> None:
    """Count these with their kinds; what records a correction is no dead letter."""
    is_letter: Any = pc.not_equal(letters.column(STATUS), pa.scalar(CORRECTED))
    letters = letters.filter(is_letter)
    reasons = letters.column("error").dictionary_encode()
    kinds = pa.array([kind_of_reason(reason) for reason in reasons.dictionary.to_pylist()], pa.string())
    table = pa.table(
        {
            **{name: letters.column(name) for name in (*PLACE, STATUS)},
            "kind": kinds.take(reasons.indices).fill_null(NO_REASON),
            "time": pc.coalesce(letters.column("_timestamp"), letters.column("_recorded_at")),
        }
    )
    groups = table.group_by(["kind", STATUS, "_stream", "_shard"]).aggregate(
        [("_sequence", "min"), ("time", "min"), ("time", "max"), ([], "count_all")]
    )
    for row in groups.to_pylist():
        reason = row["kind"] if row["kind"] in found or len(found) < MOST_KINDS else OTHER_REASONS
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
    snapshot: DeadLetterSnapshot, wanted: LetterFilter, kinds: Sequence[DeadLetterKind], most_shown: int
) -> None:
    """Read the example of each kind, some kinds at a time: each of them may be large."""
    of_kinds = iter([kind for kind in kinds if kind._at is not None and kind.reason != OTHER_REASONS])
    names = [*_KEY, "payload"] if most_shown else _KEY
    while some := list(islice(of_kinds, _EXAMPLES_AT_A_TIME)):
        conditions = []
        by_place: dict[tuple[Shard, int | None], list[DeadLetterKind]] = {}
        for kind in some:
            assert kind._at is not None
            _, is_unplaced, shard, sequence = kind._at
            by_place.setdefault((shard, None if is_unplaced else sequence), []).append(kind)
            part = UNPLACED if is_unplaced else f"_sequence = {sequence}"
            conditions.append(f"(_stream = '{shard.stream}' AND _shard = {shard.id} AND {part})")
        for letters in snapshot.scan(wanted, names, f"({' OR '.join(dict.fromkeys(conditions))})"):
            for row in range(letters.num_rows):
                # Each alone: of many large ones no more than one is held a second time.
                letter = letters.slice(row, 1).to_pylist()[0]
                place = Shard(letter["_stream"], letter["_shard"]), letter["_sequence"]
                for kind in by_place.get(place, ()):
                    _show(kind, letter, most_shown)


def _show(kind: DeadLetterKind, letter: Mapping[str, Any], most_shown: int) -> None:
    """Make the dead letter the example of its kind, if it is, and if of several at its place it is the first."""
    assert kind._at is not None
    key = (str(letter["_batch"]), str(letter["error"]))
    is_of_kind = kind_of_reason(letter["error"]) == kind.reason and (letter[STATUS] != COUNTS) == kind._at[0]
    if not is_of_kind or (kind._key is not None and kind._key <= key):
        return
    shard = Shard(letter["_stream"], letter["_shard"])
    place = str(shard) if letter["_sequence"] is None else f"{shard}={letter['_sequence']}"
    shown = shown_bytes(letter["payload"], most=most_shown) if most_shown else ""
    kind._key = key
    kind.example = DeadLetterExample(place, shortened(letter["error"] or NO_REASON, 10 * MOST_SHOWN), shown)


def kind_of_reason(reason: str | None) -> str:
    r"""The kind of a reason: quoted text in it becomes ``'…'``, and a number, a time or an id ``#``.

    Reasons of one kind have one cause, as a rule, and one remedy. The same reason always has the same kind. Logs and
    Dagster show kinds, so that a reason quotes what it says of a payload that is no number.

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
    found = _VALUES.sub(lambda value: "'…'" if value["quoted"] else "#", reason[:_MOST_READ])
    return shortened(printable(" ".join(found.split())), MOST_CHARACTERS)
