"""The error tree: what a runner decides by, and what a reader is told."""

from __future__ import annotations

import pickle

import pytest

from stream_consumers import errors
from stream_consumers.errors import InvalidStreamKeyError, StreamAssetsError, Terminal, Transient
from stream_consumers.messages import check_stream_key

LEAVES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StreamAssetsError) and kind is not StreamAssetsError
]


def test_all_leaves_are_found() -> None:
    assert len(LEAVES) >= 25


@pytest.mark.parametrize("kind", LEAVES)
def test_says_whether_trying_again_can_help(kind: type[StreamAssetsError]) -> None:
    assert issubclass(kind, Terminal) != issubclass(kind, Transient)
    assert (kind.__doc__ or "").strip()


@pytest.mark.parametrize("kind", [StreamAssetsError, *LEAVES])
def test_pickles_with_its_facts(kind: type[StreamAssetsError]) -> None:
    error = kind("orders.ss is odd", remedy="Look at it.", offset=12, path="a b")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.remedy, again.facts) == ("orders.ss is odd", "Look at it.", {"offset": 12, "path": "a b"})
    assert str(again) == str(error) == "orders.ss is odd (offset=12, path=a b). Look at it."


def test_without_numbers() -> None:
    assert str(StreamAssetsError("It is odd", remedy="Look at it.")) == "It is odd. Look at it."


def test_a_real_one_survives_a_process_boundary() -> None:
    with pytest.raises(InvalidStreamKeyError) as caught:
        check_stream_key("a b")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, Terminal)
    assert again.facts == {"length": 3}
    assert "'a b'" in str(again)
