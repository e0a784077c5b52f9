"""Clients of a Redis server or cluster: their options, raw replies, and their errors as StreamAssetsError."""

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
from stream_consumers.options import check_count, check_range, check_timeout
from stream_consumers.urls import StreamUrl

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
CONNECT_SECONDS = 5.0
# What the client takes as numbers and truth values; a password of digits stays text.
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
# Before redis-py 6 a cluster drops this option in silence, and its nodes accept the certificate of any host.
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


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """When entries of another member are taken over, and how often one is tried.

    Args:
        min_idle_seconds: entries that were idle for this time are taken over; a member that is writing sends
            a heartbeat three times as often.
        max_deliveries: an entry that was in this number of batches whose process crashed becomes a dead letter; it is
            alone in the last of them. At least 2.

    Raises:
        InvalidOptionError: a value is out of range.

    Example:
        >>> [ClaimPolicy(max_deliveries=4).batch_limit(1000, deliveries=n) for n in (0, 1, 2, 3)]
        [1000, 1000, 32, 1]
    """

    min_idle_seconds: float = 30.0
    max_deliveries: int = 5

    def __post_init__(self) -> None:
        # A shorter idle time would take entries away from members that are at work.
        check_range("min_idle_seconds", self.min_idle_seconds, at_least=0.1)
        # Fewer deliveries would make dead letters of entries whose process was just killed.
        check_count("max_deliveries", self.max_deliveries, at_least=2)

    @property
    def min_idle_ms(self) -> int:
        """``min_idle_seconds`` in milliseconds."""
        return round(self.min_idle_seconds * 1000)

    def batch_limit(self, records: int, *, deliveries: int) -> int:
        """The most entries of one batch that were delivered this number of times: fewer each time, to find the bad one.

        Args:
            records: the most in any batch.
            deliveries: how often they were delivered.
        """
        left = self.max_deliveries - 1 - deliveries
        # Entries that were tried often enough are not decoded any more, so that they can do no harm.
        if left < 0:
            return records
        return max(1, round(records ** min(1.0, left / max(1, self.max_deliveries - 2)))) if left else 1


def new_client(url: StreamUrl, options: Mapping[str, Scalar], *, reply_seconds: float, is_cluster: bool) -> Any:
    """A client that never sends a command twice: the first one may have been executed.

    With ``sentinel_service`` the nodes of the URL are Sentinels, which are asked for the service's master at each new
    connection.

    Args:
        url: of the server, or of the Sentinels.
        options: with the secrets looked up.
        reply_seconds: how long to wait for a reply.
        is_cluster: whether the server is a cluster.

    Raises:
        InvalidOptionError: the client has no such option.
        BrokerUnavailableError: no node of the cluster answers, or the server is none.
    """
    common: dict[str, Any] = {
        "socket_connect_timeout": min(CONNECT_SECONDS, reply_seconds),
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": reply_seconds,
        **{name: _typed(name, value) for name, value in options.items() if name not in _OWN},
    }
    if url.protocol == "rediss":
        # Without certificates that are checked there is no name to check.
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
        # It is no RedisError: none of the nodes answered as a cluster does.
        away = redis.ConnectionError(str(error))
        raise explain(away, what=f"connecting to {url}", options=options) from None
    except TypeError as error:
        raise InvalidOptionError(
            f"the Redis client refuses its options: {redact_options(str(error), options)}",
            remedy="Correct the client options.",
        ) from None
    return _with_raw_replies(made)


def _master_of(
    service: str, nodes: list[tuple[str, int]], common: dict[str, Any], options: Mapping[str, Scalar]
) -> redis.Redis:
    """A client of the master that the Sentinels at ``nodes`` name."""
    own = {name: value for name, value in common.items() if name == "retry" or name.startswith(("socket_", "ssl"))}
    own |= {name.removeprefix("sentinel_"): options[name] for name in _SENTINEL if name in options}
    # The client has no types for it.
    sentinels: Any = Sentinel
    made: redis.Redis = sentinels(nodes, sentinel_kwargs=own, **common).master_for(service)
    # A connection checks its options when it is made, which is at the first command.
    pool: Any = made.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return made


def _typed(name: str, value: Scalar) -> Scalar:
    """A client option of the command line or the environment is text, and the client wants a number."""
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
    """Refuse options that this project decides.

    Raises:
        InvalidOptionError: naming the option and the reason.
    """
    for name, reason in RESERVED.items():
        if name in client:
            raise InvalidOptionError(f"the client option {name!r} cannot be set: {reason}", remedy="Leave it out.")
    if _SERVICE in client and "cluster" in client:
        raise InvalidOptionError(
            f"the client options {_SERVICE!r} and 'cluster' are at odds",
            remedy="A cluster has no Sentinels: choose one.",
        )
    alone = next((name for name in _SENTINEL if name in client and _SERVICE not in client), None)
    if alone is not None:
        raise InvalidOptionError(
            f"the client option {alone!r} is for Sentinels, and there is no {_SERVICE!r}",
            remedy=f"Set {_SERVICE}, or leave {alone} out.",
        )
    claim_policy(client)


def claim_policy(client: ClientConfig) -> ClaimPolicy:
    """The claim policy that the client options contain.

    Raises:
        InvalidOptionError: a value is no number, or out of range.
    """
    return ClaimPolicy(**{name: _typed(name, str(client[name])) for name in _POLICY if name in client})  # type: ignore[arg-type]


def explain(error: redis.RedisError, *, what: str, options: Mapping[str, Scalar]) -> StreamAssetsError:
    """Maps an error of the Redis client to a StreamAssetsError, which holds none of the client's options.

    It is to be raised ``from None``: the client and the server repeat passwords, and Dagster keeps causes.

    Args:
        error: what the client raised.
        what: was done.
        options: of the client, with the secrets looked up.
    """
    # A server repeats the words of a command that it does not know, and cuts them.
    text = str(error).partition(", with args beginning with")[0]
    # The client lists its Sentinels with all of their options.
    is_unnamed = isinstance(error, MasterNotFoundError)
    shown = "no Sentinel names a master of this service" if is_unnamed else redact_options(text, options)
    said = f"{what}: {shown}"
    if isinstance(error, redis.AuthenticationError) or any(sign in text for sign in _DENIED):
        return AccessDeniedError(said, remedy="Check the client options username and password, and the ACLs.")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return BrokerUnavailableError(
            said, remedy="Check the address and that the server runs; nothing was lost, run again."
        )
    if "UNCLAIMED" in text:
        return InvalidOptionError(
            f"{what}: the group is no longer in claim mode",
            remedy="Its mode was switched, or the consumer 'stream-assets:claimed' was removed from it; if so, bring "
            "it back with stream-assets switch --to load_balanced.",
        )
    if "no such key" in text or "requires the key to exist" in text:
        return StreamNotFoundError(said, remedy="Check the stream key.")
    if "WRONGTYPE" in text:
        return FormatError(said, remedy="The key holds something else than a stream.")
    return BrokerError(said, remedy="Nothing was lost; run again.")


def _address(node: str, default_port: int) -> tuple[str, int]:
    if node == ".":
        return "localhost", default_port
    host, colon, port = node.rpartition(":")
    if not colon or not port.isdigit():
        return node.strip("[]"), default_port
    return host.strip("[]"), int(port)


class _Cluster(RedisCluster):
    """A cluster whose nodes, those that join later as well, reply as :func:`_with_raw_replies` says."""

    def get_redis_connection(self, node: Any) -> Any:
        """The client of one node."""
        return _with_raw_replies(super().get_redis_connection(node))

    def determine_slot(self, *args: Any) -> Any:
        """The slot of a command; the client would ask a node for that of a read, and lose keys that are not UTF-8."""
        if args[0] in _READS:
            # On a cluster, one stream is read at a time: its key stands before its id, at the end.
            slot_of: Any = self.keyslot
            return slot_of(args[-2])
        return super().determine_slot(*args)


def _with_raw_replies(client: Any) -> Any:
    """The client's own reading makes a dict of an entry, which loses names that occur twice."""
    for command in ("XRANGE", "XREAD", "XREADGROUP", "XREVRANGE"):
        client.set_response_callback(command, _raw_reply)
    return client


def _raw_reply(reply: Any, **options: Any) -> Any:
    return reply
