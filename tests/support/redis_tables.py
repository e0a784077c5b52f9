"""Redis streams for tests: written and read without the code under test."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import BatchReport, Ingestion, Observer, ignore_steps
from spark_jobs.run_ingestion import drain
from stream_consumers.create import StreamSource
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.redis.entries import to_sequence
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import ORDERS
from tests.support.streams import Identity, sequences_in_table

# Entries of a member that stopped are taken over after a second.
QUICK = {"min_idle_seconds": 1.0}


class Stream:
    """A stream of some shards, a group, and the table that it is written into."""

    def __init__(self, address: str, folder: Path, shards: int = 2, mode: str = "resumable") -> None:
        host, _, port = address.partition(":")
        self.client = redis.Redis(host, int(port))
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self.keys = [f"{self.name}:{n}" for n in range(shards)] if shards > 1 else [self.name]
        self.group = f"g-{self.name}"
        self.table = folder / "t"
        self.url = f"redis://{address}/{self.name}"
        self.mode = ConsumerMode(mode)
        self.options: dict[str, Any] = dict(QUICK)

    @property
    def source(self) -> StreamSource:
        """Made anew at each call, as by a new process."""
        return StreamSource(StreamUrl.parse(self.url), self.mode, self.options)

    def add(
        self, count: int, *, first: int = 0, payload: bytes | Callable[[int], bytes] = b'{"id": %d, "user": "u"}'
    ) -> None:
        """Add entries in turn to the shards."""
        pipeline = self.client.pipeline(transaction=False)
        for index in range(first, first + count):
            made = payload % index if isinstance(payload, bytes) else payload(index)
            pipeline.xadd(self.keys[index % len(self.keys)], {"msg": made})
        pipeline.execute()

    def there(self) -> set[Identity]:
        """Every entry that is in the stream."""
        return {
            (self.name, number, to_sequence(entry_id))
            for number, key in enumerate(self.keys)
            for entry_id, _ in self.client.execute_command("XRANGE", key, "-", "+")
        }

    def groups(self) -> list[tuple[bytes, object, int]]:
        """Last-delivered-id, Redis' own lag, and what is pending, per shard."""
        found = [info for key in self.keys for info in self.client.xinfo_groups(key)]
        return [(info["last-delivered-id"], info["lag"], info["pending"]) for info in found]

    def held(self, shard: int = 0) -> dict[bytes, int]:
        """How many entries each name holds."""
        return {
            found["name"]: found["pending"] for found in self.client.xpending(self.keys[shard], self.group)["consumers"]
        }

    def consumers(self) -> set[bytes]:
        """The names in the groups, but for the mark."""
        listed = [c["name"] for key in self.keys for c in self.client.xinfo_consumers(key, self.group)]
        return set(listed) - {b"stream-assets:claimed"}

    def read_as(self, consumer: str | bytes, count: int, shard: int = 0) -> list[bytes]:
        """Read new entries as another client; their ids."""
        reply: Any = self.client.xreadgroup(self.group, consumer, {self.keys[shard]: ">"}, count=count)
        return [entry_id for _, entries in reply for entry_id, _ in entries]

    def ingestion(self, records: int = 1000, **changes: Any) -> Ingestion:
        """What goes where."""
        made = Ingestion(
            group=self.group,
            table=str(self.table),
            decoder=ORDERS,
            limits=Limits(max_records=records),
            sharing=self.mode,
            retry_seconds=0.0,
        )
        return replace(made, **changes)

    def drain(
        self,
        spark: SparkSession,
        wanted: Ingestion | None = None,
        observer: Observer = ignore_steps,
        max_batches: int | None = None,
    ) -> list[BatchReport]:
        """One run to the end."""
        found = drain(spark, self.source, wanted or self.ingestion(), observer=observer, max_batches=max_batches)
        return list(found)

    def rows(self) -> set[Identity]:
        """What is in the table and its dead letters; fails if something is there twice."""
        found = sequences_in_table(self.table) + sequences_in_table(f"{self.table}_dead_letters")
        assert {identity: count for identity, count in found.items() if count > 1 and identity[2] is not None} == {}
        return {(stream, shard, sequence) for stream, shard, sequence in found if sequence is not None}

    def assert_each_once(self, *lost: bytes) -> None:
        """Every entry, and those that were lost, is in the table or its dead letters once; nothing is to be done."""
        assert self.rows() == self.there() | {(self.name, 0, to_sequence(entry_id)) for entry_id in lost}
        assert [(lag, pending) for _, lag, pending in self.groups()] == [(0, 0)] * len(self.keys)

    def entry_ids(self, shard: int = 0) -> list[bytes]:
        """The ids in a shard."""
        return [entry_id for entry_id, _ in self.client.execute_command("XRANGE", self.keys[shard], "-", "+")]
