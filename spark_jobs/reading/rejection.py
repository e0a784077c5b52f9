"""``reject``: a transform marks rows as bad, and their messages become dead letters.

The effect of a call depends on the purpose of the rows, which the caller of the transform sets with :func:`treating`.
Only one treatment, :class:`Rejections`, records bad rows, so that a condition with changing results is evaluated once.
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
# The name must not collide with columns of the user.
REASON = "_stream_assets_reason"
_ORDER = "_stream_assets_order"
_PLACE = STREAM_COLUMNS[:3]
Treatment = Callable[[DataFrame, Column, Column], DataFrame]


def reject(rows: DataFrame, condition: Column | str, reason: Column | str) -> DataFrame:
    """Return the good rows; the messages of the bad ones become dead letters, with their original bytes.

    A transform may call it several times. If one row of a message is bad, the whole message becomes a dead letter, with
    the first reason. So a redrive, with a transform that no longer rejects it, writes all of its rows once. A rejection
    stands even if the transform drops the row later.

    Outside of a run, as in a test that calls the transform, the bad rows are dropped.

    Args:
        rows: rows that still have the columns ``_stream``, ``_shard`` and ``_sequence``.
        condition: a column or SQL that is true for bad rows. A row for which it is null is not bad.
        reason: the reason in the dead letter: a text, or a column for a text with values of the row. Such text is
            quoted, so that logs and Dagster do not show it.

    Raises:
        InvalidOptionError: the condition or the reason is neither a column nor text.
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
                f"reject(…, {name}={given!r}) needs a column or text that is not empty",
                remedy="Write it like reject(rows, 'amount < 0', 'the amount is negative'); both may be columns.",
            )
    is_bad = f.coalesce(f.expr(condition) if isinstance(condition, str) else condition, f.lit(False))
    said = f.lit(reason) if isinstance(reason, str) else _quoted(reason)
    return _treatment.get()(rows, is_bad, f.concat(f.lit("rejected: "), said))


def _quoted(reason: Column) -> Column:
    """Quote text that may hold values of the row, because the kind of a reason omits quoted text."""
    escaped = f.regexp_replace(reason.cast("string"), r"(['\\])", r"\\$1")
    return f.coalesce(f.concat(f.lit("'"), escaped, f.lit("'")), f.lit("no reason given"))


@contextmanager
def treating(treatment: Treatment) -> Iterator[None]:
    """Set what :func:`reject` does within the block, in this thread.

    Args:
        treatment: :func:`drop_bad_rows`, :func:`keep_bad_rows`, :func:`fail_on_bad_rows`, or :class:`Rejections`.
    """
    token = _treatment.set(treatment)
    try:
        yield
    finally:
        _treatment.reset(token)


def drop_bad_rows(rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
    """Drop the bad rows."""
    return rows.where(~is_bad)


def keep_bad_rows(rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
    """Keep all rows, because the bad messages were removed before."""
    return rows


def fail_on_bad_rows(rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
    """Keep all rows, and fail the write at the first bad one."""
    # Spark evaluates a deterministic condition after later ones, which may drop the row; this one is not deterministic.
    is_passed = f.monotonically_increasing_id() >= 0
    return rows.where(f.when(is_bad, f.raise_error(f.lit(REJECTED)).cast("boolean")).otherwise(is_passed))


class Rejections:
    """A treatment that drops the bad rows and records them."""

    def __init__(self) -> None:
        self._parts: list[DataFrame] = []

    def __call__(self, rows: DataFrame, is_bad: Column, reason: Column) -> DataFrame:
        """Record the bad rows."""
        lacking = [name for name in _PLACE if name not in rows.columns]
        if lacking:
            raise TransformError(
                f"the transform rejects rows without {', '.join(lacking)}",
                remedy="Keep the columns _stream, _shard and _sequence, which identify the message.",
            )
        order = f.lit(len(self._parts)).alias(_ORDER)
        self._parts.append(rows.where(is_bad).select(*_PLACE, reason.alias(REASON), order))
        return rows.where(~is_bad)

    @property
    def places(self) -> DataFrame | None:
        """The places of the bad messages, each once with its first reason; ``None`` if the transform never rejects."""
        if not self._parts:
            return None
        found = reduce(DataFrame.unionByName, self._parts)
        return found.groupBy(*_PLACE).agg(f.min_by(REASON, _ORDER).alias(REASON))


_treatment: ContextVar[Treatment] = ContextVar("treatment", default=drop_bad_rows)
