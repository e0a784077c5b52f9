"""The lag sensor under a real daemon, with runs that somebody else starts and cancels in the UI."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from tests.support import staying_runs, waiting_jobs
from tests.support.dagster_services import dagster_services
from tests.support.polling import until
from tests.support.streams import assert_each_once, sequences_in_table, write_stream
from tests.support.user_interface import SECONDS, UserInterface

pytestmark = [pytest.mark.dagster, pytest.mark.slow]


def test_runs_of_other_jobs_and_cancelled_ones_hold_the_sensor_back(folder: Path) -> None:
    write_stream(folder / "orders.ss", 5)
    variables = {waiting_jobs.FOLDER_VARIABLE: str(folder)}
    with dagster_services(folder / "dagster", waiting_jobs.__name__, variables) as dagster:
        ui = UserInterface(dagster, waiting_jobs.__name__)
        (asked,) = until(ui.runs, seconds=SECONDS, what="the run that the sensor asks for")
        ui.until_status(asked, dg.DagsterRunStatus.STARTED)
        ui.cancel(asked)
        ui.until_ticks_say(f"run {asked} was cancelled")
        assert ui.runs() == {asked}, "what somebody cancelled is not asked for again"

        started = ui.launch("nightly")
        ui.until_ticks_say(f"run {started} is STARTED")
        assert ui.runs() == {asked, started}, "it makes the asset already"
        assert any("(job nightly); lag 5 (orders/0: 3, orders/1: 2)" in reason for reason in ui.reasons())
        ui.cancel(started)


def until_rows(table: Path, count: int) -> None:
    first = table / "_delta_log" / f"{0:020d}.json"

    def is_there() -> bool:
        return first.exists() and sum(sequences_in_table(table).values()) == count

    until(is_there, seconds=SECONDS, what=f"{count} rows")


@pytest.mark.spark
def test_a_run_that_stays_is_followed_and_cancelled_in_the_ui(folder: Path) -> None:
    """What it wrote since its last materialization is told when it is cancelled."""
    path, table = folder / "orders.ss", folder / "t"
    write_stream(path, 5)
    variables = {staying_runs.FOLDER_VARIABLE: str(folder)}
    with dagster_services(folder / "dagster", staying_runs.__name__, variables) as dagster:
        ui = UserInterface(dagster, staying_runs.__name__)
        (asked,) = until(ui.runs, seconds=SECONDS, what="the run that the sensor asks for")
        until_rows(table, 5)
        write_stream(path, 7)
        until_rows(table, 12)
        write_stream(path, 7)
        until_rows(table, 19)
        assert ui.runs() == {asked}, "one run has written all of it"
        ui.cancel(asked)
        found = dagster.instance.fetch_materializations(staying_runs.stream.key, limit=100, ascending=True).records
        told = [event.asset_materialization for event in found]
        assert sum(one.metadata["ingest/messages"].value for one in told if one) == 19
        assert len(told) == 2, "the first batch, and the others together"
        ui.until_ticks_say(f"run {asked} was cancelled")
    assert_each_once(path, table)
