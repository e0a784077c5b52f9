"""Starts the JVM of Spark with its settings off the command line, and with private folders for its files.

What Spark spills, shuffles and caches on disk are values of messages. Spark creates its folders with the rights that
the umask gives, in a folder that all users share. So each process that starts a Spark puts a folder of mode 0700
between, and holds a lock on it while it lives. Folders without a lock belong to killed processes, and are removed.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

from spark_jobs.jars import cache_folder, own_folder
from spark_jobs.python_start import worker_variables
from stream_consumers.errors import StreamAssetsError

if TYPE_CHECKING:
    # A PySpark that is only a client of Spark Connect has none of these.
    from py4j.java_gateway import JavaGateway  # type: ignore[import-untyped]
    from pyspark import SparkConf

GUARD: Mapping[str, str] = {
    # Any user of the machine reaches the ports of the JVM, so a client must know a secret. For a local master Spark
    # generates it, and keeps it in memory.
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
}
"""Settings of each local Spark that this project starts; they win over those of the user."""
ARGUMENTS_VARIABLE = "PYSPARK_SUBMIT_ARGS"
JAVA_OPTIONS_VARIABLE = "SPARK_SUBMIT_OPTS"
PREFIX = "stream-assets-spark-"
FOLDER_SETTINGS = ("spark.local.dir", "spark.hadoop.hadoop.tmp.dir")
"""Where Spark keeps its own files, and where Hadoop keeps what it is about to upload to an object store."""
LOCAL_DIRS_VARIABLE = "SPARK_LOCAL_DIRS"
"""Spark prefers it to the setting."""


def configuration_folder(environment: Mapping[str, str]) -> Path:
    """The folder with Spark's own configuration files."""
    home = environment.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    return Path(environment.get("SPARK_CONF_DIR") or f"{home}/conf")


def spark_defaults() -> dict[str, str]:
    """The settings in ``spark-defaults.conf``, which are behind those of a session; none if it cannot be read."""
    try:
        text = (configuration_folder(os.environ) / "spark-defaults.conf").read_text(errors="replace")
    except OSError:
        return {}
    settings = re.findall(r"^[ \t]*(?![#!])([^\s=:]+)[ \t=:]+(.+)$", re.sub(r"\\\n[ \t]*", "", text), re.MULTILINE)
    return {name: re.sub(r"\\(?!u)(.)", r"\1", value) for name, value in settings}


def launch(settings: Mapping[str, str]) -> JavaGateway:
    """Start a JVM for Spark, with its settings in a file that only this user can read, while it starts.

    Any user of the machine can read the command line of a JVM. Only what Java itself takes is there: the size of
    the heap, and the options and the class path of the driver.

    Args:
        settings: of Spark; those of ``spark-defaults.conf`` are behind them.

    Raises:
        pyspark.errors.PySparkException: it does not start; it has said why on the standard error.
    """
    # A PySpark that is a client of Spark Connect only has none of these, and needs none.
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    properties = Path(private_folders(tempfile.gettempdir()), "settings.conf")
    properties.touch(0o600)
    words = shlex.join(["--properties-file", str(properties), "--load-spark-defaults"])
    variables = {
        ARGUMENTS_VARIABLE: f"{words} {os.environ.get(ARGUMENTS_VARIABLE) or 'pyspark-shell'}",
        # The last of two options counts, so that those of the user win.
        JAVA_OPTIONS_VARIABLE: f"{crash_option()} {os.environ.get(JAVA_OPTIONS_VARIABLE, '')}",
        # Spark starts its Python workers with -m.
        **worker_variables(),
    }
    if given := os.environ.get(LOCAL_DIRS_VARIABLE):
        variables[LOCAL_DIRS_VARIABLE] = private_folders(given)
    try:
        properties.write_text("".join(f"{name}={escaped(value)}\n" for name, value in settings.items()))
        with _environment(variables):
            return _connecting_to_its_jvm(launch_gateway())  # type: ignore[no-untyped-call]
    finally:
        properties.unlink()


def crash_option() -> str:
    """The option of Java for its report of a crash, which has the command line: a file in a folder of mode 0700."""
    try:
        folder = own_folder(cache_folder()) / "crashes"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
    except (OSError, StreamAssetsError):
        # Without a cache that can be written, the reports are removed with what else Spark has on the disk.
        folder = Path(private_folders(tempfile.gettempdir()))
    within = str(folder.absolute()).replace("%", "%%")
    return shlex.quote(f"-XX:ErrorFile={within}/hs_err_pid%p.log")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _connecting_to_its_jvm(gateway: JavaGateway) -> JavaGateway:
    """Let a gateway send nothing once its JVM has ended, because another user's process may listen on the port then."""
    client, process = gateway._gateway_client, gateway.proc
    connection = client._get_connection

    def living_connection() -> object:
        # None where spark-submit has started the JVM.
        if process is not None and process.poll() is not None:
            raise Py4JNetworkError("the JVM of Spark has ended")
        return connection()

    client._get_connection = living_connection
    return gateway


def escaped(value: str) -> str:
    """A value as Java's properties have it.

    Example:
        >>> escaped("a b") == "a" + chr(92) + "u0020b"
        True
    """
    units = value.encode("utf-16-be")
    numbers = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(chr(one) if 0x20 < one < 0x7F and one != ord("\\") else rf"\u{one:04x}" for one in numbers)


def start_context(settings: Mapping[str, str], master: str) -> None:
    """Start the Spark of this process, unless there is one; a session is then made as ever.

    Args:
        settings: of Spark.
        master: of Spark.

    Raises:
        pyspark.errors.PySparkException: it does not start; its JVM has said why on the standard error.
    """
    # A PySpark that is a client of Spark Connect only has none of these, and needs none.
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415

    # At DEBUG it writes each call of Java with its arguments, such as the settings of Spark.
    calls = logging.getLogger("py4j")
    if calls.getEffectiveLevel() < logging.INFO:
        calls.setLevel(logging.INFO)
    if SparkContext._active_spark_context is not None:
        return
    conf = SparkConf().setMaster(master).setAppName("stream-assets")
    for name, value in settings.items():
        conf.set(name, value)
    # The JVM of a session that was stopped serves the next one; PySpark would forget another one, and leave it running.
    gateway = SparkContext._gateway
    if gateway is None:
        gateway = launch(dict(conf.getAll()))
    set_private_folders(conf, gateway)
    SparkContext(conf=conf, gateway=gateway)


def umask() -> int:
    """The umask of this process, which can only be read by setting it: to one that lets no other user read a file."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def set_private_folders(conf: SparkConf, gateway: JavaGateway) -> None:
    """Let a Spark keep its files in private folders: within those that its settings name, else within ``TMPDIR``.

    Args:
        conf: the settings that the context is about to be made with.
        gateway: the JVM that it is made in, which knows the settings of ``spark-defaults.conf``.
    """
    of_file = gateway.jvm.SparkConf(True)
    # The executors of a cluster get the settings of Hadoop, but not this folder.
    is_local = (conf.get("spark.master", None) or "local").startswith("local")
    for setting in FOLDER_SETTINGS if is_local else FOLDER_SETTINGS[:1]:
        given = conf.get(setting, None) or of_file.get(setting, "")
        if "${" in given or ":/" in given:
            # Hadoop would look for the folder elsewhere.
            given = ""
        conf.set(setting, private_folders(given or tempfile.gettempdir()))


def private_folders(roots: str) -> str:
    """A private folder of this process within each of some folders, removed when the process ends.

    Args:
        roots: the folders, with commas between them, as Spark has them; one that is missing is made.

    Raises:
        OSError: one cannot be made or written.
    """
    return ",".join(str(_private_folder(Path(root.strip()).absolute(), os.getpid())) for root in roots.split(","))


@cache
def _private_folder(root: Path, process: int) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        descriptor = os.open(folder, os.O_RDONLY)
        # A file system without locks has no abandoned folders that could be found.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            break
        # Another process took it for an abandoned one before it was locked.
        os.close(descriptor)
    atexit.register(_remove, folder, process)
    return folder


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        # Those of other users, and those that are in use, stay.
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(folder: Path, process: int) -> None:
    # A forked child runs the handlers of its parent, too.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
