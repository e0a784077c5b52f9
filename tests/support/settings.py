"""Where the checkout is, and Spark's settings for small data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
# Where several JVMs share two cores, a third of the time of each went to the optimising compiler. Without that one the
# JVM has 48 MB for what is compiled, which these tests fill: then a tenth of the time goes into throwing methods out,
# and more into compiling them again.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"
# For some rows, what Spark does before the work costs more than the work: generating and compiling Java for each query,
# planning it again while it runs, and tasks without a row. RESTORE and VACUUM look at files in as many tasks as the
# discovery of partitions may have.
SMALL = {
    "spark.driver.extraJavaOptions": f"{QUICK_JVM} -Xmn384m",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
}
