"""The command line on Redis Streams: what it prints is what Redis itself says."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from stream_consumers.errors import DataLossError
from stream_consumers.redis.entries import to_sequence
from tests.support.command_line import SCHEMA, printed, run
from tests.support.redis_tables import Stream

pytestmark = pytest.mark.spark


def test_people_see_ids_of_entries_and_machines_sequences(redis_address: str) -> None:
    name = f"ids-{uuid.uuid4().hex[:8]}"
    url = f"redis://{redis_address}/{name}"
    host, _, port = redis_address.partition(":")
    with redis.Redis(host, int(port)) as client:
        sent = run("produce", url, "--count", "1")
        ((entry, _),) = client.xrange(name)
    for output in (sent.output, run("peek", url).output, run("lag", url, "--group", "g").output):
        assert entry.decode() in output
    assert "Z | " in run("peek", url).output, "times have a zone"
    (row,) = printed("lag", url, "--group", "g")
    assert row["start"] == to_sequence(entry)


@pytest.mark.slow
def test_produce_ingest_lag_verify_and_switch(spark: SparkSession, redis_address: str, folder: Path) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    url, group = f"redis://{redis_address}/{name}", f"g-{name}"
    host, _, port = redis_address.partition(":")
    client: Any = redis.Redis(host, int(port))
    assert len(printed("produce", url, "--count", "1000", "--shards", "4")) == 4
    place = ["--table", folder / "t", "--group", group]
    assert [(row["committed"], row["lag"]) for row in printed("lag", url, "--group", group)] == [(None, 250)] * 4
    printed("ingest", "--source", url, *place, "--decode", "json", "--schema", SCHEMA)
    for row in printed("lag", url, *place):
        key = f"{name}:{row['shard'].rpartition('/')[2]}"
        (info,) = client.xinfo_groups(key)
        assert row["committed"] == row["ledger"] == row["end"] == to_sequence(info["last-delivered-id"]) + 1
        assert (row["lag"], info["lag"]) == (0, 0)
    run("produce", url, "--count", "20", "--shards", "4")
    assert [row["lag"] for row in printed("lag", url, *place)] == [5] * 4, "entries, not ids"
    printed("ingest", "--source", url, *place, "--decode", "json", "--schema", SCHEMA)
    assert run("verify", "--source", url, *place).exit_code == 0

    switch = ["switch", "--source", url, *place, "--to", "load_balanced"]
    assert "is load_balanced now" in run(*switch).output
    assert "was load_balanced already" in run(*switch).output
    assert "stream-assets switch --to resumable" in run("ingest", "--source", url, *place).stderr
    run("produce", url, "--count", "12", "--shards", "4")
    client.xreadgroup(group, "worker-1", {f"{name}:0": ">"}, count=2)
    for words in (("--group", group), tuple(place)):
        found = printed("lag", url, *words)
        assert [(row["unread"], row["pending"], row["lag"]) for row in found] == [(1, 2, 3)] + [(3, 0, 3)] * 3
    quick = ["-X", "min_idle_seconds=0.5", "--mode", "load_balanced", "--member", "me"]
    printed("ingest", "--source", url, *place, *quick, "--decode", "json", "--schema", SCHEMA)
    assert [row["lag"] for row in printed("lag", url, *place)] == [0] * 4
    verdicts = printed("verify", "--source", url, *place)
    assert [(row["rows"], row["missing"], row["duplicated"], row["lag"]) for row in verdicts] == [(258, 0, 0, 0)] * 4

    client.close()


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("trimmed", "load_balanced"),
        *(
            pytest.param(how, mode, marks=pytest.mark.slow)
            for how, mode in [
                ("made again", "resumable"),
                ("made again", "load_balanced"),
                ("trimmed", "resumable"),
                ("deleted", "resumable"),
                ("deleted", "load_balanced"),
            ]
        ),
    ],
)
def test_lag_and_verify_say_what_stops_the_next_run(
    spark: SparkSession, redis_address: str, folder: Path, how: str, mode: str
) -> None:
    stream = Stream(redis_address, folder, shards=1, mode=mode)
    stream.add(20)
    stream.drain(spark)
    place = ["--table", stream.table, "--group", stream.group]
    commands = [["lag", stream.url, *place], ["verify", "--source", stream.url, *place]]
    stream.add(10, first=20)
    assert [run(*words).exit_code for words in commands] == [0, 0]
    if how == "made again":
        stream.client.delete(stream.name)
        stream.add(40)
    elif how == "trimmed":
        stream.client.xtrim(stream.name, maxlen=4, approximate=False)
    else:
        stream.client.xdel(stream.name, stream.entry_ids()[25])
    assert [run(*words).exit_code for words in commands] == [1, 1]
    if how != "made again":
        for words in commands:
            (row,) = json.loads(run(*words, "--json").stdout)["rows"]
            assert row["lost"]
    with pytest.raises(DataLossError):
        stream.drain(spark)
    stream.client.close()
