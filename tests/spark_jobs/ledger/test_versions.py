"""Releases of different age use one table: what a newer one wrote is refused, what an older one wrote is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sensors.lag_sensor import LagCursor, read_cursor, write_cursor
from spark_jobs.dead_letters.table import FORMATS
from spark_jobs.ledger.entries import FORMAT, KeyOrder, LedgerEntry, Totals
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import Range, position_facts_in
from stream_consumers.errors import UnsupportedVersionError
from stream_consumers.messages import Shard
from tests.support.command_line import SCHEMA, run
from tests.support.letter_tables import ORDERS, Tables
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, write_stream
from tests.support.written_log import WrittenLog

COMMIT = "3d439c9"
"""It writes batch metadata of format 2, and reads the formats 1 and 2."""
PACKAGES = ("stream_consumers", "spark_jobs", "sensors", "stream_assets")


class OlderRelease:
    """The packages of release 0.1 in a folder.

    Args:
        folder: an empty folder for them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        packed = subprocess.run(["git", "archive", COMMIT, *PACKAGES], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)

    def python(self, code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python code with its packages; ``sys.argv[1:]`` are the words."""
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def command(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of ``stream-assets``."""
        return self.python("from stream_assets.cli.main import main; main()", *words)


SHARD = Shard("orders", 0)
# Written by release 0.1.
INIT = {
    **{"v": 2, "kind": "init", "group": "g", "app": "g/main", "n": 1, "by": "main", "bid": "b1", "base": -1},
    **{"origin": {"orders/0": 0}, "state": {}, "identities": {"orders": "kafka:a"}, "switch": "resumable"},
    "totals": {},
}
BATCH = {
    **{"v": 2, "kind": "batch", "group": "g", "app": "g/main", "n": 2, "by": "main", "bid": "b2", "base": 0},
    **{"ranges": {"orders/0": [0, 5]}, "state": {"orders/0": [0, 0]}, "rows": 5, "dead": 1},
    **{"identities": {"orders": "kafka:a"}, "sharing": "resumable", "totals": {"dead": 1}},
}
STATE = {"cov": [[None, 5]], "redo": [], "origin": 0, "claimed": None}
READ = """
import sys
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.ledger import Ledger
try:
    print(Ledger(DeltaLog(sys.argv[1]), group="g", member="main").read().positions)
except Exception as error:
    print(type(error).__name__)
"""


def ledger(log: WrittenLog, group: str = "g") -> Ledger:
    return Ledger(log.log(), group=group, member="main")


@pytest.fixture
def log(tmp_path: Path) -> WrittenLog:
    made = WrittenLog(tmp_path / "table")
    for document in (INIT, BATCH):
        made.commit(metadata=json.dumps(document), transactions={"g/main": document["n"]})
    return made


def test_what_release_0_1_wrote_is_continued(log: WrittenLog) -> None:
    state = ledger(log).read()
    assert (state.positions, state.sharing, state.identities) == ({SHARD: 5}, "resumable", {"orders": "kafka:a"})
    assert state.totals == Totals(dead=2)
    log.ours(ledger(log).entry("batch", state, ranges={SHARD: Range(5, 9)}))
    assert ledger(log).read().positions == {SHARD: 9}


@pytest.mark.parametrize("transactions", [{"g/main": 3}, {}], ids=["with a transaction", "without"])
@pytest.mark.parametrize(
    "change",
    [
        {"v": FORMAT + 1},
        {"v": "2"},
        {"v": None},
        {"except": {"orders/0": [[6, 7]]}},
        {"take": {}},
        {"kind": "merge"},
        {"kind": "claim"},
        {"kind": ["batch"]},
        {"mode": "append_some"},
        {"sharing": "by tenant"},
        {"switch": "by tenant"},
        {"state": {"orders/0": {**STATE, "leaders": [3]}}},
        {"state": {"orders/0": [5, 0, 3]}},
        {"state": {"orders/0": 1}},
        {"totals": {"dead": 1, "merged": 4}},
        {"ranges": {"orders/0": [5, 9, 1]}},
        {"ranges": {"orders": [0, 5]}},
        {"ranges": [1]},
        {"claims": {"orders/0": [5, 9, 2, 1]}},
        {"lost": {"orders/0": [[5, 6, 7]]}},
        {"lost": {"orders/0": None}},
        {"n": "3"},
        {"rows": 1.5},
        {"begins": 1},
        {"packed": "x"},
        {"keys": [["id"], "", 3]},
        {"bid": "b' OR TRUE OR _batch = '"},
        {"uncounted": {"b\\'": {}}},
    ],
    ids=json.dumps,
)
def test_what_a_newer_release_wrote_is_refused(
    log: WrittenLog, change: Mapping[str, Any], transactions: Mapping[str, int]
) -> None:
    third = {**BATCH, "n": 3, "bid": "b3", "base": 1, "ranges": {"orders/0": [5, 9]}, **change}
    log.commit(metadata=json.dumps(third), transactions=transactions)
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        ledger(log).read()
    # The entry may be of the stream that another group is about to write.
    with pytest.raises(UnsupportedVersionError):
        ledger(log, "other").other_group(frozenset({"payments"}))


def test_scd_type_1_is_written_as_by_releases_that_know_no_other(log: WrittenLog) -> None:
    """These take a list of two, and refuse one of three."""
    state = ledger(log).read()
    for keys, written in (
        (KeyOrder(("id",), "at"), [["id"], "at"]),
        (KeyOrder(("id",), "at", scd_type=2), [["id"], "at", 2]),
    ):
        document = json.loads(ledger(log).entry("batch", state, keys=keys).to_json())
        assert document["keys"] == written
        found = LedgerEntry.from_json(document)
        assert found is not None
        assert found.keys == keys


def test_release_0_1_refuses_what_this_one_wrote(log: WrittenLog, tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    older = OlderRelease(tmp_path / "older")
    assert "5" in older.python(READ, log.path).stdout
    log.ours(ledger(log).entry("batch", ledger(log).read(), ranges={SHARD: Range(5, 9)}))
    assert older.python(READ, log.path).stdout.strip() == "UnsupportedVersionError"


@pytest.mark.parametrize(
    "change", [{"v": max(FORMATS) + 1}, {"place": 1}, {"number": "1"}, {"bid": "b' OR TRUE --"}], ids=json.dumps
)
def test_dead_letters_of_a_newer_release_are_not_judged(tmp_path: Path, change: Mapping[str, object]) -> None:
    tables = Tables(tmp_path)
    tables.add(ORDERS, 3, metadata=change)
    with pytest.raises(UnsupportedVersionError, match="version 0"):
        tables.table.orphaned(tables.reader().ledger)


def test_a_cursor_of_another_release_counts_as_none() -> None:
    known = LagCursor(waiting_since=5.0, number=3)
    assert read_cursor(write_cursor(known), LagCursor) == known
    for change in ({"v": 2}, {"asked": 1}):
        assert read_cursor(json.dumps({**json.loads(write_cursor(known)), **change}), LagCursor) == LagCursor()


@pytest.mark.parametrize(
    "hint", [None, [], {"added_before": 3}, {"added_before": {"orders/0": {"at": 5}, "?": [1, 2]}}]
)
def test_a_hint_of_another_form_is_ignored(hint: object) -> None:
    assert position_facts_in(hint) == {}


@pytest.mark.spark
@pytest.mark.slow
def test_two_releases_take_turns_and_the_older_one_writes_nothing_after_the_newer(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "older").mkdir()
    older = OlderRelease(tmp_path / "older")
    file, table = tmp_path / "orders.ss", tmp_path / "t"
    url = write_stream(file, 40, malformed=frozenset({3, 21}))
    words = ["ingest", "--source", url, "--table", table, "--group", "g", "--decode", "json", "--schema", SCHEMA]
    first = older.command(*words, "--max-records", "10", "--max-batches", "2")
    assert first.returncode == 0, first.stderr
    assert run(*words, "--max-batches", "1", "--max-records", "10").exit_code == 0
    before = [sorted(path.rglob("*")) for path in (table, Path(f"{table}_dead_letters"))]
    refused = older.command(*words)
    assert refused.returncode == 1
    assert "reads up to 2" in refused.stderr
    assert [sorted(path.rglob("*")) for path in (table, Path(f"{table}_dead_letters"))] == before
    assert run(*words).exit_code == 0
    assert_each_once(file, table)
