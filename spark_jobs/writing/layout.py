"""How a table is laid out, and what a catalog calls it: said when the table is made, and never changed afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.errors import AnalysisException, IllegalArgumentException, UnsupportedOperationException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from spark_jobs.decoding.ddl import name_ddl, quoted
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.ledger import TRANSACTION_RETENTION
from spark_jobs.ledger.table_expressions import CHECK, check_expression
from spark_jobs.reading.source import STREAM_COLUMNS
from spark_jobs.reading.spark_types import column_ddl, properties, text
from spark_jobs.session import first_line
from spark_jobs.table_location import spark_location, sql_name
from spark_jobs.writing.failures import catalog_unavailable, explain
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError, WriteError

STATS_COLUMNS = "delta.dataSkippingStatsColumns"
_REFUSALS = (AnalysisException, IllegalArgumentException, UnsupportedOperationException)
# A comma within back quotes parts no names.
_NAMES = re.compile(r"(?:`(?:[^`]|``)*`|[^,`])+")
_NAME = re.compile(r"[^\s.`/\\]+(\.[^\s.`/\\]+){0,2}")


@dataclass(frozen=True, slots=True)
class TableLayout:
    """What a table that is not there yet is made with.

    Args:
        partition_by: columns with few values; each combination of them has a folder of its own.
        cluster_by: instead: columns that rows are looked for by; ``OPTIMIZE`` puts like ones together.
        properties: table properties, like ``{"delta.enableChangeDataFeed": "true"}``.
        catalog_table: a name that Spark's catalog gets for the table, like ``sales.orders`` or ``main.sales.orders``.
            The table stays where its path says.
        generated_columns: columns that Delta computes, each with its expression in SQL, like
            ``{"day": "CAST(_timestamp AS DATE)"}``; the table may be laid out by them.
        comment: what the table is, for people.

    Raises:
        InvalidOptionError: options that do not go together, or that make no sense.

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
        for option in ("partition_by", "cluster_by", "generated_columns"):
            _check_columns(option, getattr(self, option))
        for option in ("partition_by", "cluster_by"):
            names = getattr(self, option)
            object.__setattr__(self, option, (names,) if isinstance(names, str) else tuple(names))
        for option in ("properties", "generated_columns"):
            object.__setattr__(self, option, _texts(option, getattr(self, option)))
        if TRANSACTION_RETENTION.lower() in map(str.lower, self.properties):
            raise InvalidOptionError(
                f"{TRANSACTION_RETENTION} lets the table forget its transactions",
                remedy="Leave it out; exactly-once needs them.",
            )
        if self.partition_by and self.cluster_by:
            raise InvalidOptionError(
                f"partition_by={list(self.partition_by)} and cluster_by={list(self.cluster_by)} exclude each other",
                remedy="Leave one of them out.",
            )
        if self.comment is not None and not isinstance(self.comment, str):
            raise InvalidOptionError(f"the comment {self.comment!r} of a table is no text", remedy="Put it in quotes.")
        name = self.catalog_table
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise InvalidOptionError(
                f"catalog_table={name!r} is no name of a table",
                remedy="Write it like orders, sales.orders or main.sales.orders; where the table is says table.",
            )

    @property
    def is_plain(self) -> bool:
        """Whether the first batch may make the table as it comes."""
        return not (self.partition_by or self.cluster_by or self.properties or self.generated_columns or self.comment)

    def all_properties(self) -> dict[str, str]:
        """With the statistics that the ledger, and clustering, need; those of the user beside them."""
        given = _NAMES.findall(self.properties.get(STATS_COLUMNS, ""))
        # Delta parses them.
        columns = [*STREAM_COLUMNS, *map(name_ddl, self.cluster_by), *filter(None, map(str.strip, given))]
        # Delta refuses statistics of a column whose values name the folders.
        folders = {name.lower() for name in self.partition_by}
        wanted = [name for name in dict.fromkeys(columns) if name.lower() not in folders]
        return {**self.properties, STATS_COLUMNS: ",".join(wanted)}

    def check_columns(self, columns: Iterable[str]) -> None:
        """Before the table is made: the rows must have the columns.

        Raises:
            SchemaMismatchError: naming those that they lack, or have although Delta is to compute them.
        """
        known, generated = ({name.lower(): name for name in names} for names in (columns, self.generated_columns))
        if twice := sorted(generated.keys() & known.keys()):
            raise SchemaMismatchError(
                f"the rows have the column {known[twice[0]]}, which is to be computed from the others",
                remedy="Leave it out of generated_columns, or out of what the transform makes.",
            )
        lacking = [
            n for n in (*self.partition_by, *self.cluster_by) if n.lower() not in known.keys() | generated.keys()
        ]
        if lacking:
            raise SchemaMismatchError(
                f"the table is to be laid out by {', '.join(lacking)}, and the rows have no such column",
                remedy="Let the transform make it, also where it is a field of a struct, or correct partition_by and "
                "cluster_by.",
            )

    def check_table(self, log: DeltaLog) -> None:
        """A table that is there cannot be partitioned in another way, nor get columns that Delta computes.

        Raises:
            SchemaMismatchError: it would have to be.
        """
        snapshot = log.snapshot() if self.partition_by or self.generated_columns else None
        if snapshot is None:
            return
        is_as_told = [n.lower() for n in snapshot.partition_columns] == [n.lower() for n in self.partition_by]
        if self.partition_by and not is_as_told:
            raise SchemaMismatchError(
                f"{log.path} is partitioned by {list(snapshot.partition_columns)}, not by {list(self.partition_by)}",
                remedy="Correct partition_by, or leave it out: it is for tables that are not there yet.",
            )
        computed = {name.lower() for name in snapshot.computed_columns}
        if lacking := [name for name in self.generated_columns if name.lower() not in computed]:
            raise SchemaMismatchError(
                f"{log.path} does not compute {', '.join(lacking)}, and Delta takes generated columns only when a "
                "table is made",
                remedy="Correct generated_columns, let the transform make the column, or ingest into another table.",
            )


def _check_columns(option: str, names: Iterable[str]) -> None:
    found = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    is_named = all(isinstance(name, str) and name for name in found)
    if not is_named or len({name.lower() for name in found}) != len(found):
        raise InvalidOptionError(
            f"{option}={names!r} names no columns, each once", remedy="Write it like ['country', 'day']."
        )


def _texts(option: str, given: Mapping[str, str]) -> dict[str, str]:
    texts = [*given, *given.values()] if isinstance(given, Mapping) else [None]
    if not all(isinstance(one, str) and one.strip() for one in texts):
        raise InvalidOptionError(
            f"{option}={given!r} has something else than names and texts",
            remedy="Write it like {'delta.enableChangeDataFeed': 'true'}, or {'day': 'CAST(_timestamp AS DATE)'}.",
        )
    return dict(given)


def create_table(spark: SparkSession, log: DeltaLog, columns: StructType, layout: TableLayout) -> None:
    """Create the table, unless another writer was faster.

    Args:
        spark: a session that can write Delta tables.
        log: of the table.
        columns: of its rows.
        layout: how.

    Raises:
        InvalidOptionError: a table of this layout cannot be.
        SchemaMismatchError: who was faster partitions it in another way.
        WriteError: Spark failed, and there is none.
    """
    parts = [
        "USING DELTA",
        f"PARTITIONED BY ({', '.join(map(quoted, layout.partition_by))})" if layout.partition_by else "",
        f"CLUSTER BY ({', '.join(map(quoted, layout.cluster_by))})" if layout.cluster_by else "",
        f"COMMENT {text(layout.comment)}" if layout.comment else "",
        f"TBLPROPERTIES {properties(layout.all_properties())}",
    ]
    try:
        written = ", ".join([*map(column_ddl, columns.fields), *_generated(spark, columns, layout)])
        spark.sql(f"CREATE TABLE IF NOT EXISTS {sql_name(log.path)} ({written}) {' '.join(filter(None, parts))}")
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        if log.snapshot() is None:
            if away := catalog_unavailable(error):
                raise away from None
            # What Spark refuses as it stands it refuses the next time, too; a storage may answer then.
            kind = InvalidOptionError if isinstance(error, _REFUSALS) else WriteError
            raise kind(
                f"{log.path} could not be made as it is to be laid out: {first_line(error)}",
                remedy="Correct how it is to be laid out; nothing was written.",
            ) from None
    layout.check_table(log)


def _generated(spark: SparkSession, columns: StructType, layout: TableLayout) -> list[str]:
    """The columns that Delta computes, of the types that their expressions have.

    Constraints are looked at, too: Delta makes a table with one on a column that is not there, which takes no row.
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
        # Asked for the columns, a Connect session looks at the condition.
        _ = rows.where(constraint).columns
    return [f"{column_ddl(column)} GENERATED ALWAYS AS ({expressions[column.name]})" for column in found]


def register(spark: SparkSession, table: str, name: str) -> None:
    """Let Spark's catalog know the table by a name.

    Args:
        spark: a session that can write Delta tables.
        table: its path or URI.
        name: for the catalog.

    Raises:
        InvalidOptionError: the catalog has no such schema, or another table of this name.
        CatalogUnavailableError: the catalog is a Hive metastore that does not answer.
        WriteError, …: Spark failed otherwise, as where the storage does not answer; see :func:`explain`.
    """
    quoted_name = ".".join(map(quoted, name.split(".")))
    try:
        spark.sql(f"CREATE TABLE IF NOT EXISTS {quoted_name} USING DELTA LOCATION {text(spark_location(table))}")
        known = {spark.sql(f"DESCRIBE DETAIL {one}").collect()[0]["id"] for one in (quoted_name, sql_name(table))}
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        if not isinstance(error, _REFUSALS) or catalog_unavailable(error):
            raise explain(error, table=table) from None
        raise InvalidOptionError(
            f"the catalog does not take catalog_table={name!r} for {table}: {first_line(error)}",
            remedy="The name of a table has letters, digits and underscores, and is that of no view. Its schema is "
            "there (CREATE SCHEMA …), and the session's user may make tables in it.",
        ) from None
    if len(known) > 1:
        raise InvalidOptionError(
            f"catalog_table={name!r} is another table, not {table}", remedy="Give it another name, or none."
        )
