"""Hides what this process was given in confidence from the texts of Spark, of delta-rs and of storages."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping

from stream_consumers.client_config import without_values
from stream_consumers.urls import is_server

STORES = ("AWS_", "AZURE_", "GOOGLE_")
"""As the environment variables begin that delta-rs takes for storage options."""
REMOTE_VARIABLE = "SPARK_REMOTE"
# As spark.redaction.regex has it, and what may have a password in it, but for the name of a class.
_SECRET_SETTINGS = re.compile(
    r"(?!.*provider$).*(secret|pass|token|(access|account|private).?key|credential|ConnectionURL)", re.IGNORECASE
)
_JAVA_OPTIONS = re.compile(r"JavaOptions$", re.IGNORECASE)
# Options of Java, and of agents in it.
_SECRET_OPTION = re.compile(r"([^=]*(?:pass|pwd|secret|token|key|credential)[^=]*)=(.+)", re.IGNORECASE | re.DOTALL)
_hidden: dict[str, str] = {}


def hide(options: Mapping[str, str], settings: Mapping[str, str], remote: str | None) -> None:
    """Let :func:`redacted` hide these values from now on, because Spark's errors do not say whose they are.

    Args:
        options: storage options.
        settings: of Spark; those that may be secrets are hidden, and such options of Java in them.
        remote: a Spark Connect address; what is behind the server is hidden.
    """
    secrets = {name: value for name, value in settings.items() if _SECRET_SETTINGS.match(name)}
    for name, value in settings.items():
        if _JAVA_OPTIONS.search(name):
            secrets |= {f"{name} {option}": secret for option, secret in _secret_options(value)}
    _hidden.update({f"session {name}": value for name, value in {**options, **secrets}.items()})
    if remote:
        _hidden["session token"] = _behind_server(remote)


def redacted(text: str, options: Mapping[str, str] | None = None) -> str:
    """A text without the values that were hidden, and without those that the environment has for storages and Spark.

    Args:
        text: of an error.
        options: more values to hide, by their names.
    """
    # An option of one name may have another value in the environment.
    given = {f"environment {name}": value for name, value in os.environ.items() if name.startswith(STORES)}
    if remote := os.environ.get(REMOTE_VARIABLE):
        given["environment token"] = _behind_server(remote)
    return without_values(text, {**given, **_hidden, **(options or {})})


def _secret_options(options: str) -> Iterator[tuple[str, str]]:
    """The names and values of those options of Java that may be secrets."""
    try:
        words = shlex.split(options)
    except ValueError:  # a quotation is not closed
        words = options.split()
    for word in words:
        if found := _SECRET_OPTION.search(word):
            yield found[1], found[2]


def _behind_server(remote: str) -> str:
    return remote.removeprefix(without_secrets(remote)).strip("/;")


def without_secrets(remote: str) -> str:
    """A Connect address without the parameters behind it, which may hold a token.

    Example:
        >>> without_secrets("sc://spark:15002/;token=secret"), without_secrets("sc://spark;token=secret")
        ('sc://spark:15002', 'the remote address')
    """
    scheme, _, rest = remote.partition("://")
    server = rest.partition("/")[0]
    return f"{scheme}://{server}" if is_server(server) else "the remote address"
