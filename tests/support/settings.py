"""Where the checkout is, and Spark's settings for small data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
# RESTORE and VACUUM look at files in as many tasks as the last one says.
SMALL = {"spark.sql.shuffle.partitions": "2", "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2"}
# Without the optimising compiler a JVM is a quarter faster for some seconds, and a third slower after minutes.
SHORT_LIVED = {**SMALL, "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
