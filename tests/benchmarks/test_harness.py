"""The harness alternates, refuses lost and doubled rows, and says where a target is missed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import bare_loops, messages, report
from benchmarks.harness import Bench, Case, Target
from benchmarks.process_cost import ProcessTree


def write(path: Path, sequences: list[int]) -> None:
    path.mkdir()
    rows = pa.table({"_shard": [0] * len(sequences), "_sequence": sequences})
    pq.write_table(rows, path / "0.parquet")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, scale=0.01, rounds=2, log=lambda line: None)


def test_cases_alternate_behind_a_round_that_is_not_counted(bench: Bench) -> None:
    done: list[str] = []
    cases = [Case(name, lambda path, name=name: done.append(name), lambda path: None) for name in ("ours", "theirs")]
    bench.compare("both", "", cases, messages=10)
    assert done == ["ours", "theirs"] * 3
    assert list(bench.sections[0].rows) == ["ours", "theirs"]


@pytest.mark.parametrize("found", [[0, 1], [0, 1, 2, 2], [0, 1, 1], [0, 1, 3]])
def test_nobody_is_fast_by_losing_or_doubling_rows(bench: Bench, found: list[int]) -> None:
    case = Case("wrong", lambda path: write(path, found), lambda path: messages.check_parquet(path, {0: np.arange(3)}))
    with pytest.raises(AssertionError):
        bench.compare("one", "", [case], messages=3)


def test_a_target_is_reached_on_its_side_of_the_bound() -> None:
    assert Target("ratio", 1.2, 1.2, is_least=True).is_reached
    assert not Target("ratio", 1.1, 1.2, is_least=True).is_reached
    assert Target("ratio", 1.1, 1.2, is_least=False).is_reached


def test_the_report_keeps_the_suites_that_were_not_run_again(bench: Bench, tmp_path: Path) -> None:
    section = bench.section("Growth", "Over something.", ("ms",))
    bench.row(section, "10", 1.0)
    bench.row(section, "1000", 4.0)
    bench.target(section, "times", 4.0, at_most=2.0)
    facts = {
        "date": "now",
        "commit": "abc",
        "scale": 1.0,
        "rounds": 2,
        "load": [0.1, 0.2],
        "machine": report.machine(),
    }
    page = tmp_path / "docs" / "page.md"
    report.write(page, {"first": {**facts, "sections": bench.to_json()}}, ("first", "second"))
    assert "Not measured here yet: second." in page.read_text()
    report.write(page, {"second": {**facts, "sections": []}}, ("first", "second"))
    text = page.read_text()
    assert "Not measured" not in text
    assert "| times | ≤ 2 | 4 | **missed** |" in text
    assert "* now, commit abc, 2 rounds: first, second" in text
    assert list(json.loads(page.with_suffix(".json").read_text())) == ["first", "second"]


def test_the_bare_walk_finds_what_was_sent(tmp_path: Path) -> None:
    # Two beacons lie in it.
    count = messages.to_file(f"file://{tmp_path}/orders.ss/orders", messages.documents(1500, messages.LARGE))
    found = tmp_path / "walked"
    found.mkdir()
    bare_loops.scan(tmp_path / "orders.ss", found)
    payloads = pq.read_table(found).column("payload").to_pylist()
    assert sorted(payloads) == sorted(messages.documents(count, messages.LARGE))
    assert len(payloads[0]) == messages.LARGE


def test_the_cost_of_a_process_is_measured() -> None:
    # Other tests may have started a JVM.
    servers = ProcessTree(os.getpid()).processes() - {os.getpid()}
    with ProcessTree(os.getpid(), without=servers).measured() as cost:
        assert sum(range(3_000_000))
    assert cost.cpu_seconds > 0
    assert cost.peak_bytes > 10 * 2**20
    assert cost.peak_java_bytes == 0
