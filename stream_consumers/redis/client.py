"""Clients of a Redis server or cluster: their options, raw replies, and their errors as StreamAssetsError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from stream_consumers.client_config import ClientConfig, Scalar
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    FormatError,
    InvalidOptionError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.options import check_timeout
from stream_consumers.redis.claim_name import ClaimPolicy
from stream_consumers.urls import StreamUrl

DEFAULT_PORT = 6379
CONNECT_SECONDS = 5.0
# What the client takes as numbers and truth values; a password of digits stays text.
_SECONDS = {"health_check_interval", "socket_connect_timeout", "socket_timeout"}
_NUMBERS = {"db", "max_connections", "protocol", "socket_read_size", *_SECONDS}
_TRUTHS = {"retry_on_timeout", "single_connection_client", "socket_keepalive", "ssl_check_hostname"}
_POLICY = ("min_idle_seconds", "max_deliveries")
_OWN = {"message_field", "cluster", *_POLICY}
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
_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "no permissions", "invalid username-password", "AUTH ")


def new_client(url: StreamUrl, options: Mapping[str, Scalar], *, reply_seconds: float, is_cluster: bool) -> Any:
    """A client that never sends a command twice: the first one may have been executed.

    Args:
        url: of the server.
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
        # Without certificates that are checked there is no name to check.
        "ssl_check_hostname": options.get("ssl_cert_reqs") != "none",
        **{name: _typed(name, value) for name, value in options.items() if name not in _OWN},
        "ssl": url.protocol == "rediss",
    }
    nodes = [_address(node) for node in url.nodes]
    try:
        if is_cluster:
            node: Any = ClusterNode
            made: Any = _Cluster(startup_nodes=[node(host, port) for host, port in nodes], **common)
        else:
            made = redis.Redis(host=nodes[0][0], port=nodes[0][1], **common)
    except RedisClusterException as error:
        # It is no RedisError: none of the nodes answered as a cluster does.
        raise explain(redis.ConnectionError(str(error)), what=f"connecting to {url}") from error
    except TypeError as error:
        raise InvalidOptionError(
            f"the Redis client refuses its options: {error}", remedy="Correct the client options."
        ) from error
    return _reply_as_it_is(made)


def _typed(name: str, value: Scalar) -> Scalar:
    """A client option of the command line or the environment is text, and the client wants a number."""
    if not isinstance(value, str):
        return value
    try:
        if name in _NUMBERS:
            return check_timeout(float(value), name=name) if name in _SECONDS else int(value)
        if name in _TRUTHS:
            return {"true": True, "false": False}[value.lower()]
    except (ValueError, KeyError) as error:
        wanted = "a number" if name in _NUMBERS else "true or false"
        raise InvalidOptionError(
            f"the client option {name}={value!r} is not {wanted}", remedy=f"Give {wanted}, or leave it out."
        ) from error
    return value


def check_redis_options(client: ClientConfig) -> None:
    """Refuse options that this project decides.

    Raises:
        InvalidOptionError: naming the option and the reason.
    """
    for name, reason in RESERVED.items():
        if name in client:
            raise InvalidOptionError(f"the client option {name!r} cannot be set: {reason}", remedy="Leave it out.")
    claim_policy(client)


def claim_policy(client: ClientConfig) -> ClaimPolicy:
    """The claim policy that the client options contain.

    Raises:
        InvalidOptionError: a value is no number, or out of range.
    """
    given = {name: str(client[name]) for name in _POLICY if name in client}
    try:
        kinds: dict[str, Any] = {"min_idle_seconds": float, "max_deliveries": int}
        numbers = {name: kinds[name](text) for name, text in given.items()}
    except ValueError as error:
        raise InvalidOptionError(
            f"{', '.join(f'{name}={text}' for name, text in given.items())}: not a number",
            remedy="Write it like min_idle_seconds=30 or max_deliveries=5.",
        ) from error
    return ClaimPolicy(**numbers)


def explain(error: redis.RedisError, *, what: str) -> StreamAssetsError:
    """Maps an error of the Redis client to a StreamAssetsError."""
    said = f"{what}: {error}"
    text = str(error)
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


def _address(node: str) -> tuple[str, int]:
    if node == ".":
        return "localhost", DEFAULT_PORT
    host, colon, port = node.rpartition(":")
    if not colon or not port.isdigit():
        return node.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port)


class _Cluster(RedisCluster):
    """A cluster whose nodes, those that join later as well, reply as :func:`_reply_as_it_is` says."""

    def get_redis_connection(self, node: Any) -> Any:
        """The client of one node."""
        return _reply_as_it_is(super().get_redis_connection(node))

    def determine_slot(self, *args: Any) -> Any:
        """The slot of a command; the client would ask a node for that of a read, and lose keys that are not UTF-8."""
        if args[0] in _READS:
            # On a cluster, one stream is read at a time: its key stands before its id, at the end.
            slot_of: Any = self.keyslot
            return slot_of(args[-2])
        return super().determine_slot(*args)


def _reply_as_it_is(client: Any) -> Any:
    """The client's own reading makes a dict of an entry, which loses names that occur twice."""
    for command in ("XRANGE", "XREAD", "XREADGROUP", "XCLAIM", "XAUTOCLAIM", "XREVRANGE"):
        client.set_response_callback(command, _as_it_is)
    return client


def _as_it_is(reply: Any, **options: Any) -> Any:
    return reply
