"""The ``stream-assets`` command."""

from __future__ import annotations

import sys

import click

from stream_assets.cli.dead_letter_commands import dead_letters
from stream_assets.cli.group_commands import accept, adopt, rebuild, replay, rewind, seek, switch
from stream_assets.cli.ingest_commands import ingest, lag, verify
from stream_assets.cli.machine_commands import doctor, spark
from stream_assets.cli.options import ReportingGroup
from stream_assets.cli.stream_commands import infer, peek, produce, relay


@click.group(cls=ReportingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="stream-assets")
def main() -> None:
    """Streams into Delta tables exactly once.

    A URL names the streams after its last slash:

    \b
      file://path/to/orders.ss/orders      kafka://host:9092/orders      memory://name/orders
      stdio:///orders                      redis://host:6379/orders
    """


@main.command()
@click.option(
    "--messages", type=click.IntRange(min=4000), default=100_000, show_default=True, help="The number of messages."
)
def demo(messages: int) -> None:
    """Ingest messages from a file into Delta under a real Dagster daemon, which survives two killed runs.

    \b
    Example:
      stream-assets demo --messages 10000
    """
    from stream_assets.cli.demo import run_demo

    sys.exit(run_demo(messages))


for command in (
    *(produce, peek, infer, relay, ingest, lag, verify, rewind, seek, replay, rebuild),
    *(dead_letters, switch, adopt, accept, spark, doctor),
):
    main.add_command(command)

if __name__ == "__main__":
    main()
