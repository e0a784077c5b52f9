"""``StreamIngestionComponent``: streams into Delta tables, declared in a ``defs.yaml``."""

# No annotations from the future: Dagster reads those of the classes that it makes a schema of.
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Annotated, Any

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel

from spark_jobs.decoding.decoders import Decoder
from stream_assets import component_attributes as attributes
from stream_assets.asset import StreamAsset, stream_asset
from stream_assets.catalogs import CatalogTable, TableCatalog
from stream_assets.connections import StreamConnection
from stream_assets.definitions_builder import stream_definitions
from stream_assets.delta_lake import DeltaLake, LakeTable
from stream_assets.resources import SparkSessionResource
from stream_assets.stream_to_table import OPTIONS
from stream_assets.translator import StreamTranslator, StreamTranslatorData
from stream_consumers.capabilities import MeasurableConsumer
from stream_consumers.create import create_consumer
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, UnsupportedError
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl


def _about(description: str, *, examples: list[Any] | None = None) -> dg.Resolver:
    resolver: dg.Resolver = dg.Resolver.default(description=description, examples=examples)
    return resolver


def _attribute(resolve: Any, kind: Any, description: str, *, examples: list[Any] | None = None) -> dg.Resolver:
    return dg.Resolver(
        resolve,
        model_field_type=kind,
        inject_before_resolve=False,
        description=description,
        examples=examples,
    )


def _text(description: str) -> dg.Resolver:
    return _attribute(attributes.resolved, str | None, description)


def _options(name: str) -> dg.Resolver:
    model = attributes.attributes_of(OPTIONS[name])
    return _attribute(attributes.resolve_options, model | None, str(model.__doc__))


_translation = TranslationFnResolver[StreamTranslatorData](
    lambda data: {"data": data, "stream": ",".join(data.streams)}
)
_translation.description = (
    "What Dagster shows of the asset: key, group_name, tags, owners. Templates know stream, data and spec."
)


@dataclass(kw_only=True)
class StreamOptions(dg.Resolvable):
    """How a stream is ingested; what is left out is as in ``stream_asset``."""

    group: Annotated[str | None, _text("The consumer group, whose positions live in the Delta log of the table.")] = (
        None
    )
    decode: Annotated[
        Decoder | None,
        _attribute(
            attributes.resolve_decoder,
            attributes.DECODER_TYPE | None,
            "How payloads become columns: {type: json, schema: 'id BIGINT'}, {type: text}, {type: raw}, "
            "{type: avro, registry: {url: 'https://registry:8081'}, subject: orders-value}, protobuf and json_schema "
            "like it; or a reference to a decoder.",
        ),
    ] = None
    transform: Annotated[
        Any,
        _attribute(
            attributes.resolve_transform,
            str | None,
            "A reference to the function that takes the decoded rows and returns those to write, like "
            ".transforms.orders for one in a module beside the defs.yaml; or to the body of the asset.",
            examples=[".transforms.orders"],
        ),
    ] = None
    mode: Annotated[str | None, _about("resumable, load_balanced or real_time.")] = None
    start: Annotated[str | None, _about("Where a group without a position starts: earliest or latest.")] = None
    errors: Annotated[Mapping[str, Any] | None, _options("errors")] = None
    limits: Annotated[Mapping[str, Any] | None, _options("limits")] = None
    layout: Annotated[Mapping[str, Any] | None, _options("layout")] = None
    sensor: Annotated[Mapping[str, Any] | None, _options("sensor")] = None
    op: Annotated[Mapping[str, Any] | None, _options("op")] = None
    translation: Annotated[TranslationFn[StreamTranslatorData] | None, _translation] = None

    def given(self) -> dict[str, Any]:
        """What was not left out."""
        names = [field.name for field in fields(StreamOptions)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(kw_only=True)
class StreamEntry(StreamOptions):
    """A stream, or streams of which each goes into a table of its own."""

    stream: Annotated[
        str | Sequence[str] | None, _about("The stream key: a topic, a key of Redis; or several, for one table.")
    ] = None
    pattern: Annotated[
        str | None,
        _about(
            "Streams with a table each, like orders-*: what there is when the code is loaded, but for what another "
            "entry has. * stands for any text, ? for one character."
        ),
    ] = None
    name: Annotated[str | None, _about("Of the asset; the stream key by default.")] = None
    table: Annotated[
        str | None, _text("The Delta table, a path or URI, or its name in the catalog; by default the one of the lake.")
    ] = None

    def __post_init__(self) -> None:
        if (self.stream is None) == (self.pattern is None):
            raise InvalidOptionError(
                f"an entry of streams has stream={self.stream!r} and pattern={self.pattern!r}",
                remedy="Give it one of them.",
            )
        if self.pattern is not None and (self.name is not None or self.table is not None):
            raise InvalidOptionError(
                f"the streams of pattern={self.pattern!r} would all have name={self.name!r} and table={self.table!r}",
                remedy="Leave both out, and say in lake where the tables are; translation changes the keys.",
            )
        if self.pattern is None and not (self.names and all(self.names)):
            raise InvalidOptionError(
                f"an entry of streams has stream={self.stream!r}, which names none",
                remedy="Give the stream key: the topic, or the key of Redis; or leave the entry out.",
            )
        if self.names and len(self.names) > 1 and self.name is None:
            raise InvalidOptionError(
                f"the asset of stream={list(self.names)!r} has no name", remedy="Add one, like name: orders."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The stream keys; none of a pattern."""
        return (self.stream,) if isinstance(self.stream, str) else tuple(self.stream or ())


class StreamIngestionScaffolder(dg.Scaffolder[Any]):
    """Writes a ``defs.yaml`` that can be loaded, with a transform beside it."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """See ``dg scaffold defs``."""
        (request.target_path / "transforms.py").write_text(_TRANSFORMS)
        example = {
            "connection": {"type": "file", "path": "{{ context.project_root }}/data/orders.ss"},
            "lake": {"root": "{{ context.project_root }}/data/lake"},
            "streams": [
                {
                    "stream": "orders",
                    "group": "lakehouse",
                    "decode": {"type": "json", "schema": "id BIGINT, user STRING, amount DECIMAL(10,2)"},
                    "transform": ".transforms.orders",
                }
            ],
        }
        dg.scaffold_component(request=request, yaml_attributes=example)


_TRANSFORMS = '''"""What is written of the rows of each micro-batch."""

from pyspark.sql import DataFrame


def orders(batch: DataFrame) -> DataFrame:
    """Orders, each once."""
    return batch.where("amount > 0")
'''


@dg.scaffold_with(StreamIngestionScaffolder)
@dataclass(kw_only=True)
class StreamIngestionComponent(dg.Component, dg.Resolvable):
    """Writes streams into Delta tables exactly once: for each an asset with its checks, its job and its lag sensor.

    It does what ``@stream_asset`` and ``stream_definitions`` do in Python. In the connection, the lake, a group or a
    table, ``{{ EnvVar('NAME') }}`` is looked up when it is used, and its value is shown nowhere.
    """

    connection: Annotated[
        StreamConnection | StreamUrl,
        _attribute(
            attributes.resolve_connection,
            attributes.one_of(attributes.CONNECTIONS),
            "Where the streams are: {type: kafka, bootstrap_servers: …}, {type: redis, address: …}, "
            "{type: file, path: …}; or a URL, like kafka://broker:9092.",
            examples=[{"type": "kafka", "bootstrap_servers": "{{ EnvVar('KAFKA') }}"}],
        ),
    ]
    streams: Annotated[
        Sequence[StreamEntry],
        _about("The streams, one or several.", examples=[[{"stream": "orders", "group": "lakehouse"}]]),
    ]
    lake: Annotated[
        DeltaLake | None,
        _attribute(
            attributes.resolve_lake,
            attributes.attributes_of(DeltaLake) | None,
            "Where the tables are: <root>/<schema>/<name of the asset>.",
            examples=[{"root": "{{ EnvVar('LAKE') }}"}],
        ),
    ] = None
    catalog: Annotated[
        TableCatalog | None,
        _attribute(
            partial(attributes.made, kinds=attributes.CATALOGS),
            attributes.one_of(attributes.CATALOGS) | None,
            "What knows where the table of an entry is, by its name: {type: unity, url: …} or {type: hive, uri: …}.",
        ),
    ] = None
    defaults: Annotated[StreamOptions | None, _about("What the entries of streams have unless they say else.")] = None
    spark: Annotated[
        Any,
        _attribute(
            partial(attributes.made, kinds={"": SparkSessionResource}),
            attributes.attributes_of(SparkSessionResource) | None,
            "The Spark session: {master: 'local[4]'} or {remote: 'sc://host:port'}; or the key of a resource that has "
            "one. By default a local Spark that outlives the runs.",
        ),
    ] = None
    translator: Annotated[
        StreamTranslator | None,
        _attribute(
            attributes.resolve_translator,
            str | None,
            "A reference to a StreamTranslator, which decides the keys of tables and streams.",
        ),
    ] = None

    @classmethod
    def model(cls) -> type[BaseModel]:
        """The attributes; an error in one names it."""
        return _with_named_errors(super().model())

    @classmethod
    def get_additional_scope(cls) -> Mapping[str, Any]:
        """What templates know beside what they know of Dagster."""
        return {**super().get_additional_scope(), "env": attributes.Variables()}

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The assets with their checks, the streams, jobs and sensors.

        Raises:
            InvalidOptionError: naming the entry; of a pattern also with what the broker says.
        """
        return stream_definitions(list(self._assets()))

    def _assets(self) -> Iterator[StreamAsset]:
        taken = {name for entry in self.streams for name in entry.names}
        for place, entry in enumerate(self.streams):
            try:
                for names in self._found(entry, taken):
                    taken.update(names)
                    yield self._asset(entry, names)
            except StreamAssetsError as error:
                label = f"streams[{place}] ({entry.pattern or ', '.join(entry.names)})"
                raise InvalidOptionError(f"{label}: {error.what}", remedy=error.remedy) from error

    def _found(self, entry: StreamEntry, taken: Collection[str]) -> Sequence[tuple[str, ...]]:
        """For each asset of an entry the streams that it reads."""
        if entry.pattern is None:
            return [entry.names]
        return [(name,) for name in self._all_streams() if fnmatchcase(name, entry.pattern) and name not in taken]

    def _asset(self, entry: StreamEntry, names: Sequence[str]) -> StreamAsset:
        defaults = self.defaults or StreamOptions()
        options = {**defaults.given(), **entry.given()}
        # An entry may have some fields of an object of options, and the defaults the others.
        for name, kind in OPTIONS.items():
            parts = [part for part in (getattr(defaults, name), getattr(entry, name)) if part]
            if parts:
                options[name] = _made(kind, {key: value for part in parts for key, value in part.items()})
        options.pop("translation", None)
        translator = self.translator or StreamTranslator()
        for change in filter(None, (defaults.translation, entry.translation)):
            translator = _Translated(translator, change)
        transform = options.pop("transform", _as_it_is)
        storage_options = self.lake.storage_options if self.lake else {}
        table: DeltaLake | LakeTable | CatalogTable | None = self.lake
        if entry.table and self.catalog:
            table = self.catalog.table(entry.table, storage_options=storage_options)
        elif entry.table:
            table = LakeTable(entry.table, (), storage_options)
        if table is None:
            raise InvalidOptionError("there is no table", remedy="Add lake: {root: …}, or table: to the entry.")
        declare = stream_asset(
            source=self._source(names),
            table=table,
            spec=dg.AssetSpec(
                entry.name or re.sub(r"\W+", "_", names[0]).strip("_"),
                description=getattr(transform, "__doc__", None) or f"Of the stream {', '.join(names)}.",
            ),
            spark=self.spark,
            translator=translator,
            **options,
        )
        return declare(transform)

    def _source(self, names: Sequence[str]) -> Any:
        if isinstance(self.connection, StreamUrl):
            return str(self.connection.with_streams(names))
        return self.connection.stream(*names)

    def _all_streams(self) -> Sequence[str]:
        """The names of the streams that there are.

        Raises:
            UnsupportedError: the backend cannot tell.
            StreamAssetsError: as the broker says.
        """
        if isinstance(self.connection, StreamUrl):
            url, client = self.connection.with_streams(["*"]), None
        else:
            everything = self.connection.stream("*")
            url, client = everything.url, everything.client
        with create_consumer(url, mode=ConsumerMode.REAL_TIME, live=False, client=client) as consumer:
            if not isinstance(consumer, MeasurableConsumer):
                raise UnsupportedError(
                    f"{url.with_streams([])} cannot tell which streams there are without being read as a whole",
                    remedy="Name them, with stream: instead of pattern:.",
                )
            return sorted({shard.stream for shard in consumer.ends()})


@cache
def _with_named_errors(model: type[BaseModel]) -> type[BaseModel]:
    class Attributes(model):  # type: ignore[misc,valid-type]
        @classmethod
        def model_json_schema(cls, *arguments: Any, **named: Any) -> dict[str, Any]:
            found: dict[str, Any] = attributes.with_named_errors(super().model_json_schema(*arguments, **named))
            return found

    return Attributes


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """The object of options; an attribute that is null stays at its default."""
    return kind(**{name: value for name, value in given.items() if value is not None})


class _Translated(StreamTranslator):
    """What a translator decides, changed by the attribute ``translation``."""

    def __init__(self, base: StreamTranslator, change: TranslationFn[StreamTranslatorData]) -> None:
        self._base = base
        self._change = change

    def get_asset_spec(self, data: StreamTranslatorData) -> dg.AssetSpec:
        return self._change(self._base.get_asset_spec(data), data)

    def get_stream_spec(self, data: StreamTranslatorData, stream: str) -> dg.AssetSpec:
        return self._base.get_stream_spec(data, stream)


def _as_it_is(batch: Any) -> Any:
    return batch
