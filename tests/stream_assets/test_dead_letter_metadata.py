"""What Dagster is told of dead letters: without payloads unless somebody wants them, and as Markdown that is shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.delta_log import DeltaLog
from stream_assets import NO_DEAD_LETTERS, StreamAsset, StreamCheckContext, stream_asset
from stream_assets import materializations as module
from stream_assets.dead_letter_metadata import letter_reasons
from stream_assets.materializations import IngestMaterializations
from stream_consumers.batches import Range
from stream_consumers.errors import InvalidOptionError
from tests.support.batch_reports import report
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


def declare(tables: Tables, **options: Any) -> StreamAsset:
    @stream_asset(source="memory://letters/orders,clicks", group="g", table=str(tables.main.path), **options)
    def orders(batch: Any) -> Any:
        return batch

    return orders


def text(value: dg.MetadataValue | None) -> str:
    assert isinstance(value, dg.MarkdownMetadataValue)
    return str(value.value)


def test_kinds_are_a_table_without_payloads_unless_they_are_wanted(tables: Tables) -> None:
    plain = text(letter_reasons(ingestion(tables)))
    assert plain.splitlines() == [
        "| dead letters | reason | the first |",
        "|---:|---|---|",
        "| 2 | field '…' is '…' | orders/0=2 |",
        "| 1 | not a JSON object | clicks/0=5 |",
    ]
    whole = text(letter_reasons(ingestion(tables), payloads=True))
    assert '| orders/0=2 | \\{"mail": "anna@example.com\\|\\<b\\>"\\} |' in whole
    assert "(5000000 bytes)" in whole
    assert len(whole) < 1000
    assert letter_reasons(ingestion(tables), batches=["another"]) is None


def test_of_many_kinds_the_most_frequent_ones_are_told(tables: Tables) -> None:
    for number in range(30):
        tables.add(ORDERS, *range(100, 102 + number), reason=f"reason {chr(97 + number) * 2}")
    lines = text(letter_reasons(ingestion(tables), payloads=True)).splitlines()
    assert len(lines) == 2 + 20 + 1
    assert {line.replace("\\|", "").count("|") for line in lines} == {5}, "as many columns in each line"
    assert lines[2].startswith("| 31 |")
    assert "of 12 more kinds" in lines[-1]


def test_what_cannot_be_read_is_told_and_fails_nothing(tables: Tables) -> None:
    for file in Path(tables.table.path).glob("*.parquet"):
        file.unlink()
    found = letter_reasons(ingestion(tables))
    assert isinstance(found, dg.TextMetadataValue)
    assert str(found.value).startswith("the dead letters cannot be read: ")


def test_a_materialization_tells_of_the_batches_of_its_run(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_table", lambda spark, log: SimpleNamespace(schema=SimpleNamespace(fields=[])))
    monkeypatch.setattr(DeltaLog, "row_count", lambda log: 1000)
    tables.commit(2, "bid-1", {ORDERS: Range(100, 200)}, dead=1)
    tables.add(ORDERS, 120, reason="of this run", batch="bid-1", number=2, payload=SECRET.encode())
    spark: Any = None
    context: Any = SimpleNamespace(log_event=lambda event: None, log=SimpleNamespace(info=lambda line: None))
    for payloads in (False, True):
        told = IngestMaterializations(
            context, dg.AssetKey("orders"), ingestion(tables), spark, shows_payloads=payloads
        ).tell(iter([report(1)]))
        assert told is not None
        reasons = text(told.metadata["ingest/dead_letter_reasons"])
        assert reasons.splitlines()[2].startswith("| 1 | of this run | orders/0=120 |")
        assert (SECRET in reasons) is payloads
        assert len(reasons.splitlines()) == 3, "those of other runs are not told again"


def test_the_check_tells_of_all_that_count_and_how_to_go_on(tables: Tables) -> None:
    for payloads in (False, True):
        asset = declare(tables, dead_letter_payloads=payloads)
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
        given: dict[str, Any] = {"source": "memory://letters/orders", "table": "/lake/my orders", **options}
        metadata = stream_asset(name="orders", **given)(lambda rows: rows).get_asset_spec().metadata
        return text(metadata["stream/dead_letter_commands"])

    found = commands(group="it's")
    assert "dead-letters list --table '/lake/my orders' --group 'it'\"'\"'s'`" in found
    assert "the job `redrive_orders`" in found
    assert "`stream-assets dead-letters redrive`" in found
    assert "--group '{GROUP}'`" in commands(group=dg.EnvVar("GROUP")), "never what a variable holds"
    claimed = commands(group="g", source="redis://localhost:6379/orders", mode="load_balanced")
    assert "redrive" not in claimed


def test_a_switch_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="dead_letter_payloads"):
        declare(Tables(tmp_path), dead_letter_payloads="yes")
