"""Kinds of reasons: why messages are dead letters, without what differs from one message to the next."""

from __future__ import annotations

import re

from stream_consumers.readable import printable, shortened

MOST_CHARACTERS = 200
"""A longer reason is of the kind of its beginning."""
_MOST_READ = 50 * MOST_CHARACTERS
NO_REASON = "no reason is told"
OTHER_REASONS = "other reasons"
"""What those of very many kinds are counted as that are met last."""
_VALUES = re.compile(
    r"""
    (?P<quoted>(?<!\w)[bru]?(?P<mark>['"`])(?:\\.|(?!(?P=mark)).)*(?:(?P=mark)(?!\w)|\Z))
    # Times, and ids of eight hexadecimal digits and more, which have letters in them.
    | (?<![\w.])(?:
        \d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?
        | 0[xX][0-9a-fA-F]+
        | (?=[a-f-]*[0-9])[0-9a-f]{8,}(?:-[0-9a-f]{4,12})*
      )(?!\w)
    # No number: the one in UTF-8, or behind the letters of a name.
    | (?<![A-Za-z_0-9])(?<![A-Za-z]-)(?:(?<![0-9])[-+](?=\d))?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?
    """,
    re.VERBOSE | re.DOTALL,
)


def kind_of_reason(reason: str | None) -> str:
    r"""The kind of a reason: quoted text in it becomes ``'…'``, and a number, a time or an id ``#``.

    Reasons of one kind have one cause, as a rule, and one remedy. The same reason always has the same kind. Logs and
    Dagster show kinds, so that a reason quotes what it says of a payload that is no number.

    Example:
        >>> kind_of_reason("field 'amount' is not a whole number of 64 bits")
        "field '…' is not a whole number of # bits"
        >>> kind_of_reason("lost: sequences 5 to 9 were removed from the stream; the first left is 10")
        'lost: sequences # to # were removed from the stream; the first left is #'
        >>> kind_of_reason("not UTF-8: invalid start byte at byte 17")
        'not UTF-8: invalid start byte at byte #'
    """
    if not reason or reason.isspace():
        return NO_REASON
    found = _VALUES.sub(lambda value: "'…'" if value["quoted"] else "#", reason[:_MOST_READ])
    return shortened(printable(" ".join(found.split())), MOST_CHARACTERS)
