"""Reads the messages of a planned batch, and commits them: steps 5 to 7 of :mod:`spark_jobs.batches`.

:func:`spark_jobs.batches.job.write_batch` calls these functions, in one of two ways:

 1. *One pass.* :func:`one_pass_counts` decides whether a batch may be written while it is read, and
    :func:`commit_in_one_pass` does so.
 2. :func:`read_batch` reads the messages and splits them into rows and dead letters. Then :func:`commit_batch` writes
    the dead letters, then the rows, and verifies the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.batches.bad_rows import Cached, FilteredBatch, caching
from spark_jobs.batches.ingestion import Batch, Ingestion, PlanAgain, Step, WrittenBatch
from spark_jobs.batches.target_table import OutdatedError, TargetTable
from spark_jobs.batches.unread_rows import made_by_message, without_messages, without_places
from spark_jobs.dead_letters.table import DEAD_LETTER_SCHEMA, NotCounting, lost_ranges
from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.entries import MODES, LedgerEntry
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import ROW_PLACE, in_places, in_ranges
from spark_jobs.reading.rejection import fail_on_bad_rows
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, STREAM_COLUMNS, read_on_driver, read_splits
from spark_jobs.reading.spark_types import NOT_STORED, has_variant, text
from spark_jobs.writing.delta_table import only_within, read_table, unless_changed
from spark_jobs.writing.failures import (
    ROWS_CHANGED,
    FailedRowError,
    RejectedRowError,
    UnexplainedError,
    UnfinishedReadError,
    explain,
    explain_failed_read,
    explain_read,
)
from spark_jobs.writing.keyed import last_truncate
from stream_consumers.batches import BatchPlan, Range, expected_counts, widths
from stream_consumers.errors import (
    BatchTooLargeError,
    ConstraintViolatedError,
    DataLossError,
    KeyConflictError,
    SchemaMismatchError,
    StreamAssetsError,
)
from stream_consumers.messages import Shard

_log = logging.getLogger(__name__)
_IS_NOT_STORED = f"_error = {text(NOT_STORED)}"
_IS_DEAD = "_error IS NOT NULL"


@dataclass(frozen=True, slots=True)
class NotClean:
    """The result of one pass if a message or a row is bad, so that nothing was committed.

    Args:
        is_unexplained: whether the reason is unknown, so that a message may have crashed a Python worker.
    """

    is_unexplained: bool


def one_pass_counts(batch: Batch, ingestion: Ingestion) -> Mapping[Shard, int] | None:
    """Return the messages per shard, if the batch can be written while it is read; ``None`` if it must be read first.

    One pass needs more messages than the driver reads, splits that know the result of a clean read, an append, and a
    transform for which Spark must read every split to its end. It is not tried after a batch that was not clean,
    because most faults repeat.
    """
    is_append = batch.kind == "batch" and MODES[batch.fields.get("mode", "append")].fits_one_pass
    needs_first_read = batch.maybe_written or batch.fields.get("claims") or batch.fields.get("lost")
    reads_all = ingestion.transform is None or ingestion.is_row_wise
    is_large = batch.plan.records > ingestion.driver_records
    if not is_large or not is_append or needs_first_read or not reads_all or not batch.plan.splits:
        return None
    counts = expected_counts(batch.plan.splits)
    if counts is None:
        return None
    planned = sum(widths(batch.plan.ranges).values())
    return counts if _was_clean(batch.state.newest, is_dense=sum(counts.values()) == planned) else None


def _was_clean(entry: LedgerEntry | None, *, is_dense: bool) -> bool:
    """Return whether a batch had no dead letter, and if sequences grow by one, a message for each sequence."""
    if entry is None or entry.kind != "batch":
        return True
    return not entry.dead and not (is_dense and entry.messages < sum(widths(entry.ranges).values()))


def commit_in_one_pass(
    target: TargetTable, batch: Batch, counts: Mapping[Shard, int]
) -> WrittenBatch | NotClean | PlanAgain:
    """Write the batch while it is read. Executors check that the read matches the plan, or nothing is committed.

    Args:
        target: the table.
        batch: the plan.
        counts: the messages of each shard, if the batch is clean.

    Raises:
        OutdatedError: the stream lost messages of the batch; nothing was written.
        StreamAssetsError: see :func:`commit_batch`.
    """
    source = target.columns.source_of_batch
    frame = read_splits(target.spark, batch.plan.splits, source, identities=batch.identities)
    # An error here does not depend on a message, so it would happen with any way of writing.
    rows = target.columns.rows_of_clean(frame, fail_on_bad_rows)
    entry = target.entry(batch, messages=sum(counts.values()))
    try:
        return _commit_rows(target, batch, entry, rows, counts, is_filtered=False)
    except BatchTooLargeError as error:
        raise OutdatedError(error) from error
    except StreamAssetsError as error:
        of_rows = (FailedRowError, ConstraintViolatedError) if target.filter.makes_dead_letters else ()
        if not isinstance(error, (UnfinishedReadError, RejectedRowError, UnexplainedError, *of_rows)):
            raise
        # If the messages can be read, the same error is raised again there.
        _log.info("batch %d of %s is read and counted first: %s", batch.number, target.ledger.app, error)
        return NotClean(isinstance(error, UnexplainedError))


@dataclass(frozen=True, slots=True)
class _Read:
    """Messages that were read before they are written.

    Args:
        frame: with the columns of :func:`spark_jobs.reading.source.read_splits`.
        messages: how many could be decoded, per shard.
        dead: how many dead letters there are.
    """

    frame: DataFrame
    messages: Mapping[Shard, int]
    dead: int


def read_batch(target: TargetTable, batch: Batch, cached: Cached, *, is_isolated: bool = False) -> FilteredBatch:
    """Read the messages, count them, and split them into rows and dead letters.

    They are read again if the first read shows one of four things:

    * A message crashes the decoder, so that executors have to decode in isolation.
    * There are undeclared fields, which become columns.
    * The transform rejects rows for the first time, or Spark refuses JSON, and the payloads were not kept.

    Args:
        target: the table.
        batch: the plan.
        cached: keeps what is read until the batch is written.
        is_isolated: whether executors decode in child processes.

    Raises:
        OutdatedError: the stream lost messages of the batch.
        TransformError: the transform raised, or fails for some messages.
        StreamAssetsError: they cannot be read.
    """
    keeps_payloads = target.filter.needs_payloads
    while True:
        try:
            found = _read(target, batch, cached, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        except UnexplainedError as error:
            if is_isolated:
                raise
            _log.warning("batch %d of %s is decoded in isolation: %s", batch.number, target.ledger.app, error)
            is_isolated = True
            continue
        if found.dead and not keeps_payloads and not found.frame.where(_IS_NOT_STORED).isEmpty():
            keeps_payloads = True
            continue
        if found.dead and target.columns.learn_fields(found.frame):
            keeps_payloads = target.filter.needs_payloads
            continue
        filtered = target.filter.apply(
            found.frame,
            cached,
            has_payloads=keeps_payloads,
            floor=batch.state.floor,
            is_first_read=not MODES[batch.fields.get("mode", "append")].replaces_dead_letters,
        )
        if filtered is None:
            keeps_payloads = True
            continue
        if filtered.frame is not found.frame:
            found = _counted(target, filtered.frame)
        return FilteredBatch(filtered.frame, filtered.rows, found.messages, found.dead)


def _read(target: TargetTable, batch: Batch, cached: Cached, *, keeps_payloads: bool, is_isolated: bool) -> _Read:
    source, splits, what = target.columns.source_of_batch, batch.plan.splits, str(target.url)
    if batch.plan.records <= target.ingestion.driver_records and not (batch.maybe_written or is_isolated):
        try:
            read = read_on_driver(splits, source, keeps_payloads=keeps_payloads)
        except (DataLossError, BatchTooLargeError) as error:
            raise OutdatedError(error) from error
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - a decoder of the user's may raise anything
            raise explain_read(f"{type(error).__name__}: {error}", what=what) from None
        if read is not None:
            frame = read.frame(target.spark, source)
            if has_variant(source.columns) and not frame.where(_IS_NOT_STORED).isEmpty():
                return _counted(target, frame)
            return _Read(frame, read.messages, read.dead)
    try:
        frame = read_splits(target.spark, splits, source, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        frame = cached.keep(_without_written(target, frame, batch.maybe_written))
    except Exception as error:  # noqa: BLE001 - Spark raises what comes, once it has ended
        raise explain_failed_read(error, what=what) from None
    return _counted(target, frame)


def _without_written(target: TargetTable, frame: DataFrame, maybe_written: Mapping[Shard, Range]) -> DataFrame:
    """Leave out messages within ``maybe_written`` that have rows in the table, or dead letters that count."""
    if not maybe_written:
        return frame
    condition = in_ranges(maybe_written)
    found = read_table(target.spark, target.ledger.log).where(condition).select(*ROW_PLACE)
    dead_letters = target.dead_letters.counted(target.spark, target.ledger)
    if dead_letters is not None:
        found = found.unionByName(dead_letters.where(condition).select(*ROW_PLACE))
    return frame.join(found, [*ROW_PLACE], "left_anti").select(*map(quoted, frame.columns))


def _counted(target: TargetTable, frame: DataFrame) -> _Read:
    """Count the messages and dead letters, which reads the source into the cache."""
    is_dead = f.col("_error").isNotNull().cast("bigint")
    counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
    try:
        found = counts.collect()
    except Exception as error:  # noqa: BLE001 - Spark raises what comes
        failure = explain_failed_read(error, what=str(target.url))
        if isinstance(failure, (DataLossError, BatchTooLargeError)):
            raise OutdatedError(failure) from None
        raise failure from None
    messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
    return _Read(frame, messages, sum(int(row["dead"]) for row in found))


def commit_batch(target: TargetTable, batch: Batch, filtered: FilteredBatch) -> WrittenBatch | PlanAgain:
    """Steps 5 to 7: write the dead letters, then the rows, or return why the batch has to be planned again.

    The entry of the batch is created here, because only now is the content of the batch known.

    Args:
        target: the table.
        batch: the plan.
        filtered: its rows and dead letters.

    Raises:
        DataLossError: rows or dead letters would be replaced whose messages the stream no longer holds.
        SchemaMismatchError, TransformError, WriteError: nothing of the batch is in the table.
        LedgerUnreadableError: it is unknown whether the batch is in the table. Nothing may be committed to the broker.
    """
    entry = target.entry(batch, messages=sum(filtered.messages.values()), dead=filtered.dead)
    rows, frame, kept = filtered.rows, filtered.frame, None
    if entry.write_mode.keeps_last_copies:
        last = _last_copies(target, rows, frame, entry, version=batch.state.version)
        if last is not None:
            rows, frame = rows.unionByName(last, allowMissingColumns=True), without_places(frame, last)
            entry = replace(entry, dead=frame.where(_IS_DEAD).count())
    if entry.write_mode.replaces_dead_letters and not entry.places:
        # Not for a redrive, whose messages are the dead letters themselves.
        kept, count = _last_dead_letters(target, frame, entry, batch.state)
        if kept is not None:
            frame = without_places(frame, kept)
            entry = replace(entry, dead=frame.where(_IS_DEAD).count() + count)
    if entry.dead or entry.lost:
        letters = frame.where(_IS_DEAD).select(*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)
        letters = letters.unionByName(lost_ranges(target.spark, entry)) if entry.lost else letters
        if not target.dead_letters.write(letters, kept, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return PlanAgain.DEAD_LETTERS_TAKEN
    written = commit_recorded(target, batch, entry, rows, filtered.messages)
    if isinstance(written, WrittenBatch) and entry.kind == "replay" and entry.ranges and entry.write_mode.merges:
        return replace(written, stale=_count_stale(target, written, rows))
    return written


def _count_stale(target: TargetTable, written: WrittenBatch, rows: DataFrame) -> int:
    """Count the rows of the range of a replay that it did not merge, because their messages make no row any more."""
    keys = target.ingestion.keys
    assert keys is not None  # the batch was merged
    table = read_table(target.spark, target.ledger.log, version=written.commit.version)
    within = table.where(in_ranges(written.entry.ranges)).where(keys.shown_where or "TRUE")
    return within.join(rows.select(*ROW_PLACE), [*ROW_PLACE], "left_anti").count()


def commit_recorded(
    target: TargetTable, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
) -> WrittenBatch | PlanAgain:
    """Write the corrections or dismissals of the batch, if it has any, then the rows; see :func:`commit_batch`."""
    if (own := batch.dead_letters) is not None:
        schema = from_arrow_schema(pa.schema([DEAD_LETTER_SCHEMA.field(name) for name in own.column_names]))
        frame = target.spark.createDataFrame(own, schema)
        if not target.dead_letters.append(frame, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return PlanAgain.DEAD_LETTERS_TAKEN
    target.observer(Step.DEAD_LETTERS_WRITTEN, batch)
    return _commit_rows(target, batch, entry, rows, messages, is_filtered=target.filter.makes_dead_letters)


def _commit_rows(
    target: TargetTable,
    batch: Batch,
    entry: LedgerEntry,
    rows: DataFrame,
    messages: Mapping[Shard, int],
    *,
    is_filtered: bool,
) -> WrittenBatch | PlanAgain:
    """Steps 6 and 7: write the rows in one commit, and verify it in the log.

    Args:
        target: the table.
        batch: the plan.
        entry: its ledger entry.
        rows: its rows.
        messages: the messages of each shard.
        is_filtered: whether the rows that break a constraint were left out.
    """
    target.observer(Step.WRITING, batch)
    truncate = _last_truncate(target, batch, entry, rows)
    if target.ingestion.transform is not None:
        rows = only_within(rows, entry.extents)
    checked = rows if is_filtered else target.filter.failing_on_changes(rows)
    if entry.write_mode.overwrites:
        where, version = in_places(entry.affected), batch.state.version
        checked = unless_changed(checked, target.ledger.log, version=version, where=where, fails=ROWS_CHANGED)
    failure = target.writer.try_write(checked, entry, truncate=truncate)
    target.observer(Step.ROWS_WRITTEN, batch)
    try:
        commit = target.writer.verified(entry, failure, spark=target.spark, ledger=target.ledger)
    except ConstraintViolatedError as error:
        raise target.filter.located(error, rows) from error
    except SchemaMismatchError:
        if target.columns.is_current(target.ledger.read()):
            raise
        return PlanAgain.COLUMNS_CHANGED
    if commit is None:
        return PlanAgain.LOST_RACE
    target.observer(Step.VERIFIED, batch)
    return WrittenBatch(batch, entry, commit, messages)


def _last_truncate(target: TargetTable, batch: Batch, entry: LedgerEntry, rows: DataFrame) -> int | None:
    """Return the sequence of the last truncate of a batch; ``None`` without one.

    Raises:
        KeyConflictError: there is one, and the group reads several shards, which have no order.
    """
    keys = target.ingestion.keys
    if keys is None or not entry.write_mode.merges:
        return None
    try:
        last = last_truncate(rows, keys)
    except Exception as error:  # noqa: BLE001 - Spark raises errors of any type
        raise explain(error, table=target.ledger.log.path) from None
    shards = sorted({*batch.state.shards, *entry.extents})
    if last is not None and len(shards) > 1:
        raise KeyConflictError(
            f"message {last} of {target.url} truncates {target.ingestion.table}, and nothing says which changes of its "
            f"{len(shards)} shards are older; the table is unchanged",
            remedy="Write the changes of a table to one shard. Or leave truncates out of the stream, with "
            "skipped.operations=t in Debezium, and delete the rows; or let the transform drop them.",
            shards=len(shards),
        )
    return last


def _last_copies(
    target: TargetTable, rows: DataFrame, frame: DataFrame, entry: LedgerEntry, *, version: int
) -> DataFrame | None:
    """Return the rows of the range whose messages cannot be read again: they are the last copies.

    Args:
        target: the table.
        rows: the rows of the batch.
        frame: its messages.
        entry: its ledger entry.
        version: the version of the table from which it was planned.

    Raises:
        DataLossError: there are some, and ``on_data_loss`` is not ``record``.
    """
    log = target.ledger.log
    table = read_table(target.spark, log, version=version)
    last, count = _last_of_range(target, table, frame, entry, "TRUE", what="rows")
    if not count:
        return None
    snapshot = log.snapshot()
    computed = (snapshot.computed_columns if snapshot else frozenset()) - set(rows.columns)
    return last.select(*map(quoted, table.columns)).drop(*computed)


def _last_dead_letters(
    target: TargetTable, frame: DataFrame, entry: LedgerEntry, state: LedgerState
) -> tuple[DataFrame | None, int]:
    """Return the dead letters of the range that are last copies, and their count; the batch writes them again."""
    table, ledger, where = target.dead_letters, target.ledger, in_places(entry.affected)
    # Most ranges have none, which delta-rs finds without a Spark job.
    if not any(len(part) for part in table.scan(ledger.group, NotCounting(), ROW_PLACE, where=where)):
        return None, 0
    dead_letters = table.counted(target.spark, ledger, state)
    assert dead_letters is not None
    is_message = made_by_message(dead_letters)
    last, count = _last_of_range(target, dead_letters, frame, entry, is_message, what="dead letters")
    return (last if count else None), count


def _last_of_range(
    target: TargetTable, table: DataFrame, frame: DataFrame, entry: LedgerEntry, is_message: str, *, what: str
) -> tuple[DataFrame, int]:
    """Return what ``table`` has in the range of a batch without a message in ``frame``, and how many.

    Args:
        target: the table.
        table: its rows or dead letters.
        frame: the messages of the batch.
        entry: its ledger entry.
        is_message: a SQL condition for those rows of ``table`` that a whole message made, not damaged bytes.
        what: what ``table`` has.

    Raises:
        DataLossError: there are some, and ``on_data_loss`` is not ``record``.
    """
    ingestion = target.ingestion
    last = without_messages(table.where(in_places(entry.affected)), frame, is_message)
    found = last.agg(f.count("*").alias("rows"), f.min("_sequence").alias("first"), f.max("_sequence").alias("last"))
    counts = found.collect()[0]
    if not counts["rows"]:
        return last, 0
    error = DataLossError(
        f"{counts['rows']} {what} of {ingestion.table} between sequences {counts['first']} and "
        f"{counts['last']} would be replaced, but {target.url} no longer holds their messages",
        remedy="They are the last copy, so nothing was replaced. Replay only what the stream holds, or set "
        "on_data_loss='record' to keep them as they are and replace the others.",
    )
    ingestion.refuse_or_record(error)
    _log.warning("%d %s whose messages are gone from %s stay as they are", counts["rows"], what, target.url)
    return last, int(counts["rows"])


def refused_messages(target: TargetTable, plan: BatchPlan) -> Mapping[tuple[Shard, int], str]:
    """Return the messages that would become dead letters although they can be decoded, and why; nothing is written.

    They are decoded in isolation, because one of these dead letters may have crashed a process before.

    Args:
        target: the table.
        plan: a plan of dead letters that can be decoded, without the undeclared fields that they may have.

    Raises:
        TransformError: the transform raised, or fails for some of them.
    """
    with caching() as cached:
        filtered = read_batch(target, Batch("replay", target.ledger.read(), plan), cached, is_isolated=True)
        if not filtered.dead:
            return {}
        bad = filtered.frame.where(f.col("_error").isNotNull()).select(*ROW_PLACE, "_error").collect()
        return {(Shard(row["_stream"], row["_shard"]), row["_sequence"]): row["_error"] for row in bad}
