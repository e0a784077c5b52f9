"""The cursors of the sensors: JSON objects with a version."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from stream_consumers.errors import UnsupportedVersionError
from stream_consumers.versions import check_keys, check_version

FORMAT = 1


def read_cursor(text: str | None, *, keys: Collection[str]) -> Mapping[str, Any]:
    """Read the fields of a cursor.

    A cursor is no promise: one that is damaged, or of a release that knows more fields, counts as none.

    Args:
        text: the cursor.
        keys: the fields of this release.

    Example:
        >>> read_cursor('{"v": 1, "dead": 3}', keys=["dead"]), read_cursor('{"v": 2, "dead": 3}', keys=["dead"])
        ({'dead': 3}, {})
    """
    try:
        document = json.loads(text or "{}")
        fields = {name: value for name, value in document.items() if name != "v"}
        check_version(document.get("v"), what="the cursor", versions=[FORMAT])
        check_keys(fields, what="the cursor", keys=keys)
    except (ValueError, AttributeError, RecursionError, UnsupportedVersionError):
        return {}
    return fields


def write_cursor(fields: Mapping[str, object]) -> str:
    """The text that :func:`read_cursor` reads."""
    return json.dumps({"v": FORMAT, **fields})
