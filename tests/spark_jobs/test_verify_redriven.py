"""What ``verify`` and the partitions say of redriven dead letters; tables written without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import in_places
from spark_jobs.verify import ShardVerdict, verify
from stream_assets.partitions import changed_since
from stream_consumers.batches import Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import Limits

URL, SHARD = "memory://redriven/orders", Shard("orders", 0)
DAY_MS, MIDNIGHT_MS = 86_400_000, 1_794_873_600_000
COUNT, DEAD = 40, (3, 4, 9, 17, 31)


class Lake:
    """A stream of forty messages, ten a day, and the table that two batches of it are in, with five dead letters."""

    def __init__(self, folder: Path, transform: str) -> None:
        self.what = Ingestion("g", str(folder / "t"))
        self.transform = transform
        with create_producer(URL) as producer:
            for number in range(COUNT):
                producer.send(b"{}", timestamp_ms=self.moment(number))
        with open_batch_source(URL) as source:
            (extent,) = source.extents().values()
            self.identities = dict(source.identities())
        self.first = extent.start
        self.commit("init", [], origin={SHARD: self.first})
        for part in (range(20), range(20, COUNT)):
            dead = [number for number in part if number in DEAD]
            bid = f"b{part.start}"
            self.letters(bid, dead)
            ranges = {SHARD: Range(self.first + part.start, self.first + part.stop)}
            rows = [number for number in part if number not in DEAD]
            self.commit("batch", rows, bid=bid, ranges=ranges, messages=len(rows), dead=len(dead))

    def moment(self, number: int) -> int:
        return MIDNIGHT_MS + number // 10 * DAY_MS + number

    def commit(
        self, kind: str, numbers: Iterable[int], *, base: LedgerState | None = None, member: str = "main", **fields: Any
    ) -> None:
        ledger = self.ledger(member)
        fields = {"transform": self.transform, "identities": self.identities, **fields}
        entry = ledger.entry(kind, base or ledger.read(), **fields)
        data = self.rows(numbers)
        properties = CommitProperties(
            custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, entry.number)]
        )
        if entry.mode == "replace":
            where = in_places(entry.affected)
            write_deltalake(self.what.table, data, mode="overwrite", predicate=where, commit_properties=properties)
        else:
            write_deltalake(self.what.table, data, mode="append", commit_properties=properties)

    def ledger(self, member: str) -> Ledger:
        """The ledger of a member with its own transaction sequence, as in a group whose shards have their own."""
        return Ledger(self.what.ledger().log, group="g", member=member)

    def rows(self, numbers: Iterable[int]) -> pa.Table:
        kept = [number for number in numbers if not self.transform or number % 2]
        return pa.table(
            {
                "_stream": pa.array([SHARD.stream] * len(kept), pa.string()),
                "_shard": pa.array([SHARD.id] * len(kept), pa.int64()),
                "_sequence": pa.array([self.first + number for number in kept], pa.int64()),
                "_timestamp": pa.array([1000 * self.moment(number) for number in kept], pa.timestamp("us", "UTC")),
            }
        )

    def letters(self, bid: str, numbers: list[int], *, app: str = "g/main") -> None:
        log = self.what.dead_letters().log()
        snapshot = log.snapshot()
        number = snapshot.last_number(app) + 1 if snapshot else 1
        rows = {
            "_stream": [SHARD.stream] * len(numbers),
            "_shard": pa.array([SHARD.id] * len(numbers), pa.int64()),
            "_sequence": pa.array([self.first + number for number in numbers], pa.int64()),
            "_timestamp": pa.array([1000 * self.moment(number) for number in numbers], pa.timestamp("us", "UTC")),
            "_batch": [bid] * len(numbers),
            "_group": ["g"] * len(numbers),
        }
        metadata = {"v": 1, "bid": bid, "app": app, "n": number, "number": number + (app == "g/main")}
        properties = CommitProperties(
            custom_metadata={"userMetadata": json.dumps(metadata)}, app_transactions=[Transaction(app, number)]
        )
        write_deltalake(log.path, pa.table(rows), mode="append", commit_properties=properties)

    def redrive(self, *numbers: int, rows: Iterable[int] | None = None) -> None:
        places = Intervals.of(*((self.first + number, self.first + number + 1) for number in numbers))
        made = list(numbers if rows is None else rows)
        self.commit("replay", made, mode="replace", places={SHARD: places}, messages=len(numbers))

    def dismiss(self, *numbers: int, base: LedgerState) -> None:
        places = Intervals.of(*((self.first + number, self.first + number + 1) for number in numbers))
        self.letters("dismissed", list(numbers), app="g/replay")
        fields = {"bid": "dismissed", "mode": "dismiss", "places": {SHARD: places}, "dead": len(numbers)}
        self.commit("dismiss", [], base=base, member="replay", **fields)

    def verdict(self) -> ShardVerdict:
        with open_batch_source(URL) as source:
            (found,) = verify(source, self.what, limits=Limits(max_records=7))
        return found


@pytest.fixture(params=[pytest.param("", marks=pytest.mark.slow), "odd"], ids=["", "with a transform"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    yield Lake(tmp_path, request.param)
    forget_memory_broker(URL)


def test_redriven_dead_letters_are_rows_and_not_dead(lake: Lake) -> None:
    before = lake.verdict()
    assert (before.is_right, before.dead, before.unexplained) == (True, 5, 0)
    lake.redrive(3, 9, 17, 31)
    found = lake.verdict()
    assert (found.is_right, found.dead, found.unexplained) == (True, 1, 0)
    assert found.rows == before.rows + 4
    assert (found.messages, found.filtered, found.missing) == (COUNT, before.filtered, 0)


def test_a_redriven_row_that_is_gone_or_there_twice_is_told(lake: Lake) -> None:
    lake.redrive(3, 9)
    lake.redrive(17, 31)
    write_deltalake(lake.what.table, lake.rows([17]), mode="append")
    DeltaTable(lake.what.table).delete(f"_sequence = {lake.first + 9}")
    found = lake.verdict()
    assert found.examples == {"missing": [lake.first + 9], "duplicated": [lake.first + 17]}


def test_a_row_in_whose_place_a_redrive_made_none_was_filtered(lake: Lake) -> None:
    before = lake.verdict().filtered
    lake.redrive(3, 5, rows=[3])
    found = lake.verdict()
    assert (found.is_right, found.filtered) == (True, before + 1)


def test_the_partitions_of_redriven_rows_are_touched(lake: Lake) -> None:
    ledger, days = lake.what.ledger(), dg.DailyPartitionsDefinition("2026-11-16")
    version = ledger.read().version
    lake.redrive(3, 9, 31)
    found = changed_since(ledger, days, version)
    assert found is not None
    assert found[0].rows == {"2026-11-17": 2, "2026-11-20": 1}


@pytest.mark.parametrize("is_dismissed_first", [False, True])
def test_rows_that_were_written_while_a_dismissal_was_in_flight_are_right(lake: Lake, is_dismissed_first: bool) -> None:
    base = lake.ledger("replay").read()
    if is_dismissed_first:
        lake.dismiss(3, 17, base=base)
    # A rewind, and a decoder that can read three of the dead letters.
    ranges = {SHARD: Range(lake.first, lake.first + 10)}
    lake.commit("batch", range(10), mode="replace", ranges=ranges, messages=10)
    if not is_dismissed_first:
        lake.dismiss(3, 17, base=base)
    verdict = lake.verdict()
    assert (verdict.is_right, verdict.dead) == (True, 2)
    assert verdict.rows == len(lake.rows(set(range(COUNT)) - {17, 31}))
