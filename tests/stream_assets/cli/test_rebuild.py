"""The command that makes a table anew, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_jobs.batches import rebuild
from spark_jobs.batches.ingestion import BatchReport
from stream_assets.cli.options import SparkSettings
from tests.support.command_line import failing, printed, run
from tests.support.rebuilds import rebuild_reports, write_table
from tests.support.streams import write_stream

SCHEMA = ("--decode", "json", "--schema", "id BIGINT, user STRING")


def test_a_table_that_does_not_exist_is_not_made(folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 5)
    failing(run("rebuild", "--source", url, "--table", folder / "t", "--group", "g", *SCHEMA))
    assert not (folder / "t_rebuild").exists()


def test_the_batches_of_the_staging_table_and_the_swap_are_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_stream(folder / "orders.ss", 5)
    write_table(folder / "t", group="g")
    words = ("rebuild", "--source", url, "--table", folder / "t", "--group", "g", *SCHEMA, "--keys", "id")
    wanted: list[object] = []

    def events(_: object, __: object, ingestion: object) -> Iterator[BatchReport]:
        wanted.append(ingestion)
        return rebuild_reports()

    monkeypatch.setattr(SparkSettings, "session", lambda *_: None)
    monkeypatch.setattr(rebuild, "rebuild_events", events)
    # The log names files that are not there.
    monkeypatch.setattr(rebuild, "scan", lambda *_, **__: iter(()))
    rows = printed(*words, "--sequence-by", "user")
    assert [(row["table"], row["version"], row["rows"]) for row in rows] == [("staging", 3, 3), ("swapped", 7, 4)]
    assert [str(getattr(one, "key_order", "")) for one in wanted] == ["id in the order of user"]
