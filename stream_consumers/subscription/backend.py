"""The operations that a subscription needs from a streaming server (eventbus-core's ``StreamBackend`` trait)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import StreamAssetsError
from stream_consumers.options import check_several
from stream_consumers.subscription.messages import EventMessage, FetchedEntry, GroupPosition

Published = str | StreamAssetsError
"""The id of a message that was published, or the error that kept it from being published."""


class StreamBackend(ClosesOnExit, ABC):
    """Streams of messages, and groups that share them. Threads may share a backend.

    Every method raises :class:`stream_consumers.errors.BrokerUnavailableError` if the server does not answer, and
    :class:`stream_consumers.errors.GroupRemovedError` if it needs a group that was removed: only :meth:`create_group`
    creates groups.

    A backend of your own needs five methods, as in eventbus-core: :meth:`create_group`, :meth:`publish`,
    :meth:`reclaim_idle`, :meth:`read_new` and :meth:`ack`. The others are provided on top of them; each says what a
    backend gains that has its own.

    Example:
        >>> from stream_consumers.subscription.memory_backend import MemoryBackend
        >>> backend: StreamBackend = MemoryBackend()
        >>> backend.publish("orders", EventMessage(b"{}"))
        '1-0'
        >>> backend.create_group("orders", "billing", "0").is_new
        True
        >>> [entry.id for entry in backend.read_new("orders", "billing", "me", 10, 0)]
        ['1-0']
        >>> backend.ack("orders", "billing", "1-0")
        1
    """

    @abstractmethod
    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        """Create a group, and its stream, unless they exist.

        Args:
            stream: the name of the stream.
            group: the name of the group.
            start: the id after which a new group starts: ``0`` delivers everything, ``$`` only what is published later.

        Returns:
            The position of the group. A group that exists keeps its position; the difference is returned and logged.
        """

    @abstractmethod
    def publish(self, stream: str, message: EventMessage) -> str:
        """Publish a message; returns its id.

        Raises:
            SizeLimitError: its payload is too large.
            FormatError: the codec cannot encode it.
        """

    def publish_batch(self, stream: str, messages: Sequence[EventMessage]) -> list[Published]:
        """Publish messages in order; returns a result for each. One that is refused does not stop the others."""
        check_several("messages", messages)
        results: list[Published] = []
        for message in messages:
            try:
                results.append(self.publish(stream, message))
            except StreamAssetsError as error:
                results.append(error)
        return results

    @abstractmethod
    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        """Take over entries that were idle for ``min_idle_seconds``, this consumer's own as well.

        Each of them counts as delivered once more. The search continues where the last one of this consumer ended.

        Args:
            stream: the name of the stream.
            group: the group that the entries are pending in.
            consumer: the consumer that gets them.
            min_idle_seconds: seconds since the last delivery, or the last :meth:`touch`.
            count: the most entries to take over, at least 1; none is claimed that is not returned.
        """

    @abstractmethod
    def read_new(
        self, stream: str, group: str, consumer: str, count: int, timeout_seconds: float
    ) -> list[FetchedEntry]:
        """Read entries that the group has not delivered to any consumer.

        Args:
            stream: the name of the stream.
            group: the name of the group.
            consumer: the consumer that gets them.
            count: the most entries to read, at least 1.
            timeout_seconds: how long to wait for an entry; 0 does not wait, and nothing waits for ever.
        """

    @abstractmethod
    def ack(self, stream: str, group: str, entry_id: str) -> int:
        """Acknowledge an entry; see :meth:`ack_many`."""

    def ack_many(self, stream: str, group: str, entry_ids: Sequence[str]) -> int:
        """Acknowledge entries: here one after the other, up to the first that fails; better in few round trips.

        Returns:
            The number of entries that were pending. Fewer than given is no error: others may have acknowledged them.

        Raises:
            StreamAssetsError: the entries may still be pending; they will be delivered again.
        """
        check_several("entry_ids", entry_ids)
        return sum(self.ack(stream, group, entry_id) for entry_id in entry_ids)

    def redeliver(self, stream: str, group: str, consumer: str, entry_id: str) -> FetchedEntry | None:
        """Deliver an entry once more to the consumer that holds it; ``None`` if it is not delivered now.

        Here it never is: an entry that is to be tried again stays pending, and comes with :meth:`reclaim_idle` once it
        was idle for ``claim_idle_seconds``. With a method of its own a backend retries after ``backoff_seconds``.
        """
        return None

    def touch(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Send a heartbeat: those of the entries that the consumer holds are not idle any more.

        This does not count as a delivery. Here it does nothing, so that a peer takes over what a handler works on for
        longer than ``claim_idle_seconds``: set that to more than a handler ever takes, or send the heartbeat.
        """
        return

    def forget_consumer(self, stream: str, group: str, consumer: str) -> bool:
        """Drop what is remembered of a consumer, and remove it from the group unless it holds entries.

        Here nothing is remembered, and nothing is removed.

        Returns:
            Whether it was removed.
        """
        return False

    def close(self) -> None:
        """Release what is open; nothing is, unless a backend says so."""
