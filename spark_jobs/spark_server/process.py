"""The process of a server.

It leaves the process group of the run that started it, so that a signal to the run does not reach it. It then creates a
classic session with the Spark Connect plugin, publishes its address, and ends when no run has used it for a while.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from spark_jobs.redaction import TOKEN_VARIABLE
from spark_jobs.spark_server.folder import Address, ServerFolder
from spark_jobs.spark_server.port import LOOPBACK, allow_listening, offer_port, reserve_port
from spark_jobs.spark_server.workers import end_workers, write_interpreter
from spark_jobs.spark_start import JAVA_OPTIONS, launch, set_private_folders, spark_defaults
from stream_consumers.errors import InvalidOptionError

USER = "stream-assets"
IDLE_SETTING = "spark.stream_assets.server.idleSeconds"
PLUGINS = "spark.plugins"
PORT = "spark.connect.grpc.binding.port"
CONNECT_PLUGIN = "org.apache.spark.sql.connect.SparkConnectPlugin"
IDLE_SECONDS = 900.0
POLL_SECONDS = 1.0
# After this number of sessions, a server ends once it has no client: Spark keeps a thread for each kind of worker that
# a session had.
MAX_SESSIONS = 200
MAX_LOG_BYTES = 10 * 1024 * 1024
SERVER_SETTINGS: Mapping[str, str] = {
    "spark.connect.grpc.binding.address": LOOPBACK,
    # The server listens on the port that is held, or does not start.
    "spark.connect.grpc.port.maxRetries": "0",
    # Each session has its own workers, so that they import the user's modules as they are when a run begins.
    "spark.sql.artifact.isolation.enabled": "true",
    "spark.sql.artifact.isolation.alwaysApplyClassloader": "true",
    # The client ends its session, and may wait for messages for days before that.
    "spark.connect.session.manager.defaultSessionTimeout": "365d",
    # Spark recognizes a persisted frame as long as its plan is in this cache, which also holds a transform's plans.
    "spark.connect.session.planCache.maxSize": "512",
    # Spark keeps these for its user interface, which is not used here; plans can be large.
    "spark.connect.session.inactiveOperations.cacheExpiration": "5m",
    "spark.sql.connect.ui.retainedSessions": "1",
    "spark.sql.connect.ui.retainedStatements": "1",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
}


def main(words: list[str]) -> None:
    """Run the server until no run needs it.

    Args:
        words: the folder of the server, and the descriptor of :meth:`ServerFolder.alive_lock`.
    """
    folder, alive = ServerFolder(Path(words[0])), int(words[1])
    os.set_inheritable(alive, False)
    if os.fork():
        # The run that started the server waits for this process only, and does not get the server as a child.
        os._exit(0)
    os.setsid()
    os.pwrite(alive, str(os.getpid()).encode(), 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    settings = json.loads(folder.settings.read_bytes())
    folder.settings.unlink()
    with _context(settings, folder) as (context, token):
        serve(context, folder, token, idle_seconds=idle_seconds(settings))


def idle_seconds(settings: Mapping[str, str]) -> float:
    """Return how long a server with these settings keeps running without a run, in seconds.

    Raises:
        InvalidOptionError: the setting is not a number of seconds.
    """
    said = settings.get(IDLE_SETTING, str(IDLE_SECONDS))
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise InvalidOptionError(f"{IDLE_SETTING} must be at least 0 seconds, got {said!r}", remedy="Use, say, 900.")
    return seconds


@contextmanager
def _context(settings: Mapping[str, str], folder: ServerFolder) -> Iterator[tuple[SparkContext, str]]:
    """Start Spark with no setting and no token in a command line, and yield its context and the token."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    write_interpreter(
        folder.interpreter, python=os.environ.get("PYSPARK_PYTHON", sys.executable), folder=folder.workers
    )
    os.environ["PYSPARK_PYTHON"] = str(folder.interpreter)
    token = os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
    plugins = [name for name in settings.get(PLUGINS, "").split(",") if name and name != CONNECT_PLUGIN]
    given = {**settings, **SERVER_SETTINGS, PLUGINS: ",".join([*plugins, CONNECT_PLUGIN])}
    of_user = {**spark_defaults(), **settings}.get(JAVA_OPTIONS, "")
    # A JVM that is out of memory would neither work nor end.
    given[JAVA_OPTIONS] = f"{of_user} -XX:+ExitOnOutOfMemoryError"
    port = reserve_port()
    given[PORT] = str(port.getsockname()[1])
    gateway = launch(given)
    conf = SparkConf(_jvm=gateway.jvm)
    set_private_folders(conf, gateway)
    with allow_listening(port):
        context = SparkContext(conf=conf, gateway=gateway)
    offer_port(port, folder)
    yield context, token
    context.stop()


def serve(context: SparkContext, folder: ServerFolder, token: str, *, idle_seconds: float) -> None:
    """Publish the address, and serve until it is withdrawn, no client came for ``idle_seconds``, or Spark ended."""
    # Spark creates the sessions of clients from this one.
    spark = SparkSession(context)
    service = _java_object(context, "org.apache.spark.sql.connect.service.SparkConnectService$")
    address = Address(
        port=int(service.localPort()),
        token=token,
        pid=os.getpid(),
        cores=context.defaultParallelism,
        master=str(context.master),
        python=sys.executable,
        cwd=str(Path.cwd()),
        started=time.time(),
    )
    folder.publish(address)
    used, closed, is_swept = time.monotonic(), 0, True
    while folder.address() == address:
        if _has_ended(context):
            sys.exit("the JVM of Spark has ended")
        gone = folder.remove_ended_clients()
        for session in gone:
            _close_session(context, service, folder, session)
        closed += len(gone)
        used = time.monotonic() if folder.connected_sessions() else used
        is_needed = time.monotonic() - used < idle_seconds and closed < MAX_SESSIONS
        is_swept = is_swept and not gone
        if not (is_swept and is_needed):
            # The process that holds the lock may be waiting for the end of this server.
            with suppress(BlockingIOError), folder.start_lock(waits=False):
                if not folder.connected_sessions():
                    # Killed runs have left cached frames.
                    spark.catalog.clearCache()
                    folder.request_end() if not is_needed else None
                is_swept = True
        _truncate_log(folder.log)
        time.sleep(POLL_SECONDS)


def _java_object(context: SparkContext, name: str) -> Any:
    """Return the singleton of a Scala object."""
    return getattr(getattr(context._jvm, name), "MODULE$")


def _has_ended(context: SparkContext) -> bool:
    process = getattr(context._gateway, "proc", None)
    return process is not None and process.poll() is not None


def _close_session(context: SparkContext, service: Any, folder: ServerFolder, session: str) -> None:
    """Close the session of a client that has ended, with its jobs and its workers."""
    key = context._jvm.org.apache.spark.sql.connect.service.SessionKey(USER, session)  # type: ignore[union-attr]
    with suppress(Py4JError):
        holder = service.sessionManager().getIsolatedSessionIfPresent(key)
        if holder.isDefined():
            workers = str(holder.get().session().sessionUUID())
            service.sessionManager().closeSession(key, False)
            end_workers(folder.workers, workers)


def _truncate_log(log: Path) -> None:
    """Move a log that is too large to one older file."""
    # The log may have been deleted, and a full disk must not end the server.
    with suppress(OSError):
        if log.stat().st_size > MAX_LOG_BYTES:
            try:
                shutil.copyfile(log, log.with_suffix(".old"))
            finally:
                os.truncate(log, 0)
