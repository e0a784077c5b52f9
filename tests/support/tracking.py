"""What a tracked consumer hands out, as a list."""

from __future__ import annotations

from stream_consumers.messages import Message
from stream_consumers.tracking.consumer import TrackedConsumer


def fetched(consumer: TrackedConsumer, count: int, *, seconds: float) -> list[Message]:
    """What is there, up to so many messages; waits for the first one only."""
    return [message for _, message in consumer.getmany(seconds, max_messages=count)]
