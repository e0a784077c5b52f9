"""The dead-letter table: a Delta table that is written before the rows.

A dead letter counts only if the main ledger has its batch id. A batch that was dropped after its dead letters were
written (by a crash or a lost race) leaves dead letters that do not count, until a later run deletes them.
"""

from __future__ import annotations

import json
import math
import time
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

from spark_jobs.ledger.delta_log import Commit, DeltaLog, TableSnapshot
from spark_jobs.ledger.entries import BATCH_ID, LedgerEntry, Uncounted
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState, in_effect
from spark_jobs.ledger.table_rows import (
    ROW_PLACE,
    Sequences,
    by_shard,
    column_names,
    count_where,
    in_ranges,
    is_within,
    scan,
)
from spark_jobs.reading.source import DEAD_LETTER_DDL, STREAM_COLUMNS, STREAM_DDL
from spark_jobs.reading.spark_types import struct_type
from spark_jobs.table_folders import check_folder, create_folder
from spark_jobs.table_location import spark_location, sql_name
from spark_jobs.writing.delta_table import check_landed, is_conflict, read_table
from spark_jobs.writing.failures import explain
from stream_consumers.batches import HEADERS_TYPE, Range
from stream_consumers.messages import Shard
from stream_consumers.versions import check_keys, check_version, newer

ABANDONED_AFTER_MS = 86_400_000
"""A batch that has not landed after this time, in milliseconds from the commit of its dead letters, is abandoned: its
run was most likely killed. If it was not, the batch loses its number, and is planned again."""
MAX_DELETED_BATCHES = 100
"""The most batches whose dead letters one DELETE removes; each adds a term to its condition."""
SUFFIX = "_dead_letters"
"""What follows the path of a table in that of its dead letters."""
NO_TABLE = -1
"""The version if there is no table."""
FORMAT = 1
"""The format number that is written into commit metadata; the numbers in :data:`FORMATS` can be read."""
FORMATS = range(1, FORMAT + 1)
# Commit metadata with these keys is ours; every format has them.
_MARKS = frozenset(("v", "bid", "app", "number"))
_TIME = pa.timestamp("us", "UTC")
# These columns identify a dead letter without a sequence. In its dismissal, `dismisses` replaces `_batch`.
_UNPLACED_KEY = ("_batch", "_stream", "_shard", "error", "offset")
HAS_NO_SEQUENCE = "_sequence IS NULL"
"""A SQL condition: the dead letters without a sequence."""
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
COPIED_COLUMNS = tuple(DEAD_LETTER_SCHEMA.names[: DEAD_LETTER_SCHEMA.names.index("_batch")])
"""The columns before ``_batch``, which a dismissal or a correction copies from the dead letter."""


@dataclass(frozen=True, slots=True)
class OrphanedBatch:
    """A batch whose dead letters were written, and that the main ledger does not have.

    Args:
        bid: its id.
        app: the app id of the member that planned it.
        number: its number in the main ledger.
        version: the version of the dead-letter table with its dead letters.
        written_ms: the time of that version.
        is_superseded: whether this number is used up in the main ledger, so that the batch can never land.
        is_removed: whether a RESTORE removed it; another RESTORE may bring it back.
    """

    bid: str
    app: str
    number: int
    version: int
    written_ms: int
    is_superseded: bool = False
    is_removed: bool = False


@dataclass(frozen=True, slots=True)
class NotCounting:
    """The dead letters in the table that do not count.

    Args:
        ranges: for each batch id, the ranges that do not count; empty for the whole batch.
        unplaced: the keys of dead letters without a sequence that a dismissal replaces, or a newer dead letter of the
            same offset, because a replay or a rewind read the damage again.
        version: the version of the dead-letter table that this is about; -1 if there is none, and ``None`` for the
            newest one at the time of each read.
    """

    ranges: Uncounted = field(default_factory=dict)
    unplaced: frozenset[tuple[object, ...]] = frozenset()
    version: int | None = None

    def __bool__(self) -> bool:
        return bool(self.ranges or self.unplaced)


@dataclass(frozen=True, slots=True)
class CheckedDeadLetters:
    """The result of a check which dead letters count.

    Args:
        version: in versions of the dead-letter table up to this one, every dead letter counts except ``uncounted``.
        uncounted: the dead letters that do not count.
        replaces_considered: the number of replaces of the main table that ``uncounted`` already reflects.
        abandoned: the highest number of an abandoned batch by app id; see :data:`ABANDONED_AFTER_MS`. Until another
            commit takes it, ``version`` stays before its dead letters. If their commit was cleaned from the log of the
            dead-letter table before that, they would count.
    """

    version: int
    uncounted: Uncounted = field(default_factory=dict)
    replaces_considered: int = 0
    abandoned: Mapping[str, int] = field(default_factory=dict)

    def added_to(self, state: LedgerState) -> LedgerState:
        """Return the state of the ledger with this result, so that the next entries have it."""
        return replace(
            state,
            dead_letters_version=self.version,
            uncounted=self.uncounted,
            replaces_considered=self.replaces_considered,
        )


def dead_letter_path(table: str) -> str:
    """Return the path of the dead-letter table of a table, which is in the same folder."""
    return f"{table.rstrip('/')}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class DeadLetterTable:
    """The dead letters of one table.

    Columns: ``_stream, _shard, _sequence, _timestamp`` (null where the framing was lost), ``key``, ``payload`` and
    ``headers`` (the original bytes), ``error``, ``offset`` (bytes from the start of a file), ``is_message`` (whether
    the stream held a whole message, which the decoder, the transform or the table refused), ``_batch``, ``_group``,
    ``_member``, ``_number``, ``_recorded_at``. A range that was lost before it was read is also a dead letter, without
    bytes.

    A dismissed dead letter has ``dismissed_by`` and ``note``. It still accounts for its message, but is not listed as
    open. If it has no sequence, ``dismisses`` of its dismissal is the batch of the original dead letter. A row with
    ``corrected_by`` is not a dead letter. It records the ``correction`` of the payload from which a redrive made a row;
    see :mod:`spark_jobs.dead_letters.corrections`.
    """

    path: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def _of(self) -> str:
        """The path of the table whose dead letters these are."""
        return self.path.removesuffix(SUFFIX)

    def log(self) -> DeltaLog:
        """Return its Delta log.

        Raises:
            UntrustedFileError: another user made its folder.
        """
        check_folder(self.path, table=self._of)
        return DeltaLog(self.path, storage_options=self.storage_options, is_own_folder=True)

    def write(
        self, dead_letters: DataFrame, kept: DataFrame | None = None, *, ledger: Ledger, number: int, bid: str
    ) -> bool:
        """Write the dead letters of a batch, in one commit.

        Args:
            dead_letters: rows of the source with ``_error`` set.
            kept: dead letters of this table in the range that the batch replaces, which are written again.
            ledger: the ledger of the main table.
            number: the batch's number in the main ledger.
            bid: the batch's id.

        Returns:
            Whether the commit landed; if not, another run committed first, and the batch has to be dropped.

        Raises:
            WriteError: Spark failed, and the commit did not land.
            LedgerUnreadableError: it is unknown whether the commit landed.
        """
        names = {f"_{name}": name for name in COPIED_COLUMNS if name not in STREAM_COLUMNS}
        own = dead_letters.withColumnsRenamed(names)
        if kept is not None:
            own = own.unionByName(kept, allowMissingColumns=True)
        return self.append(own, ledger=ledger, number=number, bid=bid)

    def append(self, dead_letters: DataFrame, *, ledger: Ledger, number: int, bid: str) -> bool:
        """Append rows with columns of this table in one commit; :meth:`write` documents the arguments and errors.

        The columns of the batch, ``_batch`` to ``_recorded_at``, are set here; other missing columns are null.
        """
        create_folder(self.path, table=self._of)
        log = self.log()
        base, own_number = -1, 1
        if (snapshot := log.snapshot()) is not None:
            log.check_format(snapshot.version)
            base, own_number = snapshot.version, snapshot.last_number(ledger.app) + 1
        of_batch = {
            "_batch": f.lit(bid),
            "_group": f.lit(ledger.group),
            "_member": f.lit(ledger.member),
            "_number": f.lit(number).cast("bigint"),
            "_recorded_at": f.current_timestamp(),
        }
        # Give the type as text: for a type object, Spark Connect adds a collation, which delta-rs cannot read.
        missing = {
            one.name: f.lit(None).cast(one.dataType.simpleString()) for one in from_arrow_schema(DEAD_LETTER_SCHEMA)
        }
        missing = {name: null for name, null in missing.items() if name not in dead_letters.columns}
        rows = dead_letters.withColumns({**missing, **of_batch}).select(*DEAD_LETTER_SCHEMA.names).coalesce(1)
        metadata = {"v": FORMAT, "bid": bid, "app": ledger.app, "n": own_number, "number": number}
        writer = (
            rows.write.format("delta")
            .mode("append")
            .option("delta.dataSkippingStatsColumns", "_stream,_shard,_sequence,_timestamp,_batch")
            # A table that an older release created may lack columns.
            .option("mergeSchema", "true")
            .option("txnAppId", ledger.app)
            .option("txnVersion", str(own_number))
            .option("userMetadata", json.dumps(metadata))
        )
        failure: Exception | None = None
        try:
            writer.save(spark_location(self.path))
        except Exception as error:  # noqa: BLE001 - the log shows whether it landed
            failure = error
        found = self.log().find(lambda commit: commit.user_metadata.get("bid") == bid, after=base)
        check_landed(found, failure, spark=dead_letters.sparkSession, log=self.log(), bid=bid)
        return found is not None

    def counted(self, spark: SparkSession, ledger: Ledger, state: LedgerState | None = None) -> DataFrame | None:
        """Return the dead letters of the group that count; ``None`` if there is no table yet.

        Args:
            spark: a session.
            ledger: the ledger of the main table.
            state: the state of that ledger to judge by, the present one by default.
        """
        left_out = self.not_counting(ledger, state)
        if left_out.version == NO_TABLE:
            return None
        own = read_table(spark, self.log(), version=left_out.version).where(f.col("_group") == ledger.group)
        if "corrected_by" in own.columns:
            own = own.where("corrected_by IS NULL")
        if not left_out:
            return own
        return own.mapInArrow(lambda parts: (part.filter(counts(part, left_out)) for part in parts), own.schema)

    def counted_places(self, ledger: Ledger) -> Iterator[pa.RecordBatch]:
        """Yield the places of the dead letters that count in chunks, without Spark."""
        return self.scan(ledger.group, self.not_counting(ledger), ROW_PLACE)

    def corrections(self, ledger: Ledger) -> pa.Table:
        """Return the records of corrections that are in force, the newest one of each place, without Spark.

        A record is in force unless its batch did not land, or a RESTORE removed it. A user has given these payloads, so
        that they fit in memory.
        """
        names = [*COPIED_COLUMNS, "_number", "corrected_by", "note", "correction"]
        found = DEAD_LETTER_SCHEMA.empty_table().select(names)
        snapshot = self.log().snapshot()
        if snapshot is None or "correction" not in column_names(self.log(), version=snapshot.version):
            return found
        state = ledger.read()
        # Other batches replace dead letters, but no records, so only whole batches do not count.
        whole: Uncounted = {bid: parts for bid, parts in state.uncounted.items() if not parts}
        left_out = NotCounting(_united(whole, _whole(self.orphaned(ledger, state))), version=snapshot.version)
        parts = self.scan(ledger.group, left_out, names, where="corrected_by IS NOT NULL", has_corrected=True)
        found = pa.concat_tables([found, *(pa.Table.from_batches([part]) for part in parts)])
        # All of them have numbers of the transaction sequence of ingestion.
        found = found.sort_by([("_number", "descending"), *((name, "ascending") for name in ROW_PLACE)])
        return found.filter(pa.array(~found.select(list(ROW_PLACE)).to_pandas().duplicated().to_numpy()))

    def open_places(self, ledger: Ledger) -> Iterator[pa.RecordBatch]:
        """Yield the places of the dead letters that count and are not dismissed in chunks, without Spark."""
        return self.scan(ledger.group, self.not_counting(ledger), ROW_PLACE, is_open=True)

    def scan(
        self,
        group: str,
        left_out: NotCounting,
        columns: Sequence[str] | None = None,
        *,
        where: str = "",
        is_open: bool = False,
        has_corrected: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the dead letters of a group in chunks, without Spark.

        Those that do not count are filtered here, because thousands of batches may have some, too many for a condition.

        Args:
            group: the consumer group.
            left_out: the dead letters that do not count, see :meth:`not_counting`, and the version of the table.
            columns: the columns to read; all by default.
            where: a SQL condition.
            is_open: whether to omit dismissed dead letters.
            has_corrected: whether to include records of corrections.

        Raises:
            TableUnreadableError: delta-rs cannot read their table.
        """
        version = left_out.version
        if version == NO_TABLE or self.log().snapshot() is None:
            return
        key = _UNPLACED_KEY if left_out.unplaced else ("_batch",)
        needed = None if columns is None else list(dict.fromkeys([*columns, *ROW_PLACE, *key]))
        marks = {"dismissed_by": is_open, "corrected_by": not has_corrected}
        # A table that an older release created lacks these columns.
        known = column_names(self.log(), version=version)
        nulls = [f"{name} IS NULL" for name, is_left_out in marks.items() if is_left_out and name in known]
        condition = " AND ".join([_is_of(group), *nulls, *([f"({where})"] if where else [])])
        for found in scan(self.log(), needed, where=condition, version=version):
            plain = _plain(found)
            counting = plain.filter(counts(plain, left_out)) if left_out else plain
            yield counting if columns is None else counting.select(list(columns))

    def by_batch(self, *, version: int | None = None) -> Counter[str]:
        """Count all dead letters of each batch in a version, the newest by default, whether they count or not."""
        found: Counter[str] = Counter()
        if self.log().snapshot() is not None:
            where = "corrected_by IS NULL" if "corrected_by" in column_names(self.log(), version=version) else ""
            for part in scan(self.log(), ["_batch"], where=where, version=version):
                found.update(map(str, part.column("_batch").to_pylist()))
        return found

    def not_counting(self, ledger: Ledger, state: LedgerState | None = None) -> NotCounting:
        """Return the dead letters of the newest version that do not count.

        They are orphaned, or in a range that was replaced since; or they have no sequence, and others replace them.

        Args:
            ledger: the ledger of the main table.
            state: the state of that ledger to judge by, the present one by default.
        """
        snapshot = self.log().snapshot()
        if snapshot is None:
            return NotCounting(version=NO_TABLE)
        # Read after the version: a later version may have dead letters of a batch in flight.
        state = state or ledger.read()
        ranges = _united(state.uncounted, self._replaced(ledger, state), _whole(self.orphaned(ledger, state)))
        left_out = NotCounting(ranges, version=snapshot.version)
        known = column_names(self.log(), version=snapshot.version)
        columns = [name for name in (*_UNPLACED_KEY, "_recorded_at", "dismisses") if name in known]
        if not {*_UNPLACED_KEY, "_recorded_at"} <= set(columns):
            return left_out
        # Files without such rows are skipped by the statistics of _sequence.
        found = self.scan(ledger.group, left_out, columns, where=HAS_NO_SEQUENCE)
        return replace(left_out, unplaced=frozenset(_superseded(row for part in found for row in part.to_pylist())))

    def clean_up(self, spark: SparkSession, ledger: Ledger, state: LedgerState) -> CheckedDeadLetters:
        """Delete the dead letters that can never count, and return which of the others do not count.

        Dead letters never count if the main ledger gave the number of their batch to another batch. If there is no
        RESTORE in the log, they also never count if a commit removed or replaced them that was cleaned since.

        Args:
            spark: a session that can write Delta tables.
            ledger: the ledger of the main table.
            state: the state of that ledger.
        """
        snapshot = self.log().snapshot()
        considered = state.totals.replaced
        if snapshot is None:
            return CheckedDeadLetters(-1, replaces_considered=considered)
        orphaned = self.orphaned(ledger, state)
        in_flight = {batch.bid: batch for batch in orphaned if not batch.is_superseded and not batch.is_removed}
        removed = _whole(batch for batch in orphaned if batch.is_removed)
        # If a batch lands after a replace, its dead letters are newer than the replace.
        replaced = {bid: parts for bid, parts in self._replaced(ledger, state).items() if bid not in in_flight}
        superseded = _whole(batch for batch in orphaned if batch.is_superseded)
        uncounted = _united(state.uncounted, replaced, removed, superseded)
        # The rest is deleted later, and does not count until then.
        deleted = dict(islice(_united(self._stale(ledger, state, removed), superseded).items(), MAX_DELETED_BATCHES))
        if deleted and not self._delete(spark, deleted):
            return CheckedDeadLetters(state.dead_letters_version, uncounted, considered)
        left = {bid: ranges for bid, ranges in uncounted.items() if bid not in deleted}
        oldest = min((batch.version for batch in in_flight.values()), default=snapshot.version + 1)
        return CheckedDeadLetters(oldest - 1, left, considered, _abandoned(in_flight.values()))

    def _stale(self, ledger: Ledger, state: LedgerState, removed: Uncounted) -> Uncounted:
        """Return dead letters that do not count because of commits that were cleaned from the log, so never will.

        No RESTORE can restore a cleaned version, and without a RESTORE in the log no readable commit was removed.
        """
        unknown = state.uncounted.keys() - removed.keys()
        if not unknown or ledger.log.commit(0) is not None:
            return {}
        if any(commit.restore_target is not None for commit in ledger.log.readable()):
            return {}
        replaced = self._replaced(ledger, replace(state, replaces_considered=0))
        return {bid: state.uncounted[bid] for bid in unknown - replaced.keys()}

    def _delete(self, spark: SparkSession, dead_letters: Uncounted) -> bool:
        """Delete dead letters; return whether all of them are gone."""
        condition = " OR ".join(_condition(bid, ranges) for bid, ranges in dead_letters.items())
        self.log().check_version()
        try:
            spark.sql(f"DELETE FROM {sql_name(self.path)} WHERE {condition}")  # noqa: S608 - our own ids
        except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
            if not is_conflict(error):
                raise explain(error, table=self.path) from None
            # Another run is deleting the same. The rest does not count, and is deleted next time.
            return False
        # Delta silently ignores a DELETE if the session sets a transaction version that is already in the log.
        return count_where(self.log(), condition) == 0

    def _replaced(self, ledger: Ledger, state: LedgerState) -> Uncounted:
        """Return the dead letters in ranges that a newer batch has replaced, and that ``state.uncounted`` lacks."""
        replaced = replacements(ledger, state)
        if not replaced.ranges or self.log().snapshot() is None:
            return {}
        places = {
            shard: Range(min(part.start for part, _ in parts), max(part.end for part, _ in parts))
            for shard, parts in replaced.ranges.items()
        }
        found: dict[str, dict[Shard, Intervals]] = {}
        columns, where = [*ROW_PLACE, "_batch"], in_ranges(places)
        for part in self.scan(ledger.group, NotCounting(), columns, where=where):
            for bid, of_batch in part.to_pandas().groupby("_batch"):
                for shard, sequences in by_shard(of_batch, *ROW_PLACE):
                    parts = replaced.of(shard, str(bid), sequences)
                    if parts:
                        known = found.setdefault(str(bid), {})
                        known[shard] = known.get(shard, Intervals()) | Intervals.of(*parts)
        return found

    def orphaned(self, ledger: Ledger, state: LedgerState | None = None) -> list[OrphanedBatch]:
        """Return the batches whose dead letters do not count, because the main ledger does not have them.

        A batch whose commit was cleaned from the log of the main table counts, unless an entry has it as ``uncounted``.

        Args:
            ledger: the ledger of the main table.
            state: the state of that ledger; only versions after its ``dead_letters_version`` are checked. A batch that
                landed after it counts as one that has not landed.
        """
        state = state or ledger.read()
        written, delete_conditions = self._written(ledger, state.dead_letters_version)
        if not written:
            return []
        last = dict.fromkeys((batch.app for batch in written), 0)
        if state.version >= 0:
            snapshot = TableSnapshot(ledger.log, ledger.log.open(state.version))
            last = {app: snapshot.last_number(app) for app in last}
        # No commit of the main ledger has a number that it has not reached.
        reached = sorted((s for s in written if s.number <= last[s.app]), key=lambda s: -s.number)
        needed = {s.app: s.number for s in reached}
        until_then = (commit for commit in ledger.newest_first() if commit.version <= state.version)
        numbers = _numbers(until_then, needed) if needed else {}
        surviving = _numbers(ledger.surviving(state.version), needed) if needed else {}
        found = []
        for batch in written:
            if batch.bid in delete_conditions or batch.bid in surviving.get(batch.app, {}).values():
                continue
            known = numbers.get(batch.app, {})
            is_used = batch.number <= last[batch.app]
            if is_used and min(known, default=batch.number) >= batch.number and batch.number not in known:
                # Its commit may have been cleaned from the log. If a readable commit has a lower number, it was not:
                # then a fence has used up several numbers.
                continue
            is_removed = known.get(batch.number) == batch.bid
            found.append(replace(batch, is_superseded=is_used and not is_removed, is_removed=is_removed))
        return found

    def _written(self, ledger: Ledger, after: int) -> tuple[list[OrphanedBatch], str]:
        """Return the batches with dead letters after version ``after``, and the conditions of later DELETEs."""
        log = self.log()
        snapshot = log.snapshot()
        found: list[OrphanedBatch] = []
        delete_conditions = ""
        newest = snapshot.version if snapshot else -1
        # If that version does not exist, the table was deleted and created again.
        oldest = after if after <= newest else -1
        for version in range(newest, oldest, -1):
            commit = log.commit(version)
            if commit is None:
                break
            delete_conditions += commit.predicate
            batch = _written_batch(commit, self.path)
            if batch is not None and batch.app.startswith(f"{ledger.group}/"):
                found.append(batch)
        return found, delete_conditions


def _written_batch(commit: Commit, path: str) -> OrphanedBatch | None:
    """Return the batch whose dead letters a commit wrote; ``None`` if the commit is not ours.

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
    return OrphanedBatch(bid, app, number, commit.version, commit.timestamp_ms or 0)


def _abandoned(in_flight: Iterable[OrphanedBatch]) -> Mapping[str, int]:
    before = time.time() * 1000 - ABANDONED_AFTER_MS
    by_number = sorted(in_flight, key=lambda batch: batch.number)
    return {batch.app: batch.number for batch in by_number if batch.written_ms < before}


def lost_ranges(spark: SparkSession, entry: LedgerEntry) -> DataFrame:
    """Return a dead letter without a sequence for each range that was gone from the stream before it was read."""
    schema = struct_type(f"{STREAM_DDL}, {DEAD_LETTER_DDL}")
    rows = [
        (shard.stream, shard.id, None, None, None, None, None, _lost(part, entry, shard), None, False, None)
        for shard, parts in sorted(entry.lost.items())
        for part in parts
    ]
    return spark.createDataFrame(rows, schema)


def _lost(part: Range, entry: LedgerEntry, shard: Shard) -> str:
    claimed = entry.claims.get(shard)
    if claimed is not None:
        # The number is an upper bound if Redis had forgotten its count, and a lower bound for skipped entries.
        is_most = entry.hint is not None and entry.hint.get("read", 0) is None
        limit = "at most " if is_most else "at least " if shard in entry.skipped else ""
        return (
            f"lost: entries between {part.start} and {part.end} were removed from the stream before they were written "
            f"({limit}{claimed.entries} in all)"
        )
    return (
        f"lost: sequences {part.start} to {part.end - 1} were removed from the stream before they were read; "
        f"the first left is {part.end}"
    )


@dataclass(frozen=True, slots=True)
class Replacements:
    """Ranges that batches replaced, in which dead letters of older batches no longer count.

    Args:
        ranges: per shard, each replaced range with the number of batches in the log that are newer than the replace.
        ages: for each batch, the number of newer batches; a missing batch is older than every replace.
    """

    ranges: Mapping[Shard, list[tuple[Range, int]]]
    ages: Mapping[str, int]

    def of(self, shard: Shard, bid: str, sequences: Sequences) -> list[Range]:
        """Return the ranges in which the dead letters of a batch, which have these sequences, no longer count.

        They are merged into as few ranges as possible, because entries store them. Sequences between two of the batch's
        dead letters do not matter.

        Example:
            >>> orders = Shard("orders")
            >>> replacements = Replacements({orders: [(Range(0, 10), 0)]}, {"second": 0, "first": 1})
            >>> dead_letters = np.array([2, 9, 15])
            >>> replacements.of(orders, "first", dead_letters), replacements.of(orders, "second", dead_letters)
            ([Range(start=2, end=10)], [])
        """
        age = self.ages.get(bid, len(self.ages))
        parts = [part for part, age_of_replace in self.ranges.get(shard, ()) if age_of_replace < age]
        sequences = np.sort(sequences)
        starts = np.searchsorted(sequences, [part.start for part in parts])
        ends = np.searchsorted(sequences, [part.end for part in parts])
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        return [Range(int(sequences[start]), int(sequences[end - 1]) + 1) for start, end in Intervals.of(*pairs)]


def replacements(ledger: Ledger, state: LedgerState) -> Replacements:
    """Return the ranges that surviving batches have replaced, and that ``state.uncounted`` does not reflect yet."""
    ranges: dict[Shard, list[tuple[Range, int]]] = {}
    ages: dict[str, int] = {}
    for commit in in_effect(_not_considered(ledger, state)):
        if commit.entry is None:
            continue
        for shard, parts in ledger.replaced_by(commit).items():
            # A batch may have an empty part of a shard.
            if parts:
                ranges.setdefault(shard, []).extend((part, len(ages)) for part in parts)
        ages[commit.entry.bid] = len(ages)
    return Replacements(ranges, ages)


def _not_considered(ledger: Ledger, state: LedgerState) -> Iterator[Commit]:
    """Yield the newest surviving commits, back to the oldest replace that ``state.uncounted`` does not reflect.

    If a dismissal is among them, also those after the version that it was planned from, which may have replaced it.
    """
    left = state.totals.replaced - state.replaces_considered
    oldest_base: float = math.inf
    for commit in ledger.surviving(state.version) if left > 0 else ():
        yield commit
        if commit.entry is not None:
            left -= commit.entry.write_mode.replaces_dead_letters
            if commit.entry.write_mode.takes_effect_at_base:
                oldest_base = min(oldest_base, commit.entry.base)
        if left <= 0 and commit.version - 1 <= oldest_base:
            return


def _is_of(group: str) -> str:
    """Return a SQL condition for the rows of a group, whose name may have quotes."""
    quoted = group.replace("'", "''")
    return f"_group = '{quoted}'"


def _whole(batches: Iterable[OrphanedBatch]) -> Uncounted:
    return {batch.bid: {} for batch in batches}


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert the string and binary views of delta-rs to the usual types, which Arrow can filter."""
    known = set(DEAD_LETTER_SCHEMA.names)
    return batch.cast(
        pa.schema([DEAD_LETTER_SCHEMA.field(own.name) if own.name in known else own for own in batch.schema])
    )


def _superseded(rows: Iterable[Mapping[str, Any]]) -> set[tuple[object, ...]]:
    """Return the keys of dead letters without a sequence that a dismissal or a newer one of their offset replaces.

    The newer one has the same reason.

    Args:
        rows: those that count otherwise.
    """
    ordered = sorted(rows, key=lambda row: (row["_recorded_at"], row["_batch"]))
    keys = [tuple(row[name] for name in _UNPLACED_KEY) for row in ordered]
    found = {(row["dismisses"], *key[1:]) for row, key in zip(ordered, keys) if row.get("dismisses")}
    newest: dict[object, tuple[object, ...]] = {}
    for row, key in zip(ordered, keys):
        # A lost range has no offset.
        if row["offset"] is not None and key not in found:
            # If a file loses its oldest messages, other damage may be at this offset, most often for another reason.
            found |= {newest.get(key[1:], key)} - {key}
            newest[key[1:]] = key
    return found


def counts(batch: pa.RecordBatch, left_out: NotCounting) -> pa.Array[Any]:
    """Return for each dead letter whether it counts."""
    counts = np.ones(len(batch), np.bool_)
    batches = np.array(batch.column("_batch").to_pylist(), object)
    # A dead letter without a sequence is in no range. pandas would make floats of the column, which are not exact.
    is_placed = batch.column("_sequence").is_valid().to_numpy(zero_copy_only=False)
    sequences = batch.column("_sequence").fill_null(0).to_numpy(zero_copy_only=False)
    shards = pd.Series(list(zip(batch.column("_stream").to_pylist(), batch.column("_shard").to_pylist())))
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
    if left_out.unplaced and not is_placed.all():
        unplaced = np.flatnonzero(~is_placed)
        own = batch.take(unplaced)
        keys = zip(*(own.column(name).to_pylist() for name in _UNPLACED_KEY), strict=True)
        counts[unplaced] &= np.array([key not in left_out.unplaced for key in keys], np.bool_)
    return pa.array(counts)


def _united(*parts: Uncounted) -> Uncounted:
    """Return the union of dead letters that do not count; an empty mapping means the whole batch."""
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
    """Return a SQL condition for the dead letters of a batch that do not count."""
    parts = [in_ranges({shard: part}) for shard, intervals in sorted(ranges.items()) for part in intervals]
    return f"(_batch = '{bid}'" + (f" AND _sequence IS NOT NULL AND ({' OR '.join(parts)}))" if parts else ")")


def _numbers(commits: Iterator[Commit], needed: Mapping[str, int]) -> dict[str, dict[int, str]]:
    """Return the batch ids by app id and number, from the newest commit back to the needed numbers."""
    found: dict[str, dict[int, str]] = {}
    for commit in commits:
        if commit.entry is not None:
            found.setdefault(commit.entry.app, {})[commit.entry.number] = commit.entry.bid
        if all(app in found and min(found[app]) <= number for app, number in needed.items()):
            break
    return found
