"""Micro-batches from Kafka topics: ranges of offsets, read by ``assign`` and ended by their planned end.

Offsets are not contiguous, because compaction and transaction markers leave holes. So a range is complete when its
planned end is reached, even if offsets are missing in it, and the planned end is committed.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import lt
from typing import cast

import pyarrow as pa
from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicPartition
from confluent_kafka import Message as KafkaMessage

from stream_consumers.batches import (
    BatchPlan,
    BatchSource,
    Extent,
    LastMessage,
    Membership,
    Range,
    Resume,
    fair_shares,
    readable_gaps,
    widths,
)
from stream_consumers.client_config import ClientConfig, Scalar
from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import (
    BatchTooLargeError,
    BrokerUnavailableError,
    DataLossError,
    FormatError,
    StreamAssetsError,
    StreamRemovedError,
)
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.messages import (
    MAX_BATCH_BYTES,
    Run,
    bytes_of,
    last_message,
    message_bytes,
    record_batches,
    shard_of,
)
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, Limits, choice
from stream_consumers.urls import StreamUrl

Partition = tuple[str, int]
# How long a read waits after the last message of a range that ends in a marker.
POLL_SECONDS = 0.05
# How long a read waits for the message, or the end of the partition, after a range in which offsets were skipped.
CONFIRM_SECONDS = 1.0
STALL_SECONDS = 60.0
# The number of messages that are taken from the client at once, which have up to 100,000 headers each. Two blocks are
# fewer objects than the garbage collector waits for (700), so that it never runs because of them.
BLOCK_MESSAGES = 128
# The client's own default for each partition.
MAX_FETCHED_AHEAD = 100_000
SAMPLE_MESSAGES = 256
# A look-up of one message fetches batches of this many bytes from each partition, or one larger batch. No codec makes
# them more than 32,768 times as large, so that they take no more memory than the largest batch.
LOOKUP_FETCH_BYTES = MAX_BATCH_BYTES // 32_768
# A batch whose estimated size is below this fraction of the limit is not measured message by message.
SAFE_FRACTION = 0.5
# A batch that would stay below the limit with messages this many times as large as any sampled one is not sampled.
UNSAMPLED_FACTOR = 100
_NOTHING_THERE = {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}
_GONE = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}


@dataclass(frozen=True, slots=True)
class KafkaSplit:
    """Ranges of some partitions, read by one executor.

    Args:
        url: the cluster.
        client: the configuration of the client, with its secrets; it is never shown.
        ranges: the ranges to read.
        stall_seconds: fail after this number of seconds without an answer.
        max_bytes: this split's share of the bytes of the batch; ``None`` if the plan has counted them.
    """

    url: StreamUrl
    client: Mapping[str, Scalar] = field(repr=False)
    ranges: Mapping[Shard, Range]
    stall_seconds: float = STALL_SECONDS
    max_bytes: int | None = None

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`.

        Raises:
            BatchTooLargeError: the messages have more bytes than estimated, and more than ``max_bytes``.
        """
        size = 0
        with (
            KafkaBrokers(self.url, self.client) as cluster,
            RangeReader(cluster, self.ranges, self.stall_seconds) as reader,
        ):
            for batch in record_batches(reader):
                size += bytes_of(batch)
                if self.max_bytes is not None and size > self.max_bytes:
                    raise BatchTooLargeError(
                        f"a split of a batch of {self.url} has more bytes than estimated",
                        remedy="Nothing was written. The next plan counts the bytes of the batch.",
                        bytes=size,
                        limit=self.max_bytes,
                    )
                yield batch

    def counts(self) -> Mapping[Shard, int]:
        """Count one message for each offset: compacted messages and transaction markers count, too."""
        return widths(self.ranges)

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.batches.CountedSplit.identities`."""
        with KafkaBrokers(self.url, self.client) as cluster:
            return topic_ids(cluster, sorted({shard.stream for shard in self.ranges}))


def topic_ids(cluster: KafkaBrokers, streams: Sequence[str]) -> Mapping[str, str]:
    """Return the fingerprints of topics, requested at each call."""
    return {name: f"kafka:{topic.id}" for name, topic in sorted(cluster.topics(streams).items())}


class RangeReader(ClosesOnExit):
    """Reads ranges of partitions with one client, as an iterator of runs and a context manager.

    Raises (while iterating):
        DataLossError: messages of a range were deleted.
        FormatError: a batch is damaged.
        StreamRemovedError: the topic was deleted.
        BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
    """

    def __init__(self, cluster: KafkaBrokers, ranges: Mapping[Shard, Range], stall_seconds: float) -> None:
        self._cluster = cluster
        self._stall_seconds = stall_seconds
        self._ends = {(s.stream, s.id): part.end for s, part in ranges.items() if part.start < part.end}
        self.next: dict[Partition, int] = {
            (s.stream, s.id): ranges[s].start for s in ranges if (s.stream, s.id) in self._ends
        }
        # The lowest valid offset of the next message of each partition, also after its planned end.
        self._lowest = dict(self.next)
        # The number of offsets in the ranges, of all partitions, that are left, and that were skipped.
        self._left, self._skipped = sum(widths(ranges).values()), 0
        # The partitions in :attr:`next` whose planned end is reached.
        self._ended: list[Partition] = []
        is_one_stream = len({stream for stream, _ in self._ends}) == 1
        self._key: Callable[[KafkaMessage], object] = KafkaMessage.partition if is_one_stream else _place_of
        # Messages after the planned end of a partition would only take memory.
        ahead = max(1, min(MAX_FETCHED_AHEAD, max(widths(ranges).values(), default=1)))
        self._consumer: Consumer = cluster.consumer(
            enable_partition_eof=True,
            enable_auto_offset_store=False,
            queued_min_messages=cluster.settings.get("queued.min.messages", ahead),
        )
        self._consumer.assign([TopicPartition(*place, offset) for place, offset in sorted(self.next.items())])

    def close(self) -> None:
        """Release the client."""
        self._consumer.close()

    def __iter__(self) -> Iterator[Run]:
        """Yield runs of messages, each within its range; a partition leaves :attr:`next` when its end is reached.

        If offsets were skipped, an invented offset may have reached the end. The messages after it show this, so they
        are checked, too.
        """
        deadline = time.monotonic() + self._stall_seconds
        while self.next:
            ended, self._ended = [place for place in self._ended if place in self.next], []
            if ended:
                found = self._consumer.consume(1, CONFIRM_SECONDS)
                found += self._consumer.consume(BLOCK_MESSAGES, 0.0)
            else:
                found = self._consumer.consume(min(BLOCK_MESSAGES, self._left), POLL_SECONDS)
            if found:
                deadline = time.monotonic() + self._stall_seconds
            elif not ended and time.monotonic() > deadline:
                raise self._stalled()
            has_errors = any(map(KafkaMessage.error, found))
            alike = zip(found) if has_errors else (group for _, group in groupby(found, self._key))
            for messages in map(list, alike):
                run = self._advance(messages)
                if run is not None:
                    yield run
            for place in ended:
                self._finish(place)

    def _advance(self, messages: list[KafkaMessage]) -> Run | None:
        """Record the next offset of a partition; return those of its successive messages that are in its range.

        Args:
            messages: messages without an error, or a single message with one.
        """
        place, error = _place_of(messages[0]), messages[0].error()
        if error is not None:
            self._handle_error(error, messages[0], place, messages[0].offset() or 0)
            return None
        offsets = list(map(cast("Callable[[KafkaMessage], int]", KafkaMessage.offset), messages))
        count = self._count_in_range(place, offsets)
        if place not in self.next:
            return None
        start, end = self.next[place], self._ends[place]
        reached = self.next[place] = min(offsets[-1] + 1, end)
        self._left -= reached - start
        self._skipped += reached - start - count
        if reached == end:
            if offsets[count - 1] == end - 1 and not self._skipped:
                self._finish(place)
            else:
                self._ended.append(place)
        return Run(Shard(*place), offsets[:count], messages[:count]) if count else None

    def _handle_error(self, error: KafkaError, message: KafkaMessage, place: Partition, offset: int) -> None:
        """Finish a partition at its end, or whose range was read: its error is about later messages. Raise others."""
        end = self._ends.get(place)
        is_read = end is not None and self.next.get(place, end) == end
        if not is_read and error.code() != KafkaError._PARTITION_EOF:
            raise self._failed(error, message)
        if not is_read and end is not None and offset < end:
            raise DataLossError(
                f"{place[0]}/{place[1]} of {self._cluster.url} ends before the planned end",
                remedy="The topic was truncated or recreated during the read. Run again to read what it has now.",
                end=offset,
                planned=end,
            )
        self._finish(place)

    def _finish(self, place: Partition) -> None:
        if place in self.next:
            self._left -= self._ends[place] - self.next.pop(place)
            if self.next:
                self._consumer.incremental_unassign([TopicPartition(*place)])

    def _count_in_range(self, place: Partition, offsets: list[int]) -> int:
        """Return how many offsets are before the planned end.

        An invented offset is refused, because the messages that it skips would not be read.
        """
        end, before = self._ends[place], [self._lowest[place] - 1, *offsets]
        wrong = len(offsets)
        if not all(map(lt, before, offsets)):
            wrong = next(index for index, offset in enumerate(offsets) if offset <= before[index])
        inside = bisect_left(offsets, end, hi=wrong)
        skips_end = place in self.next and inside < wrong and before[inside] < end - 1
        if skips_end and self._is_invented(place, offsets[inside]):
            wrong = inside
        if wrong < len(offsets):
            raise self._cluster.misplaced(f"{place[0]}/{place[1]}", before[wrong] + 1, offsets[wrong])
        self._lowest[place] = offsets[-1] + 1
        return inside

    def _is_invented(self, place: Partition, offset: int) -> bool:
        """Return whether an offset after a planned end that was not read is after the end of the partition, too."""
        # The end that the broker returned with the message; it is negative if it is unknown. That of a replica may lag,
        # so that only the leader's shows that the offset is invented.
        _, end = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
        return 0 <= end <= offset and self._leader_end(Shard(*place)) <= offset

    def _leader_end(self, shard: Shard) -> int:
        return self._cluster.ends([shard], IsolationLevel.READ_UNCOMMITTED)[shard]

    def _failed(self, error: KafkaError, message: KafkaMessage) -> Exception:
        place = f"{message.topic()}/{message.partition()} of {self._cluster.url}"
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            return DataLossError(
                f"messages of {place} were deleted before they were read: {self._cluster.said(error)}",
                remedy="Retention removed them, or the topic was recreated. Run again to read what it has now.",
                planned=", ".join(f"{s} from {offset}" for s, offset in sorted(self._places().items())),
            )
        if error.code() in _GONE:
            return StreamRemovedError(f"{place} no longer exists", remedy="The topic was deleted during the read.")
        return self._cluster.explain_read(message, error)

    def _places(self) -> Mapping[Shard, int]:
        return {Shard(*place): offset for place, offset in self.next.items()}

    def _stalled(self) -> Exception:
        places = ", ".join(f"{shard} at {offset}" for shard, offset in sorted(self._places().items()))
        return BrokerUnavailableError(
            f"no message arrived from {self._cluster.url} for {self._stall_seconds:g} s; waiting for {places}",
            remedy="Check the brokers and run again; nothing was lost.",
        )


def _cut(ranges: Mapping[Shard, Range], reached: Mapping[Partition, int]) -> Mapping[Shard, Range]:
    """Return the part of ``ranges`` that was read; a partition that is not in ``reached`` was read to its end."""
    cut = {s: Range(part.start, reached.get((s.stream, s.id), part.end)) for s, part in ranges.items()}
    return {shard: part for shard, part in cut.items() if part.start < part.end}


def _place_of(message: KafkaMessage) -> Partition:
    return message.topic() or "", message.partition() or 0


class FirstMessages(ClosesOnExit):
    """Reads single messages of partitions; the client stays connected from one call to the next.

    Args:
        cluster: the cluster of the partitions.

    Attributes:
        damaged: the shards with a batch that cannot be read; if there are any, use another client.
    """

    def __init__(self, cluster: KafkaBrokers) -> None:
        self._cluster = cluster
        self._consumer: Consumer = cluster.consumer(
            enable_partition_eof=True,
            queued_min_messages=1,
            fetch_queue_backoff_ms=1,
            fetch_wait_max_ms=10,
            max_partition_fetch_bytes=LOOKUP_FETCH_BYTES,
        )
        self.damaged: set[Shard] = set()

    def close(self) -> None:
        """Release the client."""
        self._consumer.close()

    def at(self, offsets: Mapping[Shard, int]) -> Mapping[Shard, KafkaMessage]:
        """Return the first message of each shard at or after an offset; shards without a readable one are left out.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        found: dict[Shard, KafkaMessage] = {}
        waiting = set(offsets)
        self._consumer.assign([TopicPartition(s.stream, s.id, offset) for s, offset in sorted(offsets.items())])
        deadline = time.monotonic() + self._cluster.answer_seconds
        while waiting:
            for message in self._consumer.consume(len(waiting), POLL_SECONDS):
                shard, error = shard_of(message), message.error()
                if shard not in waiting:
                    continue
                if error is None:
                    found[shard] = message
                elif error.code() not in _NOTHING_THERE:
                    explained = self._cluster.explain_read(message, error)
                    if not isinstance(explained, FormatError):
                        raise explained
                    self.damaged.add(shard)
                waiting.remove(shard)
                # Otherwise brokers answer with batches of this partition only, until it has no more.
                self._consumer.incremental_unassign([TopicPartition(shard.stream, shard.id)])
            if waiting and time.monotonic() > deadline:
                raise BrokerUnavailableError(
                    f"{min(waiting)} of {self._cluster.url} cannot be read: no answer",
                    remedy="Check the brokers; nothing was lost, run again.",
                )
        self._consumer.unassign()
        return found


class KafkaBatchSource(BatchSource):
    """Kafka topics as a batch source.

    Args:
        url: ``kafka://host:9092/orders``.
        client: any configuration of librdkafka; ``isolation.level`` limits how far a batch may read.
        mode: with ``real_time``, the broker has no group.
        membership: the member of the group to commit as; by default positions are set from outside of the group.

    Raises:
        InvalidOptionError: ``client`` has a setting that users may not change.
    """

    def __init__(
        self,
        url: str | StreamUrl,
        client: ClientConfig | None = None,
        *,
        mode: ConsumerMode = ConsumerMode.RESUMABLE,
        membership: Membership | None = None,
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._streams = url.required_streams()
        self._mode = choice(ConsumerMode, mode, option="mode")
        self._membership = membership
        self.cluster = KafkaBrokers(url, client)
        self._extents: dict[Shard, Extent] = {}
        # The largest average size of a message in the samples so far.
        self._message_bytes: float | None = None
        self._single: FirstMessages | None = None
        # The shards in which the last look-up of messages has met a damaged batch.
        self._damaged: set[Shard] = set()
        self._planned_from: Mapping[Shard, int] = {}

    def set_request_timeout(self, seconds: float) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.set_request_timeout`."""
        self.cluster.answer_seconds, self.cluster.is_hasty = seconds, True

    def identities(self) -> Mapping[str, str]:
        """Return the topic ids, requested at each call."""
        return topic_ids(self.cluster, self._streams)

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """See :meth:`stream_consumers.batches.BatchSource.extents`; the end is that of the isolation level."""
        shards = self._shards()
        starts = self.cluster.starts(shards)
        # The order matters: messages that arrive in between must not count as blocked.
        highs = self.cluster.ends(shards, IsolationLevel.READ_UNCOMMITTED)
        ends = self.cluster.ends(shards)
        self._extents = {
            shard: Extent(starts[shard], ends[shard], max(0, highs[shard] - ends[shard])) for shard in shards
        }
        return self._extents

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.has_grown`; new partitions are left out."""
        return self.cluster.ends(extents) != {shard: extent.end for shard, extent in extents.items()}

    def _shards(self) -> list[Shard]:
        topics = self.cluster.topics(self._streams)
        return [shard for _, topic in sorted(topics.items()) for shard in topic.shards]

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.at`."""
        found = self.cluster.at(self._extents, timestamp_ms)
        return {
            shard: extent.end if found[shard] < 0 else max(extent.start, min(found[shard], extent.end))
            for shard, extent in self._extents.items()
        }

    def first(self, shard: Shard, extent: Extent) -> int:
        """Return offset 0: a new partition started empty, so messages that were deleted since then are lost."""
        return 0

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """Return the part of each range before the first offset that the brokers still have."""
        known = {shard: gap for shard, gap in gaps.items() if shard in self._extents}
        before = {shard: gap.clamp(Range(0, self._extents[shard].start)) for shard, gap in known.items()}
        return {shard: part for shard, part in before.items() if part.start < part.end}

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """See :meth:`stream_consumers.batches.BatchSource.last_messages`; a damaged batch counts as no message.

        So a group that was moved past the batch can continue. A read of the batch itself fails.
        """
        self._damaged = set()
        known = {shard: part for shard, part in ranges.items() if shard in self._extents}
        left = {shard: part.clamp(Range(*self._extents[shard][:2])) for shard, part in known.items()}
        ends = {shard: part.end for shard, part in left.items()}
        last: dict[Shard, KafkaMessage] = {}
        distance = 1
        # The range may end in markers and messages of aborted transactions. The search goes back twice as far each time
        # until it finds a message, then bisects the offsets after it.
        while left := {shard: part for shard, part in left.items() if part.start < part.end}:
            probes = {
                shard: (part.start + part.end) // 2 if shard in last else max(part.start, ends[shard] - distance)
                for shard, part in left.items()
            }
            held = self._at(probes)
            for shard, probe in probes.items():
                message = held.get(shard)
                offset = -1 if message is None else message.offset() or 0
                if message is not None and offset < left[shard].end:
                    last[shard] = message
                    left[shard] = Range(offset + 1, left[shard].end)
                else:
                    left[shard] = Range(left[shard].start, probe)
            distance *= 2
        return {shard: last_message(message) for shard, message in last.items()}

    def is_replaced(self, shard: Shard, read: LastMessage, held: LastMessage | None) -> bool:
        """Return true also if the message is missing in a topic that starts before it and deletes only at its start.

        The start is requested again after the look-up of the message.

        Raises:
            FormatError: the message is not found, and a batch is damaged that may have held it.
        """
        if super().is_replaced(shard, read, held):
            return True
        start, end, _ = self._extents[shard]
        is_there = held is not None and held.sequence == read.sequence
        # A message after the end may be in a transaction that is still open.
        if is_there or not start <= read.sequence < end:
            return False
        if shard in self._damaged:
            raise FormatError(
                f"{shard} of {self.url} has a damaged batch at offset {read.sequence}, the last one that was read: it "
                "is unknown whether the brokers lost their newest messages",
                remedy="Repair the disk of the broker or use another replica, then run again. Or, if no messages were "
                "lost, delete the records of the partition up to the end of the batch with kafka-delete-records.",
                offset=read.sequence,
            )
        return not self.cluster.is_compacted(shard.stream) and self.cluster.starts([shard])[shard] <= read.sequence

    def _at(self, offsets: Mapping[Shard, int]) -> Mapping[Shard, KafkaMessage]:
        if not offsets:
            return {}
        if self._single is None:
            self._single = FirstMessages(self.cluster)
        try:
            found = self._single.at(offsets)
            if self._single.damaged:
                self._damaged |= self._single.damaged
                self._release()
            return found
        except StreamAssetsError:
            # A client that has lost its brokers may not find them again.
            self._release()
            raise

    def _release(self) -> None:
        if self._single is not None:
            self._single.close()
            self._single = None

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """See :meth:`stream_consumers.batches.BatchSource.plan`.

        Each shard gets a fair share of ``max_records`` offsets; the part of a range before the shard's first offset is
        covered, not read. Bytes are estimated from a sample of each shard, and counted if the estimate comes near
        ``max_bytes``. A batch is not sampled if it is far below the limit by the samples of earlier plans. Splits of a
        batch with estimated bytes count them while they are read, and raise
        :class:`stream_consumers.errors.BatchTooLargeError`; the next plan from the same positions counts them first.
        """
        covered = readable_gaps(gaps, self._extents)
        if not covered:
            return None
        starts = {shard: min(gap.end, max(gap.start, self._extents[shard].start)) for shard, gap in covered.items()}
        shares = fair_shares(
            {shard: gap.end - starts[shard] for shard, gap in covered.items()},
            limits.max_records,
            turn=sum(starts.values()),
        )
        fair = {shard: Range(starts[shard], starts[shard] + share) for shard, share in shares.items()}
        ranges, is_measured = self._within_bytes(fair, limits.max_bytes)
        gone = {shard: gap for shard, gap in covered.items() if starts[shard] == gap.end}
        planned = {shard: Range(covered[shard].start, part.end) for shard, part in ranges.items()} | gone
        records = sum(part.end - part.start for part in ranges.values())
        max_bytes = None if is_measured else limits.max_bytes
        splits = self._splits(ranges, parallelism, max_bytes)
        return BatchPlan(dict(sorted(planned.items())), splits, records, lost=self.lost(planned))

    def _within_bytes(self, ranges: Mapping[Shard, Range], max_bytes: int) -> tuple[Mapping[Shard, Range], bool]:
        """Return the part of the ranges with at most this number of bytes, and whether the bytes were counted."""
        records = sum(widths(ranges).values())
        places = {shard: part.start for shard, part in ranges.items()}
        # The last plan from these positions was not written: its estimate may have been too small.
        is_again, self._planned_from = places == self._planned_from, places
        if not is_again:
            if self._message_bytes is not None and records * self._message_bytes * UNSAMPLED_FACTOR <= max_bytes:
                return ranges, False
            estimate = self._estimate_bytes(ranges)
            self._message_bytes = max(self._message_bytes or 1.0, estimate / max(1, records))
            if estimate <= SAFE_FRACTION * max_bytes:
                return ranges, False
        return self._measured(ranges, max_bytes), True

    def _estimate_bytes(self, ranges: Mapping[Shard, Range]) -> float:
        """Estimate the bytes of the ranges from the first or the last messages of each, whichever are larger."""
        heads = {shard: part.clamp(Range(0, part.start + SAMPLE_MESSAGES)) for shard, part in ranges.items()}
        tails = {shard: part.clamp(Range(part.end - SAMPLE_MESSAGES, part.end)) for shard, part in ranges.items()}
        return max(self._scaled(ranges, heads), self._scaled(ranges, tails) if tails != heads else 0.0)

    def _scaled(self, ranges: Mapping[Shard, Range], samples: Mapping[Shard, Range]) -> float:
        sizes = dict.fromkeys(ranges, 0)
        with RangeReader(self.cluster, samples, STALL_SECONDS) as reader:
            for run in reader:
                sizes[run.shard] += sum(map(message_bytes, run.messages))
        return sum(
            size * (ranges[shard].end - ranges[shard].start) / (samples[shard].end - samples[shard].start)
            for shard, size in sizes.items()
        )

    def _measured(self, ranges: Mapping[Shard, Range], max_bytes: int) -> Mapping[Shard, Range]:
        """Return the part of ``ranges`` with at most this number of bytes, but at least one message."""
        size = count = 0
        with RangeReader(self.cluster, ranges, STALL_SECONDS) as reader:
            for run in reader:
                for offset, message in zip(run.offsets, run.messages):
                    size += message_bytes(message)
                    count += 1
                    if size > max_bytes and count > 1:
                        return _cut(ranges, {**reader.next, (run.shard.stream, run.shard.id): offset})
        return ranges

    def _splits(self, ranges: Mapping[Shard, Range], parallelism: int, max_bytes: int | None) -> list[KafkaSplit]:
        total = sum(part.end - part.start for part in ranges.values())
        share = max(1, math.ceil(total / parallelism))
        splits: list[dict[Shard, Range]] = [{}]
        room = share
        for shard, part in sorted(ranges.items()):
            start = part.start
            while start < part.end:
                if not room:
                    splits.append({})
                    room = share
                end = min(part.end, start + room)
                splits[-1][shard] = Range(start, end)
                room -= end - start
                start = end
        filled = [split for split in splits if split]
        each = None if max_bytes is None else max_bytes // max(1, len(filled))
        return [KafkaSplit(self.url, self.cluster.client, split, max_bytes=each) for split in filled]

    def committed(self, group: str) -> Mapping[Shard, int] | None:
        """Return the positions that the group has committed at the brokers; ``None`` in ``real_time`` mode."""
        if self._mode is ConsumerMode.REAL_TIME:
            return None
        return self.cluster.committed(group, self._shards())

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """Set the group's positions with their metadata.

        Raises:
            GroupActiveError: the group has live members of other programs; the message names them.
        """
        if self._membership is not None:
            # A refusal is not an error: the member that has the shard now commits the ledger's position.
            self._membership.commit(positions, metadata=metadata)
        elif self._mode is not ConsumerMode.REAL_TIME:
            self.cluster.commit(group, positions, metadata=metadata)

    def committed_metadata(self, group: str) -> Mapping[Shard, str]:
        """Return the metadata of the group's positions."""
        return {} if self._mode is ConsumerMode.REAL_TIME else self.cluster.committed_metadata(group, self._shards())

    def close(self) -> None:
        """Release the clients."""
        self._release()
        self.cluster.close()
