"""Finds a place in a ``.ss`` file through its beacons instead of reading the whole file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from stream_consumers.file.format import BeaconError, Marker, decode_beacon, marker_capacity
from stream_consumers.file.frames import Frame
from stream_consumers.file.stream_file import OpenStreamFile
from stream_consumers.messages import Shard

IsBefore = Callable[[Marker | Frame], bool]
"""Whether a message, or the last one that a beacon knows of, is before the target."""
_BEACON_WINDOWS = (4 * 1024, 80 * 1024)


def survey(count: int, is_before: Callable[[int], bool | None]) -> tuple[int, int | None]:
    """Binary search over beacons 1..count, some of which cannot tell on which side of the target they are.

    Returns:
        The last beacon that is before the target (0: the header), and the first that is not (``None``: there is none).

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
        told = next((index for index in nearest_first if before < index < behind and ask(index) is not None), None)
        if told is None:
            return before, behind if behind <= count else None
        if ask(told):
            before = told
        else:
            behind = told


class BeaconSearch(OpenStreamFile):
    """A stream file whose beacons are read one at a time.

    Example:
        >>> with BeaconSearch("orders.ss") as beacons:
        ...     beacons.last_before(Shard("orders"), lambda marker: marker.sequence < 3)
        0
    """

    @property
    def count(self) -> int:
        """The number of beacons that the file can have at its present size."""
        return self.size // self.header.beacon_interval

    def last_before(self, shard: Shard, is_before: IsBefore) -> int:
        """The number of the last beacon before every message of the shard that is not before (0: the header)."""

        def judge(index: int) -> bool | None:
            named = (marker for marker in self.markers(index) if marker.shard == shard)
            return next(map(is_before, named), None)

        return survey(self.count, judge)[0]

    def shards(self) -> set[Shard] | None:
        """The shards that the beacons name; ``None`` if one of them is full, so that there may be others."""
        found: set[Shard] = set()
        for markers in map(self.markers, range(1, self.count + 1)):
            if markers and len(markers) >= marker_capacity(self.header.beacon_interval):
                return None
            found.update(marker.shard for marker in markers)
        return found

    def markers(self, index: int) -> tuple[Marker, ...]:
        """What the beacon with this number, from 1 on, says; nothing if it is damaged or not whole yet."""
        for window in _BEACON_WINDOWS:
            try:
                found = decode_beacon(self.read(index * self.header.beacon_interval, window))
            except BeaconError:
                break
            if found:
                return found[0].markers
        return ()
