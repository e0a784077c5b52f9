"""A broker that is restored to an older state, and grows past the position of a group again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sensors.lag import measure
from stream_consumers.errors import SourceTruncatedError
from stream_consumers.options import ErrorPolicy
from tests.support.kafka_broker import broker_in
from tests.support.kafka_topics import Broker, Pipeline, assert_each_once, orders, pipeline

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize("restarts", [0, 1], ids=["same_leader_epoch", "newer_leader_epoch"])
def test_a_broker_that_was_restored_and_grew_past_the_position(
    spark: SparkSession, folder: Path, tmp_path: Path, restarts: int
) -> None:
    server, snapshot = tmp_path / "broker", tmp_path / "snapshot"
    server.mkdir()
    with broker_in(server, 0) as listeners:
        port = int(listeners.plain.rpartition(":")[2])
        broker = Broker(listeners.plain)
        topic = broker.create()
        broker.send(topic, orders(50))
    shutil.copytree(server, snapshot)
    with broker_in(server, port):
        broker.send(topic, orders(50, first=50))
        what: Pipeline = pipeline(spark, broker, folder, topic)
        what.drain()
        assert what.positions() == {0: 100}
    shutil.rmtree(server)
    shutil.copytree(snapshot, server)
    for _ in range(restarts):
        with broker_in(server, port):
            pass
    with broker_in(server, port):
        broker.send(topic, orders(100, first=1000))
        for read in (what.drain, what.verify, lambda: measure(what.source, what.ingestion)):
            with pytest.raises(SourceTruncatedError) as error:
                read()
            assert (error.value.facts["position"], error.value.facts["end"]) == (100, 150)
        what.having(errors=ErrorPolicy(on_data_loss="record")).drain()
        kept, new = {(topic, 0, number) for number in range(100)}, {(f"{topic}#2", 0, n) for n in range(50, 150)}
        assert_each_once(what.rows(), kept | new)
        assert all(verdict.is_right and not verdict.lag for verdict in what.verify())
