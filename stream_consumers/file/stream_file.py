"""A ``.ss`` file that is open for reading: its header, its size, its bytes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import StreamNotFoundError
from stream_consumers.file.format import HEADER_SIZE, Header


class StreamFile(ClosesOnExit):
    """A stream file that is open for reading.

    Args:
        path: the file.

    Raises:
        StreamNotFoundError: there is no such file, or it may not be read.
        FormatError: it is not a stream file.
        UnsupportedVersionError: it is a stream file of a newer version.

    Example:
        >>> with StreamFile("orders.ss") as file:
        ...     file.header.beacon_interval, file.read(0, 2)
        (1048576, b'Ss')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = _open(self.path)
        try:
            self.header = Header.decode(self.read(0, HEADER_SIZE), path=self.path)
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

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} was closed")
        return self._descriptor


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError
        return descriptor
    except IsADirectoryError as error:
        raise StreamNotFoundError(
            f"{path} is a directory, not a stream file",
            remedy="In a file:// URL the stream key comes after the file: file://path/to/orders.ss/orders.",
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StreamNotFoundError(
            f"there is no file {path}", remedy="Check the path, or create it: stream-assets produce file://…/KEY."
        ) from error
    except PermissionError as error:
        raise StreamNotFoundError(f"{path} may not be read", remedy="Change its permissions.") from error
