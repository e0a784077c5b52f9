"""Text that may stay in the environment until it is used: ``dagster.EnvVar`` wherever there is text."""

from __future__ import annotations

from collections.abc import Mapping

from stream_consumers.client_config import Deferred
from stream_consumers.errors import InvalidOptionError

_REMEDY = "Set it where this process runs: the daemon's code server and the runs."


def is_deferred(value: object) -> bool:
    """Whether it is looked up when it is used."""
    # dagster.EnvVar is a str that must not be used as one.
    return isinstance(value, Deferred)


def shown_text(value: str) -> str:
    """For people: the name of the variable in braces, never what it holds.

    Example:
        >>> from dagster import EnvVar
        >>> shown_text("lakehouse"), shown_text(EnvVar("GROUP"))
        ('lakehouse', '{GROUP}')
    """
    return f"{{{variable(value)}}}" if is_deferred(value) else value


def variable(value: object) -> str:
    """The name of the variable that a text comes from."""
    return str(getattr(value, "env_var_name", None) or getattr(value, "name", "environment"))


def resolved_text(option: str, value: str) -> str:
    """The text, looked up now if it is deferred.

    Args:
        option: what it is for, for the message.
        value: text, or an ``EnvVar``.

    Raises:
        InvalidOptionError: the variable is not set, or there is nothing in it.
    """
    found = _looked_up(option, value)
    # Nothing would be taken for a default: the root folder, a broker on this machine.
    if isinstance(value, Deferred) and not found.strip():
        raise InvalidOptionError(
            f"{option} comes from the environment variable {variable(value)}, which is empty", remedy=_REMEDY
        )
    return found


def resolved_options(option: str, options: Mapping[str, str]) -> dict[str, str]:
    """Options, each looked up now if it is deferred.

    Raises:
        InvalidOptionError: a variable is not set.
    """
    # An option may be empty, as a session token is that somebody does not need.
    return {name: _looked_up(f"{option}[{name!r}]", value) for name, value in options.items()}


def _looked_up(option: str, value: str) -> str:
    if not isinstance(value, Deferred):
        return value
    found = value.get_value()
    if found is None:
        raise InvalidOptionError(
            f"{option} comes from the environment variable {variable(value)}, which is not set", remedy=_REMEDY
        )
    return str(found)
