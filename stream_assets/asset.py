"""The ``@stream_asset`` decorator: a stream into a Delta table, as a Dagster asset."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from sensors.lag_sensor import LagPolicy
from spark_jobs.batches.ingestion import RETRY_SECONDS, Ingestion, Observer, ignore_steps
from spark_jobs.batches.replay import Replay
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.table_location import check_location
from spark_jobs.writing.layout import TableLayout
from stream_assets.asset_function import AssetFunction
from stream_assets.catalogs import CatalogTable
from stream_assets.checks import DEFAULT_CHECKS
from stream_assets.config import RedriveConfig, ReplayConfig, StreamConfig, checked
from stream_assets.connections import Origin, StreamLocation
from stream_assets.dead_letter_metadata import DEAD_LETTER_COMMANDS, letter_commands
from stream_assets.deferred import is_deferred, shown_text
from stream_assets.delta_lake import DeltaLake, LakeTable
from stream_assets.metadata import TABLE_URI, definition_metadata
from stream_assets.stream_run import StreamRun
from stream_assets.stream_to_table import StreamCheck, StreamToTable
from stream_assets.table_loader import build_table_loader
from stream_assets.translator import AssetOptions, StreamTranslator, StreamTranslatorData
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import (
    AutoStreamReset,
    ConsumerMode,
    DataLoss,
    Limits,
    OnBadRows,
    SchemaChanges,
    check_count,
    check_range,
    choice,
)
from stream_consumers.urls import StreamUrl

DAILY = dg.DailyPartitionsDefinition(start_date="2025-01-01", end_offset=1)


@dataclass(frozen=True)
class OpOptions:
    """What ``@stream_asset`` passes on to the op; each as in ``dagster.multi_asset``."""

    retry_policy: dg.RetryPolicy | None = None
    op_tags: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    hooks: AbstractSet[dg.HookDefinition] = frozenset()
    backfill_policy: dg.BackfillPolicy | None = None


class StreamAsset(dg.AssetsDefinition):
    """A Delta table that a stream is written into, as a Dagster asset with its checks.

    It goes wherever an asset goes: into ``dg.Definitions(assets=[…])``, into a ``defs`` folder, and into
    :func:`stream_assets.stream_definitions`, which adds the stream, the job and the sensor. Called, it calls the
    decorated function: ``orders(dataframe)`` in a test is the transform.

    Args:
        declared: the stream, the table, and how.
        function: what was decorated.
        streams: the external assets that stand for the streams, by the names of those.
        run_tags: of the runs of its jobs.
        attributes: those of the definition.
    """

    def __init__(
        self,
        declared: StreamToTable,
        function: AssetFunction,
        *,
        streams: Mapping[str, dg.AssetSpec],
        run_tags: Mapping[str, Any],
        **attributes: Any,
    ) -> None:
        super().__init__(**attributes)
        self._declared = declared
        self._function = function
        self._streams = streams
        self._run_tags = run_tags

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the decorated function.

        Example:
            >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
            ... def orders(batch):
            ...     return batch.where("payload is not null")
            >>> class Rows:
            ...     def where(self, condition):
            ...         return f"rows with {condition}"
            >>> orders(Rows())
            'rows with payload is not null'
        """
        return self._function.function(*arguments, **named)

    def with_resources(self, resource_defs: Mapping[str, dg.ResourceDefinition]) -> dg.AssetsDefinition:
        """A plain copy, as Dagster makes them when it loads: what a run needs is in its op."""
        return plain(self).with_resources(resource_defs)

    @property
    def declared(self) -> StreamToTable:
        """The stream, the table, and how."""
        return self._declared

    @property
    def name(self) -> str:
        """The key as an identifier: the base of the names of the op, the job and the sensor."""
        return self._declared.name

    @property
    def job_name(self) -> str:
        """The name of the job that the sensor asks for."""
        return self._declared.job_name

    @property
    def replay_job_name(self) -> str:
        """The name of the job that replays partitions."""
        return self._declared.replay_job_name

    @property
    def source(self) -> StreamUrl:
        """The stream URL."""
        return self._declared.source

    @property
    def stream(self) -> StreamSource:
        """Where the messages come from."""
        return self._declared.stream

    @property
    def ingestion(self) -> Ingestion:
        """What goes where; without a transform that takes a context or resources."""
        return self._declared.ingestion

    @property
    def run_tags(self) -> Mapping[str, Any]:
        """The tags of the runs of its jobs."""
        return self._run_tags

    @property
    def streams(self) -> Mapping[str, dg.AssetSpec]:
        """The external assets that stand for the streams, by the names of those."""
        return self._streams

    @property
    def upstream(self) -> Mapping[str, dg.AssetKey]:
        """Per stream, the asset that stands for it, with what the variables hold now."""
        if self._declared.origin.is_deferred:
            (spec,) = self._streams.values()
            return dict.fromkeys(self._declared.source.required_streams(), spec.key)
        return {name: spec.key for name, spec in self._streams.items()}

    def pool_beside(self, work: str, pool: str | None) -> str | None:
        """Dagster's pool of other work that writes the table.

        Args:
            work: what that is, for people.
            pool: the one that it would have; ``None`` for none.

        Raises:
            InvalidOptionError: the table has a single writer, and nothing would keep the two apart.
        """
        if not self._declared.template.single_writer:
            return pool
        if self.op.pool is None or pool not in (None, self.op.pool):
            raise InvalidOptionError(
                f"{self.key.to_user_string()} has a single writer, and its {work} would be a second one",
                remedy=f"Give @stream_asset a pool with a limit of 1, as in pool='{self.name}'.",
                pool=str(pool),
            )
        return self.op.pool

    def replay(self, context: dg.OpExecutionContext, wanted: Replay, config: ReplayConfig) -> Iterator[Any]:
        """Replay into the table, in an op; a materialization when it is whole, and the checks.

        Raises:
            dagster.Failure: see :meth:`stream_assets.StreamRun.run`.
        """
        yield from self._function.events(context, StreamRun(self._declared, config, wanted))

    def redrive(self, context: dg.OpExecutionContext, config: RedriveConfig) -> Iterator[Any]:
        """Decode dead letters again, in an op; one materialization, and the checks.

        Raises:
            dagster.Failure: see :meth:`stream_assets.StreamRun.run`.
        """
        yield from self._function.events(context, StreamRun(self._declared, config, config.redrive()))


def plain(asset: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """The definition of an asset without what belongs to its stream."""
    return dg.AssetsDefinition(**_attributes(asset))


def _attributes(asset: dg.AssetsDefinition) -> dict[str, Any]:
    # The type of execution is the default one, and giving it is told of as a beta feature.
    return {name: value for name, value in asset.get_attributes_dict().items() if name != "execution_type"}


def make_stream_asset(
    declared: StreamToTable,
    function: AssetFunction,
    spec: dg.AssetSpec,
    *,
    streams: Mapping[str, dg.AssetSpec],
    op: OpOptions = OpOptions(),
    run_tags: Mapping[str, Any],
) -> StreamAsset:
    """The asset of a stream that goes into a table.

    Args:
        declared: the stream, the table, and how.
        function: the transform, or the body.
        spec: Dagster's description of it.
        streams: those of the streams.
        op: of what runs.
        run_tags: of the runs of its jobs.
    """
    known = {dep.asset_key for dep in spec.deps}
    uri = {TABLE_URI: str(declared.table)}
    missing = [upstream.key for upstream in streams.values() if upstream.key not in known]
    replayed = {"stream/replay_job": declared.replay_job_name} if declared.replay_partitions else {}
    described = definition_metadata(
        function.function,
        table=declared.table.label,
        decoder=declared.template.decoder,
        streams=[stream.key for stream in streams.values()],
    )
    commands = letter_commands(
        str(declared.table),
        # By default that of the host.
        shown_text(declared.group or str(spec.metadata.get("stream/group", "GROUP"))),
        redrive_job=None if declared.is_claimed else declared.redrive_job_name,
    )
    # A run that finds nothing to read makes nothing.
    spec = spec.replace_attributes(
        deps=[*spec.deps, *missing],
        metadata={**uri, **replayed, **described, DEAD_LETTER_COMMANDS: commands, **spec.metadata},
        skippable=True,
    )
    if spec.partitions_def not in (None, declared.partitions):
        raise InvalidOptionError(
            f"the translator gave {declared.name} the partitions {spec.partitions_def!r}, by which nothing would be "
            "replayed",
            remedy="Give them to @stream_asset, or to the entry of a defs.yaml, as partitions.",
        )
    if declared.partitions is not None:
        spec = spec.replace_attributes(partitions_def=declared.partitions)
    loader = f"{declared.name}__table"

    @dg.multi_asset(
        specs=[spec.with_io_manager_key(loader)],
        check_specs=[check.spec(declared.key) for check in declared.checks],
        # The checks can be run without the asset.
        can_subset=True,
        name=declared.name,
        required_resource_keys={*function.resources, *([declared.spark] if isinstance(declared.spark, str) else [])},
        retry_policy=op.retry_policy,
        op_tags=op.op_tags,
        pool=op.pool,
        hooks=op.hooks,
        backfill_policy=op.backfill_policy,
    )
    def materialize(context: dg.AssetExecutionContext, config: StreamConfig) -> Iterator[Any]:
        yield from function.events(context, StreamRun(declared, config))

    attributes = _attributes(materialize)
    attributes["resource_defs"] = {loader: build_table_loader(declared)}
    attributes["node_def"] = checked(materialize.op, StreamConfig)
    return StreamAsset(declared, function, streams=streams, run_tags=run_tags, **attributes)


def stream_asset(
    *,
    source: str | StreamLocation,
    table: str | LakeTable | DeltaLake | CatalogTable,
    group: str | None = None,
    decode: Decoder | None = None,
    mode: str = "resumable",
    start: str | None = None,
    client: ClientConfig | None = None,
    on_data_loss: str = "error",
    on_bad_rows: str = "fail",
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
    schema_changes: str = "fail",
    partition_by: str | Sequence[str] = (),
    cluster_by: str | Sequence[str] = (),
    table_properties: Mapping[str, str] | None = None,
    catalog_table: str | None = None,
    generated_columns: Mapping[str, str] | None = None,
    table_comment: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    single_writer: bool = False,
    name: str | None = None,
    key_prefix: str | Sequence[str] | None = None,
    group_name: str | None = None,
    stream_group_name: str | None = None,
    owners: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    description: str | None = None,
    deps: Sequence[Any] = (),
    kinds: AbstractSet[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    code_version: str | None = None,
    automation_condition: dg.AutomationCondition[Any] | None = None,
    freshness_policy: dg.FreshnessPolicy | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    op_tags: Mapping[str, Any] | None = None,
    pool: str | None = None,
    hooks: AbstractSet[dg.HookDefinition] = frozenset(),
    run_tags: Mapping[str, Any] | None = None,
    checks: Sequence[StreamCheck] = DEFAULT_CHECKS,
    dead_letter_payloads: bool = False,
    policy: LagPolicy | None = None,
    spark: Any = None,
    translator: StreamTranslator | None = None,
    observer: Observer = ignore_steps,
    partitions: dg.TimeWindowPartitionsDefinition | None = None,
    backfill_policy: dg.BackfillPolicy | None = None,
    replay_partitions: dg.TimeWindowPartitionsDefinition | None = DAILY,
) -> Callable[[Callable[..., Any]], StreamAsset]:
    """Declare a stream asset; the decorated function is the transform of each micro-batch, or the body of the asset.

    A transform takes the decoded rows as a PySpark DataFrame, with the columns ``_stream``, ``_shard``, ``_sequence``
    and ``_timestamp``, and returns the rows to write; it must keep those four columns. A parameter ``context`` gets
    Dagster's context, and each further one the resource of that key.

    A function with a parameter that is annotated with :class:`stream_assets.StreamRun` is the body of the asset: it
    yields what Dagster is told, as with ``@dg.multi_asset``, and runs the stream in it.

    Args:
        source: the stream URL, like ``file://orders.ss/orders``, or streams of a resource, like
            ``KafkaCluster(bootstrap_servers=dg.EnvVar("KAFKA")).stream("orders")``. It, the group, the table and the
            storage options may be a ``dg.EnvVar``, too: its value is looked up when it is used, and Dagster is told
            its name.
        group: the consumer group; its positions live in the Delta log of the table. By default the host's id and
            ``r`` (SeaStreamer's rule); give it a name where runs move between hosts. Mode ``real_time`` has none.
        table: the Delta table, a path or URI; a relative path is taken from the working directory. Of a
            :class:`stream_assets.DeltaLake` it is the table of the asset's key. A table of a
            :class:`stream_assets.UnityCatalog` or a :class:`stream_assets.HiveMetastore` is where that says.
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
        on_bad_rows: what becomes of rows that break a constraint of the table, or that the transform fails for:
            ``fail`` the run, or make a ``dead_letter`` of their message and go on. Those that the transform rejects,
            with :func:`stream_assets.reject`, become dead letters either way.
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
        schema_changes: what becomes of columns, and of fields of structs, that the table does not have: ``fail``;
            ``add_columns`` for adding them, and wider types, too, where the table has ``delta.enableTypeWidening``; or
            ``rescue`` for putting them into the column ``_rescued``. Fields of JSON that nobody declared are of them.
        partition_by: columns with few values, each combination of which has a folder of its own. This, the next two,
            the generated columns and the comment are for a table that is not there yet.
        cluster_by: instead: columns that rows are looked for by; maintenance puts like ones together.
        table_properties: of the table, like ``{"delta.enableChangeDataFeed": "true"}``.
        catalog_table: a name that Spark's catalog gets for the table, like ``main.sales.orders``.
        generated_columns: columns that Delta computes, like ``{"day": "CAST(_timestamp AS DATE)"}``; the table may be
            laid out by them.
        table_comment: what the table is, in the table itself.
        storage_options: of an object store, for Spark and for reading the Delta log; shown nowhere.
        single_writer: you see to it that no two runs write the table at the same time. Without it a table is refused
            whose storage could lose a commit then: Amazon S3 with Delta's own log store. The sensor asks for no run
            until Dagster knows that the last one has ended: set ``run_monitoring``. The jobs for replays, redrives and
            maintenance share ``pool``, whose limit has to be 1, and are refused without one.
        name: of the asset; the function's name by default.
        key_prefix: what comes before the name in the asset key, one part or several.
        group_name: Dagster's group of the asset; it has nothing to do with the consumer group.
        stream_group_name: Dagster's group of the external assets that stand for the streams; assets that read the same
            stream give the same one.
        owners: of the asset.
        tags: of the asset.
        description: of the asset; the function's docstring by default.
        deps: more assets that it depends on.
        kinds: what the UI shows an icon for; by default the broker, spark and deltalake.
        metadata: of the asset, beside the table, the stream and the group.
        code_version: of the asset.
        automation_condition: of the asset, for runs beside those that the sensor asks for.
        freshness_policy: of the asset.
        retry_policy: of a run that fails.
        op_tags: of the op, for executors that give each step a process or a pod of its own; the jobs here do not.
        pool: of the op; its limit says how many runs write at the same time.
        hooks: of the op.
        run_tags: of the runs of its jobs, those that ingest, replay, redrive and maintain: ``{"dagster/priority":
            "3"}``, or ``{"dagster-k8s/config": {…}}``, which says how much memory the pod of a run gets.
        checks: what is checked after each run.
        dead_letter_payloads: whether Dagster gets values of messages: the beginning of a payload with each kind of
            reason why messages became dead letters, and the whole text of errors. It keeps them for long, and others
            may see it than the table; so by default it gets their places.
        policy: when the sensor asks for a run, in full; ``min_lag`` and ``max_wait_seconds`` say nothing beside it.
            ``members`` and ``linger_seconds`` do, where it leaves how many runs there are and how long at the defaults.
        spark: a resource with a ``spark_session``, like ``SparkSessionResource(master="local[4]")``, or the key of one
            that the definitions have; by default a local Spark that outlives the run.
        translator: decides the key, the streams' keys, groups, tags, freshness and automation.
        observer: told of each step; for tests.
        partitions: of the asset, days or hours of the time of the messages, with ``end_offset=1``, so that the current
            one is a partition, too. A run without a partition ingests, and materializes the partitions that it has
            touched; a run of partitions replays them.
        backfill_policy: how many runs replay a selection of partitions; one, by default.
        replay_partitions: of the job that replays the messages of a day or an hour; daily in UTC by default, ``None``
            for no such job. An asset with ``partitions`` has none, nor one whose members claim entries.

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
    origin = Origin(source, chosen_mode, client or {})
    origin.check()
    check_count("members", members)
    check_range("linger_seconds", linger_seconds)
    if isinstance(translator, type):
        raise InvalidOptionError(
            f"translator={translator!r} is a class, and no translator", remedy=f"Write {translator.__name__}()."
        )
    if is_deferred(key_prefix):
        raise InvalidOptionError(
            f"key_prefix={key_prefix!r} would be looked up when it is used, but keys are known when the code is loaded",
            remedy="Look it up yourself, with os.environ or get_value().",
        )
    if pool is not None and not pool:
        raise InvalidOptionError(f"pool={pool!r} names none", remedy="Give a name, or leave it out.")
    if single_writer and chosen_mode is ConsumerMode.LOAD_BALANCED and members > 1:
        raise InvalidOptionError(
            f"single_writer=True says that one run writes at a time, but members={members} lets several do so",
            remedy="Use members=1; or a log store that puts a commit only if it is absent, without single_writer.",
        )
    given = policy or LagPolicy(min_lag=min_lag, max_wait_seconds=max_wait_seconds)
    if linger_seconds and given.min_lag > 1:
        raise InvalidOptionError(
            f"min_lag={given.min_lag} lets messages wait, but linger_seconds={linger_seconds:g} lets a run wait for "
            "them",
            remedy="Leave one of them out.",
        )
    shown_group = None if group is None else shown_text(group) if isinstance(group, str) else group
    if origin.shown is not None:
        shown_group = StreamSource(origin.shown, chosen_mode).group(shown_group)
    first = AutoStreamReset.LATEST if chosen_mode is ConsumerMode.REAL_TIME else AutoStreamReset.EARLIEST
    chosen_start = first if start is None else choice(AutoStreamReset, start, option="start")
    chosen_loss = choice(DataLoss, on_data_loss, option="on_data_loss")
    chosen_bad_rows = choice(OnBadRows, on_bad_rows, option="on_bad_rows")
    limits = Limits().override(max_records, max_bytes)

    # A policy that says nothing of members and of runs that stay has them as the other options say.
    chosen_policy = given.with_runs(
        max_runs=members if chosen_mode is ConsumerMode.LOAD_BALANCED else 1, linger_seconds=linger_seconds
    )

    def declare(function: Callable[..., Any]) -> StreamAsset:
        own_name = name or getattr(function, "__name__", "stream")
        if own_name == "<lambda>":
            raise InvalidOptionError("the decorated function has no name", remedy="Give name= to @stream_asset.")
        own_function = AssetFunction.of(function)
        options = AssetOptions(
            deps=deps,
            description=description or function.__doc__ or None,
            group_name=group_name,
            stream_group_name=stream_group_name,
            owners=owners,
            tags=tags or {},
            kinds=kinds,
            metadata=metadata or {},
            code_version=code_version,
            automation_condition=automation_condition,
            freshness_policy=freshness_policy,
        )
        prefix = (key_prefix,) if isinstance(key_prefix, str) else key_prefix or ()
        data = StreamTranslatorData(
            key=dg.AssetKey([*prefix, str(own_name)]),
            origin=origin,
            group=group or shown_group or chosen_mode.value,
            table=_shown(table),
            options=options,
        )
        spec = (translator or StreamTranslator()).get_asset_spec(data)
        streams = {one: (translator or StreamTranslator()).get_stream_spec(data, one) for one in data.streams}
        place = _place(table, spec.key, storage_options)
        declared = StreamToTable(
            key=spec.key,
            origin=origin,
            group=group,
            table=place,
            template=Ingestion(
                group=shown_group or chosen_mode.value,
                table="deferred" if place.is_deferred else place.path,
                decoder=Raw() if decode is None else decode,
                transform=own_function.plain_transform,
                sharing=chosen_mode,
                start=chosen_start,
                on_data_loss=chosen_loss,
                on_bad_rows=chosen_bad_rows,
                limits=limits,
                retry_seconds=retry_seconds,
                schema_changes=choice(SchemaChanges, schema_changes, option="schema_changes"),
                layout=TableLayout(
                    partition_by=partition_by,
                    cluster_by=cluster_by,
                    properties=table_properties,
                    catalog_table=catalog_table,
                    generated_columns=generated_columns,
                    comment=table_comment,
                ),
                single_writer=single_writer,
            ),
            policy=chosen_policy,
            sensor_seconds=sensor_seconds,
            sensor_status=chosen_status,
            spark=spark,
            checks=checks,
            observer=observer,
            partitions=partitions,
            replay_partitions=None if partitions else replay_partitions,
            linger_seconds=linger_seconds,
            materialize_seconds=materialize_seconds,
            dead_letter_payloads=dead_letter_payloads,
        )
        if declared.is_claimed:
            declared = replace(declared, replay_partitions=None)
        op = OpOptions(
            retry_policy=retry_policy,
            op_tags=op_tags or {},
            pool=pool,
            hooks=hooks,
            backfill_policy=(backfill_policy or dg.BackfillPolicy.single_run()) if partitions else None,
        )
        return make_stream_asset(declared, own_function, spec, streams=streams, op=op, run_tags=run_tags or {})

    return declare


def _shown(table: str | LakeTable | DeltaLake | CatalogTable) -> str | None:
    """Where the table is, for people, as far as that is known without the key of the asset."""
    if isinstance(table, DeltaLake):
        return None
    place = _place(table, None, None)
    return str(place) if place.is_deferred else check_location(place.path)


def _place(
    table: str | LakeTable | DeltaLake | CatalogTable,
    key: dg.AssetKey | None,
    storage_options: Mapping[str, str] | None,
) -> LakeTable | CatalogTable:
    """Where the table of an asset is."""
    if isinstance(table, DeltaLake):
        assert key is not None
        table = table.table_of(key)
    if isinstance(table, LakeTable | CatalogTable):
        return replace(table, storage_options={**table.storage_options, **(storage_options or {})})
    return LakeTable(table, (), storage_options or {})
