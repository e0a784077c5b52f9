"""Batches of a ``.ss`` file: damage is counted once, hints survive appending, memory stays bounded."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from stream_consumers import batches as stream_batches
from stream_consumers.batches import BatchPlan, LastMessage, Range, Resume
from stream_consumers.errors import SourceRecreatedError, StreamNotFoundError, UnsupportedError
from stream_consumers.file import batches as file_batches
from stream_consumers.file import scanner as file_scanner
from stream_consumers.file import segments
from stream_consumers.file.batches import FileBatchSource, FileSplit
from stream_consumers.file.consumer import FileConsumer
from stream_consumers.file.format import HEADER_SIZE, Beacon, FrameWriter, Header, Marker, encode_frame
from stream_consumers.file.producer import FileProducer
from stream_consumers.file.scanner import Damage, Frame, FrameScanner
from stream_consumers.messages import INTERNAL_KEY, MAX_SEQUENCE, DeadLetter, Receipt, Shard
from stream_consumers.options import FileProducerOptions, Limits
from stream_consumers.testing.batch_source_contract import gaps_of, plan_all
from stream_consumers.urls import StreamUrl
from tests.support.profiles import examples
from tests.support.ss_files import (
    CREATED_MS,
    END_OF_STREAM,
    ORDERS,
    Sent,
    cut_front,
    damages,
    file_bytes,
    flip,
    items,
    numbered,
    payload_offset,
    write_file,
)
from tests.support.streams import take

SHARDS = (ORDERS, Shard("orders", 1), Shard("orders", 2))
CLICKS = Shard("clicks")
Row = tuple[str, int, int | None, int | None]
"""Stream, shard, sequence (none where it is unknown), offset (none for a message)."""


@pytest.fixture(autouse=True)
def _many_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHECKPOINT_FRAMES", 3)
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 100)
    monkeypatch.setattr(file_scanner, "MAX_RUN_MESSAGES", 3)


@pytest.fixture(autouse=True, params=[1, 4096], ids=["runs", "one by one"])
def _runs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(file_scanner, "MIN_RUN_BYTES", request.param)


def url_of(path: Path, *streams: str) -> StreamUrl:
    return StreamUrl.parse(f"file://{path}/{','.join(streams) or 'orders'}")


def read(plan: BatchPlan) -> Iterator[Row]:
    for split in plan.splits:
        for batch in pickle.loads(pickle.dumps(split)).read():
            yield from zip(*(batch.column(name).to_pylist() for name in ("stream", "shard", "sequence", "offset")))


class Reader:
    """Reads batch after batch and remembers, as the ledger does."""

    def __init__(self, url: StreamUrl, *, with_hint: bool = True) -> None:
        self.url = url
        self.rows: Counter[Row] = Counter()
        self.positions: dict[Shard, int] = {}
        self.last: dict[Shard, LastMessage] = {}
        self.hint: Mapping[str, object] | None = None
        self._with_hint = with_hint

    def drain(self, *, max_records: int = 1000, parallelism: int = 2, batches: int = 10_000) -> Counter[Row]:
        for _ in range(batches):
            with FileBatchSource(self.url) as source:
                resume = Resume(self.positions, self.hint) if self._with_hint else None
                extents = source.extents(resume=resume)
                plan = source.plan(
                    gaps_of(extents, self.positions), limits=Limits(max_records=max_records), parallelism=parallelism
                )
                if plan is None:
                    break
                self.last.update(source.last_messages(plan.ranges))
            self.write(plan)
        return self.rows

    def write(self, plan: BatchPlan) -> None:
        self.rows.update(read(plan))
        self.positions.update({shard: covered.end for shard, covered in plan.ranges.items()})
        self.hint = json.loads(json.dumps(plan.hint))

    def lost(self) -> set[Shard]:
        """The shards of which the file has lost messages that were read."""
        with FileBatchSource(self.url) as source:
            extents = source.extents(resume=Resume(self.positions, self.hint) if self._with_hint else None)
            held = source.last_messages({shard: Range(0, last.sequence + 1) for shard, last in self.last.items()})
        return {
            shard
            for shard, last in self.last.items()
            if extents[shard].end <= last.sequence or (shard in held and last.is_replaced(held[shard]))
        }


def drain(path: Path, *streams: str, max_records: int, parallelism: int, with_hint: bool = True) -> Counter[Row]:
    reader = Reader(url_of(path, *streams), with_hint=with_hint)
    return reader.drain(max_records=max_records, parallelism=parallelism)


def expected(path: Path, *streams: str) -> Counter[Row]:
    """What one walk over the file finds: every message, and every damage once."""
    rows: list[Row] = []
    shard = ORDERS
    pending: list[Damage] = []
    for item in items(path):
        if isinstance(item, Frame) and (item.is_control or item.shard.stream not in (streams or ("orders",))):
            continue
        if item.sequence is None:
            pending.append(item)
            continue
        assert item.shard is not None
        shard = item.shard
        for damage in pending:
            owner = damage.shard or shard
            rows.append((owner.stream, owner.id, None, damage.offset))
        pending = []
        rows.append((shard.stream, shard.id, item.sequence, item.offset if isinstance(item, Damage) else None))
    return Counter(rows)


def damaged_file(path: Path) -> Path:
    """Payload flips, lost framing, a sequence that does not grow and a broken beacon, with an EOS behind."""
    messages = numbered(240, shards=SHARDS)
    messages.insert(200, messages[20])
    messages.insert(90, Sent(CLICKS, 1, 5, b"between"))
    write_file(path, [*messages, END_OF_STREAM])
    whole = items(path)
    for index in (0, 7, 8, 100):
        flip(path, payload_offset(whole[index]))
    flip(path, whole[40].offset, 0xF0)
    flip(path, whole[160].offset, 0xF0)
    flip(path, 7 * 1024)
    assert len(damages(items(path))) >= 7
    return path


@pytest.mark.parametrize("with_hint", [True, False])
@pytest.mark.parametrize(
    ("max_records", "parallelism"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (5, 1), (13, 2), (1000, 1), (1000, 3)],
)
def test_damage_is_counted_once_whatever_the_batches(
    tmp_path: Path, max_records: int, parallelism: int, with_hint: bool
) -> None:
    path = damaged_file(tmp_path / "orders.ss")
    rows = drain(path, max_records=max_records, parallelism=parallelism, with_hint=with_hint)
    assert rows == expected(path)
    assert set(rows.values()) == {1}


def known_splits(path: Path) -> list[bool]:
    """Whether each split knows how many messages it holds; those that do are right."""
    with FileBatchSource(url_of(path)) as source:
        plan = plan_all(source, parallelism=40)
    known = []
    for split in plan.splits:
        assert isinstance(split, FileSplit)
        rows = [row for batch in split.read() for row in batch.to_pylist()]
        counts = split.counts()
        known.append(counts is not None)
        assert counts in (None, Counter(Shard(row["stream"], row["shard"]) for row in rows))
        # A checksum is first compared when a message is read.
        assert counts is None or all(row["sequence"] is not None for row in rows)
    return known


def test_splits_in_which_a_beacon_had_to_help_do_not_know_what_they_hold(tmp_path: Path) -> None:
    assert set(known_splits(damaged_file(tmp_path / "orders.ss"))) == {True, False}


def test_a_split_with_damage_before_messages_of_another_stream_does_not_know_what_it_holds(tmp_path: Path) -> None:
    clicks = [Sent(CLICKS, n, 5, b"click") for n in range(1, 30)]
    path = write_file(tmp_path / "orders.ss", [*numbered(10), numbered(2)[1], *clicks, *numbered(5, first=11)])
    assert known_splits(path).count(False) == 1


def plans(source: FileBatchSource, gaps: Mapping[Shard, Range], limits: Limits) -> Iterator[BatchPlan]:
    """Batch after batch by one look at the file."""
    left = dict(gaps)
    while plan := source.plan(left, limits=limits, parallelism=3):
        yield plan
        left.update({shard: Range(covered.end, left[shard].end) for shard, covered in plan.ranges.items()})


@pytest.mark.parametrize("seed", range(examples(8)))
def test_batches_of_any_part_of_a_file_by_one_look(tmp_path: Path, seed: int) -> None:
    path = damaged_file(tmp_path / "orders.ss")
    chosen = random.Random(seed)
    whole = expected(path)
    with FileBatchSource(url_of(path)) as source:
        extents = source.extents()
        gaps = {}
        for shard in chosen.sample(SHARDS, chosen.randint(1, 3)):
            start = chosen.randint(0, extents[shard].end)
            gaps[shard] = Range(start, chosen.randint(start, extents[shard].end))
        limits = Limits(max_records=chosen.choice([1, 4, 20, 1000]), max_bytes=chosen.choice([1, 100, 10**9]))
        rows = Counter(row for plan in plans(source, gaps, limits) for row in read(plan))
    places = Counter({row: n for row, n in rows.items() if row[2] is not None})
    assert places == Counter({row: n for row, n in whole.items() if row[2] in gaps.get(Shard(*row[:2]), ())})
    assert rows - whole == Counter()


@pytest.mark.parametrize("other", [CLICKS, SHARDS[1]], ids=["another stream", "another shard"])
def test_the_greatest_sequence_of_a_shard_that_is_not_asked_for_ends_no_batch(tmp_path: Path, other: Shard) -> None:
    messages = numbered(10)
    messages[3:3] = [Sent(other, MAX_SEQUENCE - left, CREATED_MS, b"the greatest") for left in (3, 2, 1, 0)]
    path = write_file(tmp_path / "orders.ss", messages)
    with FileBatchSource(url_of(path)) as source:
        source.extents()
        found = [len(list(read(plan))) for plan in plans(source, {ORDERS: Range(1, 11)}, Limits(max_records=4))]
    assert found == [4, 4, 2]


def test_a_file_that_names_the_stream_of_control_messages(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", [*numbered(5), END_OF_STREAM])
    assert sum(drain(path, "orders", INTERNAL_KEY, max_records=100, parallelism=1).values()) == 5


def test_long_files_are_planned_by_walking_each_message_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 8)
    path = write_file(tmp_path / "orders.ss", numbered(2000, shards=SHARDS))
    walked: list[object] = []

    class Counted(FrameScanner):
        def blocks(self, **options: Any) -> Iterator[Any]:
            for block in super().blocks(**options):
                walked.append(block)
                yield block

    with FileBatchSource(url_of(path)) as source:
        gaps = {shard: Range(extent.start, extent.end) for shard, extent in source.extents().items()}
        found = source._segments
        monkeypatch.setattr(file_batches, "FrameScanner", Counted)
        records = [plan.records for plan in plans(source, gaps, Limits(max_records=40))]
    sizes = [sum(segment.counts.values()) for segment in found]
    assert len(found) <= 9
    assert sorted(sizes)[-1] <= 2.5 * sorted(sizes)[len(sizes) // 2], "they are of about one size"
    assert records == [40] * 50
    assert len(walked) <= 1.2 * 2000


@pytest.mark.parametrize("parallelism", [2, 8])
def test_splits_have_about_as_many_messages_each(tmp_path: Path, parallelism: int) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(2000, shards=SHARDS))
    with FileBatchSource(url_of(path)) as source:
        plan = plan_all(source, parallelism=parallelism)
    counted = [sum((split.counts() or {}).values()) for split in plan.splits if isinstance(split, FileSplit)]
    assert sum(counted) == 2000
    assert len(counted) in (parallelism, parallelism - 1)
    assert max(counted) <= 1.5 * 2000 / parallelism


def one_shard_a_batch(path: Path, *shards: Shard) -> Counter[Row]:
    """What batches of a single shard find, one after the other."""
    rows: Counter[Row] = Counter()
    for shard in shards:
        with FileBatchSource(url_of(path, *{shard.stream: None for shard in shards})) as source:
            gap = {shard: Range(0, source.extents()[shard].end)}
            plan = source.plan(gap, limits=Limits(), parallelism=3)
            assert plan is not None
            rows.update(read(plan))
    return rows


def test_damage_between_shards_when_batches_hold_one_shard_only(tmp_path: Path) -> None:
    """Damage may be a message of any of them, so each batch reports it, as the same dead letter."""
    path = damaged_file(tmp_path / "orders.ss")
    rows = one_shard_a_batch(path, *SHARDS)
    assert set(rows) == set(expected(path))
    assert {count for row, count in rows.items() if row[2] is not None} == {1}


@pytest.mark.parametrize("seed", range(examples(12)))
def test_damage_is_reported_if_a_shard_may_lack_a_message_there(tmp_path: Path, seed: int) -> None:
    """Each shard begins somewhere, as after a move or from a time; messages below that are never read."""
    path = damaged_file(tmp_path / "orders.ss")
    chosen = random.Random(seed)
    reader = Reader(url_of(path))
    starts = {shard: chosen.choice([1, chosen.randint(1, 80)]) for shard in SHARDS}
    reader.positions = dict(starts)
    reader.drain(max_records=chosen.choice([1, 4, 20, 1000]), batches=1)
    moved = chosen.choice(SHARDS)
    starts[moved] = reader.positions[moved] = min(81, reader.positions[moved] + chosen.randint(0, 30))
    reader.drain(max_records=chosen.choice([1, 4, 20, 1000]))
    check_damage(path, reader, starts)


@pytest.mark.parametrize("seed", range(examples(12)))
def test_damage_of_a_batch_that_was_not_written_is_reported_by_the_same_run(tmp_path: Path, seed: int) -> None:
    """Another run moves a shard before the batch is written, so it is planned again."""
    path = damaged_file(tmp_path / "orders.ss")
    chosen = random.Random(seed)
    reader = Reader(url_of(path))
    starts = {shard: 1 for shard in SHARDS}
    reader.drain(max_records=chosen.choice([1, 4, 20]), batches=1)
    moves = [chosen.choice(SHARDS)]
    with FileBatchSource(reader.url) as source:
        extents = source.extents(resume=Resume(reader.positions, reader.hint))
        while True:
            source.remember(Resume(reader.positions, reader.hint))
            limits = Limits(max_records=chosen.choice([1, 4, 20]))
            plan = source.plan(gaps_of(extents, reader.positions), limits=limits, parallelism=1)
            if plan is None:
                break
            if moves and chosen.random() < 0.3:
                moved = moves.pop()
                end = plan.ranges[moved].end if moved in plan.ranges else reader.positions.get(moved, 1)
                starts[moved] = reader.positions[moved] = min(81, end + chosen.choice([0, chosen.randint(0, 10)]))
            elif chosen.random() < 0.8:
                reader.write(plan)
    check_damage(path, reader, starts)


def check_damage(path: Path, reader: Reader, starts: Mapping[Shard, int]) -> None:
    """Check that each damage is reported once, unless every shard began after it."""
    whole = [item for item in items(path) if item.shard is None or item.shard in SHARDS]
    first = min(item.offset for item in whole if item.shard and (item.sequence or 0) >= starts[item.shard])
    known = {row[3] for row in reader.rows if row[2] is None}
    for place, damage in enumerate(whole):
        following: dict[Shard, int] = {}
        for item in whole[place + 1 :]:
            if item.shard is not None and item.sequence is not None:
                following.setdefault(item.shard, item.sequence)
        if damage.sequence is None and damage.offset > first:
            is_lacking = any(sequence >= starts[shard] for shard, sequence in following.items())
            assert damage.offset in known or not is_lacking
    assert set(reader.rows.values()) == {1}


def neighbours(path: Path, *sent: tuple[int, int, int]) -> Path:
    """A file with one stream, of messages with a shard, a sequence and a time in milliseconds."""
    return write_file(path, [Sent(SHARDS[shard], sequence, at, b"%d" % at) for shard, sequence, at in sent])


# The sequence of the third message should be 3.
LOST = ((0, 1, 4000), (0, 2, 6000), (0, 1, 6001), (1, 1, 3000), (0, 4, 6002), (1, 2, 6003))


def test_damage_next_to_a_message_that_is_not_read_is_a_dead_letter(tmp_path: Path) -> None:
    path = neighbours(tmp_path / "orders.ss", *LOST)
    (damage,) = damages(items(path))
    reader = Reader(url_of(path))
    reader.positions = {SHARDS[1]: 2}
    assert reader.drain() == Counter(
        [*(("orders", 0, n, None) for n in (1, 2, 4)), ("orders", 1, 2, None), ("orders", 0, None, damage.offset)]
    )


def test_damage_before_an_older_message_of_another_shard_is_a_dead_letter_of_a_group_from_a_time(
    tmp_path: Path,
) -> None:
    path = neighbours(tmp_path / "orders.ss", *LOST)
    (damage,) = damages(items(path))
    reader = Reader(url_of(path))
    with FileBatchSource(reader.url) as source:
        source.extents()
        reader.positions = dict(source.at(5000))
    assert ("orders", 0, None, damage.offset) in reader.drain()


@pytest.mark.parametrize("more", [0, 40])
@pytest.mark.parametrize("max_records", [1, 100])
def test_damage_before_messages_that_a_move_passes_is_a_dead_letter(
    tmp_path: Path, more: int, max_records: int
) -> None:
    """The next batch begins where the last one ended, not where the messages to read begin."""
    passed = [(1, n, 5000) for n in range(2, 3 + more)]
    read_before = [(0, 1, 1), (1, 1, 1)]
    path = neighbours(tmp_path / "orders.ss", *read_before)
    reader = Reader(url_of(path))
    reader.drain()
    neighbours(path, *read_before, (0, 1, 2), *passed, (0, 3, 9000), (1, 3 + more, 9000))
    (damage,) = damages(items(path))
    reader.positions[SHARDS[1]] = 3 + more
    rows = Counter(reader.rows)
    assert reader.drain(max_records=max_records) - rows == Counter(
        [("orders", 0, 3, None), ("orders", 1, 3 + more, None), (*("orders", 0, None), damage.offset)]
    )


@pytest.mark.parametrize("more", [0, 40])
@pytest.mark.parametrize(
    "hint", ["planned twice", "of another file", "of fewer streams", "of a file that was cut", "of another form"]
)
def test_damage_before_messages_that_a_move_passes_is_a_dead_letter_whatever_the_hint(
    tmp_path: Path, hint: str, more: int
) -> None:
    passed = [(1, n, 5000) for n in range(2, 3 + more)]
    read_before = [(0, 1, 1), (1, 1, 1)]
    path = neighbours(tmp_path / "orders.ss", *read_before)
    reader = Reader(url_of(path, *(("orders", "clicks") if hint == "of fewer streams" else ())))
    if hint == "of fewer streams":
        Reader.drain(first := Reader(url_of(path)))
        reader.positions, reader.hint = first.positions, first.hint
    else:
        reader.drain()
    neighbours(path, *read_before, (0, 1, 2), *passed, (0, 3, 9000), (1, 3 + more, 9000))
    (damage,) = damages(items(path))
    reader.positions[SHARDS[1]] = 3 + more
    assert reader.hint is not None
    changes = {
        "of another file": {"created_at_ms": 7},
        "of a file that was cut": {"tail": 7},
        "of another form": {"offset": "7"},
    }
    reader.hint = {**reader.hint, **changes.get(hint, {})}
    with FileBatchSource(reader.url) as source:
        extents = source.extents(resume=Resume(reader.positions, reader.hint))
        for _ in range(2):
            plan = source.plan(gaps_of(extents, reader.positions), limits=Limits(), parallelism=1)
            assert plan is not None
            assert ("orders", 0, None, damage.offset) in set(read(plan))


def test_the_damaged_first_message_of_a_stream_that_is_added_is_a_dead_letter(tmp_path: Path) -> None:
    """Many messages that were read before come between it and the next message of the stream."""
    messages = [*numbered(5), Sent(CLICKS, 1, 1, b"1"), *numbered(40, first=6), Sent(CLICKS, 2, 2, b"2")]
    path = write_file(tmp_path / "orders.ss", [*messages, Sent(CLICKS, 3, 3, b"3")], interval=1024 * 1024)
    first = items(path)[5]
    flip(path, field_offset(first, 60, first_bit=64)[0], field_offset(first, 60, first_bit=64)[1])
    (damage,) = damages(items(path))
    reader = Reader(url_of(path))
    reader.drain()
    both = Reader(url_of(path, "orders", "clicks"))
    both.positions, both.hint = reader.positions, reader.hint
    assert both.drain() == Counter([("clicks", 0, None, damage.offset), ("clicks", 0, 2, None), ("clicks", 0, 3, None)])


def test_a_batch_ends_with_its_last_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHECKPOINT_FRAMES", 4096)
    path = neighbours(tmp_path / "orders.ss", (0, 1, 1), (0, 2, 2), (1, 1, 3), (1, 1, 4), (1, 2, 5))
    with FileBatchSource(url_of(path)) as source:
        source.extents()
        plan = source.plan({ORDERS: Range(1, 2)}, limits=Limits(), parallelism=1)
    assert plan is not None
    assert list(read(plan)) == [("orders", 0, 1, None)]


def test_a_file_that_grew_again_without_the_last_message_is_another_one(tmp_path: Path) -> None:
    path = neighbours(tmp_path / "orders.ss", *((0, n, n) for n in range(1, 6)))
    reader = Reader(url_of(path))
    reader.drain()
    # Those from 3 on are new, and 5 is damaged.
    neighbours(path, (0, 1, 1), (0, 2, 2), (0, 3, 30), (0, 4, 40), (0, 2, 50), (0, 6, 60), (0, 7, 70))
    with FileBatchSource(reader.url) as source:
        source.extents(resume=Resume(reader.positions, reader.hint))
        held = source.last_messages({ORDERS: Range(0, 6)})
        assert source.is_replaced(ORDERS, reader.last[ORDERS], held.get(ORDERS))


def test_damage_that_only_passed_messages_follow_is_told(tmp_path: Path) -> None:
    read_before = [(0, 1, 1), (1, 1, 1)]
    path = neighbours(tmp_path / "orders.ss", *read_before)
    reader = Reader(url_of(path))
    reader.drain()
    neighbours(path, *read_before, (0, 1, 2), (1, 2, 5000), (1, 3, 5000))
    os.utime(path, (1, 1))
    reader.positions[SHARDS[1]] = 4
    with FileBatchSource(reader.url) as source:
        extents = source.extents(resume=Resume(reader.positions, reader.hint))
        assert source.plan(gaps_of(extents, reader.positions), limits=Limits(), parallelism=1) is None
        assert source.unreadable_tail()
    neighbours(path, *read_before, (0, 1, 2), (1, 2, 5000), (1, 3, 5000), (0, 3, 5000))
    os.utime(path, (1, 1))
    reader.positions[SHARDS[0]] = 4
    with FileBatchSource(reader.url) as source:
        source.extents(resume=Resume(reader.positions, reader.hint))
        assert not source.unreadable_tail(), "both were moved past it"


def test_damage_before_the_first_message_of_a_group_is_not_its_own(tmp_path: Path) -> None:
    path = neighbours(
        tmp_path / "orders.ss", (2, 1, 1), (0, 1, 1), (0, 1, 2), *((0, n, n) for n in range(3, 9)), (1, 1, 9)
    )
    assert len(damages(items(path))) == 1
    for positions in ({SHARDS[0]: 7, SHARDS[2]: 2}, {SHARDS[0]: 9, SHARDS[2]: 2}):
        reader = Reader(url_of(path))
        reader.positions = dict(positions)
        rows = reader.drain()
        assert rows
        assert all(row[2] is not None for row in rows)


def test_damage_between_streams_is_counted_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(120, shards=(ORDERS, CLICKS)))
    whole = items(path)
    for index in (40, 83):
        flip(path, whole[index].offset, 0xF0)
    found = expected(path, "orders", "clicks")
    assert drain(path, "orders", "clicks", max_records=1, parallelism=1) == found
    assert set(one_shard_a_batch(path, ORDERS, CLICKS)) == set(found)


def test_one_record_batch_of_several_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_scanner, "MAX_RUN_MESSAGES", 4096)
    # The streams in turn are read one by one, and those in a row as columns.
    messages = numbered(40, shards=(ORDERS, CLICKS))
    messages += [*numbered(400, first=21, shards=SHARDS[:1]), *numbered(400, first=21, shards=(CLICKS,))]
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    with FileBatchSource(url_of(path, "orders", "clicks")) as source:
        plan = source.plan(gaps_of(source.extents(), {}), limits=Limits(), parallelism=1)
    assert plan is not None
    (batch,) = plan.splits[0].read()
    names = ("stream", "shard", "sequence", "timestamp_ms", "payload")
    assert list(zip(*(batch.column(name).to_pylist() for name in names))) == [
        (sent.shard.stream, sent.shard.id, *sent[1:]) for sent in messages
    ]


def test_messages_of_other_streams_are_never_dead_letters(tmp_path: Path) -> None:
    messages = numbered(60, shards=(ORDERS, CLICKS))
    messages.insert(30, messages[1])
    path = write_file(tmp_path / "orders.ss", messages)
    whole = items(path)
    flip(path, payload_offset(whole[42]))
    assert whole[42].shard == CLICKS
    rows = drain(path, max_records=1, parallelism=1)
    assert rows == Counter(("orders", 0, n, None) for n in range(1, 31))


def test_damage_before_many_messages_of_another_stream(tmp_path: Path) -> None:
    """The next message of the stream comes long after the damage, behind places where a walk may begin."""
    messages = [*numbered(30), *(Sent(CLICKS, n, 5, b"click") for n in range(1, 60)), *numbered(5, first=31)]
    path = write_file(tmp_path / "orders.ss", messages)
    flip(path, items(path)[20].offset, 0xF0)
    for with_hint in (True, False):
        rows = drain(path, max_records=4, parallelism=2, with_hint=with_hint)
        assert rows == expected(path)


def test_damage_at_the_very_end_is_counted_with_the_next_message(tmp_path: Path) -> None:
    messages = numbered(20)
    path = write_file(tmp_path / "orders.ss", [*messages, messages[3]])
    os.utime(path, (1, 1))
    reader = Reader(url_of(path))
    assert set(reader.drain()) == {("orders", 0, n, None) for n in range(1, 21)}
    with FileBatchSource(reader.url) as source:
        source.extents(resume=Resume(reader.positions, reader.hint))
        assert source.unreadable_tail()
    (damage,) = damages(items(path))
    with FileProducer(url_of(path)) as producer:
        for _ in range(100):
            producer.send(b"more")
    reader.drain(max_records=7)
    assert reader.rows == Counter(
        [*(("orders", 0, n, None) for n in range(1, 121)), ("orders", 0, None, damage.offset)]
    )


def test_dead_letters_carry_their_bytes(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(5))
    frame = items(path)[2]
    flip(path, payload_offset(frame))
    with FileBatchSource(url_of(path)) as source:
        plan = source.plan(
            {ORDERS: Range(3, source.extents()[ORDERS].end)}, limits=Limits(max_records=1), parallelism=1
        )
    assert plan is not None
    (row,) = [row for split in plan.splits for batch in split.read() for row in batch.to_pylist()]
    assert row["payload"] == path.read_bytes()[frame.offset : frame.end]
    assert (row["sequence"], row["timestamp_ms"], row["offset"]) == (3, frame.timestamp_ms, frame.offset)
    assert "checksum" in row["error"]


# Flips in the header of a frame, which no checksum covers


def field_offset(frame: Frame, bit: int, *, first_bit: int = 0) -> tuple[int, int]:
    """Where a bit of the shard, the sequence of a frame is, counted from ``first_bit`` on, and its mask."""
    at = frame.offset + 1 + len(frame.shard.stream) + (first_bit + bit) // 8
    return at, 0x80 >> (first_bit + bit) % 8


# The number 0 stands for the highest bit.
BITS = (0, 1, 2, 3, 31, *range(55, 64))


def altered(data: bytes, *flips: tuple[int, int]) -> bytes:
    changed = bytearray(data)
    for offset, mask in flips:
        changed[offset] ^= mask
    return bytes(changed)


def rows_of(messages: Iterable[Sent]) -> set[Row]:
    return {(message.shard.stream, message.shard.id, message.sequence, None) for message in messages}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("place", [0, 10])
def test_a_flipped_bit_of_a_sequence_costs_its_message_only(tmp_path: Path, shards: int, place: int) -> None:
    messages = numbered(40, shards=SHARDS[:shards])
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    data, frame = path.read_bytes(), items(path)[place]
    assert isinstance(frame, Frame)
    intact = rows_of(messages) - rows_of([messages[place]])
    for bit in BITS:
        if place == 0 and bit == 63:
            # The sequence 0 is the first one, too.
            continue
        path.write_bytes(altered(data, field_offset(frame, bit, first_bit=64)))
        rows = drain(path, max_records=7, parallelism=2)
        assert rows == Counter([*intact, (frame.shard.stream, frame.shard.id, None, frame.offset)]), bit


def test_a_flipped_bit_of_a_sequence_with_a_wrong_checksum_costs_its_message_only(tmp_path: Path) -> None:
    messages = numbered(40)
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    data, frame = path.read_bytes(), items(path)[10]
    for bit in BITS:
        path.write_bytes(altered(data, field_offset(frame, bit, first_bit=64), (payload_offset(frame), 1)))
        rows = drain(path, max_records=7, parallelism=2)
        assert rows == Counter([*(rows_of(messages) - rows_of([messages[10]])), ("orders", 0, None, frame.offset)]), bit


def test_a_flipped_bit_of_a_shard_costs_its_message_only(tmp_path: Path) -> None:
    messages = numbered(120, shards=SHARDS[:2])
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    data, frame = path.read_bytes(), items(path)[30]
    for bit in BITS[1:10]:
        path.write_bytes(altered(data, field_offset(frame, bit)))
        rows = drain(path, max_records=7, parallelism=2)
        assert {row for row in rows if row[2] is not None} == rows_of(messages) - rows_of([messages[30]]), bit
        assert [row[3] for row in rows if row[2] is None] == [frame.offset], bit


@pytest.mark.parametrize("first", [7, 10**9, 2**62])
@pytest.mark.parametrize("step", [1, 1000])
def test_a_jump_that_a_producer_wrote_is_read(tmp_path: Path, first: int, step: int) -> None:
    later = [message._replace(sequence=first + step * n) for n, message in enumerate(numbered(30))]
    for messages in (later, [*numbered(5), *later]):
        path = write_file(tmp_path / "orders.ss", messages)
        whole = rows_of(messages)
        assert drain(path, max_records=7, parallelism=2) == Counter(
            rows_of(messages[: -file_scanner.PROVING_FRAMES]) if step > 1 else whole
        )
        os.utime(path, (1, 1))


@pytest.mark.parametrize("seed", range(examples(12)))
def test_flips_in_headers_stop_no_shard_and_are_read_alike_while_the_file_grows(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    shards = chance.choice([SHARDS[:1], SHARDS[:2], (*SHARDS, CLICKS)])
    messages = numbered(chance.randrange(20, 150), shards=shards)
    clean = numbered(160 + len(messages), shards=shards)[len(messages) :]
    interval = chance.choice([256, 1024, 4096])
    data = file_bytes([*messages, *clean], interval=interval)
    path = tmp_path / "orders.ss"
    path.write_bytes(data)
    whole = [item for item in items(path) if isinstance(item, Frame)]
    hit = chance.sample(whole[: len(messages)], chance.randint(1, 4))
    data = altered(
        data, *((chance.randrange(frame.offset, frame.offset + 35), 1 << chance.randrange(8)) for frame in hit)
    )
    reader = Reader(url_of(path), with_hint=chance.random() < 0.8)
    for cut in [*sorted(chance.choices(range(HEADER_SIZE, len(data)), k=chance.randrange(6))), len(data)]:
        path.write_bytes(data[:cut])
        reader.drain(max_records=chance.choice([3, 1000]))
    assert reader.rows == drain(path, max_records=1000, parallelism=1)
    assert set(reader.rows.values()) == {1}
    regions = [(item.offset, item.end) for item in damages(items(path))]
    intact = [
        frame
        for frame in whole
        if frame not in hit and not any(begin < frame.end and frame.offset < end for begin, end in regions)
    ]
    assert rows_of(Sent(*frame[2:]) for frame in intact if frame.shard.stream == "orders") <= set(reader.rows)
    assert rows_of(Sent(*frame[2:]) for frame in whole[len(messages) + 70 :] if frame.shard.stream == "orders") <= set(
        reader.rows
    )


# Flips in the length of a frame, which no checksum covers


@pytest.mark.parametrize("interval", [512, 1024 * 1024])
def test_a_flipped_bit_of_a_length_hides_no_other_message(tmp_path: Path, interval: int) -> None:
    # Frames of 64 bytes, so that a wrong end often is the end of another message.
    messages = numbered(60, shards=(*SHARDS[:2], CLICKS), size=26)
    messages.insert(11, END_OF_STREAM)
    path = write_file(tmp_path / "orders.ss", messages, interval=interval)
    data, whole = path.read_bytes(), [item for item in items(path) if isinstance(item, Frame)]
    hidden = []
    for hit, bit in product(whole[9:14], range(14)):
        path.write_bytes(altered(data, (payload_offset(hit) - 1 - bit // 8, 1 << bit % 8)))
        with FrameScanner(path) as scanner:
            regions = {item.offset: item.end for item in damages(scanner)}
            tail = scanner.offset
        for stream, positions in (("orders", {}), ("orders", {ORDERS: 12}), ("clicks", {})):
            reader = Reader(url_of(path, stream))
            reader.positions.update(positions)
            rows = reader.drain(max_records=25)
            assert set(rows.values()) == {1}
            reported = [(offset, regions[offset]) for *_, offset in rows if offset is not None] + [(tail, len(data))]
            for other in whole:
                is_read = other.shard.stream == stream and other.sequence >= positions.get(other.shard, 0)
                is_row = (other.shard.stream, other.shard.id, other.sequence, None) in rows
                is_reported = any(begin < other.end and other.offset < end for begin, end in reported)
                if is_read and other is not hit and not is_row and not is_reported:
                    hidden.append((hit.offset, bit, stream, other.offset))
    assert not hidden


@pytest.mark.parametrize("shard", [ORDERS, CLICKS])
@pytest.mark.parametrize("is_holding", [True, False])
def test_a_damaged_payload_that_contains_a_message(tmp_path: Path, shard: Shard, is_holding: bool) -> None:
    inner = b"\r" + encode_frame(ORDERS, 4, 5, b"forged")[0]
    messages = numbered(12)
    messages[3:3] = [Sent(shard, 4 if shard == ORDERS else 1, 5, b"x" + (inner if is_holding else inner[:-1]) + b"y")]
    messages[4:] = [sent._replace(sequence=5 + n) for n, sent in enumerate(messages[4:])]
    if shard == CLICKS:
        messages[4:] = [sent._replace(sequence=sent.sequence - 1) for sent in messages[4:]]
    path = write_file(tmp_path / "orders.ss", messages)
    whole = rows_of(sent for sent in messages if sent.shard == ORDERS)
    assert drain(path, max_records=7, parallelism=1) == Counter(whole)
    found = items(path)[3]
    assert isinstance(found, Frame)
    flip(path, payload_offset(found))
    rows = drain(path, max_records=7, parallelism=1)
    intact = rows_of(sent for n, sent in enumerate(messages) if n != 3 and sent.shard == ORDERS)
    if is_holding:
        assert rows == Counter([*intact, ("orders", 0, None, found.offset)])
    else:
        assert rows == Counter([*intact, *[("orders", 0, 4, found.offset)][: shard == ORDERS]])


# Appending, truncation, replacement


@pytest.mark.parametrize("eos", [True, False])
def test_a_hint_stays_good_when_more_is_appended(tmp_path: Path, eos: bool) -> None:
    """An appending producer takes the end-of-stream message away: its bytes become those of the next message."""
    path = tmp_path / "orders.ss"
    options = FileProducerOptions(beacon_interval=1024, end_with_eos=eos)
    reader = Reader(url_of(path))
    for session in range(4):
        with FileProducer(url_of(path), options) as producer:
            for number in range(25):
                producer.send(b"%d" % number, shard=number % 2)
        reader.drain(max_records=9)
        assert set(reader.rows) == {
            ("orders", number % 2, session_ * 13 - (number % 2) * session_ + number // 2 + 1, None)
            for session_ in range(session + 1)
            for number in range(25)
        }
    assert reader.rows == expected(path)
    assert isinstance(reader.hint, dict)
    assert reader.hint["offset"] > path.stat().st_size * 0.9


def test_a_hint_stays_good_when_an_unfinished_message_is_cut(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(40))
    path.write_bytes(path.read_bytes()[:-5])
    reader = Reader(url_of(path))
    assert set(reader.drain(max_records=9)) == {("orders", 0, n, None) for n in range(1, 40)}
    with FileProducer(url_of(path)) as producer:
        for _ in range(20):
            producer.send(b"x" * 50)
    assert reader.drain(max_records=9) == Counter(("orders", 0, n, None) for n in range(1, 60))


@pytest.mark.parametrize(
    "change", [{"offset": None}, {"positions": [5]}, {"positions": {"orders/0": "?"}}, {"positions": {"/": 5}}]
)
def test_a_hint_of_another_form_is_ignored(tmp_path: Path, change: Mapping[str, object]) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(40))
    reader = Reader(url_of(path))
    reader.drain(max_records=9, batches=2)
    reader.hint = {**(reader.hint or {}), **change}
    assert reader.drain(max_records=9) == Counter(("orders", 0, n, None) for n in range(1, 41))


@pytest.mark.parametrize("with_hint", [True, False])
@pytest.mark.parametrize("seed", range(examples(10)))
def test_a_file_that_was_restored_from_an_older_copy_and_grew_again(tmp_path: Path, seed: int, with_hint: bool) -> None:
    """Messages of the same sequences and sizes, some damaged, some in a shard that is new."""
    chance = random.Random(seed)
    old = numbered(chance.randrange(20, 60), shards=SHARDS[:2])
    copied, is_grown = chance.randrange(len(old) + 1), chance.random() < 0.8
    path = write_file(tmp_path / "orders.ss", old)
    if chance.random() < 0.5:
        flip(path, payload_offset(items(path)[-1]))
    reader = Reader(url_of(path), with_hint=with_hint)
    reader.drain(max_records=chance.choice([7, 1000]))
    assert {shard: last.sequence + 1 for shard, last in reader.last.items()} == reader.positions
    assert reader.lost() == set()
    new = numbered(chance.randrange(1, 90), shards=chance.choice([SHARDS[:2], SHARDS])) if is_grown else []
    later = [message._replace(timestamp_ms=message.timestamp_ms + 5_000, payload=b"?" * 20) for message in new]
    kept = old[:copied]
    write_file(path, kept + [one for one in later if one.sequence > sum(m.shard == one.shard for m in kept)])
    assert reader.lost() == {message.shard for message in old[copied:]}
    before = set(reader.rows)
    reader.drain(max_records=7)
    read_since = {row for row in reader.rows if row not in before}
    assert {row for row in read_since if row[1] == 2} == {
        ("orders", 2, one.sequence, None) for one in later if one[0].id == 2
    }
    assert all(row[2] is not None for row in read_since), "nothing of a new shard is taken for damage"


@pytest.mark.parametrize("shards", [1, 3])
def test_readers_past_an_unreadable_tail_read_what_is_appended_after_it(tmp_path: Path, shards: int) -> None:
    """They have read the messages in it before it was damaged; a hole of few bytes would not explain the gap."""
    path = write_file(tmp_path / "orders.ss", numbered(280, shards=SHARDS[:shards]), interval=16 * 1024)
    assert 0 < 16 * 1024 - path.stat().st_size < 64
    reader = Reader(url_of(path))
    reader.drain()
    damaged = items(path)[50]
    assert isinstance(damaged, Frame)
    before = reader.rows.copy()
    letters: list[DeadLetter] = []
    with FileConsumer(url_of(path), on_dead_letter=letters.append) as live:
        assert len(take(live, 280)) == 280
        flip(path, payload_offset(damaged) - 3)  # The length of its payload.
        FileProducer(url_of(path)).close()
        receipts = []
        for number in range(shards):
            with FileProducer(url_of(path)) as producer:
                receipts.append(producer.send(b"new", shard=number))
            messages = {(receipt.shard.stream, receipt.shard.id, receipt.sequence, None) for receipt in receipts}
            assert {row for row in reader.drain() - before if row[2] is not None} == messages
        assert take(live, shards) == [receipt.sequence for receipt in receipts]
        assert len(letters) == 1
    assert {row for row in drain(path, max_records=7, parallelism=2) - before if row[2] is not None} == messages
    with FileConsumer(url_of(path), live=False, on_dead_letter=letters.append) as consumer:
        assert len(list(consumer)) == 50 + shards
    assert [letter.offset for letter in letters[1:]] == [damaged.offset]


@pytest.mark.parametrize("unfinished", [0, 3000])
def test_a_shard_that_continues_after_an_unreadable_tail_leaves_no_other_gap(tmp_path: Path, unfinished: int) -> None:
    """Also if the tail ends with an unfinished message of several beacons, whose end is then in the hole."""
    messages = numbered(198, shards=SHARDS)
    more = [Sent(SHARDS[0], 100, CREATED_MS, b"x" * unfinished)] if unfinished else []
    path = write_file(tmp_path / "orders.ss", [*messages, *more], interval=4096)
    os.truncate(path, path.stat().st_size - unfinished * 2 // 5)
    damaged = next(item for item in items(path) if item.offset > 2 * 4096 + 200)
    assert isinstance(damaged, Frame)
    flip(path, payload_offset(damaged) - 3)
    last: dict[int, list[int]] = {0: [], 1: []}
    for number in (0, 0, 1, 0, 1, 1):
        with FileProducer(url_of(path)) as producer:
            last[number].append(producer.send(b"new", shard=number).sequence)
    for first, *others in last.values():
        assert others == [first + 1, first + 2]
        assert first > 99, "a reader may have read up to there"


def test_an_unfinished_message_is_read_when_it_is_whole(tmp_path: Path) -> None:
    data = file_bytes(numbered(40))
    path = tmp_path / "orders.ss"
    reader = Reader(url_of(path))
    for cut in (HEADER_SIZE, HEADER_SIZE + 1, 700, 1023, 1024, 1030, 1500, len(data) - 1, len(data)):
        path.write_bytes(data[:cut])
        reader.drain(max_records=5)
        assert reader.rows == expected(path)
    assert len(reader.rows) == 40


def test_unreadable_tail(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(5))
    last = items(path)[-1]
    path.write_bytes(path.read_bytes()[:-5])
    with FileBatchSource(url_of(path)) as source:
        source.extents()
        assert source.unreadable_tail() is None, "it was written just now"
        os.utime(path, (1, 1))
        tail = source.unreadable_tail()
        assert f" {last.end - 5 - last.offset} bytes" in (tail or "")
        ahead = time.time() + 3600
        os.utime(path, (ahead, ahead))
        assert source.unreadable_tail() == tail, "the clock was set back since"


@pytest.mark.parametrize("is_framing_lost", [False, True])
def test_damage_at_the_end_is_told_while_a_producer_writes(tmp_path: Path, is_framing_lost: bool) -> None:
    messages = numbered(20)
    path = write_file(tmp_path / "orders.ss", [*messages, messages[3]], interval=1024 * 1024)
    if is_framing_lost:
        flip(path, items(path)[10].offset, 0x40)
    with FileBatchSource(url_of(path)) as source:
        source.extents()
        assert source.unreadable_tail()


def test_a_walk_without_time_answers_with_lower_bounds(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(100))
    os.utime(path, (1, 1))
    with FileBatchSource(url_of(path)) as source:
        part = source.extents(budget_seconds=0)[ORDERS]
        assert part.start == 1
        assert 1 < part.end < 101
        assert source.unreadable_tail() is None
        plan = source.plan({ORDERS: Range(0, 1000)}, limits=Limits(), parallelism=1)
        assert plan is not None
        assert plan.ranges == {ORDERS: Range(0, part.end)}
        assert set(read(plan)) == {("orders", 0, n, None) for n in range(1, part.end)}
        assert source.extents()[ORDERS].end == 101


def test_a_replaced_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(50))
    with FileBatchSource(url_of(path)) as source:
        before = source.identities()
        plan = plan_all(source, parallelism=2)
    data = path.read_bytes()
    path.write_bytes(Header("orders.ss", CREATED_MS + 1, 1024).encode() + data[HEADER_SIZE:])
    with pytest.raises(SourceRecreatedError):
        list(read(plan))
    with FileBatchSource(url_of(path)) as source:
        assert source.identities() != before
    path.unlink()
    with pytest.raises(StreamNotFoundError):
        list(read(plan))


# Size


def test_a_file_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHECKPOINT_FRAMES", 4096)
    path = tmp_path / "orders.ss"
    writer = FrameWriter(beacon_interval=1024 * 1024, offset=HEADER_SIZE)
    payload = random.Random(1).randbytes(60_000)
    with path.open("wb") as file:
        file.write(Header("orders.ss", CREATED_MS, 1024 * 1024).encode())
        for number in range(1, 1101):
            writer.write(ORDERS, number, number, payload)
            file.write(writer.take())
    assert path.stat().st_size > 60 * 1024 * 1024
    tracemalloc.start()
    try:
        with FileBatchSource(url_of(path)) as source:
            plan = plan_all(source)
        rows = 0
        for split in plan.splits:
            for batch in split.read():
                rows += batch.num_rows
                assert batch.nbytes < 24 * 1024 * 1024
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 1100
    assert peak < 30 * 1024 * 1024


@pytest.mark.parametrize("read_before", [0, 10])
@pytest.mark.parametrize("first", [6, 11, 25])
def test_a_file_that_lost_its_oldest_messages(tmp_path: Path, read_before: int, first: int) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(10, first=1), interval=1024 * 1024)
    reader = Reader(url_of(path))
    if read_before:
        reader.drain(max_records=4, parallelism=2)
    else:
        reader.positions = {ORDERS: 1}
    path.write_bytes(file_bytes(numbered(40, first=1), interval=1024 * 1024))
    cut_front(path, first=first)
    position = reader.positions[ORDERS]
    assert position == read_before + 1
    with FileBatchSource(reader.url) as source:
        (extent,) = source.extents(resume=Resume(reader.positions, reader.hint)).values()
        gap = Range(position, extent.end)
        lost = {ORDERS: Range(position, first)} if first > position else {}
        assert source.lost({ORDERS: gap}) == lost
        plan = source.plan({ORDERS: gap}, limits=Limits(max_records=4), parallelism=1)
        assert plan is not None
        assert plan.lost == lost
        # What follows it is no loss again.
        assert source.lost({ORDERS: Range(plan.ranges[ORDERS].end, extent.end)}) == {}
        positions = {ORDERS: plan.ranges[ORDERS].end}
        extents = source.extents(resume=Resume(positions, plan.hint))
        assert source.lost({ORDERS: Range(positions[ORDERS], extents[ORDERS].end)}) == {}


def test_a_gap_in_the_sequences_of_a_file_is_no_loss(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(10, first=1), interval=1024 * 1024)
    reader = Reader(url_of(path))
    reader.drain(max_records=4, parallelism=2)
    path.write_bytes(file_bytes([*numbered(10, first=1), *numbered(10, first=500)], interval=1024 * 1024))
    for hint in (reader.hint, None):
        with FileBatchSource(reader.url) as source:
            source.extents(resume=Resume(reader.positions, hint))
            assert source.lost({ORDERS: Range(reader.positions[ORDERS], 510)}) == {}


def test_a_file_with_more_shards_than_the_ledger_can_keep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(9, shards=[Shard("orders", number) for number in range(3)]))
    monkeypatch.setattr(stream_batches, "MAX_SHARDS", 3)
    with FileBatchSource(url_of(path)) as source:
        assert len(source.extents()) == 3
        monkeypatch.setattr(stream_batches, "MAX_SHARDS", 2)
        with pytest.raises(UnsupportedError) as caught:
            source.extents()
    assert caught.value.facts["shards"] == 3


def test_a_walk_ends_within_a_long_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment of a file with many shards may be the whole file."""
    monkeypatch.setattr(segments, "CHECKPOINT_FRAMES", 4096)
    shards = [Shard("orders", number) for number in range(300)]
    path = write_file(tmp_path / "orders.ss", numbered(600, shards=shards), interval=1024)
    with FileBatchSource(url_of(path)) as source:
        part = source.extents(budget_seconds=0)
        assert 0 < len(part) < 300
        plan = source.plan({shard: Range(0, 1000) for shard in shards}, limits=Limits(), parallelism=1)
        assert plan is not None
        assert {shard: own.end for shard, own in plan.ranges.items()} == {s: own.end for s, own in part.items()}
        assert len(source.extents()) == 300
        monkeypatch.setattr(stream_batches, "MAX_SHARDS", 10)
        with pytest.raises(UnsupportedError) as caught:
            source.extents()
    assert 10 < caught.value.facts["shards"] < 300


def test_a_walk_without_time_passes_damage_at_its_begin(tmp_path: Path) -> None:
    data = bytearray(file_bytes(numbered(50), interval=1024))
    data[HEADER_SIZE : HEADER_SIZE + 8] = bytes(8)
    path = tmp_path / "orders.ss"
    path.write_bytes(data)
    with FileBatchSource(url_of(path)) as source:
        assert 0 < source.extents(budget_seconds=0)[ORDERS].end < 51


def test_shards_of_other_streams_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Shard("clicks", number) for number in range(5)]
    path = write_file(tmp_path / "orders.ss", [*numbered(2), *numbered(10, shards=others), *numbered(3, first=3)])
    monkeypatch.setattr(stream_batches, "MAX_SHARDS", 1)
    reader = Reader(url_of(path))
    assert reader.drain(max_records=2) == Counter(("orders", 0, n, None) for n in range(1, 6))
    assert reader.hint is not None
    assert reader.hint["positions"] == {"orders/0": 6}


def test_a_stream_that_the_url_names_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    """The hint of the batches before has no positions of it."""
    path = write_file(tmp_path / "orders.ss", numbered(20, shards=(ORDERS, CLICKS)))
    reader = Reader(url_of(path))
    reader.drain()
    reader.url = url_of(path, "orders", "clicks")
    assert reader.drain() == Counter((stream, 0, n, None) for stream in ("orders", "clicks") for n in range(1, 11))


def test_a_jump_at_the_end_waits_for_messages_that_decide(tmp_path: Path) -> None:
    messages = [*numbered(20), Sent(ORDERS, 2**61, CREATED_MS, b"?")]
    path = write_file(tmp_path / "orders.ss", messages)
    os.utime(path, (1, 1))
    reader = Reader(url_of(path))
    assert reader.drain() == Counter(rows_of(messages[:-1]))
    with FileBatchSource(reader.url) as source:
        source.extents(resume=Resume(reader.positions, reader.hint))
        assert f"offset {items(path)[-1].offset} " in (source.unreadable_tail() or "")
    offset = items(path)[-1].offset
    write_file(path, [*messages, numbered(22)[-1]])
    assert reader.drain() == Counter([*rows_of(messages[:-1]), ("orders", 0, 22, None), ("orders", 0, None, offset)])


@pytest.mark.parametrize("sequence", [2**61, MAX_SEQUENCE])
def test_a_producer_that_appends_after_a_jump_is_read(tmp_path: Path, sequence: int) -> None:
    """It must not write sequences that no reader takes."""
    messages = [*numbered(20), Sent(ORDERS, sequence, CREATED_MS, b"?")]
    path = write_file(tmp_path / "orders.ss", messages)
    reader = Reader(url_of(path))
    reader.drain()
    for _ in range(3):
        with FileProducer(url_of(path)) as producer:
            appended = [producer.send(b"more") for _ in range(3)]
        reader.drain()
        assert {("orders", 0, receipt.sequence, None) for receipt in appended} <= set(reader.rows)
    assert reader.rows == drain(path, max_records=2, parallelism=1)
    assert len(reader.rows) == 30


@pytest.mark.parametrize("between", [0, 70])
@pytest.mark.parametrize("bit", [47, 62])
def test_a_flip_in_the_last_message_of_a_shard_does_not_end_it(tmp_path: Path, between: int, bit: int) -> None:
    """However few messages it has: a producer that appends does not continue from a jump that readers refuse."""
    path = tmp_path / "orders.ss"
    appended: list[Receipt] = []

    def produce(times: int) -> None:
        with FileProducer(url_of(path)) as producer:
            for _ in range(times):
                appended.extend(producer.send(b"busy", shard=0) for _ in range(between))
                appended.append(producer.send(b"rare", shard=1))

    produce(5)
    appended.pop()
    last = items(path)[-1]
    assert isinstance(last, Frame)
    offset, mask = field_offset(last, bit, first_bit=64)
    flip(path, offset, mask)
    reader = Reader(url_of(path))
    reader.drain()
    for _ in range(3):
        produce(3)
        reader.drain()
    with FileProducer(url_of(path)) as producer:
        appended.extend(producer.send(b"busy", shard=0) for _ in range(70))
    reader.drain()
    intact = Counter(("orders", receipt.shard.id, receipt.sequence, None) for receipt in appended)
    assert intact <= reader.rows
    assert [row[3] for row in reader.rows - intact] == [last.offset]
    assert reader.rows == drain(path, max_records=10, parallelism=2)


def test_a_jump_with_a_wrong_checksum_is_a_dead_letter_without_a_sequence(tmp_path: Path) -> None:
    messages = [*numbered(5), *numbered(20, first=10**6)]
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    frame = items(path)[5]
    flip(path, payload_offset(frame))
    rows = drain(path, max_records=7, parallelism=2)
    assert rows == Counter([*(rows_of(messages) - rows_of([messages[5]])), ("orders", 0, None, frame.offset)])


@pytest.mark.parametrize("more", [5, 3000])
def test_a_beacon_of_the_greatest_length_after_a_jump_is_read(tmp_path: Path, more: int) -> None:
    interval = 1024 * 1024
    before = b"".join(encode_frame(*message)[0] for message in numbered(2))
    empty, _ = encode_frame(ORDERS, 1000, CREATED_MS, b"")
    jump, _ = encode_frame(ORDERS, 1000, CREATED_MS, b"x" * (interval - HEADER_SIZE - len(before) - len(empty)))
    beacon = Beacon(0, tuple(Marker(Shard("k" * 249, number), 1, 1, 0) for number in range(255))).encode()
    after = b"".join(encode_frame(*message)[0] for message in numbered(more, first=1001))
    path = tmp_path / "orders.ss"
    path.write_bytes(Header("orders.ss", CREATED_MS, interval).encode() + before + jump + beacon + after)
    rows = Counter(("orders", 0, number, None) for number in (1, 2, *range(1000, 1001 + more)))
    assert drain(path, max_records=10_000, parallelism=1) == rows


def test_a_gap_that_damage_explains_is_read_at_once_from_a_hint_too(tmp_path: Path) -> None:
    messages = numbered(90, shards=SHARDS)
    path = write_file(tmp_path / "orders.ss", messages)
    whole = items(path)
    flip(path, whole[30].offset, 0xF0)
    data = path.read_bytes()
    (damage,) = damages(items(path))
    reader = Reader(url_of(path))
    for frame in whole:
        if frame.offset >= damage.end:
            path.write_bytes(data[: frame.end])
            reader.drain()
            assert reader.rows == expected(path)
