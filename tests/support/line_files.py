"""A small backend as somebody else would write it, from what ``stream_consumers`` exports alone.

``lines://folder/orders`` is a folder with a text file a shard; a line is a time and a payload in base64.
"""

from __future__ import annotations

import base64
import fcntl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from stream_consumers import (
    AutoStreamReset,
    Backend,
    BatchSource,
    ConsumerMode,
    Edge,
    Message,
    Receipt,
    Shard,
    StreamUrl,
)
from stream_consumers.backend import ConsumerOptions
from stream_consumers.batches import BatchPlan, Extent, Membership, Range, Resume, message_row, record_batches
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Assignment, Consumer, end_of_stream, no_message_error
from stream_consumers.messages import to_milliseconds
from stream_consumers.options import Limits, Modes
from stream_consumers.producer import Producer

POLL_SECONDS = 0.01


class Folder:
    """The files of a URL; a shard is read again when its file has grown."""

    def __init__(self, url: StreamUrl) -> None:
        self.path = Path(url.path)
        self._streams = frozenset(url.required_streams())
        self._read: dict[Shard, tuple[int, list[Message]]] = {}

    def file(self, shard: Shard) -> Path:
        return self.path / f"{shard.stream}.{shard.id}.txt"

    def shards(self) -> list[Shard]:
        names = (path.stem.rpartition(".") for path in self.path.glob("*.txt"))
        return sorted(Shard(stream, int(number)) for stream, _, number in names if stream in self._streams)

    def messages(self, shard: Shard) -> list[Message]:
        file = self.file(shard)
        size = file.stat().st_size if file.exists() else 0
        if self._read.get(shard, (0, []))[0] != size:
            lines = file.read_text().split("\n")[:-1]
            found = [line.split(" ") for line in lines]
            self._read[shard] = (
                size,
                [
                    Message(shard, sequence, int(time), base64.b64decode(payload))
                    for sequence, (time, payload) in enumerate(found)
                ],
            )
        return self._read.get(shard, (0, []))[1]


class LineConsumer(Consumer):
    def __init__(self, url: StreamUrl, *, reset: AutoStreamReset, live: bool) -> None:
        super().__init__()
        self._url, self._live, self._folder = url, live, Folder(url)
        self._assignment = Assignment(url.required_streams())
        self._lock = threading.RLock()
        self._places: dict[Shard, int] = {}
        self._begun: set[Shard] = set()
        self._is_wanted: Callable[[Message], bool] = bool
        self.rewind(Edge.END if reset is AutoStreamReset.LATEST else Edge.BEGINNING)

    def _poll(self, seconds: float) -> Message | None:
        with self._lock:
            self._check_open()
            message = self._take()
        if message is None and not self._live:
            raise end_of_stream(self._url)
        if message is None:
            self._closed.wait(min(seconds, POLL_SECONDS))
        return message

    def _take(self) -> Message | None:
        for shard in filter(self._assignment.is_read, self._folder.shards()):
            for message in self._folder.messages(shard)[self._places.get(shard, 0) :]:
                self._places[shard] = message.sequence + 1
                if shard in self._begun or self._is_wanted(message):
                    self._begun.add(shard)
                    return message
        return None

    def seek(self, moment: datetime) -> None:
        milliseconds = to_milliseconds(moment)
        self._move(lambda message: message.timestamp_ms >= milliseconds, f"at or after {moment.isoformat()}")

    def rewind(self, to: Edge | int) -> None:
        if not isinstance(to, Edge):
            return self._move(lambda message: message.sequence >= to, f"from sequence {to} on")
        with self._lock:
            self._check_open()
            shards = self._folder.shards() if to is Edge.END else []
            self._begin({shard: len(self._folder.messages(shard)) for shard in shards}, lambda message: True)

    def _move(self, is_wanted: Callable[[Message], bool], place: str) -> None:
        with self._lock:
            self._check_open()
            chosen = self._assignment.select(self._folder.shards())
            if not any(is_wanted(message) for shard in chosen for message in self._folder.messages(shard)):
                raise no_message_error(place, self._url)
            self._begin({}, is_wanted)

    def _begin(self, places: dict[Shard, int], is_wanted: Callable[[Message], bool]) -> None:
        self._assignment.apply()
        self._places, self._begun, self._is_wanted = places, set(), is_wanted

    def assign(self, shard: Shard) -> None:
        self._check_open()
        self._assignment.assign(shard)

    def unassign(self, shard: Shard) -> None:
        self._check_open()
        self._assignment.unassign(shard, self._folder.shards())

    def close(self) -> None:
        self._closed.set()


class LineProducer(Producer):
    def __init__(self, url: StreamUrl) -> None:
        super().__init__(url)
        self._folder = Folder(url)

    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        with self._lock, self._folder.file(shard).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            sequence = len(self._folder.messages(shard))
            file.write(f"{timestamp_ms} {base64.b64encode(payload).decode()}\n")
        return Receipt(shard, sequence, timestamp_ms)

    def _flush(self) -> None:
        """A line is in the file when it was sent."""


@dataclass(frozen=True)
class LineSplit:
    messages: tuple[Message, ...]

    def read(self) -> Iterator[pa.RecordBatch]:
        return record_batches(map(message_row, self.messages))


class LineBatchSource(BatchSource):
    def __init__(self, url: StreamUrl) -> None:
        super().__init__(url)
        self._folder = Folder(url)
        self._logs: dict[Shard, list[Message]] = {}

    def identities(self) -> Mapping[str, str]:
        return dict.fromkeys(self.url.streams, f"inode {self._folder.path.stat().st_ino}")

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        self._logs = {shard: self._folder.messages(shard) for shard in self._folder.shards()}
        return {shard: Extent(0, len(log)) for shard, log in self._logs.items()}

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        wanted = [message for shard, gap in sorted(gaps.items()) for message in self._logs.get(shard, [])[slice(*gap)]]
        chosen: list[Message] = []
        size = 0
        for message in wanted[: limits.max_records]:
            size += len(message.payload or b"")
            if chosen and size > limits.max_bytes:
                break
            chosen.append(message)
        if not chosen:
            return None
        ends = {message.shard: message.sequence + 1 for message in chosen}
        ranges = {shard: Range(gaps[shard].start, end) for shard, end in ends.items()}
        share = -(-len(chosen) // parallelism)
        splits = [LineSplit(tuple(chosen[begin : begin + share])) for begin in range(0, len(chosen), share)]
        return BatchPlan(ranges, splits, len(chosen))

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        return {
            shard: next((message.sequence for message in log if message.timestamp_ms >= timestamp_ms), len(log))
            for shard, log in self._logs.items()
        }


class LineStreams(Backend):
    consumer_modes = Modes(of="consumers of lines", available=(ConsumerMode.REAL_TIME,))
    batch_modes = Modes(
        of="batches of lines", available=(ConsumerMode.RESUMABLE,), host_groups={ConsumerMode.RESUMABLE: "r"}
    )

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> LineConsumer:
        return LineConsumer(url, reset=options.reset, live=options.live)

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> LineProducer:
        return LineProducer(url)

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> LineBatchSource:
        return LineBatchSource(url)
