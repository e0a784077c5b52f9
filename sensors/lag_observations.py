"""What is told of a stream: how far each group is behind it, as observations of the asset that stands for it."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

from sensors.lag import Measurement
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import SourceRecreatedError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

STATUS = "stream/status"
REASON = "stream/reason"
_NEWEST = 100


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

    def observations_of_loss(
        self, error: SourceRecreatedError, instance: dg.DagsterInstance
    ) -> list[dg.AssetObservation]:
        """One for each asset that stands for a stream, unless it says so already.

        Args:
            error: how it is known that the stream is another one.
            instance: where the observations are.
        """
        return [
            dg.AssetObservation(key, metadata={**self._known(StreamStatus.LOST), REASON: error.what})
            for key in dict.fromkeys(self.upstream.values())
            if not self._was_told(instance, key, error.what)
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
        lost = {shard: part for shard, part in found.lost.items() if shard in extents}
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
                **self._known(status_of(total, is_blocked=is_blocked, is_lost=bool(lost))),
                self.lag_key: dg.MetadataValue.int(total),
                "stream/shards": dg.MetadataValue.table(records) if records else dg.MetadataValue.text("none"),
            },
        )

    def _known(self, status: StreamStatus) -> dict[str, dg.MetadataValue]:
        return {
            STATUS: dg.MetadataValue.text(status.value),
            "stream/group": dg.MetadataValue.text(self.group),
            "stream/cluster": dg.MetadataValue.text(str(self.url.with_streams([])).rstrip("/")),
            "stream/table_asset": dg.MetadataValue.asset(self.asset_key),
            "stream/sensor": dg.MetadataValue.text(self.sensor),
        }

    def _asset_of(self, shard: Shard) -> dg.AssetKey | None:
        return self.upstream.get(split_epoch(shard.stream)[0])

    def _was_told(self, instance: dg.DagsterInstance, key: dg.AssetKey, reason: str) -> bool:
        """Whether the newest observation of this group and table says it: a tick that fails remembers nothing."""
        for record in instance.fetch_observations(key, limit=_NEWEST).records:
            told = record.asset_observation.metadata if record.asset_observation else {}
            of = {name: told[name].value for name in ("stream/group", "stream/table_asset") if name in told}
            if of == {"stream/group": self.group, "stream/table_asset": self.asset_key}:
                return REASON in told and told[REASON].value == reason
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
    """The numbers that observations are made of: the same text, nothing new to tell."""
    shards = {
        str(shard): [extent.end, found.lag.get(shard, 0), extent.blocked, found.lost.get(shard)]
        for shard, extent in sorted(found.extents.items())
    }
    return json.dumps(shards)
