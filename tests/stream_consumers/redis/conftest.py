"""Streams and servers for the tests of Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_entries import Keys
from tests.support.redis_server import redis_cluster
from tests.support.redis_streams import Place


@pytest.fixture
def place(redis_address: str) -> Iterator[Place]:
    """A stream of a real server, empty at first."""
    found = Place(redis_address)
    yield found
    found.client.close()


@pytest.fixture
def keys(redis_address: str) -> Iterator[Keys]:
    """Two streams of a real server, not there yet."""
    found = Keys(redis_address)
    yield found
    found.client.close()


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of a real cluster."""
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found
