"""Starts the JVM of Spark without settings on its command line, and with private folders for its files.

The files that Spark spills, shuffles and caches on disk hold values of messages. Spark creates its folders with the
permissions of the umask, in a folder that all users share. So each process that starts a Spark puts them into a folder
of mode 0700, and holds a lock on it while it lives. Folders without a lock belong to killed processes, and are removed.
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

from spark_jobs.jars import cache_folder, check_parents, make_folders, own_folder
from spark_jobs.python_start import worker_variables
from stream_consumers.errors import StreamAssetsError

if TYPE_CHECKING:
    # A PySpark that is only a client of Spark Connect lacks these modules.
    from py4j.java_gateway import JavaGateway  # type: ignore[import-untyped]
    from pyspark import SparkConf

GUARD: Mapping[str, str] = {
    # Any user of the machine can connect to the ports of the JVM, so a client must know a secret. For a local master
    # Spark generates it, and keeps it in memory.
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
}
"""Settings of each local Spark that this project starts; they override those of the user."""
ARGUMENTS_VARIABLE = "PYSPARK_SUBMIT_ARGS"
JAVA_OPTIONS_VARIABLE = "SPARK_SUBMIT_OPTS"
DEFAULT_JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
"""The setting whose options stand last on the command line of a JVM."""
EARLIER_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
OVERRIDING_VARIABLE = "_JAVA_OPTIONS"
"""The variable whose options override those on the command line, and these those of the earlier variables."""
TEMPORARY_FOLDER = "-Djava.io.tmpdir="
# Without these ratios, the heap of a JVM grows towards its largest allowed size, whatever Spark needs.
HEAP_OPTIONS = "-XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=30"
PREFIX = "stream-assets-spark-"
FOLDER_SETTINGS = ("spark.local.dir", "spark.hadoop.hadoop.tmp.dir")
"""The settings for the folders of Spark's own files, and of files that Hadoop is about to upload to an object store."""
LOCAL_DIRS_VARIABLE = "SPARK_LOCAL_DIRS"
"""The variable that overrides ``spark.local.dir``."""
CLUSTER_VARIABLES = ("SPARK_EXECUTOR_DIRS", "CONTAINER_ID", "LOCAL_DIRS")
"""The variables of a cluster's workers that let Spark use other folders, and Hadoop for what waits for an upload."""
# Properties of Java: a line, unless it is a comment, continues after an odd number of backslashes.
_LINES = re.compile(r"^(?![ \t\f]*[#!])[ \t\f]*((?:\\[\s\S]|[^\\\n])*)", re.MULTILINE)
_CONTINUED = re.compile(r"(\\[^\n])|\\\n[ \t\f]*")
_PROPERTY = re.compile(r"((?:\\.|[^\\ \t\f=:])+)[ \t\f]*[=:]?[ \t\f]*(.*)")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def configuration_folder(environment: Mapping[str, str]) -> Path:
    """The folder with Spark's own configuration files."""
    home = environment.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    return Path(environment.get("SPARK_CONF_DIR") or f"{home}/conf")


def spark_defaults() -> dict[str, str]:
    """The settings in ``spark-defaults.conf``, which are behind those of a session; none if it cannot be read."""
    try:
        return _properties((configuration_folder(os.environ) / "spark-defaults.conf").read_text(errors="replace"))
    except OSError:
        return {}


def _properties(text: str) -> dict[str, str]:
    """Parse a text in the format of ``java.util.Properties``, which is that of Spark's configuration."""
    settings = {}
    for lines in _LINES.finditer(text):
        if found := _PROPERTY.match(_CONTINUED.sub(r"\1", lines[1])):
            settings[_unescaped(found[1])] = _unescaped(found[2]).strip()
    return settings


def _unescaped(text: str) -> str:
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else _LETTERS.get(found[2], found[2]), text)
    # A character outside of the basic plane is written as two.
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def launch(settings: Mapping[str, str]) -> JavaGateway:
    """Start a JVM for Spark, with its settings and temporary files in a folder that only this user can enter.

    Any user of the machine can read the command line of a JVM. It contains only the arguments of Java itself: the size
    of the heap, and the options and the class path of the driver.

    Args:
        settings: the settings of Spark; they override ``spark-defaults.conf``.

    Raises:
        pyspark.errors.PySparkException: the JVM does not start; the reason is on the standard error.
    """
    # A PySpark that is only a client of Spark Connect lacks these modules, and does not need them.
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    properties = Path(private_folders(tempfile.gettempdir()), "settings.conf")
    properties.touch(0o600, exist_ok=False)
    known = {**spark_defaults(), **settings}
    given, of_driver = os.environ.get(JAVA_OPTIONS_VARIABLE, ""), known.get(JAVA_OPTIONS, "")
    arguments, overriding = os.environ.get(ARGUMENTS_VARIABLE), os.environ.get(OVERRIDING_VARIABLE)
    own = temporary_folder_option(known)
    settings = {**settings, JAVA_OPTIONS: f"{of_driver} {own}"}
    words = shlex.join(["--properties-file", str(properties), "--load-spark-defaults"])
    variables: dict[str, str | None] = {
        ARGUMENTS_VARIABLE: f"{words} {arguments or 'pyspark-shell'}",
        JAVA_OPTIONS_VARIABLE: java_options(given, of_driver),
        # Spark starts its Python workers with -m.
        **worker_variables(),
    }
    if arguments or overriding:
        # The user's arguments may replace the setting.
        variables[OVERRIDING_VARIABLE] = f"{overriding or ''} {own}"
    if folders := os.environ.get(LOCAL_DIRS_VARIABLE):
        variables[LOCAL_DIRS_VARIABLE] = private_folders(folders)
    if settings.get("spark.master", "local").startswith("local"):
        variables |= dict.fromkeys(CLUSTER_VARIABLES)
    try:
        properties.write_text("".join(f"{name}={escaped(value)}\n" for name, value in settings.items()))
        with _environment(variables):
            return _connecting_to_its_jvm(launch_gateway())  # type: ignore[no-untyped-call]
    finally:
        properties.unlink()


def java_options(given: str, of_driver: str = "") -> str:
    """Return our options of the JVM and those of the user.

    Args:
        given: the options of the user, which stand behind ours, because Java uses the last of two equal ones.
        of_driver: the options of the user that Spark adds behind them.

    Example:
        >>> java_options("-Xss2m").split()[:2]
        ['-XX:MinHeapFreeRatio=10', '-XX:MaxHeapFreeRatio=30']
        >>> "MinHeapFreeRatio" in java_options("-XX:MaxHeapFreeRatio=70")
        False
    """
    # Java may reject one of our two ratios combined with one of the user's.
    of_heap = () if "HeapFreeRatio" in f"{given} {of_driver}" else (HEAP_OPTIONS,)
    return " ".join((*of_heap, crash_option(), given))


def crash_option() -> str:
    """Return Java's option that puts crash reports, which contain the command line, into a folder of mode 0700."""
    try:
        folder = own_folder(cache_folder()) / "crashes"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
    except (OSError, StreamAssetsError):
        # Without a writable cache, the reports are removed together with Spark's other files.
        folder = Path(private_folders(tempfile.gettempdir()))
    within = str(folder.absolute()).replace("%", "%%")
    return shlex.quote(f"-XX:ErrorFile={within}/hs_err_pid%p.log")


def temporary_folder_option(settings: Mapping[str, str]) -> str:
    """Return Java's option for a private folder for temporary files.

    Libraries load native code from this folder, and in a shared one, another user could replace it. Spark writes data
    that clients send to files in it for a moment.

    Args:
        settings: the settings of Spark. If the user's options in them or in variables name a folder, the private one is
            within that.
    """
    of_variables = [os.environ.get(name, "") for name in (*EARLIER_VARIABLES, JAVA_OPTIONS_VARIABLE)]
    of_settings = [settings.get(name, "") for name in (DEFAULT_JAVA_OPTIONS, JAVA_OPTIONS)]
    words: list[str] = []
    # Spark reports a quotation that is not closed.
    with suppress(ValueError):
        words = shlex.split(" ".join([*of_variables, *of_settings, os.environ.get(OVERRIDING_VARIABLE, "")]))
    named = [word.removeprefix(TEMPORARY_FOLDER) for word in words if word.startswith(TEMPORARY_FOLDER)]
    root = (named[-1] if named else "") or tempfile.gettempdir()
    return shlex.quote(f"{TEMPORARY_FOLDER}{_private_folder(Path(root).absolute(), os.getpid())}")


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment in the block; those that are ``None`` are not set in it."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _connecting_to_its_jvm(gateway: JavaGateway) -> JavaGateway:
    """Let a gateway refuse to connect once its JVM has ended, because another user's process may listen on its port."""
    client, process = gateway._gateway_client, gateway.proc
    connection = client._get_connection

    def living_connection() -> object:
        # The process is None if spark-submit has started the JVM.
        if process is not None and process.poll() is not None:
            raise Py4JNetworkError("the JVM of Spark has ended")
        return connection()

    client._get_connection = living_connection
    return gateway


def escaped(value: str) -> str:
    """Escape a value for a Java properties file.

    Example:
        >>> escaped("a b") == "a" + chr(92) + "u0020b"
        True
    """
    units = value.encode("utf-16-be")
    numbers = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(chr(one) if 0x20 < one < 0x7F and one != ord("\\") else rf"\u{one:04x}" for one in numbers)


def start_context(settings: Mapping[str, str], master: str) -> None:
    """Start the Spark context of this process, unless it has one; the session builder then uses this context.

    Args:
        settings: the settings of Spark.
        master: the Spark master.

    Raises:
        pyspark.errors.PySparkException: Spark does not start; the reason is on the standard error.
    """
    # A PySpark that is only a client of Spark Connect lacks these modules, and does not need them.
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415

    # At DEBUG, py4j logs each Java call with its arguments, such as the settings of Spark.
    calls = logging.getLogger("py4j")
    if calls.getEffectiveLevel() < logging.INFO:
        calls.setLevel(logging.INFO)
    if SparkContext._active_spark_context is not None:
        return
    conf = SparkConf().setMaster(master).setAppName("stream-assets")
    for name, value in settings.items():
        conf.set(name, value)
    # Reuse the JVM of a session that was stopped: PySpark would lose track of it, and leave it running.
    gateway = SparkContext._gateway
    if gateway is None:
        gateway = launch(dict(conf.getAll()))
    set_private_folders(conf, gateway)
    SparkContext(conf=conf, gateway=gateway)


def umask() -> int:
    """Return the umask of this process, which can only be read by setting it, for a moment to a strict one."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def set_private_folders(conf: SparkConf, gateway: JavaGateway) -> None:
    """Let Spark keep its files in private folders within the folders of its settings, else within ``TMPDIR``.

    Args:
        conf: the settings of the context that is about to be created.
        gateway: the JVM of the context, which has read ``spark-defaults.conf``.
    """
    of_file = gateway.jvm.SparkConf(True)
    # The executors of a cluster get the settings of Hadoop, but not this folder.
    is_local = (conf.get("spark.master", None) or "local").startswith("local")
    for setting in FOLDER_SETTINGS if is_local else FOLDER_SETTINGS[:1]:
        given = conf.get(setting, None) or of_file.get(setting, "")
        if "${" in given or ":/" in given:
            # Hadoop would resolve such a value to another folder.
            given = ""
        conf.set(setting, private_folders(given or tempfile.gettempdir()))


def private_folders(roots: str) -> str:
    """Create a private folder of this process in each of some folders; it is removed when the process ends.

    Args:
        roots: the folders, separated by commas as in Spark's settings; missing ones are created.

    Raises:
        OSError: a folder cannot be created or written.
        UntrustedFileError: other users can put another folder in the place of one.
    """
    return ",".join(str(_private_folder(Path(root.strip()).absolute(), os.getpid())) for root in roots.split(","))


@cache
def _private_folder(root: Path, process: int) -> Path:
    make_folders(root)
    check_parents(root / PREFIX)
    _remove_abandoned(root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        descriptor = os.open(folder, os.O_RDONLY)
        # On a file system without locks, abandoned folders cannot be detected.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            break
        # Another process removed it as abandoned before it was locked.
        os.close(descriptor)
    atexit.register(_remove, folder, process)
    return folder


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        # Folders of other users and folders in use cannot be locked, and stay.
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
