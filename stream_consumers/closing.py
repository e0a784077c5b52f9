"""Objects that are closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

Self = TypeVar("Self", bound="ClosesOnExit")


class ClosesOnExit:
    """A context manager that closes.

    Example:
        >>> class Door(ClosesOnExit):
        ...     def close(self):
        ...         print("closed")
        >>> with Door():
        ...     print("open")
        open
        closed
    """

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release what is open."""
