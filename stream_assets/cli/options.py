"""Options that several commands share, and the objects that the commands build from them."""

from __future__ import annotations

import functools
import logging
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import click

from stream_assets.cli.output import PrintableFormatter, inform, print_waiting
from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig, Deferred, Scalar, parse_client_option, resolve
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError, StreamAssetsError
from stream_consumers.kafka.client import TOKEN_PROVIDER
from stream_consumers.options import ConsumerMode, ErrorPolicy, Limits, OnBadRows, SchemaChanges
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.batches.ingestion import Ingestion, Transform
    from spark_jobs.decoding.decoders import Decoder
    from spark_jobs.ledger.ledger import LedgerState
    from spark_jobs.writing.keyed import Keys
    from spark_jobs.writing.layout import TableLayout
    from stream_consumers.batches import BatchSource, Range
    from stream_consumers.redis.claims import RedisClaims

Command = Callable[..., Any]
Option = Callable[[Command], Command]
MODES = [mode.value for mode in ConsumerMode]


_SETTING = re.compile(r"\b([a-z]+(?:_[a-z]+)+)=('[^']*'|\w+)")


def as_options(text: str, group: click.Group) -> str:
    """Write the settings in a text, like ``on_data_loss='record'``, as the options of the commands of a group.

    A setting that is not an option of any command does not change.

    Example:
        >>> @click.command()
        ... @click.option("--on-data-loss")
        ... @click.option("--single-writer", is_flag=True)
        ... def ingest(): pass
        >>> group = click.Group(commands=[ingest])
        >>> as_options("Set on_data_loss='record', or single_writer=True, or max_age=3.", group)
        'Set --on-data-loss record, or --single-writer, or max_age=3.'
    """
    options = _options(group)

    def written(found: re.Match[str]) -> str:
        option = options.get(found[1])
        if option is None:
            return found[0]
        return option.opts[0] if option.is_flag else f"{option.opts[0]} {found[2].strip(chr(39))}"

    return _SETTING.sub(written, text)


def _options(group: click.Group) -> dict[str, click.Option]:
    found: dict[str, click.Option] = {}
    for command in group.commands.values():
        if isinstance(command, click.Group):
            found |= _options(command)
        found |= {str(p.name): p for p in command.params if isinstance(p, click.Option)}
    return found


class ReportingGroup(click.Group):
    """Commands whose errors of this project are one line on stderr, and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(PrintableFormatter())
        try:
            with _exit_on_sigterm():
                return super().invoke(ctx)
        except StreamAssetsError as error:
            text = str(error).removesuffix(error.remedy) + as_options(error.remedy, self)
            inform(f"error: {text}", style="red")
            sys.exit(1)
        except KeyboardInterrupt:
            # The exit code that shells use.
            sys.exit(128 + signal.SIGINT)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(0)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Close open resources at a SIGTERM, as at Ctrl-C, before the process ends."""
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def combine_options(name: str, make: Callable[..., Any], *options: Option) -> Option:
    """Combine options into one argument of a command.

    Args:
        name: the name of the argument.
        make: makes its value; the parameters have the names of the options.
        options: the options, in the order in which ``--help`` shows them.
    """

    def decorate(command: Command) -> Command:
        def run(**values: Any) -> Any:
            made = make(**{option: values.pop(option) for option in names})
            return command(**{name: made}, **values)

        decorated: Any = functools.update_wrapper(run, command)
        others = len(getattr(decorated, "__click_params__", ()))
        for option in reversed(options):
            decorated = option(decorated)
        names = [str(parameter.name) for parameter in decorated.__click_params__[others:]]
        return cast("Command", decorated)

    return decorate


def allow_local_import(path: str) -> None:
    """Allow imports from the working folder, after all others, unless the module of MODULE:NAME is installed.

    Imports stay allowed, because a function of that module may be called later.
    """
    module = path.partition(":")[0].partition(".")[0]
    is_installed = module in sys.modules or (module.isidentifier() and find_spec(module) is not None)
    if not is_installed and "" not in sys.path:
        sys.path.append("")


def _client_options(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> dict[str, Scalar | Deferred]:
    given = dict(parse_client_option(value) for value in values)
    if TOKEN_PROVIDER in given:
        allow_local_import(str(given[TOKEN_PROVIDER]))
    return given


def client_option(*names: str, of: str = "broker's") -> Option:
    """Return an option that configures the client of a broker."""
    return click.option(
        *(names or ("-X", "--client", "client")),
        multiple=True,
        metavar="NAME=VALUE",
        callback=_client_options,
        help=f"Set an option of the {of} client. NAME=env:VARIABLE keeps a secret in the environment.",
    )


def _storage_options(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    return {name: str(value) for name, value in resolve(dict(parse_client_option(value) for value in values)).items()}


storage_option = click.option(
    "--storage-option",
    "storage",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_storage_options,
    help="Set an option of the table's storage, such as AWS_ENDPOINT_URL=…. NAME=env:VARIABLE keeps a secret in the "
    "environment. Options that are not given are taken from the environment.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
group_option = click.option("--group", default="stream-assets", show_default=True, help="The consumer group.")
# The default is that of Ingestion, which is not imported until a command needs it.
retry_option = click.option(
    "--retry-seconds",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="For how long to retry after temporary errors, such as a broker that does not answer.",
)
data_loss_option = click.option(
    "--on-data-loss",
    type=click.Choice(["error", "record"]),
    default="error",
    show_default=True,
    help="If the stream dropped messages before they were read: stop, or record the exact range and continue.",
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A stream, the group that reads it, and the table that it is written into.

    Args:
        source: the stream URL.
        table: the Delta table, a path or URI.
        group: the consumer group.
        client: configuration of the broker's client; never shown.
        storage: options for the storage of the table; never shown.
    """

    source: str
    table: str
    group: str
    client: ClientConfig = field(repr=False)
    storage: Mapping[str, str] = field(repr=False)

    @property
    def url(self) -> StreamUrl:
        """The parsed stream URL."""
        return StreamUrl.parse(self.source)

    def span(self, part: Range | None) -> str | None:
        """Return a range as text for display."""
        return None if part is None else f"{self.shown(part.start)} to {self.shown(part.end)}"

    def shown(self, sequence: int | None) -> int | None:
        """Return a sequence for display: that of a Redis entry prints as its id."""
        return None if sequence is None else find_backend(self.url.protocol).shown_sequence(sequence)

    def stream(self, mode: ConsumerMode = ConsumerMode.RESUMABLE) -> StreamSource:
        """Return the stream as the group reads it in a mode."""
        return StreamSource(self.url, mode, self.client)

    def claims(self) -> RedisClaims:
        """Open the group, whose members claim entries; close it when done."""
        # Without a table, only the server is queried, which identifies streams by their keys.
        names = self.ingestion().epochs(self.url.required_streams()) if self.table else None
        return self.stream(ConsumerMode.LOAD_BALANCED).claims(self.group, names)

    @contextmanager
    def opened(self, mode: ConsumerMode) -> Iterator[tuple[BatchSource, RedisClaims | None]]:
        """Open the stream, and the claims of the group if its members may claim entries."""
        stream = self.stream(mode)
        with stream.open() as opened, self.claims() if stream.may_be_claimed else nullcontext() as claims:
            yield opened, claims

    def ingestion(self, **settings: Any) -> Ingestion:
        """Return the ingestion of the group into the table, with further settings."""
        from spark_jobs.batches.ingestion import Ingestion

        known = {"group": self.group, "table": self.table, "storage_options": self.storage}
        return Ingestion(**{**known, **settings})


def pipeline_options(group: Option = group_option) -> Option:
    """Return the options that make a :class:`Pipeline`."""
    return combine_options(
        "pipeline",
        Pipeline,
        click.option("--source", required=True, help="The stream URL."),
        click.option("--table", required=True, help="The Delta table, a path or URI."),
        group,
        client_option(),
        storage_option,
    )


def report_download(table: str = "") -> None:
    """Report that jars are downloaded first, because this takes a while."""
    from spark_jobs.jars import download_note
    from spark_jobs.table_location import is_s3

    if note := download_note(with_s3=is_s3(table)):
        print_waiting(note)


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """Which Spark a command will start, and whether no other driver writes the table meanwhile."""

    master: str
    remote: str | None = field(repr=False)
    in_process: bool = False
    single_writer: bool = False

    def session(self, table: str, storage: Mapping[str, str]) -> SparkSession:
        """Create the session, which takes several seconds; that of a server is released when the command ends.

        Args:
            table: the table that the command reads or writes.
            storage: options for the storage of the table.
        """
        from spark_jobs.session import SparkOptions, create_session
        from spark_jobs.spark_server.client import ServerSession

        if self.remote is None:
            report_download(table)
        session = create_session(
            SparkOptions(
                master=self.master,
                remote=self.remote,
                in_process=self.in_process,
                table=table,
                storage_options=storage,
            )
        )
        if isinstance(session, ServerSession):
            click.get_current_context().call_on_close(session.stop)
        return session


def _remote(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    return None if value is None else str(resolve(dict([parse_client_option(f"remote={value}")]))["remote"])


spark_options = combine_options(
    "spark",
    SparkSettings,
    click.option("--master", default="local[*]", show_default=True, help="The Spark master."),
    click.option(
        "--remote",
        callback=_remote,
        help="A Spark Connect address, sc://host:port, instead of --master. env:VARIABLE keeps an address with a token "
        "in the environment.",
    ),
    click.option(
        "--in-process",
        is_flag=True,
        help="Start a local Spark for this command only, instead of using the server that runs share.",
    ),
    click.option(
        "--single-writer",
        is_flag=True,
        help="You guarantee that no other Spark session writes the table meanwhile; required on storage that could "
        "lose commits.",
    ),
)


_ARGUMENTS = {"json_mode": "mode", "schema_registry": "registry"}
"""The arguments of decoders whose names differ from those of their options."""


def make_decoder(decode: str, registry_options: ClientConfig, given: Mapping[str, str]) -> Decoder:
    """Return the decoder that the options describe.

    Args:
        decode: the format.
        registry_options: options of the client of the schema registry.
        given: the other options that were given, by name.

    Raises:
        InvalidOptionError: the options cannot be combined.
        SchemaMismatchError: the file has no schema.
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
            "--decode json needs --schema", remedy="Add it; or decode JSON without a schema: --decode variant."
        )
    if "registry" not in arguments and ("subject" in given or registry_options):
        raise InvalidOptionError(
            "--subject and --registry-option are for a schema registry", remedy="Give --schema-registry, too."
        )
    if "subject" in names and not {"subject", "schema_file", "schema"} & given.keys():
        raise InvalidOptionError(
            f"--decode {decode} needs a schema", remedy="Give --schema-registry and --subject; or --schema-file."
        )
    if "registry" in arguments:
        arguments["registry"] = SchemaRegistry(arguments["registry"], options=registry_options)
    decoder: Decoder = kind(**arguments)
    return decoder


@dataclass(frozen=True, slots=True)
class RowConversion:
    """How payloads become rows.

    Args:
        decoder: turns payloads into columns.
        transform: turns the columns into the rows of the table; ``None`` writes them unchanged.
        errors: how to handle bad rows and new columns.
        keys: the key of a keyed table.
    """

    decoder: Decoder
    transform: Transform | None
    errors: ErrorPolicy
    keys: Keys | None = None

    def ingestion(self, pipeline: Pipeline, *, on_data_loss: str = "error", **settings: Any) -> Ingestion:
        """Return the ingestion of a pipeline with this conversion.

        Args:
            pipeline: the stream, the group and the table.
            on_data_loss: how to handle messages that were removed from the stream.
            settings: further settings of the ingestion.
        """
        errors = replace(self.errors, on_data_loss=on_data_loss)
        known = {"decoder": self.decoder, "transform": self.transform, "keys": self.keys}
        return pipeline.ingestion(errors=errors, **known, **settings)

    def check(self, state: LedgerState) -> None:
        """Refuse to add or replace rows without a transform in a table whose rows have one.

        Raises:
            InvalidOptionError: no transform is given; the error names that of the table.
        """
        made_by = state.newest.transform if state.newest else ""
        if made_by and self.transform is None:
            raise InvalidOptionError(
                f"the rows of the table were written with the transform {made_by!r}, and no transform is given",
                remedy=f"Name it: --transform {shlex.quote(f'MODULE:{made_by}')}.",
            )


def make_conversion(
    *,
    decode: str | None = None,
    registry_option: ClientConfig | None = None,
    transform: str | None = None,
    **options: str | None,
) -> RowConversion:
    """Build the conversion that the options name; a stream asset supplies the options that are left out.

    Args:
        decode: the format; raw by default.
        registry_option: options of the client of the schema registry.
        transform: the path of a function or a stream asset.
        options: fields of an :class:`ErrorPolicy`, and arguments of the decoder.

    Raises:
        InvalidOptionError: the options cannot be combined, a name cannot be imported, or the function of an asset takes
            more than the rows.
    """
    # An option may be empty because a variable of a script is not set.
    given = {name: value for name, value in options.items() if value}
    errors: dict[str, Any] = {name: given.pop(name) for name in ("schema_changes", "on_bad_rows") if name in given}
    keys = _make_keys(**{name: given.pop(name) for name in _KEY_OPTIONS if name in given})
    decoder = make_decoder(decode or "raw", registry_option or {}, given)
    if transform is None:
        return RowConversion(decoder, None, ErrorPolicy(**errors), keys)
    named = _imported(transform)
    declared = getattr(named, "declared", None)
    if declared is None:
        if not callable(named):
            raise InvalidOptionError(f"{transform} is not a function", remedy="Name a function, or a stream asset.")
        return RowConversion(decoder, named, ErrorPolicy(**errors), keys)
    if decode is not None or keys is not None:
        raise InvalidOptionError(
            f"{transform} is a stream asset, which has its own decoder and keys",
            remedy="Leave --decode, --schema and --keys out.",
        )
    if declared.transform is None:
        # Without the transform, the rows would be written as they were decoded.
        raise InvalidOptionError(
            f"{transform} needs a run of Dagster: its function takes a context, resources or a StreamRun",
            remedy="Run its job or its replay job in Dagster, or name a function that takes only the rows.",
        )
    return RowConversion(declared.decode, declared.transform, replace(declared.errors, **errors), declared.keys)


_EXPRESSIONS = ("sequence_by", "apply_as_deletes", "apply_as_truncates")
_KEY_OPTIONS = ("keys", *_EXPRESSIONS, "except_columns", "stored_as_scd_type")


def _make_keys(
    keys: str = "", except_columns: str = "", stored_as_scd_type: str = "", **expressions: str
) -> Keys | None:
    from spark_jobs.writing.keyed import Keys

    if not keys:
        others = {"except_columns": except_columns, "stored_as_scd_type": stored_as_scd_type, **expressions}
        for name in (name for name, value in others.items() if value):
            raise InvalidOptionError(
                f"--{name.replace('_', '-')} is for a keyed table, and --keys is missing",
                remedy="Name the columns of the key: --keys id.",
            )
        return None
    columns, left_out = ([one.strip() for one in text.split(",") if one.strip()] for text in (keys, except_columns))
    return Keys(columns, except_columns=left_out, stored_as_scd_type=int(stored_as_scd_type or 1), **expressions)


def _imported(path: str) -> object:
    from spark_jobs.redaction import redacted

    module, _, name = path.partition(":")
    allow_local_import(path)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOptionError(
            f"--transform {path} cannot be imported: {redacted(str(error))}",
            remedy="Write MODULE:NAME, like my_definitions:orders, and run in the folder of the module.",
        ) from error
    except Exception as error:  # the user's module may raise anything
        said = redacted(str(error)).partition("\n")[0]
        raise InvalidOptionError(
            f"--transform {path}: its module raised {type(error).__name__}: {said}",
            remedy="Correct it. No Spark session exists while it is imported: create UDFs inside the transform.",
        ) from error


row_options = combine_options(
    "conversion",
    make_conversion,
    click.option(
        "--decode",
        type=click.Choice(["raw", "text", "json", "variant", "avro", "protobuf", "json-schema", "debezium"]),
        help="The format of the payloads; raw by default.",
    ),
    click.option("--schema", help="The columns as Spark DDL, for --decode json or debezium: 'id BIGINT, user STRING'."),
    # The choices are those of JsonMode, which is not imported until a command needs it.
    click.option(
        "--json-mode",
        type=click.Choice(["lenient", "strict"]),
        help="lenient, the default, also accepts similar values, like a number for a STRING; strict does not.",
    ),
    click.option(
        "--schema-registry", metavar="URL", help="A schema registry. Each payload must begin with a schema id."
    ),
    client_option("--registry-option", of="schema registry's"),
    click.option("--subject", help="The subject whose newest schema has the columns, like orders-value."),
    click.option(
        "--schema-file",
        metavar="PATH",
        help="A schema instead of --subject: .avsc, .proto, a descriptor set, or JSON Schema.",
    ),
    click.option("--message", help="The full name of a Protobuf message; by default the first one of the schema."),
    click.option(
        "--transform",
        metavar="MODULE:NAME",
        help="A function from DataFrame to DataFrame, or a stream asset, whose decoder, with its registry, is used as "
        "well. Its source, group, table and client options are not used: give them here.",
    ),
    click.option(
        "--keys",
        metavar="COLUMN,…",
        help="Make the table keyed: it has one row per key, which is updated and deleted as changes arrive.",
    ),
    click.option(
        "--sequence-by",
        metavar="SQL",
        help="An expression that orders the changes of a key; by default their position in the shard.",
    ),
    click.option("--apply-as-truncates", metavar="SQL", help="A condition for changes that remove all older rows."),
    click.option("--apply-as-deletes", metavar="SQL", help="A condition for changes that delete their key."),
    click.option("--except-columns", metavar="COLUMN,…", help="Columns that a keyed table does not get."),
    click.option(
        "--stored-as-scd-type",
        type=click.Choice(["1", "2"]),
        help="1, the default, keeps the newest row of each key; 2 keeps a row per change, with the time it is valid.",
    ),
    click.option(
        "--schema-changes",
        type=click.Choice([change.value for change in SchemaChanges]),
        help="What to do with columns that the table does not have. By default, the command fails.",
    ),
    click.option(
        "--on-bad-rows",
        type=click.Choice([choice.value for choice in OnBadRows]),
        help="If a row breaks a constraint of the table, or the transform fails for it: stop, or make its message a "
        "dead letter. The default is that of the stream asset, or fail.",
    ),
)
limit_options = combine_options(
    "limits",
    Limits().override,
    click.option("--max-records", type=click.IntRange(min=1), help="The most messages in a micro-batch."),
    click.option("--max-bytes", type=click.IntRange(min=1), help="The most payload bytes in a micro-batch."),
)
batches_option = click.option("--max-batches", type=click.IntRange(min=1), help="Stop after this many micro-batches.")


def _parse_pairs(context: click.Context, option: Any, texts: Sequence[str]) -> dict[str, str]:
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise InvalidOptionError(
            f"{option.opts[0]} {wrong[0]!r} has no value", remedy=f"Write {option.make_metavar()}."
        )
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _make_layout(**layout: Any) -> TableLayout:
    from spark_jobs.writing.layout import TableLayout

    return TableLayout(**layout)


layout_options = combine_options(
    "layout",
    _make_layout,
    click.option(
        "--partition-by", multiple=True, metavar="COLUMN", help="Partition a new table by this column; repeatable."
    ),
    click.option(
        "--cluster-by", multiple=True, metavar="COLUMN", help="Cluster a new table by this column; repeatable."
    ),
    click.option(
        "--table-property",
        "properties",
        multiple=True,
        callback=_parse_pairs,
        metavar="NAME=VALUE",
        help="Set a property of a new table, like delta.enableChangeDataFeed=true; repeatable.",
    ),
    click.option("--catalog-table", metavar="NAME", help="Register the table in Spark's catalog under this name."),
    click.option(
        "--generated-column",
        "generated_columns",
        multiple=True,
        callback=_parse_pairs,
        metavar="NAME=EXPRESSION",
        help="Add a column to a new table that Delta computes, like day=CAST(_timestamp AS DATE); repeatable.",
    ),
    click.option("--table-comment", "comment", metavar="TEXT", help="The comment of a new table."),
)
