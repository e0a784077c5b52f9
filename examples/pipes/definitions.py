"""An asset whose run is a job of `spark-submit` on a cluster: Dagster starts it and gets its reports by Dagster Pipes.

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
    """The messages of the stream, exactly once, whichever process dies."""
    # Every user of the machine can read a command line: give secrets to the driver as environment variables.
    settings = [f"--conf={name}={value}" for name, value in delta_spark_config(TABLE).items()]
    master = os.environ.get("SPARK_MASTER", "local[*]")
    command = ["spark-submit", "--master", master, *settings, str(JOB)]
    extras = {"source": SOURCE, "table": TABLE, "group": "lakehouse"}
    return pipes.run(command=command, context=context, extras=extras).get_materialize_result()


defs = dg.Definitions(assets=[orders], resources={"pipes": dg.PipesSubprocessClient()})
