"""The runs that a trigger requested, as far as the ledger shows what became of them.

A trigger of assets does not know which DAGs its events start. It sees only whether the group goes on: a run has
succeeded when the group has read everything that was there when the run was requested, and counts as failed if no batch
was written for some time before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_jobs.run_policy import PastRun, PastRuns, RunStatus, batch_number
from stream_consumers.messages import Shard, utc_text

if TYPE_CHECKING:
    from spark_jobs.lag import Measurement

_MAX_FINISHED = 20


@dataclass(frozen=True, slots=True)
class RequestedRun:
    """A run that was requested and has not ended.

    Args:
        created: when it was requested, in seconds since 1970.
        ends: the end of each shard at that time.
        number: the number of the newest batch that was seen.
        written: when that batch was first seen, or the run was requested, in seconds since 1970.
    """

    created: float
    ends: Mapping[Shard, int]
    number: int
    written: float

    def has_done(self, found: Measurement) -> bool:
        """Return whether everything that was there when the run was requested is in the table."""
        if found.state.newest is not None and not found.total and not found.lost:
            return True
        # Members that claim entries have no positions: then any batch counts.
        positions = found.state.positions
        is_read = all(positions.get(shard, end) >= end for shard, end in self.ends.items())
        return is_read and batch_number(found) != self.number

    def past(self, status: RunStatus, now: float) -> PastRun:
        """Return the run with a status, for the decision whether another one is wanted."""
        return PastRun(f"requested at {utc_text(int(self.created * 1000))}", status, self.created, now)


@dataclass(frozen=True, slots=True)
class RequestedRuns:
    """The runs that a trigger requested.

    Args:
        current: the run that has not ended.
        finished: the last ones that ended.
    """

    current: RequestedRun | None = None
    finished: tuple[PastRun, ...] = ()

    def after(self, found: Measurement, now: float, *, patience_seconds: float) -> RequestedRuns:
        """Return the runs as a new measurement shows them.

        Args:
            found: the measurement.
            now: the present, in seconds since 1970.
            patience_seconds: how long a run may write nothing until it counts as failed.
        """
        current = self.current
        if current is None:
            return self
        if current.has_done(found):
            return self._ended(current.past(RunStatus.SUCCEEDED, now))
        number = batch_number(found)
        # If the clock was set back, the time begins again.
        if number != current.number or now < current.written:
            return replace(self, current=replace(current, number=number, written=now))
        if now - current.written >= patience_seconds:
            return self._ended(current.past(RunStatus.FAILED, now))
        return self

    def requested(self, found: Measurement, now: float) -> RequestedRuns:
        """Return the runs after another one was requested because of a measurement."""
        ends = {shard: extent.end for shard, extent in found.extents.items()}
        return replace(self, current=RequestedRun(now, ends, batch_number(found), now))

    def past(self, now: float) -> PastRuns:
        """Return the runs for the decision whether another one is wanted."""
        in_flight = [] if self.current is None else [self.current.past(RunStatus.IN_FLIGHT, 0.0)]
        return PastRuns(now, in_flight, self.finished)

    def _ended(self, run: PastRun) -> RequestedRuns:
        return RequestedRuns(None, (*self.finished, run)[-_MAX_FINISHED:])
