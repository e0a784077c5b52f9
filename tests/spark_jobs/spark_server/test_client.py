"""What a run does before it starts a server."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_jobs.spark_server.client import make_room
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
        stack.enter_context(busy.starting())
        for age, server in enumerate((last, used, busy, own, first)):
            os.utime(server.clients, times=(1_000_000_000 - age, 1_000_000_000 - age))
        os.utime(old.clients, times=(0, 0))
        with own.starting():
            make_room(own)
        until(lambda: not first.is_alive(), seconds=60, what="the end of the one that was used first")
        assert [server.is_alive() for server in (own, last, used, busy)] == [True] * 4
        assert (dead.path.exists(), old.path.exists()) == (True, False)
