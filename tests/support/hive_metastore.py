"""A Hive metastore as a process of its own: the one in the jars of PySpark, with a Derby database."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from spark_jobs.jars import COMPILER, java
from tests.support.servers import running

START_SECONDS = 240.0
_SOURCE = Path(__file__).with_name("Metastore.java")


def derby(folder: Path) -> str:
    """The URL of the database of a metastore."""
    return f"jdbc:derby:;databaseName={folder / 'metastore_db'};create=true"


@contextmanager
def hive_metastore(folder: Path, *, port: int = 0) -> Iterator[str]:
    """A running metastore; its address, like ``thrift://127.0.0.1:9083``.

    Args:
        folder: of its database, which is made at the first start.
        port: to listen at; 0 for any.
    """
    jars = os.pathsep.join(map(str, (Path(pyspark.__file__).parent / "jars").glob("*.jar")))
    if not (folder / "Metastore.class").exists():
        compiler = [java(), "-cp", jars, COMPILER, "-d", str(folder), "-classpath", jars, str(_SOURCE)]
        subprocess.run(compiler, check=True, capture_output=True)
    settings = {
        "javax.jdo.option.ConnectionURL": derby(folder),
        "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": f"file://{folder}/warehouse",
        "derby.stream.error.file": str(folder / "derby.log"),
    }
    words = [f"-D{name}={value}" for name, value in settings.items()]
    command = [java(), "-Xmx256m", "-XX:TieredStopAtLevel=1", *words, "-cp", f"{folder}:{jars}", "Metastore", str(port)]
    with running("the metastore", command, folder / "metastore.log") as server:
        (address,) = server.until(
            lambda: server.said(r"metastore at (thrift://\S+:\d+)"), seconds=START_SECONDS, what="its address"
        )
        yield address
