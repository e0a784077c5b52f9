"""Hides what this process was given in confidence from the texts of Spark, of delta-rs and of storages."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress

from stream_consumers.client_config import environment, redact_options
from stream_consumers.urls import SECRET_PARAMETER, USER_INFO, is_server, passwords

STORES = ("AWS_", "AZURE_", "GOOGLE_")
"""As the environment variables begin that delta-rs takes for storage options."""
REMOTE_VARIABLE = "SPARK_REMOTE"
TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the name of a variable
JAVA_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS")
"""The environment variables with options of Java or of Spark, each of which may be a secret."""
HIDDEN_SETTINGS = (
    r"(?is)^(?!.*provider$).*"
    r"(secret|pass|pwd|pw$|[._-]pat$|token|(access|account|private|encryption|provided|signing|ssh|api).?key"
    rf"|credential|authorization|[.]sas[.]|{SECRET_PARAMETER}|ConnectionURL|{USER_INFO})"
)
"""A pattern, for Python and for Java, of the names of Spark settings whose values may be secrets.

Spark hides a setting in its user interface and its event logs if the pattern is found in the name or in the value, so
the pattern includes an address with a user or a signature. The name of a class that provides credentials is no secret.
"""
_SECRET_SETTING = re.compile(HIDDEN_SETTINGS)
# An option within a value, such as one of Java, of an agent in it, or of an address, may also have a shorter name.
_SECRET_OPTION = re.compile(rf"{HIDDEN_SETTINGS}|key|[?&;]sig")
# Java repeats its options from the environment when it starts.
_PICKED_UP = re.compile(r"^(NOTE: )?Picked up \w+: .*\n?", re.MULTILINE)
_hidden: dict[str, str] = {}


def hide(options: Mapping[str, str], settings: Mapping[str, str], remote: str | None) -> None:
    """Let :func:`redacted` hide these values from now on, because Spark's errors do not say whose they are.

    Args:
        options: storage options.
        settings: of Spark; hidden are those that may be secrets, and options and passwords in addresses within others.
        remote: a Spark Connect address; what is behind the server is hidden.
    """
    secrets = _secrets_within(settings)
    for name, value in settings.items():
        # Errors name the database in the address of a metastore, of which only passwords are secret.
        if _SECRET_SETTING.search(name) and not name.endswith("ConnectionURL"):
            secrets[name] = value
    if remote:
        secrets["token"] = _behind_server(remote)
    # A later session may have other values, and texts may still have the earlier ones.
    _hidden.update({f"session {hash(value)} {name}": value for name, value in [*options.items(), *secrets.items()]})


def redacted(text: str, options: Mapping[str, str] | None = None) -> str:
    """A text without the values that were hidden, and without those that the environment has for storages and Spark.

    Args:
        text: of an error.
        options: more values to hide, by their names.
    """
    # An option of one name may have another value in the environment.
    given = {f"environment {name}": value for name, value in environment().items() if name.startswith(STORES)}
    if remote := os.environ.get(REMOTE_VARIABLE):
        given["environment remote"] = _behind_server(remote)
    given["environment token"] = os.environ.get(TOKEN_VARIABLE, "")
    given |= _secrets_within({f"environment {name}": os.environ.get(name, "") for name in JAVA_VARIABLES})
    return redact_options(text, {**given, **_hidden, **(options or {})})


def jvm_output(text: str) -> str:
    """What a JVM wrote, without secrets and without the lines in which Java repeats its options.

    Example:
        >>> jvm_output("Picked up JAVA_TOOL_OPTIONS: -Dpassword=s3cret" + chr(10) + "Error: no such jar")
        'Error: no such jar'
    """
    for variable in JAVA_VARIABLES:
        # A value may have several lines.
        if value := os.environ.get(variable):
            text = text.replace(f"Picked up {variable}: {value}", f"Picked up {variable}: ")
    return redacted(_PICKED_UP.sub("", text)).strip()


def _secrets_within(values: Mapping[str, str]) -> dict[str, str]:
    """Return the options within values that may be secrets, and the passwords in addresses, with a name for each."""
    found: dict[str, str] = {}
    for name, value in values.items():
        secrets = [*_secret_options(value), *(("password", secret) for secret in passwords(value))]
        found |= {f"{name} {place} {option}": secret for place, (option, secret) in enumerate(secrets)}
    return found


def _secret_options(value: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the options within a setting that may be secrets."""
    words = value.split()
    # Spark removes quotes and backslashes, Java only quotes; a quotation may not be closed.
    with suppress(ValueError):
        words += shlex.split(value)
    for word in dict.fromkeys(words):
        name, _, rest = word.partition("=")
        while rest and not _SECRET_OPTION.search(name):
            name, _, rest = rest.partition("=")
        if rest:
            yield name, rest


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
