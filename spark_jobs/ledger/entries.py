"""The batch metadata, which each of our commits has as its ``userMetadata`` in the Delta log.

Texts of usual size stay JSON that people can read in ``DESCRIBE HISTORY``. A large one is packed (:func:`pack`). Each
object whose keys are shards, and whose values are whole numbers or lists of the same length, is stored as a table. Its
numbers are laid out by significance, the high bytes of all numbers first. These bytes hardly differ between shards, and
columns that occur in several tables, like a position and the start of the next range, compress to one copy.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple, TypedDict

import numpy as np

from spark_jobs.ledger.intervals import MAX_SEQUENCE, MIN_SEQUENCE, Intervals, json_values, per_shard
from stream_consumers.batches import LastMessage, PositionFacts, Range
from stream_consumers.errors import FormatError, InvalidUrlError, described
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode
from stream_consumers.versions import check_choice, check_keys, check_version, newer

FORMAT = 3
"""The format number of new entries; entries of all :data:`FORMATS` can be read. It grows when the meaning of a field
changes. A release that reads format 2 refuses a larger number, but ignores unknown keys, modes and ways to share.
"""
FORMATS = range(2, FORMAT + 1)
KEEPER = "keep"
"""The member whose transaction sequence a group uses to write full entries only, so that they race with no batch."""
REPLAYER = "replay"
"""The member as which a group replays and redrives."""
PAUSE = "turn"
"""The kind of an empty commit that asks ingestion to pause."""
PURGE = "purge"
"""The kind of a commit that removes rows that mark deleted keys, and the member that writes it."""
KINDS = ("batch", "fence", "init", "replay", "keep", "accept", PAUSE, "dismiss", "rebuild", PURGE)
SWITCHING = "switching"
CLAIMS = "load_balanced by claims"
LEAVING_CLAIMS = "switching from claims"
BATCH_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The form of a batch id, which is safe in SQL conditions."""
SHARINGS = ("", *(mode.value for mode in ConsumerMode), SWITCHING, CLAIMS, LEAVING_CLAIMS)
"""How a group may share its shards."""
MAX_PLAIN_BYTES = 4096
"""The most bytes of a text that is not packed."""
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""The most bytes of an unpacked text. A million shards take half of them."""
MAX_SKELETON_BYTES = 4 * 1024 * 1024
"""The most bytes of JSON in an unpacked text. Each of them may take 25 bytes in memory."""
MAX_PACKED_ROWS = 2_000_000
"""The most rows in the tables of a packed text. Each row takes some hundred bytes in memory."""
_MIN_PACKED_ROWS = 8
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_COLUMNS = "\0columns"
_REST = "\0rest"
MAX_REPLAYS = 16
"""How many replays and rewinds are remembered. To find an older one, the log is searched."""
MAX_LOSSES = 16
"""How many losses of a shard are remembered with their own range. Older ones are merged into one range."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """The progress of a replay, or what a rewind has moved.

    Args:
        goal: everything that the replay replaces; shards in which it replaces nothing may be missing.
        done: the part of ``goal`` that is in the table.
        is_complete: whether ``done`` is complete. It may lack progress that was dropped from the totals.
    """

    goal: Mapping[Shard, Range] = field(default_factory=dict)
    done: Mapping[Shard, Intervals] = field(default_factory=dict)
    is_complete: bool = True


def replay_key(kind: str, replay: str) -> str:
    """Return the key of a replay in the totals. A rewind and a replay may have the same id, so the kind is part of it.

    Example:
        >>> replay_key("replay", "nightly")
        'replay/nightly'
    """
    return f"{kind}/{replay}"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the commits of a group that no RESTORE removed.

    Args:
        dead: dead letters, including those in ranges that were replaced since.
        lost: the messages that were gone from the stream before they were read.
        replaced: the number of commits that have replaced rows.
        replays: the replays and rewinds by :func:`replay_key`, the newest one last.
        has_dropped_replays: whether the oldest replays were dropped, because there were too many.

    Example:
        >>> totals = Totals(dead=3, replaced=1)
        >>> Totals.from_json(totals.to_json()) == totals
        True
    """

    dead: int = 0
    lost: Mapping[Shard, Intervals] = field(default_factory=dict)
    replaced: int = 0
    replays: Mapping[str, ReplayProgress] = field(default_factory=dict)
    has_dropped_replays: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, without those that are empty or zero."""
        found = {
            "dead": self.dead,
            "lost": self.lost,
            "replaced": self.replaced,
            # A list: an object that is packed has no order.
            "replays": [[key, one.goal, one.done, one.is_complete] for key, one in self.replays.items()],
            "forgetful": self.has_dropped_replays,
        }
        return {name: json_values(value) for name, value in found.items() if value}

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Totals:
        """Read the result of :meth:`to_json`.

        Raises:
            UnsupportedVersionError: it has an unknown key.
        """
        check_keys(known, what="the totals", keys=("dead", "lost", "replaced", "replays", "forgetful"))
        replays = {
            key: ReplayProgress(
                per_shard(goal, lambda part: Range(*part)), per_shard(done, Intervals.from_json), is_complete
            )
            for key, goal, done, is_complete in known.get("replays", ())
        }
        return cls(
            known.get("dead", 0),
            per_shard(known.get("lost", {}), Intervals.from_json),
            known.get("replaced", 0),
            replays,
            known.get("forgetful", False),
        )


@dataclass(frozen=True, slots=True)
class ShardState:
    """What the ledger knows of one shard.

    Args:
        covered: the sequences whose rows are in the table, from before the origin on.
        redo: covered sequences whose rows have to be replaced.
        origin: where reading began; ``None`` if the group has not begun with the shard.
        claimed: the sequence after the last Redis entry that a batch of claimed entries wrote; ``None`` if there is
            none.
        ended: where the shard ended for good, because its stream was recreated and the new one was accepted; ``None``
            while it goes on.
        last: the last message that was read; ``None`` if it is unknown.
        adopted: the start of the adopted rows, which end at the origin. It is equal to the origin if a RESTORE undid
            the adopt; ``None`` if no rows were adopted.
        facts_at_start: the facts of the source at ``adopted``, or if that is ``None``, at the origin. A RESTORE does
            not change them. ``None`` without facts.
    """

    covered: Intervals = field(default_factory=Intervals)
    redo: Intervals = field(default_factory=Intervals)
    origin: int | None = None
    claimed: int | None = None
    ended: int | None = None
    last: LastMessage | None = None
    adopted: int | None = None
    facts_at_start: PositionFacts | None = None

    @property
    def start_facts(self) -> tuple[int, PositionFacts] | None:
        """The start of the shard and the facts of the source there; ``None`` without facts."""
        first = self.origin if self.adopted is None else self.adopted
        return None if first is None or self.facts_at_start is None else (first, self.facts_at_start)

    @property
    def is_adopt_undone(self) -> bool:
        """Whether a RESTORE undid the adopt, so that the table may hold adopted rows that no commit covers."""
        return self.ended is None and self.adopted is not None and self.adopted == self.origin

    @property
    def position(self) -> int | None:
        """The next sequence that is missing or has to be replaced; ``None`` if the group has not begun."""
        missing = self.covered.position
        return min(missing, self.redo.ranges[0].start) if self.redo and missing is not None else missing

    @property
    def is_written(self) -> bool:
        """Whether the group has done more than claim it: a batch was written, or the position was moved."""
        return self.claimed is not None or self.covered != Intervals.of((MIN_SEQUENCE, self.origin or 0))

    @property
    def written_end(self) -> int | None:
        """The sequence after the last Redis entry in the table, claimed or read by position; ``None`` if none is."""
        reached = self.covered.position or 0
        return max(self.claimed or 0, reached if reached > (self.origin or 0) else 0) or None

    def to_json(self) -> list[int] | dict[str, Any]:
        """Return the state as JSON values.

        A state without other fields is a list of the position, the origin, the last message, and the facts at the
        origin. An older release would mistake facts of another length for a last message.
        """
        facts = self.facts_at_start if self.last is not None and None not in (self.facts_at_start or ()) else None
        plain = ShardState(Intervals(self.covered.ranges[:1]), origin=self.origin, last=self.last, facts_at_start=facts)
        if self.origin is not None and self == plain:
            covered = self.covered.ranges
            if covered and covered[0].start == MIN_SEQUENCE:
                return [covered[0].end, self.origin, *(self.last or ()), *(facts or ())]
        parts = {"cov": self.covered.to_json(), "redo": self.redo.to_json()}
        known = {"origin": self.origin, "claimed": self.claimed}
        optional = {"ended": self.ended, "last": self.last, "adopted": self.adopted, "counted": self.facts_at_start}
        return {**parts, **known, **{name: value for name, value in optional.items() if value is not None}}

    @classmethod
    def from_json(cls, known: list[int] | Mapping[str, Any]) -> ShardState:
        """Read the result of :meth:`to_json`."""
        if isinstance(known, list):
            (position, origin), last, first = known[:2], known[2:6], known[6:]
            return cls(
                Intervals.of((MIN_SEQUENCE, position)),
                origin=origin,
                last=LastMessage(*last) if last else None,
                facts_at_start=PositionFacts(*first) if first else None,
            )
        keys = ("cov", "redo", "origin", "claimed", "ended", "last", "adopted", "counted")
        check_keys(known, what="the state of a shard", keys=keys)
        covered, redo = Intervals.from_json(known["cov"]), Intervals.from_json(known["redo"])
        remembered = LastMessage(*known["last"]) if known.get("last") else None
        facts = PositionFacts(*known["counted"]) if known.get("counted") else None
        ended, adopted = known.get("ended"), known.get("adopted")
        return cls(covered, redo, known["origin"], known["claimed"], ended, remembered, adopted, facts)


State = Mapping[Shard, ShardState]
Floor = int | str
"""A value of ``sequence_by``, below which rows of deleted keys may be gone; see :mod:`spark_jobs.writing.floor`."""
# The dead letters that do not count: for each batch id their ranges, or no range if it is the whole batch.
Uncounted = Mapping[str, Mapping[Shard, Intervals]]


class WriteMode(NamedTuple):
    """What a commit in a write mode does; each question of the code has its own answer here.

    Args:
        fits_one_pass: the batch may be written while it is read.
        repeats_rows: messages that have rows already get them a second time.
        overwrites: all rows at its places are removed before its own are added.
        merges: the rows of the keys that its messages change are inserted, updated and deleted.
        rewrites_files: data files that it removes have rows that it replaces.
        keeps_last_copies: rows at its places whose messages cannot be read again are written again.
        replaces_dead_letters: dead letters of older batches at its places no longer count.
        reduces_redo: its places are removed from ``redo``.
        takes_effect_at_base: it is ordered as if it had landed directly after the version that it was planned from.
        redoes_rest: everything that is covered behind its first range is added to ``redo``, because its changes have to
            be merged again after those of the commit.
        rebuilds: the rows and the state of a staging table take the place of all rows and of the state of the table.
    """

    fits_one_pass: bool = False
    repeats_rows: bool = False
    overwrites: bool = False
    merges: bool = False
    rewrites_files: bool = False
    keeps_last_copies: bool = False
    replaces_dead_letters: bool = False
    reduces_redo: bool = False
    takes_effect_at_base: bool = False
    redoes_rest: bool = False
    rebuilds: bool = False

    @property
    def reads_again(self) -> bool:
        """Whether it writes messages that were written before, which may have corrections."""
        return self.reduces_redo and self.replaces_dead_letters


MODES: Mapping[str, WriteMode] = {
    "append": WriteMode(fits_one_pass=True, repeats_rows=True),
    "replace": WriteMode(
        overwrites=True, rewrites_files=True, keeps_last_copies=True, replaces_dead_letters=True, reduces_redo=True
    ),
    "dismiss": WriteMode(replaces_dead_letters=True, takes_effect_at_base=True),
    # Changes of keys, in the order of their positions.
    "merge": WriteMode(merges=True, reduces_redo=True, redoes_rest=True),
    "merge again": WriteMode(merges=True, replaces_dead_letters=True, reduces_redo=True, redoes_rest=True),
    # Changes of keys whose deletions have rows, in any order.
    "upsert": WriteMode(merges=True, reduces_redo=True),
    "upsert again": WriteMode(merges=True, replaces_dead_letters=True, reduces_redo=True),
    "rebuild": WriteMode(replaces_dead_letters=True, rebuilds=True),
}
"""The ways to write a batch. Those with ``again`` write messages that were written before."""


class ClaimedRange(NamedTuple):
    """The Redis entries of a shard that one batch claimed: ``entries`` of those from ``start`` up to ``end``."""

    start: int
    end: int
    entries: int


class KeyOrder(NamedTuple):
    """The key of a keyed table, and the order of the changes of a key.

    Args:
        columns: the columns of the key.
        sequence_by: the SQL expression that orders the changes; empty if their position in the shard does.
        scd_type: 1 for a row per key, 2 for a row per change.
    """

    columns: Sequence[str]
    sequence_by: str = ""
    scd_type: int = 1

    def __str__(self) -> str:
        order = f" in the order of {self.sequence_by}" if self.sequence_by else ""
        return f"{', '.join(self.columns)}{order}{', with all versions (SCD type 2)' if self.scd_type == 2 else ''}"

    def to_json(self) -> list[Any]:
        """Return a list. It has no SCD type 1, so that older releases read it; they refuse the others."""
        return [list(self.columns), self.sequence_by, *([self.scd_type] if self.scd_type != 1 else ())]


class PlannedFields(TypedDict, total=False):
    """The fields of a :class:`LedgerEntry` that are known when a batch is planned."""

    ranges: Mapping[Shard, Range]
    places: Mapping[Shard, Intervals]
    mode: str
    until: Mapping[Shard, int]
    origin: Mapping[Shard, int]
    messages: int
    dead: int
    hint: Mapping[str, object] | None
    switch: str | None
    lost: Mapping[Shard, Intervals]
    claims: Mapping[Shard, ClaimedRange]
    replay: str
    goal: Mapping[Shard, Range]
    begins: bool
    skipped: Mapping[Shard, Range]
    transform: str
    ended: Mapping[Shard, int]
    last_messages: Mapping[Shard, LastMessage]
    adopted: Mapping[Shard, int]
    facts_at_start: Mapping[Shard, PositionFacts]
    keys: KeyOrder | None
    purged_below: Floor | None


class EntryFields(PlannedFields, total=False):
    """All fields of a :class:`LedgerEntry` that do not follow from the state of the ledger."""

    by: str
    bid: str
    number: int
    identities: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The metadata of one of our commits.

    A full entry has the whole state of the ledger at its base. The others have only what they change, which is little
    however many shards there are. :meth:`spark_jobs.ledger.ledger.Ledger.entry` decides which entries are full.

    Args:
        kind: one of :data:`KINDS`; ``init`` is the first commit of a group, ``accept`` the first one of an epoch,
            :data:`PAUSE` asks other runs to wait for a run that replaces rows, and ``dismiss`` replaces the dead
            letters at its places with dismissed ones, and writes and removes no rows.
        group: the consumer group.
        app: the transaction app id: ``<group>/<member>``, or ``<group>/<stream>/<shard>`` if every shard has its own
            transaction sequence; for a fence, the app id of the fenced sequence; for a keyed table, ``<group>/main``.
        number: the transaction version.
        by: the member that wrote it.
        bid: the id of the attempt, never reused.
        base: the table version it was planned from; -1 before the table exists.
        ranges: the ranges that it covers.
        places: for a redrive or a dismissal, instead of ``ranges``: the single sequences that it replaces. Rows
            between them stay.
        mode: one of :data:`MODES`.
        until: for a replace, the end of the range that later batches have to replace, too.
        origin: first positions, resolved to numbers.
        state: the fold at ``base``; ``None`` if the entry is not full.
        messages: the number of decoded messages.
        dead: the number of dead letters of the batch.
        identities: for each epoch of each stream, the fingerprint that detects a recreated stream; if the entry is not
            full, those that the ledger did not have at ``base``.
        hint: for the next plan; see :mod:`stream_consumers.batches` and :func:`spark_jobs.ledger.fold.moved_facts`.
        dead_letters_version: in versions of the dead-letter table up to this one, every dead letter counts except
            those in ``uncounted``; only in full entries.
        uncounted: the dead letters that do not count: a RESTORE removed their batch, or another batch replaced their
            range. It is stored because the commits that show it are cleaned from the log one day; only in full entries.
        replaces_considered: the number of replaces that ``uncounted`` already reflects; only in full entries.
        totals: the sums over the commits up to ``base``; only in full entries.
        sharing: how the group shared its shards at ``base``, see
            :attr:`spark_jobs.batches.ingestion.Ingestion.sharing_mode`; it decides which transaction sequences there
            are. Empty before the first commit.
        switch: for the first commit or a fence, how the group shares from here on.
        lost: messages that were gone from the stream before they were read; the group skips them, as the user chose.
        claims: the entries of the batch, if members claim single Redis entries; no position follows from them. For an
            accept, the end of the written entries of each shard that goes on.
        replay: the id of the replay or rewind that the commit belongs to. A run with the same id continues it.
        goal: for a replay, everything that it replaces, in this batch and in others.
        begins: for a replay or a rewind, whether it had no commit in the table when this one was planned.
        skipped: ranges that the group never reads, because a user moved it forwards.
        transform: the name of the transform that returned the rows; empty without one.
        ended: for an accept, where the shards of the epoch before it end.
        last_messages: the last message of each range, as the stream held it when the batch was planned.
        removed_claim_batches: see :class:`spark_jobs.ledger.ledger.LedgerState`, as of ``base``; only in full entries.
        adopted: for an adopt, the start of the adopted rows, which end at the origins.
        facts_at_start: the facts at the origins, or at the start of adopted rows, that are not in ``hint``.
        keys: for a keyed table, its key and the order of changes; ``None`` for a table that is appended to.
        floor: the floor of the table at ``base``; ``None`` before the first purge.
        purged_below: for a purge, the floor of the table from here on.
    """

    kind: str
    group: str
    app: str
    number: int
    by: str
    bid: str
    base: int
    ranges: Mapping[Shard, Range] = field(default_factory=dict)
    mode: str = "append"
    until: Mapping[Shard, int] = field(default_factory=dict)
    origin: Mapping[Shard, int] = field(default_factory=dict)
    state: State | None = field(default_factory=dict)
    messages: int = 0
    dead: int = 0
    identities: Mapping[str, str] = field(default_factory=dict)
    hint: Mapping[str, object] | None = None
    dead_letters_version: int = -1
    sharing: str = ""
    switch: str | None = None
    lost: Mapping[Shard, Intervals] = field(default_factory=dict)
    claims: Mapping[Shard, ClaimedRange] = field(default_factory=dict)
    replay: str = ""
    goal: Mapping[Shard, Range] = field(default_factory=dict)
    skipped: Mapping[Shard, Range] = field(default_factory=dict)
    transform: str = ""
    uncounted: Uncounted = field(default_factory=dict)
    ended: Mapping[Shard, int] = field(default_factory=dict)
    replaces_considered: int = 0
    totals: Totals = field(default_factory=Totals)
    begins: bool = False
    places: Mapping[Shard, Intervals] = field(default_factory=dict)
    last_messages: Mapping[Shard, LastMessage] = field(default_factory=dict)
    removed_claim_batches: Intervals = field(default_factory=Intervals)
    adopted: Mapping[Shard, int] = field(default_factory=dict)
    facts_at_start: Mapping[Shard, PositionFacts] = field(default_factory=dict)
    keys: KeyOrder | None = None
    floor: Floor | None = None
    purged_below: Floor | None = None

    @property
    def affected(self) -> Mapping[Shard, Intervals]:
        """The sequences that it covers or replaces.

        Example:
            >>> entry = LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, ranges={Shard("orders"): Range(0, 5)})
            >>> str(entry.affected[Shard("orders")])
            '[0,5)'
        """
        return {**{shard: Intervals.of(part) for shard, part in self.ranges.items()}, **self.places}

    @property
    def replaced(self) -> Mapping[Shard, Intervals]:
        """The sequences whose older dead letters no longer count, if its mode replaces dead letters."""
        return (
            dict.fromkeys(self.ranges, Intervals.of((0, MAX_SEQUENCE))) if self.write_mode.rebuilds else self.affected
        )

    @property
    def extents(self) -> Mapping[Shard, Range]:
        """The range from its first to its last message of each shard; others may own claimed entries in between.

        Example:
            >>> claims = {Shard("a"): ClaimedRange(3, 9, 2)}
            >>> entry = LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, claims=claims)
            >>> entry.extents[Shard("a")]
            Range(start=3, end=9)
        """
        claimed = {shard: Range(start, end) for shard, (start, end, _) in self.claims.items()}
        return {**claimed, **{shard: parts.hull for shard, parts in self.affected.items() if parts}}

    @property
    def write_mode(self) -> WriteMode:
        """The effects of its mode."""
        return MODES[self.mode]

    @property
    def adds_copies(self) -> bool:
        """Whether it is a replay that adds copies of rows, which covers no range and is in no count."""
        return self.kind == "replay" and self.write_mode.repeats_rows

    @property
    def is_full(self) -> bool:
        """Whether it has the whole state of the ledger at its base."""
        return self.state is not None

    def to_json(self) -> str:
        """Return the ``userMetadata`` text. It is plain JSON; a long one is packed except for its first keys.

        Raises:
            FormatError: :meth:`from_json` could not read it, so that the commit would make the ledger unreadable.
        """
        text = self._text()
        try:
            self._read(json.loads(text))
        except _UNREADABLE as error:
            raise FormatError(
                f"metadata of batch {self.bid!r:.100} would not be readable ({described(error)}), so it is not written",
                remedy="Use only sequences below 2^63-1. If you set none, report this as a bug.",
            ) from error
        return text

    def _text(self) -> str:
        document: dict[str, object] = {"v": FORMAT}
        for name, key in _KEYS.items():
            value = getattr(self, name)
            if name != "state" and name in _DEFAULTS and value == _DEFAULTS[name]:
                continue
            document[key] = json_values(value)
        text = json.dumps(document, separators=(",", ":"))
        if len(text) <= MAX_PLAIN_BYTES:
            return text
        plain = json.loads(text)
        head = {key: plain.pop(key) for key in ("v", *_HEAD)}
        return json.dumps({**head, "packed": pack(plain)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, document: object) -> LedgerEntry | None:
        """Read the JSON of :meth:`to_json`; return ``None`` if another program wrote it.

        Raises:
            UnsupportedVersionError: it is ours, but this release cannot read all of it.
        """
        if not isinstance(document, dict) or not document.keys() >= _MARKS:
            return None
        check_version(document["v"], what="batch metadata", versions=FORMATS)
        try:
            return cls._read(document)
        except _UNREADABLE as error:
            raise newer(f"metadata of batch {document['bid']!r:.100} cannot be read ({described(error)})") from error

    @classmethod
    def _read(cls, document: Mapping[str, Any]) -> LedgerEntry:
        if "packed" in document:
            document = {**document, **unpack(document["packed"])}
        check_keys(document, what="batch metadata", keys=("v", "packed", *_KEYS.values()))
        # The state of an entry that is not full is written as null, and never left out.
        optional = _DEFAULTS.keys() - {"state"}
        values = {name: document[key] for name, key in _KEYS.items() if key in document or name not in optional}
        entry = cls(**{name: _from_json(name, value) for name, value in values.items()})
        if not all(map(BATCH_ID.fullmatch, [entry.bid, *entry.uncounted])):
            raise ValueError("the id of a batch has characters that no release writes")
        check_choice(entry.kind, what="the kind of batch metadata", choices=KINDS)
        check_choice(entry.mode, what="the mode of batch metadata", choices=MODES)
        check_choice(entry.sharing, what="how a group shares its shards", choices=SHARINGS)
        if entry.switch is not None:
            check_choice(entry.switch, what="how a group shares its shards", choices=SHARINGS)
        return entry


def _from_json(name: str, value: Any) -> Any:
    if name in _PLAIN and type(value) is not _PLAIN[name]:
        raise TypeError(f"{name} is {value!r:.100}")
    if name in ("hint", "identities") and value is not None:
        if not isinstance(value, dict) or (
            name == "identities" and not all(isinstance(v, str) for v in value.values())
        ):
            raise TypeError(f"{name} is {value!r:.100}")
        json.dumps(value, allow_nan=False)
    if name == "keys" and value is not None:
        columns, sequence_by, *scd_types = value
        if not all(isinstance(one, str) for one in (*columns, sequence_by)) or scd_types not in ([], [2]):
            raise TypeError(f"{name} is {value!r:.100}")
        return KeyOrder(tuple(columns), sequence_by, *scd_types)
    if name in ("floor", "purged_below") and value is not None and type(value) not in (int, str):
        raise TypeError(f"{name} is {value!r:.100}")
    if name == "totals":
        return Totals.from_json(value)
    if name == "removed_claim_batches":
        _check_numbers(value)
        return Intervals.from_json(value)
    if name == "uncounted":
        return {bid: per_shard(ranges, Intervals.from_json) for bid, ranges in value.items()}
    if name in _PER_SHARD and value is not None:
        _check_numbers(value)
        return per_shard(value, _PER_SHARD[name])
    return value


def _check_numbers(value: object) -> None:
    """Refuse values that cannot be positions: fractions, infinity, and whole numbers of more than 64 bits."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_numbers(part)
    elif value is not None and not (type(value) is int and -(2**63) <= value < 2**63):
        raise ValueError(f"{value!r:.100} is not a position")


# Errors of reading an entry that no release has written.
_UNREADABLE = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    InvalidUrlError,
)
# Functions that read the value of one shard, by field.
_PER_SHARD: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("ranges", "goal", "skipped"), lambda pair: Range(*pair)),
    **dict.fromkeys(("until", "origin", "ended", "adopted"), int),
    **dict.fromkeys(("lost", "places"), Intervals.from_json),
    "state": ShardState.from_json,
    "claims": lambda triple: ClaimedRange(*triple),
    "last_messages": lambda values: LastMessage(*values),
    "facts_at_start": lambda values: PositionFacts(*values),
}
_PLAIN_TYPES: Mapping[object, type] = {"str": str, "int": int, "bool": bool}
# Fields whose JSON key is not their name.
_RENAMED = {"number": "n", "messages": "rows", "dead_letters_version": "letters"}
_RENAMED |= {"replaces_considered": "judged", "removed_claim_batches": "removed", "facts_at_start": "counted"}
_KEYS: Mapping[str, str] = {f.name: _RENAMED.get(f.name, f.name) for f in fields(LedgerEntry)}
_DEFAULTS: Mapping[str, object] = {
    f.name: f.default if f.default_factory is MISSING else f.default_factory()
    for f in fields(LedgerEntry)
    if f.default is not MISSING or f.default_factory is not MISSING
}
_PLAIN: Mapping[str, type] = {f.name: _PLAIN_TYPES[str(f.type)] for f in fields(LedgerEntry) if f.type in _PLAIN_TYPES}
# A JSON object with these keys is batch metadata; every format has them.
_MARKS = frozenset(("v", "kind", "group", "app", "bid"))
# The keys that are not packed.
_HEAD = tuple(key for name, key in _KEYS.items() if name not in _DEFAULTS)


def pack(document: Mapping[str, object]) -> str:
    """Return the JSON of the document, compressed, in characters that need no escape in JSON.

    Example:
        >>> document = {"ranges": {f"orders/{number}": [number, number + 5] for number in range(1000)}}
        >>> packed = pack(document)
        >>> len(packed) < 1000, unpack(packed) == document
        (True, True)
    """
    planes: list[bytes] = []
    skeleton = json.dumps(_without_tables(document, planes), separators=(",", ":")).encode()
    return base64.b85encode(zlib.compress(b"%d\n" % len(skeleton) + skeleton + b"".join(planes))).decode()


def unpack(text: str) -> Any:
    """Read the result of :func:`pack`.

    Raises:
        ValueError: the text is no such result.
    """
    try:
        unpacker = zlib.decompressobj()
        size, _, left = unpacker.decompress(base64.b85decode(text), MAX_UNPACKED_BYTES).partition(b"\n")
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError(f"it is cut, or has more than {MAX_UNPACKED_BYTES:,} bytes")
    if not 0 < int(size) <= MAX_SKELETON_BYTES:
        raise ValueError(f"it has {int(size):,} bytes of JSON, more than {MAX_SKELETON_BYTES:,}")
    planes = _ColumnReader(left[int(size) :])
    found = _with_tables(json.loads(left[: int(size)]), planes)
    planes.check_end()
    return found


def _without_tables(value: object, planes: list[bytes]) -> object:
    if not isinstance(value, Mapping):
        return value
    rows = {key: row for key, cell in value.items() if (row := _row(key, cell)) is not None}
    if len(rows) < _MIN_PACKED_ROWS:
        return {key: _without_tables(cell, planes) for key, cell in value.items()}
    listed = sorted((*row, key) for key, row in rows.items())
    groups = []
    for (stream, is_list, width), found in groupby(listed, key=lambda row: (row[0], row[1], len(row[3]))):
        part = list(found)
        ids = np.array([row[2] for row in part], "<i8")
        groups.append([stream, is_list, width, len(part)])
        cells = np.array([row[3] for row in part], "<i8")
        planes += [_packed(np.diff(ids, prepend=0)), *(_packed(cells[:, column]) for column in range(width))]
    rest = {key: _without_tables(cell, planes) for key, cell in value.items() if key not in rows}
    return {_COLUMNS: groups, _REST: rest}


def _row(key: object, cell: object) -> tuple[str, bool, int, list[Any]] | None:
    """Return stream, whether the numbers are a list, shard id and numbers; ``None`` if they cannot be a table row."""
    numbers = list(cell) if isinstance(cell, (list, tuple)) else [cell]
    if not numbers or not all(type(n) is int and _LOWEST <= n <= _HIGHEST for n in numbers):
        return None
    try:
        shard = Shard.parse(str(key))
    except InvalidUrlError:
        return None
    return (shard.stream, isinstance(cell, (list, tuple)), shard.id, numbers) if str(shard) == key else None


def _with_tables(value: object, planes: _ColumnReader) -> object:
    if not isinstance(value, dict):
        return value
    if _COLUMNS not in value:
        return {key: _with_tables(cell, planes) for key, cell in value.items()}
    found: dict[str, object] = {}
    for stream, is_list, width, count in value[_COLUMNS]:
        planes.count_rows(count, width)
        ids = np.cumsum(planes.next(count)).tolist()
        columns = [planes.next(count).tolist() for _ in range(width)]
        for number, *cells in zip(ids, *columns):
            found[str(Shard(stream, number))] = cells if is_list else cells[0]
    return found | {key: _with_tables(cell, planes) for key, cell in value[_REST].items()}


def _packed(numbers: Any) -> bytes:
    return bytes(numbers.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes())


class _ColumnReader:
    """Reads the columns of the tables in order."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        self._rows = 0

    def count_rows(self, count: int, width: int) -> None:
        """Add a table to the number of rows.

        Raises:
            ValueError: it has no columns, or the tables have too many rows.
        """
        self._rows += count
        if width < 1 or self._rows > MAX_PACKED_ROWS:
            raise ValueError(f"it has a table of {count} rows and {width} columns, {self._rows} rows in all")

    def next(self, count: int) -> Any:
        """Return the numbers of the next column.

        Raises:
            ValueError: the content ends before that.
        """
        start, self._at = self._at, self._at + 8 * count
        if not start < self._at <= len(self._content):
            raise ValueError(
                f"a column of {count} numbers is not in the {len(self._content) - start} bytes that are left"
            )
        own = np.frombuffer(self._content, np.uint8, 8 * count, start)
        return own.reshape(8, count).T.copy().view("<i8").reshape(count)

    def check_end(self) -> None:
        """Check that every column was read.

        Raises:
            ValueError: bytes are left.
        """
        if self._at != len(self._content):
            raise ValueError(f"{len(self._content) - self._at} bytes belong to no column")
