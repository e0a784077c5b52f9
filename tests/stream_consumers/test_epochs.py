"""Names of epochs, and a source whose streams are called by them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stream_consumers.batches import BatchSource, Extent, Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.epochs import EpochNames, EpochSource, epoch_name, newest_epochs, split_epoch
from stream_consumers.errors import InvalidStreamKeyError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard, check_stream_key
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl

NEW, OLD = Shard("orders#2"), Shard("orders")


@pytest.fixture
def source() -> Iterator[EpochSource]:
    """Ten messages of the second epoch."""
    url = "memory://epochs/orders"
    with create_producer(url) as producer:
        for number in range(10):
            producer.send(b"%d" % number)
    with EpochSource(open_batch_source(url), {"orders": "orders#2"}) as opened:
        yield opened
    forget_memory_broker(StreamUrl.parse(url))


@pytest.mark.parametrize("stream", ["orders", "a.b-c_9", "2"])
@pytest.mark.parametrize("epoch", [1, 2, 10])
def test_a_name_is_read_back_and_no_stream_key_is_like_it(stream: str, epoch: int) -> None:
    name = epoch_name(stream, epoch)
    assert split_epoch(name) == (stream, epoch)
    assert Shard.parse(f"{name}/3") == Shard(name, 3)
    if epoch > 1:
        with pytest.raises(InvalidStreamKeyError):
            check_stream_key(name)


def test_the_newest_epoch_counts_as_a_number() -> None:
    assert newest_epochs(["orders#9", "orders#10", "orders"], ["orders"]) == {"orders": "orders#10"}


def test_it_passes_on_all_that_a_source_can_do(source: EpochSource) -> None:
    can = {name for name, value in vars(BatchSource).items() if not name.startswith("_") and name != "url"}
    assert can <= vars(EpochSource).keys() | vars(source).keys()


def test_all_that_a_source_says_has_the_name_of_the_epoch(source: EpochSource) -> None:
    assert list(source.identities()) == ["orders#2"]
    assert source.extents() == {NEW: (0, 10, 0)}
    assert source.at(0) == {NEW: 0}
    assert source.first(NEW, Extent(3, 10)) == 3
    assert source.count({NEW: Range(2, 10)}) == {NEW: 8}
    plan = source.plan({NEW: Range(2, 10)}, limits=Limits(), parallelism=2)
    assert plan is not None
    assert plan.ranges == {NEW: (2, 10)}
    rows = [row for split in plan.splits for batch in split.read() for row in batch.to_pylist()]
    assert [(row["stream"], row["sequence"]) for row in rows] == [("orders#2", sequence) for sequence in range(2, 10)]


def test_nothing_is_planned_or_counted_for_another_epoch(source: EpochSource) -> None:
    source.extents()
    assert source.plan({OLD: Range(0, 10)}, limits=Limits(), parallelism=1) is None
    assert source.count({OLD: Range(0, 10)}) == {}


def test_the_broker_hears_of_the_epoch_that_it_has(source: EpochSource) -> None:
    source.commit("lakehouse", {OLD: 99, NEW: 4}, metadata="lakehouse/main 3")
    assert source.committed("lakehouse") == {NEW: 4}
    assert source.committed_metadata("lakehouse") == {NEW: "lakehouse/main 3"}


def test_a_hint_of_another_epoch_is_none_of_this_one() -> None:
    names = EpochNames({"orders": "orders#2"})
    ours = {"offset": 7, "positions": {"orders/0": 5, "clicks/0": 3}}
    written = names.hint_to_epochs(ours)
    assert written == {"offset": 7, "positions": {"orders#2/0": 5, "clicks/0": 3}}
    assert names.hint_to_streams(written) == ours
    assert names.hint_to_streams(ours) == {"offset": 7, "positions": {"clicks/0": 3}}
