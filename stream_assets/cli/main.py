"""The ``stream-assets`` command."""

from __future__ import annotations

import sys

import click

from stream_assets.cli.dead_letters import dead_letters
from stream_assets.cli.infer import infer
from stream_assets.cli.ingest_commands import accept, ingest, lag, switch, verify
from stream_assets.cli.options import ReportingGroup, SparkChoice, spark_options, storage_option
from stream_assets.cli.output import print_rows
from stream_assets.cli.relay import relay
from stream_assets.cli.replay import adopt, replay, rewind, seek
from stream_assets.cli.spark_servers import spark
from stream_assets.cli.streams import peek, produce


@click.group(cls=ReportingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="stream-assets")
def main() -> None:
    """Streams into Delta tables exactly once.

    URLs name the streams behind the last slash:

    \b
      file://path/to/orders.ss/orders      kafka://host:9092/orders      memory://name/orders
      stdio:///orders                      redis://host:6379/orders
    """


@main.command()
@click.option("--messages", type=click.IntRange(min=4000), default=100_000, show_default=True)
def demo(messages: int) -> None:
    """Messages from a file into Delta under a real Dagster daemon, with two runs killed on the way.

    \b
    Example:
      stream-assets demo --messages 10000
    """
    from stream_assets.cli.demo import run_demo

    sys.exit(run_demo(messages))


@main.command()
@click.option("--table", help="Also start Spark, and look whether it can write this table safely.")
@storage_option
@spark_options
def doctor(table: str | None, storage: dict[str, str], spark: SparkChoice) -> None:
    """Check what this machine has: Java, the Delta jars, packages; and whether two runs may write a table at once.

    \b
    Examples:
      stream-assets doctor && stream-assets demo
      stream-assets doctor --table s3a://lake/orders
    """
    from stream_assets.cli.doctor import examine, examine_table

    findings = [*examine(), *([examine_table(table, spark, storage)] if table else [])]
    print_rows([dict(finding) for finding in findings], title="doctor")
    if any(finding["state"] != "ok" for finding in findings):
        sys.exit(1)


COMMANDS = (
    produce,
    peek,
    infer,
    relay,
    ingest,
    lag,
    verify,
    rewind,
    seek,
    replay,
    dead_letters,
    switch,
    adopt,
    accept,
    spark,
)
for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main()
