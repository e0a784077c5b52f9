"""Redis groups whose members claim entries: what others do to them at odd moments, and what the protocol promises."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches import telemetry
from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.claims.claim_job import ClaimJob
from spark_jobs.claims.claim_state import claim_state
from spark_jobs.lag import measure
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.maintenance import keep_alive
from spark_jobs.metrics.recorders import BatchLabels, BatchNumbers, Recorders
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import ShardVerdict, verify
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource
from stream_consumers.errors import (
    BrokerUnavailableError,
    DataLossError,
    InvalidOptionError,
    SourceRecreatedError,
    StreamAssetsError,
    StreamNotFoundError,
    TransformError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode, ErrorPolicy, Limits
from stream_consumers.redis.claims import RELEASED_MS, ClaimedEntries, ClaimName, Heartbeat, RedisClaims
from stream_consumers.redis.entries import to_sequence
from stream_consumers.redis.group import CLAIM_MODE_SENTINEL
from stream_consumers.redis.scripts import CLAIM_NEW
from stream_consumers.urls import StreamUrl
from tests.support.bad_rows import bad_rows, is_bad
from tests.support.ingesting import run_batch
from tests.support.lossy_proxy import LossyProxy
from tests.support.polling import until
from tests.support.redis_tables import Stream
from tests.support.streams import sequences_in_table

RECORD = ErrorPolicy(on_data_loss="record")
BID = "a" * 32


@pytest.fixture
def stream(redis_address: str, folder: Path) -> Iterator[Stream]:
    made = Stream(redis_address, folder, shards=1, mode="load_balanced")
    yield made
    made.client.close()


def at(step: Step, action: Callable[[], object]) -> Callable[[Step, Batch | None], None]:
    """An observer that does something the first time a batch with entries comes to a step."""
    done: list[bool] = []

    def observe(reached: Step, batch: Batch | None) -> None:
        if reached is step and not done and batch is not None and batch.plan.records:
            done.append(True)
            action()

    return observe


class MeasuredSteps:
    """A recorder that lists the steps of all batches."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        self.steps.append(name)

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """Only steps are listed."""


def begin(spark: SparkSession, stream: Stream, count: int, *, more: int) -> None:
    """Write this number of entries into the table, and add others."""
    stream.add(count)
    stream.drain(spark)
    stream.add(more, first=count)


def stop() -> None:
    raise InterruptedError("the test ends the run here")


def verdicts(stream: Stream) -> list[ShardVerdict]:
    ingestion = stream.ingestion()
    with stream.source.claims(stream.group) as claims:
        claimed = claim_state(claims, ingestion, ingestion.ledger().read().shards)
    with stream.source.open() as opened:
        return verify(opened, ingestion, claims=claimed)


def test_members_claim_what_is_free_until_the_end(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=3, mode="load_balanced")
    stream.add(100)
    reports = stream.drain(spark, stream.ingestion(40))
    assert [sum(report.messages.values()) for report in reports] == [40, 40, 20]
    assert [sum(report.lag.values()) for report in reports] == [60, 20, 0]
    claimed = [claim.entries for report in reports for claim in report.entry.claims.values()]
    assert sum(claimed) == 100
    stream.assert_each_once()
    assert stream.consumers() == set(), "names of finished batches are removed"
    found = verdicts(stream)
    assert all(verdict.is_right for verdict in found)
    assert sum(verdict.rows for verdict in found) == 100
    assert stream.drain(spark) == []


@pytest.mark.slow
def test_limits_of_bytes_hold_and_one_entry_always_fits(spark: SparkSession, stream: Stream) -> None:
    for size in (10, 10, 5000, 10):
        stream.client.xadd(stream.keys[0], {"msg": b'{"id": 1, "user": "%s"}' % (b"x" * size)})
    reports = stream.drain(spark, stream.ingestion(limits=Limits(max_bytes=200)))
    assert [report.rows for report in reports] == [2, 1, 1]
    stream.assert_each_once()


def test_r1_an_entry_that_is_trimmed_after_it_was_claimed_is_told(spark: SparkSession, stream: Stream) -> None:
    stream.add(10)
    victim = stream.entry_ids()[3]
    observer = at(Step.PLANNED, lambda: stream.client.xdel(stream.keys[0], victim))
    with pytest.raises(DataLossError, match="1 pending entry"):
        stream.drain(spark, observer=observer)
    assert stream.rows() == set()
    assert sum(stream.held().values()) == 10, "everything stays pending until the loss is recorded"


@pytest.mark.slow
@pytest.mark.parametrize("is_swept", [False, True])
def test_r1_a_trimmed_entry_is_recorded_once_if_chosen(spark: SparkSession, stream: Stream, is_swept: bool) -> None:
    """Also, R4, where a sweep of a peer has purged the id."""
    stream.add(10)
    victims = stream.entry_ids()[3:5]

    def trim() -> None:
        stream.client.xdel(stream.keys[0], *victims)
        if is_swept:
            stream.client.execute_command("XAUTOCLAIM", stream.keys[0], stream.group, "peer", 100_000, "0-0")
            assert sum(stream.held().values()) == 8

    wanted = stream.ingestion(errors=RECORD)
    reports = stream.drain(spark, wanted, observer=at(Step.PLANNED, trim))
    lost = [part for report in reports for parts in report.entry.lost.values() for part in parts]
    assert lost == [(to_sequence(victims[0]), to_sequence(victims[1]) + 1)]
    stream.assert_each_once()
    letters = sequences_in_table(f"{stream.table}_dead_letters")
    assert [sequence for _, _, sequence in letters.elements()] == [None]
    assert stream.drain(spark, wanted) == []


@pytest.mark.slow
def test_r2_losses_of_a_dead_member(spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(spark, stream, 6, more=6)
    ids = stream.read_as(f"other/1/{BID}", 4)
    stream.client.xdel(stream.keys[0], *ids[:2])
    wanted = stream.ingestion(errors=RECORD)
    measured = MeasuredSteps()
    monkeypatch.setattr(telemetry, "recorders", lambda: Recorders([measured]))
    reports = stream.drain(spark, wanted)
    assert sum(len(report.entry.lost) for report in reports) == 1
    stream.assert_each_once()
    assert measured.steps.count("verified") == len(reports), "the batch that records the loss is measured, too"


def test_r5_entries_in_the_table_are_acknowledged_and_not_written_again(spark: SparkSession, stream: Stream) -> None:
    """As after a crash between the write and the acknowledgement; another member comes."""
    stream.add(10)
    with pytest.raises(InterruptedError):
        stream.drain(spark, stream.ingestion(member="first"), at(Step.VERIFIED, stop))
    assert sum(stream.held().values()) == 10
    version = stream.ingestion().ledger().read().version
    assert stream.drain(spark, stream.ingestion(member="second")) == []
    stream.assert_each_once()
    assert stream.ingestion().ledger().read().version == version


@pytest.mark.parametrize("beats", [pytest.param(True, marks=pytest.mark.slow), False])
def test_r6_a_batch_longer_than_the_idle_time_is_kept_by_its_heartbeat_or_fenced(
    spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    begin(spark, stream, 10, more=10)
    if not beats:
        monkeypatch.setattr(RedisClaims, "touch", lambda self, name, shards: None)
    others: list[int] = []

    def let_another_try() -> None:
        (name,) = stream.held()
        deadline = time.monotonic() + 2.5
        with stream.source.claims(stream.group) as claims:
            while time.monotonic() < deadline and not others:
                others.extend(len(page) for page in claims.pending(Shard(stream.name), name, idle=True))
        if others:
            stream.drain(spark, stream.ingestion(member="other"))

    stream.drain(spark, observer=at(Step.READ, let_another_try))
    assert bool(others) is not beats
    stream.assert_each_once()


@pytest.mark.slow
def test_r7_fewer_acknowledged_than_sent_is_no_error(spark: SparkSession, stream: Stream) -> None:
    stream.add(10)
    ids = stream.entry_ids()[:4]
    observer = at(Step.VERIFIED, lambda: stream.client.xack(stream.keys[0], stream.group, *ids))
    stream.drain(spark, observer=observer)
    stream.assert_each_once()


def test_r8_a_group_that_is_gone_is_an_error_and_never_made_again(spark: SparkSession, stream: Stream) -> None:
    begin(spark, stream, 10, more=5)
    stream.client.xgroup_destroy(stream.keys[0], stream.group)
    with pytest.raises(SourceRecreatedError):
        stream.drain(spark)
    with pytest.raises(SourceRecreatedError):
        measure(stream.source, stream.ingestion(claims=True))
    assert stream.client.xinfo_groups(stream.keys[0]) == []


def test_r8_a_group_that_goes_while_its_batch_is_written_is_told(spark: SparkSession, stream: Stream) -> None:
    stream.add(10)
    observer = at(Step.VERIFIED, lambda: stream.client.xgroup_destroy(stream.keys[0], stream.group))
    with pytest.raises(StreamNotFoundError):
        stream.drain(spark, observer=observer)
    assert len(stream.rows()) == 10


@pytest.mark.parametrize("is_recreated", [True, False])
def test_r9_a_recreated_stream_or_moved_group_is_an_error(
    spark: SparkSession, stream: Stream, is_recreated: bool
) -> None:
    """By hand, or since the server came back from an older snapshot: entries would be written again."""
    (key,) = stream.keys
    stream.add(10)
    stream.drain(spark)
    written, last = stream.rows(), stream.client.xinfo_stream(key)["last-generated-id"]
    if is_recreated:
        stream.client.delete(key)
        stream.client.xadd(key, {"msg": "{}"}, id="1-0")
        stream.client.xgroup_create(key, stream.group, id=last)
    else:
        stream.client.xgroup_setid(key, stream.group, stream.entry_ids()[3])
    with pytest.raises(SourceRecreatedError) as raised:
        stream.drain(spark)
    assert raised.value.facts.keys() >= {"position", "end" if is_recreated else "table"}
    assert raised.value.facts.get("end", 65537) == 65537
    assert stream.rows() == written


def test_r10_a_group_that_somebody_made_at_its_end_is_taken_as_it_is(spark: SparkSession, stream: Stream) -> None:
    stream.add(5)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="$")
    stream.add(5, first=5)
    (report,) = stream.drain(spark)
    assert report.rows == 5
    shards = stream.ingestion().ledger().read().shards
    assert shards[Shard(stream.name)].origin == to_sequence(stream.entry_ids()[4]) + 1
    assert all(verdict.is_right for verdict in verdicts(stream))


def test_latest_is_anchored_once(spark: SparkSession, stream: Stream) -> None:
    stream.add(5)
    wanted = stream.ingestion(start=AutoStreamReset.LATEST)
    with pytest.raises(InterruptedError):
        stream.drain(spark, wanted, lambda step, batch: stop() if step is Step.INITIALIZED else None)
    stream.add(3, first=5)
    (report,) = stream.drain(spark, wanted)
    assert report.rows == 3


def test_r12_a_name_that_holds_something_is_not_removed(stream: Stream) -> None:
    stream.add(2)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="0")
    name = ClaimName("main", 1, BID)
    stream.read_as(str(name), 1)
    with stream.source.claims(stream.group) as claims:
        assert not claims.remove_name(Shard(stream.name), name)
        assert stream.held() == {str(name).encode(): 1}
        stream.client.xack(stream.keys[0], stream.group, stream.entry_ids()[0])
        assert claims.remove_name(Shard(stream.name), name)
        assert stream.consumers() == set()


def test_r13_the_lag_is_right_where_that_of_redis_is_not(spark: SparkSession, stream: Stream) -> None:
    key = stream.keys[0]
    stream.add(10)
    stream.client.xgroup_create(key, stream.group, id=stream.entry_ids()[3])
    with stream.source.claims(stream.group) as claims:
        assert stream.groups()[0][1] is None, "Redis does not know"
        assert claims.backlog()[Shard(stream.name)].total == 6
        stream.read_as("somebody", 2)
        assert claims.backlog()[Shard(stream.name)] == (4, 2)
    with stream.source.open() as source:
        start, end = to_sequence(stream.entry_ids()[5]), source.extents()[Shard(stream.name)].end
        assert source.count({Shard(stream.name): Range(start, end)}) == {Shard(stream.name): 5}, "entries, not ids"


def test_r14_entries_that_were_trimmed_unread_are_recorded_once(spark: SparkSession, stream: Stream) -> None:
    begin(spark, stream, 10, more=10)
    left = stream.entry_ids()[17]
    stream.client.xtrim(stream.keys[0], maxlen=3, approximate=False)
    with pytest.raises(DataLossError, match=f"7 entries from .* to {to_sequence(left)}"):
        stream.drain(spark)
    wanted = stream.ingestion(errors=RECORD)
    reports = stream.drain(spark, wanted)
    lost = [report.entry for report in reports if report.entry.lost]
    assert [claim.entries for entry in lost for claim in entry.claims.values()] == [7]
    assert stream.there() <= stream.rows()
    assert [(lag, pending) for _, lag, pending in stream.groups()] == [(0, 0)], "Redis' own lag is right again"
    assert stream.drain(spark, wanted) == []


@pytest.mark.slow
def test_entries_deleted_unread_are_a_loss_though_older_ones_stay(spark: SparkSession, stream: Stream) -> None:
    (key,) = stream.keys
    stream.add(4)
    stream.client.xdel(key, stream.entry_ids()[1])
    stream.drain(spark)
    stream.client.xdel(key, stream.entry_ids()[0])
    stream.add(6)
    stream.drain(spark)
    assert len(stream.rows()) == 3 + 6, "neither what was deleted before nor what was read is a loss"
    stream.add(6)
    for gone in stream.entry_ids()[-4:-2]:
        stream.client.xdel(key, gone)
    with pytest.raises(DataLossError):
        stream.drain(spark)
    wanted = stream.ingestion(errors=RECORD)
    reports = stream.drain(spark, wanted)
    assert [c.entries for report in reports if report.entry.lost for c in report.entry.claims.values()] == [2]
    assert len(stream.rows()) == 9 + 4
    assert stream.drain(spark, wanted) == []
    stream.add(2)
    stream.drain(spark)
    assert len(stream.rows()) == 13 + 2, "it is accounted for"


@pytest.mark.slow
def test_r14_a_loss_that_was_recorded_before_a_crash_is_not_recorded_again(spark: SparkSession, stream: Stream) -> None:
    begin(spark, stream, 10, more=10)
    stream.client.xtrim(stream.keys[0], maxlen=3, approximate=False)
    wanted = stream.ingestion(errors=RECORD)
    with pytest.raises(InterruptedError):
        stream.drain(spark, wanted, lambda step, batch: stop() if step is Step.VERIFIED else None)
    reports = stream.drain(spark, wanted)
    assert [report.rows for report in reports] == [3]
    letters = spark.read.format("delta").load(f"{stream.table}_dead_letters").collect()
    assert len(letters) == 1


@pytest.mark.slow
def test_r18_two_runs_under_one_name_write_each_entry_once(spark: SparkSession, stream: Stream) -> None:
    """The same member twice: they race for every number, and one of the two drops its batch."""
    stream.add(40)
    stream.drain(spark, stream.ingestion(10), max_batches=1)
    failures: list[Exception] = []

    def run() -> None:
        try:
            stream.drain(spark, stream.ingestion(10))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    stream.assert_each_once()


@pytest.mark.slow
def test_idle_entries_of_others_are_taken_over_once(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream, worker = Stream(redis_address, folder, shards=2, mode="load_balanced"), b"worker-\xff"
    stream.add(3000)
    for key in stream.keys:
        stream.client.xgroup_create(key, stream.group, id="0")
    for shard in range(2):
        stream.read_as(worker, 1400, shard)
    begin = time.monotonic()
    stream.drain(spark, stream.ingestion(700))
    assert time.monotonic() - begin > 1, "not before they are idle"
    stream.assert_each_once()
    assert stream.consumers() == {worker}, "a client that is not ours keeps its name"


def test_an_entry_that_its_client_touches_again_is_not_taken_away(stream: Stream) -> None:
    """Compare and claim: between the look and the move somebody else may come."""
    stream.add(3)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="0")
    stream.client.xgroup_createconsumer(stream.keys[0], stream.group, CLAIM_MODE_SENTINEL)
    ids = stream.read_as("worker-1", 3)
    with stream.source.claims(stream.group) as claims:
        shard = Shard(stream.name)
        listed = until(lambda: next(claims.pending(shard, b"worker-1", idle=True), None), what="idle entries")
        stream.client.xclaim(stream.keys[0], stream.group, "worker-2", 0, [ids[0]])
        stream.client.xclaim(stream.keys[0], stream.group, "worker-1", 0, [ids[1]])
        held = ClaimedEntries(ClaimName("main", 1, BID), 10, 10_000)
        claims.take_over(held, shard, b"worker-1", listed)
        assert held.ids == {shard: [ids[2]]}
        assert stream.held() == {b"worker-1": 1, b"worker-2": 1, str(held.name).encode(): 1}


def test_the_heartbeat_of_a_fenced_member_steals_nothing_back(stream: Stream) -> None:
    stream.add(3)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="0")
    shard, name = Shard(stream.name), ClaimName("main", 1, BID)
    ids = stream.read_as(str(name), 3)
    with stream.source.claims(stream.group) as claims:
        stream.client.xclaim(stream.keys[0], stream.group, "thief", 0, [ids[0]])
        claims.touch(name, [shard])
        assert stream.held() == {b"thief": 1, str(name).encode(): 2}
        counters = stream.client.xpending_range(stream.keys[0], stream.group, "-", "+", 10)
        assert [found["times_delivered"] for found in counters] == [2, 1, 1], "a heartbeat is no delivery"
        claims.release(shard, name)
        counters = stream.client.xpending_range(stream.keys[0], stream.group, "-", "+", 10)
        assert [found["times_delivered"] for found in counters] == [2, 0, 0], "neither is a batch that failed orderly"


def test_a_heartbeat_goes_on_when_the_server_does_not_answer(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []

    def touch(self: RedisClaims, name: ClaimName, shards: list[Shard]) -> None:
        beats.append(1)
        raise BrokerUnavailableError("gone", remedy="none")

    monkeypatch.setattr(RedisClaims, "touch", touch)
    with (
        stream.source.claims(stream.group) as claims,
        Heartbeat(claims, ClaimedEntries(ClaimName("main", 1, BID), 1, 1)),
    ):
        until(lambda: len(beats) > 1, what="a second beat")


@pytest.mark.slow
def test_r4_a_claim_whose_reply_is_lost_is_given_up(spark: SparkSession, stream: Stream, redis_address: str) -> None:
    """The server has done it, its answer never comes: what the name holds is in no batch, and is claimed anew."""
    stream.add(20)
    stream.drain(spark, stream.ingestion(5), max_batches=1)
    with LossyProxy(redis_address) as proxy:
        stream.url = f"redis://{proxy.address}/{stream.name}"
        stream.options |= {"socket_timeout": 2}
        seen: list[dict[bytes, int]] = []

        def lose(step: Step, batch: Batch | None) -> None:
            if step is Step.COMMITTED and not seen:
                seen.append({})
                proxy.drop_the_reply_of(hashlib.sha1(CLAIM_NEW.encode()).hexdigest().encode())

        reports = stream.drain(spark, stream.ingestion(5), lose)
        assert proxy.dropped == 1
    assert sum(report.rows for report in reports) == 15
    stream.assert_each_once()
    fences = [c.entry for c in stream.ingestion().ledger().newest_first() if c.entry and c.entry.kind == "fence"]
    assert len(fences) == 1, "the name was fenced before its entries were moved"


def test_a_transform_that_fails_releases_its_entries_and_is_no_delivery(spark: SparkSession, stream: Stream) -> None:
    def broken(rows: DataFrame) -> DataFrame:
        raise ValueError("on purpose")

    def fails_later(rows: DataFrame) -> DataFrame:
        return rows.withColumn("id", f.raise_error(f.lit("on purpose")).cast("bigint"))

    begin(spark, stream, 5, more=5)
    stream.options["min_idle_seconds"] = 30.0
    for transform, kind in ((broken, TransformError), (fails_later, StreamAssetsError)):
        with pytest.raises(kind):
            stream.drain(spark, stream.ingestion(transform=transform))
    counters = stream.client.xpending_range(stream.keys[0], stream.group, "-", "+", 10)
    assert {found["times_delivered"] for found in counters} <= {0, 1}
    began = time.monotonic()
    stream.drain(spark)
    assert time.monotonic() - began < 15, "nobody waits for entries that were released"
    stream.assert_each_once()


@pytest.mark.slow
def test_entries_with_bad_rows_become_dead_letters_and_are_acknowledged(spark: SparkSession, stream: Stream) -> None:
    stream.add(130)
    wanted = stream.ingestion(transform=bad_rows, errors=ErrorPolicy(on_bad_rows="dead_letter"))
    assert sum(report.dead for report in stream.drain(spark, wanted)) == len([*filter(is_bad, range(130))])
    stream.assert_each_once()
    assert sum(stream.held().values()) == 0
    assert all(verdict.is_right for verdict in verdicts(stream))


@pytest.mark.slow
def test_a_restore_that_removes_claimed_batches_is_an_error(spark: SparkSession, stream: Stream) -> None:
    begin(spark, stream, 5, more=5)
    stream.drain(spark)
    spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF 1").collect()
    look = [
        lambda: stream.drain(spark),
        lambda: measure(stream.source, stream.ingestion(claims=True)),
        lambda: verdicts(stream),
    ]
    for _ in range(2):
        for each in look:
            with pytest.raises(DataLossError) as caught:
                each()
            assert caught.value.facts["batches"] == 1
        # The nightly maintenance writes a commit of the group, which once made it forget what was removed.
        keep_alive(spark, stream.ingestion())
    spark.sql(f"RESTORE delta.`{stream.table}` TO VERSION AS OF 2").collect()
    stream.add(5, first=10)
    stream.drain(spark)
    stream.assert_each_once()


def test_the_sensor_measures_unread_and_pending_entries(spark: SparkSession, stream: Stream) -> None:
    wanted = stream.ingestion(claims=True)
    stream.add(10)
    assert measure(stream.source, wanted).total == 10
    stream.drain(spark)
    stream.add(4, first=10)
    stream.read_as("worker-1", 3)
    found = measure(stream.source, wanted)
    assert (found.total, dict(found.lag)) == (4, {Shard(stream.name): 4})
    with pytest.raises(StreamAssetsError, match="load_balanced by claims"):
        measure(stream.source, replace(wanted, claims=False))


@pytest.mark.slow
def test_a_filtering_transform_is_told_from_loss(spark: SparkSession, stream: Stream) -> None:
    stream.add(50)
    stream.drain(spark, stream.ingestion(20, transform=lambda rows: rows.where("id % 5 != 0")))
    (verdict,) = verdicts(stream)
    assert (verdict.rows, verdict.filtered, verdict.missing, verdict.duplicated) == (40, 10, 0, 0)


@pytest.mark.slow
def test_a_group_that_is_moved_back_during_a_run_is_an_error(spark: SparkSession, stream: Stream) -> None:
    stream.add(20)

    def move_back(step: Step, batch: Batch | None) -> None:
        if step is Step.COMMITTED and batch is not None and batch.number == 3:
            stream.client.xgroup_setid(stream.keys[0], stream.group, stream.entry_ids()[4])

    with pytest.raises(SourceRecreatedError) as error:
        stream.drain(spark, stream.ingestion(5), move_back)
    ids = stream.entry_ids()
    assert error.value.facts["position"] == to_sequence(ids[4]) + 1
    assert error.value.facts["table"] == to_sequence(ids[9]) + 1
    assert len(stream.rows()) == 10


def test_a_move_back_after_the_look_writes_nothing_twice(
    spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.add(10)
    stream.drain(spark)
    stream.add(5, first=10)
    positions = RedisClaims.positions

    def moved_back(claims: RedisClaims) -> Mapping[Shard, int]:
        stream.client.xgroup_setid(stream.keys[0], stream.group, stream.entry_ids()[3])
        monkeypatch.undo()
        return positions(claims)

    monkeypatch.setattr(RedisClaims, "positions", moved_back)
    stream.drain(spark)
    assert stream.rows() == stream.there()


@pytest.mark.slow
def test_what_a_promoted_replica_has_not_heard_of_is_not_written_again(spark: SparkSession, stream: Stream) -> None:
    """It knows that the first member holds the entries, not that another one has written and acknowledged them."""
    key, name = stream.keys[0], f"one/1/{BID}"
    stream.add(10)
    stream.client.xgroup_create(key, stream.group, id="0")
    stream.client.xgroup_createconsumer(key, stream.group, CLAIM_MODE_SENTINEL)
    ids = stream.read_as(name, 10)
    stream.client.xclaim(key, stream.group, name, 0, ids, idle=RELEASED_MS, justid=True)
    older = stream.client.dump(key)
    stream.drain(spark, stream.ingestion(member="two"))
    stream.assert_each_once()
    stream.client.restore(key, 0, older, replace=True)
    stream.add(3, first=10)
    stream.drain(spark, stream.ingestion(member="three"))
    stream.assert_each_once()


@pytest.mark.slow
def test_entries_taken_from_a_member_at_work_are_written_once(spark: SparkSession, stream: Stream) -> None:
    stream.add(5)
    stream.drain(spark)
    stream.add(20, first=5)
    with stream.source.claims(stream.group) as claims:
        sleeper = ClaimJob(spark, claims, stream.ingestion(claims=True, member="sleeper"))
        batch = sleeper.plan()
        assert batch is not None
        taken = stream.client.execute_command("XAUTOCLAIM", stream.keys[0], stream.group, "worker-1", 0, "0-0")
        assert len(taken[1]) == 20
        stream.drain(spark, stream.ingestion(member="other"))
        assert run_batch(sleeper, batch) is None
    stream.assert_each_once()


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_earlier_group_is_found_when_the_first_entry_comes(
    is_lost: bool, spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the look would go back through the whole log in each run; and another group may write it later."""
    monkeypatch.setattr("spark_jobs.ledger.ledger.NEWEST_VERSIONS", 1)
    asked: list[frozenset[str]] = []
    look = Ledger.earlier_group

    def looking(ledger: Ledger, streams: frozenset[str]) -> str | None:
        asked.append(streams)
        return look(ledger, streams)

    monkeypatch.setattr(Ledger, "earlier_group", looking)
    quiet = f"{stream.name}-quiet"
    alone = StreamSource(StreamUrl.parse(stream.url.replace(stream.name, quiet)), stream.mode, stream.options)
    stream.url += f",{quiet}"
    stream.add(5)
    # It is there, and empty.
    stream.client.xgroup_create(quiet, "another client", mkstream=True)
    with stream.source.claims(stream.group) as claims:
        job = ClaimJob(spark, claims, stream.ingestion(claims=True, errors=RECORD))
        batch = job.plan()
        assert batch is not None
        assert run_batch(job, batch) is not None
        assert job.plan() is None
        assert asked == [{stream.name}]
        # Of the newest commits none is of the group, so that another one does not see its claim.
        spark.sql(f"ALTER TABLE delta.`{stream.table}` SET TBLPROPERTIES ('a' = 'b')")
        stream.client.xadd(quiet, {"msg": b'{"id": 1}'})
        assert [report.rows for report in drain(spark, alone, stream.ingestion(group="other"))] == [1]
        if is_lost:
            stream.client.xtrim(quiet, 0, approximate=False)
        assert job.has_more()
        with pytest.raises(InvalidOptionError):
            job.plan()
        held = [(shard, ClaimName.parse(raw)) for shard, names in claims.holders().items() for raw in names]
        released = [name is not None and claims.is_released(shard, name) for shard, name in held]
        assert released == ([] if is_lost else [True])
    assert len([place for place in sequences_in_table(stream.table).elements() if place[0] == quiet]) == 1


@pytest.mark.parametrize("is_counted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_group_moved_forwards_is_an_error_or_recorded(spark: SparkSession, stream: Stream, is_counted: bool) -> None:
    key, shard = stream.keys[0], Shard(stream.name)
    begin(spark, stream, 10, more=30)
    ids = stream.entry_ids()
    count = ["ENTRIESREAD", 25] if is_counted else []
    stream.client.execute_command("XGROUP", "SETID", key, stream.group, ids[24], *count)
    with pytest.raises(DataLossError) as error:
        stream.drain(spark)
    assert error.value.facts["given"] == to_sequence(ids[9]) + 1
    assert measure(stream.source, stream.ingestion(claims=True)).lost.keys() == {shard}
    (verdict,) = verdicts(stream)
    assert (verdict.is_right, verdict.lost) == (False, Range(to_sequence(ids[9]) + 1, to_sequence(ids[24]) + 1))
    recorded, *rest = stream.drain(spark, stream.ingestion(errors=RECORD))
    assert recorded.entry.claims[shard].entries == 15
    assert [report.entry.lost for report in rest] == [{}]
    assert len(stream.rows()) == 10 + 15
    assert verdicts(stream)[0].is_right
    stream.add(2, first=40)
    assert [report.rows for report in stream.drain(spark)] == [2]


def test_a_group_that_is_moved_forwards_after_the_look_is_given_nothing(spark: SparkSession, stream: Stream) -> None:
    begin(spark, stream, 5, more=10)
    with stream.source.claims(stream.group) as claims:
        claims.positions()
        held = ClaimedEntries(ClaimName("main", 9, BID), 100, 1 << 20)
        stream.client.xgroup_setid(stream.keys[0], stream.group, stream.entry_ids()[9])
        claims.claim_new(held, Shard(stream.name), 100)
        assert held.count == 0
        claims.count_reads()
        claims.positions()
        claims.claim_new(held, Shard(stream.name), 2)
        claims.claim_new(held, Shard(stream.name), 100)
        assert held.count == 5, "what it holds itself is no reason to stop"


@pytest.mark.slow
def test_a_member_of_another_kind_moves_the_group_as_it_likes(spark: SparkSession, stream: Stream) -> None:
    begin(spark, stream, 5, more=10)
    for entry_id in stream.read_as("worker-1", 4):
        stream.client.xack(stream.keys[0], stream.group, entry_id)
    assert [report.rows for report in stream.drain(spark)] == [6]


@pytest.mark.slow
def test_a_member_that_was_fenced_and_wakes_up_reports_no_loss(spark: SparkSession, stream: Stream) -> None:
    """The other one wrote its entries, and somebody trimmed them: what the sleeper misses is in the table."""
    begin(spark, stream, 10, more=10)

    def take_over_and_trim() -> None:
        (name,) = stream.held()
        ids = stream.entry_ids()[10:]
        stream.client.xclaim(stream.keys[0], stream.group, name, 0, ids, idle=RELEASED_MS, justid=True)
        stream.drain(spark, stream.ingestion(member="other"))
        stream.client.xtrim(stream.keys[0], maxlen=0, approximate=False)

    reports = stream.drain(spark, stream.ingestion(errors=RECORD), at(Step.PLANNED, take_over_and_trim))
    assert [report.entry.lost for report in reports if report.entry.lost] == []
    assert len(stream.rows()) == 20


@pytest.mark.slow
def test_r14_a_deleted_entry_ahead_hides_no_loss(spark: SparkSession, stream: Stream) -> None:
    """Redis stops counting what a group has read where an entry was deleted ahead of it."""
    begin(spark, stream, 10, more=40)
    stream.client.xdel(stream.keys[0], stream.entry_ids()[45])
    recorded = stream.drain(spark, stream.ingestion(10, errors=RECORD), max_batches=2)
    assert [claim.entries for report in recorded if report.entry.lost for claim in report.entry.claims.values()] == [1]
    assert len(stream.rows()) == 20, "members claim while the deleted entry is still ahead of them"
    stream.client.xtrim(stream.keys[0], maxlen=10, approximate=False)
    with pytest.raises(DataLossError, match="19 entries"):
        stream.drain(spark)


@pytest.mark.slow
def test_r14_a_group_of_somebody_else_is_counted_from_the_first_run_on(spark: SparkSession, stream: Stream) -> None:
    stream.add(5)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="$")
    stream.add(10, first=5)
    stream.drain(spark, stream.ingestion(5), max_batches=1)
    stream.client.xtrim(stream.keys[0], maxlen=2, approximate=False)
    with pytest.raises(DataLossError, match="3 entries"):
        stream.drain(spark)


@pytest.mark.slow
def test_a_new_shard_without_a_group_is_no_obstacle(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=2, mode="load_balanced")
    stream.add(10)
    stream.drain(spark)
    stream.keys.append(f"{stream.name}:2")
    stream.client.xadd(stream.keys[2], {"msg": b'{"id": 1}'})
    assert [verdict.lag for verdict in verdicts(stream)] == [0, 0, 1]
    with pytest.raises(InterruptedError):
        stream.drain(spark, stream.ingestion(member="dies"), at(Step.READ, stop))
    stream.drain(spark)
    stream.assert_each_once()
    assert all(verdict.is_right for verdict in verdicts(stream)), "the shard began at its first entry"


@pytest.mark.slow
def test_entries_that_a_foreign_client_read_often_get_their_tries(spark: SparkSession, stream: Stream) -> None:
    stream.add(5)
    stream.client.xgroup_create(stream.keys[0], stream.group, id="0")
    stream.read_as("worker-1", 5)
    for _ in range(8):
        stream.client.xreadgroup(stream.group, "worker-1", {stream.keys[0]: "0"})
    (report,) = stream.drain(spark)
    assert (report.rows, report.dead) == (5, 0)
    stream.assert_each_once()


@pytest.mark.slow
def test_entries_taken_from_a_finished_batch_are_not_written_again(spark: SparkSession, stream: Stream) -> None:
    """Killed behind the write; a client that takes over whatever is idle has them then, and dies, too."""
    stream.add(10)
    with pytest.raises(InterruptedError):
        stream.drain(spark, observer=at(Step.VERIFIED, stop))
    stream.add(3, first=10)
    taken = stream.client.execute_command("XAUTOCLAIM", stream.keys[0], stream.group, "worker-1", 0, "0-0")
    assert len(taken[1]) == 10
    stream.read_as("worker-1", 1)
    stream.drain(spark)
    stream.assert_each_once()


def test_verify_leaves_out_what_members_are_writing(spark: SparkSession, stream: Stream) -> None:
    stream.add(10)
    found: list[ShardVerdict] = []
    stream.drain(spark, stream.ingestion(5), at(Step.ROWS_WRITTEN, lambda: found.extend(verdicts(stream))))
    assert [verdict.is_right for verdict in found] == [True]


@pytest.mark.slow
def test_an_empty_name_whose_batch_the_log_forgot_is_removed(spark: SparkSession, stream: Stream) -> None:
    stream.add(5)
    stream.drain(spark)
    stream.client.xgroup_createconsumer(stream.keys[0], stream.group, f"main/1/{BID}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "spark_jobs.claims.claim_state.ClaimStatuses.of", lambda _, names: dict.fromkeys(names, pytest.fail)
        )
        stream.add(1, first=5)
        stream.drain(spark)
    assert stream.consumers() == set()


def test_a_member_name_is_refused_where_positions_count(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.RESUMABLE
    with pytest.raises(InvalidOptionError, match="member='b'"):
        stream.drain(spark, stream.ingestion(member="b"))


@pytest.mark.slow
def test_a_member_at_work_is_not_fenced_because_its_entries_were_trimmed(spark: SparkSession, stream: Stream) -> None:
    """The heartbeat cannot touch what is not there, but it touches the name."""
    begin(spark, stream, 5, more=5)

    def trim_and_let_another_try() -> None:
        stream.client.xtrim(stream.keys[0], maxlen=0, approximate=False)
        deadline = time.monotonic() + 2
        with stream.source.claims(stream.group) as claims:
            (name,) = stream.held()
            while time.monotonic() < deadline:
                assert name not in claims.idle_names(Shard(stream.name))

    reports = stream.drain(spark, observer=at(Step.READ, trim_and_let_another_try))
    assert [(report.rows, report.entry.lost) for report in reports] == [(5, {})]


def test_nothing_is_claimed_in_a_group_whose_mark_is_gone(spark: SparkSession, stream: Stream) -> None:
    """A member that looked before a switch and claims after it."""
    begin(spark, stream, 5, more=5)
    stream.client.xgroup_delconsumer(stream.keys[0], stream.group, CLAIM_MODE_SENTINEL)
    with pytest.raises(InvalidOptionError, match="switch --to load_balanced"):
        stream.drain(spark)
    assert stream.held() == {}


def test_entries_too_large_for_a_batch_do_not_fill_the_servers_memory(stream: Stream) -> None:
    pipeline = stream.client.pipeline(transaction=False)
    for _ in range(400):
        pipeline.xadd(stream.keys[0], {"msg": b"x" * 100_000})
    pipeline.execute()
    with stream.source.claims(stream.group) as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        before = stream.client.info("memory")["used_memory_peak"]
        held = ClaimedEntries(ClaimName("main", 1, BID), 1000, 250_000)
        assert claims.claim_new(held, Shard(stream.name), 1000)
        assert held.count == 2
        assert stream.client.info("memory")["used_memory_peak"] - before < 25_000_000
