"""The Delta jars, resolved once into a folder, so that a session starts without asking Ivy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pyspark

from stream_consumers.errors import MissingDependencyError

DELTA_COORDINATE = ("io.delta", "delta-spark_4.2_2.13", "4.4.0")
CACHE_VARIABLE = "STREAM_ASSETS_CACHE"


def cache_folder() -> Path:
    """Where resolved jars are kept: ``$STREAM_ASSETS_CACHE``, else ``~/.cache/stream-assets``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stream-assets")


def java() -> str:
    """The ``java`` command.

    Raises:
        MissingDependencyError: none is installed.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if not found:
        raise MissingDependencyError(
            "Spark needs Java, and there is no java command",
            remedy="Install Java 17 (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME.",
        )
    return found


def delta_jars() -> list[Path]:
    """The jars that Delta needs beyond those of pyspark; downloaded at the first call.

    Raises:
        MissingDependencyError: no Java, or the download failed.
    """
    folder = cache_folder() / "jars" / "-".join(DELTA_COORDINATE[1:])
    if not (folder / "complete").exists():
        _resolve(folder)
    return sorted(folder.glob("*.jar"))


def _resolve(folder: Path) -> None:
    spark_jars = Path(pyspark.__file__).parent / "jars"
    shipped = {_artifact(jar) for jar in spark_jars.glob("*.jar")}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetch_jars(DELTA_COORDINATE, Path(scratch) / "all")
        needed = Path(scratch) / "needed"
        needed.mkdir()
        for jar in (Path(scratch) / "all").glob("*.jar"):
            if _artifact(jar) not in shipped:
                shutil.move(jar, needed / jar.name)
        (needed / "complete").touch()
        if folder.exists():
            return
        try:
            needed.rename(folder)
        except OSError:
            # Somebody else was faster; what they put there is the same.
            if not (folder / "complete").exists():
                raise


def fetch_jars(coordinate: tuple[str, str, str], target: Path) -> None:
    """Download an artifact and all it depends on into ``target``, with the Ivy that pyspark ships.

    It has an Ivy cache of its own: a Maven cache with a pom but no jar would make Ivy give up.

    Raises:
        MissingDependencyError: with the end of Ivy's report.
    """
    ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
    pattern = target / "[artifact]-[revision].[ext]"
    command = [java(), "-jar", str(ivy), "-cache", str(cache_folder() / "ivy"), "-dependency", *coordinate]
    command += ["-confs", "default", "-retrieve", str(pattern)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
    if done.returncode or not any(target.glob("*.jar")):
        report = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise MissingDependencyError(
            f"{':'.join(coordinate)} could not be downloaded:\n{report}\n",
            remedy="Check the connection to your Maven repository and try again.",
        )


def _artifact(jar: Path) -> str:
    return re.sub(r"-\d[\w.\-]*\.jar$", "", jar.name)
