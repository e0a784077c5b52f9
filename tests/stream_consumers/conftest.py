"""The stream file of a test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.ss"


@pytest.fixture
def url(path: Path) -> str:
    return f"file://{path}/orders"
