"""Sends the packages of this project to executors on other machines, so that nobody has to install them there.

Only these: what they need (pyarrow, pandas, the clients of the brokers) is compiled for each system, and has to be in
the Python of the executors.
"""

from __future__ import annotations

import hashlib
import tempfile
import weakref
import zipfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.util import is_remote_only

import spark_jobs
import stream_consumers
from spark_jobs.jars import cache_folder, own_folder

PACKAGES = (spark_jobs, stream_consumers)
# An archive of the same files has the same bytes, and so the same name.
_DATE = (1980, 1, 1, 0, 0, 0)
_sent: weakref.WeakSet[SparkSession] = weakref.WeakSet()


def send_packages(session: SparkSession) -> None:
    """Let the executors of a session import the packages, unless they run on this machine anyway; once a session.

    Args:
        session: a local one, which needs nothing; one on a master; or a Spark Connect session.

    Raises:
        PySparkException: the server takes no files.
    """
    if session in _sent:
        return
    if not _is_classic(session):
        # A server of ours lives on this machine, and for the Python of its client.
        if not hasattr(session, "is_served"):
            session.addArtifacts(str(archive()), pyfile=True)
    elif not str(session.sparkContext.master).startswith("local"):
        session.sparkContext.addPyFile(str(archive()))
    _sent.add(session)


def _is_classic(session: SparkSession) -> bool:
    return not is_remote_only() and isinstance(session, SparkSession)


def archive() -> Path:
    """The packages in a file that Python imports from; made at the first call.

    Example:
        >>> archive().suffix
        '.zip'
    """
    files = {
        f"{Path(*package.__name__.split('.')) / file.relative_to(folder)}": file
        for package in PACKAGES
        for folder in map(Path, package.__path__)
        for file in sorted(folder.rglob("*.py"))
    }
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    own_folder(cache_folder())
    found = own_folder(cache_folder() / "packages") / f"stream-assets-{digest.hexdigest()[:12]}.zip"
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=found.parent) as scratch:
            made = Path(scratch) / found.name
            with zipfile.ZipFile(made, "w") as packed:
                for name, file in files.items():
                    packed.writestr(zipfile.ZipInfo(name, _DATE), file.read_bytes(), zipfile.ZIP_DEFLATED)
            # Who looks for it finds all of it or nothing.
            made.replace(found)
    return found
