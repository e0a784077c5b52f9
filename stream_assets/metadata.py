"""What Dagster is told of a batch."""

from __future__ import annotations

import dagster as dg
from pyspark.sql.types import StructField

from spark_jobs.batches.ingestion import BatchReport


def batch_metadata(
    report: BatchReport, *, table: str, total_rows: int | None, columns: list[StructField]
) -> dict[str, dg.MetadataValue]:
    """The metadata of one micro-batch.

    Args:
        report: the batch.
        table: the Delta table.
        total_rows: rows in the table after it, if they can be counted from the log.
        columns: the columns of the table.
    """
    written = sum(report.messages.values())
    metadata: dict[str, dg.MetadataValue] = {
        "stream/kind": dg.MetadataValue.text(report.batch.entry.kind),
        "stream/rows": dg.MetadataValue.int(report.rows),
        "stream/messages": dg.MetadataValue.int(written),
        "stream/dead_letters": dg.MetadataValue.int(report.dead),
        "stream/ranges": _ranges(report),
        "stream/lag_after": dg.MetadataValue.int(sum(report.lag.values())),
        "stream/rows_per_second": dg.MetadataValue.float(round(report.rows / report.seconds, 1)),
        "stream/batch": dg.MetadataValue.text(report.batch.entry.bid),
        "stream/batch_number": dg.MetadataValue.int(report.batch.number),
        "delta/version": dg.MetadataValue.int(report.version),
        "dagster/uri": dg.MetadataValue.url(table if "://" in table else f"file://{table}"),
        "dagster/column_schema": dg.MetadataValue.table_schema(column_schema(columns)),
    }
    if report.replaced is not None:
        metadata["stream/replaced_rows"] = dg.MetadataValue.int(report.replaced)
    if report.batch.entry.lost:
        lost = {str(shard): parts.to_json() for shard, parts in sorted(report.batch.entry.lost.items())}
        metadata["stream/lost"] = dg.MetadataValue.json(lost)
    if total_rows is not None:
        metadata["dagster/row_count"] = dg.MetadataValue.int(total_rows)
    return metadata


def column_schema(columns: list[StructField]) -> dg.TableSchema:
    """Spark columns as Dagster shows them."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.dataType.simpleString(),
                constraints=dg.TableColumnConstraints(nullable=column.nullable),
            )
            for column in columns
        ]
    )


def _ranges(report: BatchReport) -> dg.MetadataValue:
    records = [
        dg.TableRecord(
            {
                "shard": str(shard),
                "start": start,
                "end": end,
                "messages": report.messages.get(shard, 0),
                "lag after": report.lag.get(shard, 0),
            }
        )
        for shard, (start, end, *_) in sorted({**report.batch.entry.ranges, **report.batch.entry.claims}.items())
    ]
    return dg.MetadataValue.table(records, schema=_integers("shard", "start", "end", "messages", "lag after"))


def _integers(name: str, *numbers: str) -> dg.TableSchema:
    return dg.TableSchema(
        columns=[dg.TableColumn(name, "string"), *(dg.TableColumn(number, "int") for number in numbers)]
    )
