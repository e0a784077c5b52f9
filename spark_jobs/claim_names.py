"""What became of the batches whose entries a name holds: the ledger decides (protocol 3.3)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from spark_jobs.ledger import Ledger, app_id
from stream_consumers.claims import ClaimName


class Status(enum.Enum):
    """Of a name. ``WRITTEN`` and ``DEAD`` never change again.

    ``OPEN``: its number may still be written. ``WRITTEN``: its batch is in the table, so its entries are acknowledged
    and never written again. ``DEAD``: it never will be, so its entries may be moved into another batch.
    """

    OPEN = "open"
    WRITTEN = "written"
    DEAD = "dead"


class NameStatus:
    """Looks names up in the ledger of their group.

    Args:
        ledger: of the group.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[ClaimName, Status] = {}

    def of(self, names: Iterable[ClaimName]) -> Mapping[ClaimName, Status]:
        """The status of each name.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that it cannot be told.
        """
        wanted = set(names)
        unknown = wanted - self._known.keys()
        last = {member: self._ledger.last_number(member) for member in {name.member for name in unknown}}
        closed = {name for name in unknown if name.number <= last[name.member]}
        group = self._ledger.group
        entries = self._ledger.find((app_id(group, name.member), name.number) for name in closed)
        for name in closed:
            entry = entries.get((app_id(group, name.member), name.number))
            is_written = entry is not None and entry.kind == "batch" and entry.bid == name.bid
            self._known[name] = Status.WRITTEN if is_written else Status.DEAD
        return {name: self._known.get(name, Status.OPEN) for name in wanted}
