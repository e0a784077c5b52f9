"""Redrives: which dead letters become rows, what is left alone, and what they are next to other runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches import target_table
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Outcome, Redrive, RedriveJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.dead_letters.reader import DeadLetterFilter, DeadLetters
from spark_jobs.dead_letters.table import DEAD_LETTER_SCHEMA
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.rejection import reject
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import StreamNotFoundError
from stream_consumers.options import ErrorPolicy, Limits
from stream_consumers.urls import StreamUrl
from tests.support.decoders_of_runs import in_registry, order_in_avro
from tests.support.kafka_topics import Once
from tests.support.killed_runs import kill_in_turn, logs, running
from tests.support.polling import until
from tests.support.schema_registry import schema_registry
from tests.support.streams import Identity, sequences_in_table

STRICT, TODAY = Json("id BIGINT, user STRING NOT NULL"), Json("id BIGINT, user STRING")
# What only the decoder of today can read, and what no decoder can.
FIXED, HOPELESS = range(3, 60, 7), (5, 33)
COLORS = b"red", b"blue"
# One dead letter a batch: their numbers begin at 1, and each run writes one or two before it is killed.
# The numbers of their batches: ingestion has written four.
FAULTS = ["planned@6", "read@7", "dead letters written@8", "mid-write@9", "rows written@10"]
FAULTS += ["verified@11", "writing@12"]


def even(rows: DataFrame) -> DataFrame:
    """Drops every other message."""
    return rows.where("id % 2 = 0")


@dataclass(frozen=True)
class Lake:
    """A file, and the table that all of it is in, read with the strict decoder."""

    spark: SparkSession
    url: str
    strict: Ingestion
    fixed: Callable[[int], bytes] = lambda number: b'{"id": %d}' % number

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        folder: Path,
        *,
        records: int = 25,
        fixed: Callable[[int], bytes] | None = None,
        **more: object,
    ) -> Lake:
        what = Ingestion("lakehouse", str(folder / "t"), STRICT, limits=Limits(max_records=records), retry_seconds=0.0)
        lake = cls(spark, f"file://{folder}/orders.ss/orders", replace(what, **more))  # type: ignore[arg-type]
        lake = replace(lake, fixed=fixed) if fixed else lake
        lake.send(range(60))
        lake.ingest(lake.strict)
        return lake

    @property
    def today(self) -> Ingestion:
        return replace(self.strict, decoder=TODAY)

    def send(self, numbers: Iterable[int]) -> None:
        with create_producer(self.url) as producer:
            for number in numbers:
                whole = b'{"id": %d, "user": "u"}' % number
                payload = b'{"id": ' if number in HOPELESS else self.fixed(number) if number in FIXED else whole
                producer.send(payload, shard=number % 2, timestamp_ms=1_700_000_000_000 + 1000 * number)

    def ingest(self, what: Ingestion, observer: Observer = ignore_steps) -> list[BatchReport]:
        return list(drain(self.spark, StreamSource(StreamUrl.parse(self.url)), what, observer=observer))

    def job(self, wanted: Redrive | None = None, observer: Observer = ignore_steps, **more: object) -> RedriveJob:
        url, what = StreamUrl.parse(self.url), replace(self.today, **more)  # type: ignore[arg-type]
        return RedriveJob(self.spark, what, wanted or Redrive(), url=url, observer=observer)

    def redrive(self, wanted: Redrive | None = None, observer: Observer = ignore_steps, **more: object) -> Outcome:
        job = self.job(wanted, observer, **more)
        for _ in drain_batches(job):
            pass
        return job.outcome

    def replay(self, what: Ingestion) -> None:
        with open_batch_source(self.url) as source:
            for _ in drain_batches(ReplayJob(self.spark, source, what, Replay())):
                pass

    def dead(self) -> Counter[Identity]:
        letters = self.strict.dead_letters().counted_places(self.strict.ledger())
        rows = [row for batch in letters for row in batch.to_pylist()]
        return Counter((row["_stream"], row["_shard"], row["_sequence"]) for row in rows)

    def restore(self, version: int) -> None:
        self.spark.sql(f"RESTORE TABLE delta.`{self.strict.table}` TO VERSION AS OF {version}")

    def assert_none_is_lost_or_doubled(self) -> None:
        """Whatever became of a redrive, each message is a row or a dead letter."""
        log, version, found = self.strict.ledger().log, None, Counter[Identity]()
        # The server may still commit what a process that was killed has asked it for.
        while (snapshot := log.snapshot()) is not None and snapshot.version != version:
            version = snapshot.version
            found = sequences_in_table(self.strict.table) + self.dead()
        assert found == Counter(map(place, range(60)))

    def assert_each_once(self, *, dead: Iterable[int], count: int = 60, what: Ingestion | None = None) -> None:
        """Each message is a row or a dead letter, and ``verify`` says so."""
        assert self.dead() == Counter(map(place, dead))
        everything = Counter(map(place, range(count)))
        assert sequences_in_table(self.strict.table) == everything - Counter(map(place, dead))
        self.assert_right()

    def assert_right(self) -> None:
        with open_batch_source(self.url) as source:
            found = verify(source, self.strict)
        assert [verdict for verdict in found if not verdict.is_right or verdict.unexplained] == []


def place(number: int) -> Identity:
    return ("orders", number % 2, number // 2 + 1)


def test_what_decodes_now_becomes_rows_and_the_rest_stays(spark: SparkSession, folder: Path) -> None:
    lake = Lake.of(spark, folder, records=60)
    lake.assert_each_once(dead=[*FIXED, *HOPELESS])
    written = pa.schema(DeltaTable(lake.strict.dead_letters().path).schema().to_arrow())
    assert {column.name: column.type for column in written} == {
        column.name: column.type for column in DEAD_LETTER_SCHEMA
    }
    before, files = lake.strict.ledger().read(), set(DeltaTable(lake.strict.table).file_uris())
    Path(lake.url.removeprefix("file://").removesuffix("/orders")).rename(folder / "away.ss")
    found = lake.job().preview()
    assert (found.decoded, found.dead) == (len(FIXED), 2)
    assert {reason: refusal.count for reason, refusal in found.refused.items()} == {"not a JSON object": 2}
    assert found.refused["not a JSON object"].first == "orders/1=3"
    assert lake.strict.ledger().read().version == before.version
    assert lake.redrive() == found
    (folder / "away.ss").rename(folder / "orders.ss")
    lake.assert_each_once(dead=HOPELESS)
    assert files < set(DeltaTable(lake.strict.table).file_uris()), "no file was written again"
    state = lake.strict.ledger().read()
    assert (state.positions, state.version) == (before.positions, before.version + 1)
    rows = {row["id"]: row for row in DeltaTable(lake.strict.table).to_pyarrow_table().to_pylist()}
    assert rows[10]["user"] is None
    assert rows[10]["_timestamp"].timestamp() == 1_700_000_010
    again = lake.redrive()
    assert (again.decoded, again.dead) == (0, 2)
    assert lake.strict.ledger().read().version == state.version, "there is nothing to write"


@pytest.mark.slow
def test_bounds_limits_small_batches_and_what_the_transform_drops(spark: SparkSession, folder: Path) -> None:
    lake = Lake.of(spark, folder, transform=even)
    # In shard 0 are 10, 24, 38 and 52, in shard 1 3, 5, 17, 31, 33, 45 and 59.
    found = lake.redrive(Redrive(Bound.parse("orders/0=7"), Bound.parse("2023-11-14T22:14:10Z")))
    assert (found.decoded, found.dead) == (2, 0), "24 and 38"
    found = lake.redrive(Redrive(limit=3))
    assert (found.decoded, found.dead) == (3, 0), "10, 52 and 3"
    found = lake.redrive(Redrive(Bound.parse("2023-11-14T22:13:37Z")), limits=Limits(max_records=2))
    assert (found.decoded, found.dead) == (4, 1), "17, 31, 33, 45 and 59, in three batches"
    assert lake.dead() == Counter(map(place, HOPELESS))
    everything = Counter(place(number) for number in range(0, 60, 2))
    assert sequences_in_table(lake.strict.table) == everything
    lake.assert_right()
    entries = [c.entry for c in lake.strict.ledger().surviving() if c.entry and c.entry.places]
    assert [entry.messages for entry in entries] == [1, 1, 2, 3, 2]


@pytest.mark.slow
def test_a_faster_replay_leaves_nothing(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_table, "MAX_PAUSE_SECONDS", 0.0)
    lake = Lake.of(spark, folder)
    done = []

    def replay_first(step: Step, batch: Batch | None) -> None:
        if step is Step.WRITING and not done:
            done.append(step)
            lake.replay(lake.today)

    found = lake.redrive(observer=replay_first)
    assert done
    assert (found.decoded, found.dead) == (0, 2), "those of the replay are tried instead"
    lake.assert_each_once(dead=HOPELESS)
    lake.replay(lake.strict)
    lake.assert_each_once(dead=[*FIXED, *HOPELESS])
    assert lake.redrive().decoded == len(FIXED)
    lake.assert_each_once(dead=HOPELESS)


@pytest.mark.slow
def test_others_write_amid_a_redrive(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_table, "MAX_PAUSE_SECONDS", 0.0)
    lake = Lake.of(spark, folder)
    lake.send(range(60, 80))

    def others_first() -> None:
        lake.ingest(lake.today)
        lake.redrive(Redrive(limit=3))

    found = lake.redrive(observer=Once(Step.WRITING, others_first))
    assert found.decoded == len(FIXED) - 3, "those that the other one has left"
    lake.assert_each_once(dead=HOPELESS, count=80)


@pytest.mark.slow
def test_a_restore_takes_a_redrive_back_and_one_in_its_middle_is_repaired(spark: SparkSession, folder: Path) -> None:
    lake = Lake.of(spark, folder)
    before = lake.strict.ledger().read().version
    lake.redrive()
    lake.assert_each_once(dead=HOPELESS)
    lake.restore(before)
    lake.assert_each_once(dead=[*FIXED, *HOPELESS])
    lake.redrive()
    lake.assert_each_once(dead=HOPELESS)
    lake.restore(before)
    lake.redrive(observer=Once(Step.WRITING, lambda: lake.restore(before - 1)))
    state = lake.strict.ledger().read()
    assert any(shard.redo or len(shard.covered.ranges) > 1 for shard in state.shards.values()), "it landed late"
    lake.ingest(lake.today)
    lake.assert_each_once(dead=HOPELESS)


@pytest.mark.slow
def test_a_preview_knows_the_columns_that_were_made_of_new_fields(spark: SparkSession, folder: Path) -> None:
    decoder = Json("id BIGINT")
    lake = Lake(
        spark,
        f"file://{folder}/orders.ss/orders",
        Ingestion(
            "lakehouse", str(folder / "t"), decoder, errors=ErrorPolicy(schema_changes="add_columns"), retry_seconds=0.0
        ),
    )
    for payload in (b'{"id": 1, "size": 1}', b'{"id": 2, "size": "L"}'):
        with create_producer(lake.url) as producer:
            producer.send(payload)
        lake.ingest(lake.strict)
    assert sum(lake.dead().values()) == 1
    assert lake.job(decoder=decoder).preview().decoded == lake.redrive(decoder=decoder).decoded == 0


@pytest.mark.slow
def test_what_a_transform_rejects_for_a_new_field_is_a_dead_letter_once(spark: SparkSession, folder: Path) -> None:
    lake = Lake.of(spark, folder, fixed=lambda number: b'{"id": %d, "color": "%s"}' % (number, COLORS[number % 2]))

    def no_red(rows: DataFrame) -> DataFrame:
        return reject(rows, rows["color"] == "red", "it is red") if "color" in rows.columns else rows

    policy = ErrorPolicy(schema_changes="add_columns", on_bad_rows="dead_letter")
    today = {"errors": policy, "transform": no_red}
    expected = lake.job(**today).preview()
    assert expected.decoded == sum(number % 2 for number in FIXED)
    assert lake.redrive(**today) == expected
    red = [number for number in FIXED if not number % 2]
    lake.assert_each_once(dead=[*red, *HOPELESS])
    version = DeltaTable(f"{lake.strict.table}_dead_letters").version()
    assert lake.redrive(**today).decoded == 0
    assert DeltaTable(f"{lake.strict.table}_dead_letters").version() == version


def test_a_table_without_dead_letters_and_one_that_is_not_there(spark: SparkSession, folder: Path) -> None:
    lake = Lake(spark, f"file://{folder}/orders.ss/orders", Ingestion("lakehouse", str(folder / "t"), STRICT))
    with pytest.raises(StreamNotFoundError):
        lake.redrive()
    lake.send([1])
    lake.ingest(lake.strict)
    assert lake.redrive() == lake.job().preview() == Outcome()


@pytest.mark.kill
@pytest.mark.slow
def test_redrives_in_two_processes_at_once_write_each_row_once(spark: SparkSession, server: str, folder: Path) -> None:
    lake = Lake.of(spark, folder)
    one = (lake.url, Path(lake.strict.table), "", "lakehouse", server)
    with running(*one, records=4, module="one_redrive") as first:
        # Each has a log of its own.
        until(lambda: "planned" in logs(one[1]), seconds=600)
        with running(*one, records=4, module="one_redrive") as second:
            assert (first.wait(), second.wait()) == (0, 0), logs(one[1])
    lake.assert_each_once(dead=HOPELESS)
    entries = [c.entry for c in lake.strict.ledger().surviving() if c.entry and c.entry.places]
    assert sum(entry.messages for entry in entries) == len(FIXED), "none was redriven twice"
    listed = DeadLetters(lake.strict.table, group=lake.strict.group).kinds(DeadLetterFilter(includes_uncounted=True))
    assert [(kind.count, kind.replaced) for kind in listed] == [(0, len(FIXED)), (len(HOPELESS), 0)]


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "registry"])
def test_a_redrive_killed_at_each_step_is_continued(spark: SparkSession, server: str, folder: Path, kind: str) -> None:
    """Each process finds what the one before left; with a registry, what was read as JSON is Avro."""
    with schema_registry() if kind == "registry" else nullcontext() as registry:
        lake = Lake.of(spark, folder, fixed=partial(order_in_avro, registry) if registry else None)
        environment = in_registry(registry) if registry else None
        table, words = Path(lake.strict.table), ("lakehouse", server)
        for fault in FAULTS:
            kill_in_turn(lake.url, table, [fault], *words, records=1, module="one_redrive", environment=environment)
            lake.assert_none_is_lost_or_doubled()
        assert len(HOPELESS) < len(list(lake.dead())) < len(FIXED) + len(HOPELESS), "each was killed on the way"
        with running(lake.url, table, "", *words, records=1, module="one_redrive", environment=environment) as process:
            assert process.wait() == 0, logs(table)
    lake.assert_each_once(dead=HOPELESS)
    entries = [c.entry for c in lake.strict.ledger().surviving() if c.entry and c.entry.places]
    assert [entry.messages for entry in entries] == [1] * len(FIXED), "none was redriven twice"
