"""The checks of an asset: those with a threshold, and those that are there by default."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_jobs.dead_letters.table import dead_letter_path
from spark_jobs.ledger.entries import ClaimedRange, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_assets import (
    DEFAULT_CHECKS,
    StreamCheck,
    StreamCheckContext,
    build_continuity_check,
    build_dead_letter_ratio_check,
    build_freshness_check,
    build_lag_check,
)
from stream_consumers.batches import Range
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.dagster_runs import plain_asset
from tests.support.groups_without_spark import GroupWithoutSpark
from tests.support.ss_files import NO_BEACONS, break_length, numbered, write_file
from tests.support.written_log import WrittenLog, made_entry

pytestmark = pytest.mark.dagster
URL = StreamUrl.parse("memory://checked/orders")
SHARD = Shard("orders")
ALL = (
    build_lag_check(max_messages=100),
    build_freshness_check(max_seconds=60),
    build_dead_letter_ratio_check(),
    build_continuity_check(),
)


@pytest.fixture(autouse=True)
def ten_messages() -> Iterator[None]:
    with create_producer(str(URL)) as producer:
        for number in range(10):
            producer.send(b"%d" % number)
    yield
    forget_memory_broker(URL)


def write(table: Path, *batches: tuple[int, int, int], timestamp_ms: int | None = None) -> WrittenLog:
    """Batches of group ``g``, each with its messages, rows that were decoded and dead letters; the log of the table."""
    log, position = WrittenLog(table), 0
    with open_batch_source(str(URL)) as source:
        identities = source.identities()
    for number, (messages, rows, dead) in enumerate(batches, start=1):
        state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, position)), origin=0)}
        written = {"ranges": {SHARD: Range(position, position + messages)}, "messages": rows, "dead": dead}
        known = {"state": state, "identities": identities, "sharing": "resumable"}
        log.ours(made_entry(number, number - 2, bid=f"b{number}", **written, **known), timestamp_ms=timestamp_ms)
        position += messages
    return log


def write_next(log: WrittenLog, kind: str, *, number: int, **fields: Any) -> None:
    """A commit of the group ``g`` now, behind the others, that is no batch of :func:`write`."""
    member = "main" if kind == "batch" else kind
    # It is not full, so that what the one before says of the shards stays.
    told = {"kind": kind, "bid": f"{kind}{number}", "state": None, **fields}
    log.ours(made_entry(number, log.next - 1, member=member, **told), timestamp_ms=int(time.time() * 1000))


def write_dead_letters(table: Path, batch: str, sequences: range, *, dismissed_by: str | None = None) -> None:
    """Dead letters of a batch of the group ``g``, and one for a range that was gone."""
    places = [*sequences, None]
    rows = {
        "_stream": pa.array([SHARD.stream] * len(places), pa.string()),
        "_shard": pa.array([SHARD.id] * len(places), pa.int64()),
        "_sequence": pa.array(places, pa.int64()),
        "payload": pa.array([None] * len(places), pa.binary()),
        "_batch": pa.array([batch] * len(places), pa.string()),
        "_group": pa.array(["g"] * len(places), pa.string()),
        "dismissed_by": pa.array([dismissed_by] * len(places), pa.string()),
    }
    write_deltalake(dead_letter_path(str(table)), pa.table(rows), mode="append")


def evaluate(
    check: StreamCheck, folder: Path, instance: dg.DagsterInstance, *, source: str = str(URL), group: str = "g"
) -> dg.AssetCheckResult:
    orders = plain_asset(source=source, group=group, table=str(folder / "t"))
    return check.result(StreamCheckContext(orders.key, orders.declared, instance))


def test_no_check_passes_on_a_table_that_its_group_has_not_written(folder: Path, instance: dg.DagsterInstance) -> None:
    for check in (*ALL, *DEFAULT_CHECKS):
        assert not evaluate(check, folder, instance).passed, "there is no table"
    write(folder / "t", (4, 4, 0))
    assert evaluate(build_continuity_check(), folder, instance).passed
    for check in (*ALL, *DEFAULT_CHECKS):
        assert not evaluate(check, folder, instance, group="somebody").passed, "another group has written it"


def test_a_group_may_be_so_far_behind(folder: Path, instance: dg.DagsterInstance) -> None:
    write(folder / "t", (4, 4, 0))
    assert evaluate(build_lag_check(max_messages=6), folder, instance).passed
    found = evaluate(build_lag_check(max_messages=5, severity=cast("Any", "WARN")), folder, instance)
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.WARN
    assert found.metadata["stream/lag"].value == 6
    assert found.description == "lag 6 (orders/0: 6)"


def test_a_broker_that_does_not_answer_fails_the_check_and_not_the_run(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        source = f"redis://127.0.0.1:{taken.getsockname()[1]}/orders"
        assert not evaluate(build_lag_check(max_messages=5), folder, instance, source=source).passed


@pytest.mark.parametrize(
    ("written", "age_seconds", "is_fresh"), [(4, 3600, False), (4, 0, True), (10, 3600, True)], ids=repr
)
def test_messages_that_wait_while_nothing_is_written_are_not_fresh(
    folder: Path, instance: dg.DagsterInstance, written: int, age_seconds: int, is_fresh: bool
) -> None:
    write(folder / "t", (written, written, 0), timestamp_ms=int((time.time() - age_seconds) * 1000))
    assert evaluate(build_freshness_check(max_seconds=900), folder, instance).passed is is_fresh


def test_a_file_whose_end_cannot_be_read_is_neither_small_lag_nor_fresh(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    path = write_file(folder / "orders.ss", numbered(10), interval=NO_BEACONS)
    source = f"file://{path}/orders"
    group = GroupWithoutSpark(source, plain_asset(source=source, group="g", table=str(folder / "t")).declared.ingestion)
    group.begin()
    group.ingest()
    checks = (build_lag_check(max_messages=100), build_freshness_check(max_seconds=0))
    assert [evaluate(check, folder, instance, source=source).passed for check in checks] == [True, True]
    write_file(path, numbered(30), interval=NO_BEACONS)
    break_length(path, 11)
    found = [evaluate(check, folder, instance, source=source) for check in checks]
    assert [(one.passed, one.metadata["stream/lag"].value) for one in found] == [(False, 0), (False, 0)]


def test_few_dead_letters_may_be_among_the_newest_messages(folder: Path, instance: dg.DagsterInstance) -> None:
    write(folder / "t", (2, 0, 50), (2, 98, 2), (2, 100, 0))
    found = evaluate(build_dead_letter_ratio_check(batches=2), folder, instance)
    assert found.passed, "2 of 200 are one in a hundred"
    assert found.description == "2 of 200 messages in the newest 2 batches are dead letters"
    assert not evaluate(build_dead_letter_ratio_check(batches=2, max_ratio=0.009), folder, instance).passed
    assert not evaluate(build_dead_letter_ratio_check(), folder, instance).passed, "older batches count, too"


def test_dead_letters_that_were_redriven_or_replayed_count_no_more(folder: Path, instance: dg.DagsterInstance) -> None:
    log = write(folder / "t", (20, 0, 20), (20, 20, 0))
    write_dead_letters(folder / "t", "b1", range(20))
    check = build_dead_letter_ratio_check()
    assert evaluate(check, folder, instance).description == "20 of 40 messages in the newest 2 batches are dead letters"
    redriven = {SHARD: Intervals.of((0, 15))}
    write_next(log, "replay", number=1, messages=15, mode="replace", replay="r1", places=redriven)
    assert evaluate(check, folder, instance).description == "5 of 40 messages in the newest 2 batches are dead letters"
    write_next(log, "replay", number=2, messages=5, mode="replace", replay="r2", ranges={SHARD: Range(15, 20)})
    found = evaluate(check, folder, instance)
    assert found.description == "0 of 40 messages in the newest 3 batches are dead letters"
    assert found.passed


def test_dismissed_dead_letters_do_not_count(folder: Path, instance: dg.DagsterInstance) -> None:
    log = write(folder / "t", (20, 15, 5))
    write_dead_letters(folder / "t", "b1", range(5))
    write_dead_letters(folder / "t", "dismiss1", range(3), dismissed_by="ann")
    write_next(log, "dismiss", number=1, dead=3, mode="dismiss", replay="d", places={SHARD: Intervals.of((0, 3))})
    found = evaluate(build_dead_letter_ratio_check(max_ratio=0.1), folder, instance)
    assert found.description == "2 of 20 messages in the newest 1 batch are dead letters"
    assert found.passed


def test_a_message_that_was_replayed_often_counts_once(folder: Path, instance: dg.DagsterInstance) -> None:
    """Otherwise replays alone would make a bad ratio a good one."""
    log = write(folder / "t", (2, 1, 1))
    for number in (1, 2, 3):
        ranges = {SHARD: Range(0, 2)}
        write_next(log, "replay", number=number, messages=1, dead=1, mode="replace", replay=f"r{number}", ranges=ranges)
        write_dead_letters(folder / "t", f"replay{number}", range(1, 2))
    found = evaluate(build_dead_letter_ratio_check(max_ratio=0.4), folder, instance)
    assert found.description == "1 of 2 messages in the newest 1 batch are dead letters"
    assert not found.passed
    write_next(log, "replay", number=4, messages=1, mode="replace", replay="r4", ranges={SHARD: Range(0, 1)})
    found = evaluate(build_dead_letter_ratio_check(max_ratio=0.4), folder, instance)
    assert found.description == "1 of 2 messages in the newest 2 batches are dead letters"


def test_claimed_entries_lie_among_those_of_others(folder: Path, instance: dg.DagsterInstance) -> None:
    log = write(folder / "t", (4, 4, 0))
    write_next(log, "replay", number=1, messages=4, mode="replace", replay="r", ranges={SHARD: Range(0, 4)})
    claims = {SHARD: ClaimedRange(4, 10, 3)}
    write_next(log, "batch", number=2, messages=1, dead=2, claims=claims)
    write_dead_letters(folder / "t", "batch2", range(5, 7))
    found = evaluate(build_dead_letter_ratio_check(), folder, instance)
    assert found.description == "2 of 7 messages in the newest 2 batches are dead letters"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("replay", {"mode": "replace", "ranges": {SHARD: Range(0, 2)}, "replay": "r"}),
        ("replay", {"mode": "replace", "places": {SHARD: Intervals.of((0, 2))}, "replay": "r"}),
        ("keep", {}),
        ("batch", {"mode": "replace", "ranges": {SHARD: Range(1, 1)}, "until": {SHARD: 2}, "replay": "r"}),
    ],
    ids=["replay", "redrive", "maintenance", "rewind"],
)
def test_what_writes_no_new_messages_is_no_batch_that_makes_a_table_fresh(
    folder: Path, instance: dg.DagsterInstance, kind: str, fields: dict[str, Any]
) -> None:
    log = write(folder / "t", (4, 4, 0), timestamp_ms=int((time.time() - 3600) * 1000))
    write_next(log, kind, number=2 if kind == "batch" else 1, **fields)
    assert not evaluate(build_freshness_check(max_seconds=900), folder, instance).passed


def test_a_batch_that_a_restore_removed_makes_no_table_fresh(folder: Path, instance: dg.DagsterInstance) -> None:
    log = write(folder / "t", (4, 4, 0), timestamp_ms=int((time.time() - 3600) * 1000))
    write_next(log, "batch", number=2, messages=2, ranges={SHARD: Range(4, 6)})
    check = build_freshness_check(max_seconds=900)
    assert evaluate(check, folder, instance).passed
    log.restore(back_to=0, version=0)
    assert not evaluate(check, folder, instance).passed


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (build_lag_check, {"max_messages": -1}),
        (build_freshness_check, {"max_seconds": "900"}),
        (build_dead_letter_ratio_check, {"max_ratio": 1.5}),
        (build_dead_letter_ratio_check, {"batches": 0}),
        (build_continuity_check, {"blocking": "no"}),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(build: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidOptionError, match=f"{name}="):
        build(**options)
