"""Rebuilds as a job and as a run of the asset."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from stream_assets import build_rebuild_job, stream_definitions, stream_run
from stream_assets import materializations as reporting
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import declare, execute, materializations, plain_asset
from tests.support.rebuilds import rebuild_reports, write_table
from tests.support.streams import write_stream

pytestmark = pytest.mark.dagster


def test_the_job_is_there_on_request_and_not_for_claimed_entries() -> None:
    orders = plain_asset()
    plain, with_it = stream_definitions([orders]), stream_definitions([orders], rebuild_jobs=True)
    named = [{job.name for job in definitions.jobs or []} for definitions in (plain, with_it)]
    assert named[1] - named[0] == {"rebuild_orders"}
    job = with_it.resolve_job_def("rebuild_orders")
    assert dg.validate_run_config(job, {"ops": {"rebuild_orders_table": {"config": {"max_records": 5}}}})
    with pytest.raises(InvalidOptionError):
        build_rebuild_job(plain_asset(source="redis://localhost:6379/orders", mode="load_balanced"))


@pytest.mark.parametrize(("is_swapped", "version"), [(False, 7), (True, 1)], ids=["now", "by a killed run"])
def test_the_new_table_is_materialized_by_the_job_and_by_a_run_of_the_asset(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, is_swapped: bool, version: int
) -> None:
    write_stream(tmp_path / "orders.ss", 5)
    write_table(tmp_path / "t", group="lakehouse")
    no_columns = SimpleNamespace(schema=SimpleNamespace(fields=[]))
    monkeypatch.setattr(stream_run, "run_session", lambda *_: nullcontext())
    monkeypatch.setattr(stream_run, "rebuild_events", lambda *_, **__: iter(()) if is_swapped else rebuild_reports())
    monkeypatch.setattr(reporting, "read_table", lambda *_: no_columns)
    stream = declare(tmp_path)
    job = stream_definitions([stream], rebuild_jobs=True).resolve_job_def("rebuild_orders")
    for result in (job.execute_in_process(instance=instance), execute(stream, instance, config={"rebuild": True})):
        assert result.success
        (made,) = materializations(result)
        assert (made.metadata["stream/kind"].value, made.metadata["delta/version"].value) == ("rebuild", version)
