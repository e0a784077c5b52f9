"""What is measured, and who is told: the recorders that the environment names, or none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from spark_jobs.metrics.numbers import OTLP_VARIABLES, BatchLabels, BatchNumbers

TEXTFILE_VARIABLE = "STREAM_ASSETS_PROMETHEUS_TEXTFILES"
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Is told of steps and batches."""

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """A step of a batch took so long."""

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """A batch is in the table."""


class Recorders:
    """Tells all of them; what one of them raises is logged once, and disturbs no batch."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = list(recorders)

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """See :class:`Recorder`."""
        self._tell(lambda one: one.step(labels, name, seconds))

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """See :class:`Recorder`."""
        self._tell(lambda one: one.batch(labels, numbers))

    def _tell(self, call: Callable[[Recorder], None]) -> None:
        for one in list(self._recorders):
            try:
                call(one)
            except Exception:  # noqa: BLE001 - no metric is worth a batch
                self._recorders.remove(one)
                _log.exception("%s cannot be told of batches, and is left alone from here on", type(one).__name__)


@cache
def recorders() -> Recorders:
    """Those that the environment of this process names.

    ``OTEL_EXPORTER_OTLP_ENDPOINT``, and what else OpenTelemetry knows, names a receiver of OTLP; a program that has set
    up OpenTelemetry itself needs no variable. ``STREAM_ASSETS_PROMETHEUS_TEXTFILES`` names a folder of the textfile
    collector of Prometheus' node exporter. What cannot be set up, as without the package that it takes, is warned of.
    """
    named = [name for name in OTLP_VARIABLES if os.environ.get(name)]
    folder = os.environ.get(TEXTFILE_VARIABLE)
    found = [_set_up(", ".join(named), "opentelemetry", _opentelemetry)]
    if folder:
        found.append(_set_up(TEXTFILE_VARIABLE, "prometheus", lambda: _prometheus(folder)))
    return Recorders([one for one in found if one])


def _set_up(variables: str, extra: str, make: Callable[[], Recorder]) -> Recorder | None:
    """A recorder, or a warning; a package that nobody has asked for may be missing silently."""
    try:
        return make()
    except ImportError as error:
        if variables:
            _log.warning("%s is set, but %s; install stream-assets[%s]", variables, error, extra)
    except Exception as error:  # noqa: BLE001 - no metric is worth a batch
        # The package may be an older one, or refuse what its variables say.
        _log.warning(
            "no batch is told to %s, which cannot be set up: %s: %s; install stream-assets[%s], and correct the "
            "variables that it reads",
            extra,
            type(error).__name__,
            error,
            extra,
        )
    return None


# Whoever has none of the packages does not wait for their import.
def _opentelemetry() -> Recorder:
    from spark_jobs.metrics.opentelemetry import OpenTelemetryRecorder  # noqa: PLC0415

    return OpenTelemetryRecorder()


def _prometheus(folder: str) -> Recorder:
    from spark_jobs.metrics.prometheus import TextfileRecorder  # noqa: PLC0415

    return TextfileRecorder(folder)
