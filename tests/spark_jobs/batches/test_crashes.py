"""Payloads that crash their decoder: they become dead letters, and nothing else does, wherever they are decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.crashing import HUNGRY, SEGFAULT, Crashing, assert_refused, write_crashing
from tests.support.ingesting import drain, ingestion
from tests.support.streams import assert_each_once, sequences_in_table

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("driver_records", [1000, 0], ids=["driver", "workers"])
def test_payloads_that_crash_the_decoder_are_dead_letters(
    driver_records: int, spark: SparkSession, folder: Path
) -> None:
    url = write_crashing(folder / "orders.ss", 100, segfault=17, hungry=80)
    what = replace(ingestion(folder / "t", decoder=Crashing()), driver_records=driver_records)
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead, sum(report.messages.values()), sum(report.lag.values())) == (98, 2, 98, 0)
    assert_refused(folder / "t", SEGFAULT, HUNGRY)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert sum(sequences_in_table(folder / "t").values()) == 98
