"""The command: ``python -m benchmarks``, or ``make bench``."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import growth, keyed, micro_batch, report, throughput, under_dagster
from benchmarks.harness import Bench
from spark_jobs.spark_server.folder import SERVERS_VARIABLE
from tests.support.settings import ROOT

SUITES: Mapping[str, Callable[[Bench], None]] = {
    "kafka": throughput.kafka,
    "avro": throughput.avro,
    "transforms": throughput.transforms,
    "redis": throughput.redis,
    "file": throughput.file,
    "micro-batch": micro_batch.micro_batch,
    "keyed": keyed.keyed,
    "start": under_dagster.tick_to_commit,
    "freshness": under_dagster.freshness,
    "lingering": under_dagster.lingering_costs,
    "versions": growth.versions,
    "files": growth.files,
    "shards": growth.shards,
    "backlog": growth.backlog,
    "server": growth.server,
}


def main() -> None:
    """Run the suites one after the other, and write the report after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare stream-assets with its peers.")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sizes: 0.1 for a tenth of the messages")
    parser.add_argument("--rounds", type=int, default=3, help="number of times that each case is measured")
    parser.add_argument("--only", action="append", choices=SUITES, metavar="SUITE", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write")
    options = parser.parse_args()
    # An interrupt ends the processes that the benchmark started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = report.machine()
    for name in options.only or SUITES:
        _log(f"== {name}")
        before, began = os.getloadavg()[0], datetime.now(timezone.utc)
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
            os.environ[SERVERS_VARIABLE] = f"{scratch}/spark-servers"
            bench = Bench(Path(scratch), scale=options.scale, rounds=options.rounds, log=_log)
            SUITES[name](bench)
        found = {
            "date": f"{began:%Y-%m-%d %H:%M} UTC",
            "commit": _commit(),
            "scale": options.scale,
            "rounds": options.rounds,
            "load": [before, os.getloadavg()[0]],
            "machine": machine,
            "sections": bench.to_json(),
        }
        report.write(options.report, {name: found}, tuple(SUITES))
    _log(f"written: {options.report}")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _log(line: str) -> None:
    sys.stdout.write(f"{datetime.now(timezone.utc):%H:%M:%S} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
