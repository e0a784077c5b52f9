"""The cursors of the sensors: JSON objects with a version."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from stream_consumers.errors import UnsupportedVersionError
from stream_consumers.versions import check_keys, check_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 1
Cursor = TypeVar("Cursor", bound="DataclassInstance")


def read_cursor(text: str | None, kind: type[Cursor]) -> Cursor:
    """Read a cursor.

    A cursor is no promise: one that is damaged, or of a release that knows more fields, counts as a new one.

    Args:
        text: the cursor.
        kind: a dataclass of which each field has a default.
    """
    try:
        document = json.loads(text or "{}")
        own = {name: value for name, value in document.items() if name != "v"}
        check_version(document.get("v"), what="the cursor", versions=[FORMAT])
        check_keys(own, what="the cursor", keys=[field.name for field in fields(kind)])
        return TypeAdapter(kind).validate_python(own)
    except (ValueError, AttributeError, RecursionError, UnsupportedVersionError):
        return kind()


def write_cursor(cursor: DataclassInstance) -> str:
    """The text that :func:`read_cursor` reads."""
    values: dict[str, Any] = asdict(cursor)
    return json.dumps({"v": FORMAT, **values})
