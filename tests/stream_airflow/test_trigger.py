"""The trigger in a real Airflow environment, without a run: when it fires, and when it does not."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow_home import AirflowHome

pytestmark = pytest.mark.xdist_group("airflow")

# One process, because importing Airflow takes several seconds.
WATCH = """
import asyncio, json, os, sys, time
from dataclasses import replace
from pathlib import Path
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_airflow.measuring import LagWatch
from stream_airflow.trigger import StreamLagTrigger
from stream_consumers.batches import Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.written_log import WrittenLog, made_entry

URL, SHARD, FOLDER = "memory://watched/orders", Shard("orders"), Path(sys.argv[1])

def produce(count):
    with create_producer(URL) as producer:
        for _ in range(count):
            producer.send(b"{}")

def write(log, start, stop, number):
    with open_batch_source(URL) as source:
        identities = source.identities()
    state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, start)), origin=0)}
    written = {"ranges": {SHARD: Range(start, stop)}, "identities": identities, "sharing": "resumable"}
    log.ours(made_entry(number, number - 2, group="lakehouse", state=state, **written))

async def events(trigger, seconds, act, most):
    found = []
    async def collect():
        async for event in trigger.run():
            found.append(event.payload)
            act(len(found))
            if len(found) == most:
                return
    try:
        await asyncio.wait_for(collect(), seconds)
    except asyncio.TimeoutError:
        pass
    return found

def fired(seconds=0.6, act=lambda number: None, most=0, source=URL, table="orders", **options):
    given = {"source": source, "table": str(FOLDER / table), "group": "lakehouse", "interval_seconds": 0.05, **options}
    return asyncio.run(events(StreamLagTrigger(**given), seconds, act, most))

found = {}
# The first measurement of a process imports Spark.
asyncio.run(asyncio.to_thread(__import__, "spark_jobs.lag"))
produce(10)
found["patient"] = fired()
found["impatient"] = fired(1.5, patience_seconds=0.3, policy={"retry_seconds": 60})
log = WrittenLog(FOLDER / "written")

def work(number):
    write(log, (number - 1) * 10, number * 10, number)
    if number < 3:
        produce(10)

found["read"] = fired(30.0, work, 3, table="written")
found["few"] = fired(table="few", policy={"min_lag": 1000})
found["waited"] = fired(30.0, most=1, table="few", policy={"min_lag": 1000, "max_wait_seconds": 0.5})
found["silent"] = fired(source=f"redis://127.0.0.1:{os.environ['TEST_CLOSED_PORT']}/orders")
found["missing"] = fired(source=f"file://{FOLDER}/none.ss/orders")
found["ended"] = fired(30.0, source=f"file://{FOLDER}/none.ss/orders", ends_at_errors=True)
try:
    fired(policy={"keeps_alive": True})
except InvalidOptionError:
    found["refused"] = [{}]
forget_memory_broker(StreamUrl.parse(URL))
produce(5)
found["lost"] = fired(table="written")

async def without_the_unread(watch):
    # What a memory broker has lost is not known to it.
    measured = await measure(watch)
    return replace(measured, lag=dict.fromkeys(measured.lag, 0), lost={SHARD: Range(30, 35)})

measure, LagWatch.measure = LagWatch.measure, without_the_unread
found["unread"] = fired(table="few")
print(json.dumps(found))
"""


@pytest.fixture
def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_the_trigger_fires_when_a_run_is_wanted_and_survives_all_errors(tmp_path: Path, closed_port: int) -> None:
    airflow = AirflowHome.make(tmp_path / "airflow")
    printed = airflow.python(WATCH, tmp_path, TEST_CLOSED_PORT=str(closed_port)).splitlines()[-1]
    found: dict[str, list[dict[str, Any]]] = json.loads(printed)
    assert [event["lag"] for event in found["patient"]] == [10], "the run may still be in flight"
    assert len(found["impatient"]) == 2, "the first failure is retried at once, and the second one after a pause"
    assert [event["lag"] for event in found["read"]] == [10, 10, 10]
    assert found["few"] == []
    assert [event["lag"] for event in found["waited"]] == [30]
    assert found["silent"] == []
    assert found["missing"] == []
    assert len(found["ended"]) == 1
    assert "error" in found["ended"][0]
    assert found["refused"], "it cannot know which runs are in flight"
    assert len(found["lost"]) == 1, "each loss starts one run, which reports it"
    assert "error" in found["lost"][0]
    assert [(event["lag"], "lost" in event) for event in found["unread"]] == [(0, True)]
