"""Changes of keys in a stream file, the table that they make, and what it must be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Observer, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.verify_keyed import KeyedVerdict, verify_keyed
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.options import ErrorPolicy, Limits

SCHEMA = "id BIGINT, name STRING, op STRING, at BIGINT"
BY_POSITION = Keys(["id"], apply_as_deletes="op = 'd'", except_columns=["op"])
BY_VALUE = Keys(["id"], sequence_by="at", apply_as_deletes="op = 'd'", except_columns=["op"])
FIRST_MS = 1_700_000_000_000
HISTORY_BY_POSITION = replace(BY_POSITION, stored_as_scd_type=2)
HISTORY_BY_VALUE = replace(BY_VALUE, stored_as_scd_type=2)
Version = tuple[int, str, str, int, int | None, bool]
"""The key of a row, its name and operation, when it is valid, and whether it is current."""


@dataclass
class KeyedTable:
    """A stream of changes ``{"id", "name", "op", "at"}``, and the table that is kept equal to it.

    Args:
        spark: writes it.
        folder: has the stream file and the table.
        keys: of the table.
        records: the most messages of a batch.
        properties: of the table.
        first_ms: the time of the first message; the next ones are a millisecond apart.
        schema: of the payloads.
        transform: of the rows.
        errors: what becomes of bad rows and of other columns.
    """

    spark: SparkSession
    folder: Path
    keys: Keys = BY_POSITION
    records: int = 7
    driver_records: int = 10_000
    first_ms: int = FIRST_MS
    sent: list[dict[str, Any]] = field(default_factory=list)
    properties: Mapping[str, str] = field(default_factory=dict)
    schema: str = SCHEMA
    transform: Callable[[DataFrame], DataFrame] | None = None
    errors: ErrorPolicy = ErrorPolicy(on_bad_rows="dead_letter")

    @property
    def url(self) -> str:
        return f"file://{self.folder}/changes.ss/changes"

    @property
    def ingestion(self) -> Ingestion:
        return Ingestion(
            group="mirror",
            table=f"{self.folder}/t",
            decoder=Json(self.schema),
            transform=self.transform,
            keys=self.keys,
            layout=TableLayout(properties=self.properties),
            limits=Limits(max_records=self.records),
            errors=self.errors,
            retry_seconds=0.0,
            driver_records=self.driver_records,
        )

    def send(self, *changes: dict[str, Any], shards: int = 1) -> None:
        """Append changes; those of a key go to one shard. ``sent`` is the time of one, by default its number."""
        with create_producer(self.url) as producer:
            for change in changes:
                shard = change.get("id", 0) % shards
                time = self.first_ms + change.get("sent", len(self.sent))
                producer.send(json.dumps(change).encode(), shard=shard, timestamp_ms=time)
                self.sent.append(change)

    def drain(self, observer: Observer = ignore_steps) -> list[BatchReport]:
        with open_batch_source(self.url) as source:
            return list(drain_batches(IngestJob(self.spark, source, self.ingestion, observer=observer)))

    def verdict(self) -> KeyedVerdict:
        with open_batch_source(self.url) as source:
            return verify_keyed(self.spark, source, self.ingestion)

    def rows(self) -> dict[int, str]:
        """The name of each key in the table.

        Raises:
            AssertionError: a key is there twice.
        """
        table = self.spark.read.format("delta").load(f"{self.folder}/t")
        found = table.where("NOT _deleted") if self.keys.sequence_by else table
        rows = [(row["id"], row["name"]) for row in found.collect()]
        assert len(dict(rows)) == len(rows), rows
        return dict(rows)

    def expected(self) -> dict[int, str]:
        """The same, of the changes that were sent."""
        newest: dict[int, dict[str, Any]] = {}
        for change in sorted(self.sent, key=lambda change: change["at"]) if self.keys.sequence_by else self.sent:
            if change["op"] == "t":
                newest.clear()
            else:
                newest[change["id"]] = change
        return {key: change["name"] for key, change in newest.items() if change["op"] != "d"}

    def predicate(self) -> str:
        """The condition of the newest MERGE, as Delta records it."""
        newest = max(Path(self.folder, "t", "_delta_log").glob("*.json"))
        actions = map(json.loads, newest.read_text().splitlines())
        (info,) = (action["commitInfo"] for action in actions if "commitInfo" in action)
        return str(info["operationParameters"]["predicate"])

    def history(self) -> list[Version]:
        """The rows of a table of SCD type 2."""
        of_time = "unix_millis({})" if self.keys.is_ordered_by_position else "{}"
        times = [f"{of_time.format(name)} {name}" for name in ("_valid_from", "_valid_to")]
        table = self.spark.read.format("delta").load(f"{self.folder}/t")
        found = table.selectExpr("id", "name", "IF(_deleted, 'd', 'u')", *times, "_is_current").collect()
        return sorted((tuple(row) for row in found), key=str)

    def expected_history(self) -> list[Version]:
        """The same, of the changes that were sent: a row per change, valid until the next one of its key."""
        changes: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        by_value = not self.keys.is_ordered_by_position
        for number, change in enumerate(self.sent):
            time = change["at"] if by_value else change.get("sent", number) + FIRST_MS
            changes.setdefault(change["id"], []).append((time, change))
        rows: list[Version] = []
        for key, found in changes.items():
            times = [time for time, _ in found]
            starts = sorted(times) if by_value else list(accumulate(times, max))
            in_order = sorted(found, key=lambda one: one[0]) if by_value else found
            for (_, change), start, end in zip(in_order, starts, [*starts[1:], None], strict=True):
                is_current = end is None and change["op"] != "d"
                rows.append((key, change["name"], change["op"], start, end, is_current))
        return sorted(rows, key=str)

    def restore(self, version: int) -> None:
        self.spark.sql(f"RESTORE TABLE delta.`{self.folder}/t` TO VERSION AS OF {version}")


def random_changes(count: int, *, keys: int, seed: int, first: int = 0) -> Sequence[dict[str, Any]]:
    """Updates and deletes of few keys; ``at`` is in order for the most part, and unique."""
    dice = random.Random(seed)
    times = list(range(first, first + count))
    for _ in range(count // 4):
        one, other = dice.randrange(count), dice.randrange(count)
        times[one], times[other] = times[other], times[one]
    return [
        {"id": dice.randrange(keys), "name": f"n{first + at}", "op": dice.choice("uuud"), "at": times[at]}
        for at in range(count)
    ]


def assert_own_commits(table: KeyedTable) -> None:
    """Each commit of a batch has the transaction of its ledger entry, numbered without a gap."""
    numbers = []
    for file in sorted(Path(table.folder, "t", "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in file.read_text().splitlines()]
        found = [action["txn"] for action in actions if "txn" in action]
        (text,) = (action["commitInfo"].get("userMetadata") for action in actions if "commitInfo" in action)
        entry = LedgerEntry.from_json(json.loads(text)) if text else None
        assert len(found) == (entry is not None), f"{file} has {len(found)} transactions"
        if entry is not None:
            assert (found[0]["appId"], found[0]["version"]) == (entry.app, entry.number), file
            numbers.append(entry.number)
    assert numbers == list(range(1, len(numbers) + 1))
