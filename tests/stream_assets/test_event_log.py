"""How many events a run that stays leaves in Dagster's event log, and what they say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import CONTINUES, BatchReport, Event
from stream_assets import RunLimits, stream_run
from tests.support.batch_reports import report
from tests.support.dagster_runs import declare, execute, observations
from tests.support.streams import assert_each_once, write_stream

pytestmark = pytest.mark.dagster
EVERY_SECONDS = 0.25
# What a run stores in any case: its start, its end, its checks, and what it says of its session.
EVENTS_OF_A_RUN = 40
DAGSTER_YAML = """\
python_logs:
  managed_python_loggers: [stream_assets, sensors, spark_jobs, stream_consumers]
  python_log_level: INFO
"""


@pytest.mark.usefixtures("no_spark")
def test_many_batches_are_few_events_with_sums_and_the_worst_lag(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[BatchReport] = []

    def events(*_: object, **__: object) -> Iterator[Event]:
        until = time.monotonic() + 6 * EVERY_SECONDS
        while len(written) < 200 or time.monotonic() < until:
            yield CONTINUES
            number = len(written) + 1
            one = report(number)
            written.append(replace(one, lag=dict.fromkeys(one.lag, number * 37 % 101)))
            yield written[-1]

    @contextmanager
    def no_session(*_: object) -> Iterator[None]:
        yield None

    monkeypatch.setattr(stream_run, "run_events", events)
    monkeypatch.setattr(stream_run, "run_session", no_session)
    limits = RunLimits(linger_seconds=600.0, materialize_seconds=EVERY_SECONDS)
    began = time.monotonic()
    result = execute(declare(tmp_path, limits=limits, checks=[]), instance)
    most = (time.monotonic() - began) / EVERY_SECONDS + 2
    assert result.success
    found: list[dict[str, Any]]
    found = [{name: value.value for name, value in one.metadata.items()} for one in observations(instance)]
    assert 3 <= len(found) <= most
    assert len(instance.all_logs(result.run_id)) <= EVENTS_OF_A_RUN + 2 * most
    left = iter(written)
    for one in found:
        batches = [next(left) for _ in range(one["stream/batches"])]
        assert one["stream/rows"] == sum(batch.rows for batch in batches)
        assert one["stream/messages"] == sum(sum(batch.messages.values()) for batch in batches)
        assert one["stream/dead_letters"] == sum(batch.dead for batch in batches)
        assert one["stream/worst_lag"] == max(sum(batch.lag.values()) for batch in batches)
        assert one["stream/lag_after"] == sum(batches[-1].lag.values())
        assert (one["stream/batch"], one["delta/version"]) == (batches[-1].entry.bid, batches[-1].version)
    assert next(left, None) is None, "each batch is in one observation"


@pytest.mark.spark
@pytest.mark.slow
def test_a_real_run_that_stays_logs_no_line_for_each_batch(spark: SparkSession, folder: Path) -> None:
    """Also if the log lines of the packages are events of the run, as in the samples of dagster.yaml."""
    (folder / "home").mkdir()
    (folder / "home" / "dagster.yaml").write_text(DAGSTER_YAML)
    path = folder / "orders.ss"
    write_stream(path, 30)
    is_over = threading.Event()

    def feed() -> None:
        while not is_over.wait(0.1):
            write_stream(path, 5)

    limits = RunLimits(linger_seconds=30.0, materialize_seconds=10.0, batch_seconds=0.0, max_records=1000)
    feeder = threading.Thread(target=feed)
    with dg.DagsterInstance.from_config(str(folder / "home")) as instance:
        feeder.start()
        began = time.monotonic()
        try:
            result = execute(declare(folder, limits=limits), instance)
        finally:
            is_over.set()
            feeder.join()
        most = (time.monotonic() - began) / 10.0 + 2
        events = instance.all_logs(result.run_id)
        found = observations(instance)
        again = execute(declare(folder), instance)
    assert result.success
    assert len(found) <= most
    counts: list[Any] = [one.metadata["stream/batches"].value for one in found]
    assert sum(counts) > 2 * len(counts)
    assert len(events) <= EVENTS_OF_A_RUN + 2 * most
    assert again.success
    assert_each_once(path, folder / "t")
