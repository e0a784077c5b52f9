"""One empty place a test, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.contract_backends import BACKENDS, Backend, Stream


@pytest.fixture(params=BACKENDS, ids=str)
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stream]:
    """An empty stream of each backend."""
    backend: Backend = request.param
    address = request.getfixturevalue(backend.service) if backend.service else ""
    location = backend.create(tmp_path, address)
    yield Stream(location)
    backend.remove(location)
