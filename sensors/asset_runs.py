"""The runs that materialize an asset, of any job, and the pause after runs that failed or were cancelled.

Dagster stores runs by job. The repository of the sensor has the jobs that materialize the asset: the user's jobs, and
the implicit job of runs that were launched by hand on assets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dagster as dg

from stream_consumers.display import counted
from stream_consumers.messages import is_recent

IN_FLIGHT = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
FINISHED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
MAX_FINISHED_RUNS = 100
MAX_BACKOFF_SECONDS = 900.0
PARTITION_TAGS = frozenset(("dagster/partition", "dagster/asset_partition_range_start"))
"""Each run of partitions has one of these tags."""


@dataclass(frozen=True, slots=True)
class AssetRun:
    """A run that materializes the asset.

    Args:
        run: the Dagster run.
        created: when it was requested, in seconds since 1970.
        ended: when it ended, in seconds since 1970; meaningless while it is in flight.
    """

    run: dg.DagsterRun
    created: float
    ended: float

    @property
    def is_partition_run(self) -> bool:
        """Whether the run is for partitions."""
        return not PARTITION_TAGS.isdisjoint(self.run.tags)


@dataclass(frozen=True, slots=True)
class AssetRuns:
    """The runs of an asset at one moment.

    Args:
        in_flight: the runs that delay the next one.
        finished: the finished runs, the last one to end first.
        now: the moment, in seconds since 1970.
    """

    in_flight: Sequence[AssetRun]
    finished: Sequence[AssetRun]
    now: float

    @classmethod
    def find(
        cls,
        context: dg.SensorEvaluationContext,
        asset_key: dg.AssetKey,
        job_name: str,
        *,
        stale_seconds: float,
        is_partitioned: bool = False,
        waits_for_replays: bool = False,
        replay_jobs: Sequence[str] = (),
    ) -> AssetRuns:
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
        in_flight = [one for job in jobs for one in _runs(context.instance, job, asset_key, IN_FLIGHT)]
        finished = [
            one for job in jobs for one in _runs(context.instance, job, asset_key, FINISHED, limit=MAX_FINISHED_RUNS)
        ]
        if waits_for_replays:
            in_flight += [one for job in replay_jobs for one in _runs(context.instance, job, asset_key, IN_FLIGHT)]
        if is_partitioned:
            in_flight = in_flight if waits_for_replays else [one for one in in_flight if not one.is_partition_run]
            finished = [one for one in finished if not one.is_partition_run]
        return cls(
            [one for one in in_flight if is_recent(one.created, now=now, seconds=stale_seconds)],
            # A run that ended ahead of this clock, by more than any pause, would remain the newest one.
            sorted(
                (one for one in finished if one.ended <= now + MAX_BACKOFF_SECONDS),
                key=lambda one: one.ended,
                reverse=True,
            ),
            now,
        )

    def describe_in_flight(self) -> str:
        """Return the states of the runs in flight as text."""
        return "; ".join(
            f"run {one.run.run_id} is {one.run.status.value} for {max(0.0, self.now - one.created):.0f} s "
            f"(job {one.run.job_name})"
            for one in self.in_flight
        )

    def pause(self, *, retry_seconds: float, after_cancel_seconds: float) -> str | None:
        """Return why to wait although no run is in flight, as text with the times; ``None`` to request a run now.

        Args:
            retry_seconds: the pause after two failures in a row, which doubles with each further failure. After a
                single failure there is no pause.
            after_cancel_seconds: the pause after a cancelled run, unless a run was launched since.
        """
        return self._after_cancel(after_cancel_seconds) or self._after_failures(retry_seconds)

    def newest_cancelled(self, seconds: float) -> AssetRun | None:
        """Return the newest cancelled run, if it ended within these seconds and no run was launched since."""
        cancelled = next((one for one in self.finished if one.run.status is dg.DagsterRunStatus.CANCELED), None)
        if cancelled is None or not is_recent(cancelled.ended, now=self.now, seconds=seconds):
            return None
        # Only runs that were requested later count: other members of the group may have run at the same time.
        if any(one.created > cancelled.ended for one in (*self.in_flight, *self.finished)):
            return None
        return cancelled

    def _after_cancel(self, seconds: float) -> str | None:
        cancelled = self.newest_cancelled(seconds)
        if cancelled is None:
            return None
        ago, left = max(0.0, self.now - cancelled.ended), cancelled.ended + seconds - self.now
        return (
            f"paused: run {cancelled.run.run_id} was cancelled {ago:.0f} s ago; the next run is requested in "
            f"{left:.0f} s. To end the pause now, materialize the asset; to pause for longer, stop this sensor"
        )

    def _after_failures(self, seconds: float) -> str | None:
        failures = 0
        for one in self.finished:
            if one.run.status is not dg.DagsterRunStatus.FAILURE:
                break
            failures += 1
        if failures < 2:
            return None
        newest = self.finished[0]
        pause = min(MAX_BACKOFF_SECONDS, seconds * 2 ** (failures - 2))
        if not is_recent(newest.ended, now=self.now, seconds=pause):
            return None
        left = newest.ended + pause - self.now
        return (
            f"the last {counted(failures, 'run')} failed (newest: {newest.run.run_id}); the next run is in {left:.0f} s"
        )


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
) -> Iterator[AssetRun]:
    wanted = dg.RunsFilter(job_name=job, statuses=list(statuses))
    for record in instance.get_run_records(wanted, limit=limit):
        # A run without a selection materializes all assets of its job, unless it only runs checks.
        run = record.dagster_run
        selected = run.asset_selection
        is_made = not run.asset_check_selection if selected is None else asset_key in selected
        if is_made:
            updated = record.update_timestamp.timestamp()
            yield AssetRun(run, record.create_timestamp.timestamp(), record.end_time or updated)
