"""What other users of the machine can reach of a Spark in the process: its ports, and its private folders."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from spark_jobs.spark_start import (
    JAVA_OPTIONS,
    PREFIX,
    _properties,
    launch,
    private_folders,
    set_private_folders,
)
from stream_consumers.errors import UntrustedFileError
from tests.support.python_programs import run_python
from tests.support.settings import ROOT

MAKE = """\
import os, sys
from pathlib import Path
from spark_jobs.spark_start import private_folders
os.umask(0)
folder = Path(private_folders(sys.argv[1]))
(folder / "blockmgr").mkdir()
(folder / "blockmgr" / "shuffle").write_text("4111")
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(folder, folder.exists(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a private folder until its input ends."""
    command = [sys.executable, "-c", MAKE, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        folder, exists = process.stdout.readline().split()
        assert exists == "True", "a forked child has removed it"
        yield process, Path(folder)


def test_a_folder_is_private_and_goes_with_its_process(tmp_path: Path) -> None:
    with holding(tmp_path / "new") as (_, folder):
        assert folder.parent == tmp_path / "new"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_no_folder_is_made_where_other_users_can_put_another_one_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UntrustedFileError):
        private_folders(str(tmp_path / "shared"))
    assert not list((tmp_path / "shared").iterdir())


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "target"
    foreign.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(foreign)
    with holding(tmp_path) as (process, killed):
        process.kill()
    assert killed.exists()
    with holding(tmp_path) as (_, living), holding(tmp_path) as (_, another):
        assert (killed.exists(), living.exists(), another.exists(), foreign.exists()) == (False, True, True, True)


def test_the_folders_of_the_variable_are_those_of_the_user_but_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = f"{tmp_path / 'fast'},{tmp_path / 'large'}"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", given)
    seen: list[str] = []

    def launch_gateway() -> SimpleNamespace:
        seen.append(os.environ["SPARK_LOCAL_DIRS"])
        return SimpleNamespace(_gateway_client=SimpleNamespace(_get_connection=None), proc=None)

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch_gateway)
    launch({})
    made = [Path(one) for one in seen[0].split(",")]
    assert [one.parent for one in made] == [tmp_path / "fast", tmp_path / "large"]
    assert {stat.S_IMODE(one.stat().st_mode) for one in made} == {0o700}
    assert os.environ["SPARK_LOCAL_DIRS"] == given
    assert private_folders(given) == ",".join(map(str, made)), "a process has one folder in each of them"


NAMED = "-Djava.io.tmpdir=/other '-Djava.io.tmpdir={}/own scratch' -Xss2m"


@pytest.mark.parametrize(
    ("place", "root"),
    [
        ("", "TMPDIR"),
        ("settings", "own scratch"),
        ("spark-defaults.conf", "own scratch"),
        ("JAVA_TOOL_OPTIONS", "own scratch"),
        ("SPARK_SUBMIT_OPTS", "own scratch"),
        ("_JAVA_OPTIONS", "own scratch"),
        # These replace the setting, and are not looked at.
        ("PYSPARK_SUBMIT_ARGS", "TMPDIR"),
    ],
)
def test_the_temporary_files_of_java_are_in_a_private_folder_within_that_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, root: str
) -> None:
    given, settings, words = NAMED.format(tmp_path), {"spark.app.name": "it"}, list[str]()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "TMPDIR"))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS", "_JAVA_OPTIONS", "PYSPARK_SUBMIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    if place == "settings":
        settings[JAVA_OPTIONS] = given
    elif place == "spark-defaults.conf":
        (tmp_path / place).write_text(f"{JAVA_OPTIONS} {given}")
    elif place == "PYSPARK_SUBMIT_ARGS":
        monkeypatch.setenv(place, f"--driver-java-options {shlex.quote(given)} pyspark-shell")
    elif place:
        monkeypatch.setenv(place, given)

    def launch_gateway() -> SimpleNamespace:
        arguments = shlex.split(os.environ["PYSPARK_SUBMIT_ARGS"])
        of_file = _properties(Path(arguments[arguments.index("--properties-file") + 1]).read_text())
        # In this order, Java obeys the last one.
        of_driver = given if place == "PYSPARK_SUBMIT_ARGS" else of_file[JAVA_OPTIONS]
        variables = [os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "SPARK_SUBMIT_OPTS", "_JAVA_OPTIONS")]
        words.extend(shlex.split(" ".join([*variables[:2], of_driver, variables[2]])))
        return SimpleNamespace(_gateway_client=SimpleNamespace(_get_connection=None), proc=None)

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch_gateway)
    launch(settings)
    made = Path([word.partition("=")[2] for word in words if word.startswith("-Djava.io.tmpdir=")][-1])
    assert made.parent == tmp_path / root
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert ("-Xss2m" in words) is bool(place), "what else the user sets is kept"


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,1,1024]", "spark://m:7077", None])
def test_a_local_spark_does_not_use_the_folders_of_a_clusters_worker(
    monkeypatch: pytest.MonkeyPatch, master: str | None
) -> None:
    given = {"SPARK_EXECUTOR_DIRS": "/executor", "CONTAINER_ID": "container_1", "LOCAL_DIRS": "/yarn"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: set[str] = set()

    def launch_gateway() -> SimpleNamespace:
        seen.update(os.environ.keys() & given.keys())
        return SimpleNamespace(_gateway_client=SimpleNamespace(_get_connection=None), proc=None)

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch_gateway)
    launch({"spark.master": master} if master else {})
    assert seen == (set(given) if master == "spark://m:7077" else set())
    assert {name: os.environ[name] for name in given} == given


class Settings(dict[str, str]):
    """Stands for the settings of a context."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,1,1024]", "spark://m:7077", "k8s://https://m"])
def test_the_executors_of_a_cluster_do_not_get_the_folder_of_the_driver(master: str, tmp_path: Path) -> None:
    given = {"spark.local.dir": str(tmp_path), "spark.hadoop.hadoop.tmp.dir": str(tmp_path)}
    settings = Settings({"spark.master": master, **given})
    set_private_folders(settings, SimpleNamespace(jvm=SimpleNamespace(SparkConf=lambda _: {})))  # type: ignore[arg-type]
    private = {name for name in given if Path(settings[name]).parent == tmp_path}
    assert private == (set(given) if master.startswith("local") else {"spark.local.dir"})


@pytest.mark.parametrize("folder", ["/data/hadoop-${user.name}", "file:///data"])
def test_a_folder_that_only_hadoop_can_read_is_replaced(folder: str) -> None:
    settings = Settings({"spark.hadoop.hadoop.tmp.dir": folder})
    set_private_folders(settings, SimpleNamespace(jvm=SimpleNamespace(SparkConf=lambda _: {})))  # type: ignore[arg-type]
    assert stat.S_IMODE(Path(settings["spark.hadoop.hadoop.tmp.dir"]).stat().st_mode) == 0o700


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


@pytest.mark.spark
def test_the_block_manager_gives_nothing_without_the_secret(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.broadcast("sasl.password")
    environment = context._jvm.org.apache.spark.SparkEnv.get()  # type: ignore[union-attr]
    port = environment.blockManager().blockTransferService().port()
    assert open_blocks(port, "broadcast_0_piece0") != RPC_RESPONSE
    assert context.getConf().get("spark.network.crypto.enabled") == "true"


@pytest.mark.spark
def test_what_is_cached_and_shuffled_is_in_folders_that_only_this_user_enters(spark: SparkSession) -> None:
    frame = spark.range(0, 1000, 1, 2).select(f.concat(f.lit("4111-"), "id").alias("payload"))
    assert frame.repartition(2, "payload").count() == 1000
    environment = spark.sparkContext._jvm.org.apache.spark.SparkEnv.get()  # type: ignore[union-attr]
    folders = [Path(folder.getPath()) for folder in environment.blockManager().diskBlockManager().localDirs()]
    assert list(folders[0].rglob("shuffle_*.data"))
    for folder in folders:
        assert any(stat.S_IMODE(parent.stat().st_mode) == 0o700 for parent in folder.parents), folder


@pytest.mark.spark
def test_a_jvm_loads_no_code_from_a_folder_that_other_users_can_write(spark: SparkSession) -> None:
    context = spark.sparkContext
    # The compression of shuffled rows is native code, which a library unpacks first.
    assert spark.range(0, 1000, 1, 2).repartition(2, "id").count() == 1000
    maps = Path(f"/proc/{context._gateway.proc.pid}/maps").read_text().splitlines()  # type: ignore[union-attr]
    mapped = {Path(words[5]) for line in maps if len(words := line.split(maxsplit=5)) == 6 and words[5][0] == "/"}
    unpacked = [path for path in mapped if path.name.startswith("liblz4-java-")]
    assert unpacked, "this is no longer what Spark loads"
    jvm = context._jvm
    written = Path(jvm.java.io.File.createTempFile("made", "").getPath())  # type: ignore[union-attr]
    for path in (written, *mapped):
        modes = [stat.S_IMODE(one.stat().st_mode) for one in path.parents if one.exists()]
        assert 0o700 in modes or not modes[0] & stat.S_IWOTH, path


@pytest.mark.spark
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
@pytest.mark.spark
def test_tables_have_the_modes_that_the_umask_gives(folder: Path) -> None:
    run_python(WRITE, folder / "t").check_returncode()
    found = [folder / "t", *(folder / "t").rglob("*")]
    assert any(path.suffix == ".parquet" for path in found)
    assert [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
