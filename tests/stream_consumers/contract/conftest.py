"""The contract suite's harness for each of our backends, and an empty place a test for what is tested beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_consumers.testing.harness import Harness, Stream
from tests.support.contract_backends import BACKENDS, Backend


@pytest.fixture(params=BACKENDS, ids=str)
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each backend, with its server."""
    backend: Backend = request.param
    return backend.harness(request.getfixturevalue(backend.service) if backend.service else "")


@pytest.fixture
def stream(harness: Harness, tmp_path: Path) -> Iterator[Stream]:
    """An empty stream of each backend."""
    location = harness.create(tmp_path)
    yield Stream(location)
    harness.remove(location)
