"""A project of Dagster's, from ``dg scaffold`` to rows in Delta, and its pages in a real browser without a window."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import dagster as dg
import pytest
from deltalake import DeltaTable
from selenium.webdriver.remote.webelement import WebElement

from stream_consumers.create import create_producer
from tests.support.browser import Browser, browser
from tests.support.dagster_services import Dagster, dagster_services
from tests.support.dg_projects import DgProject
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.spark_servers import spark_servers

pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.browser, pytest.mark.slow]
SECONDS = 600.0
ORDERS = 1000
# The messages of which this many each is cut off in the middle.
EVERY = 25
# Each customer is made and changed once; some of them are then deleted, and the others changed again.
CUSTOMERS, CHANGES, DELETED = 200, 500, 25
COMPONENT = """
type: stream_assets.StreamIngestionComponent

attributes:
  connection: {type: file, path: "{{ context.project_root }}/data/shop.ss"}
  lake: {root: "{{ context.project_root }}/data/lake"}
  spark: {master: "local[1]", spark_config: {spark.sql.shuffle.partitions: "1"}}
  defaults:
    group: lakehouse
    limits: {max_records: 200}
    sensor: {status: RUNNING, interval_seconds: 1}
  streams:
    - stream: orders
      decode: {type: json, schema: "id BIGINT, country STRING, amount DECIMAL(10,2)"}
      transform: .transforms.orders
    - stream: customers
      decode: {type: json, schema: "id BIGINT, name STRING, gone BOOLEAN"}
      keys: {columns: [id], apply_as_deletes: gone, except_columns: [gone]}
"""
TRANSFORMS = """
def orders(batch):
    return batch.where("amount > 0")
"""
DOWNSTREAM = '''
import dagster as dg
import pyarrow as pa


@dg.asset(automation_condition=dg.AutomationCondition.eager())
def revenue(orders: pa.Table) -> dg.MaterializeResult:
    """What was sold, a country."""
    sold = orders.group_by("country").aggregate([("amount", "sum")])
    return dg.MaterializeResult(metadata={"dagster/row_count": sold.num_rows})


automation = dg.AutomationConditionSensorDefinition(
    "automation",
    target=dg.AssetSelection.assets(revenue),
    default_status=dg.DefaultSensorStatus.RUNNING,
    minimum_interval_seconds=1,
)
'''


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser."""
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name, which is the same on all machines but for its end."""
    with tempfile.TemporaryDirectory(prefix="shop-", dir="/tmp") as made:
        yield Path(made)


def write_shop(folder: Path) -> None:
    folder.mkdir()
    with create_producer(f"file://{folder}/shop.ss/orders") as producer:
        for number in range(ORDERS):
            payload = b'{"id": %d, "country": "%s", "amount": %d.50}' % (number, (b"at", b"de")[number % 2], number % 5)
            producer.send(payload[: 9 if number % EVERY == 0 else None], shard=number % 2)
    with create_producer(f"file://{folder}/shop.ss/customers") as producer:
        for number in range(CHANGES):
            gone = b"true" if number >= 2 * CUSTOMERS and number % 4 == 0 else b"false"
            producer.send(b'{"id": %d, "name": "n%d", "gone": %s}' % (number % CUSTOMERS, number, gone))


def test_a_scaffolded_project_from_its_streams_to_what_is_made_of_their_tables(home: Path, page: Browser) -> None:
    project = DgProject.make(home, package="shop")
    project.dg("scaffold", "defs", "stream_assets.StreamIngestionComponent", "shop")
    project.write("defs/shop/defs.yaml", COMPONENT)
    project.write("defs/shop/transforms.py", TRANSFORMS)
    project.write("defs/revenue.py", DOWNSTREAM)
    write_shop(project.root / "data")
    path = {"PYTHONPATH": f"{ROOT}:{project.source}"}
    with (
        spark_servers(home / "servers") as servers,
        dagster_services(home / "dagster", f"{project.package}.definitions", {**servers.variables, **path}) as dagster,
    ):
        for made in ("revenue", "customers"):
            until(lambda key=made: is_made(dagster, key), seconds=SECONDS, what=made)
        table = DeltaTable(f"{project.root}/data/lake/public/orders").to_pyarrow_table()
        expected = {number for number in range(ORDERS) if number % EVERY}
        assert sorted(table.column("id").to_pylist()) == sorted(expected)
        assert min(table.column("amount").to_pylist()) == Decimal("0.50")
        look_at_the_graph(page, dagster)
        look_at_the_asset(page, dagster)
        look_at_a_failed_check(page, dagster)
        look_at_a_keyed_table(page, dagster)


def is_made(dagster: Dagster, name: str) -> bool:
    failed = dagster.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    assert not failed, dagster.daemon_log.read_text()[-8000:]
    return bool(dagster.instance.fetch_materializations(dg.AssetKey(name), limit=1).records)


def look_at_the_graph(page: Browser, dagster: Dagster) -> None:
    page.open(f"{dagster.address}/asset-groups")
    page.see("orders", "revenue", "customers", "1 / 3 Passed")
    page.picture("lineage")


def look_at_the_asset(page: Browser, dagster: Dagster) -> None:
    page.open(f"{dagster.address}/assets/orders?view=overview")
    page.see("Latest check results\n1\n1\n1", f"Row count\n{ORDERS - ORDERS // EVERY}", "ingest/rows\n")
    page.picture("dagster-asset")
    page.click("Plots")
    page.see("stream/lag_after", "stream/rows_per_second")
    page.picture("plots", top="Metadata")


def look_at_a_failed_check(page: Browser, dagster: Dagster) -> None:
    page.open(f"{dagster.address}/assets/orders?view=checks&checkDetail=dead_letter_ratio")
    page.see("At most 1 % of the messages of the newest 20 batches are dead letters.", "Failed", "40 of 1000 messages")
    red, green, blue = colour(page.find("//*[text()='Evaluation result']/following::*[text()='Failed']"))
    assert red > 2 * max(green, blue)
    page.picture("failed-check")


def look_at_a_keyed_table(page: Browser, dagster: Dagster) -> None:
    page.open(f"{dagster.address}/assets/customers?view=overview")
    page.see(f"Row count\n{CUSTOMERS - DELETED}", "ingest/inserted_rows", "ingest/updated_rows", "ingest/deleted_rows")
    page.picture("keyed-table", top="Metadata")


def colour(element: WebElement) -> tuple[int, int, int]:
    """Red, green and blue of a text, from 0 to 255."""
    red, green, blue = re.findall(r"\d+", element.value_of_css_property("color"))[:3]
    return int(red), int(green), int(blue)
