"""The dead-letter sensor: tells of messages that could not be used, or starts a job that takes care of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dagster as dg

from sensors.asset_runs import IN_FLIGHT
from sensors.cursors import read_cursor, write_cursor
from stream_assets.asset import StreamAsset
from stream_consumers.options import check_count, choice
from stream_consumers.wording import counted

DEAD_LETTERS_TAG = "stream_assets/dead_letters"


@dataclass(frozen=True, slots=True)
class NewDeadLetters:
    """What came since the sensor told of dead letters last.

    Args:
        asset_key: of the table whose messages they were.
        table: where they are, with their original bytes.
        new: how many came.
        total: how many the group has written in all.
        lost: how many messages were gone before they were read, in all, at the most.
    """

    asset_key: dg.AssetKey
    table: str
    new: int
    total: int
    lost: int

    def describe(self) -> str:
        """The numbers, for people.

        Example:
            >>> NewDeadLetters(dg.AssetKey("orders"), "/lake/orders_dead_letters", 3, 10, 0).describe()
            '/lake/orders_dead_letters has 3 new dead letters of orders, 10 in all'
        """
        lost = f"; up to {counted(self.lost, 'message')} gone before the read" if self.lost else ""
        name = self.asset_key.to_user_string()
        return f"{self.table} has {counted(self.new, 'new dead letter')} of {name}, {self.total} in all{lost}"


Tell = Callable[[dg.SensorEvaluationContext, NewDeadLetters], object]


@dataclass(frozen=True, slots=True)
class _Cursor:
    """How many were reported."""

    dead: int = 0
    lost: int = 0


def build_dead_letter_sensor(
    stream: StreamAsset,
    *,
    job: Any = None,
    tell: Tell | None = None,
    least: int = 1,
    sensor_seconds: int = 60,
    sensor_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """A sensor that notices when dead letters of a stream asset come, and tells of them or starts a job.

    Each time, an observation of the asset has the numbers: what is new, and how many there are. It reads the ledger in
    the Delta log, without Spark. Without ``job`` and ``tell`` the observation, and a warning in the log of the tick,
    are all.

    Args:
        stream: the asset.
        job: a job to run for them, one at a time.
        tell: called with the context of the tick and what came (:class:`stream_assets.NewDeadLetters`), to send it
            somewhere. When it raises, the tick fails, and the next one tells again.
        least: wait for so many.
        sensor_seconds: the least time between two ticks.
        sensor_status: whether the sensor runs without being turned on.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> build_dead_letter_sensor(orders, tell=lambda context, found: print(found.describe())).name
        'orders_dead_letters'
    """
    status = choice(dg.DefaultSensorStatus, sensor_status, option="sensor_status")
    check_count("least", least)

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        known = read_cursor(context.cursor, _Cursor)
        ingestion = stream.declared.located(context.instance).ingestion
        totals = ingestion.ledger().read().totals
        lost = sum(parts.size for parts in totals.lost.values())
        # A RESTORE takes dead letters back.
        known = _Cursor(min(known.dead, totals.dead), min(known.lost, lost))
        new = (totals.dead - known.dead) + (lost - known.lost)
        if new < least:
            return _skip(f"{counted(new, 'new dead letter')}, {totals.dead} in all", known)
        running = _running(context.instance, job) if job is not None else None
        if running is not None:
            return _skip(f"run {running} has to end before {counted(new, 'new dead letter')} can be redriven", known)
        found = NewDeadLetters(stream.key, ingestion.dead_letters().path, totals.dead - known.dead, totals.dead, lost)
        context.log.warning(found.describe())
        if tell is not None:
            tell(context, found)
        observation = dg.AssetObservation(
            stream.key,
            metadata={
                "stream/new_dead_letters": found.new,
                "stream/dead_letters": found.total,
                "stream/lost_messages": found.lost,
                "stream/dead_letter_table": dg.MetadataValue.path(found.table),
            },
        )
        told = write_cursor(_Cursor(totals.dead, lost))
        if job is None:
            return dg.SensorResult(skip_reason=found.describe(), cursor=told, asset_events=[observation])
        request = dg.RunRequest(job_name=job.name, tags={DEAD_LETTERS_TAG: str(found.new)})
        return dg.SensorResult(run_requests=[request], cursor=told, asset_events=[observation])

    options: dict[str, Any] = {} if job is None else {"job": job}
    return dg.SensorDefinition(
        name=f"{stream.declared.name}_dead_letters",
        evaluation_fn=evaluate,
        minimum_interval_seconds=sensor_seconds,
        default_status=status,
        description=f"Notices when dead letters of {stream.key.to_user_string()} come.",
        **options,
    )


def _skip(why: str, cursor: _Cursor) -> dg.SensorResult:
    return dg.SensorResult(skip_reason=why, cursor=write_cursor(cursor))


def _running(instance: dg.DagsterInstance, job: Any) -> str | None:
    wanted = dg.RunsFilter(job_name=job.name, statuses=list(IN_FLIGHT))
    found = instance.get_runs(filters=wanted, limit=1)
    return found[0].run_id if found else None
