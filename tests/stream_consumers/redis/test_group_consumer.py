"""Members of Redis groups, message by message: what is committed when, and the traps of consumer groups."""

from __future__ import annotations

import functools
import json
import threading
import time
from typing import Any

import pytest
import redis

from stream_consumers.consumer import Edge
from stream_consumers.create import create_consumer
from stream_consumers.errors import (
    BrokerUnavailableError,
    GroupRemovedError,
    InvalidOptionError,
    NotSubscribedError,
    OutOfBoundsError,
    StreamEndedError,
)
from stream_consumers.messages import DeadLetter, Message, Shard, from_milliseconds
from stream_consumers.options import AutoCommit, AutoStreamReset, ConsumerMode, RedisGroupOptions
from stream_consumers.redis.entries import to_id, to_sequence
from stream_consumers.redis.group import CLAIM_MODE_SENTINEL
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.testing.consumer_contract import median_seconds, wait_in_threads
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.redis_streams import Place, numbers, take, take_until_silent, unique_name

RESUMABLE, SHARED = ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED
SHORT = 0.02
LONG = 60.0
# A member that is touched all the time is never idle for as long as this, on a machine under load neither.
BUSY = 3.0
PATIENCE = 100.0
GROUP = "g"
EVERY_COMMIT = list(AutoCommit)


def member(place: Place, mode: ConsumerMode = RESUMABLE, **rest: Any) -> RedisGroupConsumer:
    """A member of the group, by the name of "me" where it matters; disabled is the default here."""
    options = {name: rest.pop(name) for name in ("reset", "live", "on_dead_letter", "client") if name in rest}
    settings = RedisGroupOptions(**{"auto_commit": AutoCommit.DISABLED, "consumer": "me", **rest})
    return RedisGroupConsumer(StreamUrl.parse(place.url), mode=mode, group=GROUP, options=settings, **options)


def claiming(place: Place, idle: float = 0.15, **rest: Any) -> RedisGroupConsumer:
    """A member that looks for entries to take over all the time."""
    return member(place, SHARED, auto_claim_interval_seconds=SHORT / 4, auto_claim_idle_seconds=idle, **rest)


def is_silent(consumer: RedisGroupConsumer) -> bool:
    return consumer.next(0) is None


def ids(messages: list[Message]) -> list[str]:
    return [to_id(message.sequence) for message in messages]


# the auto-commit table


def test_immediate_leaves_nothing_pending(place: Place) -> None:
    place.send(range(5))
    with member(place, auto_commit=AutoCommit.IMMEDIATE) as consumer:
        (first,) = take(consumer, 1)
        assert place.pending(GROUP) == {}
        consumer.ack(first)
        assert consumer.commit() == 0
        # At most once: what was read and not handed out is gone for this group.
    with member(place, auto_commit=AutoCommit.IMMEDIATE) as consumer:
        assert is_silent(consumer)


def test_delayed_allows_neither_ack_nor_commit(place: Place) -> None:
    place.send(range(1))
    with member(place, auto_commit=AutoCommit.DELAYED) as consumer:
        (message,) = take(consumer, 1)
        with pytest.raises(InvalidOptionError):
            consumer.ack(message)
        with pytest.raises(InvalidOptionError):
            consumer.commit()


def test_delayed_commits_after_the_delay_also_while_next_waits(place: Place) -> None:
    place.send(range(5))
    options = {"auto_commit_delay_seconds": 0.2, "auto_commit_interval_seconds": SHORT}
    with member(place, auto_commit=AutoCommit.DELAYED, **options) as consumer:
        begin = time.monotonic()
        take(consumer, 4)
        waiting = threading.Thread(target=lambda: [consumer.next(0.001) for _ in range(3)] + [consumer.next(PATIENCE)])
        waiting.start()
        # The fifth comes at once, and after it one next waits, in which everything is committed.
        until(lambda: place.pending(GROUP) == {}, what="the commit")
        assert time.monotonic() - begin >= 0.2
        assert waiting.is_alive()
        place.send(range(5, 6))
        waiting.join(PATIENCE)


def test_delayed_keeps_what_is_younger_than_the_delay_also_at_close(place: Place) -> None:
    place.send(range(5))
    options = {"auto_commit_delay_seconds": LONG, "auto_commit_interval_seconds": 0.0}
    with member(place, auto_commit=AutoCommit.DELAYED, **options) as consumer:
        take(consumer, 5)
        assert is_silent(consumer)
        assert len(place.pending(GROUP)) == 5
    assert len(place.pending(GROUP)) == 5


def test_delayed_commits_at_close_what_was_handed_out_and_is_old_enough(place: Place) -> None:
    place.send(range(5))
    options = {"auto_commit_delay_seconds": 0.0, "auto_commit_interval_seconds": LONG}
    with member(place, auto_commit=AutoCommit.DELAYED, **options) as consumer:
        # The page has all five, but two of them are never handed out.
        take(consumer, 3)
        assert len(place.pending(GROUP)) == 5
    assert len(place.pending(GROUP)) == 2


def test_rolling_commits_what_was_acknowledged_when_the_interval_is_over(place: Place) -> None:
    place.send(range(5))
    options = {"auto_commit_interval_seconds": 0.3, "auto_commit_delay_seconds": 0.0}
    with member(place, auto_commit=AutoCommit.ROLLING, **options) as consumer:
        found = take(consumer, 5)
        with pytest.raises(InvalidOptionError):
            consumer.commit()

        def is_committed(left: int) -> bool:
            consumer.next(0)
            return list(place.pending(GROUP)) == ids(found[-left:])

        begin = time.monotonic()
        for left in (3, 1):
            for message in found[:-left]:
                consumer.ack(message)
            until(functools.partial(is_committed, left), what="the commit")
        # The first one was not before the interval was over, nor was the second one right after it.
        assert time.monotonic() - begin >= 0.5


def test_rolling_commits_at_close(place: Place) -> None:
    place.send(range(5))
    with member(place, auto_commit=AutoCommit.ROLLING, auto_commit_interval_seconds=LONG) as consumer:
        found = take(consumer, 5)
        for message in found[:4]:
            consumer.ack(message)
        assert is_silent(consumer)
        assert len(place.pending(GROUP)) == 5
    assert list(place.pending(GROUP)) == ids(found[4:])


def test_disabled_commits_when_told_and_only_then(place: Place) -> None:
    place.send(range(5))
    with member(place, auto_commit_interval_seconds=0.0) as consumer:
        found = take(consumer, 5)
        consumer.ack(found[0])
        consumer.ack((found[1].shard, found[1].sequence))
        assert is_silent(consumer)
        assert len(place.pending(GROUP)) == 5
        assert consumer.commit() == 2
        assert list(place.pending(GROUP)) == ids(found[2:])
        assert consumer.commit() == 0
        consumer.ack(found[2])
    assert list(place.pending(GROUP)) == ids(found[2:])


def test_r7_acknowledging_what_somebody_else_did_is_no_error(place: Place) -> None:
    place.send(range(5))
    with member(place) as consumer:
        found = take(consumer, 5)
        place.client.xack(place.stream, GROUP, *ids(found[:2]))
        for message in found:
            consumer.ack(message)
            consumer.ack(message)
        assert consumer.commit() == 3
        for message in found:
            consumer.ack(message)
        assert consumer.commit() == 0


def test_only_own_streams_can_be_acknowledged(place: Place) -> None:
    place.send(range(1))
    with member(place) as consumer:
        take(consumer, 1)
        for shard in (Shard("other"), Shard(place.stream, 7)):
            with pytest.raises(NotSubscribedError):
                consumer.ack((shard, 1))


# what is read, and in which order


def test_own_pending_entries_come_first_page_by_page(place: Place) -> None:
    place.send(range(10))
    place.leave_behind(GROUP, "me", 3)
    place.leave_behind(GROUP, "somebody else", 2)
    place.leave_behind(GROUP, "me", 2)
    with member(place, batch_size=2, live=False) as consumer:
        assert numbers(list(consumer)) == [0, 1, 2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("auto_commit", [AutoCommit.DISABLED, AutoCommit.IMMEDIATE])
def test_r2_pending_entries_that_were_trimmed_are_told_and_acknowledged(place: Place, auto_commit: AutoCommit) -> None:
    letters: list[DeadLetter] = []
    place.send(range(8))
    pending = place.leave_behind(GROUP, "me", 6)
    # With pages of two, the first page has nothing but what is gone.
    gone = [pending[0], pending[1], pending[4]]
    place.client.xdel(place.stream, *gone)
    with member(place, batch_size=2, on_dead_letter=letters.append, auto_commit=auto_commit) as consumer:
        assert numbers(take(consumer, 5)) == [2, 3, 5, 6, 7]
        assert is_silent(consumer)
        assert [letter.sequence for letter in letters] == [to_sequence(entry_id) for entry_id in gone]
        assert all("trimmed or deleted" in letter.error for letter in letters)
        assert not {entry_id.decode() for entry_id in gone} & set(place.pending(GROUP))


def test_a_slow_read_does_not_hide_what_it_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisGroupConsumer, "poll_seconds", 0.0)
    place.send(range(2))
    with member(place) as consumer:
        assert take_until_silent(consumer) == [0, 1]


def test_a_replay_ends_when_everything_was_given_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisGroupConsumer, "poll_seconds", 5.0)
    place.send(range(30))
    begin = time.monotonic()
    with member(place, batch_size=7, live=False) as consumer:
        assert numbers(list(consumer)) == list(range(30))
        # It waits for nothing.
        assert time.monotonic() - begin < 3
        for _ in range(2):
            with pytest.raises(StreamEndedError):
                consumer.next()
        place.send(range(30, 32))
        assert numbers(list(consumer)) == [30, 31]


@pytest.mark.parametrize("auto_commit", EVERY_COMMIT)
def test_entries_that_are_no_messages_do_not_stop_the_consumer(place: Place, auto_commit: AutoCommit) -> None:
    letters: list[DeadLetter] = []
    # More than a page: SeaStreamer reads the same page for ever.
    for number in range(25):
        place.add(f"{number + 1}-0", "other", "field")
    place.add("100-0", "msg", "one", "msg", "two")
    # An id that has no sequence.
    place.add("101-70000", "msg", "far")
    place.add("102-0", "msg", "7")
    with member(place, batch_size=5, auto_commit=auto_commit, on_dead_letter=letters.append) as consumer:
        # Not even a next that does not wait stops at a page of them.
        message = consumer.next(0)
        assert message is not None
        assert message.payload == b"7"
        assert len(letters) == 27
        assert "no field 'msg'" in letters[0].error
        assert "occurs 2 times" in letters[25].error
        assert json.loads(letters[25].payload) == [["msg", "one"], ["msg", "two"]]
        assert (letters[26].sequence, "70000" in letters[26].error) == (None, True)
        assert json.loads(letters[26].payload) == [["msg", "far"]]
        assert is_silent(consumer)
        # The message itself was not committed, the rest was.
        assert list(place.pending(GROUP)) == ([] if auto_commit is AutoCommit.IMMEDIATE else ["102-0"])


def test_dead_letters_at_the_end_are_acknowledged_at_close(place: Place) -> None:
    place.add("1-0", "other", "field")
    with member(place, live=False, on_dead_letter=lambda letter: None) as consumer:
        assert list(consumer) == []
    assert place.pending(GROUP) == {}


def test_an_observer_that_raises_leaves_the_entry_pending(place: Place) -> None:
    place.add("1-0", "other", "field")
    place.add("2-0", "msg", "7")

    def refuse(letter: DeadLetter) -> None:
        raise RuntimeError("no room for dead letters")

    with member(place, on_dead_letter=refuse) as consumer:
        with pytest.raises(RuntimeError, match="no room"):
            consumer.next(0)
        assert numbers(take(consumer, 1)) == [7]
    letters: list[DeadLetter] = []
    with member(place, on_dead_letter=letters.append) as consumer:
        assert numbers(take(consumer, 1)) == [7]
    assert len(letters) == 1


def test_r17_duplicate_and_binary_fields_keep_order_and_bytes(place: Place) -> None:
    place.add("1-0", b"b", b"1", b"a", b"\xff\x00", b"msg", b"\x80\xfe", b"b", b"2", b"\xe9", b"3")
    with member(place) as consumer:
        (message,) = take(consumer, 1)
        assert message.payload == b"\x80\xfe"
        assert message.headers == (("b", b"1"), ("a", b"\xff\x00"), ("b", b"2"), ("\\xe9", b"3"))
        # The same when it comes from the pending entries, and when it is claimed.
    with member(place) as consumer:
        assert take(consumer, 1) == [message]
    with claiming(place, consumer="other") as consumer:
        assert take(consumer, 1) == [message]


def test_the_message_field_can_be_chosen(place: Place) -> None:
    place.add("1-0", "body", "7", "msg", "a header")
    with member(place, client={"message_field": "body"}) as consumer:
        (message,) = take(consumer, 1)
        assert (message.payload, message.headers) == (b"7", (("msg", b"a header"),))


def test_r18_two_live_members_of_one_name_lose_nothing(place: Place) -> None:
    place.send(range(20))
    with member(place, batch_size=1) as one:
        first = take(one, 5)
        with member(place, batch_size=1) as other:
            # The name's pending entries are both's, and of the new ones each gets its own.
            again = take(other, 5)
            assert numbers(again) == numbers(first) == list(range(5))
            rest = take(other, 1) + take(one, 7) + take(other, 7)
            assert sorted(numbers(rest)) == list(range(5, 20))
            for consumer, messages in ((one, first + rest[1:8]), (other, again + rest[:1] + rest[8:])):
                for message in messages:
                    consumer.ack(message)
            assert one.commit() == 12
            assert other.commit() == 8
    assert place.pending(GROUP) == {}


# waiting


def test_r15_a_blocking_read_does_not_delay_a_commit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisGroupConsumer, "poll_seconds", 3.0)
    place.send(range(5))
    with member(place) as consumer:
        for message in take(consumer, 5):
            consumer.ack(message)
        waiting = threading.Thread(target=lambda: consumer.next(3.0))
        waiting.start()
        until(lambda: place.client.info("clients")["blocked_clients"], what="a blocked read")
        begin = time.monotonic()
        assert consumer.commit() == 5
        assert time.monotonic() - begin < 1
        assert waiting.is_alive()
        place.send(range(5, 6))
        waiting.join(PATIENCE)


@pytest.mark.parametrize("mode", [RESUMABLE, SHARED])
def test_0_never_waits_beside_threads_that_wait(place: Place, mode: ConsumerMode) -> None:
    receipts = place.send(range(3))
    with member(place, mode) as consumer:
        take(consumer, 3)
        threads, found = wait_in_threads(consumer, 3)
        assert median_seconds(lambda: consumer.next(0)) < 0.05
        assert all(thread.is_alive() for thread in threads)
        # It leaves the group, and the threads go on where it leads.
        consumer.rewind(receipts[0].sequence)
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(numbers(found)) == [0, 1, 2]


def test_r16_no_timeout_waits_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis takes BLOCK 0 for "for ever"."""
    sent: list[tuple[Any, ...]] = []
    with member(place) as consumer:
        reading: Any = consumer._group._reading
        execute = reading.execute_command

        def note(*words: Any, **rest: Any) -> Any:
            sent.append(words)
            return execute(*words, **rest)

        monkeypatch.setattr(reading, "execute_command", note)
        for timeout in (0, 1e-9, 0.0004, 0.001):
            assert consumer.next(timeout) is None
    assert sent
    assert all(words[words.index("BLOCK") + 1] >= 1 for words in sent if "BLOCK" in words)


def test_a_waiting_next_gets_what_is_sent_and_ends_at_close(place: Place) -> None:
    found: list[Message] = []
    ended = threading.Event()
    with member(place) as consumer:

        def wait() -> None:
            found.extend(consumer)
            ended.set()

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        place.send(range(300))
        until(lambda: len(found) == 300, seconds=PATIENCE, what="300 messages")
        assert sorted(numbers(found)) == list(range(300))
        assert not ended.is_set()
        consumer.close()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
    for call in (lambda: consumer.next(0), lambda: consumer.ack(found[0]), consumer.commit):
        with pytest.raises(StreamEndedError):
            call()


# taking over


def test_entries_of_a_member_that_is_gone_are_taken_over_only_when_idle(place: Place) -> None:
    place.send(range(3))
    left = place.leave_behind(GROUP, "gone", 3)
    with claiming(place, idle=0.3) as consumer:
        begin = time.monotonic()
        assert numbers(take(consumer, 3)) == [0, 1, 2]
        assert time.monotonic() - begin >= 0.2
        # Ownership moves: SeaStreamer leaves it with who is gone, and claims again.
        assert set(place.pending(GROUP).values()) == {"me"}
        assert set(place.deliveries(GROUP).values()) == {2}
        assert [entry_id.decode() for entry_id in left] == list(place.pending(GROUP))


def test_a_busy_member_keeps_its_entries(place: Place) -> None:
    place.send(range(4))
    left = place.leave_behind(GROUP, "gone", 2)
    busy = place.leave_behind(GROUP, "busy", 2)
    found: list[Message] = []
    with claiming(place, idle=BUSY) as consumer:

        def is_taken() -> bool:
            place.touch(GROUP, "busy", busy)
            message = consumer.next(0)
            found.extend([message] if message else [])
            return len(found) == 2

        until(is_taken, seconds=PATIENCE, what="what was left behind")
        assert numbers(found) == [0, 1]
        assert place.pending(GROUP) == {
            **{entry_id.decode(): "me" for entry_id in left},
            **{entry_id.decode(): "busy" for entry_id in busy},
        }


def test_entries_that_are_old_are_not_taken_while_their_member_is_there(place: Place) -> None:
    place.send(range(2))
    busy = place.leave_behind(GROUP, "busy", 1)
    with claiming(place, idle=LONG) as consumer:
        take(consumer, 1)
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:
            # Nobody has touched the entry for a day, but its owner is there.
            place.touch(GROUP, "busy", busy, idle_ms=86_400_000)
            assert is_silent(consumer)
        assert place.pending(GROUP)[busy[0].decode()] == "busy"


def test_without_an_interval_and_in_mode_resumable_nothing_is_taken_over(place: Place) -> None:
    place.send(range(1))
    place.leave_behind(GROUP, "gone", 1)
    idle = {"auto_claim_idle_seconds": 0.001}
    with (
        member(place, SHARED, auto_claim_interval_seconds=None, **idle) as one,
        member(place, RESUMABLE, auto_claim_interval_seconds=0.001, consumer="other", **idle) as other,
    ):
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            assert is_silent(one)
            assert is_silent(other)


@pytest.mark.slow
def test_r3_an_empty_page_is_not_the_end_of_what_was_left_behind(place: Place) -> None:
    place.send(range(60))
    busy = place.leave_behind(GROUP, "busy", 50)
    left = place.leave_behind(GROUP, "gone", 10)
    found: list[Message] = []
    with claiming(place, idle=BUSY, batch_size=1) as consumer:
        # Redis looks at ten entries a page, so that the first five pages have none that is idle.
        def is_taken() -> bool:
            place.touch(GROUP, "busy", busy)
            message = consumer.next(0)
            found.extend([message] if message else [])
            return len(found) == 10

        until(is_taken, seconds=PATIENCE, what="what was left behind")
    assert ids(found) == [entry_id.decode() for entry_id in left]


def test_no_more_is_taken_over_than_can_be_handed_out(place: Place) -> None:
    place.send(range(20))
    place.leave_behind(GROUP, "gone", 20)
    with claiming(place, batch_size=3) as consumer:
        take(consumer, 1)
        assert list(place.pending(GROUP).values()).count("me") == 3
        assert len(take(consumer, 19)) == 19


def test_what_is_in_hand_is_not_handed_out_again_by_a_sweep(place: Place) -> None:
    place.send(range(4))
    left = place.leave_behind(GROUP, "gone", 1)
    with claiming(place, idle=0.1) as consumer:
        mine = take(consumer, 3)
        assert numbers(take(consumer, 1)) == [0]
        # A member that is gone for ever, so that there is always something to look for.
        place.touch(GROUP, "gone", left)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert is_silent(consumer)
        assert set(place.deliveries(GROUP)[entry_id] for entry_id in ids(mine)) == {1}


def test_nothing_is_taken_over_in_a_group_that_ingests(place: Place) -> None:
    """Its members tell by the name that holds an entry whether it is in the table."""
    place.send(range(4))
    place.client.xgroup_create(place.stream, GROUP, "0")
    place.client.xgroup_createconsumer(place.stream, GROUP, CLAIM_MODE_SENTINEL)
    place.client.xreadgroup(GROUP, f"main/1/{'a' * 32}", {place.stream: ">"}, count=2)
    with claiming(place, idle=0.01) as consumer:
        assert numbers(take(consumer, 2)) == [2, 3]
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            assert consumer.next(0.05) is None


@pytest.mark.parametrize("auto_commit", [AutoCommit.DISABLED, AutoCommit.IMMEDIATE])
def test_entries_that_were_deleted_before_they_were_taken_over_are_told(place: Place, auto_commit: AutoCommit) -> None:
    letters: list[DeadLetter] = []
    place.send(range(3))
    left = place.leave_behind(GROUP, "gone", 3)
    place.client.xdel(place.stream, left[1])
    with claiming(place, on_dead_letter=letters.append, auto_commit=auto_commit) as consumer:
        assert numbers(take(consumer, 2)) == [0, 2]
        pending = 2 if auto_commit is AutoCommit.DISABLED else 0
        until(lambda: (consumer.next(0), letters and len(place.pending(GROUP)) == pending)[1], what="the dead letter")
        assert [letter.sequence for letter in letters] == [to_sequence(left[1])]


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_was_delivered_too_often_becomes_a_dead_letter(place: Place, is_taken_over: bool) -> None:
    letters: list[DeadLetter] = []
    place.send(range(3))
    found = []
    for attempt in range(4):
        name = f"member-{attempt}" if is_taken_over else "me"
        make = claiming if is_taken_over else member
        with make(place, consumer=name, max_deliveries=2, on_dead_letter=letters.append) as consumer:
            if attempt < 2:
                messages = take(consumer, 3)
                found += numbers(messages)
                # Only the second one is never done.
                if attempt == 0:
                    for message in messages[::2]:
                        place.client.xack(place.stream, GROUP, to_id(message.sequence))
                    place.send(range(10 * attempt + 10, 10 * attempt + 12))
            elif attempt == 2:
                until(lambda: (consumer.next(0), letters)[1], what="the dead letter")
            else:
                assert is_silent(consumer)
    assert found[:3] == [0, 1, 2]
    assert 1 in found[3:]
    assert [(letter.payload, letter.sequence is None) for letter in letters if letter.payload == b"1"] == [
        (b"1", False)
    ]
    assert "delivered 3 times" in letters[0].error
    assert to_id(letters[0].sequence or 0) not in place.pending(GROUP)


# groups and servers that go away


@pytest.mark.parametrize("remove", ["group", "stream"])
def test_r8_a_group_that_was_removed_is_told_when_reading(place: Place, remove: str) -> None:
    place.send(range(3))
    with member(place) as consumer:
        take(consumer, 3)
        if remove == "group":
            place.client.xgroup_destroy(place.stream, GROUP)
        else:
            place.client.delete(place.stream)
        for _ in range(2):
            with pytest.raises(GroupRemovedError) as raised:
                consumer.next(0)
            assert raised.value.facts["received_before"] == 3
            assert raised.value.facts["streams_there"] == int(remove == "group")
        # It is not made again behind anybody's back.
        assert not place.client.exists(place.stream) or place.client.xinfo_groups(place.stream) == []


@pytest.mark.parametrize("remove", ["group", "stream"])
def test_r8_a_group_that_was_removed_is_told_when_committing(place: Place, remove: str) -> None:
    place.send(range(3))
    consumer = member(place)
    for message in take(consumer, 3):
        consumer.ack(message)
    if remove == "group":
        place.client.xgroup_destroy(place.stream, GROUP)
    else:
        place.client.delete(place.stream)
    with pytest.raises(GroupRemovedError):
        consumer.commit()
    consumer.close()


def test_r8_a_group_that_was_removed_wakes_a_waiting_next(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisGroupConsumer, "poll_seconds", 5.0)
    raised: list[Exception] = []
    with member(place) as consumer:
        assert is_silent(consumer)

        def wait() -> None:
            try:
                consumer.next(5.0)
            except GroupRemovedError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: place.client.info("clients")["blocked_clients"], what="a blocked read")
        place.client.xgroup_destroy(place.stream, GROUP)
        waiting.join(3.0)
        assert not waiting.is_alive()
    assert len(raised) == 1


def test_a_group_that_is_made_again_by_hand_is_read_on(place: Place) -> None:
    place.send(range(3))
    with member(place) as consumer:
        take(consumer, 3)
        place.client.xgroup_destroy(place.stream, GROUP)
        with pytest.raises(GroupRemovedError):
            consumer.next(0)
        place.client.xgroup_create(place.stream, GROUP, "$")
        place.send(range(3, 5))
        assert numbers(take(consumer, 2)) == [3, 4]


def test_a_connection_that_breaks_is_told_and_the_consumer_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisGroupConsumer, "poll_seconds", 5.0)
    place.send(range(3))
    raised: list[Exception] = []
    with member(place) as consumer:
        take(consumer, 3)

        def wait() -> None:
            try:
                consumer.next(5.0)
            except BrokerUnavailableError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: place.client.info("clients")["blocked_clients"], what="a blocked read")
        place.client.execute_command("CLIENT KILL TYPE normal SKIPME yes")
        waiting.join(PATIENCE)
        assert len(raised) == 1
        place.send(range(3, 6))
        # What is in hand is not handed out again, although it is pending still.
        assert numbers(take(consumer, 3)) == [3, 4, 5]
        assert is_silent(consumer)


@pytest.mark.parametrize("lost", ["XREADGROUP", "EVALSHA"])
def test_what_was_given_in_an_answer_that_got_lost_comes_once(
    place: Place, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.send(range(6))
    if lost != "XREADGROUP":
        place.leave_behind(GROUP, "gone", 4)
    with claiming(place, batch_size=2) as consumer:
        found = take(consumer, 2)
        client: Any = consumer._group._reading if lost == "XREADGROUP" else consumer._group.server.connection
        execute = client.execute_command
        left = [1]

        def lose(*words: Any, **rest: Any) -> Any:
            answer = execute(*words, **rest)
            if words[0] == lost and left:
                left.clear()
                raise redis.ConnectionError("the answer got lost")
            return answer

        monkeypatch.setattr(client, "execute_command", lose)
        with pytest.raises(BrokerUnavailableError):
            until(lambda: consumer.next(0))
        found += take(consumer, 4)
        assert sorted(numbers(found)) == list(range(6))
        assert take_until_silent(consumer) == []


def test_a_commit_that_fails_is_told_and_repeated(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.send(range(3))
    name = unique_name("client")
    consumer = member(
        place, auto_commit=AutoCommit.ROLLING, auto_commit_interval_seconds=SHORT, client={"client_name": name}
    )

    def connections() -> int:
        return sum(found["name"] == name for found in place.client.client_list())

    for message in take(consumer, 3):
        consumer.ack(message)

    def fail(**_: Any) -> int:
        raise redis.ConnectionError("no way")

    with monkeypatch.context() as patch:
        patch.setattr(consumer._group.server.connection, "pipeline", fail)
        with pytest.raises(BrokerUnavailableError):
            until(lambda: consumer.next(0))
        assert len(place.pending(GROUP)) == 3
    until(lambda: (consumer.next(0), place.pending(GROUP) == {})[1], what="the commit")
    place.send(range(3, 4))
    consumer.ack(take(consumer, 1)[0])
    with monkeypatch.context() as patch:
        patch.setattr(consumer._group.server.connection, "pipeline", fail)
        assert connections() > 0
        with pytest.raises(BrokerUnavailableError):
            consumer.close()
    # It is closed nevertheless, with what it had open.
    until(lambda: connections() == 0, what="the connections being closed")
    with pytest.raises(StreamEndedError):
        consumer.next(0)


# leaving the group


def test_a_rewind_leaves_the_group_where_it_is(place: Place) -> None:
    receipts = place.send(range(10))
    with member(place, batch_size=4) as consumer:
        found = take(consumer, 2)
        consumer.rewind(Edge.BEGINNING)
        again = take(consumer, 10)
        assert numbers(again) == list(range(10))
        # The page that was read for the group stays pending, and nothing else becomes so.
        assert list(place.pending(GROUP)) == [to_id(receipt.sequence) for receipt in receipts[:4]]
        # What the group gave can be acknowledged; the rest is not its own.
        for message in again:
            consumer.ack(message)
        assert consumer.commit() == len(found)
        consumer.seek(from_milliseconds(receipts[5].timestamp_ms))
        assert numbers(take(consumer, 1)) == [5]
    with member(place) as consumer:
        assert numbers(take(consumer, 8)) == list(range(2, 10))


def test_what_was_acknowledged_before_a_rewind_is_committed_after_it(place: Place) -> None:
    place.send(range(3))
    with member(place, auto_commit=AutoCommit.ROLLING, auto_commit_interval_seconds=SHORT) as consumer:
        for message in take(consumer, 3):
            consumer.ack(message)
        consumer.rewind(Edge.END)
        until(lambda: (consumer.next(0), place.pending(GROUP) == {})[1], what="the commit")


def test_a_seek_to_nowhere_stays_in_the_group(place: Place) -> None:
    receipts = place.send(range(3))
    with member(place) as consumer:
        take(consumer, 1)
        with pytest.raises(OutOfBoundsError):
            consumer.rewind(receipts[-1].sequence + 1)
        with pytest.raises(OutOfBoundsError):
            consumer.seek(from_milliseconds(receipts[-1].timestamp_ms + 1))
        assert numbers(take(consumer, 2)) == [1, 2]
        place.send(range(3, 4))
        take(consumer, 1)
        assert len(place.pending(GROUP)) == 4


def test_new_shards_are_met(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_consumers.redis.group_consumer.SHARD_SEARCH_SECONDS", 0.0)
    place.send(range(2), shards=2, is_sharded=True)
    with member(place, reset=AutoStreamReset.LATEST) as consumer:
        assert is_silent(consumer)
        # A shard that comes later was never skipped: it is read from its start.
        place.send(range(2, 3), shards=3, is_sharded=True)
        message = until(lambda: consumer.next(0), what="the new shard")
        assert (message.shard, numbers([message])) == (Shard(place.stream, 2), [2])
        # One that is deleted is told, and does not just fall silent.
        place.client.delete(f"{place.stream}:0")
        with pytest.raises(GroupRemovedError, match=f"{place.stream}:0"):
            until(lambda: consumer.next(0))


# options


@pytest.mark.parametrize(
    "options",
    [
        {"auto_commit_delay_seconds": -1.0},
        {"auto_commit_interval_seconds": float("nan")},
        {"auto_claim_interval_seconds": 0.0},
        {"auto_claim_idle_seconds": 0.0},
        {"auto_claim_idle_seconds": None},
        {"auto_claim_idle_seconds": float("inf")},
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InvalidOptionError, match=f"{name}={value!r}"):
        RedisGroupOptions(**options)


def test_group_options_are_for_redis_groups_only(place: Place) -> None:
    options = RedisGroupOptions()
    alone = ConsumerMode.REAL_TIME
    for url, mode in ((place.url, alone), ("kafka://x/y", RESUMABLE), ("memory://x/y", alone)):
        with pytest.raises(InvalidOptionError):
            create_consumer(url, mode=mode, group_options=options)
    with pytest.raises(InvalidOptionError):
        create_consumer(place.url, group=GROUP)
    with create_consumer(place.url, mode=SHARED, group=GROUP, group_options=RedisGroupOptions(consumer="me")) as made:
        assert isinstance(made, RedisGroupConsumer)
        assert (made.group, made.consumer) == (GROUP, "me")
