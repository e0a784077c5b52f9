"""``StreamIngestionComponent``: ingestion of streams into Delta tables, declared in a ``defs.yaml``."""

import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from itertools import chain, islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, ConfigDict, Field, create_model

from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.schema_registry import SchemaRegistry
from spark_jobs.writing.keyed import Keys
from stream_assets.asset import StreamAsset, stream_asset
from stream_assets.catalogs import CatalogTable, HiveMetastore, TableCatalog, UnityCatalog
from stream_assets.definitions_builder import stream_definitions
from stream_assets.formats import FORMATS
from stream_assets.found_streams import check_loadable, conflicting, has_reserved_table, oldest_first
from stream_assets.resources import (
    DeltaLake,
    KafkaCluster,
    LakeTable,
    RedisServer,
    SparkSessionResource,
    StreamConnection,
    StreamFile,
    StreamLocation,
)
from stream_assets.stream_to_table import OPTIONS as ALWAYS_SET
from stream_assets.translator import StreamTranslator, StreamTranslatorData
from stream_consumers.backend import find_backend
from stream_consumers.display import shortened
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, log_text
from stream_consumers.messages import INTERNAL_KEY
from stream_consumers.options import check_range
from stream_consumers.urls import StreamUrl

CONNECTIONS: dict[str, type[Any]] = {"kafka": KafkaCluster, "redis": RedisServer, "file": StreamFile}
OPTIONS: dict[str, type[Any]] = {**ALWAYS_SET, "keys": Keys}
MAX_STREAMS = 500
"""The default of ``max_streams``: loading 500 assets takes about 15 s of CPU time, which grows with the square."""
_CONFLICT = "another stream or asset has the same name, key or table"
_PLAIN_STREAM = "stream"
"""The name of a stream that is valid everywhere."""
_SHOWN = 100
_WRITTEN = "stream_assets_written_texts"
_log = logging.getLogger(__name__)
CATALOGS: dict[str, type[Any]] = {"unity": UnityCatalog, "hive": HiveMetastore}


def with_named_errors(schema: Any) -> Any:
    """Return a JSON schema whose errors name the wrong attribute.

    Dagster allows a template in place of any value, as ``anyOf`` of the value and a string. For ``anyOf`` a validator
    reports only that no alternative matches; for ``if`` and ``else`` it reports what does not match.

    Args:
        schema: the JSON schema of attributes, or a part of it.

    Example:
        >>> with_named_errors({"anyOf": [{"$ref": "#/$defs/Op"}, {"type": "string"}]})
        {'if': {'type': ['string']}, 'else': {'$ref': '#/$defs/Op'}}
    """
    if isinstance(schema, list):
        return [with_named_errors(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_named_errors(one) for name, one in schema.items()}
    templates = [one["type"] for one in schema.get("anyOf", ()) if one.get("type") in ("string", "null")]
    others = [one for one in found.get("anyOf", ()) if one.get("type") not in ("string", "null")]
    if templates and len(others) == 1 and _has_attributes(others[0]):
        del found["anyOf"]
        found |= {"if": {"type": templates}, "else": others[0]}
    if "discriminator" in found:
        name, kinds = found["discriminator"]["propertyName"], found["discriminator"]["mapping"]
        del found["discriminator"], found["oneOf"]
        found |= {
            "type": "object",
            "properties": {name: {"enum": list(kinds)}},
            "required": [name],
            "allOf": [
                {"if": {"properties": {name: {"const": kind}}, "required": [name]}, "then": {"$ref": reference}}
                for kind, reference in kinds.items()
            ],
        }
    return found


def _has_attributes(schema: dict[str, Any]) -> bool:
    items = schema.get("items", {})
    return not {"$ref", "allOf"}.isdisjoint(schema) or "$ref" in items


class _Attributes(dg.Model):
    # An error must not print a value, which may be a secret.
    model_config = ConfigDict(hide_input_in_errors=True)


def attributes_of(
    kind: type[Any], *, type_name: str | None = None, names: Collection[str] | None = None, **types: Any
) -> type[BaseModel]:
    """Build a model with the fields of a class as YAML attributes; each value may be a template.

    The class checks the values when an object is built from them. A value whose type YAML cannot express is a template,
    like ``{{ RetryPolicy(max_retries=3) }}``.

    Args:
        kind: the class: a Pydantic model, or a dataclass whose docstring describes its fields.
        type_name: the value of the attribute ``type`` that selects this class among several.
        names: the fields that become attributes; all by default.
        types: the types of attributes that differ from the types of their fields.
    """
    declared: dict[str, tuple[Any, bool, str | None]] = {}
    # Only the types: other annotations are for the class itself.
    hints = get_type_hints(kind, localns={"Decoder": Decoder, "Mapping": Mapping})
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            declared[name] = (hints[name], field.is_required(), field.description)
    else:
        texts = _field_descriptions(kind)
        for one in (field for field in fields(kind) if field.init):
            is_required = one.default is MISSING and one.default_factory is MISSING
            declared[one.name] = (hints[one.name], is_required, texts[one.name])
    own: dict[str, Any] = {} if type_name is None else {"type": (Literal[type_name], ...)}
    for name in declared if names is None else names:
        hint, is_required, text = declared[name]
        default = ... if is_required or (type_name, name) == ("json", "schema") else None
        # A name that is an attribute of BaseModel needs an alias.
        taken = hasattr(BaseModel, name)
        own[f"{name}_" if taken else name] = (
            types.get(name, _yaml_type(hint)),
            Field(default=default, description=text, alias=name if taken else None),
        )
    # The rest of the docstring is for users of the Python class.
    summary = (kind.__doc__ or "").partition("\n")[0]
    return create_model(f"{(type_name or '').title()}{kind.__name__}", __base__=_Attributes, __doc__=summary, **own)


def one_of(kinds: Mapping[str, type[Any]]) -> Any:
    """Build the attributes of an object whose ``type`` selects one of these classes."""
    models = tuple(attributes_of(kind, type_name=name) for name, kind in kinds.items())
    return Annotated[Union[models], Field(discriminator="type")]  # noqa: UP007 - built from a tuple


def _field_descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the descriptions of the fields in the docstrings of a dataclass and of those that it extends."""
    found: list[tuple[str, str]] = []
    for one in reversed(kind.__mro__):
        _, _, about = inspect.cleandoc(one.__doc__ or "").partition("Args:\n")
        about = about.partition("\n\n")[0]
        found += re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", about, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", f"{text[0].upper()}{text[1:]}") for name, text in found}


def _yaml_type(hint: Any) -> Any:
    parts = {part for part in get_args(hint) or (hint,) if part is not type(None)}
    if get_origin(hint) in (tuple, Mapping, dict) or parts <= {bool, int, float, str}:
        # Text is a type, too, because Pydantic checks a template before it is evaluated.
        return (list[str] if get_origin(hint) is tuple else hint) | str | None
    return str | None


def _decoders(**types: Any) -> Any:
    stored = attributes_of(SchemaRegistry, options=dict[str, Any]) | str | None
    models = tuple(
        attributes_of(kind, type_name=name, names=(*names, *types), registry=stored, **types)
        for name, (kind, names) in FORMATS.items()
    )
    return Annotated[Union[models], Field(discriminator="type")]  # noqa: UP007 - made of a tuple


DECODER_ATTRIBUTES: Any = _decoders(key=str | _decoders() | None, headers=str | dict[str, str] | None)


class Variables:
    """The ``env`` of templates, whose values are read when the code is loaded.

    Dagster's own ``env`` returns nothing for a variable that is not set, as if the attribute were left out.
    """

    def __getattr__(self, name: str) -> Any:
        # Jinja looks up its own attributes on the object.
        if name.startswith(("jinja", "_")):
            raise AttributeError(name)
        return self(name)

    def __call__(self, name: str, *default: Any) -> Any:
        """Return the value of a variable.

        Raises:
            InvalidOptionError: the variable is not set, and no default is given.
        """
        value = os.environ.get(name, *default)
        if value is None and not default:
            raise InvalidOptionError(
                f"the variable {name} is not set",
                remedy=f"Set it where the code is loaded, or write {{{{ env('{name}', 'a default') }}}}.",
            )
        return value


def resolve(context: dg.ResolutionContext, value: Any) -> Any:
    """Resolve the templates of an attribute, which may use Dagster's ``EnvVar`` and ``RetryPolicy``.

    Raises:
        dagster.components.resolved.errors.ResolutionException: a template cannot be evaluated.
    """
    if isinstance(value, dict):
        return {name: resolve(context.at_path(name), one) for name, one in value.items()}
    if isinstance(value, list):
        return [resolve(context.at_path(index), one) for index, one in enumerate(value)]
    # Dagster converts text that looks like a number, even if it contains no template.
    if not isinstance(value, str) or not re.search(r"{[{%]", value):
        return value
    scope = {"EnvVar": dg.EnvVar, "RetryPolicy": dg.RetryPolicy}
    return context.with_scope(**scope).resolve_value(value, as_type=object)


def build_from_attributes(context: dg.ResolutionContext, value: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """Build the object that attributes describe, of the class that their ``type`` selects; resolve any other value.

    Args:
        context: the context of the attribute.
        value: the attributes, a template, or ``None``.
        kinds: the classes by ``type``; the name is empty for a single class without a ``type``.
    """
    if not isinstance(value, BaseModel):
        return resolve(context, value)
    given = resolve(context, value.model_dump(exclude_unset=True))
    return kinds[given.pop("type", "")](**given)


def resolve_options(context: dg.ResolutionContext, value: Any) -> Any:
    """Resolve the options that are set, by name."""
    return resolve(context, value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value)


def resolve_connection(context: dg.ResolutionContext, value: Any) -> StreamConnection | StreamUrl:
    """Resolve the connection, or a URL without streams.

    Raises:
        InvalidOptionError: the URL is in a variable.
        InvalidUrlError: the value is not a URL.
    """
    url = build_from_attributes(context, value, CONNECTIONS)
    if isinstance(url, StreamConnection):
        return url
    if isinstance(url, dg.EnvVar):
        raise InvalidOptionError(
            f"the connection is a URL in the variable {url.env_var_name}: the names of streams cannot be added to it, "
            "because it is read only when it is used",
            remedy="Write it like {type: kafka, bootstrap_servers: '{{ EnvVar(\"KAFKA\") }}'}; or write "
            f"{{{{ env.{url.env_var_name} }}}} if the URL may be displayed.",
        )
    return StreamUrl.parse(f"{str(url).rstrip('/')}/" if "://" in str(url) else str(url))


def resolve_lake(context: dg.ResolutionContext, value: Any) -> DeltaLake | None:
    """Resolve the lake, which may be given by its root."""
    found = build_from_attributes(context, value, {"": DeltaLake})
    return DeltaLake(root=found) if isinstance(found, str) else found


def resolve_decoder(context: dg.ResolutionContext, value: Any) -> Decoder | None:
    """Resolve a decoder from its attributes, or from a reference."""
    if isinstance(value, BaseModel):
        return _build_decoder(context, resolve(context, value.model_dump(exclude_unset=True, by_alias=True)))

    def is_decoder(found: Any) -> bool:
        return not isinstance(found, type) and callable(getattr(found, "decode", None))

    remedy = "Refer to an object with a method decode(payloads, schema), like Json('id BIGINT')."
    decoder: Decoder | None = _resolve_reference(context, value, "decode", is_decoder, remedy)
    return decoder


def _build_decoder(context: dg.ResolutionContext, given: dict[str, Any]) -> Decoder:
    if given.get("registry") is not None:
        given["registry"] = SchemaRegistry(**given["registry"])
    if given.get("schema_file") is not None:
        here = dg.ComponentLoadContext.from_resolution_context(context).path
        given["schema_file"] = here / given["schema_file"]
    if isinstance(given.get("key"), dict):
        given["key"] = _build_decoder(context, given["key"])
    kind, _ = FORMATS[given.pop("type")]
    decoder: Decoder = kind(**given)
    return decoder


def resolve_transform(context: dg.ResolutionContext, value: Any) -> Any:
    """Resolve the reference to a function."""
    remedy = "Refer to a function that takes the rows and returns them."
    return _resolve_reference(context, value, "transform", callable, remedy)


def resolve_translator(context: dg.ResolutionContext, value: Any) -> StreamTranslator | None:
    """Resolve the reference to a translator, or to its class."""

    def is_translator(found: Any) -> bool:
        return isinstance(found, StreamTranslator) or (isinstance(found, type) and issubclass(found, StreamTranslator))

    remedy = "Refer to a class that inherits from StreamTranslator, or to an object of one."
    found = _resolve_reference(context, value, "translator", is_translator, remedy)
    translator: StreamTranslator | None = found() if isinstance(found, type) else found
    return translator


def _resolve_reference(
    context: dg.ResolutionContext, value: Any, option: str, is_right: Callable[[Any], bool], remedy: str
) -> Any:
    """Resolve a reference, and check the object.

    Raises:
        InvalidOptionError: the object does not exist, or the option does not accept it.
    """
    given = resolve(context, value)
    found = import_reference(context, given, option=option) if isinstance(given, str) else given
    if found is not None and not is_right(found):
        raise InvalidOptionError(f"{option}={value!r} is a {type(found).__name__}", remedy=remedy)
    return found


def import_reference(context: dg.ResolutionContext, path: str, *, option: str) -> Any:
    """Import ``module.name``; with a leading dot, from the folder of the ``defs.yaml``.

    Args:
        context: the context of the attribute.
        path: the reference, like ``.transforms.orders``.
        option: the name of the attribute, for the error.

    Raises:
        InvalidOptionError: the module or the name does not exist.
    """
    here = dg.ComponentLoadContext.from_resolution_context(context) if path.startswith(".") else None
    whole = f"{here.defs_relative_module_name(here.path)}{path}" if here else path
    module_name, _, name = whole.rpartition(".")
    remedy = "Write it like my_project.transforms.orders, or .transforms.orders for a module next to the defs.yaml."
    try:
        module = import_module(module_name) if module_name else None
    except ModuleNotFoundError as error:
        # A failed import inside the module is a different error.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidOptionError(f"{option}={path!r}: module {module_name!r} does not exist", remedy=remedy) from None
    if module is None:
        raise InvalidOptionError(f"{option}={path!r} names no module", remedy=remedy)
    if not hasattr(module, name):
        raise InvalidOptionError(f"{option}={path!r}: the module {module_name!r} has no {name!r}", remedy=remedy)
    return getattr(module, name)


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
    return _attribute(resolve, str | None, description)


def _options(name: str) -> dg.Resolver:
    model = attributes_of(OPTIONS[name])
    return _attribute(resolve_options, model | None, str(model.__doc__))


def _translation_scope(data: StreamTranslatorData) -> Mapping[str, Any]:
    return {"data": data, "stream": ",".join(data.streams)}


class _WrittenTemplates(dg.ResolutionContext):
    """A context that renders only the texts of a translation as it is written, not what they have become.

    Dagster would render a key again, and all that a function returns. Any client that can create a stream chooses its
    name, so that a template in there, also one that appears when the name is rendered or changed, could run code.
    """

    def resolve_value(self, val: Any, as_type: type | None = None) -> Any:
        """Render a text of the translation, and those within a collection; any other text stays."""
        if isinstance(val, str) and val not in self.stash[_WRITTEN]:
            return val
        return super().resolve_value(val)


def _resolve_translation(context: dg.ResolutionContext, given: Any) -> TranslationFn[StreamTranslatorData]:
    resolver: Any = _dagsters_translation.fn
    written = frozenset(_texts(given.model_dump() if isinstance(given, BaseModel) else given))
    once = _WrittenTemplates(
        scope=context.scope,
        path=context.path,
        source_position_tree=context.source_position_tree,
        stash={**context.stash, _WRITTEN: written},
    )
    change: TranslationFn[StreamTranslatorData] = resolver.callable(once, given)
    return change


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within the value of an attribute."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_texts, value.values()))
    elif isinstance(value, Sequence):
        yield from chain.from_iterable(map(_texts, value))


_dagsters_translation = TranslationFnResolver[StreamTranslatorData](_translation_scope)
_translation = _attribute(
    _resolve_translation,
    _dagsters_translation.model_field_type,
    "How Dagster shows the asset: key, group_name, tags, owners. Templates can use stream, data and spec.",
)


@dataclass(kw_only=True)
class StreamOptions(dg.Resolvable):
    """How a stream is ingested. The defaults are those of ``stream_asset``."""

    group: Annotated[str | None, _text("The consumer group; its positions are in the Delta log of the table.")] = None
    decode: Annotated[
        Decoder | None,
        _attribute(
            resolve_decoder,
            DECODER_ATTRIBUTES | None,
            "How payloads become columns: {type: json, schema: 'id BIGINT'}, {type: text}, {type: raw}, "
            "{type: avro, registry: {url: 'https://registry:8081'}, subject: orders-value}, protobuf and json_schema "
            "in the same way; or a reference to a decoder.",
        ),
    ] = None
    transform: Annotated[
        Any,
        _attribute(
            resolve_transform,
            str | None,
            "A reference to the function that takes the decoded rows and returns those to write, or to the body of the "
            "asset; .transforms.orders is in a module next to the defs.yaml.",
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
    keys: Annotated[Mapping[str, Any] | None, _options("keys")] = None
    translation: Annotated[TranslationFn[StreamTranslatorData] | None, _translation] = None

    def set_options(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        names = [field.name for field in fields(StreamOptions)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(kw_only=True)
class StreamEntry(StreamOptions):
    """A stream, or several streams, each of which is written into its own table."""

    stream: Annotated[
        str | Sequence[str] | None, _about("The stream key: a Kafka topic or a Redis key; or several, for one table.")
    ] = None
    pattern: Annotated[
        str | None,
        _about(
            "A pattern of streams with a table each, like orders-*: those that exist when the code is loaded, except "
            "those of other entries. * stands for any text, ? for one character."
        ),
    ] = None
    max_streams: Annotated[
        int,
        _about(
            f"The most streams of the pattern that become assets, {MAX_STREAMS} by default. If there are more, those "
            "that are in their tables come first, the oldest table first."
        ),
    ] = MAX_STREAMS
    name: Annotated[str | None, _about("The name of the asset; the stream key by default.")] = None
    table: Annotated[
        str | None, _text("The Delta table: a path or URI, or its name in the catalog; by default a table of the lake.")
    ] = None

    def __post_init__(self) -> None:
        check_range("max_streams", self.max_streams, at_least=1)
        if (self.stream is None) == (self.pattern is None):
            raise InvalidOptionError(
                f"an entry of streams has stream={self.stream!r} and pattern={self.pattern!r}",
                remedy="Set one of the two.",
            )
        if self.pattern is not None and (self.name is not None or self.table is not None):
            raise InvalidOptionError(
                f"the streams of pattern={self.pattern!r} would all have name={self.name!r} and table={self.table!r}",
                remedy="Leave both out. Set lake for the location of the tables, and translation for other keys.",
            )
        if self.pattern is None and not (self.names and all(self.names)):
            raise InvalidOptionError(
                f"an entry of streams has stream={self.stream!r}, which names no stream",
                remedy="Set it to the stream key, a Kafka topic or a Redis key; or leave the entry out.",
            )
        if self.names and len(self.names) > 1 and self.name is None:
            raise InvalidOptionError(
                f"the asset of stream={list(self.names)!r} has no name", remedy="Add one, like name: orders."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The stream keys; empty for a pattern."""
        return (self.stream,) if isinstance(self.stream, str) else tuple(self.stream or ())


class StreamIngestionScaffolder(dg.Scaffolder[Any]):
    """Writes an example ``defs.yaml`` and its transform."""

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


_TRANSFORMS = '''"""Transforms, which return the rows to write of each micro-batch."""

from pyspark.sql import DataFrame


def orders(batch: DataFrame) -> DataFrame:
    """Keep orders with a positive amount."""
    return batch.where("amount > 0")
'''


@dg.scaffold_with(StreamIngestionScaffolder)
@dataclass(kw_only=True)
class StreamIngestionComponent(dg.Component, dg.Resolvable):
    """Writes streams into Delta tables exactly once. Each has an asset with checks, a job and a lag sensor.

    The component does what ``@stream_asset`` and ``stream_definitions`` do in Python. In the connection, the lake, a
    group or a table, ``{{ EnvVar('NAME') }}`` is read when it is used, so the definitions do not contain its value.
    Logs and metadata show the resulting addresses and paths, like all others.
    """

    connection: Annotated[
        StreamConnection | StreamUrl,
        _attribute(
            resolve_connection,
            one_of(CONNECTIONS),
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
            resolve_lake,
            attributes_of(DeltaLake) | None,
            "Where the tables are: <root>/<schema>/<name of the asset>.",
            examples=[{"root": "{{ EnvVar('LAKE') }}"}],
        ),
    ] = None
    catalog: Annotated[
        TableCatalog | None,
        _attribute(
            partial(build_from_attributes, kinds=CATALOGS),
            one_of(CATALOGS) | None,
            "The catalog that has the locations of tables: {type: unity, url: …} or {type: hive, uri: …}.",
        ),
    ] = None
    defaults: Annotated[StreamOptions | None, _about("Options that each entry of streams can override.")] = None
    spark: Annotated[
        Any,
        _attribute(
            partial(build_from_attributes, kinds={"": SparkSessionResource}),
            attributes_of(SparkSessionResource) | None,
            "The Spark session: {master: 'local[4]'} or {remote: 'sc://host:port'}; or the key of a resource with a "
            "Spark session. The default is a local Spark that outlives the runs.",
        ),
    ] = None
    translator: Annotated[
        StreamTranslator | None,
        _attribute(
            resolve_translator,
            str | None,
            "A reference to a StreamTranslator, which decides the keys of assets and streams.",
        ),
    ] = None

    @classmethod
    def model(cls) -> type[BaseModel]:
        """Return the model of the attributes, whose errors name the wrong attribute."""
        return _with_named_errors(super().model())

    @classmethod
    def get_additional_scope(cls) -> Mapping[str, Any]:
        """Return the variables of templates: those of Dagster, and ``env``."""
        return {**super().get_additional_scope(), "env": Variables()}

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the assets with their checks, the streams, the jobs and the sensors.

        Raises:
            InvalidOptionError: an entry is wrong, or the broker cannot list the streams of a pattern.
        """
        return stream_definitions(self._assets())

    def _assets(self) -> Sequence[StreamAsset]:
        named: list[StreamAsset] = []
        for index, entry in enumerate(self.streams):
            if entry.pattern is None:
                with self._labelled(index):
                    named.append(self._asset(entry, entry.names))
        taken = {stream for asset in named for stream in asset.streams}
        found: dict[StreamAsset, str] = {}
        listed: Sequence[str] | None = None
        for index, entry in enumerate(self.streams):
            if entry.pattern is not None:
                with self._labelled(index):
                    listed = self._all_streams() if listed is None else listed
                    streams = [one for one in listed if fnmatchcase(one, entry.pattern) and one not in taken]
                    taken.update(streams)
                    found |= dict.fromkeys(self._found_assets(entry, streams), entry.pattern)
        left_out = conflicting(named, list(found))
        for pattern in dict.fromkeys(found.values()):
            of_pattern = (asset for asset in found if found[asset] == pattern and asset in left_out)
            _warn(pattern, {stream: _CONFLICT for asset in of_pattern for stream in asset.streams})
        return [*named, *(asset for asset in found if asset not in left_out)]

    @contextmanager
    def _labelled(self, index: int) -> Iterator[None]:
        """Name the entry in errors within the context."""
        try:
            yield
        except StreamAssetsError as error:
            entry = self.streams[index]
            label = f"streams[{index}] ({entry.pattern or ', '.join(entry.names)})"
            raise InvalidOptionError(f"{label}: {error.what}", remedy=error.remedy) from error

    def _found_assets(self, entry: StreamEntry, streams: Sequence[str]) -> Sequence[StreamAsset]:
        """Return the assets of the streams of a pattern; a stream whose name allows none is left out.

        Raises:
            Exception: the entry is wrong, whatever a stream is called.
        """
        assets: list[StreamAsset] = []
        left_out: dict[str, str] = {}
        for stream in streams:
            try:
                asset = self._asset(entry, (stream,))
            except Exception as error:  # noqa: BLE001 - also an error of Dagster, or of a translator of the user
                left_out[stream] = log_text(error)
                continue
            if has_reserved_table(asset):
                left_out[stream] = "its table would be the dead letters or the rebuild of another one"
            else:
                assets.append(asset)
        if len(assets) > entry.max_streams:
            first = dict.fromkeys((*oldest_first(assets), *assets))
            assets = list(first)[: entry.max_streams]
            too_many = [stream for asset in list(first)[entry.max_streams :] for stream in asset.streams]
            _warn(str(entry.pattern), dict.fromkeys(too_many, f"max_streams={entry.max_streams}"))
        loadable: list[StreamAsset] = []
        for asset in assets:
            try:
                check_loadable(asset)
                loadable.append(asset)
            except Exception as error:  # noqa: BLE001 - see above
                left_out |= dict.fromkeys(asset.streams, log_text(error))
        if left_out and not loadable:
            check_loadable(self._asset(entry, (_PLAIN_STREAM,)))
        _warn(str(entry.pattern), left_out)
        return loadable

    def _asset(self, entry: StreamEntry, names: Sequence[str]) -> StreamAsset:
        defaults = self.defaults or StreamOptions()
        options = {**defaults.set_options(), **entry.set_options()}
        # An entry may set some fields of an options object, and the defaults the others.
        for name, kind in OPTIONS.items():
            parts = [part for part in (getattr(defaults, name), getattr(entry, name)) if part]
            if parts:
                options[name] = _build_options(kind, {key: value for part in parts for key, value in part.items()})
        options.pop("translation", None)
        translator = self.translator or StreamTranslator()
        for change in filter(None, (defaults.translation, entry.translation)):
            translator = _ChangedTranslator(translator, change)
        transform = options.pop("transform", _unchanged)
        storage_options = self.lake.storage_options if self.lake else {}
        table: DeltaLake | LakeTable | CatalogTable | None = self.lake
        if entry.table and self.catalog:
            table = self.catalog.table(entry.table, storage_options=storage_options)
        elif entry.table:
            table = LakeTable(entry.table, (), storage_options)
        if table is None:
            raise InvalidOptionError("the table is missing", remedy="Add lake: {root: …}, or table: to the entry.")
        declare = stream_asset(
            source=replace(self._source(names), is_found=entry.pattern is not None),
            table=table,
            spec=dg.AssetSpec(
                entry.name or re.sub(r"\W+", "_", names[0]).strip("_"),
                description=getattr(transform, "__doc__", None) or f"The rows of stream {', '.join(names)}.",
            ),
            spark=self.spark,
            translator=translator,
            **options,
        )
        return declare(transform)

    def _source(self, names: Sequence[str]) -> StreamLocation:
        if isinstance(self.connection, StreamUrl):
            return StreamLocation(str(self.connection.with_streams(names)))
        return self.connection.stream(*names)

    def _all_streams(self) -> Sequence[str]:
        """List the streams of the connection.

        Raises:
            UnsupportedError: the backend cannot list its streams.
            StreamAssetsError: the broker reports an error.
        """
        if isinstance(self.connection, StreamUrl):
            location = StreamLocation(str(self.connection))
        else:
            location = self.connection.stream()
        url, client = location.url, location.client
        backend = find_backend(url.protocol)
        backend.check(url, client)
        return sorted(set(backend.streams(url, client)) - {INTERNAL_KEY})


@cache
def _with_named_errors(model: type[BaseModel]) -> type[BaseModel]:
    class Attributes(model):  # type: ignore[misc,valid-type]
        @classmethod
        def model_json_schema(cls, *arguments: Any, **named: Any) -> dict[str, Any]:
            found: dict[str, Any] = with_named_errors(super().model_json_schema(*arguments, **named))
            return found

    return Attributes


def _build_options(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Build the options object. An attribute that is null keeps its default."""
    return kind(**{name: value for name, value in given.items() if value is not None})


class _ChangedTranslator(StreamTranslator):
    """A translator whose asset specs are changed by the attribute ``translation``."""

    def __init__(self, base: StreamTranslator, change: TranslationFn[StreamTranslatorData]) -> None:
        self._base = base
        self._change = change

    def get_asset_spec(self, data: StreamTranslatorData) -> dg.AssetSpec:
        return self._change(self._base.get_asset_spec(data), data)

    def get_stream_spec(self, data: StreamTranslatorData, stream: str) -> dg.AssetSpec:
        return self._base.get_stream_spec(data, stream)


def _warn(pattern: str, left_out: Mapping[str, str]) -> None:
    """Log how many streams of a pattern have no asset, with the reason of one of them."""
    for stream, reason in islice(left_out.items(), 1):
        _log.warning(
            "%d streams that match the pattern %s have no asset, like %s: %s",
            len(left_out),
            pattern,
            shortened(ascii(stream), _SHOWN),
            reason,
        )


def _unchanged(batch: Any) -> Any:
    return batch
