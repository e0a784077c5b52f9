"""``reject``: a transform says which rows are bad, and their messages become dead letters.

What a call does depends on what the rows are made for, which whoever calls the transform says with :func:`treating`.
Only one of the treatments decides, :class:`Rejections`; so it does not matter if a condition comes out otherwise the
next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from spark_jobs.reading.source import STREAM_COLUMNS
from stream_consumers.errors import InvalidOptionError, TransformError

REJECTED = "the transform rejects a row of this batch"
# Beside columns of the user.
REASON = "_stream_assets_reason"
_ORDER = "_stream_assets_order"
_PLACE = STREAM_COLUMNS[:3]
Treatment = Callable[[DataFrame, Column, Column], DataFrame]


def reject(rows: DataFrame, condition: Column | str, reason: Column | str) -> DataFrame:
    """The rows that are not bad; the messages of the others become dead letters, with their original bytes.

    A transform may call it several times. A message becomes a dead letter as a whole if one row that was made of it is
    bad; the first reason counts. So a redrive, with a transform that rejects it no longer, writes all of its rows,
    once. What the transform drops later on does not take a rejection back.

    Without a run, as in a test that calls the transform, the bad rows are left out.

    Args:
        rows: they still have the columns ``_stream``, ``_shard`` and ``_sequence``.
        condition: what is bad, a column or SQL. Where it is null, the row is not.
        reason: what the dead letter says, a text; or a column, for a text with values of the row, which is quoted, so
            that logs and Dagster do not show it.

    Raises:
        InvalidOptionError: the condition or the reason is something else.
        TransformError: the rows lack those columns.

    Example::

        @stream_asset(source="kafka://broker:9092/orders", group="lakehouse", table="lake/orders", decode=ORDERS)
        def orders(batch):
            batch = reject(batch, "amount < 0", "the amount is negative")
            return reject(batch, f.col("user").isNull(), f.concat(f.lit("no user in order "), "id"))
    """
    for name, given in (("condition", condition), ("reason", reason)):
        if not isinstance(given, Column) and not (isinstance(given, str) and given.strip()):
            raise InvalidOptionError(
                f"reject(…, {name}={given!r}) says nothing",
                remedy="Write it like reject(rows, 'amount < 0', 'the amount is negative'); both may be columns.",
            )
    is_bad = f.coalesce(f.expr(condition) if isinstance(condition, str) else condition, f.lit(False))
    said = f.lit(reason) if isinstance(reason, str) else _quoted(reason)
    return _treatment.get()(rows, is_bad, f.concat(f.lit("rejected: "), said))


def _quoted(reason: Column) -> Column:
    """A text that may hold values of the row, in quotes: the kind of a reason leaves quoted text out."""
    escaped = f.regexp_replace(reason.cast("string"), r"(['\\])", r"\\$1")
    return f.coalesce(f.concat(f.lit("'"), escaped, f.lit("'")), f.lit("no reason given"))


@contextmanager
def treating(treatment: Treatment) -> Iterator[None]:
    """What :func:`reject` does meanwhile, in this thread.

    Args:
        treatment: :func:`leave_out`, :func:`let_pass`, :func:`fail_write`, or :class:`Rejections`.
    """
    token = _treatment.set(treatment)
    try:
        yield
    finally:
        _treatment.reset(token)


def leave_out(rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
    """Without the bad rows."""
    return rows.where(~is_bad)


def let_pass(rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
    """All of them: the bad messages are not among them any more."""
    return rows


def fail_write(rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
    """All of them; the write fails at the first bad one."""
    # A condition that Spark takes for the same at each try it would evaluate behind later ones, which may drop the row.
    is_passed = f.monotonically_increasing_id() >= 0
    return rows.where(f.when(is_bad, f.raise_error(f.lit(REJECTED)).cast("boolean")).otherwise(is_passed))


class Rejections:
    """A treatment that leaves the bad rows out and remembers them."""

    def __init__(self) -> None:
        self._parts: list[DataFrame] = []

    def __call__(self, rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
        """Remember the bad rows."""
        lacking = [name for name in _PLACE if name not in rows.columns]
        if lacking:
            raise TransformError(
                f"the transform rejects rows without {', '.join(lacking)}",
                remedy="Keep the columns _stream, _shard and _sequence: they tell whose message becomes a dead letter.",
            )
        order = f.lit(len(self._parts)).alias(_ORDER)
        self._parts.append(rows.where(is_bad).select(*_PLACE, reason.alias(REASON), order))
        return rows.where(~is_bad)

    @property
    def places(self) -> DataFrame | None:
        """The places of the bad messages, each once with the first reason; ``None`` if nothing can be rejected."""
        if not self._parts:
            return None
        found = reduce(DataFrame.unionByName, self._parts)
        return found.groupBy(*_PLACE).agg(f.min_by(REASON, _ORDER).alias(REASON))


_treatment: ContextVar[Treatment] = ContextVar("treatment", default=leave_out)
