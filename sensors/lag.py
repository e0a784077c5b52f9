"""Measures the lag of a group without consuming messages, and reports it as observations of the streams."""

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
    """The measured lag of a group.

    Args:
        state: the state of the ledger.
        extents: the range of sequences that each shard holds.
        lag: the lag of each shard, an upper bound.
        is_exact: whether the time budget was enough to find all ends.
        lost: the range of each shard that is gone from the stream and was not read.
    """

    state: LedgerState
    extents: Mapping[Shard, Extent]
    lag: Mapping[Shard, int]
    is_exact: bool
    lost: Mapping[Shard, Range] = field(default_factory=dict)

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
            + self.blocked()
        )

    def blocked(self) -> str:
        """Return the messages that an open transaction holds back, as text; empty if there are none."""
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
    return Measurement(state, extents, behind, is_exact, lost)


def _measure_claims(source: StreamSource, ingestion: Ingestion, ledger: Ledger) -> Measurement:
    """Measure the lag in claim mode from the pending list and the unread count of the server."""
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
    """The status of a group in a stream.

    ``IDLE``: all readable messages are in the table. ``BEHIND``: there are messages to read. ``BLOCKED``: there are no
    messages to read, because an open transaction holds back the next ones. ``LOST``: messages that were not read are
    gone, or the stream is not the one that the group has read.
    """

    IDLE = "idle"
    BEHIND = "behind"
    BLOCKED = "blocked"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LagObserver:
    """Builds the observations of the streams that one group reads into one table.

    Two groups or two tables that read the same stream observe the same asset. So each of them has its own metadata key
    for the lag, ``stream/lag/<group>/<asset>``, and its own plot.

    Args:
        group: the consumer group.
        url: the stream URL.
        asset_key: the key of the table's asset.
        sensor: the name of the sensor.
        upstream: the asset of each stream, by stream key.
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
        """Build an observation of each stream asset from a measurement."""
        return [self._observation(key, found) for key in dict.fromkeys(self.upstream.values())]

    def observations_of_loss(self, error: StreamAssetsError, instance: dg.DagsterInstance) -> list[dg.AssetObservation]:
        """Build an observation of each stream asset whose newest observation does not have this error yet.

        Args:
            error: the error that stops the next run.
            instance: the Dagster instance.
        """
        return [
            dg.AssetObservation(key, metadata={**self._common_metadata(StreamStatus.LOST), REASON: error.what})
            for key in dict.fromkeys(self.upstream.values())
            if not self._is_reported(instance, key, error.what)
        ]

    def observation_of_pause(self, run_id: str, until: float) -> dg.AssetObservation:
        """Build an observation of the table's asset: the sensor pauses because a run was cancelled.

        Args:
            run_id: the id of the cancelled run.
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
        # A shard of an ended epoch has no extent, but a RESTORE may have removed rows of it.
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
        """Return whether the newest observation of this group and table has the reason."""
        for record in instance.fetch_observations(key, limit=_MAX_OBSERVATIONS).records:
            known = record.asset_observation.metadata if record.asset_observation else {}
            of = {name: known[name].value for name in ("stream/group", "stream/table_asset") if name in known}
            if of == {"stream/group": self.group, "stream/table_asset": self.asset_key}:
                return REASON in known and known[REASON].value == reason
        return False


def status_of(lag: int, *, is_blocked: bool, is_lost: bool) -> StreamStatus:
    """Return the status of a group in a stream.

    Args:
        lag: the lag of the group.
        is_blocked: whether an open transaction holds back messages.
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
    return json.dumps({**shards, **ended})
