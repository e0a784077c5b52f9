"""``spark status`` and ``spark stop``, of servers that only hold what a server holds."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_jobs.spark_server import client
from spark_jobs.spark_server.folder import Address
from tests.support.command_line import failing, run
from tests.support.held_servers import client_of, deaf, made, obedient, process


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "servers"
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(folder))
    return folder


def test_servers_that_run_are_shown_without_what_lets_in(servers: Path) -> None:
    assert run("spark", "status").output == "no Spark server runs\n"
    made(servers, "dead").publish(Address(1, "secret", 1, 2, "local[2]", "/bin/python", "/work", 0.0))
    with ExitStack() as stack:
        server = made(servers, "living")
        stack.enter_context(process(obedient, server))
        stack.enter_context(process(client_of, server))
        result = run("spark", "status", "--json")
        assert "secret" not in result.output
        [row] = json.loads(result.output)["rows"]
        assert {name: row[name] for name in ("server", "state", "runs", "master", "since")} == {
            "server": "living",
            "state": "ready",
            "runs": 1,
            "master": "local[2]",
            "since": "1970-01-01T00:00:00+00:00",
        }
        assert row["process"] == server.process()
        assert "living" in run("spark", "status").output


def test_a_server_that_a_run_uses_is_ended_by_force_only(servers: Path) -> None:
    used, unused = made(servers, "used"), made(servers, "unused")
    with process(obedient, used), process(obedient, unused), process(client_of, used):
        failing(run("spark", "stop"), "used is used by 1 run; --force stops it")
        assert (used.is_alive(), unused.is_alive()) == (True, False)
        assert run("spark", "stop", "--force").exit_code == 0
        assert not used.is_alive()
    assert run("spark", "stop").exit_code == 0


def test_a_server_that_does_not_listen_is_killed(servers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made(servers, "deaf")
    with process(deaf, server):
        monkeypatch.setattr(client, "END_SECONDS", 1.0)
        stopped = run("spark", "stop")
        assert (stopped.exit_code, server.is_alive()) == (0, False)
        assert "is starting" not in stopped.stderr


def test_a_server_that_starts_is_waited_for_and_who_waits_is_told(
    servers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = made(servers, "slow")
    with process(deaf, server):
        monkeypatch.setattr(client, "END_SECONDS", 1.0)
        server.request_end()
        stopped = run("spark", "stop")
        assert (stopped.exit_code, server.is_alive()) == (0, False)
        assert "waiting for slow, which is starting" in stopped.stderr


def test_where_no_server_can_be_kept_it_is_told_why(servers: Path) -> None:
    servers.touch()
    for command in ("status", "stop"):
        failing(run("spark", command), "Spark servers are not used here", "is not a folder of this user")
