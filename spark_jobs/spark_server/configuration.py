"""Computes the digest by which runs share a server: of Spark, Python, and everything that these read."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyspark

from spark_jobs.python_start import imports_from_here
from spark_jobs.spark_start import configuration_folder, umask

# The setting of a session with the number of tasks that its server runs at the same time.
CORES = "spark.stream_assets.cores"
# Variables that describe the shell, terminal or tool that started a process, or that change with each start.
# All others count, because a user's function may read any of them in a worker, as it can with Spark in the process.
IGNORED_VARIABLES = frozenset({
    "_", "COLORTERM", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DBUS_STARTER_ADDRESS", "DBUS_STARTER_BUS_TYPE", "DISPLAY",
    "GPG_AGENT_INFO", "GPG_TTY", "HISTCMD", "HISTCONTROL", "HISTFILE", "HISTFILESIZE", "HISTIGNORE", "HISTSIZE",
    "HISTTIMEFORMAT", "INVOCATION_ID", "JOURNAL_STREAM", "LESSCLOSE", "LESSOPEN", "LINES",
    "LS_COLORS", "MAIL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "NOTIFY_SOCKET", "OLDPWD", "PROMPT_COMMAND", "PS1", "PWD",
    "PYTEST_CURRENT_TEST", "SHLVL", "SPARK_API_MODE", "SPARK_CONNECT_AUTHENTICATE_TOKEN", "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_LOCAL_REMOTE", "SPARK_REMOTE", "SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION",
    "SSH_ORIGINAL_COMMAND", "SSH_TTY", "STY", "SYSTEMD_EXEC_PID", "TERM", "TERMCAP", "TERMINAL_EMULATOR", "TERMINFO",
    "TERMINFO_DIRS", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "TMUX", "TMUX_PANE",
    "WATCHDOG_PID", "WATCHDOG_USEC", "WINDOW", "WINDOWID", "WT_PROFILE_ID", "WT_SESSION",
})  # fmt: skip
IGNORED_PREFIXES = (
    "AIRFLOW_CTX_", "ALACRITTY_", "DAGSTER_", "GNOME_TERMINAL_", "ITERM_", "KITTY_", "KONSOLE_", "SUDO_", "TILIX_",
    "VSCODE_", "WEZTERM_", "XDG_SESSION_", "ZELLIJ", "_AIRFLOW_",
)  # fmt: skip
# The variables that name the folders with settings of Hadoop.
HADOOP_FOLDERS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")


def configuration_key(settings: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> str:
    """Return a digest of a configuration; see :func:`spark_jobs.spark_server.folder.server_folder`.

    Args:
        settings: the settings of Spark.
        environment: the environment variables of the process.

    Example:
        >>> one = configuration_key({"spark.master": "local[2]"}, {"TZ": "UTC", "SHLVL": "1"})
        >>> one == configuration_key({"spark.master": "local[2]"}, {"TZ": "UTC", "SHLVL": "2"})
        True
        >>> one == configuration_key({"spark.master": "local[2]"}, {"TZ": "Asia/Tokyo", "SHLVL": "1"})
        False
    """
    here = Path.cwd()
    parts = {
        "settings": dict(settings),
        "environment": server_environment(environment),
        "python": [sys.executable, sys.version, *_file_states([sys.executable])],
        "pyspark": [pyspark.__version__, pyspark.__file__],
        "jars": _file_states(_jars(settings)),
        "files": _file_states(_configuration_files(environment)),
        "server": [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))],
        "cwd": [str(here), *_file_states([str(here)], of_folder=True), imports_from_here()],
        "rights": [os.geteuid(), os.getegid(), sorted(os.getgroups()), umask()],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a server: all that Spark, or a user's function in a worker, may read."""
    return {
        name: value
        for name, value in environment.items()
        if name not in IGNORED_VARIABLES and not name.startswith(IGNORED_PREFIXES)
    }


def _jars(settings: Mapping[str, str]) -> list[str]:
    """Return the jars that are files of this machine."""
    named = settings.get("spark.jars", "").split(",") + settings.get("spark.driver.extraClassPath", "").split(":")
    named = [jar.removeprefix("file://") for jar in named]
    return [jar for jar in named if "://" not in jar]


def _configuration_files(environment: Mapping[str, str]) -> list[str]:
    """Return the configuration files that Spark reads."""
    others = [Path(environment[name]) for name in HADOOP_FOLDERS if environment.get(name)]
    return sorted(str(file) for folder in (configuration_folder(environment), *others) for file in folder.glob("*"))


def _file_states(files: Iterable[str], *, of_folder: bool = False) -> list[str]:
    """Return fingerprints that change when a file changes, or when a folder is created again at the same path."""
    states = []
    for file in filter(None, files):
        try:
            found = Path(file).stat()
        except OSError:
            states.append(f"{file} is not there")
            continue
        states.append(f"{file} {found.st_ino}" if of_folder else f"{file} {found.st_size} {found.st_mtime_ns}")
    return states
