"""Writes into a table, watched; transaction settings that leak; a log that is cleaned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.writing.delta_table import DeltaWriter
from tests.support.polling import until


class Writes:
    """What became of each write into the main table, by batch id: the exception, or ``None``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.outcomes: dict[str, Exception | None] = {}
        self.before: Any = lambda: None
        self.after: Any = lambda: None
        self._write = DeltaWriter.write

        def watched(sink: DeltaWriter, rows: DataFrame, entry: LedgerEntry, **options: Any) -> None:
            self.write(sink, rows, entry, **options)

        patch.setattr(DeltaWriter, "write", watched)

    def write(self, sink: DeltaWriter, rows: DataFrame, entry: LedgerEntry, **options: Any) -> None:
        is_batch = entry.kind == "batch"
        try:
            if is_batch:
                self.before()
            self._write(sink, rows, entry, **options)
            if is_batch:
                self.after()
        except Exception as error:
            self.outcomes[entry.bid] = error
            raise
        self.outcomes[entry.bid] = None


def clean_log(table: str) -> None:
    """Somebody else commits, much later Delta removes the commits from before the newest checkpoint."""
    DeltaTable(table).alter.set_table_properties({"delta.logRetentionDuration": "interval 1 day"})
    remove_older_commits(table)


def remove_older_commits(table: str) -> None:
    """Delta removes the commits from before the newest one, which it has made a checkpoint of."""
    DeltaTable(table).create_checkpoint()
    for commit in sorted(Path(table, "_delta_log").glob("*.json"))[:-1]:
        commit.unlink()


APP, VERSION = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"


def waiting(column: str, *, started: Path, landed: Path) -> Column:
    """A BIGINT column as it is, whose rows are written once ``landed`` exists; ``started`` is made while they wait."""

    def wait(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        started.touch()
        until(landed.exists)
        return number

    return f.udf(wait, "bigint")(column)
