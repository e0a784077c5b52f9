"""The contracts of every consumer and producer."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from stream_consumers.consumer import Consumer, Edge, PositionedConsumer
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import (
    InvalidOptionError,
    InvalidStreamKeyError,
    NotSubscribedError,
    OutOfBoundsError,
    ProducerEndedError,
    StreamAssetsError,
    StreamEndedError,
    Transient,
)
from stream_consumers.messages import INTERNAL_KEY, WILDCARD, Message, Receipt, Shard, from_milliseconds
from stream_consumers.options import AutoStreamReset
from stream_consumers.testing.harness import STREAMS, Contract, Harness, Stream, round_robin

TIMEOUT_SECONDS = 20.0
# A number of messages of 1,000 bytes that no queue can hold.
MORE_THAN_QUEUE_HOLDS = 5000
MAX_REJECTED = 20
# Arguments that no backend accepts.
INVALID_MESSAGES: tuple[dict[str, Any], ...] = (
    *({"payload": payload} for payload in ("text", 7, 1.5, [b"{}"], object())),
    *({"stream": stream} for stream in ("", "*", WILDCARD, INTERNAL_KEY, 7)),
    *({"shard": shard} for shard in (-1, "0", 0.5, True, None)),
    *({"timestamp_ms": moment} for moment in ("now", 1.5, math.nan, 1 << 70)),
)
TOMBSTONE: dict[str, Any] = {"payload": None}

Place = tuple[Shard, int]


def places(found: Iterable[Message | Receipt]) -> list[Place]:
    """Return the shards and sequences of messages."""
    return [(item.shard, item.sequence) for item in found]


def by_shard(found: Iterable[Message | Receipt]) -> dict[Shard, list[int]]:
    """Return the sequences of each shard, in order."""
    ordered: dict[Shard, list[int]] = {}
    for item in found:
        ordered.setdefault(item.shard, []).append(item.sequence)
    return ordered


def replay(stream: Stream, *streams: str) -> Consumer:
    """Create a consumer that stops at the end of the stream."""
    return create_consumer(stream.url(*streams), live=False)


def take(consumer: Consumer, count: int) -> list[Message]:
    """Read exactly the next ``count`` messages."""
    found: list[Message] = []
    for _ in range(count):
        message = consumer.next(TIMEOUT_SECONDS)
        assert message is not None, f"only {len(found)} of {count} messages came"
        found.append(message)
    return found


def wait_in_threads(consumer: Consumer, count: int) -> tuple[list[threading.Thread], list[Message]]:
    """Start ``count`` threads that wait for a message; return them and the list of messages that they get."""
    found: list[Message] = []
    started = threading.Barrier(count + 1)

    def wait() -> None:
        started.wait(TIMEOUT_SECONDS)
        with contextlib.suppress(StreamEndedError):
            message = consumer.next(TIMEOUT_SECONDS)
            if message is not None:
                found.append(message)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    started.wait(TIMEOUT_SECONDS)
    return threads, found


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median duration of several calls, because the machine may be busy."""
    seconds: list[float] = []
    for _ in range(9):
        # Pause, so that some calls coincide with polls of the other threads and some do not.
        time.sleep(0.03)
        begin = time.monotonic()
        call()
        seconds.append(time.monotonic() - begin)
    return sorted(seconds)[len(seconds) // 2]


class ConsumerContract(Contract):
    """The contract of a consumer without a group: next, iteration, seek, rewind, assign, timeouts, threads, closing."""

    # next, timeout, iteration

    def test_iteration_yields_everything_once_in_the_order_of_each_shard(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(60, shards=3, streams=STREAMS))
        for streams in (("orders",), ("clicks",), STREAMS):
            with replay(stream, *streams) as consumer:
                assert by_shard(consumer) == by_shard(r for r in receipts if r.shard.stream in streams)

    def test_iteration_and_next_continue_each_other(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(50))
        with replay(stream) as consumer:
            found = take(consumer, 25)
            found += itertools.islice(consumer, 24)
            found += take(consumer, 1)
            assert places(found) == places(receipts)
            assert list(consumer) == []

    def test_next_without_a_message_returns_in_time(self, stream: Stream) -> None:
        with create_consumer(stream.url()) as consumer:
            for timeout in (0, 0.2):
                begin = time.monotonic()
                assert consumer.next(timeout) is None
                assert 0.95 * timeout < time.monotonic() - begin < timeout + 2

    def test_every_next_raises_at_the_end(self, stream: Stream) -> None:
        with replay(stream) as consumer:
            assert list(consumer) == []
        stream.send(round_robin(1))
        with replay(stream) as consumer:
            take(consumer, 1)
            for _ in range(3):
                with pytest.raises(StreamEndedError):
                    consumer.next()
            assert list(consumer) == []

    # live following

    def test_live_consumers_get_later_messages(self, stream: Stream) -> None:
        with create_consumer(stream.url(*STREAMS)) as consumer, create_consumer(stream.url(*STREAMS)) as other:
            for shard in (Shard("orders", 2), Shard("orders", 0), Shard("clicks", 1)):
                receipts = stream.send([shard] * 6)
                assert places(take(consumer, 6)) == places(take(other, 6)) == places(receipts)
                assert consumer.next(0) is None

    def test_a_waiting_next_gets_the_message(self, stream: Stream) -> None:
        with create_consumer(stream.url()) as consumer:
            (waiting,), found = wait_in_threads(consumer, 1)
            receipts = stream.send(round_robin(1))
            waiting.join(TIMEOUT_SECONDS)
            assert places(found) == places(receipts)

    def test_latest_starts_after_existing_messages(self, stream: Stream) -> None:
        stream.send(round_robin(30, shards=3))
        with create_consumer(stream.url(), reset=AutoStreamReset.LATEST) as consumer:
            assert consumer.next(0) is None
            receipts = stream.send(round_robin(9, shards=3))
            assert by_shard(take(consumer, 9)) == by_shard(receipts)
        with pytest.raises(InvalidOptionError):
            create_consumer(stream.url(), reset=AutoStreamReset.LATEST, live=False)

    def test_many_threads_share_one_consumer(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(400, shards=3))
        found: list[Message] = []
        with replay(stream) as consumer:
            threads = [threading.Thread(target=lambda: found.extend(consumer)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_SECONDS)
        assert sorted(places(found)) == sorted(places(receipts))

    def test_waiting_threads_block_neither_polls_nor_moves(self, stream: Stream) -> None:
        with create_consumer(stream.url()) as consumer:
            threads, found = wait_in_threads(consumer, 3)
            assert median_seconds(lambda: consumer.next(0)) < 0.05
            assert median_seconds(lambda: consumer.rewind(Edge.END)) < 0.5
            assert all(thread.is_alive() for thread in threads)
            receipts = stream.send(round_robin(3))
            for thread in threads:
                thread.join(TIMEOUT_SECONDS)
            assert sorted(places(found)) == places(receipts)

    def test_a_waiting_thread_continues_at_the_new_position(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(5))
        with create_consumer(stream.url()) as consumer:
            take(consumer, 5)
            (waiting,), found = wait_in_threads(consumer, 1)
            consumer.rewind(receipts[2].sequence)
            waiting.join(TIMEOUT_SECONDS)
            assert places(found) == places(receipts[2:3])
            assert places(take(consumer, 2)) == places(receipts[3:])

    # rewind and seek

    @pytest.mark.parametrize("index", [0, 1, 25, 50, 98, 99])
    def test_rewind_to_a_sequence_is_inclusive(self, stream: Stream, index: int) -> None:
        receipts = stream.send(round_robin(100, shards=2))
        target = receipts[index].sequence
        with replay(stream) as consumer:
            take(consumer, 60)
            for _ in range(2):
                consumer.rewind(target)
                assert by_shard(consumer) == by_shard(r for r in receipts if r.sequence >= target)

    def test_a_shard_that_ends_before_the_target_continues_at_the_target(self, stream: Stream) -> None:
        long = stream.send([Shard(STREAMS[0], 0)] * 20)
        stream.send([Shard(STREAMS[0], 1)] * 3)
        target = long[10].sequence
        with create_consumer(stream.url()) as consumer:
            consumer.rewind(target)
            assert places(take(consumer, 10)) == places(long[10:])
            later = stream.send([Shard(STREAMS[0], 1)] * 20)
            reached = [receipt for receipt in later if receipt.sequence >= target]
            assert places(take(consumer, len(reached))) == places(reached)

    def test_rewind_to_the_edges(self, stream: Stream) -> None:
        stream.send(round_robin(100, shards=2))
        with create_consumer(stream.url()) as consumer:
            take(consumer, 7)
            consumer.rewind(Edge.END)
            assert consumer.next(0) is None
            receipts = stream.send(round_robin(4, shards=2))
            assert by_shard(take(consumer, 4)) == by_shard(receipts)
            consumer.rewind(Edge.BEGINNING)
            assert len(take(consumer, 104)) == 104

    @pytest.mark.parametrize("at", [-10_000, 0, 1_000, 1_001, 1_250, 1_251, 1_990])
    def test_seek_goes_to_the_first_message_at_or_after_the_moment(self, stream: Stream, at: int) -> None:
        receipts = stream.send(round_robin(100, shards=2, streams=STREAMS))
        moment = from_milliseconds(at)
        with replay(stream, *STREAMS) as consumer:
            take(consumer, 50)
            # A naive datetime is taken as UTC.
            for same in (moment, moment.replace(tzinfo=None), moment.astimezone(timezone(timedelta(hours=5)))):
                consumer.seek(same)
                assert by_shard(consumer) == by_shard(r for r in receipts if r.timestamp_ms >= at)

    def test_out_of_bounds_keeps_the_position(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(20))
        others = stream.send([Shard("clicks")] * 40, first_ms=5_000)
        with replay(stream) as consumer:
            take(consumer, 8)
            for sequence in (receipts[-1].sequence + 1, others[-1].sequence):
                with pytest.raises(OutOfBoundsError):
                    consumer.rewind(sequence)
            assert places(take(consumer, 1)) == places(receipts[8:9])
            with pytest.raises(OutOfBoundsError):
                consumer.seek(from_milliseconds(1_191))
            assert places(consumer) == places(receipts[9:])
            consumer.rewind(-1)
            assert places(consumer) == places(receipts)

    def test_out_of_bounds_on_an_empty_stream(self, stream: Stream) -> None:
        with create_consumer(stream.url()) as consumer:
            for place in (0, -1):
                with pytest.raises(OutOfBoundsError):
                    consumer.rewind(place)
                with pytest.raises(OutOfBoundsError):
                    consumer.seek(from_milliseconds(place))
            consumer.rewind(Edge.BEGINNING)
            consumer.rewind(Edge.END)
            assert consumer.next(0) is None

    def test_a_shard_that_is_empty_at_a_seek_starts_at_the_moment(self, stream: Stream) -> None:
        stream.send(round_robin(1), first_ms=5_000)
        with create_consumer(stream.url()) as consumer:
            consumer.seek(from_milliseconds(5_000))
            take(consumer, 1)
            later = stream.send([Shard("orders", 1)] * 4, first_ms=4_980)
            assert places(take(consumer, 2)) == places(later[2:])

    # assign and unassign

    def test_assigned_shards_only(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(90, shards=3))
        with replay(stream) as consumer:
            consumer.assign(Shard("orders", 1))
            consumer.rewind(Edge.BEGINNING)
            assert by_shard(consumer) == by_shard(r for r in receipts if r.shard.id == 1)
            consumer.assign(Shard("orders", 2))
            consumer.rewind(receipts[60].sequence)
            assert by_shard(consumer) == by_shard(
                r for r in receipts if r.shard.id in {1, 2} and r.sequence >= receipts[60].sequence
            )

    def test_assignments_take_effect_at_the_next_move(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(30, shards=3))
        with replay(stream) as consumer:
            first = take(consumer, 3)
            consumer.assign(Shard("orders", 1))
            # A failed move does not apply them.
            with pytest.raises(OutOfBoundsError):
                consumer.rewind(2 * receipts[-1].sequence + 1000)
            assert by_shard([*first, *consumer]) == by_shard(receipts)
            consumer.rewind(Edge.BEGINNING)
            (one,) = take(consumer, 1)
            consumer.assign(Shard("orders", 2))
            consumer.unassign(Shard("orders", 1))
            assert by_shard([one, *consumer]) == by_shard(r for r in receipts if r.shard.id == 1)
            consumer.seek(from_milliseconds(1_000))
            assert by_shard(consumer) == by_shard(r for r in receipts if r.shard.id == 2)

    def test_unassigned_shards_are_left_out(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(30, shards=3))
        with replay(stream) as consumer:
            consumer.unassign(Shard("orders", 0))
            consumer.rewind(Edge.BEGINNING)
            assert by_shard(consumer) == by_shard(r for r in receipts if r.shard.id != 0)
            consumer.assign(Shard("orders", 0))
            consumer.rewind(Edge.BEGINNING)
            assert by_shard(consumer) == by_shard(receipts)

    def test_a_consumer_of_a_missing_shard_ends(self, stream: Stream) -> None:
        stream.send(round_robin(6, shards=3))
        with replay(stream) as consumer:
            consumer.assign(Shard("orders", 9))
            consumer.rewind(Edge.BEGINNING)
            with pytest.raises(StreamEndedError):
                consumer.next(TIMEOUT_SECONDS)

    def test_invalid_assignments_are_rejected(self, stream: Stream) -> None:
        stream.send(round_robin(6, shards=3))
        with replay(stream) as consumer:
            with pytest.raises(NotSubscribedError):
                consumer.assign(Shard("clicks"))
            with pytest.raises(NotSubscribedError):
                consumer.unassign(Shard("orders", 9))
            consumer.unassign(Shard("orders", 0))
            with pytest.raises(NotSubscribedError):
                consumer.unassign(Shard("orders", 0))
            consumer.unassign(Shard("orders", 1))
            with pytest.raises(NotSubscribedError):
                consumer.unassign(Shard("orders", 2))

    def test_out_of_bounds_looks_at_the_assigned_shards_only(self, stream: Stream) -> None:
        stream.send([Shard("orders", 0)] * 3)
        receipts = stream.send([Shard("orders", 1)] * 30, first_ms=9_000)
        with replay(stream) as consumer:
            consumer.assign(Shard("orders", 0))
            with pytest.raises(OutOfBoundsError):
                consumer.seek(from_milliseconds(9_000))
            with pytest.raises(OutOfBoundsError):
                consumer.rewind(receipts[-1].sequence)

    # moves of single shards, if the consumer supports them

    def test_single_shards_are_moved(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(6, shards=2))
        zero, one = Shard("orders", 0), Shard("orders", 1)
        ends = {shard: sequences[-1] + 1 for shard, sequences in by_shard(receipts).items()}
        with create_consumer(stream.url()) as consumer:
            if not isinstance(consumer, PositionedConsumer):
                return
            take(consumer, 6)
            # A negative position means the beginning.
            for position in (-1, -1001, 0):
                consumer.go_to({zero: position})
                assert by_shard(take(consumer, 3)) == by_shard(r for r in receipts if r.shard == zero)
                assert consumer.next(0) is None
            for positions in ({one: ends[one] + 1}, {zero: 0, one: 1 << 62}):
                with pytest.raises(OutOfBoundsError) as error:
                    consumer.go_to(positions)
                assert error.value.facts["end"] == ends[one]
            wrong: Any
            for wrong in ("orders", ["orders"], 7, {"orders": 0}, {zero: "0"}):
                with pytest.raises(InvalidOptionError):
                    consumer.go_to(wrong)
            consumer.go_to(ends)
            assert consumer.next(0) is None, "nothing was moved by a call that raised"
            more = stream.send(round_robin(2, shards=2), first_ms=9_000)
            assert by_shard(take(consumer, 2)) == by_shard(more)

    def test_a_single_shard_that_is_not_read_cannot_be_moved(self, stream: Stream) -> None:
        stream.send(round_robin(6, shards=3))
        with replay(stream) as consumer:
            consumer.unassign(Shard("orders", 0))
            consumer.rewind(Edge.BEGINNING)
            if not isinstance(consumer, PositionedConsumer):
                return
            assert consumer.assigned() == {Shard("orders", 1), Shard("orders", 2)}
            with pytest.raises(NotSubscribedError):
                consumer.go_to({Shard("orders", 0): 0, Shard("orders", 1): 0})
            assert {message.shard.id for message in consumer} == {1, 2}

    # closing

    def test_close_ends_a_waiting_next(self, stream: Stream) -> None:
        consumer = create_consumer(stream.url())
        (waiting,), found = wait_in_threads(consumer, 1)
        waiting.join(0.05)
        assert waiting.is_alive()
        consumer.close()
        waiting.join(TIMEOUT_SECONDS)
        assert not waiting.is_alive()
        assert found == []

    def test_a_closed_consumer_neither_reads_nor_moves(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(4, shards=2))
        zero = Shard("orders", 0)
        consumer = create_consumer(stream.url())
        take(consumer, 1)
        consumer.close()
        consumer.close()
        assert list(consumer) == []
        calls: list[Callable[[], object]] = [
            lambda: consumer.next(0),
            lambda: consumer.seek(from_milliseconds(1_000)),
            lambda: consumer.rewind(Edge.BEGINNING),
            lambda: consumer.rewind(Edge.END),
            lambda: consumer.rewind(receipts[0].sequence),
            lambda: consumer.assign(zero),
            lambda: consumer.unassign(zero),
        ]
        if isinstance(consumer, PositionedConsumer):
            calls.append(lambda: consumer.go_to({zero: 0}))
        for call in calls:
            with pytest.raises(StreamEndedError):
                call()


class ProducerContract(Contract):
    """The contract of a producer: receipts, sequences, timestamps, flushing, closing, and retrying unsent messages."""

    def test_messages_are_what_was_sent(self, stream: Stream) -> None:
        payloads = [b"", b"{}", b"\xff\x00\r", b"x" * 5000]
        before = time.time_ns() // 1_000_000
        with create_producer(stream.url()) as producer:
            receipts = [producer.send(payload, timestamp_ms=1_000 + n) for n, payload in enumerate(payloads)]
            now = producer.send(b"now")
        assert before <= now.timestamp_ms <= time.time_ns() // 1_000_000
        with replay(stream) as consumer:
            found = list(consumer)
        assert [message.payload for message in found] == [*payloads, b"now"]
        assert [(m.shard, m.sequence, m.timestamp_ms) for m in found] == [
            (r.shard, r.sequence, r.timestamp_ms) for r in [*receipts, now]
        ]
        assert found[1].text() == "{}"
        assert found[1].timestamp == datetime(1970, 1, 1, 0, 0, 1, 1000, timezone.utc)

    def test_sequences_grow_in_each_shard_over_several_producers(self, stream: Stream) -> None:
        receipts = stream.send(round_robin(9, shards=3)) + stream.send(round_robin(9, shards=3))
        for sequences in by_shard(receipts).values():
            assert sequences == sorted(set(sequences))
            assert len(sequences) == 6

    def test_a_closed_producer_sends_no_more(self, stream: Stream) -> None:
        producer = create_producer(stream.url())
        producer.send(b"one")
        producer.close()
        producer.close()
        with pytest.raises(ProducerEndedError):
            producer.send(b"two")
        with pytest.raises(ProducerEndedError):
            producer.flush()
        with replay(stream) as consumer:
            assert [message.payload for message in consumer] == [b"one"]

    def test_flushed_messages_can_be_read_while_the_producer_goes_on(self, stream: Stream) -> None:
        with create_producer(stream.url()) as producer, create_consumer(stream.url()) as consumer:
            for index in range(5):
                receipt = producer.send(b"%d" % index)
                producer.flush()
                assert places(take(consumer, 1)) == places([receipt])

    # invalid messages

    def test_invalid_messages_are_rejected_without_affecting_others(self, stream: Stream) -> None:
        found: list[bytes | None] = []
        with create_producer(stream.url()) as producer:
            for number, words in enumerate(INVALID_MESSAGES):
                producer.send(b"%d" % number)
                with pytest.raises((InvalidOptionError, InvalidStreamKeyError)):
                    producer.send(**{"payload": b"refused", **words})
                found.append(b"%d" % number)
            # A payload of None is rejected, or sent as a tombstone.
            with contextlib.suppress(InvalidOptionError):
                producer.send(**TOMBSTONE)
                found.append(None)
            buffer: Any = bytearray(b"as it was")
            producer.send(buffer)
            buffer[:] = b"behind it"
            view: Any = memoryview(buffer)
            producer.send(view)
        with replay(stream) as consumer:
            assert [message.payload for message in consumer] == [*found, b"as it was", b"behind it"]

    # outages

    def test_unacknowledged_messages_stay_queued_in_order(self, stream: Stream, harness: Harness) -> None:
        if harness.outage is None:
            return
        with create_producer(stream.url()) as producer:
            receipts = [producer.send(b"%d" % number, shard=number % 2) for number in range(4)]
            producer.flush()
            with harness.outage(stream.location):
                receipts += [producer.send(b"%d" % number, shard=number % 2) for number in range(4, 10)]
                for _ in range(2):
                    with pytest.raises(StreamAssetsError) as failed:
                        producer.flush()
                    assert isinstance(failed.value, Transient)
                    assert failed.value.facts["undelivered"] == 6
            receipts.append(producer.send(b"10"))
        with replay(stream) as consumer:
            found = list(consumer)
        assert by_shard(found) == by_shard(receipts)
        for number in range(2):
            payloads = [message.payload for message in found if message.shard.id == number]
            assert payloads == [b"%d" % sent for sent in range(number, 11, 2)]

    def test_messages_dropped_by_closing_are_counted(self, stream: Stream, harness: Harness) -> None:
        if harness.outage is None:
            return
        producer = create_producer(stream.url())
        producer.send(b"arrived")
        producer.flush()
        with harness.outage(stream.location):
            for _ in range(3):
                producer.send(b"dropped")
            with pytest.raises(StreamAssetsError) as failed:
                producer.close()
            assert failed.value.facts["undelivered"] == 3
            producer.close()
        with replay(stream) as consumer:
            assert [message.payload for message in consumer] == [b"arrived"]

    def test_the_queue_is_bounded_during_an_outage(self, stream: Stream, harness: Harness) -> None:
        if harness.outage is None:
            return
        taken: list[int] = []
        refused: list[StreamAssetsError] = []
        with create_producer(stream.url()) as producer:
            with harness.outage(stream.location):
                # A send that raises has not queued its message, and does not affect earlier ones.
                for number in range(MORE_THAN_QUEUE_HOLDS):
                    try:
                        producer.send(b"%06d" % number + b"x" * 1000)
                        taken.append(number)
                    except StreamAssetsError as error:
                        refused.append(error)
                    if len(refused) == MAX_REJECTED:
                        break
            assert {error.facts["undelivered"] for error in refused} == {len(taken)}
            assert taken == list(range(len(taken)))
        with replay(stream) as consumer:
            assert [int((message.payload or b"")[:6]) for message in consumer] == taken
