"""Names in a Hive metastore: made, read, of another table, away, and in use by somebody else."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from stream_assets import HiveMetastore
from tests.support.hive_metastore import derby, hive_metastore
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.spark_connect import connect_server
from tests.support.streams import assert_each_once, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SECONDS = 600.0
# The clients of Hive try again by themselves, for half a minute and more.
HIVE = {
    "spark.sql.catalogImplementation": "hive",
    "spark.hadoop.hive.metastore.client.connect.retry.delay": "1",
    "spark.hadoop.hive.hmshandler.retry.attempts": "1",
}
COUNT = """
import sys
from spark_jobs.session import SparkOptions, create_session
remote = sys.argv[2] if sys.argv[1] == "--remote" else None
print(create_session(SparkOptions(master="local[2]", remote=remote, in_process=True)).table("orders").count())
"""


class Orders:
    """A stream file, and a table that is called ``orders`` in the catalog of a Spark.

    Args:
        folder: of both.
        spark: says which one, on the command line.
        environment: of commands.
    """

    def __init__(self, folder: Path, *spark: str, **environment: str) -> None:
        self.folder, self.spark = folder, spark
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.table = folder / "t"
        self.write(20)

    def write(self, count: int) -> None:
        self.url = write_stream(self.folder / "orders.ss", count)

    def started(self, command: str, *words: str, table: Path | None = None) -> subprocess.Popen[bytes]:
        """A command that runs."""
        made = ["--source", self.url, "--table", str(table or self.table), *self.spark]
        decoded = ["--decode", "json", "--schema", "id BIGINT, user STRING"]
        with (self.folder / "errors").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "stream_assets.cli.main", command, *made, *decoded, *words],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def run(self, command: str, *words: str, table: Path | None = None) -> str:
        """What a command says of what is wrong; nothing if it ends well."""
        with self.started(command, *words, table=table) as process:
            return "" if process.wait(SECONDS) == 0 else self.errors()

    def ingest(self, *words: str, table: Path | None = None) -> str:
        return self.run("ingest", "--catalog-table", "orders", *words, table=table)

    def errors(self) -> str:
        """What the last command has said of errors so far."""
        return " ".join((self.folder / "errors").read_text().split())

    def count(self) -> int:
        """Rows, by the name of the table."""
        done = subprocess.run(
            [sys.executable, "-c", COUNT, *self.spark],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)


def test_a_table_has_a_name_in_a_metastore_that_is_waited_for(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = tmp_path_factory.mktemp("metastore")
    with ExitStack() as stack:
        metastore = ExitStack()
        stack.enter_context(metastore)
        address = metastore.enter_context(hive_metastore(kept))
        settings = {**HIVE, "spark.hadoop.hive.metastore.uris": address}
        orders = Orders(folder, "--remote", stack.enter_context(connect_server(kept, more=settings)))
        assert not orders.ingest()
        assert orders.count() == 20
        assert (
            HiveMetastore(uri=f"thrift://127.0.0.1:1,{address}").table("default.orders").path == f"file:{orders.table}"
        )
        assert not orders.run("replay")
        assert "catalog_table='orders' is another table" in orders.ingest(table=folder / "other")

        metastore.close()
        orders.write(10)
        waiting = stack.enter_context(orders.started("ingest", "--catalog-table", "orders"))
        until(
            lambda: waiting.poll() is not None or "It is tried again" in orders.errors(),
            seconds=SECONDS,
            what="the first try",
        )
        assert "the Hive metastore of this Spark does not answer: " in orders.errors()
        stack.enter_context(hive_metastore(kept, port=int(address.rpartition(":")[2])))
        assert waiting.wait(SECONDS) == 0, orders.errors()
        assert orders.count() == 30
        assert_each_once(folder / "orders.ss", orders.table)


def test_a_metastore_of_derby_that_somebody_else_has_open_is_told(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = tmp_path_factory.mktemp("metastore")
    settings = {**HIVE, "spark.hadoop.javax.jdo.option.ConnectionURL": derby(kept)}
    (kept / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    orders = Orders(folder, "--in-process", "--master", "local[2]", SPARK_CONF_DIR=str(kept))
    with hive_metastore(kept):
        said = orders.ingest("--retry-seconds", "0")
    assert f"is a Derby database that another process has open: {kept}/metastore_db. Only one Spark" in said
    assert not orders.ingest()
    with hive_metastore(kept) as address:
        assert HiveMetastore(uri=address).table("default.orders").path == f"file:{orders.table}"
    assert_each_once(folder / "orders.ss", orders.table)
