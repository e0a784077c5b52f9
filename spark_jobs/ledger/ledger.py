"""The ledger: what the Delta log says about positions. Nothing else decides where to read."""

from __future__ import annotations

import re
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from spark_jobs.ledger.delta_log import RESTORE_REMEDY, Commit, DeltaLog, TableSnapshot, catalog_decides
from spark_jobs.ledger.entries import LedgerEntry, State, Uncounted
from spark_jobs.ledger.fold import fold, restore, tally, tally_all
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.totals import Totals
from stream_consumers.batches import LastMessage
from stream_consumers.errors import (
    ForeignCommitError,
    InvalidOptionError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    StreamAssetsError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import check_name
from stream_consumers.wording import counted

LOG_RETENTION = "delta.logRetentionDuration"
FULL_EVERY = 10
"""Every so manieth entry of a transaction sequence is full: one that says all that the ledger knows."""
MOST_VERSIONS = 2 * FULL_EVERY
"""The newest full entry never lies further back than so many versions, and those that are being written."""
FEW = 32
"""An entry that has no more to say than what is known of so many shards is always full."""
NEAR = MOST_VERSIONS
"""How many of the newest commits are opened before the checkpoint is asked which groups there are."""
LONGEST_MS = 3_600_000
_INTERVAL = re.compile(r"(?:interval\s+)?(\d+)\s+(second|minute|hour|day|week)s?", re.IGNORECASE)
_UNIT_MS = {"second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 604_800_000}
COMMIT_COORDINATOR = "delta.coordinatedCommits.commitCoordinator"
TRANSACTION_RETENTION = "delta.setTransactionRetentionDuration"


def app_id(group: str, member: str | Shard) -> str:
    """The ``txnAppId`` of a transaction sequence: ``<group>/<member>`` or ``<group>/<stream>/<shard>``."""
    return f"{group}/{member}"


@dataclass(frozen=True, slots=True)
class _Folded:
    """What is known at a version; ``totals`` is ``None`` where it began with an entry that does not say them."""

    state: State
    totals: Totals | None
    error: StreamAssetsError | None = None


@dataclass(frozen=True, slots=True)
class FullEntry:
    """The newest entry that says all that the ledger knew at its base.

    Args:
        version: of its commit.
        timestamp_ms: when it was made; ``None`` if the log does not tell.
        longest_ms: how old it may become before another one is due.
        is_restored: whether there was a RESTORE since it was planned.
    """

    version: int
    timestamp_ms: int | None
    longest_ms: int
    is_restored: bool

    def is_due(self, version: int) -> bool:
        """Whether the next entry, planned from ``version`` now, has to be full."""
        age = -1 if self.timestamp_ms is None else time.time() * 1000 - self.timestamp_ms
        return self.is_restored or version - self.version >= MOST_VERSIONS or not 0 <= age < self.longest_ms


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledger at one table version; numbers and positions come from the same snapshot.

    Args:
        version: the table version; -1 if there is no table.
        shards: what is known of each shard.
        newest: the newest entry of the group.
        last_number: the last transaction number of the member.
        settled: up to this version of the dead-letter table, all that is there counts, but for what ``uncounted`` says.
        uncounted: dead letters that do not count; see :class:`spark_jobs.ledger.entries.LedgerEntry`.
        sharing: how the group shares its shards; empty before its first commit.
        is_restored: whether there was a RESTORE since the newest commit of the group was planned.
        identities: for each epoch of each stream its fingerprint; no RESTORE takes one back.
        full: the newest full entry; ``None`` if there is none.
        judged: how many replaces ``uncounted`` knows of.
        totals: what the commits of the group add up to; ``None`` if only older versions of this package have written,
            which did not keep them: ask :meth:`Ledger.totals`.
        schema: the columns of the table, as its log has them.
    """

    version: int
    shards: State = field(default_factory=dict)
    newest: LedgerEntry | None = None
    last_number: int = 0
    settled: int = -1
    sharing: str = ""
    is_restored: bool = False
    uncounted: Uncounted = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)
    full: FullEntry | None = None
    judged: int = 0
    totals: Totals | None = field(default_factory=Totals)
    schema: str = field(default="", compare=False)

    @property
    def positions(self) -> Mapping[Shard, int]:
        """The next sequence of each shard."""
        return {shard: s.position for shard, s in sorted(self.shards.items()) if s.position is not None}

    @property
    def last_messages(self) -> Mapping[Shard, LastMessage]:
        """The last message that was read of each shard that goes on, where it is known."""
        return {shard: s.last for shard, s in sorted(self.shards.items()) if s.last is not None and s.ended is None}

    @property
    def gone(self) -> Mapping[Shard, Intervals]:
        """What a RESTORE removed from shards that have ended: nobody can read it again."""
        ended = {shard: s for shard, s in sorted(self.shards.items()) if s.ended is not None}
        missing = {s: Intervals.of((MIN_SEQUENCE, known.ended or 0)) - known.covered for s, known in ended.items()}
        return {shard: part for shard, part in missing.items() if part}


class Ledger:
    """The positions of one group in one table.

    Args:
        log: the Delta log of the table.
        group: the consumer group; the commits of others are skipped.
        member: whose transaction sequence it is: the name of a member, or a shard where every shard has one of its own.
    """

    def __init__(self, log: DeltaLog, *, group: str, member: str | Shard) -> None:
        for name, value in (("group", group), ("member", member)):
            if not isinstance(value, Shard):
                check_name(name, value, without="/")
        self.log = log
        self.group = group
        self.member = str(member)
        self.app = app_id(group, member)
        self._last: tuple[str, LedgerState] | None = None
        self._tallied: tuple[int, Totals] | None = None

    def entry(self, kind: str, state: LedgerState, **fields: Any) -> LedgerEntry:
        """Batch metadata with the next number of the transaction sequence and a new batch id.

        It is full where that costs little, in every tenth entry of the sequence, where something begins, moves or
        switches, after a RESTORE, and where the newest full one lies so far back that it may be cleaned from the log
        before this one is.

        Args:
            kind: of the entry.
            state: the snapshot that the commit is planned from.
            fields: more fields of :class:`LedgerEntry`.
        """
        known = {"transform": state.newest.transform} if state.newest else {}
        planned = {
            "group": self.group,
            "app": self.app,
            "number": state.last_number + 1,
            "by": self.member,
            "bid": uuid.uuid4().hex,
            "base": state.version,
            "state": state.shards,
            "settled": state.settled,
            "uncounted": state.uncounted,
            "sharing": state.sharing,
            "identities": state.identities,
            "judged": state.judged,
        }
        entry = LedgerEntry(kind, **{**known, **planned, **fields})
        if self._is_full(entry, state):
            return replace(entry, totals=self.totals(state))
        new = {name: told for name, told in entry.identities.items() if state.identities.get(name) != told}
        return replace(entry, state=None, settled=-1, uncounted={}, judged=0, identities=new)

    def renewed(self, entry: LedgerEntry, state: LedgerState) -> LedgerEntry:
        """The same for the ledger as it is now: another number, id and base.

        Args:
            entry: that was planned, and is not in the table.
            state: the ledger now.
        """
        kept = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in _OF_THE_MOMENT}
        return self.entry(entry.kind, state, **kept, identities={**state.identities, **entry.identities})

    def _is_full(self, entry: LedgerEntry, state: LedgerState) -> bool:
        is_ordinary = entry.kind in ("batch", "replay", "turn") and not (entry.until or entry.skipped or entry.switch)
        if not is_ordinary or state.full is None or state.full.is_due(state.version):
            return True
        if len(state.shards) + len(entry.uncounted) + len(entry.identities) <= FEW:
            return True
        # Sequences of many shards take turns.
        return (entry.number + zlib.crc32(self.app.encode())) % FULL_EVERY == 0

    def read(self) -> LedgerState:
        """The ledger now.

        Raises:
            LedgerTruncatedError: the log was cleaned beyond what is needed.
            LedgerUnreadableError: it cannot be read at the moment.
            ForeignCommitError: somebody else used our transaction app ids.
            UnsupportedVersionError: a newer release has written into the table.
            InvalidOptionError: the table forgets transaction numbers.
            UnsupportedError: a catalog decides on its commits.
        """
        snapshot = self.log.snapshot()
        if snapshot is None:
            return LedgerState(-1)
        if TRANSACTION_RETENTION in snapshot.configuration:
            raise InvalidOptionError(
                f"{self.log.path} forgets transactions: {TRANSACTION_RETENTION} is set",
                remedy=f"Run ALTER TABLE … UNSET TBLPROPERTIES ('{TRANSACTION_RETENTION}'); exactly-once needs them.",
            )
        if coordinator := next((n for n in snapshot.configuration if n.startswith(COMMIT_COORDINATOR)), None):
            raise catalog_decides(self.log.path, f"{coordinator} is set")
        if self._last is not None and self._last[0] == snapshot.table_id and self._last[1].version == snapshot.version:
            return self._last[1]
        number = snapshot.last_number(self.app)
        newest = self._newest_readable(snapshot)
        if newest is None:
            self._check_readable(snapshot, self.app)
            return LedgerState(snapshot.version, schema=snapshot.schema)
        found_full = self._newest_full(snapshot.version)
        assert found_full is not None  # the first entry of a group is full
        full, told = found_full
        is_restored = self._is_restored(newest, snapshot.version)
        sharing = self._sharing(newest, snapshot.version)
        folded = self._fold_to(snapshot.version)
        if folded.error is not None:
            raise folded.error
        longest = _longest_ms(snapshot.configuration.get(LOG_RETENTION))
        carrier = FullEntry(full.version, full.timestamp_ms, longest, self._is_restored(told, snapshot.version))
        judge = self._judge(told, is_restored=carrier.is_restored)
        identities = self._identities(told, snapshot.version)
        found = LedgerState(
            snapshot.version,
            folded.state,
            newest,
            number,
            judge.settled if judge else -1,
            sharing,
            is_restored,
            judge.uncounted if judge else {},
            identities,
            carrier,
            judge.judged if judge else 0,
            folded.totals,
            snapshot.schema,
        )
        self._last = snapshot.table_id, found
        return found

    def totals(self, state: LedgerState) -> Totals:
        """What the commits of the group add up to; where no entry says it, as far as the log reaches back."""
        if state.totals is not None:
            return state.totals
        if self._tallied is None or self._tallied[0] != state.version:
            entries: list[LedgerEntry] = []
            # Behind a RESTORE to who knows where the log does not tell.
            with suppress(LedgerUnreadableError, LedgerTruncatedError):
                entries.extend(commit.entry for commit in self.surviving(state.version) if commit.entry)
            self._tallied = state.version, tally_all(entries)
        return self._tallied[1]

    def was_restored(self, *, after: int, state: LedgerState) -> bool:
        """Whether there was a RESTORE behind version ``after``, as far as the log tells; if it does not, there was."""
        try:
            return self._any(after + 1, state.version + 1, lambda commit: commit.restored is not None)
        except LedgerTruncatedError:
            return True

    def written(self, number: int, *, after: int) -> Commit | None:
        """The commit with this number of the transaction sequence behind version ``after``; ``None`` if there is none.

        Raises:
            LedgerUnreadableError: it cannot be told, so nothing may be acknowledged.
        """
        return self.log.find(lambda commit: commit.transactions.get(self.app) == number, after=after)

    def find(self, wanted: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], LedgerEntry]:
        """The commits with these app ids and numbers, as far as there are any.

        Raises:
            LedgerTruncatedError: the log was cleaned before all were found, so that it cannot be told.
        """
        missing, found = set(wanted), {}
        for version in self.log.newest_versions():
            if not missing:
                break
            entry = self._need(version).entry
            if entry is not None and (entry.app, entry.number) in missing:
                missing.discard((entry.app, entry.number))
                found[entry.app, entry.number] = entry
        return found

    def last_number(self, member: str) -> int:
        """The last transaction number of another member or shard of the group."""
        snapshot = self.log.snapshot()
        return snapshot.last_number(app_id(self.group, member)) if snapshot else 0

    def lost_rows(self, state: LedgerState) -> frozenset[str]:
        """The ids of batches whose rows a RESTORE removed since the newest commit of the group was planned."""
        if not state.is_restored:
            return frozenset()
        written = {c.entry.bid for c in self.newest_first() if c.entry and c.entry.kind == "batch"}
        return frozenset(written - {c.entry.bid for c in self.surviving() if c.entry})

    def check_first(self, shards: Iterable[Shard]) -> None:
        """Refuse a first commit of a group that has written before, in whatever transaction sequence.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that what it wrote is not known.
        """
        snapshot = self.log.snapshot()
        if snapshot is None:
            return
        if self._newest_readable(snapshot) is not None:
            return
        for member in ("main", self.member, *map(str, sorted(shards))):
            self._check_readable(snapshot, app_id(self.group, member))

    def other_group(self, streams: frozenset[str]) -> str | None:
        """A group other than this one that has written one of these streams into the table.

        A full entry names all streams that its group had at its base, so that older commits of the group say nothing
        more. Beyond the newest commits, only a group whose rows the table may hold is searched for.

        Raises:
            LedgerTruncatedError: the log was cleaned, and rows of these streams are there: whose they are is unknown.
        """
        snapshot = self.log.snapshot()
        if snapshot is None:
            return None
        others: Collection[str] | None = None
        bases: dict[str, int] = {}
        is_cleaned = False
        for version in range(snapshot.version, -1, -1):
            if snapshot.version - version == NEAR:
                if not snapshot.may_hold(streams):
                    return None
                groups = self._groups(snapshot)
                others = None if groups is None else groups - {self.group}
            if others is not None and all(bases.get(group, -1) >= version for group in others):
                return None
            commit = self.log.commit(version)
            if commit is None:
                is_cleaned = True
                break
            entry = commit.entry
            if entry is None or entry.group == self.group:
                continue
            if streams & {shard.stream for shard in (*(entry.state or ()), *entry.written, *entry.origin)}:
                return entry.group
            if entry.is_full:
                bases[entry.group] = max(entry.base, bases.get(entry.group, -1))
        if is_cleaned and snapshot.may_hold(streams):
            raise LedgerTruncatedError(
                f"the log of {self.log.path} was cleaned, and the table holds rows of {', '.join(sorted(streams))}",
                remedy="Use the group that wrote them, or another table: a row is known by stream, shard and sequence.",
                group=self.group,
            )
        return None

    def newest_first(self) -> Iterator[Commit]:
        """The commits of the group, newest first, as far as the log reaches back."""
        for version in self.log.newest_versions():
            commit = self._own(version)
            if commit is None:
                return
            if commit.entry is not None:
                yield commit

    def surviving(self, up_to: int | None = None) -> Iterator[Commit]:
        """The commits of the group whose rows no RESTORE removed, newest first, as far as the log reaches back.

        Args:
            up_to: the version to begin with; the newest by default.
        """
        yield from (commit for commit in self._not_removed(up_to) if commit.entry is not None)

    def foreign(self) -> Iterator[Commit]:
        """What others than this package have changed in the rows, and no RESTORE took back; newest first, likewise."""
        for own in self._not_removed():
            commit = self.log.commit(own.version)
            if commit is not None and commit.entry is None and commit.changes_rows:
                yield commit

    def _not_removed(self, up_to: int | None = None) -> Iterator[Commit]:
        snapshot = self.log.snapshot() if up_to is None else None
        version = up_to if up_to is not None else snapshot.version if snapshot else -1
        while version >= 0:
            commit = self._own(version)
            if commit is None:
                return
            if commit.restored is not None:
                version = self._restored_version(commit)
                continue
            yield commit
            version -= 1

    def _check_readable(self, snapshot: TableSnapshot, app: str) -> None:
        number = snapshot.last_number(app)
        if number:
            raise LedgerTruncatedError(
                f"the log of {self.log.path} was cleaned: "
                f"{app} wrote {counted(number, 'batch', 'batches')}, none is readable",
                remedy="Say where to start with a new group name and table, or restore the log files.",
                version=snapshot.version,
            )

    def _own(self, version: int) -> Commit | None:
        """The commit with its entry, the entry ``None`` where it is not of this group; ``None`` if cleaned away."""
        commit = self.log.commit(version)
        if commit is None:
            return None
        entry = commit.entry
        ours = entry is not None and entry.group == self.group
        claimed = [app for app in commit.transactions if app.startswith(f"{self.group}/")]
        if claimed and not (ours and entry and commit.transactions.get(entry.app) == entry.number):
            raise ForeignCommitError(
                f"version {version} of {self.log.path} carries the transaction {claimed[0]} but not our metadata",
                remedy=f"Somebody else writes as group {self.group!r}: give one of the two another group name.",
            )
        return commit if ours else replace(commit, entry=None)

    def _judge(self, full: LedgerEntry, *, is_restored: bool) -> LedgerEntry | None:
        """The newest full entry whose rows survived, as all did that it knew of: it says which dead letters count."""
        if not is_restored:
            return full
        for commit in self.surviving():
            if commit.entry is None or not commit.entry.is_full:
                continue
            try:
                late = self._is_restored(commit.entry, commit.version - 1)
            except LedgerTruncatedError:
                break
            if not late:
                return commit.entry
        return None

    def _is_restored(self, entry: LedgerEntry, version: int) -> bool:
        """Whether there was a RESTORE up to ``version`` since the entry was planned."""
        return self._any(entry.base + 1, version + 1, lambda commit: commit.restored is not None)

    def _newest(self, snapshot: TableSnapshot) -> LedgerEntry | None:
        """The newest entry of the group up to a version; ``None`` if it has none."""
        for number in range(snapshot.version, -1, -1):
            if snapshot.version - number == NEAR:
                groups = self._groups(snapshot)
                if groups is not None and self.group not in groups:
                    return None
            entry = self._need(number).entry
            if entry is not None:
                return entry
        return None

    def _newest_full(self, version: int) -> tuple[Commit, LedgerEntry] | None:
        """The newest full entry of the group up to ``version``, and its commit; ``None`` if it has none."""
        for number in range(version, -1, -1):
            commit = self._need(number)
            if commit.entry is not None and commit.entry.is_full:
                return commit, commit.entry
        return None

    def _newest_readable(self, snapshot: TableSnapshot) -> LedgerEntry | None:
        try:
            return self._newest(snapshot)
        except LedgerTruncatedError:
            return None

    def _groups(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        """The groups that have written up to a version, as its transactions name them; ``None``: they are not known."""
        apps = self.log.transactions(snapshot)
        return None if apps is None else frozenset(app.partition("/")[0] for app in apps if "/" in app)

    def _sharing(self, newest: LedgerEntry, version: int) -> str:
        """The first commit decides, then every switch; no RESTORE changes it: transaction sequences just continue."""
        sharing = newest.sharing
        for number in range(newest.base + 1, version + 1):
            entry = self._need(number).entry
            if entry is not None and entry.switch is not None and (entry.kind == "fence" or not sharing):
                sharing = entry.switch
        return sharing

    def _identities(self, full: LedgerEntry, version: int) -> Mapping[str, str]:
        """Those of the newest full entry and of all since its base: one on its way does not know an accept."""
        identities = dict(full.identities)
        for number in range(full.base + 1, version + 1):
            entry = self._need(number).entry
            identities.update(entry.identities if entry else {})
        return identities

    def _fold_to(self, version: int) -> _Folded:
        """The fold up to ``version``, starting from the newest state that an entry carries: that at its base.

        A RESTORE to who knows where makes an error of it, until a RESTORE to a known version follows.
        """
        full = self._newest_full(version)
        if full is None:
            return _Folded({}, Totals())
        base, now = full[1].base, _Folded(full[1].state or {}, full[1].totals)
        folds: dict[int, _Folded] = {base: now}
        for number in range(base + 1, version + 1):
            commit = self._need(number)
            if commit.restored is not None:
                try:
                    target = self._restored_version(commit)
                    past = folds[target] if target in folds else self._fold_to(target)
                    now = replace(past, state=restore(now.state, past.state))
                except (LedgerUnreadableError, LedgerTruncatedError) as unknown:
                    now = _Folded(restore(now.state, now.state), now.totals, unknown)
            elif commit.entry is not None:
                late = self._is_restored(commit.entry, number - 1)
                totals = tally(now.totals, commit.entry) if now.totals is not None else None
                now = _Folded(fold(now.state, commit.entry, late=late), totals, now.error)
            folds[number] = now
        return now

    def _restored_version(self, commit: Commit) -> int:
        """The version that a RESTORE went back to, or any that is like it for the group.

        Raises:
            LedgerUnreadableError: it cannot be told.
        """
        newest, *others = self.log.restored_versions(commit)
        if others and self._any(others[-1] + 1, newest + 1, lambda c: c.entry is not None or c.restored is not None):
            like = self._fold_to(newest)
            for other in others:
                found = self._fold_to(other)
                if like.error is not None or (found.state, found.error) != (like.state, None):
                    raise LedgerUnreadableError(
                        f"{self.log.path} was restored to {commit.restored!r} (version {commit.version}); that may be "
                        f"version {other} or {newest}, which have the same files, but other positions",
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
                remedy="Say where to start with a new group name, or restore the log files.",
            )
        return commit


# What an entry says of the moment in which it was planned, and of whose it is.
_OF_THE_MOMENT = frozenset(
    [
        "kind",
        "group",
        "app",
        "by",
        "number",
        "bid",
        "base",
        "state",
        "settled",
        "uncounted",
        "judged",
        "totals",
        "sharing",
        "identities",
    ]
)


def interval_ms(text: str) -> int | None:
    """How long an interval of a table property is, in milliseconds; ``None`` where it has another form, like months.

    Example:
        >>> interval_ms("interval 30 days"), interval_ms("2 hours"), interval_ms("interval 1 month")
        (2592000000, 7200000, None)
    """
    found = _INTERVAL.fullmatch(text.strip())
    return int(found[1]) * _UNIT_MS[found[2].lower()] if found else None


def _longest_ms(retention: str | None) -> int:
    """How old the newest full entry may become: an hour, or less where the log is kept less than a day.

    Example:
        >>> _longest_ms(None), _longest_ms("interval 30 days"), _longest_ms("interval 1 hour"), _longest_ms("soon")
        (3600000, 3600000, 150000, 0)
    """
    if retention is None:
        return LONGEST_MS
    length = interval_ms(retention)
    return 0 if length is None else min(LONGEST_MS, length // 24)
