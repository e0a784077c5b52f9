"""A stream, the table that it goes into, and how: what a stream asset holds, and each of its runs reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import dagster as dg

from sensors.lag_sensor import LagPolicy
from spark_jobs.batches.ingestion import Ingestion, Observer, Transform, ignore_steps
from spark_jobs.batches.retries import Retries
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.table_location import S3, check_location, scheme
from stream_assets.catalogs import CatalogTable
from stream_assets.connections import Origin
from stream_assets.deferred import resolved_text
from stream_assets.delta_lake import LakeTable
from stream_assets.metadata import TABLE_URI
from stream_assets.partitions import check_current_partition, check_partitions
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_count, check_range, check_switch, choose_fields
from stream_consumers.urls import StreamUrl

_PAGE = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamCheckContext:
    """What the checks of a stream asset may look at.

    Args:
        key: of the asset in Dagster.
        stream: what it was declared with.
        instance: where its materializations are.
    """

    key: dg.AssetKey
    stream: StreamToTable
    instance: dg.DagsterInstance

    @cached_property
    def ledger(self) -> Ledger:
        """What the group has written into the table."""
        return self.stream.ingestion.ledger()

    @cached_property
    def state(self) -> LedgerState:
        """The ledger as the first check that asked has found it; all checks of a run look at the same."""
        return self.ledger.read()


@dataclass(frozen=True, slots=True)
class StreamCheck:
    """A check of a stream asset.

    Args:
        name: of the check.
        description: what holds if it passes.
        evaluate: looks whether that holds; of its result the name and the key are filled in.
        blocking: whether what is downstream in the same run waits for it, and is not made if it fails.
    """

    name: str
    description: str
    evaluate: Callable[[StreamCheckContext], dg.AssetCheckResult]
    blocking: bool = False

    def __post_init__(self) -> None:
        check_switch("blocking", self.blocking)

    def spec(self, key: dg.AssetKey) -> dg.AssetCheckSpec:
        """Dagster's description of the check of an asset."""
        return dg.AssetCheckSpec(self.name, asset=key, description=self.description, blocking=self.blocking)

    def result(self, context: StreamCheckContext) -> dg.AssetCheckResult:
        """What Dagster is told."""
        return self.evaluate(context)._replace(asset_key=context.key, check_name=self.name)

    def evaluation(self, context: StreamCheckContext) -> dg.AssetCheckEvaluation:
        """What Dagster is told by an op that makes the asset without being its own."""
        found = self.evaluate(context)
        return dg.AssetCheckEvaluation(
            asset_key=context.key,
            check_name=self.name,
            passed=found.passed,
            metadata=found.metadata,
            severity=found.severity,
            description=found.description,
        )


@dataclass(frozen=True)
class StreamToTable:
    """What ``@stream_asset`` was told, as a value.

    Args:
        key: the asset key of the table.
        origin: where the messages come from; it is looked up when it is used.
        group: the consumer group, or an ``EnvVar``; ``None`` for the default of the mode.
        table: where the table is; it is looked up when it is used.
        template: the ingestion but for its group, its table and its storage options.
        policy: when the sensor asks for a run.
        sensor_seconds: the least time between two ticks.
        sensor_status: whether the sensor runs without being turned on.
        spark: a resource with a ``spark_session``, or the key of one; ``None`` for a local Spark.
        checks: what is checked after each run.
        observer: told of each step of each batch; for tests.
        partitions: those of the asset itself; ``None`` for an asset without.
        replay_partitions: of the replay job; ``None`` for no such job.
        linger_seconds, materialize_seconds, dead_letter_payloads: see :func:`stream_assets.stream_asset`.
    """

    key: dg.AssetKey
    origin: Origin
    group: str | None
    table: LakeTable | CatalogTable
    template: Ingestion
    policy: LagPolicy = field(default_factory=LagPolicy)
    sensor_seconds: int = 30
    sensor_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED
    spark: Any = None
    checks: Sequence[StreamCheck] = ()
    observer: Observer = ignore_steps
    partitions: dg.TimeWindowPartitionsDefinition | None = None
    replay_partitions: dg.TimeWindowPartitionsDefinition | None = None
    linger_seconds: float = 0.0
    materialize_seconds: float | None = None
    dead_letter_payloads: bool = False

    def __post_init__(self) -> None:
        choose_fields(self, sensor_status=dg.DefaultSensorStatus)
        if not isinstance(self.checks, Sequence) or not all(isinstance(check, StreamCheck) for check in self.checks):
            raise InvalidOptionError(
                f"checks={self.checks!r} are no checks of a stream asset",
                remedy="Give a list, like [*DEFAULT_CHECKS, build_lag_check(max_messages=1000)].",
            )
        if isinstance(self.spark, type):
            raise InvalidOptionError(
                f"spark={self.spark!r} is a class, and no resource", remedy=f"Write {self.spark.__name__}()."
            )
        check_count("sensor_seconds", self.sensor_seconds)
        check_switch("dead_letter_payloads", self.dead_letter_payloads)
        for option in ("partitions", "replay_partitions"):
            check_partitions(getattr(self, option), option=option)
        if self.partitions is not None:
            check_current_partition(self.partitions)
        if self.partitions is not None and self.is_claimed:
            raise InvalidOptionError(
                f"the members of group {self.template.group!r} claim entries one by one, so that there are no ranges "
                f"that a run of partitions={self.partitions!r} could replay",
                remedy="Use mode 'resumable', or leave the partitions out.",
            )
        if self.materialize_seconds is not None:
            check_range("materialize_seconds", self.materialize_seconds)

    @property
    def stream(self) -> StreamSource:
        """Where the messages come from, with what the variables hold now.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return self.origin.stream()

    @property
    def ingestion(self) -> Ingestion:
        """What goes where, with what the variables hold now.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        stream = self.stream
        group = None if self.group is None else resolved_text("group", self.group)
        return replace(
            self.template,
            group=stream.group(group),
            table=self.table.path,
            claims=stream.is_claimed,
            storage_options=self.table.options(),
        )

    def located(
        self,
        instance: dg.DagsterInstance,
        *,
        retry_seconds: float = 0.0,
        on_wait: Callable[[str], object] = _log.warning,
    ) -> StreamToTable:
        """With the table where its catalog says that it is now; the same where the asset has its path.

        A run, and a tick, ask once, so that all they do is about one table.

        Args:
            instance: where the materializations of the asset are.
            retry_seconds: how long to ask again while the catalog does not answer.
            on_wait: told of each try.

        Raises:
            InvalidOptionError: the name is of another place now than at the last materialization; or there is none.
            AccessDeniedError, CatalogUnavailableError: the catalog does not tell.
        """
        table = self.table
        if isinstance(table, LakeTable):
            return self
        path = check_location(Retries(retry_seconds, on_wait=on_wait).call(lambda: table.path))
        known = self._last_location(instance)
        if known is not None and _comparable(known) != _comparable(path):
            raise InvalidOptionError(
                f"{table} is at {path} now, but {self.key.to_user_string()} was last written to {known}",
                remedy="Let the name be of that table again; or, if the other one is meant, whose stream is read from "
                "its own positions, wipe the materializations of the asset in Dagster.",
            )
        return replace(self, table=LakeTable(path, (), table.storage_options))

    def _last_location(self, instance: dg.DagsterInstance) -> str | None:
        for record in instance.fetch_materializations(self.key, limit=_PAGE).records:
            made = record.asset_materialization
            told = made.metadata.get(TABLE_URI) if made else None
            if told is not None:
                return check_location(str(told.value))
        return None

    @property
    def source(self) -> StreamUrl:
        """The stream URL, with what the variables hold now."""
        return self.stream.url

    @property
    def is_claimed(self) -> bool:
        """Whether the members of the group claim entries one by one, as far as that is known before it is used."""
        shown = self.origin.shown
        return shown is not None and StreamSource(shown, self.origin.mode).is_claimed

    def with_transform(self, transform: Transform | None) -> StreamToTable:
        """The same with another transform."""
        return replace(self, template=replace(self.template, transform=transform))

    @property
    def name(self) -> str:
        """The key as an identifier: the base of the names of the op, the job and the sensor."""
        return re.sub(r"[^A-Za-z0-9_]", "_", "__".join(self.key.path))

    @property
    def job_name(self) -> str:
        """The name of the job that the sensor asks for."""
        return f"ingest_{self.name}"

    @property
    def replay_job_name(self) -> str:
        """The name of the job that replays partitions."""
        return f"replay_{self.name}"

    @property
    def redrive_job_name(self) -> str:
        """The name of the job that decodes dead letters again."""
        return f"redrive_{self.name}"


def _comparable(location: str) -> str:
    """S3 has two names of its scheme."""
    kind = scheme(location)
    return (f"s3{location[len(kind) :]}" if kind in S3 else location).rstrip("/")
