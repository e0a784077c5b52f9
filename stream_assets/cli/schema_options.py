"""How the commands that write rows are told where the schema of the payloads is: in a registry, or in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import client_option, gathered
from stream_consumers.client_config import ClientConfig
from stream_consumers.errors import InvalidOptionError

if TYPE_CHECKING:
    from spark_jobs.decoding.decoders import Decoder

FORMATS = ("avro", "protobuf", "json-schema")


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """Where a schema is.

    Args:
        schema_registry: the URL of the registry.
        registry_options: of its client; shown nowhere.
        subject: in the registry.
        schema_file: a file with the schema.
        message: of Protobuf.
    """

    schema_registry: str | None = None
    registry_options: ClientConfig = field(default_factory=dict, repr=False)
    subject: str | None = None
    schema_file: str | None = None
    message: str | None = None

    def decoder(self, name: str | None) -> Decoder | None:
        """The decoder of a format; ``None`` for one that needs no schema of this kind.

        Args:
            name: what ``--decode`` says.

        Raises:
            InvalidOptionError: options that do not go together.
            SchemaMismatchError: the file holds no schema.
            MissingDependencyError: the libraries of the format are not installed.
        """
        for option, value in (("schema-registry", self.schema_registry), ("schema-file", self.schema_file)):
            if value is not None and name not in FORMATS:
                raise InvalidOptionError(
                    f"--{option} is for --decode {', '.join(FORMATS)}", remedy="Leave it out, or name the format."
                )
        for option, is_given in (("subject", bool(self.subject)), ("registry-option", bool(self.registry_options))):
            if is_given and self.schema_registry is None:
                raise InvalidOptionError(
                    f"--{option} is for a schema registry, and none is given", remedy="Give --schema-registry, too."
                )
        if self.message is not None and name != "protobuf":
            raise InvalidOptionError("--message is for --decode protobuf", remedy="Leave it out.")
        if name not in FORMATS:
            return None
        if self.schema_file is None and self.subject is None:
            raise InvalidOptionError(
                f"--decode {name} needs a schema", remedy="Give --schema-registry and --subject; or --schema-file."
            )
        return self._made(name)

    def _made(self, name: str) -> Decoder:
        from spark_jobs.decoding.avro import Avro
        from spark_jobs.decoding.json_schema import JsonSchema
        from spark_jobs.decoding.protobuf import Protobuf
        from spark_jobs.decoding.schema_registry import SchemaRegistry

        url, options = self.schema_registry, self.registry_options
        place: dict[str, Any] = {
            "schema_file": self.schema_file,
            "subject": self.subject,
            "registry": None if url is None else SchemaRegistry(url, options=options),
        }
        if name == "protobuf":
            return Protobuf(**place, message=self.message)
        return Avro(**place) if name == "avro" else JsonSchema(**place)


schema_options = gathered(
    "place_of_schema",
    SchemaPlace,
    click.option("--schema-registry", metavar="URL", help="Of a schema registry; payloads begin with schema ids then."),
    client_option("--registry-option", "registry_options", of="schema registry's"),
    click.option("--subject", help="Whose newest schema has the columns, like orders-value."),
    click.option("--schema-file", metavar="PATH", help="Instead: .avsc, .proto, a descriptor set, or a JSON Schema."),
    click.option("--message", help="The full name of a Protobuf message; the first one of the schema by default."),
)
