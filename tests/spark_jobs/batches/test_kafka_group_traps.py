"""The traps of Kafka groups and of runs that fail (K9 to K16), and groups that share, on a real broker."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Batch, BatchReport, Step
from spark_jobs.decoding.decoders import Raw
from spark_jobs.decoding.json_decoder import Json
from stream_consumers.errors import BrokerUnavailableError, GroupActiveError, InvalidOptionError
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import Shard
from tests.support.kafka_topics import (
    MALFORMED,
    Broker,
    CrashError,
    FailOnce,
    Once,
    assert_each_once,
    crash,
    filled,
    orders,
    pipeline,
)

pytestmark = pytest.mark.spark


def test_k09_a_live_subscriber_is_named_and_repaired_after(spark: SparkSession, broker: Broker, folder: Path) -> None:
    topic, what = filled(spark, broker, folder, orders(4))
    what.drain()
    broker.send(topic, orders(3, first=4))
    with broker.subscriber(what.group, topic, client_id="somebody-else"):
        with pytest.raises(GroupActiveError, match=r"client id 'somebody-else' on host /127\.0\.0\.1"):
            what.drain()
        assert broker.committed(what.group, topic) == {0: 4}
        assert_each_once(what.rows(), broker.messages(topic))
        broker.send(topic, orders(2, first=7))
        with pytest.raises(GroupActiveError, match="somebody-else"):
            what.drain()
    written = what.rows()
    what.drain()
    assert broker.committed(what.group, topic) == {0: 9}
    assert_each_once(what.rows(), broker.messages(topic))
    assert set(written) <= set(what.rows())


def test_k10_two_runs_at_the_same_time_write_each_message_once(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create(partitions=2)
    broker.send(topic, orders(10))
    broker.send(topic, orders(10), partition=1)
    what = pipeline(spark, broker, folder, topic, records=10)
    start = threading.Barrier(2)

    def run() -> list[BatchReport]:
        start.wait()
        return what.drain()

    with ThreadPoolExecutor(2) as pool:
        reports = [report for future in [pool.submit(run), pool.submit(run)] for report in future.result()]
    assert sum(report.rows for report in reports) == 20, "each batch is told of once, by the run that wrote it"
    assert_each_once(what.rows(), broker.messages(topic))
    what.drain()
    assert broker.committed(what.group, topic) == {0: 10, 1: 10}


# A batch behind one that was not clean is read and counted first.
WAYS = {
    "careful": (MALFORMED, set(Step) - {Step.UNCLEAN}),
    "one pass": (orders(1)[0], set(Step) - {Step.UNCLEAN, Step.READ, Step.DEAD_LETTERS_WRITTEN}),
}


@pytest.mark.parametrize("way", [pytest.param("careful", marks=pytest.mark.slow), "one pass"])
def test_k11_a_run_that_ends_at_any_step_is_finished_by_the_next(
    spark: SparkSession, broker: Broker, folder: Path, way: str
) -> None:
    """In one table, so that each run also meets what the ones before it left; the kill matrix ends real processes."""
    topic = broker.create()
    what = pipeline(spark, broker, folder, topic)
    first, steps = WAYS[way]
    with pytest.raises(CrashError):
        what.drain(Once(Step.INITIALIZED, crash))
    broker.send(topic, [first, *orders(2)])
    what.drain()
    for step in (step for step in Step if step in steps - {Step.INITIALIZED}):
        broker.send(topic, [first, *orders(2)])
        rows, position = what.rows(), what.positions().get(0, 0)
        with pytest.raises(CrashError):
            what.drain(Once(step, crash))
        is_written = step in (Step.ROWS_WRITTEN, Step.VERIFIED, Step.COMMITTED)
        assert (what.rows() != rows) == is_written, step
        assert what.positions().get(0, 0) == (broker.end(topic) if is_written else position), step
        told = broker.end(topic) if step is Step.COMMITTED else position
        assert broker.committed(what.group, topic).get(0, 0) == told, step
    what.drain()
    messages = broker.messages(topic)
    dead = {(topic, 0, offset) for _, _, offset in messages if offset % 3 == 0 and first is MALFORMED}
    assert_each_once(what.letters(), dead)
    assert_each_once(what.rows() + what.letters(), messages)
    assert broker.committed(what.group, topic) == {0: broker.end(topic)}


@pytest.mark.slow
def test_k12_offsets_that_were_deleted_or_moved_by_hand_are_repaired_from_the_ledger(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic, what = filled(spark, broker, folder, orders(6))
    what.drain()
    for offset in (None, 2, 99):
        broker.forget(what.group) if offset is None else broker.move(what.group, topic, offset)
        assert broker.committed(what.group, topic) == ({} if offset is None else {0: offset})
        assert what.drain() == []
        assert broker.committed(what.group, topic) == {0: 6}
    broker.move(what.group, topic, 1)
    broker.send(topic, orders(2, first=6))
    what.drain()
    broker.move(what.group, topic, 99)
    broker.send(topic, orders(2, first=8))
    what.drain()
    assert broker.committed(what.group, topic) == {0: 10}
    assert_each_once(what.rows(), broker.messages(topic))


HEADERS = [("trace", b"1"), ("trace", b"\xff2"), ("empty", b""), ("none", None)]


def send_odd_ones(broker: Broker, topic: str) -> None:
    """A whole message, a tombstone, a message without a key, and one with neither."""
    broker.send(topic, orders(1), key=b"k\xff", headers=HEADERS)
    broker.send(topic, [None], key=b"gone", headers=HEADERS[:1])
    broker.send(topic, orders(1, first=2))
    broker.send(topic, [None])


def records(path: str, *columns: str) -> list[dict[str, Any]]:
    table = DeltaTable(path).to_pyarrow_table(columns=["_sequence", *columns]).sort_by("_sequence")
    return [{name: row[name] for name in columns} for row in table.to_pylist()]


def test_k13_tombstones_null_keys_and_headers_are_kept_as_they_are(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    send_odd_ones(broker, topic)
    broker.send(topic, [b""], key=b"")
    what = pipeline(spark, broker, folder, topic, decoder=Raw())
    what.drain()
    listed = [{"name": name, "value": value} for name, value in HEADERS]
    assert records(what.table, "key", "payload", "headers") == [
        {"key": b"k\xff", "payload": b'{"id": 0}', "headers": listed},
        {"key": b"gone", "payload": None, "headers": listed[:1]},
        {"key": None, "payload": b'{"id": 2}', "headers": None},
        {"key": None, "payload": None, "headers": None},
        {"key": b"", "payload": b"", "headers": None},
    ]
    assert_each_once(what.rows(), broker.messages(topic))


def test_k13_a_tombstone_is_a_row_of_nulls_or_a_dead_letter_with_its_key(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create()
    send_odd_ones(broker, topic)
    nullable = pipeline(spark, broker, folder, topic, decoder=Json("id BIGINT", key="k", headers="h"))
    nullable.drain()
    listed = [{"name": name, "value": value} for name, value in HEADERS]
    assert records(nullable.table, "id", "k", "h") == [
        {"id": 0, "k": b"k\xff", "h": listed},
        {"id": None, "k": b"gone", "h": listed[:1]},
        {"id": 2, "k": None, "h": None},
        {"id": None, "k": None, "h": None},
    ]
    assert_each_once(nullable.rows(), broker.messages(topic))

    strict = pipeline(spark, broker, folder / "strict", topic, decoder=Json("id BIGINT NOT NULL", key="k"))
    strict.drain()
    assert records(strict.table, "id", "k") == [{"id": 0, "k": b"k\xff"}, {"id": 2, "k": None}]
    assert records(f"{strict.table}_dead_letters", "key", "payload", "headers") == [
        {"key": b"gone", "payload": None, "headers": listed[:1]},
        {"key": None, "payload": None, "headers": None},
    ]
    assert_each_once(strict.rows() + strict.letters(), broker.messages(topic))


@pytest.mark.slow
def test_k13_a_header_whose_name_is_no_text_makes_a_dead_letter_of_its_message_only(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    """Of many, since the client raises too late to be caught where the interpreter has optimised the call."""
    topic = broker.create()
    for number in range(40):
        broker.send(topic, orders(3))
        broker.send_with_header_name(topic, b"\xff\xfe%d" % number)
    what = pipeline(spark, broker, folder, topic, decoder=Raw())
    what.drain()
    messages = broker.messages(topic)
    assert_each_once(what.letters(), {(topic, 0, offset) for _, _, offset in messages if offset % 4 == 3})
    assert_each_once(what.rows() + what.letters(), messages)
    found = records(f"{what.table}_dead_letters", "key", "payload")
    assert found == [{"key": b"key", "payload": b'{"id": 7}'}] * 40


def test_k14_after_a_restore_the_rows_are_written_again(spark: SparkSession, broker: Broker, folder: Path) -> None:
    """RESTORE is a rewind, too; those by command and by run config are in test_replay_traps."""
    topic, what = filled(spark, broker, folder, orders(8), records=4)
    what.drain()
    DeltaTable(what.table).restore(1)
    assert set(what.rows()) == {(topic, 0, number) for number in range(4)}
    seen: list[int] = []

    def watch(step: Step, batch: Batch | None) -> None:
        if step is Step.PLANNED:
            seen.append(broker.committed(what.group, topic)[0])

    reports = what.drain(watch)
    assert seen == [4], "the broker follows the ledger back"
    assert [report.rows for report in reports] == [4]
    assert broker.committed(what.group, topic) == {0: 8}
    assert_each_once(what.rows(), broker.messages(topic))


@pytest.mark.slow
def test_k15_an_observer_that_raises_in_one_of_several_threads_ends_the_run_and_loses_nothing(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create(partitions=2)
    for partition in range(2):
        broker.send(topic, orders(4), partition=partition)
    what = pipeline(spark, broker, folder, topic, records=2).shared()
    with pytest.raises(CrashError):
        what.drain(Once(Step.VERIFIED, crash))
    assert broker.members(what.group) == 0, "the member leaves with the error"
    committed, positions = broker.committed(what.group, topic), what.positions()
    assert all(offset <= positions[partition] for partition, offset in committed.items())
    what.drain()
    assert_each_once(what.rows(), broker.messages(topic))
    assert broker.committed(what.group, topic) == {0: 4, 1: 4}


def test_k16_a_commit_that_failed_on_an_idle_topic_is_repaired_by_the_next_process(
    spark: SparkSession, broker: Broker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.create()
    what = pipeline(spark, broker, folder, topic)
    what.drain()
    broker.send(topic, orders(5))

    commit, fail = KafkaBrokers.commit, FailOnce(BrokerUnavailableError("the broker is away", remedy="Run again."))

    def fail_once(self: KafkaBrokers, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        fail()
        commit(self, group, positions, metadata=metadata)

    monkeypatch.setattr(KafkaBrokers, "commit", fail_once)
    with pytest.raises(BrokerUnavailableError):
        what.drain()
    assert broker.committed(what.group, topic) == {0: 0}
    assert_each_once(what.rows(), broker.messages(topic))
    assert what.drain() == [], "there is nothing to read"
    assert broker.committed(what.group, topic) == {0: 5}


def transactions(table: str) -> dict[str, list[int]]:
    """The transaction numbers in a Delta log, by app id and in the order of the log."""
    found: dict[str, list[int]] = {}
    for path in sorted(Path(table, "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            action = json.loads(line).get("txn")
            if action:
                found.setdefault(action["appId"], []).append(action["version"])
    return found


def test_load_balanced_writes_each_shard_once_on_a_number_line_of_its_own(
    spark: SparkSession, broker: Broker, folder: Path
) -> None:
    topic = broker.create(partitions=2)
    broker.send(topic, [MALFORMED, *orders(4)])
    broker.send(topic, orders(5), partition=1)
    what = pipeline(spark, broker, folder, topic, records=3).shared()
    reports = what.drain()
    assert_each_once(what.rows() + what.letters(), broker.messages(topic))
    assert broker.committed(what.group, topic) == what.positions() == {0: 5, 1: 5}
    assert broker.members(what.group) == 0
    assert [len(report.entry.ranges) for report in reports] == [1] * 4
    assert {frozenset(report.lag) for report in reports} == {frozenset({Shard(topic, 0), Shard(topic, 1)})}
    assert min(sum(report.lag.values()) for report in reports) == 0, "each tells what the group has left"
    numbers = transactions(what.table)
    lines = {f"{what.group}/{topic}/{partition}" for partition in range(2)}
    assert set(numbers) == lines
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values()), numbers
    assert {report.entry.app for report in reports} == lines
    assert what.drain() == []


@pytest.mark.parametrize("first", [pytest.param("resumable", marks=pytest.mark.slow), "load_balanced"])
def test_a_group_of_one_mode_refuses_a_run_of_the_other(
    spark: SparkSession, broker: Broker, folder: Path, first: str
) -> None:
    topic, alone = filled(spark, broker, folder, orders(3))
    shared = alone.shared()
    begins, refused = (alone, shared) if first == "resumable" else (shared, alone)
    begins.drain()
    broker.send(topic, orders(2))
    with pytest.raises(InvalidOptionError, match=f"is {first}, not {refused.mode.value}"):
        refused.drain()
    assert broker.committed(alone.group, topic) == {0: 3}
    begins.drain()
    assert_each_once(alone.rows(), broker.messages(topic))


@pytest.mark.parametrize("shares", [True, False])
def test_a_source_and_an_ingestion_of_different_modes_do_not_go_together(
    spark: SparkSession, broker: Broker, folder: Path, shares: bool
) -> None:
    _, alone = filled(spark, broker, folder, orders(3))
    mixed = replace(alone.shared(), mode=alone.mode) if shares else replace(alone, mode=alone.shared().mode)
    with pytest.raises(InvalidOptionError):
        mixed.drain()
    assert mixed.rows() == {}
