"""An asset whose run is a job of `spark-submit` on a cluster: Dagster starts it and hears of it through Dagster Pipes.

export SPARK_MASTER=spark://host:7077
dg dev -f examples/pipes/definitions.py
"""

import os
from pathlib import Path

import dagster as dg

from stream_assets import delta_spark_config

SOURCE = "file://orders.ss/orders"
TABLE = "lake/orders"
JOB = Path(__file__).with_name("ingest_orders.py")


@dg.asset(kinds={"delta", "pyspark"})
def orders(context: dg.AssetExecutionContext, pipes: dg.PipesSubprocessClient) -> dg.MaterializeResult:
    """What the stream holds, exactly once, whichever of the processes dies."""
    # Not for secrets, which everybody on the machine could read there: give those to the driver as environment.
    settings = [f"--conf={name}={value}" for name, value in delta_spark_config(TABLE).items()]
    master = os.environ.get("SPARK_MASTER", "local[*]")
    command = ["spark-submit", "--master", master, *settings, str(JOB)]
    told = pipes.run(command=command, context=context, extras={"source": SOURCE, "table": TABLE, "group": "lakehouse"})
    return told.get_materialize_result()


defs = dg.Definitions(assets=[orders], resources={"pipes": dg.PipesSubprocessClient()})
