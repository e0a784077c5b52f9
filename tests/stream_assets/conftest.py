"""A table without Spark."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spark_jobs.ledger.delta_log import DeltaLog
from stream_assets import materializations


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Materializations ask no Spark for the columns of the table; it has 1000 rows."""
    empty = SimpleNamespace(schema=SimpleNamespace(fields=[]))
    monkeypatch.setattr(materializations, "read_table", lambda spark, log: empty)
    monkeypatch.setattr(DeltaLog, "row_count", lambda log: 1000)
