"""The contract of every batch source: the guarantees that exactly-once writing depends on."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from stream_consumers.batches import MESSAGE_SCHEMA, BatchPlan, BatchSource, CountedSplit, Extent, Range, Resume
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.messages import Receipt, Shard
from stream_consumers.options import Limits
from stream_consumers.testing.harness import STREAMS, Contract, Stream, round_robin

DEFAULT_LIMITS = Limits()
Identity = tuple[str, int, int]


def identities(receipts: Iterable[Receipt]) -> set[Identity]:
    """Return the identities of sent messages."""
    return {(r.shard.stream, r.shard.id, r.sequence) for r in receipts}


def split_rows(plan: BatchPlan) -> list[Counter[Identity]]:
    """Read the messages of each split from a pickle, as an executor does."""
    found = []
    for split in plan.splits:
        rows: Counter[Identity] = Counter()
        for batch in pickle.loads(pickle.dumps(split)).read():  # noqa: S301
            assert batch.schema == MESSAGE_SCHEMA
            assert batch.column("error").null_count == batch.num_rows
            rows.update(zip(*(batch.column(name).to_pylist() for name in ("stream", "shard", "sequence"))))
        found.append(rows)
    return found


def read(plan: BatchPlan) -> set[Identity]:
    """Read all messages of a plan; fail if a message occurs twice."""
    rows = sum(split_rows(plan), Counter[Identity]())
    assert set(rows.values()) <= {1}, "splits overlap"
    return set(rows)


def in_ranges(receipts: Iterable[Receipt], ranges: Mapping[Shard, Range]) -> set[Identity]:
    """Return the identities of the messages within the ranges."""
    return identities(r for r in receipts if r.sequence in ranges.get(r.shard, Range(0, 0)))


def gaps_of(extents: Mapping[Shard, Extent], positions: Mapping[Shard, int] | None = None) -> dict[Shard, Range]:
    """Return the ranges from the positions, or 0, to the ends."""
    return {shard: Range((positions or {}).get(shard, 0), extent.end) for shard, extent in extents.items()}


def read_in_batches(
    stream: Stream,
    *,
    limits: Limits = DEFAULT_LIMITS,
    parallelism: int = 2,
    with_hint: bool = True,
    streams: tuple[str, ...] = (),
) -> list[tuple[Mapping[Shard, Range], set[Identity]]]:
    """Read the stream in batches, each from a new source, like runs that are killed after every batch."""
    positions: dict[Shard, int] = {}
    hint = None
    batches: list[tuple[Mapping[Shard, Range], set[Identity]]] = []
    while True:
        with open_batch_source(stream.url(*streams)) as source:
            extents = source.extents(resume=Resume(positions, hint) if positions and with_hint else None)
            plan = source.plan(gaps_of(extents, positions), limits=limits, parallelism=parallelism)
            if plan is None:
                return batches
            batches.append((plan.ranges, read(plan)))
        positions.update({shard: covered.end for shard, covered in plan.ranges.items()})
        hint = json.loads(json.dumps(plan.hint))


def plan_all(source: BatchSource, *, parallelism: int = 1) -> BatchPlan:
    """Plan the whole stream as one batch."""
    plan = source.plan(gaps_of(source.extents()), limits=DEFAULT_LIMITS, parallelism=parallelism)
    assert plan is not None
    return plan


def _read_gap(source: BatchSource, shard: Shard, gap: Range) -> set[Identity]:
    plan = source.plan({shard: gap}, limits=DEFAULT_LIMITS, parallelism=1) if gap.start < gap.end else None
    return read(plan) if plan else set()


class BatchSourceContract(Contract):
    """The contract of a batch source."""

    def test_extents(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(30, shards=3, streams=STREAMS))
        with open_batch_source(stream.url()) as source:
            extents = source.extents()
        assert set(extents) == {Shard("orders", n) for n in range(3)}
        for shard, extent in extents.items():
            own = [r.sequence for r in receipts if r.shard == shard]
            assert extent == Extent(min(own), max(own) + 1)

    def test_an_empty_stream_has_nothing_to_plan(self, stream: Stream) -> None:
        with open_batch_source(stream.url()) as source:
            assert all(extent.start == extent.end for extent in source.extents().values())
            for gaps in ({Shard("orders"): Range(0, 10)}, {}):
                assert source.plan(gaps, limits=DEFAULT_LIMITS, parallelism=1) is None
            assert source.unreadable_tail() is None

    def test_rows_carry_the_message(self, stream: Stream) -> None:
        with create_producer(stream.url()) as producer:
            receipt = producer.send(b"\xff{}", shard=2, timestamp_ms=77)
        with open_batch_source(stream.url()) as source:
            (row,) = [row for split in plan_all(source).splits for batch in split.read() for row in batch.to_pylist()]
        assert row == {
            "stream": "orders",
            "shard": 2,
            "sequence": receipt.sequence,
            "timestamp_ms": 77,
            "key": None,
            "payload": b"\xff{}",
            "headers": None,
            "error": None,
            "offset": None,
        }

    def test_last_messages_are_at_the_ends_or_left_out(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(30, shards=3))
        with open_batch_source(stream.url()) as source:
            ranges = gaps_of(source.extents())
            last = source.last_messages(ranges)
            ends = {(shard, part.end - 1) for shard, part in ranges.items()}
            found = {(shard, message.sequence) for shard, message in last.items()}
            assert found in (set(), ends)
            times = {(r.shard, r.sequence): r.timestamp_ms for r in receipts}
            assert all(times[shard, message.sequence] == message.timestamp_ms for shard, message in last.items())
            assert source.last_messages(ranges) == last
            assert not any(source.is_replaced(shard, message, message) for shard, message in last.items())
            assert source.last_messages({shard: Range(part.start, part.start) for shard, part in ranges.items()}) == {}

    @pytest.mark.parametrize("parallelism", [1, 2, 3, 4, 5])
    def test_splits_are_disjoint_and_together_the_ranges(self, stream: Stream, parallelism: int) -> None:
        receipts = stream.send(round_robin(500, shards=3))
        with open_batch_source(stream.url()) as source:
            plan = plan_all(source, parallelism=parallelism)
            assert len(plan.splits) <= parallelism
            assert plan.ranges == gaps_of(source.extents())
            assert read(plan) == identities(receipts)
            assert plan.records == 500
            gaps = {shard: Range(gap.start + 40, gap.end - 33) for shard, gap in plan.ranges.items()}
            part = source.plan(gaps, limits=DEFAULT_LIMITS, parallelism=parallelism)
            assert part is not None
            assert part.ranges == gaps
            assert read(part) == in_ranges(receipts, gaps)

    @pytest.mark.parametrize("parallelism", [1, 3])
    def test_known_counts_of_splits_are_correct(self, stream: Stream, parallelism: int) -> None:
        stream.send(round_robin(200, shards=3, streams=STREAMS))
        with open_batch_source(stream.url(*STREAMS)) as source:
            planned = source.identities()
            plan = plan_all(source, parallelism=parallelism)
        for split, rows in zip(plan.splits, split_rows(plan)):
            counts = split.counts() if isinstance(split, CountedSplit) else None
            if counts is not None and isinstance(split, CountedSplit):
                found = Counter(Shard(name, number) for name, number, _ in rows)
                assert {shard: count for shard, count in counts.items() if count} == found
                identities_there = pickle.loads(pickle.dumps(split)).identities()  # noqa: S301
                assert {shard.stream for shard in found} <= identities_there.keys() <= planned.keys()
                assert all(planned[name] == identity for name, identity in identities_there.items())

    def test_plans_stay_within_the_gaps(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(120, shards=3))
        one, two = Shard("orders", 1), Shard("orders", 2)
        places = {shard: [r.sequence for r in receipts if r.shard == shard] for shard in (one, two)}
        gaps = {one: Range(places[one][10], places[one][20]), two: Range(places[two][39], places[two][39] + 100)}
        absent = {Shard("orders", 99): Range(0, 5)}
        with open_batch_source(stream.url()) as source:
            ends = {shard: extent.end for shard, extent in source.extents().items()}
            plan = source.plan({**gaps, **absent}, limits=DEFAULT_LIMITS, parallelism=2)
            assert plan is not None
            assert plan.ranges == {one: gaps[one], two: Range(gaps[two].start, ends[two])}
            assert read(plan) == in_ranges(receipts, gaps)
            after = {shard: Range(end, end + 10) for shard, end in ends.items()}
            assert source.plan(after, limits=DEFAULT_LIMITS, parallelism=1) is None
            assert source.lost(gaps) == source.lost(absent) == {}

    def test_count_does_not_require_extents(self, stream: Stream) -> None:
        stream.send(round_robin(30, shards=3))
        with open_batch_source(stream.url()) as source:
            gaps = gaps_of(source.extents())
            asked = source.count(gaps)
        with open_batch_source(stream.url()) as source:
            assert source.count(gaps) == asked
        assert all(count >= 10 for count in asked.values())

    @pytest.mark.parametrize(
        "limits",
        [*(Limits(max_records=most) for most in (1, 2, 7, 30, 1000)), Limits(max_bytes=450), Limits(max_bytes=1)],
        ids=str,
    )
    def test_batches_keep_to_their_limits(self, stream: Stream, limits: Limits) -> None:
        """A batch takes at least one message, whatever its size."""
        receipts = stream.send(round_robin(30, shards=3), payload=b"x" * 100)
        most = max(1, min(limits.max_records, limits.max_bytes // 100))
        batches = read_in_batches(stream, limits=limits)
        assert all(1 <= len(rows) <= most for _, rows in batches)
        assert len(batches) == -(-30 // most) or limits.max_records > 1000
        assert Counter(row for _, rows in batches for row in rows) == Counter(identities(receipts))

    def test_each_batch_holds_exactly_its_ranges(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(100, shards=3, streams=STREAMS))
        for streams in (("orders",), STREAMS):
            for ranges, rows in read_in_batches(stream, limits=Limits(max_records=9), streams=streams):
                assert rows == in_ranges(receipts, ranges)

    @pytest.mark.parametrize("streams", [("orders",), ("clicks",), STREAMS])
    def test_plans_are_the_same_with_and_without_a_hint(self, stream: Stream, streams: tuple[str, ...]) -> None:
        receipts = stream.send(round_robin(101, shards=3, streams=STREAMS))
        resumed, anew = (
            read_in_batches(stream, limits=Limits(max_records=7), with_hint=with_hint, streams=streams)
            for with_hint in (True, False)
        )
        assert resumed == anew
        assert {row for _, rows in anew for row in rows} == identities(r for r in receipts if r.shard.stream in streams)

    def test_a_hint_that_does_not_fit_the_positions_is_ignored(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(60, shards=2))
        with open_batch_source(stream.url()) as source:
            whole = plan_all(source)
            half = {shard: Range(gap.start, gap.end // 2) for shard, gap in gaps_of(source.extents()).items()}
        positions = {shard: part.end for shard, part in half.items()}
        for wrong in (whole.hint, {}, {"offset": "x"}, {"offset": 10**12, "positions": {}}):
            with open_batch_source(stream.url()) as source:
                extents = source.extents(resume=Resume(positions, wrong))
                plan = source.plan(gaps_of(extents, positions), limits=DEFAULT_LIMITS, parallelism=1)
                assert plan is not None
                assert read(plan) == identities(receipts) - in_ranges(receipts, half)
        ends = {shard: covered.end for shard, covered in whole.ranges.items()}
        hole = {Shard("orders", 1): Range(ends[Shard("orders", 1)] - 9, ends[Shard("orders", 1)] - 4)}
        with open_batch_source(stream.url()) as source:
            source.extents(resume=Resume(ends, whole.hint))
            again = source.plan(hole, limits=DEFAULT_LIMITS, parallelism=1)
            assert again is not None
            assert again.ranges == hole
            assert read(again) == in_ranges(receipts, hole)

    def test_new_shards_appear(self, stream: Stream) -> None:
        first = stream.send(round_robin(10))
        with open_batch_source(stream.url()) as source:
            plan = plan_all(source)
        positions = {shard: covered.end for shard, covered in plan.ranges.items()}
        second = stream.send(round_robin(30, shards=3))
        for resume in (Resume(positions, plan.hint), None):
            with open_batch_source(stream.url()) as source:
                extents = source.extents(resume=resume)
                assert set(extents) == {Shard("orders", n) for n in range(3)}
                later = source.plan(gaps_of(extents, positions), limits=DEFAULT_LIMITS, parallelism=2)
                assert later is not None
                assert read(later) == identities(second)
        assert read(plan) == identities(first)

    def test_growth_is_detected(self, stream: Stream) -> None:
        stream.send(round_robin(10, shards=3))
        with open_batch_source(stream.url()) as source:
            plan = plan_all(source)
            resume = Resume({shard: part.end for shard, part in plan.ranges.items()}, plan.hint)
            before = source.extents(resume=resume)
            assert not source.has_grown(before, resume=resume)
            stream.send(round_robin(1))
            assert source.has_grown(before, resume=resume)
            after = source.extents(resume=resume)
            assert not source.has_grown(after, resume=resume)

    def test_extents_are_frozen_and_plans_stay_readable(self, stream: Stream) -> None:
        first = stream.send(round_robin(50, shards=2), first_ms=1_000)
        with open_batch_source(stream.url()) as source:
            extents = dict(source.extents())
            second = stream.send(round_robin(50, shards=3), first_ms=5_000)
            wide = {Shard("orders", n): Range(0, 10**9) for n in range(3)}
            plan = source.plan(wide, limits=DEFAULT_LIMITS, parallelism=3)
            assert plan is not None
            assert plan.ranges == {shard: Range(0, extent.end) for shard, extent in extents.items() if extent.end}
            assert read(plan) == read(plan) == identities(first)
            assert source.at(4_000) == {shard: extent.end for shard, extent in extents.items()}
            source.extents()
            later = source.plan(wide, limits=DEFAULT_LIMITS, parallelism=2)
            assert later is not None
            assert read(later) == identities(first + second)

    def test_identities_cover_each_stream_and_are_stable(self, stream: Stream) -> None:
        with open_batch_source(stream.url(*STREAMS)) as source:
            before = dict(source.identities())
        stream.send(round_robin(10, shards=2, streams=STREAMS))
        with open_batch_source(stream.url(*STREAMS)) as source:
            assert dict(source.identities()) == before
            assert str(source.url) == stream.url(*STREAMS)
        assert set(before) == set(STREAMS)
        assert all(before.values())

    def test_committed_positions_can_be_read_back(self, stream: Stream) -> None:
        stream.send(round_robin(10, shards=2))
        with open_batch_source(stream.url()) as source:
            ends = {shard: extent.end for shard, extent in source.extents().items()}
            source.commit("group", ends)
            assert source.committed("group") in (None, ends)
            assert source.committed("another") in (None, {})
        with open_batch_source(stream.url()) as source:
            source.commit("at once", ends)
            assert source.committed("at once") in (None, ends)

    def test_at_is_the_first_sequence_with_that_timestamp_or_a_later_one(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(30, shards=3), first_ms=1_000)
        with open_batch_source(stream.url()) as source:
            extents = source.extents()
            for moment in (0, 1_000, 1_001, 1_140, 1_149, 1_290):
                expected = {
                    shard: min(
                        (r.sequence for r in receipts if r.shard == shard and r.timestamp_ms >= moment), default=None
                    )
                    for shard in extents
                }
                found = source.at(moment)
                assert found.keys() == extents.keys()
                for shard, sequence in expected.items():
                    gap = Range(found[shard], extents[shard].end)
                    assert (
                        min((s for _, i, s in _read_gap(source, shard, gap) if i == shard.id), default=None) == sequence
                    )
            assert source.at(1_291) == {shard: extent.end for shard, extent in extents.items()}

    def test_ranges_between_moments_partition_the_stream(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(60, shards=2), first_ms=10_000)
        with open_batch_source(stream.url()) as source:
            source.extents()
            found: list[set[Identity]] = []
            for start in range(9_900, 10_700, 100):
                begin, end = source.at(start), source.at(start + 100)
                gaps = {shard: Range(begin[shard], end[shard]) for shard in begin}
                plan = source.plan(gaps, limits=DEFAULT_LIMITS, parallelism=2)
                found.append(read(plan) if plan else set())
                expected = identities(r for r in receipts if start <= r.timestamp_ms < start + 100)
                assert found[-1] == expected
        assert sum(map(len, found)) == len(receipts)
