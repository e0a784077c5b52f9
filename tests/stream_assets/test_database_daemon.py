"""A table that a real daemon keeps equal to one of a real Postgres, while its runs are killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from spark_jobs.verify_keyed import verify_keyed
from spark_jobs.writing.delta_table import is_conflict
from stream_assets.testing import KILLS_VARIABLE
from tests.support import mirrored_customers
from tests.support.customers import TABLE, Customers
from tests.support.dagster_services import Dagster, dagster_services
from tests.support.debezium import PREFIX, debezium
from tests.support.kafka_topics import Topics
from tests.support.mirrored_customers import REMOTE_VARIABLE, TABLE_VARIABLE, URL_VARIABLE, declare_mirror
from tests.support.polling import until
from tests.support.postgres import postgres_server
from tests.support.user_interface import UserInterface

pytestmark = [pytest.mark.dagster, pytest.mark.kill, pytest.mark.slow]
SECONDS = 600.0
PARTITIONS = 2
KILLS = ("read", "mid-write", "rows written")
SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


class Mirror:
    """The table of the asset, whose runs use a server."""

    def __init__(self, topics: Topics, topic: str, server: str) -> None:
        self.topics, self.topic = topics, topic
        self.table = str(topics.folder / "customers")
        self.variables = {
            URL_VARIABLE: f"kafka://{topics.address}/{topic}",
            TABLE_VARIABLE: self.table,
            REMOTE_VARIABLE: server,
        }
        self._declared = declare_mirror(*self.variables.values()).declared

    def positions(self, divisor: int = 1) -> dict[str, int]:
        """The positions of the group, or places on the way to them."""
        positions = self._declared.ingestion.ledger().read().positions
        return {str(shard): position // divisor for shard, position in positions.items()}

    def is_drained(self) -> bool:
        return self.positions() == {
            f"{self.topic}/{number}": self.topics.end(self.topic, partition=number) for number in range(PARTITIONS)
        }

    def is_restored(self) -> bool:
        """Whether the table was taken back to before its last commit; a commit of a run may win against that."""
        snapshot = self._declared.ingestion.ledger().log.snapshot()
        assert snapshot is not None
        try:
            self.topics.spark.sql(f"RESTORE delta.`{self.table}` TO VERSION AS OF {snapshot.version - 1}")
        except Exception as error:
            if not is_conflict(error):
                raise
            return False
        return True

    def assert_equal(self, customers: Customers) -> None:
        customers.assert_equal(self.table)
        with self._declared.stream.open() as source:
            assert verify_keyed(self.topics.spark, source, self._declared.ingestion).is_right


class Runs:
    """The runs of a daemon."""

    def __init__(self, dagster: Dagster) -> None:
        self._dagster = dagster
        self._ui = UserInterface(dagster, mirrored_customers.__name__)

    def statuses(self) -> Counter[dg.DagsterRunStatus]:
        return Counter(run.status for run in self._dagster.instance.get_runs())

    def are_over(self) -> bool:
        return all(run.is_finished for run in self._dagster.instance.get_runs())

    def run(self, job: str, op: str, config: dict[str, Any]) -> None:
        """Launch a run in the UI, and wait until it has succeeded."""
        asked = self._ui.launch(job, {"ops": {op: {"config": config}}})

        def ended() -> dg.DagsterRun | None:
            run = self._dagster.instance.get_run_by_id(asked)
            return run if run is not None and run.is_finished else None

        run = until(ended, seconds=SECONDS, what=f"the end of {job}")
        assert run.status is SUCCESS, self._dagster.daemon_log.read_text()[-8000:]


@pytest.fixture
def topics(kafka: str, spark: SparkSession, folder: Path) -> Iterator[Topics]:
    with Topics(kafka, spark, folder) as made:
        yield made


def test_a_daemon_keeps_a_table_equal_to_that_of_a_database(server: str, topics: Topics, folder: Path) -> None:
    """Runs are killed, and a user restores, rewinds, replays and rebuilds the table, while clients change rows."""
    topic = topics.create(name=f"{PREFIX}.{TABLE}", partitions=PARTITIONS)
    mirror = Mirror(topics, topic, server)
    variables = {**mirror.variables, KILLS_VARIABLE: ",".join(KILLS)}
    with postgres_server(logs_changes=True) as database:
        customers = Customers(database)
        customers.insert(100)
        with (
            debezium(folder / "debezium", topics.address, database, TABLE),
            dagster_services(folder / "dagster", mirrored_customers.__name__, variables) as dagster,
        ):
            runs = Runs(dagster)
            with customers.changing(keys=60, pause=0.4):
                until(lambda: runs.statuses()[SUCCESS], seconds=SECONDS, what="a run that is not killed")
                assert runs.statuses()[FAILURE] == len(KILLS)
                until(mirror.is_restored, seconds=SECONDS, what="the RESTORE")
                back = {"start": {"rewind": mirror.positions(2)}, "move_group": True}
                runs.run("ingest_customers", "customers", back)
                replayed = {"start": {"rewind": mirror.positions(5)}, "stop": {"rewind": mirror.positions(3)}}
                runs.run("ingest_customers", "customers", replayed)
                runs.run("rebuild_customers", "rebuild_customers_table", {})
            customers.until_sent()
            until(lambda: mirror.is_drained() and runs.are_over(), seconds=SECONDS, what="the end of the topic")
            assert runs.statuses()[FAILURE] == len(KILLS)
        mirror.assert_equal(customers)
