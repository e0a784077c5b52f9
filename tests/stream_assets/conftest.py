"""A browser, a table without Spark, and a folder whose name the pages of the Dagster UI can show."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_jobs.ledger.delta_log import DeltaLog
from stream_assets import materializations
from tests.support.browser import Browser, browser


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Materializations ask no Spark for the columns of the table; it has 1000 rows."""
    empty = SimpleNamespace(schema=SimpleNamespace(fields=[]))
    monkeypatch.setattr(materializations, "read_table", lambda spark, log: empty)
    monkeypatch.setattr(DeltaLog, "row_count", lambda log: 1000)


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
