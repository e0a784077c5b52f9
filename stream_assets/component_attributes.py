"""How the attributes of a ``defs.yaml`` become what ``stream_asset`` takes: connections, decoders, references.

The attributes are made from the declarations of the objects that they describe, with the descriptions there.
"""

# No annotations from the future: Dagster reads those of the classes that it makes a schema of.
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, create_model

from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_assets.catalogs import HiveMetastore, UnityCatalog
from stream_assets.connections import KafkaCluster, RedisServer, StreamConnection, StreamFile
from stream_assets.delta_lake import DeltaLake
from stream_assets.formats import FORMATS
from stream_assets.translator import StreamTranslator
from stream_consumers.errors import InvalidOptionError
from stream_consumers.urls import StreamUrl

CONNECTIONS: dict[str, type[Any]] = {"kafka": KafkaCluster, "redis": RedisServer, "file": StreamFile}
CATALOGS: dict[str, type[Any]] = {"unity": UnityCatalog, "hive": HiveMetastore}


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


class _Attributes(dg.Model):
    # A value may be a secret.
    model_config = ConfigDict(hide_input_in_errors=True)


def attributes_of(
    kind: type[Any], *, type_name: str | None = None, names: Collection[str] | None = None, **types: Any
) -> type[BaseModel]:
    """The attributes of an object: its fields, with their descriptions; each may be a template.

    The values are checked by the object that is made of them. One whose type YAML cannot express is a template, like
    ``{{ RetryPolicy(max_retries=3) }}``.

    Args:
        kind: of the object, a model or a dataclass that describes its fields in its docstring.
        type_name: the value of the attribute ``type`` that stands for it, where it is one of several.
        names: of the fields that are attributes; all by default.
        types: of fields whose own types do not say what YAML has.
    """
    declared: dict[str, tuple[Any, bool, str | None]] = {}
    # Without what is annotated beside the types, which is for the object.
    hints = get_type_hints(kind, localns={"Decoder": Decoder, "Mapping": Mapping})
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            declared[name] = (hints[name], field.is_required(), field.description)
    else:
        texts = _described(kind)
        for one in (field for field in fields(kind) if field.init):
            is_required = one.default is MISSING and one.default_factory is MISSING
            declared[one.name] = (hints[one.name], is_required, texts[one.name])
    own: dict[str, Any] = {} if type_name is None else {"type": (Literal[type_name], ...)}
    for name in declared if names is None else names:
        hint, is_required, text = declared[name]
        default = ... if is_required or (type_name, name) == ("json", "schema") else None
        # Some names are taken by Pydantic.
        taken = hasattr(BaseModel, name)
        own[f"{name}_" if taken else name] = (
            types.get(name, _yaml_type(hint)),
            Field(default=default, description=text, alias=name if taken else None),
        )
    # The text after it is for Python.
    summary = (kind.__doc__ or "").partition("\n")[0]
    return create_model(f"{(type_name or '').title()}{kind.__name__}", __base__=_Attributes, __doc__=summary, **own)


def one_of(kinds: Mapping[str, type[Any]]) -> Any:
    """The attributes of an object whose ``type`` says which one it is."""
    models = tuple(attributes_of(kind, type_name=name) for name, kind in kinds.items())
    return Annotated[Union[models], Field(discriminator="type")]  # noqa: UP007 - made of a tuple


def _described(kind: type[Any]) -> dict[str, str]:
    """What the docstring of a dataclass says of each field."""
    _, _, about = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    about = about.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", about, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", f"{text[0].upper()}{text[1:]}") for name, text in found}


def _yaml_type(hint: Any) -> Any:
    parts = {part for part in get_args(hint) or (hint,) if part is not type(None)}
    if get_origin(hint) in (tuple, Mapping, dict) or parts <= {bool, int, float, str}:
        # Pydantic checks the text of a template against each of several types.
        return (list[str] if get_origin(hint) is tuple else hint) | str | None
    return str | None


def _decoders(**types: Any) -> Any:
    stored = attributes_of(SchemaRegistry, options=dict[str, Any]) | str | None
    models = tuple(
        attributes_of(kind, type_name=name, names=(*names, *types), registry=stored, **types)
        for name, (kind, names) in FORMATS.items()
    )
    return Annotated[Union[models], Field(discriminator="type")]  # noqa: UP007 - made of a tuple


DECODER_TYPE: Any = _decoders(key=str | _decoders() | None, headers=str | dict[str, str] | None)


class Variables:
    """The ``env`` of templates, whose values are looked up when the code is loaded.

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


def resolved(context: dg.ResolutionContext, value: Any) -> Any:
    """The value, or values, of an attribute; its templates know also ``EnvVar`` and ``RetryPolicy`` of Dagster.

    Raises:
        dagster.components.resolved.errors.ResolutionException: a template that cannot be evaluated.
    """
    if isinstance(value, dict):
        return {name: resolved(context.at_path(name), one) for name, one in value.items()}
    if isinstance(value, list):
        return [resolved(context.at_path(place), one) for place, one in enumerate(value)]
    # Dagster takes text that looks like a number for one, where there is no template, too.
    if not isinstance(value, str) or not re.search(r"{[{%]", value):
        return value
    scope = {"EnvVar": dg.EnvVar, "RetryPolicy": dg.RetryPolicy}
    return context.with_scope(**scope).resolve_value(value, as_type=object)


def made(context: dg.ResolutionContext, value: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """The object that attributes describe, of the class that their ``type`` names; any other value as it is resolved.

    Args:
        context: of the attribute.
        value: the attributes, a template, or ``None``.
        kinds: the classes; of one class without a ``type`` the name is empty.
    """
    if not isinstance(value, BaseModel):
        return resolved(context, value)
    given = resolved(context, value.model_dump(exclude_unset=True))
    return kinds[given.pop("type", "")](**given)


def resolve_options(context: dg.ResolutionContext, value: Any) -> Any:
    """The attributes of an object of options that are given, by their names."""
    return resolved(context, value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value)


def resolve_connection(context: dg.ResolutionContext, value: Any) -> StreamConnection | StreamUrl:
    """The connection, or a URL without streams.

    Raises:
        InvalidOptionError: a URL in a variable.
        InvalidUrlError: no URL.
    """
    url = made(context, value, CONNECTIONS)
    if isinstance(url, StreamConnection):
        return url
    if isinstance(url, dg.EnvVar):
        raise InvalidOptionError(
            f"the connection is a URL in the variable {url.env_var_name}, to which the names of streams cannot be "
            "added before it is used",
            remedy="Write it like {type: kafka, bootstrap_servers: '{{ EnvVar(\"KAFKA\") }}'}; or write "
            f"{{{{ env.{url.env_var_name} }}}} for a URL that may be shown.",
        )
    return StreamUrl.parse(f"{str(url).rstrip('/')}/" if "://" in str(url) else str(url))


def resolve_lake(context: dg.ResolutionContext, value: Any) -> DeltaLake | None:
    """The place of the tables."""
    found = made(context, value, {"": DeltaLake})
    return DeltaLake(root=found) if isinstance(found, str) else found


def resolve_decoder(context: dg.ResolutionContext, value: Any) -> Decoder | None:
    """The decoder, or the one that is referred to."""
    if isinstance(value, BaseModel):
        return _made_decoder(context, resolved(context, value.model_dump(exclude_unset=True, by_alias=True)))

    def is_decoder(found: Any) -> bool:
        return not isinstance(found, type) and callable(getattr(found, "decode", None))

    remedy = "Refer to an object that can decode(payloads, schema), like Json('id BIGINT')."
    decoder: Decoder | None = _referred(context, value, "decode", is_decoder, remedy)
    return decoder


def _made_decoder(context: dg.ResolutionContext, given: dict[str, Any]) -> Decoder:
    if given.get("registry") is not None:
        given["registry"] = SchemaRegistry(**given["registry"])
    if given.get("schema_file") is not None:
        here = dg.ComponentLoadContext.from_resolution_context(context).path
        given["schema_file"] = here / given["schema_file"]
    if isinstance(given.get("key"), dict):
        given["key"] = _made_decoder(context, given["key"])
    kind, _ = FORMATS[given.pop("type")]
    decoder: Decoder = kind(**given)
    return decoder


def resolve_transform(context: dg.ResolutionContext, value: Any) -> Any:
    """The function that is referred to."""
    remedy = "Refer to a function that takes the rows and returns them."
    return _referred(context, value, "transform", callable, remedy)


def resolve_translator(context: dg.ResolutionContext, value: Any) -> StreamTranslator | None:
    """The translator that is referred to, or one of the class."""

    def is_translator(found: Any) -> bool:
        return isinstance(found, StreamTranslator) or (isinstance(found, type) and issubclass(found, StreamTranslator))

    remedy = "Refer to a class that inherits from StreamTranslator, or to an object of one."
    found = _referred(context, value, "translator", is_translator, remedy)
    translator: StreamTranslator | None = found() if isinstance(found, type) else found
    return translator


def _referred(
    context: dg.ResolutionContext, value: Any, option: str, is_right: Callable[[Any], bool], remedy: str
) -> Any:
    """What an attribute refers to, if it is what the option takes.

    Raises:
        InvalidOptionError: it is something else, or it is not there.
    """
    given = resolved(context, value)
    found = referred(context, given, option=option) if isinstance(given, str) else given
    if found is not None and not is_right(found):
        raise InvalidOptionError(f"{option}={value!r} is a {type(found).__name__}", remedy=remedy)
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
