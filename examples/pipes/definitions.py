"""An asset whose run is a job of `spark-submit` on a cluster: Dagster starts it and gets its reports by Dagster Pipes.

export SPARK_MASTER=spark://host:7077       # with spark.authenticate.secret in spark-defaults.conf; local by default
dg dev -f examples/pipes/definitions.py
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

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
    # Every user of the machine can read a command line, and the settings of a table on S3 have its keys. Spark's own
    # files have values of messages. So all of them are in a folder that only this user can enter.
    with TemporaryDirectory() as private:
        own = {
            "spark.local.dir": private,
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={private}",
            "spark.ui.enabled": "false",
        }
        settings = Path(private, "settings.conf")
        settings.write_text(
            "".join(f"{name} {value}\n" for name, value in {**delta_spark_config(TABLE), **own}.items())
        )
        options = ["--master", master, "--properties-file", str(settings), "--load-spark-defaults"]
        result = pipes.run(command=["spark-submit", *options, str(JOB)], context=context, extras=extras)
    return result.get_materialize_result()


defs = dg.Definitions(assets=[orders], resources={"pipes": dg.PipesSubprocessClient()})
