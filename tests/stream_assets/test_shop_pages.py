"""A project of Dagster's, from ``dg scaffold`` to rows in Delta, and its pages in a real browser without a window."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import dagster as dg
import pytest
from deltalake import DeltaTable
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver import ChromeOptions, Remote
from selenium.webdriver.chrome.remote_connection import ChromeRemoteConnection
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from stream_consumers.create import create_producer
from tests.support.dagster_services import Dagster, dagster_services
from tests.support.dg_projects import DgProject
from tests.support.polling import until
from tests.support.servers import running
from tests.support.settings import ROOT
from tests.support.spark_servers import spark_servers

T = TypeVar("T")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # as root there is none
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--window-size=1500,1100",
)
PICTURES_VARIABLE = "STREAM_ASSETS_PICTURES"
IMAGES = ROOT / "docs" / "images"
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.2
# What a page says that is being drawn anew.
UNSETTLED = (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
)


@dataclass(frozen=True, slots=True)
class Browser:
    """What a user does and sees; what does not come true leaves a screenshot behind.

    Args:
        driver: the browser.
        screenshots: the folder for them.
    """

    driver: Remote
    screenshots: Path

    def open(self, url: str) -> None:
        """Go to a page."""
        self.driver.get(url)

    def find(self, xpath: str) -> WebElement:
        """The first element that is there and visible; waits for it."""

        def find() -> WebElement | None:
            found = self.driver.find_elements("xpath", xpath)
            return next((element for element in found if element.is_displayed()), None)

        return self.until(find, what=xpath)

    def click(self, words: str) -> None:
        """A link, tab or button with these words on it, or an element at an xpath; waits until it can be clicked."""
        controls = "self::a or self::button or @role='button' or @role='tab'"
        xpath = words if words.startswith("/") else f"//*[{controls}][normalize-space()='{words}']"

        def click() -> bool:
            element = self.driver.find_element("xpath", xpath)
            if element.is_enabled():
                element.click()
                return True
            return False

        self.until(click, what=f"{words!r} to be clicked")

    def text(self) -> str:
        """All that can be read on the page."""
        return self.driver.find_element("tag name", "body").text

    def see(self, *words: str, seconds: float = WAIT_SECONDS) -> str:
        """The text of the page, when all these words are in it."""

        def read() -> str | None:
            text = self.text()
            return text if all(word in text for word in words) else None

        return self.until(read, seconds=seconds, what=f"{words} on the page")

    def picture(self, name: str, *, top: str | None = None) -> None:
        """The page as the pictures of the documentation show it; ``make pictures`` keeps it as one.

        Args:
            name: of the picture.
            top: words that are to be at its top.
        """
        self.driver.execute_script("document.activeElement?.blur()")
        if top:
            self.driver.execute_script("arguments[0].scrollIntoView()", self.find(f"//*[text()='{top}']"))
        folder = IMAGES if PICTURES_VARIABLE in os.environ else self.screenshots
        assert self.driver.save_screenshot(str(folder / f"{name}.png"))

    def until(self, condition: Callable[[], T | None], *, seconds: float = WAIT_SECONDS, what: str) -> T:
        """The first truthy value of ``condition``.

        Raises:
            AssertionError: with the place of a screenshot, after ``seconds``.
        """
        waiting: Any = WebDriverWait(self.driver, seconds, POLL_SECONDS, ignored_exceptions=UNSETTLED)
        try:
            value: T = waiting.until(lambda _: condition())
        except TimeoutException as error:
            picture = self.screenshots / f"page-{len(list(self.screenshots.glob('*.png')))}.png"
            self.driver.save_screenshot(str(picture))
            raise AssertionError(
                f"no {what} within {seconds} s at {self.driver.current_url}; see {picture}\n{self.text()}"
            ) from error
        return value


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser; its profile, its log and its screenshots are in ``folder``."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    driver = shutil.which(DRIVER)
    assert program, f"there is no browser ({', '.join(PROGRAMS)}): install chromium; make test-all does it where it may"
    assert driver, f"there is no {DRIVER}: install chromium-driver; make test-all does it where it may"
    options = ChromeOptions()
    options.binary_location = program
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    command = [driver, "--port=0"]
    with running("chromedriver", command, folder / "driver.log") as server:
        (port,) = server.until(
            lambda: server.said(r"started successfully on port (\d+)"), seconds=WAIT_SECONDS, what="its start"
        )
        # The driver listens on the loopback interface, which no proxy reaches.
        with patch.dict(os.environ, no_proxy="*"):
            made = Remote(ChromeRemoteConnection(f"http://127.0.0.1:{port}"), options=options)
            try:
                yield Browser(made, folder)
            finally:
                made.quit()
                shutil.rmtree(folder / "profile", ignore_errors=True)


pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.browser, pytest.mark.slow]
SECONDS = 600.0
ORDERS = 1000
# The messages of which this many each is cut off in the middle.
EVERY = 25
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
      decode: {type: json, schema: "id BIGINT, name STRING"}
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
        for number in range(ORDERS // 10):
            producer.send(b'{"id": %d, "name": "n%d"}' % (number, number))


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


def colour(element: WebElement) -> tuple[int, int, int]:
    """Red, green and blue of a text, from 0 to 255."""
    red, green, blue = re.findall(r"\d+", element.value_of_css_property("color"))[:3]
    return int(red), int(green), int(blue)
