"""What a split of Kafka partitions reads, column by column, most of it on a real broker."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, Message

from stream_consumers.batches import BATCH_BYTES, HEADER_BYTES, MESSAGE_SCHEMA, LastMessage, Range, message_checksum
from stream_consumers.errors import BatchTooLargeError, BrokerUnavailableError, DataLossError, FormatError
from stream_consumers.kafka import batches, messages
from stream_consumers.kafka import cluster as kafka_cluster
from stream_consumers.kafka.batches import FirstMessages, KafkaBatchSource, KafkaSplit, RangeReader
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.messages import MAX_PAYLOAD_BYTES, Run, bytes_of, message_bytes, record_batches
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.kafka_topics import Broker, orders

SECONDS = 20.0
ORDERS = Shard("orders")


@pytest.fixture
def broker(kafka: str) -> Iterator[Broker]:
    with Broker(kafka) as broker:
        yield broker


def split(broker: Broker, ranges: Mapping[Shard, Range]) -> KafkaSplit:
    streams = ",".join(sorted({shard.stream for shard in ranges}))
    return KafkaSplit(StreamUrl.parse(f"kafka://{broker.address}/{streams}"), {}, ranges, SECONDS)


def read(broker: Broker, ranges: Mapping[Shard, Range]) -> list[dict[str, Any]]:
    found = list(split(broker, ranges).read())
    for batch in found:
        assert batch.schema == MESSAGE_SCHEMA
        batch.validate(full=True)
    return [row for batch in found for row in batch.to_pylist()]


def places(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["stream"], row["shard"], row["sequence"]) for row in rows]


def test_what_transactions_leave_out_has_no_rows_and_the_others_keep_their_sequences(broker: Broker) -> None:
    topic = broker.create()
    broker.commit(topic, 3)
    broker.abort(topic, 4)
    broker.send(topic, orders(2, first=10))
    broker.commit(topic, 2, first=20)
    end = broker.end(topic)
    rows = read(broker, {Shard(topic): Range(0, end)})
    assert places(rows) == sorted(broker.messages(topic))
    assert [row["payload"] for row in rows] == [*orders(3), *orders(2, first=10), *orders(2, first=20)]
    for start, stop in ((0, 1), (1, 6), (4, 8), (3, 4), (9, 10), (end - 1, end)):
        part = {Shard(topic): Range(start, stop)}
        assert places(read(broker, part)) == [place for place in places(rows) if start <= place[2] < stop]


def test_ranges_of_several_partitions_and_topics_are_read_by_one_split(broker: Broker) -> None:
    one, two = broker.create(partitions=3), broker.create(partitions=2)
    shards = [Shard(topic, number) for topic, count in ((one, 3), (two, 2)) for number in range(count)]
    for index, shard in enumerate(shards):
        broker.send(shard.stream, orders(500, first=1000 * index), partition=shard.id, key=str(shard).encode())
    ranges = {shard: Range(7 * index, 500 - index) for index, shard in enumerate(shards)}
    rows = read(broker, ranges)
    assert sorted(places(rows)) == sorted((s.stream, s.id, n) for s, part in ranges.items() for n in range(*part))
    for row in rows:
        shard = Shard(row["stream"], row["shard"])
        assert row["key"] == str(shard).encode()
        assert row["payload"] == orders(1, first=1000 * shards.index(shard) + row["sequence"])[0]


def test_keys_headers_and_tombstones_stay_with_their_messages(broker: Broker) -> None:
    topic = broker.create()
    broker.send(topic, orders(1))
    broker.send(topic, [b"x", None], key=b"k", headers=[("a", b"1"), ("b", None), ("a", b"\xff")])
    broker.send_with_header_name(topic, b"\xff\xfe")
    broker.send(topic, [b"y"], headers=[("c", b"")])
    broker.send_with_header_name(topic, b"\xfd")
    rows = read(broker, {Shard(topic): Range(0, 6)})
    listed = [{"name": "a", "value": b"1"}, {"name": "b", "value": None}, {"name": "a", "value": b"\xff"}]
    wrong = "a header's name is not UTF-8"
    assert [(row["payload"], row["key"], row["headers"], row["error"]) for row in rows] == [
        (orders(1)[0], None, None, None),
        (b"x", b"k", listed, None),
        (None, b"k", listed, None),
        (orders(1, first=7)[0], b"key", None, wrong),
        (b"y", None, [{"name": "c", "value": b""}], None),
        (orders(1, first=7)[0], b"key", None, wrong),
    ]
    assert [row["sequence"] for row in rows] == list(range(6))
    assert all(row["timestamp_ms"] > 1_600_000_000_000 for row in rows)


def test_a_range_that_is_gone_or_ends_early_is_an_error(broker: Broker) -> None:
    topic = broker.create(partitions=2)
    for number in range(2):
        broker.send(topic, orders(30), partition=number)
    with pytest.raises(DataLossError):
        read(broker, {Shard(topic, 0): Range(0, 30), Shard(topic, 1): Range(0, 31)})
    broker.remove_before(topic, 10, partition=1)
    with pytest.raises(DataLossError):
        read(broker, {Shard(topic, 0): Range(0, 30), Shard(topic, 1): Range(0, 30)})


def test_a_small_batch_is_not_sampled_again_and_a_large_one_is(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = broker.create()
    broker.send(topic, [b"x" * 100] * 400)
    shard = Shard(topic)
    sampled: list[Range] = []
    reader = batches.RangeReader

    def watched(cluster: KafkaBrokers, ranges: Mapping[Shard, Range], stall_seconds: float) -> batches.RangeReader:
        sampled.extend(ranges.values())
        return reader(cluster, ranges, stall_seconds)

    monkeypatch.setattr(batches, "RangeReader", watched)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:

        def plan(start: int, end: int, max_bytes: int) -> Range:
            sampled.clear()
            found = source.plan({shard: Range(start, end)}, limits=Limits(max_bytes=max_bytes), parallelism=1)
            assert found is not None
            return found.ranges[shard]

        source.extents()
        wide = 400 * 100 * batches.UNSAMPLED_FACTOR
        assert plan(0, 10, wide) == Range(0, 10)
        assert sampled == [Range(0, 10)]
        assert plan(10, 400, wide) == Range(10, 400)
        assert sampled == []
        assert plan(0, 400, wide // 2) == Range(0, 400)
        assert sampled == [Range(0, 256), Range(144, 400)]
        assert plan(0, 400, 450) == Range(0, 4)


def test_the_last_message_of_a_range_is_found_before_markers_and_within_what_the_topic_holds(broker: Broker) -> None:
    topic = broker.create(partitions=2)
    first, second = Shard(topic, 0), Shard(topic, 1)
    broker.send(topic, orders(5))
    broker.commit(topic, 2)
    broker.send(topic, orders(3), partition=1, key=b"k")
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        assert source.last_messages({first: Range(0, 9)}) == {}, "nothing is known of the topic yet"
        source.extents()
        last = source.last_messages({first: Range(0, 8), second: Range(0, 100)})
        assert {shard: message.sequence for shard, message in last.items()} == {first: 6, second: 2}
        assert last[second].checksum == message_checksum(b"k", orders(3)[2])
        assert last[second].epoch >= 0
        assert source.last_messages({first: Range(0, 8), second: Range(0, 3)}) == last
        assert source.last_messages({first: Range(7, 8), second: Range(3, 3)}) == {}, "a marker, and nothing"
        # Retention removes messages that the source has seen.
        broker.remove_before(topic, 5)
        assert source.last_messages({first: Range(0, 4)}) == {}
        assert source.last_messages({first: Range(0, 7)})[first].sequence == 6


@pytest.mark.parametrize("aborted", [1, 40])
def test_the_last_message_of_a_range_is_found_before_aborted_ones(broker: Broker, aborted: int) -> None:
    topic = broker.create()
    shard = Shard(topic)
    broker.send(topic, orders(20))
    broker.abort(topic, aborted)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        end = source.extents()[shard].end
        assert end == 20 + aborted + 1
        assert source.last_messages({shard: Range(0, end)})[shard].sequence == 19
        assert source.last_messages({shard: Range(20, end)}) == {}


@pytest.mark.parametrize(("policy", "is_lost"), [("delete", True), ("compact,delete", False)])
def test_a_message_that_was_read_is_gone(broker: Broker, policy: str, is_lost: bool) -> None:
    """Another log, with aborted messages where the message stood, stands for a broker that was restored to a copy."""
    topic = broker.create(config={"cleanup.policy": policy})
    shard = Shard(topic)
    broker.send(topic, orders(5), key=b"k")
    broker.abort(topic, 5)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        source.extents()
        held = source.last_messages({shard: Range(0, 8)})[shard]
        read = LastMessage(7, held.timestamp_ms, 1, held.epoch)
        assert source.is_replaced(shard, read, held) is is_lost
        assert source.is_replaced(shard, read, None) is is_lost
        assert not source.is_replaced(shard, held, held)
        assert source.is_replaced(shard, LastMessage(3, held.timestamp_ms, 1, held.epoch), held)
        if "delete" in policy:
            broker.remove_before(topic, 8)
            assert not source.is_replaced(shard, read, None), "retention has removed it"


def test_a_broker_that_does_not_answer_for_a_last_message(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = broker.create()
    broker.send(topic, orders(1))
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        source.extents()
        source.set_request_timeout(0.0)
        monkeypatch.setattr(batches, "POLL_SECONDS", 0.0)
        with pytest.raises(BrokerUnavailableError):
            source.last_messages({Shard(topic): Range(0, 1)})
        source.set_request_timeout(SECONDS)
        assert source.last_messages({Shard(topic): Range(0, 1)})[Shard(topic)].sequence == 0


def test_large_messages_between_small_samples_do_not_pass_the_limit(broker: Broker) -> None:
    topic = broker.create()
    sizes = [10] * 600 + [50_000] * 40 + [10] * 600
    broker.send(topic, [b"x" * size for size in sizes])
    shard, limit = Shard(topic), 500_000
    position, batches_read = 0, list[int]()
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        end = source.extents()[shard].end
        while position < end:
            plan = source.plan({shard: Range(position, end)}, limits=Limits(max_bytes=limit), parallelism=2)
            assert plan is not None
            try:
                payloads = [
                    len(payload) for split in plan.splits for batch in split.read() for payload in payloads_of(batch)
                ]
            except BatchTooLargeError:
                batches_read.append(-1)
                continue
            planned = plan.ranges[shard]
            assert payloads == sizes[planned.start : planned.end]
            assert sum(payloads) <= limit
            batches_read.append(len(payloads))
            position = planned.end
    assert batches_read[0] == -1, "the first batch was guessed too small, and only it"
    assert batches_read.count(-1) == 1


@pytest.mark.parametrize(
    "part", [{"key": b"k" * 10_000}, {"headers": [("h" * 4_000, b"v" * 6_000)]}], ids=["key", "headers"]
)
def test_keys_and_headers_count_towards_the_limit(broker: Broker, part: dict[str, Any]) -> None:
    topic = broker.create()
    broker.send(topic, [None] * 600, **part)
    shard = Shard(topic)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        source.extents()
        plan = source.plan({shard: Range(0, 600)}, limits=Limits(max_bytes=45_000), parallelism=1)
        assert plan is not None
        assert plan.ranges == {shard: Range(0, 4)}
    with pytest.raises(BatchTooLargeError):
        list(replace(split(broker, {shard: Range(0, 600)}), max_bytes=1_000_000).read())


def payloads_of(batch: Any) -> list[bytes]:
    found: list[bytes] = batch.column("payload").to_pylist()
    return found


def test_a_look_up_of_one_message_reads_no_backlog(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = broker.create(partitions=4)
    for number, _ in itertools.product(range(4), range(10)):
        broker.send(topic, [bytes(100)] * 500, partition=number)
    received: list[Shard] = []

    def shard_of(message: Message) -> Shard:
        received.append(messages.shard_of(message))
        return received[-1]

    monkeypatch.setattr(batches, "shard_of", shard_of)
    with KafkaBrokers(f"kafka://{broker.address}/{topic}") as cluster, FirstMessages(cluster) as first:
        found = first.at({Shard(topic, number): 1250 for number in range(4)})
        assert {shard: message.offset() for shard, message in found.items()} == {
            Shard(topic, number): 1250 for number in range(4)
        }
    # With all partitions assigned to the end, brokers send batches of one of them until it has no more.
    assert len(received) < 1000


@pytest.mark.parametrize("name", ["max.partition.fetch.bytes", "fetch.message.max.bytes"])
def test_a_look_up_of_one_message_fetches_few_bytes_of_a_partition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[tuple[str, Any]] = []
    made = kafka_cluster.Consumer

    def watched(given: dict[str, Any], **more: Any) -> Any:
        settings.extend(given.items())
        return made(given, **more)

    monkeypatch.setattr(kafka_cluster, "Consumer", watched)
    with KafkaBrokers("kafka://127.0.0.1:1/orders", {name: 10_000_000}) as cluster, FirstMessages(cluster):
        # Of the two names of the setting, the client takes the last one.
        fetched = [
            value for name, value in settings if name in ("max.partition.fetch.bytes", "fetch.message.max.bytes")
        ]
    assert fetched[-1] == 16_384


class ScriptedClient:
    """A client that returns ``blocks``, and keeps what it was asked for in ``asked``."""

    blocks: ClassVar[list[list[Message]]] = []
    asked: ClassVar[list[tuple[int, float]]] = []

    def __init__(self, *given: Any, **more: Any) -> None:
        self.left = list(self.blocks)

    def assign(self, places: object) -> None:
        pass

    def incremental_unassign(self, places: object) -> None:
        pass

    def close(self) -> None:
        pass

    def consume(self, count: int, seconds: float) -> list[Message]:
        self.asked.append((count, seconds))
        found = self.left.pop(0) if self.left else []
        if len(found) > count:
            self.left.insert(0, found[count:])
        return found[:count]

    def get_watermark_offsets(self, place: object, *, cached: bool) -> tuple[int, int]:
        assert cached
        return 0, 40


def rows_of(
    monkeypatch: pytest.MonkeyPatch, ranges: Mapping[Shard, Range], *blocks: list[Message], leader_end: int = 40
) -> list[dict[str, Any]]:
    """What a reader of these ranges makes of the blocks that its client returns."""
    monkeypatch.setattr(kafka_cluster, "Consumer", ScriptedClient)
    monkeypatch.setattr(ScriptedClient, "blocks", list(blocks))
    monkeypatch.setattr(ScriptedClient, "asked", [])
    monkeypatch.setattr(KafkaBrokers, "ends", lambda self, shards, level: dict.fromkeys(shards, leader_end))
    with (
        KafkaBrokers("kafka://127.0.0.1:1/orders") as cluster,
        RangeReader(cluster, ranges, SECONDS) as reader,
    ):
        return [row for batch in record_batches(reader) for row in batch.to_pylist()]


def made_message(
    offset: int,
    value: bytes | None = b"{}",
    *,
    shard: Shard = ORDERS,
    error: int | None = None,
    moment: int = 1,
    headers: list[tuple[str, bytes | None]] | None = None,
) -> Message:
    return Message(
        topic=shard.stream,
        partition=shard.id,
        offset=offset,
        value=value,
        timestamp=(int(moment >= 0), moment),
        error=None if error is None else KafkaError(error),
        headers=headers,
    )


@pytest.mark.parametrize(("leader_end", "is_invented"), [(45, True), (46, False)])
def test_an_offset_after_the_end_of_a_lagging_replica_is_compared_with_the_leader(
    leader_end: int, is_invented: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks in ([[made_message(9)], [made_message(45)]], [[made_message(9), made_message(45)]]):
        ranges = {Shard("orders"): Range(9, 30)}
        if is_invented:
            with pytest.raises(FormatError) as raised:
                rows_of(monkeypatch, ranges, *blocks, leader_end=leader_end)
            assert raised.value.facts == {"offset": 10, "found": 45}
        else:
            assert places(rows_of(monkeypatch, ranges, *blocks, leader_end=leader_end)) == [("orders", 0, 9)]


@pytest.mark.parametrize("topics", [{"orders"}, {"orders", "payments"}])
def test_one_block_has_holes_several_partitions_and_the_ends_of_their_ranges(
    topics: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [Shard("orders", 0), Shard("orders", 1), Shard("payments", 1)]
    runs = [[3, 4, 7], [5], [0, 2, 3, 4], [8, 11, 12], [6, 7, 8], [9, 10]]
    block = [(shards[number % 3], offset) for number, run in enumerate(runs) for offset in run]
    ranges = dict(zip(shards, (Range(3, 12), Range(5, 8), Range(0, 10))))
    rows = rows_of(
        monkeypatch,
        {shard: part for shard, part in ranges.items() if shard.stream in topics},
        [made_message(offset, b"%d" % offset, shard=shard) for shard, offset in block if shard.stream in topics],
    )
    expected = [(s.stream, s.id, offset) for s, offset in block if s.stream in topics and offset in ranges[s]]
    assert places(rows) == expected
    assert [row["payload"] for row in rows] == [b"%d" % offset for _, _, offset in expected]


def test_a_tombstone_and_a_message_without_a_timestamp(monkeypatch: pytest.MonkeyPatch) -> None:
    block = [made_message(0), made_message(1, None), made_message(2, b"", moment=-1), made_message(3, b"x")]
    rows = rows_of(monkeypatch, {Shard("orders"): Range(0, 4)}, block)
    assert [(row["payload"], row["timestamp_ms"]) for row in rows] == [(b"{}", 1), (None, 1), (b"", -1), (b"x", 1)]


def test_a_message_that_is_too_long_in_a_later_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_PAYLOAD_BYTES", 3)
    blocks = [[made_message(0), made_message(1)], [made_message(2), made_message(3, b"1234"), made_message(4)]]
    rows = rows_of(monkeypatch, {ORDERS: Range(0, 5)}, *blocks)
    assert [row["payload"] for row in rows] == [b"{}", b"{}", b"{}", None, b"{}"]
    assert [row["sequence"] for row in rows if row["error"]] == [3]


def test_an_error_in_a_block_is_raised_unless_its_partition_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Shard("orders", 0), Shard("orders", 1)
    ranges = {one: Range(0, 2), two: Range(0, 9)}
    before, after = [made_message(0), made_message(1)], [made_message(offset, shard=two) for offset in range(9)]
    for code in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError._BAD_MSG):
        read_to = made_message(2, error=code)
        found = rows_of(monkeypatch, ranges, [*before, *after[:3], read_to, *after[3:]])
        assert places(found) == [*(("orders", 0, n) for n in range(2)), *(("orders", 1, n) for n in range(9))]
    for code, error in ((KafkaError._PARTITION_EOF, DataLossError), (KafkaError._AUTO_OFFSET_RESET, DataLossError)):
        with pytest.raises(error):
            rows_of(monkeypatch, ranges, [before[0], made_message(1, error=code), *after])


@pytest.mark.parametrize(
    "offsets", [[0, 1, 2, 2, 3], [0, 1, 3, 2, 4], [0, 1, 2, 1, 4], [0, 3, 2, 3, 4], [0, 1, 5, 6, 4]]
)
def test_offsets_in_a_block_that_do_not_grow_stop_the_read(offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last one may look like those of a block without a hole."""
    with pytest.raises(FormatError) as raised:
        rows_of(monkeypatch, {Shard("orders"): Range(0, 5)}, list(map(made_message, offsets)))
    wrong = next(place for place in range(1, 5) if offsets[place] <= offsets[place - 1])
    assert raised.value.facts == {"offset": offsets[wrong - 1] + 1, "found": offsets[wrong]}


def test_a_range_after_whose_end_with_a_hole_the_offsets_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invented offset has reached the end; the messages that it skipped come after it."""
    with pytest.raises(FormatError):
        rows_of(monkeypatch, {Shard("orders"): Range(0, 5)}, [made_message(0), made_message(4)], [made_message(1)])


def test_an_offset_after_a_range_that_was_read_is_not_compared_with_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Shard("orders", 0), Shard("orders", 1)
    block = [made_message(9), made_message(45), made_message(0, shard=two)]
    assert len(rows_of(monkeypatch, {one: Range(9, 10), two: Range(0, 1)}, block)) == 2
    # The end of the partition ends a range whose last offsets hold no message.
    block.insert(1, made_message(12, error=KafkaError._PARTITION_EOF))
    assert len(rows_of(monkeypatch, {one: Range(9, 12), two: Range(0, 1)}, block)) == 2


def test_a_read_waits_for_no_more_messages_than_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (Shard("orders", number) for number in range(3))
    eof = KafkaError._PARTITION_EOF
    rows_of(
        monkeypatch,
        {one: Range(0, 6), two: Range(0, 4), three: Range(0, 1)},
        [made_message(0), made_message(1), made_message(0, shard=two)],
        [made_message(4)],
        [made_message(6, error=eof)],
        [],
        [made_message(1, shard=two)],
        [made_message(3, shard=two), made_message(4, shard=two, error=eof)],
        [],
        [made_message(0, shard=three)],
    )
    assert ScriptedClient.asked[:-2] == [(left, batches.POLL_SECONDS) for left in (11, 8, 5, 4, 4, 3, 1, 1)]


def test_the_messages_of_a_read_do_not_make_the_garbage_collector_run(broker: Broker) -> None:
    topic = broker.create(partitions=2)
    for number in range(2):
        broker.send(topic, orders(10_000), partition=number)
    runs = list[str]()

    def count(phase: str, info: object) -> None:
        runs.append(phase)

    gc.callbacks.append(count)
    try:
        batches_read = list(split(broker, {Shard(topic, number): Range(0, 10_000) for number in range(2)}).read())
    finally:
        gc.callbacks.remove(count)
    assert sum(batch.num_rows for batch in batches_read) == 20_000
    assert len(runs) / 2 < 10


def test_a_block_ends_after_many_empty_headers_or_long_keys_and_its_memory_is_bounded() -> None:
    headers: list[tuple[str, bytes | None]] = [("", None)] * 20_000
    runs = [Run(ORDERS, [offset], [made_message(offset, headers=headers)]) for offset in range(20)]
    tracemalloc.start()
    try:
        found = list(record_batches(runs))
        assert tracemalloc.get_traced_memory()[1] < BATCH_BYTES
    finally:
        tracemalloc.stop()
    assert [batch.num_rows for batch in found] == [7, 7, 6]
    assert sum(map(bytes_of, found)) == sum(message_bytes(run.messages[0]) for run in runs) == 20 * (20_000 * 64 + 2)
    assert [len(row) for batch in found for row in batch.column("headers")] == [20_000] * 20
    whole = Run(ORDERS, list(range(20)), [run.messages[0] for run in runs])
    assert [batch.num_rows for batch in record_batches([whole])] == [16, 4], "though the client gives them as one block"
    keyed = [Run(ORDERS, [offset], [Message(topic="orders", key=bytes(1 << 22))]) for offset in range(4)]
    assert [batch.num_rows for batch in record_batches(keyed)] == [2, 2]


def test_empty_headers_count_towards_the_limit(broker: Broker) -> None:
    topic = broker.create()
    broker.send(topic, [None] * 10, headers=[("", None)] * 1000)
    shard = Shard(topic)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        source.extents()
        plan = source.plan({shard: Range(0, 10)}, limits=Limits(max_bytes=200_000), parallelism=1)
        assert plan is not None
        assert plan.ranges == {shard: Range(0, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["value", "headers"])
def test_more_bytes_than_a_column_can_have_become_several_record_batches(part: str) -> None:
    value, offsets = bytes(MAX_PAYLOAD_BYTES - HEADER_BYTES * (part == "headers")), list(range(9))
    given: dict[str, Any] = {"value": value} if part == "value" else {"value": None, "headers": [("", value)]}
    run = Run(Shard("orders"), offsets, [made_message(offset, **given) for offset in offsets])
    found = list(record_batches([run]))
    assert [offset for batch in found for offset in batch.column("sequence").to_pylist()] == offsets
    assert sum(map(bytes_of, found)) == 9 * MAX_PAYLOAD_BYTES
