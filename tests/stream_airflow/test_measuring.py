"""Many triggers measure their lags with few requests to their broker."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from spark_jobs.lag import Measurement
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.run_policy import RunPolicy
from stream_airflow.declaration import StreamTable
from stream_airflow.measuring import LagWatch
from stream_consumers.batches import Range
from stream_consumers.create import open_batch_source
from stream_consumers.errors import BrokerUnavailableError, StreamAssetsError
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog, made_entry

STREAMS = tuple(f"watched{number}" for number in range(5))
INTERVAL_SECONDS = 0.2
Round = list[int | type[BaseException]]


def tables(folder: Path, address: str, streams: Sequence[str] = STREAMS) -> list[StreamTable]:
    return [StreamTable(f"redis://{address}/{stream}", str(folder / stream), "lakehouse") for stream in streams]


async def rounds(declared: Sequence[StreamTable], acts: Sequence[object]) -> list[Round]:
    """The lag of each table, measured after each of these was called."""
    found: list[Round] = []
    with ExitStack() as stack:
        watches = [
            stack.enter_context(
                closing(LagWatch(one, RunPolicy(answer_seconds=1.0), interval_seconds=INTERVAL_SECONDS))
            )
            for one in declared
        ]
        for act in acts:
            if callable(act):
                act()
            await asyncio.sleep(INTERVAL_SECONDS)
            measured = await asyncio.gather(*(watch.measure() for watch in watches), return_exceptions=True)
            found.append([one.total if isinstance(one, Measurement) else type(one) for one in measured])
    return found


def nothing() -> None:
    """Nothing happens."""


def test_idle_streams_of_a_broker_are_asked_for_together(tmp_path: Path, redis_address: str) -> None:
    host, _, port = redis_address.partition(":")
    server = redis.Redis(host, int(port))
    for stream in STREAMS:
        server.delete(stream)
        server.xadd(stream, {"msg": b"{}"})
    connections: list[int] = []

    def count() -> None:
        connections.append(int(server.info("stats")["total_connections_received"]))

    def add() -> None:
        count()
        server.xadd(STREAMS[2], {"msg": b"{}"})

    found = asyncio.run(rounds(tables(tmp_path, redis_address), [count, count, count, add, count]))
    assert found == [[1] * 5, [1] * 5, [1] * 5, [1, 1, 2, 1, 1], [1, 1, 2, 1, 1]]
    first, idle, again, grown = (after - before for before, after in pairwise(connections))
    assert idle == again < grown < first
    assert first >= idle + len(STREAMS)


def test_a_batch_is_seen_although_the_stream_is_idle(tmp_path: Path, redis_address: str) -> None:
    host, _, port = redis_address.partition(":")
    server = redis.Redis(host, int(port))
    server.delete(STREAMS[0])
    server.xadd(STREAMS[0], {"msg": b"{}"}, id="5-0")
    (declared,) = tables(tmp_path, redis_address, STREAMS[:1])

    def write() -> None:
        with open_batch_source(declared.source) as source:
            identities = source.identities()
        shard, end = Shard(STREAMS[0], 0), (5 << 16) + 1
        state = {shard: ShardState(Intervals.of((MIN_SEQUENCE, 0)), origin=0)}
        written = {"ranges": {shard: Range(0, end)}, "identities": identities, "sharing": "resumable"}
        WrittenLog(Path(declared.table)).ours(made_entry(1, -1, group="lakehouse", state=state, **written))

    assert asyncio.run(rounds([declared], [nothing, write])) == [[1], [0]]


def test_a_missing_stream_hides_no_other_one(tmp_path: Path, kafka: str) -> None:
    from stream_consumers.create import create_producer

    with create_producer(f"kafka://{kafka}/there_is", shards=1) as producer:
        producer.send(b"{}")
    declared = [
        StreamTable(f"kafka://{kafka}/{topic}", str(tmp_path / topic), "lakehouse") for topic in ("there_is", "none")
    ]
    for lags in asyncio.run(rounds(declared, [nothing, nothing])):
        assert lags[0] == 1
        assert isinstance(lags[1], type)
        assert issubclass(lags[1], StreamAssetsError)


def test_a_silent_broker_is_asked_once_for_all_its_streams(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        declared = tables(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = asyncio.run(rounds(declared, [nothing]))
    assert found == [[BrokerUnavailableError] * 5]
    assert time.monotonic() - began < 4.0, "one after the other they would take five seconds"


@pytest.mark.parametrize("wrong", [{"mode": "fast"}, {"start": "yesterday"}, {"on_data_loss": "ignore"}])
def test_a_wrong_declaration_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(StreamAssetsError):
        StreamTable("memory://a/b", "t", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "redis://:hunter2hunter2@localhost:6379/orders"},
        {"source": "redis://:hunter2hunter2@localhost:6379/orders", "stream_conn_id": "redis_default"},
        {"source": "me:hunter2hunter2@localhost:6379/orders", "stream_conn_id": "redis_default"},
        {"table": "s3a://key:hunter2hunter2@lake/orders"},
        {"source": "redis://:hunter2hunter2@localhost:6379/orders-{{ ds }}"},
        {"source": "redis://:hunter2hunter2@{{ var.value.host }}:6379/orders"},
        {"source": "{{ var.value.scheme }}://me:hunter2hunter2@cache:6379/orders"},
        {"source": "redis://cache:6379/{{ params.key }}?password=hunter2hunter2"},
        {"table": "{{ var.value.scheme }}://key:hunter2hunter2@lake/orders"},
        {"table": "abfss://lake@account/{{ ds }}?sig=hunter2hunter2"},
        {"table": "s3a://lake/{{ ds }};token=hunter2hunter2"},
        {"source": "valkey://:hunter2hunter2@localhost:6379/orders"},
        {"table": "s3a://key:hunter2hunter2@lake/orders/{% if params.x %}x{% endif %}"},
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(wrong: dict[str, str]) -> None:
    with pytest.raises(StreamAssetsError) as caught:
        StreamTable(**{"source": "memory://a/b", "table": "t", "group": "g", **wrong})
    assert "hunter2" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    ("source", "table"),
    [
        ("sqlite:///var/lib/orders.db/orders", "t"),
        (
            "redis://{{ var.value.host }}:{{ var.value.port }}/orders",
            "abfss://lake@account.dfs.core.windows.net/{{ ds }}",
        ),
        ("{{ var.value.url }}", "{% if params.x %}s3a://lake/a{% else %}s3a://lake/b{% endif %}"),
    ],
)
def test_a_url_without_credentials_is_declared(source: str, table: str) -> None:
    assert StreamTable(source, table, "g").arguments() == {"source": source, "table": table, "group": "g"}


def test_a_secret_stays_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2hunter2")
    declared = StreamTable(
        "kafka://broker:9092/orders",
        "s3a://lake/orders",
        "lakehouse",
        client={"sasl.password": "env:KAFKA_PASSWORD"},
        storage_options={"AWS_SECRET_ACCESS_KEY": "env:KAFKA_PASSWORD"},
    )
    assert "hunter2" not in f"{declared!r} {declared.arguments()!r} {declared.stream!r}"
    assert declared.resolved_storage_options() == {"AWS_SECRET_ACCESS_KEY": "hunter2hunter2"}
    assert StreamTable(**declared.arguments()) == declared
