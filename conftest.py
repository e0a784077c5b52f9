"""Examples in docstrings run in a folder with a small stream file, ``orders.ss``."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_consumers.create import create_producer

# Only the environment of tools/airflow can import these.
collect_ignore = ["tests/support/airflow_dags"]


@pytest.fixture(autouse=True)
def example_files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for docstring examples: tests make their own files."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)
        with create_producer("file://orders.ss/orders") as producer:
            for index in range(3):
                producer.send(b'{"id": %d}' % index)
