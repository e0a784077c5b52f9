"""Groups in claim mode whose count of read entries is forgotten or too high: what was trimmed unread is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession

from spark_jobs.claims.claim_state import ClaimLosses, losses_of_claims, skipped_entries
from spark_jobs.ledger.entries import CLAIMS, ClaimedRange
from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Range
from stream_consumers.errors import DataLossError, SourceRecreatedError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ErrorPolicy
from stream_consumers.redis.claims import ClaimedEntries, ClaimName
from stream_consumers.redis.entries import to_sequence
from stream_consumers.redis.server import StreamFacts
from tests.support.redis_tables import Stream
from tests.support.written_log import WrittenLog, made_entry


class ClaimedStream(Stream):
    """A stream of one shard with a group that claims, and a ledger without a table."""

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__(address, folder, shards=1, mode="load_balanced")
        self.log = WrittenLog(self.table)
        self.number = 1
        self.shard, self.key = Shard(self.name), self.keys[0]
        self.ids: list[bytes] = []
        self.add_entries(10)
        with self.source.claims(self.group) as claims:
            origin = claims.prepare(AutoStreamReset.EARLIEST)
            identities = claims.identities()
        entry = made_entry(1, -1, kind="init", group=self.group, origin=origin, identities=identities, switch=CLAIMS)
        self.log.ours(entry)
        self.claim()

    def add_entries(self, count: int) -> None:
        self.ids += [self.client.xadd(self.key, {"msg": b"{}"}) for _ in range(count)]

    def claim(self) -> int:
        """Claim all new entries, commit them to the ledger, and acknowledge them; return their number."""
        self.number += 1
        with self.source.claims(self.group) as claims:
            claims.positions()
            held = ClaimedEntries(ClaimName("main", self.number, f"{self.number:032x}"), 1000, 1 << 30)
            claims.claim_new(held, self.shard, 1000)
            if not held.count:
                return 0
            places = sorted(to_sequence(entry_id) for entry_id in held.ids[self.shard])
            claimed = {self.shard: ClaimedRange(places[0], places[-1] + 1, held.count)}
            base = self.log.next - 1
            self.log.ours(made_entry(self.number, base, group=self.group, bid=held.name.bid, claims=claimed))
            claims.acknowledge(held.ids)
            claims.remove_name(self.shard, held.name)
        return held.count

    def trim(self, left: int) -> None:
        self.client.xtrim(self.key, maxlen=left, approximate=False)

    def move(self, index: int, *more: object) -> None:
        self.client.execute_command("XGROUP", "SETID", self.key, self.group, self.ids[index], *more)

    def read(self) -> object:
        (found,) = self.client.xinfo_groups(self.key)
        return found["entries-read"]

    def lost(self) -> Range | None:
        """What ``lag``, ``verify`` and the sensor report."""
        ingestion = self.ingestion(claims=True)
        with self.source.claims(self.group) as claims:
            return losses_of_claims(claims, ingestion, ingestion.ledger()).get(self.shard)

    def check(self, spark: SparkSession) -> None:
        """The checks of a run, which raise if entries may be lost. They need Spark only to record a loss."""
        ingestion = self.ingestion(claims=True)
        shards = ingestion.ledger().read().shards
        with self.source.claims(self.group) as claims:
            claims.check({shard: known.written_end for shard, known in shards.items()})
            assert ClaimLosses(spark, claims, ingestion, observer=lambda step, batch: None).next() is None

    def after(self, index: int) -> int:
        return to_sequence(self.ids[index]) + 1


NO_SPARK = cast("SparkSession", None)


@pytest.fixture
def stream(redis_address: str, folder: Path) -> Iterator[ClaimedStream]:
    made = ClaimedStream(redis_address, folder)
    yield made
    made.client.close()


def assert_reported(stream: ClaimedStream, start: int, end: int) -> None:
    assert stream.lost() == Range(start, end)
    with pytest.raises(DataLossError):
        stream.check(NO_SPARK)
    assert stream.claim() == 0, "no entry after the lost ones is claimed"


def test_entries_that_the_group_was_moved_over_are_reported_after_they_are_trimmed(stream: ClaimedStream) -> None:
    stream.add_entries(10)
    stream.move(19)
    stream.trim(0)
    assert stream.lost() == Range(stream.after(9), stream.after(19))
    stream.add_entries(5)
    with pytest.raises(DataLossError) as error:
        stream.check(NO_SPARK)
    assert error.value.facts["given"] == stream.after(9)
    assert stream.lost() == Range(stream.after(9), to_sequence(stream.ids[20]))


@pytest.mark.parametrize("case", ["moved back", "created again", "another member"])
def test_a_forgotten_count_hides_no_entry_that_was_trimmed_unread(stream: ClaimedStream, case: str) -> None:
    stream.add_entries(10)
    given = 9
    if case == "moved back":
        stream.move(19)
        stream.trim(5)
        with pytest.raises(DataLossError):
            stream.check(NO_SPARK)
        stream.move(9)
    elif case == "created again":
        stream.client.xgroup_destroy(stream.key, stream.group)
        stream.trim(5)
        with pytest.raises(SourceRecreatedError):
            stream.check(NO_SPARK)
        stream.client.xgroup_create(stream.key, stream.group, id=stream.ids[9])
        with stream.source.claims(stream.group) as claims:
            claims.group.enter_claim_mode(stream.shard)
    else:
        stream.client.xdel(stream.key, stream.ids[13])
        (taken,) = stream.read_as("worker-1", 1)
        stream.client.xack(stream.key, stream.group, taken)
        stream.trim(5)
        given = 10
    assert stream.read() is None
    assert_reported(stream, stream.after(given), to_sequence(stream.ids[15]))
    stream.move(given, "ENTRIESREAD", 15)
    assert stream.lost() is None
    stream.check(NO_SPARK)
    assert stream.claim() == 5


def test_the_remedy_of_a_server_that_lost_its_latest_state_keeps_the_count(stream: ClaimedStream) -> None:
    """The last ten claimed entries and their deliveries are gone from the server; ten entries after them are new."""
    stream.add_entries(10)
    stream.claim()
    stream.client.xdel(stream.key, *stream.ids[10:])
    stream.client.execute_command("XSETID", stream.key, stream.ids[9], "ENTRIESADDED", 10, "MAXDELETEDID", "0-0")
    stream.move(9, "ENTRIESREAD", 10)
    stream.add_entries(10)
    stream.trim(4)
    with pytest.raises(SourceRecreatedError) as error:
        stream.check(NO_SPARK)
    command = error.value.remedy.partition("XGROUP SETID ")[2].partition(". ")[0]
    stream.client.execute_command("XGROUP", "SETID", *command.split())
    assert stream.read() == 10
    assert_reported(stream, stream.after(19), to_sequence(stream.ids[26]))
    stream.move(19)
    assert_reported(stream, stream.after(19), to_sequence(stream.ids[26]))


def test_a_recorded_loss_hides_no_entry_beside_it_that_is_skipped_later(stream: ClaimedStream) -> None:
    stream.add_entries(20)
    stream.client.xdel(stream.key, stream.ids[-1])
    ingestion = stream.ingestion(claims=True, errors=ErrorPolicy(on_data_loss="record"))
    with stream.source.claims(stream.group) as claims:
        trimmed = claims.trimmed(frozenset((stream.shard,)))[stream.shard]
        assert trimmed.entries == 1
        entry = made_entry(
            1,
            stream.log.next - 1,
            group=stream.group,
            member=str(stream.shard),
            lost={stream.shard: Intervals.of((trimmed.start, trimmed.end))},
            claims={stream.shard: ClaimedRange(trimmed.start, trimmed.end, 1)},
            hint={"start": trimmed.start, "read": trimmed.read},
            state=None,
            bid="loss",
        )
        stream.log.ours(entry)
        claims.account_for(stream.shard, trimmed)
    assert stream.lost() is None
    stream.move(-1, "ENTRIESREAD", 30)
    with stream.source.claims(stream.group) as claims:
        skipped = skipped_entries(claims, ingestion.ledger())[stream.shard]
    assert (skipped.part, skipped.entries) == (Range(stream.after(9), stream.after(29)), 19)
    fields = {"lost": {stream.shard: Intervals.of(skipped.part)}, "skipped": {stream.shard: skipped.part}}
    base = stream.log.next - 1
    stream.log.ours(made_entry(2, base, group=stream.group, member=str(stream.shard), state=None, bid="skip", **fields))
    assert stream.lost() is None


@pytest.mark.parametrize("added", [0, 5])
def test_a_forgotten_count_is_no_loss_where_nothing_can_be_gone(stream: ClaimedStream, added: int) -> None:
    stream.trim(0 if not added else 1)
    stream.add_entries(added)
    stream.move(9)
    assert stream.lost() is None
    stream.check(NO_SPARK)
    assert stream.read() == 10
    stream.add_entries(10)
    stream.trim(3)
    assert stream.lost() == Range(stream.after(9), to_sequence(stream.ids[-3])), "it is counted again"


@pytest.mark.parametrize("count", [1, 3])
def test_a_count_that_begins_anew_is_logged(
    stream: ClaimedStream, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """Redis forgets it where another client reads before or over a deleted entry, which may not have been delivered."""
    stream.add_entries(10)
    stream.client.xdel(stream.key, stream.ids[12])
    stream.client.xack(stream.key, stream.group, *stream.read_as("other", count))
    assert stream.read() is None
    if count == 1:
        with pytest.raises(DataLossError):
            stream.check(NO_SPARK)
        assert not caplog.records, "the entry is still reported"
    else:
        stream.check(NO_SPARK)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert stream.claim() == 6
        stream.check(NO_SPARK)
        assert len(caplog.records) == 1


@pytest.mark.parametrize("read", [11, 20, 21, 1000, 2**63 - 1])
def test_a_count_that_is_too_high_hides_no_entry(stream: ClaimedStream, read: int) -> None:
    """Another client has set it; ten entries were read, and ten are not. Nothing is claimed before it is corrected."""
    stream.add_entries(10)
    stream.move(9, "ENTRIESREAD", read)
    with stream.source.claims(stream.group) as claims:
        assert claims.backlog()[stream.shard] == (10, 0)
    assert stream.lost() is None
    assert stream.claim() == 0
    assert stream.client.xpending(stream.key, stream.group)["pending"] == 0
    stream.check(NO_SPARK)
    assert stream.read() == 10
    stream.trim(4)
    assert_reported(stream, stream.after(9), to_sequence(stream.ids[16]))


@pytest.mark.parametrize(("left", "read"), [(0, 21), (0, 2**63 - 1), (4, 17), (4, 1000)])
def test_entries_that_were_trimmed_under_a_count_that_is_too_high_are_reported(
    stream: ClaimedStream, left: int, read: int
) -> None:
    stream.add_entries(10)
    stream.move(9, "ENTRIESREAD", read)
    stream.trim(left)
    assert_reported(stream, stream.after(9), to_sequence(stream.ids[16]) if left else stream.after(19))
    assert stream.read() is None, "it hides nothing later either"
    stream.move(9, "ENTRIESREAD", 20 - left)
    stream.check(NO_SPARK)
    assert stream.claim() == left


def test_a_trimmed_stream_that_was_copied_with_the_count_of_its_group_is_read(stream: ClaimedStream) -> None:
    """The copy has never had the entries that were trimmed before it was made."""
    stream.add_entries(10)
    stream.trim(12)
    old: list[tuple[bytes, dict[bytes, bytes]]] = stream.client.xrange(stream.key)
    stream.client.delete(stream.key)
    for entry_id, fields in old:
        stream.client.xadd(stream.key, fields, id=entry_id)
    stream.client.xgroup_create(stream.key, stream.group, id=stream.ids[9], entries_read=10)
    with stream.source.claims(stream.group) as claims:
        claims.group.enter_claim_mode(stream.shard)
        assert claims.backlog()[stream.shard].unread == 10
    stream.check(NO_SPARK)
    assert (stream.lost(), stream.read()) == (None, 2)
    assert stream.claim() == 10


def test_the_remedy_of_a_group_that_was_moved_back_has_no_count_that_is_too_high(stream: ClaimedStream) -> None:
    stream.add_entries(10)
    stream.claim()
    stream.move(9, "ENTRIESREAD", 1000)
    with pytest.raises(SourceRecreatedError) as error:
        stream.check(NO_SPARK)
    assert "ENTRIESREAD" not in error.value.remedy


def test_an_entry_that_is_delivered_during_the_look_does_not_make_the_count_appear_too_high(
    stream: ClaimedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stream.source.claims(stream.group) as claims:
        facts_of = claims.server.facts_of

        def looked(shards: Iterable[Shard]) -> Mapping[Shard, StreamFacts | None]:
            found = facts_of(shards)
            stream.add_entries(1)
            stream.read_as("worker-1", 1)
            return found

        monkeypatch.setattr(claims.server, "facts_of", looked)
        claims.count_reads(frozenset((stream.shard,)))
    assert stream.read() == 11


@pytest.mark.slow
@pytest.mark.parametrize("read", [None, 1000], ids=["forgotten", "too high"])
def test_a_range_that_may_be_lost_is_recorded_once(
    spark: SparkSession, redis_address: str, folder: Path, read: int | None
) -> None:
    stream = Stream(redis_address, folder, shards=1, mode="load_balanced")
    stream.add(10)
    stream.drain(spark)
    last = stream.entry_ids()[9]
    stream.add(10, first=10)
    stream.client.xtrim(stream.keys[0], maxlen=2, approximate=False)
    stream.client.xgroup_setid(stream.keys[0], stream.group, last, entries_read=read)
    wanted = stream.ingestion(errors=ErrorPolicy(on_data_loss="record"))
    reports = stream.drain(spark, wanted)
    (part,) = [part for report in reports for parts in report.entry.lost.values() for part in parts]
    assert (part.start, part.end) == (to_sequence(last) + 1, to_sequence(stream.entry_ids()[0]))
    assert len(stream.rows()) == 12
    assert stream.drain(spark, wanted) == []
    stream.client.close()
