"""Connecting to every backend."""

from __future__ import annotations

import pytest

from stream_consumers.consumer import Consumer
from stream_consumers.errors import OutOfBoundsError, StreamEndedError
from stream_consumers.messages import from_milliseconds
from stream_consumers.streamer.streamer import connect, rewind_after, seek_after
from stream_consumers.testing.harness import Stream

PATIENCE = 60.0


def take(consumer: Consumer, count: int) -> list[int]:
    found = [consumer.next(PATIENCE) for _ in range(count)]
    return [message.sequence for message in found if message]


def test_what_is_sent_is_read_and_moved_behind(stream: Stream) -> None:
    with connect(stream.location) as streamer:
        with streamer.create_producer("orders") as producer:
            receipts = [producer.send(b"%d" % number, timestamp_ms=1_000 + number) for number in range(5)]
            producer.flush()
            sequences = [receipt.sequence for receipt in receipts]
        consumer = streamer.create_consumer(["orders", "clicks"])
        assert take(consumer, 5) == sequences
        rewind_after(consumer, sequences[2])
        assert take(consumer, 2) == sequences[3:]
        seek_after(consumer, from_milliseconds(1_001))
        assert take(consumer, 3) == sequences[2:]
        for move in (
            lambda: rewind_after(consumer, sequences[-1]),
            lambda: seek_after(consumer, from_milliseconds(1_004)),
        ):
            with pytest.raises(OutOfBoundsError):
                move()
    with pytest.raises(StreamEndedError):
        consumer.next()
