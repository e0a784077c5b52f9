"""A server that outlives runs: found or started, one for all, and never with the code of yesterday."""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from pyspark.sql.connect.proto import base_pb2, base_pb2_grpc

from tests.support.polling import until
from tests.support.spark_servers import Servers, said, spark_servers

pytestmark = pytest.mark.spark

USE = """\
import json, os, sys, time
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader
from spark_jobs.session import SparkOptions, create_session
from tests.support.settings import SMALL
import answers

class Numbers(DataSource):
    def schema(self):
        return "id BIGINT"
    def reader(self, schema):
        return NumbersReader()

class NumbersReader(DataSourceReader):
    def read(self, partition):
        yield (1,)

session = create_session(SparkOptions(master="local[2]", config={**SMALL, **json.loads(sys.argv[1])}))
rows = session.range(2).select(f.udf(answers.answer, "string")("id").alias("a")).collect()
session.dataSource.register(Numbers)
numbers = session.read.format("Numbers").load().persist()
for number in range(100):
    session.range(number + 3).columns
from spark_jobs.spark_server.folder import server_folders
print(json.dumps({
    "answers": sorted({row["a"] for row in rows}),
    "server": [server.process() for server in server_folders() if server.connected_sessions() or server.is_alive()],
    "same": create_session() is session,
    "guarded": session.conf.get("spark.authenticate", None),
    "kept": numbers.storageLevel.useMemory,
}))
"""
ANSWERS = """\
import os

def answer(number):
    return f"{%r} {os.path.basename(os.getcwd())} {open('beside.txt').read()}"
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with spark_servers(tmp_path_factory.mktemp("servers") / "spark") as made:
        yield made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("place") / "work"
    made.mkdir()
    (made / "use.py").write_text(USE)
    (made / "answers.py").write_text(ANSWERS % "first")
    (made / "beside.txt").write_text("beside")
    return made


@pytest.mark.slow
def test_two_runs_that_start_at_once_share_a_server_and_each_has_the_code_as_it_is_now(
    servers: Servers, place: Path
) -> None:
    both = [servers.start("use.py", "{}", cwd=place) for _ in range(2)]
    found = [said(process) for process in both]
    assert [one["answers"] for one in found] == [["first work beside"]] * 2
    assert found[0]["server"] == found[1]["server"]
    assert len(found[0]["server"]) == 1
    assert found[0]["same"] is True
    assert found[0]["guarded"] == "true", "the JVM has more ports than that of Connect"
    assert found[0]["kept"] is True, "what a frame is was forgotten, since others were asked for their columns"
    [server] = servers.living()
    address = server.address()
    assert address is not None
    own = "\n".join(_words(pid) for pid in _processes() if _leader(pid) == found[0]["server"][0])
    assert "MaxHeapFreeRatio=30" in own
    scratch = Path(re.findall(r"java\.io\.tmpdir=([^\0]+)", own)[0])
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    assert list(scratch.glob("blockmgr-*")), "what is cached and shuffled is elsewhere"
    assert not list(scratch.glob("settings*")), "the settings have been left on the disk"
    # Two cores of workers, and their module was imported: an edit shows in the next run all the same.
    (place / "answers.py").write_text(ANSWERS % "second")
    again = servers.run("use.py", "{}", cwd=place)
    assert again == {**found[0], "answers": ["second work beside"]}
    # Nobody may come in who cannot read the files of this user.
    assert address.token not in server.log.read_text(errors="replace")
    assert not [pid for pid in _processes() if address.token in _words(pid)]
    # The workers of runs that are over have ended.
    until(
        lambda: {path.name.partition(".")[0] for path in server.workers.iterdir()} == {"ended"},
        seconds=60,
        what="the end of all workers",
    )
    assert _knock(address.port, address.token)
    with pytest.raises(grpc.RpcError) as refused:
        _knock(address.port, "wrong")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    _dies_and_comes_back(servers, place, found[0]["server"][0])
    assert not scratch.exists(), "what a killed server left was not removed"


def _dies_and_comes_back(servers: Servers, place: Path, process: int) -> None:
    """Its address is still there, and says where nobody listens."""
    [server] = servers.living()
    os.killpg(process, signal.SIGKILL)
    until(lambda: not server.is_alive(), seconds=60, what="the end of the server")
    assert server.address() is not None
    found = servers.run("use.py", '{"spark.stream_assets.server.idleSeconds": "1"}', cwd=place)
    assert found["answers"] == ["second work beside"]
    assert len(found["server"]) == 1
    assert found["server"] != [process]
    until(lambda: not servers.living(), seconds=120, what="the end of a server that nobody uses")


def _knock(port: int, token: str) -> object:
    request = base_pb2.ConfigRequest(session_id="00000000-0000-4000-8000-000000000000")
    request.user_context.user_id = "stream-assets"
    request.operation.get_all.SetInParent()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = base_pb2_grpc.SparkConnectServiceStub(channel)
        return stub.Config(request, metadata=[("authorization", f"Bearer {token}")], timeout=60)


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _leader(process: Path) -> int | None:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return None


def _words(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
