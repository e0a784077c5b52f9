"""Ticks of the lag sensor: what they observe, and what they do while a broker does not answer."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import redis

from sensors.lag import LagObserver
from sensors.lag_sensor import LagCursor, LagPolicy, read_cursor, write_cursor
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.lag import Measurement, measure
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from stream_assets import RunLimits, StreamAsset
from stream_consumers.batches import Extent, Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import BrokerUnavailableError, SourceRecreatedError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.dagster_runs import declare, plain_asset, skip_message, tick
from tests.support.groups_without_spark import GroupWithoutSpark
from tests.support.ss_files import NO_BEACONS, break_length, numbered, write_file
from tests.support.written_log import WrittenLog, made_entry

pytestmark = pytest.mark.dagster
# Requests of Kafka wait for 10 s by default, and more than one may be made.
SHORT_SECONDS = 8.0


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.fixture
def somebody_mute() -> Iterator[int]:
    """A port at which connections are taken, and nothing is ever said."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])


def asset(folder: Path, address: str, *, answer_seconds: float = 5.0, retry_seconds: float = 300.0) -> StreamAsset:
    policy = LagPolicy(answer_seconds=answer_seconds)
    return declare(folder, source=f"{address}/orders", sensor=policy, limits=RunLimits(retry_seconds=retry_seconds))


def moved(result: dg.SensorResult, seconds: float) -> str:
    """The cursor as if so much time had gone by."""
    cursor: dict[str, Any] = json.loads(result.cursor or "")
    return json.dumps(
        {**cursor, "silent_since": cursor["silent_since"] - seconds, "ask_at": cursor["ask_at"] - seconds}
    )


def test_a_tick_of_a_dead_kafka_is_short(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    began = time.monotonic()
    assert tick(asset(folder, f"kafka://127.0.0.1:{nobody}"), instance).skip_reason
    assert time.monotonic() - began < SHORT_SECONDS


@pytest.mark.parametrize("protocol", ["kafka", "redis"])
def test_a_tick_of_a_broker_that_says_nothing_is_short(
    folder: Path, instance: dg.DagsterInstance, somebody_mute: int, protocol: str
) -> None:
    began = time.monotonic()
    tick(asset(folder, f"{protocol}://127.0.0.1:{somebody_mute}", answer_seconds=1.0), instance)
    assert time.monotonic() - began < SHORT_SECONDS


def test_pauses_grow_as_long_as_it_is_silent(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    stream = asset(folder, f"redis://127.0.0.1:{nobody}")
    first = tick(stream, instance)
    second = tick(stream, instance, moved(first, 40))
    assert "It has not answered for 40 s; the next attempt is in 40 s" in skip_message(second)
    between = skip_message(tick(stream, instance, moved(second, 10)))
    assert f"redis://127.0.0.1:{nobody}/orders did not answer. It has not answered for 50 s" in between
    assert "the next attempt is in 30 s" in between
    assert "next attempt is in 60 s" in skip_message(tick(stream, instance, moved(first, 200))), "and no longer"


def test_what_the_sensor_knew_survives_the_silence(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    known = LagCursor(waiting_since=7.0, observed="digest", number=12)
    result = tick(asset(folder, f"redis://127.0.0.1:{nobody}"), instance, write_cursor(known))
    assert replace(read_cursor(result.cursor, LagCursor), silent_since=None, ask_at=0.0) == known


def test_after_the_budget_of_a_run_the_tick_fails(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    stream = asset(folder, f"redis://127.0.0.1:{nobody}")
    with pytest.raises(BrokerUnavailableError):
        tick(stream, instance, moved(tick(stream, instance), 300))
    with pytest.raises(BrokerUnavailableError):
        tick(asset(folder, f"redis://127.0.0.1:{nobody}", retry_seconds=0.0), instance)


def test_a_broker_that_is_back_is_forgiven(folder: Path, instance: dg.DagsterInstance, redis_address: str) -> None:
    host, _, port = redis_address.partition(":")
    redis.Redis(host, int(port)).xadd("silent", {"msg": b"{}"})
    stream = declare(folder, source=f"redis://{redis_address}/silent", group="silent")
    cursor = LagCursor(silent_since=time.time() - 400, ask_at=time.time() - 1)
    result = tick(stream, instance, write_cursor(cursor))
    assert result.run_requests
    assert read_cursor(result.cursor, LagCursor).silent_since is None


URL = StreamUrl.parse("memory://observed/orders")
SHARD = Shard("orders")


@pytest.fixture(autouse=True)
def ten_messages() -> Iterator[None]:
    produce()
    yield
    forget_memory_broker(URL)


def produce() -> None:
    with create_producer(str(URL)) as producer:
        for number in range(10):
            producer.send(b"%d" % number)


def write(table: Path, group: str, position: int) -> None:
    """The group has written what is before the position."""
    with open_batch_source(str(URL)) as source:
        identities = source.identities()
    state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, 0)), origin=0)}
    written = {"ranges": {SHARD: Range(0, position)}, "identities": identities, "sharing": "resumable"}
    WrittenLog(table).ours(made_entry(1, -1, group=group, state=state, **written))


def reader(folder: Path, group: str, name: str = "orders") -> StreamAsset:
    return plain_asset(name, source=str(URL), group=group, table=str(folder / name))


def told(result: dg.SensorResult) -> dict[str, object]:
    (event,) = result.asset_events
    assert isinstance(event, dg.AssetObservation)
    return {name: value.value for name, value in event.metadata.items()}


def test_groups_and_tables_that_read_one_stream_have_plots_of_their_own(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    write(folder / "orders", "lakehouse", 4)
    found = [
        told(tick(reader(folder, group, name), instance))
        for group, name in (("lakehouse", "orders"), ("audit", "orders"), ("lakehouse", "bills"))
    ]
    plots = [{name: value for name, value in one.items() if name.startswith("stream/lag")} for one in found]
    assert plots == [
        {"stream/lag/lakehouse/orders": 6},
        {"stream/lag/audit/orders": 10},
        {"stream/lag/lakehouse/bills": 10},
    ]
    assert [one["stream/group"] for one in found] == ["lakehouse", "audit", "lakehouse"]
    assert {one["stream/cluster"] for one in found} == {"memory://observed"}
    assert [one["stream/table_asset"] for one in found] == [dg.AssetKey(n) for n in ("orders", "orders", "bills")]
    assert [one["stream/sensor"] for one in found] == ["orders_lag", "orders_lag", "bills_lag"]


def test_a_group_is_behind_until_all_is_in_the_table(folder: Path, instance: dg.DagsterInstance) -> None:
    for position, status in ((4, "behind"), (10, "idle")):
        write(folder / status / "orders", "lakehouse", position)
        found = told(tick(reader(folder / status, "lakehouse"), instance))
        assert found["stream/status"] == status


@pytest.mark.parametrize(
    ("extent", "lag", "lost", "status"),
    [
        (Extent(0, 10, blocked=3), 0, {}, "blocked"),
        (Extent(0, 10, blocked=3), 2, {}, "behind"),
        (Extent(8, 10), 2, {SHARD: Range(4, 8)}, "lost"),
    ],
)
def test_what_is_blocked_or_gone_is_told(extent: Extent, lag: int, lost: dict[Shard, Range], status: str) -> None:
    observer = LagObserver("g", URL, dg.AssetKey("orders"), "orders_lag", {"orders": dg.AssetKey("stream")})
    found = Measurement(LedgerState(5), {SHARD: extent}, {SHARD: lag}, is_exact=True, lost=lost)
    (event,) = observer.observations(found)
    assert event.metadata["stream/status"].value == status
    (record,) = event.metadata["stream/shards"].value.records  # type: ignore[union-attr]
    assert record.data["blocked"] == extent.blocked
    assert record.data["lost"] == ("4 to 8" if lost else "")


@pytest.mark.parametrize(
    ("written", "broken", "lag", "status", "runs"),
    [(0, 1, 0, "blocked", 0), (10, 11, 0, "blocked", 0), (10, 21, 10, "behind", 1)],
)
def test_what_cannot_be_read_at_the_end_of_a_file_is_told_once_and_starts_no_run(
    folder: Path, instance: dg.DagsterInstance, written: int, broken: int, lag: int, status: str, runs: int
) -> None:
    path = write_file(folder / "orders.ss", numbered(written), interval=NO_BEACONS)
    asset = plain_asset("orders", source=f"file://{path}/orders", group="g", table=str(folder / "t"))
    group = GroupWithoutSpark(str(asset.declared.source), asset.declared.ingestion)
    group.begin()
    group.ingest()
    write_file(path, numbered(written + 20), interval=NO_BEACONS)
    offset = break_length(path, broken)
    measured = measure(asset.declared.stream, asset.declared.ingestion)
    assert (measured.total, f"offset {offset}" in (measured.unreadable_tail or "")) == (lag, True)
    result = tick(asset, instance)
    assert len(result.run_requests or []) == runs
    found = told(result)
    assert (found["stream/status"], found["stream/reason"]) == (status, measured.unreadable_tail)
    assert found["stream/lag/g/orders"] == lag
    again = tick(asset, instance, result.cursor)
    assert (len(again.run_requests or []), again.asset_events) == (runs, [])
    if not runs:
        assert f"offset {offset}" in skip_message(again)
    os.utime(write_file(path, numbered(written + 20), interval=NO_BEACONS), (1, 1))
    mended = tick(asset, instance, again.cursor)
    assert len(mended.run_requests or []) == 1
    assert (told(mended)["stream/status"], "stream/reason" in told(mended)) == ("behind", False)


def test_a_stream_that_was_made_again_is_lost_and_that_is_told_once(folder: Path, instance: dg.DagsterInstance) -> None:
    write(folder / "orders", "lakehouse", 4)
    stream = reader(folder, "lakehouse")
    forget_memory_broker(URL)
    produce()
    for _ in range(2):
        with pytest.raises(SourceRecreatedError):
            tick(stream, instance)
    (key,) = stream.upstream.values()
    (record,) = instance.fetch_observations(key, limit=10).records
    assert record.asset_observation is not None
    known = record.asset_observation.metadata
    assert known["stream/status"].value == "lost"
    assert "is not the stream that group 'lakehouse' has read" in str(known["stream/reason"].value)


def test_rows_that_a_restore_removed_of_a_stream_that_has_ended_are_lost(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    with open_batch_source(str(URL)) as source:
        identities = {"orders": "the stream before", "orders#2": source.identities()["orders"]}
    ended = ShardState(Intervals.of((MIN_SEQUENCE, 5)), origin=0, ended=9)
    state = {SHARD: ended, Shard("orders#2"): ShardState(Intervals.of((MIN_SEQUENCE, 10)), origin=0)}
    details = {"kind": "keep", "state": state, "identities": identities, "sharing": "resumable"}
    WrittenLog(folder / "orders").ours(made_entry(1, -1, group="lakehouse", **details))
    asset = reader(folder, "lakehouse")
    found = told(tick(asset, instance))
    assert (found["stream/status"], found["stream/lag/lakehouse/orders"]) == ("lost", 0)
    measured = measure(StreamSource(URL), Ingestion("lakehouse", str(folder / "orders")))
    assert measured.lost == {SHARD: Range(5, 9)}
