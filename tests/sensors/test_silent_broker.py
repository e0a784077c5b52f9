"""Ticks while a broker does not answer: short, at growing intervals, with the numbers; errors when it takes long."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import redis

from sensors.lag_sensor import LagCursor, LagPolicy, read_cursor, write_cursor
from stream_assets import RunLimits, StreamAsset
from stream_consumers.errors import BrokerUnavailableError
from tests.support.dagster_runs import declare, skip_message, tick

pytestmark = pytest.mark.dagster
# Requests of Kafka wait for 10 s by default, and more than one may be made.
SHORT_SECONDS = 8.0


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.fixture
def somebody_mute() -> Iterator[int]:
    """A port at which connections are taken, and nothing is ever said."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])


def asset(folder: Path, address: str, *, answer_seconds: float = 5.0, retry_seconds: float = 300.0) -> StreamAsset:
    policy = LagPolicy(answer_seconds=answer_seconds)
    return declare(folder, source=f"{address}/orders", sensor=policy, limits=RunLimits(retry_seconds=retry_seconds))


def moved(result: dg.SensorResult, seconds: float) -> str:
    """The cursor as if so much time had gone by."""
    cursor: dict[str, Any] = json.loads(result.cursor or "")
    return json.dumps(
        {**cursor, "silent_since": cursor["silent_since"] - seconds, "ask_at": cursor["ask_at"] - seconds}
    )


def test_a_tick_of_a_dead_kafka_is_short(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    began = time.monotonic()
    message = skip_message(tick(asset(folder, f"kafka://127.0.0.1:{nobody}"), instance))
    assert time.monotonic() - began < SHORT_SECONDS
    assert "Connection refused" in message
    assert "It has not answered for 0 s and is asked again at the next tick; from 300 s on the tick fails" in message


@pytest.mark.parametrize("protocol", ["kafka", "redis"])
def test_a_tick_of_a_broker_that_says_nothing_is_short(
    folder: Path, instance: dg.DagsterInstance, somebody_mute: int, protocol: str
) -> None:
    began = time.monotonic()
    tick(asset(folder, f"{protocol}://127.0.0.1:{somebody_mute}", answer_seconds=1.0), instance)
    assert time.monotonic() - began < SHORT_SECONDS


def test_pauses_grow_as_long_as_it_is_silent(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    stream = asset(folder, f"redis://127.0.0.1:{nobody}")
    first = tick(stream, instance)
    second = tick(stream, instance, moved(first, 40))
    assert "It has not answered for 40 s and is asked again in 40 s" in skip_message(second)
    between = skip_message(tick(stream, instance, moved(second, 10)))
    assert f"redis://127.0.0.1:{nobody}/orders did not answer. It has not answered for 50 s" in between
    assert "is asked again in 30 s" in between
    assert "asked again in 60 s" in skip_message(tick(stream, instance, moved(first, 200))), "and no longer"


def test_what_the_sensor_knew_survives_the_silence(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    known = LagCursor(waiting_since=7.0, observed="digest", number=12)
    result = tick(asset(folder, f"redis://127.0.0.1:{nobody}"), instance, write_cursor(known))
    assert replace(read_cursor(result.cursor, LagCursor), silent_since=None, ask_at=0.0) == known


def test_after_the_budget_of_a_run_the_tick_fails(folder: Path, instance: dg.DagsterInstance, nobody: int) -> None:
    stream = asset(folder, f"redis://127.0.0.1:{nobody}")
    with pytest.raises(BrokerUnavailableError, match=r"refused, for 30\d s now"):
        tick(stream, instance, moved(tick(stream, instance), 300))
    with pytest.raises(BrokerUnavailableError, match="for 0 s now"):
        tick(asset(folder, f"redis://127.0.0.1:{nobody}", retry_seconds=0.0), instance)


def test_a_broker_that_is_back_is_forgiven(folder: Path, instance: dg.DagsterInstance, redis_address: str) -> None:
    host, _, port = redis_address.partition(":")
    redis.Redis(host, int(port)).xadd("silent", {"msg": b"{}"})
    stream = declare(folder, source=f"redis://{redis_address}/silent", group="silent")
    cursor = LagCursor(silent_since=time.time() - 400, ask_at=time.time() - 1)
    result = tick(stream, instance, write_cursor(cursor))
    assert result.run_requests
    assert read_cursor(result.cursor, LagCursor).silent_since is None
