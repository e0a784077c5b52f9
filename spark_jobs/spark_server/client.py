"""Sessions in a server, which is found or started; a session is given back when its run ends."""

from __future__ import annotations

import os
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
from spark_jobs.redaction import redacted
from spark_jobs.spark_server import process
from spark_jobs.spark_server.configuration import CORES, configuration_key, lasting
from spark_jobs.spark_server.folder import (
    Address,
    ServerFolder,
    UnusableFolderError,
    server_folder,
    server_folders,
    tidying,
    write_private,
)
from spark_jobs.spark_server.port import LOOPBACK, check_offer, hold
from spark_jobs.spark_server.process import USER, idle_seconds
from stream_consumers.display import counted
from stream_consumers.errors import SparkEndedError, SparkSessionError

START_SECONDS = 300.0
# Beside the one that is started: tests that change their folder would leave a server each behind.
MOST_IDLE = 1
KEPT_SECONDS = 7 * 86400.0
ANSWER_SECONDS = 30.0
END_SECONDS = 30.0
LOG_LINES = 20
_MODE_VARIABLE = "SPARK_CONNECT_MODE_ENABLED"
_POLL_SECONDS = 0.05


class ServerSession(ConnectSession):
    """A session in a server of ours; ``stop`` gives it back, and leaves the server.

    Args:
        folder: of the server.
        address: where it listens.
        session: its name; the client of this name is registered already.
        client: the descriptor that says that this process lives.
        port: holds the port of the server while the session is in use, so that nothing else can listen there.
    """

    def __init__(self, folder: ServerFolder, address: Address, session: str, client: int, port: socket.socket) -> None:
        self._client_descriptor: int | None = client
        self._port = port
        self._policy = WhileItLives(folder, address)
        super().__init__(connection=_Channel(address, session))
        self.client.set_retry_policies([self._policy])

    @property
    def is_served(self) -> bool:
        """Whether its server lives."""
        return self._policy.is_alive()

    def check_served(self) -> None:
        """Notice that the server has ended, without a call.

        Raises:
            SparkEndedError: it has.
        """
        if not self.is_served:
            raise self._policy.ended()

    def stop(self) -> None:
        """Give the session back; the server closes it, and ends its workers."""
        self.release_session_on_close = False
        super().stop()
        # Not earlier: the channel, which is closed by now, would connect to the port again.
        self._port.close()
        os.environ.pop(_MODE_VARIABLE, None)
        descriptor, self._client_descriptor = self._client_descriptor, None
        if descriptor is not None:
            ServerFolder.leave(descriptor)


class _Channel(DefaultChannelBuilder):
    """To a server of this machine, whatever proxies there are; the token is in no address that somebody may print."""

    def __init__(self, address: Address, session: str) -> None:
        super().__init__(f"sc://{LOOPBACK}:{address.port}", [("grpc.enable_http_proxy", 0)])
        for name, value in (("token", address.token), ("user_id", USER), ("session_id", session)):
            self.set(name, value)

    def toChannel(self) -> grpc.Channel:  # noqa: N802 - Spark's name
        token = grpc.access_token_call_credentials(str(self.token))
        credentials = grpc.composite_channel_credentials(grpc.local_channel_credentials(), token)
        return self._secure_channel(self.endpoint, credentials)


class WhileItLives(DefaultPolicy):
    """Spark's own policy would try for ten minutes to reach a server that is gone."""

    def __init__(self, folder: ServerFolder, address: Address) -> None:
        super().__init__()
        self._folder = folder
        self._address = address

    def is_alive(self) -> bool:
        """Whether the server is the one that it was."""
        return self._folder.address() == self._address and self._folder.is_alive()

    def can_retry(self, e: BaseException) -> bool:
        """Whether the call is made again.

        Raises:
            SparkEndedError: nobody would answer it.
        """
        if not isinstance(e, grpc.RpcError):
            return False
        if self.is_alive():
            return super().can_retry(e)
        raise self.ended() from e

    def ended(self) -> SparkEndedError:
        """What is to be said when it has ended."""
        return SparkEndedError(
            f"the local Spark server of this run (process {self._address.pid}) has ended",
            remedy=f"Nothing is lost: run again, and another one is started. Why it ended is in {self._folder.log}.",
        )


def connect(settings: Mapping[str, str]) -> SparkSession:
    """A session in the server of this configuration, which is started if it is not there.

    Args:
        settings: of Spark, with the master.

    Raises:
        UnusableFolderError: a server cannot be kept safely on this machine.
        InvalidOptionError: the time that it is to be kept is none.
        SparkSessionError: it cannot be started.
    """
    idle_seconds(settings)
    with tidying():
        folder = server_folder(configuration_key(settings))
        folder.make()
        check_offer(folder)
    name = str(uuid.uuid4())
    with folder.starting():
        address = _running(folder)
        if address is None:
            make_room(folder)
            address = _started(folder, settings)
        try:
            port = hold(folder, address.port)
        except OSError as error:
            raise WhileItLives(folder, address).ended() from error
        client = folder.client(name)
    os.environ[_MODE_VARIABLE] = "1"
    session = ServerSession(folder, address, name, client, port)
    ConnectSession._set_default_and_active_session(session)
    session.conf.set(CORES, str(address.cores))
    return cast(SparkSession, session)


def end(folder: ServerFolder) -> bool:
    """End a server, whoever uses it; ``False`` if it lives all the same."""
    folder.withdraw()
    if _becomes(lambda: not folder.is_alive(), END_SECONDS):
        return True
    # It still holds its lock, so that the process of this number is still the server, which leads its process group.
    process = folder.process()
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    return _becomes(lambda: not folder.is_alive(), END_SECONDS)


def make_room(folder: ServerFolder) -> None:
    """Before a server is started: ask those to end that nobody uses, but the last one; remove what is long dead.

    Args:
        folder: of the server to start.
    """
    others = [other for other in server_folders() if other.path != folder.path]
    idle = []
    for other in others:
        # Who has it now does not wait for us, so that we do not wait for each other.
        with suppress(OSError), tidying(waits=False), other.starting(waits=False):
            if not other.is_alive():
                if time.time() - other.used() > KEPT_SECONDS:
                    shutil.rmtree(other.path)
            elif other.address() is not None and not other.connected():
                idle.append(other)
    for other in sorted(idle, key=ServerFolder.used)[: len(idle) - MOST_IDLE]:
        with suppress(OSError), other.starting(waits=False):
            if not other.connected():
                other.withdraw()


def _running(folder: ServerFolder) -> Address | None:
    """Where a server listens that lives and answers; it may be starting still. Others are ended."""
    if not folder.is_alive():
        return None
    _becomes(lambda: folder.address() is not None or not folder.is_alive(), START_SECONDS)
    address = folder.address()
    if address is not None and folder.is_alive() and _answers(address):
        return address
    if folder.is_alive() and (runs := len(folder.connected())):
        raise UnusableFolderError(
            f"the local Spark server (process {folder.process()}) does not answer; {counted(runs, 'run')} may use it; "
            "stream-assets spark stop --force ends it"
        )
    end(folder)
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


def _started(folder: ServerFolder, settings: Mapping[str, str]) -> Address:
    folder.withdraw()
    command = own_python(f"from {process.__name__} import main; main(sys.argv[1:])")
    if folder.is_alive():
        raise SparkSessionError(
            f"the local Spark server (process {folder.process()}) neither answers nor ends",
            remedy=f"Kill it; what it said is in {folder.log}.",
        )
    try:
        write_private(folder.settings, settings)
        with folder.life() as life, folder.log.open("ab") as log:
            said = log.tell()
            subprocess.run(  # noqa: S603 - fixed words
                [*command, str(folder.path), str(life)],
                env=lasting(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[life],
                check=False,
            )
        _becomes(lambda: folder.address() is not None or not folder.is_alive(), START_SECONDS)
    finally:
        # One that died at once has not read them; there may be secrets among them.
        folder.settings.unlink(missing_ok=True)
    return folder.address() or _fail(folder, said)


def _fail(folder: ServerFolder, since: int) -> NoReturn:
    """Say why a server did not start, which its log does from byte ``since`` on."""
    with folder.log.open("rb") as log:
        log.seek(since)
        lines = log.read().decode(errors="replace").strip().splitlines()[-LOG_LINES:]
    end(folder)
    said = redacted("\n".join(lines)) or "(nothing)"
    raise SparkSessionError(
        f"the local Spark server did not start; the end of {folder.log}:\n{said}\n",
        remedy="Correct it, or run Spark in the process of the run (in_process=True, --in-process).",
    )


def _becomes(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until it is so; ``False`` if it is not after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
