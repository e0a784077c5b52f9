"""Configuration that is passed on to a broker's own client, with secrets that are named, not written down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import is_plain_text

Scalar = str | int | float | bool


@runtime_checkable
class Deferred(Protocol):
    """A value that is looked up when the client is made; ``dagster.EnvVar`` is one."""

    def get_value(self) -> Scalar | None:
        """The value now; ``None`` if it is not set."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """A value that stays in the environment until the client is made, so that it shows up nowhere.

    Args:
        name: of the variable.

    Example:
        >>> EnvironmentVariable("KAFKA_PASSWORD")
        EnvironmentVariable(name='KAFKA_PASSWORD')
    """

    name: str

    def get_value(self) -> str | None:
        """What the variable holds."""
        return os.environ.get(self.name)


ClientConfig = Mapping[str, "Scalar | Deferred"]


def resolve(config: ClientConfig) -> dict[str, Scalar]:
    """The configuration with every deferred value looked up.

    Raises:
        InvalidOptionError: a variable is not set, a value is no text, number or truth value, or text has a NUL or a
            lone surrogate.

    Example:
        >>> resolve({"security.protocol": "SASL_SSL"})
        {'security.protocol': 'SASL_SSL'}
    """
    resolved: dict[str, Scalar] = {}
    for name, value in config.items():
        # dagster.EnvVar is a str that must not be used as one, so this comes first.
        if isinstance(value, Deferred):
            found = value.get_value()
            if found is None:
                raise InvalidOptionError(
                    f"the option {name!r} comes from {_variable(value)}, which is not set",
                    remedy="Set it where this process runs.",
                )
            resolved[name] = found
        elif isinstance(value, (str, int, float, bool)):
            resolved[name] = value
        else:
            raise InvalidOptionError(
                f"the option {name!r} is a {type(value).__name__}",
                remedy="Use text, a number, a truth value or an EnvVar: executors get a copy.",
            )
        if not is_plain_text(f"{name}{resolved[name]}"):
            raise InvalidOptionError(
                f"the option {name!r}, or its value, has a NUL or a lone surrogate", remedy="Give it as UTF-8 text."
            )
    return resolved


def parse_client_option(text: str) -> tuple[str, Scalar | Deferred]:
    """Read ``NAME=VALUE``; a value ``env:VARIABLE`` stays in the environment.

    Raises:
        InvalidOptionError: no ``=`` in it.

    Example:
        >>> parse_client_option("sasl.password=env:KAFKA_PASSWORD")
        ('sasl.password', EnvironmentVariable(name='KAFKA_PASSWORD'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidOptionError("an option without a name or a value", remedy="Write NAME=VALUE or NAME=env:VARIABLE.")
    if value.startswith("env:"):
        return name, EnvironmentVariable(value.removeprefix("env:"))
    return name, value


def _variable(value: Deferred) -> str:
    name = getattr(value, "env_var_name", None) or getattr(value, "name", None)
    return f"the environment variable {name}" if name else "the environment"
