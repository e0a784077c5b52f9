"""Hints: what an entry of the ledger says for the next plan of a source.

A hint is a shortcut, of which the newest entry decides, but for what is known at the positions of shards: how many
entries were added before them. Without that a loss is not detected, so that an engine keeps it for each shard by its
position, whichever entry is the newest.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from typing import NamedTuple

from stream_consumers.errors import InvalidUrlError
from stream_consumers.messages import Shard

_ADDED = "added_before"
_MORE = ("deleted", "removed")


class Known(NamedTuple):
    """What is known of a stream at a position, when every entry that was lost after it is accounted for.

    Args:
        added: entries ever added before the position; entries that were lost after it and are accounted for count, too.
        deleted: the highest sequence that was deleted by then; ``None`` where that is unknown.
        removed: entries that were removed from the stream by then, in whatever way; ``None`` where that is unknown.
    """

    added: int
    deleted: int | None = None
    removed: int | None = None


Places = Mapping[Shard, tuple[int, Known]]
"""The position of each shard, and what is known there."""


def known_places(hint: object, of: Set[Shard] | None = None) -> Places:
    """The position of each shard in a hint, or of some of them, and what is known there; other forms are ignored.

    Example:
        >>> known_places({"added_before": {"orders/0": [5, 3], "orders/1": "?"}, "deleted": {"orders/0": 2}})
        {Shard(stream='orders', id=0): (5, Known(added=3, deleted=2, removed=None))}
    """
    names = None if of is None else {str(shard) for shard in of}
    more = {name: _listed(hint, name, 1, names) for name in _MORE}
    return {
        shard: (position, Known(added, **{name: found[shard][0] for name, found in more.items() if shard in found}))
        for shard, (position, added) in _listed(hint, _ADDED, 2, names).items()
    }


def with_places(shortcut: Mapping[str, object] | None, places: Places) -> Mapping[str, object] | None:
    """A hint with these places, and with all else that another hint says; ``None`` if it says nothing.

    Example:
        >>> with_places({"offset": 7}, {Shard("orders"): (5, Known(3))})
        {'offset': 7, 'added_before': {'orders/0': [5, 3]}, 'deleted': {}, 'removed': {}}
        >>> with_places({"added_before": {"orders/0": [5, 3]}}, {})
    """
    hint = {name: part for name, part in (shortcut or {}).items() if name not in (_ADDED, *_MORE)}
    if places:
        listed = [(str(shard), position, known) for shard, (position, known) in sorted(places.items())]
        hint[_ADDED] = {shard: [position, known.added] for shard, position, known in listed}
        hint["deleted"] = {shard: known.deleted for shard, _, known in listed if known.deleted is not None}
        hint["removed"] = {shard: known.removed for shard, _, known in listed if known.removed is not None}
    return hint or None


def _listed(hint: object, key: str, count: int, names: Set[str] | None) -> Mapping[Shard, list[int]]:
    listed = hint.get(key) if isinstance(hint, Mapping) else None
    found: dict[Shard, list[int]] = {}
    for name, value in listed.items() if isinstance(listed, Mapping) else ():
        # To parse the names of a thousand shards takes 25 ms.
        if names is not None and name not in names:
            continue
        with suppress(ValueError, TypeError, OverflowError, InvalidUrlError):
            numbers = [int(number) for number in (value if isinstance(value, list) else [value])]
            if len(numbers) == count:
                found[Shard.parse(str(name))] = numbers
    return found
