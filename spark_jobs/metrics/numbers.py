"""What is measured of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""The bounds of the histograms of durations."""
COUNTERS: Mapping[str, tuple[str, str]] = {
    "batches": ("{batch}", "Batches in the table."),
    "messages": ("{message}", "Messages decoded."),
    "rows": ("{row}", "Rows written."),
    "bytes": ("By", "Bytes of the data files written."),
    "dead_letters": ("{message}", "Dead letters written."),
}
"""What is counted: the unit and the description, as both kinds of metrics have them."""
LAG = "Messages that the group is behind after its last batch."
DURATIONS = {"batch": "From plan to commit.", "step": "A step of a batch."}


@dataclass(frozen=True, slots=True)
class BatchLabels:
    """The labels of the numbers of a batch.

    Args:
        group: the consumer group.
        table: the Delta table.
        kind: batch or replay.
    """

    group: str
    table: str
    kind: str

    def to_dict(self) -> dict[str, str]:
        """Return them as labels of Prometheus, and attributes of OpenTelemetry."""
        return asdict(self)

    def of_stream(self, stream: str) -> dict[str, str]:
        """Return the labels of the lag of a stream."""
        return {"group": self.group, "table": self.table, "stream": stream}


@dataclass(frozen=True, slots=True)
class BatchNumbers:
    """The numbers of a batch that is in the table.

    Args:
        messages: messages decoded.
        rows: rows in its commit.
        bytes: of the files of its commit.
        dead_letters: messages that were none.
        seconds: from the plan to the commit.
        lag: per stream, the messages that the group is behind; empty for a replay or a redrive, which do not move it.
    """

    messages: int
    rows: int
    bytes: int
    dead_letters: int
    seconds: float
    lag: Mapping[str, int]

    def counts(self) -> dict[str, int]:
        """Return what this batch adds to each of :data:`COUNTERS`."""
        return {"batches": 1, **{name: getattr(self, name) for name in COUNTERS if name != "batches"}}
