"""The lock that lets nobody wait for a thread that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from stream_consumers.polling_lock import PollingLock
from tests.support.polling import until

PATIENCE = 60.0
Answer = TypeVar("Answer")


def in_thread(call: Callable[[], Answer]) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


def elsewhere(call: Callable[[], Answer]) -> Answer:
    thread, answers = in_thread(call)
    thread.join(PATIENCE)
    (answer,) = answers
    return answer


def test_a_poll_without_time_is_refused_beside_one_that_waits() -> None:
    lock = PollingLock()
    assert lock.acquire(60.0)
    begin = time.monotonic()
    assert elsewhere(lambda: lock.acquire(0)) is False
    assert time.monotonic() - begin < 1
    lock.release()
    assert elsewhere(lambda: lock.acquire(0)) is True


def test_a_poll_without_time_lets_another_one_end() -> None:
    lock = PollingLock()
    assert lock.acquire(0)
    thread, answers = in_thread(lambda: lock.acquire(0))
    lock.release()
    thread.join(PATIENCE)
    assert answers == [True]


def test_a_poll_without_time_gives_up_on_one_that_takes_long_all_the_same() -> None:
    lock = PollingLock()
    assert lock.acquire(0)
    assert elsewhere(lambda: lock.acquire(0)) is False


def test_a_poll_waits_as_long_as_it_has_time() -> None:
    lock = PollingLock()
    assert lock.acquire(60.0)
    begin = time.monotonic()
    assert elsewhere(lambda: lock.acquire(0.1)) is False
    assert time.monotonic() - begin >= 0.1
    thread, answers = in_thread(lambda: lock.acquire(PATIENCE))
    lock.release()
    thread.join(PATIENCE)
    assert answers == [True]


def test_who_moves_goes_before_all_who_poll() -> None:
    lock, order = PollingLock(), list[str]()
    assert lock.acquire(60.0)

    def poll() -> None:
        assert lock.acquire(PATIENCE)
        order.append("poll")
        lock.release()

    def move() -> None:
        with lock.moving():
            order.append("move")
            # Nobody polls beside it, and nobody is held up by it.
            assert elsewhere(lambda: lock.acquire(0)) is False

    polls = [in_thread(poll)[0] for _ in range(3)]
    moving, _ = in_thread(move)
    until(lambda: lock._movers == 1, seconds=PATIENCE, what="somebody who wants to move")
    assert elsewhere(lambda: lock.acquire(0)) is False
    lock.release()
    for thread in (moving, *polls):
        thread.join(PATIENCE)
    assert order == ["move", "poll", "poll", "poll"]


def test_who_has_it_may_take_it_again() -> None:
    lock = PollingLock()
    with lock.moving(), lock.moving():
        assert lock.acquire(0)
        lock.release()
        assert elsewhere(lambda: lock.acquire(0)) is False
    assert elsewhere(lambda: lock.acquire(0)) is True
