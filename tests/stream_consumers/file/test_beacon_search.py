"""Finding a place through the beacons: upstream's surveyor vectors, and what a beacon can tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stream_consumers.errors import FormatError, StreamNotFoundError
from stream_consumers.file.beacon_search import BeaconSearch, Side, survey
from stream_consumers.messages import Shard
from tests.support.ss_files import ORDERS, START_MS, flip, items, numbered, write_file

TEN = range(1, 11)
SHARDS = (ORDERS, Shard("orders", 1), Shard("clicks"))


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (TEN, (3, 4)),
        (set(TEN) - {4}, (3, 5)),
        (set(TEN) - {3, 4}, (2, 5)),
        ({1, 8, 9}, (1, 8)),
        ({8, 9}, (0, 8)),
        ({3}, (3, None)),
        ({8}, (0, 8)),
        (set(), (0, None)),
    ],
)
def test_surveyor_vectors(present: Iterable[int], expected: tuple[int, int | None]) -> None:
    judged: list[int] = []

    def judge(index: int) -> Side:
        judged.append(index)
        if index not in present:
            return Side.UNDECIDED
        return Side.AHEAD if index <= 3 else Side.BEHIND

    assert survey(10, judge) == expected
    assert len(judged) == len(set(judged)), "a beacon is read once"
    assert set(judged) <= set(TEN)


def test_a_survey_is_a_binary_search() -> None:
    judged: list[int] = []

    def judge(index: int) -> Side:
        judged.append(index)
        return Side.AHEAD if index <= 77_777 else Side.BEHIND

    assert survey(1_000_000, judge) == (77_777, 77_778)
    assert len(judged) <= 21
    assert survey(0, judge) == (0, None)


@pytest.mark.parametrize("interval", [640, 1024, 2048])
def test_the_place_is_before_every_message_asked_for(tmp_path: Path, interval: int) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(300, shards=SHARDS, size=40), interval=interval)
    frames = items(path)
    with BeaconSearch(path) as beacons:
        assert beacons.count == path.stat().st_size // interval
        for shard in SHARDS:
            own = [frame for frame in frames if frame.shard == shard]
            for frame in own:
                assert frame.sequence is not None
                assert frame.timestamp_ms is not None
                by_sequence = beacons.before_sequence(shard, frame.sequence)
                by_time = beacons.before_timestamp(shard, frame.timestamp_ms)
                for index in (by_sequence, by_time):
                    assert beacons.offset(index) <= frame.offset
                    assert frame.offset - beacons.offset(index) < 5 * interval
            assert beacons.before_sequence(shard, 0) == 0
            assert beacons.before_timestamp(shard, START_MS) == 0


def test_broken_beacons_cannot_tell(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(300))
    with BeaconSearch(path) as beacons:
        known = [beacons.before_sequence(ORDERS, number) for number in range(1, 300)]
        for offset in (3 * 1024, 7 * 1024):
            flip(path, offset)
        assert beacons.read(3) is None
        assert beacons.read(2) is not None
        found = [beacons.before_sequence(ORDERS, number) for number in range(1, 300)]
    assert [index - 1 if index in {3, 7} else index for index in known] == found


def test_a_beacon_that_is_not_whole(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(30))
    path.write_bytes(path.read_bytes()[: 1024 + 10])
    with BeaconSearch(path) as beacons:
        assert beacons.count == 1
        assert beacons.read(1) is None
        assert beacons.before_sequence(ORDERS, 100) == 0


def test_no_stream_file(tmp_path: Path) -> None:
    with pytest.raises(StreamNotFoundError):
        BeaconSearch(tmp_path / "nothing.ss")
    (tmp_path / "text").write_text("x")
    with pytest.raises(FormatError):
        BeaconSearch(tmp_path / "text")
