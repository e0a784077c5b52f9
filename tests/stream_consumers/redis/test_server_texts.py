"""Names, ids, counts and times from a server have any length and any bytes; other clients choose some of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stream_consumers.create import StreamSource
from stream_consumers.errors import DataLossError, FormatError, InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.options import MAX_MEMBER_BYTES, AutoStreamReset, check_member
from stream_consumers.redis.claims import ClaimedEntries, ClaimName, RedisClaims
from stream_consumers.redis.entries import check_entry_id, id_order, parse_sequence, to_sequence
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.urls import StreamUrl
from tests.support.redis_streams import Place

GROUP, BID = "billing", "0" * 32
DIGITS = "9" * 5000
OTHERS = [
    b"worker-1",
    b"x/1000000",
    f"x/{DIGITS}/{BID}".encode(),
    f"x/{2**63}/{BID}".encode(),
    f"x/0/{BID}".encode(),
    f"x/01/{BID}".encode(),
    f"x/\u0661/{BID}".encode(),
    f"x/1/{'A' * 32}".encode(),
    f"x/1/{BID}\n".encode(),
    f"a/x/1/{BID}".encode(),
    f" /1/{BID}".encode(),
    f"/1/{BID}".encode(),
    f"x\0/1/{BID}".encode(),
    f"{'x' * (MAX_MEMBER_BYTES + 1)}/1/{BID}".encode(),
    b"x\xff/1/" + BID.encode(),
    b"x\xed\xa0\x80/1/" + BID.encode(),
]


def claims_of(place: Place) -> RedisClaims:
    return StreamSource(StreamUrl.parse(place.url), mode="load_balanced").claims(GROUP)


@pytest.mark.parametrize("raw", OTHERS, ids=range(len(OTHERS)))
def test_a_name_that_no_member_can_have_is_one_of_another_client(raw: bytes) -> None:
    assert ClaimName.parse(raw) is None


@pytest.mark.parametrize("member", ["main", "ä\n", "\ufffd", "${env:HOME}", "x" * MAX_MEMBER_BYTES])
def test_every_name_of_a_member_is_read_as_it_was_written(member: str) -> None:
    name = ClaimName(check_member(member), 2**63 - 1, BID)
    assert ClaimName.parse(str(name).encode()) == name


@pytest.mark.parametrize("parse", [to_sequence, id_order, check_entry_id])
@pytest.mark.parametrize("text", [f"{DIGITS}-0", f"0-{DIGITS}", "1-2-3", "\u0661-0", "-", ""], ids=range(6))
def test_what_is_no_entry_id_is_an_error(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises((FormatError, InvalidOptionError)):
        parse(text)
    assert parse_sequence(text) is parse_sequence(DIGITS) is None


def test_another_client_with_a_similar_name_moves_the_group_as_it_likes(place: Place) -> None:
    """It reads between two steps of a member, which must not find that entries were skipped."""
    place.send(range(4))
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        held = ClaimedEntries(ClaimName("main", 1, BID), records=10, room=10_000)
        for raw in (f"x/{DIGITS}/{BID}", "x/1/ABC"):
            claims.positions()
            place.client.xack(place.stream, GROUP, *place.leave_behind(GROUP, raw, 1))
            claims.claim_new(held, Shard(place.stream), 1)
            place.client.xgroup_delconsumer(place.stream, GROUP, raw)
        assert held.count == 2


def test_large_counts_are_compared_as_numbers(place: Place) -> None:
    place.send(range(3))
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        shard, last = Shard(place.stream), place.client.xinfo_stream(place.stream)["last-generated-id"]
        place.client.execute_command("XSETID", place.stream, last, "ENTRIESADDED", 2 * 10**14)
        place.client.xgroup_setid(place.stream, GROUP, "0", entries_read=10**14)
        lost = claims.trimmed()[shard]
        assert lost.entries == 10**14 - 3
        claims.account_for(shard, lost)
        assert claims.trimmed() == {}


@pytest.mark.parametrize(("added", "is_counted"), [(2**53, True), (2**53 + 2048, False), (2**63 - 1, False)])
def test_entries_are_claimed_under_large_counts(place: Place, added: int, is_counted: bool) -> None:
    """Redis itself stops counting because of a deleted entry; a script can count exactly up to 2**53."""
    place.send(range(700))
    info = place.client.xinfo_stream(place.stream)
    place.client.xdel(place.stream, place.client.xrevrange(place.stream, count=2)[1][0])
    place.client.execute_command("XSETID", place.stream, info["last-generated-id"], "ENTRIESADDED", added)
    place.client.xgroup_create(place.stream, GROUP, info["first-entry"][0], entries_read=added - 699)
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        held = ClaimedEntries(ClaimName("main", 1, BID), records=600, room=1 << 20)
        claims.claim_new(held, Shard(place.stream), 600)
        assert held.count == place.client.xpending(place.stream, GROUP)["pending"] == 600
        facts = claims.group.facts(Shard(place.stream))
        assert facts is not None
        assert facts.read == (added - 99 if is_counted else None)


@pytest.mark.parametrize("added", [2**53 + 1, 2**62 + 1, 2**63 - 10])
def test_a_group_goes_on_after_a_large_count_was_accounted_for(place: Place, added: int) -> None:
    place.send(range(3))
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        shard, last = Shard(place.stream), place.client.xinfo_stream(place.stream)["last-generated-id"]
        place.client.execute_command("XSETID", place.stream, last, "ENTRIESADDED", added)
        claims.account_for(shard, claims.trimmed()[shard])
        place.send(range(3, 8))
        assert claims.has_grown()
        claims.count_reads([shard])
        assert claims.trimmed([shard]) == {}
        held = ClaimedEntries(ClaimName("main", 1, BID), records=6, room=1 << 20)
        claims.positions()
        claims.claim_new(held, shard, 6)
        assert held.count == 6
        facts = claims.group.facts(shard)
        assert facts is not None
        assert facts.read == added + 3
        assert claims.trimmed([shard]) == {}
        place.client.xtrim(place.stream, maxlen=0, approximate=False)
        assert claims.trimmed([shard])[shard].entries == 2


@pytest.mark.parametrize("start", list(AutoStreamReset))
def test_a_new_group_has_a_large_count(place: Place, start: AutoStreamReset) -> None:
    place.send(range(3))
    added, shard = 2**62 + 1, Shard(place.stream)
    last = place.client.xinfo_stream(place.stream)["last-generated-id"]
    place.client.execute_command("XSETID", place.stream, last, "ENTRIESADDED", added)
    with claims_of(place) as claims:
        claims.prepare(start)
        claims.count_reads()
        facts = claims.group.facts(shard)
        assert facts is not None
        assert facts.read == (added if start is AutoStreamReset.LATEST else added - 3)
        assert claims.trimmed() == {}


def test_an_entry_with_a_large_number_of_deliveries_is_released(place: Place) -> None:
    place.send(range(2))
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        shard, name = Shard(place.stream), ClaimName("main", 1, BID)
        (entry_id,) = place.leave_behind(GROUP, str(name), 1)
        words = ["XCLAIM", place.stream, GROUP, str(name), 0, entry_id, "RETRYCOUNT", 2**62]
        place.client.execute_command(*words)
        claims.release(shard, name)
        assert claims.is_released(shard, name)


def test_the_entries_of_the_consumer_with_an_empty_name_are_its_own(place: Place) -> None:
    place.send(range(4))
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        shard = Shard(place.stream)
        others, own = place.leave_behind(GROUP, "me", 1), place.leave_behind(GROUP, "", 2)
        found = {name: claims.pending(shard, name, idle=False) for name in claims.holders()[shard]}
        ids = {name: [entry.id for page in pages for entry in page] for name, pages in found.items()}
        assert ids == {b"": list(own), b"me": list(others)}
        assert not any(claims.group.pending(shard, consumer=b"", idle_ms=60_000))


@pytest.mark.parametrize("stored", [DIGITS, "x", "-1", str(10**15 - 1)], ids=["digits", "text", "negative", "future"])
def test_a_stored_time_of_first_delivery_may_be_anything(place: Place, stored: str) -> None:
    with RedisBackend(place.url) as backend:
        entry_id = place.add("1-0", "msg", "{}").decode()
        backend.create_group(place.stream, GROUP, "0")
        place.leave_behind(GROUP, "me", 1)
        place.client.hset(f"{{{place.stream}}}:first-received:{GROUP}", entry_id, stored)
        entry = backend.redeliver(place.stream, GROUP, "me", entry_id)
        assert entry is not None
        assert entry.delivery.first_received == entry.delivery.last_received


@pytest.mark.parametrize("moved_to", ["5-70000", "18446744073709551615-18446744073709551615"])
def test_members_of_a_group_at_an_id_without_a_sequence_stop_with_the_command_that_moves_it_back(
    place: Place, moved_to: str
) -> None:
    place.send(range(4))
    shard = Shard(place.stream)
    with claims_of(place) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        held = ClaimedEntries(ClaimName("main", 1, BID), records=2, room=10_000)
        claims.claim_new(held, shard, 2)
        written = to_sequence(held.ids[shard][-1]) + 1
        place.client.xgroup_setid(place.stream, GROUP, moved_to)
        claims.backlog()
        assert claims.pending_ends([shard]) == {shard: written}
        with pytest.raises(DataLossError) as error:
            claims.check({shard: written})
        command = f"XGROUP SETID {place.stream} {GROUP} {held.ids[shard][-1].decode()}"
        assert moved_to in error.value.what
        assert command in error.value.remedy
        place.client.execute_command(*command.split())
        claims.check({shard: written})
        odd = place.add("1800000000000-70000")
        place.leave_behind(GROUP, "other", 10)
        place.client.xdel(place.stream, odd)
        assert claims.pending_ends([shard]) == {shard: to_sequence("1800000000001-0")}
