"""Connecting to every backend."""

from __future__ import annotations

import pytest

from stream_consumers.consumer import Consumer
from stream_consumers.errors import OutOfBoundsError, StreamEndedError
from stream_consumers.messages import from_milliseconds
from stream_consumers.streamer import connect, rewind_after, seek_after
from stream_consumers.testing.consumer_contract import take
from stream_consumers.testing.harness import Stream


def numbers(consumer: Consumer, count: int) -> list[int]:
    return [message.sequence for message in take(consumer, count)]


def test_what_is_sent_is_read_and_moved_behind(stream: Stream) -> None:
    with connect(stream.location) as streamer:
        with streamer.create_producer("orders") as producer:
            receipts = [producer.send(b"%d" % number, timestamp_ms=1_000 + number) for number in range(5)]
            producer.flush()
            sequences = [receipt.sequence for receipt in receipts]
        consumer = streamer.create_consumer(["orders", "clicks"])
        assert numbers(consumer, 5) == sequences
        rewind_after(consumer, sequences[2])
        assert numbers(consumer, 2) == sequences[3:]
        seek_after(consumer, from_milliseconds(1_001))
        assert numbers(consumer, 3) == sequences[2:]
        for move in (
            lambda: rewind_after(consumer, sequences[-1]),
            lambda: seek_after(consumer, from_milliseconds(1_004)),
        ):
            with pytest.raises(OutOfBoundsError):
                move()
    with pytest.raises(StreamEndedError):
        consumer.next()
