"""The command line on Redis Streams: what it prints is what Redis itself says."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from stream_consumers.redis.ids import to_sequence
from tests.support.command_line import SCHEMA, run

pytestmark = pytest.mark.spark


def rows(*words: str | Path) -> list[dict[str, Any]]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


@pytest.mark.slow
def test_produce_ingest_lag_verify_and_switch(spark: SparkSession, redis_address: str, folder: Path) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    url, group = f"redis://{redis_address}/{name}", f"g-{name}"
    host, _, port = redis_address.partition(":")
    client: Any = redis.Redis(host, int(port))
    assert len(rows("produce", url, "--count", "1000", "--shards", "4")) == 4
    place = ["--table", folder / "t", "--group", group]
    assert [(row["committed"], row["lag"]) for row in rows("lag", url, "--group", group)] == [(None, 250)] * 4
    rows("ingest", "--source", url, *place, "--decode", "json", "--schema", SCHEMA)
    for row in rows("lag", url, *place):
        key = f"{name}:{row['shard'].rpartition('/')[2]}"
        (info,) = client.xinfo_groups(key)
        assert row["committed"] == row["ledger"] == row["end"] == to_sequence(info["last-delivered-id"]) + 1
        assert (row["lag"], info["lag"]) == (0, 0)
    run("produce", url, "--count", "20", "--shards", "4")
    assert [row["lag"] for row in rows("lag", url, *place)] == [5] * 4, "entries, not ids"
    rows("ingest", "--source", url, *place, "--decode", "json", "--schema", SCHEMA)
    assert run("verify", "--source", url, *place).exit_code == 0

    switch = ["switch", "--source", url, *place, "--to", "load_balanced"]
    assert "is load_balanced now" in run(*switch).output
    assert "was load_balanced already" in run(*switch).output
    assert "stream-assets switch --to resumable" in run("ingest", "--source", url, *place).stderr
    run("produce", url, "--count", "12", "--shards", "4")
    client.xreadgroup(group, "worker-1", {f"{name}:0": ">"}, count=2)
    for words in (("--group", group), tuple(place)):
        found = rows("lag", url, *words)
        assert [(row["unread"], row["pending"], row["lag"]) for row in found] == [(1, 2, 3)] + [(3, 0, 3)] * 3
    quick = ["-X", "min_idle_seconds=0.5", "--mode", "load_balanced", "--member", "me"]
    rows("ingest", "--source", url, *place, *quick, "--decode", "json", "--schema", SCHEMA)
    assert [row["lag"] for row in rows("lag", url, *place)] == [0] * 4
    verdicts = rows("verify", "--source", url, *place)
    assert [(row["rows"], row["missing"], row["duplicated"], row["lag"]) for row in verdicts] == [(258, 0, 0, 0)] * 4

    assert "is resumable now" in run("switch", "--source", url, *place, "--to", "resumable").output
    run("produce", url, "--count", "4", "--shards", "4")
    rows("ingest", "--source", url, *place, "--decode", "json", "--schema", SCHEMA)
    verdicts = rows("verify", "--source", url, *place)
    assert [(row["rows"], row["missing"], row["duplicated"], row["lag"]) for row in verdicts] == [(259, 0, 0, 0)] * 4
    client.close()
