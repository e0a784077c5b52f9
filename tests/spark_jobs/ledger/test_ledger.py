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
from spark_jobs.ledger.entries import BATCH_ID, KEEPER, KINDS, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import NEWEST_VERSIONS, Ledger, LedgerState
from stream_consumers.batches import Range
from stream_consumers.errors import (
    ForeignCommitError,
    FormatError,
    InvalidOptionError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    RestoreTargetError,
    StorageMismatchError,
    TableUnreadableError,
    Terminal,
    Transient,
)
from stream_consumers.messages import MAX_SHARD, Shard
from tests.support.profiles import examples
from tests.support.written_log import FIRST_MS, WrittenLog
from tests.support.written_log import made_entry as entry

SHARD = Shard("orders", 0)
QUIET = Shard("quiet", 0)
HOUR_MS = 3_600_000


@pytest.fixture
def log(tmp_path):
    return WrittenLog(tmp_path / "table")


def ledger(log, member="main", group="g"):
    return Ledger(log.log(), group=group, member=member)


def known(position):
    return {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, position)), origin=0)}


def two_batches(log):
    """Versions 0 to 2: a claim from 0, then [0,5) and [5,9)."""
    log.ours(entry(1, -1, kind="init", origin={SHARD: 0}))
    log.ours(entry(2, 0, ranges={SHARD: Range(0, 5)}, state=known(0)))
    log.ours(entry(3, 1, ranges={SHARD: Range(5, 9)}, state=known(5)))


def test_of_groups_that_began_at_once_the_first_claim_wins(log):
    """Both looked before either had claimed; a second member of the first one claims last."""
    log.ours(entry(1, -1, group="other"))
    for group, member in (("a", "main"), ("b", "main"), ("a", "second")):
        log.ours(entry(1, 0, group=group, member=member, kind="init", origin={SHARD: 0}, state={}))
    ledgers = {group: Ledger(log.log(), group=group, member="main") for group in "ab"}
    streams = frozenset((SHARD.stream,))
    assert {group: one.earlier_group(streams) for group, one in ledgers.items()} == {"a": None, "b": "a"}
    assert [one.earlier_group(frozenset(("users",))) for one in ledgers.values()] == [None, None]


def test_only_a_state_that_was_made_anew_settles_a_claim(log):
    """Maintenance writes down what a group knows, also that of one that was refused."""
    for group in "ab":
        log.ours(entry(1, -1, group=group, kind="init", origin={SHARD: 0}, state={}))
    ours, streams = Ledger(log.log(), group="b", member="main"), frozenset((SHARD.stream,))
    log.ours(entry(1, 1, group="b", member=KEEPER, kind="keep", state=known(0)))
    assert ours.earlier_group(streams) == "a"
    log.ours(entry(2, 2, group="b", kind="keep", state=known(0)))
    assert ours.earlier_group(streams) is None


def test_a_claim_that_was_cleaned_from_the_log_is_none_of_another_group(log):
    """The claimed stream has no messages yet; the group goes on with another one."""
    log.ours(entry(1, -1, kind="init", origin={SHARD: 0, QUIET: 0}, state={}))
    for number in range(2, 12):
        state = {**known(number), QUIET: ShardState(Intervals.of((MIN_SEQUENCE, 0)), origin=0)}
        log.ours(entry(number, number - 2, ranges={SHARD: Range(number, number + 1)}, state=state))
    DeltaTable(str(log.path)).create_checkpoint()
    log.clean_before(4)
    assert ledger(log).earlier_group(frozenset((QUIET.stream,))) is None


def test_a_claim_without_rows_yields_to_one_that_could_not_see_it(log):
    log.ours(entry(1, -1, group="old", kind="init", origin={SHARD: 0}, state={}))
    for number in range(1, NEWEST_VERSIONS + 2):
        log.ours(entry(number, number - 1, group="other"))
    new = Ledger(log.log(), group="new", member="main")
    assert new.other_group(frozenset((SHARD.stream,)), base=NEWEST_VERSIONS + 1) is None
    log.ours(entry(1, NEWEST_VERSIONS + 1, group="new", kind="init", origin={SHARD: 0}, state={}))
    assert Ledger(log.log(), group="old", member="main").earlier_group(frozenset((SHARD.stream,))) == "new"
    assert Ledger(log.log(), group="new", member="main").earlier_group(frozenset((SHARD.stream,))) is None


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
    @pytest.mark.parametrize("app", ["g/main", "g/other"])
    def test_under_our_app_id(self, log, metadata, app):
        two_batches(log)
        log.commit(metadata=metadata, transactions={app: 4})
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
        commit = ledger(log).commit_of(3, after=1)
        assert (commit.version, commit.entry.bid) == (2, "main3")

    def test_behind_it_a_fence_does_not_hide_it(self, log):
        two_batches(log)
        log.ours(replace(entry(4, 2, kind="fence"), by="b", bid="fence"))
        assert ledger(log).commit_of(3, after=1).entry.bid == "main3"

    def test_none(self, log):
        two_batches(log)
        assert ledger(log).commit_of(4, after=2) is None
        assert ledger(log).commit_of(3, after=2) is None
        assert ledger(log, "b").commit_of(3, after=0) is None

    def test_a_compaction_with_the_metadata_of_a_batch_is_no_batch(self, log):
        """Auto compaction runs in the session of a MERGE, whose settings hold the metadata."""
        two_batches(log)
        before, batches = ledger(log).read(), list(ledger(log).surviving())
        log.commit("OPTIMIZE", metadata=entry(3, 1, ranges={SHARD: Range(5, 9)}, state=known(5)).to_json())
        assert replace(ledger(log).read(), version=before.version) == before
        assert list(ledger(log).surviving()) == batches

    def test_a_missing_commit_file_is_an_error(self, log):
        two_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        with pytest.raises(LedgerUnreadableError) as caught:
            ledger(log).commit_of(4, after=0)
        assert isinstance(caught.value, Transient)

    @pytest.mark.parametrize(
        "content", [b'{"commitInfo":{"oper', b'{"txn":[]}', b'{"commitInfo":null}', b'{"commitInfo":"\xff"}']
    )
    def test_a_broken_commit_file_is_an_error(self, log, content):
        two_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.file(1).write_bytes(content)
        with pytest.raises(LedgerUnreadableError, match="version 1"):
            ledger(log).commit_of(4, after=0)


class TestRestore:
    @pytest.mark.parametrize("target", [{"version": 1}, {"version": "1", "timestamp": None}])
    def test_to_a_version(self, log, target):
        two_batches(log)
        log.restore(**target)
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
        with pytest.raises(RestoreTargetError, match="soon"):
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
        with pytest.raises(RestoreTargetError, match="version 2 or 3") as raised:
            ledger(log).read()
        assert "TO VERSION AS OF" in raised.value.remedy
        assert isinstance(raised.value, Terminal), "only another RESTORE helps"

    def test_a_version_long_before_with_the_same_files_is_not_left_out(self, log):
        three_batches(log)
        log.commit("DELETE", files=frozenset({"part-1.parquet"}))
        log.ours(entry(5, 4, ranges={SHARD: Range(12, 15)}))
        log.restore(timestamp="soon", back_to=1)
        with pytest.raises(RestoreTargetError, match="version 1 or 4"):
            ledger(log).read()

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
        with pytest.raises(RestoreTargetError, match="no version"):
            ledger(log).read()

    def test_a_cleaned_log(self, log):
        three_batches(log)
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        log.restore(timestamp="soon", back_to=1)
        with pytest.raises(RestoreTargetError, match="version 1 was cleaned"):
            ledger(log).read()

    def test_what_was_cleaned_long_before_it_does_not_matter(self, log):
        three_batches(log)
        log.ours(entry(5, 3, ranges={SHARD: Range(12, 15)}, state=known(12)))
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(2)
        log.restore(timestamp="soon", back_to=4)
        log.restore(timestamp="later", back_to=4)
        assert self.positions(log) == 15


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


class TestCopy:
    """A folder with the same table id, put in the place of a table that is in use."""

    @pytest.fixture
    def copy(self, log, tmp_path):
        """A copy as of the first batch, to which others have written since."""
        two_batches(log)
        copy = WrittenLog(tmp_path / "copy")
        copy.ours(entry(1, -1, kind="init", origin={SHARD: 0}))
        copy.ours(entry(2, 0, ranges={SHARD: Range(0, 5)}, state=known(0)))
        return copy

    def put_in_place(self, log, copy):
        shutil.rmtree(log.path)
        copy.path.rename(log.path)

    @pytest.mark.parametrize("foreign", [0, 1, 4])
    def test_nothing_that_was_read_of_the_table_is_taken_for_the_copy(self, log, copy, foreign):
        reader = ledger(log)
        assert reader.read().positions == {SHARD: 9}
        for _ in range(foreign):
            copy.commit("OPTIMIZE")
        self.put_in_place(log, copy)
        with pytest.raises(StorageMismatchError) as caught:
            reader.read()
        assert caught.value.facts == {"version": 2}
        assert reader.read() == ledger(log).read()
        assert reader.read().positions == {SHARD: 5}

    def test_a_write_that_landed_in_the_copy_is_not_acknowledged(self, log, copy):
        reader = ledger(log)
        planned = entry(4, reader.read().version, ranges={SHARD: Range(9, 12)}, state=known(9))
        for _ in range(4):
            copy.commit("OPTIMIZE")
        copy.ours(planned)
        self.put_in_place(log, copy)
        with pytest.raises(StorageMismatchError):
            reader.commit_of(4, after=planned.base)

    def test_a_copy_of_the_same_commits_is_no_other_table(self, log, tmp_path):
        two_batches(log)
        reader = ledger(log)
        before = reader.read()
        shutil.copytree(log.path, tmp_path / "copy")
        self.put_in_place(log, WrittenLog(tmp_path / "copy"))
        assert reader.read() is before

    def test_what_was_cleaned_since_it_was_read_is_no_copy(self, log):
        two_batches(log)
        reader = ledger(log)
        assert reader.read().positions == {SHARD: 9}
        log.ours(entry(4, 2, ranges={SHARD: Range(9, 12)}, state=known(9)))
        DeltaTable(str(log.path)).create_checkpoint()
        log.clean_before(3)
        assert reader.read().positions == {SHARD: 12}

    def test_a_commit_that_was_planned_from_a_later_version_is_refused(self, log, copy):
        """An older copy was put back between the plan and the commit, which landed all the same."""
        planned = entry(4, ledger(log).read().version, ranges={SHARD: Range(9, 12)}, state=known(9))
        self.put_in_place(log, copy)
        landed = WrittenLog(log.path)
        landed.next = 2
        landed.ours(planned)
        for act in (lambda: ledger(log).read(), lambda: ledger(log).log.commit(2)):
            with pytest.raises(LedgerUnreadableError) as caught:
                act()
            assert caught.value.facts == {"version": 2, "base": 2}
        # The remedy.
        log.file(2).unlink()
        assert ledger(log).read().positions == {SHARD: 5}


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


ODD_COMMITS = [
    {"userMetadata": "[" * 100_000},
    {"userMetadata": '{"a":' * 100_000 + "1" + "}" * 100_000},
    {"userMetadata": 7},
    {"userMetadata": "\0"},
    {"userMetadata": "9" * 5000},
    {"userMetadata": '{"a": ' + "9" * 5000 + "}"},
    {"operationParameters": 7, "operationMetrics": [], "userName": 7, "operation": None},
    {"operationMetrics": {"numOutputRows": "1e400", "numCopiedRows": [], "numOutputBytes": -1, "numDeletedRows": "x"}},
    {"operationMetrics": {"numOutputRows": "9" * 5000}},
    {"timestamp": 10**30, "inCommitTimestamp": "soon"},
    {"timestamp": -1},
]


@pytest.mark.parametrize("info", ODD_COMMITS, ids=range(len(ODD_COMMITS)))
def test_what_a_stranger_says_of_a_commit_is_not_torn(log, info):
    two_batches(log)
    before = ledger(log).read()
    action = json.dumps({"commitInfo": {"timestamp": FIRST_MS, "operation": "WRITE", **info}})
    log.write(3, action + "\n")
    found = ledger(log).read()
    assert (found.version, found.positions, found.last_number) == (3, before.positions, before.last_number)
    assert log.log().commit(3).output_rows is None
    log.write(3, action[:-1] + "\n")
    with pytest.raises(LedgerUnreadableError, match="version 3"):
        ledger(log).read()


def test_what_python_does_not_read_is_not_torn(log):
    two_batches(log)
    digits, nested = "9" * 5000, '{"a":' * 100_000 + "1" + "}" * 100_000
    for version, value in enumerate((digits, nested), 3):
        log.write(version, f'{{"commitInfo":{{"operation":"WRITE","more":{value}}}}}\n')
    assert log.log().commit(3).operation == "WRITE"
    assert log.log().commit(4).entry is None


@pytest.mark.parametrize("target", ["9" * 5000, -5, "-5", 4, True, [1], {"a": 1}])
def test_a_restore_to_no_version_is_understood_by_its_files(log, target):
    two_batches(log)
    position = ledger(log).read().positions
    log.restore(version=target, timestamp="x" * 10_000)
    assert ledger(log).read().positions == position, "it left the files of the version before it"


NUMBERS = st.integers(-(2**62), 2**62)
SHARD_NAMES = st.builds(Shard, st.text("abcXYZ019._-", max_size=9), st.integers(0, MAX_SHARD))
TEXTS = st.text(max_size=9)
SETS = st.lists(st.tuples(NUMBERS | st.just(MIN_SEQUENCE), NUMBERS), max_size=3).map(lambda pairs: Intervals.of(*pairs))
STATES = st.builds(ShardState, SETS, SETS, st.none() | NUMBERS, st.none() | NUMBERS)


def by_shard(values):
    return st.dictionaries(SHARD_NAMES, values, max_size=3)


@settings(deadline=None, max_examples=examples(40))
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
        messages=NUMBERS,
        dead=NUMBERS,
        identities=st.dictionaries(TEXTS, TEXTS, max_size=2),
        hint=st.none() | st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=2),
    )
)
def test_entries_survive_json(entry):
    assert LedgerEntry.from_json(json.loads(entry.to_json())) == entry


@pytest.mark.parametrize(
    "fields",
    [{"hint": [1]}, {"hint": "x"}, {"hint": {"a": {"b": [1e400]}}}, {"identities": []}, {"identities": {"orders": 5}}],
    ids=repr,
)
def test_metadata_of_another_form_is_refused(log, fields):
    log.ours(entry(1, -1, kind="init", origin={SHARD: 0}))
    document = json.loads(entry(2, 0, ranges={SHARD: Range(0, 5)}).to_json())
    log.commit(metadata=json.dumps({**document, **fields}), transactions={"g/main": 2})
    with pytest.raises(FormatError):
        ledger(log).read()


def test_an_error_without_a_name_of_its_own_is_that_of_the_log(log, monkeypatch):
    two_batches(log)

    def fail(*arguments):
        raise OverflowError

    monkeypatch.setattr(Ledger, "_fold_to", fail)
    with pytest.raises(LedgerUnreadableError):
        ledger(log).read()


@pytest.mark.parametrize(
    "fields",
    [
        {"ranges": {SHARD: Range(5, 2**63)}},
        {"lost": {SHARD: Intervals.of((0, 2**63))}},
        {"state": {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, 2**63)), origin=0)}},
        {"ranges": {Shard("orders", MAX_SHARD + 1): Range(0, 5)}},
        {"bid": "no id"},
        {"ranges": {Shard(f"s{n}"): Range(0, 2**62 + n) for n in range(3000)} | {SHARD: Range(5, 2**63)}},
    ],
    ids=["range", "lost", "state", "shard", "bid", "packed"],
)
def test_an_entry_that_could_not_be_read_back_is_not_written(fields):
    with pytest.raises(FormatError):
        replace(entry(1, 0), **fields).to_json()


@settings(deadline=None, max_examples=examples(40))
@given(st.recursive(st.none() | NUMBERS | TEXTS, lambda x: st.lists(x) | st.dictionaries(TEXTS, x)))
def test_any_other_document_is_foreign(document):
    assert LedgerEntry.from_json(document) is None


def spark_time(milliseconds, zone="UTC"):
    """As Spark writes it into a RESTORE: the clock of its session, the fewest fraction digits, at least one."""
    moment = datetime.fromtimestamp(milliseconds / 1000, ZoneInfo(zone))
    return f"{moment:%Y-%m-%d %H:%M:%S}." + (f"{moment.microsecond // 1000:03d}".rstrip("0") or "0")
