"""Lag: how far a group is behind its stream, measured without consuming, and as observations of the streams."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import dagster as dg

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import read_or_recover
from spark_jobs.batches.source_checks import check_sharing, check_source, lag, losses, truncations
from spark_jobs.claims.claim_state import losses_of_claims
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import Extent, Range
from stream_consumers.create import StreamSource
from stream_consumers.display import counted
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import SourceTruncatedError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl


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
        shards = _describe_counts(self.lag)
        return (
            f"lag {self.total}"
            + (f" ({shards})" if shards else f" in {counted(len(self.extents), 'shard')}")
            + self.blocked()
        )

    def blocked(self) -> str:
        """What an open transaction holds back, for people; empty if nothing is."""
        shards = _describe_counts({shard: extent.blocked for shard, extent in self.extents.items()})
        return f"; blocked by an open transaction: {shards}" if shards else ""


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
        ingestion: what goes where.
        budget_seconds: how long to look for the ends of the stream, as far as that takes reading.
        answer_seconds: how long to wait for an answer of a broker.

    Raises:
        StreamNotFoundError, FormatError, LedgerTruncatedError: as the source and the ledger say.
        SourceRecreatedError: it is another stream than the group has read, or was cut, and that is not to be recorded.
        DataLossError: a RESTORE removed batches of claimed entries.
        BrokerUnavailableError: it does not answer.
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
        # The next run finds from where on these are read again: at least the last message.
        behind = {**behind, **{shard: max(1, behind[shard]) for shard in cut}}
        lost = losses(opened, ingestion, state, extents)
    return Measurement(state, extents, behind, is_exact, lost)


def _measure_claims(source: StreamSource, ingestion: Ingestion, ledger: Ledger) -> Measurement:
    """In claim mode the lag comes from the pending list and the unread count, which the server keeps."""
    state = ledger.read()
    check_sharing(state, ingestion)
    with source.claims(ingestion.group, ingestion.epochs(source.url.required_streams(), ledger)) as claims:
        lost = losses_of_claims(claims, ingestion, ledger)
        extents = {shard: Extent(0, end) for shard, end in claims.ends.items()}
        return Measurement(state, extents, {s: b.total for s, b in claims.backlog().items()}, is_exact=True, lost=lost)


STATUS = "stream/status"
REASON = "stream/reason"
_MAX_OBSERVATIONS = 100


class StreamStatus(str, enum.Enum):
    """How a group is doing with a stream.

    ``IDLE``: all that may be read is in the table. ``BEHIND``: there is something to read. ``BLOCKED``: there is not,
    since an open transaction holds back what comes next. ``LOST``: messages are gone that were not read, or the stream
    is another one than the group has read.
    """

    IDLE = "idle"
    BEHIND = "behind"
    BLOCKED = "blocked"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LagObserver:
    """Makes the observations of the streams that one group reads into one table.

    Two groups, or two tables, that read the same stream observe the same asset. So the lag has a metadata key of its
    own for each of them, and with it a plot of its own: ``stream/lag/<group>/<asset>``.

    Args:
        group: the consumer group.
        url: of the source.
        asset_key: of the table.
        sensor: the name of the sensor that looks.
        upstream: per stream, the asset that stands for it.
    """

    group: str
    url: StreamUrl
    asset_key: dg.AssetKey
    sensor: str
    upstream: Mapping[str, dg.AssetKey]

    @property
    def lag_key(self) -> str:
        """The metadata key of the lag."""
        return f"stream/lag/{self.group}/{self.asset_key.to_user_string()}"

    def observations(self, found: Measurement) -> list[dg.AssetObservation]:
        """One for each asset that stands for a stream.

        Args:
            found: what was measured.
        """
        return [self._observation(key, found) for key in dict.fromkeys(self.upstream.values())]

    def observations_of_loss(self, error: StreamAssetsError, instance: dg.DagsterInstance) -> list[dg.AssetObservation]:
        """One for each asset that stands for a stream, unless it says so already.

        Args:
            error: why the next run stops.
            instance: where the observations are.
        """
        return [
            dg.AssetObservation(key, metadata={**self._common_metadata(StreamStatus.LOST), REASON: error.what})
            for key in dict.fromkeys(self.upstream.values())
            if not self._is_reported(instance, key, error.what)
        ]

    def observation_of_pause(self, run_id: str, until: float) -> dg.AssetObservation:
        """One of the table's asset: the sensor pauses because a run was cancelled.

        Args:
            run_id: of that run.
            until: when the pause ends, in seconds since 1970.
        """
        return dg.AssetObservation(
            self.asset_key,
            description="The sensor pauses after a cancelled run. Materialize the asset to end the pause.",
            metadata={
                "sensor/name": dg.MetadataValue.text(self.sensor),
                "sensor/cancelled_run": dg.MetadataValue.dagster_run(run_id),
                "sensor/paused_until": dg.MetadataValue.timestamp(until),
            },
        )

    def _observation(self, key: dg.AssetKey, found: Measurement) -> dg.AssetObservation:
        extents = {shard: extent for shard, extent in found.extents.items() if self._asset_of(shard) == key}
        # A shard that has ended holds nothing any more; a RESTORE may have removed rows of it.
        lost = {shard: part for shard, part in found.lost.items() if self._asset_of(shard) == key}
        extents = {**{shard: Extent(part.start, part.end) for shard, part in lost.items()}, **extents}
        total = sum(found.lag.get(shard, 0) for shard in extents)
        is_blocked = any(extent.blocked for extent in extents.values())
        records = [
            dg.TableRecord(
                {
                    "shard": str(shard),
                    "end": extent.end,
                    "lag": found.lag.get(shard, 0),
                    "blocked": extent.blocked,
                    "lost": "" if shard not in lost else f"{lost[shard].start} to {lost[shard].end}",
                }
            )
            for shard, extent in sorted(extents.items())
        ]
        return dg.AssetObservation(
            key,
            metadata={
                **self._common_metadata(status_of(total, is_blocked=is_blocked, is_lost=bool(lost))),
                self.lag_key: dg.MetadataValue.int(total),
                "stream/shards": dg.MetadataValue.table(records) if records else dg.MetadataValue.text("none"),
            },
        )

    def _common_metadata(self, status: StreamStatus) -> dict[str, dg.MetadataValue]:
        return {
            STATUS: dg.MetadataValue.text(status.value),
            "stream/group": dg.MetadataValue.text(self.group),
            "stream/cluster": dg.MetadataValue.text(str(self.url.with_streams([])).rstrip("/")),
            "stream/table_asset": dg.MetadataValue.asset(self.asset_key),
            "stream/sensor": dg.MetadataValue.text(self.sensor),
        }

    def _asset_of(self, shard: Shard) -> dg.AssetKey | None:
        return self.upstream.get(split_epoch(shard.stream)[0])

    def _is_reported(self, instance: dg.DagsterInstance, key: dg.AssetKey, reason: str) -> bool:
        """Whether the newest observation of this group and table says it: a tick that fails remembers nothing."""
        for record in instance.fetch_observations(key, limit=_MAX_OBSERVATIONS).records:
            known = record.asset_observation.metadata if record.asset_observation else {}
            of = {name: known[name].value for name in ("stream/group", "stream/table_asset") if name in known}
            if of == {"stream/group": self.group, "stream/table_asset": self.asset_key}:
                return REASON in known and known[REASON].value == reason
        return False


def status_of(lag: int, *, is_blocked: bool, is_lost: bool) -> StreamStatus:
    """The status of a group in a stream.

    Args:
        lag: messages to come.
        is_blocked: whether an open transaction holds something back.
        is_lost: whether messages are gone that were not read.

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
    """The numbers that observations are made of, as text: while it is the same, there is nothing new to report."""
    shards = {
        str(shard): [extent.end, found.lag.get(shard, 0), extent.blocked, found.lost.get(shard)]
        for shard, extent in sorted(found.extents.items())
    }
    ended = {str(shard): part for shard, part in sorted(found.lost.items()) if shard not in found.extents}
    return json.dumps({**shards, **ended})
