"""Two groups have claimed one stream in one table: what the second one is refused, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from spark_jobs.batches.accept import plan_accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.replay import PositionMove, plan_moves
from spark_jobs.batches.source_checks import losses_of_stream
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import KEEPER, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.batches import BatchSource, Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError, LedgerTruncatedError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.written_log import WrittenLog, made_entry

SHARD, QUIET = Shard("orders", 0), Shard("quiet", 0)


@pytest.fixture
def source() -> Iterator[BatchSource]:
    """100 messages of one stream, 0 to 99, and none of the other one."""
    name = "memory://refused/orders,quiet"
    with create_producer("memory://refused/orders") as producer:
        for number in range(100):
            producer.send(b"%d" % number)
    with open_batch_source(name) as opened:
        yield opened
    forget_memory_broker(StreamUrl.parse(name))


@pytest.fixture
def log(tmp_path: Path) -> WrittenLog:
    """Both groups looked before either had claimed; ``first`` came first."""
    made = WrittenLog(tmp_path / "table")
    for group in ("first", "second"):
        made.ours(claim(group, -1))
    return made


def claim(group: str, base: int, **details: Any) -> LedgerEntry:
    origin = {SHARD: 0, QUIET: 0}
    return made_entry(1, base, group=group, kind="init", origin=origin, state={}, switch="resumable", **details)


def ingestion(log: WrittenLog, group: str) -> Ingestion:
    return Ingestion(group, str(log.path))


def moves(
    source: BatchSource, log: WrittenLog, group: str, to: int, state: LedgerState | None = None
) -> list[PositionMove]:
    what = ingestion(log, group)
    return plan_moves(source, what, Bound(sequence=to), state=state or what.ledger().read())


@pytest.mark.parametrize("newest", ["init", "turn", "keep"])
def test_a_status_refuses_the_second_group_whatever_it_wrote_last(
    source: BatchSource, log: WrittenLog, newest: str
) -> None:
    if newest != "init":
        state = ingestion(log, "second").ledger().read().shards
        member, number = (KEEPER, 1) if newest == "keep" else ("main", 2)
        log.ours(made_entry(number, 1, group="second", member=member, kind=newest, state=state))
    assert losses_of_stream(source, ingestion(log, "first"), ingestion(log, "first").ledger().read()) == {}
    with pytest.raises(InvalidOptionError):
        losses_of_stream(source, ingestion(log, "second"), ingestion(log, "second").ledger().read())


@pytest.mark.parametrize("to", [7, 99])
def test_a_rewind_moves_the_first_group_and_not_the_second(source: BatchSource, log: WrittenLog, to: int) -> None:
    assert [(move.shard, move.to) for move in moves(source, log, "first", to)] == [(SHARD, to)]
    with pytest.raises(InvalidOptionError):
        moves(source, log, "second", to)
    assert moves(source, log, "second", 0) == [], "nothing would be moved"


def test_only_the_first_group_accepts_a_stream_that_was_made_again(source: BatchSource, tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "other table")
    for group in ("first", "second"):
        log.ours(claim(group, -1, identities={**source.identities(), SHARD.stream: "the stream before it"}))
    first, second = (ingestion(log, group) for group in ("first", "second"))
    assert [epoch.name for epoch in plan_accept(source, first, first.ledger().read())] == ["orders#2"]
    with pytest.raises(InvalidOptionError):
        plan_accept(source, second, second.ledger().read())


def test_a_guess_from_the_rows_has_claimed_nothing(source: BatchSource, log: WrittenLog) -> None:
    """The log was cleaned; a dry run shows what a rewind would do once it has written the guess down."""
    what = ingestion(log, "first")
    log.ours(made_entry(2, 1, group="first", ranges={SHARD: Range(0, 40)}, state=what.ledger().read().shards))
    log.commit()
    DeltaTable(str(log.path)).create_checkpoint()
    log.commit()
    log.clean_before(4)
    with pytest.raises(LedgerTruncatedError):
        what.ledger().read()
    guessed = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, 40)), origin=40)}
    kept = made_entry(2, 4, group="first", kind="keep", bid="", state=guessed)
    assert [m.to for m in moves(source, log, "first", 7, LedgerState(4, guessed, kept, 2, sharing="resumable"))] == [7]


def test_a_status_does_not_search_the_log_for_the_claim_of_a_stream_with_nothing_to_read(
    source: BatchSource, log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, opened = ingestion(log, "first"), set[str]()
    for number in range(60):
        state = {SHARD: known(number), QUIET: known(0)}
        ranges = {SHARD: Range(number, number + 1)}
        log.ours(made_entry(number + 2, log.next - 1, group="first", ranges=ranges, state=state, sharing="resumable"))
    state = what.ledger().read()
    read = DeltaLog._read

    def counting(self: DeltaLog, name: str) -> str:
        opened.add(name)
        return read(self, name)

    monkeypatch.setattr(DeltaLog, "_read", counting)
    assert losses_of_stream(source, what, state) == {}
    assert opened == set()
    create_producer("memory://refused/quiet").send(b"the first one")
    assert losses_of_stream(source, what, state) == {}
    assert len(opened) >= 60


def known(position: int) -> ShardState:
    return ShardState(Intervals.of((MIN_SEQUENCE, position)), origin=0)
