"""Writes the results of the suites as JSON and as a page.

A suite that is run again replaces its last result; the other results stay, each with its date and size.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, formatted
from spark_jobs.jars import java

# Why a target is missed, according to profiles; the page gives the reason only where the target is missed.
REASONS = {
    "Kafka, raw: times as fast as availableNow": (
        "Spark reads Kafka in the JVM. Here librdkafka reads for Python, and a third of the CPU time turns "
        "messages into Arrow columns for the JVM. A reader in Rust made all 1.22 to 1.25 times as fast (JSON 1.19 "
        "to 1.28), too little for a second reader."
    ),
    "1 % malformed messages: times well-formed ones": (
        "Rows are written while they are read only if all are valid. Otherwise a second read is kept by Spark and "
        "counted, because the dead letters are committed before the rows."
    ),
    "Kafka, JSON: times as fast as availableNow": (
        "Decoding takes a third of the time of `from_json`, but reading takes longer, as with raw messages."
    ),
    "File: times as fast as the bare loop": (
        "The append alone takes as long as the bare loop, and a first batch of 2,000 messages 0.8 s more than its "
        "append: with a file that is read in no time, all would be 0.44 times as fast."
    ),
    "a look-up at 10,000 versions, times one at 10": (
        "delta-rs lists the whole log, which takes longest, and reads all file actions."
    ),
    "memory of a run with 16 times the backlog, times that with one": (
        "The heap of the JVM grows within its limit; the other processes grow by a fifth."
    ),
}
# The columns, and the suites, that only the JSON file has; the page has the targets of these suites.
DETAILS = ("fastest", "slowest", "peak MB")
GROWTH = ("versions", "shards", "backlog", "server")
PACKAGES = ("pyspark", "delta-spark", "deltalake", "pyarrow", "confluent-kafka", "redis", "dagster")
INTRODUCTION = """\
# Benchmarks and scale

`make bench` writes this page. The cases of a table alternate in one run after a warm-up round; the numbers are medians.
After each case the rows are compared with the stream, and a missing or duplicated message ends the benchmark.
CPU-seconds and memory exclude the broker. Ratios within a table carry over to other machines; seconds do not.
`benchmarks.json` has all numbers.

Each stream has 4 partitions, keys or shards, and goes into a new Delta table at the default limits. `availableNow` is
Spark Structured Streaming in the same session. The bare loop reads the stream in two processes and writes Parquet
files.

```sh
make bench ARGS="--scale 0.1 --only kafka --rounds 3"    # one suite, with a tenth of the messages
```
"""
SCALE = """\
## A plan for a million messages a second

For JSON of 95 bytes in one topic and one table, calculated from two measured cores: 5 cores decode a million a second,
and 9 also catch up after an outage (28 and 55 with 2 KB). Use mode `resumable` with 64 to 256 partitions, batches of
about a minute (`max_records=60_000_000`, `max_bytes=8 GiB`) and daily maintenance. For more, split by topic into
several tables.
"""


def machine() -> dict[str, Any]:
    """The machine and the versions of the packages."""
    cpus = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    output = subprocess.run([java(), "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    return {
        "processor": f"{os.cpu_count()} × {cpus[0] if cpus else platform.machine()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        "Java": output[0] if output else "unknown",
        **{name: version(name) for name in PACKAGES},
    }


def write(page: Path, found: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> None:
    """Write the JSON file and the page; ``found`` replaces earlier results of the same suites."""
    data = page.with_suffix(".json")
    known: dict[str, Mapping[str, Any]] = json.loads(data.read_text()) if data.exists() else {}
    known.update(found)
    suites = {name: known[name] for name in order if name in known}
    page.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps(suites, indent=1, ensure_ascii=False) + "\n")
    page.write_text("\n".join(_page(page, suites, [name for name in order if name not in suites])))


def _page(page: Path, suites: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> Iterator[str]:
    yield INTRODUCTION
    if missing:
        yield f"Not measured here yet: {', '.join(missing)}.\n"
    yield "## Targets\n"
    yield from _targets(suites)
    yield "\n## What it ran on\n"
    yield from _runs(suites)
    for name, suite in suites.items():
        for fields in suite["sections"] if name not in GROWTH else ():
            yield f"\n## {fields['title']}\n\n{fields['text']}\n"
            columns = [index for index, name in enumerate(fields["columns"]) if name not in DETAILS]
            rows = {case: [values[index] for index in columns] for case, values in fields["rows"].items()}
            yield from _table(["", *(fields["columns"][index] for index in columns)], rows.items())
    yield ""
    yield SCALE


def _targets(suites: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    missed: list[str] = []
    yield "| | target | measured | |\n|---|---|---|---|"
    for suite in suites.values():
        for section in suite["sections"]:
            for target in (Target(**fields) for fields in section["targets"]):
                sign = "≥" if target.is_least else "≤"
                verdict = "reached" if target.is_reached else "**missed**"
                yield f"| {target.what} | {sign} {target.bound:,g} | {formatted(target.value)} | {verdict} |"
                if not target.is_reached and target.what in REASONS:
                    missed.append(target.what)
    if missed:
        yield "\nWhy targets are missed:\n"
        yield from (f"* *{what}.* {REASONS[what]}" for what in missed)


def _runs(suites: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    runs: dict[str, list[str]] = {}
    for name, suite in suites.items():
        run = f"{suite['date'].split()[0]}, commit {suite['commit']}, {suite['rounds']} rounds"
        runs.setdefault(run, []).append(name)
    yield from (f"* {run}: {', '.join(names)}" for run, names in sorted(runs.items()))
    # Which of several machines of the same kind it was, the JSON file says.
    machines = {
        ", ".join(f"{what} {is_}" for what, is_ in suite["machine"].items() if what != "system"): None
        for suite in suites.values()
    }
    yield from (f"\n{machine}." for machine in machines)


def _table(columns: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for name, values in rows:
        yield f"| {name} | {' | '.join(map(formatted, values))} |"
