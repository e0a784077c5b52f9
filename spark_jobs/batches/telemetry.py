"""Measures the steps of a batch, and records them in metrics and log lines."""

from __future__ import annotations

import logging
import time

from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step
from spark_jobs.metrics.recorders import BatchLabels, BatchNumbers, recorders
from spark_jobs.structured_logs import FIELDS, about

_log = logging.getLogger(__name__)


class BatchTelemetry:
    """An observer that measures the time between the steps, and calls another one.

    Args:
        ingestion: what goes where.
        observer: called at each step; the time that it takes is not counted.
        level: the level of the log line of a batch.
    """

    def __init__(self, ingestion: Ingestion, observer: Observer, *, level: int = logging.INFO) -> None:
        self._ingestion = ingestion
        self._observer = observer
        self._level = level
        self._recorders = recorders()
        self._since = time.monotonic()

    def __call__(self, step: Step, batch: Batch | None) -> None:
        """Record a step that is done."""
        seconds = time.monotonic() - self._since
        if batch is not None:
            fields = {"batch": batch.bid, "batch_number": batch.number, "batch_kind": batch.kind}
            about({**fields, "group": self._ingestion.group, "table": self._ingestion.table})
            self._recorders.step(self._labels(batch.kind), step.value, seconds)
        self._observer(step, batch)
        self._since = time.monotonic()

    def planning(self) -> None:
        """Start to measure the next batch; until it is planned, log lines are about no batch."""
        about({})
        self._since = time.monotonic()

    def reported(self, report: BatchReport) -> None:
        """Record a batch that is in the table and committed."""
        entry = report.entry
        messages = sum(report.messages.values())
        lag: dict[str, int] = {}
        for shard, count in report.lag.items():
            lag[shard.stream] = lag.get(shard.stream, 0) + count
        # The messages that a replay has left are not a lag of the group.
        group_lag = lag if entry.kind == "batch" else {}
        numbers = BatchNumbers(messages, report.rows, report.bytes, report.dead, report.seconds, group_lag)
        if entry.kind != "dismiss":
            self._recorders.batch(self._labels(entry.kind), numbers)
        fields = {
            "version": report.version,
            "messages": messages,
            "rows": report.rows,
            "bytes": report.bytes,
            "dead_letters": report.dead,
            "seconds": round(report.seconds, 3),
            "lag": sum(lag.values()),
        }
        text = (
            "%(kind)s is in version %(version)d of %(table)s: %(messages)d messages, %(rows)d rows, "
            "%(dead_letters)d dead letters in %(seconds).2f s, lag %(lag)d"
        )
        named = {"kind": entry.kind, "table": self._ingestion.table, **fields}
        _log.log(self._level, text, named, extra={FIELDS: fields})

    def _labels(self, kind: str) -> BatchLabels:
        return BatchLabels(self._ingestion.group, self._ingestion.table, kind)
