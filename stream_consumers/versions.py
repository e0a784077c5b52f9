"""Strict reading of documents that are kept: in a Delta log, in the cursor of a sensor.

Releases of different age may use one table. A release that does not know all of a document must not read the rest of it
as if that were all, so it refuses the document.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stream_consumers.errors import UnsupportedVersionError


def newer_format(what: str) -> UnsupportedVersionError:
    """The error for a document that this release cannot read in full.

    Args:
        what: the document, and what of it is not known.
    """
    return UnsupportedVersionError(
        f"{what}: it was written by a newer release of stream-assets, or it is damaged",
        remedy="Upgrade this one first: every process that reads or writes a table needs a release that knows its "
        "format.",
    )


def check_version(found: object, *, what: str, versions: Collection[int]) -> None:
    """Refuse a format that this release does not know.

    Args:
        found: the number of the format, as the document has it.
        what: the document.
        versions: the formats that are read.

    Raises:
        UnsupportedVersionError: with both.

    Example:
        >>> check_version(1, what="the cursor", versions=[1])
    """
    if type(found) is not int or found not in versions:
        raise newer_format(f"{what} has format {found!r:.100}, and this release reads up to {max(versions)}")


def check_keys(document: Mapping[str, object], *, what: str, keys: Collection[str]) -> None:
    """Refuse a document with keys that this release does not know.

    Args:
        document: as it was read from JSON.
        what: the document.
        keys: those that are known.

    Raises:
        UnsupportedVersionError: with the unknown keys.

    Example:
        >>> check_keys({"dead": 3}, what="the cursor", keys=["dead", "lost"])
    """
    unknown = sorted(document.keys() - set(keys))
    if unknown:
        raise newer_format(f"{what} has {', '.join(map(repr, unknown))}, which this release does not know")


def check_choice(value: object, *, what: str, choices: Collection[str]) -> None:
    """Refuse a value of an enumerated field that this release does not know.

    Args:
        value: as it was read from JSON.
        what: the document and its field.
        choices: the values that are known.

    Raises:
        UnsupportedVersionError: with the value.

    Example:
        >>> check_choice("append", what="the mode", choices=["append", "replace"])
    """
    if value not in choices:
        raise newer_format(f"{what} is {value!r:.100}, and this release knows {', '.join(map(repr, choices))}")
