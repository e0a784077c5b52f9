"""Addresses of servers and of tables: they are shown in logs and in Dagster, so that none may have a secret in it."""

from __future__ import annotations

import re

from stream_consumers.errors import InvalidOptionError

# A name, also that of a variable in braces, an address of version 4, or one of version 6 in brackets.
_SERVER = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[\w.{}-]+)(:(?P<port>[0-9]{1,5}))?")
_PORTS = range(1, 65536)
# Azure writes CONTAINER@ACCOUNT.
_CONTAINER = re.compile(r"(?:abfss?|wasbs?)://[\w$.-]+@", re.IGNORECASE)
_PARAMETERS = frozenset("?#;")


def is_server(text: str) -> bool:
    """Whether it is a host, with or without a port from 1 to 65535, and nothing besides.

    Example:
        >>> is_server("store:9000"), is_server("store:99999"), is_server("me:secret"), is_server("store;secret")
        (True, False, False, False)
    """
    server = _SERVER.fullmatch(text)
    return server is not None and int(server["port"] or 1) in _PORTS


def check_address(name: str, address: str, *, remedy: str, has_host: bool = True) -> str:
    """The address, if it is a URI without credentials and parameters.

    A secret with a slash in it ends in the path; so an ``@`` there is taken for a part of the address only where what
    is before the path cannot be the beginning of a secret.

    Args:
        name: of the option that it is given as.
        address: ``scheme://host:port/path``.
        remedy: how to write it, and where credentials belong.
        has_host: whether it must name a host.

    Raises:
        InvalidOptionError: it is something else; the message does not repeat it.

    Example:
        >>> check_address("url", "https://me:secret@registry", remedy="Give the user in options.")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: url is no address without a user, a password and parameters, and \
is not repeated, since it may have a secret in it. Give the user in options.
    """
    container = _CONTAINER.match(address)
    _, mark, rest = address.partition("://")
    host, _, path = (address[container.end() :] if container else rest).partition("/")
    is_host = is_server(host) if has_host or host else True
    may_have_at = not (has_host or ":" in host)
    if not mark or not is_host or not _PARAMETERS.isdisjoint(path) or ("@" in path and not may_have_at):
        raise InvalidOptionError(
            f"{name} is no address without a user, a password and parameters, and is not repeated, since it may have a "
            "secret in it",
            remedy=remedy,
        )
    return address
