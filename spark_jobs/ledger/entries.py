"""The batch metadata: what each of our commits says of itself in the ``userMetadata`` of the Delta log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Range
from stream_consumers.errors import InvalidUrlError
from stream_consumers.messages import Shard

FORMAT = 1
KINDS = ("batch", "fence", "init", "replay", "keep", "accept")


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
    """

    covered: Intervals = field(default_factory=Intervals)
    redo: Intervals = field(default_factory=Intervals)
    origin: int | None = None
    claimed: int | None = None
    ended: int | None = None

    @property
    def position(self) -> int | None:
        """The next sequence that is missing or has to be replaced; ``None`` if nothing is known."""
        missing = self.covered.position
        return min(missing, self.redo.ranges[0].start) if self.redo and missing is not None else missing

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        parts = {"cov": self.covered.to_json(), "redo": self.redo.to_json()}
        known = {"origin": self.origin, "claimed": self.claimed}
        return {**parts, **known} if self.ended is None else {**parts, **known, "ended": self.ended}

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> ShardState:
        """Read :meth:`to_json` back."""
        covered, redo = Intervals.from_json(known["cov"]), Intervals.from_json(known["redo"])
        return cls(covered, redo, known["origin"], known["claimed"], known.get("ended"))


State = Mapping[Shard, ShardState]
# Dead letters of these batches that do not count: those in these ranges, or where there are none, all of them.
Uncounted = Mapping[str, Mapping[Shard, Intervals]]


class ClaimedRange(NamedTuple):
    """Redis entries of a shard that were claimed for one batch: from ``start`` up to ``end``, but not all of them."""

    start: int
    end: int
    entries: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One commit of ours; protocol §2 lists the fields.

    Args:
        kind: one of :data:`KINDS`; ``init`` is the first commit of a group, ``accept`` the first one of an epoch.
        group: the consumer group.
        app: the transaction app id: ``<group>/<member>``, or ``<group>/<stream>/<shard>`` where every shard has a
            transaction sequence of its own; for a fence that of the fenced sequence.
        number: the transaction version.
        by: the member that wrote it.
        bid: the id of the attempt, never reused.
        base: the table version it was planned from; -1 before the table exists.
        ranges: what it covers.
        mode: append or replace.
        until: for a replace, up to where later batches must replace, too.
        origin: first positions, resolved to numbers.
        state: the fold at ``base``.
        rows: messages that were decoded, before the transform.
        dead: dead letters.
        identities: for each epoch of each stream, the fingerprint that detects a recreated stream.
        hint: a shortcut for the next plan; see :class:`stream_consumers.batches.Resume`.
        settled: up to this version of the dead-letter table, all that is there counts, but for what ``uncounted`` says.
        uncounted: the dead letters that are there and do not count: a RESTORE removed their batch, or another batch
            replaced their range. Said here because the commits that tell it are cleaned from the log one day.
        sharing: how the group shared its shards at ``base``, see
            :attr:`spark_jobs.batches.ingestion.Ingestion.sharing_mode`; it tells which transaction sequences there are.
            Empty before the first commit.
        switch: for the first commit or a fence, how the group shares from here on.
        lost: what was gone from the stream before it was read; the group skips it and continues, as the user chose.
        claims: what the batch holds where members claim single Redis entries; positions do not follow from it.
        replay: the replay or the rewind that the commit is a part of, so that it is taken up again where it was killed.
        goal: for a replay, all that it is to replace, in this and in other batches.
        skipped: what the group never reads, because somebody moved it forwards.
        transform: the name of the function that made the rows, so that rows of another are not put in their place.
        ended: for an accept, where the shards of the epoch before it end.
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
    state: State = field(default_factory=dict)
    rows: int = 0
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

    def to_json(self) -> str:
        """The ``userMetadata`` text."""
        document: dict[str, object] = {"v": FORMAT}
        for name, key in _KEYS.items():
            value = getattr(self, name)
            if name in _PER_SHARD:
                value = {str(shard): _PER_SHARD[name].write(part) for shard, part in value.items()}
            document[key] = value
        document["uncounted"] = {
            bid: {str(shard): parts.to_json() for shard, parts in ranges.items()}
            for bid, ranges in self.uncounted.items()
        }
        return json.dumps(document, separators=(",", ":"), default=dict)

    @classmethod
    def from_json(cls, text: str | None) -> LedgerEntry | None:
        """Read the text back; ``None`` if it is not ours."""
        try:
            document = json.loads(text or "")
            if not isinstance(document, dict) or document.get("v") != FORMAT:
                return None
            values = {n: document[key] for n, key in _KEYS.items() if key in document or n not in _ADDED_LATER}
            for name in _PER_SHARD.keys() & values.keys():
                values[name] = {Shard.parse(s): _PER_SHARD[name].read(part) for s, part in values[name].items()}
            values["uncounted"] = {
                bid: {Shard.parse(shard): Intervals.from_json(parts) for shard, parts in ranges.items()}
                for bid, ranges in values.get("uncounted", {}).items()
            }
            # Older tables call the first commit of a group a claim.
            kind = "init" if values["kind"] == "claim" else values["kind"]
            return cls(**{**values, "kind": kind}) if kind in KINDS else None
        except (KeyError, TypeError, ValueError, AttributeError, InvalidUrlError):
            return None


class _Codec(NamedTuple):
    """How the value of one shard stands in JSON."""

    write: Callable[[Any], object]
    read: Callable[[Any], object]


_RANGE = _Codec(list, lambda pair: Range(*pair))
_NUMBER = _Codec(int, int)
_PER_SHARD: Mapping[str, _Codec] = {
    "ranges": _RANGE,
    "until": _NUMBER,
    "origin": _NUMBER,
    "state": _Codec(ShardState.to_json, ShardState.from_json),
    "lost": _Codec(Intervals.to_json, Intervals.from_json),
    "claims": _Codec(list, lambda triple: ClaimedRange(*triple)),
    "goal": _RANGE,
    "skipped": _RANGE,
    "ended": _NUMBER,
}
# Field names and their JSON keys.
_KEYS: Mapping[str, str] = {f.name: f.name for f in fields(LedgerEntry)} | {"number": "n", "settled": "letters"}
# Tables of earlier versions do not have these.
_ADDED_LATER = ("replay", "goal", "skipped", "transform", "uncounted", "ended")
