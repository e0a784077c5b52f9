"""Streams that a pattern finds. Whoever may create a stream chooses its name, and no name may stop another asset."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
import redis
from dagster.components.resolved.errors import ResolutionException
from deltalake import write_deltalake

from spark_jobs.batches.source_checks import check_owner
from stream_assets import StreamAsset, StreamIngestionComponent, StreamTranslator
from stream_assets.stream_to_table import StreamToTable
from stream_consumers.display import shortened
from stream_consumers.errors import BrokerUnavailableError, InvalidOptionError
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from tests.support.groups_without_spark import GroupWithoutSpark
from tests.support.redis_server import redis_server
from tests.support.servers import some_port
from tests.support.topics import create_topic, delete_topics, unique_group

KEY = {"translation": {"key": "sales/{{ stream }}"}}
FIRST = {"translation": {"key": "{{ stream }}"}}


@pytest.fixture
def url() -> Iterator[str]:
    made = f"memory://{uuid.uuid4().hex}"
    yield made
    forget_memory_broker(f"{made}/orders")


def add(url: str, *streams: str) -> None:
    for stream in streams:
        memory_broker(f"{url}/orders").append(Shard(stream), b"{}")


def component(connection: Any, lake: object, *entries: dict[str, Any], **more: Any) -> dg.Definitions:
    given = {"group": "g", "decode": {"type": "text"}}
    attributes = {"connection": connection, "lake": str(lake), "defaults": given, "streams": list(entries), **more}
    loaded = StreamIngestionComponent.from_attributes_dict(attributes=attributes)
    return loaded.build_defs(dg.ComponentTree.for_test().load_context)


def built(connection: Any, lake: object, *entries: dict[str, Any], **more: Any) -> dict[str, StreamAsset]:
    """The assets of a component by their streams, after Dagster has loaded all of its definitions."""
    definitions = component(connection, lake, *entries, **more)
    dg.Definitions.validate_loadable(definitions)
    assets = [one for one in definitions.assets or () if isinstance(one, StreamAsset)]
    return {",".join(one.streams): one for one in assets}


def ingest(asset: StreamAsset) -> None:
    group = GroupWithoutSpark(str(asset.declared.source), asset.declared.ingestion)
    group.begin()
    group.ingest()


@pytest.mark.parametrize(
    ("entry", "new"),
    [
        ({}, "type"),
        ({}, "config"),
        ({}, "."),
        ({}, "x" * 300_000),
        ({}, "ASSET_JOB"),
        (KEY, "."),
        (KEY, ".."),
        (KEY, "_delta_log"),
        (KEY, "a[1]"),
        (FIRST, "__ASSET_JOB"),
        ({"translation": {"tags": {"stream": "{{ stream }}"}}}, "x" * 100),
    ],
    ids=lambda given: shortened(str(given), 50),
)
def test_a_stream_whose_name_makes_no_asset_is_left_out(
    entry: dict[str, Any], new: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(url, "orders", new)
    is_free = new == "ASSET_JOB"
    assert built(url, tmp_path, {"pattern": "*", **entry}).keys() == {"orders", *([new] if is_free else [])}
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == (not is_free)


@pytest.mark.parametrize(
    ("entry", "new"),
    [
        ({}, "orders.eu"),
        ({}, "orders-eu."),
        ({}, "orders_eu"),
        ({}, "ingest-orders-eu"),
        ({}, "replay-orders-eu-partition"),
        ({}, "orders-eu-dead-letters"),
        ({}, "orders-eu-rebuild"),
        ({}, "orders-eu-rebuild-dead-letters"),
        (KEY, "orders.eu"),
        (KEY, "orders-eu_dead_letters"),
    ],
    ids=lambda given: shortened(str(given), 50),
)
def test_a_new_stream_takes_no_place_of_an_existing_asset(
    entry: dict[str, Any], new: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(url, "orders-eu", "orders-us")
    every = {"pattern": "*", **entry}
    ingest(built(url, tmp_path, every)["orders-eu"])
    add(url, new)
    assert built(url, tmp_path, every).keys() == {"orders-eu", "orders-us"}
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


def remove(url: str, stream: str) -> None:
    """Let the broker not list it, like a deleted topic or a server that came back empty."""
    broker = memory_broker(f"{url}/{stream}")
    with broker.changed:
        for shard in [one for one in broker.messages if one.stream == stream]:
            del broker.messages[shard]


def test_a_stream_does_not_write_the_table_of_one_that_the_broker_does_not_list(url: str, tmp_path: Path) -> None:
    add(url, "orders-eu", "orders-us")
    every = {"pattern": "*"}
    owner = built(url, tmp_path, every)["orders-eu"].declared
    check_owner(owner.ingestion, url=owner.source)
    GroupWithoutSpark(str(owner.source), owner.ingestion).begin()
    check_owner(owner.ingestion, url=owner.source)
    remove(url, "orders-eu")
    add(url, ".orders-eu")
    other = built(url, tmp_path, every)[".orders-eu"].declared
    for group in ("g", "h"):
        with pytest.raises(InvalidOptionError):
            check_owner(replace(other.ingestion, group=group), url=other.source)
    named = built(url, tmp_path, {"stream": ".orders-eu", "name": "orders_eu"})[".orders-eu"].declared
    check_owner(named.ingestion, url=named.source)
    add(url, "orders-eu")
    assert built(url, tmp_path, every).keys() == {"orders-eu", "orders-us"}
    # Of two that began together, the first in the log stays.
    GroupWithoutSpark(str(other.source), other.ingestion).begin()
    check_owner(owner.ingestion, url=owner.source)
    with pytest.raises(InvalidOptionError):
        check_owner(other.ingestion, url=other.source)
    assert built(url, tmp_path, every).keys() == {"orders-eu", "orders-us"}


def test_a_table_of_another_program_is_not_written(url: str, tmp_path: Path) -> None:
    add(url, "orders-eu")
    found = built(url, tmp_path, {"pattern": "*"})["orders-eu"].declared
    write_deltalake(found.table.path, pa.table({"id": pa.array([], pa.int64())}))
    check_owner(found.ingestion, url=found.source)
    write_deltalake(found.table.path, pa.table({"id": [1]}), mode="append")
    with pytest.raises(InvalidOptionError):
        check_owner(found.ingestion, url=found.source)


@pytest.mark.parametrize("new", ["ingest-orders-eu", "replay-orders-eu"])
def test_of_streams_that_have_begun_the_older_one_has_a_place(new: str, url: str, tmp_path: Path) -> None:
    add(url, "orders-eu")
    every = {"pattern": "*"}
    ingest(built(url, tmp_path, every)["orders-eu"])
    remove(url, "orders-eu")
    add(url, new)
    ingest(built(url, tmp_path, every)[new])
    add(url, "orders-eu")
    assert built(url, tmp_path, every).keys() == {"orders-eu"}


def test_no_stream_takes_the_dead_letter_table_of_one_that_the_broker_does_not_list(url: str, tmp_path: Path) -> None:
    add(url, "orders-us", "orders-eu-dead-letters", "orders-eu-rebuild")
    assert built(url, tmp_path, {"pattern": "*"}).keys() == {"orders-us"}


def test_a_name_may_begin_with_a_digit(url: str, tmp_path: Path) -> None:
    add(url, "2026-orders", "2026-clicks")
    assert built(url, tmp_path, {"pattern": "*-orders"}, {"stream": "2026-clicks"}).keys() == {
        "2026-orders",
        "2026-clicks",
    }


def test_streams_beyond_the_limit_are_left_out_if_they_have_no_table(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(url, "orders-eu", "orders-us")
    every = {"pattern": "*", "max_streams": 2}
    for asset in built(url, tmp_path, every).values():
        ingest(asset)
    # The first ones by name; those of one table count as one that has begun.
    add(url, "a", "b", "orders-eu.")
    assert built(url, tmp_path, every).keys() == {"orders-eu", "orders-us"}
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    assert built(url, tmp_path, {**every, "max_streams": 3}).keys() == {"a", "orders-eu", "orders-us"}
    with pytest.raises(ResolutionException):
        built(url, tmp_path, {**every, "max_streams": 0})


def test_what_dagster_refuses_when_it_builds_the_jobs_stops_only_its_stream(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamToTable, "job_name", property(lambda one: {"new": "a-b"}.get(one.name, f"i_{one.name}")))
    add(url, "orders", "new")
    # The resource is that of another part of the project.
    definitions = component(url, tmp_path, {"pattern": "*"}, spark="lake_spark")
    assert [one.key.path for one in definitions.assets or () if isinstance(one, StreamAsset)] == [["orders"]]


def test_of_new_streams_that_would_be_one_asset_none_is(url: str, tmp_path: Path) -> None:
    add(url, "orders-eu", "orders.eu", "orders-us")
    found = {"pattern": "*"}
    assert built(url, tmp_path, found).keys() == {"orders-us"}
    # A table that cannot be read says nothing, and stops nothing.
    (tmp_path / "public" / "orders_eu" / "_delta_log").mkdir(parents=True)
    (tmp_path / "public" / "orders_eu" / "_delta_log" / f"{0:020d}.json").write_text("torn")
    assert built(url, tmp_path, found).keys() == {"orders-us"}


def test_an_asset_that_the_user_names_stays(url: str, tmp_path: Path) -> None:
    add(url, "orders-eu", "orders-us", "clicks", "sales")
    found = {"pattern": "*"}
    ingest(built(url, tmp_path, found)["orders-eu"])
    named = {"stream": "clicks", "name": "orders_eu"}
    assert built(url, tmp_path, found, named).keys() == {"clicks", "orders-us", "sales"}
    # Tables in the folder of another one.
    outer = {"stream": "clicks", "table": f"{tmp_path}/sales"}
    by_schema = {"pattern": "*", "translation": {"key": "{{ stream }}/rows"}}
    assert built(url, tmp_path, by_schema, outer).keys() == {"clicks", "orders-eu", "orders-us"}
    inner = {"stream": "clicks", "table": f"{tmp_path}/public/sales/rows"}
    assert built(url, tmp_path, found, inner).keys() == {"clicks", "orders-eu", "orders-us"}
    # Both are named.
    with pytest.raises(InvalidOptionError):
        built(url, tmp_path, {"stream": "orders-us"}, {"stream": "orders.us"})
    with pytest.raises(InvalidOptionError):
        built(url, tmp_path, {"stream": "clicks", "name": "orders_eu", **KEY, "translation": {"key": "sales/.."}})


class Refusing(StreamTranslator):
    def get_asset_spec(self, data: Any) -> dg.AssetSpec:
        return super().get_asset_spec(data).replace_attributes(group_name={"orders": "shop"}[data.streams[0]])


def test_an_error_of_a_translator_stops_only_its_stream(url: str, tmp_path: Path) -> None:
    add(url, "orders", "new")
    translator = f"{__name__}.TRANSLATOR"
    assert built(url, tmp_path, {"pattern": "*"}, translator=translator).keys() == {"orders"}


TRANSLATOR = Refusing()


def test_a_wrong_entry_is_an_error_whatever_the_streams_are_called(url: str, tmp_path: Path) -> None:
    add(url, "orders", "type")
    with pytest.raises(InvalidOptionError):
        built(url, tmp_path, {"pattern": "*", "mode": "resume"})


def test_streams_beside_a_pattern_do_not_matter_on_redis(folder: Path) -> None:
    """A database of its own: every stream of it is listed."""
    with redis_server(folder) as address, redis.Redis.from_url(f"redis://{address}") as client:
        found = {"pattern": "orders-*"}
        connection = {"type": "redis", "address": address}
        keys: list[tuple[bytes, str]] = [
            (b"orders-eu", "*"),
            (b"orders-us:0", "*"),
            (b"orders-us:9223372036854775807", "*"),
            (b"orders-us", "*"),
            (b"foo", "*"),
            (b"foo:0", "*"),
            (b"other", "18446744073709551615-1"),
            (b"orders-id", "1-70000"),
            (b"orders-" + b"x" * 300_000, "*"),
            (b"orders-\xff\n", "*"),
            (b"orders-a/../b", "*"),
            (b"", "*"),
            (b"..", "*"),
        ]
        for key, entry_id in keys:
            client.xadd(key, {"msg": "{}"}, id=entry_id)
        client.set("orders-text", "")
        names = {"orders-eu", "orders-us", "orders-id", "orders-%FF%0A", "orders-a%2F..%2Fb"}
        assert built(connection, folder, found).keys() == names
        assert built(connection, folder, {"pattern": "*", **KEY}).keys() >= {"orders-eu", "orders-us", "foo", "other"}


def test_topics_are_listed_by_their_names(kafka: str, tmp_path: Path) -> None:
    name = create_topic(kafka, 1)
    same = create_topic(kafka, 1, name=name.replace("-", "_", 1) + "-2")
    try:
        # The brokers keep the positions of groups in a topic.
        with KafkaBrokers(f"kafka://{kafka}/{name}") as cluster:
            cluster.commit(unique_group(), {Shard(name): 0})
        connection = {"type": "kafka", "bootstrap_servers": kafka}
        assert built(connection, tmp_path, {"pattern": f"{name}*"}).keys() == {name}
        assert built(connection, tmp_path, {"pattern": "__*"}).keys() == set()
    finally:
        delete_topics(kafka, [name, same])


def test_a_broker_that_does_not_answer_fails_the_loading(tmp_path: Path) -> None:
    connection = {"type": "redis", "address": f"localhost:{some_port()}"}
    with pytest.raises(InvalidOptionError) as raised:
        built(connection, tmp_path, {"pattern": "*"})
    assert isinstance(raised.value.__cause__, BrokerUnavailableError)
