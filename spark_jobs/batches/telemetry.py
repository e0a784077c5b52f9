"""What is told of batches to those who watch: metrics, log lines with numbers, and which batch each line is about."""

from __future__ import annotations

import logging
import time

from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step
from spark_jobs.metrics.numbers import BatchLabels, BatchNumbers
from spark_jobs.metrics.recorders import recorders
from spark_jobs.structured_logs import FIELDS, about

_log = logging.getLogger(__name__)


class BatchTelemetry:
    """An observer that tells another one, and measures the time between the steps.

    Args:
        ingestion: what goes where.
        observer: told of each step; the time that it takes is no part of the next one.
    """

    def __init__(self, ingestion: Ingestion, observer: Observer) -> None:
        self._ingestion = ingestion
        self._observer = observer
        self._recorders = recorders()
        self._since = time.monotonic()

    def __call__(self, step: Step, batch: Batch | None) -> None:
        """A step is done."""
        seconds = time.monotonic() - self._since
        if batch is not None:
            about(self._fields(batch))
            self._recorders.step(self._labels(batch), step.value, seconds)
        self._observer(step, batch)
        self._since = time.monotonic()

    def planning(self) -> None:
        """Another batch is looked for: what is logged now is about none."""
        about({})
        self._since = time.monotonic()

    def written(self, report: BatchReport) -> None:
        """A batch is in the table and committed."""
        # One that was tried in one pass, and read again, has another id than it was planned with.
        about(self._fields(report.batch))
        messages = sum(report.messages.values())
        lag: dict[str, int] = {}
        for shard, count in report.lag.items():
            lag[shard.stream] = lag.get(shard.stream, 0) + count
        # What a replay has left is not what the group is behind.
        behind = lag if report.batch.entry.kind == "batch" else {}
        numbers = BatchNumbers(messages, report.rows, report.bytes, report.dead, report.seconds, behind)
        self._recorders.batch(self._labels(report.batch), numbers)
        _log.info(
            "%s is in version %d of %s: %d messages, %d rows, %d dead letters in %.2f s, lag %d",
            report.batch.entry.kind,
            report.version,
            self._ingestion.table,
            messages,
            report.rows,
            report.dead,
            report.seconds,
            sum(lag.values()),
            extra={
                FIELDS: {
                    "version": report.version,
                    "messages": messages,
                    "rows": report.rows,
                    "bytes": report.bytes,
                    "dead_letters": report.dead,
                    "seconds": round(report.seconds, 3),
                    "lag": sum(lag.values()),
                }
            },
        )

    def _labels(self, batch: Batch) -> BatchLabels:
        return BatchLabels(self._ingestion.group, self._ingestion.table, batch.entry.kind)

    def _fields(self, batch: Batch) -> dict[str, object]:
        return {
            "batch": batch.entry.bid,
            "batch_number": batch.number,
            "batch_kind": batch.entry.kind,
            "group": self._ingestion.group,
            "table": self._ingestion.table,
        }
