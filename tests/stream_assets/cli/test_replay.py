"""The commands replay, rewind, seek, redrive and accept: what they say beforehand is what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.ledger import LedgerState
from stream_assets import Json, stream_asset
from tests.support.command_line import failing, printed, run
from tests.support.feeds import FILES_FIRST, SHARDS, Feed, make_feed
from tests.support.old_and_new import made, new, rows_of
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.streams import sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MESSAGES = 90
SCHEMA = ("--decode", "json", "--schema", "id BIGINT, user STRING")
NEW = (*SCHEMA, "--transform", "tests.support.old_and_new:new")
# An asset brings its own decoder.
declared = stream_asset(
    source="memory://anywhere/orders",
    group="g",
    table="t",
    decode=Json("id BIGINT, user STRING"),
    spec=dg.AssetSpec("orders"),
)(new)


# What does not depend on the backend is asked of one.
ANY_BACKEND = pytest.mark.parametrize("lake", ["file"], indirect=True)


@dataclass(frozen=True)
class Lake:
    """A feed, and the table that the command line wrote it into."""

    feed: Feed
    table: Path

    def words(self, command: str, *more: str) -> list[str]:
        place = ["--source", self.feed.url, "--table", str(self.table), "--group", self.feed.group]
        return [command, *place, *more]

    def rows(self, command: str, *more: str) -> list[dict[str, Any]]:
        """What a command prints for machines."""
        return printed(*self.words(command, *more))

    def facts(self) -> tuple[int, Any, Any]:
        """What a dry run must not change: the table's version, the ledger, what the broker was told."""
        return DeltaTable(str(self.table)).version(), self.state().positions, self.feed.told()

    def state(self) -> LedgerState:
        return Ingestion(self.feed.group, str(self.table)).ledger().read()

    def assert_made(self, *, by_new: range) -> None:
        assert rows_of(self.table) == made(self.feed, range(self.feed.sent), by_new=by_new)
        assert [row["missing"] + row["duplicated"] + row["unknown"] for row in self.rows("verify")] == [0] * SHARDS


@pytest.fixture(params=FILES_FIRST)
def lake(request: pytest.FixtureRequest, spark: SparkSession, folder: Path) -> Lake:
    made_here = Lake(make_feed(request.param, folder, request.getfixturevalue), folder / "t")
    made_here.feed.send(MESSAGES)
    found = made_here.rows("ingest", *SCHEMA, "--transform", "tests.support.old_and_new:old", "--max-records", "30")
    assert [row["lag"] for row in found] == [60, 30, 0]
    made_here.assert_made(by_new=range(0))
    return made_here


def test_replay_says_what_it_would_do_then_does_it_and_moves_nothing(lake: Lake) -> None:
    before = lake.facts()
    span = ("--from", lake.feed.bound(30), "--until", lake.feed.bound(60))
    planned = lake.rows("replay", *span, *NEW, "--dry-run")
    assert [(row["shard"], row["messages"], row["rows replaced"]) for row in planned] == [
        (f"{lake.feed.stream}/{shard}", 10, 9) for shard in range(SHARDS)
    ]
    assert [(row["from"], row["until"]) for row in planned] == [
        (lake.feed.sequence(30 + shard), lake.feed.sequence(60 + shard)) for shard in range(SHARDS)
    ]
    assert lake.facts() == before
    shown = run(*lake.words("replay", *span, *NEW, "--dry-run"))
    assert "would be replayed into" in shown.output
    assert lake.facts() == before
    done = lake.rows("replay", *span, *NEW, "--max-records", "20")
    assert [(row["batch"], row["left"]) for row in done] == [(1, 10), (2, 0)]
    assert (sum(row["replaced"] for row in done), sum(row["rows"] for row in done)) == (27, 27)
    assert lake.facts()[1:] == before[1:]
    lake.assert_made(by_new=range(30, 60))


def test_replay_takes_times_and_the_transform_of_a_stream_asset(lake: Lake) -> None:
    asset = ("--transform", "tests.stream_assets.cli.test_replay:declared")
    span = ("--from", "2025-03-10T00:00:00.010Z", "--until", "2025-03-10T00:00:00.050Z")
    planned = lake.rows("replay", *span, *asset, "--dry-run")
    assert sum(row["messages"] for row in planned) == 40
    lake.rows("replay", *span, *asset)
    lake.assert_made(by_new=range(10, 50))
    failing(run(*lake.words("replay", *span, *asset, *SCHEMA)), "its own decoder", "Leave --decode")


@ANY_BACKEND
def test_replay_and_ingest_refuse_rows_of_no_transform_in_a_table_of_one(lake: Lake) -> None:
    before = lake.facts()
    for command in ("replay", "ingest"):
        refused = run(*lake.words(command, *SCHEMA))
        failing(refused, "were written with the transform 'old', and no transform is given", "--transform MODULE:old")
    for wrong, words in (
        ("nowhere:new", "cannot be imported"),
        ("tests.support.old_and_new:nothing", "cannot be imported"),
        ("tests.support.old_and_new", "cannot be imported"),
        ("tests.support.old_and_new:COLUMNS", "is not a function"),
    ):
        failing(run(*lake.words("replay", *SCHEMA, "--transform", wrong)), words)
    assert lake.facts() == before
    lake.assert_made(by_new=range(0))


@ANY_BACKEND
def test_replay_appends_if_it_is_told_to(lake: Lake) -> None:
    span = ("--from", lake.feed.bound(30), "--until", lake.feed.bound(60))
    (done,) = lake.rows("replay", *span, *NEW, "--on-replay", "append")
    assert (done["rows"], done["replaced"]) == (27, 0)
    both = made(lake.feed, range(MESSAGES)) + made(lake.feed, range(30, 60), by_new=range(MESSAGES))
    assert rows_of(lake.table) == both


@pytest.mark.parametrize(
    ("command", "to"), [("rewind", "earliest"), ("rewind", "places"), ("seek", "2025-03-10T00:00:00.030Z")]
)
def test_rewind_and_seek_say_what_they_would_do_then_move_the_group(lake: Lake, command: str, to: str) -> None:
    first = 0 if to == "earliest" else 30
    places = lake.feed.moments(first) if command == "seek" else lake.feed.places(first)
    to = lake.feed.bound(first) if to == "places" else to
    before = lake.facts()
    planned = lake.rows(command, "--to", to, "--dry-run")
    assert "would be moved" in run(*lake.words(command, "--to", to, "--dry-run")).output
    assert lake.facts() == before
    moved = lake.rows(command, "--to", to)
    assert moved == planned
    assert [(row["to"], row["position"]) for row in moved] == [
        (places[lake.feed.shard(n)], lake.feed.sequence(MESSAGES - SHARDS + n) + 1) for n in range(SHARDS)
    ]
    again = (MESSAGES - first) // SHARDS
    assert [(row["messages to read again"], row["rows to replace"]) for row in moved] == [(again, again * 9 // 10)] * 3
    assert [row["messages skipped"] for row in moved] == [0] * SHARDS
    assert lake.facts()[0] == before[0] + 1, "one empty commit"
    assert lake.state().positions == places
    assert lake.feed.told() == lake.feed.done(first)
    lake.assert_made(by_new=range(0))
    assert f"group {lake.feed.group} is there already" in run(*lake.words(command, "--to", to)).output
    lake.rows("ingest", *NEW, "--max-records", "40")
    lake.assert_made(by_new=range(first, MESSAGES))
    assert lake.facts()[1:] == before[1:]


def test_rewind_to_latest_skips_what_is_not_read(lake: Lake) -> None:
    lake.feed.send(6)
    (dry, real) = (lake.rows("rewind", "--to", "latest", *more) for more in (("--dry-run",), ()))
    assert dry == real
    assert [row["messages skipped"] for row in real] == [2] * SHARDS
    assert lake.feed.told() == lake.feed.done(96)
    assert lake.rows("ingest", *NEW) == []
    assert [(row["skipped"], row["missing"]) for row in lake.rows("verify")] == [(2, 0)] * SHARDS


WRONG: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("rewind", "--to", "2025-03-10"), ("is a time", "stream-assets seek --to 2025-03-10")),
    (("seek", "--to", "yesterday"), ("'yesterday' is not a bound in a stream",)),
    (("seek", "--to", "earliest"), ("earliest is not a time", "stream-assets rewind --to earliest")),
    (("rewind", "--to", "999"), ("does not hold sequence 999", "earliest")),
    (("rewind", "--to", "other/0=1"), ("has no shard other/0",)),
    (("replay", *NEW, "--from", "other/0=1"), ("has no shard other/0",)),
    (("replay", *NEW, "--id", "nonsense"), ("has no replay 'nonsense'", "Leave --id out")),
    (("replay", *NEW, "--from", "latest", "--until", "earliest"), ("before its start",)),
]


def test_wrong_words_change_nothing(lake: Lake) -> None:
    before = lake.facts()
    for words, texts in WRONG:
        failing(run(*lake.words(*words)), *texts)
    assert lake.facts() == before


def test_a_group_that_has_written_nothing_cannot_be_moved_or_replayed(spark: SparkSession, folder: Path) -> None:
    feed = make_feed("file", folder, str)
    feed.send(3)
    for words in (("rewind", "--to", "earliest"), ("replay", *NEW), ("seek", "--to", "2025-03-10")):
        failing(run(*Lake(feed, folder / "t").words(*words)), "so it cannot be replayed or moved", "Ingest first")
    assert not (folder / "t").exists()


def test_a_replay_that_was_killed_goes_on_with_its_id(spark: SparkSession, server: str, lake: Lake) -> None:
    span = ("--from", lake.feed.bound(9), "--until", lake.feed.bound(81))
    limited = ("--max-records", "3", "--remote", server)
    command = [sys.executable, "-m", "stream_assets.cli.main", *lake.words("replay", *span, *NEW, *limited)]
    before = lake.facts()
    with (lake.table.parent / "killed.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ))
        try:
            until(lambda: DeltaTable(str(lake.table)).version() > before[0] + 1, seconds=120, what="two batches")
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    text = (lake.table.parent / "killed.log").read_text()
    replay_id = text.partition("continue it with --id ")[2].split()[0]
    by_then = sum(row[5] == "new" for row in rows_of(lake.table).elements())
    assert 0 < by_then < 65, text
    left = lake.rows("replay", "--id", replay_id, *NEW, "--dry-run")
    assert sum(row["messages"] for row in left) == 72, "the goal is that of the first run"
    lake.rows("replay", "--id", replay_id, *NEW)
    lake.assert_made(by_new=range(9, 81))
    assert lake.facts()[1:] == before[1:]
    entries = [c.entry for c in Ingestion(lake.feed.group, str(lake.table)).ledger().surviving() if c.entry]
    assert sum(entry.messages for entry in entries if entry.kind == "replay") == 72, "no message is replayed twice"
    assert lake.rows("replay", "--id", replay_id, *NEW) == []


STRICT = ("--decode", "json", "--schema", "id BIGINT, user STRING, amount BIGINT NOT NULL")
TODAY = ("--decode", "json", "--schema", "id BIGINT, user STRING, amount BIGINT")
BROKEN = frozenset({4, 11})


def test_redrive_says_what_it_would_do_then_does_it(spark: SparkSession, folder: Path) -> None:
    place = ("--source", write_stream(folder / "orders.ss", 20, malformed=BROKEN), "--table", folder / "t")

    def rows(command: str, *more: str) -> list[dict[str, Any]]:
        return printed(*command.split(), *place, "--group", "g", *more)

    def listed(*more: str) -> dict[str, tuple[int, ...]]:
        found = rows("dead-letters list", *more)
        return {row["reason"]: tuple(row[n] for n in ("dead letters", "replaced") if n in row) for row in found}

    failing(
        run("dead-letters", "redrive", *place, "--group", "g", "--from", "latest", *TODAY), "selects no dead letters"
    )
    rows("ingest", *STRICT)
    assert not sequences_in_table(folder / "t")
    missing, broken = "field '…' is missing, but it is NOT NULL", "not a JSON object"
    assert listed() == {missing: (18,), broken: (2,)}
    names = ("result", "dead letters", "reason", "example")
    wanted = [
        dict(zip(names, ("becomes a row", 18, None, None))),
        dict(zip(names, ("stays a dead letter", 2, "not a JSON object", "orders/0=3"))),
    ]
    assert rows("dead-letters redrive", *TODAY, "--dry-run") == wanted
    assert not sequences_in_table(folder / "t")
    assert rows("dead-letters redrive", *TODAY, "--until", "orders/0=2,orders/1=1") == [
        {**wanted[0], "dead letters": 1}
    ]
    assert listed() == {missing: (17,), broken: (2,)}
    assert rows("dead-letters redrive", *TODAY)[0]["dead letters"] == 17
    assert listed() == {broken: (2,)}
    assert listed("--all") == {missing: (0, 18), broken: (2, 0)}
    assert [row["_sequence"] for row in rows("dead-letters show", "orders/0=3", "orders/0=4")] == [3]
    found = sequences_in_table(folder / "t")
    assert (len(found), sum(found.values())) == (18, 18)
    assert [row["missing"] + row["duplicated"] + row["unknown"] for row in rows("verify")] == [0, 0]
    assert rows("dead-letters redrive", *TODAY) == wanted[1:]


DECODE = ("--decode", "json", "--schema", "id BIGINT, user STRING")


def words(folder: Path, command: str, *more: str) -> list[str]:
    url, table = f"file://{folder}/orders.ss/orders", str(folder / "t")
    place = [url, "--table", table] if command == "lag" else ["--source", url, "--table", table]
    return [command, *place, "--group", "lakehouse", *more]


def rows(folder: Path, command: str, *more: str) -> list[dict[str, Any]]:
    return printed(*words(folder, command, *more))


def test_a_rotated_file_is_accepted_and_every_command_knows_it(spark: SparkSession, folder: Path) -> None:
    write_stream(folder / "orders.ss", 30, shards=1)
    rows(folder, "ingest", *DECODE)
    failing(run(*words(folder, "accept")), "there is nothing to accept")
    (folder / "orders.ss").unlink()
    write_stream(folder / "orders.ss", 12, shards=1)
    for command, more in (("ingest", DECODE), ("lag", ()), ("verify", ()), ("rewind", ("--to", "earliest"))):
        failing(run(*words(folder, command, *more)), "stream-assets accept --as 'orders#2'", "accept: [orders#2]")
    before = sorted(folder.rglob("*.json"))
    (planned,) = rows(folder, "accept", "--dry-run")
    assert sorted(folder.rglob("*.json")) == before
    (accepted,) = rows(folder, "accept", "--as", "orders#2")
    assert accepted == planned
    assert (accepted["epoch"], accepted["begins at"], accepted["ended at"]) == (
        "orders#2",
        "orders#2/0=1",
        "orders/0=31",
    )
    assert rows(folder, "accept", "--as", "orders#2") == []
    (behind,) = rows(folder, "lag")
    assert (behind["shard"], behind["ledger"], behind["lag"]) == ("orders#2/0", 1, 12)
    rows(folder, "ingest", *DECODE)
    assert [row["shard"] for row in rows(folder, "verify")] == ["orders#2/0"]
    assert "orders/0: " in run(*words(folder, "verify")).stderr
    failing(
        run(*words(folder, "rewind", "--to", "orders/0=5")), "orders/0 belongs to another epoch", "It has orders#2/0"
    )
    failing(run(*words(folder, "replay", *DECODE, "--from", "orders/0=5")), "orders/0 belongs to another epoch")
    (replayed,) = rows(folder, "replay", *DECODE, "--dry-run")
    assert (replayed["shard"], replayed["rows replaced"]) == ("orders#2/0", 12)
    assert [row["shard"] for row in rows(folder, "rewind", "--to", "orders#2/0=5")] == ["orders#2/0"]
    rows(folder, "ingest", *DECODE)
    found = sequences_in_table(folder / "t")
    assert set(found.values()) == {1}
    assert len(found) == 42
