"""A stream, the table that it goes into, and how: what a stream asset holds, and each of its runs reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import dagster as dg

from sensors.lag_sensor import LagPolicy
from spark_jobs.batches.ingestion import RETRY_SECONDS, Ingestion, Observer, Transform, ignore_steps
from spark_jobs.batches.run_control import Retries, result_of
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.table_location import S3, check_location, scheme
from spark_jobs.writing.layout import TableLayout
from stream_assets.metadata import MATERIALIZATIONS_PER_PAGE, TABLE_URI, materializations_of
from stream_assets.options import OpOptions, RunLimits, WriterConfig
from stream_assets.partitions import check_current_partition, check_partitions
from stream_assets.resources import LakeTable, StreamLocation, TableLocation, resolved_text, shown_text
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import AutoStreamReset, ConsumerMode, ErrorPolicy, Limits, check_switch, choose_fields
from stream_consumers.urls import StreamUrl

OPTIONS: dict[str, type[Any]] = {
    "errors": ErrorPolicy,
    "limits": RunLimits,
    "layout": TableLayout,
    "sensor": LagPolicy,
    "op": OpOptions,
}
"""The objects of options of a stream asset."""
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
        severity: of a failure; ``None`` for that of the result.
    """

    name: str
    description: str
    evaluate: Callable[[StreamCheckContext], dg.AssetCheckResult]
    blocking: bool = False
    severity: dg.AssetCheckSeverity | None = None

    def __post_init__(self) -> None:
        check_switch("blocking", self.blocking)
        if self.severity is not None:
            choose_fields(self, severity=dg.AssetCheckSeverity)

    def spec(self, key: dg.AssetKey) -> dg.AssetCheckSpec:
        """Dagster's description of the check of an asset."""
        return dg.AssetCheckSpec(self.name, asset=key, description=self.description, blocking=self.blocking)

    def result(self, context: StreamCheckContext) -> dg.AssetCheckResult:
        """The result for the run that makes the asset."""
        found = self.evaluate(context)
        severity = found.severity if self.severity is None else self.severity
        return found._replace(asset_key=context.key, check_name=self.name, severity=severity)

    def evaluation(self, context: StreamCheckContext) -> dg.AssetCheckEvaluation:
        """The result as an event, for an op that makes the asset without being its own."""
        found = self.result(context)
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
    """What ``@stream_asset`` was given, as a value; see there for what has no line here.

    Args:
        spec: Dagster's description of the asset, as the translator made it.
        origin: where the messages come from; it is looked up when it is used.
        group: the consumer group, or an ``EnvVar``; ``None`` for the default of the mode.
        table: where the table is; it is looked up when it is used.
        transform: from the decoded rows of a batch to the rows to write.
    """

    spec: dg.AssetSpec
    origin: StreamLocation
    table: TableLocation
    group: str | None = None
    decode: Decoder = field(default_factory=Raw)
    mode: ConsumerMode = ConsumerMode.RESUMABLE
    start: AutoStreamReset | None = None
    errors: ErrorPolicy = field(default_factory=ErrorPolicy)
    limits: RunLimits = field(default_factory=RunLimits)
    layout: TableLayout = field(default_factory=TableLayout)
    sensor: LagPolicy = field(default_factory=LagPolicy)
    op: OpOptions = field(default_factory=OpOptions)
    checks: Sequence[StreamCheck] = ()
    spark: Any = None
    observer: Observer = ignore_steps
    transform: Transform | None = None

    def __post_init__(self) -> None:
        choose_fields(self, mode=ConsumerMode)
        if self.start is not None:
            choose_fields(self, start=AutoStreamReset)
        kinds: dict[str, type[Any]] = {"spec": dg.AssetSpec, **OPTIONS}
        for option, kind in kinds.items():
            value = getattr(self, option)
            if not isinstance(value, kind):
                raise InvalidOptionError(
                    f"{option}={value!r} is a {type(value).__name__}", remedy=f"Give {kind.__name__}(…)."
                )
        if not isinstance(self.checks, Sequence) or not all(isinstance(check, StreamCheck) for check in self.checks):
            raise InvalidOptionError(
                f"checks={self.checks!r} are no checks of a stream asset",
                remedy="Give a list, like [*DEFAULT_CHECKS, build_lag_check(max_messages=1000)].",
            )
        if isinstance(self.spark, type):
            raise InvalidOptionError(
                f"spark={self.spark!r} is a class, and no resource", remedy=f"Write {self.spark.__name__}()."
            )
        if self.sensor.max_runs > 1 and self.op.single_writer:
            raise InvalidOptionError(
                f"max_runs={self.sensor.max_runs} lets several runs write the table, but single_writer=True allows one",
                remedy="Leave max_runs out; or use a log store that puts a commit only if it is absent, without "
                "single_writer.",
            )
        check_partitions(self.spec.partitions_def, option="partitions_def")
        if self.partitions is not None:
            check_current_partition(self.partitions)
        if self.partitions is not None and self.is_claimed:
            raise InvalidOptionError(
                f"the members of group {self.shown_group!r} claim entries one by one, so that there are no ranges "
                f"that a run of partitions_def={self.partitions!r} could replay",
                remedy="Use mode 'resumable', or leave the partitions out.",
            )
        self.policy.__post_init__()
        # Refuses what can be seen to be wrong while the code is loaded.
        self._ingest(self.shown_group, "deferred" if self.table.is_deferred else self.table.path)

    @property
    def key(self) -> dg.AssetKey:
        """The asset key of the table."""
        return self.spec.key

    @property
    def partitions(self) -> dg.TimeWindowPartitionsDefinition | None:
        """Those of the asset itself; ``None`` for an asset without."""
        found = self.spec.partitions_def
        return found if isinstance(found, dg.TimeWindowPartitionsDefinition) else None

    @property
    def policy(self) -> LagPolicy:
        """When the sensor asks for a run."""
        return self.sensor.for_runs(self.limits.linger_seconds or 0.0)

    @property
    def pool(self) -> str | None:
        """The pool of other ops that write the table, where only one of them may run at a time."""
        return self.op.pool if self.op.single_writer else None

    @property
    def retry_seconds(self) -> float:
        """How long a run retries after an error that may be temporary."""
        return RETRY_SECONDS if self.limits.retry_seconds is None else self.limits.retry_seconds

    @property
    def shown_group(self) -> str:
        """The group for people; that of an ``EnvVar`` is its name in braces."""
        shown = shown_text(self.group) if isinstance(self.group, str) else self.group
        url = self.origin.shown
        return (shown if url is None else StreamSource(url, self.mode, self.origin.client).group(shown)) or (
            self.mode.value
        )

    @property
    def stream(self) -> StreamSource:
        """Where the messages come from, with what the variables hold now.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return StreamSource(self.origin.url, self.mode, self.origin.client)

    @property
    def ingestion(self) -> Ingestion:
        """What goes where, with what the variables hold now.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        stream = self.stream
        group = stream.group(None if self.group is None else resolved_text("group", self.group))
        return self._ingest(group, self.table.path, claims=stream.is_claimed, storage_options=self.table.options())

    def _ingest(self, group: str, table: str, **resolved: Any) -> Ingestion:
        is_real_time = self.mode is ConsumerMode.REAL_TIME
        return Ingestion(
            group=group,
            table=table,
            decoder=self.decode,
            transform=self.transform,
            sharing=self.mode,
            start=self.start or (AutoStreamReset.LATEST if is_real_time else AutoStreamReset.EARLIEST),
            errors=self.errors,
            limits=Limits().override(self.limits.max_records, self.limits.max_bytes),
            retry_seconds=self.retry_seconds,
            layout=self.layout,
            single_writer=self.op.single_writer,
            **resolved,
        )

    def configured(self, config: WriterConfig, transform: Transform | None) -> StreamToTable:
        """As a run config and a transform have it."""
        errors = self.errors
        if config.on_bad_rows is not None:
            errors = replace(errors, on_bad_rows=config.on_bad_rows.value)
        return replace(self, limits=self.limits.overridden(config), errors=errors, transform=transform)

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
            on_wait: gets the reason of each wait.

        Raises:
            InvalidOptionError: the name is of another place now than at the last materialization; or there is none.
            AccessDeniedError, CatalogUnavailableError: the catalog does not answer, or refuses.
        """
        table = self.table
        if isinstance(table, LakeTable):
            return self
        path = check_location(result_of(Retries(retry_seconds).call(lambda: table.path), on_wait))
        known = self._last_location(instance)
        if known is not None and _comparable(known) != _comparable(path):
            raise InvalidOptionError(
                f"{table} is at {path} now, but {self.key.to_user_string()} was last written to {known}",
                remedy="Let the name be of that table again; or, if the other one is meant, whose stream is read from "
                "its own positions, wipe the materializations of the asset in Dagster.",
            )
        return replace(self, table=LakeTable(path, (), table.storage_options))

    def _last_location(self, instance: dg.DagsterInstance) -> str | None:
        for _, made in islice(materializations_of(instance, self.key), MATERIALIZATIONS_PER_PAGE):
            known = made.metadata.get(TABLE_URI)
            if known is not None:
                return check_location(str(known.value))
        return None

    @property
    def source(self) -> StreamUrl:
        """The stream URL, with what the variables hold now."""
        return self.stream.url

    @property
    def is_claimed(self) -> bool:
        """Whether the members of the group claim entries one by one, as far as that is known before it is used."""
        shown = self.origin.shown
        return shown is not None and StreamSource(shown, self.mode, self.origin.client).is_claimed

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
    def has_replay_job(self) -> bool:
        """Whether there is a replay job: not where runs of partitions replay, nor where there are no ranges."""
        return self.partitions is None and not self.is_claimed

    @property
    def redrive_job_name(self) -> str:
        """The name of the job that decodes dead letters again."""
        return f"redrive_{self.name}"


def _comparable(location: str) -> str:
    """S3 has two names of its scheme."""
    kind = scheme(location)
    return (f"s3{location[len(kind) :]}" if kind in S3 else location).rstrip("/")
