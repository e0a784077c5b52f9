"""Measures the lag of a group without consuming messages or committing positions."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import read_or_recover
from spark_jobs.batches.source_checks import check_sharing, check_source, lag, losses, truncations
from spark_jobs.claims.claim_state import losses_of_claims
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import Extent, Range
from stream_consumers.create import StreamSource
from stream_consumers.display import counted
from stream_consumers.errors import SourceTruncatedError
from stream_consumers.messages import Shard


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured lag of a group.

    Args:
        state: the state of the ledger.
        extents: the range of sequences that each shard holds.
        lag: the lag of each shard, an upper bound.
        is_exact: whether the time budget was enough to find all ends.
        lost: the range of each shard that is gone from the stream and was not read.
        unreadable_tail: why the bytes after the last message of the stream cannot be read. They may contain messages,
            which no lag counts and no run reads. ``None`` if there are none.
    """

    state: LedgerState
    extents: Mapping[Shard, Extent]
    lag: Mapping[Shard, int]
    is_exact: bool
    lost: Mapping[Shard, Range] = field(default_factory=dict)
    unreadable_tail: str | None = None

    @property
    def total(self) -> int:
        """The lag of all shards."""
        return sum(self.lag.values())

    def describe(self) -> str:
        """Return the lag as text."""
        shards = _describe_counts(self.lag)
        return (
            f"lag {self.total}"
            + (f" ({shards})" if shards else f" in {counted(len(self.extents), 'shard')}")
            + self.held_back()
        )

    def describe_lost(self) -> str:
        """Return the messages that are gone from the stream and were not read, as text; empty if there are none."""
        parts = ", ".join(f"{shard}: {part.start} to {part.end}" for shard, part in sorted(self.lost.items()))
        return f"messages are gone from the stream that the group has not read: {parts}" if parts else ""

    def held_back(self) -> str:
        """Return what cannot be read after the last messages, as text; empty if there is nothing."""
        shards = _describe_counts({shard: extent.blocked for shard, extent in self.extents.items()})
        parts = (f"blocked by an open transaction: {shards}" if shards else "", self.unreadable_tail)
        return "".join(f"; {part}" for part in parts if part)


def _describe_counts(counts: Mapping[Shard, int]) -> str:
    return ", ".join(f"{shard}: {count}" for shard, count in sorted(counts.items()) if count)


def measure(
    source: StreamSource,
    ingestion: Ingestion,
    *,
    budget_seconds: float | None = None,
    answer_seconds: float | None = None,
) -> Measurement:
    """Measure the lag from the Delta log and the ends of the stream.

    Args:
        source: the stream.
        ingestion: the group and the table.
        budget_seconds: how long to look for the ends of the stream, if messages have to be read for that.
        answer_seconds: how long to wait for an answer of a broker.

    Raises:
        StreamNotFoundError, FormatError, LedgerTruncatedError: the source or the ledger cannot be read.
        SourceRecreatedError: the stream was recreated or truncated, and the error policy does not record the loss.
        DataLossError: a RESTORE removed batches of claimed entries.
        BrokerUnavailableError: the broker does not answer.
    """
    ledger = ingestion.ledger()
    if source.is_claimed:
        return _measure_claims(source, ingestion, ledger)
    with source.open() as stream:
        if answer_seconds is not None:
            stream.set_request_timeout(answer_seconds)
        opened = ingestion.in_epochs(stream, ledger)
        state, _ = read_or_recover(opened, ingestion, ledger)
        if state.newest is None:
            ledger.check_first(opened.extents())
        extents = opened.extents(resume=state.resume, budget_seconds=budget_seconds)
        cut: Collection[Shard] = ()
        if opened.is_exact:
            try:
                check_source(opened, ingestion.group, state, extents)
            except SourceTruncatedError as error:
                ingestion.refuse_or_record(error)
                cut = truncations(opened, ingestion.group, state, extents).keys()
        behind, is_exact = lag(opened, state, extents), opened.is_exact
        # The next run determines where to continue in truncated shards, and reads at least the last message.
        behind = {**behind, **{shard: max(1, behind[shard]) for shard in cut}}
        lost = losses(opened, ingestion, state, extents)
        tail = opened.unreadable_tail()
    return Measurement(state, extents, behind, is_exact, lost, tail)


def _measure_claims(source: StreamSource, ingestion: Ingestion, ledger: Ledger) -> Measurement:
    """Measure the lag in claim mode from the pending list and the unread count of the server."""
    state = ledger.read()
    check_sharing(state, ingestion)
    with source.claims(ingestion.group, ingestion.epochs(source.url.required_streams(), ledger)) as claims:
        lost = losses_of_claims(claims, ingestion, ledger)
        extents = {shard: Extent(0, end) for shard, end in claims.ends.items()}
        return Measurement(state, extents, {s: b.total for s, b in claims.backlog().items()}, is_exact=True, lost=lost)


class StreamStatus(str, enum.Enum):
    """The status of a group in a stream.

    ``IDLE``: all readable messages are in the table. ``BEHIND``: there are messages to read. ``BLOCKED``: there are no
    messages to read, because an open transaction holds back the next ones, or bytes after the last message cannot be
    read. ``LOST``: messages that were not read are gone, or the stream is not the one that the group has read.
    """

    IDLE = "idle"
    BEHIND = "behind"
    BLOCKED = "blocked"
    LOST = "lost"


def status_of(lag: int, *, is_blocked: bool, is_lost: bool) -> StreamStatus:
    """Return the status of a group in a stream.

    Args:
        lag: the lag of the group.
        is_blocked: whether an open transaction holds back messages, or bytes after the last message cannot be read.
        is_lost: whether messages that were not read are gone.

    Example:
        >>> status_of(0, is_blocked=True, is_lost=False).value
        'blocked'
    """
    if is_lost:
        return StreamStatus.LOST
    if lag:
        return StreamStatus.BEHIND
    return StreamStatus.BLOCKED if is_blocked else StreamStatus.IDLE


def describe_measurement(found: Measurement) -> str:
    """Return the numbers of the observations as text; if it is unchanged, the observations are not reported again."""
    shards = {
        str(shard): [extent.end, found.lag.get(shard, 0), extent.blocked, found.lost.get(shard)]
        for shard, extent in sorted(found.extents.items())
    }
    ended = {str(shard): part for shard, part in sorted(found.lost.items()) if shard not in found.extents}
    tail = {"unreadable_tail": found.unreadable_tail} if found.unreadable_tail else {}
    return json.dumps({**shards, **ended, **tail})
