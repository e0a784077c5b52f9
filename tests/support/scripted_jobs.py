"""Jobs without Spark, to see what a run makes of their batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spark_jobs.batches.ingestion import NOTHING_TO_READ, Batch, BatchReport, Event, Ingestion, Waiting, ignore_steps
from spark_jobs.batches.job import BatchJob, reports_of
from spark_jobs.batches.run_control import BatchSizer, Retries
from spark_jobs.batches.telemetry import BatchTelemetry
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.options import Limits


class ScriptedJob(BatchJob):
    """A job whose batches are values that a test gives.

    Args:
        retries: the budget for outages; none by default.
    """

    def __init__(self, retries: Retries | None = None) -> None:
        self.ingestion = Ingestion("lakehouse", "t")
        self.telemetry = BatchTelemetry(self.ingestion, ignore_steps)
        self.retries = retries or Retries(0)
        self.sizer = BatchSizer(Limits())

    @abstractmethod
    def next(self) -> Any:
        """The value of the next batch; ``None`` if there is none."""

    def put(self, value: Any) -> Any:
        """Write a batch: what its report has as its entry."""
        return value

    def plan(self) -> Batch | None:
        value = self.next()
        return None if value is None else Batch("batch", LedgerState(0, {}), fields={"value": value})

    def write(self, batch: Batch) -> Any:
        return self.put(batch.fields["value"])

    def finish(self, written: Any) -> dict[Any, int]:
        return {}

    def report(self, written: Any, lag: Any, seconds: float) -> BatchReport:
        return BatchReport(written, NOTHING_TO_READ, 1, {}, 0, 0, lag, seconds)


def values_of(events: Iterable[Event]) -> list[Any]:
    """The values of the batches that a run of a scripted job has yielded."""
    return [report.entry for report in reports_of(events)]


def reports_when_waiting(events: Iterable[Event], act: Callable[[str], object]) -> Iterator[BatchReport]:
    """The batches of a run; ``act`` is called with the reason whenever it waits."""
    for event in events:
        if isinstance(event, Waiting):
            act(event.why)
        elif isinstance(event, BatchReport):
            yield event
