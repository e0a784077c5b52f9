"""What the process of a server does while it serves; without Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs.redaction import TOKEN_VARIABLE
from spark_jobs.spark_server import process
from spark_jobs.spark_server.folder import ServerFolder
from spark_jobs.spark_start import JAVA_OPTIONS
from tests.support.held_servers import made
from tests.support.polling import until


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: float) -> Iterator[tuple[ServerFolder, Any]]:
    """A server in a thread, and the calls that it makes to Spark."""
    calls: Any = SimpleNamespace(cleared=0, closed=[])

    def clear() -> None:
        calls.cleared += 1

    spark = SimpleNamespace(catalog=SimpleNamespace(clearCache=clear))
    context: Any = SimpleNamespace(defaultParallelism=2, master="local[2]", _gateway=None)
    monkeypatch.setattr(process, "SparkSession", lambda context: spark)
    monkeypatch.setattr(process, "_java_object", lambda context, name: SimpleNamespace(localPort=lambda: 1))
    monkeypatch.setattr(
        process, "_close_session", lambda context, service, folder, session: calls.closed.append(session)
    )
    monkeypatch.setattr(process, "POLL_SECONDS", 0.01)
    server = made(folder, "server")
    server.log.touch()
    seconds = {"idle_seconds": 600.0, **options}
    thread = threading.Thread(target=lambda: process.serve(context, server, "secret", **seconds), daemon=True)
    thread.start()
    calls.is_serving = thread.is_alive
    try:
        until(server.address, what="the address")
        yield server, calls
    finally:
        server.request_end()
        thread.join(60)
    assert not thread.is_alive()


class StoppedError(Exception):
    """Ends the start of a server before its JVM."""


def test_a_server_has_the_options_of_java_that_a_user_sets_for_all_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def launch(settings: dict[str, str]) -> None:
        started.extend(settings[JAVA_OPTIONS].split())
        raise StoppedError

    monkeypatch.setattr(process, "launch", launch)
    monkeypatch.setattr(process, "reserve_port", lambda: SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1)))
    for name in ("SPARK_LOCAL_IP", "PYSPARK_PYTHON", TOKEN_VARIABLE):
        monkeypatch.setenv(name, "python3")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(f"{JAVA_OPTIONS} -Xss2m")
    with pytest.raises(StoppedError), process._context({}, made(tmp_path, "server")):
        pass
    assert started == ["-Xss2m", "-XX:+ExitOnOutOfMemoryError"]


def test_who_ends_a_server_right_after_a_run_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch) as (server, calls):
        client = server.register_client("a-session")
        with server.start_lock():
            server.unregister_client(client)
            until(lambda: calls.closed == ["a-session"], what="the end of the session")
            server.request_end()
            until(lambda: not calls.is_serving(), what="the end of the server")


def test_a_log_is_bounded_and_a_server_does_without_one_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 5)
    with serving(tmp_path, monkeypatch) as (server, calls):
        server.log.write_text("too much")
        until(lambda: not server.log.stat().st_size, what="an empty log")
        assert server.log.with_suffix(".old").read_text() == "too much"
        server.log.unlink()
        server.unregister_client(server.register_client("a-session"))
        until(lambda: calls.closed == ["a-session"], what="another look")
        server.unregister_client(server.register_client("another-session"))
        until(lambda: calls.closed[1:] == ["another-session"], what="a look behind that")


def test_what_a_run_cached_is_forgotten_as_soon_as_nobody_starts_or_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch) as (server, calls):
        with server.start_lock():
            server.unregister_client(server.register_client("a-session"))
            until(lambda: calls.closed == ["a-session"], what="the end of the session")
            assert calls.cleared == 0
        until(lambda: calls.cleared == 1, what="an empty cache")
