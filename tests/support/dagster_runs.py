"""A declared asset, and a run and a tick of its sensor in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from stream_assets import Json, KafkaCluster, RedisServer, RunLimits, StreamAsset, stream_asset, stream_definitions
from stream_assets.resources import StreamConnection, StreamLocation
from stream_consumers.urls import StreamUrl


def declare(folder: Path, made_by: str = "", **options: Any) -> StreamAsset:
    """The asset ``orders`` on the file and the table in a folder; its rows say who made them, if anybody is named."""
    settings: dict[str, Any] = {
        "source": f"file://{folder}/orders.ss/orders",
        "group": "lakehouse",
        "table": str(folder / "t"),
        "decode": Json("id BIGINT, user STRING"),
        "limits": RunLimits(max_records=40, retry_seconds=0.0).overridden(options.pop("limits", RunLimits())),
    }

    @stream_asset(**{**settings, **options})
    def orders(batch: DataFrame) -> DataFrame:
        """Orders, each once."""
        return batch.withColumn("made_by", f.lit(made_by)) if made_by else batch

    return orders


def plain_asset(name: str = "orders", **options: Any) -> StreamAsset:
    """An asset that writes rows as they are, of a stream and a table that need not be there."""
    settings = {"source": "memory://declared/orders", "group": "lakehouse", "table": f"lake/{name}"}
    return stream_asset(**{**settings, "spec": dg.AssetSpec(name), **options})(lambda batch: batch)


def source_with(url: str, client: Mapping[str, Any]) -> StreamLocation:
    """The streams of a URL, for an asset whose client has these options."""
    parsed = StreamUrl.parse(url)
    nodes = ",".join(parsed.nodes)
    if parsed.protocol == "kafka":
        connection: StreamConnection = KafkaCluster(bootstrap_servers=nodes, options=dict(client))
    else:
        connection = RedisServer(address=nodes, tls=parsed.protocol == "rediss", options=dict(client))
    return connection.stream(*parsed.required_streams())


def execute(
    stream: StreamAsset, instance: dg.DagsterInstance, *, config: dict[str, Any] | None = None, **resources: Any
) -> dg.ExecuteInProcessResult:
    definitions = stream_definitions([stream], resources=resources)
    run_config = {"ops": {stream.declared.name: {"config": config or {}}}}
    job = definitions.resolve_job_def(stream.declared.job_name)
    return job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)


def tick(
    stream: StreamAsset,
    instance: dg.DagsterInstance,
    cursor: str | None = None,
    *,
    beside: dg.Definitions | None = None,
) -> dg.SensorResult:
    """A tick of the sensor, in a repository that has also what is ``beside`` the stream."""
    definitions = stream_definitions([stream])
    definitions = dg.Definitions.merge(definitions, beside) if beside else definitions
    sensor = next(iter(definitions.sensors or []))
    assert isinstance(sensor, dg.SensorDefinition)
    context = dg.build_sensor_context(instance=instance, cursor=cursor, definitions=definitions)
    data = sensor.evaluate_tick(context)
    return dg.SensorResult(
        run_requests=list(data.run_requests or []) or None,
        skip_reason=data.skip_message,
        cursor=data.cursor,
        asset_events=list(data.asset_events),
    )


def skip_message(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    return result.skip_reason.skip_message or ""


def materializations(result: dg.ExecuteInProcessResult) -> Sequence[dg.AssetMaterialization]:
    return [e.step_materialization_data.materialization for e in result.get_asset_materialization_events()]


def observations(instance: dg.DagsterInstance, key: str = "orders") -> list[dg.AssetObservation]:
    """Those of an asset, the oldest first."""
    found = instance.fetch_observations(dg.AssetKey(key), limit=1000, ascending=True).records
    return [record.asset_observation for record in found if record.asset_observation]
