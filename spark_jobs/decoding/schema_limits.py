"""Limits for schemas, which are hostile input: a message chooses its schema by an id.

The weight of a schema is limited, with each type as often as it is referred to. The result of parsing a schema, or its
rejection, is cached up to a size. Any error of a library for a schema becomes a :class:`SchemaMismatchError`, and so a
dead letter instead of a failed run.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from spark_jobs.decoding.decoders import reason
from stream_consumers.errors import SchemaMismatchError, SchemaRegistryError, StreamAssetsError

MAX_WEIGHT = 1 << 20
"""The largest weight of a schema: its text in characters, with each type as often as it is referred to."""
TYPE_WEIGHT = 100
"""The weight of each type besides its text, in characters."""
MAX_TYPE_DEPTH = 100
"""The most nested types of a schema."""
MAX_JSON_DEPTH = 256
"""The most levels of the JSON of a schema."""
MAX_CACHED_CHARACTERS = 8 << 20
"""The size of each cache in characters of schemas, each of which needs up to 30 bytes of memory."""
ENTRY_CHARACTERS = 1000
"""The weight of each cache entry besides the text of its schemas, in characters."""

Made = TypeVar("Made")
Error = TypeVar("Error", bound=StreamAssetsError)


def cached_by_size(weigh: Callable[[Any], int]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Cache the results of a function of schemas, or its rejections, up to :data:`MAX_CACHED_CHARACTERS` characters.

    The cache limits size, not entries, because messages may name any number of schemas, and one can be thousands of
    times as large as another. The least recently used entry is dropped first.

    Args:
        weigh: the weight of a result besides the ``characters`` of the arguments, in characters of a schema.

    Example:
        >>> @cached_by_size(len)
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
                    # The dictionary is in the order of last use.
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
                    while len(kept) > 1 and sum(one for _, one in kept.values()) > MAX_CACHED_CHARACTERS:
                        del kept[next(iter(kept))]
            if isinstance(entry[0], SchemaMismatchError):
                raise copied(entry[0])
            return entry[0]

        return found

    return decorate


def copied(error: Error) -> Error:
    """Copy an error without its traceback, whose frames keep the block in memory that was being decoded."""
    return copy.copy(error)


def check_weight(form: str, weight: int, depth: int) -> None:
    """Check that a schema is not too large when all its references are followed, even if its text is short.

    Args:
        form: the format of the schema, for errors.
        weight: the weight of all its types, each as often as it is referred to; at most :data:`MAX_WEIGHT`.
        depth: how many types are nested; at most :data:`MAX_TYPE_DEPTH`.

    Raises:
        SchemaMismatchError: the schema is too large.
    """
    if weight > MAX_WEIGHT or depth > MAX_TYPE_DEPTH:
        raise SchemaMismatchError(
            f"the {form} schema has more than {MAX_WEIGHT // TYPE_WEIGHT} types, more than {MAX_WEIGHT} characters "
            f"with each type as often as it is referred to, or more than {MAX_TYPE_DEPTH} types within each other",
            remedy="Use a smaller one: the schema that payloads are read with does not need all fields.",
        )


class WeightBudget:
    """Adds up the weight of a schema while it is read. Enter it for each type, around the types nested in it.

    Args:
        form: the format of the schema, for errors.

    Raises:
        SchemaMismatchError: on entry, see :func:`check_weight`.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._weight = 0
        self._depth = 0

    def spend(self, weight: int) -> None:
        """Add the weight of anything else that is read.

        Raises:
            SchemaMismatchError: see :func:`check_weight`.
        """
        self._weight += weight
        check_weight(self._form, self._weight, self._depth)

    def __enter__(self) -> None:
        self._depth += 1
        self.spend(TYPE_WEIGHT)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1


@contextmanager
def schema_use(form: str) -> Iterator[None]:
    """Convert any error of our code or a library for a schema to a :class:`SchemaMismatchError`.

    A message chooses its schema by an id, so that any other error would fail the run on each retry.

    Args:
        form: the format of the schema, for the error.

    Raises:
        SchemaMismatchError: the schema cannot be used; it has the reason.
        SchemaRegistryError: the operating system refused a file or a process, and may not the next time.
        MemoryError: unchanged, because it depends on the rest of the block.

    Example:
        >>> with schema_use("Avro"):
        ...     {}["name"]
        Traceback (most recent call last):
        stream_consumers.errors.SchemaMismatchError: the Avro schema cannot be used: KeyError: 'name'. Correct it, or \
read with another schema.
    """
    try:
        yield
    except (StreamAssetsError, MemoryError):
        raise
    except Exception as error:
        # An error of the operating system has a number; that of a limit for the schema has none.
        if isinstance(error, OSError) and error.errno is not None:
            raise SchemaRegistryError(
                f"this machine cannot read the {form} schema for now: {error.strerror}",
                remedy="Check the free space of its disk and the limit of open files; nothing was lost, run again.",
            ) from error
        why = f"{type(error).__name__}: {reason(error)}"
        raise SchemaMismatchError(
            f"the {form} schema cannot be used: {why}", remedy="Correct it, or read with another schema."
        ) from error


def schema_document(text: str) -> Any:
    """Parse a schema that is JSON.

    Raises:
        ValueError: it is not JSON, or is nested deeper than :data:`MAX_JSON_DEPTH`.

    Example:
        >>> schema_document('{"type": "long"}')
        {'type': 'long'}
    """
    document = json.loads(text)
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        level = parts_of_document(level)
        if not level:
            return document
    raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def parts_of_document(level: list[Any]) -> list[Any]:
    """Return everything directly within some parts of a document."""
    found: list[Any] = []
    for one in level:
        found += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return found
