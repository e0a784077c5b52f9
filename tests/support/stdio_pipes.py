"""Real pipes for the stdio tests: what a test writes is a broker's stdin."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from stream_consumers.stdio.backend import StdioConsumer
from stream_consumers.stdio.broker import StdioBroker
from stream_consumers.urls import StreamUrl


@dataclass
class Pipe:
    """A broker, and the writing end of its stdin."""

    broker: StdioBroker
    writer: BinaryIO

    def write(self, *lines: bytes) -> None:
        self.writer.write(b"".join(line + b"\n" for line in lines))
        self.writer.flush()

    def end(self) -> None:
        self.writer.close()


@contextmanager
def open_pipe(target: BinaryIO | None = None, **limits: int) -> Iterator[Pipe]:
    """A pipe that a test writes to; it is at its end afterwards."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as source, os.fdopen(writing, "wb") as writer:
        yield Pipe(StdioBroker(source, target or io.BytesIO(), **limits), writer)
        writer.close()


def broker_of(data: bytes) -> StdioBroker:
    """A broker whose stdin has these bytes."""
    return StdioBroker(io.BytesIO(data), io.BytesIO())


def read_all(data: bytes, url: str = "stdio:///orders") -> list[tuple[str, int, int, bytes | None]]:
    """What a consumer gets of these bytes: stream, shard, sequence, payload."""
    with StdioConsumer(StreamUrl.parse(url), broker=broker_of(data)) as consumer:
        return [(m.shard.stream, m.shard.id, m.sequence, m.payload) for m in consumer]
