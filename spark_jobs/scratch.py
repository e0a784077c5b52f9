"""Private folders for what Spark spills, shuffles and caches on disk, which are values of messages.

Spark makes its folders with the rights that the umask gives, under a folder that all users share. So each process that
starts a Spark puts a folder of mode 0700 between. The process holds a lock on it while it lives. Folders without a lock
are of processes that were killed, and are removed before another one is made.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # A PySpark that is a client of Spark Connect only has none of these.
    from py4j.java_gateway import JavaGateway  # type: ignore[import-untyped]
    from pyspark import SparkConf

PREFIX = "stream-assets-spark-"
LOCAL_DIRS_SETTING = "spark.local.dir"
LOCAL_DIRS_VARIABLE = "SPARK_LOCAL_DIRS"
"""Spark prefers it to the setting."""


def umask() -> int:
    """The umask of this process, which can only be read by setting it: to one that lets no other user read a file."""
    found = os.umask(0o077)
    os.umask(found)
    return found


@contextmanager
def private_variable() -> Iterator[None]:
    """Let the folders of ``SPARK_LOCAL_DIRS`` be private ones for a JVM that is started in the block."""
    given = os.environ.get(LOCAL_DIRS_VARIABLE)
    if given:
        os.environ[LOCAL_DIRS_VARIABLE] = private_folders(given)
    try:
        yield
    finally:
        if given:
            os.environ[LOCAL_DIRS_VARIABLE] = given


def set_private_folders(conf: SparkConf, gateway: JavaGateway) -> None:
    """Let a Spark keep its files in private folders: within those that its settings name, else within ``TMPDIR``.

    Args:
        conf: the settings that the context is about to be made with.
        gateway: the JVM that it is made in, which knows the settings of ``spark-defaults.conf``.
    """
    given = conf.get(LOCAL_DIRS_SETTING, None) or gateway.jvm.SparkConf(True).get(LOCAL_DIRS_SETTING, "")
    conf.set(LOCAL_DIRS_SETTING, private_folders(given or tempfile.gettempdir()))


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
