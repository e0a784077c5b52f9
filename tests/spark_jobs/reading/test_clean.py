"""What a split that is written while it is read must give, and when a batch is tried so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pytest

from spark_jobs.batches.ingestion import Batch, Ingestion
from spark_jobs.batches.read_and_commit import one_pass_counts
from spark_jobs.ledger.entries import ClaimedRange, LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.reading.source import SplitCheck, SplitMismatchError
from stream_consumers.batches import BatchPlan, Range, Split, expected_counts
from stream_consumers.epochs import EpochSplit
from stream_consumers.messages import Shard

ONE, TWO = Shard("orders", 1), Shard("orders", 2)
PLANNED = {"orders": "id-1", "clicks": "id-9"}


@dataclass(frozen=True)
class Counted:
    """A split that says what it is told to say."""

    held: Mapping[Shard, int] | None
    found: Mapping[str, str]

    def read(self) -> Iterator[pa.RecordBatch]:
        return iter(())

    def counts(self) -> Mapping[Shard, int] | None:
        return self.held

    def identities(self) -> Mapping[str, str]:
        return self.found


@dataclass(frozen=True)
class Plain:
    """A split as the first version of the protocol has it."""

    def read(self) -> Iterator[pa.RecordBatch]:
        return iter(())


SPLIT = Counted({ONE: 3, TWO: 1}, {"orders": "id-1"})


def rows(*shards: int, error: str | None = None, stream: str = "orders") -> pa.RecordBatch:
    errors = [*[None] * (len(shards) - 1), error]
    columns = {"_stream": [stream] * len(shards), "_shard": list(shards), "_error": pa.array(errors, pa.string())}
    return pa.record_batch(columns)


def read(*batches: pa.RecordBatch, split: Counted = SPLIT) -> int:
    return sum(found.num_rows for found in SplitCheck({ONE: 3, TWO: 1}, PLANNED).checked(batches, split))


def test_what_was_planned_is_passed_on() -> None:
    assert read(rows(1, 2), rows(1), rows(1)) == 4
    assert sum(found.num_rows for found in SplitCheck({ONE: 0}, PLANNED).checked([], SPLIT)) == 0


UNCLEAN = {
    "a dead letter at the end": ([rows(1, 2), rows(1, 1, error="no JSON")], "1 of 2 messages are dead letters"),
    "a message more": ([rows(1, 2, 1, 1, 1)], "orders/1 holds more messages than the 3 planned"),
    "a message fewer": ([rows(1, 2, 1)], "orders/1': 1"),
    "nothing": ([], "orders/1': 3, 'orders/2': 1"),
    "as many, of others": ([rows(1, 1, 2, 2)], "orders/2 holds more messages than the 1 planned"),
    "another shard": ([rows(1, 1, 1, 2, 7)], "orders/7 holds more messages than the 0 planned"),
    "another stream": ([rows(1, 1, 1, 2), rows(1, stream="clicks")], "clicks/1 holds more messages"),
}


@pytest.mark.parametrize("name", UNCLEAN)
def test_what_was_not_planned_fails(name: str) -> None:
    batches, message = UNCLEAN[name]
    with pytest.raises(SplitMismatchError, match=message):
        read(*batches)


@pytest.mark.parametrize(
    "found", [{"orders": "id-2"}, {}, {"clicks": "id-9"}, {"orders": "id-1", "clicks": "id-8"}, {"orders#2": "id-1"}]
)
def test_another_stream_than_the_planned_one_fails_at_the_end(found: Mapping[str, str]) -> None:
    with pytest.raises(SplitMismatchError):
        read(rows(1, 1, 1, 2), split=Counted(None, found))


def test_splits_of_epochs_say_the_same_under_the_names_of_epochs() -> None:
    split = EpochSplit(SPLIT, {"orders": "orders#2", "clicks": "clicks"})
    assert split.counts() == {Shard("orders#2", 1): 3, Shard("orders#2", 2): 1}
    assert split.identities() == {"orders#2": "id-1"}
    assert EpochSplit(Plain(), {"orders": "orders#2"}).counts() is None


def test_one_split_that_does_not_know_what_it_holds_is_enough() -> None:
    assert expected_counts([SPLIT, SPLIT]) == {ONE: 6, TWO: 2}
    others: list[Split] = [Plain(), Counted(None, {})]
    for other in others:
        assert expected_counts([SPLIT, other]) is None


def entry(**fields: object) -> LedgerEntry:
    known: dict[str, object] = {"ranges": {ONE: Range(0, 3), TWO: Range(0, 1)}, "messages": 4}
    return LedgerEntry("batch", "g", "g/main", 2, "main", "bid", 1, **{**known, **fields})  # type: ignore[arg-type]


def planned(
    previous: LedgerEntry | None = None,
    *,
    splits: tuple[Split, ...] = (SPLIT,),
    ranges: dict[Shard, Range] | None = None,
    maybe_written: dict[Shard, Range] | None = None,
    **fields: object,
) -> Batch:
    plan = BatchPlan(ranges or {ONE: Range(0, 3), TWO: Range(0, 1)}, splits, 4)
    return Batch("batch", LedgerState(1, newest=previous), plan, fields=fields, maybe_written=maybe_written or {})


def counts(batch: Batch, **options: object) -> Mapping[Shard, int] | None:
    return one_pass_counts(batch, Ingestion("g", "t", driver_records=0, **options))  # type: ignore[arg-type]


def test_only_plain_batches_are_tried_in_one_pass() -> None:
    assert counts(planned()) == {ONE: 3, TWO: 1}
    assert counts(planned(mode="replace")) is None
    assert counts(planned(lost={ONE: Intervals.of((0, 1))})) is None
    assert counts(planned(claims={ONE: ClaimedRange(0, 3, 3)})) is None
    assert counts(planned(splits=())) is None
    assert counts(planned(splits=(SPLIT, Plain()))) is None
    assert counts(planned(maybe_written={ONE: Range(0, 1)})) is None


def test_rows_of_a_transform_may_take_no_read_of_all_messages_unless_it_is_said() -> None:
    assert counts(planned(), transform=lambda rows: rows.limit(1)) is None
    assert counts(planned(), transform=lambda rows: rows.where("id > 0"), is_row_wise=True) == {ONE: 3, TWO: 1}


def test_after_a_batch_that_was_not_clean_none_is_tried() -> None:
    assert counts(planned(entry())) is not None
    assert counts(planned(entry(messages=3, dead=1))) is None
    assert counts(planned(entry(messages=3))) is None, "a hole where sequences grow by one"
    sparse = {ONE: Range(0, 3000), TWO: Range(0, 1000)}
    assert counts(planned(entry(messages=3, ranges=sparse), ranges=sparse)) is not None, "ids have gaps by nature"
    assert counts(planned(entry(messages=3, dead=1, ranges=sparse), ranges=sparse)) is None
