"""What the ledger refuses, what it takes for a first run, and how a commit is verified."""

import json
import os
import shutil
from dataclasses import replace
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import BATCH_ID, KINDS, ClaimedRange, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import Range
from stream_consumers.errors import (
    ForeignCommitError,
    InvalidOptionError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    TableUnreadableError,
    Terminal,
    Transient,
)
from stream_consumers.messages import Shard
from tests.support.profiles import examples
from tests.support.written_log import FIRST_MS, STEP_MS, WrittenLog

SHARD = Shard("orders", 0)
HOUR_MS = 3_600_000


@pytest.fixture
def log(tmp_path):
    return WrittenLog(tmp_path / "table")


def ledger(log, member="main", group="g"):
    return Ledger(log.log(), group=group, member=member)


def entry(number, base, *, member="main", kind="batch", **details):
    return LedgerEntry(kind, "g", f"g/{member}", number, member, f"{member}{number}", base, **details)


def known(position):
    return {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, position)), origin=0)}


def two_batches(log):
    """Versions 0 to 2: a claim from 0, then [0,5) and [5,9)."""
    log.ours(entry(1, -1, kind="init", origin={SHARD: 0}))
    log.ours(entry(2, 0, ranges={SHARD: Range(0, 5)}, state=known(0)))
    log.ours(entry(3, 1, ranges={SHARD: Range(5, 9)}, state=known(5)))


def three_batches(log, hours=(0, 5, 11, 13)):
    """Versions 0 to 3: a claim from 0, then [0,5), [5,9) and one whose messages the transform drops, [9,12)."""
    entries = [
        entry(1, -1, kind="init", origin={SHARD: 0}),
        entry(2, 0, ranges={SHARD: Range(0, 5)}, state=known(0)),
        entry(3, 1, ranges={SHARD: Range(5, 9)}, state=known(5)),
        entry(4, 2, ranges={SHARD: Range(9, 12)}, state=known(9)),
    ]
    for hour, each in zip(hours, entries):
        files = {"files": log.files} if each.number == 4 else {}
        log.ours(each, timestamp_ms=FIRST_MS + int(hour * HOUR_MS), **files)


class TestFirstRun:
    def test_no_table(self, log):
        assert ledger(log).read() == LedgerState(-1)

    def test_an_empty_folder_and_an_empty_log(self, log):
        log.path.mkdir()
        assert ledger(log).read() == LedgerState(-1)
        (log.path / "_delta_log").mkdir()
        assert ledger(log).read() == LedgerState(-1)

    def test_a_table_of_others(self, log):
        log.commit(transactions={"g": 4, "gg/main": 7, "other/main": 9})
        log.commit("OPTIMIZE")
        assert ledger(log).read() == LedgerState(1)

    def test_a_table_of_others_with_a_cleaned_log(self, log):
        log.commit(transactions={"other/main": 9})
        log.commit()
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(1)
        assert ledger(log).read() == LedgerState(1)


class TestTruncation:
    @pytest.mark.parametrize("cleaned", [2, 3])
    def test_our_commits_are_gone_but_our_number_is_not(self, log, cleaned):
        log.ours(entry(1, -1, kind="init", origin={SHARD: 0}))
        log.ours(entry(2, 0, ranges={SHARD: Range(0, 5)}, state=known(0)))
        log.commit("OPTIMIZE")
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(cleaned)
        with pytest.raises(LedgerTruncatedError, match="none is readable") as caught:
            ledger(log).read()
        assert isinstance(caught.value, Terminal)

    def test_only_what_is_needed_must_be_there(self, log):
        two_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        assert ledger(log).read().positions == {SHARD: 9}

    def test_a_restore_into_the_cleaned_part_is_not_a_fresh_start(self, log):
        two_batches(log)
        log.restore(version=0)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        with pytest.raises(LedgerTruncatedError):
            ledger(log).read()

    def test_missing_between_the_base_and_now(self, log):
        two_batches(log)
        late = entry(4, 0, ranges={SHARD: Range(9, 12)}, state=known(0))
        log.ours(late)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(3)
        with pytest.raises(LedgerTruncatedError, match="version 1"):
            ledger(log).read()


class TestForeign:
    @pytest.mark.parametrize("metadata", [None, "{broken", "[1]", '"text"', "null", "5", '{"v":1,"kind":"batch"}'])
    def test_under_our_app_id(self, log, metadata):
        two_batches(log)
        log.commit(metadata=metadata, transactions={"g/main": 4})
        with pytest.raises(ForeignCommitError, match="version 3"):
            ledger(log).read()

    def test_our_metadata_with_another_number(self, log):
        log.commit(metadata=entry(1, -1).to_json(), transactions={"g/main": 2})
        with pytest.raises(ForeignCommitError):
            ledger(log).read()

    @pytest.mark.parametrize("lacking", ["v", "kind", "group", "app", "bid"])
    def test_metadata_without_one_of_our_marks_changes_nothing(self, log, lacking):
        two_batches(log)
        document = json.loads(entry(9, 2, ranges={SHARD: Range(9, 99)}).to_json())
        del document[lacking]
        log.commit(metadata=json.dumps(document))
        assert ledger(log).read().positions == {SHARD: 9}

    def test_other_line_separators_in_a_text_are_no_line_ends(self, log):
        two_batches(log)
        log.commit("DELETE", parameters={"predicate": "name = 'a\u2028b\u0085c'"})
        assert ledger(log).read().positions == {SHARD: 9}
        assert log.log().commit(3).predicate == "name = 'a\u2028b\u0085c'"

    def test_spaces_between_the_tokens_hide_nothing(self, log):
        log.commit()
        text = '{ "commitInfo" : {"operation": "WRITE"} }\n{ "txn" : {"appId": "g/main", "version": 3} }\n'
        log.write(1, text)
        with pytest.raises(ForeignCommitError):
            ledger(log).read()


def test_a_table_that_forgets_transactions_is_refused(tmp_path):
    log = WrittenLog(tmp_path / "t", properties={"delta.setTransactionRetentionDuration": "interval 1 day"})
    two_batches(log)
    with pytest.raises(InvalidOptionError, match="setTransactionRetentionDuration"):
        ledger(log).read()


@pytest.mark.parametrize("name", ["", "a/b", "/"])
def test_names_with_slashes_are_refused(log, name):
    with pytest.raises(InvalidOptionError, match="group"):
        Ledger(log.log(), group=name, member="main")
    with pytest.raises(InvalidOptionError, match="member"):
        Ledger(log.log(), group="g", member=name)


def test_numbers_are_per_member_and_survive_a_restore(log):
    log.ours(entry(1, -1, kind="init", origin={SHARD: 0}))
    log.ours(entry(5, 0, member="b", state=known(0)))
    log.ours(entry(2, 1, state=known(0)))
    log.restore(version=0)
    assert [ledger(log, m).read().last_number for m in ("main", "b", "c")] == [2, 5, 0]
    assert ledger(log, "c").read().newest == entry(2, 1, state=known(0))


class TestWritten:
    def test_with_our_bid(self, log):
        two_batches(log)
        commit = ledger(log).written(3, after=1)
        assert (commit.version, commit.entry.bid) == (2, "main3")

    def test_behind_it_a_fence_does_not_hide_it(self, log):
        two_batches(log)
        log.ours(replace(entry(4, 2, kind="fence"), by="b", bid="fence"))
        assert ledger(log).written(3, after=1).entry.bid == "main3"

    def test_with_the_bid_of_another_run(self, log):
        two_batches(log)
        log.ours(replace(entry(4, 2), bid="other"))
        assert ledger(log).written(4, after=2).entry.bid == "other"

    def test_none(self, log):
        two_batches(log)
        assert ledger(log).written(4, after=2) is None
        assert ledger(log).written(3, after=2) is None
        assert ledger(log, "b").written(3, after=0) is None

    def test_of_another_member(self, log):
        two_batches(log)
        log.ours(entry(1, 2, member="b"))
        assert ledger(log, "b").written(1, after=2).version == 3

    def test_a_missing_commit_file_is_an_error(self, log):
        two_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        with pytest.raises(LedgerUnreadableError) as caught:
            ledger(log).written(4, after=0)
        assert isinstance(caught.value, Transient)

    @pytest.mark.parametrize(
        "content", [b'{"commitInfo":{"oper', b'{"txn":[]}', b'{"commitInfo":null}', b'{"commitInfo":"\xff"}']
    )
    def test_a_broken_commit_file_is_an_error(self, log, content):
        two_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.file(1).write_bytes(content)
        with pytest.raises(LedgerUnreadableError, match="version 1"):
            ledger(log).written(4, after=0)


class TestRestore:
    @pytest.mark.parametrize("target", [{"version": 1}, {"version": "1", "timestamp": None}])
    def test_to_a_version(self, log, target):
        two_batches(log)
        log.restore(**target)
        assert ledger(log).read().positions == {SHARD: 5}

    def test_by_delta_rs(self, log):
        two_batches(log)
        DeltaTable(str(log.path)).restore(1)
        assert ledger(log).read().positions == {SHARD: 5}

    def test_the_remedy_works(self, log):
        two_batches(log)
        log.restore(timestamp="soon")
        log.restore(version=1)
        assert ledger(log).read().positions == {SHARD: 5}

    def test_to_a_version_that_was_itself_not_certain(self, log):
        three_batches(log)
        log.restore(timestamp="soon", back_to=2)
        log.restore(version=1, back_to=1)
        log.restore(version=4, back_to=4)
        with pytest.raises(LedgerUnreadableError, match="soon"):
            ledger(log).read()

    def test_back_and_forth_keeps_the_number(self, log):
        two_batches(log)
        for target in (0, 2, 3, 4, 1):
            log.restore(version=target)
        state = ledger(log).read()
        assert state.positions == {SHARD: 5}
        assert state.last_number == 3


class TestRestoreToATime:
    def positions(self, log):
        return ledger(log).read().positions[SHARD]

    @pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata", "Pacific/Auckland"])
    def test_the_files_tell_the_version_whatever_the_zone_of_the_session_was(self, log, zone):
        three_batches(log)
        log.restore(timestamp=spark_time(FIRST_MS + 8 * HOUR_MS, zone), version=None, back_to=1)
        assert self.positions(log) == 5

    @pytest.mark.parametrize("off", [-999, -1, 0, 1, 999])
    def test_close_to_a_version(self, log, off):
        three_batches(log)
        log.restore(timestamp=spark_time(FIRST_MS + 5 * HOUR_MS + off), back_to=1)
        assert self.positions(log) == 5

    def test_a_time_that_is_none_says_nothing_and_the_files_do(self, log):
        two_batches(log)
        log.restore(timestamp="soon", back_to=1)
        assert self.positions(log) == 5

    def test_by_delta_rs(self, log):
        three_batches(log)
        for version, hour in enumerate((0, 5, 11, 13)):
            seconds = FIRST_MS / 1000 + 3600 * hour
            os.utime(log.file(version), (seconds, seconds))
        DeltaTable(str(log.path)).restore(datetime.fromtimestamp(FIRST_MS / 1000 + 6 * 3600, timezone.utc))
        assert self.positions(log) == 5

    def test_back_and_forth(self, log):
        two_batches(log)
        log.restore(timestamp="soon", back_to=1)
        log.restore(timestamp="later", back_to=2)
        assert self.positions(log) == 9

    def test_a_version_without_a_file_of_its_own_is_not_guessed(self, log):
        three_batches(log)
        log.restore(timestamp=spark_time(FIRST_MS + 14 * HOUR_MS), back_to=3)
        with pytest.raises(LedgerUnreadableError, match="version 2 or 3") as raised:
            ledger(log).read()
        assert "TO VERSION AS OF" in raised.value.remedy

    @pytest.mark.parametrize(("hour", "position"), [(12, 9), (14, 12)])
    def test_unless_the_time_has_a_zone(self, log, hour, position):
        three_batches(log)
        log.restore(timestamp=spark_time(FIRST_MS + hour * HOUR_MS) + "+00:00", back_to=2)
        assert self.positions(log) == position

    @pytest.mark.parametrize(("minute", "position"), [(3, 9), (8, 12)])
    def test_or_means_one_of_them_in_no_zone(self, log, minute, position):
        three_batches(log, hours=(0, 5, 11, 11.1))
        batch = entry(5, 3, ranges={SHARD: Range(12, 15)}, state=known(12))
        log.ours(batch, timestamp_ms=FIRST_MS + 11 * HOUR_MS + 10 * STEP_MS)
        log.restore(timestamp=spark_time(FIRST_MS + 11 * HOUR_MS + minute * STEP_MS, "Asia/Kolkata"), back_to=2)
        assert self.positions(log) == position

    def test_commits_of_others_in_between_change_nothing(self, log):
        two_batches(log)
        log.commit("SET TBLPROPERTIES")
        log.ours(replace(entry(1, 2, kind="fence"), group="other", app="other/main"))
        log.restore(timestamp="soon", back_to=2)
        assert self.positions(log) == 9

    def test_statistics_that_are_added_to_a_file_change_no_file(self, log):
        two_batches(log)
        again = {"path": "part-2.parquet", "partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": False}
        log.commit("COMPUTE STATISTICS")
        with log.file(3).open("a") as file:
            file.write(json.dumps({"add": again}) + "\n")
        log.restore(timestamp="soon", back_to=1)
        assert self.positions(log) == 5

    def test_a_deletion_vector_makes_another_file(self, log):
        two_batches(log)
        vector = {"storageType": "u", "pathOrInlineDv": "ab", "offset": 1, "sizeInBytes": 2, "cardinality": 1}
        file = {"path": "part-2.parquet", "partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True}
        old, new = json.dumps({"remove": file}) + "\n", json.dumps({"add": {**file, "deletionVector": vector}}) + "\n"
        log.commit("DELETE")
        with log.file(3).open("a") as text:
            text.write(old + new)
        log.restore(timestamp="soon")
        log.file(4).write_text(
            log.file(4).read_text()
            + json.dumps({"remove": {**file, "deletionVector": vector}})
            + "\n"
            + json.dumps({"add": file})
            + "\n"
        )
        assert log.log().restored_versions(log.log().commit(4)) == (2,)

    def test_files_that_no_version_has(self, log):
        two_batches(log)
        log.commit("RESTORE", parameters={"timestamp": "soon"}, files=frozenset({"elsewhere.parquet"}))
        with pytest.raises(LedgerUnreadableError, match="no version"):
            ledger(log).read()

    def test_a_time_at_which_no_version_had_these_files(self, log):
        three_batches(log)
        log.restore(timestamp="2000-01-01 00:00:00.0", back_to=1)
        with pytest.raises(LedgerUnreadableError, match="no version"):
            ledger(log).read()

    @pytest.mark.parametrize(("version", "position"), [(1, 5), (2, 9)])
    def test_clocks_that_run_backwards(self, log, version, position):
        three_batches(log, hours=(0, 11, 10.5, 13))
        log.restore(timestamp=spark_time(FIRST_MS + 11 * HOUR_MS) + "Z", back_to=version)
        assert self.positions(log) == position

    def test_a_cleaned_log(self, log):
        three_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        log.restore(timestamp="soon", back_to=1)
        with pytest.raises(LedgerUnreadableError, match="version 1 was cleaned"):
            ledger(log).read()

    def test_what_was_cleaned_long_before_it_does_not_matter(self, log):
        three_batches(log, hours=(0, 100, 200, 300))
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(1)
        log.restore(timestamp=spark_time(FIRST_MS + 250 * HOUR_MS), back_to=2)
        assert self.positions(log) == 9


def test_a_table_that_was_dropped_and_created_again(log):
    reader = ledger(log)
    two_batches(log)
    assert reader.read().positions == {SHARD: 9}
    shutil.rmtree(log.path)
    again = WrittenLog(log.path, table_id="again")
    again.commit()
    again.commit()
    again.commit()
    assert reader.read() == LedgerState(2)
    shutil.rmtree(log.path)
    assert reader.read() == LedgerState(-1)


class TestUnreadableTable:
    def test_the_path_is_a_file(self, tmp_path):
        (tmp_path / "t").write_text("x")
        with pytest.raises(TableUnreadableError, match="is a file"):
            DeltaLog(str(tmp_path / "t")).snapshot()

    def test_a_folder_with_other_files(self, tmp_path):
        pq.write_table(pa.table({"id": [1]}), tmp_path / "part-0.parquet")
        with pytest.raises(TableUnreadableError, match="no Delta table"):
            DeltaLog(str(tmp_path)).snapshot()

    @pytest.mark.parametrize("content", ["{broken", "[]", ""])
    def test_a_log_that_begins_with_a_torn_commit(self, log, content):
        log.write(0, content)
        with pytest.raises(LedgerUnreadableError, match="version 0"):
            ledger(log).read()

    def test_a_log_without_a_table_in_it(self, log):
        log.write(0, '{"commitInfo":{}}\n')
        with pytest.raises(TableUnreadableError, match="cannot be read") as caught:
            ledger(log).read()
        assert isinstance(caught.value, Terminal)

    def test_a_gap_in_the_log(self, log):
        two_batches(log)
        log.file(1).unlink()
        with pytest.raises((TableUnreadableError, LedgerTruncatedError)):
            ledger(log).read()


def test_commits_newest_first(log):
    two_batches(log)
    log.commit("OPTIMIZE")
    log.ours(entry(1, 3, member="b", state=known(9)))
    found = [(commit.entry.bid, commit.version) for commit in ledger(log).newest_first()]
    assert found == [("b1", 4), ("main3", 2), ("main2", 1), ("main1", 0)]
    DeltaTable(str(log.path)).create_checkpoint()
    log.clean_before(2)
    assert [commit.entry.bid for commit in ledger(log).newest_first()] == ["b1", "main3"]


NUMBERS = st.integers(-(2**62), 2**62)
SHARD_NAMES = st.builds(Shard, st.text("abcXYZ019._-", max_size=9), st.integers(0, 2**63))
TEXTS = st.text(max_size=9)
SETS = st.lists(st.tuples(NUMBERS | st.just(MIN_SEQUENCE), NUMBERS), max_size=3).map(lambda pairs: Intervals.of(*pairs))
STATES = st.builds(ShardState, SETS, SETS, st.none() | NUMBERS, st.none() | NUMBERS)


def by_shard(values):
    return st.dictionaries(SHARD_NAMES, values, max_size=3)


@settings(deadline=None, max_examples=examples(150))
@given(
    st.builds(
        LedgerEntry,
        kind=st.sampled_from(KINDS),
        group=TEXTS,
        app=TEXTS,
        number=NUMBERS,
        by=TEXTS,
        bid=st.from_regex(BATCH_ID, fullmatch=True),
        base=NUMBERS,
        ranges=by_shard(st.builds(Range, NUMBERS, NUMBERS)),
        mode=st.sampled_from(["append", "replace"]),
        until=by_shard(NUMBERS),
        origin=by_shard(NUMBERS),
        state=by_shard(STATES),
        rows=NUMBERS,
        dead=NUMBERS,
        identities=st.dictionaries(TEXTS, TEXTS, max_size=2),
        hint=st.none() | st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=2),
    )
)
def test_entries_survive_json(entry):
    assert LedgerEntry.from_json(entry.to_json()) == entry


def test_an_entry_of_an_older_version_is_read():
    """It calls the first commit a claim, knows owners of shards, and nothing of replays."""
    state = '{"s/0":{"cov":[[null,5]],"redo":[[2,3]],"owner":"g/a","origin":1,"claimed":null}}'
    text = (
        '{"v":1,"kind":"claim","group":"g","app":"g/main","n":1,"by":"main","bid":"b","base":-1,"ranges":{},'
        '"mode":"append","until":{},"take":{"s/0":{"from":null,"to":"g/a"}},"origin":{"s/0":1},"state":' + state + ","
        '"rows":0,"dead":0,"identities":{"s":"x"},"hint":null,"letters":4,"sharing":"","switch":"resumable",'
        '"lost":{},"claims":{"s/0":[3,9,2]}}'
    )
    shard = Shard("s", 0)
    assert LedgerEntry.from_json(text) == LedgerEntry(
        "init",
        "g",
        "g/main",
        1,
        "main",
        "b",
        -1,
        origin={shard: 1},
        state={shard: ShardState(Intervals.of((MIN_SEQUENCE, 5)), Intervals.of((2, 3)), 1)},
        identities={"s": "x"},
        settled=4,
        switch="resumable",
        claims={shard: ClaimedRange(3, 9, 2)},
    )


@settings(deadline=None, max_examples=examples(150))
@given(
    st.text() | st.recursive(st.none() | NUMBERS | TEXTS, lambda x: st.lists(x) | st.dictionaries(TEXTS, x)).map(repr)
)
def test_any_other_text_is_foreign(text):
    assert LedgerEntry.from_json(text) is None


def spark_time(milliseconds, zone="UTC"):
    """As Spark writes it into a RESTORE: the clock of its session, the fewest fraction digits, at least one."""
    moment = datetime.fromtimestamp(milliseconds / 1000, ZoneInfo(zone))
    return f"{moment:%Y-%m-%d %H:%M:%S}." + (f"{moment.microsecond // 1000:03d}".rstrip("0") or "0")
