"""A declared asset, and a run and a tick of its sensor in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from stream_assets import Json, StreamAsset, stream_asset, stream_definitions


def declare(folder: Path, made_by: str = "", **options: Any) -> StreamAsset:
    """The asset ``orders`` on the file and the table in a folder; its rows say who made them, if anybody is named."""
    settings: dict[str, Any] = {
        "source": f"file://{folder}/orders.ss/orders",
        "group": "lakehouse",
        "table": str(folder / "t"),
        "decode": Json("id BIGINT, user STRING"),
        "max_records": 40,
        "retry_seconds": 0.0,
    }

    @stream_asset(**{**settings, **options})
    def orders(batch: DataFrame) -> DataFrame:
        """Orders, each once."""
        return batch.withColumn("made_by", f.lit(made_by)) if made_by else batch

    return orders


def execute(
    stream: StreamAsset, instance: dg.DagsterInstance, *, config: dict[str, Any] | None = None, **resources: Any
) -> dg.ExecuteInProcessResult:
    definitions = stream_definitions([stream], resources=resources)
    run_config = {"ops": {stream.name: {"config": config or {}}}}
    job = definitions.resolve_job_def(stream.job_name)
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
