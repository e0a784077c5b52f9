"""What two stream assets cannot share: a group whose members share messages, and a table that cannot be meant."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from spark_jobs.dead_letters.table import dead_letter_path
from spark_jobs.table_location import check_location
from stream_assets.stream_to_table import StreamToTable
from stream_assets.translator import cluster_name
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl


def check_conflicts(declared: Sequence[StreamToTable]) -> None:
    """Refuse assets that would take messages from each other, or mix their rows in one table by accident.

    Several assets may write different streams of one group into one table. What comes from a variable is compared by
    its name.

    Raises:
        InvalidOptionError: naming the two assets, and what they share.
    """
    of_group = defaultdict(list)
    of_table = defaultdict(list)
    for one in declared:
        of_table[_location(one)].append(one)
        if one.mode is ConsumerMode.LOAD_BALANCED:
            of_group[one.shown_group].append(one)
    for one, other in _pairs(of_group.values()):
        _check_group(one, other)
    for one, other in _pairs(of_table.values()):
        _check_table(one, other)
    for table, writers in of_table.items():
        for other in of_table.get(dead_letter_path(table), ()):
            raise InvalidOptionError(
                f"{other.table}, the table of {_name(other)}, is where the dead letters of {_name(writers[0])} go",
                remedy="Give one of them another table.",
            )


def _pairs(groups: Iterable[Sequence[StreamToTable]]) -> Iterator[tuple[StreamToTable, StreamToTable]]:
    for group in groups:
        yield from combinations(group, 2)


def _check_group(one: StreamToTable, other: StreamToTable) -> None:
    """Each message is given to one of the members: two tables would each get a part of the stream."""
    shared = _shared_streams(one, other)
    if shared and _is_one_place(one, other) and _location(one) != _location(other):
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} share group {one.shown_group!r} of {', '.join(shared)}, so "
            "that each of their tables would get a part of the stream",
            remedy="Give each table a group of its own.",
        )


def _check_table(one: StreamToTable, other: StreamToTable) -> None:
    shared = _shared_streams(one, other)
    if shared and not _is_one_place(one, other):
        # The ledger knows a stream by its key: the position in one would count for the other.
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} write {', '.join(shared)} of {one.origin} and of "
            f"{other.origin} into one table, {one.table}, which tells streams apart by their keys only",
            remedy="Give each of them a table of its own.",
        )
    if shared and one.shown_group == other.shown_group:
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} write {', '.join(shared)} into one table, {one.table}, for "
            f"group {one.shown_group!r}: each message would be in one of them, by chance",
            remedy="Declare one asset, or give each a table and a group of its own.",
        )
    if one.table.is_of_key and other.table.is_of_key:
        raise InvalidOptionError(
            f"the keys {_name(one)} and {_name(other)} stand for one table of the lake, {one.table}",
            remedy="Change a key, of which the last two parts name the table. If both are to write it, say so with "
            "table=lake.table(…).",
        )


def _shared_streams(one: StreamToTable, other: StreamToTable) -> list[str]:
    urls = [stream.origin.shown for stream in (one, other)]
    return sorted(set.intersection(*(set(url.required_streams() if url else ()) for url in urls)))


def _is_one_place(one: StreamToTable, other: StreamToTable) -> bool:
    first, second = (_place(stream.origin.shown) for stream in (one, other))
    return first == second


def _place(url: StreamUrl | None) -> tuple[str, str] | None:
    if url is None:
        return None
    return url.protocol, os.path.abspath(url.path) if url.protocol == "file" else cluster_name(url)


def _location(stream: StreamToTable) -> str:
    return (str(stream.table) if stream.table.is_deferred else check_location(stream.table.path)).rstrip("/")


def _name(stream: StreamToTable) -> str:
    return stream.key.to_user_string()
