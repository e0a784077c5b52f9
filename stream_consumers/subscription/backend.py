"""What a subscription needs of a streaming server (eventbus-core's ``StreamBackend`` trait), and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stream_consumers.errors import StreamAssetsError
from stream_consumers.subscription.messages import EventMessage, FetchedEntry, GroupPosition

Published = str | StreamAssetsError
"""The id of a message that was published, or why it was not."""


class StreamBackend(Protocol):
    """Streams of messages, and groups that share them. Threads may share it.

    Every method raises :class:`stream_consumers.errors.BrokerUnavailableError` where the server does not answer, and,
    if it needs a group that is gone, :class:`stream_consumers.errors.GroupRemovedError`; a group is never made again
    behind anybody's back.

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

    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        """Make a group, and its stream, unless it is there.

        Args:
            stream: its name.
            group: its name.
            start: the id to start behind: ``0`` gives everything that is there, ``$`` only what comes.

        Returns:
            Where the group stands. One that was there is left where it is; what differs is told (and logged).
        """
        ...

    def publish(self, stream: str, message: EventMessage) -> str:
        """Publish a message; returns its id.

        Raises:
            SizeLimitError: its payload is too large.
            FormatError: the codec cannot encode it.
        """
        ...

    def publish_batch(self, stream: str, messages: Sequence[EventMessage]) -> list[Published]:
        """Publish messages in order; one result for each, in order. One that is refused does not stop the others."""
        ...

    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        """Take over entries that nobody has touched for so long, this consumer's own as well.

        Each counts as delivered once more. The search goes on where the last one of this consumer ended.

        Args:
            stream: where.
            group: whose.
            consumer: who gets them.
            min_idle_seconds: since the last delivery, or :meth:`touch`.
            count: the most to take; none is claimed that is not returned.
        """
        ...

    def read_new(self, stream: str, group: str, consumer: str, count: int, timeout: float) -> list[FetchedEntry]:
        """Entries that the group has not given to anybody.

        Args:
            stream: where.
            group: whose.
            consumer: who gets them.
            count: the most to read.
            timeout: seconds to wait for one; 0 does not wait, and nothing waits for ever.
        """
        ...

    def redeliver(self, stream: str, group: str, consumer: str, entry_id: str) -> FetchedEntry | None:
        """Deliver an entry once more to the consumer that holds it; ``None`` if it holds it no longer."""
        ...

    def touch(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """The heartbeat: those of the entries that the consumer holds are idle no more. No delivery is counted."""
        ...

    def ack(self, stream: str, group: str, entry_id: str) -> int:
        """See :meth:`ack_many`."""
        ...

    def ack_many(self, stream: str, group: str, entry_ids: Sequence[str]) -> int:
        """The group is done with these entries; sent in one round trip for each 1000.

        Returns:
            How many were pending. Fewer than given is no error: somebody else may have acknowledged them.

        Raises:
            StreamAssetsError: the entries may still be pending; they will be delivered again.
        """
        ...

    def forget_consumer(self, stream: str, group: str, consumer: str) -> bool:
        """Drop what is remembered of a consumer, and remove it from the group unless it holds entries.

        Returns:
            Whether it was removed.
        """
        ...

    def close(self) -> None:
        """Release what is open."""
        ...
