"""What a batch source knows of a Redis stream from one batch to the next, and pages of entries as columns."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from stream_consumers.batches import BatchPlan, PositionFacts, Range, Resume, hint_with_facts, position_facts_in
from stream_consumers.errors import DataLossError, FormatError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.options import Limits
from stream_consumers.redis import batches, entries
from stream_consumers.redis.batches import RedisBatchSource, RedisSplit, plain_entries
from stream_consumers.redis.entries import MAX_MS, MAX_SUB, read_entry, to_sequence
from stream_consumers.urls import StreamUrl


class Reader:
    """Reads a stream by position, as runs do: each with a source of its own, and the hint of the one before."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.client = redis.Redis(host, int(port))
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self.url = StreamUrl.parse(f"redis://{address}/{self.name}")
        self.shard = Shard(self.name)
        self.position = 0
        self.hint: Mapping[str, object] | None = None

    def add(self, count: int) -> None:
        for _ in range(count):
            self.client.xadd(self.name, {"msg": b"{}"})

    def trim(self, left: int) -> None:
        self.client.xtrim(self.name, maxlen=left, approximate=False)

    def delete(self, *places: int) -> list[int]:
        """Delete entries by their places in the stream; their sequences."""
        ids = [entry_id for entry_id, _ in self.client.xrange(self.name)]
        self.client.xdel(self.name, *(ids[place] for place in places))
        return [to_sequence(ids[place]) for place in places]

    def go_back(self, older: bytes) -> None:
        """Give the server an older state of the stream, as a crash or a failover may."""
        self.client.restore(self.name, 0, older, replace=True)

    def sequences(self) -> list[int]:
        return [to_sequence(entry_id) for entry_id, _ in self.client.xrange(self.name)]

    def resume(self) -> Resume:
        return Resume({self.shard: self.position}, self.hint)

    def gap(self, source: RedisBatchSource) -> dict[Shard, Range]:
        end = source.extents(resume=self.resume())[self.shard].end
        return {self.shard: Range(self.position, end)}

    def plan(self, source: RedisBatchSource, gap: Mapping[Shard, Range], most: int = 1000) -> BatchPlan:
        """A batch that is taken as written."""
        plan = source.plan(gap, limits=Limits(most), parallelism=1)
        assert plan is not None
        self.position, self.hint = plan.ranges[self.shard].end, plan.hint
        source.remember(self.resume())
        return plan

    def lost(self) -> Mapping[Shard, Range]:
        """What a new look finds to be lost."""
        with RedisBatchSource(self.url) as source:
            return source.lost(self.gap(source))

    def rows(self, most: int) -> list[int]:
        """The sequences from the position to the end, in batches."""
        found: list[int] = []
        with RedisBatchSource(self.url) as source:
            end = self.gap(source)[self.shard].end
            while self.position < end:
                plan = self.plan(source, {self.shard: Range(self.position, end)}, most)
                blocks = [block for split in plan.splits for block in split.read()]
                found += [sequence for block in blocks for sequence in block["sequence"].to_pylist()]
        return found

    def read(self, most: int = 1000) -> frozenset[Shard]:
        """Look whether it was recreated, then read a batch."""
        with RedisBatchSource(self.url) as source:
            resume = Resume({self.shard: self.position}, self.hint) if self.hint else None
            start, end, _ = source.extents(resume=resume)[self.shard]
            self.position = self.position or start
            facts = {shard: [at] for shard, at in position_facts_in(self.hint).items()}
            late = source.with_late_messages(facts, counts_all=False)
            found = source.recreated({self.shard: self.position}) | late.keys()
            plan = source.plan({self.shard: Range(self.position, end)}, limits=Limits(most), parallelism=1)
            if plan is not None:
                self.position, self.hint = plan.ranges[self.shard].end, plan.hint
            return found


@pytest.fixture
def reader(redis_address: str) -> Iterator[Reader]:
    made = Reader(redis_address)
    made.add(10)
    assert made.read(6) == frozenset()
    yield made
    made.client.close()


def test_a_plan_takes_little_memory_of_the_server_whatever_the_entries_are(redis_address: str) -> None:
    """The server holds the entries that a script has asked for, several times, and serves nobody else meanwhile."""
    reader = Reader(redis_address)
    reader.add(500)
    for _ in range(300):
        reader.client.xadd(reader.name, {"msg": b"x" * 256 * 1024})
    reader.client.config_resetstat()
    before = reader.client.info("memory")["used_memory"]
    with RedisBatchSource(reader.url) as source:
        plan = reader.plan(source, reader.gap(source))
        assert source.server.count(reader.shard, 0, reader.position) == plan.records == 800
    after = reader.client.info("memory")["used_memory_peak"]
    reader.client.delete(reader.name)
    assert after - before < 100 * 256 * 1024 * 1.5


def test_a_stream_that_goes_on_is_the_same_whatever_is_removed(reader: Reader) -> None:
    for remove in (
        lambda: None,
        lambda: reader.client.xtrim(reader.name, maxlen=3, approximate=False),
        lambda: reader.client.xdel(reader.name, reader.client.xrange(reader.name)[-1][0]),
        lambda: reader.client.xtrim(reader.name, maxlen=0, approximate=False),
    ):
        remove()
        reader.add(2)
        assert reader.read() == frozenset()
        assert reader.read() == frozenset()


@pytest.mark.parametrize("count", [1, 6, 10, 40])
def test_a_stream_that_was_made_again_is_another_also_where_its_ids_go_on(reader: Reader, count: int) -> None:
    """What was not read of the old one is gone."""
    reader.client.delete(reader.name)
    reader.add(count)
    assert reader.read() == {reader.shard}


def test_a_server_that_has_forgotten_a_deletion_hides_no_later_one(reader: Reader) -> None:
    """The counts are those of a server with a late entry, so a run stops."""
    reader.add(1)
    older = reader.client.dump(reader.name)
    reader.delete(3)
    assert reader.read() == frozenset()
    reader.go_back(older)
    reader.add(3)
    (lost,) = reader.delete(-2)
    assert reader.lost() == {reader.shard: Range(lost, lost + 1)}
    assert reader.read() == {reader.shard}


def test_a_server_that_has_forgotten_trims_hides_no_deletion_before_an_earlier_one(redis_address: str) -> None:
    reader = Reader(redis_address)
    reader.add(10)
    reader.delete(8)
    assert reader.read(4) == frozenset()
    older = reader.client.dump(reader.name)
    reader.trim(8)
    assert reader.read(1) == frozenset()
    reader.go_back(older)
    lost = reader.delete(6)[0]
    assert lost > reader.position
    assert reader.lost() != {}


@pytest.mark.parametrize("deleted", [1, 2])
def test_a_server_that_has_lost_entries_that_were_read_is_another_whatever_is_deleted(
    reader: Reader, deleted: int
) -> None:
    older = reader.client.dump(reader.name)
    reader.add(2)
    assert reader.read() == frozenset()
    reader.go_back(older)
    reader.add(5)
    reader.delete(*range(-3, deleted - 3))
    assert reader.read() == {reader.shard}


def send_late(reader: Reader, lost: int = 1) -> None:
    """After a failover lost so many entries, an older one is sent, and then the last one that was read again."""
    reader.read()
    older = reader.client.dump(reader.name)
    for number in range(1, lost + 1):
        reader.client.xadd(reader.name, {"msg": b"{}"}, id=f"9000000000000-{number}")
    assert reader.read() == frozenset()
    reader.go_back(older)
    for number in (0, lost):
        reader.client.xadd(reader.name, {"msg": b"{}"}, id=f"9000000000000-{number}")


@pytest.mark.parametrize("lost", [1, 3, 5])
@pytest.mark.parametrize("removed", ["nothing", "trimmed", "deleted"])
@pytest.mark.parametrize("new", [0, 3, 9])
def test_a_server_that_has_got_a_late_entry_before_the_position_is_another(
    reader: Reader, new: int, removed: str, lost: int
) -> None:
    send_late(reader, lost)
    reader.add(new)
    if removed == "trimmed":
        reader.trim(new + 1)
    elif removed == "deleted":
        reader.delete(3)
    assert reader.read() == {reader.shard}


def test_a_late_entry_before_many_others_is_found_before_the_end(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan counts at most two entries, and an accept counts all."""
    monkeypatch.setattr(batches, "EXACT_COUNT", 2)
    send_late(reader)
    reader.add(6)
    facts = {shard: [at] for shard, at in position_facts_in(reader.resume().hint).items()}
    with RedisBatchSource(reader.url) as source:
        source.extents(resume=reader.resume())
        assert source.with_late_messages(facts, counts_all=False) == {}
        assert source.with_late_messages(facts, counts_all=True) == {reader.shard: reader.position}
    found = [bool(reader.read(3)) for _ in range(3)]
    assert found == [False, False, True]


@pytest.mark.parametrize("is_thinned", [False, True])
def test_the_first_position_before_which_messages_came_late_is_found(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, is_thinned: bool
) -> None:
    """The counts of later positions follow from the first one, also if entries are deleted meanwhile."""
    facts = [position_facts_in(reader.hint)[reader.shard]]
    for most in (1, 2, 1):
        reader.read(most)
        facts.append(position_facts_in(reader.hint)[reader.shard])
    entries = [entry for entry, _ in reader.client.xrange(reader.name)]
    with RedisBatchSource(reader.url) as source:
        if is_thinned:
            counted = source.server.count

            def thinned(shard: Shard, start: int, end: int, *, length: int | None = None) -> int:
                found = counted(shard, start, end, length=length)
                reader.client.xdel(reader.name, entries.pop())
                return found

            monkeypatch.setattr(source.server, "count", thinned)
        source.extents(resume=reader.resume())
        assert source.with_late_messages({reader.shard: facts}, counts_all=True) == {}
        places = [*facts[:2], *((at, known._replace(added=known.added - 9)) for at, known in facts[2:])]
        assert source.with_late_messages({reader.shard: places}, counts_all=True) == {reader.shard: facts[2][0]}


def test_an_accept_of_a_stream_that_is_trimmed_counts_its_end_once(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [position_facts_in(reader.hint)[reader.shard]]
    for most in (1, 2, 1):
        reader.read(most)
        facts.append(position_facts_in(reader.hint)[reader.shard])
    looks = []
    with RedisBatchSource(reader.url) as source:
        counted, look = source.server.count, source.server.look

        def trimmed(shard: Shard, start: int, end: int, *, length: int | None = None) -> int:
            reader.trim(reader.client.xlen(reader.name) - 1)
            return counted(shard, start, end, length=length)

        monkeypatch.setattr(source.server, "count", trimmed)
        monkeypatch.setattr(source.server, "look", lambda *of: [looks.append(of), look(*of)][1])
        source.extents(resume=reader.resume())
        assert source.with_late_messages({reader.shard: facts}, counts_all=True) == {}
    assert len(looks) == 1


def test_what_is_trimmed_after_the_look_is_lost_for_the_plan_and_for_no_later_one(reader: Reader) -> None:
    reader.add(20)
    with RedisBatchSource(reader.url) as source:
        gap = reader.gap(source)
        start = reader.position
        reader.trim(5)
        first = reader.plan(source, gap, most=2)
        assert first.lost == {reader.shard: Range(start, reader.sequences()[0])}
        assert first.records == 2
        rest = {reader.shard: Range(reader.position, gap[reader.shard].end)}
        assert reader.plan(source, rest).lost == {}
    reader.add(2)
    assert reader.lost() == {}


def test_a_server_that_has_counted_too_few_entries_hides_none(reader: Reader) -> None:
    """As on a copy of a trimmed stream, to which entries were added since: six were ever added, and six were read."""
    reader.trim(5)
    last = reader.client.xinfo_stream(reader.name)["last-generated-id"]
    reader.client.execute_command("XSETID", reader.name, last, "ENTRIESADDED", 6)
    with RedisBatchSource(reader.url) as source:
        assert source.count(reader.gap(source)) == {reader.shard: 4}


def test_a_loss_between_two_batches_of_a_run_is_of_the_second(reader: Reader) -> None:
    reader.add(20)
    with RedisBatchSource(reader.url) as source:
        gap = reader.gap(source)
        assert reader.plan(source, gap, most=5).lost == {}
        (gone,) = reader.delete(18)
        rest = {reader.shard: Range(reader.position, gap[reader.shard].end)}
        assert source.plan(rest, limits=Limits(3), parallelism=1).lost == {reader.shard: Range(gone, gone + 1)}  # type: ignore[union-attr]
        again = reader.plan(source, rest, most=3)
        assert again.lost == {reader.shard: Range(gone, gone + 1)}, "the batch before was not written"
    assert reader.lost() == {}, "it is accounted for"


def test_several_deleted_entries_are_within_the_range_that_is_told(reader: Reader) -> None:
    reader.add(20)
    start = reader.position
    early, late = reader.delete(12, 25)
    assert reader.lost() == {reader.shard: Range(start, late + 1)}
    assert start <= early
    with RedisBatchSource(reader.url) as source:
        reader.plan(source, reader.gap(source), most=1)
    assert reader.lost() == {}
    start = reader.position
    reader.delete(15)
    assert reader.lost() == {reader.shard: Range(start, late + 1)}, "an entry below the last one that was deleted"


@pytest.mark.parametrize("place", [0, 3, 10], ids=["earliest", "in the middle", "latest"])
def test_losses_are_known_from_the_first_commit_on(reader: Reader, place: int) -> None:
    with RedisBatchSource(reader.url) as source:
        (extent,) = source.extents().values()
        reader.position = (*reader.sequences(), extent.end)[place]
        reader.hint = source.hint({reader.shard: reader.position})
    reader.add(10)
    assert reader.lost() == {}
    reader.trim(4)
    assert reader.lost() == {reader.shard: Range(reader.position, reader.sequences()[0])}


@pytest.mark.parametrize("is_deleted", [False, True])
def test_trims_before_the_first_position_hide_no_deletion_and_are_no_loss(reader: Reader, is_deleted: bool) -> None:
    """Another entry after the position was deleted before, and is not lost for a group that begins now."""
    reader.delete(7)
    with RedisBatchSource(reader.url) as source:
        source.extents()
        reader.position = reader.sequences()[5]
        if is_deleted:
            reader.delete(8)
        reader.trim(7)
        reader.hint = source.hint({reader.shard: reader.position})
    assert bool(reader.lost()) == is_deleted


def test_a_position_without_a_hint_counts_from_the_first_look_on(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    reader.add(10)
    assert reader.lost() == {}
    assert not caplog.records
    reader.hint = None
    with RedisBatchSource(reader.url) as source:
        gap = reader.gap(source)
        assert source.lost(gap) == {}
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        reader.delete(15)
        assert len(reader.plan(source, gap, most=2).lost) == 1


def test_what_claims_went_past_is_lost_where_only_the_count_is_known(reader: Reader) -> None:
    """As after a switch from claims to positions: members were given three entries, and one before them was deleted."""
    (gone,) = reader.delete(2)
    reader.position = reader.sequences()[3]
    reader.hint = hint_with_facts(None, {reader.shard: (reader.position, PositionFacts(4))})
    assert reader.lost() == {}
    reader.hint = hint_with_facts(None, {reader.shard: (reader.position, PositionFacts(3))})
    assert reader.lost() == {reader.shard: Range(gone, reader.position)}


def test_what_a_new_shard_of_a_known_stream_lost_before_the_first_look_is_lost(reader: Reader) -> None:
    url = StreamUrl.parse(f"redis://{reader.url.nodes[0]}/{reader.name}-s")
    old, new = (Shard(f"{reader.name}-s", number) for number in range(2))
    reader.client.xadd(f"{reader.name}-s:0", {"msg": b"{}"})
    for _ in range(10):
        reader.client.xadd(f"{reader.name}-s:1", {"msg": b"{}"})
    reader.client.xtrim(f"{reader.name}-s:1", maxlen=4, approximate=False)
    with RedisBatchSource(url) as source:
        begins = {shard: extent.start for shard, extent in source.extents().items()}
        assert source.lost({shard: Range(start, start + 1) for shard, start in begins.items()}) == {}, "a new group"
    with RedisBatchSource(url) as source:
        extent = source.extents(resume=Resume({old: begins[old]}))[new]
        gap = {new: Range(source.first(new, extent), extent.end)}
        plan = source.plan(gap, limits=Limits(), parallelism=1)
        assert plan is not None
        assert plan.records == 4
        assert plan.lost == source.lost(gap) == {new: Range(0, extent.start)}
        assert position_facts_in(source.hint({new: 0})) == {new: (0, PositionFacts(0, 0, 0))}, "an accepted epoch"


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_stream_that_is_deleted_while_it_is_planned_is_looked_at_again(reader: Reader, is_made_again: bool) -> None:
    reader.add(10)
    with RedisBatchSource(reader.url) as source:
        gap = reader.gap(source)
        reader.client.delete(reader.name)
        if is_made_again:
            reader.client.xadd(reader.name, {"msg": b"{}"}, id="1-0")
        with pytest.raises(DataLossError):
            source.plan(gap, limits=Limits(), parallelism=1)


def test_what_another_run_knows_is_taken_and_what_it_moved_is_not_said(reader: Reader) -> None:
    """A run of two shards loses a race, and reads only one of them from where the other run has moved it to."""
    one, two = (Shard(f"{reader.name}-s", number) for number in range(2))
    url = StreamUrl.parse(f"redis://{reader.url.nodes[0]}/{one.stream}")
    keys = {shard: f"{one.stream}:{shard.id}" for shard in (one, two)}
    for key in keys.values():
        for _ in range(10):
            reader.client.xadd(key, {"msg": b"{}"})
    with RedisBatchSource(url) as slow, RedisBatchSource(url) as fast:
        gaps = {shard: Range(extent.start, extent.end) for shard, extent in slow.extents().items()}
        fast.extents()
        assert slow.plan(gaps, limits=Limits(), parallelism=1) is not None
        landed = fast.plan(gaps, limits=Limits(12), parallelism=1)
        assert landed is not None
        ends = {shard: part.end for shard, part in landed.ranges.items()}
        slow.remember(Resume(ends, landed.hint))
        plan = slow.plan({one: Range(ends[one], gaps[one].end)}, limits=Limits(2), parallelism=1)
        assert plan is not None
        assert position_facts_in(plan.hint) == {one: (plan.ranges[one].end, PositionFacts(8, 0, 0))}


def test_an_entry_that_is_deleted_after_it_was_read_is_not_replaced(reader: Reader) -> None:
    reader.read()
    with RedisBatchSource(reader.url) as source:
        source.extents(resume=reader.resume())
        read = source.last_messages({reader.shard: Range(0, reader.position)})[reader.shard]
        reader.delete(9)
        held = source.last_messages({reader.shard: Range(0, reader.position)})[reader.shard]
        assert held.sequence < read.sequence
        assert not source.is_replaced(reader.shard, read, held)


def test_names_of_fields_count_towards_the_limit(reader: Reader) -> None:
    reader.read()
    for _ in range(6):
        reader.client.xadd(reader.name, {b"msg": b"", b"x" * 1000: b""})
    with RedisBatchSource(reader.url) as source:
        plan = source.plan(reader.gap(source), limits=Limits(max_bytes=2500), parallelism=1)
        assert plan is not None
        assert plan.records == 2


def test_empty_fields_count_towards_the_limit_the_page_and_the_block(reader: Reader) -> None:
    reader.read()
    for _ in range(6):
        reader.client.execute_command("XADD", reader.name, "*", "msg", "{}", *[""] * 100_000)
    with RedisBatchSource(reader.url) as source:
        plan = source.plan(reader.gap(source), limits=Limits(max_bytes=13_000_000), parallelism=1)
        assert plan is not None
        (split,) = plan.splits
        assert isinstance(split, RedisSplit)
        assert (plan.records, split.page_size) == (4, 1)
        blocks = list(replace(split, page_size=10).read())
    assert [block.num_rows for block in blocks] == [3, 1]


# Pages of entries become columns as each entry becomes a message


NUMBERS = st.sampled_from([0, 1, MAX_SUB, MAX_SUB + 1, MAX_MS, MAX_MS + 1, 2**63, 2**64 - 1]) | st.integers(0, 2**48)
IDS = st.builds(lambda ms, sub: b"%d-%d" % (ms, sub), NUMBERS, NUMBERS) | st.sampled_from([b"", b"7", b"1-2-3", b"x-1"])
FIELDS = st.lists(st.sampled_from([b"msg", b"trace", b"", b"\xff"]), max_size=4)
ENTRIES = st.tuples(IDS, FIELDS) | st.tuples(
    st.builds(lambda ms, sub: b"%d-%d" % (ms, sub), st.integers(0, MAX_MS), st.integers(0, MAX_SUB)),
    st.binary(max_size=3).map(lambda payload: [b"msg", payload]),
)


@given(st.lists(ENTRIES, max_size=4).filter(lambda page: all(len(fields) % 2 == 0 for _, fields in page)))
def test_columns_are_what_the_entries_are(page: list[tuple[bytes, list[bytes]]]) -> None:
    columns = plain_entries(page, b"msg")
    try:
        found = [read_entry(Shard("orders"), entry_id, fields, b"msg") for entry_id, fields in page]
    except FormatError:
        assert columns is None
        return
    is_plain = all(isinstance(message, Message) and not message.headers for message in found)
    assert (columns is not None) == (is_plain and bool(page))
    if columns is not None:
        sequences, times, payloads = (column.to_pylist() for column in columns)
        assert sequences == [message.sequence for message in found]
        assert times == [message.timestamp_ms for message in found]
        assert payloads == [message.payload for message in found]


@pytest.mark.parametrize(
    "fields",
    [[b"other", b"\x80" * 100], [b"msg", b"{}", b"\x80" * 200, b""], [b"msg", b"{}", b"x", b"y" * 600]],
    ids=["payload", "name", "value"],
)
def test_an_entry_that_would_need_too_many_bytes_is_a_dead_letter_without_them(
    fields: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_entry(Shard("orders"), b"1-0", fields, b"msg")
    assert not isinstance(whole, DeadLetter) or whole.payload
    monkeypatch.setattr(entries, "MAX_OTHER_BYTES", 500)
    found = read_entry(Shard("orders"), b"1-0", fields, b"msg")
    assert isinstance(found, DeadLetter)
    assert found.payload == b""


def test_a_deleted_entry_without_a_sequence_stops_nobody(redis_address: str) -> None:
    with redis.Redis.from_url(f"redis://{redis_address}") as client:
        stream = f"deleted-{uuid.uuid4().hex}"
        client.xadd(stream, {"msg": "1"}, id="9-1")
        client.xdel(stream, client.xadd(stream, {"msg": "2"}, id="9-70000"))
        with RedisBatchSource(f"redis://{redis_address}/{stream}") as source:
            assert [extent.end for extent in source.extents().values()] == [to_sequence("10-0")]
            client.xadd(stream, {"msg": "3"}, id="10-0")
            assert [extent.end for extent in source.extents().values()] == [to_sequence("10-0") + 1]


@pytest.mark.parametrize(("most", "page_size"), [(1, 4096), (1000, 1), (1000, 4096)], ids=["batch", "page", "whole"])
@pytest.mark.parametrize("is_later", [False, True])
def test_an_entry_without_a_sequence_stops_the_run_also_at_a_border(
    redis_address: str, monkeypatch: pytest.MonkeyPatch, most: int, page_size: int, is_later: bool
) -> None:
    """The last sequence of a millisecond ends a batch, a page, or what a run has seen of the stream."""
    monkeypatch.setattr(batches, "SCAN_PAGE_SIZE", page_size)
    reader = Reader(redis_address)
    for entry_id in ("5-65534", "5-65535", "5-65536", "6-0"):
        if entry_id == "5-65536" and is_later:
            assert len(reader.rows(most)) == 2
        reader.client.xadd(reader.name, {"msg": entry_id}, id=entry_id)
    with pytest.raises(FormatError, match="5-65536"):
        reader.rows(most)
    with RedisBatchSource(reader.url) as source:
        start, facts = to_sequence("5-65535") + 1, source.server.facts(reader.shard)
        assert facts is not None
        assert source.server.look(reader.shard, start, facts)[1:] == (2, 2)
        assert source.server.count(reader.shard, start, facts.end) == 2
        assert source.server.count(reader.shard, 0, start) == 2


@pytest.mark.parametrize("moved_to", ["5-70000", "18446744073709551615-18446744073709551615"])
def test_a_group_at_an_id_without_a_sequence_is_moved_back(reader: Reader, moved_to: str) -> None:
    reader.read()
    reader.client.xgroup_create(reader.name, "billing", id="0")
    reader.client.execute_command("XGROUP", "SETID", reader.name, "billing", moved_to)
    with RedisBatchSource(reader.url) as source:
        assert source.committed("billing") != {reader.shard: reader.position}
        source.commit("billing", {reader.shard: reader.position})
        assert source.committed("billing") == {reader.shard: reader.position}
