"""What the tests of batches share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.kafka_topics import Topics


@pytest.fixture
def topics(kafka: str, spark: SparkSession, folder: Path) -> Iterator[Topics]:
    """The broker; the topics that a test makes there are gone after it."""
    made = Topics(kafka, spark, folder)
    with made:
        yield made
