"""What the page of a stream says of the groups that read it. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sensors.lag import LagObserver, Measurement, measure
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from stream_assets import StreamAsset
from stream_consumers.batches import Extent, Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import SourceRecreatedError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.dagster_runs import plain_asset, tick
from tests.support.written_log import WrittenLog, made_entry

pytestmark = pytest.mark.dagster
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


def declare(folder: Path, group: str, name: str = "orders") -> StreamAsset:
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
        told(tick(declare(folder, group, name), instance))
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


@pytest.mark.parametrize(("position", "status"), [(4, "behind"), (10, "idle")])
def test_a_group_is_behind_until_all_is_in_the_table(
    folder: Path, instance: dg.DagsterInstance, position: int, status: str
) -> None:
    write(folder / "orders", "lakehouse", position)
    assert told(tick(declare(folder, "lakehouse"), instance))["stream/status"] == status


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


def test_a_stream_that_was_made_again_is_lost_and_that_is_told_once(folder: Path, instance: dg.DagsterInstance) -> None:
    write(folder / "orders", "lakehouse", 4)
    stream = declare(folder, "lakehouse")
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
    asset = declare(folder, "lakehouse")
    found = told(tick(asset, instance))
    assert (found["stream/status"], found["stream/lag/lakehouse/orders"]) == ("lost", 0)
    measured = measure(StreamSource(URL), Ingestion("lakehouse", str(folder / "orders")))
    assert measured.lost == {SHARD: Range(5, 9)}
