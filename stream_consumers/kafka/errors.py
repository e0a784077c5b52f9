"""Maps Kafka's errors to this project's, and repeats requests while a leader or coordinator is being found."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from stream_consumers.client_config import without_values
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    GroupActiveError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.kafka.tokens import TokenProvider

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


def explain(error: KafkaError, *, what: str, reason: str = "") -> StreamAssetsError:
    """Maps an error of the client to a :class:`StreamAssetsError`.

    Args:
        error: as the client reported it.
        what: what failed, naming the servers.
        reason: what the client said of its connection, which is more exact than "timed out".
    """
    said = f"{what}: {reason or error.str()}"
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
        return GroupActiveError(said, remedy="Stop the group's other members; the next run sets its positions.")
    return BrokerError(said, remedy="Nothing was lost; run again.", code=error.name())


def is_lost(error: KafkaError) -> bool:
    """Whether a commit was refused because the member has lost what it commits."""
    return error.code() in _LOST


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
        said = without_values(error.str(), self._settings)
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
