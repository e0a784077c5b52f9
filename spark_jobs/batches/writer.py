"""The stages of a batch: read, split into rows and dead letters, write, verify; and commits without rows.

Each stage is a function over frozen values, but for what :class:`Target` learns of the columns and the constraints of
the table; :mod:`spark_jobs.batches.job` says in which order they follow each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.batches.bad_rows import BadRowFilter, Cached, FilteredBatch, caching
from spark_jobs.batches.columns import RowColumns
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step, check_other_group, without_positions
from spark_jobs.decoding.ddl import quoted
from spark_jobs.decoding.isolation import prepare
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import MODES, LedgerEntry
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import PLACE, in_places, in_ranges
from spark_jobs.reading.rejection import fail_write
from spark_jobs.reading.small import read_small
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, STREAM_COLUMNS, read_splits
from spark_jobs.session import check_session
from spark_jobs.writing.dead_letters import LETTER_SCHEMA, DeadLetterTable, NotCounting, lost_ranges
from spark_jobs.writing.failures import (
    FailedRowError,
    RejectedRowError,
    UnexplainedError,
    UnfinishedReadError,
    explain_failed_read,
    explain_read,
)
from spark_jobs.writing.layout import create_table
from spark_jobs.writing.sink import DeltaSink, check_landed, only_within
from spark_jobs.writing.storage import check_log_store, check_unseen, read_table
from stream_consumers.batches import BatchPlan, LastMessage, Range, clean_counts, widths
from stream_consumers.errors import (
    BatchTooLargeError,
    ConstraintViolatedError,
    DataLossError,
    InvalidOptionError,
    SchemaMismatchError,
    StreamAssetsError,
    WriteError,
)
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

MAX_RACES = 20
_log = logging.getLogger(__name__)


class OutdatedError(Exception):
    """What was known of the stream, or of the table, when the batch was planned is not true any more: plan again.

    Args:
        reason: the error, should it be so at each try.
    """

    def __init__(self, reason: StreamAssetsError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Written:
    """A batch that is in the table.

    Args:
        batch: as it was written: after another try it has another batch id than it was planned with.
        entry: what its commit says.
        commit: the commit.
        messages: messages decoded, per shard.
    """

    batch: Batch
    entry: LedgerEntry
    commit: Commit
    messages: Mapping[Shard, int]


@dataclass(frozen=True, slots=True)
class NotClean:
    """A batch was not written while it was read, because something is wrong with a message, or with a row.

    Args:
        is_unexplained: the reason is unknown: a message may have crashed a Python worker.
    """

    is_unexplained: bool


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


@dataclass(frozen=True, slots=True)
class Target:
    """Where the batches of one transaction sequence go.

    Args:
        spark: a session that can write Delta tables.
        ingestion: what goes where.
        url: of the source, for messages.
        observer: called at each step.
        ledger: of the table.
        columns: of the rows.
        filter: finds bad rows.
    """

    spark: SparkSession
    ingestion: Ingestion
    url: StreamUrl
    observer: Observer
    ledger: Ledger
    columns: RowColumns
    filter: BadRowFilter

    @classmethod
    def of(cls, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> Target:
        """The target of an ingestion.

        Raises:
            SparkSessionError: the session cannot write Delta tables.
            UnsafeStorageError: another driver could overwrite what this one writes.
        """
        _check_session(spark, ingestion)
        if ingestion.driver_records:
            prepare()
        ledger = ingestion.ledger()
        columns = RowColumns(spark, ingestion, ledger, url=url)
        return cls(
            spark, ingestion, url, observer, ledger, columns, BadRowFilter(spark, ingestion, ledger.log, columns)
        )

    @property
    def dead_letters(self) -> DeadLetterTable:
        """The table beside it."""
        return self.ingestion.dead_letters()

    @property
    def sink(self) -> DeltaSink:
        """Writes its rows."""
        ingestion = self.ingestion
        return DeltaSink(ingestion.table, ingestion.layout.all_properties(), ingestion.errors.schema_changes)

    def entry(self, batch: Batch, **fields: Any) -> LedgerEntry:
        """The batch metadata of a batch, with fields that are known after the read."""
        known = {"bid": batch.bid, "transform": self.ingestion.transform_name, **batch.fields, **fields}
        identities = {**batch.state.identities, **batch.identities}
        return self.ledger.entry(batch.kind, batch.state, identities=identities, **known)


def initialize(
    target: Target,
    state: LedgerState,
    origin: Mapping[Shard, int],
    *,
    identities: Mapping[str, str],
    last_messages: Mapping[Shard, LastMessage] | None = None,
    hint: Mapping[str, object] | None = None,
) -> None:
    """The first commit of a group: empty, with the resolved origin, the last messages before it and a hint of it.

    Raises:
        OutdatedError: the table was made by another run meanwhile, and the group is not in it.
    """
    ingestion, log = target.ingestion, target.ledger.log
    target.ledger.check_first(origin)
    target.columns.check(state)
    empty = target.columns.no_rows()
    if state.version < 0:
        check_unseen(target.spark, log)
        if not ingestion.layout.is_plain:
            create_table(target.spark, log, empty.schema, ingestion.layout)
            state = target.ledger.read()
    check_unwritten(target, state, identities)
    fields = {"origin": origin, "switch": ingestion.sharing_mode, "last_messages": last_messages or {}, "hint": hint}
    entry = target.entry(Batch("init", state, identities=identities, fields=fields))
    failure = target.sink.try_write(empty, entry, creates=state.version < 0)
    # A lost race to create the table shows in many ways; any entry of the group will do.
    found = target.ledger.read().newest
    check_landed(found, failure, spark=target.spark, log=log, bid=entry.bid)
    if found is None:
        raise OutdatedError(lost_races(target.ledger, ingestion))
    target.observer(Step.INITIALIZED, None)


def claim_streams(target: Target, origin: Mapping[Shard, int], *, identities: Mapping[str, str]) -> None:
    """The first commit of a group with more streams: empty, with their origins, so that other groups see the claim.

    Args:
        target: the table.
        origin: of the shards of these streams.
        identities: of the streams that are read.

    Raises:
        InvalidOptionError, LedgerTruncatedError: see :func:`check_unwritten`.
        WriteError: Spark failed, or others were always faster.
    """

    def fields(state: LedgerState) -> Mapping[str, Any] | None:
        begun = without_positions(state, (shard.stream for shard in origin))
        check_unwritten(target, state, begun)
        starts = {shard: start for shard, start in origin.items() if shard.stream in begun}
        return {"origin": starts, "identities": {**state.identities, **identities}} if begun else None

    commit_empty(target.spark, target.ingestion, "init", fields)


def check_unwritten(target: Target, state: LedgerState, streams: Iterable[str]) -> None:
    """Refuse to begin with a stream whose rows the table has already, by whatever writer.

    A copy of a table (CREATE TABLE … AS SELECT, a clone, INSERT INTO) has the rows; the positions stayed in the log
    of the table that it was made from, and to begin anew would write each message a second time.

    Args:
        target: the table.
        state: the ledger; streams in which it has positions are fine.
        streams: that are to be written.

    Raises:
        InvalidOptionError: another group writes them, or the rows are there and no positions are.
        LedgerTruncatedError: the log was cleaned, so that whose rows they are is unknown.
    """
    begun, ingestion = without_positions(state, streams), target.ingestion
    if not begun:
        return
    check_other_group(ingestion, state, begun, url=target.url)
    snapshot = target.ledger.log.snapshot()
    if snapshot is None or not snapshot.may_hold(begun):
        return
    table = read_table(target.spark, target.ledger.log)
    if "_stream" in table.columns and not table.where(f.col("_stream").isin(*begun)).isEmpty():
        raise InvalidOptionError(
            f"{ingestion.table} holds rows of {', '.join(sorted(begun))}, and its log does not tell how "
            f"far group {ingestion.group!r} has read: a copy of a table has the rows, but no positions",
            remedy=f"To continue behind these rows, run: stream-assets adopt --source {target.url} "
            f"--table {ingestion.table} --group {ingestion.group}. If they are of something else, "
            "ingest into another table.",
        )


def one_pass_counts(batch: Batch, ingestion: Ingestion) -> Mapping[Shard, int] | None:
    """The messages of each shard, if the batch can be written while it is read; ``None`` if it is counted first.

    One pass needs more messages than the driver reads, splits that know what a clean read gives, an append, and rows
    that take a read of every split to its end. It is not tried after a batch that was not clean, because most of what
    is wrong comes again.
    """
    is_plain = batch.kind == "batch" and not MODES[batch.fields.get("mode", "append")].replaces
    has_more = batch.doubtful or batch.fields.get("claims") or batch.fields.get("lost")
    reads_all = ingestion.transform is None or ingestion.is_row_wise
    is_large = batch.plan.records > ingestion.driver_records
    if not is_large or not is_plain or has_more or not reads_all or not batch.plan.splits:
        return None
    counts = clean_counts(batch.plan.splits)
    if counts is None:
        return None
    planned = sum(widths(batch.plan.ranges).values())
    return counts if _was_clean(batch.state.newest, is_dense=sum(counts.values()) == planned) else None


def _was_clean(entry: LedgerEntry | None, *, is_dense: bool) -> bool:
    """Whether a batch held no dead letter, and where sequences grow by one, a message for each of them."""
    if entry is None or entry.kind != "batch":
        return True
    return not entry.dead and not (is_dense and entry.messages < sum(widths(entry.ranges).values()))


def write_in_one_pass(target: Target, batch: Batch, counts: Mapping[Shard, int]) -> Written | NotClean | None:
    """Write the batch while it is read; executors check that it is what was planned, or nothing is committed.

    Args:
        target: the table.
        batch: planned.
        counts: the messages of each shard, if it is clean.

    Returns:
        ``None`` if another run was faster.

    Raises:
        OutdatedError: the stream lost messages of the batch; nothing was written.
        StreamAssetsError: see :func:`write`.
    """
    source = target.columns.source_of_batch
    frame = read_splits(target.spark, batch.plan.splits, source, identities=batch.identities)
    # All of it: what does not depend on a message is wrong with any other way of writing, too.
    rows = target.columns.rows_of_clean(frame, fail_write)
    entry = target.entry(batch, messages=sum(counts.values()))
    try:
        return _write_rows(target, batch, entry, rows, counts)
    except BatchTooLargeError as error:
        raise OutdatedError(error) from error
    except StreamAssetsError as error:
        of_rows = (FailedRowError, ConstraintViolatedError) if target.filter.makes_dead_letters else ()
        if not isinstance(error, (UnfinishedReadError, RejectedRowError, UnexplainedError, *of_rows)):
            raise
        # What is wrong, if the messages can be read, shows once more.
        _log.info("batch %d of %s is read and counted first: %s", batch.number, target.ledger.app, error)
        return NotClean(isinstance(error, UnexplainedError))


def read(target: Target, batch: Batch, cached: Cached, *, is_isolated: bool = False) -> FilteredBatch:
    """Read the messages, count them, and find those that are bad.

    They are read again where the first read shows what had to be known before it: undeclared fields that become
    columns, a transform that begins to reject rows, whose payloads are needed, or a message that crashes the decoder.

    Args:
        target: the table.
        batch: planned.
        cached: keeps what is read until the batch is written.
        is_isolated: executors decode in processes of their own.

    Raises:
        OutdatedError: the stream lost messages of the batch.
        TransformError: the transform raised, or fails for some messages.
        StreamAssetsError: they cannot be read.
    """
    while True:
        keeps_payloads = target.filter.needs_payloads
        try:
            found = _read(target, batch, cached, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        except UnexplainedError as error:
            if is_isolated:
                raise
            _log.warning("batch %d of %s is decoded in isolation: %s", batch.number, target.ledger.app, error)
            is_isolated = True
            continue
        if found.dead and target.columns.learn_fields(found.frame):
            continue
        judged = target.filter.judge(found.frame, cached)
        if target.filter.needs_payloads and not keeps_payloads:
            continue
        if judged.frame is not found.frame:
            found = _counted(target, judged.frame)
        return FilteredBatch(judged.frame, judged.rows, found.messages, found.dead)


def _read(target: Target, batch: Batch, cached: Cached, *, keeps_payloads: bool, is_isolated: bool) -> _Read:
    source, splits, what = target.columns.source_of_batch, batch.plan.splits, str(target.url)
    if batch.plan.records <= target.ingestion.driver_records and not (batch.doubtful or is_isolated):
        try:
            small = read_small(splits, source, keeps_payloads=keeps_payloads)
        except (DataLossError, BatchTooLargeError) as error:
            raise OutdatedError(error) from error
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - a decoder of the user's may raise anything
            raise explain_read(f"{type(error).__name__}: {error}", what=what) from None
        if small is not None:
            return _Read(small.frame(target.spark, source), small.messages, small.dead)
    try:
        frame = read_splits(target.spark, splits, source, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        frame = cached.keep(_without_written(target, frame, batch.doubtful))
    except Exception as error:  # noqa: BLE001 - Spark raises what comes, once it has ended
        raise explain_failed_read(error, what=what) from None
    return _counted(target, frame)


def _without_written(target: Target, frame: DataFrame, doubtful: Mapping[Shard, Range]) -> DataFrame:
    """Without what is in the table, or in the dead letters that count, within ``doubtful``."""
    if not doubtful:
        return frame
    condition = in_ranges(doubtful)
    found = read_table(target.spark, target.ledger.log).where(condition).select(*PLACE)
    dead_letters = target.dead_letters.counted(target.spark, target.ledger)
    if dead_letters is not None:
        found = found.unionByName(dead_letters.where(condition).select(*PLACE))
    return frame.join(found, [*PLACE], "left_anti").select(*map(quoted, frame.columns))


def _counted(target: Target, frame: DataFrame) -> _Read:
    """Read the source into the cache, and count."""
    is_dead = f.col("_error").isNotNull().cast("bigint")
    counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
    try:
        found = counts.collect()
    except Exception as error:  # noqa: BLE001 - Spark raises what comes
        explained = explain_failed_read(error, what=str(target.url))
        if isinstance(explained, (DataLossError, BatchTooLargeError)):
            raise OutdatedError(explained) from None
        raise explained from None
    messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
    return _Read(frame, messages, sum(int(row["dead"]) for row in found))


def refused(target: Target, plan: BatchPlan) -> Mapping[tuple[Shard, int], str]:
    """The messages that would become dead letters although they can be decoded, and why; nothing is written.

    They are decoded in isolation: they are dead letters, and one may have crashed a process before.

    Args:
        target: the table.
        plan: of dead letters; each message can be decoded, without the new fields that it may have.

    Raises:
        TransformError: the transform raised, or fails for some of them.
    """
    with caching() as cached:
        filtered = read(target, Batch("replay", target.ledger.read(), plan), cached, is_isolated=True)
        if not filtered.dead:
            return {}
        bad = filtered.frame.where(f.col("_error").isNotNull()).select(*PLACE, "_error").collect()
        return {(Shard(row["_stream"], row["_shard"]), row["_sequence"]): row["_error"] for row in bad}


def write(target: Target, batch: Batch, filtered: FilteredBatch) -> Written | None:
    """Steps 5 to 7: write the dead letters, then the rows; ``None`` if another run was faster.

    Args:
        target: the table.
        batch: planned.
        filtered: what was read of it.

    Raises:
        DataLossError: rows or dead letters would be replaced whose messages the stream does not hold any more.
        SchemaMismatchError, TransformError, WriteError: nothing of the batch is in the table.
        LedgerUnreadableError: whether it is cannot be found out; nothing may be committed to the broker.
    """
    entry = target.entry(batch, messages=sum(filtered.messages.values()), dead=filtered.dead)
    rows, kept = filtered.rows, None
    if entry.does.replaces:
        rows = _with_last_copies(target, rows, filtered.frame, entry)
    if entry.does.uncounts_letters and not entry.places:
        # A redrive reads the dead letters themselves.
        kept, count = _last_letters(target, filtered.frame, entry)
        entry = replace(entry, dead=entry.dead + count)
    if entry.dead or entry.lost:
        letters = filtered.frame.where(f.col("_error").isNotNull()).select(*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)
        letters = letters.unionByName(lost_ranges(target.spark, entry)) if entry.lost else letters
        if not target.dead_letters.write(letters, kept, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return None
    return write_recorded(target, batch, entry, rows, filtered.messages)


def write_recorded(
    target: Target, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
) -> Written | None:
    """Write what the batch records in the dead-letter table, then the rows; ``None`` if another run was faster."""
    if batch.letters is not None:
        schema = from_arrow_schema(pa.schema([LETTER_SCHEMA.field(name) for name in batch.letters.column_names]))
        frame = target.spark.createDataFrame(batch.letters, schema)
        if not target.dead_letters.append(frame, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return None
    target.observer(Step.DEAD_LETTERS_WRITTEN, batch)
    return _write_rows(target, batch, entry, rows, messages)


def _write_rows(
    target: Target, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
) -> Written | None:
    """Steps 6 and 7: the rows in one commit, and a look whether it landed; ``None`` if another run was faster."""
    target.observer(Step.WRITING, batch)
    if target.ingestion.transform is not None:
        rows = only_within(rows, entry.extents)
    failure = target.sink.try_write(rows, entry)
    target.observer(Step.ROWS_WRITTEN, batch)
    try:
        commit = target.sink.verified(entry, failure, spark=target.spark, ledger=target.ledger)
    except ConstraintViolatedError as error:
        raise target.filter.located(error, rows) from error
    except SchemaMismatchError:
        if target.columns.is_of_now(target.ledger.read()):
            raise
        _log.info("the columns of %s are other ones by now; planning again", target.ingestion.table)
        return None
    if commit is None:
        _log.info("batch %d of %s was written by another run; planning again", entry.number, entry.app)
        return None
    target.observer(Step.VERIFIED, batch)
    return Written(batch, entry, commit, messages)


def _with_last_copies(target: Target, rows: DataFrame, frame: DataFrame, entry: LedgerEntry) -> DataFrame:
    """Together with the rows of the range whose messages cannot be read again: they are the last copies.

    Raises:
        DataLossError: there are some, and it was not said that they are to be kept.
    """
    log = target.ledger.log
    table = read_table(target.spark, log)
    last, count = _unread(target, table, frame, entry, what="rows")
    if not count:
        return rows
    snapshot = log.snapshot()
    computed = (snapshot.computed_columns if snapshot else frozenset()) - set(rows.columns)
    return rows.unionByName(last.select(*map(quoted, table.columns)).drop(*computed), allowMissingColumns=True)


def _last_letters(target: Target, frame: DataFrame, entry: LedgerEntry) -> tuple[DataFrame | None, int]:
    """Likewise the dead letters that count, and how many; the batch that replaces their range writes them again."""
    table, ledger, where = target.dead_letters, target.ledger, in_places(entry.affected)
    # Most ranges have none, which is known without a job of Spark.
    if not any(len(part) for part in table.scan(ledger.group, NotCounting(), PLACE, where=where)):
        return None, 0
    letters = table.counted(target.spark, ledger)
    assert letters is not None
    last, count = _unread(target, letters, frame, entry, what="dead letters")
    return (last if count else None), count


def _unread(
    target: Target, held: DataFrame, frame: DataFrame, entry: LedgerEntry, *, what: str
) -> tuple[DataFrame, int]:
    """Those in the range of a batch whose messages are not in ``frame``, which was read of it, and how many.

    Raises:
        DataLossError: there are some, and it was not said that they are to be kept.
    """
    ingestion = target.ingestion
    last = held.where(in_places(entry.affected)).join(frame.select(*PLACE), [*PLACE], "left_anti")
    found = last.agg(f.count("*").alias("rows"), f.min("_sequence").alias("first"), f.max("_sequence").alias("last"))
    counts = found.collect()[0]
    if not counts["rows"]:
        return last, 0
    error = DataLossError(
        f"{counts['rows']} {what} of {ingestion.table} between sequences {counts['first']} and "
        f"{counts['last']} would be replaced, but {target.url} does not hold their messages any more",
        remedy="They are the last copy, so they are not touched. Replay only what the stream holds, or set "
        "on_data_loss='record': then they stay as they are, and the others are replaced.",
    )
    ingestion.refuse_or_record(error)
    _log.warning("%d %s whose messages are gone from %s stay as they are", counts["rows"], what, target.url)
    return last, int(counts["rows"])


def lost_races(ledger: Ledger, ingestion: Ingestion) -> WriteError:
    """The error of a run that was never the first to write."""
    return WriteError(
        f"{ledger.app} lost {MAX_RACES} races for a commit to {ingestion.table} in a row",
        remedy="Other runs of the same group are faster; this one stops. Limit the group to one run at a time.",
    )


def _check_session(spark: SparkSession, ingestion: Ingestion) -> None:
    check_session(spark)
    check_log_store(spark, ingestion.table, single_writer=ingestion.single_writer)


def commit_empty(
    spark: SparkSession,
    ingestion: Ingestion,
    kind: str,
    fields: Callable[[LedgerState], Mapping[str, Any] | None],
    *,
    read: Callable[[], LedgerState] | None = None,
) -> None:
    """Take the next number of a transaction sequence with a commit without rows.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table, and the member or the shard whose sequence it is.
        kind: of the entry.
        fields: more fields of :class:`spark_jobs.ledger.entries.LedgerEntry`, for the ledger as it is at each attempt;
            ``None`` if there is nothing to commit any more.
        read: gives the state of the ledger where its log was cleaned.

    Raises:
        WriteError: Spark failed, or others were always faster.
    """
    _check_session(spark, ingestion)
    ledger, sink = ingestion.ledger(), DeltaSink(ingestion.table)
    rows = no_rows(spark, ledger)
    for _ in range(MAX_RACES):
        state = (read or ledger.read)()
        more = fields(state)
        if more is None:
            return
        if sink.commit(rows, ledger.entry(kind, state, **more), ledger=ledger) is not None:
            return
    raise lost_races(ledger, ingestion)


def no_rows(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """No rows, with the columns that a commit to the table needs."""
    snapshot = ledger.log.snapshot()
    # Delta takes no rows that have a column whose identities it makes, not even none.
    computed = snapshot.computed_columns if snapshot else frozenset[str]()
    return read_table(spark, ledger.log).limit(0).drop(*computed)
