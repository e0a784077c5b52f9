"""What the tests of batches share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kafka_topics import Broker


@pytest.fixture
def broker(kafka: str) -> Iterator[Broker]:
    """The broker; the topics that a test makes there are gone after it."""
    with Broker(kafka) as made:
        yield made
