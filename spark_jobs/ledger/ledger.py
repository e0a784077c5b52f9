"""The ledger: reads the positions of a group from the Delta log. Nothing else decides where to read."""

from __future__ import annotations

import re
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spark_jobs.ledger.delta_log import RESTORE_REMEDY, Commit, DeltaLog, TableSnapshot, catalog_managed_error, reading
from spark_jobs.ledger.entries import (
    CLAIMS,
    KEEPER,
    LEAVING_CLAIMS,
    PAUSE,
    EntryFields,
    Floor,
    KeyOrder,
    LedgerEntry,
    State,
    Totals,
    Uncounted,
)
from spark_jobs.ledger.fold import (
    facts_at,
    floor_after,
    fold,
    is_below_floor,
    is_of_other_keys,
    keys_after,
    moved_facts,
    restore,
    totals_after,
)
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import FactsByShard, LastMessage, Resume, hint_with_facts, position_facts_in
from stream_consumers.display import counted
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import (
    ForeignCommitError,
    InvalidOptionError,
    KeyConflictError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    RestoreTargetError,
    StreamAssetsError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import check_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAIN = "main"
"""The member whose transaction sequence ingestion uses, unless every shard has its own."""
LOG_RETENTION = "delta.logRetentionDuration"
FULL_EVERY = 10
"""Every tenth entry of a transaction sequence is full: it has the whole state of the ledger."""
MAX_AGE_VERSIONS = 2 * FULL_EVERY
"""The newest full entry is at most this many versions old, not counting commits that are being written."""
MAX_ALWAYS_FULL_ITEMS = 32
"""An entry is always full while the ledger knows of at most this many shards, batches and identities."""
NEWEST_VERSIONS = MAX_AGE_VERSIONS
"""This many of the newest commits are opened before the checkpoint is read for the groups that have written."""
FIRST_VERSIONS = 100
"""The first entry of a table is searched in this many of its first commits."""
MAX_AGE_MS = 3_600_000
"""The greatest age of the newest full entry before the next entry has to be full."""
MAX_NESTED_RESTORES = 100
"""The deepest nesting of RESTOREs: one restores a version before the newest full entry, whose fold has another, …"""
_INTERVAL = re.compile(r"(?:interval\s+)?(\d+)\s+(second|minute|hour|day|week)s?", re.IGNORECASE)
_UNIT_MS = {"second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 604_800_000}
COMMIT_COORDINATOR = "delta.coordinatedCommits.commitCoordinator"
TRANSACTION_RETENTION = "delta.setTransactionRetentionDuration"


def app_id(group: str, member: str | Shard) -> str:
    """Return the ``txnAppId`` of a transaction sequence: ``<group>/<member>`` or ``<group>/<stream>/<shard>``."""
    return f"{group}/{member}"


@dataclass(frozen=True, slots=True)
class _Fold:
    """The fold of the commits up to a version.

    ``error`` is set if the target of a RESTORE is unknown, or a batch landed in a table with another key or a
    higher floor.
    """

    state: State = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    identities: Mapping[str, str] = field(default_factory=dict)
    sharing: str = ""
    facts: FactsByShard = field(default_factory=dict)
    hint: Mapping[str, object] | None = None
    removed: Intervals = field(default_factory=Intervals)
    keys: KeyOrder | None = None
    floor: Floor | None = None
    error: StreamAssetsError | None = None


@dataclass(frozen=True, slots=True)
class FullEntry:
    """The newest full entry of a group.

    Args:
        version: the version of its commit.
        timestamp_ms: the time of its commit; ``None`` if the log does not have it.
        max_age_ms: the age in milliseconds at which the next full entry is due.
        is_planned_before_restore: whether there was a RESTORE since it was planned, before or after its commit.
    """

    version: int
    timestamp_ms: int | None
    max_age_ms: int
    is_planned_before_restore: bool

    def is_due(self, version: int) -> bool:
        """Return whether the next entry, planned from ``version`` now, has to be full."""
        age = -1 if self.timestamp_ms is None else time.time() * 1000 - self.timestamp_ms
        is_old = version - self.version >= MAX_AGE_VERSIONS or not 0 <= age < self.max_age_ms
        return self.is_planned_before_restore or is_old


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledger at one table version; numbers and positions come from the same snapshot.

    Args:
        version: the table version; -1 if there is no table.
        shards: the state of each shard.
        newest: the newest entry of the group.
        last_number: the last transaction number of the member.
        dead_letters_version: in versions of the dead-letter table up to this one, every dead letter counts except
            those in ``uncounted``.
        uncounted: dead letters that do not count; see :class:`spark_jobs.ledger.entries.LedgerEntry`.
        sharing: how the group shares its shards; empty before its first commit.
        identities: the fingerprint of each epoch of each stream; no RESTORE removes one.
        full: the newest full entry; ``None`` if there is none.
        replaces_considered: the number of replaces that ``uncounted`` already reflects.
        totals: the sums over the commits of the group.
        hint: the hint of the newest entry that no RESTORE removed, with the facts at the position of each shard.
        removed_claim_batches: the versions of batches that a RESTORE removed and whose messages the group cannot read
            again, because it had claimed and acknowledged them. Only a RESTORE to a version that has these batches
            takes them out of this set.
        keys: the key of a keyed table and the order of changes; ``None`` for a table that is appended to.
        floor: in a keyed table with ``sequence_by``, rows of deleted keys may be gone whose order is below it; ``None``
            before the first purge.
        schema: the columns of the table, as its log has them.
    """

    version: int
    shards: State = field(default_factory=dict)
    newest: LedgerEntry | None = None
    last_number: int = 0
    dead_letters_version: int = -1
    sharing: str = ""
    uncounted: Uncounted = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)
    full: FullEntry | None = None
    replaces_considered: int = 0
    totals: Totals = field(default_factory=Totals)
    hint: Mapping[str, object] | None = None
    removed_claim_batches: Intervals = field(default_factory=Intervals)
    keys: KeyOrder | None = None
    floor: Floor | None = None
    schema: str = field(default="", compare=False)

    @property
    def positions(self) -> Mapping[Shard, int]:
        """The next sequence of each shard."""
        return {shard: s.position for shard, s in sorted(self.shards.items()) if s.position is not None}

    @property
    def resume(self) -> Resume | None:
        """The positions and the hint, with which a source finds the ends of the stream; ``None`` before any commit."""
        return Resume(self.positions, self.hint) if self.newest else None

    @property
    def streams(self) -> frozenset[str]:
        """The streams that the group has begun with."""
        names = (*self.identities, *(shard.stream for shard in self.shards))
        return frozenset(split_epoch(name)[0] for name in names)

    @property
    def last_messages(self) -> Mapping[Shard, LastMessage]:
        """The last message that was read of each shard that has not ended, if it is known."""
        return {shard: s.last for shard, s in sorted(self.shards.items()) if s.last is not None and s.ended is None}

    @property
    def removed_from_ended(self) -> Mapping[Shard, Intervals]:
        """The sequences that a RESTORE removed from shards that have ended, so that they cannot be read again."""
        ended = {shard: s for shard, s in sorted(self.shards.items()) if s.ended is not None}
        missing = {s: Intervals.of((MIN_SEQUENCE, known.ended or 0)) - known.covered for s, known in ended.items()}
        return {shard: part for shard, part in missing.items() if part}


class Ledger:
    """The positions of one group in one table.

    Args:
        log: the Delta log of the table.
        group: the consumer group; the commits of other groups are skipped.
        member: the owner of the transaction sequence: the name of a member, or a shard if every shard has its own.
        is_shared: the member writes in the transaction sequence of ingestion.
    """

    def __init__(self, log: DeltaLog, *, group: str, member: str | Shard, is_shared: bool = False) -> None:
        for name, value in (("group", group), ("member", member)):
            if not isinstance(value, Shard):
                check_name(name, value, without="/")
        self.log = log
        self.group = group
        self.member = str(member)
        self.app = app_id(group, MAIN if is_shared else member)
        self._last: tuple[Commit, LedgerState] | None = None

    def entry(self, kind: str, state: LedgerState, **fields: Unpack[EntryFields]) -> LedgerEntry:
        """Return batch metadata with the next number of the transaction sequence and a new batch id.

        An entry is full if the state is small, if it is every tenth of its sequence, if it begins a group, moves a
        position or switches the mode, after a RESTORE, and if the newest full entry is so old that it may be cleaned
        from the log before the next one. That of a rebuild never is. Every entry has the facts at the positions, and by
        default the hint of the ledger.

        Args:
            kind: the kind of the entry.
            state: the snapshot that the commit is planned from.
            fields: more fields of :class:`LedgerEntry`.
        """
        entry = LedgerEntry(
            kind,
            group=self.group,
            app=self.app,
            number=state.last_number + 1,
            by=self.member,
            bid=uuid.uuid4().hex,
            base=state.version,
            state=state.shards,
            dead_letters_version=state.dead_letters_version,
            uncounted=state.uncounted,
            replaces_considered=state.replaces_considered,
            sharing=state.sharing,
            identities=state.identities,
            transform=state.newest.transform if state.newest else "",
            keys=state.keys,
            hint=state.hint,
            floor=state.floor,
            removed_claim_batches=state.removed_claim_batches,
        )
        entry = replace(entry, **fields)
        facts = facts_at(fold(state.shards, entry, late=False), moved_facts(entry), position_facts_in(state.hint))
        entry = replace(entry, hint=hint_with_facts(entry.hint, facts))
        if self._is_full(entry, state):
            return replace(entry, totals=state.totals)
        new = {name: identity for name, identity in entry.identities.items() if state.identities.get(name) != identity}
        entry = replace(entry, state=None, identities=new, removed_claim_batches=Intervals())
        return replace(entry, dead_letters_version=-1, uncounted={}, replaces_considered=0)

    def _is_full(self, entry: LedgerEntry, state: LedgerState) -> bool:
        if entry.write_mode.rebuilds:
            # Its key is not that of the state at its base, which a full entry has.
            return False
        is_ordinary = entry.kind in ("batch", "replay", PAUSE) and not (entry.until or entry.skipped or entry.switch)
        if not is_ordinary or state.full is None or state.full.is_due(state.version):
            return True
        if len(state.shards) + len(entry.uncounted) + len(entry.identities) <= MAX_ALWAYS_FULL_ITEMS:
            return True
        # The checksum of the app id spreads the full entries of many sequences over the commits.
        return (entry.number + zlib.crc32(self.app.encode())) % FULL_EVERY == 0

    def read(self) -> LedgerState:
        """Read the ledger as of the newest version.

        Raises:
            LedgerTruncatedError: required commits were cleaned from the log.
            LedgerUnreadableError: the log cannot be read at the moment.
            RestoreTargetError: it is unknown which version the last RESTORE restored.
            ForeignCommitError: another program used our transaction app ids.
            UnsupportedVersionError: a newer release has written into the table.
            InvalidOptionError: the table is set to drop transaction numbers.
            UnsupportedError: a catalog decides on its commits.
        """
        remedy = "Another program wrote the log, or its files are damaged: restore them from a backup."
        what = f"the log of {self.log.path} cannot be read"
        with reading(self.log, what=what, remedy=remedy, kind=LedgerUnreadableError):
            return self._read()

    def _read(self) -> LedgerState:
        snapshot = self.log.snapshot()
        if snapshot is None:
            return LedgerState(-1)
        if TRANSACTION_RETENTION in snapshot.configuration:
            raise InvalidOptionError(
                f"{self.log.path} drops old transaction numbers, because {TRANSACTION_RETENTION} is set",
                remedy=f"Exactly-once needs them: run ALTER TABLE … UNSET TBLPROPERTIES ('{TRANSACTION_RETENTION}').",
            )
        if coordinator := next((n for n in snapshot.configuration if n.startswith(COMMIT_COORDINATOR)), None):
            raise catalog_managed_error(self.log.path, f"{coordinator} is set")
        newest_commit = self.log.commit(snapshot.version)
        if self._last is not None and self._last[0] == newest_commit:
            return self._last[1]
        newest = self._newest_readable(snapshot)
        if newest is None:
            self._check_readable(snapshot, self.app)
            return LedgerState(snapshot.version, schema=snapshot.schema)
        folded = self._fold_to(snapshot.version, {})
        if folded.error is not None:
            raise folded.error
        full = self._newest_full(snapshot.version)
        assert full is not None  # the first entry of a group is full
        commit, entry = full
        is_planned_before_restore = self._is_planned_before_restore(entry, snapshot.version)
        max_age_ms = _max_age_ms(snapshot.configuration.get(LOG_RETENTION))
        valid = self._newest_surviving_full() if is_planned_before_restore else entry
        found = LedgerState(
            snapshot.version,
            folded.state,
            newest,
            snapshot.last_number(self.app),
            sharing=folded.sharing,
            identities=folded.identities,
            full=FullEntry(commit.version, commit.timestamp_ms, max_age_ms, is_planned_before_restore),
            totals=folded.totals,
            hint=hint_with_facts(folded.hint, folded.facts),
            removed_claim_batches=folded.removed,
            keys=folded.keys,
            floor=folded.floor,
            schema=snapshot.schema,
        )
        if valid is not None:
            considered = valid.replaces_considered
            found = replace(found, uncounted=valid.uncounted, replaces_considered=considered)
            found = replace(found, dead_letters_version=valid.dead_letters_version)
        assert newest_commit is not None  # the newest entry was read
        self._last = newest_commit, found
        return found

    def was_restored(self, *, after: int, up_to: int) -> bool:
        """Return whether there was a RESTORE in these versions, or the log does not reach back that far."""
        try:
            return self._any(after + 1, up_to + 1, _is_restore)
        except LedgerTruncatedError:
            return True

    def commit_of(self, number: int, *, after: int) -> Commit | None:
        """Find the commit after version ``after`` with this number of the transaction sequence; ``None`` if absent.

        Raises:
            LedgerUnreadableError: a commit that may have it is missing, so nothing may be acknowledged.
        """
        return self.log.find(lambda commit: commit.transactions.get(self.app) == number, after=after)

    def find(self, wanted: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], LedgerEntry]:
        """Return the entries with these app ids and numbers; those that were never committed are missing.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that it is unknown whether the missing ones were committed.
        """
        missing, found = set(wanted), {}
        for version in self.log.newest_versions():
            if not missing:
                break
            entry = self._need(version).entry
            if entry is not None:
                if (entry.app, entry.number) in missing:
                    found[entry.app, entry.number] = entry
                # The numbers of a sequence only grow: no older commit has a higher one.
                missing = {(app, number) for app, number in missing if app != entry.app or number < entry.number}
        return found

    def last_number(self, member: str) -> int:
        """Return the last transaction number of another member or shard of the group."""
        snapshot = self.log.snapshot()
        return snapshot.last_number(app_id(self.group, member)) if snapshot else 0

    def check_first(self, shards: Iterable[Shard]) -> None:
        """Refuse a first commit if the group has written before in any transaction sequence.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that it is unknown what the group wrote.
        """
        snapshot = self.log.snapshot()
        if snapshot is None or self._newest_readable(snapshot) is not None:
            return
        for member in (MAIN, self.member, *map(str, sorted(shards))):
            self._check_readable(snapshot, app_id(self.group, member))

    def other_group(self, streams: frozenset[str], *, base: int | None = None) -> str | None:
        """Find another group that has written one of these streams into the table, or has registered it.

        A full entry names all streams that its group had at its base, so that older commits of the group need not be
        read. Beyond the newest commits, the search goes on only if the table may hold rows of the streams.

        Args:
            streams: their keys.
            base: the version that the first commit with the streams is planned from; the newest by default.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that it is unknown which group wrote the rows of the streams.
        """
        snapshot = self.log.snapshot()
        if snapshot is None:
            return None
        others: Collection[str] | None = None
        bases: dict[str, int] = {}
        last = snapshot.version if base is None else base
        for version in range(snapshot.version, -1, -1):
            if last - version == NEWEST_VERSIONS:
                if not snapshot.may_hold(streams):
                    return None
                groups = self._groups(snapshot)
                others = None if groups is None else groups - {self.group}
            if others is not None and all(bases.get(group, -1) >= version for group in others):
                return None
            commit = self.log.commit(version)
            if commit is None:
                if not snapshot.may_hold(streams):
                    return None
                raise LedgerTruncatedError(
                    f"the log of {self.log.path} was cleaned, and the table holds rows of {', '.join(sorted(streams))}",
                    remedy="Use the group that wrote them, or another table: rows of two groups have the same stream, "
                    "shard and sequence.",
                    group=self.group,
                )
            entry = commit.entry
            if entry is None or entry.group == self.group:
                continue
            if streams & {shard.stream for shard in (*(entry.state or ()), *entry.affected, *entry.origin)}:
                return entry.group
            if entry.is_full:
                bases[entry.group] = max(entry.base, bases.get(entry.group, -1))
        return None

    def other_groups(self) -> frozenset[str]:
        """Return the other groups that have written into the table, also if the log was cleaned."""
        snapshot = self.log.snapshot()
        groups = self._groups(snapshot) if snapshot else None
        return frozenset() if groups is None else groups - {self.group}

    def first_streams(self) -> frozenset[str]:
        """Return the streams of the first entry in the table, of any group; none if it is not in the first commits."""
        for version in range(FIRST_VERSIONS):
            commit = self.log.commit(version)
            if commit is None:
                break
            if (entry := commit.entry) is not None:
                names = (*entry.identities, *_streams(entry.origin, entry.state or ()))
                return frozenset(split_epoch(name)[0] for name in names)
        return frozenset()

    def earlier_group(self, streams: frozenset[str]) -> str | None:
        """Find a group that registered one of these streams before this group did (``tests/model/groups.py``).

        The first entry of a group with a stream registers it. Before that commit, :meth:`other_group` has searched the
        versions up to its base. This method searches for two more kinds of entries: those that landed between the base
        and that commit, and later ones of groups that did not see it because it was old and had no rows.

        Args:
            streams: the streams that the group has registered, and not written yet.

        Raises:
            LedgerTruncatedError: see :meth:`other_group`, if the log was cleaned meanwhile.
        """
        registered: dict[str, tuple[int, int]] = {}
        others: list[tuple[int, LedgerEntry, str]] = []
        known_before: set[str] = set()
        for version in self.log.newest_versions():
            if all(stream in registered and registered[stream][0] >= version for stream in streams):
                break
            commit = self.log.commit(version)
            if commit is None:
                unknown = streams - known_before
                if unknown:
                    return self.other_group(unknown)
                # The entries are older than all that can be read.
                break
            entry = commit.entry
            if entry is None:
                continue
            if entry.group != self.group:
                others += ((version, entry, stream) for stream in streams & _streams(entry.origin, entry.extents))
                continue
            if entry.kind == "keep" and entry.app != app_id(self.group, KEEPER):
                # The log was cleaned and the state was derived from the rows: older entries are not considered.
                streams -= _streams(entry.state or ())
            known_before |= _streams(entry.state or ())
            for stream in (streams & _streams(entry.origin)) - _streams(entry.state or ()):
                registered[stream] = entry.base, version
        for version, entry, stream in reversed([one for one in others if one[2] in streams]):
            base, own = registered.get(stream, (-1, -1))
            is_unaware = version > own and (stream in _streams(entry.extents) or entry.base - own >= NEWEST_VERSIONS)
            if base < version < own or is_unaware:
                return entry.group
        return None

    def newest_first(self) -> Iterator[Commit]:
        """Yield the commits of the group, newest first, as far as the log reaches back."""
        for version in self.log.newest_versions():
            commit = self._own(version)
            if commit is None:
                return
            if commit.entry is not None:
                yield commit

    def surviving(self, up_to: int | None = None) -> Iterator[Commit]:
        """Yield the commits of the group whose rows no RESTORE removed, newest first, as far as the log reaches back.

        Args:
            up_to: the version to begin with; the newest by default.
        """
        yield from (commit for commit in self._not_removed(up_to) if commit.entry is not None)

    def replaced_by(self, commit: Commit) -> Mapping[Shard, Intervals]:
        """Return the places at which dead letters of older batches do not count because of a surviving commit.

        A RESTORE after its plan may have brought back dead letters that it did not read, so that it replaces none. The
        next run reads its places again. It also replaces none if the log was cleaned and this is unknown: a dead letter
        too many is visible, one too few is not.
        """
        entry = commit.entry
        if entry is None or not entry.write_mode.replaces_dead_letters:
            return {}
        if not entry.write_mode.takes_effect_at_base and self.was_restored(after=entry.base, up_to=commit.version - 1):
            return {}
        return entry.replaced

    def foreign(self) -> Iterator[Commit]:
        """Yield the commits in which other programs changed rows, and that no RESTORE removed, newest first."""
        for own in self._not_removed():
            commit = self.log.commit(own.version)
            if commit is not None and commit.entry is None and commit.changes_rows:
                yield commit

    def _not_removed(self, up_to: int | None = None) -> Iterator[Commit]:
        folds: dict[int, _Fold] = {}
        snapshot = self.log.snapshot() if up_to is None else None
        version = up_to if up_to is not None else snapshot.version if snapshot else -1
        while version >= 0:
            commit = self._own(version)
            if commit is None:
                return
            if commit.restore_target is not None:
                version = self._restored_version(commit, folds)
                continue
            yield commit
            version -= 1

    def _check_readable(self, snapshot: TableSnapshot, app: str) -> None:
        number = snapshot.last_number(app)
        if number:
            raise LedgerTruncatedError(
                f"the log of {self.log.path} was cleaned: "
                f"{app} wrote {counted(number, 'batch', 'batches')}, none is readable",
                remedy="Restore the log files. Or set the position with: stream-assets rewind --to earliest, or --to "
                "SHARD=SEQUENCE,… with the same --source, --table and --group: rows after that position are replaced, "
                "so that none is doubled. Corrections that a RESTORE took back are in force again: look for them with "
                "stream-assets dead-letters show --all, and correct the messages once more. A group whose members "
                "claim entries needs a new name and a new table.",
                version=snapshot.version,
            )

    def _own(self, version: int) -> Commit | None:
        """Return a commit, without its entry if that belongs to another group; ``None`` if the commit was cleaned."""
        commit = self.log.commit(version)
        if commit is None:
            return None
        entry = commit.entry
        ours = entry is not None and entry.group == self.group
        claimed = [app for app in commit.transactions if app.startswith(f"{self.group}/")]
        if claimed and not (ours and entry and commit.transactions.get(entry.app) == entry.number):
            raise ForeignCommitError(
                f"version {version} of {self.log.path} carries the transaction {claimed[0]} but not our metadata",
                remedy=f"Another program writes as group {self.group!r}: change the group name of one of the two.",
            )
        return commit if ours else replace(commit, entry=None)

    def _newest_surviving_full(self) -> LedgerEntry | None:
        """Return the newest full entry that no RESTORE removed or made late: it knows which dead letters count."""
        for commit in self.surviving():
            if commit.entry is None or not commit.entry.is_full:
                continue
            try:
                if not self._is_planned_before_restore(commit.entry, commit.version - 1):
                    return commit.entry
            except LedgerTruncatedError:
                break
        return None

    def _is_planned_before_restore(self, entry: LedgerEntry, version: int) -> bool:
        """Return whether a RESTORE follows the version that the entry was planned from, up to ``version``.

        An entry is late if this is so with the version before its commit.
        """
        return self._any(entry.base + 1, version + 1, _is_restore)

    def _redriven_since_plan(self, entry: LedgerEntry, version: int) -> Mapping[Shard, Intervals]:
        """Return the places of redrives after the version that the entry was planned from, up to ``version``.

        There are none if the entry has a number of their transaction sequence. A dismissal makes no correction.
        """
        found: dict[Shard, Intervals] = {}
        for number in range(entry.base + 1, version + 1) if entry.write_mode.reduces_redo else ():
            between = self._need(number).entry
            if between is not None and between.kind == "replay":
                found |= {shard: found.get(shard, Intervals()) | parts for shard, parts in between.places.items()}
        return found

    def _newest_readable(self, snapshot: TableSnapshot) -> LedgerEntry | None:
        """Return the newest entry of the group; ``None`` if it has none, or it was cleaned from the log."""
        for version in range(snapshot.version, -1, -1):
            if snapshot.version - version == NEWEST_VERSIONS:
                groups = self._groups(snapshot)
                if groups is not None and self.group not in groups:
                    return None
            commit = self._own(version)
            if commit is None or commit.entry is not None:
                return commit.entry if commit else None
        return None

    def _newest_full(self, version: int) -> tuple[Commit, LedgerEntry] | None:
        """Return the newest full entry of the group up to ``version``, with its commit; ``None`` if there is none."""
        commits = map(self._need, range(version, -1, -1))
        return next(((commit, commit.entry) for commit in commits if commit.entry and commit.entry.is_full), None)

    def _groups(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        """Return the groups that have written up to a version, by its transactions; ``None`` if they are unknown."""
        apps = self.log.transactions(snapshot)
        return None if apps is None else frozenset(app.partition("/")[0] for app in apps if "/" in app)

    def _fold_to(self, version: int, known: dict[int, _Fold], level: int = 0) -> _Fold:
        """Return the fold up to ``version``, from the cache ``known`` if possible, else computed and added to it.

        A RESTORE needs the fold of an older version, which may contain RESTOREs. Without the cache, the work would
        double with each level of them.

        Raises:
            RestoreTargetError: RESTOREs are nested deeper than ``MAX_NESTED_RESTORES``.
        """
        if version not in known:
            if level > MAX_NESTED_RESTORES:
                raise RestoreTargetError(
                    f"{self.log.path} has more than {MAX_NESTED_RESTORES} RESTOREs that depend on one another",
                    remedy=RESTORE_REMEDY,
                )
            known[version] = self._fold_on(version, known, level + 1)
        return known[version]

    def _fold_on(self, version: int, known: dict[int, _Fold], level: int) -> _Fold:
        """Compute the fold up to ``version``, from the newest full entry on, which has the fold at its base.

        The first commit of the group decides how it shares, and later switches change it. No RESTORE undoes a switch or
        an identity, because transaction sequences just continue. After a RESTORE to an unknown version the fold has an
        error until a RESTORE to a known one follows.
        """
        found = self._newest_full(version)
        if found is None:
            return _Fold()
        newest, full = found
        state = full.state or {}
        facts = facts_at(state, position_facts_in(full.hint))
        now = _Fold(
            state,
            full.totals,
            full.identities,
            full.sharing,
            facts,
            removed=full.removed_claim_batches,
            keys=full.keys,
            floor=full.floor,
        )
        folds: dict[int, _Fold] = {full.base: now}
        for number in range(full.base + 1, version + 1):
            commit = self._need(number)
            if commit.restore_target is not None:
                removed = now.removed
                try:
                    target = self._restored_version(commit, known, level)
                    past = folds[target] if target in folds else self._fold_to(target, known, level)
                    if full.base <= target < newest.version:
                        past = self._with_older_hint(past, target, known, level)
                    removed = self._removed(now, number, target, known, level)
                except (RestoreTargetError, LedgerUnreadableError, LedgerTruncatedError) as unknown:
                    past = replace(now, error=unknown)
                state = restore(now.state, past.state)
                facts = facts_at(state, past.facts, now.facts)
                # Without a state, the group had not begun in the restored version.
                keys = past.keys if past.state else now.keys
                now = _Fold(
                    state,
                    past.totals,
                    now.identities,
                    now.sharing,
                    facts,
                    past.hint,
                    removed,
                    keys,
                    past.floor,
                    past.error,
                )
            elif entry := commit.entry:
                late = self._is_planned_before_restore(entry, number - 1)
                is_switch = entry.switch is not None and (entry.kind == "fence" or not now.sharing)
                # A late switch to claims set the server to positions that the RESTORE undid. A first commit sets none.
                is_switch = is_switch and not (late and entry.switch == CLAIMS and now.sharing)
                error = now.error
                if now.state and is_of_other_keys(now.keys, entry):
                    error = _of_other_keys(self.log.path, number, now.keys, entry)
                keys = keys_after(now.keys, entry, is_first=not now.state)
                state = fold(now.state, entry, late=late, redriven=self._redriven_since_plan(entry, number - 1))
                if is_below_floor(now.floor, entry):
                    error = _inserted_below_floor(self.log.path, number)
                now = _Fold(
                    state,
                    totals_after(now.totals, entry),
                    {**now.identities, **entry.identities},
                    entry.switch or "" if is_switch else now.sharing,
                    facts_at(state, moved_facts(entry), now.facts),
                    entry.hint,
                    now.removed,
                    keys,
                    floor_after(now.floor, entry),
                    error,
                )
            folds[number] = now
        return now

    def _removed(self, now: _Fold, version: int, target: int, known: dict[int, _Fold], level: int) -> Intervals:
        """Return ``LedgerState.removed_claim_batches`` after the RESTORE in ``version``.

        To list the commits of a version, walk back from it, and jump to the target at each RESTORE. This RESTORE
        removed the commits that are in the list of the version before it, but not in the list of its target. It brought
        back those that are only in the list of its target. A group that reads by position reads removed messages
        again, except claimed entries of a stream that was recreated since.

        Args:
            now: the fold before the RESTORE.
            version: the version of the RESTORE.
            target: the version that it restored.
            known: see :meth:`_fold_to`.
            level: see :meth:`_fold_to`.
        """
        ended = {shard for shard, one in now.state.items() if one.ended is not None and one.claimed is not None}
        is_claimed = now.sharing in (CLAIMS, LEAVING_CLAIMS)
        if not (is_claimed or ended or now.removed):
            return now.removed
        before, removed, back = version - 1, Intervals(), Intervals()
        while before != target:
            newer = max(before, target)
            commit = self._need(newer)
            older = newer - 1
            if commit.restore_target is not None:
                try:
                    older = self._restored_version(commit, known, level)
                except RestoreTargetError:
                    # The target of an earlier RESTORE is unknown: walk on through all versions before it.
                    if newer == target:
                        raise
            entry = commit.entry
            if newer == target:
                back |= Intervals.of((newer, newer + 1))
                target = older
                continue
            before = older
            if entry is not None and entry.kind == "batch" and (is_claimed or ended & entry.claims.keys()):
                removed |= Intervals.of((newer, newer + 1))
        return (now.removed | removed) - back

    def _with_older_hint(self, past: _Fold, version: int, known: dict[int, _Fold], level: int) -> _Fold:
        """Return the fold up to a version, with the hint of older entries, as far as the log reaches back.

        A full entry has the facts at the positions *after* it. It no longer has the facts at the positions of its base.
        """
        with suppress(LedgerTruncatedError):
            older = self._fold_to(version, known, level)
            return replace(past, facts={**past.facts, **older.facts}, hint=older.hint, keys=older.keys)
        return past

    def _restored_version(self, commit: Commit, known: dict[int, _Fold], level: int = 0) -> int:
        """Return the version that a RESTORE restored, or one in which the group has the same state.

        Raises:
            RestoreTargetError: several versions with other states are possible.
        """
        newest, *others = self.log.restored_versions(commit)
        if others and self._any(others[-1] + 1, newest + 1, _may_change_state):
            folds = [self._fold_to(version, known, level) for version in (newest, *others)]
            if any(one.error is not None or one.state != folds[0].state for one in folds):
                raise RestoreTargetError(
                    f"{self.log.path} was restored to {commit.restore_target!r} (version {commit.version}), which may "
                    f"be version {others[-1]} or {newest}: they have the same files but different positions",
                    remedy=RESTORE_REMEDY,
                )
        return newest

    def _any(self, first: int, end: int, is_match: Callable[[Commit], bool]) -> bool:
        return any(is_match(self._need(number)) for number in range(first, end))

    def _need(self, version: int) -> Commit:
        commit = self._own(version)
        if commit is None:
            raise LedgerTruncatedError(
                f"version {version} of {self.log.path} was cleaned from its log, and the positions depend on it",
                remedy="Restore the log files; or start with a new group name and a start position.",
            )
        return commit


def in_effect(commits: Iterable[Commit]) -> Iterator[Commit]:
    """Yield commits of a group, newest first, with each dismissal directly after the version it was planned from.

    Args:
        commits: newest first, as in the log.
    """
    waiting: list[tuple[int, Commit]] = []
    for commit in commits:
        while waiting and waiting[0][0] >= commit.version:
            yield waiting.pop(0)[1]
        if commit.entry is not None and commit.entry.write_mode.takes_effect_at_base:
            waiting.append((commit.entry.base, commit))
        else:
            yield commit
    yield from (commit for _, commit in waiting)


def kind_of_table(keys: KeyOrder | None) -> str:
    """Return how a table is written, for messages: ``keyed by id``, or ``appended to``."""
    return f"keyed by {keys}" if keys else "appended to"


def _of_other_keys(path: str, version: int, keys: KeyOrder | None, entry: LedgerEntry) -> KeyConflictError:
    return KeyConflictError(
        f"version {version} of {path} has a batch that was planned when the table was {kind_of_table(entry.keys)}, and "
        f"the table was {kind_of_table(keys)} when it landed: a rebuild, or a RESTORE to before one, came in between",
        remedy=f"Take the batch back: RESTORE TABLE … TO VERSION AS OF {version - 1}. Its messages are read again.",
        version=version,
    )


def _inserted_below_floor(path: str, version: int) -> KeyConflictError:
    return KeyConflictError(
        f"version {version} of {path} has a batch that was planned before rows of deleted keys were purged, and landed "
        "after that, because RESTOREs came in between: it may have inserted rows of deleted keys",
        remedy=f"Take the batch back: RESTORE TABLE … TO VERSION AS OF {version - 1}. Its messages are read again.",
        version=version,
    )


def _is_restore(commit: Commit) -> bool:
    return commit.restore_target is not None


def _may_change_state(commit: Commit) -> bool:
    return commit.entry is not None or _is_restore(commit)


def _streams(*shards: Iterable[Shard]) -> frozenset[str]:
    return frozenset(shard.stream for group in shards for shard in group)


def interval_ms(text: str) -> int | None:
    """Return the milliseconds in an interval of a table property; ``None`` if it has another form, such as months.

    Example:
        >>> interval_ms("interval 30 days"), interval_ms("2 hours"), interval_ms("interval 1 month")
        (2592000000, 7200000, None)
    """
    found = _INTERVAL.fullmatch(text.strip())
    return int(found[1]) * _UNIT_MS[found[2].lower()] if found else None


def _max_age_ms(retention: str | None) -> int:
    """Return the greatest age of the newest full entry: an hour, or less if the log is kept for less than a day.

    Example:
        >>> _max_age_ms(None), _max_age_ms("interval 30 days"), _max_age_ms("interval 1 hour"), _max_age_ms("soon")
        (3600000, 3600000, 150000, 0)
    """
    if retention is None:
        return MAX_AGE_MS
    length = interval_ms(retention)
    return 0 if length is None else min(MAX_AGE_MS, length // 24)
