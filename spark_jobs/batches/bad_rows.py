"""Splits a decoded batch into the rows of the transform and the bad messages, which become dead letters.

Rows that the transform rejects are bad. With ``on_bad_rows='dead_letter'`` rows that break a constraint of the table,
for which the transform or an expression of the keys fails, or for which a MERGE would fail are bad, too. They are all
found and counted before the batch writes its dead letters, and then the rows of the other messages.

The constraints come from the metadata of the Delta table: CHECK, NOT NULL, lengths, generated columns, and partition
columns, whose values name folders. Delta checks each row that it writes, and one bad row fails the write. This module
evaluates the same conditions before the write, to find the bad rows. A condition that it does not evaluate still fails
the write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType
from pyspark.storagelevel import StorageLevel

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.row_columns import RowColumns
from spark_jobs.dead_letters.reader import SequencesByShard, first_places, without_first
from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import Floor
from spark_jobs.ledger.table_expressions import CHECK, DEFAULT, GENERATED
from spark_jobs.ledger.table_rows import ROW_PLACE, by_shard, in_ranges
from spark_jobs.reading.rejection import REASON
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS
from spark_jobs.reading.spark_types import ddl, text
from spark_jobs.table_location import LOCAL, MAX_NAME_BYTES, scheme
from spark_jobs.writing.delta_table import read_table
from spark_jobs.writing.failures import CHANGED_VALUE, KEY_TWICE, FailedRowError, explain
from spark_jobs.writing.floor import floor_sql
from spark_jobs.writing.key_history import lacking_history
from spark_jobs.writing.keyed import (
    DELETED,
    SEQUENCE_BY,
    STRING_TYPE,
    TRUNCATES,
    UNAVAILABLE,
    Keys,
    after_truncate,
    lacking_changes,
    last_truncate,
    newest_changes,
)
from spark_jobs.writing.schema_evolution import takes_any_name
from stream_consumers.batches import Range
from stream_consumers.errors import ConstraintViolatedError, TransformError
from stream_consumers.messages import Shard
from stream_consumers.options import OnBadRows

MAX_FAILING_MESSAGES = 20
"""Give up on a transform after it fails for this many messages in a batch."""
T = TypeVar("T")
_PLACES = f"_stream STRING, _shard BIGINT, _sequence BIGINT, {REASON} STRING"
_LENGTH = re.compile(r"(?:var)?char\(([0-9]+)\)")
# The file systems whose folders have names of at most MAX_NAME_BYTES bytes; an object store has keys only.
_WITH_FOLDERS = frozenset({LOCAL, "hdfs", "viewfs", "ofs"})
# Stands for NULL in the name of a folder.
_NULL = "__HIVE_DEFAULT_PARTITION__"
# The types of partition columns of which Delta changes some values.
_CHANGED_TYPES = ("string", "binary", "timestamp")
_RANDOM_FOLDERS = "delta.randomizeFilePrefixes"
# The characters that Spark escapes with three bytes in the name of a folder, like %2F.
ESCAPED = "".join(map(chr, range(1, 0x20))) + "\x7f\"#%'*/:=?\\{[]^"


_FORGOTTEN = "it is older than purged rows of deleted keys, and its key, which the table lacks, may be one of them"


@dataclass(frozen=True, slots=True)
class FilteredBatch:
    """A batch that was read, with its bad messages marked.

    Args:
        frame: the messages; bad ones have an ``_error``.
        rows: the rows to write.
        messages: the number of good messages per shard.
        dead: the number of bad messages, which become dead letters.
    """

    frame: DataFrame
    rows: DataFrame
    messages: Mapping[Shard, int]
    dead: int


@dataclass(frozen=True, slots=True)
class _Filtered:
    """A frame in which bad messages have an ``_error``, the rows of the others, and whether some lack a value."""

    frame: DataFrame
    rows: DataFrame
    has_lacking: bool = False


@dataclass(slots=True)
class Cached:
    """Frames that Spark caches while a batch is written."""

    frames: list[DataFrame] = field(default_factory=list)

    def keep(self, frame: DataFrame) -> DataFrame:
        """Return the same rows from Spark's cache, so that they are computed once.

        Spark already evaluates filters of small batches, which the driver read, while it plans the rows.
        """
        self.frames.append(frame.persist(StorageLevel.MEMORY_AND_DISK_DESER))
        return self.frames[-1]


@contextmanager
def caching() -> Iterator[Cached]:
    """Unpersist every cached frame on exit."""
    cached = Cached()
    try:
        yield cached
    finally:
        for frame in cached.frames:
            # The error of a JVM that has ended would hide the one that says so.
            with suppress(Exception):
                frame.unpersist()


class BadRowFilter:
    """Finds the messages of a batch that become dead letters although they can be decoded.

    Args:
        spark: a session.
        ingestion: the table, the transform, and the treatment of bad rows.
        log: the log of the table.
        columns: computes the rows.
    """

    def __init__(self, spark: SparkSession, ingestion: Ingestion, log: DeltaLog, columns: RowColumns) -> None:
        self._spark = spark
        self._ingestion = ingestion
        self._log = log
        self._columns = columns
        self.makes_dead_letters = ingestion.errors.on_bad_rows is OnBadRows.DEAD_LETTER
        """Whether rows that break a constraint, or that the transform fails for, become dead letters."""
        self._constraints = Constraints({}, ())

    @property
    def needs_payloads(self) -> bool:
        """Whether messages that can be decoded may become dead letters, which include the payloads."""
        return self.makes_dead_letters or self._columns.may_reject

    def apply(
        self,
        frame: DataFrame,
        cached: Cached,
        *,
        has_payloads: bool,
        floor: Floor | None = None,
        is_first_read: bool = True,
    ) -> _Filtered | None:
        """Find the bad messages and rows; return ``None`` if that needs payloads that the frame lacks.

        Args:
            frame: the messages, in Spark's cache.
            cached: caches intermediate frames.
            has_payloads: whether all messages of the frame have their payloads, which dead letters need.
            floor: the floor of a keyed table; see :mod:`spark_jobs.writing.floor`.
            is_first_read: whether the messages were not merged before.

        Raises:
            TransformError: the transform fails for more than :data:`MAX_FAILING_MESSAGES`, or for no single message, or
                for any if ``on_bad_rows`` is to fail the run.
        """
        rows, rejected = self._columns.rejections(frame)
        if rejected is not None and not has_payloads:
            return None
        if rejected is not None:
            frame = self._retried(frame, cached, self._rejected, self._without_rejected)
            rows = self._columns.rows(frame)
        if not self.makes_dead_letters:
            is_merged_again = self._ingestion.keys is not None and not is_first_read
            if not is_merged_again or UNAVAILABLE not in rows.columns or not self._run(partial(_compute_changes, rows)):
                return _Filtered(frame, rows)
            # A dead letter must stay one if its change still lacks a value, because a MERGE may leave it out.
            found = _Filtered(frame, rows)
            return self._without_lacking(found, cached, is_first_read=False) if has_payloads else None
        self._constraints = self._current_constraints()
        found = self._retried(frame, cached, self._with_violations, self._without_violations)
        found = found if floor is None else self._without_forgotten(found, cached, floor)
        return self._without_lacking(found, cached, is_first_read=is_first_read) if found.has_lacking else found

    def _current_constraints(self) -> Constraints:
        return Constraints.of(self._spark, self._log, self._ingestion.keys)

    def _retried(
        self,
        frame: DataFrame,
        cached: Cached,
        make: Callable[[DataFrame], DataFrame],
        step: Callable[[DataFrame, Cached], T],
    ) -> T:
        """Run a step until it succeeds, each time without the messages for which it failed."""
        while True:
            try:
                return step(frame, cached)
            except FailedRowError as error:
                if not self.makes_dead_letters:
                    raise
                frame = self._marked(frame, self._failing(frame, make, error), cached)

    def _rejected(self, frame: DataFrame) -> DataFrame:
        """Return the places of the rejected messages."""
        _, places = self._columns.rejections(frame)
        return self._spark.createDataFrame([], _PLACES) if places is None else places

    def _without_rejected(self, frame: DataFrame, cached: Cached) -> DataFrame:
        return self._marked(frame, self._rejected(frame), cached)

    def _with_violations(self, frame: DataFrame) -> DataFrame:
        """Return the rows to write, with the constraints that they violate."""
        rows = self._columns.rows(frame)
        checked = self._constraints.with_violations(rows)
        return rows if checked is None else checked

    def _without_violations(self, frame: DataFrame, cached: Cached) -> _Filtered:
        rows = self._columns.rows(frame)
        if self._ingestion.transform is not None:
            # Computed once, so that the rows that are checked are written. All failures occur now.
            rows = self._run(partial(cached.keep, rows))
            self._run(rows.count)
        keys = self._ingestion.keys
        has_lacking = False if keys is None else self._run(partial(_compute_changes, rows))
        checked = self._constraints.with_violations(rows)
        if keys is not None:
            checked = rows.withColumn(REASON, f.lit(None).cast("string")) if checked is None else checked
            checked = self._with_faults(checked, keys, rows.columns)
        if checked is None:
            return _Filtered(frame, rows)
        violations = checked.where(f.col(REASON).isNotNull()).groupBy(*ROW_PLACE).agg(f.min(REASON).alias(REASON))
        marked = self._marked(frame, violations, cached)
        return _Filtered(marked, rows if marked is frame else _without_bad(rows, marked), has_lacking)

    def _with_faults(self, checked: DataFrame, keys: Keys, columns: Collection[str]) -> DataFrame:
        """Return rows that violate no constraint with the fault for which a MERGE of their message fails.

        Args:
            checked: the rows with the constraints that they violate.
            keys: the key.
            columns: the columns that the rows had.
        """
        if UNAVAILABLE in columns:
            checked = checked.withColumn(REASON, f.coalesce(REASON, keys.not_there(columns)))
        if TRUNCATES in columns:
            # A truncate makes no row.
            checked = checked.where(~f.col(TRUNCATES))
        if self._ingestion.transform is None:
            return checked
        is_twice = f.when(f.count("*") > 1, f.lit(KEY_TWICE.rstrip(":")))
        of_key = checked.groupBy(*ROW_PLACE, *map(quoted, keys.columns))
        return of_key.agg(f.coalesce(f.min(REASON), is_twice).alias(REASON))

    def _without_lacking(self, found: _Filtered, cached: Cached, *, is_first_read: bool) -> _Filtered:
        """Leave out the changes that lack a value which the MERGE cannot take from the table or from another change."""
        keys, rows = self._ingestion.keys, found.rows
        assert keys is not None  # only their changes lack values
        last = self._run(partial(last_truncate, rows, keys))
        table = read_table(self._spark, self._log).where("TRUE" if last is None else f"_sequence > {last}")
        changes = after_truncate(rows, last)
        # A later change may have deleted the row, so that only a message that was a dead letter stays one.
        is_old_only = not is_first_read and (keys.is_ordered_by_position or not self.makes_dead_letters)
        if keys.keeps_history:
            places = lacking_history(changes, keys, table)
        else:
            places = lacking_changes(changes, keys, table, is_first_read=is_first_read or is_old_only)
        if is_old_only:
            letters = self._ingestion.dead_letters().counted(self._spark, self._ingestion.ledger())
            places = places.where("FALSE") if letters is None else places.join(letters, [*ROW_PLACE], "left_semi")
        places = places.groupBy(*ROW_PLACE).agg(f.min(REASON).alias(REASON))
        marked = self._marked(found.frame, places, cached)
        return found if marked is found.frame else _Filtered(marked, _without_bad(rows, marked))

    def _without_forgotten(self, found: _Filtered, cached: Cached, floor: Floor) -> _Filtered:
        """Leave out the changes of keys without a row whose newest change in the batch is below the floor.

        A deletion below it changes nothing. If the row of a key goes meanwhile, the MERGE fails.
        """
        keys, rows = self._ingestion.keys, found.rows.where(~f.col(DELETED))
        assert keys is not None  # the table has a floor
        below = f.expr(f"{SEQUENCE_BY} < {floor_sql(floor, rows.schema[SEQUENCE_BY].dataType)}")
        if self._run(rows.where(below).isEmpty):
            return found
        newest = newest_changes(found.rows, keys).where(below & ~f.col(DELETED))
        names = [quoted(name) for name in keys.columns]
        absent = newest.select(*names).join(
            read_table(self._spark, self._log).select(*names), [*keys.columns], "left_anti"
        )
        places = rows.join(absent, [*keys.columns], "left_semi").select(*ROW_PLACE, f.lit(_FORGOTTEN).alias(REASON))
        marked = self._marked(found.frame, places.distinct(), cached)
        return found if marked is found.frame else replace(found, frame=marked, rows=_without_bad(found.rows, marked))

    def _marked(self, frame: DataFrame, places: DataFrame, cached: Cached) -> DataFrame:
        """Return the frame with an error for the messages at these places; the same frame if there are none.

        Raises:
            TransformError: a place is not that of a message of the batch.
        """
        # Computed once: a second evaluation could find other messages.
        places = self._run(partial(cached.keep, places))
        count = self._run(places.count)
        if not count:
            return frame
        known = self._run(_good(frame).join(places, [*ROW_PLACE], "left_semi").count)
        if known != count:
            raise TransformError(
                f"the transform rejects {count - known} rows whose places are not in this batch",
                remedy="Keep _stream, _shard and _sequence of each row unchanged; nothing was written.",
            )
        reason = f.coalesce("_error", REASON).alias("_error")
        columns = [reason if name == "_error" else f.col(quoted(name)) for name in frame.columns]
        return cached.keep(frame.join(places, [*ROW_PLACE], "left").select(*columns))

    def _run(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - Spark raises errors of any type
            raise explain(error, table=self._ingestion.table) from None

    def _failing(self, frame: DataFrame, make: Callable[[DataFrame], DataFrame], error: FailedRowError) -> DataFrame:
        """Find the places of the messages for which ``make`` fails, by halving the batch again and again.

        Raises:
            TransformError: there are too many, or none fails alone.
        """
        found: list[tuple[str, int, int, str]] = []
        read = self._run(_good(frame).select(*ROW_PLACE).toPandas)
        places = {shard: np.sort(sequences) for shard, sequences in by_shard(read, *ROW_PLACE)}
        self._search(frame, make, places, error, found)
        if not found:
            # The messages fail together, but none of them fails alone.
            raise error
        return self._spark.createDataFrame(found, _PLACES)

    def _search(
        self,
        frame: DataFrame,
        make: Callable[[DataFrame], DataFrame],
        places: SequencesByShard,
        error: FailedRowError,
        found: list[tuple[str, int, int, str]],
    ) -> None:
        """Find the failing messages at places that failed together with ``error``."""
        count = sum(map(len, places.values()))
        if count == 1:
            ((shard, own),) = places.items()
            # The detail may hold values, so it is quoted: the kind of a reason omits quoted text.
            said = f"{error.what.replace(f' while writing {self._ingestion.table}', '')}: {error.detail!r}"
            found.append((shard.stream, shard.id, int(own[0]), said))
            if len(found) > MAX_FAILING_MESSAGES:
                raise TransformError(
                    f"{error.what}; it fails for more than {MAX_FAILING_MESSAGES} messages of a batch",
                    remedy="Correct the transform, or let it reject() such rows; or read fewer messages per batch "
                    "(max_records). Nothing was written.",
                )
            return
        for half in (first_places(places, count // 2), without_first(places, count // 2)):
            ranges = {shard: Range(int(own[0]), int(own[-1]) + 1) for shard, own in half.items()}
            try:
                self._run(make(frame.where(in_ranges(ranges))).write.format("noop").mode("overwrite").save)
            except FailedRowError as failed:
                self._search(frame, make, half, failed, found)

    def failing_on_changes(self, rows: DataFrame) -> DataFrame:
        """Return the rows, whose write fails if Delta would change a value of one without an error."""
        return self._current_constraints().failing_on_changes(rows) if self._columns.partitions != () else rows

    def located(self, error: ConstraintViolatedError, rows: DataFrame) -> ConstraintViolatedError:
        """Return the same error, with the place of a row that breaks a constraint, if one is found."""
        if self.makes_dead_letters:
            # Rows that break a constraint of this module are not written; another one failed the write.
            return error
        example: Row | None = None
        # The place is only additional information, so failures to find it are ignored.
        with suppress(Exception):
            checked = self._current_constraints().with_violations(rows)
            if checked is not None:
                example = checked.where(f.col(REASON).isNotNull()).select(*ROW_PLACE, REASON).first()
        if example is None:
            return error
        where = f"{Shard(example['_stream'], example['_shard'])}={example['_sequence']}"
        located = ConstraintViolatedError(
            f"{error.what}; at {where}, for one, {example[REASON]}", remedy=error.remedy, **error.facts
        )
        located.detail = error.detail
        return located


def _compute_changes(changes: DataFrame) -> bool:
    """Compute the columns that decide a MERGE, so that failures occur now; return whether a change lacks a value."""
    made = [name for name in (DELETED, SEQUENCE_BY, TRUNCATES) if name in changes.columns]
    lacks = f.bool_or(f.size(UNAVAILABLE) > 0) if UNAVAILABLE in changes.columns else f.lit(False)
    return bool(changes.agg(f.max(f.hash(*made)), lacks.alias("lacks")).collect()[0]["lacks"])


def _good(frame: DataFrame) -> DataFrame:
    """Return the messages without an error, with the columns that the transform gets."""
    return frame.where(f.col("_error").isNull()).drop(*DEAD_LETTER_COLUMNS)


def _without_bad(rows: DataFrame, frame: DataFrame) -> DataFrame:
    """Return the rows of messages without an error."""
    bad = frame.where(f.col("_error").isNotNull()).select(*ROW_PLACE)
    return rows.join(bad, [*ROW_PLACE], "left_anti").select(*map(quoted, rows.columns))


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition that each row of a table must fulfil.

    Args:
        violation_sql: a SQL condition for the rows that violate it; never null.
        reason: the reason that such rows get.
        not_null: the name of the column, if it is that this one is NOT NULL.
    """

    violation_sql: str
    reason: str
    not_null: str = ""


@dataclass(frozen=True, slots=True)
class Constraints:
    """The constraints of a table.

    Args:
        configuration: the table properties.
        columns: the columns in the format of the log.
        types: the columns with Spark's types.
        partitions: the columns that the table is partitioned by.
        has_folders: whether their values name folders.
        keys: those of a keyed table.

    Example:
        >>> columns = [{"name": "id", "type": "long", "nullable": False, "metadata": {}}]
        >>> table = Constraints({"delta.constraints.positive": "id > 0"}, columns)
        >>> for one in table.on(["id"]):
        ...     print(one.reason, "-", one.violation_sql)
        the CHECK constraint positive (id > 0) is violated - (id > 0) IS NOT TRUE
        the column id is NOT NULL in the table - `id` IS NULL
    """

    configuration: Mapping[str, str]
    columns: Sequence[Mapping[str, Any]]
    types: StructType = field(default_factory=StructType)
    partitions: Collection[str] = ()
    has_folders: bool = False
    keys: Keys | None = None

    @classmethod
    def of(cls, spark: SparkSession, log: DeltaLog, keys: Keys | None = None) -> Constraints:
        """Return the current constraints of the table, or no constraints if it does not exist.

        Args:
            spark: a session.
            log: the log of the table.
            keys: those of a keyed table, of which no row may lack what they need.
        """
        required = () if keys is None else keys.required
        snapshot = log.snapshot()
        if snapshot is None:
            return cls({}, ())
        properties = snapshot.configuration
        # With these settings Delta gives folders random names.
        is_random = takes_any_name(properties) or properties.get(_RANDOM_FOLDERS, "").lower() == "true"
        has_folders = scheme(log.path) in _WITH_FOLDERS and not is_random
        schema = read_table(spark, log).schema
        columns = [
            {**one, "nullable": one["nullable"] and one["name"].lower() not in required} for one in snapshot.columns
        ]
        return cls(properties, columns, schema, snapshot.partition_columns, has_folders, keys)

    def on(self, names: Collection[str]) -> list[Constraint]:
        """Return the constraints on rows that have these columns.

        A NOT NULL column that all rows lack is not a fault of a row.
        """
        known = {name.lower() for name in names}
        checks = [
            # Delta treats a condition that is null as violated.
            Constraint(f"({text}) IS NOT TRUE", f"the CHECK constraint {name[len(CHECK) :]} ({text}) is violated")
            for name, text in sorted(self.configuration.items())
            if name.lower().startswith(CHECK)
        ]
        given = [one for one in self.columns if one["name"].lower() in known]
        made = [one for one in self.columns if one not in given and _is_generated(one)]
        return [
            *checks,
            *_not_null([*given, *made]),
            *_lengths([*given, *made]),
            *_generated(given),
            *map(_is_read_back, self._dividing),
            *(map(_name_of_folder, self._dividing) if self.has_folders else ()),
        ]

    @property
    def _dividing(self) -> list[Mapping[str, Any]]:
        """The partition columns of which Delta changes some values. Delta sets those that rows lack, too."""
        return [one for one in self.columns if one["name"] in self.partitions and one["type"] in _CHANGED_TYPES]

    def failing_on_changes(self, rows: DataFrame) -> DataFrame:
        """Return the rows, whose write fails if Delta would change a value of one without an error."""
        changes = " OR ".join(_is_read_back(one).violation_sql for one in self._dividing)
        if not changes:
            return rows
        # Spark evaluates no condition with such a number before the joins of the transform, which drop rows.
        is_changed = f.expr(changes) & (f.monotonically_increasing_id() >= 0)
        is_same = f.when(is_changed, f.raise_error(f.lit(CHANGED_VALUE)).cast("boolean")).otherwise(f.lit(True))
        return self._completed(rows).where(is_same).select(*map(quoted, rows.columns))

    def with_violations(self, rows: DataFrame) -> DataFrame | None:
        """Return the rows with the violated constraint in :data:`REASON`; ``None`` if the table has no constraints."""
        asked = self.on(rows.columns)
        if not asked:
            return None
        checked = self._completed(rows)
        violated = (f.when(self._is_on(one, rows.columns) & f.expr(one.violation_sql), one.reason) for one in asked)
        return checked.withColumn(REASON, f.coalesce(*violated))

    def _is_on(self, constraint: Constraint, names: Collection[str]) -> Column:
        """Return whether a constraint is one on this row: a MERGE may write another row, or none.

        A delete whose row goes needs only its key. A row keeps the values that a change lacks, so that a condition on
        such a column is left to Delta.
        """
        found = f.lit(True)
        if self.keys is None:
            return found
        of_key = constraint.not_null.lower() in {name.lower() for name in self.keys.columns}
        if not (self.keys.keeps_deletions or of_key) and DELETED in names:
            found &= ~f.col(DELETED)
        if UNAVAILABLE in names:
            condition = f.lit(constraint.violation_sql.lower())
            found &= ~f.exists(UNAVAILABLE, lambda name: f.contains(condition, f.lower(name)))
        return found

    def _completed(self, rows: DataFrame) -> DataFrame:
        """Add the columns that the rows lack, with the values that Delta gives them."""
        known = {name.lower() for name in rows.columns}
        lacking = [one for one in self.columns if one["name"].lower() not in known]
        # Generated columns come last, because their expressions use the others.
        for one in sorted(lacking, key=_is_generated):
            metadata = one.get("metadata", {})
            made = metadata.get(GENERATED) or metadata.get(DEFAULT, "NULL")
            rows = rows.withColumn(one["name"], f.expr(f"CAST({made} AS {ddl(self.types[one['name']].dataType)})"))
        return rows


def _is_generated(column: Mapping[str, Any]) -> bool:
    return GENERATED in column.get("metadata", {})


def _not_null(columns: Sequence[Mapping[str, Any]], parents: Sequence[str] = ()) -> Iterator[Constraint]:
    for column in columns:
        path = [*parents, column["name"]]
        if not column["nullable"]:
            # In Delta, a field of a struct that is null is null, too.
            found = ".".join(map(quoted, path))
            name = ".".join(path)
            yield Constraint(f"{found} IS NULL", f"the column {name} is NOT NULL in the table", not_null=name)
        kind = column["type"]
        if isinstance(kind, Mapping) and kind["type"] == "struct":
            yield from _not_null(kind["fields"], path)


def _lengths(columns: Sequence[Mapping[str, Any]]) -> Iterator[Constraint]:
    for column in columns:
        kind = column.get("metadata", {}).get(STRING_TYPE, "")
        found = _LENGTH.fullmatch(kind)
        if found:
            name, most = column["name"], found[1]
            yield Constraint(
                f"COALESCE(LENGTH({quoted(name)}) > {most}, FALSE)",
                f"the column {name} is a {kind.upper()} in the table",
            )


def _generated(columns: Sequence[Mapping[str, Any]]) -> Iterator[Constraint]:
    for column in columns:
        text = column.get("metadata", {}).get(GENERATED)
        if text:
            name = column["name"]
            yield Constraint(
                f"NOT ({quoted(name)} <=> ({text}))", f"the column {name} differs from its generated value: {text}"
            )


def _is_read_back(column: Mapping[str, Any]) -> Constraint:
    """Return the constraint that Delta reads the value of a partition column back, which it writes as text."""
    name = column["name"]
    shown = f"CAST({quoted(name)} AS STRING)"
    if column["type"] == "timestamp":
        # The text has no zone, so a time in the hour that clocks show twice may become the other one.
        changes = f"CAST({shown} AS TIMESTAMP) <> {quoted(name)}"
    else:
        changes = f"CAST({shown} AS BINARY) IN (X'', CAST('{_NULL}' AS BINARY)) OR NOT IS_VALID_UTF8({shown})"
    return Constraint(
        f"COALESCE({changes}, FALSE)",
        f"the table is partitioned by the column {name}, and Delta would write another value",
    )


def _name_of_folder(column: Mapping[str, Any]) -> Constraint:
    name = column["name"]
    found, escaped = f"CAST({quoted(name)} AS STRING)", text(ESCAPED)
    escapes = f"LENGTH({found}) - LENGTH(TRANSLATE({found}, {escaped}, ''))"
    most = MAX_NAME_BYTES - len(f"{name}=".encode()) - 2 * sum(map(ESCAPED.count, name))
    return Constraint(
        f"COALESCE(OCTET_LENGTH({found}) + 2 * ({escapes}) > {most} OR CONTAINS({found}, CHAR(0)), FALSE)",
        f"the column {name} names a folder, and its value is longer than {most} bytes or contains NUL",
    )
