"""A browser, and a folder whose name the pages of the Dagster UI can show."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, browser


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser."""
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name, which is the same on all machines but for its end."""
    with tempfile.TemporaryDirectory(prefix="shop-", dir="/tmp") as made:
        yield Path(made)
