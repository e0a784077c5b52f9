"""Redis entry ids as sequences: ``ms-sub`` is ``ms << 16 | sub`` (SeaStreamer's rule)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from stream_consumers.errors import FormatError, InvalidOptionError
from stream_consumers.messages import MAX_SEQUENCE, MAX_SHARD
from stream_consumers.options import check_several

_ENTRY_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?\Z")
SUB_BITS = 16
MAX_SUB = (1 << SUB_BITS) - 1
MAX_MS = (1 << 47) - 1
"""The last millisecond whose sequences are signed 64-bit numbers; in the year 6429."""


def to_sequence(entry_id: bytes | str) -> int:
    """The sequence of an entry id.

    Raises:
        FormatError: it is no id, or one that has no sequence (more than 65536 entries in a millisecond, or
            above :data:`GREATEST`).

    Example:
        >>> to_sequence("1795219782548-1")
        117651523669065729
    """
    text = entry_id.decode("ascii", "replace") if isinstance(entry_id, bytes) else entry_id
    parts = text.split("-")
    is_number = len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts)
    if not is_number:
        raise FormatError(f"{text!r} is not a Redis entry id", remedy="Ids are written as milliseconds-number.")
    milliseconds, sub = int(parts[0]), int(parts[1])
    sequence = milliseconds << SUB_BITS | sub
    if sub > MAX_SUB or sequence > MAX_SEQUENCE:
        raise FormatError(
            f"the entry id {text} has no sequence: its second number goes up to {MAX_SUB}, and it to {GREATEST}",
            remedy="Let Redis make the ids (XADD key * …), or spread the producer over shards.",
        )
    return sequence


def to_id(sequence: int) -> str:
    """The entry id of a sequence.

    Example:
        >>> to_id(117651523669065729)
        '1795219782548-1'
    """
    return f"{sequence >> SUB_BITS}-{sequence & MAX_SUB}"


GREATEST = to_id(MAX_SEQUENCE)
"""The greatest entry id that has a sequence."""


class EntrySequence(int):
    """A sequence that is printed as the id of its entry.

    Example:
        >>> f"{EntrySequence(117651523669065729)}"
        '1795219782548-1'
    """

    def __str__(self) -> str:
        return to_id(self)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def parse_sequence(text: str) -> int | None:
    """The sequence that a user wrote: a number, or the id of a Redis entry; ``None`` if it is neither.

    Example:
        >>> parse_sequence("7"), parse_sequence("1795219782548-1"), parse_sequence("2026-11-01")
        (7, 117651523669065729, None)
    """
    if text.isascii() and text.isdecimal():
        return int(text)
    return to_sequence(text) if _ENTRY_ID.match(text) else None


def check_entry_id(entry_id: str, special: Collection[str] = ()) -> str:
    """Return ``entry_id`` if it is the id of an entry, or one of ``special``.

    Raises:
        InvalidOptionError: it is neither.

    Example:
        >>> check_entry_id("1700000000000-0"), check_entry_id("$", special=["$"])
        ('1700000000000-0', '$')
    """
    if not isinstance(entry_id, str) or (entry_id not in special and not _ENTRY_ID.match(entry_id)):
        listed = "".join(f", or {word!r}" for word in special)
        raise InvalidOptionError(
            f"{entry_id!r} is not an identifier of an entry", remedy=f"Write an id like 1700000000000-0{listed}."
        )
    return entry_id


def check_entry_ids(entry_ids: Iterable[str]) -> None:
    """Refuse what is not a collection of entry ids.

    Raises:
        InvalidOptionError: it is text, or one of them is no id.

    Example:
        >>> check_entry_ids(["1-0", "2-0"])
    """
    check_several("entry_ids", entry_ids)
    for entry_id in entry_ids:
        check_entry_id(entry_id)


def behind(entry_id: bytes | str) -> int:
    """The sequence behind an entry; 0 for ``0-0``, which is never one.

    Example:
        >>> behind("0-0"), behind("0-5")
        (0, 6)
    """
    sequence = to_sequence(entry_id)
    return sequence + 1 if sequence else 0


def before(sequence: int) -> str:
    """The id that one reads behind to get ``sequence`` first.

    Example:
        >>> before(0), before(6)
        ('0-0', '0-5')
    """
    return to_id(max(0, sequence - 1))


def id_order(entry_id: str) -> tuple[int, ...]:
    """Sorts entry ids, those too that have no sequence.

    Example:
        >>> sorted(["10-0", "9-70000", "9-2"], key=id_order)
        ['9-2', '9-70000', '10-0']
    """
    return tuple(map(int, entry_id.split("-")))


def to_timestamp_ms(sequence: int) -> int:
    """When the entry was added, unix milliseconds."""
    return sequence >> SUB_BITS


def is_shard_id(text: str) -> bool:
    """Whether this is how a key ends that is a shard: a number up to 2^63-1, written without zeros before it.

    Example:
        >>> [is_shard_id(text) for text in ("0", "12", "012", "x", "")]
        [True, True, False, False, False]
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SHARD))
    return is_number and int(text) <= MAX_SHARD and str(int(text)) == text
