"""Creates tables with a layout, and registers them in a catalog; the layout of an existing table is never changed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.errors import AnalysisException, IllegalArgumentException, UnsupportedOperationException
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, BooleanType, StructField, StructType

from spark_jobs.decoding.ddl import VARIABLE, name_ddl, quoted
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.ledger import TRANSACTION_RETENTION
from spark_jobs.ledger.table_expressions import CHECK, check_expression, unsafe_property
from spark_jobs.reading.source import STREAM_COLUMNS
from spark_jobs.reading.spark_types import column_ddl, properties, text
from spark_jobs.session import first_line
from spark_jobs.table_location import spark_location, sql_name
from spark_jobs.writing.failures import catalog_unavailable, explain
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError, WriteError

STATS_COLUMNS = "delta.dataSkippingStatsColumns"
_REFUSALS = (AnalysisException, IllegalArgumentException, UnsupportedOperationException)
# A comma within back quotes does not separate names.
_NAMES = re.compile(r"(?:`(?:[^`]|``)*`|[^,`])+")
_NAME = re.compile(r"[^\s.`/\\]+(\.[^\s.`/\\]+){0,2}")
_WITHOUT_STATISTICS = (BinaryType, BooleanType)


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The layout of a table, used when the table is created.

    Args:
        partition_by: columns with few values; each combination of values gets its own folder.
        cluster_by: columns that queries filter by; ``OPTIMIZE`` groups similar rows. Excludes ``partition_by``.
        properties: table properties, like ``{"delta.enableChangeDataFeed": "true"}``.
        catalog_table: the name to register in Spark's catalog, like ``sales.orders`` or ``main.sales.orders``. The
            files of the table stay at its path.
        generated_columns: columns that Delta computes, each with its SQL expression, like
            ``{"day": "CAST(_timestamp AS DATE)"}``; ``partition_by`` and ``cluster_by`` may name them.
        comment: a description of the table.

    Raises:
        InvalidOptionError: an option is invalid, or two options exclude each other.

    Example:
        >>> TableLayout(cluster_by=["user"]).all_properties()
        {'delta.dataSkippingStatsColumns': '_stream,_shard,_sequence,_timestamp,user'}
    """

    partition_by: Sequence[str] = ()
    cluster_by: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    catalog_table: str | None = None
    generated_columns: Mapping[str, str] = field(default_factory=dict)
    comment: str | None = None

    def __post_init__(self) -> None:
        check_names("generated_columns", self.generated_columns)
        for option in ("partition_by", "cluster_by"):
            object.__setattr__(self, option, check_names(option, getattr(self, option)))
        for option in ("properties", "generated_columns"):
            object.__setattr__(self, option, _texts(option, getattr(self, option)))
        if TRANSACTION_RETENTION.lower() in map(str.lower, self.properties):
            raise InvalidOptionError(
                f"the property {TRANSACTION_RETENTION} makes Delta forget transactions of the table",
                remedy="Leave it out; exactly-once writes need all transactions.",
            )
        if self.partition_by and self.cluster_by:
            raise InvalidOptionError(
                f"partition_by={list(self.partition_by)} and cluster_by={list(self.cluster_by)} exclude each other",
                remedy="Leave one of them out.",
            )
        if self.comment is not None and not isinstance(self.comment, str):
            raise InvalidOptionError(f"comment={self.comment!r} is not a string", remedy="Put it in quotes.")
        if (setting := unsafe_property(self.properties)) is not None:
            raise InvalidOptionError(
                f"the table property {setting!r} may also be a setting of Hadoop, and Spark would use it as one",
                remedy="Use a name without dots, or a property of Delta.",
            )
        if VARIABLE in json.dumps([self.comment, self.properties, self.generated_columns]):
            raise InvalidOptionError(
                f"the comment, a property or a generated column of the table has {VARIABLE}, and Hadoop replaces such "
                "variables",
                remedy="Write it in another way.",
            )
        name = self.catalog_table
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise InvalidOptionError(
                f"catalog_table={name!r} is not a table name",
                remedy="Write it like orders, sales.orders or main.sales.orders; the path goes into table.",
            )

    @property
    def is_plain(self) -> bool:
        """Whether the first write can create the table, because nothing needs a ``CREATE TABLE``."""
        return not (self.partition_by or self.cluster_by or self.properties or self.generated_columns or self.comment)

    def all_properties(self) -> dict[str, str]:
        """Return the properties, with statistics for the columns that the ledger and clustering need."""
        given = _NAMES.findall(self.properties.get(STATS_COLUMNS, ""))
        # Delta parses the names, so they are quoted.
        columns = [*STREAM_COLUMNS, *map(name_ddl, self.cluster_by), *filter(None, map(str.strip, given))]
        # Delta rejects statistics for a partition column.
        folders = {name.lower() for name in self.partition_by}
        wanted = [name for name in dict.fromkeys(columns) if name.lower() not in folders]
        return {**self.properties, STATS_COLUMNS: ",".join(wanted)}

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check, before the table is created, that the rows have the columns of the layout.

        Raises:
            SchemaMismatchError: they lack some, or have some that Delta computes; it names these.
        """
        known, generated = ({name.lower(): name for name in names} for names in (columns, self.generated_columns))
        if twice := sorted(generated.keys() & known.keys()):
            raise SchemaMismatchError(
                f"the rows have the column {known[twice[0]]}, which generated_columns computes",
                remedy="Leave it out of generated_columns, or out of the rows of the transform.",
            )
        lacking = [
            n for n in (*self.partition_by, *self.cluster_by) if n.lower() not in known.keys() | generated.keys()
        ]
        if lacking:
            raise SchemaMismatchError(
                f"partition_by or cluster_by names {', '.join(lacking)}, but the rows have no such column",
                remedy="Add the column in the transform, also for a field of a struct, or correct partition_by and "
                "cluster_by.",
            )

    def of_columns(self, columns: StructType, *, keys: Collection[str] = ()) -> TableLayout:
        """Return the layout with the names of ``cluster_by`` as they are spelled in the columns.

        Args:
            columns: the columns of the table.
            keys: a key that the table is clustered by unless the user says otherwise. Columns of it are left out if
                Delta has no statistics for their types.
        """
        known, own = {column.name.lower(): column for column in columns.fields}, {name.lower() for name in keys}
        left_out = {name for name in own & known.keys() if isinstance(known[name].dataType, _WITHOUT_STATISTICS)}
        names = [name for name in self.cluster_by if name.lower() not in left_out]
        return replace(self, cluster_by=[known[n.lower()].name if n.lower() in known else n for n in names])

    def check_table(self, log: DeltaLog) -> None:
        """Check that an existing table has the partitions and generated columns of this layout.

        Raises:
            InvalidOptionError: the table is partitioned by a BINARY column.
            SchemaMismatchError: it has not; Delta cannot change either in an existing table.
        """
        snapshot = log.snapshot()
        if snapshot is None:
            return
        kinds = {column["name"].lower(): str(column["type"]) for column in snapshot.columns}
        _check_partitions(log.path, snapshot.partition_columns, kinds)
        is_same = [n.lower() for n in snapshot.partition_columns] == [n.lower() for n in self.partition_by]
        if self.partition_by and not is_same:
            raise SchemaMismatchError(
                f"{log.path} is partitioned by {list(snapshot.partition_columns)}, not by {list(self.partition_by)}",
                remedy="Correct partition_by, or leave it out: it is used only when a table is created.",
            )
        computed = {name.lower() for name in snapshot.computed_columns}
        if lacking := [name for name in self.generated_columns if name.lower() not in computed]:
            raise SchemaMismatchError(
                f"{log.path} does not compute {', '.join(lacking)}, and Delta accepts generated columns only when a "
                "table is created",
                remedy="Correct generated_columns, add the column in the transform, or ingest into another table.",
            )


def check_names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of columns.

    Raises:
        InvalidOptionError: they are not a list of different names.
    """
    found = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    is_named = all(isinstance(name, str) and name for name in found)
    if not is_named or len({name.lower() for name in found}) != len(found):
        raise InvalidOptionError(
            f"{option}={names!r} is not a list of different column names", remedy="Write it like ['country', 'day']."
        )
    return tuple(found)


def _check_partitions(path: str, names: Iterable[str], kinds: Mapping[str, str]) -> None:
    """Check that Delta keeps each value of these partition columns, whose types are in ``kinds`` by lower-case name.

    Raises:
        InvalidOptionError: a column is BINARY. Delta keeps its values as text, so different bytes become the same.
    """
    if binary := [name for name in names if kinds.get(name.lower()) == "binary"]:
        raise InvalidOptionError(
            f"{path} cannot be partitioned by {', '.join(binary)}, which is BINARY: Delta would change bytes that are "
            "not UTF-8",
            remedy="Partition by a text, such as hex() of the column. The partitions of an existing table cannot be "
            "changed, so write into another table.",
        )


def _texts(option: str, given: Mapping[str, str]) -> dict[str, str]:
    texts = [*given, *given.values()] if isinstance(given, Mapping) else [None]
    if not all(isinstance(one, str) and one.strip() for one in texts):
        raise InvalidOptionError(
            f"{option}={given!r} does not map names to non-empty strings",
            remedy="Write it like {'delta.enableChangeDataFeed': 'true'}, or {'day': 'CAST(_timestamp AS DATE)'}.",
        )
    return dict(given)


def create_table(
    spark: SparkSession, log: DeltaLog, columns: StructType, layout: TableLayout, *, required: Collection[str] = ()
) -> None:
    """Create the table, unless another writer has created it first.

    Args:
        spark: a session that can write Delta tables.
        log: the log of the table.
        columns: the columns of its rows.
        layout: the layout of the table.
        required: the columns that are NOT NULL, in lower case.

    Raises:
        InvalidOptionError: Delta rejects the layout, or would change values of a partition column.
        SchemaMismatchError: another writer has created the table with other partitions or generated columns.
        WriteError: Spark failed, and the table does not exist.
    """
    parts = [
        "USING DELTA",
        f"PARTITIONED BY ({', '.join(map(quoted, layout.partition_by))})" if layout.partition_by else "",
        f"CLUSTER BY ({', '.join(map(quoted, layout.cluster_by))})" if layout.cluster_by else "",
        f"COMMENT {text(layout.comment)}" if layout.comment else "",
        f"TBLPROPERTIES {properties(layout.all_properties())}",
    ]
    try:
        computed = _generated(spark, columns, layout)
        kinds = {one.name.lower(): one.dataType.simpleString() for one in (*columns.fields, *computed)}
        _check_partitions(log.path, layout.partition_by, kinds)
        own = [column_ddl(column, required=column.name.lower() in required) for column in columns.fields]
        own += [f"{column_ddl(one)} GENERATED ALWAYS AS ({layout.generated_columns[one.name]})" for one in computed]
        written = ", ".join(own)
        spark.sql(f"CREATE TABLE IF NOT EXISTS {sql_name(log.path)} ({written}) {' '.join(filter(None, parts))}")
    except InvalidOptionError:
        raise
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        if log.snapshot() is None:
            if away := catalog_unavailable(error):
                raise away from None
            # Spark would reject the same statement again, but a failed storage may work the next time.
            kind = InvalidOptionError if isinstance(error, _REFUSALS) else WriteError
            raise kind(
                f"{log.path} could not be created with its layout: {first_line(error)}",
                remedy="Correct the options of the layout; nothing was written.",
            ) from None
    layout.check_table(log)


def _generated(spark: SparkSession, columns: StructType, layout: TableLayout) -> list[StructField]:
    """Return the generated columns, with the types of their expressions.

    Constraints are checked, too: with one on a missing column Delta creates a table that rejects every row.
    """
    expressions = layout.generated_columns
    constraints = [condition for name, condition in layout.properties.items() if name.lower().startswith(CHECK)]
    if not (expressions or constraints):
        return []
    for expression in (*expressions.values(), *constraints):
        check_expression(expression, where="an expression of the layout")
    aliased = [f"({expression}) AS {quoted(name)}" for name, expression in expressions.items()]
    rows = spark.createDataFrame([], columns).selectExpr("*", *aliased)
    found = rows.schema.fields[len(columns) :]
    for constraint in constraints:
        # A Connect session analyzes the condition when it returns the columns.
        _ = rows.where(constraint).columns
    return found


def register(spark: SparkSession, table: str, name: str) -> None:
    """Register the table in Spark's catalog.

    Args:
        spark: a session that can write Delta tables.
        table: the path or URI of the table.
        name: the name in the catalog.

    Raises:
        InvalidOptionError: the catalog has no such schema, or another table of this name.
        CatalogUnavailableError: the catalog is a Hive metastore that does not answer.
        WriteError, …: Spark failed for another reason, such as its storage; see :func:`explain`.
    """
    quoted_name = ".".join(map(quoted, name.split(".")))
    try:
        spark.sql(f"CREATE TABLE IF NOT EXISTS {quoted_name} USING DELTA LOCATION {text(spark_location(table))}")
        known = {spark.sql(f"DESCRIBE DETAIL {one}").collect()[0]["id"] for one in (quoted_name, sql_name(table))}
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        if not isinstance(error, _REFUSALS) or catalog_unavailable(error):
            raise explain(error, table=table) from None
        raise InvalidOptionError(
            f"the catalog rejects catalog_table={name!r} for {table}: {first_line(error)}",
            remedy="Use a name of letters, digits and underscores that no view has, in a schema that exists (CREATE "
            "SCHEMA …) and in which the session's user may create tables.",
        ) from None
    if len(known) > 1:
        raise InvalidOptionError(
            f"catalog_table={name!r} is another table, not {table}",
            remedy="Use another name, or leave catalog_table out.",
        )
