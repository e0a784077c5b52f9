"""Rows of the time of a replay whose messages the stream does not hold any more; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.replay import Replay, goal_of, last_copies, plan_replay
from stream_consumers.batches import Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import DataLossError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.command_line import run
from tests.support.ledger_tables import at, write_batch

URL = "memory://last-copies/orders"
ORDERS = Shard("orders", 0)
ROWS = {0: "2026-11-16", 1: "2026-11-17", 2: "2026-11-17T12:00", 3: "2026-11-17T18:00", 4: "2026-11-18"}


@pytest.fixture
def what(tmp_path: Path) -> Iterator[Ingestion]:
    """A table with all messages of a stream that has lost the first two."""
    with create_producer(URL) as producer:
        for moment in ROWS.values():
            producer.send(b"{}", timestamp_ms=at(moment))
    write_batch(tmp_path / "t", ROWS)
    del memory_broker(StreamUrl.parse(URL)).messages[ORDERS][:2]
    yield Ingestion("lakehouse", str(tmp_path / "t"))
    forget_memory_broker(StreamUrl.parse(URL))


def goal_and_last_copies(
    what: Ingestion, replay: Replay, *, url: str = URL
) -> tuple[dict[Shard, Range], dict[Shard, Range]]:
    ledger = what.ledger()
    with open_batch_source(url) as source:
        extents = source.extents()
        goal = goal_of(replay, source, ledger.read(), extents)
        return dict(goal), dict(last_copies(replay, source, ledger, extents=extents, goal=goal))


def between(start: str, stop: str) -> Replay:
    return Replay(Bound.at_time(start), Bound.at_time(stop))


@pytest.mark.parametrize(
    ("replay", "replaced", "gone"),
    [
        (between("2026-11-16", "2026-11-17"), {}, {ORDERS: Range(0, 1)}),
        (between("2026-11-17", "2026-11-18"), {ORDERS: Range(2, 4)}, {ORDERS: Range(1, 2)}),
        (between("2026-11-18", "2026-11-19"), {ORDERS: Range(4, 5)}, {}),
        (Replay(Bound.at_time("2026-11-01")), {ORDERS: Range(2, 5)}, {ORDERS: Range(0, 2)}),
        (Replay(Bound.parse("earliest")), {ORDERS: Range(2, 5)}, {}),
        (Replay(), {ORDERS: Range(2, 5)}, {}),
    ],
    ids=["a day that is gone", "a half", "a day that is held", "an open end", "what is held", "all that is held"],
)
def test_a_replay_of_a_time_knows_the_rows_that_it_cannot_make_again(
    what: Ingestion, replay: Replay, replaced: dict[Shard, Range], gone: dict[Shard, Range]
) -> None:
    assert goal_and_last_copies(what, replay) == (replaced, gone)


def test_rows_of_another_stream_are_not_meant(what: Ingestion) -> None:
    other = "memory://last-copies/returns"
    with create_producer(other) as producer:
        producer.send(b"{}", timestamp_ms=at("2026-11-16"))
    assert goal_and_last_copies(what, between("2026-11-16", "2026-11-17"), url=other) == ({}, {})


def test_a_dry_run_refuses_what_the_replay_refuses(what: Ingestion) -> None:
    words = ("replay", "--source", URL, "--table", what.table, "--group", what.group, "--dry-run", "--json")
    gone_day = ("--from", "2026-11-16", "--until", "2026-11-17")
    refused = run(*words, *gone_day)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--on-data-loss record" in refused.stderr
    assert run(*words, *gone_day, "--on-data-loss", "record").exit_code == 0
    with open_batch_source(URL) as source, pytest.raises(DataLossError) as error:
        plan_replay(between(*gone_day[1::2]), source, what, what.ledger(), what.ledger().read())
    assert error.value.facts == {"orders/0": "0 to 1"}


def test_a_plan_keeps_the_rows_that_are_the_last_copies(what: Ingestion) -> None:
    recording = replace(what, errors=ErrorPolicy(on_data_loss="record"))
    with open_batch_source(URL) as source:
        plan = plan_replay(between("2026-11-17", "2026-11-18"), source, recording, what.ledger(), what.ledger().read())
    assert (plan.left, plan.last_copies) == ({ORDERS: Range(2, 4)}, {ORDERS: Range(1, 2)})
