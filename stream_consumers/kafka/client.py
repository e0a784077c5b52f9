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
from stream_consumers.urls import StreamUrl

DEFAULT_PORT = 9092
TOKEN_PROVIDER = "oauth_token_provider"  # noqa: S105 - the name of an option
# What this project decides, and why a user may not.
RESERVED = {
    "bootstrap.servers": "the URL says which servers",
    "group.id": "the group is an option of its own",
    "enable.partition.eof": "a range ends there, whatever is missing in it",
    "oauth_cb": f"a function does not reach executors; name it, like {TOKEN_PROVIDER}='module:function'",
}
FIXED: Mapping[str, Scalar] = {"enable.auto.commit": False, "auto.offset.reset": "error"}
_WHY_FIXED = {
    "enable.auto.commit": "it would commit what is not in the table yet",
    "auto.offset.reset": "it would silently skip or repeat messages; use start or reset",
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
# Ten years; milliseconds instead of seconds are beyond it.
LONGEST_LIFE_SECONDS = 10 * 365 * 86400.0
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
# Right after a topic was made, or while a leader moves.
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
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
# The answers to a commit of a member that has lost what it commits.
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
    """Refuse settings that this project decides; nothing is looked up.

    Raises:
        InvalidOptionError: naming the setting and the reason.
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
    """Refuse settings that only a consumer knows: a producer would silently ignore them.

    Raises:
        InvalidOptionError: naming the settings.

    Example:
        >>> check_producer_options({"linger.ms": 5, "session.timeout.ms": 6000})
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: a producer has no client option 'session.timeout.ms': only \
consumers have. Leave it out here.
    """
    consumers = sorted(filter(_is_consumer_only, client))
    if consumers:
        raise InvalidOptionError(
            f"a producer has no client option {', '.join(map(repr, consumers))}: only consumers have",
            remedy="Leave it out here.",
        )


def producer_options(client: ClientConfig | None) -> ClientConfig:
    """A configuration for consumers and producers, without what only consumers know.

    Example:
        >>> producer_options({"linger.ms": 5, "session.timeout.ms": 6000})
        {'linger.ms': 5}
    """
    return {name: value for name, value in (client or {}).items() if not _is_consumer_only(name)}


def client_settings(url: StreamUrl, client: ClientConfig | None) -> dict[str, Scalar]:
    """The settings of every client of this cluster, secrets looked up.

    Args:
        url: its nodes are the bootstrap servers, port 9092 by default.
        client: any configuration of librdkafka, like ``security.protocol`` or ``isolation.level``.

    Raises:
        InvalidUrlError: credentials in the URL.
        InvalidOptionError: a setting that this project decides, or a variable that is not set.

    Example:
        >>> client_settings(StreamUrl.parse("kafka://a,b:1/orders"), None)["bootstrap.servers"]
        'a:9092,b:1'
    """
    url.check_servers()
    check_client_options(client or {})
    given = resolve(client or {})
    servers = ",".join(_with_port(node) for node in url.nodes if node != ".") or f"localhost:{DEFAULT_PORT}"
    # What the client has to say reaches the reader in our errors; its own log lines come on top only if asked for.
    return {"log_level": 2, **given, **FIXED, "bootstrap.servers": servers}


def _with_port(node: str) -> str:
    is_bare = ":" not in node or node.endswith("]")
    return f"{node}:{DEFAULT_PORT}" if is_bare else node


def isolation(settings: Mapping[str, Scalar]) -> IsolationLevel:
    """The isolation level of the settings; ``read_committed`` by default, as in librdkafka.

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


@contextmanager
def options_explained(settings: Mapping[str, Scalar]) -> Iterator[None]:
    """What the client says of its options when it is made, without their values."""
    try:
        yield
    except KafkaException as error:
        said = redact_options(error.args[0].str(), settings)
        raise InvalidOptionError(
            f"the Kafka client refuses its options: {said}", remedy="Correct the client options."
        ) from None


def check_token_provider(name: object) -> None:
    """Refuse what does not name a function; nothing is imported.

    Raises:
        InvalidOptionError: it is not written as ``module:function``.

    Example:
        >>> check_token_provider("aws_tokens:token")
    """
    module, colon, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InvalidOptionError(
            f"{TOKEN_PROVIDER}={name!r} names no function", remedy="Write module:function, like aws_tokens:token."
        )


class TokenProvider:
    """Calls the function that an option names; it is the ``oauth_cb`` of one client of librdkafka.

    The function is called without arguments. It returns a token, and when the token expires, in seconds since 1970;
    optionally also the principal, and a mapping of SASL extensions. It is called once when the client is made, so
    that what is wrong with it is an error at once, and then before a token expires. No error repeats what it returned,
    or the text of what it raised, because that may contain the token.

    Args:
        name: ``module:function``.

    Raises:
        InvalidOptionError: it cannot be imported, or is no function.
        TokenProviderError: it raised, or returned something else than a token that is still valid.
    """

    def __init__(self, name: str) -> None:
        check_token_provider(name)
        self._name = name
        self._function = _imported(name)
        self._first: tuple[Any, ...] | None = self._call()
        self.error: TokenProviderError | None = None

    def __call__(self, config: str) -> tuple[Any, ...]:
        """Called by the client, in a thread of its own.

        Args:
            config: the client option ``sasl.oauthbearer.config``, which is not used.
        """
        found, self._first = self._first, None
        try:
            found = found or self._call()
        except TokenProviderError as error:
            # The client reports only that something was raised.
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
                remedy="Correct the function, or what it asks; its message is not repeated, as it may contain a token.",
            ) from None
        wrong = _what_is_wrong(found)
        if wrong:
            raise TokenProviderError(
                f"{TOKEN_PROVIDER}={self._name!r} returned {wrong}",
                remedy="Return (token, expiry), with the expiry in seconds since 1970; optionally also a principal "
                "and a mapping of extensions.",
            )
        token, expiry, *rest = found
        return (token, float(expiry), *rest)


def with_tokens(settings: Mapping[str, Scalar]) -> dict[str, Any]:
    """The settings of one client of librdkafka: the option that names a token provider becomes its ``oauth_cb``.

    Raises:
        InvalidOptionError, TokenProviderError: as :class:`TokenProvider` says.

    Example:
        >>> with_tokens({"security.protocol": "SASL_SSL"})
        {'security.protocol': 'SASL_SSL'}
    """
    left = dict(settings)
    name = left.pop(TOKEN_PROVIDER, None)
    return left if name is None else {**left, "oauth_cb": TokenProvider(str(name))}


def _imported(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        missing = f" ({error.name} is missing)" if isinstance(error, ModuleNotFoundError) else ""
        raise InvalidOptionError(
            f"{TOKEN_PROVIDER}={name!r} cannot be imported: {type(error).__name__}{missing}",
            remedy="Install its module, or put it on the path, where the sensor, the run and the executors are; what "
            "it raised is not repeated, as it may contain a token.",
        ) from None
    if not callable(found):
        raise InvalidOptionError(
            f"{TOKEN_PROVIDER}={name!r} is a {type(found).__name__}", remedy="Name a function without arguments."
        )
    return found  # type: ignore[no-any-return]


def _what_is_wrong(found: object) -> str:
    """What the function returned instead of a token; types only, since any of the values may be the token."""
    if not isinstance(found, (tuple, list)) or not 2 <= len(found) <= 4:
        return f"a {type(found).__name__}, not a token and its expiry"
    defaults: tuple[Any, ...] = ("", {})
    token, expiry, principal, extensions = (*list(found), *defaults[len(found) - 2 :])
    if not isinstance(token, str) or not token or not is_plain_text(token):
        return f"a {type(token).__name__} that is no token, or is empty"
    if not isinstance(expiry, (int, float)):
        return f"a {type(expiry).__name__} as expiry"
    left = expiry - time.time()
    if not 0 < left < LONGEST_LIFE_SECONDS:
        return f"a token that expires {left:.0f} s from now"
    is_plain = isinstance(principal, str) and _is_text_to_text(extensions)
    return "" if is_plain else f"a {type(principal).__name__} as principal, a {type(extensions).__name__} as extensions"


def _is_text_to_text(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)


def explain(error: KafkaError, *, what: str, said: str, reason: str = "") -> StreamAssetsError:
    """Maps an error of the client to a :class:`StreamAssetsError`.

    It is to be raised ``from None``: the client repeats what the broker says, and Dagster keeps causes.

    Args:
        error: as the client reported it.
        what: what failed, naming the servers.
        said: the text of the error, without values of options.
        reason: what the client said of its connection, which is more exact than "timed out".
    """
    said = f"{what}: {reason or said}"
    code = error.code()
    if code in _DENIED or "authentication" in reason.lower():
        return AccessDeniedError(said, remedy="Check security.protocol, the sasl.* options and the broker's ACLs.")
    if code in _MISSING:
        return StreamNotFoundError(said, remedy="Create the topic, or check its name and the ACLs.")
    if code in _SILENT:
        return BrokerUnavailableError(
            said, remedy="Check the address and that the broker runs; nothing was lost, run again."
        )
    if code == KafkaError.UNKNOWN_MEMBER_ID:
        remedy = "Stop the group's other members; the next run sets its positions."
        return GroupActiveError(said, remedy=remedy, code=error.name())
    return BrokerError(said, remedy="Nothing was lost; run again.", code=error.name())


def is_lost(error: KafkaError) -> bool:
    """Whether a commit was refused because the member has lost what it commits."""
    return error.code() in _LOST


class ClientLog:
    """Logs the lines of a client, which repeat what a broker says, without its options; give it as ``logger``.

    Args:
        settings: of the client, with the secrets looked up.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings

    def log(self, level: int, form: str, *values: object) -> None:
        """Called by the client."""
        if _log.isEnabledFor(level):
            _log.log(level, "%s", redact_options(form % values, self._settings))


class ConnectionReasons:
    """Remembers what a client says about its connections, without its options; give it as ``error_cb``.

    Args:
        settings: of the client, with the secrets looked up.

    Attributes:
        tokens: what makes tokens for the client, if anything does: the client says only that it has failed.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._said: deque[str] = deque(maxlen=4)
        self._down_since: float | None = None
        self.tokens: TokenProvider | None = None

    def __call__(self, error: KafkaError) -> None:
        """Called by the client."""
        said = redact_options(error.str(), self._settings)
        _log.debug("kafka client: %s", said)
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._said.append(said)
        elif self._down_since is None:
            self._down_since = time.monotonic()

    @property
    def down_seconds(self) -> float:
        """How long ago the client said for the first time that no broker can be reached; 0 if it did not."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    def __str__(self) -> str:
        if self.tokens is not None and self.tokens.error is not None:
            return str(self.tokens.error)
        return self._said[-1] if self._said else ""


def is_passing(error: KafkaError) -> bool:
    """Whether it is gone as soon as a leader or coordinator was found, or the client says that asking again helps."""
    return error.code() in _PASSING or error.retriable()


def raise_refused(places: Iterable[TopicPartition]) -> None:
    """Raise what a request was refused with for single partitions: the client reports it as an answer.

    Raises:
        KafkaException: the first error; one that does not mean that another member has the partition comes first.
    """
    refused = sorted((place.error for place in places if place.error is not None), key=is_lost)
    if refused:
        raise KafkaException(refused[0])


def until_found(ask: Callable[[float], T], *, seconds: float) -> T:
    """The answer; it is asked for again while a leader or coordinator is being found.

    Every request that a coordinator answers goes through here: a coordinator may move, or still be loading, at any
    moment.

    Args:
        ask: gets the seconds that are left, and raises ``KafkaException`` where there is no answer.
        seconds: how long that may take.

    Raises:
        KafkaException: what was raised last.
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
    """Whether the client's words about its connections explain more than the error does."""
    return error.code() in _SILENT
