"""When a run is wanted: the decision of a sensor or trigger from a measurement of the lag and the runs before it.

Nothing here measures, waits or starts a run. The orchestrators do this, and pass frozen values in and get them back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeVar

from stream_consumers.display import counted
from stream_consumers.errors import BrokerUnavailableError, InvalidOptionError
from stream_consumers.messages import is_recent
from stream_consumers.options import check_count, check_range, choose_fields

if TYPE_CHECKING:
    # A policy is declared where importing Spark would take too long.
    from spark_jobs.lag import Measurement

MAX_BROKER_WAIT_SECONDS = 60.0
"""The longest pause between two requests to a broker that does not answer, in seconds."""
MAX_BACKOFF_SECONDS = 900.0
"""The longest pause after failed runs, in seconds."""
STALE_RUN_SECONDS = 6 * 3600.0
Policy = TypeVar("Policy", bound="RunPolicy")
AnyWaits = TypeVar("AnyWaits", bound="Waits")


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """When a run is requested.

    Args:
        min_lag: the number of messages to wait for.
        max_wait_seconds: the longest wait for ``min_lag``, so that a quiet stream is written, too.
        budget_seconds: the longest time of a measurement.
        answer_seconds: the longest wait for one answer of a broker, because other streams may wait meanwhile. While the
            broker does not answer, it is asked again at growing intervals, and that is reported.
        retry_seconds: the pause after two failed runs in a row, which doubles up to 15 minutes.
        after_cancel_seconds: the pause after a run that was cancelled; it ends when a run is launched by hand.
        stale_run_seconds: the age from which a run no longer delays the next one, because two runs at once are safe;
            with ``single_writer``, where they are not, a run delays the next one until it is known to have ended.
        max_runs: how many runs share the work at the same time, in mode ``load_balanced``.
        keeps_alive: whether a run is requested whenever too few are in flight, even without lag, so that no message
            waits for a run to start. It is set if runs have ``linger_seconds``.
    """

    min_lag: int = 1
    max_wait_seconds: float = 60.0
    budget_seconds: float = 20.0
    answer_seconds: float = 5.0
    retry_seconds: float = 30.0
    after_cancel_seconds: float = 120.0
    stale_run_seconds: float = STALE_RUN_SECONDS
    max_runs: int = 1
    keeps_alive: bool = False

    def __post_init__(self) -> None:
        check_count("min_lag", self.min_lag, at_least=0)
        check_count("max_runs", self.max_runs)
        for option in fields(self):
            if option.name.endswith("_seconds"):
                check_range(option.name, getattr(self, option.name))

    def for_runs(self: Policy, linger_seconds: float) -> Policy:
        """Return the policy for runs that keep polling for this long.

        Raises:
            InvalidOptionError: ``min_lag`` makes messages wait, while runs wait for messages.

        Example:
            >>> policy = RunPolicy(max_wait_seconds=5).for_runs(600)
            >>> policy.keeps_alive, policy.stale_run_seconds - STALE_RUN_SECONDS
            (True, 600.0)
        """
        if not linger_seconds:
            return self
        if self.min_lag > 1:
            raise InvalidOptionError(
                f"min_lag={self.min_lag} makes messages wait, but linger_seconds={linger_seconds:g} makes runs wait",
                remedy="Leave one of them out.",
            )
        # A run that keeps polling is not stale before its time is over.
        is_usual = self.stale_run_seconds == STALE_RUN_SECONDS
        stale = STALE_RUN_SECONDS + linger_seconds if is_usual else self.stale_run_seconds
        return replace(self, keeps_alive=True, stale_run_seconds=stale)


class RunStatus(enum.Enum):
    """The status of a run that was requested before."""

    IN_FLIGHT = "in flight"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that was requested before.

    Args:
        id: its id, for display.
        status: its status.
        created: when it was requested, in seconds since 1970.
        ended: when it ended, in seconds since 1970; meaningless while it is in flight.
        shown: its status in the words of the orchestrator.
        job: what it runs, for display; empty if that is known.
        member: its name in its group; ``None`` for the one of the ingestion.
    """

    id: str
    status: RunStatus
    created: float
    ended: float = 0.0
    shown: str = ""
    job: str = ""
    member: str | None = None

    def __post_init__(self) -> None:
        choose_fields(self, status=RunStatus)


@dataclass(frozen=True, slots=True)
class PastRuns:
    """The runs that were requested before one moment.

    Args:
        now: the moment, in seconds since 1970.
        in_flight: the runs that delay the next one.
        finished: the finished runs, in any order.
    """

    now: float
    in_flight: Sequence[PastRun] = ()
    finished: Sequence[PastRun] = ()

    def __post_init__(self) -> None:
        # A run that ended ahead of this clock, by more than any pause, would remain the newest one.
        known = (one for one in self.finished if one.ended <= self.now + MAX_BACKOFF_SECONDS)
        object.__setattr__(self, "finished", sorted(known, key=lambda one: one.ended, reverse=True))

    def describe_in_flight(self) -> str:
        """Return the states of the runs in flight as text."""
        return "; ".join(
            f"run {one.id} is {one.shown or one.status.value} for {max(0.0, self.now - one.created):.0f} s"
            + (f" (job {one.job})" if one.job else "")
            for one in self.in_flight
        )

    def newest_cancelled(self, seconds: float) -> PastRun | None:
        """Return the newest cancelled run, if it ended within these seconds and no run was launched since."""
        cancelled = next((one for one in self.finished if one.status is RunStatus.CANCELLED), None)
        if cancelled is None or not is_recent(cancelled.ended, now=self.now, seconds=seconds):
            return None
        # Only runs that were requested later count: other members of the group may have run at the same time.
        if any(one.created > cancelled.ended for one in (*self.in_flight, *self.finished)):
            return None
        return cancelled


@dataclass(frozen=True, slots=True)
class Waits:
    """What is remembered between two decisions; never positions.

    Args:
        waiting_since: since when there are messages to read, in seconds since 1970; ``None`` if there are none.
        number: a number that grows with every batch of the group.
        silent_since: since when the broker does not answer, in seconds since 1970; ``None`` if it answers.
        ask_at: when to ask the silent broker again, in seconds since 1970.
    """

    waiting_since: float | None = None
    number: int = 0
    silent_since: float | None = None
    ask_at: float = 0.0

    def at(self: AnyWaits, now: float) -> AnyWaits:
        """Return the waits without times in the future, because a clock that was set back would delay all runs.

        Args:
            now: the present, in seconds since 1970.

        Example:
            >>> Waits(waiting_since=1000.0, silent_since=1000.0, ask_at=1060.0).at(500.0)
            Waits(waiting_since=None, number=0, silent_since=None, ask_at=0.0)
        """
        since, silent = self.waiting_since, self.silent_since
        is_silent = silent is not None and silent <= now and self.ask_at <= now + MAX_BROKER_WAIT_SECONDS
        return replace(
            self,
            waiting_since=since if since is not None and since <= now else None,
            silent_since=silent if is_silent else None,
            ask_at=self.ask_at if is_silent else 0.0,
        )

    def after_silence(self: AnyWaits, now: float) -> AnyWaits:
        """Return the waits after the broker did not answer: the pauses grow with the time of its silence."""
        since = now if self.silent_since is None else self.silent_since
        return replace(self, silent_since=since, ask_at=now + min(MAX_BROKER_WAIT_SECONDS, now - since))

    def after(self: AnyWaits, found: Measurement, now: float) -> AnyWaits:
        """Return the waits after a measurement."""
        number = batch_number(found)
        # The wait starts again after a batch was written.
        since = self.waiting_since if number == self.number else None
        waiting_since = (now if since is None else since) if found.total else None
        return replace(self, waiting_since=waiting_since, number=number, silent_since=None, ask_at=0.0)

    def describe_silence(self, what: str, now: float) -> str:
        """Return since when the broker is silent, and when it is asked again, as text.

        Args:
            what: what does not answer.
            now: the present, in seconds since 1970.
        """
        silent, left = now - (self.silent_since or now), self.ask_at - now
        return (
            f"{what.rstrip('.')}. It has not answered for {silent:.0f} s; the next attempt is "
            f"{f'in {left:.0f} s' if left >= 1 else 'at the next tick'}"
        )


def batch_number(found: Measurement) -> int:
    """Return a number that grows with every batch of any transaction sequence."""
    return sum(found.state.positions.values()) + (found.state.newest.base if found.state.newest else 0)


def silence_error(error: BrokerUnavailableError, waits: Waits, now: float) -> BrokerUnavailableError:
    """Return the error of a broker that does not answer, with the time of its silence."""
    silent = now - (waits.silent_since or now)
    return BrokerUnavailableError(
        f"{error.what.rstrip('.')}, for {silent:.0f} s so far", remedy=error.remedy, **error.facts
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether runs are wanted.

    Args:
        runs: how many runs are requested now; 0 to wait.
        reason: why none is requested, as text with the numbers; empty if one is.
        until: when a run is requested at the latest, in seconds since 1970; ``None`` if that is unknown.
        cancelled: the cancelled run after which there is a pause, if there are messages to read.
    """

    runs: int
    reason: str = ""
    until: float | None = None
    cancelled: PastRun | None = field(default=None, kw_only=True)


def decide(
    found: Measurement, past: PastRuns, waits: Waits, policy: RunPolicy, *, is_first_from_the_end: bool = False
) -> Decision:
    """Decide whether runs are wanted: at most one for each shard with messages to read or wait for.

    Args:
        found: the lag now.
        past: the runs that were requested before.
        waits: the waits after this measurement, see :meth:`Waits.after`.
        policy: when a run is requested.
        is_first_from_the_end: whether a group that has no position yet starts at the end of the stream, so that its
            first run is wanted without lag.
    """
    now = past.now
    cancelled = past.newest_cancelled(policy.after_cancel_seconds)
    shown = cancelled if found.total else None
    if len(past.in_flight) >= policy.max_runs:
        return Decision(0, f"{past.describe_in_flight()}; {found.describe()}", cancelled=shown)
    is_lag_asked = found.is_exact and not policy.keeps_alive
    if is_lag_asked and not found.total and not (is_first_from_the_end and found.state.newest is None):
        return Decision(0, _no_lag(found))
    latest = (now if waits.waiting_since is None else waits.waiting_since) + policy.max_wait_seconds
    if is_lag_asked and found.total and found.total < policy.min_lag and now < latest:
        reason = (
            f"{found.describe()} is below min_lag {policy.min_lag}; a run is requested in {latest - now:.0f} s at the "
            "latest"
        )
        return Decision(0, reason, latest, cancelled=shown)
    pause = _after_cancel(cancelled, policy, now) or _after_failures(past, policy)
    if pause is not None:
        return replace(pause, reason=f"{pause.reason}; {found.describe()}", cancelled=shown)
    shards = sum(1 for count in found.lag.values() if count or policy.keeps_alive)
    return Decision(max(1, min(policy.max_runs - len(past.in_flight), shards)))


def _no_lag(found: Measurement) -> str:
    if faults := [what for what in (found.describe_lost(), found.unreadable_tail) if what]:
        return f"no lag, but {'; '.join(faults)}"
    if not found.extents:
        return "no lag: the stream is empty or does not exist"
    return f"no lag: {counted(len(found.extents), 'shard')} read completely{found.held_back()}"


def _after_cancel(cancelled: PastRun | None, policy: RunPolicy, now: float) -> Decision | None:
    if cancelled is None:
        return None
    ago, until = max(0.0, now - cancelled.ended), cancelled.ended + policy.after_cancel_seconds
    return Decision(
        0,
        f"paused: run {cancelled.id} was cancelled {ago:.0f} s ago; the next run is requested in {until - now:.0f} s. "
        "To end the pause now, start a run",
        until,
    )


def _after_failures(past: PastRuns, policy: RunPolicy) -> Decision | None:
    failures = 0
    for one in past.finished:
        if one.status is not RunStatus.FAILED:
            break
        failures += 1
    # The first failure is retried at once.
    if failures < 2:
        return None
    newest = past.finished[0]
    pause = min(MAX_BACKOFF_SECONDS, policy.retry_seconds * 2 ** (failures - 2))
    if not is_recent(newest.ended, now=past.now, seconds=pause):
        return None
    until = newest.ended + pause
    return Decision(
        0,
        f"the last {counted(failures, 'run')} failed (newest: {newest.id}); the next run is in "
        f"{until - past.now:.0f} s",
        until,
    )
