"""An entry that sets positions without a batch takes no message for read that was not, and none for unread that was."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from deltalake import DeltaTable, write_deltalake

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import adopt
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.run_ingestion import _accept_truncation
from stream_consumers.batches import Range, position_facts_in
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.errors import (
    DataLossError,
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    SourceTruncatedError,
)
from stream_consumers.messages import Shard
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.entries import to_sequence
from stream_consumers.urls import StreamUrl
from tests.support.delta_writes import clean_log, remove_older_commits
from tests.support.groups_without_spark import (
    NO_SPARK,
    GroupWithoutSpark,
    Place,
    land,
    write_empty_commits_without_spark,
)
from tests.support.letter_tables import write_letters


class RedisGroup(GroupWithoutSpark):
    """A Redis stream of two keys, and a group that writes it."""

    def __init__(self, address: str, folder: Path) -> None:
        host, _, port = address.partition(":")
        self.client = redis.Redis(host, int(port))
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self.keys = [f"{self.name}:{number}" for number in range(2)]
        self.milliseconds = 1_700_000_000_000
        super().__init__(f"redis://{address}/{self.name}", Ingestion("lakehouse", str(folder / "t")))

    def add(self, count: int, *shards: int) -> None:
        for _ in range(count):
            self.milliseconds += 1
            for shard in shards or (0, 1):
                self.client.xadd(self.keys[shard], {"msg": b"{}"}, id=f"{self.milliseconds}-0")

    def fail_over(self, shard: int, dump: bytes) -> None:
        """Let a replica without the newest entries become the master."""
        self.client.restore(self.keys[shard], 0, dump, replace=True)

    def dump(self, shard: int) -> bytes:
        return self.client.dump(self.keys[shard])

    def held(self) -> set[Place]:
        return {(n, to_sequence(entry)) for n, key in enumerate(self.keys) for entry, _ in self.client.xrange(key)}

    def shard(self, number: int, epoch: int = 1) -> Shard:
        return Shard(self.name if epoch == 1 else f"{self.name}#{epoch}", number)


@pytest.fixture
def group(redis_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RedisGroup:
    """Ten entries in each key are in the table."""
    write_empty_commits_without_spark(monkeypatch)
    made = RedisGroup(redis_address, tmp_path)
    made.add(10)
    made.begin()
    made.ingest()
    return made


def test_an_accept_hides_no_trimmed_entry_of_a_key_that_goes_on(group: RedisGroup) -> None:
    dump = group.dump(0)
    group.add(5)
    group.ingest()
    position = group.state().positions[group.shard(1)]
    group.fail_over(0, dump)
    group.add(7, 0)
    group.add(20, 1)
    group.client.xtrim(group.keys[1], maxlen=5, approximate=False)
    group.accept()
    assert group.losses().keys() == {group.shard(1, 2)}
    assert group.losses()[group.shard(1, 2)].start == position


def lose_newest(group: RedisGroup, new: int) -> Counter[tuple[int, int]]:
    """Let a failover lose five entries that were read, and add new ones; return the rows of the table."""
    dump = group.dump(0)
    group.add(5)
    group.ingest()
    rows = group.rows()
    group.fail_over(0, dump)
    group.add(new, 0)
    with pytest.raises(SourceRecreatedError):
        group.losses()
    return rows


@pytest.mark.parametrize("new", [0, 2, 7])
def test_a_failover_repeats_no_entry_that_an_earlier_batch_read(group: RedisGroup, new: int) -> None:
    lost = lose_newest(group, new)
    group.accept(is_cut=True)
    group.ingest()
    assert group.rows() == lost + Counter(group.held() - lost.keys())


@pytest.mark.parametrize("new", [0, 3, 20])
@pytest.mark.parametrize(
    ("removed", "same"),
    [
        pytest.param(slice(39), 49, id="trimmed"),
        pytest.param(slice(49), 49, id="trimmed to one entry"),
        pytest.param(slice(20, 36), 49, id="deleted in the middle"),
        pytest.param(slice(0, 50, 2), 49, id="every other one deleted"),
        pytest.param(slice(1, 50, 2), 44, id="every other one deleted, and the last one"),
        pytest.param(slice(19, 50), 14, id="the newest ones deleted"),
    ],
)
def test_a_failover_repeats_no_entry_although_some_are_gone(
    group: RedisGroup, removed: slice, same: int, new: int
) -> None:
    """The epoch begins after the newest of the ten batches whose last entry is still there."""
    for _ in range(8):
        group.add(5)
        group.ingest()
    ids = [entry for entry, _ in group.client.xrange(group.keys[0])]
    if removed.start is None:
        group.client.xtrim(group.keys[0], minid=ids[removed.stop], approximate=False)
    else:
        group.client.xdel(group.keys[0], *ids[removed])
    lost = lose_newest(group, new)
    (accepted,) = group.accept(is_cut=True)
    origin = to_sequence(ids[same]) + 1
    assert accepted.origin[group.shard(0, 2)] == origin
    assert group.losses() == {}
    group.ingest()
    repeated = Counter((0, sequence) for number, sequence in group.held() if number == 0 and sequence >= origin)
    assert group.rows() == lost + repeated


@pytest.mark.parametrize(("lost", "late"), [(0, 1), (2, 1), (3, 2), (6, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize("new", [0, 3, 9])
def test_an_accept_reads_what_was_sent_late_before_the_last_entry_was_sent_again(
    group: RedisGroup, lost: int, late: int, new: int, is_deleted: bool
) -> None:
    """Several batches are lost, and only the last entry of them is sent again; ``new`` ones follow."""
    dump, milliseconds = group.dump(0), group.milliseconds
    for _ in range(lost + 1):
        group.milliseconds += 10
        group.add(1)
        group.ingest()
    group.fail_over(0, dump)
    last, group.milliseconds = group.milliseconds, milliseconds
    group.add(late, 0)
    group.milliseconds = last - 1
    group.add(1 + new, 0)
    with pytest.raises((SourceRecreatedError, SourceTruncatedError)):
        group.losses()
    if is_deleted:
        group.milliseconds += 10
        group.add(2, 0)
        newest = group.client.xrevrange(group.keys[0], count=1)
        group.client.xdel(group.keys[0], newest[0][0])
    group.accept(is_cut=True)
    group.ingest()
    assert group.held() <= group.rows().keys()


def send_again(group: RedisGroup, dump: bytes, at: int, *offsets: int) -> None:
    """Let a failover lose the newest entries, and add others, so many milliseconds after ``at``."""
    group.fail_over(0, dump)
    for offset in offsets:
        group.milliseconds = at + offset - 1
        group.add(1, 0)


@pytest.mark.parametrize("before", range(1, 7))
def test_an_accept_reads_what_was_sent_late_before_an_entry_that_was_sent_again(group: RedisGroup, before: int) -> None:
    """After three lost batches, as many entries are there as before at the end of the second; the third is missing."""
    for _ in range(before):
        group.add(1)
        group.ingest()
    dump, at = group.dump(0), group.milliseconds
    for offset in (10, 20, 30):
        group.milliseconds = at + offset - 1
        group.add(1)
        group.ingest()
    send_again(group, dump, at, 5, 20, 40)
    with pytest.raises(SourceTruncatedError):
        group.losses()
    group.accept(is_cut=True)
    group.ingest()
    assert group.held() <= group.rows().keys()


def add_unread_and_delete(group: RedisGroup, count: int = 1) -> None:
    group.add(count, 0)
    newest = group.client.xrevrange(group.keys[0], count=count)
    group.client.xdel(group.keys[0], *(entry for entry, _ in newest))


def accept_while(group: RedisGroup, call: int, action: Callable[[], object]) -> None:
    """Accept a cut stream, and let something happen before a look at the stream."""
    looks = itertools.count()

    def hooked(name: str) -> Callable[..., object]:
        look = getattr(RedisBatchSource, name)

        def found(*arguments: object, **named: object) -> object:
            if next(looks) == call:
                action()
            return look(*arguments, **named)

        return found

    with pytest.MonkeyPatch.context() as patched:
        for name in ("with_late_messages", "last_messages"):
            patched.setattr(RedisBatchSource, name, hooked(name))
        group.accept(is_cut=True)


@pytest.mark.parametrize("call", range(12))
def test_an_accept_reads_what_was_sent_late_while_the_last_entry_is_sent_again(group: RedisGroup, call: int) -> None:
    """As many entries came late as were lost."""
    dump, at = group.dump(0), group.milliseconds
    group.milliseconds = at + 19
    group.add(1)
    group.ingest()
    send_again(group, dump, at, 5)

    def send() -> None:
        group.milliseconds = at + 19
        group.add(1, 0)

    accept_while(group, call, send)
    group.ingest()
    assert group.held() <= group.rows().keys()


@pytest.mark.parametrize("call", range(1, 12))
def test_what_is_deleted_unread_while_a_stream_is_accepted_is_reported(group: RedisGroup, call: int) -> None:
    dump = group.dump(0)
    group.add(5)
    group.ingest()
    group.fail_over(0, dump)

    accept_while(group, call, lambda: add_unread_and_delete(group, 5))
    if call > 8:
        add_unread_and_delete(group, 5)
    assert group.losses().keys() == {group.shard(0, 2)}


@pytest.mark.parametrize("left", [0, 1])
def test_an_accept_takes_no_unread_entry_for_accounted_if_nothing_that_was_read_is_left(
    group: RedisGroup, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As many entries came as were lost, all with ids up to the last one that was read, and others trimmed them."""
    dump = group.dump(0)
    group.milliseconds += 5
    group.add(3)
    group.ingest()
    group.fail_over(0, dump)
    for number in range(5):
        group.client.xadd(group.keys[0], {"msg": b"{}"}, id=f"{group.milliseconds - 1}-{number}")
    group.client.xtrim(group.keys[0], maxlen=left, approximate=False)
    (accepted,) = group.accept(is_cut=True)
    assert group.shard(0, 2) not in accepted.facts
    group.add(1)
    with caplog.at_level(logging.WARNING):
        group.losses()
    assert any(record.args and record.args[0] == group.shard(0) for record in caplog.records)


@pytest.mark.parametrize("read", ["held", "lost", "deleted"])
def test_a_failover_is_found_after_a_batch_that_only_recorded_a_loss(group: RedisGroup, read: str) -> None:
    """As many entries came late as were lost, below the position, which is after an entry that was deleted unread."""
    entries = [entry for entry, _ in group.client.xrange(group.keys[0])]
    if read == "lost":
        group.client.xdel(group.keys[0], entries[-1])
    dump = group.dump(0)
    if read == "lost":
        group.milliseconds += 5
        group.add(1)
        group.ingest()
    elif read == "deleted":
        group.client.xdel(group.keys[0], *entries)
    late = group.milliseconds - 2 if read == "lost" else group.milliseconds
    group.milliseconds += 5
    add_unread_and_delete(group)
    group.ingest(records_loss=True)
    group.fail_over(0, dump)
    for number in range(2 if read == "lost" else 1):
        group.client.xadd(group.keys[0], {"msg": b"{}"}, id=f"{late}-{number + 1}")
    group.add(1)
    with pytest.raises(SourceTruncatedError):
        group.losses()


def test_late_entries_are_found_although_a_newer_one_was_deleted_unread(group: RedisGroup) -> None:
    """All that was lost is sent again, and two entries more before the last one: more than was ever removed."""
    dump, at = group.dump(0), group.milliseconds
    group.milliseconds = at + 9
    group.add(2)
    group.ingest()
    group.fail_over(0, dump)
    for entry in (f"{at + 10}-0", f"{at + 10}-1", f"{at + 10}-2", f"{at + 11}-0"):
        group.client.xadd(group.keys[0], {"msg": b"{}"}, id=entry)
    add_unread_and_delete(group)
    with pytest.raises(SourceTruncatedError):
        group.losses()


@pytest.mark.parametrize("is_cleaned", [False, True])
def test_an_accept_takes_no_counts_for_those_of_an_earlier_message(group: RedisGroup, is_cleaned: bool) -> None:
    """The oldest commit that is left tells the last message before it, and the counts after it, which are as before."""
    dump, at = group.dump(0), group.milliseconds
    for offset in (10, 20, 30, 40):
        if is_cleaned and offset == 40:
            remove_older_commits(group.what.table)
        group.milliseconds = at + offset - 1
        group.add(1)
        group.ingest()
    send_again(group, dump, at, 5, 6, 20, 50)
    with pytest.raises(SourceTruncatedError):
        group.losses()
    group.accept(is_cut=True)
    group.ingest()
    assert group.held() <= group.rows().keys()


@pytest.mark.parametrize("is_longer", [False, True])
def test_an_accept_reads_a_stream_that_was_filled_again_from_the_first_entry_on(
    group: RedisGroup, is_longer: bool
) -> None:
    """The new stream has the same first entries and lacks the last one, or the same last one after one more."""
    ids = [entry for entry, _ in group.client.xrange(group.keys[0])]
    group.client.delete(group.keys[0])
    for entry in [ids[0], ids[0].replace(b"-0", b"-1"), *ids[1:]] if is_longer else ids[:-1]:
        group.client.xadd(group.keys[0], {"msg": b"{}"}, id=entry)
    with pytest.raises(SourceRecreatedError):
        group.losses()
    (accepted,) = group.accept()
    assert accepted.origin[group.shard(0, 2)] <= to_sequence(ids[0])
    group.ingest()
    assert group.held() <= group.rows().keys()


def test_an_accept_of_one_key_that_was_recreated_repeats_no_other(group: RedisGroup) -> None:
    before = group.rows()
    group.client.delete(group.keys[0])
    group.add(3, 0)
    group.add(4, 1)
    with pytest.raises(SourceRecreatedError):
        group.accept(is_cut=True)
    (accepted,) = group.accept()
    assert accepted.origin[group.shard(0, 2)] == 0
    group.ingest()
    assert group.rows() == before + Counter(group.held() - before.keys())
    group.client.xtrim(group.keys[1], maxlen=0, approximate=False)
    group.add(1, 1)
    group.client.xdel(group.keys[1], f"{group.milliseconds}-0")
    assert group.losses().keys() == {group.shard(1, 2)}


@pytest.mark.parametrize(
    ("what", "is_lost"),
    [
        pytest.param("redo", False, id="to be replaced"),
        pytest.param("gap", False, id="a gap"),
        pytest.param("redo", True, id="to be replaced, and lost"),
    ],
)
def test_an_accept_is_refused_while_rows_have_to_be_written_again(group: RedisGroup, what: str, is_lost: bool) -> None:
    shards = (0,) if is_lost else (0, 1)
    first, dump = group.version, group.dump(0)
    group.add(10, *shards)
    group.ingest()
    before = group.version
    dump = dump if is_lost else group.dump(0)
    group.add(5, *shards)
    if what == "redo":
        group.ingest()
        newest = group.version
        group.restore(before)
        late = group.plan()
        group.restore(newest)
    else:
        late = group.plan()
        group.restore(first)
    assert late is not None
    good = group.version
    land(group.what, *late)
    assert all(group.shards()[group.shard(n)].redo for n in shards) == (what == "redo")
    group.fail_over(0, dump)
    group.add(20, 0)
    if not is_lost:
        with pytest.raises(InvalidOptionError):
            group.accept()
        group.restore(good)
    # Without the late batch, the table has nothing that the stream lost.
    if what == "redo":
        group.accept()
    group.ingest()
    rows = group.rows()
    assert {place: rows[place] for place in group.held()} == dict.fromkeys(group.held(), 1)


def test_a_move_to_the_first_entry_leaves_a_loss_to_the_next_run(group: RedisGroup) -> None:
    group.add(20)
    group.client.xtrim(group.keys[1], maxlen=5, approximate=False)
    position = group.state().positions[group.shard(1)]
    (moved,) = group.rewind("earliest")
    assert (moved.shard, moved.skipped.start == moved.skipped.end) == (group.shard(0), True)
    assert group.state().positions[group.shard(1)] == position
    assert group.losses().keys() == {group.shard(1)}


@pytest.mark.parametrize("is_trimmed", [True, False], ids=["before the new position", "after it"])
def test_a_move_forwards_over_lost_entries_is_refused(group: RedisGroup, is_trimmed: bool) -> None:
    group.add(20)
    entry = f"{group.milliseconds - 2}-0"
    if is_trimmed:
        group.client.xtrim(group.keys[1], maxlen=5, approximate=False)
    else:
        group.client.xdel(group.keys[1], f"{group.milliseconds - 1}-0")
    state = group.state()
    with pytest.raises(DataLossError) as raised:
        group.rewind(f"{group.shard(0)}={to_sequence(entry.encode())},{group.shard(1)}={to_sequence(entry.encode())}")
    assert raised.value.facts.keys() == {str(group.shard(1))}
    assert group.state().positions == state.positions
    group.rewind(f"{group.shard(0)}={to_sequence(entry.encode())}")
    assert group.losses().keys() == {group.shard(1)}


@pytest.mark.parametrize("has_dead_letter", [False, True])
def test_after_a_cleaned_log_a_key_without_rows_has_lost_what_was_trimmed(
    group: RedisGroup, has_dead_letter: bool
) -> None:
    """It is unknown whether the group has read those entries. A dead letter shows that it has."""
    group.what = replace(group.what, table=f"{group.what.table}_2")
    group.client.delete(group.keys[1])
    group.begin()
    group.ingest()
    group.add(5)
    group.client.xtrim(group.keys[1], maxlen=2, approximate=False)
    if has_dead_letter:
        last = max(sequence for number, sequence in group.held() if number == 1)
        write_letters(group.what.dead_letters(), group.shard(1), last, group=group.what.group, number=2)
    clean_log(group.what.table)
    with pytest.raises(LedgerTruncatedError):
        group.state()
    group.rewind("earliest")
    if has_dead_letter:
        first = min(sequence for number, sequence in group.held() if number == 1)
        assert group.shards()[group.shard(1)].redo == Intervals.of((first, last + 1))
        return
    assert group.state().positions[group.shard(1)] == 0
    assert group.losses().keys() == {group.shard(1)}


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_an_adopt_counts_no_entry_as_read_that_may_be_gone(
    group: RedisGroup, is_trimmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What is gone before the adopt cannot be known, so that a run warns; what is removed after it is a loss."""
    group.add(20)
    if is_trimmed:
        group.client.xtrim(group.keys[1], maxlen=5, approximate=False)
    copy = GroupWithoutSpark(group.url, replace(group.what, group="other", table=f"{group.what.table}_2"))
    table = DeltaTable(group.what.table).to_pyarrow_table()
    write_deltalake(copy.what.table, table)
    with open_batch_source(group.url) as source:
        adopt(NO_SPARK, source, copy.what)
    known = position_facts_in(copy.state().hint).keys()
    assert known == {group.shard(0)} if is_trimmed else {group.shard(0), group.shard(1)}
    assert copy.losses() == {}
    assert ("not detected" in caplog.text) == is_trimmed
    group.client.xtrim(group.keys[0], maxlen=5, approximate=False)
    assert copy.losses().keys() == {group.shard(0)}


def test_the_epoch_of_a_stream_outlives_a_recovery_for_another_url(group: RedisGroup) -> None:
    """So that the rows of its epoch are found, and the stream is not begun again under its first name."""
    state, clicks = group.state(), Shard("clicks#2")
    more = group.what.ledger().entry(
        "init", state, origin={clicks: 0}, identities={**state.identities, "clicks#2": "id"}
    )
    land(group.what, more, [])
    batch = group.what.ledger().entry("batch", group.state(), ranges={clicks: Range(0, 3)})
    land(group.what, batch, [("clicks#2", 0, number) for number in range(3)])
    clean_log(group.what.table)
    assert group.what.epochs(["clicks", group.name]) == {"clicks": "clicks#2", group.name: group.name}
    group.rewind("earliest")
    assert group.state().identities.keys() == {group.name}
    assert group.what.epochs(["clicks", group.name]) == {"clicks": "clicks#2", group.name: group.name}


def test_a_run_that_records_losses_goes_on_after_a_failover_and_not_after_a_recreation(group: RedisGroup) -> None:
    """Also while the stream has fewer entries than were read."""
    source = StreamSource(StreamUrl.parse(group.url))
    dump = group.dump(0)
    group.add(5)
    group.ingest()
    group.fail_over(0, dump)
    with pytest.raises(SourceRecreatedError) as cut:
        group.losses()
    assert _accept_truncation(NO_SPARK, source, group.what, cut.value)
    assert group.losses() == {}
    assert not _accept_truncation(NO_SPARK, source, group.what, cut.value), "nothing is left to accept"
    group.client.delete(group.keys[0])
    group.add(1)
    with pytest.raises(SourceRecreatedError) as recreated:
        group.losses()
    with pytest.raises(SourceRecreatedError):
        _accept_truncation(NO_SPARK, source, group.what, recreated.value)
    clean_log(group.what.table)
    with pytest.raises(SourceRecreatedError):
        _accept_truncation(NO_SPARK, source, group.what, recreated.value)
