"""Large batch metadata as short texts: what is known of hundreds of shards are columns of numbers, and compressed.

Texts of usual size stay JSON that people can read in ``DESCRIBE HISTORY``. In a large one each object whose keys are
shards and whose values are whole numbers, or equally many of them, is a table. Its numbers are laid out by
significance, the high bytes of all first: those hardly differ between shards, and what stands in several tables, like
the position and the start of the range behind it, is there once after compression.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from stream_consumers.errors import InvalidUrlError
from stream_consumers.messages import Shard

LARGEST_PLAIN = 4096
"""Bytes of a text that is left as it is."""
LARGEST_UNPACKED = 64 * 1024 * 1024
"""Bytes of a text after it is unpacked: a million shards take half of it."""
LARGEST_SKELETON = 4 * 1024 * 1024
"""Bytes of its JSON, each of which may become 25 in memory."""
MOST_ROWS = 2_000_000
"""Rows of all tables of a text, each of which takes some hundred bytes in memory."""
_FEWEST_ROWS = 8
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_COLUMNS = "\0columns"
_REST = "\0rest"


def pack(document: Mapping[str, object]) -> str:
    """JSON of the document, compressed, in characters that need no escape in JSON.

    Example:
        >>> document = {"ranges": {f"orders/{number}": [number, number + 5] for number in range(1000)}}
        >>> packed = pack(document)
        >>> len(packed) < 1000, unpack(packed) == document
        (True, True)
    """
    planes: list[bytes] = []
    skeleton = json.dumps(_without_tables(document, planes), separators=(",", ":")).encode()
    return base64.b85encode(zlib.compress(b"%d\n" % len(skeleton) + skeleton + b"".join(planes))).decode()


def unpack(text: str) -> Any:
    """Read :func:`pack` back.

    Raises:
        ValueError: it is none.
    """
    try:
        unpacker = zlib.decompressobj()
        size, _, left = unpacker.decompress(base64.b85decode(text), LARGEST_UNPACKED).partition(b"\n")
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError(f"it is cut, or has more than {LARGEST_UNPACKED:,} bytes")
    if not 0 < int(size) <= LARGEST_SKELETON:
        raise ValueError(f"it has {int(size):,} bytes of JSON, more than {LARGEST_SKELETON:,}")
    planes = _Planes(left[int(size) :])
    found = _with_tables(json.loads(left[: int(size)]), planes)
    planes.check_end()
    return found


def _without_tables(value: object, planes: list[bytes]) -> object:
    if not isinstance(value, Mapping):
        return value
    rows = {key: row for key, cell in value.items() if (row := _row(key, cell)) is not None}
    if len(rows) < _FEWEST_ROWS:
        return {key: _without_tables(cell, planes) for key, cell in value.items()}
    listed = sorted((*row, key) for key, row in rows.items())
    groups = []
    for (stream, is_list, width), found in groupby(listed, key=lambda row: (row[0], row[1], len(row[3]))):
        part = list(found)
        ids = np.array([row[2] for row in part], "<i8")
        groups.append([stream, is_list, width, len(part)])
        cells = np.array([row[3] for row in part], "<i8")
        planes += [_plane(np.diff(ids, prepend=0)), *(_plane(cells[:, column]) for column in range(width))]
    rest = {key: _without_tables(cell, planes) for key, cell in value.items() if key not in rows}
    return {_COLUMNS: groups, _REST: rest}


def _row(key: object, cell: object) -> tuple[str, bool, int, list[Any]] | None:
    """Stream, whether the numbers are a list, shard id and numbers; ``None`` if this is nothing for a table."""
    numbers = list(cell) if isinstance(cell, (list, tuple)) else [cell]
    if not numbers or not all(type(n) is int and _LOWEST <= n <= _HIGHEST for n in numbers):
        return None
    try:
        shard = Shard.parse(str(key))
    except InvalidUrlError:
        return None
    return (shard.stream, isinstance(cell, (list, tuple)), shard.id, numbers) if str(shard) == key else None


def _with_tables(value: object, planes: _Planes) -> object:
    if not isinstance(value, dict):
        return value
    if _COLUMNS not in value:
        return {key: _with_tables(cell, planes) for key, cell in value.items()}
    found: dict[str, object] = {}
    for stream, is_list, width, count in value[_COLUMNS]:
        planes.count_rows(count, width)
        ids = np.cumsum(planes.next(count)).tolist()
        columns = [planes.next(count).tolist() for _ in range(width)]
        for number, *cells in zip(ids, *columns):
            found[str(Shard(stream, number))] = cells if is_list else cells[0]
    return found | {key: _with_tables(cell, planes) for key, cell in value[_REST].items()}


def _plane(numbers: Any) -> bytes:
    return bytes(numbers.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes())


class _Planes:
    """The columns, one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        self._rows = 0

    def count_rows(self, count: int, width: int) -> None:
        """Count a table.

        Raises:
            ValueError: it has no columns, or there are too many rows.
        """
        self._rows += count
        if width < 1 or self._rows > MOST_ROWS:
            raise ValueError(f"it has a table of {count} rows and {width} columns, {self._rows} rows in all")

    def next(self, count: int) -> Any:
        """The numbers of the next column.

        Raises:
            ValueError: there are fewer.
        """
        start, self._at = self._at, self._at + 8 * count
        if not start < self._at <= len(self._content):
            raise ValueError(
                f"a column of {count} numbers is not in the {len(self._content) - start} bytes that are left"
            )
        own = np.frombuffer(self._content, np.uint8, 8 * count, start)
        return own.reshape(8, count).T.copy().view("<i8").reshape(count)

    def check_end(self) -> None:
        """Check that there is no other column.

        Raises:
            ValueError: there is.
        """
        if self._at != len(self._content):
            raise ValueError(f"{len(self._content) - self._at} bytes are of no column")
