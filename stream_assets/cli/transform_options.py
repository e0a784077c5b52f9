"""How the commands that write rows are told to make them: decoder, transform, and limits of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import gathered, import_from_here
from stream_assets.cli.schema_options import FORMATS, SchemaPlace, schema_options
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import Limits, OnBadRows, SchemaChanges, choice, choose_fields

if TYPE_CHECKING:
    from spark_jobs.batches.ingestion import Transform
    from spark_jobs.decoding.decoders import Decoder
    from spark_jobs.ledger.ledger import LedgerState
    from spark_jobs.writing.layout import TableLayout


@dataclass(frozen=True, slots=True)
class RowMaker:
    """How payloads become rows.

    Args:
        decoder: payloads to columns.
        transform: those to the rows of the table; ``None`` for all of them as they are.
        schema_changes: what becomes of columns that the table does not have.
        on_bad_rows: what becomes of rows that the table does not take, or that the transform fails for.
    """

    decoder: Decoder
    transform: Transform | None
    schema_changes: SchemaChanges = SchemaChanges.FAIL
    on_bad_rows: OnBadRows = OnBadRows.FAIL

    def __post_init__(self) -> None:
        choose_fields(self, schema_changes=SchemaChanges, on_bad_rows=OnBadRows)

    @property
    def options(self) -> dict[str, Any]:
        """What :class:`spark_jobs.batches.ingestion.Ingestion` takes."""
        return {field.name: getattr(self, field.name) for field in fields(RowMaker)}

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
    decode: str | None,
    schema: str | None,
    transform: str | None,
    schema_changes: str | None,
    place_of_schema: SchemaPlace | None = None,
    json_mode: str | None = None,
    on_bad_rows: str | None = None,
) -> RowMaker:
    """The decoder and the transform that the options name; what they leave open is as an asset says.

    Raises:
        InvalidOptionError: options that do not go together, a name that cannot be imported, or an asset whose function
            takes more than the rows.
    """
    from spark_jobs.decoding.decoders import Raw, Text
    from spark_jobs.decoding.json_decoder import Json, JsonMode

    if (decode == "json") != (schema is not None):
        raise InvalidOptionError(
            "--decode json and --schema belong together",
            remedy="Give both, or neither; --decode variant takes JSON without a schema.",
        )
    if json_mode is not None and schema is None:
        raise InvalidOptionError("--json-mode is for --decode json", remedy="Leave it out.")
    stored = (place_of_schema or SchemaPlace()).decoder(decode)
    decoder: Decoder = Text() if decode == "text" else Json() if decode == "variant" else stored or Raw()
    if schema is not None:
        decoder = Json(schema, mode=json_mode or JsonMode.LENIENT)
    chosen = SchemaChanges(schema_changes or SchemaChanges.FAIL)
    of_bad_rows = choice(OnBadRows, on_bad_rows or "fail", option="--on-bad-rows")
    if transform is None:
        return RowMaker(decoder, None, chosen, of_bad_rows)
    named = _imported(transform)
    declared = getattr(named, "ingestion", None)
    if declared is None:
        if not callable(named):
            raise InvalidOptionError(f"{transform} is no function", remedy="Name a function, or a stream asset.")
        return RowMaker(decoder, named, chosen, of_bad_rows)
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
    return RowMaker(
        declared.decoder,
        declared.transform,
        chosen if schema_changes else declared.schema_changes,
        of_bad_rows if on_bad_rows else declared.on_bad_rows,
    )


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
    click.option("--decode", type=click.Choice(["raw", "text", "json", "variant", *FORMATS]), help="raw by default."),
    click.option("--schema", help="Spark DDL of the columns, for --decode json: 'id BIGINT, user STRING'."),
    # The choices are those of JsonMode, which is not imported until a command needs it.
    click.option(
        "--json-mode",
        type=click.Choice(["lenient", "strict"]),
        help="Take what Spark's from_json takes, the default, or only values that are written as their types are.",
    ),
    schema_options,
    click.option(
        "--transform",
        metavar="MODULE:NAME",
        help="A function from DataFrame to DataFrame, or a stream asset, whose decoder is used as well.",
    ),
    click.option(
        "--schema-changes",
        type=click.Choice(["fail", "add_columns", "rescue"]),
        help="What becomes of columns that the table does not have: fail by default.",
    ),
    click.option(
        "--on-bad-rows",
        type=click.Choice(["fail", "dead_letter"]),
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
batches_option = click.option("--max-batches", type=click.IntRange(min=1), help="Stop after so many.")


def make_layout(
    partition_by: tuple[str, ...],
    cluster_by: tuple[str, ...],
    table_property: tuple[str, ...],
    catalog_table: str | None,
    generated_column: tuple[str, ...],
    table_comment: str | None,
) -> TableLayout:
    """How a table that is not there yet is made.

    Raises:
        InvalidOptionError: options that make no sense.
    """
    from spark_jobs.writing.layout import TableLayout

    return TableLayout(
        partition_by=partition_by,
        cluster_by=cluster_by,
        properties=_named("--table-property", table_property, "NAME=VALUE, like delta.enableChangeDataFeed=true"),
        catalog_table=catalog_table,
        generated_columns=_named(
            "--generated-column", generated_column, "NAME=EXPRESSION, like day=CAST(_timestamp AS DATE)"
        ),
        comment=table_comment,
    )


def _named(option: str, texts: tuple[str, ...], example: str) -> dict[str, str]:
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise InvalidOptionError(f"{option} {wrong[0]!r} has no value", remedy=f"Write {example}.")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


layout_options = gathered(
    "layout",
    make_layout,
    click.option("--partition-by", multiple=True, metavar="COLUMN", help="Of a new table; may be given several times."),
    click.option("--cluster-by", multiple=True, metavar="COLUMN", help="Of a new table; may be given several times."),
    click.option("--table-property", multiple=True, metavar="NAME=VALUE", help="Of a new table; several times, too."),
    click.option("--catalog-table", metavar="NAME", help="A name that Spark's catalog gets for the table."),
    click.option(
        "--generated-column", multiple=True, metavar="NAME=EXPRESSION", help="That Delta computes, of a new table."
    ),
    click.option("--table-comment", metavar="TEXT", help="What a new table is, in the table itself."),
)
