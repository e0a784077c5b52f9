"""The dead letters of a group that count, for those who look at them: by reason, one by one, as a table or a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, scan
from spark_jobs.writing.dead_letters import LETTER_SCHEMA, UNPLACED
from spark_jobs.writing.letters import CORRECTED, COUNTS, STATUS, LetterFilter, LetterSnapshot
from spark_jobs.writing.reasons import NO_REASON, OTHER_REASONS, kind_of_reason
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.readable import shortened, shown_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_KINDS = 100
MOST_SHOWN = 200
"""The most characters of the payload of an example."""
COUNTING = LetterFilter()
"""All that count."""
_EXAMPLES_AT_A_TIME = 20
Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)
_KEY = [*PLACE, "_timestamp", "error", "_batch", "_recorded_at"]


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


@dataclass(slots=True)
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
    example: LetterExample | None = None
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
        object.__setattr__(self, "table", self._ingestion.table)

    @classmethod
    def of(cls, ingestion: Ingestion) -> DeadLetters:
        """Those of an ingestion."""
        return cls(ingestion.table, group=ingestion.group, storage_options=ingestion.storage_options)

    @property
    def _ingestion(self) -> Ingestion:
        return Ingestion(self.group, self.table, storage_options=self.storage_options)

    def kinds(
        self, wanted: LetterFilter = COUNTING, *, limit: int | None = None, most_shown: int = MOST_SHOWN
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
        found: dict[str, LetterKind] = {}
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
            limit: so many at most.

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

    def _snapshot(self) -> LetterSnapshot:
        return LetterSnapshot.of(self._ingestion.dead_letters(), self._written_ledger())

    def _written_ledger(self) -> Ledger:
        """The ledger; a mistyped table or group is an error, and not an empty list."""
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


def _first(batches: Iterator[Rows], limit: int | None) -> Iterator[Rows]:
    """The first rows, as many as the limit allows."""
    for batch in batches:
        yield batch if limit is None else batch.slice(0, limit)
        limit = None if limit is None else limit - batch.num_rows
        if limit is not None and limit <= 0:
            return


def _tally(letters: pa.RecordBatch, found: dict[str, LetterKind]) -> None:
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
        kind = found.setdefault(reason, LetterKind(reason))
        counted = "count" if row[STATUS] == COUNTS else row[STATUS]
        setattr(kind, counted, getattr(kind, counted) + row["count_all"])
        times = [time for time in (kind.first, kind.last, row["time_min"], row["time_max"]) if time is not None]
        kind.first, kind.last = min(times, default=None), max(times, default=None)
        shard, sequence = Shard(row["_stream"], row["_shard"]), row["_sequence_min"]
        kind.shards = sorted({*kind.shards, shard})
        at = (row[STATUS] != COUNTS, sequence is None, shard, sequence or 0)
        kind._at = at if kind._at is None else min(kind._at, at)


def _find_examples(
    snapshot: LetterSnapshot, wanted: LetterFilter, kinds: Sequence[LetterKind], most_shown: int
) -> None:
    """Read the example of each kind, some kinds at a time: each of them may be large."""
    of_kinds = iter([kind for kind in kinds if kind._at is not None and kind.reason != OTHER_REASONS])
    names = [*_KEY, "payload"] if most_shown else _KEY
    while some := list(islice(of_kinds, _EXAMPLES_AT_A_TIME)):
        conditions = []
        by_place: dict[tuple[Shard, int | None], list[LetterKind]] = {}
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


def _show(kind: LetterKind, letter: Mapping[str, Any], most_shown: int) -> None:
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
    kind.example = LetterExample(place, shortened(letter["error"] or NO_REASON, 10 * MOST_SHOWN), shown)
