"""Tables that a catalog names: where they are is asked at each use, and a name that moves is reported.

The server of Unity Catalog is in no package registry: the one here gives the answers of its OpenAPI description,
``getTable`` of ``Tables``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from stream_assets import HiveMetastore, RunLimits, StreamAsset, UnityCatalog, stream_definitions
from stream_assets.catalogs import MAX_ANSWER_BYTES, CatalogTable
from stream_assets.metadata import TABLE_URI
from stream_consumers.create import create_producer
from stream_consumers.errors import AccessDeniedError, CatalogUnavailableError, InvalidOptionError, StreamAssetsError
from tests.support.dagster_runs import declare as declare_on_file
from tests.support.dagster_runs import execute, materializations, plain_asset, tick
from tests.support.kept_errors import kept
from tests.support.streams import assert_each_once, write_stream

PREFIX = "/api/2.1/unity-catalog/tables/"
TOKEN = "t0ken-of-the-catalog"


@dataclass(slots=True)
class Unity:
    """A running catalog.

    Args:
        url: of it.
        tables: what it says of each table, by its full name.
        failure: answers this instead, if it is not 0: an HTTP status.
        body: answers this instead, if it is not empty.
        asked: what it was asked: the path and the headers of each request.
    """

    url: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: int = 0
    body: bytes = b""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def add(self, name: str, location: str | None, *, kind: str = "EXTERNAL", data_format: str = "DELTA") -> None:
        """Let the name be of a table at a place."""
        catalog, schema, table = name.split(".")
        self.tables[name] = {
            "name": table,
            "catalog_name": catalog,
            "schema_name": schema,
            "table_type": kind,
            "data_source_format": data_format,
            "storage_location": location,
            "table_id": f"id of {name}",
        }

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        """The status and the body of an answer."""
        self.asked.append((path, headers))
        if self.failure:
            return self.failure, {"error_code": "INTERNAL", "message": "it fails"}
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error_code": "UNAUTHENTICATED", "message": "who is it?"}
        name = unquote(path.removeprefix(PREFIX))
        if not path.startswith(PREFIX) or name not in self.tables:
            return 404, {"error_code": "TABLE_NOT_FOUND", "message": f"Table not found: {name}"}
        return 200, self.tables[name]


@contextmanager
def unity_catalog() -> Iterator[Unity]:
    """A catalog without tables; one that has ended refuses connections."""
    catalog = Unity("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = catalog.answer(self.path, dict(self.headers))
            content = catalog.body or json.dumps(body).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        catalog.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield catalog
        finally:
            server.shutdown()
            thread.join()


NAME = "main.sales.orders"


@pytest.fixture
def unity() -> Iterator[Unity]:
    with unity_catalog() as found:
        yield found


def named(unity: Unity, name: str = NAME, **options: Any) -> CatalogTable:
    return UnityCatalog(url=unity.url, token=TOKEN).table(name, **options)


def declare(table: Any) -> StreamAsset:
    """An asset on a stream of its own, with one message."""
    source = f"memory://{uuid4().hex}/orders"
    with create_producer(source) as producer:
        producer.send(b"{}")

    return plain_asset(source=source, table=table, limits=RunLimits(retry_seconds=0))


def materialized(instance: dg.DagsterInstance, location: str | None) -> None:
    metadata = {} if location is None else {TABLE_URI: dg.MetadataValue.url(location)}
    instance.report_runless_asset_event(dg.AssetMaterialization("orders", metadata=metadata))


def test_a_table_is_where_unity_catalog_says(unity: Unity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unity.add("main.sales.été", f"file://{tmp_path}/t")
    monkeypatch.setenv("T_UNITY", f"{unity.url}/")
    monkeypatch.setenv("T_TOKEN", f"{TOKEN}\n")
    monkeypatch.setenv("T_NAME", "main.sales.été")
    catalog = UnityCatalog(url=dg.EnvVar("T_UNITY"), token=dg.EnvVar("T_TOKEN"))
    orders = declare(catalog.table(dg.EnvVar("T_NAME"), storage_options={"AWS_REGION": "eu"}))
    assert not unity.asked, "code loads without the catalog"
    assert orders.declared.ingestion.table == f"{tmp_path}/t"
    assert orders.declared.ingestion.storage_options == {"AWS_REGION": "eu"}
    definitions = stream_definitions([orders])
    dg.Definitions.validate_loadable(definitions)
    metadata = orders.get_asset_spec().metadata
    assert metadata["dagster/uri"] == "{T_UNITY}/{T_NAME}"
    assert declare(catalog.table(NAME)).get_asset_spec().metadata["dagster/table_name"] == NAME
    assert TOKEN not in repr(orders.declared)


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (302, InvalidOptionError),
        (429, CatalogUnavailableError),
        (503, CatalogUnavailableError),
    ],
)
def test_an_answer_of_a_catalog_is_an_error_of_its_kind(failure: int, error: type[Exception], unity: Unity) -> None:
    unity.failure = failure
    with pytest.raises(error):
        _ = named(unity).path
    assert len(unity.asked) == 1, "nothing is asked anywhere else"


def test_only_a_delta_table_of_a_unity_catalog_is_taken(unity: Unity) -> None:
    with pytest.raises(InvalidOptionError, match=NAME):
        _ = named(unity).path
    unity.add(NAME, None, kind="VIEW")
    with pytest.raises(InvalidOptionError, match="VIEW"):
        _ = named(unity).path
    unity.add(NAME, "/lake/orders", data_format="PARQUET")
    with pytest.raises(InvalidOptionError, match="PARQUET"):
        _ = named(unity).path
    unity.add(NAME, "/lake/orders")
    for unity.body in (b"<html>", b"[1]", b"\xff", b" " * (MAX_ANSWER_BYTES + 1)):
        with pytest.raises(InvalidOptionError):
            _ = named(unity).path


def test_a_catalog_that_is_away_is_unavailable() -> None:
    with unity_catalog() as unity:
        pass
    with pytest.raises(CatalogUnavailableError):
        _ = named(unity).path


@pytest.mark.parametrize(
    "make",
    [
        lambda: UnityCatalog(url="https://u").table("sales.orders"),
        lambda: UnityCatalog(url="https://u").table("/lake/main.sales.orders"),
        lambda: HiveMetastore(uri="thrift://h:1").table("main.sales.orders"),
        lambda: UnityCatalog(url="unity:8080").table(NAME).path,
        lambda: UnityCatalog(url="ftp://unity").table(NAME),
        lambda: UnityCatalog(url="https://u", token="a\nb").table(NAME).path,
        lambda: HiveMetastore(uri="hive:9083").table("sales.orders").path,
        lambda: HiveMetastore(uri="thrift://h:x").table("sales.orders").path,
        lambda: HiveMetastore(uri="thrift://h").table("sales.orders"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(InvalidOptionError):
        make()


@pytest.mark.parametrize(
    "url", ["https://me:hunter2@h", "https://me:hunter2/x@h:1", "h?t=hunter2", "https://h/?t=hunter2"]
)
@pytest.mark.parametrize("is_deferred", [False, True])
def test_no_address_with_credentials_is_taken(url: str, is_deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITY", url)
    monkeypatch.setenv("HIVE", url.replace("https", "thrift"))
    unity = UnityCatalog(url=dg.EnvVar("UNITY") if is_deferred else url)
    hive = HiveMetastore(uri=dg.EnvVar("HIVE") if is_deferred else url.replace("https", "thrift"))
    for make in (lambda: unity.table(NAME), lambda: hive.table("sales.orders")):
        with pytest.raises(InvalidOptionError) as refused:
            _ = make().path
        assert "hunter2" not in kept(refused.value)


def test_a_sensor_asks_the_catalog_once_a_tick(unity: Unity, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    unity.add(NAME, str(tmp_path / "t"))
    orders = declare(named(unity))
    assert tick(orders, instance).run_requests
    assert len(unity.asked) == 1
    unity.failure = 503
    with pytest.raises(CatalogUnavailableError):
        tick(orders, instance)


def test_a_name_that_moves_is_not_another_table(unity: Unity, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    orders = declare(named(unity))
    unity.add(NAME, f"file://{tmp_path}/t/")
    materialized(instance, f"file://{tmp_path}/t")
    materialized(instance, None)
    assert tick(orders, instance).run_requests
    unity.add(NAME, str(tmp_path / "other"))
    with pytest.raises(InvalidOptionError, match=rf"{tmp_path}/other"):
        tick(orders, instance)
    instance.wipe_assets([orders.key])
    assert tick(orders, instance).run_requests
    unity.add(NAME, "s3://lake/orders")
    materialized(instance, "s3a://lake/orders")
    assert orders.declared.located(instance).table.path == "s3://lake/orders", "one bucket, two names of its scheme"


@pytest.mark.slow
@pytest.mark.spark
def test_a_run_writes_where_the_name_is_and_nowhere_else(
    unity: Unity, instance: dg.DagsterInstance, folder: Path, spark: SparkSession
) -> None:
    unity.add(NAME, f"file://{folder}/t")
    write_stream(folder / "orders.ss", 10)
    orders = declare_on_file(folder, table=named(unity))
    done = execute(orders, instance)
    assert done.success
    assert len(unity.asked) == 1, "a run asks once"
    (made,) = materializations(done)
    assert made.metadata[TABLE_URI].value == f"file://{folder}/t"
    assert_each_once(folder / "orders.ss", folder / "t")
    unity.add(NAME, f"file://{folder}/other")
    write_stream(folder / "orders.ss", 10)
    moved = execute(orders, instance)
    (failed,) = moved.get_step_failure_events()
    assert "was last written to" in str(failed.step_failure_data.user_failure_data)
    assert not (folder / "other").exists()


def test_a_run_waits_for_the_catalog(unity: Unity, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    unity.add(NAME, str(tmp_path / "t"))
    unity.failure = 503
    told: list[str] = []

    def comes_back(text: str) -> None:
        told.append(text)
        unity.failure = 0

    declared = declare(named(unity)).declared
    assert declared.located(instance, retry_seconds=60, on_wait=comes_back).ingestion.table == str(tmp_path / "t")
    assert len(told) == 1
    unity.failure = 503
    with pytest.raises(StreamAssetsError):
        declared.located(instance)
