"""Finding a place through the beacons: upstream's surveyor vectors, and what a beacon can tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stream_consumers.file.stream_file import BeaconSearch, survey
from stream_consumers.messages import Shard
from tests.support.ss_files import ORDERS, flip, items, numbered, write_file

TEN = range(1, 11)
SHARDS = (ORDERS, Shard("orders", 1), Shard("clicks"))


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (TEN, (3, 4)),
        (set(TEN) - {3, 4}, (2, 5)),
        ({8, 9}, (0, 8)),
        ({3}, (3, None)),
        (set(), (0, None)),
    ],
)
def test_surveyor_vectors(present: Iterable[int], expected: tuple[int, int | None]) -> None:
    judged: list[int] = []

    def is_before(index: int) -> bool | None:
        judged.append(index)
        return index <= 3 if index in present else None

    assert survey(10, is_before) == expected
    assert len(judged) == len(set(judged)), "a beacon is read once"
    assert set(judged) <= set(TEN)


def test_a_survey_is_a_binary_search() -> None:
    judged: list[int] = []
    assert survey(1_000_000, lambda index: judged.append(index) or index <= 77_777) == (77_777, 77_778)  # type: ignore[func-returns-value]
    assert len(judged) <= 21
    assert survey(0, bool) == (0, None)


def before_sequence(beacons: BeaconSearch, shard: Shard, sequence: int) -> int:
    return beacons.last_before(shard, lambda place: place.sequence < sequence)


@pytest.mark.parametrize("interval", [640, 2048])
def test_the_place_is_before_every_message_asked_for(tmp_path: Path, interval: int) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(300, shards=SHARDS, size=40), interval=interval)
    frames = items(path)
    with BeaconSearch(path) as beacons:
        assert beacons.count == path.stat().st_size // interval
        for frame in frames:
            at = frame.timestamp_ms
            by_time = beacons.last_before(frame.shard, lambda place, at=at: place.timestamp_ms < at)
            for index in (before_sequence(beacons, frame.shard, frame.sequence), by_time):
                assert index * interval <= frame.offset
                assert frame.offset - index * interval < 8 * interval
        assert before_sequence(beacons, ORDERS, 0) == 0


def test_broken_beacons_cannot_tell(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(300))
    with BeaconSearch(path) as beacons:
        known = [before_sequence(beacons, ORDERS, number) for number in range(1, 300)]
        for offset in (3 * 1024, 7 * 1024):
            flip(path, offset)
        assert beacons.markers(3) == ()
        assert beacons.markers(2)
        found = [before_sequence(beacons, ORDERS, number) for number in range(1, 300)]
    assert [index - 1 if index in {2, 3, 6, 7} else index for index in known] == found


def test_a_beacon_that_is_not_whole(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(30))
    path.write_bytes(path.read_bytes()[: 1024 + 10])
    with BeaconSearch(path) as beacons:
        assert beacons.count == 1
        assert beacons.markers(1) == ()
        assert before_sequence(beacons, ORDERS, 100) == 0
