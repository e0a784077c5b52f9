"""Reads a ``.ss`` file message by message: replay, live following, seek and rewind through the beacons."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from stream_consumers.consumer import (
    Assignment,
    Consumer,
    DeadLetterObserver,
    Edge,
    end_of_stream,
    log_dead_letter,
    no_message_error,
    rewind_target,
)
from stream_consumers.errors import StreamRemovedError
from stream_consumers.file.format import HEADER_SIZE, Marker
from stream_consumers.file.scanner import Damage, Frame, FrameScanner
from stream_consumers.file.stream_file import BeaconSearch
from stream_consumers.messages import DeadLetter, Message, Shard, to_milliseconds
from stream_consumers.options import AutoStreamReset, choose_reset
from stream_consumers.urls import StreamUrl

IsBefore = Callable[[Marker | Frame], bool]
"""Returns whether a message, or the last message that a beacon names, is before the target."""
MIN_WAIT_SECONDS = 0.001
MAX_WAIT_SECONDS = 1.024


class FileConsumer(Consumer):
    """A consumer of a ``.ss`` file; see :class:`stream_consumers.consumer.Consumer`.

    If the file is removed, replaced or rewritten, a live consumer reads the rest of the open file, then raises
    :class:`stream_consumers.errors.StreamRemovedError`, because no more messages can arrive.

    Args:
        url: ``file://path/to/orders.ss/orders``; it may name several stream keys, or ``*`` for all current and future
            streams of the file.
        reset: where to start.
        live: wait for more messages at the end of the file; otherwise the end of the file ends the stream.
        on_dead_letter: called with each damaged frame; by default it is logged. Reading continues after the frame.
            Without ``live``, what cannot be read at the end of the file is one dead letter, too.

    Attributes:
        unfinished_bytes: the size of an unfinished message at which the consumer ended; 0 without one.

    Raises:
        InvalidOptionError: ``latest`` without ``live`` would read nothing.

    Example:
        >>> with FileConsumer("file://orders.ss/orders", live=False) as orders:
        ...     [message.text() for message in orders]
        ['{"id": 0}', '{"id": 1}', '{"id": 2}']
    """

    poll_seconds = MAX_WAIT_SECONDS

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        live: bool = True,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
    ) -> None:
        url = StreamUrl.parse(url)
        reset = choose_reset(reset, live=live)
        super().__init__()
        self._path = Path(url.path)
        self._streams = frozenset(url.subscribed_streams())
        self._live = live
        self._on_dead_letter = on_dead_letter
        self._assignment = Assignment(self._streams)
        self._lock = threading.RLock()
        self._wait_seconds = MIN_WAIT_SECONDS
        self._skip: IsBefore | None = None
        self._passed: set[Shard] = set()
        self._scanner = FrameScanner(self._path)
        self._items: Iterator[Frame | Damage] = iter(())
        self._ended = False
        self._passed_end: int | None = None
        self.unfinished_bytes = 0
        if reset is AutoStreamReset.LATEST:
            self.rewind(Edge.END)

    def _poll(self, seconds: float) -> Message | None:
        with self._lock:
            self._check_open()
            message = self._next_available()
            if message is None and not self._live and not self._ended:
                self._end()
            if message is None and self._ended:
                raise end_of_stream(self._path)
            if message is None:
                try:
                    self._scanner.check_in_place()
                except StreamRemovedError:
                    # Messages that were written before the removal are read first.
                    message = self._next_available()
                    if message is None and not self._ended:
                        raise
        if message is None and seconds:
            # A file sends no notification when it grows, so it is polled, at longer intervals while it does not grow.
            self._closed.wait(min(seconds, self._wait_seconds))
            self._wait_seconds = min(2 * self._wait_seconds, MAX_WAIT_SECONDS)
        elif message is not None:
            self._wait_seconds = MIN_WAIT_SECONDS
        return message

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        at = to_milliseconds(moment)
        with self._lock:
            self._check_open()
            self._move(lambda place: place.timestamp_ms < at, f"at or after {moment.isoformat()}")

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        to = rewind_target(to)
        with self._lock:
            self._check_open()
            # Beacons are read by path and messages from the open file: both must be the same file.
            self._scanner.check_in_place()
            if to is Edge.BEGINNING:
                self._go_to(HEADER_SIZE)
            elif isinstance(to, Edge):
                self._go_to_end()
            else:
                sequence = to
                self._move(lambda place: place.sequence < sequence, f"from sequence {sequence} on")

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._lock:
            self._check_open()
            self._assignment.assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._lock:
            self._check_open()
            self._assignment.unassign(shard, self._assigned())

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`."""
        self._closed.set()
        with self._lock:
            self._scanner.close()

    def _next_available(self) -> Message | None:
        if self._ended:
            return None
        message = self._next_of_pass()
        if message is None and not self._ended:
            self._items = iter(self._scanner)
            message = self._next_of_pass()
        return message

    def _next_of_pass(self) -> Message | None:
        """Return the next wanted message of this pass over the file, and note the end of the stream."""
        is_at_end = False
        for item in self._items:
            is_at_end = isinstance(item, Frame) and item.is_end_of_stream and item.offset != self._passed_end
            if isinstance(item, Damage):
                self._report(item)
            elif not item.is_control and self._is_wanted(item):
                return Message(item.shard, item.sequence, item.timestamp_ms, item.payload)
        self._ended = is_at_end and self._scanner.size <= self._scanner.offset
        return None

    def _end(self) -> None:
        """End at the end of the file, and report the bytes there that cannot be read."""
        self._ended = True
        if tail := self._scanner.unreadable_tail():
            self._report(tail)
        else:
            self.unfinished_bytes = self._scanner.incomplete_bytes

    def _is_wanted(self, frame: Frame) -> bool:
        shard = frame.shard
        if not self._assignment.is_read(shard):
            return False
        if self._skip is not None and shard not in self._passed:
            if self._skip(frame):
                return False
            self._passed.add(shard)
        return True

    def _report(self, damage: Damage) -> None:
        if damage.shard is not None and not self._assignment.is_read(damage.shard):
            return
        shard = damage.shard or Shard(min(self._streams))
        payload = self._scanner.read_bytes(damage)
        self._on_dead_letter(
            DeadLetter(shard, damage.sequence, damage.timestamp_ms, payload, damage.reason, damage.offset)
        )

    def _assigned(self) -> set[Shard]:
        """Return the assigned shards; without an explicit assignment, all shards of the file."""
        if self._assignment.chosen is not None:
            return set(self._assignment.chosen)
        with FrameScanner(self._path) as scanner:
            return {item.shard for item in scanner if item.shard is not None and item.shard in self._assignment}

    def _move(self, is_before: IsBefore, place: str) -> None:
        with BeaconSearch(self._path) as beacons, FrameScanner(self._path) as scanner:
            self._scanner.check_in_place()
            known = self._known_shards(beacons)
            first = 0 if known is None else min((beacons.last_before(shard, is_before) for shard in known), default=0)
            is_found: bool | None = None
            if first and scanner.skip_spliced(first):
                start = scanner.offset
                is_found = self._has_message(scanner, is_before)
            if is_found is None:
                # The beacon or what follows it is damaged.
                start = HEADER_SIZE
                scanner.seek(start)
                is_found = any(self._is_place(item, is_before) for item in scanner)
            if not is_found:
                raise no_message_error(place, self._path)
        self._go_to(start, is_before)

    def _has_message(self, scanner: FrameScanner, is_before: IsBefore) -> bool | None:
        """Return whether a wanted message that is not before the target follows; ``None`` if damage comes first."""
        for item in scanner:
            if isinstance(item, Damage):
                return None
            if self._is_place(item, is_before):
                return True
        return None if scanner.unreadable_tail() else False

    def _is_place(self, item: Frame | Damage, is_before: IsBefore) -> bool:
        return isinstance(item, Frame) and item.shard in self._assignment and not is_before(item)

    def _known_shards(self, beacons: BeaconSearch) -> set[Shard] | None:
        """Return the assigned shards, else those that beacons name; ``None`` if they name only some."""
        if self._assignment.chosen is not None:
            return set(self._assignment.chosen)
        named = beacons.shards()
        return None if named is None else {shard for shard in named if shard in self._assignment}

    def _go_to(self, offset: int, skip: IsBefore | None = None) -> None:
        self._scanner.seek(offset)
        self._assignment.apply()
        self._items = iter(())
        self._skip, self._passed, self._ended, self._passed_end = skip, set(), False, None

    def _go_to_end(self) -> None:
        with FrameScanner(self._path) as scanner:
            beacons = range(scanner.size // scanner.header.beacon_interval, 0, -1)
            is_intact = any(map(scanner.skip_spliced, beacons)) and not any(
                isinstance(block, Damage) for block in scanner.blocks(is_checked=False)
            )
            if not is_intact or scanner.unreadable_tail():
                # The beacon or what follows it is damaged.
                scanner.seek(HEADER_SIZE)
                deque(scanner.blocks(is_checked=False), maxlen=0)
            end, is_ended = scanner.resume_offset, scanner.resume_offset != scanner.offset
        self._go_to(end)
        # The end-of-stream message that is there now does not end the consumer, which waits for the next producer.
        self._passed_end = end if is_ended else None
