"""The batch metadata: what each of our commits says of itself in the ``userMetadata`` of the Delta log.

Texts of usual size stay JSON that people can read in ``DESCRIBE HISTORY``. A large one is packed (:func:`pack`): each
object whose keys are shards and whose values are whole numbers, or equally many of them, is a table. Its numbers are
laid out by significance, the high bytes of all first: those hardly differ between shards, and what stands in several
tables, like the position and the start of the range after it, is there once after compression.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple, TypedDict

import numpy as np

from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals, json_values, per_shard
from stream_consumers.batches import LastMessage, PositionFacts, Range
from stream_consumers.errors import FormatError, InvalidUrlError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode
from stream_consumers.versions import check_choice, check_keys, check_version, newer

FORMAT = 3
"""The format that is written; :data:`FORMATS` are read. It grows when the meaning of a field changes. A reader of
format 2 refuses a larger number, but ignores keys, modes and ways to share that it does not know.
"""
FORMATS = range(2, FORMAT + 1)
KEEPER = "keep"
"""The member in whose transaction sequence a group says what its ledger knows: it races with no batch."""
KINDS = ("batch", "fence", "init", "replay", "keep", "accept", "turn", "dismiss")
SWITCHING = "switching"
CLAIMS = "load_balanced by claims"
LEAVING_CLAIMS = "switching from claims"
BATCH_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the id of a batch looks like: it stands in SQL conditions."""
SHARINGS = ("", *(mode.value for mode in ConsumerMode), SWITCHING, CLAIMS, LEAVING_CLAIMS)
"""How a group may share its shards."""
LARGEST_PLAIN = 4096
"""Bytes of a text that is left as it is."""
LARGEST_UNPACKED = 64 * 1024 * 1024
"""Bytes of a text after it is unpacked: a million shards take half of it."""
LARGEST_SKELETON = 4 * 1024 * 1024
"""Bytes of its JSON, each of which may become 25 in memory."""
MOST_ROWS = 2_000_000
"""Rows of all tables of a text, each of which takes some hundred bytes in memory."""
_FEWEST_ROWS = 8
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_COLUMNS = "\0columns"
_REST = "\0rest"
MOST_REPLAYS = 16
"""How many replays and rewinds are remembered; of older ones the log has to be searched."""
MOST_LOSSES = 16
"""Of how many losses of a shard the place is remembered; older ones are joined."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay is; of a rewind, what it has moved.

    Args:
        goal: all that it replaces; a shard may be missing, where it has nothing to replace.
        done: what of that is in the table.
        is_whole: whether ``done`` is complete. It may lack progress that was dropped from the totals.
    """

    goal: Mapping[Shard, Range] = field(default_factory=dict)
    done: Mapping[Shard, Intervals] = field(default_factory=dict)
    is_whole: bool = True


def replay_key(kind: str, replay: str) -> str:
    """What a replay is remembered by: a run that moved its group may be run again with a replay, under the same id.

    Example:
        >>> replay_key("replay", "nightly")
        'replay/nightly'
    """
    return f"{kind}/{replay}"


@dataclass(frozen=True, slots=True)
class Totals:
    """What the commits of a group add up to, as far as no RESTORE removed them.

    Args:
        dead: dead letters, with those in ranges that were replaced since.
        lost: what was gone from the stream before it was read.
        replaced: how many commits have replaced rows.
        replays: the replays and rewinds by :func:`replay_key`, the newest one last.
        is_forgetful: whether the oldest ones were dropped, because there were too many.

    Example:
        >>> totals = Totals(dead=3, replaced=1)
        >>> Totals.from_json(totals.to_json()) == totals
        True
    """

    dead: int = 0
    lost: Mapping[Shard, Intervals] = field(default_factory=dict)
    replaced: int = 0
    replays: Mapping[str, ReplayProgress] = field(default_factory=dict)
    is_forgetful: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what is nothing is left out."""
        found = {
            "dead": self.dead,
            "lost": self.lost,
            "replaced": self.replaced,
            # A list: an object that is packed has no order.
            "replays": [[key, one.goal, one.done, one.is_whole] for key, one in self.replays.items()],
            "forgetful": self.is_forgetful,
        }
        return {name: json_values(value) for name, value in found.items() if value}

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Totals:
        """Read :meth:`to_json` back.

        Raises:
            UnsupportedVersionError: there is something that this release does not know.
        """
        check_keys(known, what="the totals", keys=("dead", "lost", "replaced", "replays", "forgetful"))
        replays = {
            key: ReplayProgress(
                per_shard(goal, lambda part: Range(*part)), per_shard(done, Intervals.from_json), is_whole
            )
            for key, goal, done, is_whole in known.get("replays", ())
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
        claimed: behind the last Redis entry that a batch of claimed entries wrote; ``None`` if there is none.
        ended: where the shard ends for good, since its stream was recreated and the new one accepted; ``None`` while it
            goes on.
        last: the last message that was read; ``None`` if it is not known.
        adopted: where rows begin that were adopted, up to the origin; at the origin if a RESTORE took that back.
            ``None`` if none were adopted.
        counted: what the source knows at the first place: at ``adopted``, or where that is ``None``, at the origin. It
            stays with them over a RESTORE. ``None`` if it is not known.
    """

    covered: Intervals = field(default_factory=Intervals)
    redo: Intervals = field(default_factory=Intervals)
    origin: int | None = None
    claimed: int | None = None
    ended: int | None = None
    last: LastMessage | None = None
    adopted: int | None = None
    counted: PositionFacts | None = None

    @property
    def first_place(self) -> tuple[int, PositionFacts] | None:
        """Where the shard begins, and what is known there; ``None`` if that is not known."""
        first = self.origin if self.adopted is None else self.adopted
        return None if first is None or self.counted is None else (first, self.counted)

    @property
    def lacks_adopted(self) -> bool:
        """Whether rows were adopted and a RESTORE took that back: the table may hold some that no commit covers."""
        return self.ended is None and self.adopted is not None and self.adopted == self.origin

    @property
    def position(self) -> int | None:
        """The next sequence that is missing or has to be replaced; ``None`` if nothing is known."""
        missing = self.covered.position
        return min(missing, self.redo.ranges[0].start) if self.redo and missing is not None else missing

    @property
    def is_written(self) -> bool:
        """Whether the group has done more than claim it: a batch was written, or the position was moved."""
        return self.claimed is not None or self.covered != Intervals.of((MIN_SEQUENCE, self.origin or 0))

    @property
    def written_end(self) -> int | None:
        """Behind the last Redis entry that is in the table, claimed or read by position; ``None`` if there is none."""
        reached = self.covered.position or 0
        return max(self.claimed or 0, reached if reached > (self.origin or 0) else 0) or None

    def to_json(self) -> list[int] | dict[str, Any]:
        """The state as JSON values.

        Where these are all there is to know: position, origin, the last message and, behind that, what is known at the
        origin. Other forms of what is known would be taken for a last message by an older release.
        """
        counted = self.counted if self.last is not None and None not in (self.counted or ()) else None
        plain = ShardState(Intervals(self.covered.ranges[:1]), origin=self.origin, last=self.last, counted=counted)
        if self.origin is not None and self == plain:
            covered = self.covered.ranges
            if covered and covered[0].start == MIN_SEQUENCE:
                return [covered[0].end, self.origin, *(self.last or ()), *(counted or ())]
        parts = {"cov": self.covered.to_json(), "redo": self.redo.to_json()}
        known = {"origin": self.origin, "claimed": self.claimed}
        optional = {"ended": self.ended, "last": self.last, "adopted": self.adopted, "counted": self.counted}
        return {**parts, **known, **{name: value for name, value in optional.items() if value is not None}}

    @classmethod
    def from_json(cls, known: list[int] | Mapping[str, Any]) -> ShardState:
        """Read :meth:`to_json` back."""
        if isinstance(known, list):
            (position, origin), last, first = known[:2], known[2:6], known[6:]
            return cls(
                Intervals.of((MIN_SEQUENCE, position)),
                origin=origin,
                last=LastMessage(*last) if last else None,
                counted=PositionFacts(*first) if first else None,
            )
        keys = ("cov", "redo", "origin", "claimed", "ended", "last", "adopted", "counted")
        check_keys(known, what="the state of a shard", keys=keys)
        covered, redo = Intervals.from_json(known["cov"]), Intervals.from_json(known["redo"])
        remembered = LastMessage(*known["last"]) if known.get("last") else None
        counted = PositionFacts(*known["counted"]) if known.get("counted") else None
        ended, adopted = known.get("ended"), known.get("adopted")
        return cls(covered, redo, known["origin"], known["claimed"], ended, remembered, adopted, counted)


State = Mapping[Shard, ShardState]
# Dead letters of these batches that do not count: those in these ranges, or where there are none, all of them.
Uncounted = Mapping[str, Mapping[Shard, Intervals]]


class WriteMode(NamedTuple):
    """What a way of writing does. This is the one place where each of them says so.

    Args:
        replaces: the commit removes the rows at its places; otherwise it only adds rows.
        moves_position: the group continues after it. A replay moves no position: in such a mode it adds copies of rows.
        uncounts_dead_letters: dead letters of older batches at its places count no more.
        reduces_redo: rows that had to be replaced need not be any more; otherwise rows that are written again have to.
    """

    replaces: bool
    moves_position: bool
    uncounts_dead_letters: bool
    reduces_redo: bool


MODES: Mapping[str, WriteMode] = {
    "append": WriteMode(replaces=False, moves_position=True, uncounts_dead_letters=False, reduces_redo=False),
    "replace": WriteMode(replaces=True, moves_position=False, uncounts_dead_letters=True, reduces_redo=True),
}


class ClaimedRange(NamedTuple):
    """Redis entries of a shard that were claimed for one batch: from ``start`` up to ``end``, but not all of them."""

    start: int
    end: int
    entries: int


class PlannedFields(TypedDict, total=False):
    """The fields of a :class:`LedgerEntry` that the planner of a batch knows, by their names there."""

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
    counted: Mapping[Shard, PositionFacts]


class EntryFields(PlannedFields, total=False):
    """All fields of a :class:`LedgerEntry` that do not follow from the state of the ledger."""

    by: str
    bid: str
    number: int
    identities: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One commit of ours.

    Some are full: they say all that the ledger knew at their base. The others say what they change only, which is
    little however many shards there are; :meth:`spark_jobs.ledger.ledger.Ledger.entry` decides.

    Args:
        kind: one of :data:`KINDS`; ``init`` is the first commit of a group, ``accept`` the first one of an epoch,
            ``turn`` asks the others to wait for a run that replaces rows, and ``dismiss`` has dead letters in place of
            those that were at its places, and no rows.
        group: the consumer group.
        app: the transaction app id: ``<group>/<member>``, or ``<group>/<stream>/<shard>`` where every shard has a
            transaction sequence of its own; for a fence that of the fenced sequence.
        number: the transaction version.
        by: the member that wrote it.
        bid: the id of the attempt, never reused.
        base: the table version it was planned from; -1 before the table exists.
        ranges: what it covers.
        places: for a redrive or a dismissal, instead: the sequences that it replaces, between which lie rows that stay.
        mode: one of :data:`MODES`.
        until: for a replace, up to where later batches must replace, too.
        origin: first positions, resolved to numbers.
        state: the fold at ``base``; ``None`` if the entry is not full.
        messages: how many were decoded.
        dead: dead letters.
        identities: for each epoch of each stream, the fingerprint that detects a recreated stream; if the entry is not
            full, those that the ledger did not have at ``base``.
        hint: for the next plan; see :mod:`stream_consumers.batches` and :func:`spark_jobs.ledger.fold.moved_places`.
        settled: up to this version of the dead-letter table, all that is there counts, but for what ``uncounted``
            says; only in full entries.
        uncounted: the dead letters that are there and do not count: a RESTORE removed their batch, or another batch
            replaced their range. Said here because the commits that show it are cleaned from the log one day; only in
            full entries.
        judged: how many replaces ``uncounted`` knows of; only in full entries.
        totals: what the commits up to ``base`` add up to; only in full entries.
        sharing: how the group shared its shards at ``base``, see
            :attr:`spark_jobs.batches.ingestion.Ingestion.sharing_mode`; it decides which transaction sequences there
            are. Empty before the first commit.
        switch: for the first commit or a fence, how the group shares from here on.
        lost: what was gone from the stream before it was read; the group skips it and continues, as the user chose.
        claims: what the batch holds where members claim single Redis entries; positions do not follow from it.
        replay: the replay or the rewind that the commit is a part of, so that it is taken up again where it was killed.
        goal: for a replay, all that it is to replace, in this and in other batches.
        begins: for a replay or a rewind, whether it was not in the table when the commit was planned.
        skipped: what the group never reads, because a user moved it forwards.
        transform: the name of the function that made the rows, so that rows of another are not put in their place.
        ended: for an accept, where the shards of the epoch before it end.
        last_messages: the last message of each range, as the stream held it when the batch was planned.
        removed: see :class:`spark_jobs.ledger.ledger.LedgerState`, as of ``base``; only in full entries.
        adopted: for an adopt, where the rows begin that it adopts, up to the origins.
        counted: what is known at the origins, or where adopted rows begin, if ``hint`` does not say it.
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
    settled: int = -1
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
    judged: int = 0
    totals: Totals = field(default_factory=Totals)
    begins: bool = False
    places: Mapping[Shard, Intervals] = field(default_factory=dict)
    last_messages: Mapping[Shard, LastMessage] = field(default_factory=dict)
    removed: Intervals = field(default_factory=Intervals)
    adopted: Mapping[Shard, int] = field(default_factory=dict)
    counted: Mapping[Shard, PositionFacts] = field(default_factory=dict)

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
    def extents(self) -> Mapping[Shard, Range]:
        """From where to where it has messages of each shard; between those that are claimed lie such of others.

        Example:
            >>> claims = {Shard("a"): ClaimedRange(3, 9, 2)}
            >>> entry = LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, claims=claims)
            >>> entry.extents[Shard("a")]
            Range(start=3, end=9)
        """
        claimed = {shard: Range(start, end) for shard, (start, end, _) in self.claims.items()}
        return {**claimed, **{shard: parts.hull for shard, parts in self.affected.items() if parts}}

    @property
    def does(self) -> WriteMode:
        """What its mode does."""
        return MODES[self.mode]

    @property
    def adds_copies(self) -> bool:
        """Whether it is a replay that adds copies of rows: it covers nothing, and counts nowhere."""
        return self.kind == "replay" and self.does.moves_position

    @property
    def is_full(self) -> bool:
        """Whether it says all that the ledger knew at its base."""
        return self.state is not None

    def to_json(self) -> str:
        """The ``userMetadata`` text: plain JSON, or where that is long, packed but for a head of it.

        Raises:
            FormatError: :meth:`from_json` could not read it, and so the table could not be read any more.
        """
        text = self._text()
        try:
            self._read(json.loads(text))
        except _UNREADABLE as error:
            raise FormatError(
                f"the metadata of batch {self.bid!r:.100} could not be read back ({error!r:.200}): it is not written",
                remedy="Name sequences below 2^63-1 only. If you named none, report this as a bug.",
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
        if len(text) <= LARGEST_PLAIN:
            return text
        plain = json.loads(text)
        head = {key: plain.pop(key) for key in ("v", *_HEAD)}
        return json.dumps({**head, "packed": pack(plain)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, document: object) -> LedgerEntry | None:
        """Read the JSON of :meth:`to_json` back; ``None`` if it is not ours.

        Raises:
            UnsupportedVersionError: it is ours, and this release cannot read all of it.
        """
        if not isinstance(document, dict) or not document.keys() >= _MARKS:
            return None
        check_version(document["v"], what="batch metadata", versions=FORMATS)
        try:
            return cls._read(document)
        except _UNREADABLE as error:
            raise newer(f"batch metadata of batch {document['bid']!r:.100} cannot be read ({error!r:.200})") from error

    @classmethod
    def _read(cls, document: Mapping[str, Any]) -> LedgerEntry:
        if "packed" in document:
            document = {**document, **unpack(document["packed"])}
        check_keys(document, what="batch metadata", keys=("v", "packed", *_KEYS.values()))
        # An entry that is not full has a state, which is null.
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
    if name == "totals":
        return Totals.from_json(value)
    if name == "removed":
        _check_numbers(value)
        return Intervals.from_json(value)
    if name == "uncounted":
        return {bid: per_shard(ranges, Intervals.from_json) for bid, ranges in value.items()}
    if name in _PER_SHARD and value is not None:
        _check_numbers(value)
        return per_shard(value, _PER_SHARD[name])
    return value


def _check_numbers(value: object) -> None:
    """Refuse what is no position: fractions, infinity, and whole numbers of more than 64 bits."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_numbers(part)
    elif value is not None and not (type(value) is int and -(2**63) <= value < 2**63):
        raise ValueError(f"{value!r:.100} is no position")


# What reading an entry that no release has written may raise.
_UNREADABLE = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    InvalidUrlError,
)
# How the value of one shard is read.
_PER_SHARD: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("ranges", "goal", "skipped"), lambda pair: Range(*pair)),
    **dict.fromkeys(("until", "origin", "ended", "adopted"), int),
    **dict.fromkeys(("lost", "places"), Intervals.from_json),
    "state": ShardState.from_json,
    "claims": lambda triple: ClaimedRange(*triple),
    "last_messages": lambda values: LastMessage(*values),
    "counted": lambda values: PositionFacts(*values),
}
_PLAIN_TYPES: Mapping[object, type] = {"str": str, "int": int, "bool": bool}
# Field names and their JSON keys.
_RENAMED = {"number": "n", "settled": "letters", "messages": "rows"}
_KEYS: Mapping[str, str] = {f.name: _RENAMED.get(f.name, f.name) for f in fields(LedgerEntry)}
_DEFAULTS: Mapping[str, object] = {
    f.name: f.default if f.default_factory is MISSING else f.default_factory()
    for f in fields(LedgerEntry)
    if f.default is not MISSING or f.default_factory is not MISSING
}
_PLAIN: Mapping[str, type] = {f.name: _PLAIN_TYPES[str(f.type)] for f in fields(LedgerEntry) if f.type in _PLAIN_TYPES}
# By these keys a document is known to be batch metadata; every format has them.
_MARKS = frozenset(("v", "kind", "group", "app", "bid"))
# What a text says of itself before it is unpacked.
_HEAD = tuple(key for name, key in _KEYS.items() if name not in _DEFAULTS)


def pack(document: Mapping[str, object]) -> str:
    """JSON of the document, compressed, in characters that need no escape in JSON.

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
    """Read :func:`pack` back.

    Raises:
        ValueError: it is none.
    """
    try:
        unpacker = zlib.decompressobj()
        size, _, left = unpacker.decompress(base64.b85decode(text), LARGEST_UNPACKED).partition(b"\n")
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError(f"it is cut, or has more than {LARGEST_UNPACKED:,} bytes")
    if not 0 < int(size) <= LARGEST_SKELETON:
        raise ValueError(f"it has {int(size):,} bytes of JSON, more than {LARGEST_SKELETON:,}")
    planes = _ColumnReader(left[int(size) :])
    found = _with_tables(json.loads(left[: int(size)]), planes)
    planes.check_end()
    return found


def _without_tables(value: object, planes: list[bytes]) -> object:
    if not isinstance(value, Mapping):
        return value
    rows = {key: row for key, cell in value.items() if (row := _row(key, cell)) is not None}
    if len(rows) < _FEWEST_ROWS:
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
    """Stream, whether the numbers are a list, shard id and numbers; ``None`` if this is nothing for a table."""
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
    """The columns, one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        self._rows = 0

    def count_rows(self, count: int, width: int) -> None:
        """Count a table.

        Raises:
            ValueError: it has no columns, or there are too many rows.
        """
        self._rows += count
        if width < 1 or self._rows > MOST_ROWS:
            raise ValueError(f"it has a table of {count} rows and {width} columns, {self._rows} rows in all")

    def next(self, count: int) -> Any:
        """The numbers of the next column.

        Raises:
            ValueError: there are fewer.
        """
        start, self._at = self._at, self._at + 8 * count
        if not start < self._at <= len(self._content):
            raise ValueError(
                f"a column of {count} numbers is not in the {len(self._content) - start} bytes that are left"
            )
        own = np.frombuffer(self._content, np.uint8, 8 * count, start)
        return own.reshape(8, count).T.copy().view("<i8").reshape(count)

    def check_end(self) -> None:
        """Check that there is no other column.

        Raises:
            ValueError: there is.
        """
        if self._at != len(self._content):
            raise ValueError(f"{len(self._content) - self._at} bytes are of no column")
