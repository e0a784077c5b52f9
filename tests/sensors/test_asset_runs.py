"""Which runs hold the sensor back: those that materialize the asset, of whatever job, and those that were cancelled."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from sensors import asset_runs
from sensors.asset_runs import MEMBER_TAG
from sensors.lag_sensor import LagPolicy
from stream_assets import OpOptions, RunLimits, StreamAsset, stream_definitions
from tests.support.dagster_runs import declare, skip_message, tick
from tests.support.streams import write_stream

pytestmark = pytest.mark.dagster
Status = dg.DagsterRunStatus


@dg.asset
def report() -> None:
    """An asset of somebody else."""


class Jobs:
    """The stream asset, another asset, and jobs with names of the user's own."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance, **options: Any) -> None:
        write_stream(folder / "orders.ss", 5)
        self.folder, self.options = folder, options
        self.stream: StreamAsset = declare(folder, **options)
        self.instance = instance
        nightly = dg.define_asset_job("nightly", selection=[self.stream.key])
        both = dg.define_asset_job("both", selection=[self.stream.key, report.key])
        reports = dg.define_asset_job("reports", selection=[report.key])
        self.beside = dg.Definitions([report], jobs=[nightly, both, reports])
        self.all = dg.Definitions.merge(stream_definitions([self.stream], redrive_jobs=True), self.beside)

    def follow(self, policy: LagPolicy) -> None:
        """From now on the sensor has another policy."""
        self.stream = declare(self.folder, **{**self.options, "sensor": policy})

    def run(
        self,
        job: str,
        status: Status = Status.STARTED,
        *,
        only: dg.AssetKey | None = None,
        checks: dg.AssetCheckKey | None = None,
        member: str = "main",
        **tags: str,
    ) -> dg.DagsterRun:
        """A run as Dagster would have made it."""
        run = self.instance.create_run_for_job(
            self.all.resolve_job_def(job),
            status=status,
            asset_selection=frozenset((only,)) if only else None,
            tags={MEMBER_TAG: member, **tags},
        )
        if checks:
            self.instance.delete_run(run.run_id)
            run = self.instance.add_run(run._replace(asset_check_selection=frozenset((checks,))))
        return run

    def cancel(self, run: dg.DagsterRun) -> None:
        self.instance.report_run_canceling(run)
        self.instance.report_run_canceled(run)

    def tick(self) -> dg.SensorResult:
        return tick(self.stream, self.instance, beside=self.beside)


@pytest.fixture
def jobs(folder: Path, instance: dg.DagsterInstance) -> Jobs:
    return Jobs(folder, instance)


def test_a_run_of_any_job_that_makes_the_asset_holds_the_next_one_back(jobs: Jobs) -> None:
    for job, status in (
        ("ingest_orders", Status.STARTED),
        ("nightly", Status.NOT_STARTED),
        ("both", Status.CANCELING),
        ("__ASSET_JOB", Status.STARTED),
    ):
        run = jobs.run(job, status)
        assert held_by(jobs, run), job
        jobs.instance.delete_run(run.run_id)


def held_by(jobs: Jobs, run: dg.DagsterRun) -> bool:
    """Whether a tick asks for no run because of this one."""
    return f"run {run.run_id} is {run.status.value}" in skip_message(jobs.tick())


def test_a_run_that_does_not_make_the_asset_holds_nothing_back(jobs: Jobs) -> None:
    jobs.run("reports")
    jobs.run("both", only=report.key)
    jobs.run("__ASSET_JOB", only=report.key)
    check = dg.AssetCheckKey(jobs.stream.key, "no_gaps")
    run = jobs.run("__ASSET_JOB", checks=check)
    assert jobs.tick().run_requests
    jobs.cancel(run)
    assert jobs.tick().run_requests
    assert held_by(jobs, jobs.run("__ASSET_JOB", only=jobs.stream.key, checks=check))


DAYS = dg.DailyPartitionsDefinition("2026-11-16", end_offset=1)
OF_PARTITIONS = (
    {"dagster/partition": "2026-11-17"},
    {"dagster/asset_partition_range_start": "2026-11-17", "dagster/asset_partition_range_end": "2026-11-19"},
)


def test_ingestion_goes_on_beside_a_replay_of_partitions(folder: Path, instance: dg.DagsterInstance) -> None:
    jobs = Jobs(folder, instance, spec=dg.AssetSpec("orders", partitions_def=DAYS))
    for tags in OF_PARTITIONS:
        jobs.run("__ASSET_JOB", **tags)
        jobs.cancel(jobs.run("__ASSET_JOB", **tags))
        for _ in range(2):
            jobs.instance.report_run_failed(jobs.run("__ASSET_JOB", **tags))
        assert jobs.tick().run_requests
    assert held_by(jobs, jobs.run("ingest_orders"))


def test_ingestion_waits_for_whatever_writes_where_two_writers_are_not_safe(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    alone = {"op": OpOptions(single_writer=True, pool="orders")}
    safe, jobs = Jobs(folder, instance), Jobs(folder, instance, **alone)
    for job in ("replay_orders", "redrive_orders"):
        run = jobs.run(job)
        assert safe.tick().run_requests
        assert held_by(jobs, run)
        jobs.cancel(run)
        assert jobs.tick().run_requests, "what was cancelled was no ingestion"
    by_day = Jobs(folder, instance, **alone, spec=dg.AssetSpec("orders", partitions_def=DAYS))
    assert held_by(by_day, by_day.run("__ASSET_JOB", **OF_PARTITIONS[0]))


def test_without_partitions_a_run_of_a_partitioned_job_ingests(jobs: Jobs) -> None:
    assert held_by(jobs, jobs.run("both", **OF_PARTITIONS[0]))


@pytest.mark.parametrize(
    ("options", "hours", "holds"),
    [
        ({}, 5, True),
        ({}, 7, False),
        ({"limits": RunLimits(linger_seconds=86400.0)}, 29, True),
        ({"limits": RunLimits(linger_seconds=86400.0)}, 31, False),
        ({"op": OpOptions(single_writer=True, pool="orders")}, 24 * 365, True),
    ],
)
def test_an_old_run_holds_the_next_one_back_as_long_as_it_may_live_and_where_two_are_not_safe_always(
    folder: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    hours: int,
    holds: bool,
) -> None:
    jobs = Jobs(folder, instance, **options)
    jobs.run("ingest_orders")
    set_clock(monkeypatch, hours * 3600)
    assert bool(jobs.tick().run_requests) is not holds


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock of the sensor ahead by this, or back."""
    then = time.time() + seconds
    monkeypatch.setattr(asset_runs, "time", SimpleNamespace(time=lambda: then))


def test_a_clock_that_was_set_back_prolongs_no_pause(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.cancel(jobs.run("ingest_orders"))
    assert jobs.tick().skip_reason
    set_clock(monkeypatch, -60)
    assert jobs.tick().skip_reason
    set_clock(monkeypatch, -2 * 3600)
    assert jobs.tick().run_requests


def test_failures_of_any_job_count(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.instance.report_run_failed(jobs.run("nightly"))
    assert jobs.tick().run_requests, "the first failure is tried again at once"
    jobs.instance.report_run_failed(jobs.run("both", only=jobs.stream.key))
    assert "the last 2 runs failed" in skip_message(jobs.tick())
    set_clock(monkeypatch, -2 * 3600)
    assert jobs.tick().run_requests, "they are from before the clock was set back"


def test_what_was_cancelled_is_not_asked_for_again_until_somebody_starts_it(jobs: Jobs) -> None:
    cancelled = jobs.run("__ASSET_JOB")
    jobs.cancel(cancelled)
    found = jobs.tick()
    message = skip_message(found)
    told = rf"run {cancelled.run_id} was cancelled (\d+) s ago; the next run is requested in (\d+) s"
    (seconds,) = re.findall(told, message)
    assert sum(map(int, seconds)) == 120
    (paused,) = (one for one in found.asset_events if one.asset_key == jobs.stream.key)
    assert paused.metadata["sensor/cancelled_run"] == dg.MetadataValue.dagster_run(cancelled.run_id)
    assert 0 < float(str(paused.metadata["sensor/paused_until"].value)) - time.time() <= 120
    again = tick(jobs.stream, jobs.instance, found.cursor, beside=jobs.beside)
    assert skip_message(again)
    assert not again.asset_events, "reported once"
    jobs.instance.report_run_failed(jobs.run("nightly"))
    assert jobs.tick().run_requests, "somebody has started it: the cancelled run is over"


def test_a_cancelled_run_is_asked_for_again_after_the_pause(jobs: Jobs) -> None:
    jobs.cancel(jobs.run("nightly"))
    jobs.follow(LagPolicy(after_cancel_seconds=0.0))
    assert jobs.tick().run_requests


def test_a_member_that_was_cancelled_is_not_replaced_while_the_others_go_on(jobs: Jobs) -> None:
    jobs.follow(LagPolicy(max_runs=2))
    member = jobs.run("ingest_orders", member="member-2")
    other = jobs.run("ingest_orders")
    jobs.cancel(member)
    assert f"run {member.run_id} was cancelled" in skip_message(jobs.tick())
    jobs.instance.report_run_failed(other)
    assert f"run {member.run_id} was cancelled" in skip_message(jobs.tick()), "the other one was there before"


def test_failures_of_a_member_are_counted_while_another_one_works(jobs: Jobs) -> None:
    jobs.follow(LagPolicy(max_runs=2))
    for _ in range(2):
        jobs.instance.report_run_failed(jobs.run("ingest_orders", member="member-2"))
    jobs.run("ingest_orders")
    assert "the last 2 runs failed" in skip_message(jobs.tick())


def test_with_runs_that_stay_one_is_kept_alive_also_without_lag(folder: Path, instance: dg.DagsterInstance) -> None:
    jobs = Jobs(folder, instance, source="memory://alive/orders", limits=RunLimits(linger_seconds=60.0))
    asked = jobs.tick()
    assert asked.run_requests, "the stream is empty, and the run waits for its first message"
    run = jobs.run("ingest_orders")
    assert held_by(jobs, run)
    jobs.cancel(run)
    assert "was cancelled" in skip_message(jobs.tick())


def test_members_that_stay_are_kept_alive_one_a_shard_at_most(folder: Path, instance: dg.DagsterInstance) -> None:
    jobs = Jobs(folder, instance)
    jobs.follow(LagPolicy(max_runs=3, keeps_alive=True))
    requests = jobs.tick().run_requests or []
    assert [request.tags[MEMBER_TAG] for request in requests] == ["main", "member-2"]


def test_a_stream_whose_name_is_misspelt_does_not_look_like_one_that_is_read(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 5)
    message = skip_message(tick(declare(folder, source=f"file://{folder}/orders.ss/ordrs"), instance))
    assert "or does not exist" in message
