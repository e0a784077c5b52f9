"""Errors that tests expect by type and by facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stream_consumers.errors import StreamAssetsError


@contextmanager
def raises_with(kind: type[StreamAssetsError], **facts: object) -> Iterator[None]:
    """Expect an error of this type that has these facts, and maybe more."""
    with pytest.raises(kind) as caught:
        yield
    found = caught.value.facts
    assert {name: found.get(name) for name in facts} == facts
