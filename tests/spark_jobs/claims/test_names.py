"""Consumer names of other clients that look like those of members, and names with numbers that the ledger lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.claims.claim_job import ClaimJob
from spark_jobs.claims.claim_state import MAX_NUMBERS_AHEAD, ClaimStatus, ClaimStatuses, claim_names, claim_state
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.mode_switch import settle_claims
from stream_consumers.errors import GroupActiveError, InvalidOptionError, LedgerTruncatedError
from stream_consumers.options import MAX_MEMBER_BYTES
from stream_consumers.redis.claims import RELEASED_MS, ClaimName
from tests.support.ingesting import entries, run_batch
from tests.support.letter_tables import ORDERS, Tables
from tests.support.polling import until
from tests.support.redis_tables import Stream
from tests.support.written_log import made_entry

BID = "0" * 32


@pytest.fixture
def stream(redis_address: str, folder: Path) -> Iterator[Stream]:
    made = Stream(redis_address, folder, shards=1, mode="load_balanced")
    yield made
    made.client.close()


def hold(stream: Stream, name: str | bytes) -> None:
    """Let a client read one entry, and release it."""
    ids = stream.read_as(name, 1)
    stream.client.xclaim(stream.keys[0], stream.group, name, 0, ids, idle=RELEASED_MS, justid=True)


def fences(stream: Stream) -> dict[str, list[int]]:
    """The numbers that fences have used up, per member."""
    found: dict[str, list[int]] = {}
    for entry in entries(stream.ingestion()):
        if entry.kind == "fence":
            found.setdefault(entry.app.partition("/")[2], []).append(entry.number)
    return found


@pytest.mark.slow
def test_entries_of_any_consumer_name_are_written_with_few_commits(spark: SparkSession, stream: Stream) -> None:
    stream.add(3)
    stream.drain(spark)
    stream.add(9, first=3)
    names: list[str | bytes] = [
        f"x/1000000/{BID}",
        f"x/999999/{BID}",
        f"main/{2**63 - 1}/{BID}",
        f"x/{'9' * 5000}/{BID}",
        f" /1/{BID}",
        b"x\xff/1/" + BID.encode(),
    ]
    for name in names:
        hold(stream, name)
    stream.client.xgroup_createconsumer(stream.keys[0], stream.group, f"y/500000/{BID}")
    with stream.source.claims(stream.group) as claims:
        claimed = claim_state(claims, stream.ingestion(), stream.ingestion().ledger().read().shards)
    assert [len(pending) for pending in claimed.pending.values()] == [len(names)]
    last = stream.drain(spark)[-1]
    assert fences(stream).keys() <= {"x", "y", "main"}
    assert fences(stream)["x"] == [1, 1_000_000]
    assert last.entry.number < 10, "the numbers of a member are not used up"
    stream.assert_each_once()
    stream.add(2, first=12)
    stream.client.xack(stream.keys[0], stream.group, *stream.read_as(names[2], 1))
    assert [report.rows for report in stream.drain(spark)] == [1], "another client acknowledges what it likes"


@pytest.mark.slow
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_member_whose_number_the_ledger_has_not_reached_is_fenced(
    spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch, is_restored: bool
) -> None:
    """As of a member that read the ledger before an older copy of the table was put in place, or before a RESTORE."""
    stream.add(5)
    stream.drain(spark)
    version = stream.ingestion().ledger().read().version
    stream.add(5, first=5)
    stream.drain(spark)
    stream.add(5, first=10)
    with stream.source.claims(stream.group) as claims:
        job = ClaimJob(spark, claims, stream.ingestion(member="slow", claims=True))
        read = job.ledger.read
        monkeypatch.setattr(job.ledger, "read", lambda: replace(read(), last_number=4))
        batch = job.plan()
        assert batch is not None
        assert batch.number == 5
        monkeypatch.undo()
        if is_restored:
            newest = stream.ingestion().ledger().read().version
            last = stream.ingestion().ledger().last_number("main")
            for restored in (version, newest):
                spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF {restored}").collect()
                assert stream.ingestion().ledger().last_number("main") == last
        for raw in next(iter(claims.holders().values())):
            stream.client.xclaim(
                stream.keys[0], stream.group, raw, 0, stream.entry_ids()[10:], idle=RELEASED_MS, justid=True
            )
        stream.drain(spark, stream.ingestion(member="other"))
        assert fences(stream) == {"slow": [1, 5]}
        assert run_batch(job, batch) is None
    stream.assert_each_once()


@pytest.mark.slow
def test_entries_of_a_name_whose_commit_was_cleaned_are_written_if_they_have_no_row(
    spark: SparkSession, stream: Stream
) -> None:
    """The remedy of the error: another client claims the entries. One of the two was written and not acknowledged."""
    stream.add(5)
    stream.drain(spark)
    versions = DeltaTable(str(stream.table)).version() + 1
    (first,) = [entry for entry in entries(stream.ingestion()) if entry.kind == "batch"]
    name = str(ClaimName("main", first.number, first.bid))
    stream.add(1, first=5)
    stream.drain(spark)
    stream.add(1, first=6)
    written, unread = stream.entry_ids()[0], *stream.read_as(name, 1)
    words = ["XCLAIM", stream.keys[0], stream.group]
    stream.client.execute_command(*words, name, 0, written, "IDLE", RELEASED_MS, "FORCE")
    DeltaTable(str(stream.table)).create_checkpoint()
    for version in range(versions):
        (stream.table / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(LedgerTruncatedError) as error:
        stream.drain(spark)
    assert error.value.facts["consumer"] == name
    stream.client.execute_command(*words, "released", 0, written, unread)
    until(lambda: stream.drain(spark) and not stream.held(), what="the entries being taken over")
    stream.assert_each_once()


# without Spark


def test_a_member_has_no_longer_name_than_is_read() -> None:
    with pytest.raises(InvalidOptionError):
        Ingestion("g", "/t", member="x" * (MAX_MEMBER_BYTES + 1))


def fenced(folder: Path, *numbers: int, is_cleaned: bool = False) -> Tables:
    """A table with the batch 1 of a member, dead letters of its batch 50, and fences with these numbers."""
    tables = Tables(folder)
    if is_cleaned:
        DeltaTable(str(tables.main.path)).create_checkpoint()
        tables.main.file(0).unlink()
    for number in numbers:
        tables.main.ours(made_entry(number, tables.main.next - 1, kind="fence", state={}))
    tables.add(ORDERS, 3, number=50, batch=BID)
    return tables


def ledger_of(tables: Tables) -> Ledger:
    return Ledger(tables.main.log(), group="g", member="main")


def test_numbers_far_ahead_are_those_of_another_client(tmp_path: Path) -> None:
    ours, others = (
        [f"main/{1 + MAX_NUMBERS_AHEAD + more}/{BID}".encode(), f"x/{MAX_NUMBERS_AHEAD + more}/{BID}".encode()]
        for more in (0, 1)
    )
    found = claim_names([*ours, *others, b"worker-1"], ledger_of(fenced(tmp_path)))
    assert found.keys() == set(ours)


def test_a_number_that_a_fence_used_up_with_others_is_dead(tmp_path: Path) -> None:
    """Also if the log was cleaned before the fence of the number after the last one."""
    name = ClaimName("main", 50, BID)
    assert ClaimStatuses(ledger_of(fenced(tmp_path / "a", 2, 100, is_cleaned=True))).of([name]) == {
        name: ClaimStatus.DEAD
    }
    with pytest.raises(LedgerTruncatedError):
        ClaimStatuses(ledger_of(fenced(tmp_path / "b", 100, is_cleaned=True))).of([name])


@pytest.mark.parametrize("numbers", [(2, 100), (2, 50), (2,), (49,)])
def test_dead_letters_with_a_number_that_was_used_up_never_count(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    tables = fenced(tmp_path, *numbers, is_cleaned=True)
    (lost,) = tables.table.orphaned(ledger_of(tables), LedgerState(tables.main.next - 1))
    assert (lost.bid, lost.is_superseded, lost.is_removed) == (BID, numbers[-1] >= 50, False)


def test_dead_letters_count_where_the_log_may_have_had_their_batch(tmp_path: Path) -> None:
    tables = fenced(tmp_path, 100, is_cleaned=True)
    assert tables.table.orphaned(ledger_of(tables), LedgerState(tables.main.next - 1)) == []


def test_a_switch_fences_names_of_members_only(stream: Stream, tmp_path: Path) -> None:
    far, beyond = ClaimName("x", 1_000_000, BID), ClaimName("x", 2**63 - 1, BID)
    stream.add(4)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="0")
    for raw in (str(far), str(beyond), f"x/{'9' * 5000}/{BID}", b"x\xff/1/" + BID.encode()):
        hold(stream, raw)
    open_names: list[ClaimName] = []
    with stream.source.claims(stream.group) as claims, pytest.raises(GroupActiveError):
        settle_claims(claims, ledger_of(fenced(tmp_path)), open_names.append)
    assert open_names == [far]
