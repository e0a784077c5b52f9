"""Writes the rows of a batch and its batch metadata in one Delta commit, and looks into the log whether it is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from delta import exceptions as conflicts
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame

from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import in_ranges
from spark_jobs.reading.source import STREAM_COLUMNS
from spark_jobs.session import first_line
from stream_consumers.errors import SchemaMismatchError, StreamAssetsError, TransformError, WriteError

# All of Delta's exceptions are conflicts with another commit; they have no base of their own.
CONFLICTS: tuple[type[Exception], ...] = tuple(getattr(conflicts, name) for name in conflicts.__all__)
CONFLICT_TEXTS = ("io.delta.exceptions.", "DELTA_CONCURRENT", "DELTA_PROTOCOL_CHANGED", "DELTA_METADATA_CHANGED")
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
            writer.mode("overwrite").option("replaceWhere", in_ranges(entry.ranges)).save(self.path)
        else:
            writer.mode("append").save(self.path)

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
        """

        def find() -> Commit | None:
            on_return()
            return ledger.written(entry.number, after=entry.base)

        commit = write_verified(lambda: self.write(rows, entry), find, table=self.path)
        return commit if commit is not None and commit.entry is not None and commit.entry.bid == entry.bid else None


def write_verified(write: Callable[[], None], find: Callable[[], T | None], *, table: str) -> T | None:
    """Write, then look whether it is there: an error may follow a commit that landed, and none one that was ignored.

    Args:
        write: writes.
        find: looks into the log; ``None`` if it is not there.
        table: for messages.

    Returns:
        What ``find`` found; ``None`` if another commit came first.

    Raises:
        TransformError, SchemaMismatchError, WriteError: nothing of it is in the table.
    """
    failure: Exception | None = None
    try:
        write()
    except Exception as error:  # noqa: BLE001 - whether it landed is for the log to say
        failure = error
    found = find()
    if found is None and failure is not None and not is_conflict(failure):
        raise explain(failure, table=table) from failure
    return found


def is_conflict(error: BaseException) -> bool:
    """Whether somebody else's commit came first: look into the ledger and plan again.

    In a classic session some conflicts arrive as bare Java errors, so the text counts as well as the type.
    """
    return isinstance(error, CONFLICTS) or any(text in str(error) for text in CONFLICT_TEXTS)


def explain(error: Exception, *, table: str) -> StreamAssetsError:
    """Map the error of a failed write to a :class:`StreamAssetsError`; nothing of the batch is in the table."""
    if isinstance(error, StreamAssetsError):
        return error
    is_python = isinstance(error, PythonException) or "[PYTHON_EXCEPTION]" in str(error)
    if is_python and "stream_consumers.errors." not in last_line(error):
        return TransformError(
            f"a function of the transform raised while writing {table}: {last_line(error)}",
            remedy="Correct it, or let it return null; the batch is read again at the next run.",
        )
    if isinstance(error, AnalysisException) and "schema" in str(error).lower():
        return SchemaMismatchError(
            f"the rows do not fit the table {table}: {first_line(error)}",
            remedy="Change the transform or the schema, or let new columns in with merge_schema=True.",
        )
    return WriteError(
        f"Spark could not write to {table}: {first_line(error)}",
        remedy="Nothing of the batch was written; it is read again at the next run.",
    )


def last_line(error: Exception) -> str:
    """The line of a Python worker's traceback that says what was raised, out of all that Spark puts around it."""
    raised = re.findall(r"^((?:[\w.]+\.)?\w*(?:Error|Exception): .*)$", str(error), re.MULTILINE)
    python = [line for line in raised if not line.startswith(("org.", "java.", "py4j."))]
    return str(python[-1]) if python else first_line(error)


def check_columns(rows: Mapping[str, str], table: Mapping[str, str], *, path: str, merge_schema: bool) -> None:
    """Refuse rows that do not fit the table before anything is read.

    Args:
        rows: names and types of the columns to write.
        table: those of the table; empty if it is new.
        path: the table, for the message.
        merge_schema: new columns are fine.

    Raises:
        SchemaMismatchError: listing the columns that do not fit.
    """
    lacking = [name for name in STREAM_COLUMNS if name not in rows]
    if lacking:
        raise SchemaMismatchError(
            f"the transform drops {', '.join(lacking)}",
            remedy="Keep the columns _stream, _shard, _sequence and _timestamp: they tell which message a row is from.",
        )
    folded = {name.lower(): kind for name, kind in table.items()}
    problems = [
        f"{name} is {kind} but {folded[name.lower()]} in the table"
        for name, kind in rows.items()
        if name.lower() in folded and folded[name.lower()] != kind
    ]
    if table and not merge_schema:
        problems += [f"{name} is not in the table" for name in rows if name.lower() not in folded]
    if problems:
        raise SchemaMismatchError(
            f"the rows do not fit the table {path}: {'; '.join(problems)}",
            remedy="Change the transform or the schema, or let new columns in with merge_schema=True.",
        )
