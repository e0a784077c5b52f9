"""Reads an open ``.ss`` file: its header, its size, its bytes, its beacons."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import BrokerError, StreamExistsError, StreamNotFoundError, StreamRemovedError
from stream_consumers.file.format import HEADER_SIZE, BeaconError, Header, Marker, decode_beacon, marker_capacity
from stream_consumers.messages import Shard

# How many bytes to read for a beacon: few at first, then as many as it can have.
_BEACON_WINDOWS = (4 * 1024, 80 * 1024)
# How many of the last bytes that were read are compared before a reader continues.
KEPT_BYTES = 64


class OpenStreamFile(ClosesOnExit):
    """A stream file that is open for reading.

    Args:
        path: the file.

    Raises:
        StreamNotFoundError: the file does not exist, or its permissions forbid reading it.
        FormatError: the file is not a stream file.
        UnsupportedVersionError: the file has a newer version of the format.

    Example:
        >>> with OpenStreamFile("orders.ss") as file:
        ...     file.header.beacon_interval, file.read(0, 2)
        (1048576, b'Ss')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # The working directory may change while the file is open.
        self._place = self.path.absolute()
        self._descriptor: int | None = None
        # The last bytes that were read, and their offset.
        self._last_read = (0, b"")
        self._descriptor = open_file(self.path, os.O_RDONLY)
        try:
            self._header_bytes = self.read(0, HEADER_SIZE)
            self.header = Header.decode(self._header_bytes, path=self.path)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The size of the file now, in bytes."""
        return os.fstat(self._open_descriptor()).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes from ``offset`` on; fewer at the end of the file."""
        return os.pread(self._open_descriptor(), size, offset)

    def force(self) -> None:
        """Sync the file to the disk, so that a power cut cannot revert it.

        Raises:
            BrokerError: the sync failed.
        """
        try:
            os.fsync(self._open_descriptor())
        except OSError as error:
            # On a read-only file system, or one without this call, there is nothing to sync.
            if error.errno not in (errno.EROFS, errno.EINVAL, errno.ENOTSUP):
                raise BrokerError(
                    f"{self.path} cannot be synced to the disk: {error}", remedy="Check the disk for errors."
                ) from error

    @property
    def is_in_place(self) -> bool:
        """Whether the path still names this file: it was neither removed nor replaced by another file."""
        try:
            there = os.stat(self._place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # The path cannot be checked now, but the open file can still be read.
            return True
        return os.path.samestat(there, os.fstat(self._open_descriptor()))

    def note_read(self, read_to: int) -> None:
        """Note the last bytes before an offset for :meth:`check_kept`."""
        begin = max(0, read_to - KEPT_BYTES)
        self._last_read = (begin, self.read(begin, read_to - begin))

    def check_kept(self, read_to: int) -> None:
        """Check that the bytes that were read are still in the file: its header, and those noted.

        Args:
            read_to: the offset after the bytes that were read.

        Raises:
            StreamRemovedError: the file was truncated or rewritten.
        """
        size = self.size
        if size < read_to:
            raise self.removed("became shorter", read=read_to, size=size)
        begin, last_read = self._last_read
        if self.read(0, HEADER_SIZE) != self._header_bytes or self.read(begin, len(last_read)) != last_read:
            raise self.removed("was rewritten", read=read_to, size=size)

    def removed(self, what: str, **facts: object) -> StreamRemovedError:
        """Return the error to raise if a reader cannot continue in this file."""
        return StreamRemovedError(
            f"{self.path} {what} while it was read",
            remedy="Restart the reader. If the file was replaced, give the new one another name.",
            **facts,
        )

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        # A consumer may be garbage-collected without being closed.
        self.close()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} was closed")
        return self._descriptor


def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a stream file, as :func:`os.open` does.

    Raises:
        StreamNotFoundError: the file does not exist, is a directory, a pipe or a device, or its permissions forbid it.
        StreamExistsError: the file must be new, but exists.
    """
    try:
        if not flags & os.O_EXCL:
            _check_regular(path)
        # A pipe may have taken the place of the file since the check.
        return os.open(path, flags | os.O_NONBLOCK, mode)
    except FileExistsError as error:
        raise StreamExistsError(f"{path} exists already", remedy="Remove it, or append to it.") from error
    except IsADirectoryError as error:
        raise StreamNotFoundError(
            f"{path} is a directory, not a stream file",
            remedy="In a file:// URL the stream key comes after the file: file://path/to/orders.ss/orders.",
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        if flags & os.O_CREAT:
            raise StreamNotFoundError(f"{path.parent} does not exist", remedy="Create it first.") from error
        raise StreamNotFoundError(
            f"the file {path} does not exist",
            remedy="Check the path, or create it: stream-assets produce file://…/KEY.",
        ) from error
    except PermissionError as error:
        use = "read" if flags == os.O_RDONLY else "written"
        raise StreamNotFoundError(f"{path} cannot be {use}", remedy="Change its permissions.") from error


def _check_regular(path: Path) -> None:
    """Refuse anything but a regular file before it is opened: a pipe would wait for its other end."""
    try:
        found = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found):
        raise IsADirectoryError
    if not stat.S_ISREG(found):
        raise StreamNotFoundError(
            f"{path} is a pipe, a socket or a device, not a stream file",
            remedy="Name a regular file. To read lines from a pipe, use stdio:///KEY.",
        )


def survey(count: int, is_before: Callable[[int], bool | None]) -> tuple[int, int | None]:
    """Search beacons 1..count by bisection; some do not reveal on which side of the target they are.

    Returns:
        The last beacon that is before the target (0: the header), and the first that is not (``None``: all are).

    Example:
        >>> survey(10, lambda index: index <= 3)
        (3, 4)
    """
    ask = cache(is_before)
    before, behind = 0, count + 1
    while True:
        middle = (before + behind) // 2
        distances = range(max(middle - before, behind - middle))
        nearest_first = (index for distance in distances for index in (middle + distance, middle - distance))
        known = next((index for index in nearest_first if before < index < behind and ask(index) is not None), None)
        if known is None:
            return before, behind if behind <= count else None
        if ask(known):
            before = known
        else:
            behind = known


class BeaconSearch(OpenStreamFile):
    """A stream file whose beacons are read one by one.

    Example:
        >>> with BeaconSearch("orders.ss") as beacons:
        ...     beacons.last_before(Shard("orders"), lambda marker: marker.sequence < 3)
        0
    """

    @property
    def count(self) -> int:
        """The number of beacons that the file can have at its present size."""
        return self.size // self.header.beacon_interval

    def last_before(self, shard: Shard, is_before: Callable[[Marker], bool]) -> int:
        """Return a late beacon before every message of the shard that is not before the target (0: the header).

        No checksum covers a beacon, so two must agree: the last one before these messages, and the one before that,
        which is returned.
        """

        def judge(index: int) -> bool | None:
            named = (marker for marker in self.markers(index) if marker.shard == shard)
            return next(map(is_before, named), None)

        last = survey(self.count, judge)[0]
        others = ((index, judge(index)) for index in range(last - 1, 0, -1))
        index, is_confirmed = next((other for other in others if other[1] is not None), (0, None))
        return index if is_confirmed else 0

    def shards(self) -> set[Shard] | None:
        """Return the shards that the beacons name; ``None`` if a beacon is full, so that others may be missing."""
        found: set[Shard] = set()
        for markers in map(self.markers, range(1, self.count + 1)):
            if markers and len(markers) >= marker_capacity(self.header.beacon_interval):
                return None
            found.update(marker.shard for marker in markers)
        return found

    def markers(self, index: int) -> tuple[Marker, ...]:
        """Return the markers of the beacon with this number, from 1 on; none if it is damaged or incomplete."""
        for window in _BEACON_WINDOWS:
            try:
                found = decode_beacon(self.read(index * self.header.beacon_interval, window))
            except BeaconError:
                break
            if found:
                return found[0].markers
        return ()
