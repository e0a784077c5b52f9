"""Reports the measured lag of a group as observations of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

from spark_jobs.lag import Measurement, StreamStatus, status_of
from stream_consumers.batches import Extent
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

STATUS = "stream/status"
REASON = "stream/reason"
_MAX_OBSERVATIONS = 100


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
        # The bytes may contain messages of each stream.
        tail = found.unreadable_tail
        is_blocked = tail is not None or any(extent.blocked for extent in extents.values())
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
                **({} if tail is None else {REASON: dg.MetadataValue.text(tail)}),
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
