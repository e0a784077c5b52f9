"""What Dagster is told of the batches of a run, when, and at its end; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from spark_jobs.batches.ingestion import BatchReport
from spark_jobs.ledger.delta_log import DeltaLog, MergedRows
from stream_assets import RunLimits
from stream_assets import materializations as module
from stream_assets.materializations import IngestMaterializations, ReplayMaterialization, RunScope
from stream_assets.options import PlaceConfig, StreamConfig
from stream_assets.stream_run import polling_times
from stream_consumers.batches import Range
from stream_consumers.errors import BrokerUnavailableError, InvalidOptionError
from tests.support.batch_reports import ONE, ZERO, report
from tests.support.dagster_runs import declare
from tests.support.written_log import WrittenLog

pytestmark = [pytest.mark.dagster, pytest.mark.usefixtures("no_spark")]
REPLAY = "run/orders"


class Run:
    """A run with a clock that only its script moves: a context of Dagster's that remembers what it is told."""

    def __init__(self, folder: Path, every_seconds: float | None = None) -> None:
        self.now = 0.0
        self.told: list[dict[str, Any]] = []
        self.observed: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.said: list[str] = []
        self.stream = declare(folder)
        log = SimpleNamespace(info=self.said.append, warning=self.warnings.append)
        self.instance = dg.DagsterInstance.ephemeral()
        self.context: Any = SimpleNamespace(log_event=self._remember, log=log, instance=self.instance)
        spark: Any = None
        run = RunScope.of(self.context, self.stream.key, self.stream.declared, spark)
        self.ingested = IngestMaterializations(run, every_seconds=every_seconds, clock=lambda: self.now)
        told = {"partitions": "2026-11-17, 2026-11-18"}
        self.replayed = ReplayMaterialization(run, replay_id=REPLAY, what=told)

    def _remember(self, made: dg.AssetMaterialization | dg.AssetObservation) -> None:
        found = {name: value.value for name, value in made.metadata.items()}
        (self.told if isinstance(made, dg.AssetMaterialization) else self.observed).append(found)

    def go(self, reports: Iterator[BatchReport], *, is_replay: bool = False) -> list[dict[str, Any]]:
        """The metadata of all that it materializes, its result at last."""
        made = (self.replayed if is_replay else self.ingested).report(reports)
        if made is not None:
            self._remember(made)
        return self.told


def test_a_run_is_one_materialization_and_each_of_its_batches_an_observation(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def reports() -> Iterator[BatchReport]:
        for number in (1, 2, 3):
            run.ingested.materialize_if_due()
            yield report(number)

    (made,) = run.go(reports())
    assert [one["delta/transaction"] for one in run.observed] == [1, 2, 3]
    assert [one["stream/rows"] for one in run.observed] == [9, 9, 9]
    assert [one["stream/lag_after"] for one in run.observed] == [99, 98, 97]
    assert [one["delta/version"] for one in run.observed] == [1, 2, 3]
    assert (made["ingest/batches"], made["ingest/rows"], made["ingest/messages"], made["ingest/dead_letters"]) == (
        3,
        27,
        27,
        3,
    )
    assert (made["delta/first_version"], made["delta/version"], made["dagster/row_count"]) == (1, 3, 1000)
    of_both = set(made) & set(run.observed[0])
    assert of_both == {"stream/lag_after", "delta/version"}, "other sums are no points in the plots of its batches"
    assert all(made[name] == run.observed[-1][name] for name in of_both)
    assert Run(tmp_path).go(iter(())) == [], "a run without batches has no result"


def test_a_replay_is_one_materialization_and_no_point_in_the_plots_of_ingestion(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (made,) = run.go(map(report, (1, 2)), is_replay=True)
    assert run.observed == []
    assert made["replay/partitions"] == "2026-11-17, 2026-11-18"
    assert (made["replay/batches"], made["replay/rows"]) == (2, 18)
    assert not {name for name in made if name.startswith(("stream/", "ingest/"))} - {"stream/kind"}


def test_a_keyed_table_says_what_was_inserted_updated_deleted_and_left_stale(tmp_path: Path) -> None:
    reports = [replace(report(number), merged=MergedRows(3, 2, 1), stale=4) for number in (1, 2)]
    (made,) = Run(tmp_path / "a").go(iter(reports))
    assert [made[f"ingest/{kind}_rows"] for kind in MergedRows._fields] == [6, 4, 2]
    (made,) = Run(tmp_path / "b").go(iter(reports), is_replay=True)
    assert [made[f"replay/{kind}_rows"] for kind in (*MergedRows._fields, "stale")] == [6, 4, 2, 8]


def test_a_replay_that_is_not_whole_is_not_materialized(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def reports() -> Iterator[BatchReport]:
        yield report(1)
        raise BrokerUnavailableError("gone", remedy="Wait.")

    with pytest.raises(BrokerUnavailableError):
        run.go(reports(), is_replay=True)
    assert run.told == []
    assert len(run.warnings) == 1
    assert Run(tmp_path).go(iter(()), is_replay=True) == [], "nothing was replaced"


def test_a_replay_whose_run_was_killed_behind_its_last_batch_is_materialized_by_the_retry(tmp_path: Path) -> None:
    table = WrittenLog(tmp_path / "t")
    for number in (1, 2):
        entry = report(number).entry
        goal = {ZERO: Range(10, 20), ONE: Range(0, 10)}
        # Only the first entry is full; a later one would have to carry how far the replay is.
        state = {} if number == 1 else None
        table.ours(replace(entry, kind="replay", replay=REPLAY, goal=goal, begins=number == 1, state=state))
    table.ours(replace(report(3).entry, state=None))
    (made,) = Run(tmp_path).go(iter(()), is_replay=True)
    assert (made["stream/kind"], made["replay/batches"], made["delta/version"]) == ("replay", 0, 2)


def test_a_run_that_stays_tells_at_most_so_often_and_sums_what_it_wrote(tmp_path: Path) -> None:
    run = Run(tmp_path, every_seconds=10)

    def reports() -> Iterator[BatchReport]:
        for number in range(1, 8):
            run.ingested.materialize_if_due()
            yield report(number)
            run.now += 4.0
        for _ in range(20):
            run.ingested.materialize_if_due()
            run.now += 0.25

    found = run.go(reports())
    assert [one["ingest/batches"] for one in found] == [1, 3, 3], "the first one at once"
    assert [one["ingest/messages"] for one in found] == [9, 27, 27]
    assert [one["ingest/dead_letters"] for one in found] == [1, 3, 3]
    versions = [(one["delta/first_version"], one["delta/version"]) for one in found]
    assert versions == [(1, 1), (2, 4), (5, 7)]
    assert [dict(record.data) for record in found[1]["ingest/ranges"].records] == [
        {"shard": "orders/0", "start": 10, "end": 30, "messages": 18, "lag after": 96},
        {"shard": "orders/1", "start": 10, "end": 20, "messages": 9, "lag after": 0},
    ]
    assert found[1]["ingest/lost"] == {"orders/1": [[10, 11]]}
    assert found[1]["ingest/rows_per_second"] == 18.0
    observed = [(one["stream/batches"], one["stream/rows"], one["stream/worst_lag"]) for one in run.observed]
    assert observed == [(1, 9, 99), (3, 27, 98), (3, 27, 95)]
    alone = Run(tmp_path)
    alone.go(iter([report(1)]))
    assert {*run.observed[0]} == {*run.observed[2]} == {*alone.observed[0]}, "the plots keep their names"


def test_what_a_killed_run_wrote_is_told_by_the_next_one(tmp_path: Path) -> None:
    """Otherwise nobody downstream hears of it before the next message comes."""
    run = Run(tmp_path)
    table = WrittenLog(tmp_path / "t")
    for number in (1, 2, 3):
        table.ours(report(number).entry)
    (made,) = run.go(iter(()))
    assert (made["delta/version"], made["ingest/batches"]) == (2, 0)

    def tell(name: str, version: int) -> None:
        metadata = {name: version}
        run.instance.report_runless_asset_event(dg.AssetMaterialization(run.stream.key, metadata=metadata))

    tell("ingest/version", 1)
    tell("delta/version", 2)
    assert len(run.go(iter(()))) == 2, "a replay tells nothing of what was ingested"
    tell("ingest/version", 2)
    assert len(run.go(iter(()))) == 2
    table.ours(replace(report(4).entry, kind="replay"))
    assert len(run.go(iter(()))) == 2, "a replay on its way is told when it is whole"


@pytest.mark.parametrize("error", [BrokerUnavailableError("gone", remedy="Wait."), KeyboardInterrupt()])
def test_what_was_written_is_told_when_the_run_fails_or_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Spark may be what is gone, so that it is asked for nothing."""
    run = Run(tmp_path, every_seconds=600)

    def reports() -> Iterator[BatchReport]:
        for number in (1, 2, 3):
            run.ingested.materialize_if_due()
            yield report(number, replaced=None if number == 2 else 4)
        monkeypatch.setattr(module, "read_table", pytest.fail)
        raise error

    with pytest.raises(type(error)):
        run.go(reports())
    assert [one["ingest/batches"] for one in run.told] == [1, 2]
    assert "ingest/replaced_rows" not in run.told[1]
    assert run.told[0]["ingest/replaced_rows"] == 4


def test_what_dagster_could_not_be_told_of_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, every_seconds=0)

    def reports() -> Iterator[BatchReport]:
        for number in (1, 2):
            yield report(number)
        with monkeypatch.context() as patched:
            patched.setattr(run.context, "log_event", fail)
            run.ingested.materialize_if_due()

    def fail(made: object) -> None:
        raise ConnectionError("Dagster's storage is gone")

    with pytest.raises(ConnectionError):
        run.go(reports())
    assert [one["ingest/batches"] for one in run.told] == [2]
    assert [one["stream/batches"] for one in run.observed] == [2]


def test_batches_are_observed_once_if_they_could_not_be_materialized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, every_seconds=0)

    def gone(log: DeltaLog) -> int:
        raise OSError("the storage is gone")

    def reports() -> Iterator[BatchReport]:
        yield report(1)
        with monkeypatch.context() as patched:
            patched.setattr(DeltaLog, "row_count", gone)
            run.ingested.materialize_if_due()

    with pytest.raises(OSError, match="gone"):
        run.go(reports())
    assert [one["ingest/batches"] for one in run.told] == [1]
    assert [one["stream/batches"] for one in run.observed] == [1]


def test_the_error_that_ends_a_run_is_seen_also_if_dagster_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    def gone(log: DeltaLog) -> int:
        raise OSError("the storage is gone")

    def reports() -> Iterator[BatchReport]:
        yield report(1)
        monkeypatch.setattr(DeltaLog, "row_count", gone)
        raise BrokerUnavailableError("gone", remedy="Wait.")

    with pytest.raises(BrokerUnavailableError):
        run.go(reports())
    assert run.told == []
    assert len(run.warnings) == 1


@pytest.mark.parametrize(
    ("options", "config", "expected"),
    [
        ({}, {}, (0.0, None)),
        ({"linger_seconds": 60}, {}, (60.0, 30.0)),
        ({"linger_seconds": 60, "materialize_seconds": 5}, {}, (60.0, 5.0)),
        ({"linger_seconds": 60}, {"linger_seconds": 0}, (0.0, None)),
        ({}, {"linger_seconds": 7, "materialize_seconds": 0}, (7.0, 0.0)),
        ({"linger_seconds": 60}, {"stop": PlaceConfig(rewind="latest")}, (0.0, None)),
    ],
)
def test_the_run_config_wins_over_the_asset(
    options: dict[str, Any], config: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    given = StreamConfig(**config)
    assert polling_times(RunLimits(**options).overridden(given), given) == expected


@pytest.mark.parametrize("config", [{"stop": PlaceConfig(rewind="latest")}, {"start": PlaceConfig(rewind="earliest")}])
def test_a_run_config_that_ends_and_stays_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        StreamConfig(linger_seconds=5, **config).check()
    StreamConfig(linger_seconds=5, move_group=True, start=PlaceConfig(rewind="earliest")).check()
