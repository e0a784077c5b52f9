"""Starts a Spark in this process without the lines that every start prints.

What Spark says of itself before any setting of its log counts (the incubator module, the default log profile, a missing
native library) is no news, and stands between the lines that are. Everything else that its JVM writes to the standard
error is passed on.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from spark_jobs.scratch import private_variable, set_private_folders

GUARD: Mapping[str, str] = {
    # Any user of the machine reaches the ports of the JVM, so a client must know a secret. For a local master Spark
    # generates it, and keeps it in memory.
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
}
"""Settings of each local Spark that this project starts; they win over those of the user."""
STANDARD_ERROR = 2
_CHUNK = 65536
# What Spark itself does not show of its settings (spark.redaction.regex), and what the object stores call theirs.
_SECRET = re.compile(r"secret|password|token|credential|private|key|[.]sas[.]", re.IGNORECASE)
_USER_IN_URL = re.compile(r"://[^/\s]*@")
_NEEDLESS = re.compile(
    rb"WARNING: Using incubator modules: "
    rb"|\S+ \S+ WARN NativeCodeLoader: Unable to load native-hadoop library"
    rb"|Using Spark's default log4j profile: "
    rb"|Setting default log level to "
    rb"|To adjust logging level use sc\.setLogLevel"
    rb"|Setting Spark log level to "
)


def is_secret(name: str, value: str) -> bool:
    """Whether a setting stays off the command line of the JVM, which any user of the machine can read.

    Example:
        >>> is_secret("spark.jars.repositories", "https://ann:pw@maven"), is_secret("spark.app.name", "orders")
        (True, False)
    """
    return bool(_SECRET.search(name) or _USER_IN_URL.search(value))


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
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    if SparkContext._active_spark_context is not None:
        return
    conf = SparkConf().setMaster(master).setAppName("stream-assets")
    for name, value in settings.items():
        conf.set(name, value)
    # These stand on the command line of the JVM, which everybody on the machine can read; the context gets all.
    public = SparkConf()
    for name, value in conf.getAll():
        if not is_secret(name, value):
            public.set(name, value)
    # The JVM of a session that was stopped serves the next one; PySpark would forget another one, and leave it running.
    gateway = SparkContext._gateway
    if gateway is None:
        with without_needless_lines() as descriptor, private_variable():
            gateway = launch_gateway(public, {"stderr": descriptor})  # type: ignore[no-untyped-call]
    set_private_folders(conf, gateway)
    SparkContext(conf=conf, gateway=gateway)


@contextmanager
def without_needless_lines() -> Iterator[int]:
    """A file descriptor for the standard error of a process that is started within the block.

    What the process writes, then and later, goes to the standard error of this one, but for the needless lines.
    """
    read, write = os.pipe()
    threading.Thread(target=_pass_on, args=(read,), name="standard error of Spark", daemon=True).start()
    try:
        yield write
    finally:
        os.close(write)


def _pass_on(read: int) -> None:
    rest = b""
    while chunk := os.read(read, _CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        kept = b"".join(line + b"\n" for line in lines if not _NEEDLESS.match(line))
        if b"\r" in rest:
            # A progress bar has no end of a line.
            kept, rest = kept + rest, b""
        _write(kept)
    os.close(read)
    _write(rest)


def _write(text: bytes) -> None:
    # A full disk, or a terminal that was closed, costs these lines: a JVM that nobody reads would stand still.
    with suppress(OSError):
        while text:
            text = text[os.write(STANDARD_ERROR, text) :]
