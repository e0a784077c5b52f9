"""Metrics for OpenTelemetry, through its API: without a provider of metrics it does nothing."""

from __future__ import annotations

import os

from opentelemetry import metrics

from spark_jobs.metrics.numbers import OTLP_VARIABLES, SECONDS, BatchLabels, BatchNumbers


class OpenTelemetryRecorder:
    """Tells the provider of metrics of this process; where there is none, one that the environment describes.

    The variables are those of OpenTelemetry: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``,
    ``OTEL_METRIC_EXPORT_INTERVAL``, ``OTEL_SERVICE_NAME`` and so on.

    Args:
        meter: another one; for tests.
    """

    def __init__(self, meter: metrics.Meter | None = None) -> None:
        if meter is None and any(os.environ.get(name) for name in OTLP_VARIABLES):
            _provide()
        meter = meter or metrics.get_meter("stream_assets")
        self._batches = meter.create_counter("stream_assets.batches", "{batch}", "Batches in the table.")
        self._messages = meter.create_counter("stream_assets.messages", "{message}", "Messages decoded.")
        self._rows = meter.create_counter("stream_assets.rows", "{row}", "Rows written.")
        self._bytes = meter.create_counter("stream_assets.bytes", "By", "Bytes of the data files written.")
        self._dead = meter.create_counter("stream_assets.dead_letters", "{message}", "Dead letters written.")
        self._lag = meter.create_gauge(
            "stream_assets.lag", "{message}", "Messages that the group is behind after its last batch."
        )
        self._seconds = meter.create_histogram(
            "stream_assets.batch.duration", "s", "From plan to commit.", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._step = meter.create_histogram(
            "stream_assets.step.duration", "s", "A step of a batch.", explicit_bucket_boundaries_advisory=SECONDS
        )

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """A step of a batch took so long."""
        self._step.record(seconds, {**labels.to_dict(), "step": name})

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """A batch is in the table."""
        attributes = labels.to_dict()
        self._batches.add(1, attributes)
        self._messages.add(numbers.messages, attributes)
        self._rows.add(numbers.rows, attributes)
        self._bytes.add(numbers.bytes, attributes)
        self._dead.add(numbers.dead_letters, attributes)
        self._seconds.record(numbers.seconds, attributes)
        for stream, lag in numbers.lag.items():
            self._lag.set(lag, {"group": labels.group, "table": labels.table, "stream": stream})


def _provide() -> None:
    """Set up a provider that exports over OTLP, unless the program has one; it exports once more when it ends."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

    if not isinstance(metrics.get_meter_provider(), MeterProvider):
        metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
