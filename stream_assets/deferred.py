"""Text that may stay in the environment until it is used: ``dagster.EnvVar`` wherever there is text."""

from __future__ import annotations

from collections.abc import Mapping

from stream_consumers.client_config import Deferred, look_up, variable
from stream_consumers.errors import InvalidOptionError


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


def resolved_text(option: str, value: str) -> str:
    """The text, looked up now if it is deferred.

    Args:
        option: what it is for, for the message.
        value: text, or an ``EnvVar``.

    Raises:
        InvalidOptionError: the variable is not set, or there is nothing in it.
    """
    if not isinstance(value, Deferred):
        return value
    found = str(look_up(value, option))
    # Nothing would be taken for a default: the root folder, a broker on this machine.
    if not found.strip():
        raise InvalidOptionError(
            f"{option} comes from the environment variable {variable(value)}, which is empty",
            remedy="Set it where this process runs: the daemon's code server and the runs.",
        )
    return found


def resolved_options(option: str, options: Mapping[str, str]) -> dict[str, str]:
    """Options, each looked up now if it is deferred.

    Raises:
        InvalidOptionError: a variable is not set.
    """
    # An option may be empty, as a session token is that somebody does not need.
    return {
        name: str(look_up(value, f"{option}[{name!r}]")) if isinstance(value, Deferred) else value
        for name, value in options.items()
    }
