"""How the attributes of a ``defs.yaml`` become what ``stream_asset`` takes: connections, decoders, references."""

# No annotations from the future: Dagster reads those of the classes that it makes a schema of.
import os
import re
from importlib import import_module
from typing import Annotated, Any, Literal

import dagster as dg
from pydantic import BaseModel, Field, create_model

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.decoders import Decoder, Raw, Text
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_schema import JsonSchema
from spark_jobs.decoding.protobuf import Protobuf
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_assets.catalogs import HiveMetastore, TableCatalog, UnityCatalog
from stream_assets.connections import KafkaCluster, RedisServer, StreamConnection, StreamFile
from stream_assets.delta_lake import DeltaLake
from stream_assets.resources import SparkSessionResource
from stream_assets.translator import StreamTranslator
from stream_consumers.errors import InvalidOptionError
from stream_consumers.urls import StreamUrl

CONNECTIONS: dict[str, type[StreamConnection]] = {"kafka": KafkaCluster, "redis": RedisServer, "file": StreamFile}
_DECODERS: dict[str, Any] = {
    "json": Json,
    "variant": Json,
    "text": Text,
    "raw": Raw,
    "avro": Avro,
    "protobuf": Protobuf,
    "json_schema": JsonSchema,
}


def with_named_errors(schema: Any) -> Any:
    """A JSON schema whose errors name the attribute that is wrong.

    Dagster lets a template stand for any value, as ``anyOf`` of the value and a string. Of ``anyOf`` a validator
    reports only that nothing fits; of ``if`` and ``else`` it reports what does not fit.

    Args:
        schema: of attributes, or a part of it.

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
                {"if": {"properties": {name: {"const": kind}}, "required": [name]}, "then": {"$ref": place}}
                for kind, place in kinds.items()
            ],
        }
    return found


def _has_attributes(schema: dict[str, Any]) -> bool:
    items = schema.get("items", {})
    return not {"$ref", "allOf"}.isdisjoint(schema) or "$ref" in items


def _attributes_of(resource: type[BaseModel], **more: Any) -> type[BaseModel]:
    """The attributes of a resource, each with its description."""
    own: dict[str, Any] = {name: (field.annotation, field) for name, field in resource.model_fields.items()}
    # The text after it is for Python.
    summary = (resource.__doc__ or "").partition("\n")[0]
    return create_model(f"{resource.__name__}Attributes", __base__=dg.Model, __doc__=summary, **more, **own)


_Kafka = _attributes_of(KafkaCluster, type=(Literal["kafka"], ...))
_Redis = _attributes_of(RedisServer, type=(Literal["redis"], ...))
_File = _attributes_of(StreamFile, type=(Literal["file"], ...))
CONNECTION_TYPE: Any = Annotated[_Kafka | _Redis | _File, Field(discriminator="type")]
_CATALOGS: dict[str, type[TableCatalog]] = {"unity": UnityCatalog, "hive": HiveMetastore}
_Unity = _attributes_of(UnityCatalog, type=(Literal["unity"], ...))
_Hive = _attributes_of(HiveMetastore, type=(Literal["hive"], ...))
CATALOG_TYPE: Any = Annotated[_Unity | _Hive, Field(discriminator="type")]
LAKE_TYPE: Any = _attributes_of(DeltaLake)
SPARK_TYPE: Any = _attributes_of(SparkSessionResource)


class JsonFields(dg.Model):
    """Payloads are JSON objects."""

    type: Literal["json"]
    schema_: str = Field(alias="schema", description="Spark DDL: 'id BIGINT, amount DECIMAL(10,2)'.")
    mode: Literal["lenient", "strict"] = Field(
        default="lenient",
        description="Take values that are written in another way than their types, or refuse them.",
    )


class VariantFields(dg.Model):
    """Payloads are JSON without a schema."""

    type: Literal["variant"]
    column: str = Field(default="payload", description="The column of the VARIANT.")


class TextFields(dg.Model):
    """Payloads are UTF-8 text."""

    type: Literal["text"]
    column: str = Field(default="payload", description="The column of the text.")


class RawFields(dg.Model):
    """Payloads stay as they are."""

    type: Literal["raw"]
    column: str = Field(default="payload", description="The column of the bytes.")


class RegistryAttributes(dg.Model):
    """A schema registry."""

    url: str = Field(description="Like https://registry:8081.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Of its client, like basic.auth.user.info: '{{ env.REGISTRY_USER }}'."
    )


class _StoredFields(dg.Model):
    """Where a schema is."""

    registry: RegistryAttributes | None = Field(default=None, description="Payloads begin with schema ids then.")
    subject: str | None = Field(default=None, description="Whose schema has the columns, like orders-value.")
    version: int | None = Field(default=None, description="Of the subject; the newest by default.")
    schema_file: str | None = Field(
        default=None, description="Instead of a subject, the path of a file with the schema, from this folder."
    )
    framed: bool | None = Field(default=None, description="Whether payloads begin with schema ids.")


class AvroFields(_StoredFields):
    """Payloads are Avro values."""

    type: Literal["avro"]
    column: str | None = Field(default=None, description="One column for all; null for a column a field.")


class ProtobufFields(_StoredFields):
    """Payloads are Protobuf messages."""

    type: Literal["protobuf"]
    message: str | None = Field(default=None, description="The full name; the first one of the schema by default.")
    column: str | None = Field(default=None, description="One column for all; null for a column a field.")


class JsonSchemaFields(_StoredFields):
    """Payloads are JSON objects with a JSON Schema."""

    type: Literal["json_schema"]
    validate_: bool = Field(default=False, alias="validate", description="Refuse what the schema does not allow.")


_KEY_TYPE: Any = Annotated[
    JsonFields | TextFields | RawFields | AvroFields | ProtobufFields | JsonSchemaFields, Field(discriminator="type")
]


class _Columns(dg.Model):
    """Columns for what comes with a payload."""

    key: str | _KEY_TYPE | None = Field(
        default=None, description="A column for the message key, BINARY, or a decoder of it; null leaves it out."
    )
    headers: str | dict[str, str] | None = Field(
        default=None, description="A column for the headers, or for columns the names of headers; null leaves them out."
    )


class JsonAttributes(_Columns, JsonFields):
    """Payloads are JSON objects."""


class VariantAttributes(_Columns, VariantFields):
    """Payloads are JSON without a schema."""


class TextAttributes(_Columns, TextFields):
    """Payloads are UTF-8 text."""


class RawAttributes(_Columns, RawFields):
    """Payloads stay as they are."""


class AvroAttributes(_Columns, AvroFields):
    """Payloads are Avro values."""


class ProtobufAttributes(_Columns, ProtobufFields):
    """Payloads are Protobuf messages."""


class JsonSchemaAttributes(_Columns, JsonSchemaFields):
    """Payloads are JSON objects with a JSON Schema."""


DECODER_TYPE: Any = Annotated[
    JsonAttributes
    | VariantAttributes
    | TextAttributes
    | RawAttributes
    | AvroAttributes
    | ProtobufAttributes
    | JsonSchemaAttributes,
    Field(discriminator="type"),
]


class _Variable:
    """``{{ env.NAME }}`` as a whole text: its value is looked up when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def deferred(self) -> dg.EnvVar:
        return dg.EnvVar(self._name)

    def __str__(self) -> str:
        raise InvalidOptionError(
            f"{{{{ env.{self._name} }}}} is a part of a text, but it is looked up when it is used, so that its value "
            "is shown nowhere",
            remedy=f"Put the whole text into the variable, and write {{{{ env.{self._name} }}}} alone; or write "
            f"{{{{ env('{self._name}') }}}} for a value that may be looked up when the code is loaded, and be shown.",
        )

    def __bool__(self) -> bool:
        # As in "env.A or 'b'".
        return bool(str(self))


class Variables:
    """The ``env`` of templates in attributes whose values are looked up when the code is loaded.

    That of Dagster gives nothing for a variable that is not set, which would be an attribute that was left out.
    """

    def __getattr__(self, name: str) -> Any:
        # Jinja looks for what is its own.
        if name.startswith(("jinja", "_")):
            raise AttributeError(name)
        return self(name)

    def __call__(self, name: str, *default: Any) -> Any:
        """The value of a variable.

        Raises:
            InvalidOptionError: it is not set, and there is no default.
        """
        value = os.environ.get(name, *default)
        if value is None and not default:
            raise InvalidOptionError(
                f"the variable {name} is not set",
                remedy=f"Set it where the code is loaded; or write {{{{ env('{name}', 'a default') }}}}.",
            )
        return value


class _Known:
    """``{{ env('NAME') }}``, as Dagster looks it up: text, whatever it looks like."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


class _Environment:
    """The ``env`` of templates in attributes whose values are looked up when they are used."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def __getattr__(self, name: str) -> _Variable:
        # Jinja looks for what is its own.
        if name.startswith(("jinja", "_")):
            raise AttributeError(name)
        return _Variable(name)

    def __call__(self, name: str, *default: str) -> _Known:
        return _Known(str(self._usual(name, *default)))


def deferred_text(context: dg.ResolutionContext, value: Any) -> Any:
    """The value, or values, of an attribute; ``{{ env.NAME }}`` becomes ``EnvVar("NAME")``.

    Raises:
        dagster.components.resolved.errors.ResolutionException: a template that cannot be evaluated.
    """
    scope = {"env": _Environment(context.scope.get("env"))}
    return _resolved(context.with_scope(**scope), value)


def _resolved(context: dg.ResolutionContext, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _resolved(context.at_path(name), one) for name, one in value.items()}
    if isinstance(value, list):
        return [_resolved(context.at_path(place), one) for place, one in enumerate(value)]
    # Dagster takes text that looks like a number for one, where there is no template, too.
    if not isinstance(value, str) or not re.search(r"{[{%]", value):
        return value
    found = context.resolve_value(value, as_type=object)
    if isinstance(found, _Variable):
        return found.deferred()
    return str(found) if isinstance(found, _Known) else found


def resolve_connection(context: dg.ResolutionContext, value: Any) -> StreamConnection | StreamUrl:
    """The connection, or a URL without streams.

    Raises:
        InvalidOptionError: a URL in a variable.
        InvalidUrlError: no URL.
    """
    if isinstance(value, BaseModel):
        given = deferred_text(context, value.model_dump(exclude_unset=True))
        return CONNECTIONS[given.pop("type")](**given)
    url = deferred_text(context, value)
    if isinstance(url, StreamConnection):
        return url
    if isinstance(url, dg.EnvVar):
        raise InvalidOptionError(
            f"the connection is a URL in the variable {url.env_var_name}, to which the names of streams cannot be "
            "added before it is used",
            remedy="Write it like {type: kafka, bootstrap_servers: '{{ env.KAFKA }}'}; or write "
            f"{{{{ env('{url.env_var_name}') }}}} for a URL that may be shown.",
        )
    return StreamUrl.parse(f"{str(url).rstrip('/')}/" if "://" in str(url) else str(url))


def resolve_lake(context: dg.ResolutionContext, value: Any) -> DeltaLake | None:
    """The place of the tables."""
    if isinstance(value, BaseModel):
        return DeltaLake(**deferred_text(context, value.model_dump(exclude_unset=True)))
    found = None if value is None else deferred_text(context, value)
    if isinstance(found, str):
        return DeltaLake(root=found)
    return found


def resolve_catalog(context: dg.ResolutionContext, value: Any) -> TableCatalog | None:
    """The catalog that names the tables."""
    if not isinstance(value, BaseModel):
        return value  # type: ignore[no-any-return]
    given = deferred_text(context, value.model_dump(exclude_unset=True))
    return _CATALOGS[given.pop("type")](**given)


def resolve_spark(context: dg.ResolutionContext, value: Any) -> Any:
    """The resource with a session, or the key of one."""
    if isinstance(value, BaseModel):
        return SparkSessionResource(**deferred_text(context, value.model_dump(exclude_unset=True)))
    return value


def resolve_decoder(context: dg.ResolutionContext, value: Any) -> Decoder | None:
    """The decoder, or the one that is referred to.

    Raises:
        InvalidOptionError: what is referred to is none.
    """
    if isinstance(value, BaseModel):
        return _made_decoder(context, value.model_dump(exclude_unset=True, by_alias=True))
    if not isinstance(value, str):
        return value  # type: ignore[no-any-return]
    found: Any = referred(context, value, option="decode")
    if isinstance(found, type) or not callable(getattr(found, "decode", None)):
        raise InvalidOptionError(
            f"decode={value!r} is a {type(found).__name__}, and no decoder",
            remedy="Refer to an object that can decode(payloads, schema), like Json('id BIGINT').",
        )
    return found  # type: ignore[no-any-return]


def _made_decoder(context: dg.ResolutionContext, given: dict[str, Any]) -> Decoder:
    if given.get("registry") is not None:
        given["registry"] = SchemaRegistry(**deferred_text(context, given["registry"]))
    if given.get("schema_file") is not None:
        here = dg.ComponentLoadContext.from_resolution_context(context).path
        given["schema_file"] = here / given["schema_file"]
    if isinstance(given.get("key"), dict):
        given["key"] = _made_decoder(context, given["key"])
    decoder: Decoder = _DECODERS[given.pop("type")](**given)
    return decoder


def resolve_transform(context: dg.ResolutionContext, value: Any) -> Any:
    """The function that is referred to.

    Raises:
        InvalidOptionError: what is referred to is none.
    """
    found = referred(context, value, option="transform") if isinstance(value, str) else value
    if found is not None and not callable(found):
        raise InvalidOptionError(
            f"transform={value!r} is a {type(found).__name__}, and cannot be called",
            remedy="Refer to a function that takes the rows and returns them.",
        )
    return found


def resolve_translator(context: dg.ResolutionContext, value: Any) -> StreamTranslator | None:
    """The translator that is referred to, or one of the class.

    Raises:
        InvalidOptionError: what is referred to is none.
    """
    found = referred(context, value, option="translator") if isinstance(value, str) else value
    found = found() if isinstance(found, type) else found
    if found is not None and not isinstance(found, StreamTranslator):
        raise InvalidOptionError(
            f"translator={value!r} is a {type(found).__name__}",
            remedy="Refer to a class that inherits from StreamTranslator, or to an object of one.",
        )
    return found


def referred(context: dg.ResolutionContext, path: str, *, option: str) -> Any:
    """What ``module.name`` refers to; with a dot before it, in the folder of the ``defs.yaml``.

    Args:
        context: of the attribute.
        path: like ``.transforms.orders``.
        option: the attribute.

    Raises:
        InvalidOptionError: it is not there.
    """
    here = dg.ComponentLoadContext.from_resolution_context(context) if path.startswith(".") else None
    whole = f"{here.defs_relative_module_name(here.path)}{path}" if here else path
    module_name, _, name = whole.rpartition(".")
    remedy = "Write it like my_project.transforms.orders; or .transforms.orders for a module beside the defs.yaml."
    try:
        module = import_module(module_name) if module_name else None
    except ModuleNotFoundError as error:
        # What the module itself imports is told as it is.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidOptionError(f"{option}={path!r}: there is no module {module_name!r}", remedy=remedy) from None
    if module is None:
        raise InvalidOptionError(f"{option}={path!r} names no module", remedy=remedy)
    if not hasattr(module, name):
        raise InvalidOptionError(f"{option}={path!r}: the module {module_name!r} has no {name!r}", remedy=remedy)
    return getattr(module, name)
