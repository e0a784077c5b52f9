"""Finds a place in a ``.ss`` file through its beacons instead of reading the whole file."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator

from stream_consumers.closing import ClosesOnExit
from stream_consumers.file.format import HEADER_SIZE, Beacon, BeaconError, Marker, decode_beacon, marker_capacity
from stream_consumers.file.stream_file import StreamFile
from stream_consumers.messages import Shard

_BEACON_WINDOWS = (4 * 1024, 80 * 1024)


class Side(enum.Enum):
    """The direction of the target, seen from a beacon."""

    AHEAD = "ahead"
    BEHIND = "behind"
    UNDECIDED = "undecided"


def survey(count: int, judge: Callable[[int], Side]) -> tuple[int, int | None]:
    """Binary search over beacons 1..count, some of which cannot tell the direction.

    Returns:
        The last beacon that has the target ahead (0: the header), and the first that has it behind (``None``: none).

    Example:
        >>> survey(10, lambda index: Side.AHEAD if index <= 3 else Side.BEHIND)
        (3, 4)
    """
    ahead, behind = 0, count + 1
    judged: dict[int, Side] = {}
    while behind - ahead > 1:
        for index in _outward(ahead, behind):
            if index not in judged:
                judged[index] = judge(index)
            if judged[index] is not Side.UNDECIDED:
                break
        else:
            break
        if judged[index] is Side.AHEAD:
            ahead = index
        else:
            behind = index
    return ahead, behind if behind <= count else None


def _outward(low: int, high: int) -> Iterator[int]:
    """The whole numbers between ``low`` and ``high``, both excluded, from the middle outward."""
    middle = (low + high) // 2
    yield middle
    for distance in range(1, high - low):
        if middle + distance < high:
            yield middle + distance
        if middle - distance > low:
            yield middle - distance


class BeaconSearch(ClosesOnExit):
    """The beacons of one file, read one at a time.

    Example:
        >>> with BeaconSearch("orders.ss") as beacons:
        ...     beacons.offset(beacons.before_sequence(Shard("orders"), 3))
        128
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = StreamFile(path)
        self._interval = self._file.header.beacon_interval

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def count(self) -> int:
        """The number of beacons that the file can have at its present size."""
        return self._file.size // self._interval

    def offset(self, index: int) -> int:
        """The file offset of a beacon; index 0 stands for the first frame behind the header."""
        return index * self._interval if index else HEADER_SIZE

    def before_sequence(self, shard: Shard, sequence: int) -> int:
        """The last beacon before every message of the shard from ``sequence`` on (0: the header)."""
        return self._search(shard, lambda marker: marker.sequence < sequence)

    def before_timestamp(self, shard: Shard, timestamp_ms: int) -> int:
        """The last beacon before every message of the shard at or after this time (0: the header)."""
        return self._search(shard, lambda marker: marker.timestamp_ms < timestamp_ms)

    def _search(self, shard: Shard, is_ahead: Callable[[Marker], bool]) -> int:
        def judge(index: int) -> Side:
            beacon = self.read(index)
            for marker in beacon.markers if beacon else ():
                if marker.shard == shard:
                    return Side.AHEAD if is_ahead(marker) else Side.BEHIND
            return Side.UNDECIDED

        return survey(self.count, judge)[0]

    def shards(self) -> set[Shard] | None:
        """The shards that the beacons name; ``None`` if one of them is full, so that there may be others."""
        found: set[Shard] = set()
        capacity = marker_capacity(self._interval)
        for beacon in map(self.read, range(1, self.count + 1)):
            if beacon and len(beacon.markers) >= capacity:
                return None
            found.update(marker.shard for marker in (beacon.markers if beacon else ()))
        return found

    def read(self, index: int) -> Beacon | None:
        """The beacon at ``index``; ``None`` if it is damaged or not whole yet."""
        for window in _BEACON_WINDOWS:
            try:
                found = decode_beacon(self._file.read(index * self._interval, window))
            except BeaconError:
                return None
            if found:
                return found[0]
        return None
