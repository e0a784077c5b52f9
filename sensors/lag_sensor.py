"""The lag sensor: measures how far a group is behind, and asks for runs when that is more than its policy allows."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import dagster as dg

from sensors.lag import Measurement, measure
from spark_jobs.batches.ingestion import Ingestion
from stream_consumers.create import StreamSource
from stream_consumers.options import AutoStreamReset, choice

IN_FLIGHT = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
# The job of runs that were started by hand on assets.
ASSET_JOB = "__ASSET_JOB"
RUNS_LOOKED_AT = 20
LONGEST_BACKOFF_SECONDS = 900.0
LAG_TAG = "stream_assets/lag"
MEMBER_TAG = "stream_assets/member"


@dataclass(frozen=True, slots=True)
class LagPolicy:
    """When a run is asked for.

    Args:
        min_lag: messages; below it the sensor waits for more.
        max_wait_seconds: but no longer than this, so that a quiet stream is written, too.
        budget_seconds: the most that measuring may take; far below the 60 s after which Dagster gives up on a tick.
        retry_seconds: after two failed runs in a row, the wait before the next; it doubles up to 15 minutes.
        stale_run_seconds: a run in flight for longer no longer holds the next one back; two runs at once are safe.
        max_runs: how many runs share the work at the same time.
    """

    min_lag: int = 1
    max_wait_seconds: float = 60.0
    budget_seconds: float = 20.0
    retry_seconds: float = 30.0
    stale_run_seconds: float = 6 * 3600.0
    max_runs: int = 1


@dataclass(frozen=True, slots=True)
class LagCursor:
    """What the sensor remembers: only for waiting and for not repeating observations, never for positions."""

    waiting_since: float | None = None
    observed: str = ""
    number: int = 0

    @classmethod
    def parse(cls, text: str | None) -> LagCursor:
        """Read it; anything unknown counts as nothing."""
        try:
            document: Any = json.loads(text or "{}")
            since = document.get("waiting_since")
            waiting = float(since) if since is not None else None
            return cls(waiting, str(document.get("observed", "")), int(document.get("number", 0)))
        except (ValueError, TypeError, AttributeError):
            return cls()

    def to_json(self) -> str:
        """The cursor text."""
        return json.dumps({"v": 1, **asdict(self)})


def build_lag_sensor(
    *,
    name: str,
    source: StreamSource,
    ingestion: Ingestion,
    job: Any,
    job_name: str,
    asset_key: dg.AssetKey,
    upstream: Mapping[str, dg.AssetKey],
    policy: LagPolicy = LagPolicy(),
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """A sensor that asks for a run of ``job`` when there is something to read.

    Args:
        name: of the sensor.
        source: the stream.
        ingestion: what goes where; the ledger is read from its table.
        job: the job to run.
        job_name: its name.
        asset_key: the asset that it makes.
        upstream: per stream, the asset that stands for it; lag is reported as an observation of it.
        policy: when to ask.
        minimum_interval_seconds: between two ticks; Dagster's loop makes it at least about 5.
        default_status: whether it runs without being turned on.
    """
    status = choice(dg.DefaultSensorStatus, default_status, option="default_status")

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now = time.time()
        cursor = LagCursor.parse(context.cursor)
        found = measure(source, ingestion, budget_seconds=policy.budget_seconds)
        # Grows with every batch, whatever transaction sequence it was written in.
        number = sum(found.state.positions.values()) + (found.state.newest.base if found.state.newest else 0)
        # What a run has written since was not waited for.
        since = cursor.waiting_since if number == cursor.number else None
        waiting_since = None if not found.total else since or now
        events, observed = _observations(found, upstream, cursor.observed)
        running = _in_flight(context.instance, job_name, asset_key, now, policy.stale_run_seconds)
        taken = [run.tags.get(MEMBER_TAG, ingestion.member) for run, _ in running]
        reason = (
            (_busy(running, found) if len(running) >= policy.max_runs else None)
            or _nothing_to_do(found, ingestion, now - (waiting_since or now), policy)
            or _backing_off(context.instance, job_name, now, policy.retry_seconds)
        )
        return dg.SensorResult(
            # No run key: a failed run would burn it, and its retry would never be launched. What keeps runs from
            # piling up is the check for one in flight; what keeps them from doubling anything is the ledger.
            run_requests=None if reason else _requests(found, policy.max_runs, taken),
            skip_reason=reason,
            cursor=LagCursor(waiting_since, observed, number).to_json(),
            asset_events=events,
        )

    return dg.SensorDefinition(
        name=name,
        evaluation_fn=evaluate,
        job=job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=status,
        description=f"Asks for a run when group {ingestion.group} is behind on {source.url}.",
    )


def _nothing_to_do(found: Measurement, ingestion: Ingestion, waited: float, policy: LagPolicy) -> dg.SkipReason | None:
    if not found.is_exact:
        return None
    if not found.total:
        if found.state.newest is None and ingestion.start is AutoStreamReset.LATEST:
            return None
        return dg.SkipReason(f"no lag: {len(found.extents)} shards are read to their ends{found.blocked()}")
    if found.total < policy.min_lag and waited < policy.max_wait_seconds:
        return dg.SkipReason(
            f"{found.describe()} is below min_lag {policy.min_lag}; "
            f"it is written in {policy.max_wait_seconds - waited:.0f} s at the latest"
        )
    return None


def _busy(running: Sequence[tuple[dg.DagsterRun, float]], found: Measurement) -> dg.SkipReason:
    runs = "; ".join(f"run {run.run_id} is {run.status.value} for {age:.0f} s" for run, age in running)
    return dg.SkipReason(f"{runs}; {found.describe()}")


def _requests(found: Measurement, most: int, taken: Sequence[str]) -> list[dg.RunRequest]:
    """No more runs than there are shards with something to read, each a member of its own."""
    behind = sum(1 for count in found.lag.values() if count)
    members = ["main", *(f"member-{number}" for number in range(2, most + 1))]
    free = [member for member in members if member not in taken][: max(1, min(most - len(taken), behind))]
    return [dg.RunRequest(tags={LAG_TAG: str(found.total), MEMBER_TAG: member}) for member in free]


def _in_flight(
    instance: dg.DagsterInstance, job_name: str, asset_key: dg.AssetKey, now: float, stale_seconds: float
) -> list[tuple[dg.DagsterRun, float]]:
    """The runs that hold the next one back, and how old they are; also those that were started by hand."""
    found = []
    for name in (job_name, ASSET_JOB):
        for record in instance.get_run_records(dg.RunsFilter(job_name=name, statuses=list(IN_FLIGHT)), limit=100):
            run, age = record.dagster_run, now - record.create_timestamp.timestamp()
            if (name == job_name or asset_key in (run.asset_selection or ())) and age < stale_seconds:
                found.append((run, age))
    return found


def _backing_off(instance: dg.DagsterInstance, job_name: str, now: float, retry_seconds: float) -> dg.SkipReason | None:
    """After one failure try again at once; after more, wait longer and longer."""
    records = instance.get_run_records(dg.RunsFilter(job_name=job_name), limit=RUNS_LOOKED_AT)
    failures = _failures_in_a_row(records)
    if failures < 2:
        return None
    ended = records[0].end_time or records[0].update_timestamp.timestamp()
    wait = min(LONGEST_BACKOFF_SECONDS, retry_seconds * 2 ** (failures - 2)) - (now - ended)
    if wait <= 0:
        return None
    return dg.SkipReason(
        f"the last {failures} runs failed (newest: {records[0].dagster_run.run_id}); the next try is in {wait:.0f} s"
    )


def _failures_in_a_row(records: Sequence[dg.RunRecord]) -> int:
    for count, record in enumerate(records):
        if record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
            return count
    return len(records)


def _observations(
    found: Measurement, upstream: Mapping[str, dg.AssetKey], observed: str
) -> tuple[list[dg.AssetObservation], str]:
    """One observation of each stream, if something changed since the last one."""
    now = json.dumps({str(shard): [found.extents[shard].end, count] for shard, count in sorted(found.lag.items())})
    digest = hash_text(now)
    if digest == observed:
        return [], observed
    events = []
    for stream, key in upstream.items():
        extents = {shard: extent for shard, extent in found.extents.items() if shard.stream == stream}
        records = [
            dg.TableRecord({"shard": str(shard), "end": extent.end, "lag": found.lag.get(shard, 0)})
            for shard, extent in sorted(extents.items())
        ]
        total = sum(found.lag.get(shard, 0) for shard in extents)
        events.append(
            dg.AssetObservation(
                asset_key=key,
                metadata={
                    "stream/lag": dg.MetadataValue.int(total),
                    "stream/shards": dg.MetadataValue.table(records) if records else dg.MetadataValue.text("none"),
                },
            )
        )
    return events, digest


def hash_text(text: str) -> str:
    """A short digest, so that the cursor stays small however many shards there are."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
