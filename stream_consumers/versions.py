"""Strict parsing of stored documents: entries of a Delta log, the cursor of a sensor.

Different releases may use one table. A release that does not know every part of a document must not interpret the rest
as if it were complete, so it rejects the document.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stream_consumers.errors import UnsupportedVersionError


def newer(what: str) -> UnsupportedVersionError:
    """Return the error for a document that this release cannot read completely.

    Args:
        what: the document, and its unknown part.
    """
    return UnsupportedVersionError(
        f"{what}: a newer release of stream-assets wrote it, or it is damaged",
        remedy="Upgrade this release: every process that reads or writes a table needs a release that knows its "
        "format.",
    )


def check_version(found: object, *, what: str, versions: Collection[int]) -> None:
    """Raise if this release does not know the format of a document.

    Args:
        found: the format number in the document.
        what: the document.
        versions: the format numbers that this release reads.

    Raises:
        UnsupportedVersionError: the format is unknown.

    Example:
        >>> check_version(1, what="the cursor", versions=[1])
    """
    if type(found) is not int or found not in versions:
        raise newer(f"{what} has format {found!r:.100}, and this release reads up to {max(versions)}")


def check_keys(document: Mapping[str, object], *, what: str, keys: Collection[str]) -> None:
    """Raise if a document has keys that this release does not know.

    Args:
        document: the parsed JSON document.
        what: the document, for the error.
        keys: the known keys.

    Raises:
        UnsupportedVersionError: the document has unknown keys.

    Example:
        >>> check_keys({"dead": 3}, what="the cursor", keys=["dead", "lost"])
    """
    unknown = sorted(document.keys() - set(keys))
    if unknown:
        raise newer(f"{what} has {', '.join(map(repr, unknown))}, which this release does not know")


def check_choice(value: object, *, what: str, choices: Collection[str]) -> None:
    """Raise if an enumerated field has a value that this release does not know.

    Args:
        value: the parsed JSON value.
        what: the document and its field, for the error.
        choices: the known values.

    Raises:
        UnsupportedVersionError: the value is unknown.

    Example:
        >>> check_choice("append", what="the mode", choices=["append", "replace"])
    """
    if value not in choices:
        raise newer(f"{what} is {value!r:.100}, and this release knows {', '.join(map(repr, choices))}")
