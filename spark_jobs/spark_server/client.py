"""Finds or starts a server, and creates a session of it; a run releases its session when it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn, cast

import grpc  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession as ConnectSession

from spark_jobs.python_start import own_python
from spark_jobs.redaction import jvm_output
from spark_jobs.spark_server import process
from spark_jobs.spark_server.configuration import CORES, configuration_key, server_environment
from spark_jobs.spark_server.folder import (
    Address,
    ServerFolder,
    UnusableFolderError,
    folders_lock,
    server_folder,
    server_folders,
    write_private,
)
from spark_jobs.spark_server.port import LOOPBACK, check_unix_sockets, hold_port
from spark_jobs.spark_server.process import USER, idle_seconds
from stream_consumers.display import counted
from stream_consumers.errors import SparkEndedError, SparkSessionError

START_SECONDS = 300.0
# The number of idle servers that stay when another one starts.
MAX_IDLE_SERVERS = 1
KEEP_ENDED_SECONDS = 7 * 86400.0
ANSWER_SECONDS = 30.0
END_SECONDS = 30.0
LOG_LINES = 20
# A line of a stack trace of Java or of Python that names a place in the code, and not a cause.
_FRAME = re.compile(r"\s+(at [\w.$/]+\(|\.\.\. \d+ more)|  File \"|    ")
_MODE_VARIABLE = "SPARK_CONNECT_MODE_ENABLED"
_POLL_SECONDS = 0.05


class ServerSession(ConnectSession):
    """A session of a local server; ``stop`` releases the session, and the server keeps running.

    Args:
        folder: the folder of the server.
        address: where the server listens.
        session: the name of the session, under which the client is registered already.
        client: the locked descriptor of :meth:`ServerFolder.register_client`, which shows that this process lives.
        port: a socket that holds the server's port while the session is in use, so that no other process can listen.
    """

    def __init__(self, folder: ServerFolder, address: Address, session: str, client: int, port: socket.socket) -> None:
        self._client_descriptor: int | None = client
        self._port = port
        self._policy = ServerRetryPolicy(folder, address)
        super().__init__(connection=_Channel(address, session))
        self.client.set_retry_policies([self._policy])

    @property
    def is_served(self) -> bool:
        """Whether the server of this session is alive."""
        return self._policy.is_alive()

    def check_served(self) -> None:
        """Check that the server is alive, without a call to it.

        Raises:
            SparkEndedError: the server has ended.
        """
        if not self.is_served:
            raise self._policy.ended()

    def stop(self) -> None:
        """Release the session; the server closes it and ends its workers."""
        self.release_session_on_close = False
        super().stop()
        # The channel is closed by now; before that it could connect to the port again.
        self._port.close()
        os.environ.pop(_MODE_VARIABLE, None)
        descriptor, self._client_descriptor = self._client_descriptor, None
        if descriptor is not None:
            ServerFolder.unregister_client(descriptor)


class _Channel(DefaultChannelBuilder):
    """A channel to a server of this machine that ignores proxies, and whose printable address has no token."""

    def __init__(self, address: Address, session: str) -> None:
        super().__init__(f"sc://{LOOPBACK}:{address.port}", [("grpc.enable_http_proxy", 0)])
        for name, value in (("token", address.token), ("user_id", USER), ("session_id", session)):
            self.set(name, value)

    def toChannel(self) -> grpc.Channel:  # noqa: N802 - Spark's name
        token = grpc.access_token_call_credentials(str(self.token))
        credentials = grpc.composite_channel_credentials(grpc.local_channel_credentials(), token)
        return self._secure_channel(self.endpoint, credentials)


class ServerRetryPolicy(DefaultPolicy):
    """Retries calls only while the server is alive; Spark's policy would retry for ten minutes after its end."""

    def __init__(self, folder: ServerFolder, address: Address) -> None:
        super().__init__()
        self._folder = folder
        self._address = address

    def is_alive(self) -> bool:
        """Return whether the server is alive and has the same address."""
        return self._folder.address() == self._address and self._folder.is_alive()

    def can_retry(self, e: BaseException) -> bool:
        """Return whether to retry the call.

        Raises:
            SparkEndedError: the server has ended.
        """
        if not isinstance(e, grpc.RpcError):
            return False
        if self.is_alive():
            return super().can_retry(e)
        raise self.ended() from e

    def ended(self) -> SparkEndedError:
        """Return the error for a server that has ended."""
        return SparkEndedError(
            f"the local Spark server of this run (process {self._address.pid}) has ended",
            remedy=f"No message is lost. Run again, to start another server; the reason is in {self._folder.log}.",
        )


def connect(settings: Mapping[str, str]) -> SparkSession:
    """Create a session of the server of this configuration, and start the server if none is running.

    Args:
        settings: the settings of Spark, with the master.

    Raises:
        UnusableFolderError: this machine cannot keep a server safely.
        InvalidOptionError: the idle time in the settings is not a number of seconds.
        SparkSessionError: the server cannot be started.
    """
    idle_seconds(settings)
    with folders_lock():
        folder = server_folder(configuration_key(settings))
        folder.create()
        check_unix_sockets(folder)
    name = str(uuid.uuid4())
    with folder.start_lock():
        address = _running_address(folder)
        if address is None:
            end_idle_servers(folder)
            address = _start_server(folder, settings)
        try:
            port = hold_port(folder, address.port)
        except OSError as error:
            raise ServerRetryPolicy(folder, address).ended() from error
        client = folder.register_client(name)
    os.environ[_MODE_VARIABLE] = "1"
    session = ServerSession(folder, address, name, client, port)
    ConnectSession._set_default_and_active_session(session)
    session.conf.set(CORES, str(address.cores))
    return cast(SparkSession, session)


def end_server(folder: ServerFolder) -> bool:
    """End a server even while runs use it; return ``False`` if it is still alive afterwards."""
    folder.request_end()
    if _wait_for(lambda: not folder.is_alive(), END_SECONDS):
        return True
    # The server still holds its lock, so that this process id is still its own; it leads its process group.
    process = folder.process()
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    return _wait_for(lambda: not folder.is_alive(), END_SECONDS)


def end_idle_servers(folder: ServerFolder) -> None:
    """Ask all idle servers but the last used one to end, and remove the folders of servers that ended long ago.

    Args:
        folder: the folder of the server that is about to start; it is left alone.
    """
    others = [other for other in server_folders() if other.path != folder.path]
    idle = []
    for other in others:
        # This does not wait for a lock, so that two processes cannot wait for each other.
        with suppress(OSError), folders_lock(waits=False), other.start_lock(waits=False):
            if not other.is_alive():
                if time.time() - other.last_used() > KEEP_ENDED_SECONDS:
                    shutil.rmtree(other.path)
            elif other.address() is not None and not other.connected_sessions():
                idle.append(other)
    for other in sorted(idle, key=ServerFolder.last_used)[: len(idle) - MAX_IDLE_SERVERS]:
        with suppress(OSError), other.start_lock(waits=False):
            if not other.connected_sessions():
                other.request_end()


def _running_address(folder: ServerFolder) -> Address | None:
    """Return the address of the server if it answers, after its start if it is starting; end it if it does not."""
    if not folder.is_alive():
        return None
    _wait_for(lambda: folder.address() is not None or not folder.is_alive(), START_SECONDS)
    address = folder.address()
    if address is not None and folder.is_alive() and _answers(address):
        return address
    if folder.is_alive() and (runs := len(folder.connected_sessions())):
        raise UnusableFolderError(
            f"the local Spark server (process {folder.process()}) does not answer; {counted(runs, 'run')} may use it; "
            "stream-assets spark stop --force ends it"
        )
    end_server(folder)
    return None


def _answers(address: Address) -> bool:
    channel = _Channel(address, str(uuid.uuid4())).toChannel()
    try:
        grpc.channel_ready_future(channel).result(ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()
    return True


def _start_server(folder: ServerFolder, settings: Mapping[str, str]) -> Address:
    folder.request_end()
    command = own_python(f"from {process.__name__} import main; main(sys.argv[1:])")
    if folder.is_alive():
        raise SparkSessionError(
            f"the local Spark server (process {folder.process()}) neither answers nor ends",
            remedy=f"Kill the process; its log is {folder.log}.",
        )
    try:
        write_private(folder.settings, settings)
        with folder.alive_lock() as alive, folder.log.open("ab") as log:
            said = log.tell()
            subprocess.run(  # noqa: S603 - fixed words
                [*command, str(folder.path), str(alive)],
                env=server_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[alive],
                check=False,
            )
        _wait_for(lambda: folder.address() is not None or not folder.is_alive(), START_SECONDS)
    finally:
        # A server that ended at once has not deleted its settings, which may contain secrets.
        folder.settings.unlink(missing_ok=True)
    return folder.address() or _raise_start_error(folder, said)


def _raise_start_error(folder: ServerFolder, since: int) -> NoReturn:
    """End a server that did not start, and raise an error with the causes in its log from byte ``since`` on."""
    with folder.log.open("rb") as log:
        log.seek(since)
        said = jvm_output(log.read().decode(errors="replace"))
    end_server(folder)
    lines = [line for line in said.splitlines() if not _FRAME.match(line)][-LOG_LINES:]
    shown = "\n".join(lines) or "(nothing)"
    raise SparkSessionError(
        f"the local Spark server did not start; the end of {folder.log}, without stack frames:\n{shown}\n",
        remedy="Correct the cause, or run Spark in the process of the run (in_process=True, --in-process).",
    )


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition; return ``False`` if it is still false after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
