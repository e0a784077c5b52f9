"""Clients of Kafka brokers: their options, their tokens for SASL/OAUTHBEARER, and their errors as StreamAssetsError."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition

from stream_consumers.client_config import ClientConfig, Deferred, Scalar, redact_options, resolve
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    GroupActiveError,
    InvalidOptionError,
    StreamAssetsError,
    StreamNotFoundError,
    TokenProviderError,
)
from stream_consumers.options import is_plain_text
from stream_consumers.urls import NOT_SHOWN, StreamUrl

DEFAULT_PORT = 9092
TOKEN_PROVIDER = "oauth_token_provider"  # noqa: S105 - the name of an option
# The settings that users may not change, each with the reason.
RESERVED = {
    "bootstrap.servers": "the URL names the servers",
    "group.id": "the group is a separate option",
    "enable.partition.eof": "the end of a partition ends a range, even if offsets are missing",
    "oauth_cb": f"a function does not reach executors; name it, like {TOKEN_PROVIDER}='module:function'",
}
FIXED: Mapping[str, Scalar] = {"enable.auto.commit": False, "auto.offset.reset": "error", "check.crcs": True}
_WHY_FIXED = {
    "enable.auto.commit": "it would commit messages that are not in the table yet",
    "auto.offset.reset": "it would silently skip or repeat messages; use start or reset",
    "check.crcs": "without it, a damaged batch loses or changes messages without an error",
}
_CONSUMER_ONLY = {
    "auto.commit.interval.ms",
    "auto.offset.reset",
    "check.crcs",
    "coordinator.query.interval.ms",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "group.instance.id",
    "group.protocol",
    "group.protocol.type",
    "group.remote.assignor",
    "heartbeat.interval.ms",
    "isolation.level",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "partition.assignment.strategy",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "session.timeout.ms",
}
# Ten years: an expiry in milliseconds, which is a mistake, exceeds it.
MAX_TOKEN_LIFE_SECONDS = 10 * 365 * 86400.0
MAX_ISSUED = 64
"""The number of tokens and extensions that are hidden in texts; a broker repeats only those of late."""
_DENIED = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_SILENT = {
    KafkaError._WAIT_COORD,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._RESOLVE,
    KafkaError.REQUEST_TIMED_OUT,
}
# Errors that occur just after a topic was created, or while a leader or coordinator moves.
_PASSING = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
}
# The answers to a fetch of a batch that the client cannot decode: another fetch returns the same bytes.
_UNDECODABLE = {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED}
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
# The answers to a commit of a member that has lost its shards.
_LOST = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError._ASSIGNMENT_LOST,
    KafkaError._FENCED,
    KafkaError._MAX_POLL_EXCEEDED,
}
T = TypeVar("T")
RETRY_SECONDS = 0.1
_log = logging.getLogger(__name__)


def check_client_options(client: ClientConfig) -> None:
    """Refuse settings that users may not change, without resolving deferred values.

    Raises:
        InvalidOptionError: the error names the setting and the reason.
    """
    for name, reason in RESERVED.items():
        if name in client:
            raise InvalidOptionError(f"the client option {name!r} cannot be set: {reason}", remedy="Leave it out.")
    if TOKEN_PROVIDER in client and not isinstance(client[TOKEN_PROVIDER], Deferred):
        check_token_provider(client[TOKEN_PROVIDER])
    for name, fixed in FIXED.items():
        if name in client and (isinstance(client[name], Deferred) or str(client[name]).lower() != str(fixed).lower()):
            raise InvalidOptionError(
                f"the client option {name!r} is refused: {_WHY_FIXED[name]}", remedy="Leave it out."
            )


def check_producer_options(client: ClientConfig) -> None:
    """Refuse settings that only consumers have, because a producer would silently ignore them.

    Raises:
        InvalidOptionError: the error names the settings.

    Example:
        >>> check_producer_options({"linger.ms": 5, "session.timeout.ms": 6000})
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: a producer does not accept the client option \
'session.timeout.ms', which is for consumers. Leave it out here.
    """
    consumers = sorted(filter(_is_consumer_only, client))
    if consumers:
        raise InvalidOptionError(
            f"a producer does not accept the client option {', '.join(map(repr, consumers))}, which is for consumers",
            remedy="Leave it out here.",
        )


def producer_options(client: ClientConfig | None) -> ClientConfig:
    """Return a configuration for consumers and producers, without the settings that only consumers have.

    Example:
        >>> producer_options({"linger.ms": 5, "session.timeout.ms": 6000})
        {'linger.ms': 5}
    """
    return {name: value for name, value in (client or {}).items() if not _is_consumer_only(name)}


def client_settings(url: StreamUrl, client: ClientConfig | None) -> dict[str, Scalar]:
    """Return the settings of every client of this cluster, with its secrets.

    Args:
        url: the URL whose nodes are the bootstrap servers, port 9092 by default.
        client: any configuration of librdkafka, like ``security.protocol`` or ``isolation.level``.

    Raises:
        InvalidUrlError: the URL has credentials.
        InvalidOptionError: users may not change a setting, or a variable is not set.

    Example:
        >>> client_settings(StreamUrl.parse("kafka://a,b:1/orders"), None)["bootstrap.servers"]
        'a:9092,b:1'
    """
    url.check_servers()
    check_client_options(client or {})
    given = resolve(client or {})
    servers = ",".join(_with_port(node) for node in url.nodes if node != ".") or f"localhost:{DEFAULT_PORT}"
    # Our errors contain the client's messages; its own log lines are shown only if the user raises the level.
    return {"log_level": 2, **given, **FIXED, "bootstrap.servers": servers}


def _with_port(node: str) -> str:
    is_bare = ":" not in node or node.endswith("]")
    return f"{node}:{DEFAULT_PORT}" if is_bare else node


def isolation(settings: Mapping[str, Scalar]) -> IsolationLevel:
    """Return the isolation level of the settings; ``read_committed`` by default, as in librdkafka.

    Raises:
        InvalidOptionError: an unknown level.
    """
    level = str(settings.get("isolation.level", "read_committed"))
    levels = {
        "read_committed": IsolationLevel.READ_COMMITTED,
        "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
    }
    if level not in levels:
        raise InvalidOptionError(f"isolation.level={level!r} is unknown", remedy=f"Use one of: {', '.join(levels)}.")
    return levels[level]


def _is_consumer_only(name: str) -> bool:
    return name in _CONSUMER_ONLY or name.startswith("fetch.")


class ClientSecrets:
    """Removes the secrets of the clients of a cluster from their texts, which may repeat those of a broker.

    Args:
        settings: the settings of the clients.
    """

    def __init__(self, settings: Mapping[str, Scalar]) -> None:
        self._settings = settings
        # The name and the value of each.
        self._issued: deque[tuple[str, str]] = deque(maxlen=MAX_ISSUED)

    def add(self, token: str, extensions: Mapping[str, str]) -> None:
        """Remember a token and its extensions; threads of several clients call this."""
        for issued in (("token", token), *extensions.items()):
            if issued not in tuple(self._issued):
                self._issued.append(issued)

    def redacted(self, text: str) -> str:
        """Return the text without the values of the settings, and without the last tokens."""
        issued = {f"{place} {name}": value for place, (name, value) in enumerate(tuple(self._issued))}
        return redact_options(text, {**self._settings, **issued})


@contextmanager
def options_explained(secrets: ClientSecrets) -> Iterator[None]:
    """Turn an error of the client about its options into an InvalidOptionError without their values."""
    try:
        yield
    except KafkaException as error:
        said = secrets.redacted(error.args[0].str())
        raise InvalidOptionError(
            f"the Kafka client refuses its options: {said}", remedy="Correct the client options."
        ) from None


def check_token_provider(name: object) -> None:
    """Refuse a value that does not name a function, without importing it.

    Raises:
        InvalidOptionError: the value is not written as ``module:function``.

    Example:
        >>> check_token_provider("aws_tokens:token")
    """
    module, colon, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InvalidOptionError(
            f"{TOKEN_PROVIDER} does not name a function; {NOT_SHOWN}",
            remedy="Write module:function, like aws_tokens:token.",
        )


class TokenProvider:
    """Calls the function that an option names; it is the ``oauth_cb`` of one client of librdkafka.

    The function is called without arguments. It returns a token and its expiry in seconds since 1970; optionally also
    the principal and a mapping of SASL extensions. It is called when the client is created, so that a mistake is
    reported at once, and again before each token expires. No error repeats its result or the text of its error,
    because they may contain the token.

    Args:
        name: ``module:function``.
        secrets: hides the tokens in the texts of the client.

    Raises:
        InvalidOptionError: the function cannot be imported, or the name is not that of a function.
        TokenProviderError: the function raised an error, or did not return a valid token.
    """

    def __init__(self, name: str, secrets: ClientSecrets) -> None:
        check_token_provider(name)
        self._name, self._secrets = name, secrets
        self._function = _imported(name)
        self._first: tuple[Any, ...] | None = self._call()
        self.error: TokenProviderError | None = None

    def __call__(self, config: str) -> tuple[Any, ...]:
        """Return a token; the client calls this in a background thread.

        Args:
            config: the client option ``sasl.oauthbearer.config``, which is not used.
        """
        found, self._first = self._first, None
        try:
            found = found or self._call()
        except TokenProviderError as error:
            # The client reports only that an error was raised.
            self.error = error
            raise
        self.error = None
        return found

    def _call(self) -> tuple[Any, ...]:
        try:
            found = self._function()
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            raise TokenProviderError(
                f"{TOKEN_PROVIDER}={self._name!r} raised {type(error).__name__}",
                remedy="Correct the function. The text of its error is not repeated, because it may contain a token.",
            ) from None
        wrong = _what_is_wrong(found)
        if wrong:
            raise TokenProviderError(
                f"{TOKEN_PROVIDER}={self._name!r} returned {wrong}",
                remedy="Return (token, expiry), with the expiry in seconds since 1970; optionally also a principal "
                "and a mapping of extensions.",
            )
        token, expiry, *rest = found
        self._secrets.add(token, rest[1] if len(rest) > 1 else {})
        return (token, float(expiry), *rest)


def with_tokens(settings: Mapping[str, Scalar], secrets: ClientSecrets) -> dict[str, Any]:
    """Return the settings of one client of librdkafka, with the named token provider as its ``oauth_cb``.

    Raises:
        InvalidOptionError, TokenProviderError: see :class:`TokenProvider`.

    Example:
        >>> with_tokens({"security.protocol": "SASL_SSL"}, ClientSecrets({}))
        {'security.protocol': 'SASL_SSL'}
    """
    left = dict(settings)
    name = left.pop(TOKEN_PROVIDER, None)
    return left if name is None else {**left, "oauth_cb": TokenProvider(str(name), secrets)}


def _imported(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        missing = f" ({error.name} is missing)" if isinstance(error, ModuleNotFoundError) else ""
        raise InvalidOptionError(
            f"{TOKEN_PROVIDER}={name!r} cannot be imported: {type(error).__name__}{missing}",
            remedy="Install its module, or put it on the path, for the sensor, the run and the executors. The text of "
            "the error is not repeated, because it may contain a token.",
        ) from None
    if not callable(found):
        raise InvalidOptionError(
            f"{TOKEN_PROVIDER}={name!r} is a {type(found).__name__}", remedy="Name a function without arguments."
        )
    return found  # type: ignore[no-any-return]


def _what_is_wrong(found: object) -> str:
    """Describe an invalid result of the function by its types only, because any value may be the token."""
    if not isinstance(found, (tuple, list)) or not 2 <= len(found) <= 4:
        return f"a {type(found).__name__}, not a token and its expiry"
    defaults: tuple[Any, ...] = ("", {})
    token, expiry, principal, extensions = (*list(found), *defaults[len(found) - 2 :])
    if not isinstance(token, str) or not token or not is_plain_text(token):
        return f"a {type(token).__name__} that is empty or not a token"
    if not isinstance(expiry, (int, float)):
        return f"a {type(expiry).__name__} as expiry"
    left = expiry - time.time()
    if not 0 < left < MAX_TOKEN_LIFE_SECONDS:
        return f"a token that expires {left:.0f} s from now"
    is_plain = isinstance(principal, str) and _is_text_to_text(extensions)
    return "" if is_plain else f"a {type(principal).__name__} as principal, a {type(extensions).__name__} as extensions"


def _is_text_to_text(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)


def explain(error: KafkaError, *, what: str, said: str, reason: str = "") -> StreamAssetsError:
    """Map an error of the client to a :class:`StreamAssetsError`.

    Raise the result ``from None``: the client repeats the broker's text, and Dagster stores causes.

    Args:
        error: the error that the client reported.
        what: the action that failed, and the servers.
        said: the text of the error without values of options.
        reason: the client's error about its connection, which is more exact than "timed out".
    """
    said = f"{what}: {reason or said}"
    code = error.code()
    if code in _DENIED or "authentication" in reason.lower():
        return AccessDeniedError(said, remedy="Check security.protocol, the sasl.* options and the broker's ACLs.")
    if code in _MISSING:
        return StreamNotFoundError(said, remedy="Create the topic, or check its name and the ACLs.")
    if code in _SILENT:
        return BrokerUnavailableError(
            said, remedy="Check the address and that the broker runs, then run again; nothing was lost."
        )
    if code == KafkaError.UNKNOWN_MEMBER_ID:
        remedy = "Stop the group's other members; the next run sets its positions."
        return GroupActiveError(said, remedy=remedy, code=error.name())
    return BrokerError(said, remedy="Nothing was lost; run again.", code=error.name())


def is_undecodable(error: KafkaError) -> bool:
    """Return whether the client cannot decode a batch that it fetched; only valid for the errors of a consumer."""
    return error.code() in _UNDECODABLE


def is_lost(error: KafkaError) -> bool:
    """Return whether a commit was refused because the member has lost its shards."""
    return error.code() in _LOST


class ClientLog:
    """Logs the lines of a client, which may repeat a broker's text, without its secrets; pass it as ``logger``."""

    def __init__(self, secrets: ClientSecrets) -> None:
        self._secrets = secrets

    def log(self, level: int, form: str, *values: object) -> None:
        """Log a line; the client calls this."""
        if _log.isEnabledFor(level):
            _log.log(level, "%s", self._secrets.redacted(form % values))


class ConnectionReasons:
    """Keeps the errors of a client about its connections, without its secrets; pass it as ``error_cb``.

    Attributes:
        tokens: the token provider of the client, if any; the client itself reports only that it failed.
    """

    def __init__(self, secrets: ClientSecrets) -> None:
        self._secrets = secrets
        self._said: deque[str] = deque(maxlen=4)
        self._down_since: float | None = None
        self.tokens: TokenProvider | None = None

    def __call__(self, error: KafkaError) -> None:
        """Record an error; the client calls this."""
        said = self._secrets.redacted(error.str())
        _log.debug("kafka client: %s", said)
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._said.append(said)
        elif self._down_since is None:
            self._down_since = time.monotonic()

    @property
    def down_seconds(self) -> float:
        """Seconds since the client first reported that it can reach no broker; 0 if it did not."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    def __str__(self) -> str:
        if self.tokens is not None and self.tokens.error is not None:
            return str(self.tokens.error)
        return self._said[-1] if self._said else ""


def is_passing(error: KafkaError) -> bool:
    """Return whether a retry may succeed: a leader is being found, or the client calls the error retriable."""
    return error.code() in _PASSING or error.retriable()


def raise_refused(places: Iterable[TopicPartition]) -> None:
    """Raise the error of a partition that the client returned as part of an answer.

    Raises:
        KafkaException: the first error; an error that another member has the partition is raised only without others.
    """
    refused = sorted((place.error for place in places if place.error is not None), key=is_lost)
    if refused:
        raise KafkaException(refused[0])


def until_found(ask: Callable[[float], T], *, seconds: float) -> T:
    """Send a request, and retry it while a leader or coordinator is being found.

    Every request to a coordinator goes through here, because it may move, or still be loading, at any moment.

    Args:
        ask: send the request with the remaining seconds as timeout, and raise ``KafkaException`` without an answer.
        seconds: how long to retry.

    Raises:
        KafkaException: the last error.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask(max(RETRY_SECONDS, deadline - time.monotonic()))
        except KafkaException as error:
            if not is_passing(error.args[0]) or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def is_about_connection(error: KafkaError) -> bool:
    """Return whether the client's errors about its connections explain more than this error."""
    return error.code() in _SILENT
