"""What the commands share: options, what they make, and how errors are told."""

from __future__ import annotations

import functools
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import click

from stream_assets.cli.output import PrintableFormatter, tell, tell_waiting
from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig, Deferred, Scalar, parse_client_option, resolve
from stream_consumers.create import StreamSource
from stream_consumers.errors import StreamAssetsError
from stream_consumers.kafka.tokens import OPTION as TOKEN_PROVIDER
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.batches.ingestion import Ingestion
    from stream_consumers.batches import BatchSource, Range
    from stream_consumers.redis.claims import RedisClaims

Command = Callable[..., Any]
Option = Callable[[Command], Command]
MODES = [mode.value for mode in ConsumerMode]


_SETTING = re.compile(r"\b([a-z]+(?:_[a-z]+)+)=('[^']*'|\w+)")


def as_options(text: str, group: click.Group) -> str:
    """Write the settings in a text, like ``on_data_loss='record'``, as the options of the commands of a group.

    A setting that no command has as an option stays as it is.

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
            with _orderly_end():
                return super().invoke(ctx)
        except StreamAssetsError as error:
            text = str(error).removesuffix(error.remedy) + as_options(error.remedy, self)
            tell(f"error: {text}", style="red")
            sys.exit(1)
        except KeyboardInterrupt:
            # As shells have it.
            sys.exit(128 + signal.SIGINT)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(0)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM closes what is open, as Ctrl-C does, before it ends the process."""
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def gathered(name: str, make: Callable[..., Any], *options: Option) -> Option:
    """Options that reach a command as one argument.

    Args:
        name: of that argument.
        make: makes it; its parameters are called like the options.
        options: in the order in which ``--help`` shows them.
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


def import_from_here() -> None:
    """Let modules of the working folder be imported: a command that is installed does not look there."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _client_options(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> dict[str, Scalar | Deferred]:
    given = dict(parse_client_option(value) for value in values)
    if TOKEN_PROVIDER in given:
        import_from_here()
    return given


def client_option(*names: str, of: str = "broker's") -> Option:
    """An option that configures the client of a broker."""
    return click.option(
        *(names or ("-X", "--client", "client")),
        multiple=True,
        metavar="NAME=VALUE",
        callback=_client_options,
        help=f"Configure the {of} client; NAME=env:VARIABLE keeps a secret in the environment.",
    )


def _storage_options(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    return {name: str(value) for name, value in resolve(dict(parse_client_option(value) for value in values)).items()}


storage_option = click.option(
    "--storage-option",
    "storage",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_storage_options,
    help="For the object store of the table, such as AWS_ENDPOINT_URL=…; NAME=env:VARIABLE keeps a secret in the "
    "environment, and what is not given is taken from there anyway.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
group_option = click.option("--group", default="stream-assets", show_default=True, help="The consumer group.")
# The default is that of Ingestion, which is not imported until a command needs it.
retry_option = click.option(
    "--retry-seconds",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="How long to try again, with growing pauses, what may be gone soon, like a broker that does not answer.",
)
data_loss_option = click.option(
    "--on-data-loss",
    type=click.Choice(["error", "record"]),
    default="error",
    show_default=True,
    help="Stop at messages that the stream dropped before they were read, or record the exact range and go on.",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A stream, the group that reads it, and the table that it is written into.

    Args:
        source: the stream URL.
        table: the Delta table, a path or URI.
        group: the consumer group.
        client: configuration of the broker's client; shown nowhere.
        storage: options for the storage of the table; shown nowhere.
    """

    source: str
    table: str
    group: str
    client: ClientConfig = field(repr=False)
    storage: Mapping[str, str] = field(repr=False)

    @property
    def url(self) -> StreamUrl:
        """The stream URL, read."""
        return StreamUrl.parse(self.source)

    def span(self, part: Range | None) -> str | None:
        """A range as this command shows it."""
        return None if part is None else f"{self.shown(part.start)} to {self.shown(part.end)}"

    def shown(self, sequence: int | None) -> int | None:
        """A sequence as it is printed for this stream: that of a Redis entry as its id."""
        return None if sequence is None else find_backend(self.url.protocol).shown_sequence(sequence)

    def stream(self, mode: ConsumerMode = ConsumerMode.RESUMABLE) -> StreamSource:
        """The stream as the group reads it in a mode."""
        return StreamSource(self.url, mode, self.client)

    def claims(self) -> RedisClaims:
        """The group, where members claim entries; close it when done."""
        # Without a table the server is asked only: it knows streams by their keys.
        names = self.ingestion().epochs(self.url.required_streams()) if self.table else None
        return self.stream(ConsumerMode.LOAD_BALANCED).claims(self.group, names)

    @contextmanager
    def opened(self, mode: ConsumerMode) -> Iterator[tuple[BatchSource, RedisClaims | None]]:
        """The stream, and the claims of the group where its members may claim entries."""
        stream = self.stream(mode)
        with stream.open() as opened, self.claims() if stream.may_be_claimed else nullcontext() as claims:
            yield opened, claims

    def ingestion(self, **settings: Any) -> Ingestion:
        """Group and table, and what else is known of the ingestion."""
        from spark_jobs.batches.ingestion import Ingestion

        known = {"group": self.group, "table": self.table, "storage_options": self.storage}
        return Ingestion(**{**known, **settings})


def place_options(group: Option = group_option) -> Option:
    """The options that make a :class:`Place`."""
    return gathered(
        "place",
        Place,
        click.option("--source", required=True, help="The stream URL."),
        click.option("--table", required=True, help="The Delta table, a path or URI."),
        group,
        client_option(),
        storage_option,
    )


def tell_of_download(table: str = "") -> None:
    """Say so where jars are downloaded first: nobody sees that a command does it."""
    from spark_jobs.jars import download_note
    from spark_jobs.table_location import is_s3

    if note := download_note(with_s3=is_s3(table)):
        tell_waiting(note)


@dataclass(frozen=True, slots=True)
class SparkChoice:
    """Which Spark a command uses, and whether nobody else writes the table meanwhile; none is started yet."""

    master: str
    remote: str | None = field(repr=False)
    in_process: bool = False
    single_writer: bool = False

    def session(self, table: str, storage: Mapping[str, str]) -> SparkSession:
        """The session; it takes some seconds. What a server lends is given back at the end of the command.

        Args:
            table: that it reads or writes.
            storage: options for its storage.
        """
        from spark_jobs.session import SparkOptions, create_session
        from spark_jobs.spark_server.client import ServerSession

        if self.remote is None:
            tell_of_download(table)
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


spark_options = gathered(
    "spark",
    SparkChoice,
    click.option("--master", default="local[*]", show_default=True, help="The Spark master."),
    click.option(
        "--remote",
        callback=_remote,
        help="A Spark Connect address, sc://host:port, instead of --master; env:VARIABLE keeps one with a token in the "
        "environment.",
    ),
    click.option(
        "--in-process",
        is_flag=True,
        help="Start a local Spark for this command only, not the one that outlives it (stream-assets spark).",
    ),
    click.option(
        "--single-writer",
        is_flag=True,
        help="No other driver writes the table meanwhile; needed where its storage could lose commits (Amazon S3).",
    ),
)
