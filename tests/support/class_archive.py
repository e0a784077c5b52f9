"""The classes of Spark as a JVM has them in memory: who maps them needs two fifths less CPU until its first commits.

``make tests`` makes the archive once. A JVM whose classes are others, or that finds no archive, goes on without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from spark_jobs.jars import cache_folder
from spark_jobs.session import SparkOptions, create_session
from tests.support.ingesting import drain, ingestion
from tests.support.settings import QUICK_JVM
from tests.support.spark_connect import connect_server
from tests.support.streams import write_stream

OPTIONS_VARIABLE = "SPARK_SUBMIT_OPTS"
"""Options of the JVMs that Spark's own scripts start."""
ARCHIVE = "spark-classes.jsa"
WRITE_SECONDS = 300.0
"""How long a JVM has to write the archive when it ends, in seconds: less than 30 alone, 120 beside a test run."""


def quick_options() -> str:
    """For a JVM of Spark that lives for some minutes: the archive, and no optimising compiler."""
    archive = f"-XX:SharedArchiveFile={cache_folder() / ARCHIVE} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
    return f"{QUICK_JVM} {archive}"


def make_archive() -> None:
    """Run Spark Connect until it has done what the tests do, and keep what it has loaded."""
    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), cache_folder() / f"{ARCHIVE}.new"
        os.environ[OPTIONS_VARIABLE] = f"-XX:ArchiveClassesAtExit={made} -Xlog:cds=off -Xlog:cds+dynamic=off"
        with connect_server(folder, stop_seconds=WRITE_SECONDS) as address:
            spark = create_session(SparkOptions(remote=address))
            what = ingestion(folder / "t", records=20)
            drain(spark, write_stream(folder / "orders.ss", 40, malformed=frozenset({7})), what)
            for statement in ("OPTIMIZE {}", "DELETE FROM {} WHERE id = 3", "RESTORE {} TO VERSION AS OF 1"):
                spark.sql(statement.format(f"delta.`{what.table}`")).collect()
            spark.stop()
        if made.exists():
            made.replace(cache_folder() / ARCHIVE)
        else:
            print("this Java keeps no archive of its classes; the tests take longer", file=sys.stderr)


if __name__ == "__main__":
    make_archive()
