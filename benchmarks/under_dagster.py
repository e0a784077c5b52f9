"""Measures with a real Dagster daemon: the time from a tick to the first commit, and the freshness of a table."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer

from benchmarks import messages
from benchmarks.harness import MEGABYTE, Bench, end_servers
from benchmarks.messages import PARTITIONS, documents
from tests.support.dagster_services import DAGSTER_YAML, WORKSPACE_YAML
from tests.support.kafka_broker import kafka_broker
from tests.support.polling import until
from tests.support.servers import running
from tests.support.settings import ROOT
from tests.support.topics import create_topic

TIMEOUT_SECONDS = 600.0
MESSAGES = 1000
PER_SECOND = 200
WARM_BATCHES = 6
LINGER_SECONDS = 1800
BATCH_SECONDS = (1.0, 10.0, 60.0)
RUNS_A_DAY = 24
EVENTS_OF_A_RUN = 24
LOGS_YAML = """\
python_logs:
  managed_python_loggers: [stream_assets, sensors, spark_jobs, stream_consumers]
  python_log_level: INFO
"""


@contextmanager
def daemon(
    home: Path, *, source: str, table: Path, linger_seconds: float, batch_seconds: float = 1.0
) -> Iterator[dg.DagsterInstance]:
    """Run a Dagster daemon with one asset, whose sensor ticks each second."""
    home.mkdir()
    (home / "dagster.yaml").write_text(DAGSTER_YAML + LOGS_YAML)
    workspace = home / "workspace.yaml"
    workspace.write_text(WORKSPACE_YAML.format(module="benchmarks.definitions", root=ROOT))
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "BENCH_SOURCE": source,
        "BENCH_TABLE": str(table),
        "BENCH_LINGER_SECONDS": str(linger_seconds),
        "BENCH_BATCH_SECONDS": str(batch_seconds),
    }
    command = [str(Path(sys.executable).with_name("dagster-daemon")), "run", "-w", str(workspace)]
    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        running("the Dagster daemon", command, home / "daemon.log", environment=environment, stop=signal.SIGINT),
    ):
        try:
            yield instance
        finally:
            for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
                instance.run_launcher.terminate(run.run_id)


class Commits:
    """The commits of a table that added rows, with the times at which they could be read, polled at a low rate.

    A commit can be read once its file has its name, which is the last change of the file's inode.

    Args:
        table: the path of the table, which need not exist yet.
    """

    def __init__(self, table: Path) -> None:
        self.table = table
        self.files: dict[str, float] = {}
        self.rows = 0
        self.count = 0
        self._version = 0

    def until(self, total: int) -> float:
        """Wait for ``total`` rows, and return when the last of them could be read, in seconds since 1970."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self._read() < total:
            assert time.monotonic() < deadline, f"{self.rows} of {total} messages in {TIMEOUT_SECONDS:g} s"
            time.sleep(0.2)
        assert self.rows == total, f"{self.rows} rows of {total} messages"
        return max(self.files.values())

    def _read(self) -> int:
        while (file := self.table / "_delta_log" / f"{self._version:020d}.json").exists():
            added = [action["add"] for action in map(json.loads, file.open()) if "add" in action]
            self.files |= {add["path"]: file.stat().st_ctime for add in added}
            self.rows += sum(json.loads(add["stats"])["numRecords"] for add in added)
            self.count += bool(added)
            self._version += 1
        return self.rows


def tick_to_commit(bench: Bench) -> None:
    """Measure from the tick that requests a run to the first commit: cold, warm, and in a lingering run."""
    section = bench.section(
        "From a tick of the sensor to the first commit",
        f"A Dagster daemon, a tick each second, {MESSAGES:,} messages in Kafka. Cold: no Spark server runs. Warm: the "
        "server of the last run does. Lingering: a run is active; the time begins with the last message produced.",
        ("seconds", "fastest", "slowest"),
    )
    with bench.service(kafka_broker(bench.folder)) as (address, _):
        topic, table, number = create_topic(address, PARTITIONS), bench.new_path(), count(1)
        commits = Commits(table)
        source = f"kafka://{address}/{topic}"

        def produce() -> int:
            messages.to_kafka(address, topic, documents(MESSAGES))
            return next(number) * MESSAGES

        def from_tick(instance: dg.DagsterInstance) -> float:
            committed = commits.until(produce())
            (record,) = instance.get_run_records(limit=1)
            until(
                lambda: instance.get_run_by_id(record.dagster_run.run_id).is_success,  # type: ignore[union-attr]
                seconds=TIMEOUT_SECONDS,
                what="the end of the run",
            )
            return committed - record.create_timestamp.timestamp()

        taken: dict[str, list[float]] = {"cold": [], "warm server": [], "lingering": []}
        end_servers()
        with daemon(bench.folder / "starts", source=source, table=table, linger_seconds=0) as instance:
            for turn in range(bench.rounds):
                taken["cold"].append(from_tick(instance))
                bench.log(f"  cold, round {turn + 1}: {taken['cold'][-1]:.2f} s")
                taken["warm server"].append(from_tick(instance))
                bench.log(f"  warm server, round {turn + 1}: {taken['warm server'][-1]:.2f} s")
                if turn + 1 < bench.rounds:
                    end_servers()
        with daemon(bench.folder / "stays", source=source, table=table, linger_seconds=LINGER_SECONDS):
            commits.until(produce())
            for _ in range(3 * bench.rounds):
                time.sleep(1.0)
                total = produce()
                produced = time.time()
                taken["lingering"].append(commits.until(total) - produced)
        end_servers()
    for name, seconds in taken.items():
        bench.row(section, name, median(seconds), min(seconds), max(seconds))
    warm = median(taken["warm server"]) / median(taken["cold"])
    bench.target(section, "tick to first commit: warm, times cold", warm, at_most=0.35)
    bench.target(section, "tick to first commit: lingering, seconds", median(taken["lingering"]), at_most=2.0)


def freshness(bench: Bench) -> None:
    """Measure the delay until 200 messages a second are readable in Delta, against Structured Streaming."""
    seconds = max(10, min(120, round(120 * bench.scale)))
    section = bench.section(
        f"Freshness at {PER_SECOND} messages a second, for {seconds} seconds",
        "The time of the commit minus the timestamp of each message, for a run that stays under a Dagster daemon, and "
        "for Structured Streaming with `processingTime='0 seconds'` without Dagster.",
        ("p50 s", "p95 s", "p99 s", "slowest s", "commits"),
    )
    found = {}
    with bench.service(kafka_broker(bench.folder)) as (address, _):
        topic, table = create_topic(address, PARTITIONS), bench.new_path()
        source = f"kafka://{address}/{topic}"
        with daemon(bench.folder / "fresh", source=source, table=table, linger_seconds=LINGER_SECONDS):
            found["stream-assets, lingering"] = _delays(address, topic, table, seconds)
        end_servers()
        topic, table = create_topic(address, PARTITIONS), bench.new_path()
        command = [sys.executable, "-m", "benchmarks.peers", address, topic, str(table)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with running("Structured Streaming", command, bench.folder / "peer.log", environment=environment):
            found["Structured Streaming"] = _delays(address, topic, table, seconds)
    percentiles = {}
    for name, (delays, commits_made) in found.items():
        percentiles[name] = np.percentile(delays, [50, 95, 99, 100])
        bench.row(section, name, *map(float, percentiles[name]), commits_made)
    ours, theirs = percentiles["stream-assets, lingering"], percentiles["Structured Streaming"]
    bench.target(section, "freshness: p50, times Structured Streaming's", float(ours[0] / theirs[0]), at_most=0.8)
    bench.target(section, "freshness: p95, times Structured Streaming's", float(ours[1] / theirs[1]), at_most=1.0)


def lingering_costs(bench: Bench) -> None:
    """Measure what a run that stays costs a day, for some values of ``batch_seconds``."""
    seconds = max(30, round(600 * bench.scale))
    section = bench.section(
        f"What a run that stays costs a day, at {PER_SECOND} messages a second",
        f"Measured for {seconds} seconds under a Dagster daemon that stores log lines as events, and multiplied; "
        "events also of 24 runs, each of an hour. CPU and memory without the broker.",
        ("CPU-hours", "peak MB", "versions", "files", "events"),
    )
    with bench.service(kafka_broker(bench.folder)) as (address, _):
        for batch_seconds in BATCH_SECONDS:
            topic, table = create_topic(address, PARTITIONS), bench.new_path()
            home, commits = bench.folder / f"costs-{batch_seconds:g}", Commits(table)
            source, options = f"kafka://{address}/{topic}", {"linger_seconds": LINGER_SECONDS}
            with daemon(home, source=source, table=table, batch_seconds=batch_seconds, **options) as instance:
                messages.to_kafka(address, topic, documents(PER_SECOND))
                commits.until(PER_SECOND)
                (run,) = instance.get_runs()
                began, own, events = time.monotonic(), time.process_time(), len(instance.all_logs(run.run_id))
                files, versions = len(commits.files), commits.count
                with bench.processes().measured() as cost:
                    _produce(address, topic, seconds)
                    commits.until((1 + seconds) * PER_SECOND)
                per_day = 86_400 / (time.monotonic() - began)
                more = len(instance.all_logs(run.run_id)) - events
            end_servers()
            cpu_hours = (cost.cpu_seconds - time.process_time() + own) * per_day / 3600
            bench.row(
                section,
                f"batch_seconds={batch_seconds:g}",
                cpu_hours,
                cost.peak_bytes // MEGABYTE,
                round((commits.count - versions) * per_day),
                round((len(commits.files) - files) * per_day),
                round(more * per_day + RUNS_A_DAY * EVENTS_OF_A_RUN),
            )
    most = max(float(row[-1]) for row in section.rows.values())
    bench.target(section, "events a day of an asset with runs that stay", most, at_most=9000)


def _produce(address: str, topic: str, seconds: int) -> None:
    """Produce ``PER_SECOND`` messages a second, each at its time."""
    producer, began = Producer({"bootstrap.servers": address, "linger.ms": 0, "log_level": 2}), time.monotonic()
    for number, payload in enumerate(documents(seconds * PER_SECOND)):
        time.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))
        producer.produce(topic, payload, partition=number % PARTITIONS)
        producer.poll(0)
    producer.flush()


def _delays(address: str, topic: str, table: Path, seconds: int) -> tuple[Any, int]:
    """The seconds until each message could be read, and the number of commits."""
    commits, before = Commits(table), 0
    for _ in range(WARM_BATCHES):
        messages.to_kafka(address, topic, documents(PER_SECOND))
        before += PER_SECOND
        commits.until(before)
    known, warm = set(commits.files), commits.count
    total = seconds * PER_SECOND
    _produce(address, topic, seconds)
    commits.until(before + total)
    messages.check_delta(table, {shard: np.arange((before + total) // PARTITIONS) for shard in range(PARTITIONS)})
    delays = []
    for path in set(commits.files) - known:
        produced = pq.read_table(table / path, columns=["_timestamp"], partitioning=None).column("_timestamp")
        produced = produced.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        delays.append(commits.files[path] - produced.to_numpy() / 1e6)
    return np.concatenate(delays), commits.count - warm
