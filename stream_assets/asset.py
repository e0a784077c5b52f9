"""The ``@stream_asset`` decorator, which declares a Delta table that a stream is written into as a Dagster asset."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from sensors.lag_sensor import LagPolicy
from spark_jobs.batches.dead_letter_jobs import Redrive
from spark_jobs.batches.ingestion import Transform
from spark_jobs.batches.replay import Replay
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_assets.checks import DEFAULT_CHECKS
from stream_assets.materializations import Context
from stream_assets.metadata import DEAD_LETTER_COMMANDS, TABLE_NAME, TABLE_URI, dead_letter_commands, table_name
from stream_assets.options import OpOptions, RunLimits, StreamConfig, WriterConfig, with_config_check
from stream_assets.resources import DeltaLake, LakeTable, StreamLocation, TableLocation
from stream_assets.stream_run import Rebuild, StreamRun
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
    """A decorated function, and the objects that its parameters request.

    Args:
        function: the decorated function.
        run: the name of the parameter that takes a ``StreamRun``. A function with one is the body of the asset. Any
            other function is the transform, and its first parameter except ``context`` takes the rows.
        rows: the name of the parameter that takes the rows of a transform.
        takes_context: whether the function has a parameter ``context``.
        resources: the names of the other parameters, which are keys of resources.
    """

    function: Callable[..., Any]
    run: str | None
    rows: str | None
    takes_context: bool
    resources: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "AssetFunction":
        """Inspect the parameters of a function. Parameters with a default are not filled in.

        Raises:
            InvalidOptionError: the function yields, as a body does, but takes no ``StreamRun``.

        Example:
            >>> def orders(context, batch, settings):
            ...     return batch
            >>> AssetFunction.of(orders).resources
            ('settings',)
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:
            # Some callables that are written in C have no signature.
            return cls(function, None, None, takes_context=False, resources=())
        run = next((p.name for p in parameters if _is_run(p.annotation)), None)
        if run is None and inspect.isgeneratorfunction(function):
            raise InvalidOptionError(
                f"{getattr(function, '__name__', function)!r} yields, but it takes no StreamRun",
                remedy="Write a body as (context, stream: StreamRun), or return the rows from a transform.",
            )
        asked = [p.name for p in parameters if p.kind in _NAMED_KINDS and p.default is p.empty and p.name != CONTEXT]
        rows = asked[0] if asked and run is None else None
        others = tuple(name for name in asked if name not in (run, rows))
        return cls(function, run, rows, any(p.name == CONTEXT for p in parameters), others)

    @property
    def plain_transform(self) -> Transform | None:
        """The function if it is a transform that takes only the rows."""
        return None if self.run or self.takes_context or self.resources else self.function

    def events(self, context: Context, stream: StreamRun) -> Iterator[Any]:
        """Run the body of the asset; a transform runs in the default body."""
        given = {name: getattr(context.resources, name) for name in self.resources}
        if self.takes_context:
            given[CONTEXT] = context
        if self.run is not None:
            events = self.function(**given, **{self.run: stream})
            # MaterializeResult is a named tuple, so it is iterable although it is a single event.
            if not isinstance(events, Iterable) or isinstance(events, dg.MaterializeResult):
                raise InvalidOptionError(
                    f"the body {getattr(self.function, '__name__', self.function)!r} returned {events!r}, but a body "
                    "must yield events for Dagster: the stream is read only while its events are iterated over",
                    remedy=f"Write in the body: yield from {self.run}.run(context)",
                )
            yield from events
        else:
            yield from stream.run(context, transform=self._transform(given))

    def _transform(self, given: dict[str, Any]) -> Transform:
        first = self.rows
        if not given or first is None:
            return self.function

        # The ledger records the name of the transform, so the wrapper keeps it.
        @functools.wraps(self.function)
        def transform(rows: Any) -> Any:
            return self.function(**{first: rows}, **given)

        return transform


def _is_run(annotation: object) -> bool:
    """Return whether an annotation is ``StreamRun``, as the class or as text."""
    return annotation is StreamRun or str(annotation).strip("'\"").rpartition(".")[2] == StreamRun.__name__


class StreamAsset(dg.AssetsDefinition):
    """A Delta table that a stream is written into, as a Dagster asset with its checks.

    Use it like any other asset: in ``dg.Definitions(assets=[…])``, in a ``defs`` folder, or in
    :func:`stream_assets.stream_definitions`, which adds the stream, the job and the sensor. Calling it calls the
    decorated function, so a test can call the transform as ``orders(dataframe)``.

    Args:
        declared: the stream, the table, and their options.
        function: the decorated function.
        streams: the external assets of the streams, by stream key.
        attributes: the attributes of the ``AssetsDefinition``.
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
        """Return a plain definition with the resources, which is enough for a run: the op holds the rest."""
        return plain_definition(self).with_resources(resource_defs)

    @property
    def upstream(self) -> Mapping[str, dg.AssetKey]:
        """The asset of each stream, by stream key; environment variables are resolved now."""
        if self.declared.origin.is_deferred:
            (spec,) = self.streams.values()
            return dict.fromkeys(self.declared.source.required_streams(), spec.key)
        return {name: spec.key for name, spec in self.streams.items()}

    def events(
        self, context: dg.OpExecutionContext, config: WriterConfig, wanted: Replay | Redrive | Rebuild
    ) -> Iterator[Any]:
        """Replay, redrive or rebuild in an op of another job; yield the materialization and the results of the checks.

        Raises:
            dagster.Failure: see :meth:`stream_assets.StreamRun.run`.
        """
        yield from self._function.events(context, StreamRun(self.declared, config, wanted))
        yield dg.Output(None)


def plain_definition(asset: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """Return the definition of an asset without its stream."""
    return dg.AssetsDefinition(**_attributes(asset))


def _attributes(asset: dg.AssetsDefinition) -> dict[str, Any]:
    # Dagster warns that the execution type is a beta feature. Here it has its default.
    return {name: value for name, value in asset.get_attributes_dict().items() if name != "execution_type"}


def make_stream_asset(
    declared: StreamToTable, function: AssetFunction, *, streams: Mapping[str, dg.AssetSpec]
) -> StreamAsset:
    """Build the Dagster asset.

    Args:
        declared: the stream, the table, and their options.
        function: the transform, or the body.
        streams: the external assets of the streams, by stream key.
    """
    spec, op = declared.spec, declared.op
    known = {dep.asset_key for dep in spec.deps}
    missing = [upstream.key for upstream in streams.values() if upstream.key not in known]
    commands = dead_letter_commands(
        str(declared.table),
        declared.shown_group,
        redrive_job=None if declared.is_claimed else declared.redrive_job_name,
    )
    # A resource key has to be an identifier, and the name may begin with a digit.
    loader = f"table_of__{declared.name}"
    # A run that finds nothing to read does not materialize the asset.
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
        # Dagster may run the checks without the asset.
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
    keys: Keys | Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], StreamAsset]:
    """Declare a stream asset; the decorated function is the transform of each micro-batch, or the body of the asset.

    A transform takes the decoded rows as a PySpark DataFrame, with the columns ``_stream``, ``_shard``, ``_sequence``
    and ``_timestamp``, and returns the rows to write. It must keep those four columns. A parameter ``context`` takes
    Dagster's context, and every other parameter takes the resource of its name.

    A function with a parameter that is annotated with :class:`stream_assets.StreamRun` is the body of the asset. It
    runs the stream, and yields what ``@dg.multi_asset`` yields.

    Args:
        source: the stream URL, like ``file://orders.ss/orders``, or streams of a resource, like
            ``KafkaCluster(bootstrap_servers=dg.EnvVar("KAFKA")).stream("orders")``. The source, the group, the table
            and the storage options may be a ``dg.EnvVar``. Its value is read when it is used, and Dagster sees only
            the name of the variable.
        table: the Delta table: a path or URI, where a relative path starts at the working directory; a
            :class:`stream_assets.DeltaLake`, in which the key of the asset names the table; a
            :class:`stream_assets.LakeTable`, which is a path with storage options; or a table of a
            :class:`stream_assets.UnityCatalog` or :class:`stream_assets.HiveMetastore`, which give its location.
        group: the consumer group; its positions are stored in the Delta log of the table. The default is the host's id
            and ``r`` (SeaStreamer's rule), so name the group if runs move between hosts. Mode ``real_time`` has none.
        decode: how payloads become columns: ``Json``, ``Text``, ``Avro``, … or ``Raw`` (the default).
        mode: ``resumable``: one member reads all shards and continues from the group's positions. ``load_balanced``
            (Kafka, Redis): up to ``LagPolicy(max_runs=…)`` runs share the shards, or claim the entries. ``real_time``
            (Kafka, Redis): a run starts at the end of the stream, and the broker knows no group.
        start: where a group without a position starts, ``earliest`` or ``latest``. The default is ``latest`` in mode
            ``real_time``, and ``earliest`` in the others.
        errors: how a run handles lost messages, bad rows and new columns.
        limits: the size of a micro-batch, and how long a run retries and polls; a run config overrides them.
        layout: the layout of the table, if a run creates it.
        sensor: when the sensor requests a run.
        spec: Dagster's description of the asset: key, deps, description, metadata, tags, owners, kinds, group_name,
            automation_condition, freshness_policy, code_version. By default the key is the function's name, and the
            description its docstring. With ``partitions_def``, days or hours of the time of the messages, with
            ``end_offset=1`` so that the current one is a partition, a run without a partition ingests, and
            materializes the partitions whose rows it changed; a run of partitions replays them.
        op: how the asset runs in Dagster: retries, pool, tags, hooks.
        checks: the checks that are evaluated after each run.
        spark: a resource with a ``spark_session``, like ``SparkSessionResource(master="local[4]")``, or the key of a
            resource in the definitions. The default is a local Spark that outlives the run.
        translator: decides the key of the asset, the keys of its streams, groups, tags, freshness and automation.
        keys: the key columns, like ``["id"]``, of a table that has one row per key, which is updated and deleted as
            changes arrive; or :class:`stream_assets.Keys`, with what orders and what deletes.

    Raises:
        InvalidUrlError, InvalidOptionError: raised when the code is loaded.

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
            f"translator={translator!r} is a class, not an object", remedy=f"Write {translator.__name__}()."
        )
    chosen_translator = translator or StreamTranslator()

    def declare(function: Callable[..., Any]) -> StreamAsset:
        own_name = getattr(function, "__name__", "stream")
        if spec is None and own_name == "<lambda>":
            raise InvalidOptionError(
                "the decorated function has no name", remedy="Pass spec=dg.AssetSpec('…') to @stream_asset."
            )
        own_function = AssetFunction.of(function)
        given = dg.AssetSpec(own_name) if spec is None else spec
        declared = StreamToTable(
            spec=given,
            origin=origin,
            # In a lake, the key that the translator chooses below decides the table.
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
            keys=keys if keys is None or isinstance(keys, Keys) else Keys(keys),
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
