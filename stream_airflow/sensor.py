"""The sensor that waits for messages, without a worker."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator

from spark_jobs.run_policy import RunPolicy
from stream_airflow.airflow_names import AirflowFailException
from stream_airflow.declaration import check_addresses
from stream_airflow.trigger import INTERVAL_SECONDS, StreamLagTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class StreamLagSensor(BaseSensorOperator):
    """Waits until there are messages that the group has not read. Meanwhile it is deferred, and takes no worker.

    The result is the payload of the event of :class:`stream_airflow.trigger.StreamLagTrigger`. To schedule a DAG by its
    messages, use that trigger in an ``AssetWatcher``.

    Args:
        source: the stream URL.
        table: the Delta table, a path or URI.
        group: the consumer group; the mode may have a default.
        client: options of the broker's client. A value ``env:NAME`` is read from the environment of the triggerer.
        storage_options: options of the table's storage; ``env:NAME`` as for ``client``.
        policy: when a run is wanted: how many messages to wait for, and how long.
        interval_seconds: the time between two measurements.
        stream_conn_id: a connection of type ``kafka`` or ``redis``, see
            :class:`stream_airflow.operators.StreamOperator`.
        storage_conn_id: a connection of type ``aws``.
        declared: ``mode``, ``start`` and ``on_data_loss``, as for the trigger.
        operator: arguments of every sensor of Airflow, like ``timeout``.
    """

    template_fields = (
        *("source", "table", "group", "client", "storage_options"),
        *("stream_conn_id", "storage_conn_id"),
    )

    def __init__(
        self,
        *,
        source: str,
        table: str,
        group: str | None = None,
        client: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, str] | None = None,
        policy: RunPolicy | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        stream_conn_id: str | None = None,
        storage_conn_id: str | None = None,
        declared: Mapping[str, Any] | None = None,
        **operator: Any,
    ) -> None:
        super().__init__(**operator)
        check_addresses(source, table, has_connection=stream_conn_id is not None)
        self.source = source
        self.table = table
        self.group = group
        self.client = client or {}
        self.storage_options = storage_options or {}
        self.policy = policy
        self.interval_seconds = interval_seconds
        self.stream_conn_id = stream_conn_id
        self.storage_conn_id = storage_conn_id
        self.declared = declared or {}

    def execute(self, context: Context) -> None:
        """Wait in the triggerer."""
        trigger = StreamLagTrigger(
            source=self.source,
            table=self.table,
            group=self.group,
            client=self.client,
            storage_options=self.storage_options,
            stream_conn_id=self.stream_conn_id,
            storage_conn_id=self.storage_conn_id,
            policy=self.policy,
            interval_seconds=self.interval_seconds,
            ends_at_errors=True,
            **self.declared,
        )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=self.timeout))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return the lag, or fail with the error that a retry cannot fix."""
        if "error" in event:
            raise AirflowFailException(event["error"])
        return event
