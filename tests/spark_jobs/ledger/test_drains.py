"""When a drain ends and what it tells of first, without Spark."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.run_ingestion import SharedDrain
from stream_consumers.create import StreamSource
from stream_consumers.errors import DataLossError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

ZERO, ONE = Shard("orders", 0), Shard("orders", 1)


class Jobs:
    """A replay of two batches; the messages of the third are gone."""

    def __init__(self) -> None:
        self.left: list[Any] = ["first", "second", DataLossError("gone", remedy="None.")]

    def plan(self) -> Any:
        planned = self.left.pop(0)
        if isinstance(planned, Exception):
            raise planned
        return planned

    def run(self, batch: str) -> str:
        return f"{batch} is in the table"


def test_batches_of_a_replay_that_are_in_the_table_are_told_of_before_an_error() -> None:
    told: list[Any] = []
    jobs: Any = Jobs()

    def tell() -> None:
        for report in drain_batches(jobs):
            told.append(report)

    with pytest.raises(DataLossError):
        tell()
    assert told == [("first is in the table", False), ("second is in the table", False)]


class Member:
    """A member that has one shard."""

    def shards(self) -> Set[Shard]:
        return {ZERO}


@pytest.mark.parametrize(("own", "other", "is_over"), [(10, 10, True), (4, 10, True), (10, 4, False), (4, 4, False)])
def test_a_member_waits_for_the_shards_of_others_and_not_for_those_it_has_drained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own: int, other: int, is_over: bool
) -> None:
    """Somebody may have moved them back since."""
    positions = {shard: ShardState(Intervals.of((MIN_SEQUENCE, at))) for shard, at in ((ZERO, own), (ONE, other))}
    monkeypatch.setattr(Ledger, "read", lambda ledger: LedgerState(1, positions))
    source = StreamSource(StreamUrl.parse("memory://drains/orders"))
    member: Any = Member()
    drain = SharedDrain(source, Ingestion("g", str(folder / "t")), member, job_of=pytest.fail)
    drain._done = {ZERO}
    assert drain._is_over({ZERO: 10, ONE: 10}) is is_over
