"""What other users of the machine can reach of a Spark in the process: its ports and its files."""

from __future__ import annotations

import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tests.support.settings import ROOT

pytestmark = pytest.mark.spark

RPC_REQUEST, RPC_RESPONSE = 3, 4
OPEN_BLOCKS = 0
SECONDS = 30.0


def open_blocks(port: int, block: str) -> int | None:
    """Ask a block manager for a block, as Spark's own client does without a secret.

    Returns:
        The kind of its answer; ``None``: it has ended the connection.
    """
    texts = [text.encode() for text in ("app", "driver", block)]
    application, executor, wanted = (struct.pack(">i", len(text)) + text for text in texts)
    body = bytes([OPEN_BLOCKS]) + application + executor + struct.pack(">i", 1) + wanted
    message = bytes([RPC_REQUEST]) + struct.pack(">qi", 1, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(struct.pack(">q", 8 + len(message)) + message)
        answer = connection.recv(9)
    return answer[8] if len(answer) == 9 else None


def test_the_block_manager_gives_nothing_without_the_secret(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.broadcast("sasl.password")
    environment = context._jvm.org.apache.spark.SparkEnv.get()  # type: ignore[union-attr]
    port = environment.blockManager().blockTransferService().port()
    assert open_blocks(port, "broadcast_0_piece0") != RPC_RESPONSE
    assert context.getConf().get("spark.network.crypto.enabled") == "true"


def test_what_is_cached_and_shuffled_is_in_folders_that_only_this_user_enters(spark: SparkSession) -> None:
    frame = spark.range(0, 1000, 1, 2).select(f.concat(f.lit("4111-"), "id").alias("payload"))
    assert frame.repartition(2, "payload").count() == 1000
    environment = spark.sparkContext._jvm.org.apache.spark.SparkEnv.get()  # type: ignore[union-attr]
    folders = [Path(folder.getPath()) for folder in environment.blockManager().diskBlockManager().localDirs()]
    assert list(folders[0].rglob("shuffle_*.data"))
    for folder in folders:
        assert any(stat.S_IMODE(parent.stat().st_mode) == 0o700 for parent in folder.parents), folder


def test_what_waits_for_an_upload_is_in_folders_that_only_this_user_enters(spark: SparkSession) -> None:
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    for setting in ("hadoop.tmp.dir", "fs.s3a.buffer.dir", "fs.azure.buffer.dir"):
        folder = Path(conf.get(setting))
        made = [parent for parent in (folder, *folder.parents) if parent.exists()]
        assert any(stat.S_IMODE(parent.stat().st_mode) == 0o700 for parent in made), (setting, folder)


WRITE = """
import os, sys
os.umask(0o077)
from spark_jobs.session import SparkOptions, create_session
spark = create_session(SparkOptions(master="local[1]", in_process=True))
spark.range(2).selectExpr("id", "id % 2 AS half").write.format("delta").partitionBy("half").save(sys.argv[1])
"""


@pytest.mark.slow
def test_tables_have_the_modes_that_the_umask_gives(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE, str(folder / "t")], check=True, cwd=ROOT)
    found = [folder / "t", *(folder / "t").rglob("*")]
    assert any(path.suffix == ".parquet" for path in found)
    assert [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
