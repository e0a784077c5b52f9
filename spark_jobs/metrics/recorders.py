"""Defines the metrics of a batch, and creates the recorders that the environment names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import unquote

from stream_consumers.client_config import address_options, environment
from stream_consumers.errors import log_text
from stream_consumers.library_logs import redact_logs

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
"""The counters by name, each with its unit and its description."""
LAG = "Messages that the group is behind after its last batch."
DURATIONS = {"batch": "From plan to commit.", "step": "A step of a batch."}
TEXTFILE_VARIABLE = "STREAM_ASSETS_PROMETHEUS_TEXTFILES"
_log = logging.getLogger(__name__)


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
        """Return the labels of Prometheus, which are also the attributes of OpenTelemetry."""
        return asdict(self)

    def of_stream(self, stream: str) -> dict[str, str]:
        """Return the labels of the lag of a stream."""
        return {"group": self.group, "table": self.table, "stream": stream}


@dataclass(frozen=True, slots=True)
class BatchNumbers:
    """The numbers of a batch that is in the table.

    Args:
        messages: the number of decoded messages.
        rows: the number of rows in its commit.
        bytes: the size of the files of its commit.
        dead_letters: the number of messages that became dead letters.
        seconds: the time from the plan to the commit.
        lag: the lag of each stream; empty for a replay or a redrive, which do not change it.
    """

    messages: int
    rows: int
    bytes: int
    dead_letters: int
    seconds: float
    lag: Mapping[str, int]

    def counts(self) -> dict[str, int]:
        """Return the amount that this batch adds to each of :data:`COUNTERS`."""
        return {"batches": 1, **{name: getattr(self, name) for name in COUNTERS if name != "batches"}}


class Recorder(Protocol):
    """Records steps and batches."""

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """Record how long a step of a batch took."""

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """Record a batch that is in the table."""


class Recorders:
    """Several recorders as one; an error of one is logged, and that recorder gets no more calls."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = list(recorders)

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """See :class:`Recorder`."""
        self._call(lambda one: one.step(labels, name, seconds))

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """See :class:`Recorder`."""
        self._call(lambda one: one.batch(labels, numbers))

    def _call(self, call: Callable[[Recorder], None]) -> None:
        for one in list(self._recorders):
            try:
                call(one)
            except Exception as error:  # noqa: BLE001 - an error of a metric must not fail a batch
                self._recorders.remove(one)
                name = type(one).__name__
                _log.error("%s failed to record a batch, and is switched off: %s", name, log_text(error))


@cache
def recorders() -> Recorders:
    """Return the recorders that the environment of this process names.

    ``OTEL_EXPORTER_OTLP_ENDPOINT``, and the other variables of OpenTelemetry, name a receiver of OTLP; a program that
    has set up OpenTelemetry itself needs no variable. ``STREAM_ASSETS_PROMETHEUS_TEXTFILES`` names a folder of the
    textfile collector of Prometheus' node exporter. If a recorder cannot be set up, a warning is logged.
    """
    redact_logs(_otlp_secrets)
    otlp = ", ".join(name for name in OTLP_VARIABLES if os.environ.get(name))
    found = [_set_up("opentelemetry", "OpenTelemetryRecorder", otlp)]
    if folder := os.environ.get(TEXTFILE_VARIABLE):
        found.append(_set_up("prometheus", "TextfileRecorder", TEXTFILE_VARIABLE, folder))
    return Recorders([one for one in found if one])


def _set_up(extra: str, name: str, variables: str, *arguments: Any) -> Recorder | None:
    """Create a recorder, or log why that failed; without ``variables``, a missing package is not logged."""
    try:
        # Imported only here, so that a run without metrics does not load the packages.
        recorder: Recorder = getattr(import_module(f"spark_jobs.metrics.{extra}"), name)(*arguments)
        return recorder
    except ImportError as error:
        if variables:
            _log.warning("%s is set, but %s; install stream-assets[%s]", variables, error, extra)
    except Exception as error:  # noqa: BLE001 - an error of a metric must not fail a batch
        # The package may be too old, or reject the values of its variables.
        said = log_text(error)
        _log.warning("no metrics of %s: %s; install stream-assets[%s], and correct its variables", extra, said, extra)
    return None


def _otlp_secrets() -> dict[str, str]:
    """Return the headers in the environment, as they are written and decoded, and all of an address but its host."""
    values = {name: value for name, value in environment().items() if name.startswith("OTEL_EXPORTER_OTLP")}
    headers = {name: value for name, value in values.items() if name.endswith("_HEADERS")}
    # The parts of a short value may be too short to be hidden, so each value is an option of its own.
    parts = {
        f"{name} {place} token": header.partition("=")[2]
        for name, value in headers.items()
        for place, header in enumerate(value.split(","))
    }
    written = {**headers, **parts}
    decoded = {f"{name} decoded": unquote(value) for name, value in written.items()}
    addresses = {name: value for name, value in values.items() if name.endswith("_ENDPOINT")}
    return {**written, **decoded, **address_options(addresses)}
