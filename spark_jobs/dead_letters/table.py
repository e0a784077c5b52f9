"""Dead letters: a Delta table of their own, written before the rows, and counted once.

A dead letter counts only if the main ledger holds its batch id: a batch that was dropped after its dead letters were
written (a crash, a race) leaves rows that count for nothing, until housekeeping deletes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.ledger.delta_log import Commit, DeltaLog
from spark_jobs.ledger.entries import BATCH_ID, ClaimedRange, LedgerEntry, Uncounted
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import (
    PLACE,
    Sequences,
    by_shard,
    column_names,
    count_where,
    in_ranges,
    is_within,
    scan,
)
from spark_jobs.reading.source import DEAD_LETTER_DDL, STREAM_DDL
from spark_jobs.reading.spark_types import struct_type
from spark_jobs.table_location import spark_location, sql_name
from spark_jobs.writing.delta_table import check_landed, is_conflict, read_table
from spark_jobs.writing.failures import explain
from stream_consumers.batches import HEADERS_TYPE, Range
from stream_consumers.messages import Shard
from stream_consumers.versions import check_keys, check_version, newer

MOST_DELETED = 100
"""Of how many batches dead letters are deleted at a time: each of them is a term of the condition."""
FORMAT = 1
"""The format of the metadata of commits that is written; :data:`FORMATS` are read."""
FORMATS = range(1, FORMAT + 1)
# By these keys the metadata of a commit is known to be ours; every format has them.
_MARKS = frozenset(("v", "bid", "app", "number"))
_TIME = pa.timestamp("us", "UTC")
# By these columns a dead letter without a sequence is known, and where its dismissal has them.
_UNPLACED_KEY = ("_batch", "_stream", "_shard", "error", "offset")
_DISMISSAL_KEY = ("dismisses", *_UNPLACED_KEY[1:])
UNPLACED = "_sequence IS NULL"
"""A condition, in SQL: the dead letters that have no sequence."""
DEAD_LETTER_SCHEMA: pa.Schema = pa.schema(
    (
        pa.field("_stream", pa.string()),
        pa.field("_shard", pa.int64()),
        pa.field("_sequence", pa.int64()),
        pa.field("_timestamp", _TIME),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
        pa.field("error", pa.string()),
        pa.field("offset", pa.int64()),
        pa.field("is_message", pa.bool_()),
        pa.field("_batch", pa.string()),
        pa.field("_group", pa.string()),
        pa.field("_member", pa.string()),
        pa.field("_number", pa.int64()),
        pa.field("_recorded_at", _TIME),
        pa.field("dismissed_by", pa.string()),
        pa.field("corrected_by", pa.string()),
        pa.field("note", pa.string()),
        pa.field("correction", pa.binary()),
        pa.field("dismisses", pa.string()),
    )
)
"""The columns of the table, as :meth:`DeadLetterTable.write` writes them."""
RECORDED = tuple(DEAD_LETTER_SCHEMA.names[: DEAD_LETTER_SCHEMA.names.index("_batch")])
"""The columns that a dead letter keeps where a dismissal, or a correction, is written of it."""


@dataclass(frozen=True, slots=True)
class OrphanedBatch:
    """A batch with orphaned dead letters: they were written, and the main ledger does not hold it.

    Args:
        bid: its id.
        app: the app id of the member that planned it.
        number: its number in the main ledger.
        version: of the dead-letter table.
        is_passed: the main ledger has another batch of this number, so this one never comes.
        is_removed: a RESTORE removed it; another RESTORE may bring it back.
    """

    bid: str
    app: str
    number: int
    version: int
    is_passed: bool = False
    is_removed: bool = False


@dataclass(frozen=True, slots=True)
class NotCounting:
    """Dead letters that are in their table and do not count.

    Args:
        ranges: those of batches.
        dismissed: the keys of those without a sequence that a dismissal stands for.
    """

    ranges: Uncounted = field(default_factory=dict)
    dismissed: frozenset[tuple[object, ...]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ranges or self.dismissed)


@dataclass(frozen=True, slots=True)
class Settlement:
    """Which dead letters count.

    Args:
        version: up to this version of their table, all that is there counts but ``uncounted``.
        uncounted: what does not.
        judged: how many replaces of the main table that takes into account.
    """

    version: int
    uncounted: Uncounted = field(default_factory=dict)
    replaces_considered: int = 0


def dead_letter_path(table: str) -> str:
    """Where the dead letters of a table go by default: beside it."""
    return f"{table.rstrip('/')}_dead_letters"


@dataclass(frozen=True, slots=True)
class DeadLetterTable:
    """The dead letters of one table.

    Columns: ``_stream, _shard, _sequence, _timestamp`` (null where the framing was lost), ``key``, ``payload`` and
    ``headers`` (the original bytes), ``error``, ``offset`` (bytes from the start of a file), ``is_message`` (whether
    the stream held a whole message, which only the decoder refused), ``_batch``, ``_group``, ``_member``, ``_number``,
    ``_recorded_at``. A range that was gone before it was read is one, too, without bytes.

    A dismissed one has ``dismissed_by`` and ``note``; it counts, since nothing else accounts for its message, and is in
    no list of what is to be done. Where it has no sequence, its dismissal names the batch of the dead letter that it
    stands for as ``dismisses``. A row with ``corrected_by`` is none: it records with which ``correction`` of its
    payload a redrive of the batch made a row.
    """

    path: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def log(self) -> DeltaLog:
        """Its Delta log."""
        return DeltaLog(self.path, storage_options=self.storage_options, is_own_folder=True)

    def write(
        self, dead_letters: DataFrame, kept: DataFrame | None = None, *, ledger: Ledger, number: int, bid: str
    ) -> bool:
        """Write the dead letters of a batch, in one commit.

        Args:
            dead_letters: rows of the source with ``_error`` set.
            kept: dead letters of this table in the range that the batch replaces, which are written again.
            ledger: of the main table.
            number: the batch's number in the main ledger.
            bid: the batch's id.

        Returns:
            Whether they are there; ``False``: another run was faster, drop the batch.

        Raises:
            WriteError: Spark failed, and they are not there.
            LedgerUnreadableError: it is unknown whether they are there.
        """
        names = {f"_{name}": name for name in ("key", "payload", "headers", "error", "offset", "is_message")}
        letters = dead_letters.withColumnsRenamed(names)
        if kept is not None:
            letters = letters.unionByName(kept, allowMissingColumns=True)
        return self.append(letters, ledger=ledger, number=number, bid=bid)

    def append(self, letters: DataFrame, *, ledger: Ledger, number: int, bid: str) -> bool:
        """As :meth:`write`, with the names that this table has; columns of the batch are added, and others are null."""
        snapshot = self.log().snapshot()
        base, own_number = (snapshot.version, snapshot.last_number(ledger.app) + 1) if snapshot else (-1, 1)
        of_batch = {
            "_batch": f.lit(bid),
            "_group": f.lit(ledger.group),
            "_member": f.lit(ledger.member),
            "_number": f.lit(number).cast("bigint"),
            "_recorded_at": f.current_timestamp(),
        }
        # A type that is no text gets a collation by Spark Connect, which delta-rs cannot read.
        missing = {
            one.name: f.lit(None).cast(one.dataType.simpleString()) for one in from_arrow_schema(DEAD_LETTER_SCHEMA)
        }
        missing = {name: null for name, null in missing.items() if name not in letters.columns}
        rows = letters.withColumns({**missing, **of_batch}).select(*DEAD_LETTER_SCHEMA.names).coalesce(1)
        metadata = {"v": FORMAT, "bid": bid, "app": ledger.app, "n": own_number, "number": number}
        writer = (
            rows.write.format("delta")
            .mode("append")
            .option("delta.dataSkippingStatsColumns", "_stream,_shard,_sequence,_timestamp,_batch")
            # A table that an older version made may lack columns.
            .option("mergeSchema", "true")
            .option("txnAppId", ledger.app)
            .option("txnVersion", str(own_number))
            .option("userMetadata", json.dumps(metadata))
        )
        failure: Exception | None = None
        try:
            writer.save(spark_location(self.path))
        except Exception as error:  # noqa: BLE001 - whether it landed is for the log to say
            failure = error
        found = self.log().find(lambda commit: commit.user_metadata.get("bid") == bid, after=base)
        check_landed(found, failure, spark=letters.sparkSession, log=self.log(), bid=bid)
        return found is not None

    def counted(self, spark: SparkSession, ledger: Ledger) -> DataFrame | None:
        """The dead letters of the group that count; ``None`` if there is no table yet."""
        snapshot = self.log().snapshot()
        if snapshot is None:
            return None
        # What is known to count is known of this version: later ones may have dead letters of a batch on its way.
        own = read_table(spark, self.log(), version=snapshot.version).where(f.col("_group") == ledger.group)
        if "corrected_by" in own.columns:
            own = own.where("corrected_by IS NULL")
        left_out = self.not_counting(ledger, version=snapshot.version)
        if not left_out:
            return own
        return own.mapInArrow(lambda parts: (part.filter(counts(part, left_out)) for part in parts), own.schema)

    def counted_places(self, ledger: Ledger) -> Iterator[pa.RecordBatch]:
        """Stream, shard and sequence of the dead letters that count, without Spark, some at a time."""
        return self.scan(ledger.group, self.not_counting(ledger), PLACE)

    def open_places(self, ledger: Ledger) -> Iterator[pa.RecordBatch]:
        """Likewise of those that count and are not dismissed."""
        return self.scan(ledger.group, self.not_counting(ledger), PLACE, is_open=True)

    def scan(
        self,
        group: str,
        left_out: NotCounting,
        columns: Sequence[str] | None = None,
        *,
        where: str = "",
        version: int | None = None,
        is_open: bool = False,
        has_corrected: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The dead letters of a group, some at a time, without Spark.

        There may be thousands of batches with some that do not count, more than one SQL condition can name.

        Args:
            group: whose they are.
            left_out: those that do not count, see :meth:`not_counting`.
            columns: all by default.
            where: a SQL condition.
            version: of their table, the newest by default.
            is_open: leave out those that are dismissed.
            has_corrected: also what records a correction.

        Raises:
            TableUnreadableError: delta-rs cannot read their table.
        """
        if self.log().snapshot() is None:
            return
        key = _UNPLACED_KEY if left_out.dismissed else ("_batch",)
        needed = None if columns is None else list(dict.fromkeys([*columns, *PLACE, *key]))
        marks = {"dismissed_by": is_open, "corrected_by": not has_corrected}
        # A table that an older release made has none of them.
        known = column_names(self.log(), version=version)
        nulls = [f"{name} IS NULL" for name, is_left_out in marks.items() if is_left_out and name in known]
        condition = " AND ".join([_is_of(group), *nulls, *([f"({where})"] if where else [])])
        for found in scan(self.log(), needed, where=condition, version=version):
            letters = _plain(found)
            counting = letters.filter(counts(letters, left_out)) if left_out else letters
            yield counting if columns is None else counting.select(list(columns))

    def by_batch(self, *, version: int | None = None) -> Counter[str]:
        """How many dead letters of each batch are in a version, the newest by default, whether they count or not."""
        found: Counter[str] = Counter()
        if self.log().snapshot() is not None:
            is_letter = "corrected_by IS NULL" if "corrected_by" in column_names(self.log(), version=version) else ""
            for letters in scan(self.log(), ["_batch"], where=is_letter, version=version):
                found.update(map(str, letters.column("_batch").to_pylist()))
        return found

    def uncounted(self, ledger: Ledger) -> Uncounted:
        """The dead letters that are there and do not count: orphaned, or in a range that was replaced since."""
        state = ledger.read()
        return _united(state.uncounted, self._replaced(ledger, state), _whole(self.orphaned(ledger, state)))

    def not_counting(self, ledger: Ledger, *, version: int | None = None) -> NotCounting:
        """As :meth:`uncounted`, with those without a sequence that a dismissal stands for.

        Args:
            ledger: of the main table.
            version: of the dead-letter table, the newest by default.
        """
        ranges = self.uncounted(ledger)
        if self.log().snapshot() is None or "dismisses" not in column_names(self.log(), version=version):
            return NotCounting(ranges)
        # Statistics of files show which of them have no such row; there are none of ``dismisses``.
        where = f"{UNPLACED} AND dismisses IS NOT NULL"
        found = self.scan(ledger.group, NotCounting(ranges), _DISMISSAL_KEY, where=where, version=version)
        return NotCounting(ranges, frozenset(key for part in found for key in _keys(part, _DISMISSAL_KEY)))

    def settle(self, spark: SparkSession, ledger: Ledger, state: LedgerState) -> Settlement:
        """Delete the dead letters that will never count, and return which of the others do not count.

        Never will those of a batch whose number the main ledger has given to another one; and where the log reaches
        back to no RESTORE, those of a batch that was removed, or replaced, by a commit that was cleaned since.

        Args:
            spark: does the deleting.
            ledger: of the main table.
            state: the main ledger.
        """
        snapshot = self.log().snapshot()
        if snapshot is None:
            return Settlement(-1, replaces_considered=state.totals.replaced)
        judged = state.totals.replaced
        orphaned = self.orphaned(ledger, state)
        in_flight = {batch.bid: batch.version for batch in orphaned if not batch.is_passed and not batch.is_removed}
        removed = _whole(batch for batch in orphaned if batch.is_removed)
        # Dead letters of a batch that lands after a replace are newer than it.
        replaced = {bid: parts for bid, parts in self._replaced(ledger, state).items() if bid not in in_flight}
        passed = _whole(batch for batch in orphaned if batch.is_passed)
        uncounted = _united(state.uncounted, replaced, removed, passed)
        never = _united(self._stale(ledger, state, removed), passed)
        # Those that are left count for nothing meanwhile.
        never = dict(islice(never.items(), MOST_DELETED))
        if never and not self._delete(spark, never):
            return Settlement(state.dead_letters_version, uncounted, judged)
        left = {bid: ranges for bid, ranges in uncounted.items() if bid not in never}
        return Settlement(min(in_flight.values(), default=snapshot.version + 1) - 1, left, judged)

    def _stale(self, ledger: Ledger, state: LedgerState, removed: Uncounted) -> Uncounted:
        """What does not count because of commits that were cleaned from the log since: nothing brings it back.

        No RESTORE goes back to what was cleaned, and without one in the log nothing readable was removed.
        """
        unknown = state.uncounted.keys() - removed.keys()
        if not unknown or ledger.log.commit(0) is not None:
            return {}
        if any(commit.restored is not None for commit in ledger.log.readable()):
            return {}
        replaced = self._replaced(ledger, replace(state, replaces_considered=0))
        return {bid: state.uncounted[bid] for bid in unknown - replaced.keys()}

    def _delete(self, spark: SparkSession, never: Uncounted) -> bool:
        """Whether they are gone."""
        condition = " OR ".join(_condition(bid, ranges) for bid, ranges in never.items())
        try:
            spark.sql(f"DELETE FROM {sql_name(self.path)} WHERE {condition}")  # noqa: S608 - our own ids
        except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
            if not is_conflict(error):
                raise explain(error, table=self.path) from None
            # Another run is deleting the same; what is left of them counts for nothing and is deleted next time.
            return False
        # Delta silently ignores a DELETE if the session names a transaction version that is recorded already.
        return count_where(self.log(), condition) == 0

    def _replaced(self, ledger: Ledger, state: LedgerState) -> Uncounted:
        """The dead letters in ranges that a newer batch has replaced, as far as ``state.uncounted`` does not say so."""
        replaced = replacements(ledger, state)
        if not replaced.ranges or self.log().snapshot() is None:
            return {}
        places = {
            shard: Range(min(part.start for part, _ in parts), max(part.end for part, _ in parts))
            for shard, parts in replaced.ranges.items()
        }
        found: dict[str, dict[Shard, Intervals]] = {}
        for letters in self.scan(ledger.group, NotCounting(), [*PLACE, "_batch"], where=in_ranges(places)):
            for bid, of_batch in letters.to_pandas().groupby("_batch"):
                for shard, sequences in by_shard(of_batch, *PLACE):
                    parts = replaced.of(shard, str(bid), sequences)
                    if parts:
                        known = found.setdefault(str(bid), {})
                        known[shard] = known.get(shard, Intervals()) | Intervals.of(*parts)
        return found

    def orphaned(self, ledger: Ledger, state: LedgerState | None = None) -> list[OrphanedBatch]:
        """The batches whose dead letters do not count, because the main ledger is known not to hold them.

        A commit that was cleaned from the log of the main table is not missing: its batch counts, unless an entry says
        otherwise (``uncounted``).

        Args:
            ledger: of the main table.
            state: what it says; everything behind its ``settled`` is judged.
        """
        state = state or ledger.read()
        written, deleted = self._written(ledger, state.dead_letters_version)
        if not written:
            return []
        last = {app: ledger.last_number(app.removeprefix(f"{ledger.group}/")) for app in {s.app for s in written}}
        # Numbers that the main ledger has not reached are in none of its commits.
        reached = sorted((s for s in written if s.number <= last[s.app]), key=lambda s: -s.number)
        needed = {s.app: s.number for s in reached}
        numbers = _numbers(ledger.newest_first(), needed) if needed else {}
        held = _numbers(ledger.surviving(), needed) if needed else {}
        found = []
        for batch in written:
            if batch.bid in deleted or batch.bid in held.get(batch.app, {}).values():
                continue
            other = numbers.get(batch.app, {}).get(batch.number)
            if other is None and batch.number <= last[batch.app]:
                continue
            is_removed = other == batch.bid
            found.append(replace(batch, is_passed=other is not None and not is_removed, is_removed=is_removed))
        return found

    def _written(self, ledger: Ledger, after: int) -> tuple[list[OrphanedBatch], str]:
        """The batches of the group with dead letters behind version ``after``, and what was deleted since."""
        log = self.log()
        snapshot = log.snapshot()
        found: list[OrphanedBatch] = []
        deleted = ""
        newest = snapshot.version if snapshot else -1
        # Settled up to a version that is not there: the table was deleted and made anew.
        oldest = after if after <= newest else -1
        for version in range(newest, oldest, -1):
            commit = log.commit(version)
            if commit is None:
                break
            deleted += commit.predicate
            batch = _written_batch(commit, self.path)
            if batch is not None and batch.app.startswith(f"{ledger.group}/"):
                found.append(batch)
        return found, deleted


def _written_batch(commit: Commit, path: str) -> OrphanedBatch | None:
    """The batch whose dead letters a commit wrote; ``None`` if the commit is not ours.

    Raises:
        UnsupportedVersionError: a newer release has written it.
    """
    metadata = commit.user_metadata
    if not metadata.keys() >= _MARKS:
        return None
    what = f"version {commit.version} of {path}: metadata of dead letters"
    check_version(metadata["v"], what=what, versions=FORMATS)
    check_keys(metadata, what=what, keys=(*_MARKS, "n"))
    bid, app, number = metadata["bid"], metadata["app"], metadata["number"]
    if not (isinstance(bid, str) and BATCH_ID.fullmatch(bid) and isinstance(app, str) and isinstance(number, int)):
        raise newer(f"{what} cannot be read")
    return OrphanedBatch(bid, app, number, commit.version)


def lost_ranges(spark: SparkSession, entry: LedgerEntry) -> DataFrame:
    """A dead letter for each range that was gone from the stream before it was read; it has no sequence."""
    schema = struct_type(f"{STREAM_DDL}, {DEAD_LETTER_DDL}")
    rows = [
        (shard.stream, shard.id, None, None, None, None, None, _lost(part, entry.claims.get(shard)), None, False, None)
        for shard, parts in sorted(entry.lost.items())
        for part in parts
    ]
    return spark.createDataFrame(rows, schema)


def _lost(part: Range, claimed: ClaimedRange | None) -> str:
    if claimed is not None:
        return (
            f"lost: entries between {part.start} and {part.end} were removed from the stream before they were written "
            f"({claimed.entries} in all)"
        )
    return (
        f"lost: sequences {part.start} to {part.end - 1} were removed from the stream before they were read; "
        f"the first left is {part.end}"
    )


@dataclass(frozen=True, slots=True)
class Replacements:
    """Ranges that batches replaced: dead letters of older batches in them count no more.

    Args:
        ranges: per shard what was replaced, and how many batches of the log are newer than the one that did it.
        newer: for each batch, how many are newer; those that are not named are older than all that replaced.
    """

    ranges: Mapping[Shard, list[tuple[Range, int]]]
    newer: Mapping[str, int]

    def of(self, shard: Shard, bid: str, sequences: Sequences) -> list[Range]:
        """The ranges in which dead letters of a batch, which has these sequences, do not count any more.

        As few as there can be, since entries say them: what lies between two of its dead letters is not asked for.

        Example:
            >>> orders = Shard("orders")
            >>> replacements = Replacements({orders: [(Range(0, 10), 0)]}, {"second": 0, "first": 1})
            >>> letters = np.array([2, 9, 15])
            >>> replacements.of(orders, "first", letters), replacements.of(orders, "second", letters)
            ([Range(start=2, end=10)], [])
        """
        age = self.newer.get(bid, len(self.newer))
        parts = [part for part, newer in self.ranges.get(shard, ()) if newer < age]
        sequences = np.sort(sequences)
        first = np.searchsorted(sequences, [part.start for part in parts])
        behind = np.searchsorted(sequences, [part.end for part in parts])
        pairs = zip(first.tolist(), behind.tolist(), strict=True)
        return [Range(int(sequences[start]), int(sequences[end - 1]) + 1) for start, end in Intervals.of(*pairs)]


def replacements(ledger: Ledger, state: LedgerState) -> Replacements:
    """What batches have replaced, as far as no RESTORE removed them, and ``state.uncounted`` does not know of it."""
    ranges: dict[Shard, list[tuple[Range, int]]] = {}
    newer: dict[str, int] = {}
    left = state.totals.replaced - state.replaces_considered
    for commit in ledger.surviving(state.version) if left > 0 else ():
        if commit.entry is None:
            continue
        if commit.entry.write_mode.uncounts_dead_letters:
            for shard, parts in commit.entry.affected.items():
                # A batch may have nothing of a shard.
                if parts:
                    ranges.setdefault(shard, []).extend((part, len(newer)) for part in parts)
            left -= 1
        newer[commit.entry.bid] = len(newer)
        if not left:
            break
    return Replacements(ranges, newer)


def _is_of(group: str) -> str:
    """The rows of a group, as a SQL condition for delta-rs; its name may have quotes."""
    quoted = group.replace("'", "''")
    return f"_group = '{quoted}'"


def _whole(batches: Iterable[OrphanedBatch]) -> Uncounted:
    return {batch.bid: {} for batch in batches}


def _plain(letters: pa.RecordBatch) -> pa.RecordBatch:
    """With strings and bytes of the usual types, which Arrow can filter; delta-rs gives views of them."""
    known = set(DEAD_LETTER_SCHEMA.names)
    return letters.cast(
        pa.schema([DEAD_LETTER_SCHEMA.field(own.name) if own.name in known else own for own in letters.schema])
    )


def _keys(letters: pa.RecordBatch, names: Sequence[str]) -> list[tuple[object, ...]]:
    return list(zip(*(letters.column(name).to_pylist() for name in names), strict=True))


def counts(letters: pa.RecordBatch, left_out: NotCounting) -> pa.Array[Any]:
    """For each dead letter, whether it is none of those that do not count."""
    counts = np.ones(len(letters), np.bool_)
    batches = np.array(letters.column("_batch").to_pylist(), object)
    # Without a sequence it is in no range. In pandas the others would become imprecise next to it.
    is_placed = letters.column("_sequence").is_valid().to_numpy(zero_copy_only=False)
    sequences = letters.column("_sequence").fill_null(0).to_numpy(zero_copy_only=False)
    shards = pd.Series(list(zip(letters.column("_stream").to_pylist(), letters.column("_shard").to_pylist())))
    for bid, rows in pd.Series(batches).groupby(batches).groups.items():
        ranges = left_out.ranges.get(str(bid))
        if ranges is None:
            continue
        if not ranges:
            counts[rows] = False
            continue
        for (stream, number), own in shards[rows].groupby(shards[rows]).groups.items():
            parts = ranges.get(Shard(str(stream), int(number)), Intervals())
            counts[own] &= ~(is_within(sequences[own], parts) & is_placed[own])
    if left_out.dismissed and not is_placed.all():
        unplaced = np.flatnonzero(~is_placed)
        keys = _keys(letters.take(unplaced), _UNPLACED_KEY)
        counts[unplaced] &= np.array([key not in left_out.dismissed for key in keys], np.bool_)
    return pa.array(counts)


def _united(*parts: Uncounted) -> Uncounted:
    """What does not count according to any of them; no range stands for all of a batch."""
    found: dict[str, Mapping[Shard, Intervals]] = {}
    for part in parts:
        for bid, ranges in part.items():
            known = found.get(bid)
            if known is None or not ranges:
                found[bid] = ranges
            elif known:
                shards = known.keys() | ranges.keys()
                found[bid] = {s: known.get(s, Intervals()) | ranges.get(s, Intervals()) for s in shards}
    return found


def _condition(bid: str, ranges: Mapping[Shard, Intervals]) -> str:
    """The rows that do not count, as a SQL condition."""
    parts = [in_ranges({shard: part}) for shard, intervals in sorted(ranges.items()) for part in intervals]
    return f"(_batch = '{bid}'" + (f" AND _sequence IS NOT NULL AND ({' OR '.join(parts)}))" if parts else ")")


def _numbers(commits: Iterator[Commit], needed: Mapping[str, int]) -> dict[str, dict[int, str]]:
    """Per app id the batch ids by number, from the newest commit down to the needed numbers."""
    found: dict[str, dict[int, str]] = {}
    for commit in commits:
        if commit.entry is not None:
            found.setdefault(commit.entry.app, {})[commit.entry.number] = commit.entry.bid
        if all(app in found and min(found[app]) <= number for app, number in needed.items()):
            break
    return found
