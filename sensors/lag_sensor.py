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

from sensors.asset_runs import AssetRuns
from sensors.lag import LagObserver, Measurement, describe_measurement, measure
from spark_jobs.batches.ingestion import Ingestion
from stream_consumers.create import StreamSource
from stream_consumers.display import counted
from stream_consumers.errors import (
    BrokerUnavailableError,
    DataLossError,
    InvalidOptionError,
    SourceRecreatedError,
    UnsupportedVersionError,
)
from stream_consumers.options import AutoStreamReset, check_count, check_range, choose_fields
from stream_consumers.versions import check_keys, check_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_BROKER_WAIT_SECONDS = 60.0
LAG_TAG = "stream_assets/lag"
MEMBER_TAG = "stream_assets/member"
STALE_RUN_SECONDS = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class LagPolicy:
    """When the sensor requests a run.

    Args:
        min_lag: the number of messages to wait for.
        max_wait_seconds: the longest wait for ``min_lag``, so that a quiet stream is written, too.
        budget_seconds: the longest time of a measurement; far below the 60 s after which Dagster ends a tick.
        answer_seconds: the longest wait for one answer of a broker, because the daemon may evaluate one sensor at a
            time. While the broker does not answer, the sensor retries at growing intervals, and reports that; after
            ``retry_seconds`` of the asset, the ticks fail.
        retry_seconds: the pause after two failed runs in a row, which doubles up to 15 minutes.
        after_cancel_seconds: the pause after a run that was cancelled; it ends when a run is launched by hand.
        stale_run_seconds: the age from which a run no longer delays the next one, because two runs at once are safe;
            with ``single_writer``, where they are not, a run delays the next one until Dagster knows that it has ended.
        max_runs: how many runs share the work at the same time, in mode ``load_balanced``.
        keeps_alive: whether a run is requested whenever too few are in flight, even without lag, so that no message
            waits for a run to start. It is set if runs have ``linger_seconds``.
        interval_seconds: the least time between two ticks; Dagster's loop makes it at least about 5 s.
        status: whether the sensor runs without being turned on.
    """

    min_lag: int = 1
    max_wait_seconds: float = 60.0
    budget_seconds: float = 20.0
    answer_seconds: float = 5.0
    retry_seconds: float = 30.0
    after_cancel_seconds: float = 120.0
    stale_run_seconds: float = STALE_RUN_SECONDS
    max_runs: int = 1
    keeps_alive: bool = False
    interval_seconds: int = 30
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED

    def __post_init__(self) -> None:
        check_count("min_lag", self.min_lag, at_least=0)
        check_count("max_runs", self.max_runs)
        check_count("interval_seconds", self.interval_seconds)
        choose_fields(self, status=dg.DefaultSensorStatus)
        for field in fields(self):
            if field.name.endswith("_seconds"):
                check_range(field.name, getattr(self, field.name))

    def for_runs(self, linger_seconds: float) -> LagPolicy:
        """Return the policy for runs that keep polling for this long.

        Raises:
            InvalidOptionError: ``min_lag`` makes messages wait, while runs wait for messages.

        Example:
            >>> policy = LagPolicy(max_wait_seconds=5).for_runs(600)
            >>> policy.keeps_alive, policy.stale_run_seconds - STALE_RUN_SECONDS
            (True, 600.0)
        """
        if not linger_seconds:
            return self
        if self.min_lag > 1:
            raise InvalidOptionError(
                f"min_lag={self.min_lag} makes messages wait, but linger_seconds={linger_seconds:g} makes runs wait",
                remedy="Leave one of them out.",
            )
        # A run that keeps polling is not stale before its time is over.
        is_usual = self.stale_run_seconds == STALE_RUN_SECONDS
        stale = STALE_RUN_SECONDS + linger_seconds if is_usual else self.stale_run_seconds
        return replace(self, keeps_alive=True, stale_run_seconds=stale)


@dataclass(frozen=True, slots=True)
class LagCursor:
    """The state of the sensor: its waits, and the observation that it reported last; never positions."""

    waiting_since: float | None = None
    observed: str = ""
    number: int = 0
    silent_since: float | None = None
    ask_at: float = 0.0
    paused_after: str = ""

    def at(self, now: float) -> LagCursor:
        """Return the cursor without times in the future, because a clock that was set back would delay all runs.

        Args:
            now: the present, in seconds since 1970.

        Example:
            >>> LagCursor(waiting_since=1000.0, silent_since=1000.0, ask_at=1060.0).at(500.0)
            LagCursor(waiting_since=None, observed='', number=0, silent_since=None, ask_at=0.0, \
paused_after='')
        """
        since, silent = self.waiting_since, self.silent_since
        is_silent = silent is not None and silent <= now and self.ask_at <= now + MAX_BROKER_WAIT_SECONDS
        return replace(
            self,
            waiting_since=since if since is not None and since <= now else None,
            silent_since=silent if is_silent else None,
            ask_at=self.ask_at if is_silent else 0.0,
        )


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
            silent_since = cursor.silent_since or now
            silent = now - silent_since
            if silent >= ingestion.retry_seconds:
                raise BrokerUnavailableError(
                    f"{error.what.rstrip('.')}, for {silent:.0f} s so far", remedy=error.remedy, **error.facts
                ) from error
            pause = min(MAX_BROKER_WAIT_SECONDS, silent)
            waiting = replace(cursor, silent_since=silent_since, ask_at=now + pause)
            return _wait_for_broker(waiting, str(error), now, ingestion.retry_seconds)
        # This number grows with every batch of any transaction sequence.
        number = sum(found.state.positions.values()) + (found.state.newest.base if found.state.newest else 0)
        # The wait starts again after a batch was written.
        since = cursor.waiting_since if number == cursor.number else None
        # With a single writer, an old run may still be alive, and a second one could overwrite its commits.
        stale_seconds = math.inf if ingestion.single_writer else policy.stale_run_seconds
        runs = AssetRuns.find(
            context,
            asset_key,
            job.name,
            stale_seconds=stale_seconds,
            is_partitioned=is_partitioned,
            waits_for_replays=ingestion.single_writer,
            replay_jobs=replay_jobs,
        )
        waiting_since = None if not found.total else since or runs.now
        observed = short_digest(describe_measurement(found))
        is_news = observed != cursor.observed
        taken = [one.run.tags.get(MEMBER_TAG, ingestion.member) for one in runs.in_flight]
        reason = _skip_reason(found, runs, ingestion, policy, waited=runs.now - (waiting_since or runs.now))
        events = observer.observations(found) if is_news else []
        cancelled = runs.newest_cancelled(policy.after_cancel_seconds) if found.total else None
        paused_after = cancelled.run.run_id if cancelled else ""
        if cancelled and paused_after != cursor.paused_after:
            events.append(observer.observation_of_pause(paused_after, cancelled.ended + policy.after_cancel_seconds))
        return dg.SensorResult(
            # No run key: Dagster launches each key once, so the retry of a failed run would never be launched. Runs do
            # not pile up because those in flight are counted, and the ledger prevents duplicate rows.
            run_requests=None if reason else _requests(found, policy, taken),
            skip_reason=None if reason is None else dg.SkipReason(reason),
            cursor=write_cursor(LagCursor(waiting_since, observed, number, paused_after=paused_after)),
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
    silent, left = now - (cursor.silent_since or now), cursor.ask_at - now
    return dg.SensorResult(
        skip_reason=dg.SkipReason(
            f"{what.rstrip('.')}. It has not answered for {silent:.0f} s; the next attempt is "
            f"{f'in {left:.0f} s' if left >= 1 else 'at the next tick'}. After {seconds:g} s ticks fail"
        ),
        cursor=write_cursor(cursor),
    )


def _skip_reason(
    found: Measurement, runs: AssetRuns, ingestion: Ingestion, policy: LagPolicy, *, waited: float
) -> str | None:
    """Return why no run is requested, as text with the numbers; ``None`` to request one."""
    if len(runs.in_flight) >= policy.max_runs:
        return f"{runs.describe_in_flight()}; {found.describe()}"
    is_first_from_the_end = found.state.newest is None and ingestion.start is AutoStreamReset.LATEST
    is_lag_asked = found.is_exact and not policy.keeps_alive
    if is_lag_asked and not found.total and not is_first_from_the_end:
        if not found.extents:
            return "no lag: the stream is empty or does not exist"
        return f"no lag: {counted(len(found.extents), 'shard')} read completely{found.blocked()}"
    if is_lag_asked and found.total < policy.min_lag and waited < policy.max_wait_seconds and found.total:
        left = policy.max_wait_seconds - waited
        return f"{found.describe()} is below min_lag {policy.min_lag}; a run is requested in {left:.0f} s at the latest"
    pause = runs.pause(retry_seconds=policy.retry_seconds, after_cancel_seconds=policy.after_cancel_seconds)
    return pause and f"{pause}; {found.describe()}"


def _requests(found: Measurement, policy: LagPolicy, taken: Sequence[str]) -> list[dg.RunRequest]:
    """Request at most one run for each shard with messages to read or wait for, each as a different member."""
    shards = sum(1 for count in found.lag.values() if count or policy.keeps_alive)
    members = ["main", *(f"member-{number}" for number in range(2, policy.max_runs + 1))]
    free = [member for member in members if member not in taken][: max(1, min(policy.max_runs - len(taken), shards))]
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
