"""The dead letters of a group that count, for those who look at them: by reason, one by one, as a table or a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, Sequences, by_shard, column_names, in_places, in_ranges, scan
from spark_jobs.writing.dead_letters import LETTER_SCHEMA, UNPLACED, DeadLetterTable, NotCounting, counts
from spark_jobs.writing.letters import Places, Span, first_places, without_first
from spark_jobs.writing.reasons import NO_REASON, OTHER_REASONS, kind_of_reason
from stream_consumers.batches import Range
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.readable import shortened, shown_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_LETTERS = 8192
"""The most dead letters that are held at a time,"""
MOST_BYTES = 32 * 1024 * 1024
"""and their most bytes; but one is held whatever its size."""
MOST_KINDS = 100
MOST_SHOWN = 200
"""The most characters of the payload of an example."""
COUNTS, DISMISSED, REPLACED, ORPHANED, CORRECTED = "counts", "dismissed", "replaced", "orphaned", "corrected"
STATUS = "status"
_FIRST_LETTERS = 8
_GROWTH = 4
_EXAMPLES_AT_A_TIME = 20
_KEY = [*PLACE, "_timestamp", "error", "offset", "_batch", "_recorded_at", "dismissed_by", "corrected_by"]


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
        parts = []
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
        letters = self.span.times(letters)
        if self.span.has_sequences:
            letters = letters.filter(self.span.sequences(letters))
        return letters


@dataclass(frozen=True, slots=True)
class LetterExample:
    """One dead letter of a kind.

    Args:
        place: where its message is in the stream, as ``orders/0=17``; without a sequence only the shard.
        reason: why it is one.
        payload: its payload, shortened: text where it is, else hexadecimal digits.
    """

    place: str
    reason: str
    payload: str


@dataclass(frozen=True, slots=True)
class LetterKind:
    """Dead letters whose reasons are of one kind.

    Args:
        reason: the kind; see :func:`spark_jobs.writing.reasons.kind_of_reason`.
        count: how many count.
        replaced: how many more do not, since their messages were redriven or replayed.
        orphaned: how many more do not, since their batch is not in the table.
        dismissed: how many more were dismissed.
        first: the earliest time of a message; where that is not known, when the dead letter was recorded.
        last: the latest.
        shards: of the messages.
        example: the first one, by its place in the stream.
    """

    reason: str
    count: int
    replaced: int
    orphaned: int
    dismissed: int
    first: datetime | None
    last: datetime | None
    shards: Sequence[Shard]
    example: LetterExample | None


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
        object.__setattr__(self, "table", self._ingestion.table)

    @classmethod
    def of(cls, ingestion: Ingestion) -> DeadLetters:
        """Those of an ingestion."""
        return cls(ingestion.table, group=ingestion.group, storage_options=ingestion.storage_options)

    @property
    def _ingestion(self) -> Ingestion:
        return Ingestion(self.group, self.table, storage_options=self.storage_options)

    def kinds(
        self, wanted: LetterFilter = LetterFilter(), *, limit: int | None = None, most_shown: int = MOST_SHOWN
    ) -> list[LetterKind]:
        """How many there are of each kind of reason, the most frequent kind first.

        Of very many kinds those that are met last are counted together.

        Args:
            wanted: which of them.
            limit: look at so many at most.
            most_shown: the most characters of the payload of an example; without any it is not read.

        Raises:
            StreamNotFoundError: the group has written nothing into the table.
            TableUnreadableError: delta-rs cannot read the dead letters.
        """
        snapshot = self._snapshot()
        found: dict[str, _Kind] = {}
        for letters in _first(snapshot.scan(wanted, _KEY), limit):
            _tally(letters, found)
        kinds = sorted(found.values(), key=lambda kind: (-kind.total, kind.reason))
        _find_examples(snapshot, wanted, kinds, most_shown)
        return [kind.told() for kind in kinds]

    def tables(
        self, wanted: LetterFilter = LetterFilter(), *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Iterator[pa.Table]:
        """Them as the table has them, some at a time, in the order of their places; those without a place at last.

        Args:
            wanted: which of them. With those that do not count there is a column ``status`` behind the others.
            columns: all by default.
            limit: so many at most.

        Raises:
            InvalidOptionError: there is no column of this name.
            StreamNotFoundError, TableUnreadableError: see :meth:`kinds`.
        """
        names = self.schema(wanted, columns).names
        snapshot = self._snapshot()
        left = limit
        for part in snapshot.in_order(wanted, names, limit):
            found = part if left is None else part.slice(0, left)
            left = None if left is None else left - found.num_rows
            if found.num_rows:
                yield found
            if left == 0:
                return

    def to_arrow(
        self,
        wanted: LetterFilter = LetterFilter(),
        *,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Them as one table, which pandas, Polars and DuckDB take; see :meth:`tables`."""
        found = self.tables(wanted, columns=columns, limit=limit)
        return pa.concat_tables([self.schema(wanted, columns).empty_table(), *found])

    @staticmethod
    def schema(wanted: LetterFilter = LetterFilter(), columns: Sequence[str] | None = None) -> pa.Schema:
        """The columns of :meth:`tables`.

        Raises:
            InvalidOptionError: there is no column of this name.
        """
        known = {**{column.name: column for column in LETTER_SCHEMA}, STATUS: pa.field(STATUS, pa.string())}
        names = list(LETTER_SCHEMA.names if columns is None else columns)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InvalidOptionError(
                f"dead letters have no column {unknown[0]!r}", remedy=f"They have {', '.join(LETTER_SCHEMA.names)}."
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
        counted = self._ingestion.dead_letters().counted(spark, self._written_ledger())
        if counted is None:
            counted = spark.createDataFrame([], from_arrow_schema(LETTER_SCHEMA))
        elif "dismissed_by" in counted.columns:
            counted = counted.where("dismissed_by IS NULL")
        counted.createOrReplaceTempView(name)

    def _snapshot(self) -> _Snapshot:
        """What is there, and what of it counts."""
        ledger, table = self._written_ledger(), self._ingestion.dead_letters()
        now = table.log().snapshot()
        if now is None:
            return _Snapshot(table, self.group, -1, NotCounting(), frozenset())
        # Behind the version: what comes later may be of a batch on its way, which is not known not to count.
        left_out = table.not_counting(ledger, version=now.version)
        columns = frozenset(column_names(table.log(), version=now.version))
        return _Snapshot(table, self.group, now.version, left_out, columns)

    def _written_ledger(self) -> Ledger:
        """The ledger; whoever mistypes a table or a group is not told that all is well."""
        ledger = self._ingestion.ledger()
        if ledger.read().newest is not None:
            return ledger
        log = self._ingestion.dead_letters().log()
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


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One version of a dead-letter table, and what of it does not count."""

    table: DeadLetterTable
    group: str
    version: int
    left_out: NotCounting
    columns: Collection[str]

    def scan(self, wanted: LetterFilter, names: Sequence[str], where: str = "") -> Iterator[pa.RecordBatch]:
        """Those that are meant, in no order, with their status."""
        if self.version < 0:
            return
        condition = " AND ".join(filter(None, (wanted.where(), where)))
        needed = [name for name in dict.fromkeys([*names, *_KEY]) if name in self.columns]
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
        places = self._places(wanted)
        if limit is not None:
            places = first_places(places, limit)
        # The reader of the files is ahead of who stops it, so that large ones are not asked for many at a time.
        most = _FIRST_LETTERS
        while chunk := first_places(places, min(most, MOST_LETTERS)):
            count = sum(map(len, chunk.values()))
            found = self._read(wanted, chunk, names, is_one=count == 1)
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

    def _places(self, wanted: LetterFilter) -> Places:
        found: dict[Shard, list[Sequences]] = {}
        for letters in self.scan(wanted, PLACE):
            placed = letters.filter(letters.column("_sequence").is_valid())
            for shard, sequences in by_shard(placed.to_pandas(), *PLACE):
                found.setdefault(shard, []).append(sequences)
        return {shard: np.unique(np.concatenate(found[shard])) for shard in sorted(found)}

    def _read(self, wanted: LetterFilter, places: Places, names: Sequence[str], *, is_one: bool) -> pa.Table | None:
        """All that are meant between the first and the last of these places; ``None`` if that is too much."""
        parts: list[pa.RecordBatch] = []
        size = 0
        hulls = {shard: Range(int(own[0]), int(own[-1]) + 1) for shard, own in places.items()}
        for part in self.scan(wanted, [*names, *_KEY], f"({in_ranges(hulls)})"):
            size += part.nbytes
            if size > MOST_BYTES and not is_one:
                return None
            parts.append(part)
        return _ordered(pa.Table.from_batches(parts), names)


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


def _first(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """The first so many rows."""
    for batch in batches:
        yield batch if limit is None else batch.slice(0, limit)
        limit = None if limit is None else limit - batch.num_rows
        if limit is not None and limit <= 0:
            return


@dataclass(slots=True)
class _Kind:
    """What is known of a kind so far."""

    reason: str
    statuses: Counter[str] = field(default_factory=Counter)
    first: datetime | None = None
    last: datetime | None = None
    shards: set[Shard] = field(default_factory=set)
    # Of the example: those that count go first, then those with a sequence.
    at: tuple[bool, bool, Shard, int] | None = None
    example: LetterExample | None = None
    example_key: tuple[str, str] | None = None

    @property
    def total(self) -> int:
        return self.statuses.total()

    def told(self) -> LetterKind:
        number = self.statuses
        shards = tuple(sorted(self.shards))
        return LetterKind(
            self.reason,
            number[COUNTS],
            number[REPLACED],
            number[ORPHANED],
            number[DISMISSED],
            self.first,
            self.last,
            shards,
            self.example,
        )


def _tally(letters: pa.RecordBatch, found: dict[str, _Kind]) -> None:
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
        kind = found.setdefault(reason, _Kind(reason))
        kind.statuses[row[STATUS]] += row["count_all"]
        times = [time for time in (kind.first, kind.last, row["time_min"], row["time_max"]) if time is not None]
        kind.first, kind.last = min(times, default=None), max(times, default=None)
        shard, sequence = Shard(row["_stream"], row["_shard"]), row["_sequence_min"]
        kind.shards.add(shard)
        at = (row[STATUS] != COUNTS, sequence is None, shard, sequence or 0)
        kind.at = at if kind.at is None else min(kind.at, at)


def _find_examples(snapshot: _Snapshot, wanted: LetterFilter, kinds: Sequence[_Kind], most_shown: int) -> None:
    """Read the example of each kind, some kinds at a time: each of them may be large."""
    of_kinds = iter([kind for kind in kinds if kind.at is not None and kind.reason != OTHER_REASONS])
    names = [*_KEY, "payload"] if most_shown else _KEY
    while some := list(islice(of_kinds, _EXAMPLES_AT_A_TIME)):
        conditions = []
        by_place: dict[tuple[Shard, int | None], list[_Kind]] = {}
        for kind in some:
            assert kind.at is not None
            _, is_unplaced, shard, sequence = kind.at
            by_place.setdefault((shard, None if is_unplaced else sequence), []).append(kind)
            part = UNPLACED if is_unplaced else f"_sequence = {sequence}"
            conditions.append(f"(_stream = '{shard.stream}' AND _shard = {shard.id} AND {part})")
        for letters in snapshot.scan(wanted, names, f"({' OR '.join(dict.fromkeys(conditions))})"):
            for letter in (row.to_pylist()[0] for row in _rows(letters)):
                place = Shard(letter["_stream"], letter["_shard"]), letter["_sequence"]
                for kind in by_place.get(place, ()):
                    _show(kind, letter, most_shown)


def _rows(letters: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Each alone: of many large ones no more than one is held a second time."""
    return (letters.slice(row, 1) for row in range(letters.num_rows))


def _show(kind: _Kind, letter: Mapping[str, Any], most_shown: int) -> None:
    """Make the dead letter the example of its kind, if it is, and if of several at its place it is the first."""
    assert kind.at is not None
    key = (str(letter["_batch"]), str(letter["error"]))
    is_of_kind = kind_of_reason(letter["error"]) == kind.reason and (letter[STATUS] != COUNTS) == kind.at[0]
    if not is_of_kind or (kind.example_key is not None and kind.example_key <= key):
        return
    shard = Shard(letter["_stream"], letter["_shard"])
    place = str(shard) if letter["_sequence"] is None else f"{shard}={letter['_sequence']}"
    shown = shown_bytes(letter["payload"], most=most_shown) if most_shown else ""
    kind.example_key = key
    kind.example = LetterExample(place, shortened(letter["error"] or NO_REASON, 10 * MOST_SHOWN), shown)
