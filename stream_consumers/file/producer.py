"""Writes ``.ss`` files: creates new ones, and appends to existing ones."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stream_consumers.errors import (
    BrokerError,
    ProducerBusyError,
    SizeLimitError,
    UntrustedFileError,
)
from stream_consumers.file.format import EOS_PAYLOAD, HEADER_SIZE, NEW_SHARD, FrameWriter, Header, ShardTail, checksum
from stream_consumers.file.scanner import AtJump, Damage, Frame, FrameScanner
from stream_consumers.file.stream_file import open_file
from stream_consumers.messages import INTERNAL_KEY, MAX_SEQUENCE, Receipt, Shard, now_milliseconds
from stream_consumers.options import FileCreation, FileProducerOptions
from stream_consumers.producer import Producer, undelivered
from stream_consumers.urls import StreamUrl

COALESCE_BYTES = 1024 * 1024
_PRIVATE = 0o600
_OF_OTHERS = 0o077
_QUEUED = "Free disk space or remove the cause, then flush again; the messages stay queued, in order."
_DROPPED = "The producer has ended. Check the last message of the file, and send the rest with another producer."
_NOT_OPENED = "Free disk space or remove the cause, then open the file again."
_log = logging.getLogger(__name__)


class FileProducer(Producer):
    """A producer of a ``.ss`` file; see :class:`stream_consumers.producer.Producer`.

    Sequences start at 1 for each shard and grow by one. Appending continues the sequences, removes an end-of-stream
    message, and cuts off an unfinished last message, whose bytes are saved next to the file with mode 0600. If the last
    bytes may contain intact messages, they stay in the file, new messages begin at a beacon after them, and each shard
    continues after as many sequences as they can hold. A lock allows one producer of a file at a time. While the file
    cannot be written (a full disk), sent messages stay queued, in order.

    Args:
        url: ``file://path/to/orders.ss/orders``; ``send`` uses its first stream by default.
        options: see :class:`stream_consumers.options.FileProducerOptions`.
        is_private: deny other users access: the file is created with mode 0600, or changed to it.

    Raises:
        StreamNotFoundError, StreamExistsError: the file does not exist, or exists, contrary to ``options.creation``.
        UntrustedFileError: with ``is_private``, the file is a symbolic link, belongs to another user, or is on a file
            system that cannot deny others access.
        ProducerBusyError: another producer has the file open.
        FormatError: the file is not a stream file.
        SizeLimitError: from ``send``: the file would exceed its limit; no part of the message is written.
        BrokerError: the file cannot be written; also from ``flush``, ``close``, or a ``send`` up to a megabyte later.

    Example:
        >>> with FileProducer("file://orders.ss/orders") as producer:
        ...     producer.send(b"the fourth one").sequence
        4
    """

    def __init__(
        self, url: str | StreamUrl, options: FileProducerOptions | None = None, *, is_private: bool = False
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._options = options or FileProducerOptions()
        self._path = Path(url.path)
        self._waiting: list[Shard] = []
        self._file = self._open_private() if is_private else self._open()
        try:
            if is_private:
                self._keep_private()
            self._claim()
            size = os.fstat(self._file).st_size
            self._writer = self._continue() if size else self._create()
        except OSError as error:
            os.close(self._file)
            raise BrokerError(f"{self._path} cannot be written: {error}", remedy=_NOT_OPENED) from error
        except BaseException:
            os.close(self._file)
            raise

    @property
    def shards(self) -> Collection[Shard]:
        """The shards of the file."""
        return self._writer.shards.keys()

    def _send(self, shard: Shard, timestamp_ms: int, payload: bytes) -> Receipt:
        with self._lock:
            self._check_not_ended()
            if self._writer.pending_bytes >= COALESCE_BYTES:
                self._write()
            sequence = self._writer.shards.get(shard, NEW_SHARD).sequence + 1
            if sequence > MAX_SEQUENCE:
                raise SizeLimitError(
                    f"{shard} has no more sequences", remedy="Continue in a new file.", last=sequence - 1
                )
            self._writer.write(shard, sequence, timestamp_ms, payload, limit=self._options.file_size_limit)
            self._waiting.append(shard)
            if self._writer.pending_bytes >= COALESCE_BYTES:
                # The next send or flush raises this error, because this message was queued.
                with suppress(BrokerError):
                    self._write()
        return Receipt(shard, sequence, timestamp_ms)

    def _flush(self) -> None:
        """Write all sent messages, so that readers see them.

        Raises:
            BrokerError: the file cannot be written; the messages stay queued.
        """
        with self._lock:
            self._check_not_ended()
            self._write()

    def _end(self) -> None:
        """Flush, write the end-of-stream message if the options say so, and sync the file to the disk."""
        with self._lock:
            try:
                if self._options.end_with_eos:
                    self._writer.write(Shard(INTERNAL_KEY), 0, now_milliseconds(), EOS_PAYLOAD)
                self._write()
                os.fsync(self._file)
            except OSError as error:
                raise BrokerError(f"{self._path} cannot be synced to the disk: {error}", remedy=_DROPPED) from error
            except BrokerError as error:
                raise undelivered(error, self._waiting, remedy=_DROPPED) from error
            finally:
                os.close(self._file)

    def _open(self, more_flags: int = 0, mode: int = 0o644) -> int:
        flags = {
            FileCreation.NEVER: os.O_RDWR,
            FileCreation.IF_MISSING: os.O_RDWR | os.O_CREAT,
            FileCreation.ALWAYS_NEW: os.O_RDWR | os.O_CREAT | os.O_EXCL,
        }[self._options.creation]
        if flags & os.O_CREAT and not self._path.exists():
            # Encode the header first, so that an invalid one creates no file.
            self._new_header().encode()
        return open_file(self._path, flags | more_flags, mode)

    def _open_private(self) -> int:
        """Open the file without following a symbolic link; a new file has the mode 0600 from the beginning."""
        try:
            return self._open(os.O_NOFOLLOW, _PRIVATE)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UntrustedFileError(
                f"{self._path} is a symbolic link", remedy="Give the path of the file itself."
            ) from error

    def _keep_private(self) -> None:
        """Check that the file belongs to this user, and deny other users access from now on."""
        found = os.fstat(self._file)
        if found.st_uid != os.geteuid():
            raise UntrustedFileError(
                f"{self._path} belongs to the user {found.st_uid}, who could read its messages",
                remedy=f"Use another file, or give this one to the user {os.geteuid()} with chown if its file system "
                "supports that.",
            )
        if found.st_mode & _OF_OTHERS:
            # A file system without modes refuses or ignores this, so the result is checked.
            with suppress(OSError):
                os.fchmod(self._file, _PRIVATE)
            mode = stat.S_IMODE(os.fstat(self._file).st_mode)
            if mode & _OF_OTHERS:
                raise UntrustedFileError(
                    f"{self._path} has the mode {mode:04o}, which its file system cannot change, so that other users "
                    "have access",
                    remedy="Use a file on another file system, or mount this one for this user only.",
                )

    def _claim(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ProducerBusyError(
                f"another producer has {self._path} open", remedy="End that one first: a file has one at a time."
            ) from error

    def _create(self) -> FrameWriter:
        header = self._new_header()
        _write_all(self._file, header.encode(), 0)
        return FrameWriter(beacon_interval=header.beacon_interval, offset=HEADER_SIZE)

    def _new_header(self) -> Header:
        return Header(self._path.name, now_milliseconds(), self._options.beacon_interval)

    def _continue(self) -> FrameWriter:
        """Scan the whole file once to find its end and the last messages of its shards.

        Readers may have read messages in an unreadable tail before it was damaged. So each shard continues after as
        many sequences as the tail can hold. Readers that begin after the tail only see the hole that follows it, which
        is at least as long, so that it explains this gap to them.
        """
        shards: dict[Shard, ShardTail] = {}
        # How many sequences such tails can hold, in all and before the last message of each shard.
        held, held_before = 0, dict[Shard, int]()
        with FrameScanner(self._path, at_jump=AtJump.DECIDE) as scanner:
            for item in _joined(scanner):
                if isinstance(item, Damage) and item.shard is None:
                    kept = scanner.without_hole(item)
                    has_hole = 2 * (kept.end - kept.offset) <= item.end - item.offset
                    held += kept.missing if has_hole else 0
                elif item.shard is not None and item.sequence is not None and item.shard.stream != INTERNAL_KEY:
                    crc = checksum(item.payload) if isinstance(item, Frame) else 0
                    state = shards.get(item.shard, NEW_SHARD)
                    shards[item.shard] = state.after(item.sequence, item.timestamp_ms or 0, crc)
                    held_before[item.shard] = held
            offset, size, interval = scanner.offset, scanner.size, scanner.header.beacon_interval
            end = scanner.resume_offset
            if tail := scanner.unreadable_tail():
                kept = scanner.without_hole(tail)
                held += kept.missing
                # Readers continue at a beacon. The hole before it takes no space on the disk.
                end = -(-max(size, 2 * kept.end - offset) // interval) * interval
        if tail:
            _log.warning(
                "%s is damaged near its end: its last %d bytes stay in it, and new messages begin at offset %d",
                self._path,
                size - offset,
                end,
            )
        elif offset < size:
            self._keep_aside(offset)
        os.ftruncate(self._file, end)
        lasts = {shard: state.sequence + held - held_before[shard] for shard, state in shards.items()}
        shards = {shard: replace(state, sequence=lasts[shard]) for shard, state in shards.items()}
        return FrameWriter(beacon_interval=interval, offset=end, shards=shards)

    def _keep_aside(self, end: int) -> None:
        """Save the bytes of an unfinished message in a file of mode 0600 before they are cut off."""
        size = os.fstat(self._file).st_size
        beside = self._path.with_name(f"{self._path.name}.tail-{end}")
        while True:
            try:
                # O_EXCL does not follow symbolic links, and fails even for a link without a target.
                saved = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
                break
            except FileExistsError:
                beside = self._path.with_name(f"{self._path.name}.tail-{end}-{time.time_ns()}")
        try:
            _write_all(saved, os.pread(self._file, size - end, end), 0)
        except OSError:
            beside.unlink()
            raise
        finally:
            os.close(saved)
        _log.warning(
            "%s ended in the middle of a message: moved its last %d bytes, from offset %d, to %s",
            self._path,
            size - end,
            end,
            beside,
        )

    def _write(self) -> None:
        if self._writer.pending_bytes:
            offset = self._writer.offset - self._writer.pending_bytes
            try:
                _write_all(self._file, self._writer.pending, offset)
            except OSError as error:
                # The next call writes all bytes again, at the same offset.
                failed = BrokerError(f"{self._path} cannot be written: {error}", remedy=_QUEUED)
                raise undelivered(failed, self._waiting, remedy=_QUEUED) from error
            self._writer.take()
            self._waiting.clear()


def _joined(items: Iterable[Frame | Damage]) -> Iterator[Frame | Damage]:
    """Yield the items, with adjacent damage without a shard as one item."""
    before: Damage | None = None
    for item in items:
        is_nameless = isinstance(item, Damage) and item.shard is None
        if before is not None and is_nameless and before.end == item.offset:
            before = before._replace(end=item.end)
            continue
        if before is not None:
            yield before
        before = item if isinstance(item, Damage) and is_nameless else None
        if before is None:
            yield item
    if before is not None:
        yield before


def _write_all(file: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
