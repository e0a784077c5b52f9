"""The port of a server is held: whatever dies, no other process gets what its runs send."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from spark_jobs.spark_server import client, port
from spark_jobs.spark_server.client import connect
from spark_jobs.spark_server.configuration import configuration_key
from spark_jobs.spark_server.folder import Address, ServerFolder, UnusableFolderError, server_folder
from spark_jobs.spark_server.port import allow_listening, check_unix_sockets, hold_port, offer_port, reserve_port
from stream_consumers.errors import SparkEndedError
from tests.support.held_servers import made, obedient, process
from tests.support.polling import until
from tests.support.python_programs import run_python
from tests.support.spark_servers import spark_servers

PLACES = [
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET, "0.0.0.0"),
    (socket.AF_INET6, "::"),
    (socket.AF_INET6, "::ffff:127.0.0.1"),
]


def bound(port: int, family: int = socket.AF_INET6, host: str = "::ffff:127.0.0.1") -> socket.socket:
    """A socket as a JVM has it: of both families, and willing to share its port."""
    made = socket.socket(family)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, option == socket.SO_REUSEADDR)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


def assert_refused(port: int) -> None:
    for family, host in PLACES:
        with pytest.raises(OSError, check=is_taken):
            bound(port, family, host)


def test_a_port_is_held_until_the_server_and_its_last_client_have_ended(tmp_path: Path) -> None:
    server = made(tmp_path, "a name that is too long for the path of a socket" * 3)
    port = reserve_port()
    number = port.getsockname()[1]
    with allow_listening(port):
        early, jvm = bound(number), bound(number)
        jvm.listen()
    offer_port(port, server)
    held = hold_port(server, number)
    assert_refused(number)
    jvm.close()
    assert_refused(number)
    with early, pytest.raises(OSError, check=is_taken):
        early.listen()
    port.close()
    assert_refused(number)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number))
    held.close()
    bound(number).close()


def test_a_port_that_is_not_the_one_of_the_server_is_not_used(tmp_path: Path) -> None:
    server = made(tmp_path, "server")
    with reserve_port() as port:
        offer_port(port, server)
        number = port.getsockname()[1]
        with pytest.raises(ConnectionError):
            hold_port(server, number + 1)
        hold_port(server, number).close()


def test_a_server_that_does_not_give_its_port_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"spark.master": "local[1]"}
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(tmp_path / "servers"))
    monkeypatch.setattr(client, "_answers", lambda address: True)
    server = made(tmp_path / "servers", server_folder(configuration_key(settings)).path.name)
    with process(obedient, server):
        with pytest.raises(SparkEndedError):
            connect(settings)
        assert not server.connected_sessions()


def test_a_path_of_any_length_takes_a_socket_and_a_file_system_without_sockets_is_refused(tmp_path: Path) -> None:
    server = made(tmp_path, "a name that is too long for the path of a socket" * 3)
    (server.path / "probe").touch()
    for _ in range(2):
        check_unix_sockets(server)
    assert {path.name for path in server.path.iterdir()} == {"clients"}
    with pytest.raises(UnusableFolderError):
        check_unix_sockets(ServerFolder(Path("/proc/self")))


SANDBOXED = """\
import errno, sys
from tests.support.sandbox import refuse_bind

refuse_bind(errno.EOPNOTSUPP)
from spark_jobs.spark_server.client import connect
from spark_jobs.spark_server.folder import UnusableFolderError

try:
    connect({"spark.master": "local[1]"})
except UnusableFolderError as error:
    sys.exit(7 if error.__cause__.errno == errno.EOPNOTSUPP else 1)
"""


def test_in_a_sandbox_without_sockets_no_server_is_started(tmp_path: Path) -> None:
    servers = tmp_path / "servers"
    assert run_python(SANDBOXED, STREAM_ASSETS_SPARK_SERVERS=str(servers)).returncode == 7
    assert not list(servers.glob("*/log"))


def full_once(server: ServerFolder, started: Event) -> None:
    """Offers a port, and cannot open another file until it has logged a failure."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    class Freeing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    logging.getLogger(port.__name__).addHandler(Freeing())
    port.PAUSE_SECONDS = 0.01
    held = reserve_port()
    offer_port(held, server)
    server.publish(Address(held.getsockname()[1], "secret", os.getpid(), 2, "local[2]", "/bin/python", "/work", 0.0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    started.set()
    signal.pause()


def test_a_server_goes_on_to_give_its_port_after_it_could_not(tmp_path: Path) -> None:
    server = made(tmp_path, "server")
    with process(full_once, server):
        address = server.address()
        assert address is not None
        # The kernel gives the file of the next client to a process that waits for one before it has come.
        for _ in range(2):
            hold_port(server, address.port).close()


RUN = """\
import json, sys
import pyarrow as pa
from spark_jobs.session import SparkOptions, create_session
from stream_consumers.errors import SparkEndedError
from tests.support.settings import SMALL

for _ in sys.stdin:
    session = create_session(SparkOptions(master="local[1]", config=SMALL))
    rows = session.createDataFrame(pa.table({"user": ["a payload"]}))
    print(json.dumps(rows.count()), flush=True)
    sys.stdin.readline()
    try:
        outcome = rows.mapInArrow(lambda blocks, password="a password": blocks, rows.schema).count()
    except SparkEndedError as error:
        outcome = type(error).__name__
    print(json.dumps(outcome), flush=True)
"""
# Another user, where there are the rights to become one.
TAKER = """\
import os, socket, sys, time

if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print("waits", flush=True)
while True:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(("127.0.0.1", int(sys.argv[1])))
        taken.listen()
        break
    except OSError:
        taken.close()
        time.sleep(0.001)
print("took", flush=True)
"""


@contextmanager
def taking(port: int, log: Path) -> Iterator[None]:
    """Another process waits until it can listen on a port, and logs it."""
    with log.open("w") as output:
        taker = subprocess.Popen([sys.executable, "-c", TAKER, str(port)], stdout=output)
    try:
        until(lambda: log.read_text() == "waits\n", what="the start of the taker")
        yield
    finally:
        taker.kill()
        taker.wait()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.kill
def test_another_user_does_not_get_the_port_of_a_server_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    log = tmp_path / "log"
    with spark_servers(tmp_path / "servers") as servers:
        run = subprocess.Popen(
            [sys.executable, "run.py"],
            cwd=tmp_path,
            env=servers.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def says(word: str) -> object:
            assert run.stdin is not None
            assert run.stdout is not None
            run.stdin.write("\n")
            run.stdin.flush()
            return word, json.loads(run.stdout.readline())

        for victim in ("JVM", "server", "both"):
            # The session of the server before is given up.
            assert says(victim) == (victim, 1)
            [server] = servers.living()
            address = server.address()
            assert address is not None
            jvm = java_of(address.pid)
            with taking(address.port, log):
                for process in {"JVM": [jvm], "server": [address.pid], "both": [address.pid, jvm]}[victim]:
                    os.kill(process, signal.SIGKILL)
                until(lambda: not is_running(jvm), what="the end of the JVM")  # noqa: B023
                assert says(victim) == (victim, "SparkEndedError")
                assert log.read_text() == "waits\n", f"the port was free after the end of: {victim}"
                if victim == "both":
                    run.communicate(timeout=60)
                    until(lambda: log.read_text() == "waits\ntook\n", what="a port that is free after the run")
        assert run.returncode == 0


def java_of(server: int) -> int:
    """The JVM of a server."""
    [jvm] = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and (path / "comm").read_text() == "java\n" and os.getpgid(int(path.name)) == server
    ]
    return jvm


def is_running(process: int) -> bool:
    """Whether a process, which may be a zombie, still has its sockets."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
