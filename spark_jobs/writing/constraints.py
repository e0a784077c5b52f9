"""What a Delta table asks of its rows, read from its metadata: CHECK, NOT NULL, lengths, generated columns.

Delta checks each row as it is written, and one bad row fails the write. Here the same conditions are asked before it,
to know which rows are bad. Delta still has the last word: what is not known here fails the write.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.table_expressions import CHECK, DEFAULT, GENERATED
from spark_jobs.reading.rejection import REASON
from spark_jobs.reading.sql_types import ddl
from spark_jobs.writing.storage import read_table

# Where Spark keeps the type of a string column that was declared with a length.
_LENGTH = re.compile(r"(?:var)?char\(([0-9]+)\)")
_TEXT_TYPE = "__CHAR_VARCHAR_TYPE_STRING"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition that each row of a table fulfils.

    Args:
        is_broken: the rows that do not, in SQL; never null.
        broken: what is said of them.
    """

    is_broken: str
    broken: str


@dataclass(frozen=True, slots=True)
class Constraints:
    """Those of a table.

    Args:
        configuration: the table properties.
        columns: as the log has them.
        types: the columns as Spark has them.

    Example:
        >>> columns = [{"name": "id", "type": "long", "nullable": False, "metadata": {}}]
        >>> table = Constraints({"delta.constraints.positive": "id > 0"}, columns)
        >>> for one in table.on(["id"]):
        ...     print(one.broken, "-", one.is_broken)
        the CHECK constraint positive (id > 0) is violated - (id > 0) IS NOT TRUE
        the column id is NOT NULL in the table - `id` IS NULL
    """

    configuration: Mapping[str, str]
    columns: Sequence[Mapping[str, Any]]
    types: StructType = field(default_factory=StructType)

    @classmethod
    def of(cls, spark: SparkSession, log: DeltaLog) -> Constraints:
        """Those of the table as it is now; none of one that is not there."""
        snapshot = log.snapshot()
        return cls(snapshot.configuration, snapshot.columns, read_table(spark, log).schema) if snapshot else cls({}, ())

    def on(self, names: Collection[str]) -> list[Constraint]:
        """The constraints on rows that have these columns.

        A column that may not be null, and that all rows lack, is no fault of a row.
        """
        known = {name.lower() for name in names}
        checks = [
            # To Delta a condition that is null is violated.
            Constraint(f"({text}) IS NOT TRUE", f"the CHECK constraint {name[len(CHECK) :]} ({text}) is violated")
            for name, text in sorted(self.configuration.items())
            if name.lower().startswith(CHECK)
        ]
        given = [one for one in self.columns if one["name"].lower() in known]
        made = [one for one in self.columns if one not in given and _is_generated(one)]
        return [*checks, *_not_null([*given, *made]), *_lengths([*given, *made]), *_generated(given)]

    def judged(self, rows: DataFrame) -> DataFrame | None:
        """The rows with what is wrong with each in the column :data:`REASON`; ``None`` if the table asks nothing."""
        asked = self.on(rows.columns)
        if not asked:
            return None
        reason = f.coalesce(*(f.when(f.expr(one.is_broken), f.lit(one.broken)) for one in asked))
        return self._completed(rows).withColumn(REASON, reason)

    def _completed(self, rows: DataFrame) -> DataFrame:
        """With the columns that the rows lack, as Delta adds them."""
        known = {name.lower() for name in rows.columns}
        lacking = [one for one in self.columns if one["name"].lower() not in known]
        # Those that are made of others are made last.
        for one in sorted(lacking, key=_is_generated):
            told = one.get("metadata", {})
            made = told.get(GENERATED) or told.get(DEFAULT, "NULL")
            rows = rows.withColumn(one["name"], f.expr(f"CAST({made} AS {ddl(self.types[one['name']].dataType)})"))
        return rows


def _is_generated(column: Mapping[str, Any]) -> bool:
    return GENERATED in column.get("metadata", {})


def _not_null(columns: Sequence[Mapping[str, Any]], parents: Sequence[str] = ()) -> Iterator[Constraint]:
    for column in columns:
        path = [*parents, column["name"]]
        if not column["nullable"]:
            # To Delta a struct that is null has no field, which is null, too.
            found = ".".join(map(quoted, path))
            yield Constraint(f"{found} IS NULL", f"the column {'.'.join(path)} is NOT NULL in the table")
        kind = column["type"]
        if isinstance(kind, Mapping) and kind["type"] == "struct":
            yield from _not_null(kind["fields"], path)


def _lengths(columns: Sequence[Mapping[str, Any]]) -> Iterator[Constraint]:
    for column in columns:
        kind = column.get("metadata", {}).get(_TEXT_TYPE, "")
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
                f"NOT ({quoted(name)} <=> ({text}))", f"the column {name} is not what the table makes it: {text}"
            )
