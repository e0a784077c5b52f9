"""``… | stream-assets ingest --source stdio:///orders``: real pipes, a real Spark, and a kill in the middle."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from deltalake import DeltaTable

from stream_consumers.file.scanner import Frame, FrameScanner
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, sequences_in_table

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.slow]
MESSAGES = 400
# One shard is named by the lines, the other one is theirs who name none; every tenth line is no JSON.
PRODUCER = (
    f"for n in range({MESSAGES}):\n"
    "    print('[orders | %d | 3] ' % n if n % 2 else '', '{\"id\": %d' % n, '' if n % 10 == 7 else '}', sep='')"
)


@contextmanager
def piped(table: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """``producer | stream-assets ingest`` in a process group of its own, the JVM included."""
    words = ["--source", "stdio:///orders", "--table", str(table), "--group", "lakehouse", "--decode", "json"]
    ingest = [
        sys.executable,
        "-m",
        "stream_assets.cli.main",
        "ingest",
        *words,
        "--schema",
        "id BIGINT",
        "--json",
        "--master",
        "local[2]",
        *more,
    ]
    script = f"{shlex.join([sys.executable, '-c', PRODUCER])} | {shlex.join(ingest)}"
    log = table.with_name(f"run-{len(os.listdir(table.parent))}.log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            ["/bin/bash", "-o", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def logs(table: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(table.parent.glob("run-*.log")))


def spooled(path: Path) -> list[Frame]:
    with FrameScanner(path) as scanner:
        return [item for item in scanner if isinstance(item, Frame)]


def has_rows(table: Path) -> bool:
    """Whether a batch is in a table that is being written, and made."""
    return any((table / "_delta_log").glob("*.json")) and bool(sequences_in_table(table))


def test_a_pipe_is_in_the_table_once_and_given_again_after_a_kill_it_is_there_once_more(folder: Path) -> None:
    """What the spool promises: whole lines survive the kill; a pipe that is given again is new messages, each once."""
    table, spool = folder / "t", folder / "t.spool.ss"
    with piped(table, "--max-records", "50") as process:
        until(lambda: has_rows(table) or process.poll() is not None, seconds=240, what="the first batch")
        assert process.poll() is None, logs(table)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows = sum(sequences_in_table(table).values())
    assert 0 < rows < MESSAGES, "it was killed on the way"
    first = spooled(spool)
    assert len(first) == MESSAGES, "the whole pipe was on the disk before Spark began"
    assert {frame.shard.id for frame in first} == {0, 3}

    with piped(table) as process:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, logs(table)
    reports = json.loads(out)["rows"]
    assert reports[-1]["lag"] == 0
    second = spooled(spool)
    assert second[:MESSAGES] == first
    assert [frame.payload for frame in second] == [frame.payload for frame in first] * 2
    assert [frame.sequence for frame in second if frame.shard.id == 3] == list(range(1, MESSAGES + 1))
    assert_each_once(spool, table)
    assert sum(sequences_in_table(f"{table}_dead_letters").values()) == 2 * MESSAGES // 10
    written = DeltaTable(str(table)).to_pyarrow_table(columns=["id"]).column("id").to_pylist()
    assert sorted(written) == sorted(2 * [number for number in range(MESSAGES) if number % 10 != 7])
