"""Libraries that only some decoders need, and that come with an extra of this package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stream_consumers.errors import MissingDependencyError


def imported(module: str, *, extra: str) -> Any:
    """The module.

    Args:
        module: its name.
        extra: of this package, with which it is installed.

    Raises:
        MissingDependencyError: it is not installed; says how to install it.

    Example:
        >>> imported("json", extra="avro").dumps([1])
        '[1]'
        >>> imported("no_such_library", extra="avro")
        Traceback (most recent call last):
        stream_consumers.errors.MissingDependencyError: the Python package no_such_library is not installed. \
Install it here and where executors run: pip install 'stream-assets[avro]'.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise MissingDependencyError(
            f"the Python package {missing} is not installed",
            remedy=f"Install it here and where executors run: pip install 'stream-assets[{extra}]'.",
        ) from error
