"""Who vouches for a single writer says so on the asset, for a run, or on the command line."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from pyspark.sql import SparkSession

from stream_assets import stream_asset
from stream_assets.asset import StreamAsset
from stream_assets.cli.main import main
from stream_assets.config import PlaceConfig, ReplayConfig, StreamConfig
from stream_consumers.errors import InvalidOptionError
from tests.support.command_line import run

SOURCE = "kafka://localhost:9092/orders"


def declare(*, single_writer: bool, mode: str = "resumable", members: int = 2) -> StreamAsset:
    @stream_asset(
        source=SOURCE,
        group="lakehouse",
        table="s3a://lake/orders",
        mode=mode,
        members=members,
        single_writer=single_writer,
    )
    def orders(batch):  # type: ignore[no-untyped-def]
        return batch

    assert isinstance(orders, StreamAsset)
    return orders


def test_an_asset_or_a_run_says_it() -> None:
    vouched, plain = declare(single_writer=True).ingestion, declare(single_writer=False).ingestion
    assert (vouched.single_writer, plain.single_writer) == (True, False)
    for config in (StreamConfig, ReplayConfig):
        assert config().configured(vouched).single_writer
        assert not config().configured(plain).single_writer
        assert config(single_writer=True).configured(plain).single_writer
    replayed = StreamConfig(start=PlaceConfig(rewind="earliest"), single_writer=True, max_records=7)
    assert replayed.configured(plain).limits.max_records == 7


def test_several_members_are_not_one_writer() -> None:
    with pytest.raises(InvalidOptionError, match=r"single_writer=True .* members=2"):
        declare(single_writer=True, mode="load_balanced")
    assert declare(single_writer=True, mode="load_balanced", members=1).ingestion.single_writer
    assert not declare(single_writer=False, mode="load_balanced").ingestion.single_writer


@pytest.mark.parametrize("name", ["ingest", "replay", "rewind", "seek", "switch", "doctor"])
def test_each_command_that_writes_has_the_flag(name: str) -> None:
    command = main.commands[name]
    assert "--single-writer" in command.get_help(click.Context(command))


def test_doctor_tells_of_two_runs_at_once() -> None:
    assert "two runs at once" in run("doctor").output


@pytest.mark.spark
def test_doctor_looks_at_the_log_store_of_a_table(spark: SparkSession, folder: Path) -> None:
    refused = run("doctor", "--table", "s3a://lake/orders")
    assert refused.exit_code == 1
    assert "spark.delta.logStore.s3a.impl" in "".join(refused.output.split())
    assert run("doctor", "--table", "s3a://lake/orders", "--single-writer").exit_code == 0
    local = run("doctor", "--table", folder / "t")
    assert local.exit_code == 0
    assert "HardLinkLogStore" in local.output
