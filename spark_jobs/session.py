"""Creates Spark sessions that can write Delta tables: local ones by default, on any master, or over Spark Connect.

The settings of a session include those for tables in object stores. Executors on other machines receive the packages of
this project; their dependencies (pyarrow, pandas, the clients of the brokers) are compiled code, and must be installed
on these machines.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.util import is_remote_only

import spark_jobs
import stream_consumers
from spark_jobs.jars import (
    CACHE_VARIABLE,
    LOG_STORE_CLASS,
    S3_LOG_STORE_CLASS,
    cache_folder,
    delta_jars,
    java,
    own_folder,
    s3_jars,
)
from spark_jobs.redaction import HIDDEN_SETTINGS, REMOTE_VARIABLE, hide, redacted, without_secrets
from spark_jobs.spark_server.folder import UnusableFolderError
from spark_jobs.spark_start import GUARD, spark_defaults, start_context, umask
from spark_jobs.table_location import S3, is_s3
from stream_consumers.client_config import environment
from stream_consumers.errors import InvalidOptionError, SparkSessionError
from stream_consumers.urls import check_no_credentials

SPARK_VARIABLE = "STREAM_ASSETS_SPARK"
IN_PROCESS = "in-process"
CONNECT_PORT = 15002
CONNECT_SECONDS = 10.0
DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
UMASK = "spark.hadoop.fs.permissions.umask-mode"
LOCAL_LOG_STORE = "spark.delta.logStore.file.impl"
# PySpark writes the text of each error to the standard error before it is raised, with the value that a cast rejects.
_QUERY_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
_log = logging.getLogger(__name__)
_SIZE = re.compile(r"([0-9]{1,18})\s*([kmgtp]?)b?")
DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

LOCAL_DEFAULTS: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.python.daemon.module": "spark_jobs.reading.worker_daemon",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# Our errors report each failure once; Spark would also log it, with values of rows and a page of Java frames.
LOG_LEVEL: Mapping[str, str] = {"spark.log.level": "FATAL"}
DELTA_CONFIG: Mapping[str, str] = {
    "spark.sql.extensions": DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": DELTA_CATALOG,
    "spark.sql.session.timeZone": "UTC",
    # A commit reads the state of the table in this many tasks; the default of 50 costs a second each time.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "4",
    # A block of cached rows has 4 MiB, or one row. Java would hold 100 of them while it writes, and Spark measure each
    # 16th one.
    "spark.serializer.objectStreamReset": "1",
    "spark.storage.unrollMemoryCheckPeriod": "1",
    "spark.redaction.regex": HIDDEN_SETTINGS,
}
# Settings that each session gets before it writes, including sessions of the user.
REQUIRED_CONFIG: Mapping[str, str] = {
    # Spark would write INT96, which other readers read as nanoseconds: a wrong time before 1677 or after 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # In the calendar of Spark 2 the days from 1582-10-05 to 1582-10-14 would become later ones.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    # Delta would write times of partitions without their zone.
    "spark.databricks.delta.write.utcTimestampPartitionValues": "true",
    # delta-rs, which reads and checks the metadata before Spark does, does not read compacted parts of a log.
    "spark.databricks.delta.deltaLog.minorCompaction.useForReads": "false",
    # Spark and Parquet hold up to thousands of rows in memory in these places, however large they are.
    "spark.sql.windowExec.buffer.spill.size.threshold": "128m",
    "spark.sql.sortMergeJoinExec.buffer.spill.size.threshold": "128m",
    "spark.sql.parquet.columnarReaderBatchSize": "16",
    "spark.sql.inMemoryColumnarStorage.hugeVectorThreshold": "16777216",
    "parquet.page.size.row.check.min": "1",
    "parquet.page.size.row.check.max": "16",
    "parquet.block.size.row.check.min": "1",
    "parquet.block.size.row.check.max": "16",
    # A batch is cached for seconds, and read twice: compression costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Spark would replace ${env:NAME} in names of columns and in expressions of tables by secrets of the run.
    "spark.sql.variable.substitute": "false",
}
_AWS_PREFIX = "aws_"
_S3A: Mapping[str, str] = {
    "access_key_id": "fs.s3a.access.key",
    "secret_access_key": "fs.s3a.secret.key",
    "session_token": "fs.s3a.session.token",
    "token": "fs.s3a.session.token",
    "default_region": "fs.s3a.endpoint.region",
    "region": "fs.s3a.endpoint.region",
    "endpoint": "fs.s3a.endpoint",
    "endpoint_url": "fs.s3a.endpoint",
    "endpoint_url_s3": "fs.s3a.endpoint",
}
PACKAGES = (spark_jobs, stream_consumers)
# A fixed date gives an archive of the same files the same bytes.
_ARCHIVE_DATE = (1980, 1, 1, 0, 0, 0)
_sent: weakref.WeakSet[SparkSession] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """Options of a session.

    Args:
        master: a Spark master; ``local[*]`` by default.
        remote: a Spark Connect address, ``sc://host:port``; ``master`` is then ignored.
        config: further Spark settings, which override the defaults.
        in_process: whether to start a local Spark in this process, which ends with it. Otherwise a local Spark is a
            server that outlives the process (:mod:`spark_jobs.spark_server`). The variable
            ``STREAM_ASSETS_SPARK=in-process`` sets this for all sessions.
        table: the table to write, if it is in an object store, so that the session gets the jars and settings for it.
        storage_options: the options of delta-rs for that table; see :func:`object_store_config`.
    """

    master: str = "local[*]"
    remote: str | None = field(default=None, repr=False)
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    in_process: bool = False
    table: str = ""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


def delta_spark_config(table: str = "", storage_options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings that a session needs for Delta; download the jars first.

    They are for sessions created elsewhere, such as ``PySparkResource(spark_config=delta_spark_config())``. The ports
    of such a session require a secret. Spark generates it for a local master, YARN and Kubernetes; for a standalone
    cluster, set ``spark.authenticate.secret`` in ``spark-defaults.conf``.

    Args:
        table: the table to write, if it is in an object store, such as ``s3a://lake/orders``.
        storage_options: the options of delta-rs for that table; see :func:`object_store_config`.

    Raises:
        MissingDependencyError: Java is missing, or the jars cannot be downloaded.
    """
    return {**GUARD, **_table_config(table, storage_options)}


def _table_config(table: str, storage_options: Mapping[str, str] | None) -> dict[str, str]:
    stored = object_store_config(table, storage_options)
    jars = ",".join(filter(None, [*map(str, delta_jars()), stored.pop("spark.jars", "")]))
    # By Hadoop's own default umask all users could read the files of tables.
    modes = {UMASK: f"{umask():03o}"}
    return {**DELTA_CONFIG, **modes, LOCAL_LOG_STORE: LOG_STORE_CLASS, **stored, "spark.jars": jars}


def create_session(options: SparkOptions = SparkOptions()) -> SparkSession:
    """Return a session that can write Delta tables: the running one, or a new one.

    Raises:
        MissingDependencyError: Java is missing, or the jars cannot be downloaded.
        SparkSessionError: the session cannot be created, or cannot write Delta tables.
        InvalidOptionError: an address in a setting contains a password, or ``STREAM_ASSETS_SPARK`` is invalid.
    """
    for name, value in {**options.config, "spark.master": options.master}.items():
        check_no_credentials(
            f"the Spark setting {name!r}",
            value,
            remedy="Put the user and the password into settings of their own, or into a file (spark.jars.ivySettings "
            "for a repository), because Spark prints the addresses of repositories; write another '@' as %40. Put an "
            "address that a library accepts only with a password into spark-defaults.conf, with mode 0600.",
        )
    remote = options.remote or os.environ.get(REMOTE_VARIABLE)
    hide_secrets(options)
    try:
        return check_session(_session(options))
    except (PySparkException, RuntimeError, OSError) as error:
        where = without_secrets(remote) if remote else options.master
        remedy = "Check the address, and that Java 17 runs."
        if isinstance(error, OSError) and not remote:
            remedy = (
                f"Free space or grant write access in {cache_folder()}, which holds jars and Spark servers, and in "
                f"{tempfile.gettempdir()}, which holds Spark's own files; or set {CACHE_VARIABLE} or TMPDIR."
            )
        raise SparkSessionError(f"no Spark session at {where}: {first_line(error)}", remedy=remedy) from None


def hide_secrets(options: SparkOptions) -> None:
    """Let errors hide the secrets of these options and of ``spark-defaults.conf`` from now on."""
    hide(options.storage_options, options.config, options.remote or os.environ.get(REMOTE_VARIABLE))
    hide({}, spark_defaults(), None)


def _session(options: SparkOptions) -> SparkSession:
    builder = SparkSession.builder.appName("stream-assets")
    if options.remote:
        _reach(options.remote)
        for name, value in options.config.items():
            builder = builder.config(name, value)
        return builder.remote(options.remote).getOrCreate()
    running = running_session()
    if running is not None:
        # Our settings could change the user's results, and a running session accepts no further jars or log store.
        return running
    is_local = options.master.startswith("local")
    # The user's settings may already include the jars for Amazon S3.
    of_table = _table_config("" if brings_s3(options.config) else options.table, options.storage_options)
    defaults = {**LOG_LEVEL, **(LOCAL_DEFAULTS if is_local else {})}
    settings = {**defaults, **of_table, **options.config, **(GUARD if is_local else {})}
    is_served = is_local and REMOTE_VARIABLE not in os.environ
    if is_served and not options.in_process and not _is_always_in_process():
        # The import takes a second, and only sessions on a Spark server need it.
        from spark_jobs.spark_server.client import connect  # noqa: PLC0415

        try:
            return connect({"spark.app.name": "stream-assets", **settings, "spark.master": options.master})
        except UnusableFolderError as error:
            _log.warning(
                "Spark runs in the process of this run, guarded like a Spark server, and each run starts its own: %s",
                error,
            )
    java()
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if REMOTE_VARIABLE not in os.environ:
        start_context(settings, options.master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.master(options.master).getOrCreate()


def _is_always_in_process() -> bool:
    said = os.environ.get(SPARK_VARIABLE, "")
    if said not in ("", IN_PROCESS):
        raise InvalidOptionError(f"{SPARK_VARIABLE} is {said!r}", remedy=f"Unset it, or set it to {IN_PROCESS!r}.")
    return bool(said)


def running_session() -> SparkSession | None:
    """Return the session of this process; stop it and return ``None`` if its Spark server has ended."""
    try:
        session = SparkSession.active()
    except PySparkException:
        return None
    if getattr(session, "is_served", True):
        return session
    session.stop()
    return None


def check_served(session: SparkSession) -> None:
    """Check that the local Spark server of a session is alive; sessions without such a server are not checked.

    Raises:
        SparkEndedError: the server has ended.
    """
    check = getattr(session, "check_served", None)
    if check is not None:
        check()


def check_session(session: SparkSession) -> SparkSession:
    """Check that the session can write Delta tables, and set the settings that it needs for that.

    Raises:
        SparkSessionError: it lacks settings that must be set before it starts; it names them.
    """
    missing = [
        f"{name}={value}"
        for name, value in (
            ("spark.sql.extensions", DELTA_EXTENSION),
            ("spark.sql.catalog.spark_catalog", DELTA_CATALOG),
        )
        if value not in str(session.conf.get(name, ""))
    ]
    if missing:
        raise SparkSessionError(
            f"the Spark session cannot write Delta tables: {', '.join(missing)} is not set",
            remedy="Create it with spark_jobs.session.create_session, or add spark_jobs.session.delta_spark_config() "
            "to its settings before it starts (a running session ignores them).",
        )
    is_local = str(session.conf.get("spark.master", "")).startswith("local")
    if is_local and str(session.conf.get("spark.authenticate", "false")).lower() != "true":
        _log.warning(
            "Any user of this machine can read the rows and settings of this Spark session, because spark.authenticate "
            "is not true. Start it with the settings of stream_assets.delta_spark_config()."
        )
    for name in _QUERY_LOGGERS:
        PySparkLogger.getLogger(name).disabled = True
    _use_own_python(session)
    send_packages(session)
    for name, value in REQUIRED_CONFIG.items():
        session.conf.set(name, value)
    return session


def heap_bytes(session: SparkSession) -> int:
    """Return the size of the heap of each JVM that holds rows: of the driver if Spark is local, else of executors.

    Example:
        >>> from types import SimpleNamespace
        >>> settings = {"spark.master": "local[2]", "spark.driver.memory": "1536m"}
        >>> heap_bytes(SimpleNamespace(conf=settings))
        1610612736
    """
    is_local = str(session.conf.get("spark.master", "")).startswith("local")
    size = str(session.conf.get(f"spark.{'driver' if is_local else 'executor'}.memory", ""))
    found = _SIZE.fullmatch(size.strip().lower())
    # Without a setting, a heap has a gigabyte; without a unit, a number means megabytes.
    return int(found[1]) << 10 * (1 + "kmgtp".index(found[2] or "m")) if found else 1 << 30


def _reach(remote: str) -> None:
    """Fail at once if no server listens at the address; the client itself would retry for ten minutes."""
    address = urlsplit(without_secrets(remote))
    if address.scheme != "sc" or not address.hostname:
        raise OSError("the address is not of the form sc://host:port")
    with socket.create_connection((address.hostname, address.port or CONNECT_PORT), CONNECT_SECONDS):
        pass


def _use_own_python(session: SparkSession) -> None:
    """Let local workers run the interpreter of this process, not the first ``python3`` on the path."""
    if is_remote_only() or not isinstance(session, SparkSession) or "PYSPARK_PYTHON" in os.environ:
        return
    context = session.sparkContext
    if str(context.master).startswith("local"):
        context.pythonExec = sys.executable


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for messages, without secrets."""
    lines = redacted(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def object_store_config(table: str, storage_options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings that Spark needs to write a table, beyond those for Delta; none for a local one.

    For Amazon S3 and compatible storages, they are the jars of S3A, our log store, which creates a commit only if it is
    absent, and the storage options. They must be set before Spark starts.

    Args:
        table: a path or URI; only its scheme counts.
        storage_options: the options of delta-rs, such as ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
            ``AWS_SESSION_TOKEN``, ``AWS_REGION`` and ``AWS_ENDPOINT_URL``; missing ones come from the environment.

    Raises:
        MissingDependencyError: the jars cannot be downloaded, or this Spark is too old for tables on Amazon S3.
        InvalidOptionError: a flag in the options is not a boolean.

    Example:
        >>> object_store_config("/lake/orders")
        {}
    """
    if not is_s3(table):
        return {}
    of_environment = {name: value for name, value in environment().items() if name.startswith(_AWS_PREFIX.upper())}
    given = {**_normalized(of_environment), **_normalized(storage_options or {})}
    # An option overrides the environment even under another name, as it does for delta-rs.
    config = {**_of_s3a(of_environment), **_of_s3a(storage_options or {})}
    if "fs.s3a.endpoint" in config:
        is_virtual = _flag(given, "virtual_hosted_style_request")
        config["fs.s3a.path.style.access"] = str(not is_virtual).lower()
    if _flag(given, "skip_signature"):
        config["fs.s3a.aws.credentials.provider"] = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
    return {
        "spark.jars": ",".join(str(jar) for jar in s3_jars()),
        **{f"spark.delta.logStore.{each}.impl": S3_LOG_STORE_CLASS for each in sorted(S3)},
        # Other programs name such tables s3://.
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        **{f"spark.hadoop.{name}": value for name, value in config.items()},
    }


def brings_s3(config: Mapping[str, str]) -> bool:
    """Return whether the settings of the user choose the jars or the log store for Amazon S3.

    Example:
        >>> brings_s3({"spark.jars.packages": "org.apache.hadoop:hadoop-aws:3.4.1"}), brings_s3({"spark.ui.port": "0"})
        (True, False)
    """
    stores = {f"spark.delta.logStore.{kind}.impl" for kind in S3}
    return not stores.isdisjoint(config) or any("hadoop-aws" in value for value in config.values())


def _normalized(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options in lower case and without the prefix, both of which delta-rs ignores."""
    return {name.lower().removeprefix(_AWS_PREFIX): value for name, value in options.items()}


def _of_s3a(options: Mapping[str, str]) -> dict[str, str]:
    # If two names of one setting are used, the longer one counts, as it does for delta-rs.
    return {_S3A[name]: value for name, value in sorted(_normalized(options).items()) if name in _S3A}


def _flag(options: Mapping[str, str], name: str) -> bool:
    said = options.get(name, "false").lower()
    if said not in ("true", "false", "1", "0"):
        raise InvalidOptionError(
            f"the storage option {_AWS_PREFIX.upper()}{name.upper()} is {said!r}", remedy="Use 'true' or 'false'."
        )
    return said in ("true", "1")


def send_packages(session: SparkSession) -> None:
    """Send the packages to the executors of a session once, unless they run on this machine.

    Args:
        session: a local session, which needs nothing; a session on a master; or a Spark Connect session.

    Raises:
        PySparkException: the server accepts no files.
    """
    if session in _sent:
        return
    if not _is_classic(session):
        # Our own server runs on this machine, with the Python of its client.
        if not hasattr(session, "is_served"):
            session.addArtifacts(str(archive()), pyfile=True)
    elif not str(session.sparkContext.master).startswith("local"):
        session.sparkContext.addPyFile(str(archive()))
    _sent.add(session)


def _is_classic(session: SparkSession) -> bool:
    return not is_remote_only() and isinstance(session, SparkSession)


def archive() -> Path:
    """Return an archive of the packages that Python can import from.

    Each call writes it, so that a file of another user is never used. In a folder that only root can write, the file
    of root is used.

    Example:
        >>> archive().suffix
        '.zip'
    """
    files = {
        f"{Path(*package.__name__.split('.')) / file.relative_to(folder)}": file.read_bytes()
        for package in PACKAGES
        for folder in map(Path, package.__path__)
        for file in sorted(folder.rglob("*.py"))
    }
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0".encode() + content + b"\0")
    own_folder(cache_folder())
    found = own_folder(cache_folder() / "packages") / f"stream-assets-{digest.hexdigest()[:12]}.zip"
    if found.exists() and not os.access(found.parent, os.W_OK) and not found.stat().st_mode & 0o022:
        # Root owns the folder and has created the file.
        return found
    with tempfile.TemporaryDirectory(dir=found.parent) as scratch:
        made = Path(scratch) / found.name
        with zipfile.ZipFile(made, "w") as packed:
            for name, content in files.items():
                packed.writestr(zipfile.ZipInfo(name, _ARCHIVE_DATE), content, zipfile.ZIP_DEFLATED)
        made.chmod(0o644)
        # Other processes find the complete file or none.
        made.replace(found)
    return found
