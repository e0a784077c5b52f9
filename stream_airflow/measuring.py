"""Measures lags for the triggers of one triggerer, without blocking its event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from spark_jobs.lag import Measurement
    from spark_jobs.run_policy import RunPolicy
    from stream_airflow.declaration import StreamTable

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = WeakKeyDictionary()


async def measured(declared: StreamTable, policy: RunPolicy) -> Measurement:
    """Measure a lag in a thread; of the streams of one broker, one after the other.

    Raises:
        StreamAssetsError: see :func:`spark_jobs.lag.measure`.
    """
    broker = str(declared.stream.url.with_streams([]))
    locks = _locks.setdefault(asyncio.get_running_loop(), {})
    async with locks.setdefault(broker, asyncio.Lock()):
        return await asyncio.to_thread(_measure, declared, policy)


def _measure(declared: StreamTable, policy: RunPolicy) -> Measurement:
    # Importing Spark would block the event loop for a second.
    from spark_jobs.lag import measure  # noqa: PLC0415

    return measure(
        declared.stream,
        declared.ingestion(),
        budget_seconds=policy.budget_seconds,
        answer_seconds=policy.answer_seconds,
    )
