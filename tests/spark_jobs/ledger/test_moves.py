"""What a rewind would do to a shard, also where a RESTORE left holes in what is covered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.replay import PositionMove, plan_moves
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.batches import Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl

SHARD = Shard("orders")
WHOLE = Intervals.of((MIN_SEQUENCE, 60))
HOLE = Intervals.of((MIN_SEQUENCE, 20), (40, 60))


@pytest.fixture
def url() -> Iterator[str]:
    """100 messages, 0 to 99."""
    name = "memory://moves/orders"
    with create_producer(name) as producer:
        for number in range(100):
            producer.send(b"%d" % number)
    yield name
    forget_memory_broker(StreamUrl.parse(name))


def moves(url: str, to: int, known: ShardState) -> list[PositionMove]:
    with open_batch_source(url) as source:
        newest = LedgerEntry("batch", "g", "g/main", 1, "main", "bid", 0, identities=source.identities())
        state = LedgerState(1, {SHARD: known}, newest, 1, sharing="resumable")
        return plan_moves(source, Ingestion("g", "t"), Bound(sequence=to), state=state)


def test_backwards_and_forwards(url: str) -> None:
    (back,) = moves(url, 10, ShardState(WHOLE))
    assert (back.position, back.replaced, len(range(*back.skipped))) == (60, (10, 60), 0)
    (ahead,) = moves(url, 70, ShardState(WHOLE))
    assert (ahead.position, len(range(*ahead.replaced)), ahead.skipped) == (60, 0, (60, 70))
    assert moves(url, 60, ShardState(WHOLE)) == []


def test_backwards_in_a_file_that_is_read_from_the_position_on(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/orders.ss/orders"
    with create_producer(url) as producer:
        for number in range(3):
            producer.send(b"%d" % number)
    with open_batch_source(url) as source:
        ((shard, extent),) = source.extents().items()
        plan = source.plan({shard: Range(extent.start, extent.end)}, limits=Limits(), parallelism=1)
        assert plan is not None
        newest = LedgerEntry("batch", "g", "g/main", 1, "main", "bid", 0, identities=source.identities())
        known = ShardState(Intervals.of((MIN_SEQUENCE, extent.end)))
        state = LedgerState(1, {shard: known}, newest, 1, sharing="resumable", hint=plan.hint)
        assert source.extents(resume=state.resume)[shard].start == extent.end
        (back,) = plan_moves(source, Ingestion("g", "t"), Bound(sequence=extent.start), state=state)
        assert back.replaced == (extent.start, extent.end)


def test_back_over_a_hole_all_that_lies_behind_is_written_again(url: str) -> None:
    (back,) = moves(url, 10, ShardState(HOLE))
    assert (back.position, back.to, back.replaced) == (20, 10, (10, 60))


@pytest.mark.parametrize("to", [30, 50, 60, 70])
def test_forwards_over_a_hole_is_refused(url: str, to: int) -> None:
    """What is covered behind it would be taken away, and what is missing would never be read."""
    with pytest.raises(InvalidOptionError, match=rf"cannot be moved forwards to {to}: the rows from 20 on"):
        moves(url, to, ShardState(HOLE))


def test_forwards_to_the_end_leaves_what_is_to_be_replaced(url: str) -> None:
    known = ShardState(WHOLE, Intervals.of((20, 25)))
    (ahead,) = moves(url, 70, known)
    assert (ahead.position, ahead.to) == (20, 70)
    with pytest.raises(InvalidOptionError):
        moves(url, 59, known)


def test_the_position_is_the_first_that_is_missing_or_to_be_replaced() -> None:
    assert ShardState(HOLE, Intervals.of((40, 50))).position == 20
    assert ShardState(HOLE, Intervals.of((10, 15), (40, 50))).position == 10
    assert ShardState(HOLE).position == 20
    assert ShardState().position is None
