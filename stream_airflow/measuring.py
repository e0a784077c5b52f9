"""Measures lags for the triggers of one triggerer, without blocking its event loop.

All triggers whose streams are at one broker share a request for the ends of their streams. Only a stream that has
grown, or whose table has another version, is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stream_consumers.create import StreamSource
from stream_consumers.errors import BrokerUnavailableError, LedgerTruncatedError, StreamAssetsError
from stream_consumers.messages import Shard

if TYPE_CHECKING:
    from spark_jobs.lag import Measurement
    from spark_jobs.ledger.ledger import Ledger
    from spark_jobs.run_policy import RunPolicy
    from stream_airflow.declaration import StreamTable
    from stream_consumers.batches import Extent

MEASURE_SECONDS = 60.0
"""The longest time between two measurements, in seconds."""
Extents = Mapping[Shard, "Extent"]


class Broker:
    """A broker, and the streams of it that are watched.

    Args:
        source: one of the streams; the others have the same servers and client options.
    """

    def __init__(self, source: StreamSource) -> None:
        self.lock = asyncio.Lock()
        self.streams: Counter[str] = Counter()
        self._source = source
        self._extents: Extents | None = None
        self._error: BrokerUnavailableError | None = None
        self._asked_at = -MEASURE_SECONDS

    async def extents(
        self, streams: tuple[str, ...], *, max_age_seconds: float, answer_seconds: float
    ) -> Extents | None:
        """Return what some of the streams hold; ``None`` if the broker cannot be asked for all streams together.

        Args:
            streams: the keys of the streams.
            max_age_seconds: how old an answer may be.
            answer_seconds: the longest wait for an answer.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        async with self.lock:
            if time.monotonic() - self._asked_at > max_age_seconds:
                await asyncio.to_thread(self._ask, sorted(self.streams), answer_seconds)
                self._asked_at = time.monotonic()
        if self._error is not None:
            raise self._error
        if self._extents is None:
            return None
        return {shard: extent for shard, extent in self._extents.items() if shard.stream in streams}

    def _ask(self, streams: list[str], answer_seconds: float) -> None:
        self._error, self._extents = None, None
        try:
            every = StreamSource(self._source.url.with_streams(streams), client=self._source.client)
            with every.open() as opened:
                opened.set_request_timeout(answer_seconds)
                self._extents = opened.extents(budget_seconds=answer_seconds)
        except BrokerUnavailableError as error:
            self._error = error
        except StreamAssetsError:
            # One of the streams may be missing. Each of them is measured alone then, and has its own error.
            self._extents = None


_brokers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, Broker]] = WeakKeyDictionary()


class LagWatch:
    """Measures the lag of one group again and again; close it when done.

    Args:
        declared: the stream, the group and the table.
        policy: how long to wait for answers.
        interval_seconds: the time between two calls of :meth:`measure`.
    """

    def __init__(self, declared: StreamTable, policy: RunPolicy, *, interval_seconds: float) -> None:
        self._declared = declared
        self._policy = policy
        self._max_age_seconds = interval_seconds / 2
        source = self._source = declared.stream
        client = sorted((name, repr(value)) for name, value in source.client.items())
        brokers = _brokers.setdefault(asyncio.get_running_loop(), {})
        key = str(source.url.with_streams([])), tuple(client)
        self._broker = brokers.setdefault(key, Broker(source))
        self._streams = source.url.required_streams()
        self._broker.streams.update(self._streams)
        self._ledger: Ledger | None = None
        self._known: tuple[Extents, int] | None = None
        self._found: Measurement | None = None
        self._measured_at = 0.0

    def close(self) -> None:
        """Ask the broker no longer for these streams."""
        self._broker.streams.subtract(self._streams)
        self._broker.streams += Counter()

    async def measure(self) -> Measurement:
        """Return the lag, as of at most half an interval ago.

        Raises:
            StreamAssetsError: see :func:`spark_jobs.lag.measure`.
        """
        known = await self._state()
        is_old = time.monotonic() - self._measured_at > MEASURE_SECONDS
        if self._found is None or known is None or known != self._known or is_old:
            async with self._broker.lock:
                self._found = await asyncio.to_thread(self._measure)
            self._known, self._measured_at = known, time.monotonic()
        return self._found

    async def _state(self) -> tuple[Extents, int] | None:
        """Return all that a measurement depends on; ``None`` if it cannot be known without one."""
        if self._source.is_claimed or not self._source.backend.answers_for_many:
            return None
        extents = await self._broker.extents(
            self._streams, max_age_seconds=self._max_age_seconds, answer_seconds=self._policy.answer_seconds
        )
        version = None if extents is None else await asyncio.to_thread(self._version)
        return None if extents is None or version is None else (extents, version)

    def _version(self) -> int | None:
        """Return the version of the table; ``None`` if its log was cleaned, so that only the broker has positions."""
        if self._ledger is None:
            self._ledger = self._declared.ingestion().ledger()
        try:
            return self._ledger.read().version
        except LedgerTruncatedError:
            return None

    def _measure(self) -> Measurement:
        # Importing Spark would block the event loop for a second.
        from spark_jobs.lag import measure  # noqa: PLC0415

        options: dict[str, Any] = {
            "budget_seconds": self._policy.budget_seconds,
            "answer_seconds": self._policy.answer_seconds,
        }
        return measure(self._source, self._declared.ingestion(), **options)
