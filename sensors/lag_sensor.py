"""The lag sensor: measures how far a group is behind, and asks for runs when that is more than its policy allows."""

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
    """When a run is asked for.

    Args:
        min_lag: messages; below it the sensor waits for more.
        max_wait_seconds: but no longer than this, so that a quiet stream is written, too.
        budget_seconds: the most that measuring may take; far below the 60 s after which Dagster gives up on a tick.
        answer_seconds: the longest wait for one answer of a broker, since the daemon may look at one sensor at a time.
            While it does not answer, the sensor asks at growing intervals, and says so; when that has taken longer
            than runs try again (``retry_seconds`` of the asset), the ticks fail.
        retry_seconds: after two failed runs in a row, the wait before the next; it doubles up to 15 minutes.
        after_cancel_seconds: the pause after a run that was cancelled; it ends when a run is launched by hand.
        stale_run_seconds: a run that was asked for longer ago no longer holds the next one back, since two runs at once
            are safe; where they are not (``single_writer``) it does until Dagster knows that it has ended.
        max_runs: how many runs share the work at the same time, in mode ``load_balanced``.
        keeps_alive: runs stay and wait for messages: one is asked for whenever there are too few in flight, also
            without lag, so that no message waits for a run to start. It is set where runs have ``linger_seconds``.
        interval_seconds: the least time between two ticks; Dagster's loop makes it at least about 5.
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
        """The policy for runs that keep polling for this long.

        Raises:
            InvalidOptionError: messages are to wait for others, and runs for messages.

        Example:
            >>> policy = LagPolicy(max_wait_seconds=5).for_runs(600)
            >>> policy.keeps_alive, policy.stale_run_seconds - STALE_RUN_SECONDS
            (True, 600.0)
        """
        if not linger_seconds:
            return self
        if self.min_lag > 1:
            raise InvalidOptionError(
                f"min_lag={self.min_lag} lets messages wait, but linger_seconds={linger_seconds:g} lets a run wait for "
                "them",
                remedy="Leave one of them out.",
            )
        # A run that stays is not stale before its time is over.
        is_usual = self.stale_run_seconds == STALE_RUN_SECONDS
        stale = STALE_RUN_SECONDS + linger_seconds if is_usual else self.stale_run_seconds
        return replace(self, keeps_alive=True, stale_run_seconds=stale)


@dataclass(frozen=True, slots=True)
class LagCursor:
    """What the sensor remembers: only for waiting and for not repeating observations, never for positions."""

    waiting_since: float | None = None
    observed: str = ""
    number: int = 0
    silent_since: float | None = None
    ask_at: float = 0.0
    paused_after: str = ""

    def at(self, now: float) -> LagCursor:
        """Without times that are not over yet: a clock was set back, and until then nothing would be asked for.

        Args:
            now: in seconds since 1970.

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
    """What a lag sensor looks at.

    Args:
        source: the stream.
        ingestion: what goes where; the ledger is read from its table.
        upstream: per stream, the asset that stands for it; lag is reported as an observation of it.
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
    """A sensor that asks for a run of ``job`` when there is something to read.

    Args:
        name: of the sensor.
        inputs: returns what to look at; it is called at each tick.
        job: the job to run. Runs of other jobs hold the next one back, too, if they make the asset.
        asset_key: the asset that it makes.
        description: of the sensor.
        policy: when to ask.
        is_partitioned: whether the asset has partitions, so that runs of them replay and hold no run back.
        replay_jobs: the names of jobs that write the table without making the asset. Where only one run may write it
            (``single_writer``), they hold the next run back, too.
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
            # Dagster drops what a tick that fails would return.
            for event in observer.observations_of_loss(error, context.instance):
                context.instance.report_runless_asset_event(event)
            raise
        except BrokerUnavailableError as error:
            silent_since = cursor.silent_since or now
            silent = now - silent_since
            if silent >= ingestion.retry_seconds:
                raise BrokerUnavailableError(
                    f"{error.what.rstrip('.')}, for {silent:.0f} s now", remedy=error.remedy, **error.facts
                ) from error
            pause = min(MAX_BROKER_WAIT_SECONDS, silent)
            waiting = replace(cursor, silent_since=silent_since, ask_at=now + pause)
            return _wait_for_broker(waiting, str(error), now, ingestion.retry_seconds)
        # Grows with every batch, whatever transaction sequence it was written in.
        number = sum(found.state.positions.values()) + (found.state.newest.base if found.state.newest else 0)
        # What a run has written since was not waited for.
        since = cursor.waiting_since if number == cursor.number else None
        # An old run may live: with a single writer a second one could overwrite its commits.
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
            # No run key: a failed run would burn it, and its retry would never be launched. What keeps runs from
            # piling up is the check for one in flight; what keeps them from doubling anything is the ledger.
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
            f"{what.rstrip('.')}. It has not answered for {silent:.0f} s and is asked again "
            f"{f'in {left:.0f} s' if left >= 1 else 'at the next tick'}; from {seconds:g} s on the tick fails"
        ),
        cursor=write_cursor(cursor),
    )


def _skip_reason(
    found: Measurement, runs: AssetRuns, ingestion: Ingestion, policy: LagPolicy, *, waited: float
) -> str | None:
    """Why no run is asked for, with the numbers, for people; ``None`` if one is."""
    if len(runs.in_flight) >= policy.max_runs:
        return f"{runs.describe_in_flight()}; {found.describe()}"
    is_first_from_the_end = found.state.newest is None and ingestion.start is AutoStreamReset.LATEST
    is_lag_asked = found.is_exact and not policy.keeps_alive
    if is_lag_asked and not found.total and not is_first_from_the_end:
        if not found.extents:
            return "no lag: the stream is empty, or there is none of this name"
        return f"no lag: all of {counted(len(found.extents), 'shard')} is read{found.blocked()}"
    if is_lag_asked and found.total < policy.min_lag and waited < policy.max_wait_seconds and found.total:
        left = policy.max_wait_seconds - waited
        return f"{found.describe()} is below min_lag {policy.min_lag}; it is written in {left:.0f} s at the latest"
    pause = runs.pause(retry_seconds=policy.retry_seconds, after_cancel_seconds=policy.after_cancel_seconds)
    return pause and f"{pause}; {found.describe()}"


def _requests(found: Measurement, policy: LagPolicy, taken: Sequence[str]) -> list[dg.RunRequest]:
    """No more runs than there are shards with something to read, or to wait for, each a member of its own."""
    shards = sum(1 for count in found.lag.values() if count or policy.keeps_alive)
    members = ["main", *(f"member-{number}" for number in range(2, policy.max_runs + 1))]
    free = [member for member in members if member not in taken][: max(1, min(policy.max_runs - len(taken), shards))]
    return [dg.RunRequest(tags={LAG_TAG: str(found.total), MEMBER_TAG: member}) for member in free]


def short_digest(text: str) -> str:
    """A short digest, so that the cursor stays small however many shards there are."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


CURSOR_VERSION = 1
Cursor = TypeVar("Cursor", bound="DataclassInstance")


def read_cursor(text: str | None, kind: type[Cursor]) -> Cursor:
    """Read a cursor.

    A cursor is no promise: one that is damaged, or of a release that knows more fields, counts as a new one.

    Args:
        text: the cursor.
        kind: a dataclass of which each field has a default.
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
    """The text that :func:`read_cursor` reads."""
    values: dict[str, Any] = asdict(cursor)
    return json.dumps({"v": CURSOR_VERSION, **values})
