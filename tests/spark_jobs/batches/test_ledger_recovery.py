"""Which positions at the broker are taken for those of a table whose log was cleaned."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import commit_positions, read_or_recover, surviving_state
from spark_jobs.batches.replay import rewind
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import BatchSource, Range
from stream_consumers.create import open_batch_source
from stream_consumers.errors import InvalidOptionError, LedgerTruncatedError, SourceRecreatedError, UnsupportedError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.urls import StreamUrl
from tests.support.delta_writes import clean_log
from tests.support.letter_tables import write_letters
from tests.support.redis_streams import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARD = Shard("orders")
MESSAGES = 30


@pytest.fixture
def source() -> Iterator[BatchSource]:
    url = StreamUrl.parse(f"memory://{uuid.uuid4().hex}/{SHARD.stream}")
    for number in range(MESSAGES):
        memory_broker(url).append(SHARD, b'{"id":%d}' % number, 1000 * number)
    with open_batch_source(url) as opened:
        yield opened
    forget_memory_broker(url)


def land(what: Ingestion, entry: LedgerEntry, sequences: range) -> None:
    """A commit as the writer of a batch makes it; message n is of second n."""
    rows = {
        "_stream": pa.array([SHARD.stream] * len(sequences), pa.string()),
        "_shard": pa.array([SHARD.id] * len(sequences), pa.int64()),
        "_sequence": pa.array(sequences, pa.int64()),
        "_timestamp": pa.array([1_000_000 * n for n in sequences], pa.timestamp("us", "UTC")),
    }
    properties = CommitProperties(
        custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, entry.number)]
    )
    write_deltalake(what.table, pa.table(rows), mode="append", commit_properties=properties)


def ingest(what: Ingestion, source: BatchSource, *ends: int, is_overtaken: bool = False) -> None:
    """Batches up to these ends; before the last one lands, another writer commits if it is overtaken."""
    ledger = what.ledger()
    if ledger.read().newest is None:
        land(what, ledger.entry("init", ledger.read(), origin={SHARD: 0}, switch="resumable"), range(0))
    for end in ends:
        start = ledger.read().positions[SHARD]
        entry = ledger.entry("batch", ledger.read(), ranges={SHARD: Range(start, end)})
        if is_overtaken and end == ends[-1]:
            DeltaTable(what.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        land(what, entry, range(start, end))
    commit_positions(source, what, ledger.read(), [SHARD.stream])


@pytest.fixture
def cleaned(source: BatchSource, tmp_path: Path) -> Ingestion:
    """A table with batches [0, 10) and [10, 20); the log begins with the second one, whose base it lacks."""
    what = Ingestion("lakehouse", str(tmp_path / "cleaned"))
    ingest(what, source, 10, 20, is_overtaken=True)
    DeltaTable(what.table).create_checkpoint()
    *older, _ = sorted(Path(what.table, "_delta_log").glob("*.json"))
    for file in older:
        file.unlink()
    with pytest.raises(LedgerTruncatedError):
        what.ledger().read()
    return what


def recovered(what: Ingestion, source: BatchSource) -> Mapping[Shard, int]:
    state, is_recovered = read_or_recover(source, what, what.ledger())
    assert is_recovered
    return state.positions


def test_what_the_broker_was_told_of_this_table(cleaned: Ingestion, source: BatchSource) -> None:
    assert recovered(cleaned, source) == {SHARD: 20}


@pytest.mark.parametrize("ends", [(10, 30), (15, 20)])
def test_another_table_of_the_group_with_the_same_number(
    cleaned: Ingestion, source: BatchSource, tmp_path: Path, ends: tuple[int, ...]
) -> None:
    other = replace(cleaned, table=str(tmp_path / "other"))
    ingest(other, source, *ends)
    numbers = {what.ledger().last_number("main") for what in (cleaned, other)}
    assert len(numbers) == 1
    with pytest.raises(LedgerTruncatedError):
        read_or_recover(source, cleaned, cleaned.ledger())


@pytest.mark.parametrize(("position", "is_of"), [(20, True), (30, False)])
def test_what_a_release_without_batch_ids_told_the_broker_has_to_be_where_the_batch_ends(
    cleaned: Ingestion, source: BatchSource, position: int, is_of: bool
) -> None:
    source.commit(cleaned.group, {SHARD: position}, metadata="lakehouse/main 3")
    if is_of:
        assert recovered(cleaned, source) == {SHARD: position}
    else:
        with pytest.raises(LedgerTruncatedError):
            read_or_recover(source, cleaned, cleaned.ledger())


@pytest.mark.parametrize("told", ["", "lakehouse/main", "lakehouse/main 2", "lakehouse/main 33", "other/main 3"])
def test_what_is_of_another_batch(cleaned: Ingestion, source: BatchSource, told: str) -> None:
    source.commit(cleaned.group, {SHARD: 20}, metadata=told)
    with pytest.raises(LedgerTruncatedError):
        read_or_recover(source, cleaned, cleaned.ledger())


@pytest.mark.parametrize("position", [20, 30])
def test_where_the_batch_was_cleaned_too_the_rows_have_to_reach_the_position(
    cleaned: Ingestion, source: BatchSource, position: int
) -> None:
    metadata = source.committed_metadata(cleaned.group)[SHARD]
    source.commit(cleaned.group, {SHARD: position}, metadata=metadata)
    clean_log(cleaned.table)
    if position == 20:
        assert recovered(cleaned, source) == {SHARD: position}
    else:
        with pytest.raises(LedgerTruncatedError):
            read_or_recover(source, cleaned, cleaned.ledger())


@pytest.mark.parametrize("last", [None, 15, 24], ids=["none", "below the last row", "behind it"])
def test_what_lies_between_the_last_row_and_a_dead_letter_is_replaced(
    cleaned: Ingestion, source: BatchSource, last: int | None
) -> None:
    """A batch died after its dead letters were written, or a RESTORE removed its rows."""
    if last is not None:
        write_letters(cleaned.dead_letters(), SHARD, last, group=cleaned.group, number=4)
    again, end = ([(20, 25)], 25) if last == 24 else ([], 20)
    covered = Intervals.of((MIN_SEQUENCE, end))
    state = surviving_state(cleaned, source)
    assert state.shards == {SHARD: ShardState(covered, Intervals.of(*again), origin=end)}
    assert state.positions == {SHARD: 20}


@pytest.mark.parametrize("is_same", [False, True])
def test_a_stream_that_was_made_again_and_is_longer_by_now(
    cleaned: Ingestion, source: BatchSource, is_same: bool
) -> None:
    forget_memory_broker(source.url)
    for number in range(2 * MESSAGES):
        memory_broker(source.url).append(SHARD, b"{}", 1000 * number + (0 if is_same else 1))
    with open_batch_source(source.url) as opened:
        opened.commit(cleaned.group, {SHARD: 20}, metadata=source.committed_metadata(cleaned.group)[SHARD])
        if is_same:
            assert surviving_state(cleaned, opened).positions == recovered(cleaned, opened) == {SHARD: 20}
            return
        with pytest.raises(SourceRecreatedError) as raised:
            surviving_state(cleaned, opened)
        assert raised.value.facts == {"sequence": 19, "table": 19_000, "stream": 19_001}
        with pytest.raises(SourceRecreatedError):
            read_or_recover(opened, cleaned, cleaned.ledger())


def test_rows_do_not_tell_what_a_group_in_claim_mode_has_read(cleaned: Ingestion, redis_address: str) -> None:
    place = Place(redis_address)
    place.send(range(30))
    url = StreamUrl.parse(place.url)
    with open_batch_source(url) as opened, RedisClaims(url, cleaned.group) as claims:
        assert surviving_state(cleaned, opened).positions
        claims.prepare(AutoStreamReset.EARLIEST)
        with pytest.raises(UnsupportedError):
            surviving_state(cleaned, opened)


def test_a_rewind_that_is_refused_leaves_the_table_as_it_is(cleaned: Ingestion, source: BatchSource) -> None:
    write_letters(cleaned.dead_letters(), SHARD, 24, group=cleaned.group, number=4)
    version = DeltaTable(cleaned.table).version()
    with pytest.raises(InvalidOptionError):
        rewind(cast("SparkSession", None), source, cleaned, Bound(sequence=22))
    assert DeltaTable(cleaned.table).version() == version
