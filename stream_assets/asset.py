"""The ``@stream_asset`` decorator: a stream into a Delta table, as a Dagster asset."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from sensors.lag_sensor import LagPolicy
from spark_jobs.batches.dead_letter_jobs import Redrive
from spark_jobs.batches.ingestion import Observer, Transform, ignore_steps
from spark_jobs.batches.replay import Replay
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.writing.layout import TableLayout
from stream_assets.checks import DEFAULT_CHECKS
from stream_assets.materializations import Context
from stream_assets.metadata import DEAD_LETTER_COMMANDS, TABLE_NAME, TABLE_URI, dead_letter_commands, table_name
from stream_assets.options import OpOptions, RedriveConfig, ReplayConfig, RunLimits, StreamConfig, with_config_check
from stream_assets.resources import DeltaLake, LakeTable, StreamLocation, TableLocation
from stream_assets.stream_run import StreamRun
from stream_assets.stream_to_table import StreamCheck, StreamToTable
from stream_assets.table_loader import build_table_loader
from stream_assets.translator import StreamTranslator, StreamTranslatorData
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import AutoStreamReset, ConsumerMode, ErrorPolicy, choice

CONTEXT = "context"
_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class AssetFunction:
    """A decorated function, with what it asks for by the names of its parameters.

    Args:
        function: as it was written.
        run: the parameter that takes a ``StreamRun``: then it is the body of the asset. Otherwise it is the transform,
            and its first parameter but ``context`` takes the rows.
        rows: the parameter that takes the rows, if it is the transform.
        takes_context: whether it has a parameter ``context``.
        resources: the other parameters, each the key of a resource.
    """

    function: Callable[..., Any]
    run: str | None
    rows: str | None
    takes_context: bool
    resources: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "AssetFunction":
        """Look at its parameters. One with a default is left to the function.

        Raises:
            InvalidOptionError: it yields, as a body does, but takes no ``StreamRun``.

        Example:
            >>> def orders(context, batch, settings):
            ...     return batch
            >>> AssetFunction.of(orders).resources
            ('settings',)
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:
            # Some callables of C have no signature.
            return cls(function, None, None, takes_context=False, resources=())
        run = next((p.name for p in parameters if _is_run(p.annotation)), None)
        if run is None and inspect.isgeneratorfunction(function):
            raise InvalidOptionError(
                f"{getattr(function, '__name__', function)!r} yields, but it takes no StreamRun",
                remedy="Write the body of an asset as (context, stream: StreamRun), and a transform with return.",
            )
        asked = [p.name for p in parameters if p.kind in _NAMED_KINDS and p.default is p.empty and p.name != CONTEXT]
        rows = asked[0] if asked and run is None else None
        others = tuple(name for name in asked if name not in (run, rows))
        return cls(function, run, rows, any(p.name == CONTEXT for p in parameters), others)

    @property
    def plain_transform(self) -> Transform | None:
        """The function if it is a transform that takes the rows and nothing else."""
        return None if self.run or self.takes_context or self.resources else self.function

    def events(self, context: Context, stream: StreamRun) -> Iterator[Any]:
        """Run the body, or that of every asset whose function is a transform."""
        given = {name: getattr(context.resources, name) for name in self.resources}
        if self.takes_context:
            given[CONTEXT] = context
        if self.run is not None:
            events = self.function(**given, **{self.run: stream})
            # A result of Dagster's is a tuple of its fields.
            if not isinstance(events, Iterable) or isinstance(events, dg.MaterializeResult):
                raise InvalidOptionError(
                    f"the body {getattr(self.function, '__name__', self.function)!r} returned {events!r}, but a body "
                    "yields events for Dagster, and a stream is read only while its events are iterated over",
                    remedy=f"Write in it: yield from {self.run}.run(context)",
                )
            yield from events
        else:
            yield from stream.run(context, transform=self._transform(given))

    def _transform(self, given: dict[str, Any]) -> Transform:
        first = self.rows
        if not given or first is None:
            return self.function

        # The log of the table names the transform.
        @functools.wraps(self.function)
        def transform(rows: Any) -> Any:
            return self.function(**{first: rows}, **given)

        return transform


def _is_run(annotation: object) -> bool:
    """Whether a parameter is annotated with the class, also as text."""
    return annotation is StreamRun or str(annotation).strip("'\"").rpartition(".")[2] == StreamRun.__name__


class StreamAsset(dg.AssetsDefinition):
    """A Delta table that a stream is written into, as a Dagster asset with its checks.

    It goes wherever an asset goes: into ``dg.Definitions(assets=[…])``, into a ``defs`` folder, and into
    :func:`stream_assets.stream_definitions`, which adds the stream, the job and the sensor. Called, it calls the
    decorated function: ``orders(dataframe)`` in a test is the transform.

    Args:
        declared: the stream, the table, and how.
        function: what was decorated.
        streams: the external assets that stand for the streams, by the names of those.
        attributes: those of the definition.
    """

    def __init__(
        self,
        declared: StreamToTable,
        function: AssetFunction,
        *,
        streams: Mapping[str, dg.AssetSpec],
        **attributes: Any,
    ) -> None:
        super().__init__(**attributes)
        self.declared = declared
        self.streams = streams
        self._function = function

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
        return plain_definition(self).with_resources(resource_defs)

    @property
    def upstream(self) -> Mapping[str, dg.AssetKey]:
        """Per stream, the asset that stands for it, with what the variables hold now."""
        if self.declared.origin.is_deferred:
            (spec,) = self.streams.values()
            return dict.fromkeys(self.declared.source.required_streams(), spec.key)
        return {name: spec.key for name, spec in self.streams.items()}

    def events(
        self, context: dg.OpExecutionContext, config: ReplayConfig | RedriveConfig, wanted: Replay | Redrive
    ) -> Iterator[Any]:
        """All that an op of another job yields that replays or redrives into the table: a materialization, the checks.

        Raises:
            dagster.Failure: see :meth:`stream_assets.StreamRun.run`.
        """
        yield from self._function.events(context, StreamRun(self.declared, config, wanted))
        yield dg.Output(None)


def plain_definition(asset: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """The definition of an asset without what belongs to its stream."""
    return dg.AssetsDefinition(**_attributes(asset))


def _attributes(asset: dg.AssetsDefinition) -> dict[str, Any]:
    # Dagster warns of the execution type as a beta feature; it is the default one here.
    return {name: value for name, value in asset.get_attributes_dict().items() if name != "execution_type"}


def make_stream_asset(
    declared: StreamToTable, function: AssetFunction, *, streams: Mapping[str, dg.AssetSpec]
) -> StreamAsset:
    """The asset of a stream that goes into a table.

    Args:
        declared: the stream, the table, and how.
        function: the transform, or the body.
        streams: those of the streams.
    """
    spec, op = declared.spec, declared.op
    known = {dep.asset_key for dep in spec.deps}
    missing = [upstream.key for upstream in streams.values() if upstream.key not in known]
    commands = dead_letter_commands(
        str(declared.table),
        declared.shown_group,
        redrive_job=None if declared.is_claimed else declared.redrive_job_name,
    )
    loader = f"{declared.name}__table"
    # A run that finds nothing to read makes nothing.
    spec = spec.replace_attributes(
        deps=[*spec.deps, *missing],
        metadata={
            TABLE_URI: str(declared.table),
            **({"stream/replay_job": declared.replay_job_name} if declared.has_replay_job else {}),
            TABLE_NAME: table_name(declared.table.label),
            DEAD_LETTER_COMMANDS: commands,
            **spec.metadata,
        },
        skippable=True,
    ).with_io_manager_key(loader)

    @dg.multi_asset(
        specs=[spec],
        check_specs=[check.spec(declared.key) for check in declared.checks],
        # The checks can be run without the asset.
        can_subset=True,
        name=declared.name,
        required_resource_keys={*function.resources, *([declared.spark] if isinstance(declared.spark, str) else [])},
        retry_policy=op.retry_policy,
        op_tags=op.tags,
        pool=op.pool,
        hooks=op.hooks,
        backfill_policy=(op.backfill_policy or dg.BackfillPolicy.single_run()) if declared.partitions else None,
    )
    def materialize(context: dg.AssetExecutionContext, config: StreamConfig) -> Iterator[Any]:
        yield from function.events(context, StreamRun(declared, config))

    attributes = _attributes(materialize)
    attributes["resource_defs"] = {loader: build_table_loader(declared)}
    attributes["node_def"] = with_config_check(materialize.op, StreamConfig)
    return StreamAsset(declared, function, streams=streams, **attributes)


def stream_asset(
    *,
    source: str | StreamLocation,
    table: str | TableLocation | DeltaLake,
    group: str | None = None,
    decode: Decoder | None = None,
    mode: str = "resumable",
    start: str | None = None,
    errors: ErrorPolicy = ErrorPolicy(),
    limits: RunLimits = RunLimits(),
    layout: TableLayout = TableLayout(),
    sensor: LagPolicy = LagPolicy(),
    spec: dg.AssetSpec | None = None,
    op: OpOptions = OpOptions(),
    checks: Sequence[StreamCheck] = DEFAULT_CHECKS,
    spark: Any = None,
    translator: StreamTranslator | None = None,
    observer: Observer = ignore_steps,
) -> Callable[[Callable[..., Any]], StreamAsset]:
    """Declare a stream asset; the decorated function is the transform of each micro-batch, or the body of the asset.

    A transform takes the decoded rows as a PySpark DataFrame, with the columns ``_stream``, ``_shard``, ``_sequence``
    and ``_timestamp``, and returns the rows to write; it must keep those four columns. A parameter ``context`` gets
    Dagster's context, and each further one the resource of that key.

    A function with a parameter that is annotated with :class:`stream_assets.StreamRun` is the body of the asset: it
    yields what ``@dg.multi_asset`` yields, and runs the stream in it.

    Args:
        source: the stream URL, like ``file://orders.ss/orders``, or streams of a resource, like
            ``KafkaCluster(bootstrap_servers=dg.EnvVar("KAFKA")).stream("orders")``. It, the group, the table and the
            storage options may be a ``dg.EnvVar``, too: its value is looked up when it is used, and Dagster gets only
            its name.
        table: the Delta table, a path or URI; a relative path is taken from the working directory. Of a
            :class:`stream_assets.DeltaLake` it is the table of the asset's key. A
            :class:`stream_assets.LakeTable` is a path with storage options. A table of a
            :class:`stream_assets.UnityCatalog` or a :class:`stream_assets.HiveMetastore` is where that says.
        group: the consumer group; its positions live in the Delta log of the table. By default the host's id and
            ``r`` (SeaStreamer's rule); give it a name where runs move between hosts. Mode ``real_time`` has none.
        decode: how payloads become columns: ``Json``, ``Text``, ``Avro``, … or ``Raw`` (the default).
        mode: ``resumable``: one member reads all shards and continues where the group was. ``load_balanced`` (Kafka,
            Redis): several runs share the shards, or claim the entries; ``LagPolicy(max_runs=…)`` says how many.
            ``real_time`` (Kafka, Redis): from the end on, and no group at the broker.
        start: where a group without a position starts, ``earliest`` or ``latest``; ``earliest`` by default, in mode
            ``real_time`` ``latest``.
        errors: what a run does about lost messages, bad rows and new columns.
        limits: how much one micro-batch holds, how long a run retries and stays; a run config overrides it.
        layout: how the table is made if it does not exist yet.
        sensor: when the sensor asks for a run.
        spec: Dagster's description of the asset: key, deps, description, metadata, tags, owners, kinds, group_name,
            automation_condition, freshness_policy, code_version. By default the key is the function's name, and the
            description its docstring. With ``partitions_def``, days or hours of the time of the messages, with
            ``end_offset=1`` so that the current one is a partition, a run without a partition ingests, and
            materializes the partitions that it has touched; a run of partitions replays them.
        op: how the asset runs in Dagster: retries, pool, tags, hooks.
        checks: what is checked after each run.
        spark: a resource with a ``spark_session``, like ``SparkSessionResource(master="local[4]")``, or the key of one
            that the definitions have; by default a local Spark that outlives the run.
        translator: decides the key, the streams' keys, groups, tags, freshness and automation.
        observer: called at each step of a batch; for tests.

    Raises:
        InvalidUrlError, InvalidOptionError: at once, when the code is loaded.

    Example:
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch.where("payload is not null")
        >>> orders.declared.job_name
        'ingest_orders'
    """
    chosen_mode = choice(ConsumerMode, mode, option="mode")
    chosen_start = None if start is None else choice(AutoStreamReset, start, option="start")
    origin = source if isinstance(source, StreamLocation) else StreamLocation(source)
    if origin.shown is not None:
        StreamSource(origin.shown, chosen_mode, origin.client)
    if isinstance(translator, type):
        raise InvalidOptionError(
            f"translator={translator!r} is a class, and no translator", remedy=f"Write {translator.__name__}()."
        )
    chosen_translator = translator or StreamTranslator()

    def declare(function: Callable[..., Any]) -> StreamAsset:
        own_name = getattr(function, "__name__", "stream")
        if spec is None and own_name == "<lambda>":
            raise InvalidOptionError(
                "the decorated function has no name", remedy="Give @stream_asset spec=dg.AssetSpec('…')."
            )
        own_function = AssetFunction.of(function)
        given = dg.AssetSpec(own_name) if spec is None else spec
        declared = StreamToTable(
            spec=given,
            origin=origin,
            # Of a lake, the translator decides below which table it is.
            table=_location(table, dg.AssetKey(own_name)),
            group=group,
            decode=Raw() if decode is None else decode,
            mode=chosen_mode,
            start=chosen_start,
            errors=errors,
            limits=limits,
            layout=layout,
            sensor=sensor,
            op=op,
            checks=checks,
            spark=spark,
            observer=observer,
            transform=own_function.plain_transform,
        )
        data = StreamTranslatorData(
            given.replace_attributes(description=given.description or function.__doc__ or None),
            origin,
            declared.shown_group,
            None if isinstance(table, DeltaLake) else declared.table.shown,
        )
        translated = chosen_translator.get_asset_spec(data)
        streams = {one: chosen_translator.get_stream_spec(data, one) for one in data.streams}
        declared = replace(declared, spec=translated, table=_location(table, translated.key))
        return make_stream_asset(declared, own_function, streams=streams)

    return declare


def _location(table: str | TableLocation | DeltaLake, key: dg.AssetKey) -> TableLocation:
    if isinstance(table, DeltaLake):
        return table.table_of(key)
    return table if isinstance(table, TableLocation) else LakeTable(table)
