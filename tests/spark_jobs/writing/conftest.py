"""A stream in memory for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from stream_consumers.memory import forget_memory_broker
from stream_consumers.urls import StreamUrl


@pytest.fixture
def url() -> Iterator[StreamUrl]:
    made = StreamUrl.parse(f"memory://{uuid.uuid4().hex}/orders")
    yield made
    forget_memory_broker(made)
