"""Runs, replays, rewinds and rebuilds of keyed tables, killed with SIGKILL at each stage: no key is wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.run_ingestion import drain
from spark_jobs.verify_keyed import verify_keyed
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.decoders_of_runs import SCHEMA_VARIABLE
from tests.support.feeds import SHARDS, Feed, make_feed
from tests.support.keyed_tables import BY_POSITION, BY_VALUE, HISTORY_BY_POSITION, HISTORY_BY_VALUE, SCHEMA
from tests.support.killed_runs import asleep, kill_in_turn, logs, running
from tests.support.old_and_new import new, old
from tests.support.one_replay import MOVED
from tests.support.one_run import KEYS_VARIABLE

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.slow]
MESSAGES = 240
RECORDS = 100
MALFORMED = frozenset(range(5, MESSAGES, 10))
REPLAYED = range(60, 150)
REWOUND = 120
Row = Mapping[str, Any]


def changes_of(keys: Keys) -> Sequence[Row]:
    """Changes of keys, many of which delete. Each batch has the last change of some key, and changes of few keys.

    Only ``at`` orders the changes of a key that come from several shards.
    """
    dice, changes = random.Random(1), []
    for number in range(MESSAGES):
        shard = number % SHARDS if keys.is_ordered_by_position else None
        # No transform of the runs drops one of these.
        ids = [n for n in range(number // 4, number // 4 + 12) if n % 10 not in (3, 4) and shard in (None, n % SHARDS)]
        at, op = number + dice.randrange(-20, 20), dice.choice("uuud")
        changes.append({"id": dice.choice(ids), "name": f"n{number}", "op": op, "at": at})
    return changes


@dataclass(frozen=True)
class Mirror:
    """A feed of changes, and the table that is kept equal to it."""

    spark: SparkSession
    server: str
    feed: Feed
    folder: Path
    keys: Keys
    changes: Sequence[Row]

    @classmethod
    def of(
        cls, spark: SparkSession, server: str, request: pytest.FixtureRequest, folder: Path, kind: str, keys: Keys
    ) -> Mirror:
        feed, changes = make_feed(kind, folder, request.getfixturevalue), changes_of(keys)
        feed.payload = lambda number: json.dumps(changes[number]).encode()
        feed.send(MESSAGES, malformed=MALFORMED)
        return cls(spark, server, feed, folder, keys, changes)

    @property
    def table(self) -> Path:
        return self.folder / "t"

    @property
    def environment(self) -> Mapping[str, str]:
        return {KEYS_VARIABLE: json.dumps(asdict(self.keys)), SCHEMA_VARIABLE: SCHEMA}

    def ingestion(self, *, by_new: bool) -> Ingestion:
        return Ingestion(
            self.feed.group,
            str(self.table),
            Json(SCHEMA),
            new if by_new else old,
            limits=Limits(max_records=RECORDS),
            keys=self.keys,
        )

    def kill(self, *stages: str) -> None:
        """One run after the other; the JVM is killed, too, where it is that of the run."""
        for stage in stages:
            words = ("resumable", "" if "group" in stage else self.server, "main", "old")
            kill_in_turn(self.feed.url, self.table, [stage], self.feed.group, *words, environment=self.environment)

    def kill_again(self, stages: Sequence[str], *words: str, records: int = 20) -> None:
        """One replay, rewind or rebuild after the other. With no stage it is let live."""
        words = (self.feed.group, self.server, *words)
        options: dict[str, Any] = {"records": records, "module": "one_replay", "environment": self.environment}
        kill_in_turn(self.feed.url, self.table, stages, *words, **options)
        if not stages:
            with running(self.feed.url, self.table, "", *words, **options) as process:
                assert process.wait() == 0, logs(self.table)

    def drain(self, *, by_new: bool = False) -> None:
        source = StreamSource(StreamUrl.parse(self.feed.url))
        for _ in drain(self.spark, source, self.ingestion(by_new=by_new)):
            pass

    def state(self) -> LedgerState:
        return self.ingestion(by_new=False).ledger().read()

    def rows(self) -> list[Row]:
        found = self.spark.read.format("delta").load(str(self.table)).collect()
        return sorted(({name: _plain(value) for name, value in row.asDict().items()} for row in found), key=_place)

    def expected(self, by_new: Collection[int]) -> list[Row]:
        """The rows that the table must have. The new transform makes those of these messages."""
        by_value = not self.keys.is_ordered_by_position
        of_key: dict[int, list[dict[str, Any]]] = {}
        for number, change in enumerate(self.changes):
            if number not in MALFORMED:
                row = {
                    **change,
                    "made_by": "new" if number in by_new else "old",
                    "_stream": self.feed.stream,
                    "_shard": number % SHARDS,
                    "_sequence": self.feed.sequence(number),
                    "_timestamp": self.feed.moment(number),
                    "_deleted": change["op"] == "d",
                }
                if by_value:
                    row["_sequence_by"] = change["at"]
                of_key.setdefault(change["id"], []).append(row)
        found = []
        for rows in of_key.values():
            if by_value:
                rows.sort(key=lambda row: (row["at"], *_place(row)))
            if self.keys.keeps_history:
                starts = list(accumulate((row["at" if by_value else "_timestamp"] for row in rows), max))
                for row, start, end in zip(rows, starts, [*starts[1:], None], strict=True):
                    is_current = end is None and not row["_deleted"]
                    found.append({**row, "_valid_from": start, "_valid_to": end, "_is_current": is_current})
            elif by_value or not rows[-1]["_deleted"]:
                found.append(rows[-1])
        hidden = {"op"} if self.keys.keeps_deletions else {"op", "_deleted"}
        return sorted(({name: row[name] for name in row.keys() - hidden} for row in found), key=_place)

    def assert_equal(self, *, by_new: Collection[int] = ()) -> None:
        """All columns of all rows are right, each dead letter is there once, and the group is at the end."""
        assert self.rows() == self.expected(by_new)
        what = self.ingestion(by_new=bool(by_new))
        letters = what.dead_letters().counted(self.spark, what.ledger())
        assert letters is not None
        places = Counter((row["_shard"], row["_sequence"]) for row in letters.collect())
        assert places == Counter((number % SHARDS, self.feed.sequence(number)) for number in MALFORMED)
        assert self.feed.told() == self.feed.done(MESSAGES)
        state = self.state()
        assert not any(shard.redo for shard in state.shards.values())
        with open_batch_source(self.feed.url) as source:
            assert state.positions == {shard: extent.end for shard, extent in source.extents().items()}
            verdict = verify_keyed(self.spark, source, what)
        assert (verdict.is_right, verdict.messages) == (True, MESSAGES - len(MALFORMED))


def _made_by_any(rows: Iterable[Row]) -> list[Row]:
    return [{**row, "made_by": None} for row in rows]


def _place(row: Row) -> tuple[str, int, int]:
    return row["_stream"], row["_shard"], row["_sequence"]


def _plain(value: Any) -> Any:
    return round(value.timestamp() * 1000) if isinstance(value, datetime) else value


FIRST = ["initialized", "read", "mid-dead-letters", "rows written"]
SECOND = ["planned", "dead letters written", "mid-write", "mid-write!group-SIGKILL"]
THIRD = ["writing", "verified", "committed"]
LANDED = ["mid-write", "rows written", "verified"]


@pytest.mark.parametrize(
    ("kind", "keys", "stages"),
    [
        pytest.param("file", BY_POSITION, FIRST, id="file by position"),
        pytest.param("kafka", BY_POSITION, SECOND, id="kafka by position"),
        pytest.param("redis", BY_POSITION, THIRD, id="redis by position"),
        pytest.param("file", BY_VALUE, SECOND, id="file by value"),
        pytest.param("kafka", BY_VALUE, THIRD, id="kafka by value"),
        pytest.param("redis", BY_VALUE, FIRST, id="redis by value"),
        pytest.param("file", HISTORY_BY_VALUE, THIRD, id="file, history by value"),
        pytest.param("kafka", HISTORY_BY_POSITION, FIRST, id="kafka, history by position"),
        pytest.param("redis", HISTORY_BY_VALUE, SECOND, id="redis, history by value"),
    ],
)
def test_runs_that_are_killed_at_each_stage_are_continued(
    spark: SparkSession,
    server: str,
    folder: Path,
    request: pytest.FixtureRequest,
    kind: str,
    keys: Keys,
    stages: list[str],
) -> None:
    mirror = Mirror.of(spark, server, request, folder, kind, keys)
    mirror.kill(*stages)
    ledger = mirror.ingestion(by_new=False).ledger()
    assert sum(commit.entry.messages for commit in ledger.surviving() if commit.entry) <= 80, "each was killed early"
    mirror.drain()
    mirror.assert_equal()


def test_a_run_stopped_before_its_merge_wakes_up_after_another_one_finished(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Its changes, of keys that may have been deleted since, are not merged."""
    mirror = Mirror.of(spark, server, request, folder, "file", BY_POSITION)
    words = ("resumable", server, "main", "old")
    fault, options = "writing@2!-SIGSTOP", {"environment": mirror.environment, "records": 40}
    with asleep(mirror.feed.url, mirror.table, fault, mirror.feed.group, *words, **options):
        mirror.drain()
        version = mirror.state().version
    assert mirror.state().version == version
    mirror.assert_equal()


IN_REPLAY = ["planned", "read", "mid-dead-letters", "dead letters written", "writing", *LANDED]


@pytest.mark.parametrize(
    ("kind", "keys", "stages"),
    [
        pytest.param("kafka", BY_POSITION, IN_REPLAY, id="kafka by position"),
        pytest.param("redis", BY_VALUE, LANDED, id="redis by value"),
        pytest.param("file", HISTORY_BY_POSITION, LANDED, id="file, history by position"),
    ],
)
def test_a_replay_that_is_killed_at_each_stage_is_continued(
    spark: SparkSession,
    server: str,
    folder: Path,
    request: pytest.FixtureRequest,
    kind: str,
    keys: Keys,
    stages: list[str],
) -> None:
    """Between two of its runs, ingestion merges again what came after the messages that were replayed."""
    mirror = Mirror.of(spark, server, request, folder, kind, keys)
    mirror.drain()
    words = ("the-replay", mirror.feed.bound(REPLAYED.start), mirror.feed.bound(REPLAYED.stop))
    mirror.kill_again(stages, *words)
    mirror.drain(by_new=True)
    assert _made_by_any(mirror.rows()) == _made_by_any(mirror.expected(()))
    mirror.kill_again([], *words)
    mirror.drain(by_new=True)
    # Where rows of deleted keys go, everything behind the replay is merged again.
    mirror.assert_equal(by_new=REPLAYED if keys.keeps_deletions else range(REPLAYED.start, MESSAGES))


def test_a_rewind_and_its_ingestion_that_are_killed_at_each_stage_are_continued(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    mirror = Mirror.of(spark, server, request, folder, "redis", BY_POSITION)
    mirror.drain()
    words = ("the-rewind", mirror.feed.bound(REWOUND))
    mirror.kill_again([MOVED, *IN_REPLAY, "committed"], *words)
    mirror.kill_again([], *words)
    mirror.assert_equal(by_new=range(REWOUND, MESSAGES))


@pytest.mark.parametrize(
    ("kind", "keys", "last"),
    [
        pytest.param("redis", BY_POSITION, "mid-write", id="redis by position"),
        pytest.param("file", BY_VALUE, "rows written", id="file by value"),
        pytest.param("kafka", HISTORY_BY_VALUE, "verified", id="kafka, history by value"),
    ],
)
def test_a_rebuild_that_is_killed_at_each_stage_is_continued(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest, kind: str, keys: Keys, last: str
) -> None:
    """While it ingests into the staging table, then in the swap. After its last stage, the swap may have landed."""
    mirror = Mirror.of(spark, server, request, folder, kind, keys)
    mirror.drain()
    newest = mirror.state().newest
    assert newest is not None
    swap = newest.number + 1
    in_swap = [f"{stage}@{swap}" for stage in ("planned", "dead letters written", "writing", last)]
    mirror.kill_again(["initialized", "read@2", "rows written@3", *in_swap], "the-rebuild", records=RECORDS)
    mirror.kill_again([], "the-rebuild", records=RECORDS)
    mirror.assert_equal(by_new=range(MESSAGES))
