"""What the tests share: one Spark session, and one server of each kind."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from spark_jobs import redaction
from spark_jobs.session import SparkOptions, create_session
from tests.support.class_archive import OPTIONS_VARIABLE, quick_options
from tests.support.kafka_broker import Listeners, kafka_broker
from tests.support.profiles import load_profile
from tests.support.redis_server import redis_server
from tests.support.settings import ROOT, SMALL
from tests.support.spark_connect import connect_server, end_python_workers

os.environ.setdefault("STREAM_ASSETS_CACHE", str(ROOT / ".cache"))
# A test that is about the server that outlives runs says so; the others leave nothing behind.
os.environ.setdefault("STREAM_ASSETS_SPARK", "in-process")
os.environ.setdefault(OPTIONS_VARIABLE, quick_options())
load_profile()


# Started once for all processes of a run: the tests that need one are given to the same process.
STARTED_ONCE = ("server", "own_kafka", "cluster")
# Ten times what the longest take alone: a test that is given up in the middle of a call breaks its Spark session.
LONG_SECONDS = 3000


# Before pytest-xdist looks at the marks, or it sees none of these.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell the processes of ``pytest -n`` which tests belong together and come first; give long tests more time.

    What has a session, or a server for one, is marked ``spark``.
    """
    # Behind all others they would keep one process busy for minutes.
    items.sort(key=lambda item: not (item.get_closest_marker("slow") and item.get_closest_marker("dagster")))
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("kill"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
        needed = getattr(item, "fixturenames", ())
        if {"spark", "server"} & set(needed):
            item.add_marker(pytest.mark.spark)
        group = next((name for name in STARTED_ONCE if name in needed), None)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def own_hidden_values() -> Iterator[None]:
    """What a test lets errors hide is shown again in the next test."""
    before = dict(redaction._hidden)
    yield
    redaction._hidden.clear()
    redaction._hidden.update(before)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one session of a test run."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = create_session(
        SparkOptions(
            master="local[2]",
            config={
                **SMALL,
                "spark.sql.warehouse.dir": str(warehouse),
                # A JVM works where the first session of the process was made: in a folder of a test, perhaps.
                "spark.executorEnv.PYTHONPATH": str(ROOT),
            },
        )
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka_listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listeners]:
    """Where the one Kafka broker of a test run listens."""
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as listeners:
        yield listeners


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> str:
    """The one Kafka broker of a test run, as host:port; ``TEST_KAFKA_BROKER`` names another one."""
    given = os.environ.get("TEST_KAFKA_BROKER")
    return given or str(request.getfixturevalue("kafka_listeners").plain)


@pytest.fixture(scope="session")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second broker, always of ours: nothing is in it but what a test puts there, and a test may break it."""
    with kafka_broker(tmp_path_factory.mktemp("own-kafka")) as listeners:
        yield listeners.plain


@pytest.fixture(scope="session")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one Redis server of a test run, as host:port; ``TEST_REDIS_URL`` names another one (redis://host:port)."""
    given = os.environ.get("TEST_REDIS_URL")
    if given:
        yield given.removeprefix("redis://").rstrip("/")
        return
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one Spark Connect server of a test run; its address."""
    with connect_server(tmp_path_factory.mktemp("connect")) as address:
        yield address


@pytest.fixture(autouse=True)
def _few_python_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets no Python workers pile up at the Spark Connect server."""
    yield
    if "server" in request.fixturenames:
        end_python_workers()


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """For tests that send signals: Dagster and Spark leave handlers behind, of which one ends the tests."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    left = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert left == defaults, "a handler was not put back"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test, so that tables do not fill the disk."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance of its own, in memory: the databases of one on disk take seconds to make."""
    with dg.DagsterInstance.ephemeral(tempdir=str(folder)) as made:
        yield made
