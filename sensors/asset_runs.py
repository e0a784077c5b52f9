"""The runs that materialize an asset, of any job, as the decision of the sensor needs them.

Dagster stores runs by job. The repository of the sensor has the jobs that materialize the asset: the user's jobs, and
the implicit job of runs that were launched by hand on assets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import dagster as dg

from spark_jobs.run_policy import PastRun, PastRuns, RunStatus
from stream_consumers.messages import is_recent

MEMBER_TAG = "stream_assets/member"
IN_FLIGHT = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
_FINISHED = {
    dg.DagsterRunStatus.SUCCESS: RunStatus.SUCCEEDED,
    dg.DagsterRunStatus.FAILURE: RunStatus.FAILED,
    dg.DagsterRunStatus.CANCELED: RunStatus.CANCELLED,
}
_MAX_FINISHED_RUNS = 100
PARTITION_TAGS = frozenset(("dagster/partition", "dagster/asset_partition_range_start"))
"""Each run of partitions has one of these tags."""


def find_runs(
    context: dg.SensorEvaluationContext,
    asset_key: dg.AssetKey,
    job_name: str,
    *,
    stale_seconds: float,
    is_partitioned: bool = False,
    waits_for_replays: bool = False,
    replay_jobs: Sequence[str] = (),
) -> PastRuns:
    """Find the runs of an asset.

    Args:
        context: the context of the tick.
        asset_key: the key of the asset.
        job_name: a job that materializes the asset, in any repository.
        stale_seconds: the age from which runs in flight are ignored; infinite to ignore none.
        is_partitioned: whether the asset has partitions. Runs of partitions replay, and are ignored.
        waits_for_replays: whether runs of partitions and of ``replay_jobs`` count while they are in flight.
        replay_jobs: the jobs that write the table without materializing the asset.
    """
    now = time.time()
    jobs = sorted({job_name, *_jobs(context.repository_def, asset_key)})
    ignores_partitions = is_partitioned and not waits_for_replays
    in_flight = [
        one
        for job in jobs
        for one in _runs(context.instance, job, asset_key, IN_FLIGHT, ignores_partitions=ignores_partitions)
    ]
    if waits_for_replays:
        in_flight += [one for job in replay_jobs for one in _runs(context.instance, job, asset_key, IN_FLIGHT)]
    finished = [
        one
        for job in jobs
        for one in _runs(
            context.instance,
            job,
            asset_key,
            tuple(_FINISHED),
            limit=_MAX_FINISHED_RUNS,
            ignores_partitions=is_partitioned,
        )
    ]
    return PastRuns(now, [one for one in in_flight if is_recent(one.created, now=now, seconds=stale_seconds)], finished)


def _jobs(repository: dg.RepositoryDefinition | None, asset_key: dg.AssetKey) -> list[str]:
    jobs = repository.get_all_jobs() if repository is not None else ()
    return [job.name for job in jobs if asset_key in job.asset_layer.selected_asset_keys]


def _runs(
    instance: dg.DagsterInstance,
    job: str,
    asset_key: dg.AssetKey,
    statuses: Sequence[dg.DagsterRunStatus],
    *,
    limit: int | None = None,
    ignores_partitions: bool = False,
) -> Iterator[PastRun]:
    wanted = dg.RunsFilter(job_name=job, statuses=list(statuses))
    for record in instance.get_run_records(wanted, limit=limit):
        # A run without a selection materializes all assets of its job, unless it only runs checks.
        run = record.dagster_run
        selected = run.asset_selection
        is_made = not run.asset_check_selection if selected is None else asset_key in selected
        if is_made and not (ignores_partitions and not PARTITION_TAGS.isdisjoint(run.tags)):
            updated = record.update_timestamp.timestamp()
            yield PastRun(
                run.run_id,
                _FINISHED.get(run.status, RunStatus.IN_FLIGHT),
                record.create_timestamp.timestamp(),
                record.end_time or updated,
                shown=run.status.value,
                job=run.job_name,
                member=run.tags.get(MEMBER_TAG),
            )
