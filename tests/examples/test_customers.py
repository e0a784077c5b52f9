"""The example with a table of a database: its changes as they came, and its state."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from stream_consumers.create import create_producer
from tests.support.debezium_messages import POSTGRES, envelope
from tests.support.settings import ROOT

EXAMPLE = ROOT / "examples" / "customers" / "definitions.py"
ADA, BOB = {"id": 1, "name": "Ada", "email": "a", "notes": "x"}, {"id": 2, "name": "Bob", "email": None, "notes": "y"}


@pytest.mark.slow
def test_the_changes_as_they_came_and_the_state(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{folder}/changes.ss/customers"
    monkeypatch.setenv("CUSTOMERS", url)
    monkeypatch.setenv("LAKE", str(folder))
    changes: list[tuple[str, dict[str, Any]]] = [("c", ADA), ("c", BOB), ("u", {**ADA, "email": "b"}), ("d", BOB)]
    with create_producer(url) as producer:
        for place, (operation, row) in enumerate(changes):
            source = {**POSTGRES, "lsn": place, "sequence": f'[null,"{place}"]'}
            side = "before" if operation == "d" else "after"
            producer.send(envelope(operation, source=source, **{side: row}))
    defs = runpy.run_path(str(EXAMPLE))["defs"]
    dg.Definitions.validate_loadable(defs)
    for job in ("ingest_customer_changes", "ingest_customers"):
        assert defs.resolve_job_def(job).execute_in_process(instance=instance).success

    def rows(table: str, *columns: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in spark.read.format("delta").load(f"{folder}/{table}").select(*columns).collect()]

    assert sorted(rows("customer_changes", "_op", "id", "email")) == [
        ("c", 1, "a"),
        ("c", 2, None),
        ("d", 2, None),
        ("u", 1, "b"),
    ]
    assert rows("customers", "id", "name", "email", "notes") == [(1, "Ada", "b", "x")]
