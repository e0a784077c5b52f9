"""What the commits of a group add up to, so that nobody has to go over all of them to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_jobs.ledger.intervals import Intervals, json_values, per_shard
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from stream_consumers.versions import check_keys

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
        is_whole: whether ``done`` is all of it; not where it was begun so long ago that it was forgotten meanwhile.
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
        is_forgetful: whether there were so many that the oldest ones are not named.

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
