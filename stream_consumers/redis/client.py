"""Clients of a Redis server or cluster: options, raw replies, and mapping of errors to StreamAssetsError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from stream_consumers.client_config import ClientConfig, Scalar, redact_options
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    FormatError,
    InvalidOptionError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.library_logs import redact_logs
from stream_consumers.options import check_count, check_range, check_timeout
from stream_consumers.urls import StreamUrl

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
CONNECT_SECONDS = 5.0
# Options that are numbers or Booleans; other values stay text, such as a password of digits.
_SECONDS = {"min_idle_seconds", "health_check_interval", "socket_connect_timeout", "socket_timeout"}
_NUMBERS = {"db", "max_connections", "max_deliveries", "protocol", "socket_read_size", *_SECONDS}
_BOOLEANS = {"retry_on_timeout", "single_connection_client", "socket_keepalive", "ssl_check_hostname"}
_POLICY = ("min_idle_seconds", "max_deliveries")
# The service that Sentinels watch, and the credentials of the Sentinels themselves.
_SERVICE = "sentinel_service"
_SENTINEL = ("sentinel_username", "sentinel_password")
_OWN = {"message_field", "cluster", *_POLICY, _SERVICE, *_SENTINEL}
RESERVED = {
    "host": "the URL says which server",
    "port": "the URL says which port",
    "ssl": "the protocol rediss:// says so",
    "decode_responses": "payloads are bytes",
}
_READS = ("XREAD", "XREADGROUP")
# Before redis-py 6, a cluster client silently drops this option and accepts certificates for any host.
_cluster_module: Any = redis.cluster
_cluster_module.REDIS_ALLOWED_KEYS = (*_cluster_module.REDIS_ALLOWED_KEYS, "ssl_check_hostname")
_DENIED = (
    "NOAUTH",
    "WRONGPASS",
    "NOPERM",
    "no permissions",
    "invalid username-password",
    "AUTH ",
    "AuthenticationError",
)
# The options of all clients of this process, because a log record does not name its client.
_logged_options: dict[str, Scalar] = {}


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """When entries of another member are taken over, and how often an entry is retried.

    Args:
        min_idle_seconds: the idle time in seconds after which entries are taken over; a member that is writing sends
            three heartbeats in this time.
        max_deliveries: an entry that was in this many batches whose process crashed becomes a dead letter; the last of
            these batches contains only this entry. At least 2.

    Raises:
        InvalidOptionError: a value is out of range.

    Example:
        >>> [ClaimPolicy(max_deliveries=4).batch_limit(1000, deliveries=n) for n in (0, 1, 2, 3)]
        [1000, 1000, 32, 1]
    """

    min_idle_seconds: float = 30.0
    max_deliveries: int = 5

    def __post_init__(self) -> None:
        # A shorter idle time would take entries from members that are still writing.
        check_range("min_idle_seconds", self.min_idle_seconds, at_least=0.1)
        # With fewer deliveries, a single kill of a process would turn its entries into dead letters.
        check_count("max_deliveries", self.max_deliveries, at_least=2)

    @property
    def min_idle_ms(self) -> int:
        """``min_idle_seconds`` in milliseconds."""
        return round(self.min_idle_seconds * 1000)

    def batch_limit(self, records: int, *, deliveries: int) -> int:
        """Return the limit for a batch of entries with this many deliveries; it shrinks to isolate a bad entry.

        Args:
            records: the limit of any batch.
            deliveries: the number of deliveries of its entries.
        """
        left = self.max_deliveries - 1 - deliveries
        # Entries that exhausted their deliveries become dead letters without decoding, so they can do no harm.
        if left < 0:
            return records
        return max(1, round(records ** min(1.0, left / max(1, self.max_deliveries - 2)))) if left else 1


def new_client(url: StreamUrl, options: Mapping[str, Scalar], *, reply_seconds: float, is_cluster: bool) -> Any:
    """Create a client that never resends a command, because the first one may have been executed.

    With ``sentinel_service``, the nodes of the URL are Sentinels; each new connection asks them for the master of the
    service.

    Args:
        url: the URL of the server or of the Sentinels.
        options: the client options, with the secrets looked up.
        reply_seconds: how long to wait for a reply.
        is_cluster: whether the server is a cluster.

    Raises:
        InvalidOptionError: the client does not have an option.
        BrokerUnavailableError: no node of the cluster answers, or the server is not a cluster.
    """
    key = hash(frozenset(options.items()))
    _logged_options.update({f"{key} {name}": value for name, value in options.items()})
    redact_logs(_logged_options.copy)
    common: dict[str, Any] = {
        "socket_connect_timeout": min(CONNECT_SECONDS, reply_seconds),
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": reply_seconds,
        **{name: _typed(name, value) for name, value in options.items() if name not in _OWN},
    }
    if url.protocol == "rediss":
        # Without a check of certificates, host names cannot be checked.
        common = {"ssl_check_hostname": options.get("ssl_cert_reqs") != "none", **common, "ssl": True}
    service = options.get(_SERVICE)
    nodes = [_address(node, DEFAULT_PORT if service is None else SENTINEL_PORT) for node in url.nodes]
    try:
        if is_cluster:
            node: Any = ClusterNode
            made: Any = _Cluster(startup_nodes=[node(host, port) for host, port in nodes], **common)
        elif service is not None:
            made = _master_of(str(service), nodes, common, options)
        else:
            made = redis.Redis(host=nodes[0][0], port=nodes[0][1], **common)
    except RedisClusterException as error:
        # RedisClusterException is not a RedisError: no node answered as a cluster.
        away = redis.ConnectionError(str(error))
        raise explain(away, what=f"connecting to {url}", options=options) from None
    except TypeError as error:
        raise InvalidOptionError(
            f"the Redis client rejects its options: {redact_options(str(error), options)}",
            remedy="Correct the client options.",
        ) from None
    return _with_raw_replies(made)


def _master_of(
    service: str, nodes: list[tuple[str, int]], common: dict[str, Any], options: Mapping[str, Scalar]
) -> redis.Redis:
    """Create a client of the master that the Sentinels at ``nodes`` report."""
    own = {name: value for name, value in common.items() if name == "retry" or name.startswith(("socket_", "ssl"))}
    own |= {name.removeprefix("sentinel_"): options[name] for name in _SENTINEL if name in options}
    # redis-py has no type annotations for Sentinel.
    sentinels: Any = Sentinel
    made: redis.Redis = sentinels(nodes, sentinel_kwargs=own, **common).master_for(service)
    # Create a connection now to check the options; otherwise that happens at the first command.
    pool: Any = made.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return made


def _typed(name: str, value: Scalar) -> Scalar:
    """Convert a client option from the command line or the environment, which is text, to its type."""
    if not isinstance(value, str):
        return value
    try:
        if name in _NUMBERS:
            return check_timeout(float(value), name=name) if name in _SECONDS else int(value)
        if name in _BOOLEANS:
            return {"true": True, "false": False}[value.lower()]
    except (ValueError, KeyError):
        wanted = "a number" if name in _NUMBERS else "true or false"
        raise InvalidOptionError(
            f"the client option {name!r} is not {wanted}", remedy=f"Give {wanted}, or leave it out."
        ) from None
    return value


def check_redis_options(client: ClientConfig) -> None:
    """Raise if reserved or conflicting client options are set.

    Raises:
        InvalidOptionError: the options cannot be used; the error gives the reason.
    """
    for name, reason in RESERVED.items():
        if name in client:
            raise InvalidOptionError(f"the client option {name!r} cannot be set: {reason}", remedy="Leave it out.")
    if _SERVICE in client and "cluster" in client:
        raise InvalidOptionError(
            f"the client options {_SERVICE!r} and 'cluster' exclude each other",
            remedy="Remove one of them: a cluster has no Sentinels.",
        )
    alone = next((name for name in _SENTINEL if name in client and _SERVICE not in client), None)
    if alone is not None:
        raise InvalidOptionError(
            f"the client option {alone!r} is for Sentinels, but {_SERVICE!r} is not set",
            remedy=f"Set {_SERVICE}, or leave {alone} out.",
        )
    claim_policy(client)


def claim_policy(client: ClientConfig) -> ClaimPolicy:
    """Return the claim policy in the client options.

    Raises:
        InvalidOptionError: a value is not a number, or is out of range.
    """
    return ClaimPolicy(**{name: _typed(name, str(client[name])) for name in _POLICY if name in client})  # type: ignore[arg-type]


def explain(error: redis.RedisError, *, what: str, options: Mapping[str, Scalar]) -> StreamAssetsError:
    """Map an error of the Redis client to a StreamAssetsError without secret client options.

    Raise the result ``from None``: clients and servers repeat passwords in errors, and Dagster stores causes.

    Args:
        error: the error of the client.
        what: the operation.
        options: the client options, with the secrets looked up.
    """
    # A server repeats the words of an unknown command, and truncates them.
    text = str(error).partition(", with args beginning with")[0]
    # The error of the client lists the Sentinels with all their options.
    is_unnamed = isinstance(error, MasterNotFoundError)
    shown = "no Sentinel reports a master of this service" if is_unnamed else redact_options(text, options)
    said = f"{what}: {shown}"
    if isinstance(error, redis.AuthenticationError) or any(sign in text for sign in _DENIED):
        return AccessDeniedError(said, remedy="Check the client options username and password, and the ACLs.")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return BrokerUnavailableError(
            said, remedy="Check the address and that the server runs. No data was lost; run again."
        )
    if "UNCLAIMED" in text:
        return InvalidOptionError(
            f"{what}: the group is no longer in claim mode",
            remedy="Its mode was switched, or the consumer 'stream-assets:claimed' was removed. In the latter case, "
            "restore it with stream-assets switch --to load_balanced.",
        )
    if "no such key" in text or "requires the key to exist" in text:
        return StreamNotFoundError(said, remedy="Check the stream key.")
    if "WRONGTYPE" in text:
        return FormatError(said, remedy="The key does not hold a stream; use another key.")
    return BrokerError(said, remedy="No data was lost; run again.")


def _address(node: str, default_port: int) -> tuple[str, int]:
    if node == ".":
        return "localhost", default_port
    host, colon, port = node.rpartition(":")
    if not colon or not port.isdigit():
        return node.strip("[]"), default_port
    return host.strip("[]"), int(port)


class _Cluster(RedisCluster):
    """A cluster client with raw replies from all nodes, including later ones; see :func:`_with_raw_replies`."""

    # Before version 6, redis-py does not look at its retries here, and sends a command up to four times.
    cluster_error_retry_attempts = property(lambda _: 0, lambda _, __: None)

    def get_redis_connection(self, node: Any) -> Any:
        """Return the client of one node."""
        return _with_raw_replies(super().get_redis_connection(node))

    def determine_slot(self, *args: Any) -> Any:
        """Return the slot of a command; for a read, redis-py would query a node, and damage keys that are not UTF-8."""
        if args[0] in _READS:
            # On a cluster, a read has one stream: the command ends with its key and its id.
            slot_of: Any = self.keyslot
            return slot_of(args[-2])
        return super().determine_slot(*args)


def _with_raw_replies(client: Any) -> Any:
    """Disable the parsing of entries: redis-py converts them to dicts, which lose repeated names."""
    for command in ("XRANGE", "XREAD", "XREADGROUP", "XREVRANGE"):
        client.set_response_callback(command, _raw_reply)
    return client


def _raw_reply(reply: Any, **options: Any) -> Any:
    return reply
