"""What verify says of right tables and of damaged ones, whatever the transform makes of a message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import SparkSession

from spark_jobs import verify as module
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import adopt
from spark_jobs.claims.claim_state import ClaimState
from spark_jobs.ledger import table_rows
from spark_jobs.ledger.entries import CLAIMS, ClaimedRange, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.table_rows import MESSAGE_TIME, Timestamps, compared, timestamps_of
from spark_jobs.verify import ShardVerdict, verify
from stream_consumers.batches import Range
from stream_consumers.create import open_batch_source
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from stream_consumers.options import Limits
from tests.support.command_line import run
from tests.support.groups_without_spark import GroupWithoutSpark
from tests.support.ingesting import drain, ingestion
from tests.support.ss_files import NO_BEACONS, break_length, cut_front, numbered, write_file
from tests.support.streams import shard, write_stream

MESSAGES = 30
BATCH = 10


def verdict(url: str, what: Ingestion, **options: Any) -> ShardVerdict:
    with open_batch_source(url) as source:
        (found,) = verify(source, what, **options)
    return found


def wrong(found: ShardVerdict) -> tuple[int, int, int]:
    return found.missing, found.duplicated, found.unknown


def moment(sequence: int | None, moved_ms: int) -> int | None:
    """The timestamp of a message, in milliseconds; each call of ``write_stream`` starts at the same one."""
    return None if sequence is None else 1_700_000_000_000 + (sequence - 1) % MESSAGES + moved_ms


class Lake:
    """Messages 1 to 30 of one shard, and the table that three batches of a transform made of them.

    It makes no row of a message whose sequence is divisible by three, and of the others as many as the remainder says:
    twenty messages are thirty rows.
    """

    def __init__(self, folder: Path, *, transform: str = "exploded") -> None:
        self.url = write_stream(folder / "orders.ss", MESSAGES, shards=1)
        self.what = ingestion(folder / "t")
        self.path = self.what.table
        with open_batch_source(self.url) as source:
            self.identities = source.identities()
        self.commit(1, [], kind="init", origin={shard(0): 1}, switch="resumable")
        for number in range(3):
            self.batch(number, [sequence for sequence in self.within(number) for _ in range(sequence % 3)], transform)

    def within(self, number: int) -> range:
        return range(1 + BATCH * number, 1 + BATCH * (number + 1))

    def batch(self, number: int, sequences: list[int], transform: str, **details: Any) -> None:
        covered = Intervals.of((MIN_SEQUENCE, 1 + BATCH * number))
        fields = {"ranges": {shard(0): Range(1 + BATCH * number, 1 + BATCH * (number + 1))}, "messages": BATCH}
        state = {shard(0): ShardState(covered, origin=1)}
        self.commit(number + 2, sequences, transform=transform, state=state, **{**fields, **details})

    def commit(self, number: int, sequences: list[int], *, kind: str = "batch", **fields: Any) -> None:
        """As a run would write it."""
        base = number - 2
        entry = LedgerEntry(
            kind,
            "lakehouse",
            "lakehouse/main",
            number,
            "main",
            f"b{number}",
            base,
            identities=self.identities,
            **fields,
        )
        properties = CommitProperties(
            custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, number)]
        )
        write_deltalake(self.path, self.rows(sequences), mode="append", commit_properties=properties)
        file = Path(self.path, "_delta_log", f"{DeltaTable(self.path).version():020d}.json")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for info in (line["commitInfo"] for line in lines if "commitInfo" in line):
            info["operationMetrics"] = {"numOutputRows": str(len(sequences))}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def rows(self, sequences: list[int]) -> pa.Table:
        count = len(sequences)
        places = {"_shard": pa.array([0] * count, pa.int64()), "_sequence": pa.array(sequences, pa.int64())}
        return pa.table(
            {"_stream": pa.array(["orders"] * count, pa.string()), **places, "item": pa.array(range(count), pa.int64())}
        )

    def insert(self, *sequences: int) -> None:
        """Somebody else does."""
        write_deltalake(self.path, self.rows(list(sequences)), mode="append")

    def delete(self, where: str) -> None:
        DeltaTable(self.path).delete(where)

    def verdict(self, **options: Any) -> ShardVerdict:
        return verdict(self.url, self.what, **options)

    def letters(
        self, bid: str, *sequences: int | None, group: str = "lakehouse", moved_ms: int = 0, offset: int | None = None
    ) -> None:
        """Dead letters of a batch, as a run would write them before its rows; ``moved_ms`` after their messages."""
        count = len(sequences)
        names = {"_stream": "orders", "_batch": bid, "_group": group}
        texts = {name: pa.array([text] * count, pa.string()) for name, text in names.items()}
        places = {
            "_shard": pa.array([0] * count, pa.int64()),
            "_sequence": pa.array(sequences, pa.int64()),
            "offset": pa.array([offset] * count, pa.int64()),
            "_timestamp": pa.array([moment(sequence, moved_ms) for sequence in sequences], pa.timestamp("ms", "UTC")),
        }
        number = int(bid[1:])
        metadata = {"v": 1, "bid": bid, "app": f"{group}/main", "n": number, "number": number}
        properties = CommitProperties(custom_metadata={"userMetadata": json.dumps(metadata)})
        path = self.what.dead_letters().path
        write_deltalake(path, pa.table({**texts, **places}), mode="append", commit_properties=properties)

    def delete_letters(self, where: str) -> None:
        DeltaTable(self.what.dead_letters().path).delete(where)

    def forget_files(self) -> None:
        """What VACUUM does to the files that the batches wrote, after a compaction."""
        DeltaTable(self.path).optimize.compact()
        DeltaTable(self.path).vacuum(0, enforce_retention_duration=False, dry_run=False)

    def replay(self, number: int, part: Range, sequences: list[int], mode: str = "replace", **details: Any) -> None:
        covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 41)), origin=1)}
        fields: dict[str, Any] = {"messages": len(sequences), "transform": "one", "state": covered, **details}
        self.commit(number, sequences, kind="replay", mode=mode, ranges={shard(0): part}, **fields)


@pytest.fixture
def lake(folder: Path) -> Lake:
    return Lake(folder)


@pytest.fixture
def damaged(lake: Lake, folder: Path) -> Lake:
    """With a batch of the messages 31 to 40, of which two are dead letters: 31 and 32; the transform drops 33."""
    write_stream(folder / "orders.ss", BATCH, shards=1)
    lake.letters("b5", 31, 32)
    lake.batch(3, list(range(34, 41)), "one", messages=8, dead=2)
    return lake


def test_a_transform_that_makes_none_or_many_rows_of_a_message(lake: Lake) -> None:
    found = lake.verdict()
    assert (found.messages, found.rows, found.filtered, found.unexplained) == (30, 30, 10, 0)
    assert found.is_right


def test_one_of_two_rows_is_gone(lake: Lake) -> None:
    lake.delete("_sequence = 2 AND item = 1")
    assert lake.verdict().examples == {"missing": [2]}


def test_a_message_without_its_rows(lake: Lake) -> None:
    lake.delete("_sequence IN (2, 22)")
    found = lake.verdict()
    assert (found.examples, found.filtered) == ({"missing": [2, 22]}, 10)


def test_as_many_rows_as_there_were_but_others(lake: Lake) -> None:
    lake.delete("_sequence = 2 AND item = 1")
    lake.insert(1)
    found = lake.verdict()
    assert found.rows == 30
    assert found.examples == {"missing": [2], "duplicated": [1]}


def test_a_row_of_a_message_that_the_transform_drops_and_of_none_at_all(lake: Lake) -> None:
    lake.insert(3, 1000)
    assert lake.verdict().examples == {"unknown": [1000, 3]}
    assert not lake.verdict().is_right


def test_the_newest_batch_that_wrote_a_range_tells_what_is_there(lake: Lake) -> None:
    """A replay with another transform: of each message one row, but not of the last."""
    lake.delete("_sequence > 10 AND _sequence <= 20")
    covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 31)), origin=1)}
    lake.commit(
        5,
        list(range(11, 20)),
        kind="replay",
        transform="one",
        mode="replace",
        state=covered,
        ranges={shard(0): Range(11, 21)},
        messages=BATCH,
    )
    found = lake.verdict()
    assert (found.rows, found.filtered, found.is_right) == (28, 8, True)


def test_all_of_it_in_small_parts(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.delete("_sequence IN (2, 28)")
    lake.insert(*range(1000, 1040))
    whole = lake.verdict()
    assert wrong(whole) == (2, 0, 40)
    sizes: list[int] = []
    read: Callable[[Iterable[pa.RecordBatch]], Any] = table_rows.sequences_of

    def watched(batches: Iterable[pa.RecordBatch]) -> Any:
        found = read(batches)
        sizes.append(sum(map(len, found.values())))
        return found

    monkeypatch.setattr(module, "sequences_of", watched)
    assert replace(lake.verdict(limits=Limits(max_records=4)), examples={}) == replace(whole, examples={})
    assert max(sizes) <= 8


def test_rows_that_were_rewritten_and_files_that_are_gone(lake: Lake) -> None:
    right = lake.verdict()
    DeltaTable(lake.path).optimize.compact()
    assert lake.verdict() == right
    DeltaTable(lake.path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    assert lake.verdict() == right
    # What is left is the number of rows of each batch.
    lake.delete("_sequence = 2")
    assert wrong(lake.verdict()) == (2, 0, 0)
    lake.insert(11)
    assert wrong(lake.verdict()) == (2, 1, 0)


def test_files_that_are_gone_of_a_batch_that_was_replaced_in_part(lake: Lake) -> None:
    lake.delete("_sequence > 10 AND _sequence <= 15")
    covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 31)), origin=1)}
    replay = {"kind": "replay", "mode": "replace", "transform": "one", "state": covered}
    lake.commit(5, list(range(11, 16)), ranges={shard(0): Range(11, 16)}, messages=5, **replay)
    assert lake.verdict().is_right
    DeltaTable(lake.path).optimize.compact()
    DeltaTable(lake.path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    found = lake.verdict()
    assert (found.is_right, found.unexplained) == (True, 1)
    told = run("verify", "--source", lake.url, "--table", lake.path, "--group", "lakehouse")
    assert "1 message without rows may be filtered or missing" in told.stderr.replace("\n", " ")


def test_a_log_that_does_not_tell_any_more_is_no_reason_to_call_a_table_wrong(lake: Lake) -> None:
    DeltaTable(lake.path).create_checkpoint()
    for version in range(3):
        Path(lake.path, "_delta_log", f"{version:020d}.json").unlink()
    found = lake.verdict()
    assert (found.filtered, found.unexplained, found.is_right) == (4, 6, True)


def test_what_lies_before_positions_that_were_made_anew_is_not_compared_and_named(lake: Lake) -> None:
    assert lake.verdict().uncompared is None
    known = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 31)), origin=31)}
    lake.commit(5, [], kind="keep", transform="one", state=known)
    DeltaTable(lake.path).create_checkpoint()
    for version in range(4):
        Path(lake.path, "_delta_log", f"{version:020d}.json").unlink()
    assert lake.verdict().uncompared == Range(1, 31)
    lake.delete("_sequence > 25")
    found = lake.verdict()
    assert (found.uncompared, found.missing) == (Range(1, 31), 0)
    told = run("verify", "--source", lake.url, "--table", lake.path, "--group", "lakehouse")
    assert (told.exit_code, "1 to 31 is not compared" in told.stderr.replace("\n", " ")) == (0, True)
    # A replay is compared again, also where it wrote before the origin.
    lake.replay(6, Range(1, 21), [*range(1, 21)], state=known)
    assert lake.verdict().uncompared == Range(21, 31)


def test_without_a_transform_each_message_is_one_row(folder: Path) -> None:
    lake = Lake(folder)
    plain = ingestion(folder / "plain")
    other = Lake.__new__(Lake)
    other.url, other.what, other.path, other.identities = lake.url, plain, plain.table, lake.identities
    other.commit(1, [], kind="init", origin={shard(0): 1}, switch="resumable")
    for number in range(3):
        other.batch(number, [n for n in other.within(number) if n != 14] + [15] * (number == 1), "")
    found = other.verdict()
    assert found.examples == {"missing": [14], "duplicated": [15]}, "also if the batch itself was wrong"


def test_a_row_of_a_trimmed_message_is_missing_as_long_as_its_file_shows_it(folder: Path) -> None:
    lake = Lake.__new__(Lake)
    lake.url, lake.what = write_stream(folder / "orders.ss", MESSAGES, shards=1), ingestion(folder / "t")
    lake.path = lake.what.table
    with open_batch_source(lake.url) as source:
        lake.identities = source.identities()
    lake.commit(1, [], kind="init", origin={shard(0): 1}, switch="resumable")
    for number in range(3):
        lake.batch(number, list(lake.within(number)), "")
    cut_front(folder / "orders.ss", first=16)
    found = lake.verdict()
    assert (found.messages, found.rows, found.is_right) == (15, 30, True)
    lake.delete("_sequence IN (5, 12, 20)")
    assert lake.verdict().examples == {"missing": [5, 12, 20]}
    lake.forget_files()
    assert lake.verdict().examples == {"missing": [20]}, "no file shows the others"


def test_rows_that_were_adopted_are_what_they_are_until_a_batch_writes_them(folder: Path) -> None:
    lake = Lake(folder)
    copy = Lake.__new__(Lake)
    copy.url, copy.what, copy.identities = lake.url, ingestion(folder / "copy"), lake.identities
    copy.path = copy.what.table
    copy.insert(1, 2, 2, 4, 5, 5)
    copy.commit(2, [], kind="init", origin={shard(0): 11}, switch="resumable")
    begun = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 11)), origin=11)}
    copy.commit(3, list(copy.within(1)), state=begun, ranges={shard(0): Range(11, 21)}, messages=BATCH)
    found = copy.verdict()
    assert (found.messages, found.rows, found.is_right) == (10, 16, True)
    copy.insert(12)
    assert copy.verdict().examples == {"duplicated": [12]}
    # A replay of what lies before the origin is compared again.
    copy.delete("_sequence < 6 OR _sequence = 12")
    covered = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 21)), origin=11)}
    replay = {"kind": "replay", "mode": "replace", "state": covered}
    copy.commit(4, [1, 2, 3, 4], ranges={shard(0): Range(1, 6)}, messages=4, **replay)
    assert copy.verdict().examples == {"missing": [5, 12]}


def missing_dead(found: ShardVerdict) -> tuple[int, int, int, Mapping[str, int]]:
    return found.dead, found.filtered, found.missing, found.missing_dead


def test_dead_letters_that_are_gone_are_missing_and_not_filtered(damaged: Lake, folder: Path) -> None:
    damaged.letters("b7", 31, group="another")
    right = damaged.verdict()
    assert (right.is_right, missing_dead(right)) == (True, (2, 11, 0, {}))
    damaged.delete_letters("_sequence = 31 AND _group = 'lakehouse'")
    found = damaged.verdict()
    assert (found.is_right, missing_dead(found)) == (False, (1, 11, 1, {"b5": 1}))
    Path(damaged.what.dead_letters().path).rename(folder / "elsewhere")
    found = damaged.verdict()
    assert (found.is_right, missing_dead(found)) == (False, (0, 11, 2, {"b5": 2}))
    told = run("verify", "--source", damaged.url, "--table", damaged.path, "--group", "lakehouse")
    assert told.exit_code == 1
    assert "orders/0: batch b5 lacks 2 dead letters" in told.stderr.replace("\n", " ")


def test_dead_letters_of_other_messages(damaged: Lake) -> None:
    damaged.delete_letters("_sequence = 31")
    damaged.letters("b5", 31, moved_ms=1)
    found = damaged.verdict()
    assert (found.is_right, found.other, found.examples) == (False, 1, {"other": [31]})


def test_a_dead_letter_has_no_timestamp_where_no_table_can_hold_that_of_its_message() -> None:
    """Kafka takes any number of milliseconds."""

    def found(*timestamps_ms: int | None) -> Timestamps:
        count = len(timestamps_ms)
        places = [pa.array(["orders"] * count), pa.array([0] * count), pa.array(range(count))]
        rows = pa.RecordBatch.from_arrays([*places, pa.array(timestamps_ms, pa.int64())], names=[*MESSAGE_TIME])
        return timestamps_of([rows], MESSAGE_TIME)[shard(0)]

    held = found(MAX_TIMESTAMP_MS, MAX_TIMESTAMP_MS + 1, MIN_TIMESTAMP_MS - 1)
    same, other = compared(held, found(None, None, None))
    assert (list(same), list(other)) == ([1, 2], [0])


def test_dead_letters_that_are_gone_where_the_files_of_the_rows_are_gone(damaged: Lake) -> None:
    damaged.forget_files()
    damaged.delete_letters("_sequence = 31")
    damaged.delete("_sequence IN (34, 35, 36)")
    assert missing_dead(damaged.verdict()) == (1, 11, 4, {"b5": 1})


def test_dead_letters_that_are_gone_where_whole_batches_are_untold(damaged: Lake) -> None:
    damaged.replay(6, Range(40, 41), [40], transform="one")
    damaged.delete("_sequence = 40")
    damaged.insert(40)
    damaged.forget_files()
    damaged.delete_letters("_sequence = 31")
    found = damaged.verdict()
    assert (found.unexplained, found.missing, found.missing_dead) == (1, 1, {"b5": 1})


def test_dead_letters_that_are_gone_without_a_transform(folder: Path) -> None:
    lake = Lake(folder)
    write_stream(folder / "orders.ss", BATCH, shards=1)
    lake.batch(3, list(range(33, 41)), "", messages=8, dead=2)
    found = lake.verdict()
    assert (found.examples, found.missing, found.missing_dead) == ({"missing": [31, 32]}, 2, {"b5": 2})


def test_two_dead_letters_of_one_damaged_part_of_a_file(lake: Lake) -> None:
    for offset in (640, 640, 900, None, None):
        lake.letters("b2", None, offset=offset)
    found = lake.verdict()
    assert (found.dead, wrong(found)) == (5, (0, 1, 0))


def test_dead_letters_in_a_range_that_was_replaced_do_not_count(damaged: Lake) -> None:
    damaged.replay(6, Range(31, 32), [31])
    assert damaged.verdict().is_right
    damaged.delete_letters("_sequence = 31")
    assert damaged.verdict().is_right
    damaged.delete_letters("_sequence = 32")
    assert missing_dead(damaged.verdict()) == (0, 11, 1, {"b5": 1})
    # No more of them than there were sequences can have been in the range.
    shutil.rmtree(damaged.what.dead_letters().path)
    assert missing_dead(damaged.verdict()) == (0, 11, 1, {"b5": 1})
    damaged.delete("_sequence > 30")
    damaged.replay(7, Range(31, 41), list(range(31, 41)))
    assert damaged.verdict().is_right


def test_a_replay_that_appends_is_not_asked_for_its_dead_letters(damaged: Lake) -> None:
    damaged.replay(6, Range(31, 33), [], mode="append", dead=2)
    assert damaged.verdict().is_right


def test_dead_letters_of_what_a_restore_removed(damaged: Lake) -> None:
    DeltaTable(damaged.path).restore(DeltaTable(damaged.path).version() - 1)
    assert damaged.verdict().missing_dead == {}
    damaged.delete_letters("true")
    assert damaged.verdict().missing_dead == {}
    DeltaTable(damaged.path).restore(DeltaTable(damaged.path).version() - 1)
    assert damaged.verdict().missing_dead == {"b5": 2}


def test_dead_letters_of_claimed_entries(lake: Lake, folder: Path) -> None:
    write_stream(folder / "orders.ss", BATCH, shards=1)
    lake.letters("b5", 31, 32)
    claims = {shard(0): ClaimedRange(31, 41, 10)}
    lake.batch(3, list(range(34, 41)), "one", messages=8, dead=2, ranges={}, claims=claims)
    delivered = ClaimState({shard(0): Intervals.of((1, 41))}, {}, {})
    assert missing_dead(lake.verdict(claims=delivered)) == (2, 11, 0, {})
    lake.delete_letters("_sequence = 31")
    assert missing_dead(lake.verdict(claims=delivered)) == (1, 11, 1, {"b5": 1})


class ClaimingLake(Lake):
    """The same messages, in the table of a group that claims entries: what is delivered is asked of the server."""

    def __init__(self, folder: Path) -> None:
        self.url, self.what = write_stream(folder / "orders.ss", MESSAGES, shards=1), ingestion(folder / "t")
        self.path = self.what.table
        with open_batch_source(self.url) as source:
            self.identities = source.identities()
        self.commit(1, [], kind="init", origin={shard(0): 1}, switch=CLAIMS)

    def claim(self, number: int, claimed: Iterable[int], sequences: list[int], transform: str = "one") -> None:
        listed = sorted(claimed)
        claims = {shard(0): ClaimedRange(listed[0], listed[-1] + 1, len(listed))}
        known = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 1)), origin=1)}
        self.commit(number, sequences, transform=transform, claims=claims, messages=len(listed), state=known)

    def counts(self, *, pending: Iterable[int] = ()) -> tuple[int, int, int]:
        pending = {shard(0): np.array(sorted(pending), np.int64)}
        found = self.verdict(claims=ClaimState({shard(0): Intervals.of((1, 31))}, pending, {}))
        return found.missing, found.filtered, found.unexplained


ODD, EVEN = range(1, 31, 2), range(2, 31, 2)
KEPT = [sequence for sequence in ODD if sequence % 3]


def test_entries_that_no_batch_has_claimed_are_missing_and_not_filtered(folder: Path) -> None:
    """As where a backup was put in the place of the table: another batch had the even ones, and acknowledged them."""
    lake = ClaimingLake(folder)
    lake.claim(2, ODD, KEPT)
    assert lake.counts(pending=EVEN) == (0, 5, 0)
    assert lake.counts() == (15, 5, 0)
    lake.claim(3, EVEN, [2, 4])
    assert lake.counts() == (0, 18, 0)
    lake.forget_files()
    assert lake.counts() == (0, 0, 18)
    lake.delete("_sequence = 2")
    assert lake.counts() == (0, 0, 19), "how many entries there were is right"


def test_entries_outside_of_all_claims_are_missing_by_name(folder: Path) -> None:
    lake = ClaimingLake(folder)
    lake.claim(2, range(11, 21), [12, 14])
    lake.claim(3, range(26, 31), [])
    assert lake.counts(pending=[*range(1, 11), *range(21, 26)]) == (0, 13, 0)
    assert lake.counts(pending=range(1, 9)) == (7, 13, 0)
    found = lake.verdict(claims=ClaimState({shard(0): Intervals.of((1, 24))}, {}, {}))
    assert found.examples["missing"] == [1, 2, 3, 4, 5]


def test_entries_in_batches_that_the_log_forgot_are_untold(folder: Path) -> None:
    lake = ClaimingLake(folder)
    lake.claim(2, range(1, 11), [2, 4])
    lake.claim(3, [n for n in range(11, 31) if n % 2], [21])
    DeltaTable(lake.path).create_checkpoint()
    for version in range(2):
        Path(lake.path, "_delta_log", f"{version:020d}.json").unlink()
    assert lake.counts() == (0, 9, 18)


def test_entries_that_were_redriven_are_claimed_as_well(folder: Path) -> None:
    lake = ClaimingLake(folder)
    lake.claim(2, ODD, KEPT)
    lake.commit(3, [7], mode="replace", transform="one", places={shard(0): Intervals.of((7, 8), (9, 10))}, messages=2)
    lake.delete("_sequence = 7")
    lake.insert(7)
    assert lake.counts(pending=EVEN) == (0, 5, 0)
    assert lake.counts() == (15, 5, 0)


def test_what_a_group_that_claims_was_moved_over_is_skipped_after_a_switch(folder: Path) -> None:
    lake = ClaimingLake(folder)
    part = Range(1, 11)
    lost, claims = {shard(0): Intervals.of(part)}, {shard(0): ClaimedRange(1, 11, 10)}
    lake.commit(2, [], transform="one", skipped={shard(0): part}, lost=lost, claims=claims)
    lake.claim(3, range(11, 31), [*range(11, 31)])
    known = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 31)), origin=1)}
    lake.letters("b2", None)
    lake.commit(4, [], kind="fence", state=known, switch="resumable")
    found = lake.verdict()
    assert (found.skipped, found.missing, found.filtered, found.is_right) == (10, 0, 0, True)


def test_covered_messages_in_no_batch_are_missing_where_the_log_is_whole(folder: Path) -> None:
    lake = Lake(folder)
    write_stream(folder / "orders.ss", BATCH, shards=1)
    known = {shard(0): ShardState(Intervals.of((MIN_SEQUENCE, 41)), origin=1)}
    lake.commit(5, [], transform="one", state=known)
    found = lake.verdict()
    assert (found.examples, found.missing, found.unexplained) == ({"missing": [31, 32, 33, 34, 35]}, 10, 0)


def test_dead_letters_of_a_batch_of_several_shards(folder: Path) -> None:
    lake = Lake.__new__(Lake)
    lake.url, lake.what = write_stream(folder / "orders.ss", 8, shards=2), ingestion(folder / "t")
    lake.path = lake.what.table
    shards = [shard(0), shard(1)]
    with open_batch_source(lake.url) as source:
        lake.identities, ends = source.identities(), {one: extent.end for one, extent in source.extents().items()}
    lake.commit(1, [], kind="init", origin=dict.fromkeys(shards, 1), switch="resumable")
    ranges = {one: Range(1, ends[one]) for one in shards}
    lake.commit(2, [], transform="one", state={}, ranges=ranges, messages=3, dead=5)
    with open_batch_source(lake.url) as source:
        found = verify(source, lake.what)
    assert [(one.messages, *missing_dead(one)) for one in found] == [(4, 0, 0, 4, {"b2": 4}), (4, 0, 3, 1, {"b2": 1})]


def test_the_record_of_a_loss_that_is_gone(lake: Lake, folder: Path) -> None:
    write_stream(folder / "orders.ss", BATCH, shards=1)
    lake.letters("b5", 31, None)
    lake.batch(3, list(range(33, 41)), "one", messages=9, dead=1, lost={shard(0): Intervals.of((50, 60))})
    assert (lake.verdict().is_right, lake.verdict().dead) == (True, 2)
    lake.delete_letters("_sequence IS NULL")
    assert missing_dead(lake.verdict())[2:] == (1, {"b5": 1})


def test_each_message_counts_once_where_only_the_number_of_rows_is_left(folder: Path) -> None:
    lake = Lake(folder)
    write_stream(folder / "orders.ss", BATCH, shards=1)
    lake.batch(3, list(range(31, 39)), "one")
    lake.forget_files()
    lake.delete("_sequence > 32")
    found = lake.verdict()
    assert (found.messages, found.rows, found.filtered, found.missing) == (40, 32, 12, 6)


@pytest.mark.slow
@pytest.mark.spark
def test_deletion_vectors_renamed_columns_and_clones(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10, shards=1)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    table = f"delta.`{what.table}`"
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM {table} WHERE id = 3")
    found = verdict(url, what)
    assert (found.rows, found.missing, found.examples) == (9, 1, {"missing": [4]})
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN user TO customer")
    write_stream(folder / "orders.ss", 3, shards=1)
    drain(spark, url, replace(what, transform=lambda rows: rows.withColumnRenamed("user", "customer").where("id <> 1")))
    found = verdict(url, what)
    assert (found.rows, found.filtered, found.examples) == (11, 1, {"missing": [4]})
    clone = ingestion(folder / "clone")
    spark.sql(f"CREATE TABLE delta.`{clone.table}` SHALLOW CLONE {table}")
    with open_batch_source(url) as source:
        adopt(spark, source, clone)
    write_stream(folder / "orders.ss", 2, shards=1)
    drain(spark, url, replace(clone, transform=lambda rows: rows.withColumnRenamed("user", "customer")))
    found = verdict(url, clone)
    assert (found.messages, found.rows, found.lag, found.is_right) == (2, 13, 0, True)


@pytest.mark.parametrize(("broken", "messages"), [(101, 100), (1, 0)])
def test_a_file_whose_end_cannot_be_read_is_not_right(folder: Path, broken: int, messages: int) -> None:
    path = write_file(folder / "orders.ss", numbered(100, size=100), interval=NO_BEACONS)
    group = GroupWithoutSpark(f"file://{path}/orders", ingestion(folder / "t"))
    group.begin()
    group.ingest()
    assert verdict(group.url, group.what).is_right
    write_file(path, numbered(120, size=100), interval=NO_BEACONS)
    offset = break_length(path, broken)
    found = verdict(group.url, group.what)
    assert (found.messages, found.lag) == (messages, 0)
    assert (f"offset {offset}" in (found.unreadable_tail or ""), found.is_right) == (True, False)
    done = run("verify", "--source", group.url, "--table", group.what.table, "--group", "lakehouse", "--json")
    assert (done.exit_code, json.loads(done.stdout)["unreadable_tail"]) == (1, found.unreadable_tail)
    assert (found.unreadable_tail or "") in done.stderr


def test_who_else_has_changed_rows_is_known(folder: Path) -> None:
    lake = Lake(folder)
    table = DeltaTable(lake.path)
    assert list(lake.what.ledger().foreign()) == []
    lake.insert(1)
    table.update_incremental()
    table.update({"item": "7"}, predicate="_sequence = 2")
    table.merge(
        lake.rows([4]), "t._sequence = s._sequence", source_alias="s", target_alias="t"
    ).when_matched_delete().execute()
    table.optimize.compact()
    lake.commit(9, [])
    found = [(commit.version, commit.operation) for commit in lake.what.ledger().foreign()]
    assert found == [(6, "MERGE"), (5, "UPDATE"), (4, "WRITE")], "rows that are only put into other files are the same"
    assert all("delta-rs" in commit.by for commit in lake.what.ledger().foreign())
    DeltaTable(lake.path).restore(4)
    assert [commit.version for commit in lake.what.ledger().foreign()] == [4]


@pytest.mark.slow
@pytest.mark.spark
def test_runs_that_go_on_meanwhile_are_no_faults(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = ingestion(folder / "t")
    url = write_stream(folder / "orders.ss", 20, malformed=frozenset({3}))
    drain(spark, url, what)
    meanwhile = [
        lambda: write_stream(folder / "orders.ss", 10, malformed=frozenset({4, 7})),
        lambda: drain(spark, url, what),
    ]
    with open_batch_source(url) as source:
        extents = source.extents

        def go_on(**options: Any) -> Any:
            while meanwhile:
                meanwhile.pop(0)()
            return extents(**options)

        monkeypatch.setattr(source, "extents", go_on)
        found = verify(source, what)
    assert [one for one in found if not one.is_right] == []
    assert sum(one.rows + one.dead for one in found) == 20
    with open_batch_source(url) as source:
        assert sum(one.rows + one.dead for one in verify(source, what)) == 30
