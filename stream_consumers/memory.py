"""Streams in memory, for tests of pipelines: they need no server and no cleanup.

Splits contain the messages themselves, so executors of any Spark session can read them.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import attrgetter

import pyarrow as pa

from stream_consumers.backend import Backend, ConsumerOptions
from stream_consumers.batches import (
    BatchPlan,
    BatchSource,
    Extent,
    LastMessage,
    Membership,
    Range,
    Resume,
    message_checksum,
    message_row,
    readable_gaps,
    record_batches,
)
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import (
    Assignment,
    Consumer,
    Edge,
    Positions,
    ShardEnd,
    check_positions,
    end_of_stream,
    no_message_error,
    resolve_positions,
    rewind_target,
)
from stream_consumers.in_process_groups import SharedGroupConsumer
from stream_consumers.messages import Message, Receipt, Shard, now_milliseconds, to_milliseconds
from stream_consumers.options import AutoStreamReset, ConsumerMode, Limits, Modes, check_name, choose_reset
from stream_consumers.producer import Producer
from stream_consumers.urls import StreamUrl

_sequence = attrgetter("sequence")


@dataclass
class HeldEntry:
    """A message that a group has delivered to a consumer and that is not acknowledged.

    Args:
        consumer: the consumer that holds it.
        attempt: the number of deliveries.
        first_delivered_ms: the time of its first delivery, unix milliseconds.
        last_touched: the time of its last delivery or heartbeat, in seconds of the monotonic clock.
    """

    consumer: str
    attempt: int
    first_delivered_ms: int
    last_touched: float


@dataclass
class MemoryGroup:
    """A group that shares a stream message by message, like a Redis group.

    Args:
        position: the next sequence to deliver for the first time.
        pending: the delivered entries that are not acknowledged, by sequence.
        consumers: the names of its members.
        cursors: the sequence where each member's next search for idle entries starts.
    """

    position: int
    pending: dict[int, HeldEntry] = field(default_factory=dict)
    consumers: set[str] = field(default_factory=set)
    cursors: dict[str, int] = field(default_factory=dict)

    def held_by(self, consumer: str, sequences: Iterable[int]) -> list[HeldEntry]:
        """Return the pending entries among ``sequences`` that this consumer holds."""
        found = (self.pending.get(sequence) for sequence in sequences)
        return [held for held in found if held is not None and held.consumer == consumer]


@dataclass
class MemoryBroker:
    """The messages of one ``memory://name``, shared by all users of the same name in this process.

    Args:
        created_ns: the time of its creation, unix nanoseconds.
        messages: the messages of each shard, in order of their sequences.
        arrivals: the shard of each message, in the order of arrival.
        ends: the next sequence of each shard; messages before it may have been removed.
        committed: the committed positions, by group and shard.
        metadata: the metadata of the last commits, by group and shard.
        groups: the groups that deliver message by message, by shard and group.
        changed: the lock of all these fields; it is notified of each message.

    Example:
        >>> MemoryBroker().append(Shard("orders"), b"{}", timestamp_ms=1000)
        Receipt(orders/0, 0, 1000)
    """

    created_ns: int = field(default_factory=time.time_ns)
    messages: dict[Shard, list[Message]] = field(default_factory=dict)
    arrivals: list[Shard] = field(default_factory=list)
    ends: dict[Shard, int] = field(default_factory=dict)
    committed: dict[tuple[str, Shard], int] = field(default_factory=dict)
    metadata: dict[tuple[str, Shard], str] = field(default_factory=dict)
    groups: dict[tuple[Shard, str], MemoryGroup] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def append(self, shard: Shard, payload: bytes | None, timestamp_ms: int | None = None) -> Receipt:
        """Append a message; sequences start at 0."""
        with self.changed:
            moment = now_milliseconds() if timestamp_ms is None else timestamp_ms
            sequence = self.ends.get(shard, 0)
            self.ends[shard] = sequence + 1
            self.messages.setdefault(shard, []).append(Message(shard, sequence, moment, payload))
            self.arrivals.append(shard)
            self.changed.notify_all()
            return Receipt(shard, sequence, moment)

    def between(self, shard: Shard, start: int = 0, end: int = sys.maxsize) -> Iterator[Message]:
        """Return the messages of the shard in ``[start, end)``; the caller must hold :attr:`changed`."""
        log = self.messages.get(shard, [])
        return map(log.__getitem__, range(*(bisect_left(log, edge, key=_sequence) for edge in (start, end))))


_brokers: dict[str, MemoryBroker] = {}
_brokers_lock = threading.Lock()


def memory_broker(url: str | StreamUrl) -> MemoryBroker:
    """Return the broker of this URL; the first call creates it.

    Example:
        >>> broker = memory_broker("memory://example/orders")
        >>> broker.append(Shard("orders"), b"{}").sequence
        0
    """
    url = StreamUrl.parse(url)
    with _brokers_lock:
        return _brokers.setdefault(",".join(url.nodes), MemoryBroker())


def forget_memory_broker(url: str | StreamUrl) -> None:
    """Remove the broker of this URL; the next use starts with an empty one.

    Example:
        >>> url = "memory://forgotten/orders"
        >>> _ = memory_broker(url).append(Shard("orders"), b"{}")
        >>> forget_memory_broker(url)
        >>> memory_broker(url).messages
        {}
    """
    url = StreamUrl.parse(url)
    with _brokers_lock:
        _brokers.pop(",".join(url.nodes), None)


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """A split that contains its messages and the fingerprints of their streams."""

    messages: tuple[Message, ...]
    fingerprints: Mapping[str, str]

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        return record_batches(map(message_row, self.messages))

    def counts(self) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.CountedSplit.counts`."""
        return Counter(message.shard for message in self.messages)

    def identities(self) -> Mapping[str, str]:
        """Return the fingerprints of the broker that the messages were copied from; copies cannot change."""
        return self.fingerprints


class MemoryBatchSource(BatchSource):
    """A memory broker as a batch source; see :class:`stream_consumers.batches.BatchSource`.

    Args:
        url: ``memory://name/orders``.

    Example:
        >>> url = "memory://batches/orders"
        >>> _ = MemoryProducer(url).send(b"{}")
        >>> with MemoryBatchSource(url) as source:
        ...     source.extents()[Shard("orders")].end
        1
    """

    def __init__(self, url: str | StreamUrl) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._broker = memory_broker(url)
        self._streams = frozenset(url.required_streams())
        self._extents: dict[Shard, Extent] = {}

    def identities(self) -> Mapping[str, str]:
        """Return the creation time of the broker as the fingerprint of each stream."""
        return {stream: f"memory:{self._broker.created_ns}" for stream in sorted(self._streams)}

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """See :meth:`stream_consumers.batches.BatchSource.extents`."""
        with self._broker.changed:
            self._extents = {
                shard: Extent(log[0].sequence, self._broker.ends[shard])
                for shard, log in sorted(self._broker.messages.items())
                if shard.stream in self._streams and log
            }
        return self._extents

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """See :meth:`stream_consumers.batches.BatchSource.plan`; fills the batch shard by shard."""
        chosen: list[Message] = []
        ranges: dict[Shard, Range] = {}
        size, is_full = 0, False
        for shard, gap in readable_gaps(gaps, self._extents).items():
            start, end = gap
            with self._broker.changed:
                messages = list(self._broker.between(shard, start, end))
            for message in messages:
                size += len(message.payload or b"")
                if chosen and (len(chosen) == limits.max_records or size > limits.max_bytes):
                    is_full, end = True, message.sequence
                    break
                chosen.append(message)
            if start < end:
                ranges[shard] = Range(start, end)
            if is_full:
                break
        if not ranges:
            return None
        share = -(-max(1, len(chosen)) // parallelism)
        starts = range(0, max(1, len(chosen)), share)
        splits = [MemorySplit(tuple(chosen[start : start + share]), self.identities()) for start in starts]
        return BatchPlan(ranges, splits, len(chosen))

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.at`."""
        with self._broker.changed:
            return {
                shard: next(
                    (m.sequence for m in self._broker.between(shard, 0, extent.end) if m.timestamp_ms >= timestamp_ms),
                    extent.end,
                )
                for shard, extent in self._extents.items()
            }

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """See :meth:`stream_consumers.batches.BatchSource.last_messages`."""
        with self._broker.changed:
            held = {shard: list(self._broker.between(shard, *part))[-1:] for shard, part in ranges.items()}
        return {
            shard: LastMessage(last.sequence, last.timestamp_ms, message_checksum(None, last.payload))
            for shard, messages in held.items()
            for last in messages
        }

    def committed(self, group: str) -> Mapping[Shard, int] | None:
        """Return the positions of the group."""
        with self._broker.changed:
            return {
                shard: end
                for (owner, shard), end in self._broker.committed.items()
                if owner == group and shard.stream in self._streams
            }

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """Store the positions of the group."""
        with self._broker.changed:
            self._broker.committed.update({(group, shard): end for shard, end in positions.items()})
            self._broker.metadata.update({(group, shard): metadata for shard in positions})

    def committed_metadata(self, group: str) -> Mapping[Shard, str]:
        """Return the metadata of the last commits."""
        with self._broker.changed:
            return {shard: text for (owner, shard), text in self._broker.metadata.items() if owner == group and text}


class MemoryConsumer(Consumer):
    """A consumer of a memory broker; see :class:`stream_consumers.consumer.Consumer`.

    Args:
        url: ``memory://name/orders``; ``*`` stands for all streams, including future ones.
        reset: where to start.
        live: wait for more messages at the end; without it, reading ends there.

    Example:
        >>> url = "memory://consumed/orders"
        >>> _ = MemoryProducer(url).send(b"{}")
        >>> with MemoryConsumer(url, live=False) as consumer:
        ...     [message.text() for message in consumer]
        ['{}']
    """

    def __init__(
        self, url: str | StreamUrl, *, reset: AutoStreamReset = AutoStreamReset.EARLIEST, live: bool = True
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__()
        reset = choose_reset(reset, live=live)
        self._broker = memory_broker(url)
        self._live = live
        self._assignment = Assignment(url.subscribed_streams())
        self._next: dict[Shard, int] = {}
        # The shards that may have a message, in round-robin order, and the number of arrivals they account for. So the
        # cost of a message does not depend on the number of shards.
        self._turns: OrderedDict[Shard, None] = OrderedDict()
        self._arrivals_seen = 0
        # After a seek or rewind, a shard starts with its first wanted message; from then on every message is read.
        self._started: set[Shard] = set()
        self._is_wanted: Callable[[Message], bool] = _any_message
        if reset is AutoStreamReset.LATEST:
            self.rewind(Edge.END)
        else:
            with self._broker.changed:
                self._reset_turns()

    def _poll(self, seconds: float) -> Message | None:
        with self._broker.changed:
            self._check_open()
            message = self._take()
            if message is None and not self._live:
                raise end_of_stream()
            if message is None:
                self._broker.changed.wait(seconds)
            return message

    def assigned(self) -> frozenset[Shard]:
        """Return the shards that are read now."""
        with self._broker.changed:
            return frozenset(filter(self._assignment.is_read, self._broker.messages))

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """See :meth:`stream_consumers.consumer.MeasurableConsumer.ends`."""
        with self._broker.changed:
            self._check_open()
            return {shard: ShardEnd(end, end) for shard in self.assigned() for end in [self._broker.ends[shard]]}

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        at = to_milliseconds(moment)
        self._move(lambda message: message.timestamp_ms >= at, f"at or after {moment.isoformat()}")

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        to = rewind_target(to)
        if isinstance(to, Edge):
            with self._broker.changed:
                self._check_open()
                self._go_to(dict(self._broker.ends) if to is Edge.END else {}, _any_message)
        else:
            sequence = to
            self._move(lambda message: message.sequence >= sequence, f"from sequence {sequence} on")

    def go_to(self, positions: Mapping[Shard, int]) -> None:
        """See :meth:`stream_consumers.consumer.PositionedConsumer.go_to`."""
        with self._broker.changed:
            self._check_open()
            resolved = resolve_positions(positions, self.assigned(), lambda: self._broker.ends)
            self._next |= resolved
            self._started |= resolved.keys()
            self._turns |= dict.fromkeys(resolved)

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        self._check_open()
        self._assignment.assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._broker.changed:
            self._check_open()
            self._assignment.unassign(shard, self._broker.messages)

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`."""
        with self._broker.changed:
            self._closed.set()
            self._broker.changed.notify_all()

    def _take(self) -> Message | None:
        self._add_arrivals()
        while self._turns:
            shard, _ = self._turns.popitem(last=False)
            position = self._next.get(shard, 0)
            is_wanted = _any_message if shard in self._started else self._is_wanted
            message = next(filter(is_wanted, self._broker.between(shard, position)), None)
            if message is not None:
                self._next[shard] = message.sequence + 1
                self._started.add(shard)
                self._turns[shard] = None
                return message
            # Skip the unwanted messages, so that they are not examined again.
            self._next[shard] = max(position, self._broker.ends[shard])
        return None

    def _reset_turns(self) -> None:
        self._turns = OrderedDict.fromkeys(sorted(self.assigned()))
        self._arrivals_seen = len(self._broker.arrivals)

    def _add_arrivals(self) -> None:
        arrivals = self._broker.arrivals
        for index in range(self._arrivals_seen, len(arrivals)):
            if self._assignment.is_read(arrivals[index]):
                self._turns.setdefault(arrivals[index])
        self._arrivals_seen = len(arrivals)

    def _move(self, is_wanted: Callable[[Message], bool], place: str) -> None:
        with self._broker.changed:
            self._check_open()
            shards = self._assignment.select(self._broker.messages)
            if not any(is_wanted(message) for shard in shards for message in self._broker.messages[shard]):
                raise no_message_error(place)
            self._go_to({}, is_wanted)

    def _go_to(self, positions: dict[Shard, int], is_wanted: Callable[[Message], bool]) -> None:
        self._assignment.apply()
        self._next, self._started, self._is_wanted = positions, set(), is_wanted
        self._reset_turns()


def _any_message(message: Message) -> bool:
    return True


class MemoryProducer(Producer):
    """A producer of a memory broker; see :class:`stream_consumers.producer.Producer`.

    Args:
        url: ``memory://name/orders``; ``send`` uses its first stream by default.

    Example:
        >>> with MemoryProducer("memory://produced/orders") as producer:
        ...     [producer.send(b"{}").sequence for _ in range(2)]
        [0, 1]
    """

    def __init__(self, url: str | StreamUrl) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._broker = memory_broker(url)

    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        return self._broker.append(shard, payload, timestamp_ms)

    def _flush(self) -> None:
        """Do nothing: a sent message is already in memory."""


class MemoryCommitter:
    """Stores the positions of a group in the broker of a ``memory://`` URL.

    Args:
        url: the streams.
        group: the consumer group.

    Example:
        >>> committer = MemoryCommitter("memory://commits/orders", "billing")
        >>> committer.commit({Shard("orders"): 7})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 7}
    """

    is_transactional = False

    def __init__(self, url: str | StreamUrl, group: str) -> None:
        url = StreamUrl.parse(url)
        self._source, self._group = MemoryBatchSource(url), check_name("group", group)

    def commit(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.consumer.PositionCommitter.commit`."""
        check_positions(positions)
        self._source.commit(self._group, positions)

    def committed(self) -> Positions:
        """See :meth:`stream_consumers.consumer.PositionCommitter.committed`."""
        return self._source.committed(self._group) or {}


class MemoryStreams(Backend):
    """Streams in this process."""

    consumer_modes = Modes(of="consumers of memory", available=(ConsumerMode.REAL_TIME, ConsumerMode.LOAD_BALANCED))
    batch_modes = Modes(
        of="batches of memory", available=(ConsumerMode.RESUMABLE,), host_groups={ConsumerMode.RESUMABLE: "r"}
    )

    def streams(self, url: StreamUrl, client: ClientConfig) -> Collection[str]:
        """See :meth:`stream_consumers.backend.Backend.streams`."""
        broker = memory_broker(url)
        with broker.changed:
            return {shard.stream for shard in broker.messages}

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """See :meth:`stream_consumers.backend.Backend.open_consumer`."""
        reset, live = options.reset, options.live
        open_standalone = partial(MemoryConsumer, url, reset=reset, live=live)
        if options.group is None:
            return open_standalone()
        return SharedGroupConsumer(url, group=options.group, reset=reset, live=live, open_consumer=open_standalone)

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """See :meth:`stream_consumers.backend.Backend.open_producer`."""
        return MemoryProducer(url)

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> BatchSource:
        """See :meth:`stream_consumers.backend.Backend.open_batch_source`."""
        return MemoryBatchSource(url)

    def committer(
        self, url: StreamUrl, group: str, *, consumer: Consumer | None, client: ClientConfig
    ) -> MemoryCommitter:
        """See :meth:`stream_consumers.backend.Backend.committer`."""
        return MemoryCommitter(url, group)
