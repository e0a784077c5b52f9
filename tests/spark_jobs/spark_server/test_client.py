"""What a run does before it starts a server."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from spark_jobs.spark_server import client
from spark_jobs.spark_server.client import ServerRetryPolicy, connect, end_idle_servers, end_server
from spark_jobs.spark_server.configuration import configuration_key
from spark_jobs.spark_server.folder import UnusableFolderError, folders_lock, server_folder
from stream_consumers.errors import InvalidOptionError, SparkEndedError, SparkSessionError
from tests.support.held_servers import client_of, made, obedient, process
from tests.support.polling import until


def test_of_the_servers_that_nobody_uses_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = tmp_path / "servers"
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(servers))
    own, first, last, used, busy, dead, old = (
        made(servers, name) for name in ("own", "first", "last", "used", "busy", "dead", "old")
    )
    with ExitStack() as stack:
        for server in (own, first, last, used, busy):
            stack.enter_context(process(obedient, server))
        stack.enter_context(process(client_of, used))
        stack.enter_context(busy.start_lock())
        for age, server in enumerate((last, used, busy, own, first)):
            os.utime(server.clients, times=(1_000_000_000 - age, 1_000_000_000 - age))
        os.utime(old.clients, times=(0, 0))
        with own.start_lock():
            end_idle_servers(own)
        until(lambda: not first.is_alive(), seconds=60, what="the end of the one that was used first")
        assert [server.is_alive() for server in (own, last, used, busy)] == [True] * 4
        assert (dead.path.exists(), old.path.exists()) == (True, False)


def test_a_folder_that_somebody_is_about_to_use_again_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = tmp_path / "servers"
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(servers))
    own, old = made(servers, "own"), made(servers, "old")
    os.utime(old.clients, times=(0, 0))
    with folders_lock():
        end_idle_servers(own)
        assert old.path.exists(), "somebody makes it, or another one"
        old.create()
    end_idle_servers(own)
    assert old.path.exists(), "its server is to be started"


def test_a_process_that_has_the_number_of_a_dead_server_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that is to end was just started, and has not said its number yet."""
    monkeypatch.setattr(client, "END_SECONDS", 0.1)
    server = made(tmp_path, "server")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    (server.path / "alive").write_text(str(other.pid))
    with server.alive_lock():
        assert not end_server(server)
    assert other.communicate(b"\n", timeout=60) == (None, None)
    assert other.returncode == 0


class RefusedError(grpc.RpcError):  # type: ignore[misc]
    """What gRPC raises where nobody listens, or a server is shut down."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_a_server_that_is_gone_is_told_at_once_and_without_its_token(tmp_path: Path, code: grpc.StatusCode) -> None:
    server = made(tmp_path, "server")
    with process(obedient, server):
        address = server.address()
        assert address is not None
        policy = ServerRetryPolicy(server, address)
        assert policy.can_retry(RefusedError(grpc.StatusCode.UNAVAILABLE))
        assert not policy.can_retry(ValueError("a bug"))
        server.request_end()
        with pytest.raises(SparkEndedError, match=str(address.pid)) as withdrawn:
            policy.can_retry(RefusedError(code))
        assert "secret" not in str(withdrawn.value)
    server.publish(address)
    with pytest.raises(SparkEndedError):
        policy.can_retry(RefusedError(code))


SETTINGS = {"spark.master": "local[1]", "spark.hadoop.fs.s3a.secret.key": "secret"}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "servers"
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(folder))
    return folder


def test_a_server_that_dies_at_once_leaves_no_settings_and_is_told_by_its_own_words(
    servers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = servers.with_name("python")
    python.write_text("#!/bin/sh\necho the disk is full >&2\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    server = made(servers, server_folder(configuration_key(SETTINGS)).path.name)
    server.log.write_text("what an earlier server said\n")
    with pytest.raises(SparkSessionError, match="the disk is full") as failed:
        connect(SETTINGS)
    assert "earlier" not in str(failed.value)
    assert not server.settings.exists()
    assert "secret" not in "".join(path.read_text() for path in server.path.rglob("*") if path.is_file())


@pytest.mark.parametrize("seconds", ["5m", "nan", "-1"])
def test_a_time_to_keep_a_server_that_is_none_is_refused_before_it_starts(servers: Path, seconds: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"idleSeconds.*{seconds}"):
        connect({**SETTINGS, "spark.stream_assets.server.idleSeconds": seconds})
    assert not servers.exists()


def test_a_server_that_does_not_answer_is_left_to_those_who_use_it(
    servers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_answers", lambda address: False)
    server = made(servers, server_folder(configuration_key(SETTINGS)).path.name)
    with process(obedient, server), process(client_of, server):
        with pytest.raises(UnusableFolderError, match="stop --force"):
            connect(SETTINGS)
        assert server.is_alive()
