"""What is measured of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""The bounds of the histograms of durations."""


@dataclass(frozen=True, slots=True)
class BatchLabels:
    """Whose numbers these are.

    Args:
        group: the consumer group.
        table: the Delta table.
        kind: batch or replay.
    """

    group: str
    table: str
    kind: str

    def to_dict(self) -> dict[str, str]:
        """As labels of Prometheus, and attributes of OpenTelemetry."""
        return {"group": self.group, "table": self.table, "kind": self.kind}


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
