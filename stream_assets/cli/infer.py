"""The command that finds a schema for the payloads of a stream: ``infer``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import client_option, storage_option
from stream_assets.cli.output import err, print_letter, print_rows, tell
from stream_assets.cli.streams import go_to
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import create_consumer
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError, TableUnreadableError
from stream_consumers.readable import printable
from stream_consumers.wording import counted

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@click.command()
@click.argument("url")
@click.option("--sample", type=click.IntRange(min=1), default=1000, show_default=True, help="Read so many messages.")
@click.option("--start", default="earliest", show_default=True, help="earliest, a sequence, or an ISO time.")
@click.option("--table-like", metavar="TABLE", help="Keep the types of this Delta table where the messages fit them.")
@click.option("--json", "as_json", is_flag=True, help="Print all that was found as JSON.")
@client_option()
@storage_option
def infer(
    url: str,
    sample: int,
    start: str,
    table_like: str | None,
    as_json: bool,
    client: ClientConfig,
    storage: dict[str, str],
) -> None:
    """Find a schema for payloads that are JSON: print the DDL, and on stderr what was found.

    It joins no group, commits nothing, and needs no Spark.

    \b
    Examples:
      stream-assets infer file://orders.ss/orders
      stream-assets infer kafka://localhost:9092/orders --sample 10000 --start 2026-11-01T00:00:00Z
      stream-assets infer file://orders.ss/orders --table-like lake/orders --json
    """
    from spark_jobs.writing.schema_inference import fitted, infer

    if start == "latest":
        raise InvalidOptionError(
            "--start latest: there is no message behind the last one", remedy="Use earliest, a sequence, or a time."
        )
    with create_consumer(url, live=False, client=client, on_dead_letter=print_letter) as consumer:
        go_to(consumer, start)
        payloads = [message.payload for message in islice(consumer, sample)]
    found = infer(payloads)
    if not found.fields:
        reasons = "; ".join(f"{count} are {reason}" for reason, count in found.refused.items())
        raise SchemaMismatchError(
            f"of {counted(found.messages, 'message')}, none has a field{': ' if reasons else ''}{reasons}",
            remedy="Read from another place with --start; or decode without a schema: --decode variant, text or raw.",
        )
    if table_like:
        found = fitted(found, payloads, _columns(table_like, storage))
    fields: list[dict[str, Any]] = [
        {"name": column.name, "type": column.ddl, "messages": column.messages, "remarks": list(column.remarks)}
        for column in found.fields
    ]
    if as_json:
        shown = {"messages": found.messages, "refused": dict(found.refused), "remarks": list(found.remarks)}
        click.echo(json.dumps({"ddl": found.ddl(), "fields": fields, **shown}))
        return
    for reason, count in found.refused.items():
        tell(f"{count} of {counted(found.messages, 'message')} would become dead letters: {reason}", style="yellow")
    print_rows(fields, title=counted(found.messages, "message"), console=err)
    for remark in found.remarks:
        tell(remark, style="yellow")
    click.echo(printable(found.ddl()))


def _columns(table: str, storage: Mapping[str, str]) -> StructType:
    """The columns of a table that are not of the stream."""
    from pyspark.sql.types import StructType

    from spark_jobs.ledger.delta_log import DeltaLog
    from spark_jobs.ledger.table_rows import schema_of
    from spark_jobs.reading.source import STREAM_COLUMNS
    from spark_jobs.table_location import check_location

    log = DeltaLog(check_location(table), storage_options=storage)
    if log.snapshot() is None:
        raise TableUnreadableError(f"there is no Delta table at {table}", remedy="Leave --table-like out.")
    columns = StructType.fromJson(dict(schema_of(log))).fields
    return StructType([column for column in columns if column.name not in STREAM_COLUMNS])
