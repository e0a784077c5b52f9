"""The options of the commands that write rows: their decoder and transform, limits, and the layout of a new table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import Place, client_option, gathered, import_from_here
from stream_consumers.client_config import ClientConfig
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import ErrorPolicy, Limits, OnBadRows, SchemaChanges

if TYPE_CHECKING:
    from spark_jobs.batches.ingestion import Ingestion, Transform
    from spark_jobs.decoding.decoders import Decoder
    from spark_jobs.ledger.ledger import LedgerState
    from spark_jobs.writing.layout import TableLayout

_ARGUMENTS = {"json_mode": "mode", "schema_registry": "registry"}
"""The arguments of decoders that are not called like their options."""


def make_decoder(decode: str, registry_options: ClientConfig, given: Mapping[str, str]) -> Decoder:
    """The decoder that the options describe.

    Args:
        decode: the format.
        registry_options: of the client of the schema registry.
        given: the other options that were given, by their names.

    Raises:
        InvalidOptionError: options that do not go together.
        SchemaMismatchError: the file holds no schema.
        MissingDependencyError: the libraries of the format are not installed.
    """
    from spark_jobs.decoding.schema_registry import SchemaRegistry
    from stream_assets.formats import FORMATS

    kind, names = FORMATS[decode.replace("-", "_")]
    arguments: dict[str, Any] = {_ARGUMENTS.get(option, option): value for option, value in given.items()}
    for option, name in zip(given, arguments, strict=True):
        if name not in names:
            formats = ", ".join(form.replace("_", "-") for form, (_, known) in FORMATS.items() if name in known)
            raise InvalidOptionError(f"--{option.replace('_', '-')} is for --decode {formats}", remedy="Leave it out.")
    if decode == "json" and "schema" not in given:
        raise InvalidOptionError(
            "--decode json needs --schema", remedy="Give it; or take JSON without a schema: --decode variant."
        )
    if "registry" not in arguments and ("subject" in given or registry_options):
        raise InvalidOptionError(
            "--subject and --registry-option are for a schema registry", remedy="Give --schema-registry, too."
        )
    if "subject" in names and not {"subject", "schema_file"} & given.keys():
        raise InvalidOptionError(
            f"--decode {decode} needs a schema", remedy="Give --schema-registry and --subject; or --schema-file."
        )
    if "registry" in arguments:
        arguments["registry"] = SchemaRegistry(arguments["registry"], options=registry_options)
    decoder: Decoder = kind(**arguments)
    return decoder


@dataclass(frozen=True, slots=True)
class RowMaker:
    """How payloads become rows.

    Args:
        decoder: turns payloads into columns.
        transform: turns those into the rows of the table; ``None`` keeps all of them as they are.
        errors: what to do about bad rows and new columns.
    """

    decoder: Decoder
    transform: Transform | None
    errors: ErrorPolicy

    def ingestion(self, place: Place, *, on_data_loss: str = "error", **settings: Any) -> Ingestion:
        """The ingestion whose rows are made like this.

        Args:
            place: what is read, and where to it goes.
            on_data_loss: what to do about messages that are gone.
            settings: what else is known of it.
        """
        errors = replace(self.errors, on_data_loss=on_data_loss)
        return place.ingestion(decoder=self.decoder, transform=self.transform, errors=errors, **settings)

    def check(self, state: LedgerState) -> None:
        """Refuse rows of no transform next to, or in the place of, rows of one.

        Raises:
            InvalidOptionError: naming the transform of the table.
        """
        made_by = state.newest.transform if state.newest else ""
        if made_by and self.transform is None:
            raise InvalidOptionError(
                f"the rows of the table were made by the transform {made_by!r}, and none is given",
                remedy=f"Name it: --transform MODULE:{made_by}.",
            )


def make_rows(
    *,
    decode: str | None = None,
    registry_option: ClientConfig | None = None,
    transform: str | None = None,
    **options: str | None,
) -> RowMaker:
    """The decoder and the transform that the options name; what they leave open is as an asset says.

    Args:
        decode: the format; raw by default.
        registry_option: of the client of the schema registry.
        transform: the path of a function or a stream asset.
        options: others of an :class:`ErrorPolicy`, and the arguments of the decoder.

    Raises:
        InvalidOptionError: options that do not go together, a name that cannot be imported, or an asset whose function
            takes more than the rows.
    """
    # A variable of a script that is not set makes an empty value.
    given = {name: value for name, value in options.items() if value}
    errors: dict[str, Any] = {name: given.pop(name) for name in ("schema_changes", "on_bad_rows") if name in given}
    decoder = make_decoder(decode or "raw", registry_option or {}, given)
    if transform is None:
        return RowMaker(decoder, None, ErrorPolicy(**errors))
    named = _imported(transform)
    declared = getattr(named, "declared", None)
    if declared is None:
        if not callable(named):
            raise InvalidOptionError(f"{transform} is no function", remedy="Name a function, or a stream asset.")
        return RowMaker(decoder, named, ErrorPolicy(**errors))
    if decode is not None:
        raise InvalidOptionError(
            f"{transform} is a stream asset with a decoder of its own", remedy="Leave --decode and --schema out."
        )
    if declared.transform is None:
        # Without it the rows would be written as they were decoded.
        raise InvalidOptionError(
            f"{transform} needs a run of Dagster: its function takes a context, resources or a StreamRun",
            remedy="Run it there, in its job or its replay job; or name a function that takes only the rows.",
        )
    return RowMaker(declared.decode, declared.transform, replace(declared.errors, **errors))


def _imported(path: str) -> object:
    module, _, name = path.partition(":")
    # Also later: a function of that module may be called while rows are made.
    import_from_here()
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOptionError(
            f"--transform {path} cannot be imported: {error}",
            remedy="Write MODULE:NAME, like my_definitions:orders, and run in the folder of the module.",
        ) from error
    except Exception as error:  # the user's module may raise anything
        raise InvalidOptionError(
            f"--transform {path}: its module raised {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            remedy="Correct it. There is no Spark session yet while it is imported: make UDFs inside the transform.",
        ) from error


row_options = gathered(
    "maker",
    make_rows,
    click.option(
        "--decode",
        type=click.Choice(["raw", "text", "json", "variant", "avro", "protobuf", "json-schema"]),
        help="The format; raw by default.",
    ),
    click.option("--schema", help="Spark DDL of the columns, for --decode json: 'id BIGINT, user STRING'."),
    # The choices are those of JsonMode, which is not imported until a command needs it.
    click.option(
        "--json-mode",
        type=click.Choice(["lenient", "strict"]),
        help="Take values that are written in another way than their types, the default, or refuse them.",
    ),
    click.option("--schema-registry", metavar="URL", help="Of a schema registry; payloads begin with schema ids then."),
    client_option("--registry-option", of="schema registry's"),
    click.option("--subject", help="Whose newest schema has the columns, like orders-value."),
    click.option("--schema-file", metavar="PATH", help="Instead: .avsc, .proto, a descriptor set, or a JSON Schema."),
    click.option("--message", help="The full name of a Protobuf message; the first one of the schema by default."),
    click.option(
        "--transform",
        metavar="MODULE:NAME",
        help="A function from DataFrame to DataFrame, or a stream asset, whose decoder is used as well.",
    ),
    click.option(
        "--schema-changes",
        type=click.Choice([change.value for change in SchemaChanges]),
        help="What becomes of columns that the table does not have: fail by default.",
    ),
    click.option(
        "--on-bad-rows",
        type=click.Choice([choice.value for choice in OnBadRows]),
        help="Rows that break a constraint of the table, or that the transform fails for: stop, or make dead letters "
        "of their messages. By default as the stream asset says, or fail.",
    ),
)
limit_options = gathered(
    "limits",
    Limits().override,
    click.option("--max-records", type=click.IntRange(min=1), help="The most messages in a micro-batch."),
    click.option("--max-bytes", type=click.IntRange(min=1), help="The most payload bytes in a micro-batch."),
)
batches_option = click.option("--max-batches", type=click.IntRange(min=1), help="Stop after this many micro-batches.")


def _pairs(context: click.Context, option: Any, texts: Sequence[str]) -> dict[str, str]:
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise InvalidOptionError(
            f"{option.opts[0]} {wrong[0]!r} has no value", remedy=f"Write {option.make_metavar()}."
        )
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _make_layout(**layout: Any) -> TableLayout:
    from spark_jobs.writing.layout import TableLayout

    return TableLayout(**layout)


layout_options = gathered(
    "layout",
    _make_layout,
    click.option("--partition-by", multiple=True, metavar="COLUMN", help="Of a new table; may be given several times."),
    click.option("--cluster-by", multiple=True, metavar="COLUMN", help="Of a new table; may be given several times."),
    click.option(
        "--table-property",
        "properties",
        multiple=True,
        callback=_pairs,
        metavar="NAME=VALUE",
        help="Of a new table, like delta.enableChangeDataFeed=true; may be given several times.",
    ),
    click.option("--catalog-table", metavar="NAME", help="A name that Spark's catalog gets for the table."),
    click.option(
        "--generated-column",
        "generated_columns",
        multiple=True,
        callback=_pairs,
        metavar="NAME=EXPRESSION",
        help="That Delta computes, of a new table, like day=CAST(_timestamp AS DATE).",
    ),
    click.option("--table-comment", "comment", metavar="TEXT", help="What a new table is, in the table itself."),
)
