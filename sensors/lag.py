"""Lag: how far a group is behind its stream. No JVM, no consumption, no commits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import read_or_recover
from spark_jobs.batches.source_checks import check_sharing, check_source, lag, losses, truncations
from spark_jobs.claims.claim_state import losses_of_claims
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import Extent, Range
from stream_consumers.create import StreamSource
from stream_consumers.errors import SourceTruncatedError
from stream_consumers.messages import Shard
from stream_consumers.wording import counted


@dataclass(frozen=True, slots=True)
class Measurement:
    """How far a group is behind.

    Args:
        state: the ledger.
        extents: what the shards hold.
        lag: messages to come per shard, an upper bound.
        is_exact: whether the budget was enough to see everything.
        lost: what is gone from the stream and was not read, per shard.
    """

    state: LedgerState
    extents: Mapping[Shard, Extent]
    lag: Mapping[Shard, int]
    is_exact: bool
    lost: Mapping[Shard, Range] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Messages to write."""
        return sum(self.lag.values())

    def describe(self) -> str:
        """The numbers, for people."""
        shards = _listed(self.lag)
        return (
            f"lag {self.total}"
            + (f" ({shards})" if shards else f" in {counted(len(self.extents), 'shard')}")
            + self.blocked()
        )

    def blocked(self) -> str:
        """What an open transaction holds back, for people; empty if nothing is."""
        shards = _listed({shard: extent.blocked for shard, extent in self.extents.items()})
        return f"; blocked by an open transaction: {shards}" if shards else ""


def _listed(counts: Mapping[Shard, int]) -> str:
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
        ingestion: what goes where.
        budget_seconds: how long to look for the ends of the stream, as far as that takes reading.
        answer_seconds: how long to wait for an answer of a broker.

    Raises:
        StreamNotFoundError, FormatError, LedgerTruncatedError: as the source and the ledger say.
        SourceRecreatedError: it is another stream than the group has read, or was cut, and that is not to be recorded.
        BrokerUnavailableError: it does not answer.
    """
    ledger = ingestion.ledger()
    if source.is_claimed:
        return _measure_claims(source, ingestion, ledger)
    with source.open() as stream:
        if answer_seconds is not None:
            stream.answer_within(answer_seconds)
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
        # The next run finds from where on these are read again: at least the last message.
        behind = {**behind, **{shard: max(1, behind[shard]) for shard in cut}}
        lost = losses(opened, state, extents)
    return Measurement(state, extents, behind, is_exact, lost)


def _measure_claims(source: StreamSource, ingestion: Ingestion, ledger: Ledger) -> Measurement:
    """In claim mode the lag comes from the pending list and the unread count, which the server keeps."""
    state = ledger.read()
    check_sharing(state, ingestion)
    with source.claims(ingestion.group, ingestion.epochs(source.url.required_streams(), ledger)) as claims:
        lost = losses_of_claims(claims, ledger)
        extents = {shard: Extent(0, end) for shard, end in claims.ends.items()}
        return Measurement(state, extents, {s: b.total for s, b in claims.backlog().items()}, is_exact=True, lost=lost)
