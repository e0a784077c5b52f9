"""Values of messages are in no log of a Spark server, and in no error over Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.spark_servers import spark_servers
from tests.support.streams import write_stream

MARK = "Mallory"
RUN = """\
import json, sys, traceback
from pathlib import Path
from pyspark.sql import functions as f
from spark_jobs.session import SparkOptions, create_session
from stream_consumers.create import create_producer
from tests.support.ingesting import drain, ingestion
from tests.support.settings import SMALL

url, folder = sys.argv[1], Path(sys.argv[2])
session = create_session(SparkOptions(master="local[1]", config=SMALL))
drain(session, url, ingestion(folder / "t"))
session.sql(f"ALTER TABLE delta.`{folder}/t` ADD CONSTRAINT short CHECK (length(user) < 4)")
with create_producer(url) as producer:
    producer.send(json.dumps({"id": 1, "user": "it's Mallory"}).encode())

def raising(user):
    raise ValueError(f"no such user: {user}")

transforms = {
    "check": None,
    "udf": lambda rows: rows.withColumn("user", f.udf(raising, "string")("user")),
    "cast": lambda rows: rows.withColumn("user", f.col("user").cast("int").cast("string")),
    "collect": lambda rows: rows.limit(sum(int(row["user"]) for row in rows.collect())),
}
found = {}
for name, transform in transforms.items():
    try:
        drain(session, url, ingestion(folder / "t", transform=transform))
    except Exception as error:
        traceback.print_exc()
        found[name] = [type(error).__name__, "".join(traceback.format_exception(error)), error.detail]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.spark
def test_no_value_of_a_message_is_in_the_log_of_a_server(folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 2)
    (folder / "run.py").write_text(RUN)
    with spark_servers(folder / "servers") as servers:
        found = servers.run("run.py", url, folder, cwd=folder)
        kept = [file for file in servers.folder.rglob("*") if file.is_file() and MARK.encode() in file.read_bytes()]
    assert {name: kind for name, (kind, _, _) in found.items()} == {
        "check": "ConstraintViolatedError",
        "udf": "FailedRowError",
        "cast": "FailedRowError",
        "collect": "TransformError",
    }
    assert {name: text for name, (_, text, _) in found.items() if MARK in text} == {}
    assert [name for name, (_, _, detail) in found.items() if MARK not in detail] == []
    assert kept == []
