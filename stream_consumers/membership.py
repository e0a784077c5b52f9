"""Members of a group that share its shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stream_consumers.messages import Shard


class Membership(Protocol):
    """A live member of a group. Close it when done, so that others take its shards at once; it is a context manager."""

    def shards(self) -> frozenset[Shard]:
        """The shards that are this member's now; they come and go as members do.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the membership failed.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Wait for the first assignment; whether it came. It may be empty where there are more members than shards."""
        ...

    def commit(self, positions: Mapping[Shard, int], *, mark: str = "") -> bool:
        """Tell the broker how far the shards are; ``False`` if it refused, since somebody else has them by now.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: as the broker says.
        """
        ...

    def close(self) -> None:
        """Leave the group."""
        ...

    def __enter__(self) -> Membership: ...

    def __exit__(self, *_: object) -> None: ...
