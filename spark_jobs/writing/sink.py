"""Writes the rows of a batch and its batch metadata in one Delta commit, and looks into the log whether it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from delta import exceptions as conflicts
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from spark_jobs.ledger.delta_log import Commit, DeltaLog
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, in_places, in_ranges
from spark_jobs.reading.source import STREAM_COLUMNS, STREAM_TYPES
from spark_jobs.table_location import spark_location
from spark_jobs.writing.failures import FOREIGN_PLACE, explain, text_of
from spark_jobs.writing.sql_types import ddl, quoted
from spark_jobs.writing.storage import check_files, check_seen
from stream_consumers.batches import Range
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.messages import Shard

# All of Delta's exceptions are conflicts with another commit; they have no base of their own.
CONFLICTS: tuple[type[Exception], ...] = tuple(getattr(conflicts, name) for name in conflicts.__all__)
CONFLICT_TEXTS = ("io.delta.exceptions.", "DELTA_CONCURRENT", "DELTA_PROTOCOL_CHANGED", "DELTA_METADATA_CHANGED")
MOST_EXTENTS = 64
"""A row is compared with so many ranges, one after the other."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """The Delta table at ``path``.

    Args:
        path: a local path or a URI that Spark understands.
        properties: table properties, set when the table is created.
        merge_schema: let new columns into the table.
    """

    path: str
    properties: Mapping[str, str] = field(default_factory=dict)
    merge_schema: bool = False

    def write(self, rows: DataFrame, entry: LedgerEntry, *, creates: bool = False) -> None:
        """Write ``rows`` with the transaction and the metadata of ``entry``, in one commit.

        That it returns does not mean that the rows are in the table: Delta silently ignores a transaction version it
        has already recorded. :meth:`commit` looks.

        Raises:
            Exception: whatever Spark raises; see :func:`explain`.
        """
        writer = (
            rows.write.format("delta")
            .option("txnAppId", entry.app)
            .option("txnVersion", str(entry.number))
            .option("userMetadata", entry.to_json())
        )
        if creates:
            for name, value in self.properties.items():
                writer = writer.option(name, value)
        if self.merge_schema:
            writer = writer.option("mergeSchema", "true")
        if entry.mode == "replace":
            writer = writer.mode("overwrite").option("replaceWhere", in_places(entry.written))
        else:
            writer = writer.mode("append")
        writer.save(spark_location(self.path))

    def commit(
        self, rows: DataFrame, entry: LedgerEntry, *, ledger: Ledger, on_return: Callable[[], None] = lambda: None
    ) -> Commit | None:
        """Write ``rows`` and verify the write; ``None`` if the number of ``entry`` is somebody else's.

        Args:
            rows: what is written.
            entry: its batch metadata.
            ledger: of the transaction sequence of ``entry``.
            on_return: called when the write has returned or raised, before the ledger is read.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of it is in the table.
            LedgerUnreadableError: whether it is cannot be told.
            StorageMismatchError: it is in a table, or in files, that are not to be seen from here.
        """

        def find() -> Commit | None:
            on_return()
            return ledger.written(entry.number, after=entry.base)

        commit = write_verified(
            lambda: self.write(rows, entry), find, spark=rows.sparkSession, log=ledger.log, bid=entry.bid
        )
        if commit is None or commit.entry is None or commit.entry.bid != entry.bid:
            return None
        check_files(ledger.log, commit.version)
        return commit


def only_within(rows: DataFrame, extents: Mapping[Shard, Range]) -> DataFrame:
    """The same rows; the write fails if one of them is of no message in these ranges.

    A transform may give a row the place of another message, and then nobody would know what became of its own.

    Args:
        rows: to be written.
        extents: the ranges; of very many shards only those are checked that they have in common.
    """
    condition = in_ranges(extents) if len(extents) <= MOST_EXTENTS else _in_hulls(extents)
    place = f.concat_ws(" ", *(f.coalesce(f.col(name).cast("string"), f.lit("null")) for name in PLACE))
    foreign = f.raise_error(f.concat(f.lit(f"{FOREIGN_PLACE} "), place))
    return rows.where(f.when(f.expr(condition or "FALSE"), f.lit(True)).otherwise(foreign))


def _in_hulls(extents: Mapping[Shard, Range]) -> str:
    """The rows between the first and the last shard of each stream, as a SQL condition that is quick to evaluate.

    Example:
        >>> _in_hulls({Shard("orders", 3): Range(5, 9), Shard("orders", 7): Range(0, 6)})
        "(_stream = 'orders' AND _shard BETWEEN 3 AND 7 AND _sequence >= 0 AND _sequence < 9)"
    """
    found = []
    for stream in sorted({shard.stream for shard in extents}):
        own = {shard.id: part for shard, part in extents.items() if shard.stream == stream}
        start, end = min(part.start for part in own.values()), max(part.end for part in own.values())
        found.append(
            f"(_stream = '{stream}' AND _shard BETWEEN {min(own)} AND {max(own)} "
            f"AND _sequence >= {start} AND _sequence < {end})"
        )
    return " OR ".join(found)


def plain_strings(rows: DataFrame, columns: Sequence[StructField]) -> DataFrame:
    """The same columns, with strings whose collation is the usual one as strings without any.

    A Connect client names the collation of each type that it sends, as for ``mapInPandas``. In the schema of a Delta
    table that is another type, which readers other than Spark do not know.

    Args:
        rows: to be written.
        columns: their columns.
    """
    named = [f.col(quoted(column.name)) for column in columns]
    if isinstance(rows.sparkSession, SparkSession):
        return rows.select(*named)
    return rows.select(
        *(
            source.cast(ddl(column.dataType)).alias(column.name, metadata=column.metadata)
            if "string" in column.dataType.simpleString()
            else source
            for source, column in zip(named, columns)
        )
    )


def write_verified(
    write: Callable[[], None], find: Callable[[], T | None], *, spark: SparkSession, log: DeltaLog, bid: str
) -> T | None:
    """Write, then look whether it is there: an error may follow a commit that landed, and none one that was ignored.

    Args:
        write: writes.
        find: looks into the log; ``None`` if it is not there.
        spark: the session that writes.
        log: where ``find`` looks.
        bid: the batch id of what is written.

    Returns:
        What ``find`` found; ``None`` if another commit came first.

    Raises:
        TransformError, SchemaMismatchError, WriteError, …: nothing of it is in the table; see :func:`explain`.
        StorageMismatchError: it is in a table that only Spark sees.
    """
    failure: Exception | None = None
    try:
        write()
    except Exception as error:  # noqa: BLE001 - whether it landed is for the log to say
        failure = error
    found = find()
    if found is None and failure is None:
        check_seen(spark, log, bid)
    elif found is None and failure is not None and not is_conflict(failure):
        raise explain(failure, table=log.path) from failure
    return found


def is_conflict(error: BaseException) -> bool:
    """Whether somebody else's commit came first: look into the ledger and plan again.

    In a classic session some conflicts arrive as bare Java errors, so the text counts as well as the type.
    """
    return isinstance(error, CONFLICTS) or any(text in text_of(error) for text in CONFLICT_TEXTS)


def check_columns(rows: StructType, table: StructType | None, *, path: str, merge_schema: bool) -> None:
    """Refuse rows that do not fit the table before anything is read.

    Args:
        rows: the columns to write.
        table: those of the table; ``None`` if it is new.
        path: the table, for the message.
        merge_schema: new columns are fine, and new fields of structs.

    Raises:
        SchemaMismatchError: listing the columns that do not fit.
    """
    lacking = [name for name in STREAM_COLUMNS if name not in rows.names]
    if lacking:
        raise SchemaMismatchError(
            f"the transform drops {', '.join(lacking)}",
            remedy="Keep the columns _stream, _shard, _sequence and _timestamp: they tell which message a row is from.",
        )
    kinds = {name: rows[name].dataType.simpleString() for name in STREAM_COLUMNS}
    other = [f"{name} is {kinds[name]}, not {kind}" for name, kind in STREAM_TYPES.items() if kinds[name] != kind]
    if other:
        raise SchemaMismatchError(
            f"the transform changes the types of stream columns: {'; '.join(other)}",
            remedy="Keep them as they are, and put what is made of them into columns of other names.",
        )
    if table is None:
        return
    changed, new = [], []
    for name, found, wanted in _differences("", rows, table):
        if wanted is None:
            new.append(f"{name} is not in the table")
        else:
            changed.append(f"{name} is {found.simpleString()} but {wanted.simpleString()} in the table")
    problems = changed if merge_schema else [*changed, *new]
    if problems:
        hint = "merge_schema=True lets new columns and fields in, but changes no type" if changed else ""
        raise SchemaMismatchError(
            f"the rows do not fit the table {path}: {'; '.join(problems)}",
            remedy=f"Change the transform or the schema; {hint}."
            if hint
            else "Change the transform or the schema, or let new columns and fields in with merge_schema=True.",
        )


def _differences(name: str, rows: DataType, table: DataType) -> Iterator[tuple[str, DataType, DataType | None]]:
    """What is of another type in the table, or not in it: the name, and the types."""
    if isinstance(rows, StructType) and isinstance(table, StructType):
        known = {field.name.lower(): field.dataType for field in table.fields}
        for field in rows.fields:
            path = f"{name}.{field.name}" if name else field.name
            wanted = known.get(field.name.lower())
            if wanted is None:
                yield path, field.dataType, None
            else:
                yield from _differences(path, field.dataType, wanted)
    elif isinstance(rows, ArrayType) and isinstance(table, ArrayType):
        yield from _differences(f"{name}[]", rows.elementType, table.elementType)
    elif isinstance(rows, MapType) and isinstance(table, MapType):
        yield from _differences(f"{name}.key", rows.keyType, table.keyType)
        yield from _differences(f"{name}.value", rows.valueType, table.valueType)
    elif rows.simpleString() != table.simpleString():
        yield name, rows, table
