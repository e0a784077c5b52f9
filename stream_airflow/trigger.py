"""The trigger that fires when there are messages to read. It consumes nothing and commits nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from spark_jobs.run_policy import RunPolicy, Waits, decide
from stream_airflow.connections import connected
from stream_airflow.declaration import StreamTable
from stream_airflow.measuring import LagWatch
from stream_airflow.requested_runs import RequestedRuns
from stream_consumers.errors import DataLossError, InvalidOptionError, SourceRecreatedError, Terminal, log_text
from stream_consumers.options import check_range, check_switch

if TYPE_CHECKING:
    from spark_jobs.lag import Measurement

INTERVAL_SECONDS = 10.0
PATIENCE_SECONDS = 300.0
_MIN_PAUSE_SECONDS = 0.1


class StreamLagTrigger(BaseEventTrigger):
    """Fires when a run is wanted, because there are messages that the group has not read.

    As the trigger of an ``AssetWatcher`` it schedules DAGs by messages. It compares the ledger in the Delta log with
    the ends of the stream, so that no message is lost or read twice, whatever happens between the trigger and the run.
    After it has fired, it waits until the group has read what was there; if no batch is written for
    ``patience_seconds``, it fires again, with pauses that grow with each such run. While a broker does not answer, it
    asks at growing intervals.

    The payload of an event has ``lag``, ``shards`` (the lag of each), ``source``, ``group`` and ``table``. If messages
    were lost, it has ``error``, and the run that it starts fails with that error.

    Args:
        source: the stream URL.
        table: the Delta table, a path or URI.
        policy: when a run is wanted: ``min_lag``, ``max_wait_seconds``, ``retry_seconds``, ``budget_seconds`` and
            ``answer_seconds`` of it.
        interval_seconds: the time between two measurements.
        patience_seconds: how long a run may write nothing, from its request, until it counts as failed.
        ends_at_errors: whether an error that a retry cannot fix is an event, and the last one, for a task that waits
            for the trigger. Otherwise it is logged, because no task waits for the trigger of an asset.
        declared: further arguments of :class:`stream_airflow.declaration.StreamTable`: ``group``, ``mode``, ``start``,
            ``on_data_loss``, ``client``, ``storage_options``, ``stream_conn_id``, ``storage_conn_id``.

    Raises:
        InvalidOptionError: an option is invalid.
    """

    def __init__(
        self,
        *,
        source: str,
        table: str,
        policy: RunPolicy | Mapping[str, Any] | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        ends_at_errors: bool = False,
        **declared: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_range("interval_seconds", interval_seconds)
        check_range("patience_seconds", patience_seconds)
        check_switch("ends_at_errors", ends_at_errors)
        self.declared = StreamTable(source, table, **declared)
        self.policy = policy if isinstance(policy, RunPolicy) else RunPolicy(**(policy or {}))
        if self.policy.keeps_alive or self.policy.max_runs > 1:
            raise InvalidOptionError(
                "keeps_alive and max_runs of a policy need to know which runs are in flight, and a trigger does not",
                remedy="Leave them out.",
            )
        self.interval_seconds = interval_seconds
        self.patience_seconds = patience_seconds
        self.ends_at_errors = ends_at_errors

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the path of the class and its arguments as plain values, from which a triggerer makes the trigger."""
        default = asdict(RunPolicy())
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                **self.declared.arguments(),
                "policy": {name: value for name, value in asdict(self.policy).items() if value != default[name]},
                "interval_seconds": self.interval_seconds,
                "patience_seconds": self.patience_seconds,
                "ends_at_errors": self.ends_at_errors,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield an event each time that a run is wanted."""
        waits, requested, reported, shown = Waits(), RequestedRuns(), "", None
        watch: LagWatch | None = None
        try:
            while True:
                now = time.time()
                waits = waits.at(now)
                try:
                    watch = watch or await self._watch()
                    found = await watch.measure()
                except Exception as error:  # noqa: BLE001 - Airflow does not start a trigger of an asset again
                    waits = waits.after_silence(now)
                    text, pause = log_text(error), max(self.interval_seconds, waits.ask_at - now)
                    self.log.warning("%s: %s; the next attempt is in %.0f s", self.declared.source, text, pause)
                    is_loss = isinstance(error, (SourceRecreatedError, DataLossError)) and text != reported
                    is_end = self.ends_at_errors and isinstance(error, Terminal)
                    if is_loss or is_end:
                        reported = text
                        yield _event(self._payload(None, error=text))
                    if is_end:
                        return
                    await asyncio.sleep(pause)
                    # A connection may have another password now.
                    _close(watch)
                    watch = None
                    continue
                lost = found.describe_lost()
                is_news, reported = lost not in ("", reported), lost
                now = time.time()
                waits = waits.after(found, now)
                requested = requested.after(found, now, patience_seconds=self.patience_seconds)
                past = requested.past(now)
                decision = decide(found, past, waits, self.policy, is_first_from_the_end=self.declared.is_from_the_end)
                # The numbers in a reason change all the time.
                is_cut = found.unreadable_tail is not None
                state = bool(decision.runs), bool(found.total), is_cut, bool(past.in_flight), len(past.finished)
                if state != shown:
                    shown = state
                    self.log.info("%s", decision.reason or f"{found.describe()}: a run is wanted")
                if decision.runs:
                    requested = requested.requested(found, now)
                if decision.runs or is_news:
                    # After a loss, the run fails with the error, or records it.
                    yield _event(self._payload(found, **({"lost": lost} if lost else {})))
                latest = self.interval_seconds if decision.until is None else decision.until - now
                await asyncio.sleep(max(_MIN_PAUSE_SECONDS, min(self.interval_seconds, latest)))
        finally:
            _close(watch)

    async def _watch(self) -> LagWatch:
        # In a triggerer, Airflow reads connections in such a thread.
        declared = await sync_to_async(connected)(self.declared)
        return LagWatch(declared, self.policy, interval_seconds=self.interval_seconds)

    def _payload(self, found: Measurement | None, **more: str) -> dict[str, Any]:
        return {
            "source": self.declared.source,
            "group": self.declared.group,
            "table": self.declared.table,
            "lag": found.total if found else 0,
            "shards": {str(shard): count for shard, count in sorted(found.lag.items()) if count} if found else {},
            **more,
        }


def _event(payload: dict[str, Any]) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]


def _close(watch: LagWatch | None) -> None:
    if watch is not None:
        watch.close()
