"""What delta-rs says when it cannot read a table: which of it may be gone at the next try, in one line and in words."""

from __future__ import annotations

import re

from stream_consumers.errors import LedgerUnreadableError, StreamAssetsError, TableUnreadableError

MOST_CHARACTERS = 500
_COLOURS = re.compile(r"\x1b\[[0-9;]*m|↳")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified (bucket|container) does not exist")
_AWAY = re.compile(
    r"error sending request|max_retries|retry_timeout|timed? ?out|connection (refused|reset|closed)"
    r"|status code\D{1,20}(50[0234]|429)|SlowDown|dns error",
    re.IGNORECASE,
)


def one_line(error: BaseException) -> str:
    r"""The text of an error, without colours, in one line.

    Example:
        >>> one_line(ValueError("it failed\n   \x1b[31m↳\x1b[0m since nobody answered"))
        'it failed since nobody answered'
    """
    said = " ".join(_COLOURS.sub("", str(error)).split())
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]} …"


def unreadable(table: str, error: BaseException, *, what: str, remedy: str) -> StreamAssetsError:
    """Map an error of delta-rs to a :class:`StreamAssetsError`.

    Args:
        table: its path or URI.
        error: what was raised.
        what: cannot be read, for an error that stays.
        remedy: of an error that stays.

    Example:
        >>> type(unreadable("s3://lake/t", OSError("error sending request"), what="", remedy="")).__name__
        'LedgerUnreadableError'
    """
    said = one_line(error)
    if _NO_BUCKET.search(said):
        return TableUnreadableError(
            f"there is no bucket or container of {table}", remedy="Make it, or correct the address or the endpoint."
        )
    if _AWAY.search(said):
        return LedgerUnreadableError(
            f"the storage of {table} does not answer ({said})",
            remedy="Check the address, the endpoint and the network.",
        )
    return TableUnreadableError(f"{what} ({said})", remedy=remedy)
