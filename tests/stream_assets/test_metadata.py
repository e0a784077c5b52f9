"""What Dagster shows of a table and of its dead letters: without payloads unless the asset asks for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from pyspark.sql.types import LongType, StringType, StructField

from spark_jobs.batches.ingestion import Ingestion
from stream_assets import NO_DEAD_LETTERS, ErrorPolicy, StreamCheckContext
from stream_assets.materializations import IngestMaterializations, RunScope
from stream_assets.metadata import column_schema, dead_letter_reasons, table_metadata
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource
from tests.support.batch_reports import report
from tests.support.dagster_runs import plain_asset
from tests.support.letter_tables import CLICKS, ORDERS, Tables

pytestmark = pytest.mark.dagster
SECRET = "anna@example.com"


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(tmp_path)
    made.add(ORDERS, 9, 2, reason=f"field 'mail' is '{SECRET}|<b>'", payload=f'{{"mail": "{SECRET}|<b>"}}'.encode())
    made.add(CLICKS, 5, reason="not a JSON object", payload=b"\xff" * 5_000_000)
    return made


def ingestion(tables: Tables) -> Ingestion:
    return Ingestion("g", str(tables.main.path))


def text(value: dg.MetadataValue | None) -> str:
    assert isinstance(value, dg.MarkdownMetadataValue)
    return str(value.value)


def test_kinds_are_a_table_without_payloads_unless_they_are_wanted(tables: Tables) -> None:
    plain = text(dead_letter_reasons(ingestion(tables)))
    assert plain.splitlines() == [
        "| dead letters | reason | the first |",
        "|---:|---|---|",
        "| 2 | field '…' is '…' | orders/0=2 |",
        "| 1 | not a JSON object | clicks/0=5 |",
    ]
    whole = text(dead_letter_reasons(ingestion(tables), payloads=True))
    assert '| orders/0=2 | \\{"mail": "anna@example.com\\|\\<b\\>"\\} |' in whole
    assert "(5000000 bytes)" in whole
    assert len(whole) < 1000
    assert dead_letter_reasons(ingestion(tables), batches=["another"]) is None


def test_dead_letters_that_cannot_be_read_fail_nothing(tables: Tables) -> None:
    for file in Path(tables.table.path).glob("*.parquet"):
        file.unlink()
    assert isinstance(dead_letter_reasons(ingestion(tables)), dg.TextMetadataValue)


@pytest.mark.usefixtures("no_spark")
def test_a_materialization_tells_of_the_batches_of_its_run(tables: Tables) -> None:
    tables.commit(2, "bid-1", {ORDERS: Range(100, 200)}, dead=1)
    tables.add(ORDERS, 120, reason="of this run", batch="bid-1", number=2, payload=SECRET.encode())
    spark: Any = None
    context: Any = SimpleNamespace(log_event=lambda event: None, log=SimpleNamespace(info=lambda line: None))
    for payloads in (False, True):
        declared: Any = SimpleNamespace(partitions=None, errors=ErrorPolicy(dead_letter_payloads=payloads))
        source = StreamSource("memory://letters/orders")
        run = RunScope(context, dg.AssetKey("orders"), declared, source, ingestion(tables), spark)
        told = IngestMaterializations(run).report(iter([report(1)]))
        assert told is not None
        reasons = text(told.metadata["ingest/dead_letter_reasons"])
        assert reasons.splitlines()[2].startswith("| 1 | of this run | orders/0=120 |")
        assert (SECRET in reasons) is payloads
        assert len(reasons.splitlines()) == 3, "those of other runs are not told again"


def test_the_check_tells_of_all_that_count_and_how_to_go_on(tables: Tables) -> None:
    for payloads in (False, True):
        errors = ErrorPolicy(dead_letter_payloads=payloads)
        source, table = "memory://letters/orders,clicks", str(tables.main.path)
        asset = plain_asset(source=source, group="g", table=table, errors=errors)
        with dg.DagsterInstance.ephemeral() as instance:
            found = NO_DEAD_LETTERS.result(StreamCheckContext(asset.key, asset.declared, instance))
        reasons = text(found.metadata["stream/dead_letter_reasons"])
        assert reasons.splitlines()[2].startswith("| 2 | field '…' is '…' | orders/0=2 |")
        assert (SECRET in reasons) is payloads
        assert f"dead-letters list --table {tables.main.path} --group g`" in text(
            found.metadata["stream/dead_letter_commands"]
        )


def test_the_asset_says_before_any_run_how_to_look_and_which_job_redrives(tmp_path: Path) -> None:
    def commands(**options: Any) -> str:
        metadata = plain_asset(table="/lake/my orders", **options).get_asset_spec().metadata
        return text(metadata["stream/dead_letter_commands"])

    found = commands(group="it's")
    assert "dead-letters list --table '/lake/my orders' --group 'it'\"'\"'s'`" in found
    assert "the job `redrive_orders`" in found
    assert "`stream-assets dead-letters redrive`" in found
    assert "--group '{GROUP}'`" in commands(group=dg.EnvVar("GROUP")), "never what a variable holds"
    claimed = commands(group="g", source="redis://localhost:6379/orders", mode="load_balanced")
    assert "redrive" not in claimed


def test_an_asset_that_was_never_made_names_its_table() -> None:
    orders = plain_asset(table="s3a://bucket/lake/sales/orders")
    assert orders.get_asset_spec().metadata["dagster/table_name"] == "sales.orders"


def test_a_materialization_has_the_version_and_the_place_of_the_table() -> None:
    columns = [StructField("id", LongType())]
    told = table_metadata("/lake/sales/orders", version=3, total_rows=5, columns=columns)
    assert {name: value.value for name, value in told.items() if name != "dagster/column_schema"} == {
        "delta/version": 3,
        "dagster/uri": "file:///lake/sales/orders",
        "dagster/row_count": 5,
    }


def test_the_columns_of_a_message_are_described_and_a_comment_of_the_table_counts_more() -> None:
    columns = [StructField(name, StringType()) for name in ("_stream", "_shard", "_sequence", "_timestamp", "user")]
    columns.append(StructField("_timestamp", StringType(), metadata={"comment": "by the table"}))
    *places, user, own = (column.description for column in column_schema(columns).columns)
    assert all(places)
    assert (user, own) == (None, "by the table")
