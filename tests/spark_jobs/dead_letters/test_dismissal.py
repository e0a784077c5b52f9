"""Dismissed dead letters, and payloads that were corrected: each message is accounted for once, whatever dies when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.dead_letter_jobs import NOT_OPEN, Dismissal, DismissJob, Redrive, RedriveJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.dead_letters.corrections import Corrections
from spark_jobs.dead_letters.reader import CORRECTED, DISMISSED, REPLACED, DeadLetterFilter, DeadLetters
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.entries import PAUSE
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import verify
from spark_jobs.writing.delta_table import DeltaWriter, read_table
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.options import FileProducerOptions, Limits
from stream_consumers.urls import StreamUrl
from tests.support.kafka_topics import Once
from tests.support.ss_files import flip, items
from tests.support.streams import Identity, sequences_in_table

pytestmark = pytest.mark.spark
BROKEN = (3, 8, 21)
EVERYTHING = DeadLetterFilter()
WHY = Dismissal("ann", "test messages")


class Lake:
    """A file of 30 messages, of which three are broken, and its table."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.url = spark, f"file://{folder}/orders.ss/orders"
        self.what = Ingestion("g", str(folder / "t"), Json("id BIGINT"), retry_seconds=0.0)
        options = FileProducerOptions(beacon_interval=1024)
        with create_producer(self.url, producer_options=options) as producer:
            for number in range(30):
                producer.send(b'{"id": ' if number in BROKEN else b'{"id": %d}' % number)
        self.ingest()
        self.letters = DeadLetters(self.what.table, group=self.what.group)

    def ingest(self) -> None:
        for _ in drain(self.spark, StreamSource(StreamUrl.parse(self.url)), self.what):
            pass

    def dismiss(
        self, observer: Observer = ignore_steps, limit: int | None = None, wanted: DeadLetterFilter = EVERYTHING
    ) -> int:
        job = DismissJob(self.spark, self.what, wanted, WHY, limit=limit, observer=observer)
        return sum(report.dead for report in drain_batches(job))

    def redrive(self, payloads: dict[int, bytes]) -> RedriveJob:
        corrections = Corrections({(Shard("orders"), n): own for n, own in payloads.items()}, "ann", "by hand")
        job = RedriveJob(self.spark, self.what, Redrive(corrections=corrections), url=StreamUrl.parse(self.url))
        for _ in drain_batches(job):
            pass
        return job

    def replay(self, observer: Observer = ignore_steps) -> None:
        with open_batch_source(self.url) as source:
            for _ in drain_batches(ReplayJob(self.spark, source, self.what, Replay(), observer=observer)):
                pass

    def ids(self) -> dict[int, int]:
        """The id of each row, by its sequence."""
        rows = DeltaTable(self.what.table).to_pyarrow_table(columns=["_sequence", "id"]).to_pylist()
        return {row["_sequence"]: row["id"] for row in rows}

    def restore(self, version: int) -> None:
        self.spark.sql(f"RESTORE TABLE delta.`{self.what.table}` TO VERSION AS OF {version}")

    def statuses(self) -> Counter[str]:
        return Counter(self.letters.to_arrow(DeadLetterFilter(includes_uncounted=True)).column("status").to_pylist())

    def open(self) -> list[int]:
        found: list[int] = self.letters.to_arrow(columns=["_sequence"]).column("_sequence").to_pylist()
        return found

    def lose_framing(self) -> None:
        """More messages, some of which cannot be told from the bytes around them, up to the next beacon."""
        file = Path(self.url.removeprefix("file://")).parent
        with create_producer(self.url) as producer:
            for number in range(30, 90):
                producer.send(b'{"id": %d, "text": "%s"}' % (number, b"x" * 100))
        flip(file, items(file)[50].offset, 0xF0)
        self.ingest()

    def unplaced(self) -> tuple[int, int, int]:
        """How many without a sequence count, by delta-rs and by Spark, and how many of them are open."""
        table, ledger = self.what.dead_letters(), self.what.ledger()
        sequences = [part.column("_sequence") for part in table.counted_places(ledger)]
        counted = table.counted(self.spark, ledger)
        assert counted is not None
        return (
            sum(column.null_count for column in sequences),
            counted.where("_sequence IS NULL").count(),
            sum(part.column("_sequence").null_count for part in table.open_places(ledger)),
        )

    def version(self) -> int:
        return DeltaTable(self.what.table).version()

    def assert_each_once(self) -> None:
        with open_batch_source(self.url) as source:
            (verdict,) = verify(source, self.what)
        assert verdict.is_right
        letters = self.what.dead_letters().counted_places(self.what.ledger())
        dead = Counter((r["_stream"], r["_shard"], r["_sequence"]) for part in letters for r in part.to_pylist())
        found: Counter[Identity] = sequences_in_table(self.what.table) + dead
        assert found == Counter({("orders", 0, n): 1 for n in range(1, 31)})


@pytest.fixture
def lake(spark: SparkSession, folder: Path) -> Lake:
    return Lake(spark, folder)


@pytest.mark.slow
def test_dismissed_ones_are_done_with_and_still_account_for_their_messages(lake: Lake) -> None:
    assert lake.open() == [4, 9, 22]
    before = lake.version()
    assert lake.dismiss(limit=2) == 2
    assert lake.open() == [22]
    (kind,) = lake.letters.kinds(DeadLetterFilter(is_dismissed=True))
    assert (kind.count, kind.dismissed) == (0, 2)
    columns = ["_sequence", "payload", "dismissed_by", "note"]
    first = lake.letters.to_arrow(DeadLetterFilter(is_dismissed=True), columns=columns).to_pylist()[0]
    assert list(first.values()) == [4, b'{"id": ', "ann", WHY.note]
    totals = lake.what.ledger().read().totals
    assert totals is not None
    assert totals.dead == 3, "no sensor reports them as new"
    lake.assert_each_once()
    assert (lake.dismiss(), lake.dismiss()) == (1, 0), "the others, and then none"
    lake.assert_each_once()
    lake.ingest()
    lake.restore(before)
    lake.ingest()
    assert lake.open() == [4, 9, 22], "a RESTORE takes a dismissal back"
    lake.assert_each_once()


@pytest.mark.slow
def test_lost_framing_is_dismissed_though_it_has_no_sequence(lake: Lake) -> None:
    lake.lose_framing()
    before = lake.version()
    wanted = DeadLetterFilter(reason="unreadable")
    (framing,) = lake.letters.to_arrow(wanted).to_pylist()
    assert (framing["_sequence"], framing["offset"] is not None) == (None, True)
    rows = sequences_in_table(lake.what.table)
    assert lake.dismiss(wanted=wanted) == 1
    assert lake.open() == [4, 9, 22]
    assert sequences_in_table(lake.what.table) == rows, "a dismissal touches no row"
    lake.restore(before)
    lake.ingest()
    assert lake.dismiss() == 4, "with the three that have a place"
    assert lake.open() == []
    (found,) = lake.letters.to_arrow(replace(wanted, is_dismissed=True)).to_pylist()
    assert (found["error"], found["dismissed_by"], found["dismisses"]) == (framing["error"], "ann", framing["_batch"])
    assert lake.dismiss() == 0
    assert lake.unplaced() == (1, 1, 0)
    lake.ingest()
    lake.restore(before)
    lake.ingest()
    assert lake.open() == [4, 9, 22, None], "a RESTORE takes a dismissal back"
    assert lake.unplaced() == (1, 1, 1)
    lake.dismiss()
    lake.replay()
    assert lake.unplaced() == (1, 1, 1), "a replay reads the damage again"
    with open_batch_source(lake.url) as source:
        assert verify(source, lake.what)[0].dead == 4


@pytest.mark.slow
def test_letters_that_another_run_has_redriven_since_they_were_listed_are_passed_over(lake: Lake) -> None:
    payloads = {(Shard("orders"), number + 1): b'{"id": %d}' % number for number in BROKEN}
    redrive = Redrive(corrections=Corrections(payloads, "ann", "by hand"))
    one_by_one = replace(lake.what, limits=Limits(max_records=1))
    first = drain_batches(RedriveJob(lake.spark, one_by_one, redrive, url=StreamUrl.parse(lake.url)))
    next(first)
    lake.redrive({number + 1: b'{"id": %d}' % number for number in BROKEN})
    assert list(first) == []
    assert lake.open() == []
    lake.assert_each_once()


@pytest.mark.slow
def test_a_dismissed_one_that_is_replayed_and_refused_again_is_a_dead_letter_again(lake: Lake) -> None:
    lake.dismiss()
    lake.replay()
    assert lake.open() == [4, 9, 22]
    lake.assert_each_once()


LATER = [pytest.param(step, marks=pytest.mark.slow) for step in (Step.WRITING, Step.ROWS_WRITTEN, Step.VERIFIED)]


@pytest.mark.parametrize("step", [Step.DEAD_LETTERS_WRITTEN, *LATER])
def test_one_that_was_killed_is_run_again(lake: Lake, step: Step) -> None:
    def die(at: Step, batch: Batch | None) -> None:
        if at is step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lake.dismiss(observer=die)
    lake.assert_each_once()
    assert lake.dismiss() == (3 if step in (Step.DEAD_LETTERS_WRITTEN, Step.WRITING) else 0)
    assert lake.open() == []
    lake.assert_each_once()


@pytest.mark.slow
def test_rows_that_another_run_writes_while_a_dismissal_is_in_flight_stay(lake: Lake) -> None:
    def replace_all() -> None:
        # Like a rewind with a decoder that can read the three, in the transaction sequence of the shard.
        ledger = replace(lake.what, shard=Shard("orders")).ledger()
        state = ledger.read()
        entry = ledger.entry("batch", state, ranges={Shard("orders"): Range(1, 31)}, mode="replace", messages=30)
        rows = read_table(lake.spark, ledger.log, version=state.version)
        fixed = rows.where("_sequence IN (5, 10, 23)").withColumn("_sequence", f.col("_sequence") - 1)
        assert DeltaWriter(lake.what.table).commit(rows.unionByName(fixed), entry, ledger=ledger) is not None

    assert lake.dismiss(observer=Once(Step.DEAD_LETTERS_WRITTEN, replace_all)) == 3
    assert sequences_in_table(lake.what.table) == Counter({("orders", 0, n): 1 for n in range(1, 31)})
    assert lake.statuses() == Counter({REPLACED: 6})


@pytest.mark.slow
def test_a_dismissal_that_loses_to_ingestion_asks_it_to_pause(lake: Lake) -> None:
    lost: list[Step] = []

    def ingest(at: Step, batch: Batch | None) -> None:
        if at is Step.DEAD_LETTERS_WRITTEN and len(lost) < 2:
            lost.append(at)
            with create_producer(lake.url) as producer:
                producer.send(b'{"id": 30}')
            lake.ingest()

    assert lake.dismiss(observer=ingest) == 3
    commits = [commit.entry for commit in lake.what.ledger().newest_first() if commit.entry]
    assert [entry.kind for entry in commits[:2]] == ["dismiss", PAUSE]
    assert lake.open() == []
    with open_batch_source(lake.url) as source:
        (verdict,) = verify(source, lake.what)
    assert (verdict.is_right, verdict.dead) == (True, 3)


@pytest.mark.slow
def test_a_dismissal_that_lands_after_a_restore_leaves_each_message_once(lake: Lake) -> None:
    lake.dismiss(observer=Once(Step.DEAD_LETTERS_WRITTEN, lambda: lake.restore(0)))
    lake.ingest()
    lake.assert_each_once()


def test_a_corrected_payload_becomes_a_row_and_the_original_is_kept(lake: Lake) -> None:
    job = lake.redrive({4: b'{"id": 400}', 9: b"no better", 5: b'{"id": 1}'})
    assert job.outcome.decoded == 1
    assert job.outcome.refused.pop(NOT_OPEN).first == "orders/0=5"
    assert [one.first for one in job.outcome.refused.values()] == ["orders/0=9"]
    assert lake.ids()[4] == 400
    assert lake.open() == [9, 22]
    rows = lake.letters.to_arrow(DeadLetterFilter(includes_uncounted=True)).to_pylist()
    (record,) = [row for row in rows if row["status"] == CORRECTED]
    assert (record["payload"], record["correction"]) == (b'{"id": ', b'{"id": 400}')
    assert (record["corrected_by"], record["note"]) == ("ann", "by hand")
    lake.assert_each_once()
    assert lake.redrive({4: b'{"id": 400}'}).outcome.decoded == 0, "done again it finds nothing"
    assert lake.dismiss() == 2
    assert lake.statuses()[DISMISSED] == 2
    lake.assert_each_once()
    lake.ingest()
    lake.assert_each_once()


@pytest.mark.slow
def test_a_correction_is_in_force_until_another_one_or_a_restore(lake: Lake) -> None:
    before = lake.version()
    lake.redrive({4: b'{"id": 400}'})
    lake.replay()
    assert (lake.ids()[4], lake.open()) == (400, [9, 22])
    assert lake.redrive({4: b'{"id": 500}'}).outcome.decoded == 1
    lake.replay()
    lake.replay()
    assert (lake.ids()[4], lake.open()) == (500, [9, 22])
    lake.assert_each_once()
    lake.restore(before)
    lake.replay()
    assert lake.open() == [4, 9, 22]
    lake.assert_each_once()


@pytest.mark.slow
def test_a_replay_in_flight_over_a_correction_has_it(lake: Lake) -> None:
    lake.replay(Once(Step.WRITING, lambda: lake.redrive({4: b'{"id": 400}'})))
    assert (lake.ids()[4], lake.open()) == (400, [9, 22])
    lake.assert_each_once()


@pytest.mark.parametrize(("by", "note"), [("ann", " "), ("", "why")])
def test_who_and_why_are_needed(by: str, note: str) -> None:
    with pytest.raises(InvalidOptionError):
        Dismissal(by, note)
