"""Addresses of servers and of tables: they are shown in logs and in Dagster, so that none may have a secret in it."""

from __future__ import annotations

import re
from urllib.parse import unquote

from stream_consumers.errors import InvalidOptionError

# A name, also that of a variable in braces, an address of version 4, or one of version 6 in brackets.
_SERVER = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[\w.{}-]+)(:(?P<port>[0-9]{1,5}))?")
_PORTS = range(1, 65536)
# Azure writes CONTAINER@ACCOUNT. What is encoded is no character that a user and a password, or parameters, need.
_CONTAINER = re.compile(r"(?:abfss?|wasbs?)://(?:[\w$.-]|%(?!25|2F|23|3[ABDF]|40|[01]|7F)[0-9A-F]{2})+@", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_PARAMETERS = frozenset("?#;")
NOT_REPEATED = "it is not repeated, since it may have a secret in it"
CREDENTIALS = "has a user or a password in it, or an '@' that cannot be told from theirs"


def is_server(text: str) -> bool:
    """Whether it is a host, with or without a port from 1 to 65535, and nothing besides.

    Example:
        >>> is_server("store:9000"), is_server("store:99999"), is_server("me:secret"), is_server("store;secret")
        (True, False, False, False)
    """
    server = _SERVER.fullmatch(text)
    return server is not None and int(server["port"] or 1) in _PORTS


def server_fault(text: str) -> str:
    """Why it is no host with or without a port, as the end of a sentence; empty if it is one.

    Example:
        >>> server_fault("store:99999"), server_fault("store?key=secret"), server_fault("store")
        ('has a port that is no number from 1 to 65535', 'has parameters', '')
    """
    if is_server(text):
        return ""
    if "@" in unquote(text):
        return CREDENTIALS
    if not _PARAMETERS.isdisjoint(text):
        return "has parameters"
    if any(map(str.isspace, text)):
        return "has white space in it"
    host = text.rpartition(":")[0] if ":" in text else text
    if not host:
        return "names no host"
    return "has a port that is no number from 1 to 65535" if is_server(host) else "has characters that no host can have"


def is_address(text: str) -> bool:
    """Whether it is a server, or a URI of one without credentials and parameters.

    Example:
        >>> is_address("store:9000"), is_address("http://store:9000/a"), is_address("http://me:secret@store")
        (True, True, False)
    """
    return is_server(text) or not _fault(text, has_host=True)


def check_address(name: str, address: str, *, remedy: str, has_host: bool = True) -> str:
    """The address, if it is a URI without credentials and parameters.

    A secret with a slash in it ends in the path; so an ``@`` there is taken for a part of the address only where what
    is before the path cannot be the beginning of a secret. A bucket cannot, since it has no colon. A host with a port
    can: ``user:8020/secret@host`` looks the same as ``host:8020/me@home``, whatever the number is. It is taken for one
    in ``hdfs`` only, whose URIs have no place for a password, and whose paths have no colon; an ``@`` in the path after
    any other port is refused, as is any ``@`` in the path of a server that must be named.

    Args:
        name: of the option that it is given as.
        address: ``scheme://host:port/path``.
        remedy: how to write it, and where credentials belong.
        has_host: whether it must name a host.

    Raises:
        InvalidOptionError: it is something else; the message names the reason, and does not repeat the address.

    Example:
        >>> check_address("url", "https://me:secret@registry", remedy="Give the user in options.")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: url has a user or a password in it, or an '@' that cannot be told \
from theirs; it is not repeated, since it may have a secret in it. Give the user in options.
    """
    if fault := _fault(address, has_host=has_host):
        raise InvalidOptionError(f"{name} {fault}; {NOT_REPEATED}", remedy=remedy)
    return address


def _fault(address: str, *, has_host: bool) -> str:
    if address != address.strip():
        return "begins or ends with white space, as the text of a file may"
    scheme, _, rest = address.partition("://")
    if not rest or not _SCHEME.fullmatch(scheme):
        return "has no scheme, like https://, before a host or a path"
    container = _CONTAINER.match(address)
    host, _, path = (address[container.end() :] if container else rest).partition("/")
    is_namenode = scheme.lower() == "hdfs" and is_server(host) and ":" not in path
    if "@" in path and (has_host or (":" in host and not is_namenode)):
        return CREDENTIALS
    if not _PARAMETERS.isdisjoint(path):
        return "has parameters"
    return server_fault(host) if has_host or host else ""
