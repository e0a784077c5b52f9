"""A corrected payload takes the place of that in the stream, whatever reads the message again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.dead_letters.corrections import Corrections
from spark_jobs.writing.keyed import Keys
from stream_assets import reject
from stream_consumers.create import open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.keyed_tables import BY_POSITION, BY_VALUE, KeyedTable

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SHARD = Shard("changes", 0)
DELETE = b'{"id": 2, "op": "d", "at": 2}'


class Corrected(KeyedTable):
    """A table some of whose messages a transform rejects."""

    def reject(self, condition: str) -> None:
        def transform(rows: DataFrame) -> DataFrame:
            return reject(rows, condition, "it is bad")

        self.transform = transform

    def redrive(self, payloads: Mapping[int, bytes] | None = None) -> None:
        own = {(SHARD, sequence): payload for sequence, payload in (payloads or {}).items()}
        what = Redrive(corrections=Corrections(own, by="ann") if own else None)
        list(drain_batches(RedriveJob(self.spark, self.ingestion, what, url=StreamUrl.parse(self.url))))
        self.drain()

    def rewind(self, to: int) -> None:
        with open_batch_source(self.url) as source:
            rewind(self.spark, source, self.ingestion, Bound(sequence=to))
        self.drain()

    def replay(self) -> None:
        with open_batch_source(self.url) as source:
            list(drain_batches(ReplayJob(self.spark, source, self.ingestion, Replay())))
        self.drain()

    def rebuild(self) -> None:
        with open_batch_source(self.url) as source:
            list(rebuild_events(self.spark, source, self.ingestion))

    def open(self) -> list[int]:
        parts = self.ingestion.dead_letters().open_places(self.ingestion.ledger())
        return sorted(sequence for part in parts for sequence in part.column("_sequence").to_pylist())

    def corrections(self) -> dict[int, bytes]:
        found = self.ingestion.dead_letters().corrections(self.ingestion.ledger())
        return dict(zip(found.column("_sequence").to_pylist(), found.column("correction").to_pylist(), strict=True))

    def clean_log(self) -> None:
        commits = sorted(Path(f"{self.folder}/t/_delta_log").glob("*.json"))
        for commit in commits[:-2]:
            commit.unlink()


@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE], ids=["position", "value"])
def test_it_stays_when_all_is_read_again_and_the_log_is_cleaned(spark: SparkSession, folder: Path, keys: Keys) -> None:
    table = Corrected(spark, folder, keys, records=100, properties={"delta.checkpointInterval": "1"})
    table.reject("name = 'b'")
    table.send(*({"id": n, "name": name, "op": "u", "at": n} for n, name in enumerate("abc", start=1)))
    table.drain()
    table.redrive({2: DELETE})
    table.transform = None
    for read_again in (table.replay, lambda: table.rewind(1), table.rebuild):
        read_again()
        assert table.rows() == {1: "a", 3: "c"}
        assert (table.open(), table.corrections()) == ([], {2: DELETE})
        assert table.verdict().is_right
    for number in range(4, 8):
        table.send({"id": number, "name": "d", "op": "u", "at": number})
        table.drain()
    table.clean_log()
    table.rewind(1)
    assert table.rows() == {1: "a", 3: "c", 4: "d", 5: "d", 6: "d", 7: "d"}
    assert (table.open(), table.corrections()) == ([], {2: DELETE})
    assert table.verdict().is_right


@pytest.mark.parametrize("records", [100, 1])
def test_it_stays_between_dead_letters_that_are_redriven(spark: SparkSession, folder: Path, records: int) -> None:
    table = Corrected(spark, folder, BY_POSITION, records=100)
    table.reject("name LIKE 'bad%'")
    names = {n: f"bad{n}" if n in (2, 4, 6) else f"n{n}" for n in range(1, 7)}
    table.send(*({"id": n, "name": name, "op": "u", "at": n} for n, name in names.items()))
    table.drain()
    table.redrive({4: b'{"id": 3, "op": "d", "at": 4}'})
    table.rewind(1)
    assert (table.rows(), table.open()) == ({1: "n1", 5: "n5"}, [2, 6])
    table.transform = None
    table.records = records
    table.redrive()
    table.drain()
    assert (table.rows(), table.open()) == ({1: "n1", 2: "bad2", 5: "n5", 6: "bad6"}, [])
    assert table.verdict().is_right


def test_it_stays_when_the_transform_refuses_it_for_a_time(spark: SparkSession, folder: Path) -> None:
    table = Corrected(spark, folder, BY_POSITION, records=100)
    table.reject("name = 'b'")
    table.send({"id": 1, "name": "a", "op": "u", "at": 1}, {"id": 2, "name": "b", "op": "u", "at": 2})
    table.drain()
    table.redrive({2: b'{"id": 5, "name": "bb", "op": "u", "at": 2}'})
    table.reject("name IN ('b', 'bb')")
    table.rebuild()
    assert (table.rows(), table.open()) == ({1: "a"}, [2])
    table.transform = None
    table.redrive()
    assert (table.rows(), table.open()) == ({1: "a", 5: "bb"}, [])
    assert table.verdict().is_right
    table.rewind(1)
    assert table.rows() == {1: "a", 5: "bb"}
    assert table.verdict().is_right


def test_a_rebuild_that_began_before_a_correction_does_not_end(spark: SparkSession, folder: Path) -> None:
    table = Corrected(spark, folder, BY_POSITION, records=100)
    table.reject("name = 'b'")
    table.send({"id": 1, "name": "a", "op": "u", "at": 1}, {"id": 2, "name": "b", "op": "u", "at": 2})
    table.drain()
    with open_batch_source(table.url) as source:
        events = rebuild_events(spark, source, table.ingestion)
        next(events)
        table.redrive({2: DELETE})
        with pytest.raises(InvalidOptionError):
            list(events)
    assert table.rows() == {1: "a"}
