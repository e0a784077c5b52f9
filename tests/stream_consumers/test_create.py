"""Consumers are opened by what a user writes, and that may be text."""

from __future__ import annotations

import itertools

import pytest

from stream_consumers import InvalidOptionError, create_consumer, create_producer

numbers = itertools.count()


@pytest.fixture
def url() -> str:
    place = f"memory://create-{next(numbers)}/orders"
    with create_producer(place) as producer:
        producer.send(b"0")
    return place


def test_a_mode_and_a_reset_may_be_text(url: str) -> None:
    with create_consumer(url, mode="real_time", reset="latest") as consumer:  # type: ignore[arg-type]
        assert consumer.next(0) is None
    with create_consumer(url, mode="load_balanced", group="billing", live=False) as member:  # type: ignore[arg-type]
        assert [message.payload for message in member] == [b"0"]


@pytest.mark.parametrize("option", ["mode", "reset"])
def test_text_that_is_no_choice_names_the_choices(url: str, option: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"{option}='nonsense' is unknown. Use one of: "):
        create_consumer(url, **{option: "nonsense"})  # type: ignore[arg-type]
