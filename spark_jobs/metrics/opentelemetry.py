"""Metrics for OpenTelemetry, through its API, which does nothing without a provider of metrics."""

from __future__ import annotations

import os

from opentelemetry import metrics

from spark_jobs.metrics.recorders import COUNTERS, DURATIONS, LAG, OTLP_VARIABLES, SECONDS, BatchLabels, BatchNumbers


class OpenTelemetryRecorder:
    """Records with the provider of metrics of this process, or with one that the environment describes.

    The variables are those of OpenTelemetry: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``,
    ``OTEL_METRIC_EXPORT_INTERVAL``, ``OTEL_SERVICE_NAME`` and so on.

    Args:
        meter: the meter to record with, for tests.
    """

    def __init__(self, meter: metrics.Meter | None = None) -> None:
        if meter is None and any(os.environ.get(name) for name in OTLP_VARIABLES):
            _provide()
        meter = meter or metrics.get_meter("stream_assets")
        self._counters = {
            name: meter.create_counter(f"stream_assets.{name}", unit, text) for name, (unit, text) in COUNTERS.items()
        }
        self._lag = meter.create_gauge("stream_assets.lag", "{message}", LAG)
        self._seconds, self._step = (
            meter.create_histogram(
                f"stream_assets.{name}.duration", "s", text, explicit_bucket_boundaries_advisory=SECONDS
            )
            for name, text in DURATIONS.items()
        )

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """Record how long a step of a batch took."""
        self._step.record(seconds, {**labels.to_dict(), "step": name})

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """Record a batch that is in the table."""
        for name, count in numbers.counts().items():
            self._counters[name].add(count, labels.to_dict())
        self._seconds.record(numbers.seconds, labels.to_dict())
        for stream, lag in numbers.lag.items():
            self._lag.set(lag, labels.of_stream(stream))


def _provide() -> None:
    """Set up a provider that exports over OTLP, also at the end of the process, unless the program has a provider."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

    if not isinstance(metrics.get_meter_provider(), MeterProvider):
        metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
