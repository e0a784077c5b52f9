"""What was made of schemas, and which schemas were refused: kept by each process up to a size."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

from stream_consumers.errors import SchemaMismatchError, StreamAssetsError

MOST_KEPT = 8 << 20
"""The characters of schemas of which each function keeps what it made; a character takes up to 30 bytes then."""
ENTRY_CHARACTERS = 1000
"""What each schema counts for besides its text."""

Made = TypeVar("Made")
Error = TypeVar("Error", bound=StreamAssetsError)


def kept_by_size(weigh: Callable[[Any], int]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Keep what a function makes of schemas, and that it refuses one, up to :data:`MOST_KEPT` characters.

    Messages name schemas without end, and one can be thousands of times as large as another one. What was used least
    lately is dropped first.

    Args:
        weigh: what a result takes besides the ``characters`` of the arguments, in characters of a schema.

    Example:
        >>> @kept_by_size(len)
        ... def spelled(text):
        ...     print("spelling")
        ...     return text.split()
        >>> spelled("a b") is spelled("a b")
        spelling
        True
    """

    def decorate(make: Callable[..., Made]) -> Callable[..., Made]:
        kept: dict[tuple[Hashable, ...], tuple[Made | SchemaMismatchError, int]] = {}
        lock = threading.Lock()

        @wraps(make)
        def found(*schemas: Any) -> Made:
            with lock:
                entry = kept.pop(schemas, None)
                if entry is not None:
                    # The last entry is the one that was used last.
                    kept[schemas] = entry
            if entry is None:
                weight = ENTRY_CHARACTERS + sum(getattr(schema, "characters", 0) for schema in schemas)
                try:
                    made: Made | SchemaMismatchError = make(*schemas)
                    weight += weigh(made)
                except SchemaMismatchError as error:
                    made = copied(error)
                entry = made, weight
                with lock:
                    kept[schemas] = entry
                    while len(kept) > 1 and sum(one for _, one in kept.values()) > MOST_KEPT:
                        del kept[next(iter(kept))]
            if isinstance(entry[0], SchemaMismatchError):
                raise copied(entry[0])
            return entry[0]

        return found

    return decorate


def copied(error: Error) -> Error:
    """The same error without the frames that it was raised in, which hold the block that was being decoded."""
    return copy.copy(error)
