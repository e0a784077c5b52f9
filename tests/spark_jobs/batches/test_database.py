"""A table that is kept equal to one of a real Postgres, through Debezium and Kafka, whatever happens on the way."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.job import drain_batches, reports_of
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.verify_keyed import verify_keyed
from spark_jobs.writing.keyed import Keys
from stream_consumers.options import ErrorPolicy
from tests.support.customers import ADDED, COLUMNS, TABLE, Customers
from tests.support.debezium import PREFIX, debezium
from tests.support.decoders_of_runs import DEBEZIUM_VARIABLE
from tests.support.kafka_topics import MALFORMED, Pipeline, Topics
from tests.support.killed_runs import kill_in_turn
from tests.support.one_run import KEYS_VARIABLE, QUICK, REBUILD_VARIABLE, SCHEMA_CHANGES_VARIABLE
from tests.support.postgres import postgres_server

pytestmark = [pytest.mark.slow, pytest.mark.kill]
PARTITIONS = 3
# Messages of a new partition, which is not rewound.
FEW = 10
# A producer learns of new partitions when it asks for them.
OPTIONS = {"producer.override.metadata.max.age.ms": "500"}


class Mirror:
    """The table that is kept equal to the customers of a database."""

    def __init__(self, topics: Topics, topic: str, keys: Keys, server: str) -> None:
        self._decoder: dict[str, Any] = {"schema": COLUMNS, "source_order": bool(keys.sequence_by)}
        options = {"columns": list(keys.columns), "sequence_by": keys.sequence_by}
        self._words = ("resumable", server)
        self._environment = {
            DEBEZIUM_VARIABLE: json.dumps(self._decoder),
            KEYS_VARIABLE: json.dumps(options),
            SCHEMA_CHANGES_VARIABLE: "add_columns",
        }
        self.pipeline: Pipeline = topics.pipeline(
            topic,
            records=1000,
            decoder=Debezium(**self._decoder),
            keys=keys,
            client=QUICK,
            errors=ErrorPolicy(schema_changes="add_columns"),
            retry_seconds=60.0,
        )

    def kill(self, stages: Sequence[str], **more: str) -> None:
        """Start one run after the other, each of which is killed at its stage."""
        what, environment = self.pipeline, {**self._environment, **more}
        words = (what.group, *self._words)
        kill_in_turn(what.url, Path(what.table), stages, *words, records=100, environment=environment)

    def add_column(self) -> None:
        """Declare a column that the table of the database gets."""
        self._decoder["schema"] += f", {ADDED}"
        self._environment[DEBEZIUM_VARIABLE] = json.dumps(self._decoder)
        self.pipeline = self.pipeline.having(decoder=Debezium(**self._decoder))

    def restore(self) -> None:
        """Take the table back to before its last batch."""
        snapshot = self.pipeline.ingestion.ledger().log.snapshot()
        assert snapshot is not None
        self.pipeline.spark.sql(f"RESTORE delta.`{self.pipeline.table}` TO VERSION AS OF {snapshot.version - 1}")

    def part_of_positions(self, divisor: int) -> Bound:
        """A place on the way to the positions."""
        positions = self.pipeline.ingestion.ledger().read().positions
        return Bound(sequences={s: position // divisor for s, position in positions.items() if position >= FEW})

    def rewind(self) -> None:
        with self.pipeline.source.open() as source:
            assert rewind(self.pipeline.spark, source, self.pipeline.ingestion, self.part_of_positions(2))

    def replay(self) -> None:
        replay = Replay(self.part_of_positions(5), self.part_of_positions(3), id=uuid.uuid4().hex)
        with self.pipeline.source.open() as source:
            job = ReplayJob(self.pipeline.spark, source, self.pipeline.ingestion, replay)
            assert list(drain_batches(job))

    def rebuild(self) -> None:
        """Make the table anew, with or after the rebuilds that were killed."""
        with self.pipeline.source.open() as source:
            list(reports_of(rebuild_events(self.pipeline.spark, source, self.pipeline.ingestion)))

    def assert_equal(self, customers: Customers) -> None:
        """All columns of all rows are those of the database."""
        customers.assert_equal(self.pipeline.table)
        with self.pipeline.source.open() as source:
            verdict = verify_keyed(self.pipeline.spark, source, self.pipeline.ingestion)
        assert verdict.is_right


@pytest.fixture
def topics(kafka: str, spark: SparkSession, folder: Path) -> Iterator[Topics]:
    with Topics(kafka, spark, folder) as made:
        yield made


@dataclass(frozen=True)
class Kills:
    """The stages at which runs are killed, in order.

    Args:
        first: of the first runs.
        grown: after the topic and the table of the database grew.
        rewound: after a RESTORE and a rewind.
        staging: of rebuilds that ingest into the staging table.
        swap: of rebuilds that swap the tables.
    """

    first: Sequence[str]
    grown: Sequence[str]
    rewound: Sequence[str]
    staging: Sequence[str]
    swap: Sequence[str]


@pytest.mark.parametrize(
    ("keys", "kills"),
    [
        pytest.param(
            Keys(["id"]),
            Kills(
                first=["initialized", "mid-dead-letters", "writing"],
                grown=["verified"],
                rewound=["read", "mid-write"],
                staging=["batch:rows written"],
                swap=["rebuild:mid-write"],
            ),
            id="position",
        ),
        pytest.param(
            Keys(["id"], sequence_by="_source_order"),
            Kills(
                first=["dead letters written", "committed"],
                grown=["rows written"],
                rewound=["planned", "mid-write"],
                staging=["batch:committed"],
                swap=["rebuild:rows written"],
            ),
            id="log",
        ),
    ],
)
def test_a_table_equals_that_of_the_database(
    server: str, topics: Topics, folder: Path, keys: Keys, kills: Kills
) -> None:
    """The two variants kill runs at all stages of a batch; partitions are added where the log orders the changes."""
    is_by_log = bool(keys.sequence_by)
    topic = topics.create(name=f"{PREFIX}.{TABLE}", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        topics.send(topic, [MALFORMED], partition=partition)
    with postgres_server(logs_changes=True) as database:
        customers = Customers(database, has_whole_rows=is_by_log)
        customers.insert(100)
        mirror = Mirror(topics, topic, keys, server)
        with debezium(folder / "debezium", topics.address, database, TABLE, OPTIONS):
            with customers.changing(keys=60):
                mirror.kill(kills.first)
                if is_by_log:
                    topics.add_partitions(topic, PARTITIONS + 2)
                mirror.add_column()
                customers.add_column()
                mirror.kill(kills.grown)
                mirror.pipeline.drain(max_batches=1)
                mirror.restore()
                mirror.rewind()
                mirror.kill(kills.rewound)
                mirror.replay()
                mirror.kill(kills.staging, **{REBUILD_VARIABLE: "1"})
                mirror.pipeline.drain(max_batches=1)
                mirror.kill(kills.swap, **{REBUILD_VARIABLE: "1"})
                mirror.rebuild()
            customers.until_sent()
        mirror.pipeline.drain()
        mirror.assert_equal(customers)
        assert mirror.pipeline.letters() == Counter({(topic, partition, 0): 1 for partition in range(PARTITIONS)})
