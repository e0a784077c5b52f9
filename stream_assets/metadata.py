"""The metadata that Dagster gets about batches, tables and dead letters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import dagster as dg
from pyspark.sql.types import StructField

from spark_jobs.batches.dead_letter_jobs import Outcome
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.dead_letters.reader import DeadLetterFilter, DeadLetterKind, DeadLetters
from spark_jobs.reading.source import STREAM_DESCRIPTIONS
from spark_jobs.run_report import BatchTotals, ReportedValue
from stream_consumers.display import counted, shortened
from stream_consumers.errors import StreamAssetsError

KIND = "stream/kind"
VERSION = "delta/version"
REPORTED_VERSION = "ingest/version"
PARTITION_ROWS = "ingest/partition_rows"
PARTITION_ROW_COUNT = "dagster/partition_row_count"
TABLE_NAME = "dagster/table_name"
TABLE_URI = "dagster/uri"
COLUMN_SCHEMA = "dagster/column_schema"
DEAD_LETTER_COMMANDS = "stream/dead_letter_commands"
MAX_DEAD_LETTERS_READ = 100_000
"""How many dead letters are read at most to find their kinds."""
MAX_KINDS = 20
"""How many kinds of dead letters are listed at most."""
MAX_PAYLOAD_CHARACTERS = 100
"""How many characters of a payload are shown at most."""
_MARKDOWN_CHARACTERS = re.compile(r"([\\`*_{}\[\]#|<>~&!])")
MATERIALIZATIONS_PER_PAGE = 100
"""How many materializations one query fetches."""
PARTITION_METADATA = (
    *(KIND, VERSION, TABLE_URI, COLUMN_SCHEMA),
    *("replay/start", "replay/stop", "replay/partitions", "replay/rows_left_out"),
)
"""The metadata of a run that applies to each partition that it changed; the rest are totals of the run."""


def materializations_of(
    instance: dg.DagsterInstance, wanted: dg.AssetKey | dg.AssetRecordsFilter
) -> Iterator[tuple[str, dg.AssetMaterialization]]:
    """Yield the materializations of an asset with the ids of their runs, the newest first.

    Args:
        instance: the Dagster instance.
        wanted: the asset, or a filter of its materializations.
    """
    cursor, has_more = None, True
    while has_more:
        page = instance.fetch_materializations(wanted, limit=MATERIALIZATIONS_PER_PAGE, cursor=cursor)
        for record in page.records:
            if record.asset_materialization is not None:
                yield record.run_id, record.asset_materialization
        cursor, has_more = page.cursor, page.has_more


def table_name(table: str) -> str:
    """Return ``schema.table`` from the last two folders of a path.

    Example:
        >>> table_name("s3a://bucket/lake/sales/orders"), table_name("orders")
        ('sales.orders', 'orders')
    """
    parts = table.partition("://")[2] or table
    return ".".join([part for part in parts.split("/") if part][-2:])


def batch_metadata(total: BatchTotals) -> dict[str, dg.MetadataValue]:
    """Return the metadata of the observation of one or more micro-batches, which Dagster plots."""
    last = total.last
    metadata: dict[str, dg.MetadataValue] = {
        **_total_metadata(total, "stream"),
        "stream/batches": dg.MetadataValue.int(total.batches),
        "stream/lag_after": dg.MetadataValue.int(sum(last.lag.values())),
        "stream/worst_lag": dg.MetadataValue.int(total.worst_lag),
        "stream/batch": dg.MetadataValue.text(last.entry.bid),
        "delta/transaction": dg.MetadataValue.int(last.entry.number),
        VERSION: dg.MetadataValue.int(last.version),
    }
    return metadata


def ingest_metadata(total: BatchTotals | None) -> dict[str, dg.MetadataValue]:
    """Return the metadata of the ingestion since the last materialization, with other keys than single batches.

    Args:
        total: the totals of this run; ``None`` if the batches were written by a run that was killed.
    """
    kind = {KIND: dg.MetadataValue.text("ingestion")}
    if total is None:
        return {**kind, "ingest/batches": dg.MetadataValue.int(0)}
    return {
        **kind,
        **_total_metadata(total, "ingest"),
        "ingest/batches": dg.MetadataValue.int(total.batches),
        "stream/lag_after": dg.MetadataValue.int(sum(total.last.lag.values())),
        "delta/first_version": dg.MetadataValue.int(total.first_version),
    }


def replay_metadata(
    total: BatchTotals | None, what: Mapping[str, str], *, rows_left_out: int
) -> dict[str, dg.MetadataValue]:
    """Return the metadata of a replay, with other keys than ingestion, so that a replay does not change its plots.

    Args:
        total: the totals of this run; ``None`` if there was nothing to replace.
        what: descriptions of what was replayed, like the partitions.
        rows_left_out: the number of rows of the replayed time that lie outside of the replayed ranges.
    """
    left_out = {"replay/rows_left_out": dg.MetadataValue.int(rows_left_out)} if rows_left_out else {}
    metadata: dict[str, dg.MetadataValue] = {
        KIND: dg.MetadataValue.text("replay"),
        **{f"replay/{name}": dg.MetadataValue.text(value) for name, value in what.items()},
        **left_out,
        "replay/batches": dg.MetadataValue.int(total.batches if total else 0),
    }
    if total is None:
        return metadata
    stale = {"replay/stale_rows": dg.MetadataValue.int(total.stale)} if total.stale else {}
    return {**metadata, **stale, **_total_metadata(total, "replay")}


def rebuild_metadata(total: BatchTotals | None) -> dict[str, dg.MetadataValue]:
    """Return the metadata of a rebuild.

    Args:
        total: the totals of the swap; ``None`` if a run that was killed has made it.
    """
    metadata: dict[str, dg.MetadataValue] = {KIND: dg.MetadataValue.text("rebuild")}
    if total is not None:
        metadata["rebuild/messages"] = dg.MetadataValue.int(total.last.entry.messages)
        metadata["rebuild/rows"] = dg.MetadataValue.int(total.rows)
        metadata["rebuild/dead_letters"] = dg.MetadataValue.int(total.last.dead)
    return metadata


def redrive_metadata(total: BatchTotals, outcome: Outcome) -> dict[str, dg.MetadataValue]:
    """Return the metadata of a redrive, with other keys than ingestion.

    Args:
        total: the totals of this run.
        outcome: how many dead letters became rows, and why the others did not.
    """
    return {
        KIND: dg.MetadataValue.text("redrive"),
        "redrive/batches": dg.MetadataValue.int(total.batches),
        "redrive/messages": dg.MetadataValue.int(sum(total.messages.values())),
        "redrive/rows": dg.MetadataValue.int(total.rows),
        **_refused_metadata(outcome),
    }


def outcome_metadata(outcome: Outcome) -> dict[str, dg.MetadataValue]:
    """Return the metadata of the run of a redrive job: the result of a redrive, or of a dry run."""
    return {"redrive/decoded": dg.MetadataValue.int(outcome.decoded), **_refused_metadata(outcome)}


def _refused_metadata(outcome: Outcome) -> dict[str, dg.MetadataValue]:
    columns = {"reason": "string", "dead letters": "int", "example": "string"}
    reasons = [(reason, refusal.count, refusal.first) for reason, refusal in outcome.refused.items()]
    return {
        "redrive/still_dead": dg.MetadataValue.int(outcome.dead),
        "redrive/reasons": _table(columns, reasons),
    }


def table_metadata(
    table: str, *, version: int, total_rows: int | None, columns: list[StructField] | None
) -> dict[str, dg.MetadataValue]:
    """Return the metadata of the table after a materialization.

    Args:
        table: the path or URI of the Delta table.
        version: the version of the table.
        total_rows: the rows in the table; ``None`` if the log does not have the number.
        columns: the columns; ``None`` if they are unknown.
    """
    metadata: dict[str, dg.MetadataValue] = {
        VERSION: dg.MetadataValue.int(version),
        TABLE_URI: dg.MetadataValue.url(table if "://" in table else f"file://{table}"),
    }
    if columns is not None:
        metadata[COLUMN_SCHEMA] = dg.MetadataValue.table_schema(column_schema(columns))
    if total_rows is not None:
        metadata["dagster/row_count"] = dg.MetadataValue.int(total_rows)
    return metadata


def _total_metadata(total: BatchTotals, prefix: str) -> dict[str, dg.MetadataValue]:
    return {f"{prefix}/{name}": _metadata_value(value) for name, value in total.values().items()}


def _metadata_value(value: ReportedValue) -> dg.MetadataValue:
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    if isinstance(value, float):
        return dg.MetadataValue.float(value)
    if isinstance(value, list):
        columns = {"shard": "string", **dict.fromkeys(("start", "end", "messages", "lag after"), "int")}
        return _table(columns, [list(row.values()) for row in value])
    return dg.MetadataValue.json(dict(value))


def column_schema(columns: list[StructField]) -> dg.TableSchema:
    """Convert Spark columns to a Dagster table schema."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.dataType.simpleString(),
                description=column.metadata.get("comment") or STREAM_DESCRIPTIONS.get(column.name),
                constraints=dg.TableColumnConstraints(nullable=column.nullable),
            )
            for column in columns
        ]
    )


def _table(columns: Mapping[str, str], rows: Iterable[Sequence[str | int | None]]) -> dg.MetadataValue:
    """Build a Dagster table whose columns have these types."""
    records = [dg.TableRecord(dict(zip(columns, row, strict=True))) for row in rows]
    schema = dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table(records, schema=schema)


def dead_letter_reasons(
    ingestion: Ingestion, *, batches: Collection[str] | None = None, payloads: bool = False
) -> dg.MetadataValue | None:
    """Return a Markdown table of the reasons of dead letters; ``None`` if there are no dead letters.

    If they cannot be read, the text gives the reason. This is not an error, because the rows are in the table.

    Args:
        ingestion: the group and the table.
        batches: the ids of the batches whose dead letters are listed; all dead letters that count by default.
        payloads: whether examples show the start of their payload. Dagster stores it for a long time, and its users may
            not have access to the table.
    """
    wanted, max_shown = DeadLetterFilter(batches=batches), MAX_PAYLOAD_CHARACTERS if payloads else 0
    try:
        kinds = DeadLetters(ingestion.table, group=ingestion.group, storage_options=ingestion.storage_options).kinds(
            wanted, limit=MAX_DEAD_LETTERS_READ, max_shown=max_shown
        )
    except StreamAssetsError as error:
        return dg.MetadataValue.text(f"the dead letters cannot be read: {error}")
    return dg.MetadataValue.md(reasons_markdown(kinds, payloads=payloads)) if kinds else None


def reasons_markdown(kinds: Sequence[DeadLetterKind], *, payloads: bool = False) -> str:
    """Return a Markdown table with a line for each of the most frequent kinds.

    Example:
        >>> from stream_consumers.messages import Shard
        >>> kind = DeadLetterKind("not a JSON object", 3, 0, 0, 0, None, None, [Shard("orders")], None)
        >>> print(reasons_markdown([kind]))
        | dead letters | reason | the first |
        |---:|---|---|
        | 3 | not a JSON object | – |
    """
    lines = [f"| dead letters | reason | the first |{' its payload |' if payloads else ''}"]
    lines.append(f"|---:|---|---|{'---|' if payloads else ''}")
    for kind in kinds[:MAX_KINDS]:
        example = kind.example
        cells = [str(kind.count), _cell(kind.reason), _cell(example.place) if example else "–"]
        cells += [_cell(example.payload) if example else "–"] if payloads else []
        lines.append(f"| {' | '.join(cells)} |")
    if len(kinds) > MAX_KINDS:
        others = sum(kind.count for kind in kinds[MAX_KINDS:])
        lines.append(f"| {others} | of {counted(len(kinds) - MAX_KINDS, 'more kind')} | {'| ' if payloads else ''}|")
    return "\n".join(lines)


def dead_letter_commands(table: str, group: str, *, redrive_job: str | None) -> dg.MetadataValue:
    """Return Markdown with the commands that list and redrive the dead letters of an asset.

    Args:
        table: the path or URI of the table, for display.
        group: the consumer group, for display.
        redrive_job: the name of the redrive job; ``None`` if the asset cannot have one.

    Example:
        >>> print(dead_letter_commands("lake/orders", "lakehouse", redrive_job=None).value)
        `stream-assets dead-letters list --table lake/orders --group lakehouse` lists the dead letters
    """
    options = shlex.join(["--table", table, "--group", group]).replace("`", "")
    text = f"`stream-assets dead-letters list {options}` lists the dead letters"
    if redrive_job is not None:
        text += (
            f"; `stream-assets dead-letters redrive` decodes them again, and so does the job `{redrive_job}` if "
            "`stream_definitions` has `redrive_jobs=True`"
        )
    return dg.MetadataValue.md(text)


def _cell(text: str) -> str:
    return _MARKDOWN_CHARACTERS.sub(r"\\\1", shortened(text, MAX_PAYLOAD_CHARACTERS + 20))
