"""Executors on a cluster without our packages, and tables on Amazon S3: each message once, whatever dies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.jars import SPARK_LINE
from spark_jobs.verify import verify
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.urls import StreamUrl
from tests.support.class_archive import quick_options
from tests.support.crashing import HUNGRY, SEGFAULT
from tests.support.crashing_streams import assert_refused, write_crashing
from tests.support.decoders_of_runs import CRASHING
from tests.support.killed_runs import Run, asleep, kill_in_turn, logs, running
from tests.support.one_run import CONFIG_VARIABLE, MASTER_VARIABLE, RETRY_VARIABLE, TABLE_VARIABLE
from tests.support.polling import until
from tests.support.s3_server import SECRET, ObjectStore, object_store
from tests.support.spark_cluster import Cluster, spark_cluster, without_checkout
from tests.support.spark_connect import connect_server
from tests.support.spark_servers import spark_servers
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.slow]
MESSAGES = 800
SLOW = ("lakehouse", "resumable", "", "main", "slow")


def environment(cluster: Cluster, **config: str) -> Mapping[str, str]:
    """For a run whose driver is here and whose executors are there."""
    of_executors = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": quick_options()}
    settings = {**of_executors, **cluster.config, "spark.cores.max": "2", **config}
    return {MASTER_VARIABLE: cluster.master, CONFIG_VARIABLE: json.dumps(settings), "PYSPARK_PYTHON": sys.executable}


def assert_right(url: str, folder: Path) -> None:
    assert_each_once(folder / "orders.ss", folder / "t")
    with open_batch_source(StreamUrl.parse(url)) as source:
        found = verify(source, Ingestion(group="lakehouse", table=str(folder / "t")))
        assert [verdict.is_right for verdict in found] == [True, True]


def test_executors_are_sent_the_packages_that_they_lack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    url = write_stream(folder / "orders.ss", 100, malformed=frozenset({7}))
    with (
        spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster,
        running(url, folder / "t", environment=environment(cluster)) as run,
    ):
        assert run.wait() == 0, logs(folder / "t")
    assert_right(url, folder)


def test_what_crashes_the_decoder_on_executors_is_dead(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    url = write_crashing(folder / "orders.ss", 100, segfault=17, hungry=80)
    with (
        spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster,
        running(url, folder / "t", environment={**environment(cluster), **CRASHING}) as run,
    ):
        assert run.wait() == 0, logs(folder / "t")
    assert_refused(folder / "t", SEGFAULT, HUNGRY)
    assert_each_once(folder / "orders.ss", folder / "t")


def test_a_worker_is_killed_while_its_executor_reads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset({7}))
    with (
        spark_cluster(tmp_path_factory.mktemp("cluster")) as cluster,
        running(url, folder / "t", "", *SLOW, records=400, environment=environment(cluster)) as run,
    ):
        until(lambda: "writing 3" in logs(folder / "t") or run.has_ended(), seconds=600, what="the second batch")
        assert not run.has_ended(), logs(folder / "t")
        cluster.kill_worker(0)
        assert "rows written 3" not in logs(folder / "t"), "it was killed in the middle"
        assert run.wait() == 0, logs(folder / "t")
    assert_right(url, folder)
    assert "drained" in logs(folder / "t")


def test_drivers_are_killed_where_executors_are_at_work(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    url = write_stream(folder / "orders.ss", 400, malformed=frozenset({7, 200}))
    # Of the other steps the executors know nothing.
    faults = ["planned", "dead letters written", "mid-write", "verified"]
    with spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster:
        kill_in_turn(url, folder / "t", faults, environment=environment(cluster))
        assert 0 < sum(sequences_in_table(folder / "t").values()) < 400, "each was killed on the way"
        with running(url, folder / "t", environment=environment(cluster)) as run:
            assert run.wait() == 0, logs(folder / "t")
    assert_right(url, folder)


def test_what_speculation_reads_twice_is_there_once(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset({7}))
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.01",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "50ms",
    }
    with (
        spark_cluster(tmp_path_factory.mktemp("cluster")) as cluster,
        running(url, folder / "t", "", *SLOW, records=400, environment=environment(cluster, **speculation)) as run,
    ):
        assert run.wait() == 0, logs(folder / "t")
    assert_right(url, folder)


def test_a_connect_server_elsewhere_lacks_the_packages(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, redis_address: str
) -> None:
    url, sent = sent_orders(redis_address, folder.name, 100)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    table = f"s3a://lake/{folder.name}/orders"
    with (
        object_store(elsewhere) as store,
        connect_server(
            elsewhere, table=table, storage_options=store.options, packages=without_checkout(elsewhere)
        ) as server,
    ):
        more = ("lakehouse", "resumable", server)
        own = {**store.options, TABLE_VARIABLE: table}
        kill_in_turn(url, folder / "t", ["planned", "rows written"], *more, environment=own)
        with running(url, folder / "t", "", *more, environment=own) as run:
            assert run.wait() == 0, logs(folder / "t")
        found = sequences_in_table(table, store.options)
    assert {sequence for _, _, sequence in found} == sent
    assert set(found.values()) == {1}


def sent_orders(address: str, name: str, count: int) -> tuple[str, set[int]]:
    """A stream of Redis, and the sequences of its messages."""
    url = f"redis://{address}/{name}"
    with create_producer(url) as producer:
        receipts = [producer.send(b'{"id": %d, "user": "u"}' % number) for number in range(count)]
        return url, {receipt.sequence for receipt in receipts}


# What a firewall between the executors and the broker does; there is none on this machine.
_CUT_OFF = """import socket
def refuse(self, address):
    if isinstance(address, tuple) and address[1] == {port}:
        raise ConnectionRefusedError(111, "Connection refused")
    return connect(self, address)
connect = socket.socket.connect
socket.socket.connect = refuse
socket.gethostname = lambda: "worker-7"
"""


def test_executors_cut_off_say_so(folder: Path, tmp_path_factory: pytest.TempPathFactory, redis_address: str) -> None:
    url, _ = sent_orders(redis_address, folder.name, 10)
    site = _CUT_OFF.format(port=redis_address.rpartition(":")[2])
    with (
        spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1, site=site) as cluster,
        running(url, folder / "t", environment={**environment(cluster), RETRY_VARIABLE: "0"}) as run,
    ):
        assert run.wait() == 1
    assert "executor worker-7: " in logs(folder / "t")
    assert sum(sequences_in_table(folder / "t").values()) == 0


on_s3 = pytest.mark.skipif(SPARK_LINE == "4.0", reason="its Hadoop cannot put a commit only if it is absent")
ON_S3 = 400


class Pipeline:
    """A stream file, and a table on S3."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store = store
        self.file = folder / "orders.ss"
        self.url = write_stream(self.file, ON_S3, malformed=frozenset({5, 200}))
        # The folder keeps what the runs said, and which faults have happened.
        self.runs = folder / "t"
        self.table = f"s3a://lake/{folder.name}/orders"
        self.environment = {**store.options, TABLE_VARIABLE: self.table}

    def run(self, fault: str = "", *more: str) -> Run:
        """A run that has ended."""
        with running(self.url, self.runs, fault, *more, environment=self.environment) as run:
            assert run.wait() == 0, logs(self.runs)
        return run

    def rows(self) -> int:
        return sum(sequences_in_table(self.table, self.store.options).values())

    def assert_each_once(self) -> None:
        assert_each_once(self.file, self.table, self.store.options)
        ingestion = Ingestion(group="lakehouse", table=self.table, storage_options=self.store.options)
        with open_batch_source(StreamUrl.parse(self.url)) as source:
            assert [verdict.is_right for verdict in verify(source, ingestion)] == [True, True]
        assert SECRET not in logs(self.runs)


@pytest.fixture
def pipeline(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with object_store(tmp_path_factory.mktemp("s3")) as store:
        yield Pipeline(store, folder)


@on_s3
def test_runs_that_are_killed_at_any_step_are_continued(pipeline: Pipeline, folder: Path) -> None:
    faults = ["initialized", "planned", "dead letters written", "rows written", "verified", "committed"]
    with spark_servers(folder / "servers") as servers:
        more = ("lakehouse", "resumable", f"servers:{servers.folder}")
        kill_in_turn(pipeline.url, pipeline.runs, faults, *more, environment=pipeline.environment)
        assert 0 < pipeline.rows() < ON_S3, "each was killed on the way"
        pipeline.run("", *more)
    pipeline.assert_each_once()


@on_s3
def test_a_run_that_is_killed_in_the_middle_of_a_write_is_continued(pipeline: Pipeline) -> None:
    more = ("lakehouse", "resumable", "", "main", "slow")
    with running(pipeline.url, pipeline.runs, "", *more, environment=pipeline.environment) as run:
        until(lambda: "writing 2\n" in logs(pipeline.runs), seconds=600, what="a write")
        run.kill()
    assert "rows written 2\n" not in logs(pipeline.runs), "it was killed in the middle"
    pipeline.run("", *more)
    pipeline.assert_each_once()


@on_s3
def test_two_drivers_at_once_write_each_message_once(pipeline: Pipeline) -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(running(pipeline.url, pipeline.runs, records=40, environment=pipeline.environment))
            for _ in range(2)
        ]
        assert [run.wait() for run in both] == [0, 0], logs(pipeline.runs)
    pipeline.assert_each_once()
    # Each of them has written something, or it was no race.
    assert DeltaTable(pipeline.table, storage_options=pipeline.store.options).version() >= ON_S3 // 40


@on_s3
def test_a_run_that_is_stopped_in_the_middle_wakes_up_when_another_has_done_its_work(pipeline: Pipeline) -> None:
    with asleep(pipeline.url, pipeline.runs, "writing@3!group-SIGSTOP", environment=pipeline.environment):
        pipeline.run()
        pipeline.assert_each_once()
    pipeline.assert_each_once()
