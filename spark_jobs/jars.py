"""Downloads and compiles the jars that Spark needs for Delta, once, so that a session starts without Ivy."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pyspark

from spark_jobs.redaction import jvm_output
from stream_consumers.errors import InvalidOptionError, MissingDependencyError, UntrustedFileError

# Delta has an artifact for each Spark line, and its jars and its Python package have the same version.
SPARK_LINE = ".".join(pyspark.__version__.split(".")[:2])
DELTA_COORDINATE = ("io.delta", f"delta-spark_{SPARK_LINE}_2.13", version("delta-spark"))
CACHE_VARIABLE = "STREAM_ASSETS_CACHE"
REPOSITORY_VARIABLE = "STREAM_ASSETS_MAVEN_REPOSITORY"
"""The URL of a Maven repository that jars are downloaded from, in place of Maven Central."""
UNPINNED_VARIABLE = "STREAM_ASSETS_UNPINNED_JARS"
"""If set to 1, jars without a pinned digest are accepted, such as those of a newer version of Delta."""
# The digests of the downloaded jars, in the format of sha256sum; tools/pin_jars.py writes them.
DIGESTS = Path(__file__).with_name("jars.sha256")
LOG_STORE_CLASS = "spark_jobs.HardLinkLogStore"
S3_LOG_STORE_CLASS = "spark_jobs.ConditionalWriteLogStore"
_SOURCES = [
    Path(__file__).with_name(f"{name.rpartition('.')[2]}.java") for name in (LOG_STORE_CLASS, S3_LOG_STORE_CLASS)
]
# The versions that the S3A of each Hadoop was built with; 3.4.1, of Spark 4.0, has no conditional put of an object.
AWS = {"3.4.2": ("2.29.52", "1.2.1"), "3.5.0": ("2.35.4", "1.3.1")}
_SDK_MODULES = ("s3", "s3-transfer-manager", "sts", "url-connection-client")
# The command of Janino, the compiler that Spark ships; a Java without its development kit has none.
COMPILER = "org.codehaus.commons.compiler.samples.CompilerDemo"
RETRY_PAUSES_SECONDS = (2.0, 10.0, 30.0)
REPORT_LINES = 40
# The user to whom a user namespace shows files of users outside of it, such as root.
_UNMAPPED_UID = 65534
# The file that marks a folder with all of its jars.
COMPLETE = "complete"


def cache_folder() -> Path:
    """Return the folder for resolved jars: ``$STREAM_ASSETS_CACHE``, else ``~/.cache/stream-assets``.

    Raises:
        InvalidOptionError: the variable is not set, and the user has no home directory.
    """
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache" / "stream-assets"
    except RuntimeError as error:
        raise InvalidOptionError(
            f"the user {os.getuid()} has no home directory for the cache of jars",
            remedy=f"Set {CACHE_VARIABLE} to a writable folder, or set HOME.",
        ) from error


def own_folder(path: Path) -> Path:
    """Create a folder of the cache if it is missing, and check that no other user can change it or its jars.

    Raises:
        UntrustedFileError: another user can change them.
    """
    make_folders(path)
    check_parents(path)
    for each in (path, *path.glob("*.jar")):
        found = each.stat()
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedFileError(
                f"other users than {os.getuid()} and root can change {each}, from which Spark runs code: it belongs to "
                f"{found.st_uid} and has the mode {stat.S_IMODE(found.st_mode):04o}",
                remedy=f"Delete {cache_folder()} if you do not trust its content; else chown it and chmod -R go-w. Or "
                f"set {CACHE_VARIABLE} to another folder.",
            )
    return path


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, which only this user can change whatever the umask."""
    for each in (*reversed(path.parents), path):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)


def check_parents(path: Path) -> None:
    """Check that not every user can put another folder in the place of this one.

    In a folder with the sticky bit, only its owner can, which must be this user or root. Owners and groups of other
    folders are those that an operator chose, so they are not checked.

    Raises:
        UntrustedFileError: every user can, by a folder above.
    """
    for each in dict.fromkeys((*path.absolute().parents, *path.resolve().parents)):
        found = each.stat()
        is_protected = found.st_mode & stat.S_ISVTX and found.st_uid in (os.getuid(), 0, _UNMAPPED_UID)
        if found.st_mode & stat.S_IWOTH and not is_protected:
            raise UntrustedFileError(
                f"other users can replace folders in {each}, which belongs to {found.st_uid} and has the mode "
                f"{stat.S_IMODE(found.st_mode):04o}, and Spark trusts what is in {path}",
                remedy="Run chmod o-w on it, or chmod +t if it is yours; or use another folder, with "
                f"{CACHE_VARIABLE}, STREAM_ASSETS_SPARK_SERVERS, TMPDIR or spark.local.dir.",
            )


def pinned(jars: Sequence[Path]) -> list[Path]:
    """Return downloaded jars after a check that they are those that this version was released with.

    Args:
        jars: the files; each call reads them completely.

    Raises:
        UntrustedFileError: a jar has another digest than the pinned one, or no digest is pinned.
    """
    known = {name: digest for digest, name in map(str.split, DIGESTS.read_text().splitlines())}
    for jar in jars:
        digest, expected = hashlib.sha256(jar.read_bytes()).hexdigest(), known.get(jar.name)
        if expected is None and os.environ.get(UNPINNED_VARIABLE) != "1":
            raise UntrustedFileError(
                f"this version pins no digest of {jar}, whose SHA-256 is {digest}",
                remedy="Install a version of delta-spark and pyspark that this version of stream-assets supports; or "
                f"set {UNPINNED_VARIABLE}=1 to accept jars without a pinned digest.",
            )
        if expected not in (None, digest):
            raise UntrustedFileError(
                f"{jar} is not the released jar: its SHA-256 is {digest}, but must be {expected}",
                remedy=f"Find out who changed it. Delete {cache_folder()}, and try again with a repository that you "
                f"trust ({REPOSITORY_VARIABLE}).",
            )
    return list(jars)


def java() -> str:
    """Return the path of the ``java`` command.

    Raises:
        MissingDependencyError: Java is not installed.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if not found:
        raise MissingDependencyError(
            "Spark needs Java, but there is no java command",
            remedy="Install Java 17 (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME.",
        )
    return found


def download_note(*, with_s3: bool = False) -> str | None:
    """Return a note to show while jars are downloaded; ``None`` if all of them are in the cache.

    Args:
        with_s3: whether :func:`s3_jars` are needed, too.
    """
    names = {"Delta": _name(DELTA_COORDINATE)}
    if with_s3 and (of_s3 := _s3_versions()):
        names["S3A"] = _s3_name(*of_s3)
    lacking = [what for what, name in names.items() if not (_folder(name) / COMPLETE).exists()]
    if not lacking:
        return None
    return (
        f"the jars of {' and '.join(lacking)} are downloaded into {cache_folder()} first, once; this may take minutes"
    )


def delta_jars() -> list[Path]:
    """Return the jars that Delta needs beyond those of pyspark, and our log stores; the first call creates them.

    Raises:
        MissingDependencyError: Java is missing, or the download or the compiler failed.
        UntrustedFileError: a jar is not the released one, or other users can change it.
    """
    delta = resolved(DELTA_COORDINATE)
    jars = pinned(_beside(delta, _shipped()))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:12]
    log_stores = _once(f"{delta.name}-log-stores-{digest}", lambda target: _compile(jars, target))
    return sorted((*jars, *log_stores.glob("*.jar")))


def s3_jars() -> list[Path]:
    """Return the jars that Spark needs for tables on Amazon S3; the first call downloads them.

    They are S3A and the modules of the SDK that it uses, not the whole SDK, which has hundreds of megabytes.

    Raises:
        MissingDependencyError: Java is missing, the download failed, or the Hadoop of this Spark is too old.
        UntrustedFileError: a jar is not the released one, or other users can change it.
    """
    versions = _s3_versions()
    if versions is None:
        raise MissingDependencyError(
            f"Spark {pyspark.__version__} comes with Hadoop {_hadoop()}, but tables on Amazon S3 need "
            f"{' or '.join(AWS)}, which can create a commit only if it is absent",
            remedy="Install pyspark 4.1 or 4.2; or start Spark yourself, with hadoop-aws and such a log store.",
        )

    def make(target: Path) -> None:
        download([("org.apache.hadoop", "hadoop-aws", versions[0])], target, is_alone=True)
        download(s3_modules(versions[0]), target)

    jars = _beside(_once(_s3_name(*versions), make), (*_shipped(), *delta_jars()))
    # S3A does not use netty, and Spark has another version of it.
    return pinned([jar for jar in jars if not jar.name.startswith("netty-")])


def s3_modules(hadoop: str) -> list[tuple[str, str, str]]:
    """Return the Maven coordinates of the SDK modules that the S3A of a Hadoop version uses."""
    sdk, accelerator = AWS[hadoop]
    return [
        *(("software.amazon.awssdk", name, sdk) for name in _SDK_MODULES),
        ("software.amazon.s3.analyticsaccelerator", "analyticsaccelerator-s3", accelerator),
    ]


def _hadoop() -> str:
    return next(jar.stem.rpartition("-")[2] for jar in _shipped() if jar.name.startswith("hadoop-client-api-"))


def _s3_versions() -> tuple[str, str, str] | None:
    """Return the versions of Hadoop, the SDK and the accelerator; ``None`` if this Hadoop is too old."""
    hadoop = _hadoop()
    return (hadoop, *AWS[hadoop]) if hadoop in AWS else None


def _s3_name(hadoop: str, sdk: str, accelerator: str) -> str:
    return f"hadoop-aws-{hadoop}-{sdk}"


def _shipped() -> list[Path]:
    return sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))


def _beside(folder: Path, others: Sequence[Path]) -> list[Path]:
    """Return the jars of a folder whose artifacts are not among ``others`` in any version."""
    known = {_artifact(jar) for jar in others}
    return [jar for jar in sorted(folder.glob("*.jar")) if _artifact(jar) not in known]


def resolved(coordinate: tuple[str, str, str], *, is_alone: bool = False) -> Path:
    """Return a folder with an artifact and its dependencies; the first call downloads it.

    One process downloads at a time; others that need the artifact wait for it.

    Args:
        coordinate: group, artifact and version in Maven.
        is_alone: whether to omit its dependencies.

    Raises:
        MissingDependencyError: Java is missing, or the download failed.
    """
    return _once(_name(coordinate, is_alone=is_alone), lambda target: download([coordinate], target, is_alone=is_alone))


def _name(coordinate: tuple[str, str, str], *, is_alone: bool = False) -> str:
    return "-".join((*coordinate[1:], *(["alone"] if is_alone else [])))


def _folder(name: str) -> Path:
    return cache_folder() / "jars" / name


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of this name in the cache; the first call fills it by ``make``, one process at a time."""
    folder = _folder(name)
    own_folder(cache_folder())
    own_folder(folder.parent)
    if (folder / COMPLETE).exists():
        return own_folder(folder)
    # A user who can open the file could hold the lock.
    with open(folder.parent / "lock", "w", opener=partial(os.open, mode=0o600)) as lock:
        os.fchmod(lock.fileno(), 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                jars = Path(scratch) / "jars"
                make(jars)
                (jars / COMPLETE).touch()
                for file in (jars, *jars.iterdir()):
                    file.chmod(file.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
                shutil.rmtree(folder, ignore_errors=True)
                jars.rename(folder)
    return own_folder(folder)


def download(coordinates: Sequence[tuple[str, str, str]], target: Path, *, is_alone: bool = False) -> None:
    """Download artifacts with the Ivy that pyspark ships, and retry, because a repository may fail temporarily.

    Ivy gets its own cache, because it fails on a Maven cache with a pom but no jar. It is deleted: Ivy writes the
    URL of the repository into files that all users may read, and the path of a URL may be a key.
    """
    cache = target / "ivy"
    cache.mkdir(parents=True, exist_ok=True)
    transitive = str(not is_alone).lower()
    wanted = "".join(
        f'<dependency org="{group}" name="{name}" rev="{revision}" conf="default" transitive="{transitive}"/>'
        for group, name, revision in coordinates
    )
    module = target / "ivy.xml"
    module.write_text(
        '<ivy-module version="2.0"><info organisation="stream-assets" module="jars"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{wanted}</dependencies></ivy-module>'
    )
    ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
    pattern = target / "[artifact]-[revision].[ext]"
    command = [java(), "-jar", str(ivy), "-cache", str(cache), "-ivy", str(module)]
    if repository := os.environ.get(REPOSITORY_VARIABLE):
        if "@" in repository:
            # Ivy writes the URL into its report.
            raise InvalidOptionError(
                f"the URL in {REPOSITORY_VARIABLE} contains a user, and perhaps a password",
                remedy="Use a repository without a login, or download the jars elsewhere and copy the cache.",
            )
        settings = target / "settings.xml"
        settings.write_text(
            '<ivysettings><settings defaultResolver="mirror"/><resolvers>'
            f'<ibiblio name="mirror" m2compatible="true" root={quoteattr(repository)}/></resolvers></ivysettings>'
        )
        command += ["-settings", str(settings)]
    command += ["-confs", "default", "-retrieve", str(pattern)]
    for pause in (*RETRY_PAUSES_SECONDS, None):
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
        if done.returncode == 0 and any(target.glob("*.jar")):
            for file in target.glob("*.xml"):
                file.unlink()
            shutil.rmtree(cache)
            return
        if pause is not None:
            time.sleep(pause)
    report = "\n".join(jvm_output(done.stdout + done.stderr).splitlines()[-REPORT_LINES:])
    names = ", ".join(":".join(coordinate) for coordinate in coordinates)
    raise MissingDependencyError(
        f"{names} could not be downloaded in {1 + len(RETRY_PAUSES_SECONDS)} attempts:\n{report}\n",
        remedy="Check the connection to your Maven repository, or set another one with "
        f"{REPOSITORY_VARIABLE}, and try again.",
    )


def _compile(delta: list[Path], target: Path) -> None:
    classpath = os.pathsep.join(str(jar) for jar in (*_shipped(), *delta))
    classes = target / "classes"
    classes.mkdir(parents=True)
    command = [java(), "-cp", classpath, COMPILER, "-d", str(classes), "-classpath", classpath, *map(str, _SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
    compiled = sorted(classes.rglob("*.class"))
    if done.returncode or not compiled:
        report = "\n".join(jvm_output(done.stdout + done.stderr).splitlines()[:REPORT_LINES])
        raise MissingDependencyError(
            f"{' and '.join(map(str, _SOURCES))} could not be compiled:\n{report}\n",
            remedy="Check that Java 17 runs, and try again.",
        )
    with zipfile.ZipFile(target / "log-stores.jar", "w") as jar:
        for file in compiled:
            jar.write(file, file.relative_to(classes))
    shutil.rmtree(classes)


def _artifact(jar: Path) -> str:
    return re.sub(r"-\d[\w.\-]*\.jar$", "", jar.name)
