"""SeaStreamer's stream URLs, ``[protocol://]nodes/streams``, and addresses of servers and tables.

URLs and addresses are shown in logs and in Dagster, so they must not contain secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote

from stream_consumers.errors import InvalidOptionError, InvalidStreamKeyError, InvalidUrlError, UnsupportedError
from stream_consumers.messages import WILDCARD, check_encoded_key, check_stream_key

# A host name (possibly a variable in braces), an IPv4 address, or an IPv6 address in brackets.
_SERVER = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[\w.{}-]+)(:(?P<port>[0-9]{1,5}))?")
_PORTS = range(1, 65536)
# Azure uses CONTAINER@ACCOUNT. Encoded characters are allowed, except those that delimit credentials or parameters.
_CONTAINER = re.compile(r"(?:abfss?|wasbs?)://(?:[\w$.-]|%(?!25|2F|23|3[ABDF]|40|[01]|7F)[0-9A-F]{2})+@", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_PARAMETERS = frozenset("?#;")
# An address in a text ends at white space or before the next address of a list; a password may contain a comma.
_IN_TEXT = re.compile(rf"({_SCHEME.pattern}://[^\s\"]+?)(?=[\s\"]|$|,{_SCHEME.pattern}://)")
# A Kerberos principal in an address of Hive is not a credential.
_PRINCIPAL = re.compile(r"(jdbc:hive2://[^\s\"@]*;principal=)[\w./-]+@[\w.-]+", re.IGNORECASE)
# The user and the password of an address, or only the user, unless that is the container of an address of Azure.
USER_INFO = r"(?<!abfs|wasb)(?<!abfss|wasbs)://[^/\s]*@|://[^/\s:@]*:[^/\s]*@"
# A parameter of an address whose value is a secret, such as a password of JDBC or the signature of a storage.
SECRET_PARAMETER = r"[?&;][\w.-]*(?:password|pwd|pw|token|secret|sig|signature|key|auth|assertion)="  # noqa: S105 - names of parameters
# Protocols whose stream keys may be arbitrary bytes.
_ANY_KEYS = frozenset({"redis", "rediss"})
# Characters that may belong to, or precede, a password.
_UNSHOWN = re.compile(r"[@%;#?=]|:(?!//|[0-9])")
_ADDRESS_SCHEME = re.compile(rf"\A\s*{_SCHEME.pattern}://")
# A client may decode an "@" that is encoded, or not.
_AT = re.compile(r"@|%40")
_AFTER_HOST = re.compile(r"[/?#]+")
_BETWEEN_WORDS = re.compile(rf"[\s:/?#\\\[\]]|{_AT.pattern}")
_HOST_AND_NUMBER = re.compile(r"[\w.-]+:[0-9]+")
NOT_SHOWN = "it is not shown, because it may contain a secret"
CREDENTIALS = "contains a user or a password, or an '@' that may belong to one"


def is_server(text: str) -> bool:
    """Return whether the text is a host, optionally with a port from 1 to 65535, and nothing else.

    Example:
        >>> is_server("store:9000"), is_server("store:99999"), is_server("me:secret"), is_server("store;secret")
        (True, False, False, False)
    """
    server = _SERVER.fullmatch(text)
    return server is not None and int(server["port"] or 1) in _PORTS


def server_fault(text: str) -> str:
    """Return why the text is not a host with an optional port, as a predicate; empty if it is one.

    Example:
        >>> server_fault("store:99999"), server_fault("store?key=secret"), server_fault("store")
        ('has a port outside of 1 to 65535', 'has parameters', '')
    """
    if is_server(text):
        return ""
    if "@" in unquote(text):
        return CREDENTIALS
    if not _PARAMETERS.isdisjoint(text):
        return "has parameters"
    if any(map(str.isspace, text)):
        return "contains white space"
    host = text.rpartition(":")[0] if ":" in text else text
    if not host:
        return "names no host"
    return "has a port outside of 1 to 65535" if is_server(host) else "has characters that a host cannot have"


def is_address(text: str) -> bool:
    """Return whether the text is a server, or the URI of one without credentials and parameters.

    Example:
        >>> is_address("store:9000"), is_address("http://store:9000/a"), is_address("http://me:secret@store")
        (True, True, False)
    """
    return is_server(text) or not _address_fault(text, has_host=True)


def check_address(name: str, address: str, *, remedy: str, has_host: bool = True) -> str:
    """Return the address if it is a URI without credentials and parameters.

    A secret that contains a slash ends in the path, so an ``@`` in the path is accepted only if the part before the
    path cannot be the beginning of a secret. A bucket cannot, because it has no colon. A host with a port can:
    ``user:8020/secret@host`` has the same form as ``host:8020/me@home``. Such a part is taken for a host only in
    ``hdfs`` URIs, which have no place for a password and whose paths have no colon. After any other port, an ``@`` in
    the path is rejected, as is any ``@`` in the path of an address that must name a host.

    Args:
        name: the name of the option.
        address: ``scheme://host:port/path``.
        remedy: the correct form, and where credentials belong.
        has_host: whether the address must name a host.

    Raises:
        InvalidOptionError: the address is not such a URI; the message gives the reason without the address.

    Example:
        >>> check_address("url", "https://me:secret@registry", remedy="Give the user in options.")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: url contains a user or a password, or an '@' that may \
belong to one; it is not shown, because it may contain a secret. Give the user in options.
    """
    if fault := _address_fault(address, has_host=has_host):
        raise InvalidOptionError(f"{name} {fault}; {NOT_SHOWN}", remedy=remedy)
    return address


def check_no_credentials(name: str, text: str, *, remedy: str) -> str:
    """Return the text unless an address in it contains a user or a password, or an ``@`` that may belong to one.

    Args:
        name: the name of the option.
        text: any text, such as a list of addresses.
        remedy: where credentials belong.

    Raises:
        InvalidOptionError: the text contains such an address; the message does not show it.

    Example:
        >>> check_no_credentials("jars", "/lib/a.jar,abfss://jars@account/b.jar", remedy="Use a file.")
        '/lib/a.jar,abfss://jars@account/b.jar'
    """
    if any(_credentials(text)):
        raise InvalidOptionError(f"{name} {CREDENTIALS}; {NOT_SHOWN}", remedy=remedy)
    return text


def passwords(text: str) -> Iterator[str]:
    """Yield the password of each address in a text that has one, and the user of an address that has only a user.

    Example:
        >>> list(passwords("https://me:s3cret@repo.example/a,abfss://jars@account,https://token@repo.example"))
        ['s3cret', 'token']
    """
    for credentials in _credentials(text):
        yield credentials.partition(":")[2] or credentials


def address_secrets(address: str) -> set[str]:
    """Return what may be secret in an address: its credentials, whole and in parts, and all after its host.

    The host of ``[scheme://][user:password@]host[:port][/path]`` is not secret, if no ``@`` follows it. Clients
    disagree about where the credentials of any other address begin and end, so each part of it may be secret.

    Example:
        >>> sorted(address_secrets("http://me:hun@ter2@server:4318/key"))
        ['hun', 'hun@ter2', 'key', 'me:hun@ter2', 'ter2']
        >>> sorted(address_secrets("http://server/me@key"))
        ['key', 'me', 'me:', 'me@key', 'server', 'server/me', 'server/me:', 'server/me@key']
    """
    rest = _ADDRESS_SCHEME.sub("", address.strip())
    authority, *behind = _AFTER_HOST.split(rest.rstrip("/?#"), maxsplit=1)
    credentials, _, server = authority.rpartition("@")
    if is_server(server) and "\\" not in authority and not any(map(_AT.search, behind)):
        password = credentials.partition(":")[2] or credentials
        users = {credentials}
        secrets = {password, *behind, *_BETWEEN_WORDS.split(password)}
    else:
        begins = [0, *(found.end() for found in _BETWEEN_WORDS.finditer(rest))]
        users = {rest[begin : found.start()] for begin in begins for found in _AT.finditer(rest)}
        secrets = {rest[begin:] for begin in begins} | {*_BETWEEN_WORDS.split(rest)}
    # Clients encode a user without a password with a colon.
    secrets |= users | {f"{user}:" for user in users if ":" not in user}
    # One character would be hidden in many places. Clients write hosts in lower case.
    return {one for secret in secrets if len(secret) > 1 for one in (secret, secret.lower())}


def _credentials(text: str) -> Iterator[str]:
    """Yield what precedes the ``@`` in each address of a text that contains a user or a password."""
    for address in _IN_TEXT.findall(_PRINCIPAL.sub(r"\1", text)):
        scheme, host, path = _parts(address)
        if _has_credentials(scheme, host, path, has_host=False):
            # A password may contain a slash, or encode the "@".
            yield host.rpartition("@")[0] or (path and f"{host}/{path}".rpartition("@")[0]) or host


def _parts(address: str) -> tuple[str, str, str]:
    """Return the scheme, the host without an Azure container, and the path."""
    scheme, _, rest = address.partition("://")
    container = _CONTAINER.match(address)
    host, _, path = (address[container.end() :] if container else rest).partition("/")
    return scheme, host, path


def _has_credentials(scheme: str, host: str, path: str, *, has_host: bool) -> bool:
    is_namenode = scheme.lower() == "hdfs" and is_server(host) and ":" not in path
    return "@" in unquote(host) or ("@" in path and (has_host or (":" in host and not is_namenode)))


def _address_fault(address: str, *, has_host: bool) -> str:
    if address != address.strip():
        return "begins or ends with white space, like the text of a file"
    scheme, _, rest = address.partition("://")
    if not rest or not _SCHEME.fullmatch(scheme):
        return "has no scheme, like https://, before a host or a path"
    _, host, path = _parts(address)
    if _has_credentials(scheme, host, path, has_host=has_host):
        return CREDENTIALS
    if not _PARAMETERS.isdisjoint(path):
        return "has parameters"
    return server_fault(host) if has_host or host else ""


@dataclass(frozen=True, slots=True)
class StreamUrl:
    """A parsed stream URL; the text after the last ``/`` lists the streams (SeaStreamer's rule).

    A Redis stream may have any key, see :func:`stream_consumers.messages.encode_key`; other stream keys consist of the
    characters ``[a-zA-Z0-9._-]``.

    Args:
        protocol: the scheme of a backend: ``file``, ``kafka``, ``redis``, ``rediss``, ``stdio``, ``memory``, or one
            that another package registers.
        nodes: the servers or the path, without the protocol; ``.`` by default.
        streams: the stream keys, percent-encoded if necessary; ``*`` (SeaStreamer's ``SEA_STREAMER_WILDCARD``) stands
            for all streams.

    Example:
        >>> url = StreamUrl.parse("kafka://a:1,b:2/x,y")
        >>> url.nodes, url.streams, str(url)
        (('a:1', 'b:2'), ('x', 'y'), 'kafka://a:1,b:2/x,y')
    """

    protocol: str
    nodes: tuple[str, ...]
    streams: tuple[str, ...]

    @classmethod
    def parse(cls, text: str | StreamUrl) -> StreamUrl:
        """Parse ``text``; the case of the protocol does not matter.

        All functions with a URL argument call this method, so that they accept text; a parsed URL is returned as it is.

        Raises:
            InvalidUrlError: the URL has no protocol, or no slash before the streams.
            InvalidStreamKeyError: a stream key has invalid characters.
        """
        if isinstance(text, StreamUrl):
            return text
        if not isinstance(text, str):
            raise InvalidUrlError(
                f"a URL must be text, got {type(text).__name__}",
                remedy="Write it like file://path/to/orders.ss/orders.",
            )
        try:
            return cls._parsed(text)
        except InvalidUrlError as error:
            if not _UNSHOWN.search(text):
                raise
            # The invalid node or stream key may be a part of a password.
            fault, remedy = _url_fault(text)
            raise type(error)(f"a URL {fault}; {NOT_SHOWN}", remedy=remedy) from None

    @classmethod
    def _parsed(cls, text: str) -> StreamUrl:
        protocol, separator, rest = text.partition("://")
        if not separator or not protocol:
            raise InvalidUrlError(f"{text!r} has no protocol", remedy="Write it like file://path/to/orders.ss/orders.")
        location, slash, listing = rest.rpartition("/")
        if not slash:
            raise InvalidUrlError(
                f"{text!r} does not say which streams to read",
                remedy=f"End it with a slash and the stream keys, like {text}/orders.",
            )
        if "?" in listing:
            raise InvalidStreamKeyError("a URL cannot have parameters", remedy="Give them as client options.")
        nodes = tuple(node for node in location.split(",") if node) or (".",)
        return cls(protocol.lower(), nodes, ()).with_streams(key for key in listing.split(",") if key)

    def with_streams(self, keys: Iterable[str]) -> StreamUrl:
        """Return this URL with other streams.

        Args:
            keys: the stream keys; text is a single key.

        Raises:
            InvalidStreamKeyError: a stream key has invalid characters.

        Example:
            >>> str(StreamUrl.parse("redis://localhost/").with_streams(["user:events", "*"]))
            'redis://localhost/user:events,SEA_STREAMER_WILDCARD'
            >>> StreamUrl.parse("redis://localhost/").with_streams("orders").streams
            ('orders',)
        """
        keys = (keys,) if isinstance(keys, str) else keys
        return replace(self, streams=tuple(WILDCARD if key == "*" else self.stream_key(key) for key in keys))

    def stream_key(self, text: str) -> str:
        """Return ``text`` as a stream key on the servers of this URL.

        Raises:
            InvalidStreamKeyError: it has characters that such a stream key cannot have.

        Example:
            >>> StreamUrl.parse("redis://localhost/").stream_key("user%3Aevents")
            'user:events'
        """
        return check_encoded_key(text) if self.protocol in _ANY_KEYS else check_stream_key(text)

    @property
    def path(self) -> str:
        """The file path of a ``file`` URL.

        Raises:
            InvalidUrlError: the URL names several nodes.
        """
        if len(self.nodes) != 1:
            raise InvalidUrlError(f"{self} names several files", remedy="Use one URL per file.", files=len(self.nodes))
        return self.nodes[0].rstrip("/") or "/"

    def check_servers(self) -> None:
        """Raise unless the nodes are servers without credentials, because URLs are shown in logs and in the UI.

        Ports are checked, because a client would interpret a port that is too large as another port.

        Raises:
            InvalidUrlError: a node is not a server, or contains credentials; the message does not show credentials.

        Example:
            >>> StreamUrl.parse("kafka://a:9092,b:99999/orders").check_servers()
            Traceback (most recent call last):
            stream_consumers.errors.InvalidUrlError: 'b:99999' has a port outside of 1 to 65535. Write ...
        """
        # A slash in a password turns the end of the password into a stream key.
        is_in_stream = any("@" in stream for stream in self.streams)
        if any("@" in node for node in self.nodes):
            of = "" if is_in_stream or not self.streams else f" of {','.join(self.streams)!r}"
            raise InvalidUrlError(
                f"the URL{of} contains credentials",
                remedy="Give them as client options, with secrets from the environment.",
            )
        for node in self.nodes:
            if fault := server_fault(node):
                fault = CREDENTIALS if is_in_stream else fault
                is_shown = _HOST_AND_NUMBER.fullmatch(node) and not is_in_stream
                raise InvalidUrlError(
                    f"{node!r} {fault}" if is_shown else f"a server of a URL {fault}; {NOT_SHOWN}",
                    remedy="Write it as host:port, with a port from 1 to 65535, and give credentials and parameters as "
                    "client options, with secrets from the environment.",
                )

    def required_streams(self) -> tuple[str, ...]:
        """Return the streams, at least one; the wildcard is rejected.

        Raises:
            InvalidUrlError: the URL names no stream.
            UnsupportedError: the URL contains the wildcard.
        """
        if WILDCARD in self.streams:
            raise UnsupportedError(
                f"{self.shown}: only consumers of files, memory, Redis or Kafka without a group can read all streams "
                "('*')",
                remedy="Name the streams.",
            )
        return self.subscribed_streams()

    def subscribed_streams(self) -> tuple[str, ...]:
        """Return the streams, at least one; the wildcard may be among them.

        Raises:
            InvalidUrlError: the URL names no stream.
        """
        if not self.streams:
            raise InvalidUrlError(f"{self.shown} names no stream", remedy=f"Add a stream key, like {self.shown}orders.")
        return self.streams

    @property
    def shown(self) -> str:
        """The URL for messages, without credentials: the part of a node before an ``@`` is replaced.

        Example:
            >>> StreamUrl.parse("redis://:secret@server:6379/").shown
            'redis://…@server:6379/'
        """
        nodes = (f"…@{node.rpartition('@')[2]}" if "@" in node else node for node in self.nodes)
        return str(replace(self, nodes=tuple(nodes)))

    def __str__(self) -> str:
        nodes = "" if self.nodes == (".",) else ",".join(self.nodes)
        return f"{self.protocol}://{nodes}/{','.join(self.streams)}"


def _url_fault(text: str) -> tuple[str, str]:
    """Return why a text that may contain credentials is not a URL, and the remedy."""
    _, separator, rest = text.partition("://")
    if "@" in text:
        return CREDENTIALS, (
            "Give credentials as client options, with secrets from the environment, and write the URL like "
            "redis://server:6379/orders; in a key of Redis, write '@' as %40."
        )
    if not set("?#;").isdisjoint(text):
        return "contains parameters, or a '?', '#' or ';' that may start one", (
            "Give them as client options, with secrets from the environment; in a key of Redis, write '?' as %3F, "
            "'#' as %23."
        )
    if not separator:
        return "has no protocol", "Write it like redis://server:6379/orders."
    if "/" not in rest:
        return "does not say which streams to read", "End it with a slash and the stream keys, like /orders."
    return "has a stream key with invalid characters", (
        "Write them percent-encoded in a key of Redis: '%' as %25, '*' as %2A; elsewhere use letters, digits, '.', '_' "
        "and '-' only."
    )
