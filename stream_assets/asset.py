"""The ``@stream_asset`` decorator: a stream into a Delta table, as a Dagster asset."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import dagster as dg
from pyspark.sql import SparkSession

from sensors.lag_sensor import MEMBER_TAG, STALE_RUN_SECONDS, LagPolicy
from spark_jobs.batches.accept import accept
from spark_jobs.batches.ingestion import RETRY_SECONDS, BatchReport, Ingestion, Observer, Transform, ignore_steps
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.ledger_recovery import has_begun
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.batches.rewind import rewind
from spark_jobs.reading.decode import Decoder, Raw
from spark_jobs.run_ingestion import drain
from stream_assets.config import ReplayConfig, StreamConfig
from stream_assets.materializations import (
    Context,
    IngestMaterializations,
    ReplayMaterialization,
    Told,
    as_result,
    describe_partitions,
    describe_ranges,
)
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, Terminal
from stream_consumers.options import (
    AutoStreamReset,
    ConsumerMode,
    DataLoss,
    Limits,
    check_count,
    check_range,
    choice,
    choose_fields,
)
from stream_consumers.urls import StreamUrl

DAILY = dg.DailyPartitionsDefinition(start_date="2025-01-01", end_offset=1)
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_ENCODED = "percent-encoded"
MATERIALIZE_SECONDS = 30.0


@dataclass(frozen=True)
class StreamAsset:
    """A declared stream asset; :func:`stream_assets.stream_definitions` makes Dagster definitions of it.

    Args:
        key: the asset key of the table.
        stream: where the messages come from.
        ingestion: what goes where.
        policy: when the sensor asks for a run.
        sensor_seconds: the least time between two ticks.
        sensor_status: whether the sensor runs without being turned on.
        resource: the key of the resource that has the ``spark_session``.
        group_name, owners, tags, description, deps: as in ``dagster.AssetSpec``.
        observer: told of each step of each batch; for tests.
        linger_seconds, materialize_seconds: see :func:`stream_asset`.
        replay_partitions: of the replay job; ``None`` for no such job.
    """

    key: dg.AssetKey
    stream: StreamSource
    ingestion: Ingestion
    policy: LagPolicy = field(default_factory=LagPolicy)
    sensor_seconds: int = 30
    sensor_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED
    resource: str = "spark"
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str | None = None
    deps: Sequence[Any] = ()
    observer: Observer = ignore_steps
    replay_partitions: dg.TimeWindowPartitionsDefinition | None = None
    linger_seconds: float = 0.0
    materialize_seconds: float | None = None

    def __post_init__(self) -> None:
        choose_fields(self, sensor_status=dg.DefaultSensorStatus)
        check_count("sensor_seconds", self.sensor_seconds)
        days = self.replay_partitions
        if days is not None and not isinstance(days, dg.TimeWindowPartitionsDefinition):
            raise InvalidOptionError(
                f"replay_partitions={days!r} are no windows of time",
                remedy="Use dg.DailyPartitionsDefinition, dg.HourlyPartitionsDefinition and the like, or None.",
            )
        check_range("linger_seconds", self.linger_seconds)
        if self.materialize_seconds is not None:
            check_range("materialize_seconds", self.materialize_seconds)

    @property
    def source(self) -> StreamUrl:
        """The stream URL."""
        return self.stream.url

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
    def upstream(self) -> Mapping[str, dg.AssetKey]:
        """Per stream, the asset that stands for it."""
        return {stream: stream_asset_key(self.source.protocol, stream) for stream in self.source.required_streams()}

    def upstream_specs(self) -> list[dg.AssetSpec]:
        """The streams as external assets, so that lineage and lag show up in the UI."""
        kind = self.stream.backend.kind
        return [
            dg.AssetSpec(
                key,
                description=f"Stream {stream} of {self.source}.",
                group_name=self.group_name,
                kinds={kind} if kind else None,
                metadata={"stream/url": str(self.source), "stream/key": stream},
            )
            for stream, key in self.upstream.items()
        ]

    def assets_definition(self) -> dg.AssetsDefinition:
        """The Dagster asset."""
        kind = self.stream.backend.kind
        spec = dg.AssetSpec(
            self.key,
            deps=[*self.upstream.values(), *self.deps],
            description=self.description,
            group_name=self.group_name,
            owners=self.owners,
            tags=self.tags,
            kinds={"spark", "deltalake", *([kind] if kind else [])},
            metadata={
                "dagster/uri": self.ingestion.table,
                "stream/source": str(self.source),
                "stream/group": self.ingestion.group,
                **({"stream/replay_job": self.replay_job_name} if self.replay_partitions else {}),
            },
            # A run that finds nothing to read makes nothing.
            skippable=True,
        )

        @dg.multi_asset(specs=[spec], name=self.name, required_resource_keys={self.resource})
        def materialize(context: dg.AssetExecutionContext, config: StreamConfig) -> Iterator[dg.MaterializeResult]:  # type: ignore[type-arg]
            yield from self.drain(context, config)

        return materialize

    def drain(self, context: dg.AssetExecutionContext, config: StreamConfig) -> Iterator["dg.MaterializeResult[Any]"]:
        """What a run does: micro-batches up to the end that the stream had when it began, or a replay.

        With ``linger_seconds`` it stays, and writes what comes. Each batch is an observation when it is in the table
        and committed; all of them are one materialization at the end, or several while the run stays. A replay is
        materialized when it is whole.

        Raises:
            dagster.Failure: for errors that come back until somebody changes something; other errors pass through.
        """
        with _failures():
            config.check()
            self._accept(context, config)
            if config.start is not None and not config.move_group:
                wanted = config.replay(replay_id(context))
                made = self._result(self._replay_told(context, wanted), self._replayed(context, wanted, config))
            else:
                linger_seconds, every_seconds = self._staying(config)
                spark = self._spark(context)
                told = IngestMaterializations(context, self.key, self.ingestion, spark, every_seconds=every_seconds)
                made = self._result(told, self._drained(context, config, linger_seconds, told.tell_if_due))
            if made is not None:
                yield as_result(made)

    def _accept(self, context: dg.AssetExecutionContext, config: StreamConfig) -> None:
        if not config.accept:
            return
        with ExitStack() as stack:
            opened = stack.enter_context(self.stream.open())
            names = self.ingestion.epochs(self.source.required_streams())
            claimed = self.stream.claims(self.ingestion.group, names) if self.stream.is_claimed else None
            claims = stack.enter_context(claimed) if claimed else None
            found = accept(self._spark(context), opened, self.ingestion, epochs=config.accept, claims=claims)
        for one in found:
            context.log.info(f"{one.name} is accepted, known by {one.identity}; {one.before} has ended")

    def replay(
        self, context: dg.OpExecutionContext, wanted: Replay, config: ReplayConfig
    ) -> Iterator[dg.AssetMaterialization]:
        """Replay partitions into the table; a materialization when they are whole.

        Raises:
            dagster.Failure: see :meth:`drain`.
        """
        with _failures():
            told = self._replay_told(context, wanted, partitions=describe_partitions(context))
            made = self._result(told, self._replayed(context, wanted, config))
            if made is not None:
                yield made

    def _replay_told(self, context: Context, wanted: Replay, **what: str) -> Told:
        what = {"start": str(wanted.start or "earliest"), "stop": str(wanted.stop or "the group's position"), **what}
        return ReplayMaterialization(context, self.key, self.ingestion, self._spark(context), what=what)

    def _staying(self, config: StreamConfig) -> tuple[float, float | None]:
        """How long the run stays, and the least time between two materializations; ``None`` for one at its end."""
        linger = self.linger_seconds if config.linger_seconds is None else config.linger_seconds
        # A run that is to stop somewhere has nothing to stay for.
        linger = 0.0 if config.stop else linger
        every = self.materialize_seconds if config.materialize_seconds is None else config.materialize_seconds
        if every is None:
            every = MATERIALIZE_SECONDS if linger else None
        return linger, every

    def _drained(
        self,
        context: dg.AssetExecutionContext,
        config: StreamConfig,
        linger_seconds: float,
        on_next: Callable[[], object],
    ) -> Iterator[BatchReport]:
        tagged = context.run.tags.get(MEMBER_TAG, self.ingestion.member)
        member = tagged if self.stream.is_claimed else self.ingestion.member
        ingestion = replace(config.configured(self.ingestion), member=member)
        to = config.start.bound() if config.start else None
        if to is not None and has_begun(ingestion):
            with self.stream.open() as opened:
                moves = rewind(
                    self._spark(context),
                    opened,
                    ingestion,
                    to,
                    replay_id=replay_id(context),
                    on_wait=context.log.warning,
                )
                for move in moves:
                    context.log.info(f"{move.shard} is moved from {move.position} to {move.to}")
        is_empty = True
        for report in drain(
            self._spark(context),
            self.stream,
            ingestion,
            observer=self.observer,
            max_batches=config.max_batches,
            on_tail=context.log.warning,
            origin=to,
            stop=config.stop.bound() if config.stop else None,
            linger_seconds=linger_seconds,
            on_next=on_next,
            on_wait=context.log.warning,
        ):
            is_empty = False
            yield report
        if is_empty:
            context.log.info(f"nothing to read: group {ingestion.group} is at the end of {self.source}")

    def _replayed(
        self,
        context: Context,
        wanted: Replay,
        config: ReplayConfig,
    ) -> Iterator[BatchReport]:
        ingestion = config.configured(self.ingestion)
        with self.stream.open() as opened:
            job = ReplayJob(
                self._spark(context),
                opened,
                ingestion,
                wanted,
                observer=self.observer,
                on_wait=context.log.warning,
            )
            start, stop = wanted.start or "the beginning", wanted.stop or "the position of the group"
            ranges = describe_ranges(job.goal()) or "nothing"
            context.log.info(f"replaying from {start} to {stop}: {ranges}")
            yield from drain_batches(job, max_batches=config.max_batches)

    def _spark(self, context: Context) -> SparkSession:
        spark: SparkSession = getattr(context.resources, self.resource).spark_session
        return spark

    def _result(self, told: Told, reports: Iterator[BatchReport]) -> dg.AssetMaterialization | None:
        """The last materialization of the run, or the only one; the others are events on the way."""
        try:
            for report in reports:
                told.add(report)
        except BaseException:
            told.tell_rest()
            raise
        return told.result()


def stream_asset_key(protocol: str, stream: str) -> dg.AssetKey:
    """The key of the asset that stands for a stream; each stream has its own.

    Dagster makes the name of an input of it, which may have few characters: colons separate parts of the key, and a
    stream with other characters, or a part that is empty, is encoded as a whole.

    Example:
        >>> stream_asset_key("redis", "user:events").to_user_string()
        'redis/user/events'
        >>> stream_asset_key("redis", "user%3A42").to_user_string()
        'redis/percent-encoded/user_3A42'
    """
    parts = stream.split(":")
    if parts[0] != _ENCODED and all(map(_PLAIN.fullmatch, parts)):
        return dg.AssetKey([protocol, *parts])
    # What it has of percent signs is encoding already.
    text = quote(stream.replace("_", "%5F").replace("~", "%7E"), safe="%")
    return dg.AssetKey([protocol, _ENCODED, text.replace("%", "_")])


def replay_id(context: Context) -> str:
    """The id of a run's replay: a retry of a run that failed goes on with it; what had succeeded is begun anew."""
    run = context.run
    while run.parent_run_id is not None:
        parent = context.instance.get_run_by_id(run.parent_run_id)
        if parent is None or parent.status is dg.DagsterRunStatus.SUCCESS:
            break
        run = parent
    return run.run_id


@contextmanager
def _failures() -> Iterator[None]:
    """Errors that come back until somebody changes something are not retried."""
    try:
        yield
    except StreamAssetsError as error:
        if isinstance(error, Terminal):
            raise dg.Failure(description=str(error), allow_retries=False) from error
        raise


def stream_asset(
    *,
    source: str,
    table: str,
    group: str | None = None,
    decode: Decoder | None = None,
    mode: str = "resumable",
    start: str | None = None,
    client: ClientConfig | None = None,
    on_data_loss: str = "error",
    members: int = 2,
    max_records: int | None = None,
    max_bytes: int | None = None,
    retry_seconds: float = RETRY_SECONDS,
    linger_seconds: float = 0.0,
    materialize_seconds: float | None = None,
    min_lag: int = 1,
    max_wait_seconds: float = 60.0,
    sensor_seconds: int = 30,
    sensor_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    merge_schema: bool = False,
    storage_options: Mapping[str, str] | None = None,
    single_writer: bool = False,
    name: str | None = None,
    key_prefix: Sequence[str] | None = None,
    group_name: str | None = None,
    owners: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    description: str | None = None,
    deps: Sequence[Any] = (),
    resource: str = "spark",
    observer: Observer = ignore_steps,
    replay_partitions: dg.TimeWindowPartitionsDefinition | None = DAILY,
) -> Callable[[Transform], StreamAsset]:
    """Declare a stream asset; the decorated function is the transform of each micro-batch.

    The function takes the decoded rows as a PySpark DataFrame, with the columns ``_stream``, ``_shard``,
    ``_sequence`` and ``_timestamp``, and returns the rows to write; it must keep those four columns.

    Args:
        source: the stream URL, like ``file://orders.ss/orders``.
        group: the consumer group; its positions live in the Delta log of the table. By default the host's id and
            ``r`` (SeaStreamer's rule); give it a name where runs move between hosts. Mode ``real_time`` has none.
        table: the Delta table, a path or URI; a relative path is taken from the working directory.
        decode: how payloads become columns: ``Json``, ``Text`` or ``Raw`` (the default).
        mode: ``resumable``: one member reads all shards and continues where the group was. ``load_balanced`` (Kafka,
            Redis): several runs share the shards, or claim the entries. ``real_time`` (Kafka, Redis): from the end on,
            and no group at the broker.
        start: where a group without a position starts, ``earliest`` or ``latest``; ``earliest`` by default, in mode
            ``real_time`` ``latest``.
        client: configuration of the broker's client, like ``{"security.protocol": "SASL_SSL", "sasl.password":
            dg.EnvVar("KAFKA_PASSWORD")}``; it is shown nowhere.
        on_data_loss: what to do about messages that the stream dropped before they were read: ``error``, or
            ``record`` the exact range and go on.
        members: in mode ``load_balanced``, how many runs the sensor has at the same time.
        max_records: the most messages in one micro-batch.
        max_bytes: the most payload bytes in one micro-batch.
        retry_seconds: how long a run tries again, with growing pauses, what failed for a reason that may be gone soon,
            like a broker that does not answer; 0 for not at all.
        linger_seconds: how long a run has: until then it looks for new messages when it has written all that there
            were, so that they are in the table within seconds, and the sensor asks for the next run when it has ended.
            0 for a run that ends then.
        materialize_seconds: the least time between two materializations of a run, each of which stands for all batches
            since the one before. By default 30 in a run that stays; any other has one, at its end.
        min_lag: the sensor waits for so many messages,
        max_wait_seconds: but no longer than this.
        sensor_seconds: the least time between two ticks.
        sensor_status: whether the sensor runs without being turned on.
        merge_schema: let new columns, and new fields of structs, into the table.
        storage_options: for reading the Delta log in an object store.
        single_writer: you see to it that no two runs write the table at the same time. Without it a table is refused
            whose storage could lose a commit then: Amazon S3 with Delta's own log store. The sensor asks for no run
            until Dagster knows that the last one has ended: set ``run_monitoring``.
        name: of the asset; the function's name by default.
        key_prefix: what comes before the name in the asset key.
        group_name: Dagster's group of the asset; it has nothing to do with the consumer group.
        owners: of the asset.
        tags: of the asset.
        description: of the asset; the function's docstring by default.
        deps: more assets that it depends on.
        resource: the key of a resource with a ``spark_session``.
        observer: told of each step; for tests.
        replay_partitions: the partitions of the job that replays the messages of a day or an hour; daily in UTC by
            default, ``None`` for no such job. Where members claim entries there is none.

    Raises:
        InvalidUrlError, InvalidOptionError: at once, when the code is loaded.

    Example:
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch.where("payload is not null")
        >>> orders.job_name
        'ingest_orders'
    """
    chosen_mode = choice(ConsumerMode, mode, option="mode")
    chosen_status = choice(dg.DefaultSensorStatus, sensor_status, option="sensor_status")
    stream = StreamSource(source, chosen_mode, client or {})
    check_count("members", members)
    if single_writer and chosen_mode is ConsumerMode.LOAD_BALANCED and members > 1:
        raise InvalidOptionError(
            f"single_writer=True says that one run writes at a time, but members={members} lets several do so",
            remedy="Use members=1; or a log store that puts a commit only if it is absent, without single_writer.",
        )
    if linger_seconds and min_lag > 1:
        raise InvalidOptionError(
            f"min_lag={min_lag} lets messages wait, but linger_seconds={linger_seconds:g} lets a run wait for them",
            remedy="Leave one of them out.",
        )
    ledger_group = stream.group(group)
    first = AutoStreamReset.LATEST if chosen_mode is ConsumerMode.REAL_TIME else AutoStreamReset.EARLIEST
    chosen_start = first if start is None else choice(AutoStreamReset, start, option="start")
    chosen_loss = choice(DataLoss, on_data_loss, option="on_data_loss")
    limits = Limits().override(max_records, max_bytes)

    def declare(transform: Transform) -> StreamAsset:
        own_name = name or getattr(transform, "__name__", "stream")
        return StreamAsset(
            key=dg.AssetKey([*(key_prefix or ()), str(own_name)]),
            stream=stream,
            ingestion=Ingestion(
                group=ledger_group,
                table=table,
                decoder=Raw() if decode is None else decode,
                transform=transform,
                sharing=chosen_mode,
                claims=stream.is_claimed,
                start=chosen_start,
                on_data_loss=chosen_loss,
                limits=limits,
                retry_seconds=retry_seconds,
                merge_schema=merge_schema,
                storage_options=storage_options or {},
                single_writer=single_writer,
            ),
            policy=LagPolicy(
                min_lag=min_lag,
                max_wait_seconds=max_wait_seconds,
                # A run that stays is not stale before its time is over.
                stale_run_seconds=STALE_RUN_SECONDS + linger_seconds,
                max_runs=members if chosen_mode is ConsumerMode.LOAD_BALANCED else 1,
                keeps_alive=linger_seconds > 0,
            ),
            sensor_seconds=sensor_seconds,
            sensor_status=chosen_status,
            resource=resource,
            group_name=group_name,
            owners=owners,
            tags=tags or {},
            description=description or (transform.__doc__ or None),
            deps=deps,
            observer=observer,
            replay_partitions=None if stream.is_claimed else replay_partitions,
            linger_seconds=linger_seconds,
            materialize_seconds=materialize_seconds,
        )

    return declare
