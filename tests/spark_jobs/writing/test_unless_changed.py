"""A write that replaces rows fails if what it removes are not the rows that were there at its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.writing.delta_table import is_conflict, unless_changed
from spark_jobs.writing.failures import ROWS_CHANGED
from tests.support.python_programs import run_python

pytestmark = [pytest.mark.spark, pytest.mark.slow]
RANGE = "_sequence >= 0 AND _sequence < 2"


@dataclass
class Table:
    """A table of which two messages are to be replaced."""

    spark: SparkSession
    path: str

    def rows(self, *sequences: int, user: str = "a") -> DataFrame:
        values = [("orders", 0, sequence, user) for sequence in sequences]
        return self.spark.createDataFrame(values, "_stream STRING, _shard BIGINT, _sequence BIGINT, user STRING")

    def append(self, *sequences: int, user: str = "a") -> None:
        self.rows(*sequences, user=user).coalesce(1).write.format("delta").mode("append").save(self.path)

    def sql(self, statement: str) -> None:
        self.spark.sql(statement.format(f"delta.`{self.path}`")).collect()

    def correct(self) -> None:
        self.sql("UPDATE {} SET user = 'b' WHERE _sequence = 1")

    def version(self) -> int:
        snapshot = DeltaLog(self.path).snapshot()
        assert snapshot is not None
        return snapshot.version

    def is_replaced(self, rows: DataFrame, *meanwhile: Callable[[], None]) -> bool:
        guarded = unless_changed(rows, DeltaLog(self.path), version=self.version(), where=RANGE, fails=ROWS_CHANGED)
        for act in meanwhile:
            act()
        before = self.users()
        try:
            guarded.write.format("delta").mode("overwrite").option("replaceWhere", RANGE).save(self.path)
        except Exception as error:
            if not is_conflict(error) or self.users() != before:
                raise
            return False
        return True

    def users(self) -> list[tuple[int, str]]:
        rows = self.spark.read.format("delta").load(self.path).collect()
        return sorted((row["_sequence"], row["user"]) for row in rows)


def made(spark: SparkSession, path: Path) -> Table:
    table = Table(spark, str(path))
    table.append(0, 1)
    table.append(5, 6)
    return table


@pytest.fixture
def table(spark: SparkSession, folder: Path) -> Table:
    return made(spark, folder / "t")


VECTORS = "ALTER TABLE {} SET TBLPROPERTIES (delta.enableDeletionVectors = true)"


@pytest.mark.parametrize("vectors", [False, True], ids=["files", "vectors"])
@pytest.mark.parametrize("doubled", [False, True], ids=["one-row", "two-rows"])
def test_other_contents_at_the_same_places_are_a_change(table: Table, doubled: bool, vectors: bool) -> None:
    if vectors:
        table.sql(VECTORS)
    if doubled:
        table.append(0, 1)
    assert not table.is_replaced(table.rows(0, 1, user="old"), table.correct)
    assert table.is_replaced(table.rows(0, 1, user="c"))
    assert table.users() == [(0, "c"), (1, "c"), (5, "a"), (6, "a")]


def test_two_rows_of_another_message_are_a_change(table: Table) -> None:
    def act() -> None:
        table.sql("DELETE FROM {} WHERE _sequence = 0")
        table.append(1, 1)

    table.sql("DELETE FROM {} WHERE _sequence < 2")
    table.append(0, 0)
    assert not table.is_replaced(table.rows(0), act)


def test_a_write_without_rows_removes_no_others(table: Table) -> None:
    none = f.col("user") == "none"
    for rows in (table.rows(0, 1).where(none), table.rows(0).limit(0), table.rows()):
        assert not table.is_replaced(rows, table.correct)
    assert table.is_replaced(table.rows(0, 1).where(none))
    assert table.users() == [(5, "a"), (6, "a")]


OVER_CONNECT = """
import sys
from pathlib import Path
from spark_jobs.session import SparkOptions, create_session
from tests.spark_jobs.writing.test_unless_changed import made
table = made(create_session(SparkOptions(remote=sys.argv[1])), Path(sys.argv[2]))
for rows in (table.rows(), table.rows(0, 1)):
    assert not table.is_replaced(rows, table.correct)
assert table.is_replaced(table.rows())
"""


def test_a_change_is_seen_over_connect(server: str, folder: Path) -> None:
    """There Spark knows earlier that a batch has no rows, and its errors come as texts of the server."""
    done = run_python(OVER_CONNECT, server, folder / "t")
    assert done.returncode == 0, done.stderr


def test_what_lands_elsewhere_is_no_change(table: Table) -> None:
    def act() -> None:
        table.append(7)
        table.sql("UPDATE {} SET user = 'b' WHERE _sequence = 5")
        table.sql("ALTER TABLE {} SET TBLPROPERTIES (note = 'n')")

    assert table.is_replaced(table.rows(0, 1, user="c"), act)


def test_rows_that_move_to_another_file_are_compared_again(table: Table) -> None:
    assert not table.is_replaced(table.rows(0, 1, user="c"), lambda: table.sql("OPTIMIZE {}"))
    assert table.is_replaced(table.rows(0, 1, user="c"))


def test_a_restore_of_the_same_rows_is_no_change(table: Table) -> None:
    back = f"RESTORE TABLE {{}} TO VERSION AS OF {table.version()}"
    assert table.is_replaced(table.rows(0, 1, user="c"), table.correct, lambda: table.sql(back))
