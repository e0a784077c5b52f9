"""A ``.ss`` file that is open for reading: its header, its size, its bytes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import BrokerError, StreamExistsError, StreamNotFoundError, StreamRemovedError
from stream_consumers.file.format import HEADER_SIZE, Header


class OpenStreamFile(ClosesOnExit):
    """A stream file that is open for reading.

    Args:
        path: the file.

    Raises:
        StreamNotFoundError: there is no such file, or it may not be read.
        FormatError: it is not a stream file.
        UnsupportedVersionError: it is a stream file of a newer version.

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
        """At most ``size`` bytes from ``offset`` on; fewer at the end of the file."""
        return os.pread(self._open_descriptor(), size, offset)

    def force(self) -> None:
        """Force everything in the file to the disk, so that a power cut takes nothing of it back.

        Raises:
            BrokerError: the disk did not take it.
        """
        try:
            os.fsync(self._open_descriptor())
        except OSError as error:
            # A file system that can be read only, or that knows no such call, has nothing to force.
            if error.errno not in (errno.EROFS, errno.EINVAL, errno.ENOTSUP):
                raise BrokerError(
                    f"{self.path} is not safely on the disk: {error}", remedy="Look for errors of the disk."
                ) from error

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it: it was neither removed nor replaced by another file."""
        try:
            there = os.stat(self._place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # Nobody can tell now; what is open can be read all the same.
            return True
        return os.path.samestat(there, os.fstat(self._open_descriptor()))

    def check_kept(self, read_to: int) -> None:
        """Check that what was read is still in the file: it was neither cut nor written anew.

        Args:
            read_to: the offset behind what was read.

        Raises:
            StreamRemovedError: it was.
        """
        size = self.size
        if size < read_to:
            raise self.removed("became shorter", read=read_to, size=size)
        if self.read(0, HEADER_SIZE) != self._header_bytes:
            raise self.removed("was written anew", read=read_to, size=size)

    def removed(self, what: str, **facts: object) -> StreamRemovedError:
        """What a reader raises that can get no further in this file."""
        return StreamRemovedError(
            f"{self.path} {what} while it was read",
            remedy="Start again; if the file was replaced, give the new one another name.",
            **facts,
        )

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        # A consumer may be dropped without being closed.
        self.close()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} was closed")
        return self._descriptor


def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a stream file, as :func:`os.open` does.

    Raises:
        StreamNotFoundError: there is no such file, it is a directory, a pipe or a device, or its permissions forbid it.
        StreamExistsError: it must be new, and is there.
    """
    try:
        if not flags & os.O_EXCL:
            _check_regular(path)
        return os.open(path, flags, mode)
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
            f"there is no file {path}", remedy="Check the path, or create it: stream-assets produce file://…/KEY."
        ) from error
    except PermissionError as error:
        use = "read" if flags == os.O_RDONLY else "written"
        raise StreamNotFoundError(f"{path} may not be {use}", remedy="Change its permissions.") from error


def _check_regular(path: Path) -> None:
    """Refuse what is no regular file before it is opened: a pipe would wait for its other end."""
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
