"""An asset whose run is a job of `spark-submit` on a cluster: Dagster starts it and gets its reports by Dagster Pipes.

export SPARK_MASTER=spark://host:7077
dg dev -f examples/pipes/definitions.py
"""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

import dagster as dg

from stream_assets import delta_spark_config

SOURCE = "file://orders.ss/orders"
TABLE = "lake/orders"
JOB = Path(__file__).with_name("ingest_orders.py")


@dg.asset(kinds={"delta", "pyspark"})
def orders(context: dg.AssetExecutionContext, pipes: dg.PipesSubprocessClient) -> dg.MaterializeResult:
    """The messages of the stream, exactly once, whichever process dies."""
    master = os.environ.get("SPARK_MASTER", "local[*]")
    extras = {"source": SOURCE, "table": TABLE, "group": "lakehouse"}
    # Every user of the machine can read a command line, and the settings of a table on S3 have its keys. Only the owner
    # can read a temporary file.
    with NamedTemporaryFile("w", suffix=".conf") as settings:
        settings.writelines(f"{name} {value}\n" for name, value in delta_spark_config(TABLE).items())
        settings.flush()
        options = ["--master", master, "--properties-file", settings.name, "--load-spark-defaults"]
        result = pipes.run(command=["spark-submit", *options, str(JOB)], context=context, extras=extras)
    return result.get_materialize_result()


defs = dg.Definitions(assets=[orders], resources={"pipes": dg.PipesSubprocessClient()})
