"""A base class for objects that a ``with`` block closes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

Self = TypeVar("Self", bound="ClosesOnExit")


class ClosesOnExit:
    """A context manager that closes itself on exit.

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
        """Release open resources."""
