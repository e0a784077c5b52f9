"""Which entries say all that the ledger knows, how small the others are, and what older and newer formats are told."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_jobs.ledger.entries import (
    MAX_PLAIN_BYTES,
    MAX_UNPACKED_BYTES,
    ClaimedRange,
    LedgerEntry,
    ShardState,
    pack,
    unpack,
)
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import FULL_EVERY, MAX_AGE_VERSIONS, Ledger, LedgerState
from stream_consumers.batches import Range
from stream_consumers.errors import LedgerTruncatedError, UnsupportedVersionError
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog, made_entry

HOUR_MS = 3_600_000
SHARDS = tuple(Shard("orders", number) for number in range(60))


def now_ms() -> int:
    return int(time.time() * 1000)


class Group:
    """A group of many shards, whose batches are planned as jobs do it."""

    def __init__(self, path: Path, shards: tuple[Shard, ...] = SHARDS, **details: object) -> None:
        self.log = WrittenLog(path, **details)  # type: ignore[arg-type]
        self.ledger = Ledger(self.log.log(), group="g", member="main")
        self.commit("init", origin=dict.fromkeys(shards, 0), identities={"orders": "kafka:a"})

    def read(self) -> LedgerState:
        return Ledger(self.log.log(), group="g", member="main").read()

    def commit(self, kind: str, *, age_ms: int = 0, **fields: object) -> LedgerEntry:
        entry = self.ledger.entry(kind, self.ledger.read(), **fields)
        self.log.ours(entry, timestamp_ms=now_ms() - age_ms)
        return entry

    def batch(self, shard: Shard = SHARDS[0], **fields: object) -> LedgerEntry:
        position = self.ledger.read().positions[shard]
        return self.commit("batch", ranges={shard: Range(position, position + 5)}, **fields)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path / "table")


def test_every_tenth_entry_of_a_sequence_is_full_and_the_state_is_the_same(group: Group) -> None:
    entries = [group.batch(SHARDS[number % 7]) for number in range(3 * FULL_EVERY)]
    full = [number for number, entry in enumerate(entries) if entry.is_full]
    assert [later - earlier for earlier, later in pairwise(full)] == [FULL_EVERY, FULL_EVERY]
    state = group.read()
    assert state.positions == {shard: 5 * sum(n % 7 == shard.id for n in range(30)) for shard in SHARDS}
    assert state.identities == {"orders": "kafka:a"}
    assert all(not entry.identities and entry.state is None for entry in entries if not entry.is_full)


def test_few_shards_are_in_every_entry(tmp_path: Path) -> None:
    group = Group(tmp_path / "table", SHARDS[:30])
    assert all(group.batch().is_full for _ in range(2 * FULL_EVERY))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("fence", {"switch": "switching"}),
        ("accept", {"identities": {"orders": "kafka:a", "orders#2": "kafka:b"}}),
        ("keep", {}),
        ("batch", {"mode": "replace", "ranges": {SHARDS[0]: Range(0, 0)}, "until": {SHARDS[0]: 5}}),
        ("batch", {"mode": "replace", "ranges": {SHARDS[0]: Range(5, 9)}, "skipped": {SHARDS[0]: Range(5, 9)}}),
    ],
)
def test_what_begins_moves_or_switches_is_full(group: Group, kind: str, fields: Mapping[str, object]) -> None:
    assert not group.batch().is_full
    assert group.commit(kind, **fields).is_full


def test_behind_a_restore_the_next_entry_is_full(group: Group) -> None:
    group.batch()
    group.log.restore(version=0)
    assert group.batch().is_full
    assert not group.batch().is_full


def test_a_full_entry_is_due_after_an_hour_or_many_versions_of_others(group: Group) -> None:
    group.commit("fence", age_ms=HOUR_MS - 60_000)
    assert not group.batch().is_full
    group.commit("fence", age_ms=HOUR_MS)
    assert group.batch().is_full
    for _ in range(MAX_AGE_VERSIONS - 1):
        group.log.commit("OPTIMIZE")
    assert not group.batch().is_full
    assert group.batch().is_full


def test_a_table_that_keeps_its_log_shortly_gets_them_more_often(tmp_path: Path) -> None:
    group = Group(tmp_path / "table", properties={"delta.logRetentionDuration": "interval 2 hours"})
    group.commit("fence", age_ms=4 * 60_000)
    assert not group.batch().is_full
    group.commit("fence", age_ms=6 * 60_000)
    assert group.batch().is_full


def test_what_an_entry_on_its_way_does_not_know_is_not_undone_by_it(group: Group) -> None:
    late = group.ledger.entry("batch", group.ledger.read(), ranges={SHARDS[1]: Range(0, 7)})
    group.commit("accept", identities={"orders": "kafka:a", "orders#2": "kafka:b"}, ended={SHARDS[1]: 7})
    group.log.ours(late)
    assert not late.is_full
    assert group.read().identities == {"orders": "kafka:a", "orders#2": "kafka:b"}
    assert group.read().positions[SHARDS[1]] == 7


def test_without_the_newest_full_entry_the_log_is_truncated(group: Group) -> None:
    group.batch()
    group.batch()
    DeltaTable(str(group.log.path)).create_checkpoint()
    group.log.clean_before(1)
    with pytest.raises(LedgerTruncatedError, match="version 0"):
        group.read()


@pytest.mark.parametrize("positions", [10**8, 10**12])
def test_a_batch_of_a_thousand_shards_takes_ten_kilobytes_at_most(tmp_path: Path, positions: int) -> None:
    shards = tuple(Shard("orders", number) for number in range(1000))
    group = Group(tmp_path / "table", shards)
    starts = {shard: positions + 7_919 * shard.id**2 % positions for shard in shards}
    group.commit("init", origin={})
    ranges = {shard: Range(start, start + 400 + 7 * shard.id % 5000) for shard, start in starts.items()}
    all_shards = group.commit("batch", ranges=ranges)
    one_shard = group.commit("batch", ranges={shards[7]: Range(positions, positions + 1)})
    assert not all_shards.is_full
    assert len(all_shards.to_json()) <= 10_000
    assert len(one_shard.to_json()) <= 500
    assert LedgerEntry.from_json(json.loads(all_shards.to_json())) == all_shards


def test_a_packed_entry_is_read_back() -> None:
    odd = ShardState(Intervals.of((MIN_SEQUENCE, 5), (9, 12)), Intervals.of((2, 3)), origin=0, claimed=4, ended=12)
    entry = made_entry(
        3,
        2,
        state={shard: ShardState(Intervals.of((MIN_SEQUENCE, 10 * shard.id)), origin=-3) for shard in SHARDS}
        | {Shard("other", 2**40): odd, Shard("orders#2", 0): ShardState()},
        ranges={shard: Range(shard.id, 2**62 - shard.id) for shard in SHARDS},
        claims={shard: ClaimedRange(shard.id, 9, 3) for shard in SHARDS},
        until=dict.fromkeys(SHARDS, 7),
        hint={"offset": 2**70, "positions": {str(shard): shard.id for shard in SHARDS}, "orders": [1, None, True]},
        uncounted={f"bid{number}": {SHARDS[0]: Intervals.of((1, 2))} for number in range(30)},
        lost={SHARDS[0]: Intervals.of((1, 2), (5, 6))},
        places={SHARDS[1]: Intervals.of((3, 4), (8, 11))},
    )
    text = entry.to_json()
    assert "packed" in json.loads(text)
    assert LedgerEntry.from_json(json.loads(text)) == entry
    with pytest.raises(UnsupportedVersionError):
        LedgerEntry.from_json(json.loads(text.replace('"packed":"', '"packed":"x')))


def test_a_short_text_is_json_that_people_read(group: Group) -> None:
    text = group.batch().to_json()
    assert len(text) < MAX_PLAIN_BYTES
    assert json.loads(text)["ranges"] == {"orders/0": [0, 5]}


def test_packing_keeps_every_kind_of_value() -> None:
    values = {"orders/1": [1, 2], "orders/2": 5, "orders/3": [], "orders/04": 1, "x": True, "orders/5": "text"}
    document = {"mixed": values, "tables": {f"s/{n}": {f"t/{m}": m - n for m in range(20)} for n in range(20)}}
    assert unpack(pack(document)) == document


def packed(skeleton: object, left: bytes = b"") -> str:
    text = json.dumps(skeleton).encode()
    return base64.b85encode(zlib.compress(b"%d\n" % len(text) + text + left)).decode()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        packed({"\0columns": [["s", True, 10**9, 0]], "\0rest": {}}),
        packed({"\0columns": [["s", True, 10**9, 1]], "\0rest": {}}, bytes(16)),
        packed({"\0columns": [["s", True, 1, -1]], "\0rest": {}}, bytes(16)),
        packed({"\0columns": [["s", True, 1, 10**18]], "\0rest": {}}, bytes(16)),
        packed({}, bytes(MAX_UNPACKED_BYTES)),
        packed({})[:-5],
    ],
    ids=["no columns", "too many rows", "negative", "fewer bytes", "bomb", "cut"],
)
def test_a_packed_text_takes_no_more_than_it_holds(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of the codec, whatever it says
        unpack(text)
