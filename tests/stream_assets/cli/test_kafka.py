"""The command line on a Kafka topic: what it prints is what Kafka's own tools say."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.command_line import SCHEMA, printed, run
from tests.support.topics import committed, ends, unique_group

pytestmark = pytest.mark.spark


def test_produce_ingest_lag_verify_and_switch(spark: SparkSession, kafka: str, folder: Path) -> None:
    group = unique_group()
    url = f"kafka://{kafka}/orders-of-{group}"
    topic = f"orders-of-{group}"
    sent = printed("produce", url, "--count", "1000", "--shards", "4")
    assert [(row["first"], row["last"]) for row in sent] == [(0, 249)] * 4
    place = ["--table", folder / "t", "--group", group]
    before = printed("lag", url, "--group", group)
    assert [(row["committed"], row["lag"]) for row in before] == [(None, 250)] * 4
    printed("ingest", "--source", url, *place, "--decode", "json", "--schema", SCHEMA)
    for number, row in enumerate(printed("lag", url, *place)):
        assert row == {
            "shard": f"{topic}/{number}",
            "start": 0,
            "committed": committed(kafka, group, topic)[number],
            "ledger": 250,
            "end": ends(kafka, topic)[number],
            "lag": 0,
            "blocked": 0,
            "lost": None,
        }
    assert committed(kafka, group, topic) == dict.fromkeys(range(4), 250)
    assert run("verify", "--source", url, *place).exit_code == 0
    switch = ["switch", "--source", url, *place, "--to", "load_balanced"]
    assert "is load_balanced now" in run(*switch).output
    assert "was load_balanced already" in run(*switch).output
    refused = run("ingest", "--source", url, *place)
    assert refused.exit_code == 1
    assert "stream-assets switch --to resumable" in refused.stderr


def test_client_options_are_passed_on_and_secrets_are_not_shown(kafka: str) -> None:
    url = f"kafka://{kafka}/nothing"
    failed = run("lag", url, "-X", "sasl.password=env:NOT_SET_ANYWHERE")
    assert failed.exit_code == 1
    assert "NOT_SET_ANYWHERE, which is not set" in failed.stderr
    assert "Leave it out" in run("lag", url, "-X", "enable.auto.commit=true").stderr
    shown = run("lag", url, "-X", "sasl.password=hunter2", "-X", "security.protocol=nonsense")
    assert "error: the Kafka client refuses its options" in shown.stderr
    assert "hunter2" not in shown.output + shown.stderr


def test_keys_headers_and_partitions_are_sent_shown_and_read_back(kafka: str) -> None:
    url = f"kafka://{kafka}/keys-of-{unique_group()}"
    run("produce", url, "--count", "3", "--shards", "3")
    keyed = ("--key", "k-7", "--header", "source=till", "--header", "empty=", "--shard", "2")
    sent = run("produce", url, *keyed, "--json", text='{"id": 7}\n')
    assert json.loads(sent.stdout)["rows"] == [{"shard": f"{url.rpartition('/')[2]}/2", "first": 1, "last": 1}]
    documents = [json.loads(line) for line in run("peek", url, "--json").stdout.splitlines()]
    (last,) = (one for one in documents if one["shard_id"] == 2 and one["sequence"] == 1)
    assert (last["payload"], last["key"]) == ('{"id": 7}', "k-7")
    assert last["headers"] == [{"name": "source", "value": "till"}, {"name": "empty", "value": ""}]
    assert datetime.fromisoformat(last["timestamp"].replace("Z", "+00:00")).tzinfo is not None
    assert "key=k-7 source=till empty=(empty)" in run("peek", url).stdout
    copy = f"kafka://{kafka}/copy-of-{unique_group()}"
    run("produce", copy, "--count", "3", "--shards", "3")
    run("produce", copy, "--json-lines", text="".join(f"{json.dumps(one)}\n" for one in documents))
    places = ("stream_key", "sequence")
    copied = [json.loads(line) for line in run("peek", copy, "--json").stdout.splitlines()]
    without_place = [{name: one[name] for name in one if name not in places} for one in documents]
    assert all({n: v for n, v in one.items() if n not in places} in without_place for one in copied if one["sequence"])
    assert len(copied) == 3 + len(documents)
