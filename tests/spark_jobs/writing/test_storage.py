"""What is refused because of the storage of a table: commits that could be overwritten, and two views of one path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs import table_location
from spark_jobs.batches.ingestion import Ingestion, Step
from spark_jobs.dead_letters import table
from spark_jobs.jars import LOG_STORE_CLASS
from spark_jobs.writing import delta_table
from spark_jobs.writing.delta_table import check_log_store
from stream_consumers.errors import InvalidOptionError, StorageMismatchError, Terminal, UnsafeStorageError
from tests.support.ingesting import drain, entries, ingestion
from tests.support.kafka_topics import Once
from tests.support.streams import assert_each_once, write_stream

DYNAMO = "io.delta.storage.S3DynamoDBLogStore"
OF_DELTA = "io.delta.storage.S3SingleDriverLogStore"
RENAMES = "io.delta.storage.HDFSLogStore"


class Session:
    """A session with these settings."""

    def __init__(self, **settings: str) -> None:
        self.conf = {f"spark.delta.logStore.{name.replace('_', '.')}": value for name, value in settings.items()}


def is_refused(table: str, *, single_writer: bool = False, **settings: str) -> bool:
    session: Any = Session(**settings)
    try:
        check_log_store(session, table, single_writer=single_writer)
    except UnsafeStorageError:
        return True
    return False


@pytest.mark.parametrize("scheme", ["s3", "s3a", "s3n", "S3A"])
def test_amazon_needs_a_log_store_that_puts_a_commit_only_if_it_is_absent(scheme: str) -> None:
    table = f"{scheme}://lake/orders"
    setting = f"{scheme.lower()}_impl"
    assert is_refused(table)
    assert is_refused(table, **{setting: OF_DELTA})
    assert is_refused(table, **{setting: RENAMES})
    assert is_refused(table, **{"gs_impl": DYNAMO})
    assert not is_refused(table, **{setting: DYNAMO})
    assert not is_refused(table, **{setting: "com.example.ConditionalPutLogStore"})
    assert not is_refused(table, **{"class": DYNAMO})
    assert not is_refused(table, single_writer=True)


@pytest.mark.parametrize(
    ("table", "settings", "refused"),
    [
        ("hdfs://namenode/orders", {}, False),
        ("abfss://lake@account.dfs.core.windows.net/orders", {}, False),
        ("gs://lake/orders", {}, False),
        ("oss://lake/orders", {}, True),
        ("oss://lake/orders", {"oss_impl": "com.example.LogStore"}, False),
        ("/lake/orders", {}, True),
        ("/lake/orders", {"file_impl": RENAMES}, True),
        ("lake/orders", {"file_impl": LOG_STORE_CLASS}, False),
        ("file:///lake/orders", {"file_impl": LOG_STORE_CLASS}, False),
    ],
)
def test_which_storage_can_tell_two_commits_apart(table: str, settings: dict[str, str], refused: bool) -> None:
    assert is_refused(table, **settings) is refused
    assert not is_refused(table, single_writer=True, **settings)


@pytest.mark.spark
def test_a_run_on_amazon_is_refused_before_anything_is_written(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 3)
    with pytest.raises(UnsafeStorageError, match=r"ConditionalWriteLogStore"):
        drain(spark, url, Ingestion(group="lakehouse", table="s3a://lake/orders"))


@pytest.mark.spark
def test_a_relative_table_is_where_the_process_was_when_it_was_named_and_its_commits_are_put_by_links(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_stream(folder / "orders.ss", 10, malformed=frozenset({3}))
    monkeypatch.chdir(folder)
    what = Ingestion(group="lakehouse", table="lake/orders", decoder=ingestion(folder).decoder)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "lake" / "orders")
    assert [entry.kind for entry in entries(what)] == ["init", "batch"]
    assert list(Path.cwd().iterdir()) == []
    assert delta_table.log_store_of(spark, what.table) == LOG_STORE_CLASS
    left = [file.name for file in (folder / "lake" / "orders" / "_delta_log").glob(".*")]
    assert not [name for name in left if name.endswith(".tmp")], "no draft is left"
    assert not [name for name in left if name.endswith(".json.crc")], "Hadoop has put a commit, by a rename"


@pytest.mark.slow
@pytest.mark.spark
def test_a_path_is_a_local_one_whatever_the_default_file_system(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10, malformed=frozenset({3}))
    session = spark.newSession()
    session.conf.set("fs.defaultFS", "hdfs://127.0.0.1:1")
    drain(session, url, ingestion(folder / "t"))
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.fixture
def server_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Spark has a disk of its own, as a Connect server without a shared folder has."""
    disk = folder / "server"

    def on_server(table: str) -> str:
        return f"file://{disk}{table_location.absolute_location(table)}"

    for module in (delta_table, table):
        monkeypatch.setattr(module, "spark_location", on_server)
    for module in (delta_table, table):
        monkeypatch.setattr(module, "sql_name", lambda table: f"delta.`{on_server(table)}`")
    return disk


def versions(table: str) -> int:
    return DeltaTable(table).version() + 1


@pytest.mark.spark
def test_a_first_commit_that_only_spark_sees_is_written_once(
    spark: SparkSession, folder: Path, server_disk: Path
) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what = ingestion(folder / "t")
    theirs = f"{server_disk}{what.table}"
    with pytest.raises(StorageMismatchError) as caught:
        drain(spark, url, what)
    message = str(caught.value)
    assert f"Spark wrote version 0 of file:{theirs}, but this process sees no table at {what.table}" in message
    assert isinstance(caught.value, Terminal)
    assert versions(theirs) == 1
    with pytest.raises(StorageMismatchError, match=f"file:{theirs}"):
        drain(spark, url, what)
    assert versions(theirs) == 1, "nothing is written where it is not seen"
    assert not (folder / "t").exists()


@pytest.mark.spark
def test_a_table_that_only_we_see_is_not_written(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 10)
    disk = request.getfixturevalue("server_disk")
    with pytest.raises(StorageMismatchError):
        drain(spark, url, what)
    assert not disk.exists()


@pytest.mark.slow
@pytest.mark.spark
def test_a_batch_that_only_spark_sees_is_an_error_and_written_once(
    spark: SparkSession, folder: Path, request: pytest.FixtureRequest
) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what = ingestion(folder / "t")
    drain(spark, url, what)
    write_stream(folder / "orders.ss", 10)
    theirs = f"{folder}/server{what.table}"
    spark.read.format("delta").load(what.table).write.format("delta").save(theirs)
    with pytest.raises(StorageMismatchError, match=f"version 1 of file:{theirs}"):
        drain(spark, url, what, Once(Step.PLANNED, lambda: request.getfixturevalue("server_disk")))
    assert versions(theirs) == 2


@pytest.mark.parametrize("table", ["x" * 256, "ü" * 128, "lake/" * 800], ids=["name", "bytes", "path"])
def test_a_path_that_no_file_system_has_is_refused(table: str) -> None:
    with pytest.raises(InvalidOptionError):
        table_location.check_location(table)
    assert table_location.check_location("x" * 255).endswith("x")
