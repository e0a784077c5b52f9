"""Compares a keyed table with its stream: each row must be made by the newest change of its key.

Spark reads the covered messages as ingestion does, reduces them to the newest change of each key, and joins these with
the rows. So memory does not grow with the stream. Where the stream no longer holds messages, or the group did not have
to read them, rows of them are only counted. The stream itself is checked first, as :mod:`spark_jobs.verify` does.

Each message that is read is decoded, or is a dead letter that counts, or was redriven with a corrected payload, which
is decoded in its place. Any other message is accounted for only by a row.

A table of SCD type 2 must have a row of each change, and each row must be valid until the next one of its key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.bad_rows import Cached, caching
from spark_jobs.batches.ingestion import Ingestion, ignore_steps
from spark_jobs.batches.job import read_all
from spark_jobs.batches.source_checks import check_keys, losses_of_stream
from spark_jobs.batches.target_table import TargetTable
from spark_jobs.dead_letters.corrections import StoredSplit, corrected_messages
from spark_jobs.decoding.ddl import quoted
from spark_jobs.decoding.decoders import Raw
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import ROW_PLACE, ROW_TIME, TIME, extents_of, in_places
from spark_jobs.reading.source import SourceColumns, read_splits
from spark_jobs.verify import places_read
from spark_jobs.writing.delta_table import read_table
from spark_jobs.writing.failures import COMPARING, UnexplainedError, translating_spark_errors
from spark_jobs.writing.key_history import start_column, with_extents
from spark_jobs.writing.keyed import (
    DELETED,
    EXTENT,
    FOUND,
    SEQUENCE_BY,
    Keys,
    after_truncate,
    last_truncate,
    newest_changes,
)
from stream_consumers.batches import BatchSource, Extent, Range
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError, UnsupportedError
from stream_consumers.messages import Shard

_log = logging.getLogger(__name__)
MAX_TRIES = 3
"""How often a table is compared that others change meanwhile, and that seems to be wrong."""
MAX_EXAMPLES = 5
"""How many places of each fault are in a verdict."""
_KEY = "_key_{}"
"""The key columns of what is compared, so that the user's names are not beside those of this module."""
_IS_VALID, _IS_UNDECODED = "_is_valid", "_is_undecoded"
FAULTS = ("missing", "stale", "undeleted", "unknown", "doubled", "other", "undecoded")
"""The counts of a verdict that must be 0."""
UNCOMPARED = ("unread", "uncompared")
"""The counts of a verdict of rows that cannot be compared."""
COUNTS = ("messages", "keys", "rows", *FAULTS, *UNCOMPARED)
"""All counts of a verdict."""


@dataclass(frozen=True, slots=True)
class KeyedVerdict:
    """The result of a comparison.

    Args:
        messages: the messages that the group has read, that the stream holds, and that can be decoded.
        keys: the keys that these messages change.
        rows: the rows of the table, without those that only mark a deleted key.
        missing: keys without a row, although their newest change does not delete them; in a table of SCD type 2,
            changes without a row.
        stale: rows of an older change than the newest one of their key; in a table of SCD type 2, rows that are not
            valid from their change to the next one of their key.
        undeleted: rows of keys whose newest change deletes them; in a table of SCD type 2, rows of changes that delete
            which do not say so.
        unknown: rows of no message of the stream, within the messages that it holds.
        doubled: rows beyond the first one of their key; in a table of SCD type 2, beyond the first one of their change.
        other: rows and dead letters whose message in the stream has another timestamp.
        undecoded: messages that cannot be decoded here, and that have neither a row nor a dead letter that counts.
        unread: rows of messages that the stream no longer holds or the group skipped, which cannot be compared.
        uncompared: rows of messages that cannot be decoded here, and of whose key no newer change can be. Another
            decoder, or a session with less memory, may not decode a message that the run has decoded.
        examples: for each fault, the places of some messages or rows.
        lost: messages that the stream no longer holds and the group has not read, per shard.
        unreadable_tail: why the bytes after the last message of the stream cannot be read, which may contain messages;
            ``None`` if there are none.
    """

    messages: int
    keys: int
    rows: int
    missing: int
    stale: int
    undeleted: int
    unknown: int
    doubled: int
    other: int
    undecoded: int
    unread: int
    uncompared: int
    examples: Mapping[str, Sequence[tuple[Shard, int]]] = field(default_factory=dict)
    lost: Mapping[Shard, Range] = field(default_factory=dict)
    unreadable_tail: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether the table is what the changes make, and no unread message is lost or unreadable."""
        is_complete = not self.lost and self.unreadable_tail is None
        return is_complete and not any(getattr(self, name) for name in FAULTS)


def verify_keyed(spark: SparkSession, source: BatchSource, ingestion: Ingestion) -> KeyedVerdict:
    """Compare a keyed table with the covered messages of its stream.

    Args:
        spark: a session that can read the table and the stream.
        source: the stream.
        ingestion: the group, the table, and the decoder, transform and keys that make its rows.

    Raises:
        StreamNotFoundError: the group has written nothing into the table.
        UnsupportedError: the ingestion has no keys.
        InvalidOptionError: the table has other keys, or messages still have to be merged again.
        SourceRecreatedError, SourceTruncatedError, …: see
            :func:`spark_jobs.batches.source_checks.losses_of_stream`.
        StreamAssetsError: the stream cannot be read, or Spark failed.
    """
    if ingestion.keys is None:
        raise UnsupportedError("a comparison by key needs the keys", remedy="Pass the keys of the table.")
    target = TargetTable.of(spark, ingestion, url=source.url, observer=ignore_steps)
    source = ingestion.in_epochs(source, target.ledger)
    for _ in range(MAX_TRIES):
        verdict, version = _verdict_of(target, source)
        # A redrive or a replay may have landed between the reads of rows and of dead letters.
        if verdict.is_right or target.ledger.read().version == version:
            break
    return verdict


def _verdict_of(target: TargetTable, source: BatchSource) -> tuple[KeyedVerdict, int]:
    """Return the comparison of the newest version of the table, and that version."""
    ingestion, state = target.ingestion, target.ledger.read()
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}",
            remedy="Check the source, the table and the group, or ingest first.",
        )
    check_keys(state, ingestion)
    _check_merged(state, ingestion)
    lost, tail = losses_of_stream(source, ingestion, state), source.unreadable_tail()
    target.columns.check(state)
    try:
        verdict = _compared(target, source, state, is_isolated=False)
    except UnexplainedError as error:
        _log.warning("the messages of %s are decoded in isolation: %s", source.url, error)
        verdict = _compared(target, source, state, is_isolated=True)
    # A scan from the positions and one from the start of the stream may end at different bytes.
    return replace(verdict, lost=lost, unreadable_tail=tail or source.unreadable_tail()), state.version


def _compared(target: TargetTable, source: BatchSource, state: LedgerState, *, is_isolated: bool) -> KeyedVerdict:
    spark, ingestion, keys = target.spark, target.ingestion, target.ingestion.keys
    assert keys is not None  # verify_keyed() has checked it
    # Without the positions of the ledger, because a source may report only later messages for them.
    extents, read = source.extents(), places_read(target.ledger, state)
    places = {s: read[s] & Intervals.of(part) for s, part in _covered(state, extents).items()}
    held = {s: parts.hull for s, parts in places.items() if parts}
    with translating_spark_errors(ingestion.table, COMPARING), caching() as cached:
        frame = read_all(spark, source, held, target.columns.source, is_isolated=is_isolated).where(in_places(places))
        dead = target.dead_letters.counted(spark, target.ledger)
        frame = frame if dead is None else _without_dead_letters(target, frame, dead, in_places(places))
        messages, undecoded = _decoded(frame, cached)
        changes = target.columns.rows(frame)
        changes = after_truncate(changes, last_truncate(changes, keys))
        table = read_table(spark, target.ledger.log, version=state.version)
        verdict = _verdict(changes, table, in_places(places), keys, undecoded)
        if undecoded is not None:
            verdict = _with_undecoded(verdict, undecoded, table)
        if dead is not None:
            letters = extents_of(target.dead_letters.counted_places(target.ledger))
            of_dead = {s: part.clamp(held[s]) for s, part in letters.items() if s in held}
            verdict = _with_dead_letters(verdict, dead, read_all(spark, source, of_dead, SourceColumns.of(Raw())))
        return replace(verdict, messages=messages)


def _without_dead_letters(target: TargetTable, frame: DataFrame, dead: DataFrame, held: str) -> DataFrame:
    """Return the messages without dead letters, and with the corrected payloads of those that a redrive corrected."""
    names = [*map(quoted, frame.columns)]
    records = target.dead_letters.corrections(target.ledger)
    if records.num_rows:
        splits = [StoredSplit.of(corrected_messages(records))]
        corrected = read_splits(target.spark, splits, target.columns.source, is_isolated=True).where(held)
        places = target.spark.createDataFrame(records.select(list(ROW_PLACE)))
        frame = frame.join(places, [*ROW_PLACE], "left_anti").select(*names).unionByName(corrected)
    # The transform may fail for them again. Spark moves none of its filters below a function of Python.
    others = frame.join(dead.select(*ROW_PLACE), [*ROW_PLACE], "left_anti").select(*names)
    return others.mapInArrow(lambda blocks: blocks, frame.schema)


def _decoded(frame: DataFrame, cached: Cached) -> tuple[int, DataFrame | None]:
    """Return how many messages can be decoded, and the places and times of the others; ``None`` if there are none."""
    failed = f.col("_error").isNotNull()
    counts = frame.agg(f.count_if(~failed).alias("messages"), f.count_if(failed).alias("failed")).collect()[0]
    return counts["messages"], cached.keep(frame.where(failed).select(*ROW_TIME)) if counts["failed"] else None


def _covered(state: LedgerState, extents: Mapping[Shard, Extent]) -> Mapping[Shard, Range]:
    """Return the ranges up to the positions that the stream holds."""
    ends = {shard: known.covered.position or 0 for shard, known in state.shards.items()}
    return {s: Range(one.start, min(one.end, ends[s])) for s, one in extents.items() if s in ends}


def _check_merged(state: LedgerState, ingestion: Ingestion) -> None:
    left = {str(shard): str(known.redo) for shard, known in sorted(state.shards.items()) if known.redo}
    if left:
        raise InvalidOptionError(
            f"{ingestion.table} cannot be compared yet: messages have to be merged again",
            remedy="Ingest first.",
            **left,
        )


def _verdict(changes: DataFrame, table: DataFrame, held: str, keys: Keys, undecoded: DataFrame | None) -> KeyedVerdict:
    is_history = f.lit(keys.keeps_history)
    of_key = {_KEY.format(number): f.col(quoted(name)) for number, name in enumerate(keys.columns)}
    names = [*of_key, *(ROW_PLACE if keys.keeps_history else ())]
    starts = () if not keys.keeps_history or keys.is_ordered_by_position else (start_column(keys),)
    orders = () if keys.keeps_history or keys.is_ordered_by_position else (SEQUENCE_BY,)
    rows, is_valid = _with_validity(table, keys)
    if not keys.keeps_history:
        changes = newest_changes(changes, keys)
    keyed = [column.alias(name) for name, column in of_key.items()]
    rows = rows.select(*keyed, *ROW_TIME, DELETED, *starts, *orders, is_valid.alias(_IS_VALID))
    is_undecoded = f.lit(False)
    if undecoded is not None:
        rows = rows.join(undecoded.withColumn(_IS_UNDECODED, f.lit(True)), [*ROW_TIME], "left")
        is_undecoded = f.coalesce(_IS_UNDECODED, is_undecoded)
    rows = rows.withColumn(_IS_UNDECODED, is_undecoded)
    changes = changes.select(*keyed, *ROW_TIME, DELETED, *starts, *orders)
    of_rows = rows.groupBy(*names).agg(
        f.max(f.struct(*ROW_TIME, DELETED, *starts, *orders, _IS_UNDECODED)).alias("row"),
        f.count("*").alias("count"),
        f.count_if(~f.col(DELETED)).alias("shown"),
        f.bool_and(_IS_VALID).alias(_IS_VALID),
        f.max(f.expr(held)).alias("is_held"),
    )
    change = f.struct(*ROW_TIME, DELETED, *starts, *orders)
    joined = changes.select(*names, change.alias("change")).join(of_rows, names, "full_outer")
    has_change, has_row = f.col("change").isNotNull(), f.col("row").isNotNull()
    deletes, is_deleted, is_held = f.col(f"change.{DELETED}"), f.col(f"row.{DELETED}"), f.col("is_held")
    is_same = _place_in("row", *starts).eqNullSafe(_place_in("change", *starts))
    has_both = has_change & has_row
    is_shown, is_newer, is_undecoded = is_history | ~is_deleted, f.lit(False), f.col(f"row.{_IS_UNDECODED}")
    if not keys.keeps_history:
        row, of_change = (f.struct(*(f.col(f"{one}.{name}") for name in keys.ordering)) for one in ("row", "change"))
        # The stream may hold only late changes of a key. A compacted topic may lack deletions between other messages.
        may_be_newer = is_undecoded | ~is_held | is_deleted if orders else is_undecoded
        is_newer = has_both & (row > of_change) & may_be_newer
    faults: dict[str, Column] = {
        "missing": has_change & ~has_row & (is_history | ~deletes),
        "stale": (has_row & ~f.col(_IS_VALID))
        | (has_both & ~is_newer & (is_history | ~deletes) & (~is_same | (is_deleted & ~deletes))),
        "undeleted": has_both & ~is_newer & deletes & ~is_deleted,
        "unknown": ~has_change & has_row & is_held & is_shown & ~is_undecoded,
        "other": _place_in("row").eqNullSafe(_place_in("change"))
        & ~f.col(f"row.{TIME}").eqNullSafe(f.col(f"change.{TIME}")),
    }
    is_unread = is_newer | (~has_change & has_row & (~is_held | is_undecoded))
    place = f.coalesce(f.when(has_change, _place_in("change")), _place_in("row"))
    sums = [
        f.count_distinct(f.when(has_change, f.struct(*of_key))).alias("keys"),
        f.coalesce(f.sum("shown"), f.lit(0)).alias("rows"),
        f.coalesce(f.sum(f.col("count") - 1), f.lit(0)).alias("doubled"),
        f.count_if(is_unread & is_shown & ~is_undecoded).alias("unread"),
        f.count_if(is_unread & is_shown & is_undecoded).alias("uncompared"),
    ]
    for name, fault in faults.items():
        sums.append(f.count_if(fault).alias(name))
        sums.append(f.slice(f.collect_list(f.when(fault, place)), 1, MAX_EXAMPLES).alias(f"of_{name}"))
    found = joined.agg(*sums).collect()[0].asDict()
    examples = {name: [(Shard(p[0], p[1]), p[2]) for p in found.pop(f"of_{name}")] for name in faults}
    examples = {name: one for name, one in examples.items() if one}
    return KeyedVerdict(0, undecoded=0, examples=examples, **found)


def _with_undecoded(verdict: KeyedVerdict, undecoded: DataFrame, table: DataFrame) -> KeyedVerdict:
    """Count the messages that cannot be decoded and have no row."""
    found = undecoded.join(table.select(*ROW_TIME), [*ROW_TIME], "left_anti")
    listed = [(Shard(row[0], row[1]), row[2]) for row in found.select(*ROW_PLACE).limit(MAX_EXAMPLES).collect()]
    examples = {**verdict.examples, "undecoded": listed} if listed else verdict.examples
    return replace(verdict, undecoded=found.count(), examples=examples)


def _with_dead_letters(verdict: KeyedVerdict, dead: DataFrame, messages: DataFrame) -> KeyedVerdict:
    """Count the dead letters in a verdict whose message has another timestamp."""
    is_other = ~f.col(f"dead.{TIME}").eqNullSafe(f.col(f"message.{TIME}"))
    both = dead.select(*ROW_TIME).alias("dead").join(messages.select(*ROW_TIME).alias("message"), list(ROW_PLACE))
    places = f.collect_set(f.struct(*ROW_PLACE))
    found = both.where(is_other).agg(f.size(places).alias("count"), f.slice(f.array_sort(places), 1, MAX_EXAMPLES))
    count, listed = found.collect()[0]
    if not count:
        return verdict
    examples = [*verdict.examples.get("other", ()), *((Shard(p[0], p[1]), p[2]) for p in listed)]
    shown = {**verdict.examples, "other": examples[:MAX_EXAMPLES]}
    return replace(verdict, other=verdict.other + count, examples=shown)


def _with_validity(table: DataFrame, keys: Keys) -> tuple[DataFrame, Column]:
    """Return the rows to compare, with ``_deleted``, and whether each is valid from its change to the next one."""
    if keys.keeps_history:
        extent = f.struct(*EXTENT)
        return with_extents(table.withColumn(FOUND, extent), keys), f.col(FOUND).eqNullSafe(extent)
    return table.withColumn(DELETED, f.col(DELETED) if keys.keeps_deletions else f.lit(False)), f.lit(True)


def _place_in(struct: str, *more: str) -> Column:
    return f.struct(*(f.col(f"{struct}.{name}") for name in (*ROW_PLACE, *more)))
