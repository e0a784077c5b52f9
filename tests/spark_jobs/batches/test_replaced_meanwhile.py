"""What replaces rows takes the place of what was there at its plan: redrives and RESTOREs that come between win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.dead_letters import table as dead_letter_table
from spark_jobs.dead_letters.corrections import Corrections
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.rejection import reject
from spark_jobs.verify import verify
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import DataLossError, InvalidOptionError
from stream_consumers.memory import memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, DataLoss, ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.delta_writes import clean_log

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ORDERS = Shard("orders")
A, B = b'{"id": 1, "user": "a"}', b'{"id": 1, "user": "b"}'


@dataclass
class Orders:
    """Messages in memory, of which some are broken or are gone since, and their table."""

    spark: SparkSession
    folder: Path
    keys: Keys | None = None
    transform: Callable[[DataFrame], DataFrame] | None = None
    sharing: ConsumerMode = ConsumerMode.RESUMABLE
    on_data_loss: DataLoss = DataLoss.ERROR
    name: str = field(default_factory=lambda: f"meanwhile-{uuid4().hex}")

    @property
    def url(self) -> StreamUrl:
        return StreamUrl.parse(f"memory://{self.name}/orders")

    @property
    def what(self) -> Ingestion:
        decoder = Json("id BIGINT, user STRING")
        errors, table = ErrorPolicy(on_data_loss=self.on_data_loss), f"{self.folder}/t"
        more = {"keys": self.keys, "transform": self.transform, "sharing": self.sharing}
        return Ingestion("g", table, decoder, errors=errors, retry_seconds=0.0, **more)

    def send(self, *payloads: bytes) -> None:
        with create_producer(self.url) as producer:
            for payload in payloads:
                producer.send(payload)
        self.drain()

    def lose(self, sequence: int) -> None:
        messages = memory_broker(self.url).messages[ORDERS]
        messages[:] = [message for message in messages if message.sequence != sequence]

    def drain(self, observer: Observer = ignore_steps) -> None:
        with open_batch_source(self.url) as source:
            for what, _ in self.what.by_sequence([ORDERS]):
                list(drain_batches(IngestJob(self.spark, source, what, observer=observer)))

    def rewind(self) -> None:
        with open_batch_source(self.url) as source:
            rewind(self.spark, source, self.what, Bound(sequence=0))

    def redrive(self, payloads: Mapping[int, bytes], observer: Observer = ignore_steps) -> None:
        own = {(ORDERS, sequence): payload for sequence, payload in payloads.items()}
        what = Redrive(corrections=Corrections(own, by="ann"))
        list(drain_batches(RedriveJob(self.spark, self.what, what, url=self.url, observer=observer)))

    def replay(self, observer: Observer = ignore_steps) -> None:
        with open_batch_source(self.url) as source:
            list(drain_batches(ReplayJob(self.spark, source, self.what, Replay(), observer=observer)))

    def rebuild(self, observer: Observer = ignore_steps) -> None:
        with open_batch_source(self.url) as source:
            list(rebuild_events(self.spark, source, self.what, observer=observer))

    def version(self) -> int:
        return self.what.ledger().read().version

    def delete(self, sequence: int) -> None:
        self.spark.sql(f"DELETE FROM delta.`{self.what.table}` WHERE _sequence = {sequence}")

    def restore(self, version: int) -> None:
        self.spark.sql(f"RESTORE TABLE delta.`{self.what.table}` TO VERSION AS OF {version}").collect()

    def dead_letters(self) -> set[int]:
        parts = list(self.what.dead_letters().counted_places(self.what.ledger()))
        found = [number for part in parts for number in part.column("_sequence").to_pylist()]
        assert len(set(found)) == len(found)
        return set(found)

    def is_right(self) -> bool:
        with open_batch_source(self.url) as source:
            return all(one.is_right for one in verify(source, self.what))

    def users(self) -> dict[int, str]:
        rows = self.spark.read.format("delta").load(self.what.table).collect()
        assert len({row["_sequence"] for row in rows}) == len(rows)
        return {row["_sequence"]: row["user"] for row in rows}


def at(step: Step, act: Callable[[], None], *, kind: str = "", mode: str = "") -> Observer:
    """Calls ``act`` at the step of the first batch of this kind and mode."""
    met: list[Step] = []

    def observer(now: Step, batch: Batch | None) -> None:
        if now is step and not met and batch is not None:
            own = batch.kind, batch.fields.get("mode", "append")
            if all(wanted in ("", found) for wanted, found in zip((kind, mode), own, strict=True)):
                met.append(now)
                act()

    return observer


def order(number: int) -> bytes:
    return b'{"id": %d, "user": "u%d"}' % (number, number)


@pytest.mark.parametrize("sharing", [ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED])
def test_a_rewound_batch_has_the_correction_that_came_while_it_was_read(
    spark: SparkSession, folder: Path, sharing: ConsumerMode
) -> None:
    orders = Orders(spark, folder, sharing=sharing)
    orders.send(order(0), b"broken", order(2))
    orders.redrive({1: A})
    orders.rewind()
    orders.drain(at(Step.READ, lambda: orders.redrive({1: B}), mode="replace"))
    assert orders.users() == {0: "u0", 1: "b", 2: "u2"}


@pytest.mark.parametrize("sharing", [ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED])
@pytest.mark.parametrize("payload", [b"broken", b'{"id": 1, "user": "bad"}'], ids=["dead letter", "row"])
def test_a_rewound_batch_has_the_correction_that_makes_no_row_and_came_while_it_was_read(
    spark: SparkSession, folder: Path, sharing: ConsumerMode, payload: bytes
) -> None:
    is_kept = "user != 'dropped'"
    orders = Orders(spark, folder, sharing=sharing)
    orders.transform = lambda rows: reject(rows.where(is_kept), "user = 'bad'", "bad")
    orders.send(order(0), payload, order(2))
    assert orders.dead_letters() == {1}
    orders.transform = lambda rows: rows.where(is_kept)
    orders.rewind()
    orders.drain(at(Step.READ, lambda: orders.redrive({1: b'{"id": 1, "user": "dropped"}'}), mode="replace"))
    orders.drain()
    assert orders.users() == {0: "u0", 2: "u2"}
    assert orders.dead_letters() == set()
    assert orders.is_right()


@pytest.mark.parametrize("keys", [None, Keys(["id"])], ids=["rows", "keys"])
def test_the_newest_correction_is_in_force_after_a_rebuild_with_other_keys(
    spark: SparkSession, folder: Path, keys: Keys | None
) -> None:
    orders = Orders(spark, folder, keys=None if keys else Keys(["id"]))
    orders.send(order(0), b"broken", order(2))
    for _ in range(3):
        orders.replay()
    orders.redrive({1: A})
    orders.drain()
    orders.keys = keys
    orders.rebuild()
    orders.redrive({1: B})
    orders.drain()
    assert orders.users() == {0: "u0", 1: "b", 2: "u2"}
    orders.replay()
    orders.drain()
    assert orders.users() == {0: "u0", 1: "b", 2: "u2"}


def test_a_rebuild_keeps_the_last_copy_that_a_redrive_makes_before_the_swap(spark: SparkSession, folder: Path) -> None:
    orders = Orders(spark, folder)
    orders.send(order(0), b"broken", order(2))
    orders.lose(1)
    with pytest.raises((DataLossError, InvalidOptionError)):
        orders.rebuild(at(Step.PLANNED, lambda: orders.redrive({1: A}), kind="rebuild"))
    assert orders.users() == {0: "u0", 1: "a", 2: "u2"}


@pytest.mark.parametrize("keys", [None, Keys(["id"])], ids=["rows", "keys"])
def test_a_rebuild_keeps_the_last_copy_that_a_restore_brings_before_the_swap(
    spark: SparkSession, folder: Path, keys: Keys | None
) -> None:
    orders = Orders(spark, folder, keys=keys)
    orders.send(order(0), order(1), order(2))
    before = orders.version()
    orders.delete(1)
    orders.lose(1)
    with pytest.raises(InvalidOptionError):
        orders.rebuild(at(Step.PLANNED, lambda: orders.restore(before), kind="rebuild"))
    assert orders.users() == {0: "u0", 1: "u1", 2: "u2"}


def test_a_replay_keeps_the_last_copy_that_a_restore_brings_before_its_write(spark: SparkSession, folder: Path) -> None:
    orders = Orders(spark, folder)
    orders.send(order(0), order(1), order(2))
    before = orders.version()
    orders.delete(1)
    orders.lose(1)
    with pytest.raises(DataLossError):
        orders.replay(at(Step.WRITING, lambda: orders.restore(before)))
    assert orders.users() == {0: "u0", 1: "u1", 2: "u2"}


@pytest.mark.parametrize("kind", ["replay", "rebuild"])
def test_the_last_copy_of_a_dead_letter_stays_that_a_restore_brings_before_a_write(
    spark: SparkSession, folder: Path, kind: str
) -> None:
    orders = Orders(spark, folder, transform=lambda rows: rows.where("user != 'dropped'"))
    orders.send(order(0), b"broken", order(2))
    before = orders.version()
    orders.redrive({1: b'{"id": 1, "user": "dropped"}'})
    assert orders.dead_letters() == set()
    orders.lose(1)
    restore = at(Step.WRITING, lambda: orders.restore(before), kind=kind)
    orders.replay(restore) if kind == "replay" else orders.rebuild(restore)
    assert orders.dead_letters() == {1}
    with pytest.raises(DataLossError):
        orders.drain()
    assert orders.dead_letters() == {1}
    assert not orders.is_right()
    assert orders.users() == {0: "u0", 2: "u2"}


def test_a_replay_keeps_the_copy_that_a_restore_brings_in_place_of_a_newer_one(
    spark: SparkSession, folder: Path
) -> None:
    orders = Orders(spark, folder, on_data_loss=DataLoss.RECORD)
    orders.send(order(0), b"broken", order(2))
    orders.redrive({1: A})
    before = orders.version()
    orders.redrive({1: B})
    orders.lose(1)
    orders.replay(at(Step.WRITING, lambda: orders.restore(before)))
    assert orders.users() == {0: "u0", 1: "a", 2: "u2"}


def test_a_correction_of_a_redrive_that_was_killed_is_never_in_force(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if ingestion has other transaction sequences, and the log of the dead-letter table is cleaned."""

    def kill() -> None:
        raise KeyboardInterrupt

    orders = Orders(spark, folder, sharing=ConsumerMode.LOAD_BALANCED)
    orders.send(order(0), b"broken", order(2))
    with pytest.raises(KeyboardInterrupt):
        orders.redrive({1: A}, at(Step.DEAD_LETTERS_WRITTEN, kill))
    monkeypatch.setattr(dead_letter_table, "ABANDONED_AFTER_MS", -1)
    orders.send(b"broken, too")
    clean_log(orders.what.dead_letters().path)
    orders.send(order(4))
    assert orders.what.dead_letters().corrections(orders.what.ledger()).num_rows == 0
    orders.replay()
    assert orders.dead_letters() == {1, 3}
    assert orders.users() == {0: "u0", 2: "u2", 4: "u4"}
    assert orders.is_right()
