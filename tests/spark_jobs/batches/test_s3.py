"""Tables on Amazon S3, for which a server stands that honours its conditions: each message once, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from deltalake import DeltaTable

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.jars import SPARK_LINE
from spark_jobs.verify import verify
from stream_consumers.create import open_batch_source
from stream_consumers.urls import StreamUrl
from tests.support.killed_runs import Run, asleep, kill_in_turn, logs, running
from tests.support.one_run import TABLE_VARIABLE
from tests.support.polling import until
from tests.support.s3_server import SECRET, ObjectStore, object_store
from tests.support.spark_servers import spark_servers
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kill,
    pytest.mark.skipif(SPARK_LINE == "4.0", reason="its Hadoop cannot put a commit only if it is absent"),
]
MESSAGES = 400


class Pipeline:
    """A stream file, and a table on S3."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store = store
        self.file = folder / "orders.ss"
        self.url = write_stream(self.file, MESSAGES, malformed=frozenset({5, 200}))
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


@pytest.mark.slow
def test_a_run_that_is_killed_behind_its_commit_is_continued(pipeline: Pipeline, folder: Path) -> None:
    with spark_servers(folder / "servers") as servers:
        more = ("lakehouse", "resumable", f"servers:{servers.folder}")
        kill_in_turn(
            pipeline.url, pipeline.runs, ["rows written"], *more, records=200, environment=pipeline.environment
        )
        pipeline.run("", *more)
    pipeline.assert_each_once()


@pytest.mark.slow
def test_runs_that_are_killed_at_any_step_are_continued(pipeline: Pipeline, folder: Path) -> None:
    faults = ["initialized", "planned", "dead letters written", "rows written", "verified", "committed"]
    with spark_servers(folder / "servers") as servers:
        more = ("lakehouse", "resumable", f"servers:{servers.folder}")
        kill_in_turn(pipeline.url, pipeline.runs, faults, *more, environment=pipeline.environment)
        assert 0 < pipeline.rows() < MESSAGES, "each was killed on the way"
        pipeline.run("", *more)
    pipeline.assert_each_once()


@pytest.mark.slow
def test_a_run_that_is_killed_in_the_middle_of_a_write_is_continued(pipeline: Pipeline) -> None:
    more = ("lakehouse", "resumable", "", "main", "slow")
    with running(pipeline.url, pipeline.runs, "", *more, environment=pipeline.environment) as run:
        until(lambda: "writing 2\n" in logs(pipeline.runs), seconds=600, what="a write")
        run.kill()
    assert "rows written 2\n" not in logs(pipeline.runs), "it was killed in the middle"
    pipeline.run("", *more)
    pipeline.assert_each_once()


@pytest.mark.slow
def test_two_drivers_at_once_write_each_message_once(pipeline: Pipeline) -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(running(pipeline.url, pipeline.runs, records=40, environment=pipeline.environment))
            for _ in range(2)
        ]
        assert [run.wait() for run in both] == [0, 0], logs(pipeline.runs)
    pipeline.assert_each_once()
    # Each of them has written something, or it was no race.
    assert DeltaTable(pipeline.table, storage_options=pipeline.store.options).version() >= MESSAGES // 40


@pytest.mark.slow
def test_a_run_that_is_stopped_in_the_middle_wakes_up_when_another_has_done_its_work(pipeline: Pipeline) -> None:
    with asleep(pipeline.url, pipeline.runs, "writing@3!group-SIGSTOP", environment=pipeline.environment):
        pipeline.run()
        pipeline.assert_each_once()
    pipeline.assert_each_once()
