"""A position never covers messages that a power cut could take out of the file again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_consumers.batches import Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.options import Limits
from stream_consumers.stdio.broker import StdioBroker
from stream_consumers.stdio.spool import spool_stdin
from tests.support.power_cut import Disk, disk
from tests.support.streams import sequences_in_file, shard


@pytest.fixture
def lazy(folder: Path) -> Iterator[Disk]:
    with disk(folder) as made:
        yield made


def test_what_is_planned_is_in_the_file_whatever_its_writer_does(lazy: Disk) -> None:
    url = f"file://{lazy.folder}/orders.ss/orders"
    with create_producer(url) as producer:
        for _ in range(100):
            producer.send(b"{}", shard=0)
        producer.flush()
        with lazy.after_power_cut() as found:
            assert not (found / "orders.ss").exists(), "a producer forces its file when it is closed"
        with open_batch_source(url) as source:
            extents = source.extents()
            plan = source.plan({shard(0): Range(0, extents[shard(0)].end)}, limits=Limits(), parallelism=1)
        assert plan is not None
        assert plan.records == 100
        with lazy.after_power_cut() as found:
            assert len(sequences_in_file(found / "orders.ss")) == 100


def test_a_spooled_pipe_is_in_the_file(lazy: Disk) -> None:
    pipe = StdioBroker(io.BytesIO(b"message\n" * 100), io.BytesIO())
    spool_stdin("stdio:///orders", lazy.folder / "spool.ss", broker=pipe)
    with lazy.after_power_cut() as found:
        assert len(sequences_in_file(found / "spool.ss")) == 100
