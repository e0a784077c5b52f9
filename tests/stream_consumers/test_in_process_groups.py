"""Groups in one process, over files and memory: who gets what, and that nothing gets lost."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stream_consumers.consumer import Consumer, Edge
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, StreamEndedError, StreamNotFoundError
from stream_consumers.messages import Message, from_milliseconds
from stream_consumers.options import AutoStreamReset, ConsumerMode, FileProducerOptions
from stream_consumers.testing.consumer_contract import median_seconds, wait_in_threads
from tests.support.polling import until
from tests.support.ss_files import START_MS, numbered, write_file

SHARED = ConsumerMode.LOAD_BALANCED
EARLIEST, LATEST = AutoStreamReset.EARLIEST, AutoStreamReset.LATEST
PATIENCE = 60.0
_numbers = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """An empty stream."""
    if request.param == "memory":
        return f"memory://groups-{next(_numbers)}/orders"
    create_producer(f"file://{path}/orders", producer_options=FileProducerOptions(beacon_interval=1024)).close()
    return f"file://{path}/orders"


def member(url: str, group: str = "g", *, reset: AutoStreamReset = EARLIEST, live: bool = True) -> Consumer:
    return create_consumer(url, mode=SHARED, group=group, reset=reset, live=live)


def send(url: str, numbers: Iterable[int]) -> int:
    """Send these; returns the sequence of the first."""
    with create_producer(url) as producer:
        receipts = [producer.send(b"%d" % n, timestamp_ms=START_MS + n) for n in numbers]
    return receipts[0].sequence


def take(consumer: Consumer, count: int) -> list[int]:
    found = [consumer.next(PATIENCE) for _ in range(count)]
    return numbers(message for message in found if message)


def take_all(consumer: Consumer) -> list[int]:
    """What there is without waiting."""
    return numbers(iter(lambda: consumer.next(0), None))


def numbers(found: Iterable[Message | None]) -> list[int]:
    return [int(message.payload or b"") for message in found if message]


def open_files(path: Path) -> int:
    """How often this process has a file open."""
    links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return sum(1 for link in links if link.is_symlink() and os.readlink(link) == str(path))


# Upstream's tests


def test_group_by_sequence_in_the_order_of_joining(path: Path) -> None:
    """F-group, with SeaStreamer's numbers from 0."""
    every = numbered(130, first=0)
    write_file(path, every[:100])
    url = f"file://{path}/orders"
    with member(url) as chip, member(url) as dale:
        assert open_files(path) == 1
        evens, odds = ([chip.next(PATIENCE) for _ in range(50)], [dale.next(PATIENCE) for _ in range(50)])
        assert [m.sequence for m in evens if m] == list(range(0, 100, 2))
        assert [m.sequence for m in odds if m] == list(range(1, 100, 2))
        with member(url) as donald:
            write_file(path, every)
            for remainder, consumer in enumerate((chip, dale, donald)):
                found = [consumer.next(PATIENCE) for _ in range(10)]
                assert [m.sequence for m in found if m] == [n for n in range(100, 130) if n % 3 == remainder]
                assert consumer.next(0) is None
            assert open_files(path) == 1
    assert open_files(path) == 0


def test_seek_in_a_group_leaves_it(url: str) -> None:
    """F-seek, grouped."""
    with member(url) as alone:
        first = send(url, range(100))
        assert take(alone, 100) == list(range(100))
        alone.rewind(Edge.BEGINNING)
        assert take_all(alone) == list(range(100))
        for start in (25, 50, 75, 99):
            alone.rewind(first + start)
            assert take_all(alone) == list(range(start, 100))
        alone.seek(from_milliseconds(START_MS + 40))
        assert take_all(alone) == list(range(40, 100))


# sharing


def test_groups_do_not_take_from_each_other(url: str) -> None:
    send(url, range(10))
    with member(url, "g") as one, member(url, "h") as other, create_consumer(url) as nobody:
        for consumer in (one, other, nobody):
            assert take_all(consumer) == list(range(10))


def test_what_a_member_was_not_handed_out_goes_to_the_others_in_order(url: str) -> None:
    with member(url) as one, member(url) as other:
        leaving = member(url)
        send(url, range(30))
        # It reads for all three, so that messages wait for each of the others, too.
        found = take(other, 4) + take(leaving, 1)
        leaving.close()
        for consumer in (one, other):
            rest = take_all(consumer)
            assert rest == sorted(rest)
            found += rest
        assert sorted(found) == list(range(30))
        with pytest.raises(StreamEndedError):
            leaving.next(0)


def test_a_member_that_moves_gives_its_messages_back(url: str) -> None:
    send(url, range(10))
    with member(url) as staying, member(url) as moving:
        before = take(staying, 5)
        moving.rewind(Edge.BEGINNING)
        assert take_all(moving) == list(range(10))
        assert sorted(before + take_all(staying)) == list(range(10))


# ends and threads


def test_the_end_of_a_replay_is_the_end_for_every_member(url: str) -> None:
    send(url, range(10))
    with member(url, live=False) as one, member(url, live=False) as other:
        found = numbers(one)
        with pytest.raises(StreamEndedError):
            one.next()
        assert sorted(found + numbers(other)) == list(range(10))


def test_an_end_of_stream_ends_a_live_group(path: Path) -> None:
    url = f"file://{path}/orders"
    options = FileProducerOptions(beacon_interval=1024, end_with_eos=True)
    with create_producer(url, producer_options=options) as producer, member(url) as one, member(url) as other:
        for number in range(10):
            producer.send(b"%d" % number)
        producer.close()
        assert sorted(numbers(one) + numbers(other)) == list(range(10))


def test_many_threads_and_members_share_everything(url: str) -> None:
    found: list[Message] = []
    consumers = [member(url) for _ in range(3)]

    def consume(consumer: Consumer) -> None:
        found.extend(consumer)

    threads = [threading.Thread(target=consume, args=(consumer,)) for consumer in consumers for _ in range(2)]
    for thread in threads:
        thread.start()
    for begin in range(0, 600, 100):
        send(url, range(begin, begin + 100))
    until(lambda: len(found) >= 600, what="600 messages")
    for consumer in consumers:
        consumer.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(numbers(found)) == list(range(600))


def test_a_thread_that_waits_goes_on_where_its_member_was_moved_to(url: str) -> None:
    for others in range(2):
        first = send(url, range(4))
        with contextlib.ExitStack() as stack:
            moving, *_ = [stack.enter_context(member(url, reset=LATEST)) for _ in range(1 + others)]
            (waiting,), found = wait_in_threads(moving, 1)
            moving.rewind(first + 1)
            waiting.join(PATIENCE)
            assert numbers(found) == [1]
            assert take(moving, 2) == [2, 3]


def test_a_member_that_was_dropped_gives_its_messages_back(url: str) -> None:
    with member(url) as staying:
        dropped = member(url)
        send(url, range(10))
        found = take(staying, 4)
        del dropped
        assert sorted(found + take_all(staying)) == list(range(10))
        send(url, range(10, 20))
        assert take_all(staying) == list(range(10, 20))


def test_a_group_whose_members_were_all_dropped_is_over(url: str, path: Path) -> None:
    send(url, range(4))
    alone = member(url)
    moved = member(url)
    moved.rewind(Edge.BEGINNING)
    assert take(alone, 2) == [0, 1]
    del alone
    with member(url) as again:
        assert take_all(again) == [0, 1, 2, 3]
    moved.close()
    last = member(url)
    del moved, last
    gc.collect()
    assert open_files(path) == 0


def test_0_never_waits_beside_members_that_wait(url: str) -> None:
    with member(url) as one, member(url) as other:
        threads, _ = wait_in_threads(one, 3)
        for consumer in (one, other):
            assert median_seconds(lambda consumer=consumer: consumer.next(0)) < 0.05
        assert all(thread.is_alive() for thread in threads)


# what cannot be


@pytest.mark.parametrize(
    "options",
    [
        {"group": None},
        {"group": ""},
        {"mode": ConsumerMode.REAL_TIME},
        {"mode": ConsumerMode.RESUMABLE},
        {"reset": LATEST},
        {"live": False},
    ],
)
def test_what_cannot_be(url: str, options: dict[str, Any]) -> None:
    with member(url):
        with pytest.raises(InvalidOptionError):
            create_consumer(url, **{"mode": SHARED, "group": "g", **options})
        with pytest.raises(InvalidOptionError):
            member(f"{url},clicks")


def test_a_group_whose_file_is_missing_is_not_kept(path: Path) -> None:
    url = f"file://{path}/orders"
    for _ in range(2):
        with pytest.raises(StreamNotFoundError):
            member(url)
    send(url, range(3))
    with member(url) as consumer:
        assert take_all(consumer) == [0, 1, 2]
