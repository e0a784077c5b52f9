"""The declaration of a stream asset: the stream, the table, and the options that each run reads."""

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
from spark_jobs.batches.ingestion import BATCH_SECONDS, RETRY_SECONDS, Ingestion, Transform
from spark_jobs.batches.run_control import Retries, result_of
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.table_location import check_location, comparable_location
from spark_jobs.writing.keyed import Keys
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
"""The options objects of a stream asset."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamCheckContext:
    """The objects that checks of a stream asset read.

    Args:
        key: the key of the asset.
        stream: the stream, the table, and their options.
        instance: the Dagster instance.
    """

    key: dg.AssetKey
    stream: StreamToTable
    instance: dg.DagsterInstance

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the group in the table."""
        return self.stream.ingestion.ledger()

    @cached_property
    def state(self) -> LedgerState:
        """The state of the ledger, which is read once for all checks of a run."""
        return self.ledger.read()


@dataclass(frozen=True, slots=True)
class StreamCheck:
    """A check of a stream asset.

    Args:
        name: the name of the check.
        description: the condition that the check verifies.
        evaluate: evaluates the condition; the name and the key of its result are filled in.
        blocking: whether downstream assets of the same run wait for the check, and are skipped if it fails.
        severity: the severity of a failure; ``None`` for the one of the result.
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
        """Return Dagster's spec of the check."""
        return dg.AssetCheckSpec(self.name, asset=key, description=self.description, blocking=self.blocking)

    def result(self, context: StreamCheckContext) -> dg.AssetCheckResult:
        """Evaluate the check in a run of the asset."""
        found = self.evaluate(context)
        severity = found.severity if self.severity is None else self.severity
        return found._replace(asset_key=context.key, check_name=self.name, severity=severity)

    def evaluation(self, context: StreamCheckContext) -> dg.AssetCheckEvaluation:
        """Evaluate the check in an op of another job that writes the table, and return an event."""
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
    """The arguments of ``@stream_asset``, which documents those that are missing here.

    Args:
        spec: Dagster's spec of the asset, as the translator returned it.
        origin: the streams, whose variables are read when they are used.
        group: the consumer group, or an ``EnvVar``; ``None`` for the default of the mode.
        table: the location of the table, which is resolved when it is used.
        transform: converts the decoded rows of a batch to the rows to write.
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
    keys: Keys | None = None
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
                    f"{option}={value!r} is a {type(value).__name__}", remedy=f"Use {kind.__name__}(…)."
                )
        if not isinstance(self.checks, Sequence) or not all(isinstance(check, StreamCheck) for check in self.checks):
            raise InvalidOptionError(
                f"checks={self.checks!r} are not checks of a stream asset",
                remedy="Use a list, like [*DEFAULT_CHECKS, build_lag_check(max_messages=1000)].",
            )
        if isinstance(self.spark, type):
            raise InvalidOptionError(
                f"spark={self.spark!r} is a class, not a resource", remedy=f"Write {self.spark.__name__}()."
            )
        if self.sensor.max_runs > 1 and self.op.single_writer:
            raise InvalidOptionError(
                f"max_runs={self.sensor.max_runs} lets several runs write the table, but single_writer=True allows one",
                remedy="Leave max_runs out; or leave single_writer out, and use a log store that writes a commit only "
                "if it is absent.",
            )
        check_partitions(self.spec.partitions_def, option="partitions_def")
        if self.partitions is not None:
            check_current_partition(self.partitions)
        if self.partitions is not None and self.is_claimed:
            raise InvalidOptionError(
                f"a run of partitions_def={self.partitions!r} cannot replay ranges, because the members of group "
                f"{self.shown_group!r} claim entries one by one",
                remedy="Use mode 'resumable', or leave the partitions out.",
            )
        if self.partitions is not None and self.keys is not None:
            raise InvalidOptionError(
                f"partitions_def={self.partitions!r} divides rows by the time of their messages, and a keyed table "
                "moves a row with each change of its key",
                remedy="Leave the partitions out.",
            )
        self.policy.__post_init__()
        # Checks the options that are known when the code is loaded.
        self._ingest(self.shown_group, "deferred" if self.table.is_deferred else self.table.path)

    @property
    def key(self) -> dg.AssetKey:
        """The asset key of the table."""
        return self.spec.key

    @property
    def partitions(self) -> dg.TimeWindowPartitionsDefinition | None:
        """The partitions of the asset; ``None`` if it has none."""
        found = self.spec.partitions_def
        return found if isinstance(found, dg.TimeWindowPartitionsDefinition) else None

    @property
    def policy(self) -> LagPolicy:
        """The policy by which the sensor requests runs."""
        return self.sensor.for_runs(self.limits.linger_seconds or 0.0)

    @property
    def pool(self) -> str | None:
        """The pool of all ops that write the table, if only one of them may run at a time."""
        return self.op.pool if self.op.single_writer else None

    @property
    def retry_seconds(self) -> float:
        """How long a run retries after a temporary error, in seconds."""
        return RETRY_SECONDS if self.limits.retry_seconds is None else self.limits.retry_seconds

    @property
    def shown_group(self) -> str:
        """The group for display; an ``EnvVar`` as its name in braces."""
        shown = shown_text(self.group) if isinstance(self.group, str) else self.group
        url = self.origin.shown
        return (shown if url is None else StreamSource(url, self.mode, self.origin.client).group(shown)) or (
            self.mode.value
        )

    @property
    def stream(self) -> StreamSource:
        """The stream, with variables resolved now.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return StreamSource(self.origin.url, self.mode, self.origin.client)

    @property
    def ingestion(self) -> Ingestion:
        """The group, the table and how rows are made, with variables resolved now.

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
            batch_seconds=BATCH_SECONDS if self.limits.batch_seconds is None else self.limits.batch_seconds,
            layout=self.layout,
            single_writer=self.op.single_writer,
            keys=self.keys,
            owns_table=self.origin.is_found,
            **resolved,
        )

    def configured(self, config: WriterConfig, transform: Transform | None) -> StreamToTable:
        """Return the declaration with the options of a run config, and a transform."""
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
        """Return the declaration with the present location of the table in its catalog.

        A run and a tick call this once, so everything they do concerns one table.

        Args:
            instance: the Dagster instance, whose materializations have the previous location.
            retry_seconds: how long to retry while the catalog does not answer.
            on_wait: called with the reason of each wait.

        Raises:
            InvalidOptionError: the catalog has no such table, or its location differs from the last materialization.
            AccessDeniedError, CatalogUnavailableError: the catalog refuses access, or does not answer.
        """
        table = self.table
        if isinstance(table, LakeTable):
            return self
        path = check_location(result_of(Retries(retry_seconds).call(lambda: table.path), on_wait))
        known = self._last_location(instance)
        if known is not None and comparable_location(known) != comparable_location(path):
            raise InvalidOptionError(
                f"{table} is at {path} now, but {self.key.to_user_string()} was last written to {known}",
                remedy="Register that table under the name again. If the new table is right, wipe the materializations "
                "of the asset in Dagster; the stream is then read from the positions of the new table.",
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
        """The stream URL, with variables resolved now."""
        return self.stream.url

    @property
    def is_claimed(self) -> bool:
        """Whether the members of the group claim entries one by one; false while the URL is in a variable."""
        shown = self.origin.shown
        return shown is not None and StreamSource(shown, self.mode, self.origin.client).is_claimed

    @property
    def name(self) -> str:
        """The key as an identifier, from which the names of the op, the jobs and the sensors are made."""
        return re.sub(r"[^A-Za-z0-9_]", "_", "__".join(self.key.path))

    @property
    def job_name(self) -> str:
        """The name of the job that the sensor requests."""
        return f"ingest_{self.name}"

    @property
    def replay_job_name(self) -> str:
        """The name of the job that replays partitions."""
        return f"replay_{self.name}"

    @property
    def has_replay_job(self) -> bool:
        """Whether the asset has a replay job: not if it has partitions, whose runs replay, or claims entries."""
        return self.partitions is None and not self.is_claimed

    @property
    def redrive_job_name(self) -> str:
        """The name of the job that decodes dead letters again."""
        return f"redrive_{self.name}"

    @property
    def rebuild_job_name(self) -> str:
        """The name of the job that makes the table anew."""
        return f"rebuild_{self.name}"
