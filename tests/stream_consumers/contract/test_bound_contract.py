"""Where a rewind goes, and where a replay begins and ends, on every backend: what SeaStreamer tests of its consumers.

Sequences are inclusive and times are those of the message or later ones, on Redis as well, where SeaStreamer's own
rewind and seek leave that message out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.replay import Replay, goal_of
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.batches import Range
from stream_consumers.create import open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Receipt, Shard
from stream_consumers.options import Limits
from stream_consumers.testing.batch_source_contract import Identity, identities, read
from stream_consumers.testing.harness import Stream, round_robin

FIRST_MS = 1_741_564_800_000
ZERO = Shard("orders")


def behind(stream: Stream, bound: Bound, *, streams: tuple[str, ...] = ()) -> set[Identity]:
    """What a batch that begins there holds, in the shards that have such a place."""
    with open_batch_source(stream.url(*streams)) as source:
        extents = source.extents()
        places = bound.resolve(source, extents)
        gaps = {shard: Range(start, extents[shard].end) for shard, start in places.items()}
        plan = source.plan(gaps, limits=Limits(), parallelism=2)
        return read(plan) if plan else set()


def from_number(receipts: Iterable[Receipt], number: int, *, shard: Shard = ZERO) -> set[Identity]:
    """The messages of a shard from its ``number``-th on."""
    return identities([receipt for receipt in receipts if receipt.shard == shard][number:])


def test_a_sequence_is_inclusive(stream: Stream) -> None:
    receipts = stream.send(round_robin(100))
    for number in (0, 50, 99):
        bound = Bound.parse(f"orders/0={receipts[number].sequence}")
        assert behind(stream, bound) == from_number(receipts, number)


def test_the_same_sequence_for_every_shard(stream: Stream) -> None:
    receipts = stream.send(round_robin(3, shards=3))
    # Sequences of all shards run side by side, but on Redis, where they are times.
    if len({receipt.sequence for receipt in receipts}) == 1:
        assert behind(stream, Bound.parse(str(receipts[0].sequence))) == identities(receipts)
    else:
        with pytest.raises(InvalidOptionError):
            behind(stream, Bound.parse(str(receipts[0].sequence)))


def places(stream: Stream, bound: Bound) -> Mapping[Shard, int]:
    with open_batch_source(stream.url()) as source:
        return dict(bound.resolve(source, source.extents()))


def test_a_time_is_that_of_the_first_message_with_it_or_a_later_one(stream: Stream) -> None:
    receipts = stream.send(round_robin(10), first_ms=FIRST_MS)
    for at, first in (
        ("2025-03-09", 0),
        ("2025-03-10T00:00:00.009Z", 1),
        ("2025-03-10T01:00:00.070+01:00", 7),
        ("2025-03-10T00:00:00.071Z", 8),
        ("2025-03-10T00:00:00.091", 10),
    ):
        assert behind(stream, Bound.parse(at)) == from_number(receipts, first), at


def test_a_shard_that_is_not_there_is_refused(stream: Stream) -> None:
    stream.send(round_robin(3, shards=3))
    for listed in ("clicks/0=1", "orders/99=1"):
        with pytest.raises(InvalidOptionError, match=listed.partition("=")[0]):
            places(stream, Bound.parse(listed))


def test_a_sequence_outside_the_stream_is_told_with_what_it_holds(stream: Stream) -> None:
    receipts = stream.send(round_robin(5))
    first, end = receipts[0].sequence, receipts[-1].sequence + 1
    assert places(stream, Bound.parse(f"orders/0={end}"))[ZERO] == end, "the end is a place: nothing is there yet"
    for wrong in (first - 1, end + 1):
        if wrong >= 0:
            with pytest.raises(InvalidOptionError, match=rf"{wrong}(?s:.*){first} to {end - 1}"):
                places(stream, Bound.parse(f"orders/0={wrong}"))


def goal(stream: Stream, wanted: Replay, covered: Mapping[Shard, Intervals]) -> Mapping[Shard, Range]:
    state = LedgerState(1, {shard: ShardState(parts) for shard, parts in covered.items()})
    with open_batch_source(stream.url()) as source:
        return goal_of(wanted, source, state, source.extents())


def test_a_replay_holds_its_start_and_not_its_stop_and_nothing_that_is_not_covered(stream: Stream) -> None:
    sequences = [receipt.sequence for receipt in stream.send(round_robin(20))]
    covered = {ZERO: Intervals.of((MIN_SEQUENCE, sequences[15]))}

    def between(start: int, stop: int) -> Replay:
        return Replay(Bound(sequences={ZERO: sequences[start]}), Bound(sequences={ZERO: sequences[stop]}))

    assert goal(stream, between(3, 7), covered) == {ZERO: Range(sequences[3], sequences[7])}
    assert goal(stream, between(3, 18), covered) == {ZERO: Range(sequences[3], sequences[15])}
    assert goal(stream, between(16, 18), covered) == {}
    assert goal(stream, Replay(), covered) == {ZERO: Range(sequences[0], sequences[15])}
    assert goal(stream, between(3, 7), {}) == {}, "nobody has read the shard"
    with pytest.raises(InvalidOptionError):
        goal(stream, between(7, 3), covered)
