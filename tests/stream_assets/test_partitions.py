"""Which time partitions a batch has touched, and what a run of partitions replays; without Spark."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import numpy as np
import pytest
from deltalake import DeltaTable

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.replay import LeftOut, ReplayPlan
from spark_jobs.ledger.entries import ReplayProgress
from stream_assets import ErrorPolicy
from stream_assets.materializations import IngestMaterializations, PartitionMaterialization, RunScope
from stream_assets.options import PlaceConfig, StreamConfig
from stream_assets.partitions import (
    PartitionRows,
    changed_since,
    count_by_partition,
    partition_replay,
    rows_in_partitions,
)
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from tests.support.batch_reports import report
from tests.support.ledger_tables import at, write_batch

pytestmark = [pytest.mark.dagster, pytest.mark.usefixtures("no_spark")]
DAYS = dg.DailyPartitionsDefinition("2026-11-16")
KEY = dg.AssetKey("orders")


def counted(
    partitions: dg.TimeWindowPartitionsDefinition, *moments: str, now: str = "2026-11-22T12:00"
) -> PartitionRows:
    return count_by_partition([np.array([at(one) for one in moments])], partitions, now=at(now) / 1000)


def test_each_time_belongs_to_the_day_that_it_is_in() -> None:
    found = counted(DAYS, "2026-11-17T23:59:59.999", "2026-11-18", "2026-11-16", "2026-11-17T12:00")
    assert found == PartitionRows({"2026-11-16": 1, "2026-11-17": 2, "2026-11-18": 1})


def test_the_day_that_is_not_over_counts_and_days_that_are_none_do_not() -> None:
    found = counted(DAYS, "2026-11-15T23:59", "2026-11-22T01:00", "2026-11-23", "9999-12-31T23:59:59")
    assert found == PartitionRows({"2026-11-22": 1}, outside=3)
    later = counted(dg.DailyPartitionsDefinition("2026-11-16", end_offset=2), "2026-11-23", "2026-11-24")
    assert later == PartitionRows({"2026-11-23": 1}, outside=1)
    until = dg.DailyPartitionsDefinition("2026-11-16", end_date="2026-11-18")
    assert counted(until, "2026-11-17", "2026-11-18") == PartitionRows({"2026-11-17": 1}, outside=1)


def test_days_are_those_of_the_zone_also_when_the_clocks_change() -> None:
    berlin = dg.DailyPartitionsDefinition("2026-10-01", timezone="Europe/Berlin")
    moments = ["2026-10-24T21:59", "2026-10-24T22:00", "2026-10-25T22:59", "2026-10-25T23:00"]
    found = counted(berlin, *moments)
    assert found.rows == {"2026-10-24": 1, "2026-10-25": 2, "2026-10-26": 1}, "the 25th has 25 hours"


def test_hours_and_windows_that_are_left_out() -> None:
    hours = dg.HourlyPartitionsDefinition("2026-11-16-00:00")
    assert counted(hours, "2026-11-16T05:59:59", "2026-11-16T06:00").rows == {
        "2026-11-16-05:00": 1,
        "2026-11-16-06:00": 1,
    }
    weekdays = dg.TimeWindowPartitionsDefinition(
        start="2026-11-16", fmt="%Y-%m-%d", cron_schedule="0 0 * * *", exclusions=["0 0 * * 6", "0 0 * * 0"]
    )
    found = counted(weekdays, "2026-11-20T23:00", "2026-11-21T10:00", "2026-11-22T10:00", now="2026-11-24")
    assert found == PartitionRows({"2026-11-20": 1}, outside=2)


def ingestion(folder: Path) -> Ingestion:
    return Ingestion("lakehouse", str(folder / "t"))


def test_a_batch_touches_the_days_of_its_rows_and_not_those_between(tmp_path: Path) -> None:
    table, ledger = tmp_path / "t", ingestion(tmp_path).ledger()
    assert changed_since(ledger, DAYS, None) is None, "there is no table"
    first = write_batch(table, {0: "2026-11-17", 1: "2026-11-19", 2: "2026-11-19T05:00"})
    write_batch(table, {3: "2026-11-20"})
    write_batch(table, {0: "2026-11-17"}, kind="replay", ranges=[0])
    assert changed_since(ledger, DAYS, first) == (PartitionRows({"2026-11-20": 1}), first + 1)
    assert changed_since(ledger, DAYS, first - 1) == (
        PartitionRows({"2026-11-17": 1, "2026-11-19": 2, "2026-11-20": 1}),
        first + 1,
    )
    assert changed_since(ledger, DAYS, first + 1) is None, "a replay names its partitions itself"


def test_the_first_time_all_days_that_the_table_has_rows_of_are_touched(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for sequence, moment in enumerate(["2026-11-15", "2026-11-16", "2026-11-18"]):
        write_batch(table, {sequence: moment})
    found = changed_since(ingestion(tmp_path).ledger(), DAYS, None)
    assert found == (PartitionRows({"2026-11-16": 1, "2026-11-18": 1}, outside=1), 2)


def test_a_batch_that_replaces_touches_what_it_removes_and_not_what_it_copies(tmp_path: Path) -> None:
    table, ledger = tmp_path / "t", ingestion(tmp_path).ledger()
    before = write_batch(table, {0: "2026-11-16", 1: "2026-11-17", 2: "2026-11-18", 3: "2026-11-19"})
    # The transform of now drops the one of the 17th.
    write_batch(table, {2: "2026-11-18"}, ranges=[1, 2])
    found = changed_since(ledger, DAYS, before)
    assert found is not None
    assert found[0].rows == {"2026-11-17": 0, "2026-11-18": 1}


def test_what_vacuum_has_removed_is_unknown(tmp_path: Path) -> None:
    table, ledger = tmp_path / "t", ingestion(tmp_path).ledger()
    write_batch(table, {0: "2026-11-16"})
    (file,) = DeltaTable(str(table)).file_uris()
    write_batch(table, {1: "2026-11-17"})
    Path(file).unlink()
    assert changed_since(ledger, DAYS, -1) == (PartitionRows({"2026-11-17": 1}, unknown=(0,)), 1)


def test_the_rows_of_partitions_are_counted(tmp_path: Path) -> None:
    write_batch(tmp_path / "t", {0: "2026-11-16T23:59", 1: "2026-11-17", 2: "2026-11-17T08:00", 3: "2026-11-19"})
    ledger = ingestion(tmp_path).ledger()
    assert rows_in_partitions(ledger, DAYS, ["2026-11-17", "2026-11-18"]) == {"2026-11-17": 2, "2026-11-18": 0}
    assert rows_in_partitions(ledger, DAYS, ["2026-11-19", "2026-11-16"]) == {"2026-11-16": 1, "2026-11-19": 1}
    assert rows_in_partitions(ledger, DAYS, []) == {}


def scope(context: Any, folder: Path) -> RunScope:
    """What a run of an asset with partitions works with."""
    source = StreamSource("memory://partitions/orders")
    declared: Any = SimpleNamespace(partitions=DAYS, errors=ErrorPolicy())
    spark: Any = None
    return RunScope(context, KEY, declared, source, ingestion(folder), spark)


class Run:
    """A run of the asset, on a table that somebody else writes."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.said: list[str] = []
        self.told: list[dg.AssetMaterialization] = []
        self._instance = instance
        log = SimpleNamespace(info=self.said.append, warning=self.said.append)
        self.context: Any = SimpleNamespace(log_event=self._log_event, log=log, instance=instance)
        self.made = IngestMaterializations(scope(self.context, folder))

    def _log_event(self, event: dg.AssetMaterialization | dg.AssetObservation) -> None:
        if isinstance(event, dg.AssetMaterialization):
            self.tell(event)

    def tell(self, made: dg.AssetMaterialization) -> None:
        self._instance.report_runless_asset_event(made)
        self.told.append(made)

    def end(self) -> dict[str | None, Any]:
        """The partitions that it tells of at its end, and how many rows came into them."""
        whole = self.made.result()
        assert (whole is None) == (not self.told), "what is downstream in the run is made if anything came"
        if whole is not None:
            assert whole.partition is None
            self.tell(whole)
            self.told.remove(whole)
        return {one.partition: one.metadata["ingest/partition_rows"].value for one in self.told}


def test_each_run_names_the_partitions_that_were_touched_since_the_last_one(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    # An asset without partitions, before.
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY, metadata={"ingest/version": 0}))
    write_batch(tmp_path / "t", {0: "2026-11-16", 1: "2026-11-17"})
    assert Run(tmp_path, instance).end() == {"2026-11-16": 1, "2026-11-17": 1}
    assert Run(tmp_path, instance).end() == {}
    write_batch(tmp_path / "t", {2: "2026-11-17", 3: "2026-11-18", 4: "2026-11-18", 5: "2026-11-01"})
    run = Run(tmp_path, instance)
    assert run.end() == {"2026-11-17": 1, "2026-11-18": 2}
    assert "rows that belong to no partition: 1" in run.said
    assert instance.get_materialized_partitions(KEY) == {"2026-11-16", "2026-11-17", "2026-11-18"}


def test_what_a_run_replaces_is_counted_once_and_its_sums_are_not_on_the_partitions(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """As ``start: {rewind: earliest}, move_group: true`` does."""
    first = {number: "2026-11-16" if number < 3 else "2026-11-17" for number in range(5)}
    write_batch(tmp_path / "t", first)
    Run(tmp_path, instance).end()
    version = write_batch(tmp_path / "t", first, ranges=first)
    run = Run(tmp_path, instance)
    run.made.add(report(version))
    assert run.end() == {"2026-11-16": 3, "2026-11-17": 2}
    found = {one.partition: {name: value.value for name, value in one.metadata.items()} for one in run.told}
    assert {day: one["dagster/partition_row_count"] for day, one in found.items()} == {"2026-11-16": 3, "2026-11-17": 2}
    of_run = {"ingest/messages", "ingest/rows", "ingest/batches", "ingest/ranges", "dagster/row_count"}
    assert {day: of_run & one.keys() for day, one in found.items()} == {"2026-11-16": set(), "2026-11-17": set()}


def test_the_rows_of_many_partitions_are_counted_with_a_short_condition(tmp_path: Path) -> None:
    hours = dg.HourlyPartitionsDefinition("2026-11-16-00:00")
    moments = [f"2026-11-{16 + number // 12}T{2 * (number % 12):02d}:30" for number in range(100)]
    write_batch(tmp_path / "t", dict(enumerate(moments)))
    keys = [f"{moment[:10]}-{moment[11:13]}:00" for moment in moments]
    assert rows_in_partitions(ingestion(tmp_path).ledger(), hours, keys) == dict.fromkeys(keys, 1)


def test_a_run_whose_rows_are_of_no_partition_is_materialized_without_one(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    write_batch(tmp_path / "t", {0: "2026-11-01"})
    run = Run(tmp_path, instance)
    run.made.add(report(0))
    whole = run.made.result()
    assert whole is not None, "what is downstream in the run would be skipped"
    assert whole.partition is None
    assert whole.metadata["ingest/rows"].value == 9
    assert Run(tmp_path, instance).end() == {}, "nothing came since"


def test_a_run_that_is_killed_while_it_tells_is_followed_by_one_that_tells_all(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    write_batch(tmp_path / "t", {0: "2026-11-16"})
    Run(tmp_path, instance).end()
    write_batch(tmp_path / "t", {1: "2026-11-17", 2: "2026-11-18"})
    killed = Run(tmp_path, instance)

    def die(made: dg.AssetMaterialization) -> None:
        killed.tell(made)
        raise SystemExit

    killed.context.log_event = die
    with pytest.raises(SystemExit):
        killed.end()
    assert [made.partition for made in killed.told] == ["2026-11-17"]
    assert Run(tmp_path, instance).end() == {"2026-11-17": 1, "2026-11-18": 1}


def test_a_retry_tells_what_the_run_has_replaced_that_was_killed_before_it_could_tell(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """The message of the 16th came late, among those of the 17th."""
    write_batch(tmp_path / "t", {0: "2026-11-16", 1: "2026-11-17", 2: "2026-11-16", 3: "2026-11-17", 4: "2026-11-18"})
    rows = {1: "2026-11-17", 2: "2026-11-16", 3: "2026-11-17"}
    write_batch(tmp_path / "t", rows, kind="replay", ranges=rows, replay="killed")
    replayed = ReplayedDay(tmp_path, instance)
    made = replayed.reporter.report(())
    assert made is not None
    assert replayed.counts["2026-11-17"]["dagster/partition_row_count"].value == 2
    assert [one.partition for one in replayed.made] == ["2026-11-16"]


def test_rows_of_the_day_that_stay_as_they_are_are_logged_and_in_the_metadata(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    write_batch(tmp_path / "t", {2: "2026-11-17"}, kind="replay", ranges=[2], replay="killed")
    replayed = ReplayedDay(tmp_path, instance)
    left_out = {Shard("orders", 0): LeftOut(3, Range(7, 12))}
    plan = ReplayPlan(ReplayProgress({}), {}, {Shard("orders", 0): Range(0, 2)}, left_out, "3 rows are left out")
    replayed.reporter.warn_of_kept_rows(plan)
    made = replayed.reporter.report(())
    assert made is not None
    assert made.metadata["replay/rows_left_out"].value == 3
    gone, late = replayed.warned
    assert gone.startswith("the stream no longer has the messages of orders/0 [0, 2)")
    assert late == plan.note


class ReplayedDay:
    """A run that replays the 17th, and goes on with what another one has replaced that was killed."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.counts: dict[str, Any] = {}
        self.made: list[dg.AssetMaterialization] = []
        self.warned: list[str] = []
        context = Run(folder, instance).context
        context.partition_keys = ["2026-11-17"]
        context.partition_time_window = dg.TimeWindow(WINDOW.start, WINDOW.start + timedelta(days=1))
        context.add_asset_metadata = lambda metadata, **of: self.counts.update({of["partition_key"]: metadata})
        context.log_event, context.log.warning = self.made.append, self.warned.append
        self.reporter = PartitionMaterialization(scope(context, folder), context, DAYS, "killed")


WINDOW = dg.TimeWindow(datetime(2026, 11, 17, tzinfo=timezone.utc), datetime(2026, 11, 20, tzinfo=timezone.utc))


def test_a_run_of_partitions_replays_their_time_at_once() -> None:
    wanted = partition_replay(WINDOW, StreamConfig.model_validate({"on_replay": "append"}))
    assert (str(wanted.start), str(wanted.stop)) == ("2026-11-17T00:00:00+00:00", "2026-11-20T00:00:00+00:00")
    assert wanted.on_replay.value == "append"


def test_what_does_not_go_together_with_partitions_is_refused() -> None:
    wrong: dict[str, Any] = {
        "start": PlaceConfig(rewind="earliest"),
        "stop": PlaceConfig(rewind="latest"),
        "move_group": True,
        "accept": ["orders#2"],
        "max_batches": 3,
        "linger_seconds": 5,
    }
    for name, value in wrong.items():
        with pytest.raises(InvalidOptionError, match=name):
            partition_replay(WINDOW, StreamConfig(**{name: value}))
