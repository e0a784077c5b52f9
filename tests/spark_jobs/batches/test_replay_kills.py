"""Replays and rewinds killed with SIGKILL at each step, then gone on with: as if nobody had killed them."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.decoders_of_runs import decoder_of, in_registry, order_in_avro
from tests.support.feeds import SHARDS, Feed, make_feed
from tests.support.killed_runs import kill_in_turn, logs, running
from tests.support.old_and_new import made, old, rows_of
from tests.support.one_replay import MOVED
from tests.support.schema_registry import Registry, schema_registry
from tests.support.streams import Identity

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.slow]
MESSAGES = 400
MALFORMED = frozenset(range(5, MESSAGES, 10))
GOOD = [number for number in range(MESSAGES) if number not in MALFORMED]
MIDDLE = range(80, 320)
# The numbers of a replay begin here at 1, and each run writes one or two before it is killed.
IN_REPLAY = ["planned@2", "read@3", "mid-dead-letters@4", "dead letters written@4", "mid-write@5", "rows written@6"]
IN_REPLAY += ["verified@7", "writing@8"]
AFTER_REWIND = [MOVED, "planned", "read", "mid-dead-letters", "dead letters written", "mid-write", "rows written"]
AFTER_REWIND += ["verified", "committed", "writing"]


@dataclass(frozen=True)
class Lake:
    """A feed, the table that all of it is in, and how many records a batch of a replay has."""

    spark: SparkSession
    feed: Feed
    what: Ingestion
    environment: Mapping[str, str]
    records: int

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        kind: str,
        folder: Path,
        request: pytest.FixtureRequest,
        registry: Registry | None = None,
        *,
        records: int = 24,
    ) -> Lake:
        feed = make_feed(kind, folder, request.getfixturevalue)
        if registry is not None:
            feed.payload = partial(order_in_avro, registry)
        feed.send(MESSAGES, malformed=MALFORMED)
        environment = in_registry(registry) if registry is not None else {}
        what = Ingestion(feed.group, str(folder / "t"), decoder_of(environment), old, limits=Limits(max_records=100))
        lake = cls(spark, feed, what, environment, records)
        for _ in drain(spark, StreamSource(StreamUrl.parse(feed.url)), lake.what):
            pass
        lake.assert_made(by_new=range(0))
        return lake

    @property
    def table(self) -> Path:
        return Path(self.what.table)

    def numbered(self, *faults: str) -> list[str]:
        """The same faults, with numbers that begin after those of the batches that the table has."""
        last = self.what.ledger().read().last_number
        parts = [fault.partition("@") for fault in faults]
        return [f"{step}@{int(number) + last}" if number else step for step, _, number in parts]

    def kill(self, faults: list[str], *words: str) -> None:
        """One process after the other."""
        kill_in_turn(
            self.feed.url,
            self.table,
            self.numbered(*faults),
            self.feed.group,
            *words,
            records=self.records,
            module="one_replay",
            environment=self.environment,
        )

    def finish(self, *words: str) -> None:
        """The last process is let live."""
        words = ("", self.feed.group, *words)
        with running(
            self.feed.url, self.table, *words, records=self.records, module="one_replay", environment=self.environment
        ) as process:
            assert process.wait() == 0, logs(self.table)

    def letters(self) -> Counter[Identity]:
        """Every dead letter that counts."""
        found = self.what.dead_letters().counted(self.spark, self.what.ledger())
        assert found is not None
        return Counter((row["_stream"], row["_shard"], row["_sequence"]) for row in found.collect())

    def assert_made(self, *, by_new: range) -> None:
        """Each row and each dead letter is there once, and the group is at the end."""
        assert rows_of(self.table) == made(self.feed, GOOD, by_new=by_new)
        assert self.letters() == Counter((self.feed.stream, n % SHARDS, self.feed.sequence(n)) for n in MALFORMED)
        assert self.feed.told() == self.feed.done(MESSAGES)
        with open_batch_source(self.feed.url) as source:
            assert [verdict.is_right for verdict in verify(source, self.what)] == [True] * SHARDS
            ends = {shard: extent.end for shard, extent in source.extents().items()}
        state = self.what.ledger().read()
        assert state.positions == ends
        assert not any(shard.redo for shard in state.shards.values())

    def news(self) -> int:
        """How many rows are made by the new transform by now."""
        return sum(row[5] == "new" for row in rows_of(self.table).elements())


def test_a_replay_that_is_killed_at_each_step_in_turn_is_gone_on_with(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    lake = Lake.of(spark, "file", folder, request)
    words = (server, "the-replay", lake.feed.bound(MIDDLE.start), lake.feed.bound(MIDDLE.stop))
    lake.kill(IN_REPLAY, *words)
    before, wanted = lake.news(), sum(made(lake.feed, GOOD, by_new=MIDDLE).values())
    assert 0 < before < len(MIDDLE) * 8 // 10, "each was killed on the way"
    lake.finish(*words)
    lake.assert_made(by_new=MIDDLE)
    assert sum(rows_of(lake.table).values()) == wanted
    numbers = [c.entry.number for c in lake.what.ledger().surviving() if c.entry and c.entry.kind == "replay"]
    assert len(numbers) == 10, "no message was replayed twice"


def test_a_replay_that_is_killed_with_its_jvm_in_the_middle_of_its_write(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    lake = Lake.of(spark, "file", folder, request, records=60)
    bounds = ("the-replay", lake.feed.bound(MIDDLE.start), lake.feed.bound(MIDDLE.stop))
    words = (*lake.numbered("mid-write@3"), lake.feed.group, "", *bounds)
    with running(lake.feed.url, lake.table, *words, records=lake.records, module="one_replay") as process:
        assert process.wait() == -signal.SIGKILL, logs(lake.table)
    lake.finish(server, *bounds)
    lake.assert_made(by_new=MIDDLE)


def test_a_rewind_and_its_ingestion_that_are_killed_at_each_step_in_turn_are_gone_on_with(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    lake = Lake.of(spark, "file", folder, request)
    words = (server, "the-rewind", lake.feed.bound(MIDDLE.start))
    lake.kill(AFTER_REWIND, *words)
    assert 0 < lake.news() < (MESSAGES - MIDDLE.start) * 8 // 10, "each was killed on the way"
    lake.finish(*words)
    lake.assert_made(by_new=range(MIDDLE.start, MESSAGES))


@pytest.mark.parametrize("kind", ["kafka", "redis", "registry"])
def test_a_replay_and_then_a_rewind_are_killed(
    spark: SparkSession, server: str, folder: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """On a broker, and of payloads in a file whose schema is in a registry."""
    with schema_registry() if kind == "registry" else nullcontext() as registry:
        lake = Lake.of(spark, "file" if registry else kind, folder, request, registry, records=40)
        words = (server, "the-replay", lake.feed.bound(MIDDLE.start), lake.feed.bound(MIDDLE.stop))
        lake.kill(["mid-dead-letters@2", "mid-write@3", "rows written@4", "verified@5"], *words)
        assert 0 < lake.news() < len(MIDDLE) * 8 // 10, "each was killed on the way"
        assert lake.feed.told() == lake.feed.done(MESSAGES), "a replay moves no group"
        lake.finish(*words)
        lake.assert_made(by_new=MIDDLE)
        words = (server, "the-rewind", lake.feed.bound(200), "")
        lake.kill([MOVED, "mid-dead-letters", "mid-write", "rows written", "verified"], *words)
        told, end = lake.feed.told(), lake.feed.done(MESSAGES)
        assert all(told[shard] <= position for shard, position in end.items())
        assert told != end or registry, "the broker follows the ledger back"
        lake.finish(*words)
        lake.assert_made(by_new=range(MIDDLE.start, MESSAGES))
