"""What it costs to measure the lag: each commit that matters is opened once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sensors.lag import measure
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.written_log import WrittenLog, made_entry

URL = StreamUrl.parse("memory://lag/orders")
SHARD = Shard("orders")


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    """Eight of ten messages are written, in eight batches."""
    log = WrittenLog(tmp_path / "table")
    with create_producer(str(URL)) as producer:
        for number in range(10):
            producer.send(b"%d" % number)
    with open_batch_source(str(URL)) as source:
        identities = source.identities()
    for number in range(8):
        state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, number)), origin=0)}
        written = {"ranges": {SHARD: Range(number, number + 1)}, "identities": identities, "sharing": "resumable"}
        log.ours(made_entry(number + 1, number - 1, state=state, **written))
    yield log.path
    forget_memory_broker(URL)


def test_a_tick_opens_each_commit_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, opened = DeltaLog._read, Counter[str]()

    def counting(self: DeltaLog, name: str) -> str:
        opened[name] += 1
        return read(self, name)

    monkeypatch.setattr(DeltaLog, "_read", counting)
    assert measure(StreamSource(URL), Ingestion("g", str(table))).total == 2
    assert {name: count for name, count in opened.items() if name.endswith(".json")} == {f"_delta_log/{7:020d}.json": 1}
