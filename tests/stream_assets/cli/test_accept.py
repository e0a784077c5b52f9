"""The command accept, and what the other commands say before and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.command_line import failing, printed, run
from tests.support.streams import sequences_in_table, write_stream

pytestmark = pytest.mark.spark
DECODE = ("--decode", "json", "--schema", "id BIGINT, user STRING")


def words(folder: Path, command: str, *more: str) -> list[str]:
    url, table = f"file://{folder}/orders.ss/orders", str(folder / "t")
    place = [url, "--table", table] if command == "lag" else ["--source", url, "--table", table]
    return [command, *place, "--group", "lakehouse", *more]


def rows(folder: Path, command: str, *more: str) -> list[dict[str, Any]]:
    return printed(*words(folder, command, *more))


@pytest.mark.slow
def test_a_rotated_file_is_accepted_and_every_command_knows_it(spark: SparkSession, folder: Path) -> None:
    write_stream(folder / "orders.ss", 30, shards=1)
    rows(folder, "ingest", *DECODE)
    failing(run(*words(folder, "accept")), "there is nothing to accept")
    (folder / "orders.ss").unlink()
    write_stream(folder / "orders.ss", 12, shards=1)
    for command, more in (("ingest", DECODE), ("lag", ()), ("verify", ()), ("rewind", ("--to", "earliest"))):
        failing(run(*words(folder, command, *more)), "stream-assets accept --as orders#2", "accept: [orders#2]")
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
    assert "orders/0: the stream is gone" in run(*words(folder, "verify")).stderr
    failing(run(*words(folder, "rewind", "--to", "orders/0=5")), "orders/0 is of another epoch", "It has orders#2/0")
    failing(run(*words(folder, "replay", *DECODE, "--from", "orders/0=5")), "orders/0 is of another epoch")
    (replayed,) = rows(folder, "replay", *DECODE, "--dry-run")
    assert (replayed["shard"], replayed["rows replaced"]) == ("orders#2/0", 12)
    assert [row["shard"] for row in rows(folder, "rewind", "--to", "orders#2/0=5")] == ["orders#2/0"]
    rows(folder, "ingest", *DECODE)
    found = sequences_in_table(folder / "t")
    assert set(found.values()) == {1}
    assert len(found) == 42
