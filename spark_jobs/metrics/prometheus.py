"""Metrics for Prometheus, in a file that the textfile collector of its node exporter reads.

A run may end before it is scraped, and counters that start at zero in each run would be wrong. So the file keeps the
counts: each batch is added to the numbers in it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from spark_jobs.metrics.recorders import COUNTERS, DURATIONS, LAG, SECONDS, BatchLabels, BatchNumbers
from stream_consumers.errors import UntrustedFileError

FILE = "stream_assets.prom"
LOCK_SECONDS = 10.0
"""How long a batch waits for other processes that write the file, in seconds."""
_POLL_SECONDS = 0.01
_WRITE_OF_OTHERS = 0o022
_LAG = GaugeMetricFamily("stream_assets_lag", LAG)
_SECONDS = {name: HistogramMetricFamily(f"stream_assets_{name}_seconds", text) for name, text in DURATIONS.items()}
_COUNTERS = [CounterMetricFamily(f"stream_assets_{name}", text) for name, (_, text) in COUNTERS.items()]
_SUFFIXES = ("_total", "_bucket", "_count", "_sum", "")
_Key = tuple[str, tuple[tuple[str, str], ...]]


class TextfileRecorder:
    """Adds to the numbers in ``stream_assets.prom``, which all runs of a machine share.

    Steps are written together with their batch.

    Args:
        folder: the folder of the textfile collector; it is created if it is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file = Path(folder) / FILE
        self._steps: deque[tuple[BatchLabels, str, float]] = deque()

    def step(self, labels: BatchLabels, name: str, seconds: float) -> None:
        """Record how long a step of a batch took."""
        self._steps.append((labels, name, seconds))

    def batch(self, labels: BatchLabels, numbers: BatchNumbers) -> None:
        """Record a batch that is in the table."""
        own = labels.to_dict()
        with self._changing() as values:
            for name, count in numbers.counts().items():
                _increase(values, f"stream_assets_{name}_total", own, count)
            _observe(values, _SECONDS["batch"], own, numbers.seconds)
            while self._steps:
                of, name, seconds = self._steps.popleft()
                _observe(values, _SECONDS["step"], {**of.to_dict(), "step": name}, seconds)
            for stream, lag in numbers.lag.items():
                values[_key(_LAG.name, labels.of_stream(stream))] = lag

    @contextmanager
    def _changing(self) -> Iterator[dict[_Key, float]]:
        """Read the numbers in the file, and write them back atomically after the block, one process at a time."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Another user who could read the lock could hold it.
        lock = _open_own(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        try:
            _wait_for(lock)
            values = _read(self._file)
            yield values
            with tempfile.NamedTemporaryFile(dir=self._file.parent, suffix=".new", delete=False) as new:
                new.write(generate_latest(_Numbers(values)))
                # The collector may be another user.
                os.fchmod(new.fileno(), 0o644)
            os.replace(new.name, self._file)
        finally:
            os.close(lock)


class _Numbers(Collector):
    def __init__(self, values: Mapping[_Key, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for family in (*_COUNTERS, _LAG, *_SECONDS.values()):
            metric = Metric(family.name, family.documentation, family.type)
            names = {f"{family.name}{suffix}" for suffix in _SUFFIXES}
            metric.samples = [
                Sample(name, dict(labels), value) for (name, labels), value in self._values.items() if name in names
            ]
            yield metric


def _open_own(file: Path, flags: int) -> int:
    """Open a file in a folder that other users may be able to write, without following a link or waiting for a pipe.

    Raises:
        UntrustedFileError: another user owns the file or can write it, or it is not a regular file.
    """
    opened = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & _WRITE_OF_OTHERS:
        os.close(opened)
        raise UntrustedFileError(
            f"{file} is not a regular file that only this user or root can write", remedy="Remove it."
        )
    return opened


def _wait_for(lock: int) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: another process holds the lock for more than :data:`LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def _read(file: Path) -> dict[_Key, float]:
    try:
        opened = _open_own(file, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    with os.fdopen(opened) as text:
        families = list(text_string_to_metric_families(text.read()))
    return {_key(sample.name, sample.labels): sample.value for family in families for sample in family.samples}


def _key(name: str, labels: Mapping[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _observe(values: dict[_Key, float], histogram: Metric, labels: Mapping[str, str], seconds: float) -> None:
    for bound in SECONDS:
        _increase(values, f"{histogram.name}_bucket", {**labels, "le": str(bound)}, float(seconds <= bound))
    _increase(values, f"{histogram.name}_bucket", {**labels, "le": "+Inf"}, 1)
    _increase(values, f"{histogram.name}_count", labels, 1)
    _increase(values, f"{histogram.name}_sum", labels, seconds)


def _increase(values: dict[_Key, float], name: str, labels: Mapping[str, str], amount: float) -> None:
    key = _key(name, labels)
    values[key] = values.get(key, 0.0) + amount
