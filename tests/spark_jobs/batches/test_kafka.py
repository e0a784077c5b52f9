"""The traps of a Kafka log and of its groups (K1 to K16 in the list of hidden traps), on a real broker."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as f

from spark_jobs.batches.ingestion import Batch, BatchReport, Step
from spark_jobs.decoding.decoders import Raw
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.lag import measure
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.verify_keyed import verify_keyed
from spark_jobs.writing.keyed import Keys
from stream_consumers.batches import Extent, Range
from stream_consumers.errors import (
    DataLossError,
    GroupActiveError,
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    SourceTruncatedError,
    TransformError,
)
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, DataLoss, ErrorPolicy, Limits
from tests.support.delta_writes import clean_log
from tests.support.kafka_topics import MALFORMED, CrashError, Once, Pipeline, Topics, assert_each_once, crash, orders
from tests.support.polling import until

RECORD = ErrorPolicy(on_data_loss="record")


# The log


@pytest.mark.slow
def test_k01_a_transform_that_fails_on_the_first_message_commits_nothing(topics: Topics) -> None:
    topic, what = topics.filled(orders(10))

    def refuse(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        if number == 0:
            raise ArithmeticError("the first one")
        return number

    refusing = f.udf(refuse, "bigint")
    with pytest.raises(TransformError) as raised:
        what.having(transform=lambda rows: rows.withColumn("id", refusing("id"))).drain()
    assert raised.value.detail == "the first one"
    assert topics.committed(what.group, topic) == {0: 0}
    assert what.rows() == {}
    what.drain()
    assert topics.committed(what.group, topic) == {0: 10}
    assert_each_once(what.rows(), topics.messages(topic))


def test_k02_offset_0_is_a_position_and_none_is_not(topics: Topics) -> None:
    topic = topics.create(partitions=2)
    latest = topics.pipeline(topic, start=AutoStreamReset.LATEST)
    assert latest.drain() == []
    topics.send(topic, orders(3))
    latest.drain()
    assert latest.positions() == topics.committed(latest.group, topic) == {0: 3, 1: 0}
    assert_each_once(latest.rows(), topics.messages(topic))
    topics.send(topic, orders(5), partition=1)
    topics.remove_before(topic, 3, partition=1)
    with pytest.raises(DataLossError) as raised:
        latest.drain()
    assert raised.value.facts == {f"{topic}/1": "committed 0, earliest 3, latest 5"}
    fresh = topics.pipeline(topic, table="fresh")
    with fresh.source.open() as opened:
        assert opened.committed(fresh.group) == {}
        topics.move(fresh.group, topic, 0)
        assert opened.committed(fresh.group) == {Shard(topic): 0}
    fresh.drain()
    assert fresh.positions() == {0: 3, 1: 5}, "what the broker has committed is no position: the ledger has none"
    assert_each_once(fresh.rows(), topics.messages(topic))


@pytest.mark.slow
def test_k03_ranges_that_end_in_or_hold_only_an_aborted_transaction_are_covered(topics: Topics) -> None:
    topic = topics.create()
    topics.commit(topic, 3)
    topics.abort(topic, 4)
    topics.commit(topic, 2, first=10)
    topics.abort(topic, 3)
    assert topics.end(topic) == 16, "12 messages and 4 markers"
    what = topics.pipeline(topic, records=12)
    reports = what.drain()
    assert [dict(one.entry.ranges) for one in reports] == [{Shard(topic): Range(0, 12)}, {Shard(topic): Range(12, 16)}]
    assert [sum(report.messages.values()) for report in reports] == [5, 0]
    assert topics.committed(what.group, topic) == what.positions() == {0: 16}
    assert sum(reports[-1].lag.values()) == measure(what.source, what.ingestion).total == 0
    assert_each_once(what.rows(), topics.messages(topic))
    assert [(v.messages, v.lag, v.is_right) for v in what.verify()] == [(5, 0, True)]
    assert what.drain() == []


@pytest.mark.slow
def test_k03_messages_of_aborted_transactions_are_read_only_if_asked_for(topics: Topics) -> None:
    topic = topics.create()
    topics.commit(topic, 2)
    topics.abort(topic, 3)
    what = topics.pipeline(topic, client={"isolation.level": "read_uncommitted"})
    open_transaction = topics.begin(topic, 4)
    what.drain()
    assert len(topics.messages(topic)) == 2
    assert_each_once(what.rows(), topics.messages(topic, level="read_uncommitted"))
    assert topics.committed(what.group, topic) == {0: topics.end(topic, committed=False)}
    open_transaction.abort_transaction()


@pytest.mark.slow
def test_k04_a_compacted_range_with_one_message_left_and_ranges_with_none(topics: Topics) -> None:
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    topic = topics.create(config=config)
    topics.send(topic, orders(100), key=b"a")
    keys = itertools.count()

    def old() -> list[int]:
        # Messages are compacted when they lie before the segment of the newest one.
        topics.send(topic, orders(1), key=b"%d" % next(keys))
        return [offset for _, _, offset in topics.messages(topic) if offset < 100]

    until(lambda: len(old()) == 1, what="compaction")
    left = topics.messages(topic)
    assert min(left) == (topic, 0, 99)
    what = topics.pipeline(topic, records=70)
    found = [sum(report.messages.values()) for report in what.drain()]
    assert (found[0], sum(found)) == (0, len(left))
    assert topics.committed(what.group, topic) == {0: topics.end(topic)}
    assert_each_once(what.rows(), left)
    assert [v.is_right for v in what.verify()] == [True]


def test_k05_an_open_transaction_is_reported_and_waited_for(topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, orders(5))
    transaction = topics.begin(topic, 3, first=5)
    topics.send(topic, orders(4, first=8))
    what = topics.pipeline(topic)
    (report,) = what.drain()
    assert report.messages == {Shard(topic): 5}
    assert what.drain() == []
    found = measure(what.source, what.ingestion)
    assert (found.extents, found.total) == ({Shard(topic): Extent(0, 5, 7)}, 0)
    assert found.describe() == f"lag 0 in 1 shard; blocked by an open transaction: {topic}/0: 7"
    assert topics.committed(what.group, topic) == {0: 5}
    transaction.commit_transaction()
    topics.settle(topic)
    assert measure(what.source, what.ingestion).total == 8
    what.drain()
    assert topics.committed(what.group, topic) == {0: 13}
    assert_each_once(what.rows(), topics.messages(topic))


def test_k06_messages_that_retention_removed_between_runs_are_an_error_with_numbers(topics: Topics) -> None:
    topic, what = topics.filled(orders(4), partitions=2)
    what.drain()
    before = what.rows()
    topics.send(topic, orders(6, first=4))
    topics.send(topic, orders(3), partition=1)
    topics.remove_before(topic, 7)
    with pytest.raises(DataLossError) as raised:
        what.drain()
    assert raised.value.facts == {f"{topic}/0": "committed 4, earliest 7, latest 10"}
    assert what.rows() == before
    assert topics.committed(what.group, topic) == {0: 4, 1: 0}
    assert [(verdict.lost, verdict.is_right) for verdict in what.verify()] == [(Range(4, 7), False), (None, True)]


@pytest.mark.slow
def test_k06_messages_that_retention_removed_between_runs_are_recorded_if_chosen(topics: Topics) -> None:
    topic, what = topics.filled(orders(4), errors=RECORD)
    what.drain()
    topics.send(topic, orders(6, first=4))
    topics.remove_before(topic, 7)
    (report,) = what.drain()
    assert_lost(what, topic, 4, 7)
    assert report.messages == {Shard(topic): 3}
    assert_each_once(what.rows(), {(topic, 0, number) for number in (0, 1, 2, 3, 7, 8, 9)})
    assert topics.committed(what.group, topic) == {0: 10}
    assert what.drain() == []
    # All that is left is gone as well: nothing to read, and still to be reported.
    topics.send(topic, orders(5, first=10))
    topics.remove_before(topic, 15)
    what.drain()
    assert_lost(what, topic, 10, 15)
    assert topics.committed(what.group, topic) == {0: 15}


def assert_lost(what: Pipeline, topic: str, start: int, end: int) -> None:
    """The newest loss is in the ledger and in the dead letters, with its exact range."""
    entries = [commit.entry for commit in what.ingestion.ledger().newest_first() if commit.entry]
    assert entries[0].lost == {Shard(topic): Intervals.of((start, end))}
    letters = what.ingestion.dead_letters().counted(what.spark, what.ingestion.ledger())
    assert letters is not None
    reason = f"sequences {start} to {end - 1} were removed"
    assert letters.where(f.col("_sequence").isNull() & f.col("error").contains(reason)).count() == 1


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "step"), [(DataLoss.ERROR, Step.PLANNED), (DataLoss.RECORD, Step.COMMITTED)])
def test_k06_messages_that_retention_removes_during_a_run(topics: Topics, loss: DataLoss, step: Step) -> None:
    """Where the read finds the messages gone, and where the next plan does."""
    topic, what = topics.filled(orders(10), records=4, errors=ErrorPolicy(on_data_loss=loss))
    remove = Once(step, lambda: topics.remove_before(topic, 6), number=3 if step is Step.PLANNED else 2)
    if loss is DataLoss.ERROR:
        with pytest.raises(DataLossError) as raised:
            what.drain(remove)
        assert raised.value.facts == {f"{topic}/0": "committed 4, earliest 6, latest 10"}
        assert topics.committed(what.group, topic) == {0: 4}
        assert_each_once(what.rows(), {(topic, 0, number) for number in range(4)})
    else:
        what.drain(remove)
        assert_lost(what, topic, 4, 6)
        assert topics.committed(what.group, topic) == {0: 10}
        assert_each_once(what.rows(), {(topic, 0, number) for number in (0, 1, 2, 3, 6, 7, 8, 9)})
    assert remove.is_done


def test_k07_a_topic_recreated_between_runs_is_another_one_though_it_is_longer(topics: Topics) -> None:
    topic, what = topics.filled(orders(8), errors=RECORD)
    what.drain()
    before = what.rows()
    topics.recreate(topic)
    topics.send(topic, orders(20, first=100))
    for read in (what.drain, lambda: measure(what.source, what.ingestion)):
        with pytest.raises(SourceRecreatedError):
            read()
    assert what.rows() == before
    assert topics.committed(what.group, topic) == {}


@pytest.mark.slow
def test_verify_of_a_keyed_table_finds_what_its_topic_has_lost(topics: Topics) -> None:
    topic, what = topics.filled(orders(10))
    what = what.having(keys=Keys(["id"]))
    what.drain()
    topics.send(topic, orders(5))
    topics.remove_before(topic, 12)
    with what.source.open() as opened:
        verdict = verify_keyed(what.spark, opened, what.ingestion)
    assert (verdict.lost, verdict.is_right) == ({Shard(topic): Range(10, 12)}, False)
    topics.recreate(topic)
    topics.send(topic, orders(10))
    with what.source.open() as opened, pytest.raises(SourceRecreatedError):
        verify_keyed(what.spark, opened, what.ingestion)


@pytest.mark.slow
@pytest.mark.parametrize("step", [Step.PLANNED, Step.COMMITTED])
def test_k07_a_topic_recreated_during_a_run_is_another_one(topics: Topics, step: Step) -> None:
    topic, what = topics.filled(orders(8), records=4, errors=RECORD)

    def recreate() -> None:
        topics.recreate(topic)
        topics.send(topic, orders(5, first=100))

    swap = Once(step, recreate, number=3 if step is Step.PLANNED else 2)
    with pytest.raises(SourceRecreatedError):
        what.drain(swap)
    assert swap.is_done
    assert_each_once(what.rows(), {(topic, 0, number) for number in range(4)})


@pytest.mark.slow
def test_k07_a_position_beyond_the_end_is_an_error(topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an unclean election: the same topic, but its last messages are gone."""
    topic, what = topics.filled(orders(8))
    what.drain()
    monkeypatch.setattr(KafkaBrokers, "ends", lambda self, shards, level=None: {Shard(topic): 5})
    with pytest.raises(SourceTruncatedError) as raised:
        what.drain()
    assert (raised.value.facts["position"], raised.value.facts["end"]) == (8, 5)
    with pytest.raises(SourceTruncatedError):
        measure(what.source, what.ingestion)
    assert topics.committed(what.group, topic) == {0: 8}
    assert what.having(errors=RECORD).drain() == []
    assert what.ingestion.ledger().read().positions == {Shard(topic): 8, Shard(f"{topic}#2"): 5}


def test_k08_added_partitions_are_read_from_their_beginning_or_are_a_loss(topics: Topics) -> None:
    topic, what = topics.filled(orders(3), start=AutoStreamReset.LATEST)
    assert what.drain() == []
    before = topics.messages(topic)
    topics.send(topic, orders(2))
    topics.add_partitions(topic, 2)
    topics.send(topic, orders(4), partition=1)

    def add() -> None:
        topics.add_partitions(topic, 3)
        topics.send(topic, orders(5), partition=2)

    added = Once(Step.PLANNED, add)
    what.drain(added)
    assert added.is_done
    assert what.positions() == {0: 5, 1: 4}
    what.drain()
    assert what.positions() == topics.committed(what.group, topic) == {0: 5, 1: 4, 2: 5}
    assert_each_once(what.rows(), topics.messages(topic) - before)
    topics.add_partitions(topic, 4)
    topics.send(topic, orders(10), partition=3)
    topics.remove_before(topic, 6, partition=3)
    with pytest.raises(DataLossError) as raised:
        what.drain()
    assert raised.value.facts == {f"{topic}/3": "committed 0, earliest 6, latest 10"}


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [0, 10_000], ids=["executors", "driver"])
def test_k09_large_messages_between_small_samples_do_not_pass_max_bytes(topics: Topics, driver_records: int) -> None:
    topic = topics.create()
    sizes = [1] * 600 + [50_000] * 20 + [1] * 600
    topics.send(topic, [b'{"id": %d, "more": "%s"}' % (number, b"x" * size) for number, size in enumerate(sizes)])
    limits = Limits(max_records=10_000, max_bytes=500_000)
    what = topics.pipeline(topic, limits=limits, driver_records=driver_records)
    reports = what.drain()
    assert len(reports) > 2
    for report in reports:
        assert sum(sizes[slice(*report.plan.ranges[Shard(topic)])]) <= 500_000
    assert_each_once(what.rows(), topics.messages(topic))


# Groups, and runs that fail


def test_k09_a_live_subscriber_is_named_and_repaired_after(topics: Topics) -> None:
    topic, what = topics.filled(orders(4))
    what.drain()
    topics.send(topic, orders(3, first=4))
    with topics.subscriber(what.group, topic, client_id="somebody-else"):
        with pytest.raises(GroupActiveError, match=r"client id 'somebody-else' on host /127\.0\.0\.1"):
            what.drain()
        assert topics.committed(what.group, topic) == {0: 4}
        assert_each_once(what.rows(), topics.messages(topic))
    assert what.drain() == []
    assert topics.committed(what.group, topic) == {0: 7}


@pytest.mark.slow
def test_k10_two_runs_at_the_same_time_write_each_message_once(topics: Topics) -> None:
    topic, what = topics.filled(orders(10), partitions=2, records=10)
    topics.send(topic, orders(10), partition=1)
    start = threading.Barrier(2)

    def run() -> list[BatchReport]:
        start.wait()
        return what.drain()

    with ThreadPoolExecutor(2) as pool:
        reports = [report for future in [pool.submit(run), pool.submit(run)] for report in future.result()]
    assert sum(report.rows for report in reports) == 20, "each batch is reported once, by the run that wrote it"
    assert_each_once(what.rows(), topics.messages(topic))
    what.drain()
    assert topics.committed(what.group, topic) == {0: 10, 1: 10}


# A batch that follows one that was not clean is read and counted first.
WAYS = {
    "careful": (MALFORMED, set(Step) - {Step.UNCLEAN}),
    "one pass": (orders(1)[0], set(Step) - {Step.UNCLEAN, Step.READ, Step.DEAD_LETTERS_WRITTEN}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_k11_a_run_that_ends_at_any_step_is_finished_by_the_next(topics: Topics, way: str) -> None:
    """In one table, so that each run also meets what the ones before it left; the kill matrix ends real processes."""
    topic = topics.create()
    what = topics.pipeline(topic)
    first, steps = WAYS[way]
    with pytest.raises(CrashError):
        what.drain(Once(Step.INITIALIZED, crash))
    topics.send(topic, [first, *orders(2)])
    what.drain()
    for step in (step for step in Step if step in steps - {Step.INITIALIZED}):
        topics.send(topic, [first, *orders(2)])
        rows, position = what.rows(), what.positions().get(0, 0)
        with pytest.raises(CrashError):
            what.drain(Once(step, crash))
        is_written = step in (Step.ROWS_WRITTEN, Step.VERIFIED, Step.COMMITTED)
        assert (what.rows() != rows) == is_written, step
        assert what.positions().get(0, 0) == (topics.end(topic) if is_written else position), step
        told = topics.end(topic) if step is Step.COMMITTED else position
        assert topics.committed(what.group, topic).get(0, 0) == told, step
    what.drain()
    messages = topics.messages(topic)
    dead = {(topic, 0, offset) for _, _, offset in messages if offset % 3 == 0 and first is MALFORMED}
    assert_each_once(what.letters(), dead)
    assert_each_once(what.rows() + what.letters(), messages)
    assert topics.committed(what.group, topic) == {0: topics.end(topic)}


@pytest.mark.slow
def test_k12_offsets_that_were_deleted_or_moved_by_hand_are_repaired_from_the_ledger(topics: Topics) -> None:
    topic, what = topics.filled(orders(6))
    what.drain()
    for offset in (None, 2, 99):
        topics.forget(what.group) if offset is None else topics.move(what.group, topic, offset)
        assert topics.committed(what.group, topic) == ({} if offset is None else {0: offset})
        assert what.drain() == []
        assert topics.committed(what.group, topic) == {0: 6}
    for first, offset in ((6, 1), (8, 99)):
        topics.move(what.group, topic, offset)
        topics.send(topic, orders(2, first=first))
        what.drain()
    assert topics.committed(what.group, topic) == {0: 10}
    assert_each_once(what.rows(), topics.messages(topic))
    with pytest.raises(InvalidOptionError, match="is resumable, not load_balanced"):
        what.shared().drain()


HEADERS = [("trace", b"1"), ("trace", b"\xff2"), ("empty", b""), ("none", None)]
LISTED = [{"name": name, "value": value} for name, value in HEADERS]


@pytest.fixture
def odd_topic(topics: Topics) -> str:
    """A whole message, a tombstone, a message without a key, and one with neither."""
    topic = topics.create()
    topics.send(topic, orders(1), key=b"k\xff", headers=HEADERS)
    topics.send(topic, [None], key=b"gone", headers=HEADERS[:1])
    topics.send(topic, orders(1, first=2))
    topics.send(topic, [None])
    return topic


def records(path: str, *columns: str) -> list[dict[str, Any]]:
    table = DeltaTable(path).to_pyarrow_table(columns=["_sequence", *columns]).sort_by("_sequence")
    return [{name: row[name] for name in columns} for row in table.to_pylist()]


def test_k13_tombstones_null_keys_and_headers_are_kept_as_they_are(topics: Topics, odd_topic: str) -> None:
    topics.send(odd_topic, [b""], key=b"")
    what = topics.pipeline(odd_topic, decoder=Raw())
    what.drain()
    assert records(what.table, "key", "payload", "headers") == [
        {"key": b"k\xff", "payload": b'{"id": 0}', "headers": LISTED},
        {"key": b"gone", "payload": None, "headers": LISTED[:1]},
        {"key": None, "payload": b'{"id": 2}', "headers": None},
        {"key": None, "payload": None, "headers": None},
        {"key": b"", "payload": b"", "headers": None},
    ]
    assert_each_once(what.rows(), topics.messages(odd_topic))


@pytest.mark.slow
def test_k13_a_tombstone_is_a_row_of_nulls_or_a_dead_letter_with_its_key(topics: Topics, odd_topic: str) -> None:
    nullable = topics.pipeline(odd_topic, decoder=Json("id BIGINT", key="k", headers="h"))
    nullable.drain()
    assert records(nullable.table, "id", "k", "h") == [
        {"id": 0, "k": b"k\xff", "h": LISTED},
        {"id": None, "k": b"gone", "h": LISTED[:1]},
        {"id": 2, "k": None, "h": None},
        {"id": None, "k": None, "h": None},
    ]
    assert_each_once(nullable.rows(), topics.messages(odd_topic))
    strict = topics.pipeline(odd_topic, table="strict", decoder=Json("id BIGINT NOT NULL", key="k"))
    strict.drain()
    assert records(strict.table, "id", "k") == [{"id": 0, "k": b"k\xff"}, {"id": 2, "k": None}]
    assert records(f"{strict.table}_dead_letters", "key", "payload", "headers") == [
        {"key": b"gone", "payload": None, "headers": LISTED[:1]},
        {"key": None, "payload": None, "headers": None},
    ]
    assert_each_once(strict.rows() + strict.letters(), topics.messages(odd_topic))


@pytest.mark.slow
def test_k13_a_header_whose_name_is_no_text_makes_a_dead_letter_of_its_message_only(topics: Topics) -> None:
    """Of many, since the client raises too late to be caught where the interpreter has optimised the call."""
    topic = topics.create()
    for number in range(40):
        topics.send(topic, orders(3))
        topics.send_with_header_name(topic, b"\xff\xfe%d" % number)
    what = topics.pipeline(topic, decoder=Raw())
    what.drain()
    messages = topics.messages(topic)
    assert_each_once(what.letters(), {(topic, 0, offset) for _, _, offset in messages if offset % 4 == 3})
    assert_each_once(what.rows() + what.letters(), messages)
    found = records(f"{what.table}_dead_letters", "key", "payload")
    assert found == [{"key": b"key", "payload": b'{"id": 7}'}] * 40


@pytest.mark.slow
def test_k14_after_a_restore_the_rows_are_written_again(topics: Topics) -> None:
    """RESTORE is a rewind, too; those by command and by run config are in test_replay.py."""
    topic, what = topics.filled(orders(8), records=4)
    what.drain()
    DeltaTable(what.table).restore(1)
    assert set(what.rows()) == {(topic, 0, number) for number in range(4)}
    seen: list[int] = []

    def watch(step: Step, batch: Batch | None) -> None:
        if step is Step.PLANNED:
            seen.append(topics.committed(what.group, topic)[0])

    reports = what.drain(watch)
    assert seen == [4], "the broker follows the ledger back"
    assert [report.rows for report in reports] == [4]
    assert topics.committed(what.group, topic) == {0: 8}
    assert_each_once(what.rows(), topics.messages(topic))


@pytest.mark.slow
def test_dead_letters_of_batches_that_a_restore_removed_during_a_run_count_once(topics: Topics) -> None:
    payloads = [b"{" if number % 4 == 0 else order for number, order in enumerate(orders(16))]
    topic, what = topics.filled(payloads, records=4)
    what.drain(max_batches=2)
    restore = Once(Step.COMMITTED, lambda: DeltaTable(what.table).restore(1))
    what.drain(restore)
    what.drain()
    assert restore.is_done
    assert_each_once(what.rows() + what.letters(), topics.messages(topic))
    assert all(verdict.is_right for verdict in what.verify())


@pytest.mark.slow
def test_k15_an_observer_that_raises_in_one_of_several_threads_ends_the_run_and_loses_nothing(topics: Topics) -> None:
    topic = topics.create(partitions=2)
    for partition in range(2):
        topics.send(topic, orders(4), partition=partition)
    what = topics.pipeline(topic, records=2).shared()
    with pytest.raises(CrashError):
        what.drain(Once(Step.VERIFIED, crash))
    assert topics.members(what.group) == 0, "the member leaves with the error"
    committed, positions = topics.committed(what.group, topic), what.positions()
    assert all(offset <= positions[partition] for partition, offset in committed.items())
    what.drain()
    assert_each_once(what.rows(), topics.messages(topic))
    assert topics.committed(what.group, topic) == {0: 4, 1: 4}


def transactions(table: str) -> dict[str, list[int]]:
    """The transaction numbers in a Delta log, by app id and in the order of the log."""
    found: dict[str, list[int]] = {}
    for path in sorted(Path(table, "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            action = json.loads(line).get("txn")
            if action:
                found.setdefault(action["appId"], []).append(action["version"])
    return found


def test_load_balanced_writes_each_shard_once_in_a_sequence_of_its_own(topics: Topics) -> None:
    topic, alone = topics.filled([MALFORMED, *orders(4)], partitions=2)
    topics.send(topic, orders(5), partition=1)
    what = alone.shared()
    reports = what.drain()
    assert_each_once(what.rows() + what.letters(), topics.messages(topic))
    assert topics.committed(what.group, topic) == what.positions() == {0: 5, 1: 5}
    assert topics.members(what.group) == 0
    assert [len(report.entry.ranges) for report in reports] == [1, 1]
    assert {frozenset(report.lag) for report in reports} == {frozenset({Shard(topic, 0), Shard(topic, 1)})}
    assert min(sum(report.lag.values()) for report in reports) == 0, "each reports what the group has left"
    numbers = transactions(what.table)
    lines = {f"{what.group}/{topic}/{partition}" for partition in range(2)}
    assert set(numbers) == {report.entry.app for report in reports} == lines
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values()), numbers
    with pytest.raises(InvalidOptionError, match="is load_balanced, not resumable"):
        alone.drain()
    assert what.drain() == []


@pytest.mark.parametrize("shares", [True, False])
def test_a_source_and_an_ingestion_of_different_modes_do_not_go_together(topics: Topics, shares: bool) -> None:
    _, alone = topics.filled(orders(3))
    mixed = replace(alone.shared(), mode=alone.mode) if shares else replace(alone, mode=alone.shared().mode)
    with pytest.raises(InvalidOptionError):
        mixed.drain()
    assert mixed.rows() == {}


@pytest.mark.slow
def test_a_shard_that_never_wrote_does_not_begin_the_group_anew_on_a_cleaned_log(topics: Topics) -> None:
    topic, alone = topics.filled(orders(6))
    what = alone.shared()
    what.drain()
    before = what.rows()
    clean_log(what.table)
    topics.add_partitions(topic, 2)
    # By hand, so that the group's position does not say with which batch it got there.
    KafkaBrokers(what.source.url).commit(what.ingestion.group, {Shard(topic): 6})
    for read in (what.drain, what.drain, lambda: measure(what.source, what.ingestion)):
        with pytest.raises(LedgerTruncatedError):
            read()
    assert what.rows() == before
