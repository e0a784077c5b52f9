"""What Dagster is told of the batches of a run, when, and at its end; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from spark_jobs.batches.ingestion import Batch, BatchReport
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from stream_assets import materializations as module
from stream_assets.config import PlaceConfig, StreamConfig
from stream_assets.materializations import Materializations
from stream_consumers.batches import BatchPlan, Range
from stream_consumers.errors import BrokerUnavailableError, InvalidOptionError
from stream_consumers.messages import Shard
from tests.support.dagster_runs import declare

pytestmark = pytest.mark.dagster
ZERO, ONE = Shard("orders", 0), Shard("orders", 1)


def report(number: int, *, replaced: int | None = 0) -> BatchReport:
    """Batch ``number``: ten messages of one shard, one of them unusable, in half a second."""
    shard, start = (ZERO, ONE)[number % 2], number // 2 * 10
    ranges = {shard: Range(start, start + 10)}
    entry = LedgerEntry(
        "batch",
        group="lakehouse",
        app="lakehouse/main",
        number=number,
        by="main",
        bid=f"bid-{number}",
        base=number - 1,
        ranges=ranges,
        lost={shard: Intervals.of((start, start + 1))} if number == 3 else {},
    )
    batch = Batch(entry, BatchPlan(ranges, [], 10))
    return BatchReport(batch, number, {shard: 9}, 9, 1, {shard: 100 - number}, 0.5, replaced)


class Run:
    """A run with a clock that only its script moves: a context of Dagster's that remembers what it is told."""

    def __init__(self, folder: Path, every_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.told: list[dict[str, Any]] = []
        self._stream = declare(folder)
        self.warnings: list[str] = []
        log = SimpleNamespace(info=lambda text: None, warning=self.warnings.append)
        self._context: Any = SimpleNamespace(log_event=self._remember, log=log)
        spark: Any = None
        self.materializations = Materializations(
            self._context,
            self._stream.key,
            self._stream.ingestion,
            spark,
            every_seconds=every_seconds,
            clock=lambda: self.now,
        )

    def _remember(self, made: dg.AssetMaterialization | dg.MaterializeResult[Any]) -> None:
        self.told.append({name: value.value for name, value in (made.metadata or {}).items()})

    def go(self, reports: Iterator[BatchReport]) -> list[dict[str, Any]]:
        """The metadata of all that it tells, its result at last."""
        for result in self._stream._results(self.materializations, reports):
            self._remember(result)
        return self.told


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_table", lambda spark, log: SimpleNamespace(schema=SimpleNamespace(fields=[])))
    monkeypatch.setattr(DeltaLog, "row_count", lambda log: 1000)


def test_each_batch_of_a_run_that_does_not_stay_is_a_materialization(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def reports() -> Iterator[BatchReport]:
        for number in (1, 2, 3):
            run.materializations.tell_if_due()
            yield report(number)

    found = run.go(reports())
    assert [one["delta/version"] for one in found] == [1, 2, 3]
    assert [one["stream/batches"] for one in found] == [1, 1, 1]
    assert [one["stream/lag_after"] for one in found] == [99, 98, 97]
    assert all("delta/first_version" not in one for one in found)


def test_a_run_that_stays_tells_at_most_so_often_and_sums_what_it_wrote(tmp_path: Path) -> None:
    run = Run(tmp_path, every_seconds=10)

    def reports() -> Iterator[BatchReport]:
        for number in range(1, 8):
            run.materializations.tell_if_due()
            yield report(number)
            run.now += 4.0
        for _ in range(20):
            run.materializations.tell_if_due()
            run.now += 0.25

    found = run.go(reports())
    assert [one["stream/batches"] for one in found] == [1, 3, 3, 0], "the first one at once; the last one says the end"
    assert [one["stream/messages"] for one in found] == [9, 27, 27, 0]
    assert [one["stream/dead_letters"] for one in found] == [1, 3, 3, 0]
    versions = [(one.get("delta/first_version"), one["delta/version"]) for one in found]
    assert versions == [(None, 1), (2, 4), (5, 7), (None, 7)]
    assert [dict(record.data) for record in found[1]["stream/ranges"].records] == [
        {"shard": "orders/0", "start": 10, "end": 30, "messages": 18, "lag after": 96},
        {"shard": "orders/1", "start": 10, "end": 20, "messages": 9, "lag after": 0},
    ]
    assert found[1]["stream/lost"] == {"orders/1": [[10, 11]]}
    assert found[1]["stream/rows_per_second"] == 18.0


def test_a_run_without_batches_has_no_result(tmp_path: Path) -> None:
    assert Run(tmp_path).go(iter(())) == []


@pytest.mark.parametrize("error", [BrokerUnavailableError("gone", remedy="Wait."), KeyboardInterrupt()])
def test_what_was_written_is_told_when_the_run_fails_or_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Spark may be what is gone, so that it is asked for nothing."""
    run = Run(tmp_path, every_seconds=600)

    def reports() -> Iterator[BatchReport]:
        for number in (1, 2, 3):
            run.materializations.tell_if_due()
            yield report(number, replaced=None if number == 2 else 4)
        monkeypatch.setattr(module, "read_table", pytest.fail)
        raise error

    with pytest.raises(type(error)):
        run.go(reports())
    assert [one["stream/batches"] for one in run.told] == [1, 2]
    assert "stream/replaced_rows" not in run.told[1]
    assert run.told[0]["stream/replaced_rows"] == 4


def test_what_dagster_could_not_be_told_of_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    def reports() -> Iterator[BatchReport]:
        for number in (1, 2):
            yield report(number)
        with monkeypatch.context() as patched:
            patched.setattr(run._context, "log_event", fail)
            run.materializations.tell_if_due()

    def fail(made: object) -> None:
        raise ConnectionError("Dagster's storage is gone")

    with pytest.raises(ConnectionError):
        run.go(reports())
    assert [one["stream/batches"] for one in run.told] == [2]


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
    assert run.warnings == ["Dagster could not be told of 1 batches: the storage is gone"]


@pytest.mark.parametrize(
    ("options", "config", "expected"),
    [
        ({}, {}, (0.0, 0.0)),
        ({"linger_seconds": 60}, {}, (60.0, 30.0)),
        ({"linger_seconds": 60, "materialize_seconds": 5}, {}, (60.0, 5.0)),
        ({"linger_seconds": 60}, {"linger_seconds": 0}, (0.0, 0.0)),
        ({}, {"linger_seconds": 7, "materialize_seconds": 0}, (7.0, 0.0)),
        ({"linger_seconds": 60}, {"stop": PlaceConfig(rewind="latest")}, (0.0, 0.0)),
    ],
)
def test_the_run_config_wins_over_the_asset(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any], expected: tuple[float, float]
) -> None:
    assert declare(tmp_path, **options)._staying(StreamConfig(**config)) == expected


@pytest.mark.parametrize("config", [{"stop": PlaceConfig(rewind="latest")}, {"start": PlaceConfig(rewind="earliest")}])
def test_a_run_config_that_ends_and_stays_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="linger_seconds=5 lets a run stay"):
        StreamConfig(linger_seconds=5, **config).check()
    StreamConfig(linger_seconds=5, move_group=True, start=PlaceConfig(rewind="earliest")).check()


@pytest.mark.parametrize("options", [{"linger_seconds": -1}, {"materialize_seconds": -1}])
def test_no_such_times(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="is out of range"):
        declare(tmp_path, **options)
