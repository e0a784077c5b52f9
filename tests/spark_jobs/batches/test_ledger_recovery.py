"""Where a group continues whose log was cleaned, or that adopts the rows of a copied table."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import (
    _adoption,
    adopt,
    commit_positions,
    keep,
    plan_adoption,
    read_or_recover,
    surviving_state,
)
from spark_jobs.batches.replay import rewind
from spark_jobs.batches.source_checks import check_source, check_undone_adopt, losses_of_stream
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.mode_switch import _is_behind
from stream_consumers.batches import BatchSource, Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import (
    DataLossError,
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    SourceTruncatedError,
    StreamNotFoundError,
    UnsupportedError,
)
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.entries import to_sequence
from stream_consumers.urls import StreamUrl
from tests.support.command_line import failing, run
from tests.support.delta_writes import clean_log
from tests.support.groups_without_spark import write_empty_commits_by
from tests.support.ingesting import drain, entries, ingestion
from tests.support.letter_tables import write_letters
from tests.support.redis_streams import Place
from tests.support.streams import shard, write_stream

SHARD = Shard("orders")
MESSAGES = 30
NO_SPARK: Any = None


def places(*sequences: int) -> dict[str, pa.Array]:
    """Rows of messages, of which message n is of second n."""
    return {
        "_stream": pa.array([SHARD.stream] * len(sequences), pa.string()),
        "_shard": pa.array([SHARD.id] * len(sequences), pa.int64()),
        "_sequence": pa.array(sequences, pa.int64()),
        "_timestamp": pa.array([1_000_000 * n for n in sequences], pa.timestamp("us", "UTC")),
    }


def land(what: Ingestion, entry: LedgerEntry, *sequences: int) -> None:
    """A commit as the writer of a batch makes it."""
    properties = CommitProperties(
        custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, entry.number)]
    )
    write_deltalake(what.table, pa.table(places(*sequences)), mode="append", commit_properties=properties)


# A cleaned log


@pytest.fixture
def source() -> Iterator[BatchSource]:
    url = StreamUrl.parse(f"memory://{uuid.uuid4().hex}/{SHARD.stream}")
    for number in range(MESSAGES):
        memory_broker(url).append(SHARD, b'{"id":%d}' % number, 1000 * number)
    with open_batch_source(url) as opened:
        yield opened
    forget_memory_broker(url)


def ingest(what: Ingestion, source: BatchSource, *ends: int, is_overtaken: bool = False) -> None:
    """Batches up to these ends; before the last one lands, another writer commits if it is overtaken."""
    ledger = what.ledger()
    if ledger.read().newest is None:
        land(what, ledger.entry("init", ledger.read(), origin={SHARD: 0}, switch="resumable"))
    for end in ends:
        start = ledger.read().positions[SHARD]
        entry = ledger.entry("batch", ledger.read(), ranges={SHARD: Range(start, end)})
        if is_overtaken and end == ends[-1]:
            DeltaTable(what.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        land(what, entry, *range(start, end))
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


def recovered(what: Ingestion, source: BatchSource) -> Mapping[Shard, int] | None:
    """The positions that are taken from the broker; ``None`` if they are refused."""
    try:
        state, is_recovered = read_or_recover(source, what, what.ledger())
    except LedgerTruncatedError:
        return None
    assert is_recovered
    return state.positions


def test_what_the_broker_was_told_of_this_table(cleaned: Ingestion, source: BatchSource) -> None:
    assert recovered(cleaned, source) == {SHARD: 20}


@pytest.mark.parametrize("ends", [(10, 30), (15, 20)])
def test_tables_with_equal_numbers(
    cleaned: Ingestion, source: BatchSource, tmp_path: Path, ends: tuple[int, ...]
) -> None:
    other = replace(cleaned, table=str(tmp_path / "other"))
    ingest(other, source, *ends)
    assert len({what.ledger().last_number("main") for what in (cleaned, other)}) == 1
    assert recovered(cleaned, source) is None


@pytest.mark.parametrize(
    ("told", "position", "is_taken"),
    [
        # As a release without batch ids told it: it has to be where the batch ends.
        *(("lakehouse/main 3", 20, True), ("lakehouse/main 3", 30, False)),
        *(
            (told, 20, False)
            for told in ("", "lakehouse/main", "lakehouse/main 2", "lakehouse/main 33", "other/main 3")
        ),
    ],
)
def test_the_broker_has_to_name_the_newest_batch(
    cleaned: Ingestion, source: BatchSource, told: str, position: int, is_taken: bool
) -> None:
    source.commit(cleaned.group, {SHARD: position}, metadata=told)
    assert recovered(cleaned, source) == ({SHARD: position} if is_taken else None)


@pytest.mark.parametrize("position", [20, 30])
def test_cleaned_rows_have_to_reach_the_position(cleaned: Ingestion, source: BatchSource, position: int) -> None:
    source.commit(cleaned.group, {SHARD: position}, metadata=source.committed_metadata(cleaned.group)[SHARD])
    clean_log(cleaned.table)
    assert recovered(cleaned, source) == ({SHARD: position} if position == 20 else None)


@pytest.mark.parametrize("last", [None, 15, 24], ids=["none", "below the last row", "after it"])
def test_what_lies_before_a_dead_letter_is_replaced(cleaned: Ingestion, source: BatchSource, last: int | None) -> None:
    """A batch died after its dead letters were written, or a RESTORE removed its rows."""
    if last is not None:
        write_letters(cleaned.dead_letters(), SHARD, last, group=cleaned.group, number=4)
    again, end = ([(20, 25)], 25) if last == 24 else ([], 20)
    state = surviving_state(cleaned, source)
    covered = Intervals.of((MIN_SEQUENCE, end))
    read = source.last_messages({SHARD: Range(0, end)})[SHARD]
    assert state.shards == {SHARD: ShardState(covered, Intervals.of(*again), origin=end, last=read)}
    assert state.positions == {SHARD: 20}


@pytest.mark.parametrize("is_same", [False, True])
def test_a_stream_that_was_recreated_and_is_longer(cleaned: Ingestion, source: BatchSource, is_same: bool) -> None:
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
            recovered(cleaned, opened)


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
        rewind(NO_SPARK, source, cleaned, Bound(sequence=22))
    assert DeltaTable(cleaned.table).version() == version


# Rows without positions


def write_messages(path: Path, count: int) -> str:
    """A stream file with messages from number 1 on, of which message n is of second n, like its row."""
    url = f"file://{path}/{SHARD.stream}"
    with create_producer(url) as producer:
        for number in range(1, count + 1):
            producer.send(b"{}", timestamp_ms=1000 * number)
    return url


def write_dead_letters(what: Ingestion, *sequences: int, number: int | None) -> None:
    """Those of a batch; without a number they are a copy, too, and no commit names a batch."""
    rows = {**places(*sequences), "_batch": ["b"] * len(sequences), "_group": [what.group] * len(sequences)}
    metadata = {"v": 1, "bid": "b", "app": f"{what.group}/main", "n": 1, "number": number}
    told = CommitProperties(
        custom_metadata={"userMetadata": json.dumps(metadata)}, app_transactions=[Transaction(f"{what.group}/main", 1)]
    )
    write_deltalake(what.dead_letters().path, pa.table(rows), commit_properties=None if number is None else told)


@pytest.mark.parametrize(
    ("number", "position"),
    [pytest.param(7, 4, id="left from the table before"), pytest.param(None, 6, id="copied with the rows")],
)
def test_dead_letters_beside_a_copy_are_not_skipped(folder: Path, number: int | None, position: int) -> None:
    url, what = write_messages(folder / "orders.ss", 10), ingestion(folder / "t")
    write_deltalake(what.table, pa.table(places(1, 2, 3)))
    write_dead_letters(what, 5, number=number)
    with open_batch_source(url) as source:
        assert plan_adoption(source, what) == {SHARD: position}


def adopted(what: Ingestion, origin: int) -> LedgerEntry:
    """As the adopt of the rows before ``origin`` plans its commit."""
    ledger = what.ledger()
    state = ledger.read()
    switch = None if state.newest else "resumable"
    return ledger.entry("init", state, origin={SHARD: origin}, adopted={SHARD: 1}, switch=switch)


def append(what: Ingestion, start: int, end: int) -> LedgerEntry:
    ledger = what.ledger()
    return ledger.entry("batch", ledger.read(), ranges={SHARD: Range(start, end)})


@pytest.fixture
def copy(folder: Path) -> Ingestion:
    """Nine messages; rows of the first three were copied in version 0, those of the next three in version 1."""
    write_messages(folder / "orders.ss", 9)
    what = ingestion(folder / "t")
    write_deltalake(what.table, pa.table(places(1, 2, 3)))
    write_deltalake(what.table, pa.table(places(4, 5, 6)), mode="append")
    return what


def position(what: Ingestion) -> int:
    return what.ledger().read().positions[SHARD]


def check(what: Ingestion) -> None:
    check_undone_adopt(what, what.ledger().read())


def test_a_restore_takes_an_adopt_back_and_what_is_left_is_refused_until_it_is_adopted_again(copy: Ingestion) -> None:
    land(copy, adopted(copy, 7))
    land(copy, append(copy, 7, 9), 7, 8)
    assert position(copy) == 9
    DeltaTable(copy.table).restore(0)
    assert position(copy) == 1, "the first of the messages whose rows it removed is 4"
    with pytest.raises(InvalidOptionError):
        check(copy)
    write_dead_letters(copy, 6, number=None)
    url = f"file://{Path(copy.table).parent}/orders.ss/orders"
    with open_batch_source(url) as source:
        assert plan_adoption(source, copy) == {SHARD: 4}, "its dead letters stayed, also after removed rows"
    land(copy, adopted(copy, 4))
    check(copy)
    assert position(copy) == 4
    DeltaTable(copy.table).restore(3)
    check(copy)
    assert position(copy) == 9, "the first adopt is back, and the batch after it"
    with open_batch_source(url) as source, pytest.raises(InvalidOptionError):
        plan_adoption(source, copy)


def test_after_a_restore_that_left_none_of_the_adopted_rows_all_is_read(copy: Ingestion) -> None:
    DeltaTable(copy.table).delete()
    write_deltalake(copy.table, pa.table(places(1, 2, 3)), mode="append")
    land(copy, adopted(copy, 4))
    DeltaTable(copy.table).restore(2)
    check(copy)
    assert position(copy) == 1
    land(copy, append(copy, 1, 5), 1, 2, 4)
    check(copy)
    assert position(copy) == 5


def test_an_adopt_or_a_batch_that_lands_after_the_restore_hides_no_rows(copy: Ingestion) -> None:
    late = adopted(copy, 7)
    DeltaTable(copy.table).restore(0)
    land(copy, late)
    assert position(copy) == 1
    with pytest.raises(InvalidOptionError):
        check(copy)
    land(copy, adopted(copy, 4))
    late = append(copy, 4, 7)
    DeltaTable(copy.table).restore(0)
    land(copy, late, 4, 5, 6)
    with pytest.raises(InvalidOptionError):
        check(copy)
    assert copy.ledger().read().shards[SHARD].redo == Intervals.of((4, 7))


def test_a_group_that_claims_cannot_read_again_what_a_restore_of_adopted_rows_removed(copy: Ingestion) -> None:
    land(copy, adopted(copy, 7))
    ledger = copy.ledger()
    land(copy, ledger.entry("fence", ledger.read(), switch="load_balanced by claims"))
    check(copy)
    DeltaTable(copy.table).restore(0)
    with pytest.raises(DataLossError):
        check(copy)


def test_a_group_that_has_read_the_adopted_messages_itself_may_claim(tmp_path: Path) -> None:
    group = ingestion(tmp_path / "t")
    write_deltalake(group.table, pa.table(places(0)).slice(0, 0))
    write_deltalake(group.table, pa.table(places(1, 2, 3)), mode="append")
    land(group, adopted(group, 4))
    DeltaTable(group.table).restore(0)
    ledger = group.ledger()
    assert any(map(_is_behind, ledger.read().shards.values()))
    land(group, append(group, 1, 10), *range(1, 10))
    assert not any(map(_is_behind, ledger.read().shards.values()))
    land(group, ledger.entry("fence", ledger.read(), switch="switching"))
    land(group, ledger.entry("fence", ledger.read(), switch="load_balanced by claims"))
    check(group)


@pytest.mark.parametrize("is_early", [True, False], ids=["trimmed before the adopt", "trimmed after it"])
def test_adopted_rows_whose_messages_are_gone_are_lost_once_they_are_removed(
    redis_address: str, tmp_path: Path, is_early: bool
) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    client = redis.Redis.from_url(f"redis://{redis_address}")
    url, own, what = f"redis://{redis_address}/{name}", Shard(name), ingestion(tmp_path / "t")
    ids = [client.xadd(name, {"msg": b"{}"}, id=f"{number}-0") for number in range(1, 11)]
    client.xtrim(name, maxlen=9, approximate=False)
    rows = {**places(*map(to_sequence, ids[1:8])), "_stream": pa.array([name] * 7, pa.string())}
    write_deltalake(what.table, pa.table(rows).slice(0, 0))
    write_deltalake(what.table, pa.table(rows), mode="append")
    if is_early:
        client.xtrim(name, maxlen=4, approximate=False)
    with open_batch_source(url) as source:
        found = _adoption(source, what, what.ledger().read())
        assert found.adopted == {own: to_sequence(ids[1])}
        fields = {"origin": found.positions, "adopted": found.adopted, "facts_at_start": found.facts_at_start}
        entry = what.ledger().entry("init", what.ledger().read(), switch="resumable", **fields)
    land(what, entry)
    client.xtrim(name, maxlen=4, approximate=False)
    for lost in ({}, {own: Range(to_sequence(ids[1]), to_sequence(ids[6]))}):
        with open_batch_source(url) as source:
            assert losses_of_stream(source, what, what.ledger().read()) == lost
        DeltaTable(what.table).restore(0)


def test_what_cannot_be_adopted(folder: Path) -> None:
    what, url = ingestion(folder / "t"), write_stream(folder / "shorter.ss", 2, shards=1)
    with open_batch_source(url) as source:
        with pytest.raises(StreamNotFoundError):
            plan_adoption(source, what)
        with pytest.raises(UnsupportedError):
            plan_adoption(source, replace(what, sharing=ConsumerMode.LOAD_BALANCED, claims=True))
        write_deltalake(what.table, pa.table(places(1, 2, 3)))
        with pytest.raises(SourceRecreatedError) as raised:
            plan_adoption(source, what)
    assert raised.value.facts == {"row": 3, "end": 3}


@pytest.mark.parametrize(
    ("rows", "is_refused"),
    [
        pytest.param(places(1, 2, 3), True, id="with timestamps"),
        pytest.param({n: c for n, c in places(1, 2, 3).items() if n != "_timestamp"}, False, id="without the column"),
        pytest.param({**places(1, 2, 3), "_timestamp": pa.nulls(3, pa.timestamp("us", "UTC"))}, False, id="with nulls"),
    ],
)
@pytest.mark.parametrize("dead", [(), (5,)], ids=["a row is last", "a dead letter is last"])
def test_rows_of_another_stream_cannot_be_adopted(
    folder: Path, rows: dict[str, pa.Array], is_refused: bool, dead: tuple[int, ...]
) -> None:
    what, url = ingestion(folder / "t"), write_stream(folder / "orders.ss", 9, shards=1)
    write_deltalake(what.table, pa.table(rows))
    if dead:
        write_dead_letters(what, *dead, number=None)
    with open_batch_source(url) as source:
        if not is_refused:
            assert plan_adoption(source, what) == {SHARD: 6 if dead else 4}
            return
        with pytest.raises(SourceRecreatedError) as raised:
            plan_adoption(source, what)
    assert raised.value.facts.keys() == {"sequence", "table", "stream"}
    assert (raised.value.facts["sequence"], raised.value.facts["table"]) == (3, 3000)


# The last message before a position that was set


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty commits are written by delta-rs."""
    write_empty_commits_by(monkeypatch, land)


def recover_from_broker(what: Ingestion, source: BatchSource) -> None:
    state, is_recovered = read_or_recover(source, what, what.ledger())
    assert is_recovered
    keep(NO_SPARK, source, what, state)


def move(to: int) -> Callable[[Ingestion, BatchSource], object]:
    return lambda what, source: rewind(NO_SPARK, source, what, Bound(sequence=to))


def move_before_dead_letter(what: Ingestion, source: BatchSource) -> None:
    write_letters(what.dead_letters(), SHARD, 24, group=what.group, number=4)
    move(20)(what, source)


def adopt_copy(what: Ingestion, source: BatchSource) -> None:
    what = replace(what, table=f"{what.table}_copy")
    write_deltalake(what.table, pa.table(places(*range(20))))
    adopt(NO_SPARK, source, what)


@pytest.mark.usefixtures("without_spark")
@pytest.mark.parametrize(
    ("set_position", "end"),
    [
        pytest.param(recover_from_broker, 20, id="kept as the broker has it"),
        pytest.param(move(20), 20, id="kept where the rows end"),
        pytest.param(move(10), 20, id="kept, and moved backwards"),
        pytest.param(move(25), 25, id="kept, and moved forwards"),
        pytest.param(move_before_dead_letter, 25, id="kept after a dead letter"),
        pytest.param(adopt_copy, 20, id="adopted"),
    ],
)
def test_each_entry_that_sets_a_position_has_the_last_message_before_it(
    cleaned: Ingestion, source: BatchSource, set_position: Callable[[Ingestion, BatchSource], object], end: int
) -> None:
    """So that a stream that is cut below the position and grows past it again is detected."""
    set_position(cleaned, source)
    what = replace(cleaned, table=f"{cleaned.table}_copy") if set_position is adopt_copy else cleaned
    state = what.ledger().read()
    assert state.shards[SHARD].covered == Intervals.of((MIN_SEQUENCE, end))
    assert state.last_messages == source.last_messages({SHARD: Range(MIN_SEQUENCE, end)})
    check_source(source, what.group, state, source.extents())
    broker = memory_broker(source.url)
    with broker.changed:
        del broker.messages[SHARD][5:]
        broker.ends[SHARD] = 5
    for number in range(5, MESSAGES):
        broker.append(SHARD, b"new", 1000 * number)
    with pytest.raises(SourceTruncatedError):
        check_source(source, what.group, state, source.extents())


# With Spark


def read_places(what: Ingestion) -> list[tuple[int, int]]:
    rows = DeltaTable(what.table).to_pyarrow_table(columns=["_shard", "_sequence"]).to_pylist()
    return sorted((row["_shard"], row["_sequence"]) for row in rows)


@pytest.mark.parametrize("how", ["SHALLOW CLONE", pytest.param("USING delta AS SELECT * FROM", marks=pytest.mark.slow)])
def test_a_copy_is_refused_until_its_rows_are_adopted(spark: SparkSession, folder: Path, how: str) -> None:
    url = write_stream(folder / "orders.ss", 10)
    original, copy = ingestion(folder / "t"), ingestion(folder / "copy")
    drain(spark, url, original)
    spark.sql(f"CREATE TABLE delta.`{copy.table}` {how} delta.`{original.table}`")
    write_stream(folder / "orders.ss", 4)
    with pytest.raises(InvalidOptionError) as raised:
        drain(spark, url, copy)
    words = ("adopt", "--source", url, "--table", copy.table, "--group", "lakehouse")
    assert f"stream-assets {' '.join(words)}" in raised.value.remedy
    said = run(*words, "--dry-run", "--json")
    assert said.exit_code == 0, said.output
    assert entries(copy) == []
    done = run(*words, "--json")
    assert json.loads(said.stdout)["rows"] == json.loads(done.stdout)["rows"]
    assert dict(copy.ledger().read().positions) == {shard(0): 6, shard(1): 6}
    failing(run(*words), "already")
    assert [report.rows for report in drain(spark, url, copy)] == [4]
    # Without Spark, delta-rs does not find the files of a shallow clone.
    rows = spark.read.format("delta").load(copy.table).collect()
    assert sorted((row["_shard"], row["_sequence"]) for row in rows) == [(s, n) for s in (0, 1) for n in range(1, 8)]


def test_a_rewind_to_the_last_row_makes_a_cleaned_log_readable(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", 10, shards=1), ingestion(folder / "t")
    drain(spark, url, what)
    clean_log(what.table)
    with pytest.raises(LedgerTruncatedError):
        drain(spark, url, what)
    words = ("rewind", "--source", url, "--table", what.table, "--group", what.group, "--to", "orders/0=11")
    version = DeltaTable(what.table).version()
    assert run(*words, "--dry-run").exit_code == 0
    assert DeltaTable(what.table).version() == version
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] == []
    assert position(what) == 11
    assert drain(spark, url, what) == []


@pytest.mark.slow
def test_after_a_restore_to_before_the_adopt_what_is_left_is_adopted_again(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 6, shards=1)
    original, copy = ingestion(folder / "t"), ingestion(folder / "copy")
    drain(spark, url, original)
    rows = f"SELECT * FROM delta.`{original.table}` WHERE _sequence"
    spark.sql(f"CREATE TABLE delta.`{copy.table}` USING delta AS {rows} <= 3")
    spark.sql(f"INSERT INTO delta.`{copy.table}` {rows} > 3")
    with open_batch_source(url) as source:
        assert adopt(spark, source, copy) == {SHARD: 7}
    write_stream(folder / "orders.ss", 2, shards=1)
    drain(spark, url, copy)
    spark.sql(f"RESTORE TABLE delta.`{copy.table}` TO VERSION AS OF 0")
    with pytest.raises(InvalidOptionError):
        drain(spark, url, copy)
    with open_batch_source(url) as source:
        assert adopt(spark, source, copy) == {SHARD: 4}
    drain(spark, url, copy)
    assert read_places(copy) == [(0, n) for n in range(1, 9)]


@pytest.mark.slow
def test_rows_of_a_stream_that_a_group_begins_with_later_are_a_copy_too(spark: SparkSession, folder: Path) -> None:
    """And another group that writes such a stream is seen."""
    mine, other = ingestion(folder / "t"), ingestion(folder / "u", group="other")
    url, users = write_stream(folder / "orders.ss", 4), f"file://{folder}/users-only.ss/users"
    with create_producer(users) as producer:
        for index in range(6):
            producer.send(b'{"id": %d, "user": "u"}' % index)
    drain(spark, url, mine)
    drain(spark, users, other)
    spark.sql(f"INSERT INTO delta.`{mine.table}` SELECT * FROM delta.`{other.table}`")
    with pytest.raises(InvalidOptionError):
        drain(spark, users, mine)
    with open_batch_source(users) as source:
        assert adopt(spark, source, mine) == {shard(0, "users"): 7}
    assert drain(spark, users, mine) == drain(spark, url, mine) == []
    with pytest.raises(InvalidOptionError, match="group 'lakehouse' already writes"):
        drain(spark, users, replace(mine, group="other"))
