"""A rebuild removes no row and no dead letter whose message the stream has lost, wherever in the stream it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.dead_letter_jobs import Dismissal, DismissJob
from spark_jobs.batches.ingestion import Ingestion, Transform
from spark_jobs.batches.job import drain_batches, reports_of
from spark_jobs.batches.rebuild import delete_staging, rebuild_events, staging_of
from spark_jobs.dead_letters.reader import DeadLetterFilter, DeadLetters
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.verify import verify
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import DataLossError
from stream_consumers.file.scanner import Frame
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import DataLoss, ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain
from tests.support.keyed_tables import BY_POSITION, BY_VALUE, HISTORY_BY_POSITION, SCHEMA
from tests.support.ss_files import flip, items, payload_offset
from tests.support.streams import write_stream

URL = "memory://rebuild-losses/changes"
BROKER = StreamUrl.parse(URL)
CHANGES = Shard("changes")
KEPT = ErrorPolicy(on_data_loss="record")
pytestmark = pytest.mark.slow


@dataclass
class Table:
    """A table that is appended to, and its stream, which can lose messages."""

    spark: SparkSession
    what: Ingestion
    sent: int = 0

    def send(self, *changes: str) -> None:
        """Append changes like ``u1``, which updates key 1; ``!`` is garbage. ``u1@7`` has ``at`` 7, not its place."""
        with create_producer(URL) as producer:
            for change in changes:
                key, _, at = change[1:].partition("@")
                text = f'{{"id": {key}, "name": "n{self.sent}", "op": "{change[0]}", "at": {at or self.sent}}}'
                producer.send((change if change == "!" else text).encode())
                self.sent += 1
        drain(self.spark, URL, self.what)

    def lose(self, *sequences: int) -> None:
        """Lose messages, as a compacted topic or XDEL would."""
        log = memory_broker(BROKER).messages[CHANGES]
        log[:] = [message for message in log if message.sequence not in sequences]

    def rebuild(
        self, keys: Keys | None = None, errors: ErrorPolicy = ErrorPolicy(), transform: Transform | None = None
    ) -> None:
        self.what = replace(self.what, keys=keys, errors=errors, transform=transform)
        with open_batch_source(URL) as source:
            list(reports_of(rebuild_events(self.spark, source, self.what)))

    def assert_refused(self, keys: Keys | None = None, errors: ErrorPolicy = ErrorPolicy(), **facts: object) -> None:
        """Assert that a rebuild is refused, and has changed nothing."""
        before, rows = self.what, self.sequences()
        with pytest.raises(DataLossError) as raised:
            self.rebuild(keys, errors)
        assert raised.value.facts == facts
        assert self.sequences() == rows
        delete_staging(staging_of(self.what))
        self.what = before

    def sequences(self) -> list[int]:
        """The places of the rows of keys that are not deleted."""
        rows = self.spark.read.format("delta").load(self.what.table)
        rows = rows.where("NOT _deleted") if "_deleted" in rows.columns else rows
        return sorted(row["_sequence"] for row in rows.collect())

    def dead_letters(self) -> list[int]:
        found = self.what.dead_letters().counted_places(self.what.ledger())
        return sorted(sequence for part in found for sequence in part.column("_sequence").to_pylist())


@pytest.fixture
def table(spark: SparkSession, folder: Path) -> Iterator[Table]:
    yield Table(spark, Ingestion(group="g", table=f"{folder}/t", decoder=Json(SCHEMA), retry_seconds=0.0))
    forget_memory_broker(BROKER)


def test_rows_and_dead_letters_of_lost_messages_are_refused_or_kept(table: Table) -> None:
    table.send("u0", "u1", "u2", "u0", "!", "u1", "!", "u2")
    list(drain_batches(DismissJob(table.spark, table.what, DeadLetterFilter(), Dismissal("ann", "a test"), limit=1)))
    table.lose(1, 4)
    lost = {"rows": 1, "dead_letters": 1, "changes/0": "1 to 5"}
    table.assert_refused(**lost)
    table.assert_refused(HISTORY_BY_POSITION, **lost)
    table.assert_refused(HISTORY_BY_POSITION, KEPT, **lost)
    for _ in range(2):
        table.rebuild(errors=KEPT)
        assert (table.sequences(), table.dead_letters()) == ([0, 1, 2, 3, 5, 7], [4, 6])
        letters = DeadLetters(table.what.table, group="g").to_arrow(DeadLetterFilter(is_dismissed=True))
        (dismissed,) = letters.to_pylist()
        assert [dismissed[name] for name in ("_sequence", "dismissed_by", "note")] == [4, "ann", "a test"]


def test_rows_and_dead_letters_of_messages_that_were_damaged_since_are_refused_or_kept(
    spark: SparkSession, folder: Path
) -> None:
    path = folder / "orders.ss"
    url = write_stream(path, 40, shards=1, malformed=frozenset({3}))
    what = Ingestion("g", f"{folder}/t", Json("id BIGINT, user STRING"), retry_seconds=0.0)
    payloads = {item.sequence: payload_offset(item) for item in items(path) if isinstance(item, Frame)}

    def damage(*sequences: int) -> None:
        """Damage messages, or mend them again."""
        for sequence in sequences:
            flip(path, payloads[sequence])

    def stored() -> tuple[list[tuple[int, int]], list[tuple[int, bool, bytes]]]:
        rows = spark.read.format("delta").load(what.table).collect()
        letters = what.dead_letters().counted(spark, what.ledger())
        dead = letters.collect() if letters else []
        return (
            sorted((row["_sequence"], row["id"]) for row in rows),
            sorted((row["_sequence"], row["is_message"], bytes(row["payload"])) for row in dead),
        )

    def rebuild(loss: DataLoss) -> None:
        with open_batch_source(url) as source:
            asked = replace(what, errors=ErrorPolicy(on_data_loss=loss))
            list(reports_of(rebuild_events(spark, source, asked)))

    damage(8)
    drain(spark, url, what)
    before = stored()
    assert [letter[:2] for letter in before[1]] == [(4, True), (8, False)]
    damage(3, 4, 5)
    with pytest.raises(DataLossError) as raised:
        rebuild(DataLoss.ERROR)
    assert raised.value.facts == {"rows": 2, "dead_letters": 1, "orders/0": "3 to 6"}
    assert stored() == before
    rebuild(DataLoss.RECORD)
    assert stored() == before
    with pytest.raises(DataLossError):
        rebuild(DataLoss.ERROR)
    # A rebuild that continued would not read the messages that are mended.
    damage(3, 4, 5)
    rebuild(DataLoss.ERROR)
    assert stored() == before
    with open_batch_source(url) as source:
        assert all(verdict.is_right for verdict in verify(source, what))


def test_messages_that_the_transform_drops_are_no_loss(table: Table) -> None:
    table.send("u0", "u1", "u2", "u0", "!")
    table.lose(4)
    table.assert_refused(rows=0, dead_letters=1, **{"changes/0": "4 to 5"})
    table.rebuild(errors=KEPT, transform=lambda rows: rows.where("id <> 0"))
    assert (table.sequences(), table.dead_letters()) == ([1, 2], [4])


@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["by position", "by value"])
def test_a_row_per_key_needs_only_the_newest_change_of_the_key(table: Table, keys: Keys) -> None:
    table.send("u0", "u1", "u2", "u0", "d1", "u3", "u2", "u0")
    table.lose(0, 1, 2, 3)
    table.rebuild(keys)
    assert table.sequences() == [5, 6, 7]
    table.send("u3", "u4", "u2")
    table.lose(5, 6)
    table.rebuild(keys)
    assert table.sequences() == [7, 8, 9, 10]
    table.lose(9)
    table.assert_refused(keys, rows=1, dead_letters=0, **{"changes/0": "9 to 10"})
    table.assert_refused(keys, KEPT, rows=1, dead_letters=0, **{"changes/0": "9 to 10"})


@pytest.mark.parametrize("was", [BY_VALUE, None], ids=["by value", "appended"])
def test_a_deletion_counts_only_where_the_rebuild_would_bring_its_key_back(table: Table, was: Keys | None) -> None:
    """An older change, which came later, is still there, and so is a deletion whose key is gone altogether."""
    table.what = replace(table.what, keys=was)
    table.send("u0@1", "d1@10", "u1@5", "d2@12", "u3@11")
    table.lose(1, 3)
    for errors in (ErrorPolicy(), KEPT):
        table.assert_refused(BY_VALUE, errors, rows=1, dead_letters=0, **{"changes/0": "1 to 2"})
    table.send("u1@20")
    table.rebuild(BY_VALUE)
    assert table.sequences() == [0, 4, 5]
