"""Another client removes entries between any two commands that a source or a group sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from stream_consumers.batches import BatchPlan, Range, Resume
from stream_consumers.errors import DataLossError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, Limits
from stream_consumers.redis import server
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.claims import ClaimedEntries, ClaimName, RedisClaims
from stream_consumers.redis.entries import to_id, to_sequence
from stream_consumers.redis.server import RedisConnection
from tests.support.redis_streams import Place

MOST = 60
REMOVALS = {
    "two deleted": lambda place: place.client.xdel(place.stream, "7-1", "8-1"),
    "deleted before another": lambda place: place.client.xdel(place.stream, "4-1"),
    "added and trimmed": lambda place: place.client.xadd(
        place.stream, {"msg": "{}"}, id="20-1", maxlen=3, approximate=False
    ),
}
removals = pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
pages = pytest.mark.parametrize(
    "moments",
    [
        pytest.param((5000, 5), id="one page"),
        pytest.param((4, 5), id="two pages", marks=pytest.mark.slow),
        pytest.param((4, 1), id="uncertain"),
    ],
    indirect=True,
)


class Moments:
    """Calls a function right before the command with this number; the commands of a pipeline are sent one by one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left, self.is_last = 0, False
        self.act: Callable[[], object] | None = None
        pipelined, run = RedisConnection._pipelined, RedisConnection.run

        def one_by_one(connection: RedisConnection, commands: Sequence[Any]) -> list[Any]:
            replies: list[Any] = []
            for words in commands:
                self._tick()
                replies += pipelined(connection, [words])
            return replies

        def run_later(connection: RedisConnection, *words: Any) -> Any:
            self._tick()
            return run(connection, *words)

        patch.setattr(RedisConnection, "_pipelined", one_by_one)
        patch.setattr(RedisConnection, "run", run_later)

    def _tick(self) -> None:
        if self.act is not None:
            self.left -= 1
            if self.left == 0:
                act, self.act = self.act, None
                act()

    @contextmanager
    def removing(self, number: int, act: Callable[[], object]) -> Iterator[None]:
        """Act before this command within the context, or after all of them."""
        self.left, self.act = number, act
        yield
        self.is_last, act_now, self.act = self.act is not None, self.act, None
        if act_now is not None:
            act_now()

    def each(self) -> Iterator[int]:
        """Yield the numbers of the commands, until one comes after all of them."""
        for number in range(1, MOST):
            yield number
            if self.is_last:
                return
        raise AssertionError("it never ends")


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Moments:
    """Moments of a count with pages of the given size, which is repeated at most the given number of times."""
    page_size, tries = getattr(request, "param", (server.COUNT_PAGE_SIZE, server.LOOK_TRIES))
    monkeypatch.setattr(server, "COUNT_PAGE_SIZE", page_size)
    monkeypatch.setattr(server, "LOOK_TRIES", tries)
    return Moments(monkeypatch)


class Group:
    """A group that reads a stream of ten entries by position, and records losses."""

    def __init__(self, place: Place) -> None:
        self.place, self.shard = place, Shard(place.stream)
        self.position = 0
        self.hint: Mapping[str, object] | None = None
        self.rows: list[int] = []
        self.lost: list[Range] = []

    def gap(self, source: RedisBatchSource) -> Range:
        extents = source.extents(resume=Resume({self.shard: self.position}, self.hint))
        assert not source.recreated({self.shard: self.position}), "nothing was created again"
        return Range(self.position, extents[self.shard].end)

    def read(self, most: int) -> bool:
        """Read one batch, and plan it again if its entries are gone; return whether there was one."""
        with RedisBatchSource(self.place.url) as source:
            for _ in range(3):
                gap = self.gap(source)
                plan = source.plan({self.shard: gap}, limits=Limits(most), parallelism=1)
                if plan is None:
                    return False
                assert not source.recreated({self.shard: self.position})
                try:
                    rows = rows_of(plan)
                except DataLossError:
                    continue
                self.rows += rows
                self.lost += plan.lost.values()
                self.position, self.hint = plan.ranges[self.shard].end, plan.hint
                return True
        raise AssertionError("each plan was outdated")

    def check(self, added: Sequence[int]) -> None:
        """Read the rest, and check that each entry is a row or in a loss, and each loss has one."""
        while self.read(1000):
            pass
        missing = set(added) - set(self.rows)
        assert all(any(sequence in part for part in self.lost) for sequence in missing), (missing, self.lost)
        assert not [part for part in self.lost if part.end - part.start == 1 and part.start in self.rows]


def rows_of(plan: BatchPlan) -> list[int]:
    blocks = [block for split in plan.splits for block in split.read()]
    return [sequence for block in blocks for sequence in block["sequence"].to_pylist() if sequence is not None]


def begin(place: Place) -> tuple[Group, list[int]]:
    ids = [f"{number}-1" for number in range(1, 11)]
    with place.client.pipeline() as pipeline:
        pipeline.delete(place.stream)
        for entry_id in ids:
            pipeline.xadd(place.stream, {"msg": "{}"}, id=entry_id)
        pipeline.execute()
    return Group(place), [to_sequence(entry_id) for entry_id in ids]


def report(claims: RedisClaims, shard: Shard, lost: list[Range]) -> bool:
    """Account for what is lost, and return whether there was any."""
    found = claims.trimmed([shard])
    for part in found.values():
        lost.append(Range(part.start, part.end))
        claims.account_for(shard, part)
    return bool(found)


@pages
@removals
def test_a_plan_reports_what_is_removed_at_any_moment_of_it(place: Place, moments: Moments, remove: Any) -> None:
    for number in moments.each():
        group, added = begin(place)
        group.read(3)
        place.client.xdel(place.stream, "5-1")
        with moments.removing(number, partial(remove, place)):
            group.read(2)
        group.check(added)


@pages
@removals
@pytest.mark.parametrize("is_hole", [False, True])
def test_what_is_removed_while_a_position_is_set_is_reported(
    place: Place, moments: Moments, remove: Any, is_hole: bool
) -> None:
    """A group begins in the middle, or a batch fills a hole before entries that are in the table."""
    for number in moments.each():
        group, added = begin(place)
        place.client.xdel(place.stream, "9-1")
        with RedisBatchSource(place.url) as source:
            gap = group.gap(source)
            plan = source.plan({group.shard: gap}, limits=Limits(1), parallelism=1) if is_hole else None
            group.position = added[4]
            with moments.removing(number, partial(remove, place)):
                group.hint = source.hint({group.shard: group.position}, plan.hint if plan else None)
        group.check([*added[4:8], added[9]])


@pytest.mark.parametrize("moments", [(3, 1)], indirect=True)
def test_what_is_trimmed_before_the_position_does_not_blur_a_count_of_many_pages(
    place: Place, moments: Moments
) -> None:
    """The only deleted entry after the position is on the first page."""
    is_exact = []
    for number in moments.each():
        group, added = begin(place)
        place.client.xdel(place.stream, "5-1")
        with RedisBatchSource(place.url) as source:
            facts = source.server.facts(group.shard)
            assert facts is not None
            trim = partial(place.client.xadd, place.stream, {"msg": "{}"}, maxlen=9, approximate=False)
            with moments.removing(number, trim):
                look = source.server.look(group.shard, added[3], facts)
        is_exact.append(look.least == look.most)
        assert look.facts.added is not None
        assert look.least <= look.facts.added - 4 <= look.most
    # Of two pages with three commands each: no trim is allowed during the first, and no new entry after the last count.
    assert is_exact == [True, False, False, True, True, False, True]


@pytest.mark.slow
def test_a_cluster_is_looked_at_in_one_moment(nodes: list[str]) -> None:
    place = Place(nodes[0], cluster=True)
    shard, client = Shard(place.stream), {"cluster": True}
    ids = [to_sequence(place.client.xadd(place.stream, {"msg": "{}"})) for _ in range(10)]
    with RedisBatchSource(place.url, client) as source:
        source.extents()
        hint = source.hint({shard: ids[4]})
        place.client.xdel(place.stream, to_id(ids[5]), to_id(ids[7]))
        source.extents(resume=Resume({shard: ids[4]}, hint))
        assert source.lost({shard: Range(ids[4], ids[9])}) == {shard: Range(ids[4], ids[7] + 1)}


@pages
@removals
def test_claims_report_what_is_removed_at_any_moment(place: Place, moments: Moments, remove: Any) -> None:
    for number in moments.each():
        group, added = begin(place)
        lost: list[Range] = []
        with RedisClaims(place.url, "claims") as claims:
            claims.prepare(AutoStreamReset.EARLIEST)
            held = ClaimedEntries(ClaimName("main", 1, f"{number:032x}"), 100, 1 << 20)
            claims.claim_new(held, group.shard, 3)
            place.client.xdel(place.stream, "5-1")
            with moments.removing(number, partial(remove, place)):
                claims.count_reads([group.shard])
                report(claims, group.shard, lost)
            while report(claims, group.shard, lost) or claims.has_grown():
                pass
            claims.positions()
            claims.claim_new(held, group.shard, 100)
            assert not report(claims, group.shard, lost)
        missing = set(added) - {to_sequence(entry_id) for entry_id in held.ids[group.shard]}
        assert all(any(sequence in part for part in lost) for sequence in missing), (missing, lost)


def take_one(claims: RedisClaims, shard: Shard, deleted: str) -> None:
    """Another member claims and finishes an entry, and another client deletes one."""
    held = ClaimedEntries(ClaimName("other", 1, "0" * 32), 1, 1 << 20)
    claims.claim_new(held, shard, 1)
    claims.acknowledge(held.ids)
    claims.server.connection.xdel(claims.server.key(shard), deleted)


def test_what_another_member_got_and_another_client_deleted_is_not_lost(place: Place, moments: Moments) -> None:
    for number in moments.each():
        group, _ = begin(place)
        with RedisClaims(place.url, "claims") as claims, RedisClaims(place.url, "claims") as other:
            claims.prepare(AutoStreamReset.EARLIEST)
            place.client.xdel(place.stream, "9-1")
            assert report(claims, group.shard, [])

            take_one(other, group.shard, "0-1")
            with moments.removing(number, partial(take_one, other, group.shard, "2-1")):
                assert claims.trimmed([group.shard]) == {}
