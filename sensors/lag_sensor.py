"""The lag sensor, which measures the lag of a group, and requests runs by its policy."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg
from pydantic import TypeAdapter

from sensors.asset_runs import MEMBER_TAG, find_runs
from sensors.lag import LagObserver
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.lag import Measurement, describe_measurement, measure
from spark_jobs.run_policy import RunPolicy, Waits, decide, silence_error
from stream_consumers.create import StreamSource
from stream_consumers.errors import (
    BrokerUnavailableError,
    DataLossError,
    SourceRecreatedError,
    UnsupportedVersionError,
)
from stream_consumers.options import AutoStreamReset, check_count, choose_fields
from stream_consumers.versions import check_keys, check_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LAG_TAG = "stream_assets/lag"


@dataclass(frozen=True, slots=True)
class LagPolicy(RunPolicy):
    """When the sensor requests a run: the options of ``RunPolicy``, and those of a sensor of Dagster.

    Dagster ends a tick after 60 s, so ``budget_seconds`` must stay far below. If the broker does not answer for the
    ``retry_seconds`` of the asset, the ticks fail.

    Args:
        interval_seconds: the least time between two ticks; Dagster's loop makes it at least about 5 s.
        status: whether the sensor runs without being turned on.
    """

    interval_seconds: int = 30
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED

    def __post_init__(self) -> None:
        # super() without arguments fails in a dataclass with slots, which is another class than the one defined here.
        RunPolicy.__post_init__(self)
        check_count("interval_seconds", self.interval_seconds)
        choose_fields(self, status=dg.DefaultSensorStatus)


@dataclass(frozen=True, slots=True)
class LagCursor(Waits):
    """The state of the sensor: its waits, the observation that it reported last, and the cancelled run that it did."""

    observed: str = ""
    paused_after: str = ""


@dataclass(frozen=True, slots=True)
class SensorInputs:
    """The inputs of a lag sensor.

    Args:
        source: the stream.
        ingestion: the group and the table, which has the ledger.
        upstream: the asset of each stream, by stream key; the lag is reported as an observation of it.
    """

    source: StreamSource
    ingestion: Ingestion
    upstream: Mapping[str, dg.AssetKey]


def build_lag_sensor(
    *,
    name: str,
    inputs: Callable[[dg.DagsterInstance], SensorInputs],
    job: Any,
    asset_key: dg.AssetKey,
    description: str | None = None,
    policy: LagPolicy = LagPolicy(),
    is_partitioned: bool = False,
    replay_jobs: Sequence[str] = (),
) -> dg.SensorDefinition:
    """Build a sensor that requests a run of ``job`` when there are messages to read.

    Args:
        name: the name of the sensor.
        inputs: returns the stream, the ingestion and the assets of the streams; it is called at each tick.
        job: the job to run. Runs of other jobs that materialize the asset delay the next run, too.
        asset_key: the asset that the job materializes.
        description: the description of the sensor.
        policy: when to request a run.
        is_partitioned: whether the asset has partitions, whose runs replay and do not delay other runs.
        replay_jobs: the names of jobs that write the table without materializing the asset. With ``single_writer``,
            where only one run may write the table, their runs delay the next run, too.
    """

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        current = inputs(context.instance)
        source, ingestion, upstream = current.source, current.ingestion, current.upstream
        now = time.time()
        cursor = read_cursor(context.cursor, LagCursor).at(now)
        if cursor.silent_since is not None and now < cursor.ask_at:
            return _wait_for_broker(cursor, f"{source.url} did not answer", now, ingestion.retry_seconds)
        observer = LagObserver(ingestion.group, source.url, asset_key, name, upstream)
        try:
            found = measure(
                source, ingestion, budget_seconds=policy.budget_seconds, answer_seconds=policy.answer_seconds
            )
        except (SourceRecreatedError, DataLossError) as error:
            # Dagster ignores the result of a failed tick, so the events are reported directly.
            for event in observer.observations_of_loss(error, context.instance):
                context.instance.report_runless_asset_event(event)
            raise
        except BrokerUnavailableError as error:
            waiting = cursor.after_silence(now)
            if now - (cursor.silent_since or now) >= ingestion.retry_seconds:
                raise silence_error(error, cursor, now) from error
            return _wait_for_broker(waiting, str(error), now, ingestion.retry_seconds)
        runs = find_runs(
            context,
            asset_key,
            job.name,
            # With a single writer, an old run may still be alive, and a second one could overwrite its commits.
            stale_seconds=math.inf if ingestion.single_writer else policy.stale_run_seconds,
            is_partitioned=is_partitioned,
            waits_for_replays=ingestion.single_writer,
            replay_jobs=replay_jobs,
        )
        cursor = cursor.after(found, runs.now)
        decision = decide(found, runs, cursor, policy, is_first_from_the_end=ingestion.start is AutoStreamReset.LATEST)
        observed = short_digest(describe_measurement(found))
        events = observer.observations(found) if observed != cursor.observed else []
        cancelled = decision.cancelled
        paused_after = cancelled.id if cancelled else ""
        if cancelled and paused_after != cursor.paused_after:
            events.append(observer.observation_of_pause(paused_after, cancelled.ended + policy.after_cancel_seconds))
        taken = [one.member or ingestion.member for one in runs.in_flight]
        return dg.SensorResult(
            # No run key: Dagster launches each key once, so the retry of a failed run would never be launched. Runs do
            # not pile up because those in flight are counted, and the ledger prevents duplicate rows.
            run_requests=_requests(found, policy, taken, decision.runs) if decision.runs else None,
            skip_reason=None if decision.runs else dg.SkipReason(decision.reason),
            cursor=write_cursor(replace(cursor, observed=observed, paused_after=paused_after)),
            asset_events=events,
        )

    return dg.SensorDefinition(
        name=name,
        evaluation_fn=evaluate,
        job=job,
        minimum_interval_seconds=policy.interval_seconds,
        default_status=policy.status,
        description=description,
    )


def _wait_for_broker(cursor: LagCursor, what: str, now: float, seconds: float) -> dg.SensorResult:
    silence = cursor.describe_silence(what, now)
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"{silence}. After {seconds:g} s ticks fail"), cursor=write_cursor(cursor)
    )


def _requests(found: Measurement, policy: LagPolicy, taken: Sequence[str], count: int) -> list[dg.RunRequest]:
    """Request this number of runs, each as a different member."""
    members = ["main", *(f"member-{number}" for number in range(2, policy.max_runs + 1))]
    free = [member for member in members if member not in taken][:count]
    return [dg.RunRequest(tags={LAG_TAG: str(found.total), MEMBER_TAG: member}) for member in free]


def short_digest(text: str) -> str:
    """Return a short digest, which keeps the cursor small for any number of shards."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


CURSOR_VERSION = 1
Cursor = TypeVar("Cursor", bound="DataclassInstance")


def read_cursor(text: str | None, kind: type[Cursor]) -> Cursor:
    """Parse a cursor. One that is damaged, or was written by a release with other fields, is replaced by a new one.

    Args:
        text: the cursor.
        kind: the dataclass of the cursor, whose fields all have defaults.
    """
    try:
        document = json.loads(text or "{}")
        own = {name: value for name, value in document.items() if name != "v"}
        check_version(document.get("v"), what="the cursor", versions=[CURSOR_VERSION])
        check_keys(own, what="the cursor", keys=[field.name for field in fields(kind)])
        return TypeAdapter(kind).validate_python(own)
    except (ValueError, AttributeError, RecursionError, UnsupportedVersionError):
        return kind()


def write_cursor(cursor: DataclassInstance) -> str:
    """Serialize a cursor for :func:`read_cursor`."""
    values: dict[str, Any] = asdict(cursor)
    return json.dumps({"v": CURSOR_VERSION, **values})
