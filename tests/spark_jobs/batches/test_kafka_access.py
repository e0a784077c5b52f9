"""Secrets stay secret, passwords work from end to end, and options that would break exactly-once are refused."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.decoding.decoders import Raw
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.source import SourceColumns, SplitPartition, read_splits
from stream_assets import RunLimits, StreamAsset, stream_asset, stream_definitions
from stream_assets.resources import StreamLocation
from stream_consumers.batches import BatchPlan, Range
from stream_consumers.create import StreamSource
from stream_consumers.errors import AccessDeniedError, InvalidOptionError
from stream_consumers.kafka import cluster as kafka_cluster
from stream_consumers.kafka.batches import KafkaSplit
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.dagster_runs import source_with
from tests.support.kafka_broker import SECURE_PASSWORD, SECURE_USER, Listeners
from tests.support.kafka_topics import Pipeline, Topics, assert_each_once, orders, shard

SECRET = SECURE_PASSWORD
_LONG = re.compile(r"[A-Za-z0-9+/_-]{24,}")


@pytest.fixture
def topics(kafka_listeners: Listeners, spark: SparkSession, folder: Path) -> Iterator[Topics]:
    made = Topics(kafka_listeners.plain, spark, folder)
    with made:
        yield made


@pytest.fixture
def address(kafka_listeners: Listeners) -> str:
    """The listener that asks for a password."""
    return kafka_listeners.secure


def client(password: object = SECRET) -> dict[str, Any]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": SECURE_USER,
        "sasl.password": password,
    }


def tells(text: str) -> bool:
    """Whether the secret is in a text, as it is or within something in base64."""
    return SECRET in text or any(SECRET.encode() in decoded for decoded in _decoded(text))


def _decoded(text: str) -> Iterator[bytes]:
    for word in _LONG.findall(text):
        for cut in range(4):
            with contextlib.suppress(binascii.Error):
                yield base64.b64decode(
                    word[cut : cut + (len(word) - cut) // 4 * 4], altchars=b"-_" if "-" in word else None
                )


def test_the_test_itself_would_see_a_secret() -> None:
    hidden = base64.b64encode(b"%s..." % SECRET.encode()).decode()
    assert tells(f"<{SECRET}>")
    assert all(tells(f"plan={'x' * cut}{hidden}") for cut in range(4))
    assert not tells("*********(redacted)" * 9)


def planned(address: str, topic: str) -> BatchPlan:
    source = StreamSource(StreamUrl.parse(f"kafka://{address}/{topic}"), client=client())
    with source.open() as opened:
        opened.extents()
        plan = opened.plan({shard(topic): Range(0, 10)}, limits=Limits(), parallelism=2)
    assert plan is not None
    return plan


@pytest.mark.parametrize("is_variable", [False, True], ids=["text", "variable"])
def test_no_value_of_ours_shows_a_secret(
    topics: Topics, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, is_variable: bool
) -> None:
    topic = topics.create()
    topics.send(topic, orders(4))
    monkeypatch.setenv("TRAP_PASSWORD", SECRET)
    given = client(dg.EnvVar("TRAP_PASSWORD") if is_variable else SECRET)
    url = f"kafka://{address}/{topic}"
    stream = declare(source_with(url, given), folder)
    with StreamSource(StreamUrl.parse(url), client=given).open() as opened:
        opened.extents()
        plan = opened.plan({shard(topic): Range(0, 4)}, limits=Limits(), parallelism=2)
        assert plan is not None
        splits = list(plan.splits)
        assert all(isinstance(split, KafkaSplit) and split.client["sasl.password"] == SECRET for split in splits)
        partition = SplitPartition(splits[0], Raw(), SourceColumns.of(Raw()).decoded, "driver")
        values = [
            stream,
            stream.declared.stream,
            stream.declared.ingestion,
            stream.streams,
            stream.declared,
            opened,
            plan,
            *splits,
            partition,
        ]
        assert [value for value in values if tells(f"{value!r} {value!s}")] == []


def test_no_plan_of_spark_shows_a_secret(topics: Topics, address: str) -> None:
    topic = topics.create()
    topics.send(topic, orders(4))
    frame = (
        read_splits(topics.spark, planned(address, topic).splits, SourceColumns.of(Raw()))
        .where("payload IS NOT NULL")
        .persist()
    )
    assert frame.count() == 4
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for mode in ("extended", "formatted", "codegen", "cost"):
            frame.explain(mode)
    assert "stream_assets" in shown.getvalue()
    execution = frame._jdf.queryExecution()
    plans = [execution.logical(), execution.analyzed(), execution.optimizedPlan(), execution.executedPlan()]
    texts = [shown.getvalue(), execution.toString(), *(plan.treeString() for plan in plans)]
    texts += [plan.prettyJson() for plan in plans]
    frame.unpersist()
    assert [text for text in texts if tells(text)] == []


def test_no_error_shows_a_secret(topics: Topics, address: str, folder: Path) -> None:
    topic = topics.create()
    topics.send(topic, orders(4))
    # An executor that finds less than was planned.
    url = StreamUrl.parse(f"kafka://{address}/{topic}")
    frame = read_splits(topics.spark, [KafkaSplit(url, client(), {shard(topic): Range(0, 9)})], SourceColumns.of(Raw()))
    with pytest.raises(PythonException, match="ends before the planned end") as read:
        frame.collect()
    assert not tells(f"{read.value!r} {read.value}")
    for option in ({"enable.auto.commit": True}, {"isolation.level": "some"}):
        with pytest.raises(InvalidOptionError) as refused:
            Pipeline.of(topics.spark, str(url), folder / "t", client={**client(), **option}).drain()
        assert not tells(f"{refused.value!r} {refused.value}")


def test_wrong_passwords_are_hidden(
    topics: Topics, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create()
    # As long as a request may take, the client tries again.
    monkeypatch.setattr(kafka_cluster, "REQUEST_SECONDS", 2.0)
    what = Pipeline.of(topics.spark, f"kafka://{address}/{topic}", folder / "t", client=client(f"not-{SECRET}"))
    began = time.monotonic()
    with pytest.raises(AccessDeniedError, match=r"Invalid username or password.*sasl\.") as denied:
        what.drain()
    assert time.monotonic() - began < 8
    assert not tells(f"{denied.value!r} {denied.value}")
    assert what.rows() == {}


def declare(source: StreamLocation, folder: Path, **options: Any) -> StreamAsset:
    @stream_asset(source=source, table=str(folder / "t"), group="lakehouse", decode=Json("id BIGINT"), **options)
    def orders(batch: DataFrame) -> DataFrame:
        return batch

    return orders


@pytest.mark.dagster
def test_a_password_works_and_dagster_never_hears_it(
    topics: Topics, address: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, orders(5))
    topics.send(topic, orders(5), partition=1)
    stream = declare(source_with(f"kafka://{address}/{topic}", client()), folder, limits=RunLimits(max_records=6))
    definitions = stream_definitions([stream])
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def(stream.declared.job_name).execute_in_process(instance=instance)
        run = instance.get_run_by_id(result.run_id)
        told = [repr(record) for record in instance.all_logs(result.run_id)]
    assert result.success
    what = topics.pipeline(topic, group="lakehouse")
    assert_each_once(what.rows(), topics.messages(topic))
    assert topics.committed("lakehouse", topic) == {0: 5, 1: 5}
    assert any("ASSET_MATERIALIZATION" in text for text in told)
    told += [repr(run), repr(stream), *map(repr, definitions.assets or []), *map(repr, definitions.sensors or [])]
    told += [repr(spec) for spec in definitions.resolve_all_asset_specs()]
    told += list(capfd.readouterr())
    assert [text for text in told if tells(text)] == []


REFUSED = {
    "enable.auto.commit": "true",
    "auto.offset.reset": "latest",
    "group.id": "another",
    "bootstrap.servers": "127.0.0.1:1",
    "enable.partition.eof": False,
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_this_project_decides_are_refused(option: str) -> None:
    with pytest.raises(InvalidOptionError, match=option):
        StreamSource(StreamUrl.parse("kafka://127.0.0.1:1/orders"), client={option: REFUSED[option]}).open()


@pytest.mark.parametrize("option", [{"sasl.pasword": "x"}, {"security.protocol": "none"}, {"fetch.min.bytes": "many"}])
def test_options_that_the_client_does_not_know_are_reported_as_such(topics: Topics, option: dict[str, Any]) -> None:
    topic = topics.create()
    topics.send(topic, orders(1))
    with pytest.raises(InvalidOptionError, match=next(iter(option))):
        topics.pipeline(topic, client=option).drain()


@pytest.mark.slow
def test_drivers_and_executors_have_tokens_of_a_named_provider(topics: Topics, address: str) -> None:
    topic = topics.create()
    topics.send(topic, orders(4))
    given = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_token_provider": "tests.support.tokens:token",
    }
    what = Pipeline.of(topics.spark, f"kafka://{address}/{topic}", topics.folder / "t", client=given)
    what.drain()
    assert_each_once(what.rows(), topics.messages(topic))
    assert topics.committed(what.group, topic) == {0: 4}
