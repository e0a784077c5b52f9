"""The same job over Spark Connect: the session lives in a server, the client has no JVM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from stream_consumers.create import create_producer
from tests.support.python_programs import run_command
from tests.support.spark_connect import connect_server
from tests.support.streams import assert_each_once, write_stream
from tests.support.topics import create_topic, fill

pytestmark = pytest.mark.spark
DECODED = ("--decode", "json", "--schema", "id BIGINT, user STRING")


def test_ingest_over_connect(server: str, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 300, malformed=frozenset({7}))
    words = ["ingest", "--source", url, "--table", folder / "t", *DECODED, "--max-records", "200", "--json", "--remote"]
    done = run_command(*words, server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["rows"], row["dead letters"]) for row in json.loads(done.stdout)["rows"]] == [(199, 1), (100, 0)]
    assert_each_once(folder / "orders.ss", folder / "t")
    wrong = run_command(*words, "sc://127.0.0.1:1/;token=secret")
    assert wrong.returncode == 1
    assert "error: no Spark session at sc://127.0.0.1:1: " in wrong.stderr
    assert "secret" not in wrong.stderr + wrong.stdout


@pytest.mark.parametrize("history", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_large_batch_is_merged_over_connect(server: str, folder: Path, history: bool) -> None:
    """The client sends the rows to the server apart from the plans that use them."""
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        for number in range(5):
            producer.send(json.dumps({"id": number % 4, "user": str(number) * 500_000}).encode())
    words = ["--source", f"file://{folder}/orders.ss/orders", "--table", folder / "t", *DECODED, "--keys", "id"]
    words += ["--stored-as-scd-type", "2"] if history else []
    done = run_command("ingest", *words, "--remote", server)
    assert done.returncode == 0, done.stdout + done.stderr
    # A reader of the data files alone would not know which of their rows are deleted.
    table = QueryBuilder().register("t", DeltaTable(folder / "t"))
    rows = pa.table(table.execute("SELECT id, left(user, 1) AS first, length(user) AS size FROM t").read_all())
    found = sorted((row["id"], row["first"], row["size"]) for row in rows.to_pylist())
    first = [(0, "0", 500_000)] if history else []
    assert found == [*first, (0, "4", 500_000), *((number, str(number), 500_000) for number in (1, 2, 3))]


TRANSFORMS = """
from pyspark.sql import functions as f
from pyspark.sql.types import LongType


def mapped(rows):
    # The server cannot import this module.
    def same(blocks):
        yield from blocks

    more = rows.selectExpr("*", "array(user) tags", "named_struct('first-name', user) name", "map('k', user) more")
    return more.mapInPandas(same, more.schema)


@f.udf(LongType())
def plus_one(number):
    return number + 1


def early(rows):
    return rows.withColumn("id", plus_one("id"))
"""


def ingested(server: str, folder: Path, transform: str) -> subprocess.CompletedProcess[str]:
    (folder / "made.py").write_text(TRANSFORMS)
    url = write_stream(folder / "orders.ss", 3)
    words = ["ingest", "--source", url, "--table", folder / "t", *DECODED, "--remote", server]
    return run_command(*words, "--transform", f"made:{transform}", cwd=folder)


@pytest.mark.slow
def test_strings_that_went_through_python_are_strings_in_the_table(server: str, folder: Path) -> None:
    """Of a Connect client they have a collation, by which nobody but Spark could read the table."""
    done = ingested(server, folder, "mapped")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collate" not in (folder / "t" / "_delta_log" / f"{0:020d}.json").read_text()
    found = DeltaTable(str(folder / "t")).to_pyarrow_table(columns=["user", "tags", "name", "more"]).to_pylist()
    assert len(found) == 3
    assert all(row["tags"] == [row["user"]] and row["name"] == {"first-name": row["user"]} for row in found)


@pytest.mark.slow
def test_a_udf_that_was_made_for_another_spark_has_a_remedy(server: str, folder: Path) -> None:
    done = ingested(server, folder, "early")
    assert done.returncode == 1
    assert "Create it inside the transform; or use such a Spark" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_no_secret_is_in_what_a_server_writes_down(kafka: str, folder: Path) -> None:
    """The splits that executors read have the options of the client in them."""
    topic = create_topic(kafka, 1)
    fill(kafka, topic, 12_000, partitions=1)
    events = folder / "events"
    events.mkdir()
    logged = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{events}",
    }
    with connect_server(folder, more=logged) as server:
        words = ["ingest", "--source", f"kafka://{kafka}/{topic}", "--table", folder / "t", "--remote", server]
        done = run_command(*words, "--client", "sasl.password=hunter2-of-the-broker")
    assert done.returncode == 0, done.stdout + done.stderr
    written = "".join(path.read_text(errors="replace") for path in events.rglob("*") if path.is_file())
    assert "stream_assets_splits" in written
    assert "hunter2" not in written + done.stdout + done.stderr
