"""A schema registry for the tests of decoders."""

from collections.abc import Iterator

import pytest

from tests.support.schema_registry import Registry, schema_registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry of this test's own."""
    with schema_registry() as running:
        yield running
