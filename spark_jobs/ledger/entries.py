"""What each of our commits says of itself in the ``userMetadata`` of the Delta log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Range
from stream_consumers.errors import InvalidUrlError
from stream_consumers.messages import Shard

FORMAT = 1
KINDS = ("batch", "fence", "claim", "replay", "keep")


@dataclass(frozen=True, slots=True)
class ShardState:
    """What the ledger knows of one shard.

    Args:
        covered: the sequences whose rows are in the table, from before the origin on.
        redo: covered sequences whose rows have to be replaced.
        owner: the app id that owns the shard where members share (Kafka); else ``None``.
        origin: where reading began; ``None`` if the shard was never claimed.
        claimed: behind the last entry that a batch of claimed entries wrote; ``None`` if there is none.
    """

    covered: Intervals = field(default_factory=Intervals)
    redo: Intervals = field(default_factory=Intervals)
    owner: str | None = None
    origin: int | None = None
    claimed: int | None = None

    @property
    def position(self) -> int | None:
        """The next sequence that is missing or has to be replaced; ``None`` if nothing is known."""
        missing = self.covered.position
        return min(missing, self.redo.ranges[0].start) if self.redo and missing is not None else missing


State = Mapping[Shard, ShardState]


class Claimed(NamedTuple):
    """Entries of a shard that were claimed for one batch: from ``start`` up to ``end``, but not all that lie there."""

    start: int
    end: int
    entries: int


@dataclass(frozen=True, slots=True)
class Take:
    """A change of owner; it counts only if ``giver`` owns the shard at that place of the log."""

    giver: str | None
    taker: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit of ours; protocol §2 lists the fields.

    Args:
        kind: batch, fence, claim, replay or keep.
        group: the consumer group.
        app: the transaction app id: ``<group>/<member>``, or ``<group>/<stream>/<shard>`` where every shard has a
            number line of its own; for a fence that of the fenced line.
        number: the transaction version.
        by: the member that wrote it.
        bid: the id of the attempt, never reused.
        base: the table version it was planned from; -1 before the table exists.
        ranges: what it covers.
        mode: append or replace.
        until: for a replace, up to where later batches must replace, too.
        take: changes of owner.
        origin: first positions, resolved to numbers.
        state: the fold at ``base``.
        rows: messages that were decoded, before the transform.
        dead: dead letters.
        identities: what tells each stream from a recreated one.
        hint: a shortcut for the next plan; see :class:`stream_consumers.batches.Resume`.
        letters: the version of the dead-letter table up to which every stray was deleted.
        sharing: how the group shared its shards at ``base``, a :class:`stream_consumers.options.ConsumerMode`; it tells
            which number lines there are. Empty before the first claim.
        switch: for a claim or a fence, how the group shares from here on.
        lost: what was gone from the stream before it was read; the group goes on behind it, as the user chose.
        claims: what the batch holds where entries are claimed one by one (Redis, load_balanced); positions do not
            follow from it.
        replay: the replay or the rewind that the commit is a part of, so that it is taken up again where it was killed.
        goal: for a replay, all that it is to replace, in this and in other batches.
        skipped: what the group went over without reading it, because somebody moved it forwards.
        transform: the name of the function that made the rows, so that rows of another are not put in their place.
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
    take: Mapping[Shard, Take] = field(default_factory=dict)
    origin: Mapping[Shard, int] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    rows: int = 0
    dead: int = 0
    identities: Mapping[str, str] = field(default_factory=dict)
    hint: Mapping[str, object] | None = None
    letters: int = -1
    sharing: str = ""
    switch: str | None = None
    lost: Mapping[Shard, Intervals] = field(default_factory=dict)
    claims: Mapping[Shard, Claimed] = field(default_factory=dict)
    replay: str = ""
    goal: Mapping[Shard, Range] = field(default_factory=dict)
    skipped: Mapping[Shard, Range] = field(default_factory=dict)
    transform: str = ""

    def to_json(self) -> str:
        """The ``userMetadata`` text."""
        document: dict[str, Any] = {
            "v": FORMAT,
            "kind": self.kind,
            "group": self.group,
            "app": self.app,
            "n": self.number,
            "by": self.by,
            "bid": self.bid,
            "base": self.base,
            "ranges": {str(shard): list(part) for shard, part in self.ranges.items()},
            "mode": self.mode,
            "until": {str(shard): end for shard, end in self.until.items()},
            "take": {str(shard): {"from": take.giver, "to": take.taker} for shard, take in self.take.items()},
            "origin": {str(shard): origin for shard, origin in self.origin.items()},
            "state": {
                str(shard): {
                    "cov": s.covered.to_json(),
                    "redo": s.redo.to_json(),
                    "owner": s.owner,
                    "origin": s.origin,
                    "claimed": s.claimed,
                }
                for shard, s in self.state.items()
            },
            "rows": self.rows,
            "dead": self.dead,
            "identities": dict(self.identities),
            "hint": self.hint,
            "letters": self.letters,
            "sharing": self.sharing,
            "switch": self.switch,
            "lost": {str(shard): parts.to_json() for shard, parts in self.lost.items()},
            "claims": {str(shard): list(claimed) for shard, claimed in self.claims.items()},
            "replay": self.replay,
            "goal": {str(shard): list(part) for shard, part in self.goal.items()},
            "skipped": {str(shard): list(part) for shard, part in self.skipped.items()},
            "transform": self.transform,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> Entry | None:
        """Read the text back; ``None`` if it is not ours."""
        try:
            document = json.loads(text or "")
            if not isinstance(document, dict) or document.get("v") != FORMAT or document.get("kind") not in KINDS:
                return None
            return cls(
                kind=document["kind"],
                group=document["group"],
                app=document["app"],
                number=document["n"],
                by=document["by"],
                bid=document["bid"],
                base=document["base"],
                ranges={Shard.parse(s): Range(start, end) for s, (start, end) in document["ranges"].items()},
                mode=document["mode"],
                until={Shard.parse(s): end for s, end in document["until"].items()},
                take={Shard.parse(s): Take(take["from"], take["to"]) for s, take in document["take"].items()},
                origin={Shard.parse(s): origin for s, origin in document["origin"].items()},
                state={
                    Shard.parse(s): ShardState(
                        Intervals.from_json(known["cov"]),
                        Intervals.from_json(known["redo"]),
                        known["owner"],
                        known["origin"],
                        known["claimed"],
                    )
                    for s, known in document["state"].items()
                },
                rows=document["rows"],
                dead=document["dead"],
                identities=document["identities"],
                hint=document["hint"],
                letters=document["letters"],
                sharing=document["sharing"],
                switch=document["switch"],
                lost={Shard.parse(s): Intervals.from_json(parts) for s, parts in document["lost"].items()},
                claims={Shard.parse(s): Claimed(*claimed) for s, claimed in document["claims"].items()},
                # Tables written before there were replays do not have these.
                replay=document.get("replay", ""),
                goal={Shard.parse(s): Range(*part) for s, part in document.get("goal", {}).items()},
                skipped={Shard.parse(s): Range(*part) for s, part in document.get("skipped", {}).items()},
                transform=document.get("transform", ""),
            )
        except (KeyError, TypeError, ValueError, AttributeError, InvalidUrlError):
            return None
