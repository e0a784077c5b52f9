"""Metrics for Prometheus, in a file that the textfile collector of its node exporter reads.

Runs come and go, so that none lives long enough to be scraped, and counters that began at nothing in each run would
count wrongly. So the file is what counts: each batch is added to what stands in it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from spark_jobs.metrics.numbers import SECONDS, BatchLabels, BatchNumbers

FILE = "stream_assets.prom"
_BATCHES = CounterMetricFamily("stream_assets_batches", "Batches in the table.")
_MESSAGES = CounterMetricFamily("stream_assets_messages", "Messages decoded.")
_ROWS = CounterMetricFamily("stream_assets_rows", "Rows written.")
_BYTES = CounterMetricFamily("stream_assets_bytes", "Bytes of the data files written.")
_DEAD_LETTERS = CounterMetricFamily("stream_assets_dead_letters", "Dead letters written.")
_LAG = GaugeMetricFamily("stream_assets_lag", "Messages that the group is behind after its last batch.")
_BATCH_SECONDS = HistogramMetricFamily("stream_assets_batch_seconds", "From plan to commit.")
_STEP_SECONDS = HistogramMetricFamily("stream_assets_step_seconds", "A step of a batch.")
_FAMILIES = (_BATCHES, _MESSAGES, _ROWS, _BYTES, _DEAD_LETTERS, _LAG, _BATCH_SECONDS, _STEP_SECONDS)
_Key = tuple[str, tuple[tuple[str, str], ...]]


class TextfileRecorder:
    """Adds to the numbers in ``stream_assets.prom``, which all runs of a machine share.

    Steps are written together with their batch.

    Args:
        folder: of the textfile collector; it is made if it is not there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file = Path(folder) / FILE
        self._steps: deque[tuple[BatchLabels, str, float]] = deque()

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """A step of a batch took so long."""
        self._steps.append((labels, name, seconds))

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """A batch is in the table."""
        own = labels.to_dict()
        with self._changing() as values:
            _add(values, _BATCHES, own, 1)
            _add(values, _MESSAGES, own, numbers.messages)
            _add(values, _ROWS, own, numbers.rows)
            _add(values, _BYTES, own, numbers.bytes)
            _add(values, _DEAD_LETTERS, own, numbers.dead_letters)
            _observe(values, _BATCH_SECONDS, own, numbers.seconds)
            while self._steps:
                of, name, seconds = self._steps.popleft()
                _observe(values, _STEP_SECONDS, {**of.to_dict(), "step": name}, seconds)
            for stream, lag in numbers.lag.items():
                of_stream = {"group": labels.group, "table": labels.table, "stream": stream}
                values[_key(_LAG.name, of_stream)] = lag

    @contextmanager
    def _changing(self) -> Iterator[dict[_Key, float]]:
        """The numbers in the file, of one process at a time; the collector sees them all or none."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            values = _read(self._file)
            yield values
            with tempfile.NamedTemporaryFile(dir=self._file.parent, suffix=".new", delete=False) as new:
                new.write(generate_latest(_Numbers(values)))
            # The collector may be another user.
            os.chmod(new.name, 0o644)
            os.replace(new.name, self._file)


class _Numbers(Collector):
    def __init__(self, values: Mapping[_Key, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for family in _FAMILIES:
            metric = Metric(family.name, family.documentation, family.type)
            metric.samples = [
                Sample(name, dict(labels), value)
                for (name, labels), value in self._values.items()
                if name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
                == family.name
            ]
            yield metric


def _read(file: Path) -> dict[_Key, float]:
    if not file.exists():
        return {}
    families = text_string_to_metric_families(file.read_text())
    return {_key(sample.name, sample.labels): sample.value for family in families for sample in family.samples}


def _key(name: str, labels: Mapping[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _add(values: dict[_Key, float], counter: Metric, labels: Mapping[str, str], amount: float) -> None:
    _increase(values, f"{counter.name}_total", labels, amount)


def _observe(values: dict[_Key, float], histogram: Metric, labels: Mapping[str, str], seconds: float) -> None:
    for bound in SECONDS:
        _increase(values, f"{histogram.name}_bucket", {**labels, "le": str(bound)}, float(seconds <= bound))
    _increase(values, f"{histogram.name}_bucket", {**labels, "le": "+Inf"}, 1)
    _increase(values, f"{histogram.name}_count", labels, 1)
    _increase(values, f"{histogram.name}_sum", labels, seconds)


def _increase(values: dict[_Key, float], name: str, labels: Mapping[str, str], amount: float) -> None:
    key = _key(name, labels)
    values[key] = values.get(key, 0.0) + amount
