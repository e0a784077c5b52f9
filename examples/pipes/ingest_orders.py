"""The driver of the job: one run from the position of the group to the end of the stream at the start of the run."""

from dagster_pipes import open_dagster_pipes
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.run_ingestion import drain
from stream_consumers.create import StreamSource

with open_dagster_pipes() as pipes:
    extras = pipes.extras
    source = StreamSource(extras["source"])
    ingestion = Ingestion(
        group=extras["group"], table=extras["table"], decoder=Json("id BIGINT, user STRING"), sharing=source.mode
    )
    batches = rows = dead_letters = 0
    for report in drain(SparkSession.builder.getOrCreate(), source, ingestion):
        batches, rows, dead_letters = batches + 1, rows + report.rows, dead_letters + report.dead
        pipes.log.info(
            f"batch {batches}: {report.rows} rows, {report.dead} dead letters, lag {sum(report.lag.values())}"
        )
    version = ingestion.ledger().read().version
    pipes.report_asset_materialization(
        metadata={"batches": batches, "rows": rows, "dead_letters": dead_letters, "delta/version": version},
        data_version=str(version),
    )
