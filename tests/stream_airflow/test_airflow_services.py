"""A real Airflow beside real brokers: messages start runs, whichever of its processes are killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.verify import verify
from stream_consumers.create import StreamSource, create_producer
from tests.support.airflow_home import LOWEST, NEWEST, AirflowHome
from tests.support.airflow_services import STANDALONE, AirflowServices, airflow_services
from tests.support.ingesting import drain, ingestion
from tests.support.postgres import postgres_server
from tests.support.redis_streams import Place
from tests.support.settings import ROOT
from tests.support.spark_servers import spark_servers
from tests.support.streams import Identity, sequences_in_file, sequences_in_table, write_stream
from tests.support.topics import create_topic, fill, sequences_in_topic

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("airflow")]

GROUP = "lakehouse"
VICTIMS = ("triggerer", "task", "scheduler")
KILLS = int(os.environ.get("TEST_AIRFLOW_KILLS", "6"))
"""How many processes are killed, in turn; 30 take a quarter of an hour."""
PAUSE_SECONDS = 0.05
MOST_SECONDS_BEFORE_A_KILL = 3.0
DAY_MS = 86_400_000
DAYS = range(14, 21)
FIRST_DAY_MS = 1_699_920_000_000
REPLAYED = (16, 17, 18)
ROWS_SECONDS = 300.0


@contextmanager
def airflow(
    folder: Path, dags: str, *, version: str = NEWEST, standalone: bool = False, **variables: str
) -> Iterator[AirflowServices]:
    """An Airflow with one file of DAGs, which gets environment variables."""
    home = AirflowHome.make(folder / "airflow", version)
    shutil.copy(ROOT / "tests" / "support" / "airflow_dags" / dags, home.dags)
    with ExitStack() as stack:
        variables |= stack.enter_context(spark_servers(folder / "servers")).variables
        if standalone:
            services = airflow_services(home, words=STANDALONE, **variables)
        else:
            server = stack.enter_context(postgres_server())
            # The workers of a scheduler that was killed keep its connections open, with the locks of its transaction.
            server.run(f"ALTER DATABASE {server.database} SET idle_in_transaction_session_timeout = '10s'")
            database = server.url.replace(":", "+psycopg2:", 1)
            services = airflow_services(home, database=database, **variables)
        yield stack.enter_context(services)


def declared(folder: Path, streams: Mapping[str, str]) -> str:
    """The variable of a DAG for each stream of ``streams`` (URL by name), into the table of this name."""
    return json.dumps({name: [url, str(folder / name)] for name, url in streams.items()})


@contextmanager
def sending(address: str, topic: str, *, partitions: int) -> Iterator[None]:
    """Messages that keep coming as long as the block takes."""
    is_done = threading.Event()

    def send() -> None:
        producer = Producer({"bootstrap.servers": address, "linger.ms": 5, "log_level": 2})
        number = 0
        while not is_done.wait(PAUSE_SECONDS):
            producer.produce(topic, b'{"id": %d, "user": "u"}' % number, partition=number % partitions)
            producer.poll(0)
            number += 1
        producer.flush()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def until_written(services: AirflowServices, table: Path, expected: set[Identity]) -> None:
    """Wait until the table has each message."""
    services.until(
        lambda: set(sequences_in_table(table)) >= expected,
        seconds=ROWS_SECONDS,
        what=f"{len(expected)} messages in {table.name}",
    )


def until_more(services: AirflowServices, count: Callable[[], int], what: str) -> None:
    """Wait until ``count`` is larger than now."""
    seen = count()
    services.until(lambda: count() > seen, seconds=ROWS_SECONDS, what=what)


def assert_exactly_once(url: str, table: Path, expected: set[Identity]) -> None:
    found = sequences_in_table(table)
    assert {identity: count for identity, count in found.items() if count != 1} == {}
    assert set(found) == expected
    with StreamSource(url).open() as opened:
        verdicts = verify(opened, Ingestion(GROUP, str(table)))
    assert verdicts
    assert [verdict.missing for verdict in verdicts] == [0] * len(verdicts)
    assert all(verdict.is_right for verdict in verdicts)


def commits(table: Path) -> int:
    """How many commits a table has."""
    return len(list((table / "_delta_log").glob("*.json")))


@pytest.mark.parametrize(
    ("version", "standalone"),
    [(NEWEST, False), (NEWEST, True), (LOWEST, False)],
    ids=["newest", "standalone", "lowest"],
)
def test_messages_of_each_kind_of_stream_start_runs(
    tmp_path: Path, version: str, standalone: bool, kafka: str, redis_address: str
) -> None:
    topic, place = create_topic(kafka, 2), Place(redis_address)
    file = write_stream(tmp_path / "orders.ss", 0)
    streams = {"kafka": f"kafka://{kafka}/{topic}", "redis": place.url, "file": file}
    variables = {"TEST_STREAMS": declared(tmp_path, streams)}
    with airflow(tmp_path, "watched.py", version=version, standalone=standalone, **variables) as services:
        for round in range(2):
            fill(kafka, topic, 100, partitions=2)
            for index in range(100):
                place.add(f"{1_700_000_000_000 + 1000 * round + index}-0", "msg", json.dumps({"id": index}))
            write_stream(tmp_path / "orders.ss", 100)
            expected = {
                "kafka": sequences_in_topic(kafka, topic),
                "redis": {
                    (place.stream, 0, 1_700_000_000_000 + 1000 * n + i << 16)
                    for n in range(round + 1)
                    for i in range(100)
                },
                "file": sequences_in_file(tmp_path / "orders.ss"),
            }
            for name, identities in expected.items():
                until_written(services, tmp_path / name, identities)
    for name, identities in expected.items():
        assert_exactly_once(streams[name], tmp_path / name, identities)


@pytest.mark.kill
def test_kills_of_any_process_lose_and_double_nothing(tmp_path: Path, kafka: str) -> None:
    topic, table, moments = create_topic(kafka, 2), tmp_path / "kafka", random.Random(40)
    url = f"kafka://{kafka}/{topic}"
    with airflow(tmp_path, "watched.py", TEST_STREAMS=declared(tmp_path, {"kafka": url})) as services:
        with sending(kafka, topic, partitions=2):
            for number in range(KILLS):
                victim = VICTIMS[number % len(VICTIMS)]
                if victim == VICTIMS[0]:
                    # What was killed since the one before has been replaced.
                    until_more(services, lambda: len(services.runs("kafka")), "another run of the DAG")
                until_more(services, lambda: commits(table), "another commit")
                if victim == "task":
                    kill_a_task(services, moments)
                else:
                    time.sleep(moments.uniform(0, MOST_SECONDS_BEFORE_A_KILL))
                    services.kill(victim)
                    services.start(victim)
        expected = sequences_in_topic(kafka, topic)
        until_written(services, table, expected)
    assert_exactly_once(url, table, expected)


def kill_a_task(services: AirflowServices, moments: random.Random) -> None:
    """Kill a process that runs a task, some time after it was seen; another one, if it had ended until then."""

    def is_killed() -> bool:
        if not services.tasks():
            return False
        time.sleep(moments.uniform(0, MOST_SECONDS_BEFORE_A_KILL))
        return services.kill_task()

    services.until(is_killed, seconds=ROWS_SECONDS, what="a task to kill")


def test_a_backfill_replaces_the_days_that_it_is_given_and_nothing_else(tmp_path: Path, spark: SparkSession) -> None:
    url, table = f"file://{tmp_path}/orders.ss/orders", tmp_path / "orders"
    with create_producer(url) as producer:
        for day in DAYS:
            for index, moment in enumerate((0, 1, DAY_MS // 2, DAY_MS - 1)):
                payload = b'{"id": %d, "user": "u%d"}' % (day, index)
                producer.send(payload, timestamp_ms=FIRST_DAY_MS + (day - DAYS[0]) * DAY_MS + moment)
    reports = drain(spark, url, ingestion(table, records=4))
    assert [report.rows for report in reports] == [4] * len(DAYS)
    files, version = rows_by_file(table), DeltaTable(str(table)).version()
    with airflow(tmp_path, "days.py", TEST_STREAM=url, TEST_TABLE=str(table)) as services:
        services.until(lambda: "days" in services.dags(), seconds=ROWS_SECONDS, what="the DAG")
        services.home.run(
            "airflow", "backfill", "create", "--dag-id", "days", "--from-date", "2023-11-16", "--to-date", "2023-11-18"
        )
        runs = services.finished_runs("days", seconds=ROWS_SECONDS)
        assert {run["state"] for run in runs} == {"success"}, services.logs()
        assert sorted(run["logical_date"][:10] for run in runs) == ["2023-11-16", "2023-11-17", "2023-11-18"]
    after = rows_by_file(table)
    kept = {file: rows for file, rows in files.items() if rows[0][0] not in REPLAYED}
    assert len(kept) == len(DAYS) - len(REPLAYED)
    assert {file: rows for file, rows in after.items() if file in files} == kept
    replaced = sorted(row for file, rows in after.items() if file not in files for row in rows)
    assert replaced == [(day, "replayed") for day in REPLAYED for _ in range(4)]
    assert DeltaTable(str(table)).version() >= version + len(REPLAYED)
    assert_exactly_once(url, table, sequences_in_file(tmp_path / "orders.ss"))


def rows_by_file(table: Path) -> dict[str, list[tuple[int, str]]]:
    """The number and the user of each row, by the data file of the newest version that has it."""
    found = {}
    for file in DeltaTable(str(table)).file_uris():
        columns = pq.read_table(file, columns=["id", "user"]).to_pydict()
        found[file] = list(zip(columns["id"], columns["user"], strict=True))
    return found
